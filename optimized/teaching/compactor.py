r"""The attention of a chunk to read: what a token receives from its neighbours, before and after it (CO-3).

A program is one chunk of one head, and walks over the queries of the chunk. A row of logits is there at once,
so each softmax needs one pass, and nothing is masked but what lies past the chunk.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only
from .h2o import load_channels


@forward_only
def chunk_attention(queries: torch.Tensor, keys: torch.Tensor, *, chunk_size: int = 256) -> torch.Tensor:
    r"""CO-3: queries and keys [..., T, D] give the attention that each token receives, [..., T]."""
    queries, keys = (each.contiguous() for each in torch.broadcast_tensors(queries, keys))
    length, head_dim = keys.shape[-2:]
    received = keys.new_empty(keys.shape[:-1])
    sizes = (
        length,
        chunk_size,
        head_dim,
        max(16, triton.next_power_of_2(chunk_size)),
        32,
    )  # 32 queries of a tile
    attend_to_chunk[triton.cdiv(length, chunk_size), received.numel() // length](
        queries, keys, received, *sizes, num_warps=8
    )
    return received


@triton.jit
def attend_to_chunk(
    queries_ptr, keys_ptr, received_ptr, length, chunk_size, D: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """received[head, t] = the sum of softmax(q_m . k_t) over the m of the chunk of t. Grid: chunks, heads."""
    start, row = tl.program_id(0) * chunk_size, tl.program_id(1).to(tl.int64) * length
    stop = tl.minimum(start + chunk_size, length)
    tokens = start + tl.arange(0, SIZE)
    received = tl.zeros([SIZE], dtype=tl.float32)
    for first in range(start, stop, BLOCK):
        asking = first + tl.arange(0, BLOCK)
        logits = tl.zeros([BLOCK, SIZE], dtype=tl.float32)
        for channel in range(0, D, 16):
            queries = load_channels(queries_ptr + row * D, asking, stop, channel, D)
            keys = load_channels(keys_ptr + row * D, tokens, stop, channel, D)
            logits = tl.dot(queries, tl.trans(keys), logits, input_precision="ieee")
        logits = tl.where((tokens < stop)[None, :], logits, -float("inf"))
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        shares = tl.where(asking < stop, 1 / tl.sum(powers, axis=1), 0.0)
        received += tl.sum(powers * shares[:, None], axis=0)
    tl.store(received_ptr + row + tokens, received, mask=tokens < stop)
