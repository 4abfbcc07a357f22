"""LagKV as different people write it: each function of RIGHT is one form of a part, each of WRONG a mistake in a part."""

import math
from decimal import Decimal
from fractions import Fraction
from functools import reduce

import numpy as np


def refuse(keys, values, next_keys, next_values):
    for name, states, like in (("values", values, keys), ("next_values", next_values, next_keys)):
        if states.shape[:-1] != like.shape[:-1]:
            raise ValueError(f"{name}: wanted the tokens of the keys")
    for name, states, like in (("next_keys", next_keys, keys), ("next_values", next_values, values)):
        if (*states.shape[:-2], states.shape[-1]) != (*like.shape[:-2], like.shape[-1]):
            raise ValueError(f"{name}: wanted the heads and channels of the partition before it")


def refuse_settings(keep_ratio, sink_size, lag_size, length=0):
    if not 0 <= keep_ratio <= 1:
        raise ValueError("keep_ratio: wanted a number in [0, 1]")
    for name, number, least in (("sink_size", sink_size, 0), ("lag_size", lag_size, 1), ("length", length, 0)):
        if int(number) != number or number < least:
            raise ValueError(f"{name}: wanted a whole number of at least {least}")


def normalise_by_where(states, following):
    low, high = following.min(axis=-2, keepdims=True), following.max(axis=-2, keepdims=True)
    return np.where(high > low, (states - low) / np.where(high > low, high - low, 1), 0)


def normalise_by_divide(states, following):
    spread = np.ptp(following, axis=-2, keepdims=True)
    shifted = states - following.min(axis=-2, keepdims=True)
    return np.divide(shifted, spread, out=np.zeros_like(shifted), where=np.broadcast_to(spread, shifted.shape) != 0)


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
    return normalise_by_where(states.astype(np.longdouble), following.astype(np.longdouble)).astype(np.float64)


def normalise_by_sorting(states, following):
    ordered = np.sort(following, axis=-2)
    low, spread = ordered[..., :1, :], ordered[..., -1:, :] - ordered[..., :1, :]
    return (states - low) * (spread > 0) / np.where(spread > 0, spread, 1)


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

    return np.array([of(row) for row in scaled.reshape(-1, scaled.shape[-1]).tolist()]).reshape(scaled.shape[:-1])


def deviation_running(scaled):
    mean, squares = np.zeros(scaled.shape[:-1]), np.zeros(scaled.shape[:-1])
    for count, x in enumerate(np.moveaxis(scaled, -1, 0), 1):
        before = x - mean
        mean = mean + before / count
        squares = squares + before * (x - mean)
    return np.sqrt(squares / max(1, scaled.shape[-1] - 1))


