r"""Compaction: the kept rows of K and V, in the order of storage, copied in one launch (CACHE-1, CACHE-2).

It equals, in torch:

    keys[kept], values[kept], kept.nonzero()[:, 2]

A running count of the mask, torch's cumulative sum, gives every kept token its row. The host reads the last
number, because it allocates the compressed cache and needs the number of kept tokens for that. Then one
program takes a tile of tokens of one head and copies its kept rows, K and V; rows that are not kept are not
read. Rows leave in the order of their positions and next to one another, so the writes are contiguous
although the reads skip.

The tile holds 4,096 elements for 4 warps: with 128 channels
of 16 bits, sixteen threads copy a row, 16 bytes each.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..states import CompressedCache
from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, launch, launcher, padded
from .strided import strided
from .tiles import copy_tile, head_of

ELEMENTS_OF_A_TILE = 4096


@launcher
def compress(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> CompressedCache:
    r"""CACHE-1, CACHE-2: gather the kept tokens, K and V
    together, in position order, as `optimized.cache.compress`.
    """
    rows = kept.reshape(-1).cumsum(0)
    return copy_kept(keys, values, kept.contiguous(), rows, int(rows[-1]))


def copy_kept(
    keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, rows: torch.Tensor, total: int
) -> CompressedCache:
    """Copy the `total` kept tokens to the rows in `rows` [B * H_kv * T], counted from 1."""
    batch, num_heads, length, head_dim = keys.shape
    cache = empty_cache(keys, values, total, kept.sum(dim=-1))
    block_d, block_dv = padded(head_dim), padded(values.shape[-1])
    block_t = min(128, ELEMENTS_OF_A_TILE // max(block_d, block_dv))
    tiles = cdiv(length, block_t)
    launch(copy_rows, (batch * num_heads * tiles,))(
        strided(keys), strided(values), kept, Copy(*cache[:3], rows), num_heads, length, tiles, head_dim,
        values.shape[-1],
        BLOCK_T=block_t, BLOCK_D=block_d, BLOCK_DV=block_dv, num_warps=4,
    )  # fmt: skip
    return cache


def empty_cache(
    keys: torch.Tensor, values: torch.Tensor, total: int, lengths: torch.Tensor
) -> CompressedCache:
    """Return room for `total` tokens of `keys` and `values`."""
    return CompressedCache(
        keys.new_empty(total, keys.shape[-1]),
        values.new_empty(total, values.shape[-1]),
        keys.new_empty(total, dtype=torch.int64),
        lengths,
    )


class Copy(NamedTuple):
    """The compressed cache that a kernel fills, and the row in it of each kept token, counted from 1."""

    kept_keys: torch.Tensor
    kept_values: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor | None = None  # for a kernel that cannot know it


@triton.jit(do_not_specialize=["length", "tiles"])
def copy_rows(
    keys, values, kept_ptr, copy, num_heads, length, tiles, head_dim, value_dim,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Copy the kept rows of one tile of tokens of one head.
    Grid: heads * tiles, the tiles of a head together.
    """
    program = tl.program_id(0).to(tl.int64)
    head, tile = program // tiles, program % tiles
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < length
    kept = tl.load(kept_ptr + head * length + tokens, mask=inside, other=0) != 0
    rows = tl.load(copy.rows + head * length + tokens, mask=inside, other=1) - 1
    tl.store(copy.positions + rows, tokens, mask=kept)
    copy_tile(
        head_of(keys, head, num_heads), copy.kept_keys, tokens, rows, tl.arange(0, BLOCK_D), kept, head_dim
    )
    copy_tile(
        head_of(values, head, num_heads),
        copy.kept_values,
        tokens,
        rows,
        tl.arange(0, BLOCK_DV),
        kept,
        value_dim,
    )


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    kept = torch.empty(keys.shape[:3], dtype=torch.bool, device="meta")
    copy_kept(keys, keys, kept, kept.reshape(-1).cumsum(0), 2 * 8 * 2048)


CONFIGURATIONS = configurations(_launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS))
