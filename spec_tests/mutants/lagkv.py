"""Wrong LagKVs."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from evictionary.reference.attention import softmax
from evictionary.reference.lagkv import (
    Stream,
    append,
    keep_ratio_for,
    normalise,
    retained_length,
    score,
    select,
    step,
    tokens_per_partition,
    variation_score,
)
from evictionary.reference.lagkv_theory import attention_output, attention_weights, project
from evictionary.reference.lagkv_variants import local_score, local_select, norm_select
from evictionary.reference.selection import top_k
from evictionary.spec_tests.harness.planted import mutant

SCORE, SELECT, RETAINED = "lagkv.score", "lagkv.select", "lagkv.retained_length"
WEIGHTS, APPEND, STEP = "lagkv_theory.attention_weights", "lagkv.append", "lagkv.step"
LOCAL_SCORE, LOCAL_SELECT, NORM_SELECT = "lagkv_variants.local_score", "lagkv_variants.local_select", "lagkv_variants.norm_select"


def scored(keys, values, next_keys, next_values, part):
    """The sum of LK-11 with a part of one's own; what the right score refuses is refused."""
    score(keys, values, next_keys, next_values)
    return part(keys, next_keys) + part(values, next_values)


def deviation_of(normalised):
    """The sample standard deviation over the channels."""
    return normalised.std(axis=-1, ddof=1) if normalised.shape[-1] > 1 else np.zeros(normalised.shape[:-1])


def ranged(states, low, high):
    """Equation 9 with a range of one's own."""
    spread = high - low
    return np.where(spread == 0, 0, (states - low) / np.where(spread == 0, 1, spread))


@mutant(SCORE, killed_by="LK-11", misconception="the partition normalised by its own range, not by the next one's (LocalKV)")
def own_range(keys, values, next_keys, next_values):
    return scored(keys, values, next_keys, next_values, lambda states, following: variation_score(normalise(states, states)))


@mutant(SCORE, killed_by="LK-11", misconception="the next partition scored against this one: the roles exchanged")
def roles_exchanged(keys, values, next_keys, next_values):
    length = keys.shape[-2]
    swapped = scored(keys, values, next_keys, next_values, lambda states, following: variation_score(normalise(following, states)))
    return np.pad(swapped, [(0, 0)] * (keys.ndim - 2) + [(0, max(0, length - swapped.shape[-1]))])[..., :length]


@mutant(SCORE, killed_by="LK-11", misconception="only the keys scored")
def keys_alone(keys, values, next_keys, next_values):
    score(keys, values, next_keys, next_values)
    return 2 * variation_score(normalise(keys, next_keys))


@mutant(SCORE, killed_by="LK-11", misconception="the scores of keys and values multiplied instead of added")
def scores_multiplied(keys, values, next_keys, next_values):
    score(keys, values, next_keys, next_values)
    return variation_score(normalise(keys, next_keys)) * variation_score(normalise(values, next_values))


@mutant(SCORE, killed_by="LK-11", misconception="the standard deviation with ddof=0")
def population_deviation(keys, values, next_keys, next_values):
    return scored(
        keys, values, next_keys, next_values, lambda states, following: softmax(normalise(states, following).std(axis=-1))
    )


@mutant(SCORE, killed_by="LK-11", misconception="the variance instead of the standard deviation")
def variance(keys, values, next_keys, next_values):
    return scored(
        keys, values, next_keys, next_values, lambda states, following: softmax(normalise(states, following).std(axis=-1) ** 2)
    )


@mutant(SCORE, killed_by="LK-11", misconception="the scores of keys and values averaged instead of added")
def scores_averaged(keys, values, next_keys, next_values):
    return score(keys, values, next_keys, next_values) / 2


@mutant(SCORE, killed_by="LK-11", misconception="keys and values joined channel by channel before the standard deviation")
def channels_joined(keys, values, next_keys, next_values):
    score(keys, values, next_keys, next_values)
    joined = np.concatenate([normalise(keys, next_keys), normalise(values, next_values)], axis=-1)
    return 2 * variation_score(joined)


@mutant(SCORE, killed_by="LK-11", misconception="the scores of batch item 0 used for the whole batch")
def first_batch_item_scores(keys, values, next_keys, next_values):
    scores = score(keys, values, next_keys, next_values)
    return np.broadcast_to(scores[:1], scores.shape).copy()


@mutant(SCORE, killed_by="LK-11", misconception="the scores averaged over the heads of a layer")
def scores_shared_by_the_heads(keys, values, next_keys, next_values):
    scores = score(keys, values, next_keys, next_values)
    return np.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape).copy()


