"""LagKV as different people write it, in parts."""

import math
from decimal import Decimal
from fractions import Fraction
from functools import reduce

import numpy as np

from evictionary.spec_tests.shared.forms import SOFTMAX, TOP, running_statistics


def normalise_by_where(states, following):
    low, high = following.min(axis=-2, keepdims=True), following.max(axis=-2, keepdims=True)
    return np.where(high > low, (states - low) / np.where(high > low, high - low, 1), 0)


def normalise_by_divide(states, following):
    spread = np.ptp(following, axis=-2, keepdims=True)
    shifted = states - following.min(axis=-2, keepdims=True)
    return np.divide(
        shifted, spread, out=np.zeros_like(shifted), where=np.broadcast_to(spread, shifted.shape) != 0
    )


def normalise_in_place(states, following):
    work = np.array(states)
    work -= np.minimum.reduce(following, axis=-2)[..., None, :]
    spread = (np.maximum.reduce(following, axis=-2) - np.minimum.reduce(following, axis=-2))[..., None, :]
    work /= np.where(spread == 0, np.inf, spread)
    return work


def normalise_channel_by_channel(states, following):
    columns = []
    for channel in range(states.shape[-1]):
        column, after = states[..., channel], following[..., channel]
        low, high = after.min(axis=-1, keepdims=True), after.max(axis=-1, keepdims=True)
        columns.append((high != low) * (column - low) / (high - low + (high == low)))
    return np.stack(columns, axis=-1)


def normalise_in_long_double(states, following):
    return normalise_by_where(states.astype(np.longdouble), following.astype(np.longdouble)).astype(
        np.float64
    )


def normalise_by_sorting(states, following):
    ordered = np.sort(following, axis=-2)
    low, spread = ordered[..., :1, :], ordered[..., -1:, :] - ordered[..., :1, :]
    return (states - low) * (spread > 0) / np.where(spread > 0, spread, 1)


def normalise_by_reciprocal(states, following):
    low, spread = following.min(axis=-2, keepdims=True), np.ptp(following, axis=-2, keepdims=True)
    return (states - low) * np.divide(1, spread, out=np.zeros_like(spread), where=spread > 0)


def normalise_token_by_token(states, following):
    tokens = np.moveaxis(following, -2, 0)
    return normalise_by_where(
        states, np.stack([reduce(np.minimum, tokens), reduce(np.maximum, tokens)], axis=-2)
    )


def deviation_by_std(scaled):
    return scaled.std(axis=-1, ddof=1) if scaled.shape[-1] > 1 else np.zeros(scaled.shape[:-1])


def deviation_by_var(scaled):
    return np.sqrt(np.var(scaled, axis=-1, ddof=min(1, scaled.shape[-1] - 1)))


def deviation_by_hand(scaled):
    centred = scaled - scaled.mean(axis=-1, keepdims=True)
    return np.sqrt(np.einsum("...d,...d->...", centred, centred) / max(1, scaled.shape[-1] - 1))


def deviation_by_norm(scaled):
    centred = scaled - np.add.reduce(scaled, axis=-1, keepdims=True) / scaled.shape[-1]
    return np.linalg.norm(centred, axis=-1) / np.sqrt(max(1, scaled.shape[-1] - 1))


def deviation_in_lists(scaled):
    def of(row):
        mean = math.fsum(row) / len(row)
        return math.sqrt(math.fsum((x - mean) ** 2 for x in row) / max(1, len(row) - 1))

    return np.array([of(row) for row in scaled.reshape(-1, scaled.shape[-1]).tolist()]).reshape(
        scaled.shape[:-1]
    )


def deviation_running(scaled):
    channels = scaled.shape[-1]
    return np.sqrt(running_statistics(np.moveaxis(scaled, -1, 0))[1] * channels / max(1, channels - 1))


def deviation_of_pairs(scaled):
    """The variance as half the mean squared difference of all pairs of channels."""
    pairs = scaled[..., :, None] - scaled[..., None, :]
    return np.sqrt((pairs * pairs).sum(axis=(-2, -1)) / (2 * scaled.shape[-1] * max(1, scaled.shape[-1] - 1)))


def score_as_a_sum(keys, values, next_keys, next_values):
    return softmax(deviation(normalise(keys, next_keys))) + softmax(deviation(normalise(values, next_values)))


def score_in_a_loop(keys, values, next_keys, next_values):
    total = np.zeros(keys.shape[:-1])
    for states, following in ((keys, next_keys), (values, next_values)):
        total += softmax(deviation(normalise(states, following)))
    return total


def score_head_by_head(keys, values, next_keys, next_values):
    out = np.empty(keys.shape[:-1])
    for head in np.ndindex(keys.shape[:-2]):
        out[head] = softmax(deviation(normalise(keys[head], next_keys[head])))
        out[head] += softmax(deviation(normalise(values[head], next_values[head])))
    return out


