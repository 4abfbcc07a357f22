"""DuoAttention as different people write it, in parts."""

import math

import numpy as np

from evictionary.spec_tests.shared.forms import SOFTMAX, TURNED


def attention_at_the_places(query, key, length, theta):
    places = np.arange(length)
    keys, last = turned(key[..., None, :], places, theta), turned(query[..., None, :], places[-1:], theta)
    return softmax((last @ np.swapaxes(keys, -1, -2))[..., 0, :] / math.sqrt(key.shape[-1]))


def attention_by_distances(query, key, length, theta):
    back = turned(query[..., None, :], np.arange(length)[::-1], theta)
    return softmax(np.einsum("...td,...d->...t", back, key) * key.shape[-1] ** -0.5)


def area_of_the_curve(weights):
    return np.cumsum(weights, axis=-1).mean(axis=-1)


def area_by_the_mean_place(weights):
    return 1 - weights @ np.arange(weights.shape[-1]) / weights.shape[-1]


def area_token_by_token(weights):
    total, reached = np.zeros(weights.shape[:-1]), np.zeros(weights.shape[:-1])
    for place in range(weights.shape[-1]):
        reached = reached + weights[..., place]
        total = total + reached
    return total / weights.shape[-1]


def gates_of_repeated_keys(query_mean, key_mean, *, length=500, theta=10000.0):
    group = query_mean.shape[1] // key_mean.shape[1]
    each = area(attention(query_mean, np.repeat(key_mean, group, axis=1), length, theta))
    return each.reshape(*key_mean.shape[:2], group).mean(axis=-1)


def gates_head_by_head(query_mean, key_mean, *, length=500, theta=10000.0):
    out, group = np.zeros(key_mean.shape[:2]), query_mean.shape[1] // key_mean.shape[1]
    for item, reader in np.ndindex(query_mean.shape[:2]):
        weights = attention(query_mean[item, reader], key_mean[item, reader // group], length, theta)
        out[item, reader // group] += area(weights)
    return out / group


def select_by_masks(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    places = np.arange(keys.shape[2])
    return (gates >= threshold)[..., None] | (places < sink_size) | (places >= keys.shape[2] - recent_size)


def select_head_by_head(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    kept = np.zeros(keys.shape[:3], dtype=bool)
    for head in np.ndindex(gates.shape):
        if gates[head] >= threshold:
            kept[head] = True
        else:
            kept[head][:sink_size] = True
            kept[head][max(0, keys.shape[2] - recent_size) :] = True
    return kept


def select_what_is_forgotten(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    from_the_end = np.arange(keys.shape[2])[::-1]
    middle = (from_the_end[::-1] >= sink_size) & (from_the_end >= recent_size)
    return ~np.logical_and.outer(gates < threshold, middle)


FORMS: dict = {
    "softmax": SOFTMAX,
    "turned": TURNED,
    "attention": (attention_at_the_places, attention_by_distances),
    "area": (area_of_the_curve, area_by_the_mean_place, area_token_by_token),
    "estimate_gates": (gates_of_repeated_keys, gates_head_by_head),
    "select": (select_by_masks, select_head_by_head, select_what_is_forgotten),
}
softmax, turned, attention, area, estimate_gates, select = (forms[0] for forms in FORMS.values())
