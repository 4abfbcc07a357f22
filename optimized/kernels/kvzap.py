r"""KVzap's surrogate: ZA-2, `s_t = w . h_t + b` of every KV head.

It equals, in torch, `weights @ hidden_states.float().mT + bias[..., None]`.

The hidden states are the memory that counts: a KV head adds four bytes for each
token. So one program takes a tile of tokens, reads its states once, and multiplies
them by the weights of all heads. A score is compared with a threshold, so the product
is one of float32. The states are converted on their way, and no copy of them is made.
"""

import torch
import triton
import triton.language as tl

from .compiling import configurations
from .launching import cdiv, floats, launch, launcher, padded
from .strided import Rows, strided
from .tiles import head_and_tokens, load_tile

BLOCK_T, BLOCK_C = 128, 32  # tokens of a program, and channels of a step


@launcher
def score(hidden_states: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    r"""ZA-2: scores [B, H_kv, T] of hidden_states [B, T, hidden], with weights [B, H_kv, hidden] and bias
    [B, H_kv] in float32.
    """
    (batch, length, hidden), heads = hidden_states.shape, weights.shape[1]
    scores = floats(hidden_states, batch, heads, length)
    launch(project_states, (batch * cdiv(length, BLOCK_T),))(
        strided(hidden_states), strided(weights), strided(bias), scores, length, hidden, heads,
        BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, BLOCK_H=padded(heads, 8), num_warps=8, num_stages=3,
    )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["length"])
def project_states(
    states, surrogate, bias, scores_ptr, length, hidden, heads,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """scores[sequence, head, token] for all heads. Grid: sequences * tiles of tokens."""
    sequence, token = head_and_tokens(length, BLOCK_T)
    head = tl.arange(0, BLOCK_H)
    own = Rows(states.ptr + sequence * states.stride_b, states.stride_h, states.stride_d)
    weights = Rows(surrogate.ptr + sequence * surrogate.stride_b, surrogate.stride_h, surrogate.stride_d)
    total = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    for start in range(0, hidden, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        tile = load_tile(own, token, channel, token < length, hidden)
        factor = load_tile(weights, head, channel, head < heads, hidden)
        total = tl.dot(tile, tl.trans(factor), total, input_precision="ieee")
    offsets = sequence * bias.stride_t + head * bias.stride_d
    total += tl.load(bias.ptr + offsets, mask=head < heads, other=0.0)[None, :]
    target = scores_ptr + (sequence * heads + head)[None, :] * length + token[:, None]
    tl.store(target, total, mask=(token < length)[:, None] & (head < heads)[None, :])


def _launch(dtype: torch.dtype, heads: int) -> None:
    states = torch.empty((2, 4096, 4096), dtype=dtype, device="meta")
    score(states, floats(states, 2, heads, 4096), floats(states, 2, heads))


CONFIGURATIONS = configurations(_launch, *({"heads": heads} for heads in (8, 1, 32)))