def floor_of_fraction(keep_ratio, lag_size):
    return math.floor(Fraction(str(keep_ratio)) * lag_size)


def floor_of_decimal(keep_ratio, lag_size):
    if isinstance(keep_ratio, Fraction):
        return keep_ratio * lag_size // 1
    return int(Decimal(repr(float(keep_ratio))) * lag_size)


def floor_by_counting(keep_ratio, lag_size):
    exact = Fraction(str(keep_ratio))
    return max(count for count in range(lag_size + 1) if count <= exact * lag_size)


def floor_in_float_with_a_guard(keep_ratio, lag_size):
    return math.floor(round(float(keep_ratio) * lag_size, 9))


def length_by_formula(length, *, keep_ratio, sink_size=16, lag_size=1024):
    if length < sink_size + 2 * lag_size:
        return length
    rest = length - sink_size
    return sink_size + share(keep_ratio, lag_size) * (rest // lag_size - 1) + lag_size + rest % lag_size


def length_by_recursion(length, *, keep_ratio, sink_size=16, lag_size=1024):
    settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    if length < sink_size + 2 * lag_size:
        return length
    whole = (length - sink_size - 2 * lag_size) // lag_size
    return length_by_formula(length - whole * lag_size, **settings) + whole * share(keep_ratio, lag_size)


def length_by_counting(length, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, start = min(length, sink_size), sink_size
    while length - start >= 2 * lag_size:
        kept, start = kept + share(keep_ratio, lag_size), start + lag_size
    return kept + max(0, length - start)


def length_by_what_is_removed(length, *, keep_ratio, sink_size=16, lag_size=1024):
    compressed = max(0, (length - sink_size) // lag_size - 1)
    return length - compressed * (lag_size - share(keep_ratio, lag_size))


def select_partition_by_partition(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept = np.ones(keys.shape[:3], dtype=bool)
    for start in range(sink_size, keys.shape[2] - 2 * lag_size + 1, lag_size):
        own, after = slice(start, start + lag_size), slice(start + lag_size, start + 2 * lag_size)
        scores = score(keys[:, :, own], values[:, :, own], keys[:, :, after], values[:, :, after])
        kept[:, :, own] = top(scores, share(keep_ratio, lag_size))
    return kept


def select_in_loops(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept = np.ones(keys.shape[:3], dtype=bool)
    for batch, head in np.ndindex(keys.shape[:2]):
        start, own_keys, own_values = sink_size, keys[batch, head], values[batch, head]
        while len(own_keys) - start >= 2 * lag_size:
            middle, end = start + lag_size, start + 2 * lag_size
            scores = score(
                own_keys[start:middle], own_values[start:middle], own_keys[middle:end], own_values[middle:end]
            )
            kept[batch, head, start:middle] = top(scores, share(keep_ratio, lag_size))
            start = middle
    return kept


def select_all_partitions_at_once(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    kept, count = np.ones(keys.shape[:3], dtype=bool), (keys.shape[2] - sink_size) // lag_size
    if count >= 2:
        end = sink_size + count * lag_size
        parts = [
            states[:, :, sink_size:end].reshape(*states.shape[:2], count, lag_size, -1)
            for states in (keys, values)
        ]
        scores = score(*(part[:, :, :-1] for part in parts), *(part[:, :, 1:] for part in parts))
        kept[:, :, sink_size : end - lag_size] = top(scores, share(keep_ratio, lag_size)).reshape(
            *keys.shape[:2], -1
        )
    return kept


FORMS: dict = {
    "normalise": (
        normalise_by_where,
        normalise_by_divide,
        normalise_in_place,
        normalise_channel_by_channel,
        normalise_in_long_double,
        normalise_by_sorting,
        normalise_by_reciprocal,
        normalise_token_by_token,
    ),
    "deviation": (
        deviation_by_std,
        deviation_by_var,
        deviation_by_hand,
        deviation_by_norm,
        deviation_in_lists,
        deviation_running,
        deviation_of_pairs,
    ),
    "softmax": SOFTMAX,
    "top": TOP,
    "share": (floor_of_fraction, floor_of_decimal, floor_by_counting, floor_in_float_with_a_guard),
    "score": (score_as_a_sum, score_in_a_loop, score_head_by_head),
    "retained_length": (
        length_by_formula,
        length_by_recursion,
        length_by_counting,
        length_by_what_is_removed,
    ),
    "select": (select_partition_by_partition, select_in_loops, select_all_partitions_at_once),
}
normalise, deviation, softmax, top, share, score, retained_length, select = (
    forms[0] for forms in FORMS.values()
)
