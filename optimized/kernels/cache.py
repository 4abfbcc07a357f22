r"""Compaction: the kept rows of K and V, in the order of storage, copied in one launch (CACHE-1, CACHE-2).

It equals, in torch:

    keys[kept], values[kept], kept.nonzero()[:, 2]

Reads and writes. One running count of the mask (torch's cumulative sum, 9 bytes for each token) gives every kept token its row
and, read back once, the size of the result: a cache that holds nothing but the kept tokens cannot be allocated without knowing
their number. Then one program takes a tile of tokens of one head and copies its kept rows, K and V: rows that are not kept are
not read. Kept half of 131,072 tokens of 8 heads of 128 bfloat16 channels: 268 MB read and 268 MB written, and 9.4 MB for the
count; at 4.3 TB/s the floor is 127 microseconds.

The tiling. A tile holds 4,096 elements for 4 warps: with head_dim 128, sixteen threads copy a row, 16 bytes each. Rows leave in
the order of their positions and next to one another, so the writes are contiguous although the reads skip. States are copied
bit by bit in their own dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..cache import CompressedCache
from ..checks import require_kept, require_same_kind, require_shape, require_states
from .compiling import Configuration
from .launching import padded, require_launchable

__all__ = ["CONFIGURATIONS", "CompressedCache", "compress", "copy_kept"]

ELEMENTS_OF_A_TILE = 4096


def compress(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> CompressedCache:
    r"""CACHE-1, CACHE-2: gather the kept tokens, K and V together, in position order, as `optimized.cache.compress`.

    Args: keys [B, H_kv, T, D]; values [B, H_kv, T, D_v], float32, float16 or bfloat16, any strides; kept [B, H_kv, T], boolean.
    Returns the cache in the dtype of its inputs. Raises ValueError naming the argument for a wrong shape, dtype or device.
    Waits for the GPU once, to learn how many tokens are kept.
    """
    require_states("keys", keys, "B H_kv T D")
    require_states("values", values, "B H_kv T D_v")
    require_launchable("keys", keys)
    require_launchable("values", values)
    require_shape("values", values, (*keys.shape[:3], values.shape[-1]), "the batch, heads and tokens of keys")
    require_same_kind("values", values, "keys", keys)
    require_kept("kept", kept, "keys", keys, tuple(keys.shape[:3]))
    rows = kept.reshape(-1).cumsum(0)
    return copy_kept(keys, values, kept.contiguous(), rows, int(rows[-1]))


def copy_kept(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, rows: torch.Tensor, total: int) -> CompressedCache:
    """Copy the `total` kept tokens, each to the row that `rows` [B * H_kv * T], counted from 1, gives it."""
    batch, num_heads, length, head_dim = keys.shape
    value_dim = values.shape[-1]
    out_keys = torch.empty((total, head_dim), dtype=keys.dtype, device=keys.device)
    out_values = torch.empty((total, value_dim), dtype=values.dtype, device=keys.device)
    positions = torch.empty(total, dtype=torch.int64, device=keys.device)
    block_d, block_dv = padded(head_dim), padded(value_dim)
    block_t = min(128, ELEMENTS_OF_A_TILE // max(block_d, block_dv))
    tiles = triton.cdiv(length, block_t)
    copy_rows[(batch * num_heads * tiles,)](
        keys, values, kept, rows, out_keys, out_values, positions, *keys.stride(), *values.stride(),
        num_heads, length, tiles, head_dim, value_dim, BLOCK_T=block_t, BLOCK_D=block_d, BLOCK_DV=block_dv, num_warps=4,
    )  # fmt: skip
    return CompressedCache(out_keys, out_values, positions, kept.sum(dim=-1))


@triton.jit
def copy_tile(
    source, target, tokens, rows, copied, stride_t, stride_d, head_dim, BLOCK_D: tl.constexpr
):  # fmt: skip
    """target[rows] = source[tokens] where `copied`; tokens, rows and copied are [BLOCK_T], rows int64."""
    channels = tl.arange(0, BLOCK_D)
    inside = copied[:, None] & (channels < head_dim)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * stride_t + channels.to(tl.int64)[None, :] * stride_d
    states = tl.load(source + offsets, mask=inside, other=0.0)
    tl.store(target + rows[:, None] * head_dim + channels[None, :], states, mask=inside)


@triton.jit(do_not_specialize=["length", "tiles"])
def copy_rows(
    keys_ptr, values_ptr, kept_ptr, rows_ptr, out_keys_ptr, out_values_ptr, positions_ptr,
    key_stride_b, key_stride_h, key_stride_t, key_stride_d, value_stride_b, value_stride_h, value_stride_t, value_stride_d,
    num_heads, length, tiles, head_dim, value_dim,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Copy the kept rows of one tile of tokens of one head. Grid: heads * tiles, the tiles of a head together."""
    program = tl.program_id(0).to(tl.int64)
    head, tile = program // tiles, program % tiles
    item, kv_head = head // num_heads, head % num_heads
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < length
    kept = tl.load(kept_ptr + head * length + tokens, mask=inside, other=0) != 0
    rows = tl.load(rows_ptr + head * length + tokens, mask=inside, other=1) - 1
    tl.store(positions_ptr + rows, tokens, mask=kept)
    keys = keys_ptr + item * key_stride_b + kv_head * key_stride_h
    values = values_ptr + item * value_stride_b + kv_head * value_stride_h
    copy_tile(keys, out_keys_ptr, tokens, rows, kept, key_stride_t, key_stride_d, head_dim, BLOCK_D)
    copy_tile(values, out_values_ptr, tokens, rows, kept, value_stride_t, value_stride_d, value_dim, BLOCK_DV)


def _compiled(dtype: torch.dtype, head_dim: int) -> Configuration:
    def launch() -> CompressedCache:
        keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
        kept = torch.empty(keys.shape[:3], dtype=torch.bool, device="meta")
        return copy_kept(keys, keys, kept, kept.reshape(-1).cumsum(0), 2 * 8 * 2048)

    return Configuration(f"{dtype} head_dim {head_dim}".removeprefix("torch."), launch)


CONFIGURATIONS = [
    _compiled(dtype, head_dim) for dtype in (torch.bfloat16, torch.float16, torch.float32) for head_dim in (128, 64, 80, 96, 256)
]
