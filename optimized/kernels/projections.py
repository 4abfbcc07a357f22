r"""Keys along a direction: `row_t = q . k_t + sum_f s_f |k_t,f|`, f the pairs of channels that RoPE turns
together (QF-3, TA-3).

It equals, in torch, `q @ keys.mT + s @ pair_lengths(keys).mT`; Q-Filters has no slack s. One program takes a
tile of tokens of one KV head. It loads the keys once, as two halves of the channels, and walks over the query
heads of the group. A row is multiplied by the power of two that brings its largest component to [1, 2), so
that no square leaves the range of float32.
"""

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, launch, launcher, padded
from .strided import strided
from .tiles import at_head, head_and_tokens, head_of, load_tile, power_of_two

ELEMENTS_OF_A_TILE = 4096


@launcher
def project(keys: torch.Tensor, directions: torch.Tensor, slack: torch.Tensor | None = None) -> torch.Tensor:
    r"""The rows [B, H_q, T], float32, of keys [B, H_kv, T, D],
    directions [B, H_q, D] and slack [B, H_q, D/2] in float32.
    """
    batch, num_heads, length, head_dim = keys.shape
    group, half = directions.shape[1] // num_heads, cdiv(head_dim, 2)
    rows, block = floats(keys, batch, directions.shape[1], length), padded(half, 8)
    block_t = min(128, ELEMENTS_OF_A_TILE // (2 * block))
    launch(project_keys, (batch * num_heads * cdiv(length, block_t),))(
        strided(keys), strided(directions), strided(directions if slack is None else slack), rows,
        num_heads, group, length, head_dim,
        SLACK=slack is not None, HALF=half, BLOCK_T=block_t, BLOCK_F=block, num_warps=4,
    )  # fmt: skip
    return rows


@triton.jit(do_not_specialize=["length", "group"])
def project_keys(
    keys, directions, slack, rows_ptr, num_heads, group, length, head_dim,
    SLACK: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """rows[query head, token] for the query heads of a group. Grid: KV heads * tiles of tokens."""
    head, token = head_and_tokens(length, BLOCK_T)
    inside, pair = token < length, tl.arange(0, BLOCK_F)
    states = head_of(keys, head, num_heads)
    first = load_tile(states, token, pair, inside, HALF)
    second = load_tile(states, token, HALF + pair, inside, head_dim)
    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    scale, inverse = power_of_two(largest, 0)
    first, second = first * scale[:, None], second * scale[:, None]
    lengths = tl.sqrt_rn(first * first + second * second) if SLACK else first
    for query_head in range(head * group, (head + 1) * group):
        direction = at_head(directions, query_head, num_heads * group)
        along = direction + pair.to(tl.int64) * directions.stride_d
        across = along + HALF * directions.stride_d
        terms = first * tl.load(along, mask=pair < HALF, other=0.0)[None, :]
        terms += second * tl.load(across, mask=HALF + pair < head_dim, other=0.0)[None, :]
        if SLACK:
            place = at_head(slack, query_head, num_heads * group) + pair.to(tl.int64) * slack.stride_d
            spare = tl.load(place, mask=pair < HALF, other=0.0)[None, :]
            terms += spare * lengths
        tl.store(rows_ptr + query_head * length + token, inverse * tl.sum(terms, axis=1), mask=inside)


def _launch(dtype: torch.dtype, head_dim: int, slack: int) -> None:
    keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    directions, lengths = floats(keys, 2, 32 if slack else 8, head_dim), floats(keys, 2, 32, head_dim // 2)
    project(keys, directions, lengths if slack else None)


CONFIGURATIONS = configurations(
    _launch, *({"head_dim": head_dim, "slack": slack} for slack in (1, 0) for head_dim in HEAD_DIMS)
)
