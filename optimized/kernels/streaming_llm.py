r"""StreamingLLM (arXiv 2309.17453): the sinks and the most recent tokens are copied, and nothing else is
read (SL-1, CACHE-1).

It equals, in torch, for one head:

    kept = torch.cat([torch.arange(sinks), torch.arange(length - recent, length)])
    keys[kept], values[kept]

The kept positions are known beforehand, so there are no scores and no
selection, and the host waits for nothing. One launch: one program copies
a tile of the kept rows of one head, K and V; the writes are contiguous.
"""

import torch
import triton
import triton.language as tl

from ..states import CompressedCache
from .cache import ELEMENTS_OF_A_TILE, Copy, empty_cache
from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, launch, launcher, padded
from .strided import strided
from .tiles import copy_tile, head_of


@launcher
def compress(keys: torch.Tensor, values: torch.Tensor, sinks: int, recent: int) -> CompressedCache:
    r"""SL-1, CACHE-1: the first `sinks` and the last `recent`
    tokens of every head, as `optimized.streaming_llm.compress`.
    """
    batch, num_heads, length, head_dim = keys.shape
    kept = sinks + recent
    lengths = torch.full((batch, num_heads), kept, device=keys.device)
    cache = empty_cache(keys, values, batch * num_heads * kept, lengths)
    block_d, block_dv = padded(head_dim), padded(values.shape[-1])
    block_t = min(128, ELEMENTS_OF_A_TILE // max(block_d, block_dv))
    launch(copy_ends, (batch * num_heads * cdiv(kept, block_t),))(
        strided(keys), strided(values), Copy(*cache[:3]), num_heads, length, sinks, kept, head_dim,
        values.shape[-1],
        BLOCK_T=block_t, BLOCK_D=block_d, BLOCK_DV=block_dv, num_warps=4,
    )  # fmt: skip
    return cache


@triton.jit(do_not_specialize=["length", "sinks", "kept"])
def copy_ends(
    keys, values, copy, num_heads, length, sinks, kept, head_dim, value_dim,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Copy one tile of the kept rows of one head. Grid: heads * tiles of kept rows."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(kept, BLOCK_T)
    head, row = program // tiles, program % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < kept
    token = tl.where(row < sinks, row, row + length - kept)
    target = head * kept + row
    tl.store(copy.positions + target, token, mask=inside)
    copy_tile(
        head_of(keys, head, num_heads), copy.kept_keys, token, target, tl.arange(0, BLOCK_D), inside, head_dim
    )
    copy_tile(
        head_of(values, head, num_heads),
        copy.kept_values,
        token,
        target,
        tl.arange(0, BLOCK_DV),
        inside,
        value_dim,
    )


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    compress(keys, keys, 4, 1020)


CONFIGURATIONS = configurations(_launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS))