@mutant(SCORE, killed_by="LK-11", misconception="values of more or fewer tokens than the keys cut to the common length in silence")
def other_tokens_cut_off(keys, values, next_keys, next_values):
    length, following = min(keys.shape[-2], values.shape[-2]), min(next_keys.shape[-2], next_values.shape[-2])
    own = keys[..., :length, :], values[..., :length, :]
    return score(*own, next_keys[..., :following, :], next_values[..., :following, :])


@mutant(SCORE, killed_by="LK-11", misconception="a next partition of other channels cut to the common ones in silence")
def other_channels_cut_off(keys, values, next_keys, next_values):
    width, value_width = min(keys.shape[-1], next_keys.shape[-1]), min(values.shape[-1], next_values.shape[-1])
    return score(keys[..., :width], values[..., :value_width], next_keys[..., :width], next_values[..., :value_width])


@mutant(SCORE, killed_by="LK-10", misconception="the softmax left out: raw deviations added")
def no_softmax(keys, values, next_keys, next_values):
    return scored(keys, values, next_keys, next_values, lambda states, following: deviation_of(normalise(states, following)))


@mutant(SCORE, killed_by="LK-10", misconception="deviations divided by their sum instead of a softmax")
def shares_for_softmax(keys, values, next_keys, next_values):
    def part(states, following):
        deviation = deviation_of(normalise(states, following)) + 1e-12
        return deviation / deviation.sum(axis=-1, keepdims=True)

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-10", misconception="a temperature of sqrt(D) in the softmax, as in attention")
def temperature(keys, values, next_keys, next_values):
    def part(states, following):
        return softmax(deviation_of(normalise(states, following)) / math.sqrt(states.shape[-1]))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-10", misconception="one softmax over the sum of both deviations")
def one_softmax_for_both(keys, values, next_keys, next_values):
    score(keys, values, next_keys, next_values)
    return 2 * softmax(deviation_of(normalise(keys, next_keys)) + deviation_of(normalise(values, next_values)))


@mutant(SCORE, killed_by="LK-10", misconception="the softmax taken over the heads instead of the tokens")
def softmax_over_heads(keys, values, next_keys, next_values):
    return scored(
        keys, values, next_keys, next_values, lambda states, following: softmax(deviation_of(normalise(states, following)), axis=1)
    )


