"""MomentKV as different people write it, in parts."""

import math
from typing import NamedTuple

import numpy as np

from evictionary.spec_tests.shared.forms import LOGITS, SOFTMAX


class Moments(NamedTuple):
    """Sums over the evicted tokens of each head."""

    count: np.ndarray  # type: ignore[assignment]  # a name of tuple's
    key_sum: np.ndarray
    value_sum: np.ndarray
    value_key_sum: np.ndarray


def update_by_matmul(moments, keys, values, evicted):
    keys, values = keys * evicted[..., None], values * evicted[..., None]
    return Moments(
        moments.count + evicted.sum(axis=-1),
        moments.key_sum + keys.sum(axis=-2),
        moments.value_sum + values.sum(axis=-2),
        moments.value_key_sum + np.swapaxes(values, -1, -2) @ keys,
    )


def update_by_einsum(moments, keys, values, evicted):
    gone = evicted.astype(float)
    return Moments(
        moments.count + np.count_nonzero(evicted, axis=-1),
        moments.key_sum + np.einsum("bht,bhtd->bhd", gone, keys),
        moments.value_sum + np.einsum("bht,bhtd->bhd", gone, values),
        moments.value_key_sum + np.einsum("bht,bhtv,bhtd->bhvd", gone, values, keys),
    )


def update_token_by_token(moments, keys, values, evicted):
    count, key_sum, value_sum, products = (np.array(field) for field in moments)
    for batch, head, token in np.argwhere(evicted):
        key, value = keys[batch, head, token], values[batch, head, token]
        count[batch, head] += 1
        key_sum[batch, head] += key
        value_sum[batch, head] += value
        products[batch, head] += np.outer(value, key)
    return Moments(count, key_sum, value_sum, products)


def update_head_by_head(moments, keys, values, evicted):
    result = Moments(*(np.array(field) for field in moments))
    for head in np.ndindex(keys.shape[:2]):
        own_keys, own_values = keys[head][evicted[head]], values[head][evicted[head]]
        for field, added in zip(
            result,
            (len(own_keys), own_keys.sum(axis=0), own_values.sum(axis=0), own_values.T @ own_keys),
            strict=True,
        ):
            field[head] += added
    return result


def update_by_recursion(moments, keys, values, evicted):
    if keys.shape[2] > 1:
        half = keys.shape[2] // 2
        first = update_by_recursion(moments, keys[:, :, :half], values[:, :, :half], evicted[:, :, :half])
        return update_by_recursion(first, keys[:, :, half:], values[:, :, half:], evicted[:, :, half:])
    return update_by_einsum(moments, keys, values, evicted)


def means_by_maximum(moments):
    count = np.maximum(moments.count, 1)
    key, value = moments.key_sum / count[..., None], moments.value_sum / count[..., None]
    return key, value, moments.value_key_sum - moments.value_sum[..., None] * key[..., None, :]


def means_by_divide(moments):
    count = np.asarray(moments.count, dtype=float)[..., None]
    key = np.divide(moments.key_sum, count, out=np.zeros_like(moments.key_sum), where=count > 0)
    value = np.divide(moments.value_sum, count, out=np.zeros_like(moments.value_sum), where=count > 0)
    return key, value, moments.value_key_sum - count[..., None] * np.einsum("bhv,bhd->bhvd", value, key)


def means_by_where(moments):
    count = np.where(moments.count > 0, moments.count, 1)[..., None]
    outer = moments.value_sum[..., :, None] @ moments.key_sum[..., None, :]
    return (
        moments.key_sum / count,
        moments.value_sum / count,
        moments.value_key_sum - outer / count[..., None],
    )


def score_in_loops(query, keys, values, moments):
    group, out = query.shape[1] // keys.shape[1], np.zeros(keys.shape[:3])
    _, mean_value, covariance = means(moments)
    for batch, head in np.ndindex(keys.shape[:2]):
        scale = max(1, moments.count[batch, head]) * math.sqrt(keys.shape[-1])
        rest = (
            values[batch, head]
            - mean_value[batch, head]
            - keys[batch, head] @ covariance[batch, head].T / scale
        )
        for reader in range(head * group, (head + 1) * group):
            out[batch, head] += softmax(logits(query[batch, reader], keys[batch, head])) / group
        out[batch, head] *= np.linalg.norm(rest, axis=-1)
    return out


