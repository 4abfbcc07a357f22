r"""LagKV (arXiv 2504.04704) in one launch: score every partition, choose its tokens and copy them (LK-7 to LK-12, CACHE-1).

It equals, in torch, for one partition `part` and its successor `next`, both [L, D], and likewise for the values:

    low, high = next.amin(dim=0), next.amax(dim=0)
    deviation = ((part - low) / (high - low)).std(dim=-1)
    score = deviation_of_keys.softmax(dim=0) + deviation_of_values.softmax(dim=0)
    kept = score.argsort(descending=True, stable=True)[:floor(r * L)].sort()

Why one launch. Every partition keeps the same number of tokens, so where its rows go is known before any score is: scoring,
choosing and copying need no answer from another program. One program takes one partition of one head; programs behind the last
partition copy what is never scored, the sinks and the tail.

Reads and writes. K and V once, and the kept rows of both. That each partition is read a second time, as the reference of the one
before it, costs no memory traffic, since neighbours run together and the second read finds it in L2; so does the third read, of
the kept rows. 131,072 tokens of 8 heads of 128 bfloat16 channels, L = 128, r = 0.25: 537 MB in and 134 MB out; at 4.3 TB/s the
floor is 156 microseconds. Prediction for one H200, not measured: the compiled loops need 7 instructions for an element of the next
partition and 16 for one of its own; at four a clock on 132 multiprocessors that is 0.3 milliseconds, more than the bytes.

The tiling. A program walks its partition in tiles of 4,096 elements for 4 warps, 32 to a thread: first over the next partition,
keeping minimum and maximum of each element of the tile and folding them over the tokens once; then over its own, a standard
deviation for each token, collected in a register array of [tiles, tokens of a tile], so that a partition of any length is
softmaxed, ranked and counted without leaving the registers; then over its own again, copying the rows that were chosen. There is
no shared scratch and no barrier to get wrong. Ranks: `selection.keep_highest`.

Numbers. The range of a channel is inverted once, 1 / (max - min), and multiplied with; a range of 0 has the inverse 0, which is
the decision that a constant channel normalises to 0. The deviation is computed in two steps, mean and then squares, in registers.
A token further off than 1e18 ranges counts as that far off: its square is still a float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evictionary.reference.lagkv import retained_length, tokens_per_partition

from ..cache import CompressedCache
from ..checks import require_same_kind, require_shape, require_states
from .cache import copy_tile
from .compiling import Configuration
from .launching import padded, require_launchable
from .selection import keep_highest, ordered

__all__ = ["CONFIGURATIONS", "LARGEST_LAG", "compress", "retained_length", "score", "select"]

ELEMENTS_OF_A_TILE = 4096
LARGEST_LAG = 4096


def score(keys: torch.Tensor, values: torch.Tensor, next_keys: torch.Tensor, next_values: torch.Tensor) -> torch.Tensor:
    r"""LK-7..11: `score_i = score(K)_i + score(V)_i` of one partition against the next, as `optimized.lagkv.score`.

    Args: keys [..., L, D], values [..., L, D_v]; next_keys [..., L', D], next_values [..., L', D_v], float32, float16 or
    bfloat16, L at most 4096. Returns [..., L] float32. Raises ValueError for a wrong shape, dtype or device.
    """
    require_states("keys", keys, "... L D")
    require_states("values", values, "... L D_v")
    require_states("next_keys", next_keys, "... L D")
    require_states("next_values", next_values, "... L D_v")
    require_launchable("keys", keys)
    require_launchable("values", values)
    following = next_keys.shape[-2]
    require_shape("values", values, (*keys.shape[:-1], values.shape[-1]), "the tokens of keys")
    require_shape("next_keys", next_keys, (*keys.shape[:-2], following, keys.shape[-1]), "the heads and channels of keys")
    require_shape("next_values", next_values, (*values.shape[:-2], following, values.shape[-1]), "the tokens of next_keys")
    for name, tensor in (("values", values), ("next_keys", next_keys), ("next_values", next_values)):
        require_same_kind(name, tensor, "keys", keys)
    lag, head_dim, value_dim = *keys.shape[-2:], values.shape[-1]
    _require_lag("keys", lag)
    parts = [states.reshape(-1, *states.shape[-2:]) for states in (keys, values, next_keys, next_values)]
    strides = [stride for part in parts for stride in part.stride()]
    scores = torch.empty((parts[0].shape[0], lag), dtype=torch.float32, device=keys.device)
    tile = _tile(lag, keys, values)
    score_partitions[(parts[0].shape[0],)](*parts, scores, *strides, lag, following, head_dim, value_dim, **tile)
    return scores.reshape(keys.shape[:-1])


def select(
    keys: torch.Tensor, values: torch.Tensor, *, keep_ratio: float, sink_size: int = 16, lag_size: int = 1024
) -> torch.Tensor:
    r"""LK-12: the kept mask, as `optimized.lagkv.select`.

    Args: keys [B, H_kv, T, D]; values [B, H_kv, T, D_v], float32, float16 or bfloat16, any strides; keep_ratio in [0, 1];
    sink_size >= 0; lag_size from 1 to 4096. Returns kept [B, H_kv, T], boolean. Raises ValueError naming the argument.
    """
    _require_cache(keys, values)
    length = keys.shape[2]
    retained = retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    _require_lag("lag_size", lag_size)
    kept = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    if retained == length:
        return kept
    scored = (length - sink_size) // lag_size - 1
    kept_each = tokens_per_partition(keep_ratio, lag_size)
    num_heads, head_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    select_partitions[(keys.shape[0] * num_heads * scored,)](
        keys, values, kept, *keys.stride(), *values.stride(),
        num_heads, length, scored, sink_size, lag_size, kept_each, head_dim, value_dim, **_tile(lag_size, keys, values),
    )  # fmt: skip
    return kept


def compress(
    keys: torch.Tensor, values: torch.Tensor, *, keep_ratio: float, sink_size: int = 16, lag_size: int = 1024
) -> CompressedCache:
    r"""LK-12 and CACHE-1 in one launch: `cache.compress(keys, values, select(keys, values, ...))`. Arguments of `select`."""
    _require_cache(keys, values)
    batch, num_heads, length, head_dim = keys.shape
    value_dim = values.shape[3]
    retained = retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    _require_lag("lag_size", lag_size)
    total = batch * num_heads * retained
    out_keys = torch.empty((total, head_dim), dtype=keys.dtype, device=keys.device)
    out_values = torch.empty((total, value_dim), dtype=values.dtype, device=keys.device)
    positions = torch.empty(total, dtype=torch.int64, device=keys.device)
    # A cache too short to be compressed is all tail: no partition is scored.
    scored = 0 if retained == length else (length - sink_size) // lag_size - 1
    kept_each = tokens_per_partition(keep_ratio, lag_size)
    copied = length - scored * lag_size  # the sinks and the tail
    programs = scored + triton.cdiv(copied, lag_size)
    compress_partitions[(batch * num_heads * programs,)](
        keys, values, out_keys, out_values, positions, *keys.stride(), *values.stride(),
        num_heads, length, retained, scored, programs, min(sink_size, length), lag_size, kept_each, head_dim, value_dim,
        **_tile(lag_size, keys, values),
    )  # fmt: skip
    lengths = torch.full((batch, num_heads), retained, dtype=torch.int64, device=keys.device)
    return CompressedCache(out_keys, out_values, positions, lengths)


def _require_cache(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise ValueError unless keys and values are the states of one cache that the kernels can run on."""
    require_states("keys", keys, "B H_kv T D")
    require_states("values", values, "B H_kv T D_v")
    require_launchable("keys", keys)
    require_launchable("values", values)
    require_shape("values", values, (*keys.shape[:3], values.shape[-1]), "the batch, heads and tokens of keys")
    require_same_kind("values", values, "keys", keys)