@mutant(SCORE, killed_by="LK-10", misconception="the squares divided by D - 1 = 0 where there is one channel: NaN")
def one_channel_divided_by_zero(keys, values, next_keys, next_values):
    def part(states, following):
        normalised = normalise(states, following)
        squares = ((normalised - normalised.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
        with np.errstate(all="ignore"):
            return softmax(np.sqrt(squares / np.float64(states.shape[-1] - 1)))

    with np.errstate(all="ignore"):
        return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-10", misconception="deviations rounded to float16 before the softmax")
def deviations_in_half_precision(keys, values, next_keys, next_values):
    def part(states, following):
        return softmax(np.minimum(deviation_of(normalise(states, following)), 6e4).astype(np.float16).astype(np.float64))

    return scored(keys, values, next_keys, next_values, part)


@mutant(
    SCORE,
    killed_by="LK-10",
    misconception="the softmax normalised over the last tile of 16 tokens filled up with zeros: an unmasked tail",
)
def tail_tile_not_masked(keys, values, next_keys, next_values):
    def part(states, following):
        deviation = deviation_of(normalise(states, following))
        padding = [(0, 0)] * (deviation.ndim - 1) + [(0, -deviation.shape[-1] % 16)]
        return softmax(np.pad(deviation, padding))[..., : deviation.shape[-1]]

    return scored(keys, values, next_keys, next_values, part)


@mutant(
    SCORE,
    killed_by="LK-11",
    misconception="the absolute normalised values summed instead of their standard deviation over the channels",
)
def absolute_sum(keys, values, next_keys, next_values):
    return scored(
        keys, values, next_keys, next_values, lambda states, following: softmax(np.abs(normalise(states, following)).sum(axis=-1))
    )


@mutant(
    SCORE,
    killed_by="LK-11",
    misconception="the deviation measured from the mean token of the partition, not over a token's channels",
)
def deviation_over_tokens(keys, values, next_keys, next_values):
    def part(states, following):
        normalised = normalise(states, following)
        return softmax(np.sqrt(((normalised - normalised.mean(axis=-2, keepdims=True)) ** 2).mean(axis=-1)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-7", misconception="the first token of the next partition taken for its minimum")
def first_token_for_the_minimum(keys, values, next_keys, next_values):
    def part(states, following):
        return variation_score(ranged(states, following[..., :1, :], following.max(axis=-2, keepdims=True)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-7", misconception="the next partition's first and last token taken for its range")
def ends_for_the_range(keys, values, next_keys, next_values):
    def part(states, following):
        ends = following[..., [0, -1], :]
        return variation_score(normalise(states, ends))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-8", misconception="the mean of the next partition taken for its maximum")
def mean_for_the_maximum(keys, values, next_keys, next_values):
    def part(states, following):
        return variation_score(ranged(states, following.min(axis=-2, keepdims=True), following.mean(axis=-2, keepdims=True)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(
    SCORE,
    killed_by="LK-8",
    misconception="mean and standard deviation of the next partition (z-scores) instead of minimum and maximum",
)
def standardised(keys, values, next_keys, next_values):
    def part(states, following):
        mean = following.mean(axis=-2, keepdims=True)
        return variation_score(ranged(states, mean, mean + following.std(axis=-2, keepdims=True)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-8", misconception="the range running from 0 to the largest absolute value of the next partition")
def largest_absolute_value(keys, values, next_keys, next_values):
    def part(states, following):
        return variation_score(ranged(states, 0, np.abs(following).max(axis=-2, keepdims=True)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-9", misconception="minimum and maximum taken over both partitions together")
def range_of_both_partitions(keys, values, next_keys, next_values):
    def part(states, following):
        return variation_score(normalise(states, np.concatenate([states, following], axis=-2)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-9", misconception="minimum and maximum taken over all channels together")
def one_range_for_all_channels(keys, values, next_keys, next_values):
    def part(states, following):
        axes = (-2, -1)
        return variation_score(ranged(states, following.min(axis=axes, keepdims=True), following.max(axis=axes, keepdims=True)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(
    SCORE,
    killed_by="LK-9",
    misconception="the next partition's last tile of 16 tokens filled up with zeros that enter its range: an unmasked tail",
)
def zeros_in_the_range(keys, values, next_keys, next_values):
    def part(states, following):
        padding = np.zeros((*following.shape[:-2], -following.shape[-2] % 16, following.shape[-1]))
        return variation_score(normalise(states, np.concatenate([following, padding], axis=-2)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-9", misconception="the range divided out without subtracting the minimum")
def minimum_not_subtracted(keys, values, next_keys, next_values):
    def part(states, following):
        spread = np.ptp(following, axis=-2, keepdims=True)
        return variation_score(np.where(spread == 0, 0, states / np.where(spread == 0, 1, spread)))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-9", misconception="the minimum subtracted without dividing by the range")
def range_not_divided(keys, values, next_keys, next_values):
    return scored(
        keys,
        values,
        next_keys,
        next_values,
        lambda states, following: variation_score(states - following.min(axis=-2, keepdims=True)),
    )


@mutant(
    SCORE, killed_by="LK-9", misconception="the distance to the middle of the range instead of the value measured from its minimum"
)
def distance_to_the_middle(keys, values, next_keys, next_values):
    def part(states, following):
        return variation_score(np.abs(normalise(states, following) - 0.5))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-9", misconception="a channel constant in the next partition divided by a range of zero")
def constant_channel_divided(keys, values, next_keys, next_values):
    def part(states, following):
        low = following.min(axis=-2, keepdims=True)
        with np.errstate(all="ignore"):
            return variation_score((states - low) / (following.max(axis=-2, keepdims=True) - low))

    with np.errstate(all="ignore"):
        return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-9", misconception="a channel constant in the next partition divided by 1e-6")
def constant_channel_by_epsilon(keys, values, next_keys, next_values):
    def part(states, following):
        low = following.min(axis=-2, keepdims=True)
        return variation_score((states - low) / (following.max(axis=-2, keepdims=True) - low + 1e-6))

    return scored(keys, values, next_keys, next_values, part)


@mutant(SCORE, killed_by="LK-9", misconception="the normalised values clipped to [0, 1]")
def clipped(keys, values, next_keys, next_values):
    return scored(
        keys, values, next_keys, next_values, lambda states, following: variation_score(np.clip(normalise(states, following), 0, 1))
    )


def window(keys, values, keep_ratio, sink_size, lag_size):
    """The parts of a select: the mask of ones, the number of compressed partitions and the count kept in each."""
    retained_length(keys.shape[2], keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    partitions = max(0, (keys.shape[2] - sink_size) // lag_size - 1)
    return np.ones(keys.shape[:3], dtype=bool), partitions, math.floor(Fraction(repr(float(keep_ratio))) * lag_size)


def partition_scores(keys, values, start, lag_size, reference_start):
    own, other = slice(start, start + lag_size), slice(reference_start, reference_start + lag_size)
    return score(keys[:, :, own], values[:, :, own], keys[:, :, other], values[:, :, other])


@mutant(SELECT, killed_by="LK-12", misconception="the previous partition taken as the reference instead of the next")
def previous_partition(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    for start in range(sink_size, sink_size + partitions * lag_size, lag_size):
        scores = partition_scores(keys, values, start, lag_size, max(sink_size, start - lag_size))
        kept[:, :, start : start + lag_size] = top_k(scores, count)
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="one top-k over the whole sequence instead of one for each partition")
def global_top_k(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    starts = range(sink_size, sink_size + partitions * lag_size, lag_size)
    if partitions:
        scores = np.concatenate([partition_scores(keys, values, start, lag_size, start + lag_size) for start in starts], axis=-1)
        kept[:, :, sink_size : starts.stop] = top_k(scores, count * partitions)
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="int(r * L) in binary floating point instead of the exact floor")
def float_floor(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    retained_length(keys.shape[2], keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    count = int(float(keep_ratio) * lag_size)
    return select(keys, values, keep_ratio=Fraction(count, lag_size), sink_size=sink_size, lag_size=lag_size)


@mutant(SELECT, killed_by="LK-12", misconception="rL rounded up instead of down")
def rounded_up(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    retained_length(keys.shape[2], keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    count = math.ceil(Fraction(repr(float(keep_ratio))) * lag_size)
    return select(keys, values, keep_ratio=Fraction(count, lag_size), sink_size=sink_size, lag_size=lag_size)


@mutant(SELECT, killed_by="LK-12", misconception="caches of S + L tokens compressed already, not from S + 2L on")
def compressed_too_early(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept = select(keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    if sink_size + lag_size <= keys.shape[2] < sink_size + 2 * lag_size:
        count = math.floor(Fraction(repr(float(keep_ratio))) * lag_size)
        scores = partition_scores(keys, values, sink_size, lag_size, sink_size)
        kept[:, :, sink_size : sink_size + lag_size] = top_k(scores, count)
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="a cache of exactly S + 2L tokens left whole (an off-by-one in the threshold)")
def threshold_off_by_one(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept = select(keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    return np.ones_like(kept) if keys.shape[2] == sink_size + 2 * lag_size else kept


@mutant(SELECT, killed_by="LK-12", misconception="partitions counted from position 0, the sinks not set aside")
def sinks_inside_the_first_partition(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept = select(keys, values, keep_ratio=keep_ratio, sink_size=0, lag_size=lag_size)
    retained_length(keys.shape[2], keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    if keys.shape[2] < sink_size + 2 * lag_size:
        return np.ones_like(kept)
    kept[:, :, :sink_size] = True
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="the remainder taken from the front, so that the partitions end at the last token")
def remainder_at_the_front(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    offset = sink_size + max(0, keys.shape[2] - sink_size) % lag_size
    for start in range(offset, offset + partitions * lag_size, lag_size):
        kept[:, :, start : start + lag_size] = top_k(partition_scores(keys, values, start, lag_size, start + lag_size), count)
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="the mask of batch item 0 used for the whole batch")
def first_batch_item_decides(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept = select(keys[:1], values[:1], keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    return np.broadcast_to(kept, keys.shape[:3]).copy()


@mutant(SELECT, killed_by="LK-12", misconception="one set of tokens for all heads, by their summed scores")
def one_set_for_all_heads(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    for start in range(sink_size, sink_size + partitions * lag_size, lag_size):
        scores = partition_scores(keys, values, start, lag_size, start + lag_size)
        scores = np.broadcast_to(scores.sum(axis=1, keepdims=True), scores.shape)
        kept[:, :, start : start + lag_size] = top_k(scores, count)
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="the lowest scores kept instead of the highest")
def lowest_kept(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    for start in range(sink_size, sink_size + partitions * lag_size, lag_size):
        kept[:, :, start : start + lag_size] = top_k(-partition_scores(keys, values, start, lag_size, start + lag_size), count)
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="of equal scores the higher position kept")
def later_of_equal_tokens(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    for start in range(sink_size, sink_size + partitions * lag_size, lag_size):
        scores = partition_scores(keys, values, start, lag_size, start + lag_size)
        kept[:, :, start : start + lag_size] = top_k(scores[..., ::-1], count)[..., ::-1]
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="the last partition compressed too, against itself")
def last_partition_compressed_too(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    start = sink_size + partitions * lag_size
    kept &= select(keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    if partitions:
        kept[:, :, start : start + lag_size] = top_k(partition_scores(keys, values, start, lag_size, start), count)
    return kept


@mutant(SELECT, killed_by="LK-12", misconception="the sinks scored and evicted like all other tokens, at the same total")
def sinks_not_protected(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept = select(keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    evicted = np.minimum((~kept).sum(axis=-1, keepdims=True), sink_size)
    first_evicted = np.cumsum(~kept, axis=-1) <= evicted
    return (kept | first_evicted) & (np.arange(keys.shape[2]) >= evicted)


@mutant(SELECT, killed_by="LK-12", misconception="keep_ratio taken for the fraction removed")
def ratio_removed(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    window(keys, values, keep_ratio, sink_size, lag_size)
    removed = 1 - Fraction(repr(float(keep_ratio)))
    return select(keys, values, keep_ratio=removed, sink_size=sink_size, lag_size=lag_size)


@mutant(SELECT, killed_by="LK-12", misconception="settings out of range moved into it in silence")
def settings_moved_into_range(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    return select(keys, values, keep_ratio=min(1, max(0, keep_ratio)), sink_size=max(0, sink_size), lag_size=max(1, lag_size))


@mutant(SELECT, killed_by="LK-S9", misconception="the range taken from all tokens that follow, not from the next partition")
def all_following_tokens(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    for start in range(sink_size, sink_size + partitions * lag_size, lag_size):
        own, following = slice(start, start + lag_size), slice(start + lag_size, None)
        scores = score(keys[:, :, own], values[:, :, own], keys[:, :, following], values[:, :, following])
        kept[:, :, own] = top_k(scores, count)
    return kept


@mutant(SELECT, killed_by="LK-S9", misconception="the last partition (the sliding window) taken as the reference of all")
def window_for_the_reference(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    last = sink_size + partitions * lag_size
    for start in range(sink_size, last, lag_size):
        kept[:, :, start : start + lag_size] = top_k(partition_scores(keys, values, start, lag_size, last), count)
    return kept


@mutant(RETAINED, killed_by="LK-12", misconception="the remainder (L_s - S) mod L forgotten")
def remainder_forgotten(length, *, keep_ratio, sink_size=16, lag_size=1024):
    left = retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    return left - (length - sink_size) % lag_size if left < length else left


@mutant(RETAINED, killed_by="LK-12", misconception="every partition compressed, the sliding window too")
def window_compressed_too(length, *, keep_ratio, sink_size=16, lag_size=1024):
    left = retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    return left - lag_size + math.floor(Fraction(repr(float(keep_ratio))) * lag_size) if left < length else left


@mutant(RETAINED, killed_by="LK-12", misconception="rL not rounded to a whole number of tokens in each partition")
def floor_of_the_total(length, *, keep_ratio, sink_size=16, lag_size=1024):
    if length < sink_size + 2 * lag_size:
        return length
    partitions, remainder = divmod(length - sink_size, lag_size)
    return sink_size + math.floor(Fraction(repr(float(keep_ratio))) * lag_size * (partitions - 1)) + lag_size + remainder


@mutant(RETAINED, killed_by="LK-12", misconception="caches longer than S + 2L compressed, those of exactly S + 2L left whole")
def threshold_exclusive(length, *, keep_ratio, sink_size=16, lag_size=1024):
    left = retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    return length if length == sink_size + 2 * lag_size else left


@mutant(RETAINED, killed_by="LK-12", misconception="the sinks forgotten in the count of what is left")
def sinks_forgotten(length, *, keep_ratio, sink_size=16, lag_size=1024):
    left = retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    return left - sink_size if left < length else left


@mutant(RETAINED, killed_by="LK-12", misconception="floor(rL) taken in binary floating point: int(r * L)")
def float_length(length, *, keep_ratio, sink_size=16, lag_size=1024):
    ratio = Fraction(int(float(keep_ratio) * lag_size), lag_size)
    return retained_length(length, keep_ratio=ratio, sink_size=sink_size, lag_size=lag_size)


@mutant("lagkv.compression_ratio", killed_by="LK-13", misconception="the fraction kept returned as the fraction removed")
def fraction_kept(length, *, keep_ratio, sink_size=16, lag_size=1024):
    return retained_length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size) / length


@mutant("lagkv.compression_ratio", killed_by="LK-13", misconception="the limit 1 - r taken for the ratio at every length")
def limit_at_every_length(length, *, keep_ratio, sink_size=16, lag_size=1024):
    return 1 - float(keep_ratio) if length >= sink_size + 2 * lag_size else 0.0


@mutant(
    "lagkv.keep_ratio_for",
    killed_by="LK-13",
    misconception="the budget divided by the length: window, sinks and remainder forgotten",
)
def window_forgotten(length, budget, *, sink_size=16, lag_size=1024):
    return Fraction(budget, length)


@mutant("lagkv.keep_ratio_for", killed_by="LK-13", misconception="the share of each partition rounded up, over the budget")
def ratio_rounded_up(length, budget, *, sink_size=16, lag_size=1024):
    fitting = keep_ratio_for(length, budget, sink_size=sink_size, lag_size=lag_size)
    return min(Fraction(1), fitting + Fraction(1, lag_size))


@mutant("lagkv.keep_ratio_for", killed_by="LK-13", misconception="the last partition shared in, as if it were compressed")
def window_shared_in(length, budget, *, sink_size=16, lag_size=1024):
    if budget >= length or length < sink_size + 2 * lag_size:
        return Fraction(1)
    partitions, remainder = divmod(length - sink_size, lag_size)
    return Fraction(max(0, min(lag_size, (budget - sink_size - remainder) // partitions)), lag_size)


@mutant("lagkv_theory.project", killed_by="LK-1", misconception="the weights of keys and values exchanged")
def keys_for_values(states, query_weight, key_weight, value_weight):
    return project(states, query_weight, value_weight, key_weight)


@mutant("lagkv_theory.project", killed_by="LK-1", misconception="the queries scaled by 1/sqrt(d_h) in the projection already")
def queries_scaled(states, query_weight, key_weight, value_weight):
    queries, keys, values = project(states, query_weight, key_weight, value_weight)
    return queries / math.sqrt(queries.shape[-1]), keys, values


@mutant(
    "lagkv_theory.project",
    killed_by="LK-4",
    misconception="the states centred over the tokens first: a token's q, k and v depend on the others",
)
def states_centred(states, query_weight, key_weight, value_weight):
    return project(states - states.mean(axis=-2, keepdims=True), query_weight, key_weight, value_weight)


@mutant("lagkv_theory.attention_output", killed_by="LK-2", misconception="channels before heads in the concatenation")
def channels_before_heads(weights, values, output_weight):
    attention_output(weights, values, output_weight)
    outputs = np.moveaxis(weights @ values, -3, -1)  # [..., M, d_h, h]
    return outputs.reshape(*outputs.shape[:-2], -1) @ output_weight


@mutant(
    "lagkv_theory.attention_output",
    killed_by="LK-2",
    misconception="the axes of heads and queries not exchanged before they are joined",
)
def heads_and_queries_mixed(weights, values, output_weight):
    right = attention_output(weights, values, output_weight)
    outputs = weights @ values
    return outputs.reshape(*right.shape[:-1], -1) @ output_weight


@mutant("lagkv_theory.attention_output", killed_by="LK-2", misconception="the values of head 0 read by every head")
def values_of_the_first_head(weights, values, output_weight):
    return attention_output(weights, np.broadcast_to(values[..., :1, :, :], values.shape).copy(), output_weight)


def weighted(queries, keys, *, scale=None, hidden=None, axis=-1):
    """Attention weights with a scale, a mask or a softmax of one's own."""
    attention_weights(queries, keys)
    logits = queries @ np.swapaxes(keys, -1, -2) * (scale or keys.shape[-1] ** -0.5)
    if hidden is None:
        hidden = np.triu(np.ones(logits.shape[-2:], dtype=bool), k=1 + logits.shape[-1] - logits.shape[-2])
    return softmax(np.where(hidden, -np.inf, logits), axis=axis)


@mutant(WEIGHTS, killed_by="LK-3", misconception="the causal mask left out, as equation 3 is printed")
def as_printed(queries, keys):
    return weighted(queries, keys, hidden=np.zeros((1, 1), dtype=bool))


@mutant(WEIGHTS, killed_by="LK-3", misconception="the scale 1/sqrt(d_h) left out")
def no_scale(queries, keys):
    return weighted(queries, keys, scale=1.0)


@mutant(WEIGHTS, killed_by="LK-3", misconception="weights masked after the softmax and not normalised again")
def masked_after_the_softmax(queries, keys):
    whole = weighted(queries, keys, hidden=np.zeros((1, 1), dtype=bool))
    return np.tril(whole, keys.shape[-2] - queries.shape[-2])


@mutant(
    WEIGHTS,
    killed_by="LK-6",
    misconception="the mask aligned with the first cached token: the newest query sees the oldest key alone",
)
def mask_from_the_corner(queries, keys):
    return weighted(queries, keys, hidden=~np.tri(queries.shape[-2], keys.shape[-2], dtype=bool))


@mutant(WEIGHTS, killed_by="LK-6", misconception="the newest token not among the keys that it attends to")
def own_token_hidden(queries, keys):
    hidden = ~np.tri(queries.shape[-2], keys.shape[-2], keys.shape[-2] - queries.shape[-2] - 1, dtype=bool)
    hidden[:, 0] = False
    return weighted(queries, keys, hidden=hidden)


@mutant(WEIGHTS, killed_by="LK-6", misconception="more queries than tokens answered in silence")
def surplus_queries_answered(queries, keys):
    surplus = max(0, queries.shape[-2] - keys.shape[-2])
    weights = attention_weights(queries[..., surplus:, :], keys)
    return np.concatenate([np.repeat(weights[..., :1, :], surplus, axis=-2), weights], axis=-2)


@mutant(APPEND, killed_by="LK-5", misconception="new tokens put before the cached ones")
def new_tokens_first(cached, new):
    append(cached, new)
    return np.concatenate([new, cached], axis=-2)


@mutant(APPEND, killed_by="LK-5", misconception="new tokens written over the oldest ones (a ring buffer)")
def oldest_overwritten(cached, new):
    return append(cached, new)[..., min(cached.shape[-2], new.shape[-2]) :, :]


def stepped(stream, keys, values, settings, choose):
    """A step of LK-R in which `choose(joined)` gives the mask over the joined tokens and the new length of the static part."""
    step(stream, keys, values, **settings)  # refuses what is to be refused
    if stream is None:
        nothing = np.zeros((*keys.shape[:2], 0), dtype=int)
        stream = Stream(keys[:, :, :0], values[:, :, :0], nothing, settings["sink_size"], 0)
    arrived = np.broadcast_to(np.arange(stream.seen, stream.seen + keys.shape[2]), keys.shape[:3])
    joined = Stream(
        append(stream.keys, keys),
        append(stream.values, values),
        np.concatenate([stream.positions, arrived], axis=-1),
        stream.static_length,
        stream.seen + keys.shape[2],
    )
    kept, static_length = choose(joined)
    rows = [states[kept].reshape(*keys.shape[:2], -1, *states.shape[3:]) for states in joined[:3]]
    return Stream(rows[0], rows[1], rows[2], static_length, joined.seen)


def partitions_after(static_length, length, lag_size):
    return max(0, (length - static_length) // lag_size - 1)


@mutant(STEP, killed_by="LK-R", misconception="what an earlier step left compressed again with the new tokens")
def static_part_compressed_again(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    again = stream and stream._replace(static_length=min(sink_size, stream.static_length))
    return step(again, keys, values, **settings)


@mutant(STEP, killed_by="LK-R", misconception="only the first chunk compressed, later tokens appended whole")
def first_chunk_only(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    if stream is None:
        return step(None, keys, values, **settings)
    return stepped(stream, keys, values, settings, lambda joined: (np.ones(joined.keys.shape[:3], bool), stream.static_length))


@mutant(STEP, killed_by="LK-R", misconception="each chunk compressed by itself, its own remainder left whole for good")
def chunks_by_themselves(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    if stream is None:
        return step(None, keys, values, **settings)
    old = stream.keys.shape[2]

    def choose(joined):
        own = select(keys, values, keep_ratio=keep_ratio, sink_size=0, lag_size=lag_size)
        return np.concatenate([np.ones((*own.shape[:2], old), dtype=bool), own], axis=-1), old

    return stepped(stream, keys, values, settings, choose)


@mutant(STEP, killed_by="LK-R", misconception="positions counted from the length of the cache, not from the tokens seen")
def positions_from_the_buffer(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    if stream is not None:
        seen = stream.seen
        stream = stream._replace(seen=stream.keys.shape[2])
        return step(stream, keys, values, **settings)._replace(seen=seen + keys.shape[2])
    return step(None, keys, values, **settings)


@mutant(STEP, killed_by="LK-R", misconception="keys gathered, values cut off: row n of the two are different tokens")
def values_cut_off(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    after = step(stream, keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    joined = values if stream is None else append(stream.values, values)
    return after._replace(values=joined[:, :, : after.keys.shape[2]])


@mutant(STEP, killed_by="LK-R", misconception="the static part said to grow by L a partition instead of floor(rL)")
def static_part_grows_by_the_lag(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    after = step(stream, keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    before = sink_size if stream is None else stream.static_length
    length = keys.shape[2] + (0 if stream is None else stream.keys.shape[2])
    return after._replace(static_length=before + lag_size * partitions_after(before, length, lag_size))


@mutant(STEP, killed_by="LK-R", misconception="a partition compressed only when two whole ones stand behind it")
def one_partition_late(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}

    def choose(joined):
        kept, start = np.ones(joined.keys.shape[:3], dtype=bool), joined.static_length
        late = max(0, partitions_after(start, kept.shape[2], lag_size) - 1)
        end = start + (late + 1) * lag_size
        part = select(joined.keys[:, :, :end], joined.values[:, :, :end], keep_ratio=keep_ratio, sink_size=start, lag_size=lag_size)
        kept[:, :, :end] = part
        return kept, start + late * tokens_per_partition(keep_ratio, lag_size)

    return stepped(stream, keys, values, settings, choose)


STREAMS: list[Stream] = []


@mutant(STEP, killed_by="LK-R", misconception="the stream kept in a global: a second continuation starts from the end of the first")
def stream_in_a_global(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    last = STREAMS[-1] if stream is not None and STREAMS and STREAMS[-1].keys.shape[:2] == keys.shape[:2] else stream
    STREAMS[:] = [step(last, keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)]
    return STREAMS[-1]


@mutant(STEP, killed_by="LK-R", misconception="settings out of range moved into it in silence")
def step_settings_moved_into_range(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    settings = {"keep_ratio": min(1, max(0, keep_ratio)), "sink_size": max(0, sink_size), "lag_size": max(1, lag_size)}
    return step(stream, keys, values, **settings)


@mutant("lagkv.normalise", killed_by="LK-15", misconception="values normalised to [-1, 1]")
def signed_interval(states, next_states):
    return 2 * normalise(states, next_states) - 1


@mutant("lagkv.normalise", killed_by="LK-15", misconception="an epsilon of 1e-6 added to the range")
def epsilon_in_the_range(states, next_states):
    low = next_states.min(axis=-2, keepdims=True)
    return (states - low) / (np.ptp(next_states, axis=-2, keepdims=True) + 1e-6)


@mutant(LOCAL_SCORE, killed_by="LK-14", misconception="the keys measured from 0 instead of from their minimum")
def keys_from_zero(keys, values):
    local_score(keys, values)
    return variation_score(ranged(keys, 0, keys.max(axis=-2, keepdims=True))) + variation_score(normalise(values, values))


@mutant(LOCAL_SCORE, killed_by="LK-14", misconception="minimum and maximum taken over the channels of a token")
def range_of_a_token(keys, values):
    local_score(keys, values)

    def part(states):
        return variation_score(ranged(states, states.min(axis=-1, keepdims=True), states.max(axis=-1, keepdims=True)))

    return part(keys) + part(values)


@mutant(LOCAL_SCORE, killed_by="LK-15", misconception="the last token of the partition left out of its range (an off-by-one)")
def last_token_left_out(keys, values):
    inner = slice(max(1, keys.shape[-2] - 1))
    return score(keys, values, keys[..., inner, :], values[..., inner, :])


@mutant(LOCAL_SELECT, killed_by="LK-14", misconception="the last partition compressed too, as its own range is at hand")
def local_window_compressed(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, partitions, count = window(keys, values, keep_ratio, sink_size, lag_size)
    kept &= local_select(keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
    if partitions:
        own = slice(sink_size + partitions * lag_size, sink_size + (partitions + 1) * lag_size)
        kept[:, :, own] = top_k(local_score(keys[:, :, own], values[:, :, own]), count)
    return kept


@mutant(LOCAL_SELECT, killed_by="LK-14", misconception="the next partition's range: LocalKV is LagKV")
def lagged_selection(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    return select(keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)


@mutant(NORM_SELECT, killed_by="LK-16", misconception="the keys of largest norm kept")
def largest_norms(keys, values, *, layer, keep_ratio, sink_size=16, lag_size=1024, skipped_layers=2):
    settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    kept = norm_select(keys, values, layer=layer, skipped_layers=skipped_layers, **settings)
    _, partitions, count = window(keys, values, **settings)
    for start in range(sink_size, sink_size + partitions * lag_size if layer >= skipped_layers else 0, lag_size):
        own = slice(start, start + lag_size)
        kept[:, :, own] = top_k(np.linalg.norm(keys[:, :, own], axis=-1), count)
    return kept


@mutant(NORM_SELECT, killed_by="LK-16", misconception="the norms of the values instead of the keys")
def norms_of_values(keys, values, *, layer, keep_ratio, sink_size=16, lag_size=1024, skipped_layers=2):
    settings: dict[str, Any] = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    return norm_select(values, keys, layer=layer, skipped_layers=skipped_layers, **settings)


@mutant(NORM_SELECT, killed_by="LK-16", misconception="every layer compressed, the first two as well")
def no_layer_skipped(keys, values, *, layer, keep_ratio, sink_size=16, lag_size=1024, skipped_layers=2):
    settings: dict[str, Any] = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    return norm_select(keys, values, layer=layer, skipped_layers=0, **settings)


@mutant(NORM_SELECT, killed_by="LK-16", misconception="one layer too many skipped (layer <= skipped_layers)")
def one_layer_more_skipped(keys, values, *, layer, keep_ratio, sink_size=16, lag_size=1024, skipped_layers=2):
    settings: dict[str, Any] = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    return norm_select(keys, values, layer=layer, skipped_layers=skipped_layers + 1, **settings)


@mutant(NORM_SELECT, killed_by="LK-16", misconception="a negative layer taken for one of the first")
def negative_layer_skipped(keys, values, *, layer, keep_ratio, sink_size=16, lag_size=1024, skipped_layers=2):
    settings: dict[str, Any] = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    return norm_select(keys, values, layer=max(0, layer), skipped_layers=skipped_layers, **settings)
