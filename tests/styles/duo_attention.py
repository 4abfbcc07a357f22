"""DuoAttention as different people write it: each function of RIGHT is one form of a part, each of WRONG a mistake in a part."""

import math

import numpy as np


def turned_by_halves(vectors, places, theta):
    half = vectors.shape[-1] // 2
    angles = places[:, None] * theta ** (-np.arange(half) / half)
    first, second = vectors[..., :half], vectors[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )


def turned_as_complex_numbers(vectors, places, theta):
    half = vectors.shape[-1] // 2
    points = vectors[..., :half] + 1j * vectors[..., half:]
    points = points * np.exp(1j * places[:, None] * theta ** (-2 * np.arange(half) / vectors.shape[-1]))
    return np.concatenate([points.real, points.imag], axis=-1)


def turned_by_matrices(vectors, places, theta):
    dim = vectors.shape[-1]
    out = np.zeros(np.broadcast_shapes(vectors.shape, (len(places), dim)))
    for channel in range(dim // 2):
        pair = [channel, channel + dim // 2]
        angles = places * float(theta) ** (-2 * channel / dim)
        matrices = np.array([[np.cos(angles), -np.sin(angles)], [np.sin(angles), np.cos(angles)]])
        out[..., pair] = np.einsum("ijt,...tj->...ti", matrices, np.broadcast_to(vectors, out.shape)[..., pair])
    return out


def turned_with_rotate_half(vectors, places, theta):
    frequencies = 1.0 / theta ** (np.arange(0, vectors.shape[-1], 2) / vectors.shape[-1])
    angles = np.tile(places[:, None] * frequencies, 2)
    swapped = np.concatenate([-vectors[..., vectors.shape[-1] // 2 :], vectors[..., : vectors.shape[-1] // 2]], axis=-1)
    return vectors * np.cos(angles) + swapped * np.sin(angles)


def weights_of(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def attention_at_the_places(query, key, length, theta):
    places = np.arange(length)
    keys, last = turned(key[..., None, :], places, theta), turned(query[..., None, :], places[-1:], theta)
    return weights_of((last @ np.swapaxes(keys, -1, -2))[..., 0, :] / math.sqrt(key.shape[-1]))


def attention_by_distances(query, key, length, theta):
    back = turned(query[..., None, :], np.arange(length)[::-1], theta)
    return weights_of(np.einsum("...td,...d->...t", back, key) * key.shape[-1] ** -0.5)


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


def refuse(keys, gates, sink_size, recent_size):
    if np.shape(gates) != keys.shape[:2]:
        raise ValueError(f"gates: got shape {np.shape(gates)}, wanted {keys.shape[:2]}")
    for name, size in (("sink_size", sink_size), ("recent_size", recent_size)):
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{name}: got {size}, wanted a whole number of at least 0")
    if sink_size + recent_size == 0:
        raise ValueError("recent_size: got 0 with no sinks, wanted at least 1")


def select_by_masks(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    refuse(keys, gates, sink_size, recent_size)
    places = np.arange(keys.shape[2])
    return (gates >= threshold)[..., None] | (places < sink_size) | (places >= keys.shape[2] - recent_size)


def select_head_by_head(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    refuse(keys, gates, sink_size, recent_size)
    kept = np.zeros(keys.shape[:3], dtype=bool)
    for head in np.ndindex(gates.shape):
        if gates[head] >= threshold:
            kept[head] = True
        else:
            kept[head][:sink_size] = True
            kept[head][max(0, keys.shape[2] - recent_size) :] = True
    return kept


def select_what_is_forgotten(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    refuse(keys, gates, sink_size, recent_size)
    from_the_end = np.arange(keys.shape[2])[::-1]
    middle = (from_the_end[::-1] >= sink_size) & (from_the_end >= recent_size)
    return ~np.logical_and.outer(gates < threshold, middle)


RIGHT = {
    "turned": (turned_by_halves, turned_as_complex_numbers, turned_by_matrices, turned_with_rotate_half),
    "attention": (attention_at_the_places, attention_by_distances),
    "area": (area_of_the_curve, area_by_the_mean_place, area_token_by_token),
    "estimate_gates": (gates_of_repeated_keys, gates_head_by_head),
    "select": (select_by_masks, select_head_by_head, select_what_is_forgotten),
}


def turned_the_other_way_round(vectors, places, theta):
    return turned_by_halves(vectors, -places, theta) if len(places) > 1 else turned_by_halves(vectors, places, theta)


def neighbouring_channels_turned(vectors, places, theta):
    half = vectors.shape[-1] // 2
    order = np.arange(2 * half).reshape(half, 2).T.ravel()
    return turned_by_halves(vectors[..., order], places, theta)


def angles_without_the_two(vectors, places, theta):
    return turned_by_halves(vectors, places, theta**0.5)


def attention_without_the_scale(query, key, length, theta):
    return attention_at_the_places(query * key.shape[-1] ** 0.5, key, length, theta)


def attention_in_float32(query, key, length, theta):
    return attention_at_the_places(query, key, length, theta).astype(np.float32).astype(np.float64)


def area_by_the_trapezoid(weights):
    reached = np.cumsum(weights, axis=-1)
    return (reached - weights / 2).mean(axis=-1)


def area_before_the_token(weights):
    return (np.cumsum(weights, axis=-1) - weights).mean(axis=-1)


def share_of_the_first_half(weights):
    return weights[..., : (weights.shape[-1] + 1) // 2].sum(axis=-1)


def select_a_short_prompt_by_its_gate(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    kept = select_by_masks(keys, gates, threshold=threshold, sink_size=sink_size, recent_size=recent_size)
    return kept if keys.shape[2] > 2 else (gates >= threshold)[..., None] & kept


def select_without_the_newest(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    kept = select_by_masks(keys, gates, threshold=threshold, sink_size=sink_size, recent_size=recent_size)
    kept[..., -1] &= gates >= threshold
    return kept


WRONG = {
    "turned": (turned_the_other_way_round, neighbouring_channels_turned, angles_without_the_two),
    "attention": (attention_without_the_scale, attention_in_float32),
    "area": (area_by_the_trapezoid, area_before_the_token, share_of_the_first_half),
    "select": (select_a_short_prompt_by_its_gate, select_without_the_newest),
}
turned, attention, area, estimate_gates, select = (forms[0] for forms in RIGHT.values())
