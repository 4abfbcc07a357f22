"""MomentKV as different people write it: each function of RIGHT is one form of a part, each of WRONG a mistake in a part."""

import math
from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Sums over the evicted tokens of each head."""

    count: np.ndarray
    key_sum: np.ndarray
    value_sum: np.ndarray
    value_key_sum: np.ndarray


def refuse(keys, values, moments, query=None, mask=None, name="kept"):
    if keys.ndim != 4 or 0 in keys.shape or not np.isfinite(keys).all():
        raise ValueError("keys: wanted finite numbers in [B, H_kv, T, D]")
    if values.ndim != 4 or values.shape[:3] != keys.shape[:3] or 0 in values.shape or not np.isfinite(values).all():
        raise ValueError("values: wanted finite numbers, with the batch, heads and tokens of keys")
    heads, dim, value_dim = keys.shape[:2], keys.shape[3], values.shape[3]
    shapes = (heads, (*heads, dim), (*heads, value_dim), (*heads, value_dim, dim))
    for field, array, shape in zip(moments._fields, moments, shapes, strict=True):
        if np.shape(array) != shape or not np.isfinite(array).all():
            raise ValueError(f"moments.{field}: wanted finite numbers of shape {shape}")
    count = np.asarray(moments.count)
    if (count < 0).any() or (count != np.round(count)).any():
        raise ValueError("moments.count: wanted whole numbers of at least 0")
    if query is not None:
        if query.ndim != 3 or (query.shape[0], query.shape[2]) != (heads[0], dim) or not np.isfinite(query).all():
            raise ValueError("query: wanted finite numbers, with the batch and channels of keys")
        if query.shape[1] % heads[1]:
            raise ValueError("query: wanted a multiple of the KV heads (queries)")
    if mask is not None and (mask.dtype != bool or mask.shape != keys.shape[:3]):
        raise ValueError(f"{name}: wanted a boolean mask of the shape of the tokens")


def update_by_matmul(moments, keys, values, evicted):
    refuse(keys, values, moments, mask=evicted, name="evicted")
    keys, values = keys * evicted[..., None], values * evicted[..., None]
    return Moments(
        moments.count + evicted.sum(axis=-1),
        moments.key_sum + keys.sum(axis=-2),
        moments.value_sum + values.sum(axis=-2),
        moments.value_key_sum + np.swapaxes(values, -1, -2) @ keys,
    )


def update_by_einsum(moments, keys, values, evicted):
    refuse(keys, values, moments, mask=evicted, name="evicted")
    gone = evicted.astype(float)
    return Moments(
        moments.count + np.count_nonzero(evicted, axis=-1),
        moments.key_sum + np.einsum("bht,bhtd->bhd", gone, keys),
        moments.value_sum + np.einsum("bht,bhtd->bhd", gone, values),
        moments.value_key_sum + np.einsum("bht,bhtv,bhtd->bhvd", gone, values, keys),
    )


def update_token_by_token(moments, keys, values, evicted):
    refuse(keys, values, moments, mask=evicted, name="evicted")
    count, key_sum, value_sum, products = (np.array(field) for field in moments)
    for batch, head, token in np.argwhere(evicted):
        key, value = keys[batch, head, token], values[batch, head, token]
        count[batch, head] += 1
        key_sum[batch, head] += key
        value_sum[batch, head] += value
        products[batch, head] += np.outer(value, key)
    return Moments(count, key_sum, value_sum, products)


def update_head_by_head(moments, keys, values, evicted):
    refuse(keys, values, moments, mask=evicted, name="evicted")
    result = Moments(*(np.array(field) for field in moments))
    for head in np.ndindex(keys.shape[:2]):
        own_keys, own_values = keys[head][evicted[head]], values[head][evicted[head]]
        for field, added in zip(
            result, (len(own_keys), own_keys.sum(axis=0), own_values.sum(axis=0), own_values.T @ own_keys), strict=True
        ):
            field[head] += added
    return result


def update_by_recursion(moments, keys, values, evicted):
    refuse(keys, values, moments, mask=evicted, name="evicted")
    if keys.shape[2] > 1:
        half = keys.shape[2] // 2
        first = update_by_recursion(moments, keys[:, :, :half], values[:, :, :half], evicted[:, :, :half])
        return update_by_recursion(first, keys[:, :, half:], values[:, :, half:], evicted[:, :, half:])
    return update_by_einsum(moments, keys, values, evicted)


def softmax_by_maximum(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_by_log_add_exp(logits):
    return np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))


def softmax_by_differences(logits):
    with np.errstate(over="ignore"):
        return 1 / np.exp(logits[..., None, :] - logits[..., :, None]).sum(axis=-1)


def softmax_in_long_double(logits):
    return softmax_by_maximum(logits.astype(np.longdouble)).astype(np.float64)


def softmax_in_lists(logits):
    def of(row):
        weights = [math.exp(x - max(row)) for x in row]
        return [weight / math.fsum(weights) for weight in weights]

    return np.array([of(row) for row in logits.reshape(-1, logits.shape[-1]).tolist()]).reshape(logits.shape)


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
    return moments.key_sum / count, moments.value_sum / count, moments.value_key_sum - outer / count[..., None]


def logits_by_matmul(query, keys):
    return keys @ query / math.sqrt(len(query))


def logits_by_einsum(query, keys):
    return np.einsum("td,d->t", keys, query * len(query) ** -0.5)


def logits_by_sum(query, keys):
    return (keys * query).sum(axis=-1) / np.sqrt(query.size)


def score_in_loops(query, keys, values, moments):
    refuse(keys, values, moments, query)
    group, out = query.shape[1] // keys.shape[1], np.zeros(keys.shape[:3])
    _, mean_value, covariance = means(moments)
    for batch, head in np.ndindex(keys.shape[:2]):
        scale = max(1, moments.count[batch, head]) * math.sqrt(keys.shape[-1])
        rest = values[batch, head] - mean_value[batch, head] - keys[batch, head] @ covariance[batch, head].T / scale
        for reader in range(head * group, (head + 1) * group):
            out[batch, head] += softmax(logits(query[batch, reader], keys[batch, head])) / group
        out[batch, head] *= np.linalg.norm(rest, axis=-1)
    return out


def score_by_einsum(query, keys, values, moments):
    refuse(keys, values, moments, query)
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
        parts.append((math.log(moments) + query @ key / scale, value + covariance @ query / (moments * scale)))
    return parts


def mixed_by_log_add_exp(parts, width):
    if not parts:
        return np.zeros(width)
    total = np.logaddexp.reduce([size for size, _ in parts])
    return sum(np.exp(size - total) * output for size, output in parts)


def mixed_by_maximum(parts, width):
    top = max((size for size, _ in parts), default=0.0)
    weights = [math.exp(size - top) for size, _ in parts]
    return sum((weight * output for weight, (_, output) in zip(weights, parts, strict=True)), np.zeros(width)) / (sum(weights) or 1)


def mixed_by_a_sigmoid(parts, width):
    if len(parts) < 2:
        return parts[0][1] if parts else np.zeros(width)
    (first, output), (second, other) = parts
    share = 1 / (1 + math.exp(min(700, second - first)))
    return share * output + (1 - share) * other


def attend_in_loops(query, keys, values, kept, moments):
    refuse(keys, values, moments, query, kept)
    group, out = query.shape[1] // keys.shape[1], np.empty((*query.shape[:2], values.shape[-1]))
    key, value, covariance = means(moments)
    for batch, head in np.ndindex(query.shape[:2]):
        place = batch, head // group
        own = (keys[place], values[place], moments.count[place], key[place], value[place], covariance[place], kept[place])
        out[batch, head] = mixed(estimated(query[batch, head], *own), values.shape[-1])
    return out


def attend_in_lists(query, keys, values, kept, moments):
    refuse(keys, values, moments, query, kept)
    group, found = query.shape[1] // keys.shape[1], means(moments)

    def of(batch, head):
        place = (batch, head // group)
        statistics = (field[place] for field in found)
        parts = estimated(query[batch, head], keys[place], values[place], moments.count[place], *statistics, kept[place])
        return mixed(parts, values.shape[-1])

    return np.stack([np.stack([of(batch, head) for head in range(query.shape[1])]) for batch in range(len(query))])


RIGHT = {
    "update": (update_by_matmul, update_by_einsum, update_token_by_token, update_head_by_head, update_by_recursion),
    "softmax": (softmax_by_maximum, softmax_by_log_add_exp, softmax_by_differences, softmax_in_long_double, softmax_in_lists),
    "means": (means_by_maximum, means_by_divide, means_by_where),
    "logits": (logits_by_matmul, logits_by_einsum, logits_by_sum),
    "score": (score_in_loops, score_by_einsum),
    "mixed": (mixed_by_log_add_exp, mixed_by_maximum, mixed_by_a_sigmoid),
    "attend": (attend_in_loops, attend_in_lists),
}


def sums_of_the_newest_alone(moments, keys, values, evicted):
    return update_by_matmul(Moments(*(0 * np.asarray(field) for field in moments)), keys, values, evicted)


def sums_in_float32(moments, keys, values, evicted):
    result = update_by_matmul(moments, keys, values, evicted)
    return Moments(result.count, *(field.astype(np.float32).astype(np.float64) for field in result[1:]))


def products_of_keys_and_values_transposed(moments, keys, values, evicted):
    result = update_by_matmul(moments, keys, values, evicted)
    square = keys.shape[-1] == values.shape[-1]
    return result._replace(value_key_sum=np.swapaxes(result.value_key_sum, -1, -2)) if square else result


def counted_one_too_many(moments, keys, values, evicted):
    result = update_by_matmul(moments, keys, values, evicted)
    return result._replace(count=result.count + evicted.any(axis=-1))


def softmax_and_1e_9(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / (weights.sum(axis=-1, keepdims=True) + 1e-9)


def softmax_in_float32(logits):
    return softmax_by_maximum(logits.astype(np.float32)).astype(np.float64)


def counts_and_one(moments):
    count = moments.count[..., None] + 1
    key, value = moments.key_sum / count, moments.value_sum / count
    return key, value, moments.value_key_sum - moments.value_sum[..., None] * key[..., None, :]


def a_covariance_cut_to_its_diagonal(moments):
    key, value, covariance = means_by_maximum(moments)
    return key, value, covariance * np.eye(*covariance.shape[-2:])


def logits_of_unit_queries(query, keys):
    return logits_by_matmul(query / max(np.linalg.norm(query), 1e-300), keys)


def residuals_squared(query, keys, values, moments):
    return score_in_loops(query, keys, values, moments) ** 2


def attention_alone(query, keys, values, moments):
    return score_in_loops(query, keys, np.ones_like(values), Moments(*(0 * np.asarray(field) for field in moments)))


def mixed_half_and_half(parts, width):
    return sum((output for _, output in parts), np.zeros(width)) / max(1, len(parts))


def the_larger_part_alone(parts, width):
    return max(parts, key=lambda part: part[0])[1] if parts else np.zeros(width)


WRONG = {
    "update": (
        sums_of_the_newest_alone,
        sums_in_float32,
        products_of_keys_and_values_transposed,
        counted_one_too_many,
    ),
    "softmax": (softmax_and_1e_9, softmax_in_float32),
    "means": (counts_and_one, a_covariance_cut_to_its_diagonal),
    "logits": (logits_of_unit_queries,),
    "score": (residuals_squared, attention_alone),
    "mixed": (mixed_half_and_half, the_larger_part_alone),
}
update, softmax, means, logits, score, mixed, attend = (forms[0] for forms in RIGHT.values())
