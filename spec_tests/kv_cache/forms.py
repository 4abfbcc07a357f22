"""A KV cache as different people write it, in parts."""

import math
from typing import NamedTuple

import numpy as np

from evictionary.spec_tests.shared.forms import TURNED, softmax_by_log_add_exp, softmax_by_maximum


class KVCache(NamedTuple):
    """What a layer remembers of the tokens that it has read."""

    keys: np.ndarray
    values: np.ndarray
    seen: int


def softmax_in_place(logits):
    np.subtract(logits, logits.max(axis=-1)[..., None], out=logits)
    np.exp(logits, out=logits)
    logits /= np.einsum("...t->...", logits)[..., None]
    return logits


def seen_by_comparing(num_queries, length, window, sinks):
    token, own = np.arange(length), np.arange(length)[length - num_queries :, None]
    seen = token <= own
    if window is not None:
        seen &= (own - token < window) | (token < sinks)
    return seen


def seen_by_triangles(num_queries, length, window, sinks):
    square = np.tri(length, dtype=bool)
    if window is not None:
        square &= ~np.tri(length, k=-window, dtype=bool) | (np.arange(length) < sinks)
    return square[length - num_queries :]


def seen_row_by_row(num_queries, length, window, sinks):
    rows = np.zeros((num_queries, length), dtype=bool)
    for row in range(num_queries):
        end = length - num_queries + row + 1
        rows[row, 0 if window is None else max(0, end - window) : end] = True
        rows[row, : min(sinks, end)] = True
    return rows


def weights_masked(queries, keys, *, window=None, sinks=0):
    logits = queries @ np.swapaxes(keys, -1, -2) / math.sqrt(keys.shape[-1])
    return softmax(np.where(seen(logits.shape[-2], logits.shape[-1], window, sinks), logits, -np.inf))


def weights_with_a_bias(queries, keys, *, window=None, sinks=0):
    hidden = ~seen(queries.shape[-2], keys.shape[-2], window, sinks)
    bias = np.zeros(hidden.shape)
    bias[hidden] = -np.inf
    return softmax(np.einsum("...md,...td->...mt", queries * keys.shape[-1] ** -0.5, keys) + bias)


def weights_query_by_query(queries, keys, *, window=None, sinks=0):
    mask = seen(queries.shape[-2], keys.shape[-2], window, sinks)
    found = np.zeros((*queries.shape[:-1], keys.shape[-2]))
    for place in np.ndindex(queries.shape[:-1]):
        own = keys[place[:-1]][mask[place[-1]]]
        found[place][mask[place[-1]]] = softmax(own @ queries[place] / np.sqrt(keys.shape[-1]))
    return found


def attend_with_repeated_heads(queries, keys, values, *, window=None, sinks=0):
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat(group, axis=1) for each in (keys, values))
    return weights(queries, keys, window=window, sinks=sinks) @ values


