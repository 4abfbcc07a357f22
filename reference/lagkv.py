r"""LagKV (arXiv 2504.04704): score the tokens of each partition by their variation relative to the
range of the next partition.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from .attention import softmax
from .contract import Mask, Real, Setting, Share, State, Weight, Whole, contract
from .selection import gather, top_k

METHOD = "keeps, partition by partition, the tokens that vary most against the next partition"
TRAITS = {"recursive"}


@contract
def score(
    keys: Real[np.ndarray, "... L D"],
    values: Real[np.ndarray, "... L D_v"],
    next_keys: Real[np.ndarray, "... M D"],
    next_values: Real[np.ndarray, "... M D_v"],
) -> Weight[np.ndarray, "... L"]:
    r"""LK-7..11: `score_i = score(K)_i + score(V)_i` of one partition against the next; the scores
    of a partition sum to 2.

    Args: next_keys, next_values, the partition after it. Returns scores, higher = keep. Source: section
    2.2, equations 7 to 11.
    """
    return variation_score(normalise(keys, next_keys)) + variation_score(normalise(values, next_values))


@contract
def append(
    cached: Real[np.ndarray, "... N>=0 D"], new: Real[np.ndarray, "... n D"]
) -> Real[np.ndarray, "... N+n D"]:
    r"""LK-5: `K = Cat[K : k]`, the new tokens after the cached ones. Source: section 2.1, equation 5."""
    return np.concatenate([cached, new], axis=-2)


def reference_minimum(next_states: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... 1 D"]:
    r"""LK-7: `min_c = min over the tokens t of Z[p+1]_tc`, per channel. Source: equation 7."""
    return next_states.min(axis=-2, keepdims=True)


def reference_maximum(next_states: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... 1 D"]:
    r"""LK-8: `max_c = max over the tokens t of Z[p+1]_tc`, per channel. Source: equation 8."""
    return next_states.max(axis=-2, keepdims=True)


def normalise(
    states: Real[np.ndarray, "... T D"], next_states: Real[np.ndarray, "... M D"]
) -> Real[np.ndarray, "... T D"]:
    r"""LK-9: `Zbar = (Z - min) / (max - min)`, per channel, with the range of the NEXT partition;
    it may leave [0, 1].

    Args: states of partition p, next_states of partition p + 1. Source: equation 9.
    """
    low, high = reference_minimum(next_states), reference_maximum(next_states)
    spread = high - low
    # Decision: a channel that is constant in the next partition says nothing about scale: it
    # normalises to 0. That keeps the invariance to affine maps; dividing by the zero range would
    # give NaN.
    return np.where(spread == 0, 0, (states - low) / np.where(spread == 0, 1, spread))


def variation_score(normalised: Real[np.ndarray, "... T D"]) -> Share[np.ndarray, "... T"]:
    r"""LK-10: `softmax over the tokens of std over the channels`:
    positive, sums to 1 over the partition.

    Source: equation 10.
    """
    if normalised.shape[-1] == 1:
        deviation = np.zeros_like(normalised[..., 0])  # a single channel has no variation
    else:
        # Decision: the sample standard deviation (ddof=1), as in the authors' code; the paper does
        # not say.
        deviation = normalised.std(axis=-1, ddof=1)
    return softmax(deviation, axis=-1)


@contract
def select(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    *,
    keep_ratio: Setting[float | Fraction, "[0, 1]"],
    sink_size: Setting[int, ">= 0", 4] = 16,
    lag_size: Setting[int, ">= 1", 128, 512] = 1024,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""LK-12: keep the sinks, the best floor(rL) tokens of every partition but the last, and the
    last partition onwards.

    Each head keeps `retained_length(T)` tokens. Source: section 2.2 and figure 1.
    """
    return _kept_after(sink_size, score, keys, values, keep_ratio, lag_size)


@contract
def tokens_per_partition(
    keep_ratio: Setting[float | Fraction, "[0, 1]"], lag_size: Setting[int, ">= 1"]
) -> int:
    r"""LK-12: `floor(r L)`, the tokens kept of each compressed partition; the paper writes rL as if
    it were whole.
    """
    # Decision: floor in exact decimal arithmetic, as the authors' code floors; float gives 28 for
    # floor(0.29 * 100).
    return math.floor(keep_ratio * lag_size)


@contract
def retained_length(
    length: Setting[int, ">= 0"],
    *,
    keep_ratio: Setting[float | Fraction, "[0, 1]"],
    sink_size: Setting[int, ">= 0", 4] = 16,
    lag_size: Setting[int, ">= 1", 128, 512] = 1024,
) -> int:
    r"""LK-12: `L_R = S + floor(rL) (floor((L_s - S) / L) - 1) + L + (L_s - S) mod L` for
    `L_s >= S + 2L`, else `L_s`.

    Args: length, tokens in the cache (L_s); keep_ratio, the fraction of each partition kept (r), in
    [0, 1]; sink_size (S), lag_size (L). Returns the tokens left. Source: equation 12.
    """
    kept_each = tokens_per_partition(keep_ratio, lag_size)
    if length < sink_size + 2 * lag_size:
        return length
    partitions, remainder = divmod(length - sink_size, lag_size)
    return sink_size + kept_each * (partitions - 1) + lag_size + remainder