def softmax_by_maximum(deviation):
    weights = np.exp(deviation - deviation.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_by_log_add_exp(deviation):
    return np.exp(deviation - np.logaddexp.reduce(deviation, axis=-1)[..., None])


def softmax_by_log_sum_exp(deviation):
    top = deviation.max(axis=-1, keepdims=True)
    return np.exp(deviation - top - np.log(np.exp(deviation - top).sum(axis=-1, keepdims=True)))


def softmax_by_differences(deviation):
    with np.errstate(over="ignore"):
        return 1 / np.exp(deviation[..., None, :] - deviation[..., :, None]).sum(axis=-1)


def softmax_by_reduce(deviation):
    total = reduce(np.logaddexp, np.moveaxis(deviation, -1, 0))
    return np.exp(deviation - total[..., None])


def softmax_online(deviation):
    top, total = np.full(deviation.shape[:-1], -np.inf), np.zeros(deviation.shape[:-1])
    for x in np.moveaxis(deviation, -1, 0):
        higher = np.maximum(top, x)
        total = total * np.exp(top - higher) + np.exp(x - higher)
        top = higher
    return np.exp(deviation - top[..., None]) / total[..., None]


def softmax_in_powers_of_two(deviation):
    powers = np.exp2((deviation - deviation.max(axis=-1, keepdims=True)) / math.log(2))
    return powers / np.einsum("...t->...", powers)[..., None]


def score_as_a_sum(keys, values, next_keys, next_values):
    refuse(keys, values, next_keys, next_values)
    return softmax(deviation(normalise(keys, next_keys))) + softmax(deviation(normalise(values, next_values)))


def score_in_a_loop(keys, values, next_keys, next_values):
    refuse(keys, values, next_keys, next_values)
    total = np.zeros(keys.shape[:-1])
    for states, following in ((keys, next_keys), (values, next_values)):
        total += softmax(deviation(normalise(states, following)))
    return total


def score_head_by_head(keys, values, next_keys, next_values):
    refuse(keys, values, next_keys, next_values)
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


def length_by_formula(length, *, keep_ratio, sink_size=16, lag_size=1024):
    refuse_settings(keep_ratio, sink_size, lag_size, length)
    if length < sink_size + 2 * lag_size:
        return length
    rest = length - sink_size
    return sink_size + share(keep_ratio, lag_size) * (rest // lag_size - 1) + lag_size + rest % lag_size


def length_by_recursion(length, *, keep_ratio, sink_size=16, lag_size=1024):
    refuse_settings(keep_ratio, sink_size, lag_size, length)
    settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag_size}
    if length < sink_size + 2 * lag_size:
        return length
    whole = (length - sink_size - 2 * lag_size) // lag_size
    return length_by_formula(length - whole * lag_size, **settings) + whole * share(keep_ratio, lag_size)


def length_by_counting(length, *, keep_ratio, sink_size=16, lag_size=1024):
    refuse_settings(keep_ratio, sink_size, lag_size, length)
    kept, start = min(length, sink_size), sink_size
    while length - start >= 2 * lag_size:
        kept, start = kept + share(keep_ratio, lag_size), start + lag_size
    return kept + max(0, length - start)


def select_by_argsort(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    refuse_settings(keep_ratio, sink_size, lag_size)
    kept = np.ones(keys.shape[:3], dtype=bool)
    start, length = sink_size, keys.shape[2]
    while length - start >= 2 * lag_size:
        own, after = slice(start, start + lag_size), slice(start + lag_size, start + 2 * lag_size)
        scores = score(keys[:, :, own], values[:, :, own], keys[:, :, after], values[:, :, after])
        order = np.argsort(-scores, axis=-1, kind="stable")
        np.put_along_axis(kept[:, :, own], order[..., share(keep_ratio, lag_size) :], False, axis=-1)
        start += lag_size
    return kept


def select_in_loops(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    refuse_settings(keep_ratio, sink_size, lag_size)
    kept = np.ones(keys.shape[:3], dtype=bool)
    for batch, head in np.ndindex(keys.shape[:2]):
        own_keys, own_values = keys[batch, head], values[batch, head]
        for start in range(sink_size, keys.shape[2] - 2 * lag_size + 1, lag_size):
            middle, end = start + lag_size, start + 2 * lag_size
            scores = score(own_keys[start:middle], own_values[start:middle], own_keys[middle:end], own_values[middle:end])
            order = sorted(range(lag_size), key=lambda token, scores=scores: (-scores[token], token))
            kept[batch, head, [start + token for token in order[share(keep_ratio, lag_size) :]]] = False
    return kept


def select_all_partitions_at_once(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    refuse_settings(keep_ratio, sink_size, lag_size)
    kept, count = np.ones(keys.shape[:3], dtype=bool), (keys.shape[2] - sink_size) // lag_size
    if count < 2:
        return kept
    end = sink_size + count * lag_size
    parts = [states[:, :, sink_size:end].reshape(*states.shape[:2], count, lag_size, -1) for states in (keys, values)]
    scores = score(*(part[:, :, :-1] for part in parts), *(part[:, :, 1:] for part in parts))
    places = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    kept[:, :, sink_size : end - lag_size] = (places < share(keep_ratio, lag_size)).reshape(*keys.shape[:2], -1)
    return kept


RIGHT = {
    "normalise": (
        normalise_by_where,
        normalise_by_divide,
        normalise_in_place,
        normalise_channel_by_channel,
        normalise_in_long_double,
        normalise_by_sorting,
    ),
    "deviation": (
        deviation_by_std,
        deviation_by_var,
        deviation_by_hand,
        deviation_by_norm,
        deviation_in_lists,
        deviation_running,
    ),
    "softmax": (
        softmax_by_maximum,
        softmax_by_log_add_exp,
        softmax_by_log_sum_exp,
        softmax_by_differences,
        softmax_by_reduce,
        softmax_online,
        softmax_in_powers_of_two,
    ),
    "share": (floor_of_fraction, floor_of_decimal, floor_by_counting),
    "score": (score_as_a_sum, score_in_a_loop, score_head_by_head),
    "retained_length": (length_by_formula, length_by_recursion, length_by_counting),
    "select": (select_by_argsort, select_in_loops, select_all_partitions_at_once),
}


def a_range_that_ignores_the_sign(states, following):
    return normalise_by_where(np.abs(states), np.abs(following))


def percentiles_for_the_range(states, following):
    low, high = (np.percentile(following, share, axis=-2, keepdims=True) for share in (10, 90))
    return np.where(high > low, (states - low) / np.where(high > low, high - low, 1), 0)


def range_and_1e_12(states, following):
    low, high = following.min(axis=-2, keepdims=True), following.max(axis=-2, keepdims=True)
    return (states - low) / (high - low + 1e-12)


def a_range_of_the_first_half(states, following):
    return normalise_by_where(states, following[..., : (following.shape[-2] + 1) // 2, :])


def constant_channels_give_one(states, following):
    low, high = following.min(axis=-2, keepdims=True), following.max(axis=-2, keepdims=True)
    return np.where(high > low, (states - low) / np.where(high > low, high - low, 1), 1)


def mean_absolute_deviation(scaled):
    return np.abs(scaled - scaled.mean(axis=-1, keepdims=True)).mean(axis=-1)


def spread_of_the_channels(scaled):
    return np.ptp(scaled, axis=-1)


def softmax_without_the_maximum(deviation):
    weights = np.exp(deviation)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_of_half(deviation):
    return softmax_by_maximum(deviation / 2)


def softmax_in_float32(deviation):
    return softmax_by_maximum(deviation.astype(np.float32)).astype(np.float64)


def twice_the_keys(keys, values, next_keys, next_values):
    refuse(keys, values, next_keys, next_values)
    return softmax(deviation(normalise(keys, next_keys))) * 2


def rounded_to_the_nearest(keep_ratio, lag_size):
    return round(float(keep_ratio) * lag_size)


def a_window_of_two_partitions(length, *, keep_ratio, sink_size=16, lag_size=1024):
    return min(
        length,
        length_by_formula(max(0, length - lag_size), keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size) + lag_size,
    )


WRONG = {
    "normalise": (
        a_range_that_ignores_the_sign,
        percentiles_for_the_range,
        range_and_1e_12,
        a_range_of_the_first_half,
        constant_channels_give_one,
    ),
    "deviation": (mean_absolute_deviation, spread_of_the_channels),
    "softmax": (softmax_without_the_maximum, softmax_of_half, softmax_in_float32),
    "score": (twice_the_keys,),
    "share": (rounded_to_the_nearest,),
    "retained_length": (a_window_of_two_partitions,),
}
normalise, deviation, softmax, share, score, retained_length, select = (forms[0] for forms in RIGHT.values())