def score_by_einsum(query, keys, values, moments):
    grouped = query.reshape(*keys.shape[:2], -1, keys.shape[-1])
    weights = softmax(np.einsum("bhgd,bhtd->bhgt", grouped, keys) / math.sqrt(keys.shape[-1])).mean(axis=2)
    _, mean_value, covariance = means(moments)
    scale = (np.maximum(moments.count, 1) * math.sqrt(keys.shape[-1]))[..., None, None]
    rest = values - mean_value[:, :, None] - np.einsum("bhvd,bhtd->bhtv", covariance / scale, keys)
    return weights * np.sqrt(np.einsum("bhtv,bhtv->bht", rest, rest))


def estimated(query, keys, values, moments, key, value, covariance, kept):
    """The logarithms and the outputs of the kept and the evicted part of one query head."""
    parts = []
    if kept.any():
        scores = logits(query, keys[kept])
        top = scores.max()
        parts.append((top + math.log(np.exp(scores - top).sum()), softmax(scores) @ values[kept]))
    if moments > 0:
        scale = math.sqrt(len(query))
        parts.append(
            (math.log(moments) + query @ key / scale, value + covariance @ query / (moments * scale))
        )
    return parts


def mixed_by_log_add_exp(parts, width):
    if not parts:
        return np.zeros(width)
    total = np.logaddexp.reduce([size for size, _ in parts])
    return sum(np.exp(size - total) * output for size, output in parts)


def mixed_by_maximum(parts, width):
    top = max((size for size, _ in parts), default=0.0)
    weights = [math.exp(size - top) for size, _ in parts]
    return sum(
        (weight * output for weight, (_, output) in zip(weights, parts, strict=True)), np.zeros(width)
    ) / (sum(weights) or 1)


def mixed_by_a_sigmoid(parts, width):
    if len(parts) < 2:
        return parts[0][1] if parts else np.zeros(width)
    (first, output), (second, other) = parts
    share = 1 / (1 + math.exp(min(700, second - first)))
    return share * output + (1 - share) * other


def attend_in_loops(query, keys, values, kept, moments):
    group, out = query.shape[1] // keys.shape[1], np.empty((*query.shape[:2], values.shape[-1]))
    key, value, covariance = means(moments)
    for batch, head in np.ndindex(query.shape[:2]):
        place = batch, head // group
        own = (
            keys[place],
            values[place],
            moments.count[place],
            key[place],
            value[place],
            covariance[place],
            kept[place],
        )
        out[batch, head] = mixed(estimated(query[batch, head], *own), values.shape[-1])
    return out


def attend_in_lists(query, keys, values, kept, moments):
    group, found = query.shape[1] // keys.shape[1], means(moments)

    def of(batch, head):
        place = (batch, head // group)
        statistics = (field[place] for field in found)
        parts = estimated(
            query[batch, head], keys[place], values[place], moments.count[place], *statistics, kept[place]
        )
        return mixed(parts, values.shape[-1])

    return np.stack(
        [np.stack([of(batch, head) for head in range(query.shape[1])]) for batch in range(len(query))]
    )


FORMS: dict = {
    "update": (
        update_by_matmul,
        update_by_einsum,
        update_token_by_token,
        update_head_by_head,
        update_by_recursion,
    ),
    "softmax": SOFTMAX,
    "means": (means_by_maximum, means_by_divide, means_by_where),
    "logits": LOGITS,
    "score": (score_in_loops, score_by_einsum),
    "mixed": (mixed_by_log_add_exp, mixed_by_maximum, mixed_by_a_sigmoid),
    "attend": (attend_in_loops, attend_in_lists),
}
update, softmax, means, logits, score, mixed, attend = (forms[0] for forms in FORMS.values())
