r"""LagKV (arXiv 2504.04704): score the tokens of each partition by their variation relative to the range
of the next partition.
"""

import math

import torch
from torch.linalg import vector_norm

from evictionary.reference.lagkv import (
    compression_ratio,
    keep_ratio_for,
    retained_length,
    tokens_per_partition,
    why_nothing_removed,
)

from . import kernels
from .cache import compress as gather
from .checks import fits, require_fit, working_dtype
from .operators import operator
from .selection import top_k
from .states import CompressedCache

# Counting partitions is exact integer arithmetic: the reference's functions serve here too.
__all__ = [
    "compress",
    "compression_ratio",
    "keep_ratio_for",
    "retained_length",
    "score",
    "select",
    "tokens_per_partition",
    "why_nothing_removed",
]

# The longest partition that fits into the registers of one program of the kernels.
LONGEST_IN_KERNELS = 4096
# The largest distance of a token, in ranges of the next partition; the square of a larger distance would
# overflow float32.
LARGEST_STEP = 1e18


def variation_score(
    states: torch.Tensor, next_states: torch.Tensor, room: torch.Tensor | None = None
) -> torch.Tensor:
    r"""LK-7..10: `softmax over tokens of std over channels of (Z - min) / (max - min)`, min and max those
    of the next partition.

    Args: states [..., L, D], next_states [..., L', D]; room, memory of the shape of states in float32
    (float64 for float64), which is overwritten: a caller with many partitions gives it, so that it stays in
    the processor's cache. Returns [..., L], as room.
    """
    dtype = working_dtype(states)
    low, high = (
        next_states.amin(dim=-2, keepdim=True).to(dtype),
        next_states.amax(dim=-2, keepdim=True).to(dtype),
    )
    spread = high - low
    # Decision: a channel that is constant in the next partition normalises to 0, as its numbers are divided
    # by infinity.
    spread.masked_fill_(spread == 0, math.inf)
    room = torch.empty_like(states, dtype=dtype) if room is None else room
    normalised = room.copy_(states).sub_(low).div_(spread).clamp_(-LARGEST_STEP, LARGEST_STEP)
    if states.shape[-1] == 1:
        # a single channel has no variation
        return torch.softmax(torch.zeros_like(normalised[..., 0]), dim=-1)
    # Decision: the sample standard deviation (ddof=1), as in the authors' code. As the norm of the
    # differences from the mean it runs at the speed of memory; torch's `std` takes one number at a time.
    centred = normalised.sub_(normalised.mean(dim=-1, keepdim=True))
    return torch.softmax(vector_norm(centred, dim=-1) / math.sqrt(states.shape[-1] - 1), dim=-1)


@operator()
@fits()
def score(
    keys: torch.Tensor, values: torch.Tensor, next_keys: torch.Tensor, next_values: torch.Tensor
) -> torch.Tensor:
    r"""LK-7..11: `score_i = score(K)_i + score(V)_i` of one partition against the next; the scores of a
    partition sum to 2.

    Args: keys and values of a partition; next_keys and next_values, the partition after it. Returns [..., L],
    higher = keep, float32 (float64 for float64). Raises ValueError if shapes, dtypes or devices disagree, and
    on a CPU for NaN or infinite numbers. Source: section 2.2, equations 7 to 11.
    """
    if _kernels_take(keys, values, keys.shape[-2], beside=(next_keys, next_values)):
        return kernels.lagkv.score(keys, values, next_keys, next_values)
    return variation_score(keys, next_keys) + variation_score(values, next_values)


@operator()
@fits()
@torch.no_grad()
def select(
    keys: torch.Tensor, values: torch.Tensor, *, keep_ratio: float, sink_size: int = 16, lag_size: int = 1024
) -> torch.Tensor:
    r"""LK-12: keep the sinks, the best floor(rL) tokens of every
    partition but the last, and the last partition onwards.

    One partition is scored at a time, for all heads at once:
    it and its successor stay in the processor's cache.

    Returns kept [B, H_kv, T], boolean; each head keeps `retained_length(T)` tokens. Raises ValueError naming
    the argument, and on a CPU for NaN or infinite numbers. Source: section 2.2 and figure 1.
    """
    length = keys.shape[2]
    left = retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    kept = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    if left == length:
        return kept
    kept_each = tokens_per_partition(keep_ratio, lag_size)
    if _kernels_take(keys, values, lag_size):
        return kernels.lagkv.select(
            keys, values, kept, sink_size=sink_size, lag_size=lag_size, kept_each=kept_each
        )
    rooms = [
        states.new_empty(states[:, :, :lag_size].shape, dtype=working_dtype(states))
        for states in (keys, values)
    ]
    for start in range(sink_size, length - 2 * lag_size + 1, lag_size):
        this, following = slice(start, start + lag_size), slice(start + lag_size, start + 2 * lag_size)
        scores = variation_score(keys[:, :, this], keys[:, :, following], rooms[0])
        scores += variation_score(values[:, :, this], values[:, :, following], rooms[1])
        kept[:, :, this] = top_k(scores, kept_each)
    return kept


def compress(
    keys: torch.Tensor, values: torch.Tensor, *, keep_ratio: float, sink_size: int = 16, lag_size: int = 1024
) -> CompressedCache:
    r"""LK-12 and CACHE-1 at once: `cache.compress(keys, values, select(keys, values, ...))`.

    The number of tokens that a partition keeps is known beforehand, so on a GPU
    the scores, the choice and the copy of the kept rows are one launch. Arguments
    and errors are those of `select`; the result is that of `cache.compress`.
    """
    require_fit("lagkv.select", keys, values)
    left = retained_length(keys.shape[2], keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    if _kernels_take(keys, values, lag_size):
        kept_each = tokens_per_partition(keep_ratio, lag_size)
        return kernels.lagkv.compress(
            keys, values, left, sink_size=sink_size, lag_size=lag_size, kept_each=kept_each
        )
    kept = select(keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    return gather(keys, values, kept)


def _kernels_take(
    keys: torch.Tensor, values: torch.Tensor, lag_size: int, beside: tuple[torch.Tensor, ...] = ()
) -> bool:
    """Return whether the kernels take these states in partitions of `lag_size` tokens, beside the next."""
    return lag_size <= LONGEST_IN_KERNELS and kernels.take("lagkv", keys, values, beside=beside)