@contract
def compression_ratio(
    length: Setting[int, ">= 1"],
    *,
    keep_ratio: Setting[float | Fraction, "[0, 1]"],
    sink_size: Setting[int, ">= 0", 4] = 16,
    lag_size: Setting[int, ">= 1", 128, 512] = 1024,
) -> float:
    r"""LK-13: `C = 1 - L_R / L_s`, the fraction removed: below `1 - floor(rL) / L`, or 0 as that is
    at r = 1.

    Arguments of `retained_length`.
    """
    return 1 - retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size) / length


@contract
def keep_ratio_for(
    length: Setting[int, ">= 1"],
    budget: Setting[int, ">= 1"],
    *,
    sink_size: Setting[int, ">= 0", 4] = 16,
    lag_size: Setting[int, ">= 1", 128, 512] = 1024,
) -> Fraction:
    r"""LK-13, solved for r: the largest keep_ratio whose retained length is within `budget`, or 0
    if there is none.

    The paper adapts r this way to compare methods at equal compression (section 3.2). Returns an
    exact fraction of lag_size; 1 where nothing needs to be removed.
    """
    fixed = retained_length(length, keep_ratio=0, sink_size=sink_size, lag_size=lag_size)
    if budget >= length or fixed == length:
        return Fraction(1)
    compressed_partitions = (length - sink_size) // lag_size - 1
    return Fraction(max(0, min(lag_size, (budget - fixed) // compressed_partitions)), lag_size)


def why_nothing_removed(length: int, *, sink_size: int = 16, lag_size: int = 1024) -> str | None:
    """Say why a cache of `length` tokens stays whole (LK-12), or None if LagKV compresses it."""
    shortest = sink_size + 2 * lag_size
    if length >= shortest:
        return None
    return (
        f"LagKV keeps every cache below sink_size + 2 * lag_size = {shortest} tokens; this one has {length}"
    )


class Stream(NamedTuple):
    """LK-R: the cache between two steps: the static part (sinks and kept tokens of partitions),
    then uncompressed tokens.

    positions are those of the original sequence, ascending; static_length says how many tokens are
    static (sink_size at first, though fewer may have come); seen, how many tokens have come.
    """

    keys: Real[np.ndarray, "N>=0 D"]
    values: Real[np.ndarray, "N>=0 D_v"]
    positions: Whole[np.ndarray, "N>=0"]
    static_length: int
    seen: int


@contract
def step(
    stream: State[Stream | None, "B H_kv"],
    keys: Real[np.ndarray, "B H_kv n D"],
    values: Real[np.ndarray, "B H_kv n D_v"],
    *,
    keep_ratio: Setting[float | Fraction, "[0, 1]"],
    sink_size: Setting[int, ">= 0", 4] = 16,
    lag_size: Setting[int, ">= 1", 128, 512] = 1024,
) -> State[Stream, "B H_kv"]:
    r"""LK-R: append new tokens, then compress every partition after the static part that has a
    whole partition behind it.

    The sizes of the chunks do not matter: the kept positions are those of `select` on all tokens;
    an evicted token never returns. At most `sink_size + floor(rL) n + 2L - 1` tokens stay, n the
    partitions compressed so far.

    Args: stream, None at the start; keys and values, those of the new tokens; the settings of `select`.
    Returns the next Stream; the given stream is unchanged. Source: the list of section 2.2, figure 1 and
    (the prefill in chunks) section 4.3.
    """
    if stream is None:
        nothing = np.zeros((*keys.shape[:2], 0), dtype=int)
        stream = Stream(keys[:, :, :0], values[:, :, :0], nothing, sink_size, 0)
    new = keys.shape[2]
    arrived = np.broadcast_to(np.arange(stream.seen, stream.seen + new), keys.shape[:3])
    keys, values = append(stream.keys, keys), append(stream.values, values)
    positions = np.concatenate([stream.positions, arrived], axis=-1)
    kept = _kept_after(stream.static_length, score, keys, values, keep_ratio, lag_size)
    compressed = max(0, (keys.shape[2] - stream.static_length) // lag_size - 1)
    static_length = stream.static_length + compressed * tokens_per_partition(keep_ratio, lag_size)
    keys, values, positions = gather(keys, kept), gather(values, kept), gather(positions, kept)
    return Stream(keys, values, positions, static_length, stream.seen + new)


def _kept_after(
    static_length: int,
    scorer: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    keys: np.ndarray,
    values: np.ndarray,
    keep_ratio: float | Fraction,
    lag_size: int,
) -> np.ndarray:
    """The kept mask: the first `static_length` tokens
    stay; every later partition but the last is compressed.
    """
    kept_each = tokens_per_partition(keep_ratio, lag_size)
    batch, num_kv_heads, length, _ = keys.shape
    kept = np.ones((batch, num_kv_heads, length), dtype=bool)
    partitions = (length - static_length) // lag_size
    if partitions < 2:
        return kept
    window = slice(static_length, static_length + partitions * lag_size)

    def partitioned(
        states: np.ndarray,
    ) -> np.ndarray:  # [B, H_kv, T, D] to [B, H_kv, partitions, L, D]
        return states[:, :, window].reshape(batch, num_kv_heads, partitions, lag_size, -1)

    key_parts, value_parts = partitioned(keys), partitioned(values)
    scores = scorer(key_parts[:, :, :-1], value_parts[:, :, :-1], key_parts[:, :, 1:], value_parts[:, :, 1:])
    kept[:, :, static_length : window.stop - lag_size] = top_k(scores, kept_each).reshape(
        batch, num_kv_heads, -1
    )
    return kept
