r"""The moments of a prompt (MK-25) for MomentKV (arXiv
2606.01563), in the pass over K and V that compacts them.

It equals, in torch, for one KV head whose tokens are kept where `kept` [T] is True:

    cache = keys[kept], values[kept] evicted_keys,
    evicted_values = keys[~kept].float(), values[~kept].float()
    n, s_k, s_v, S = len(evicted_keys), evicted_keys.sum(0),
    evicted_values.sum(0), evicted_values.T @ evicted_keys

S = V_E^T K_E is one product with the tokens in the middle, and the rows that go into it are those that
compaction does not copy. `sum_evicted` therefore reads each tile once, the kept rows into the compressed
cache and the evicted ones into the product. torch adds the float32 sums of the splits to the moments from
before: once for a prompt, that is not worth a kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..states import CompressedCache, Moments, zero_moments
from .cache import Copy, empty_cache
from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, launch, launcher, padded
from .strided import KV, strided
from .tiles import copy_tile, dot_dtype, head_of, load_tile

PROGRAMS_WANTED = 256
LEAST_TOKENS_OF_A_SPLIT = 256


@launcher
def update(moments: Moments, keys: torch.Tensor, values: torch.Tensor, evicted: torch.Tensor) -> Moments:
    r"""MK-25: the moments with those of the evicted tokens
    added, as `optimized.momentkv.update`; the sums are float32.
    """
    return _sum_evicted(keys, values, ~evicted, moments)


@launcher
def compress_prompt(
    keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, moments: Moments, total: int | None = None
) -> tuple[CompressedCache, Moments]:
    r"""CACHE-1 and MK-25 in one pass over K and V, as
    `optimized.momentkv.compress_prompt`; `moments` are those before.

    total: the number of kept tokens; if it is None, the host reads it from the GPU and waits.
    """
    rows = kept.reshape(-1).cumsum(0)
    cache = empty_cache(keys, values, int(rows[-1]) if total is None else total, kept.sum(dim=-1))
    return cache, _sum_evicted(keys, values, kept, moments, Copy(*cache[:3], rows))


def _sum_evicted(
    keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, before: Moments, copy: Copy | None = None
) -> Moments:
    """Add the tokens that are not kept to the moments, and with `copy` copy the others."""
    (length, head_dim), value_dim = keys.shape[-2:], values.shape[-1]
    keys, values = (
        states.reshape(-1, 1, *states.shape[-2:]) if states.ndim != 4 else states for states in (keys, values)
    )
    num_heads = keys.shape[1]
    heads = keys.shape[0] * num_heads
    tile = _sum_tile(keys, values)
    block_t = tile["BLOCK_T"]
    splits = max(1, min(cdiv(PROGRAMS_WANTED, heads), cdiv(length, LEAST_TOKENS_OF_A_SPLIT)))
    split = cdiv(cdiv(length, splits), block_t) * block_t
    splits = cdiv(length, split)
    chunks = cdiv(value_dim, tile["BLOCK_DV"])
    sums = [
        floats(keys, heads, splits, *shape) for shape in ((head_dim,), (value_dim,), (value_dim, head_dim))
    ]
    launch(sum_evicted, (heads * splits * chunks,))(
        KV(strided(keys), strided(values)), kept.contiguous(), copy, Moments(None, *sums),
        num_heads, length, split, splits, head_dim, value_dim, **tile,
    )  # fmt: skip
    evicted = length - kept.sum(dim=-1)
    return Moments(
        before.count + evicted,
        *(old + own.sum(dim=1).view(old.shape) for old, own in zip(before[1:], sums, strict=True)),
    )


def contiguous(moments: Moments) -> Moments:
    """Return the moments in the form that the kernels read."""
    return Moments(*(field.contiguous() for field in moments))


def _sum_tile(keys: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
    """Return the constants of `sum_evicted`: the sum of products, [BLOCK_DV, BLOCK_D], stays in registers."""
    block_d, block_dv = padded(keys.shape[-1]), padded(values.shape[-1])
    if keys.dtype == torch.float32:
        tile = {
            "BLOCK_T": 32 if block_d <= 64 else 16,
            "BLOCK_DV": min(block_dv, 32),
            "num_warps": 8,
            "num_stages": 1,
        }
    else:
        block_t = 64 if max(block_d, block_dv) <= 64 else 32
        tile = {
            "BLOCK_T": block_t,
            "BLOCK_DV": min(block_dv, 16384 // block_d, 128),
            "num_warps": 8,
            "num_stages": 2,
        }
    return tile | {"BLOCK_D": block_d, "DOT_DTYPE": dot_dtype(keys)}


@triton.jit(do_not_specialize=["num_heads", "length", "split", "splits"])
def sum_evicted(
    cache, kept_ptr, copy, sums, num_heads, length, split, splits, head_dim, value_dim,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """The moments of the evicted tokens of one split of one head; with `copy`, its kept rows. Grid: heads *
    splits * chunks.
    """
    chunks = (value_dim + BLOCK_DV - 1) // BLOCK_DV
    program, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    head, part = program // splits, (program % splits).to(tl.int32)
    channels = tl.arange(0, BLOCK_D)
    value_channels = chunk * BLOCK_DV + tl.arange(0, BLOCK_DV)
    own_keys, own_values = head_of(cache.k, head, num_heads), head_of(cache.v, head, num_heads)
    # A product with a row of ones is the sum over the tokens; tensor cores need 16 rows, so zeros follow.
    ones = tl.where(tl.arange(0, 16)[:, None] == 0, 1.0, tl.zeros([16, BLOCK_T], dtype=tl.float32)).to(
        DOT_DTYPE
    )
    products = tl.zeros([BLOCK_DV, BLOCK_D], dtype=tl.float32)
    key_sums = tl.zeros([16, BLOCK_D], dtype=tl.float32)
    value_sums = tl.zeros([16, BLOCK_DV], dtype=tl.float32)
    end = tl.minimum((part + 1) * split, length)
    for first in range(part * split, end, BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        inside = tokens < end
        kept = inside & (tl.load(kept_ptr + head * length + tokens, mask=inside, other=0) != 0)
        evicted = inside & (kept == 0)
        if copy is not None:
            rows = tl.load(copy.rows + head * length + tokens, mask=kept, other=1) - 1
            # the first chunk of value channels copies the keys
            copied = kept & (tokens < tl.where(chunk == 0, end, 0))
            tl.store(copy.positions + rows, tokens, mask=copied)
            copy_tile(own_keys, copy.kept_keys, tokens, rows, channels, copied, head_dim)
            copy_tile(own_values, copy.kept_values, tokens, rows, value_channels, kept, value_dim)
        # key [BLOCK_T, BLOCK_D], value [BLOCK_T, BLOCK_DV]: rows that are kept are not read here.
        key = load_tile(own_keys, tokens, channels, evicted, head_dim).to(DOT_DTYPE)
        value = load_tile(own_values, tokens, value_channels, evicted, value_dim).to(DOT_DTYPE)
        products += tl.dot(tl.trans(value), key, input_precision="ieee")
        key_sums += tl.dot(ones, key, input_precision="ieee")
        value_sums += tl.dot(ones, value, input_precision="ieee")
    written = channels < tl.where(chunk == 0, head_dim, 0)
    tl.store(sums.key_sum + program * head_dim + channels, tl.sum(key_sums, axis=0), mask=written)
    tl.store(
        sums.value_sum + program * value_dim + value_channels,
        tl.sum(value_sums, axis=0),
        mask=value_channels < value_dim,
    )
    tl.store(
        sums.value_key_sum + (program * value_dim + value_channels[:, None]) * head_dim + channels[None, :],
        products,
        mask=(value_channels < value_dim)[:, None] & (channels < head_dim)[None, :],
    )  # fmt: skip


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    cache = torch.empty((32, 8, 1024, head_dim), dtype=dtype, device="meta")
    kept = torch.empty((32, 8, 1024), dtype=torch.bool, device="meta")
    moments = zero_moments(cache, cache)
    update(moments, cache, cache, kept)
    compress_prompt(cache, cache, kept, moments, 32 * 8 * 128)


CONFIGURATIONS = configurations(
    _launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS), tensor_cores=["sum_evicted"]
)
