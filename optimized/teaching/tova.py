r"""TOVA to read: the attention of the last query, averaged over all query heads of a layer (TO-1).

One launch. A program for each query head walks over the keys twice: the first walk finds the largest logit
and the sum of the exponentials, the second one writes the weights.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only

BLOCK = 64  # tokens of a tile


@forward_only
def score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""TO-1: the last of queries [B, H_q, M, D] and keys
    [B, H_kv, T, D] give scores [B, H_kv, T], higher = keep.
    """
    mean = last_attention(queries[:, :, -1], keys).mean(dim=1, keepdim=True)
    return mean.repeat(1, keys.shape[1], 1)


@forward_only
def last_attention(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""`softmax(q K^T / sqrt(D))` of one query of each head: query [B, H_q, D] and keys [B, H_kv, T, D]
    give [B, H_q, T].
    """
    batch, num_query_heads, head_dim = query.shape
    weights = keys.new_empty(batch, num_query_heads, keys.shape[2])
    scaled, group = query * head_dim**-0.5, num_query_heads // keys.shape[1]
    attend[(batch * num_query_heads,)](
        scaled.contiguous(), keys.contiguous(), weights, group, keys.shape[2], head_dim, BLOCK
    )
    return weights


@triton.jit
def tile_logits(query, keys_ptr, first, seen, D: tl.constexpr, BLOCK: tl.constexpr):
    """The logits q . k_t of a tile of tokens of a head,
    [BLOCK]; -inf for those that the query does not see.
    """
    positions = first + tl.arange(0, BLOCK)
    addresses = keys_ptr + positions[:, None] * D + tl.arange(0, D)[None, :]
    keys = tl.load(addresses, mask=(positions < seen)[:, None], other=0.0)
    return tl.where(positions < seen, tl.sum(keys * query[None, :], axis=1), float("-inf"))


@triton.jit
def sum_powers(query, keys_ptr, seen, D: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit s of a query, and the sum of exp(s_t - s) over the tokens that it sees."""
    highest = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    for first in range(0, seen, BLOCK):
        logits = tile_logits(query, keys_ptr, first, seen, D, BLOCK)
        higher = tl.maximum(highest, tl.max(logits, axis=0))
        # What has been summed so far counts from the old largest logit; it is brought to the new one.
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(logits - higher), axis=0)
        highest = higher
    return highest, total


@triton.jit
def attend(queries_ptr, keys_ptr, weights_ptr, group, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """weights[query head, t] = exp(s_t) / sum_u exp(s_u), s_t = q . k_t. Grid: query heads."""
    query_head = tl.program_id(0).to(tl.int64)
    keys_ptr += query_head // group * length * D  # the query heads of a group read the same KV head
    query = tl.load(queries_ptr + query_head * D + tl.arange(0, D))
    highest, total = sum_powers(query, keys_ptr, length, D, BLOCK)
    for first in range(0, length, BLOCK):
        logits = tile_logits(query, keys_ptr, first, length, D, BLOCK)
        positions = first + tl.arange(0, BLOCK)
        tl.store(
            weights_ptr + query_head * length + positions,
            tl.exp(logits - highest) / total,
            mask=positions < length,
        )
