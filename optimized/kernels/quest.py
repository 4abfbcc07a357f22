r"""Quest's bound of a page: QU-2, `U = sum_i max(q_i m_i, q_i M_i)`.

It equals, in torch, `torch.maximum(query[..., None, :] * low, query[..., None, :] * high).sum(dim=-1)`.

One program takes a tile of pages of one KV head. It reads their lowest and highest keys once and walks over
the query heads of the group. A page is 16 tokens long, so a decoded token reads an eighth of its keys.
"""

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, launch, launcher, padded
from .strided import load_row, strided
from .tiles import at_head, head_and_tokens, head_of, load_tile

ELEMENTS_OF_A_TILE = 4096


@launcher
def bounds(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    r"""QU-2: bounds [B, H_q, P], float32, of query [B, H_q, D], low and high [B, H_kv, P, D], any strides."""
    batch, num_heads, pages, head_dim = low.shape
    found, block_p = floats(low, batch, query.shape[1], pages), ELEMENTS_OF_A_TILE // padded(head_dim)
    launch(bound_pages, (batch * num_heads * cdiv(pages, block_p),))(
        strided(query), strided(low), strided(high), found,
        num_heads, query.shape[1] // num_heads, pages, head_dim,
        BLOCK_P=block_p, BLOCK_D=padded(head_dim), num_warps=8,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["pages", "group"])
def bound_pages(
    query, low, high, bounds_ptr, num_heads, group, pages, head_dim,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """bounds[query head, page] for the query heads of a group. Grid: KV heads * tiles of pages."""
    head, page = head_and_tokens(pages, BLOCK_P)
    channel = tl.arange(0, BLOCK_D)
    lowest = load_tile(head_of(low, head, num_heads), page, channel, page < pages, head_dim)
    highest = load_tile(head_of(high, head, num_heads), page, channel, page < pages, head_dim)
    for query_head in range(head * group, (head + 1) * group):
        place = at_head(query, query_head, num_heads * group)
        row = load_row(place, channel, head_dim, query.stride_d)[None, :]
        largest = tl.maximum(row * lowest, row * highest)
        tl.store(bounds_ptr + query_head * pages + page, tl.sum(largest, axis=1), mask=page < pages)


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    low = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    bounds(torch.empty((2, 32, head_dim), dtype=dtype, device="meta"), low, low)


CONFIGURATIONS = configurations(_launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS))