def _require_lag(name: str, lag: int) -> None:
    """Raise ValueError for a partition that would not fit the registers of a program."""
    if lag > LARGEST_LAG:
        raise ValueError(f"{name}: got a partition of {lag} tokens, wanted at most {LARGEST_LAG}")


def _tile(lag: int, keys: torch.Tensor, values: torch.Tensor) -> dict[str, int]:
    """Return the constants of the tiling: BLOCK_L holds a partition, BLOCK_T the tokens of a tile."""
    block_d, block_dv, block_l = padded(keys.shape[-1]), padded(values.shape[-1]), padded(lag)
    # float32 tiles of short rows are smaller and shared by more warps: assemblers for sm_80 and sm_90 would spill others.
    wide = keys.element_size() == 4
    block_t = min(32 if wide else 64, block_l, ELEMENTS_OF_A_TILE // max(block_d, block_dv))
    num_warps = 8 if wide and max(block_d, block_dv) <= 64 else 4
    return {"BLOCK_L": block_l, "BLOCK_T": block_t, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "num_warps": num_warps}


@triton.jit
def load_tile(base, first, end, stride_t, stride_d, head_dim, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the states of tokens first .. first+BLOCK_T-1 as float32 [BLOCK_T, BLOCK_D], 0 from `end` on."""
    tokens = first + tl.arange(0, BLOCK_T)
    channels = tl.arange(0, BLOCK_D)
    inside = (tokens < end)[:, None] & (channels < head_dim)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * stride_t + channels.to(tl.int64)[None, :] * stride_d
    return tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32), (tokens < end)[:, None]


@triton.jit
def channel_range(base, length, stride_t, stride_d, head_dim, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """LK-7, LK-8: the minimum of every channel over a partition, and 1 / (maximum - minimum), or 0: [BLOCK_D] each."""
    low = tl.full([BLOCK_T, BLOCK_D], float("inf"), dtype=tl.float32)
    high = tl.full([BLOCK_T, BLOCK_D], float("-inf"), dtype=tl.float32)
    for first in range(0, length, BLOCK_T):
        states, inside = load_tile(base, first, length, stride_t, stride_d, head_dim, BLOCK_T, BLOCK_D)
        low = tl.minimum(low, tl.where(inside, states, float("inf")))
        high = tl.maximum(high, tl.where(inside, states, float("-inf")))
    minimum = tl.min(low, axis=0)
    spread = tl.max(high, axis=0) - minimum
    # Below the smallest normal number the inverse is no float32.
    return minimum, tl.where(spread > 0, tl.div_rn(1.0, tl.maximum(spread, 1.1754944e-38)), 0.0)


@triton.jit
def deviations(
    base, length, minimum, inverse, stride_t, stride_d, head_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """LK-9, LK-10: the standard deviation over channels of every normalised token of a partition: [BLOCK_L]."""
    rows = tl.arange(0, BLOCK_L // BLOCK_T)[:, None]
    channel = (tl.arange(0, BLOCK_D) < head_dim)[None, :]
    collected = tl.zeros([BLOCK_L // BLOCK_T, BLOCK_T], dtype=tl.float32)
    for tile in range(0, BLOCK_L // BLOCK_T):
        states, _ = load_tile(base, tile * BLOCK_T, length, stride_t, stride_d, head_dim, BLOCK_T, BLOCK_D)
        steps = (states - minimum[None, :]) * inverse[None, :]
        steps = tl.where(channel, tl.minimum(tl.maximum(steps, -1e18), 1e18), 0.0)
        centred = tl.where(channel, steps - tl.sum(steps, axis=1)[:, None] / head_dim, 0.0)
        # One channel does not vary; the divisor of the sample deviation is then 1 rather than 0.
        variance = tl.sum(centred * centred, axis=1) / tl.maximum(head_dim - 1, 1)
        collected = tl.where(rows == tile, tl.sqrt_rn(variance)[None, :], collected)
    return tl.reshape(collected, [BLOCK_L])


@triton.jit
def softmax(values, inside):
    """exp(x_i) / sum exp(x_j) over the elements `inside`, 0 elsewhere."""
    weights = tl.exp(tl.where(inside, values - tl.max(tl.where(inside, values, float("-inf")), axis=0), float("-inf")))
    return tl.div_rn(weights, tl.sum(weights, axis=0))


@triton.jit
def variation_score(
    base, length, next_base, next_length, stride_t, stride_d, next_stride_t, next_stride_d, head_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """LK-7..10 of keys or of values: [BLOCK_L], 0 from `length` on."""
    minimum, inverse = channel_range(next_base, next_length, next_stride_t, next_stride_d, head_dim, BLOCK_T, BLOCK_D)
    spread = deviations(base, length, minimum, inverse, stride_t, stride_d, head_dim, BLOCK_L, BLOCK_T, BLOCK_D)
    return softmax(spread, tl.arange(0, BLOCK_L) < length)


@triton.jit
def choose(
    keys, values, lag, kept_each, key_stride_t, key_stride_d, value_stride_t, value_stride_d, head_dim, value_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """LK-11, LK-12: which tokens are kept of the partition at `keys` and `values`, the next of which follows: [BLOCK_L]."""
    total = variation_score(
        keys, lag, keys + lag * key_stride_t, lag,
        key_stride_t, key_stride_d, key_stride_t, key_stride_d, head_dim, BLOCK_L, BLOCK_T, BLOCK_D,
    ) + variation_score(
        values, lag, values + lag * value_stride_t, lag,
        value_stride_t, value_stride_d, value_stride_t, value_stride_d, value_dim, BLOCK_L, BLOCK_T, BLOCK_DV,
    )  # fmt: skip
    ranks = tl.where(tl.arange(0, BLOCK_L) < lag, ordered(total), 0)
    return keep_highest(ranks, kept_each)


@triton.jit
def score_partitions(
    keys_ptr, values_ptr, next_keys_ptr, next_values_ptr, scores_ptr,
    key_stride_p, key_stride_t, key_stride_d, value_stride_p, value_stride_t, value_stride_d,
    next_key_stride_p, next_key_stride_t, next_key_stride_d, next_value_stride_p, next_value_stride_t, next_value_stride_d,
    lag, following, head_dim, value_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """scores[p] = LK-11 of one partition. Grid: partitions."""
    part = tl.program_id(0).to(tl.int64)
    total = variation_score(
        keys_ptr + part * key_stride_p, lag, next_keys_ptr + part * next_key_stride_p, following,
        key_stride_t, key_stride_d, next_key_stride_t, next_key_stride_d, head_dim, BLOCK_L, BLOCK_T, BLOCK_D,
    ) + variation_score(
        values_ptr + part * value_stride_p, lag, next_values_ptr + part * next_value_stride_p, following,
        value_stride_t, value_stride_d, next_value_stride_t, next_value_stride_d, value_dim, BLOCK_L, BLOCK_T, BLOCK_DV,
    )  # fmt: skip
    tokens = tl.arange(0, BLOCK_L)
    tl.store(scores_ptr + part * lag + tokens, total, mask=tokens < lag)


@triton.jit(do_not_specialize=["length", "scored", "sink_size", "kept_each"])
def select_partitions(
    keys_ptr, values_ptr, kept_ptr,
    key_stride_b, key_stride_h, key_stride_t, key_stride_d, value_stride_b, value_stride_h, value_stride_t, value_stride_d,
    num_heads, length, scored, sink_size, lag, kept_each, head_dim, value_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write the kept mask of one partition of one head. Grid: heads * scored partitions."""
    program = tl.program_id(0).to(tl.int64)
    head, part = program // scored, program % scored
    item, kv_head = head // num_heads, head % num_heads
    start = sink_size + part * lag
    keys = keys_ptr + item * key_stride_b + kv_head * key_stride_h + start * key_stride_t
    values = values_ptr + item * value_stride_b + kv_head * value_stride_h + start * value_stride_t
    kept = choose(
        keys, values, lag, kept_each, key_stride_t, key_stride_d, value_stride_t, value_stride_d, head_dim, value_dim,
        BLOCK_L, BLOCK_T, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    tokens = tl.arange(0, BLOCK_L)
    tl.store(kept_ptr + head * length + start + tokens, kept, mask=tokens < lag)


@triton.jit(do_not_specialize=["length", "retained", "scored", "programs", "sink_size", "kept_each"])
def compress_partitions(
    keys_ptr, values_ptr, out_keys_ptr, out_values_ptr, positions_ptr,
    key_stride_b, key_stride_h, key_stride_t, key_stride_d, value_stride_b, value_stride_h, value_stride_t, value_stride_d,
    num_heads, length, retained, scored, programs, sink_size, lag, kept_each, head_dim, value_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Copy what is kept of one partition of one head, or `lag` tokens of its sinks and tail. Grid: heads * programs."""
    program = tl.program_id(0).to(tl.int64)
    head, part = program // programs, program % programs
    item, kv_head = head // num_heads, head % num_heads
    keys = keys_ptr + item * key_stride_b + kv_head * key_stride_h
    values = values_ptr + item * value_stride_b + kv_head * value_stride_h
    first_row = head * retained
    if part < scored:
        start = sink_size + part * lag
        first_row += sink_size + part * kept_each
        keys += start * key_stride_t
        values += start * value_stride_t
        kept = choose(
            keys, values, lag, kept_each, key_stride_t, key_stride_d, value_stride_t, value_stride_d, head_dim, value_dim,
            BLOCK_L, BLOCK_T, BLOCK_D, BLOCK_DV,
        ).to(tl.int32)  # fmt: skip
        # The row of a kept token counts the kept tokens before it; -1 marks the others. One row of the array is a tile.
        rows = tl.reshape(tl.where(kept != 0, tl.cumsum(kept, axis=0) - 1, -1), [BLOCK_L // BLOCK_T, BLOCK_T])
        tiles = tl.arange(0, BLOCK_L // BLOCK_T)[:, None]
        for tile in range(0, BLOCK_L // BLOCK_T):
            row = tl.max(tl.where(tiles == tile, rows, -1), axis=0)
            tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
            target = first_row + row
            tl.store(positions_ptr + target, start + tokens, mask=row >= 0)
            copy_tile(keys, out_keys_ptr, tokens, target, row >= 0, key_stride_t, key_stride_d, head_dim, BLOCK_D)
            copy_tile(values, out_values_ptr, tokens, target, row >= 0, value_stride_t, value_stride_d, value_dim, BLOCK_DV)
    else:
        copied = length - scored * lag
        first = (part - scored) * lag
        for tile in range(0, lag, BLOCK_T):
            index = first + tile + tl.arange(0, BLOCK_T)
            inside = (index < copied) & (tile + tl.arange(0, BLOCK_T) < lag)
            tokens = tl.where(index < sink_size, index, index + scored * lag)
            target = first_row + tl.where(index < sink_size, index, index + scored * kept_each)
            tl.store(positions_ptr + target, tokens, mask=inside)
            copy_tile(keys, out_keys_ptr, tokens, target, inside, key_stride_t, key_stride_d, head_dim, BLOCK_D)
            copy_tile(values, out_values_ptr, tokens, target, inside, value_stride_t, value_stride_d, value_dim, BLOCK_DV)


def _compiled(dtype: torch.dtype, head_dim: int, lag_size: int) -> Configuration:
    def launch() -> None:
        cache = torch.empty((2, 8, 8192 + 16, head_dim), dtype=dtype, device="meta")
        compress(cache, cache, keep_ratio=0.25, lag_size=lag_size)
        select(cache, cache, keep_ratio=0.25, lag_size=lag_size)
        part = cache[:, :, :lag_size]
        score(part, part, part, part)

    return Configuration(f"{dtype} head_dim {head_dim} lag_size {lag_size}".removeprefix("torch."), launch)


CONFIGURATIONS = [
    _compiled(dtype, head_dim, lag_size)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for head_dim in (128, 64, 80, 96, 256)
    for lag_size in (128, 1024)
]