def attend_head_by_head(queries, keys, values, *, window=None, sinks=0):
    group, heads = queries.shape[1] // keys.shape[1], []
    for head in range(queries.shape[1]):
        attention = weights(queries[:, head], keys[:, head // group], window=window, sinks=sinks)
        heads.append(np.einsum("bmt,btv->bmv", attention, values[:, head // group]))
    return np.stack(heads, axis=1)


def attend_by_groups(queries, keys, values, *, window=None, sinks=0):
    rows = queries.reshape(*keys.shape[:2], -1, *queries.shape[2:])
    own = np.broadcast_to(keys[:, :, None], (*rows.shape[:3], *keys.shape[2:]))
    out = np.einsum("bhgmt,bhtv->bhgmv", weights(rows, own, window=window, sinks=sinks), values)
    return out.reshape(*queries.shape[:3], values.shape[-1])


def kept_by_the_mask(keys, values, count, window, sinks):
    mask = seen(1, keys.shape[2], window, sinks)[0]
    return KVCache(keys[:, :, mask], values[:, :, mask], count)


def kept_in_two_slices(keys, values, count, window, sinks):
    length = keys.shape[2]
    if window is None or length <= sinks + window:
        return KVCache(keys.copy(), values.copy(), count)
    both = (np.concatenate([x[:, :, :sinks], x[:, :, length - window :]], axis=2) for x in (keys, values))
    return KVCache(*both, count)


def prefill_at_once(queries, keys, values, *, window=None, sinks=0):
    length = keys.shape[2]
    queries, keys = (rotate(each, np.arange(length)) for each in (queries, keys))
    out = attend(queries, keys, values, window=window, sinks=sinks)
    return out, kept(keys, values, length, window, sinks)


def prefill_token_by_token(queries, keys, values, *, window=None, sinks=0):
    first = np.zeros(1, dtype=int)
    cache = KVCache(rotate(keys[:, :, :1], first), values[:, :, :1].copy(), 1)
    outputs = [values[:, :, 0].repeat(queries.shape[1] // keys.shape[1], axis=1)]
    for token in range(1, keys.shape[2]):
        new = (each[:, :, token] for each in (queries, keys, values))
        output, cache = decode(*new, cache, window=window, sinks=sinks)
        outputs.append(output)
    return np.stack(outputs, axis=2), cache


def decode_by_appending(query, key, value, cache, *, window=None, sinks=0):
    place = np.array([cache.seen])
    keys = np.concatenate([cache.keys, rotate(key[:, :, None], place)], axis=2)
    values = np.concatenate([cache.values, value[:, :, None]], axis=2)
    cache = kept(keys, values, cache.seen + 1, window, sinks)
    return attend(rotate(query[:, :, None], place), cache.keys, cache.values)[:, :, 0], cache


def decode_into_a_buffer(query, key, value, cache, *, window=None, sinks=0):
    old_keys, old_values, position = cache
    batch, heads, length, _ = old_keys.shape
    keys = np.empty((batch, heads, length + 1, old_keys.shape[-1]))
    values = np.empty((batch, heads, length + 1, old_values.shape[-1]))
    keys[:, :, :length], values[:, :, :length] = old_keys, old_values
    values[:, :, length] = value
    turned = rotate(np.concatenate([query, key], axis=1)[:, :, None], np.array([position]))
    keys[:, :, length] = turned[:, -heads:, 0]
    new = kept(keys, values, position + 1, window, sinks)
    return attend(turned[:, :-heads], new.keys, new.values)[:, :, 0], new


def bytes_by_the_formula(
    length,
    *,
    num_layers,
    num_query_heads,
    num_kv_heads,
    head_dim,
    bytes_per_number=2,
    window=None,
    sinks=0,
):
    tokens = length if window is None or length < sinks + window else sinks + window
    return 2 * num_layers * num_kv_heads * head_dim * tokens * bytes_per_number


def bytes_layer_by_layer(length, *, num_layers, num_kv_heads, head_dim, bytes_per_number=2, **others):
    held = [place for place in range(length) if _is_held(place, length, **others)]
    return sum(2 * bytes_per_number * num_kv_heads * head_dim * len(held) for _ in range(num_layers))


def _is_held(place, length, num_query_heads, window=None, sinks=0):
    return window is None or place < sinks or place >= length - window


FORMS: dict = {
    "softmax": (softmax_by_maximum, softmax_by_log_add_exp, softmax_in_place),
    "seen": (seen_by_comparing, seen_by_triangles, seen_row_by_row),
    "weights": (weights_masked, weights_with_a_bias, weights_query_by_query),
    "attend": (attend_with_repeated_heads, attend_head_by_head, attend_by_groups),
    "rotate": TURNED,
    "kept": (kept_by_the_mask, kept_in_two_slices),
    "prefill": (prefill_at_once, prefill_token_by_token),
    "decode": (decode_by_appending, decode_into_a_buffer),
    "cache_bytes": (bytes_by_the_formula, bytes_layer_by_layer),
}
softmax, seen, weights, attend, rotate, kept, prefill, decode, cache_bytes = (
    forms[0] for forms in FORMS.values()
)
