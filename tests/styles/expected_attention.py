"""Expected Attention as different people write it: RIGHT has the forms of each part, WRONG the mistakes in a part."""

import math

import numpy as np


def refuse_statistics(query_mean, query_covariance):
    if query_mean.shape[-1] % 2 or not np.isfinite(query_mean).all():
        raise ValueError("query_mean: wanted finite numbers and an even head_dim")
    if query_covariance.shape != (*query_mean.shape, query_mean.shape[-1]) or not np.isfinite(query_covariance).all():
        raise ValueError("query_covariance: wanted finite numbers of the shape of query_mean with D twice")


def refuse_window(position, horizon, theta):
    if position < 0 or int(position) != position:
        raise ValueError("position: wanted a whole number of at least 0")
    if horizon < 1 or int(horizon) != horizon:
        raise ValueError("horizon: wanted a whole number of at least 1")
    if not 0 < theta < math.inf:
        raise ValueError("theta: wanted a positive number")


def refuse(keys, values, query_mean, query_covariance, epsilon):
    for name, states, axes in (
        ("keys", keys, 4),
        ("values", values, 4),
        ("query_mean", query_mean, 3),
        ("query_covariance", query_covariance, 4),
    ):
        if np.ndim(states) != axes or 0 in np.shape(states) or not np.isfinite(states).all():
            raise ValueError(f"{name}: wanted {axes} axes, none of them empty, of finite numbers")
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError("values: wanted the tokens of keys")
    if query_mean.shape[1] % keys.shape[1] or (query_mean.shape[0], query_mean.shape[2]) != (keys.shape[0], keys.shape[3]):
        raise ValueError("query_mean: wanted the batch and channels of keys, and a multiple of its heads")
    if query_covariance.shape != (*query_mean.shape, keys.shape[3]):
        raise ValueError("query_covariance: wanted the shape of query_mean with D twice")
    if not 0 <= epsilon < math.inf:
        raise ValueError("epsilon: wanted a number of at least 0")


def statistics_by_matmul(queries):
    mean = queries.mean(axis=-2)
    centred = queries - mean[..., None, :]
    return mean, np.swapaxes(centred, -1, -2) @ centred / queries.shape[-2]


def statistics_by_einsum(queries):
    mean = np.einsum("...nd->...d", queries) / queries.shape[-2]
    centred = queries - np.expand_dims(mean, -2)
    return mean, np.einsum("...nd,...ne->...de", centred, centred) / queries.shape[-2]


def statistics_by_outer_products(queries):
    rows = np.moveaxis(queries, -2, 0)
    mean = sum(rows) / len(rows)
    return mean, sum((row - mean)[..., :, None] * (row - mean)[..., None, :] for row in rows) / len(rows)


def statistics_by_cov(queries):
    shape = queries.shape[:-2] + queries.shape[-1:]
    heads = queries.reshape(-1, *queries.shape[-2:])
    covariances = [np.cov(head, rowvar=False, bias=True).reshape(shape[-1], shape[-1]) for head in heads]
    return np.average(queries, axis=-2), np.stack(covariances).reshape(*shape, shape[-1])


def statistics_running(queries):
    mean = np.zeros(queries.shape[:-2] + queries.shape[-1:])
    products = np.zeros((*mean.shape, mean.shape[-1]))
    for count, row in enumerate(np.moveaxis(queries, -2, 0), 1):
        before = row - mean
        mean = mean + before / count
        products = products + before[..., :, None] * (row - mean)[..., None, :]
    return mean, products / queries.shape[-2]


def rotation_as_a_block(head_dim, position, horizon, theta):
    angles = np.arange(position, position + horizon)[:, None] * theta ** (-2 * np.arange(head_dim // 2) / head_dim)
    cos, sin = np.diag(np.cos(angles).mean(axis=0)), np.diag(np.sin(angles).mean(axis=0))
    return np.block([[cos, -sin], [sin, cos]])


def rotation_position_by_position(head_dim, position, horizon, theta):
    total, half = np.zeros((head_dim, head_dim)), head_dim // 2
    channel = np.arange(half)
    for place in range(position, position + horizon):
        angle = place * theta ** (-channel / half)
        total[channel, channel] += np.cos(angle)
        total[channel + half, channel + half] += np.cos(angle)
        total[channel, channel + half] -= np.sin(angle)
        total[channel + half, channel] += np.sin(angle)
    return total / horizon


def rotation_by_complex_numbers(head_dim, position, horizon, theta):
    half = head_dim // 2
    frequency = 1 / theta ** (np.arange(half) / half)
    turned = np.exp(1j * np.outer(position + np.arange(horizon), frequency)).mean(axis=0)
    result = np.zeros((head_dim, head_dim))
    for channel, number in enumerate(turned):
        result[channel, channel] = result[channel + half, channel + half] = number.real
        result[channel + half, channel], result[channel, channel + half] = number.imag, -number.imag
    return result


def rotation_in_lists(head_dim, position, horizon, theta):
    half = head_dim // 2
    result = [[0.0] * head_dim for _ in range(head_dim)]
    for channel in range(half):
        frequency = math.pow(theta, -2 * channel / head_dim)
        cos = math.fsum(math.cos(place * frequency) for place in range(position, position + horizon)) / horizon
        sin = math.fsum(math.sin(place * frequency) for place in range(position, position + horizon)) / horizon
        result[channel][channel] = result[channel + half][channel + half] = cos
        result[channel + half][channel], result[channel][channel + half] = sin, -sin
    return np.array(result)


def rope_by_matmul(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    refuse_window(position, horizon, theta)
    refuse_statistics(query_mean, query_covariance)
    turn = rotation(query_mean.shape[-1], position, horizon, theta)
    return query_mean @ turn.T, turn @ query_covariance @ turn.T


def rope_by_einsum(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    refuse_window(position, horizon, theta)
    refuse_statistics(query_mean, query_covariance)
    turn = rotation(query_mean.shape[-1], position, horizon, theta)
    mean = np.einsum("ij,...j->...i", turn, query_mean)
    return mean, np.einsum("ij,...jk,lk->...il", turn, query_covariance, turn)


def rope_head_by_head(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    refuse_window(position, horizon, theta)
    refuse_statistics(query_mean, query_covariance)
    turn = rotation(query_mean.shape[-1], position, horizon, theta)
    mean, covariance = np.empty_like(query_mean), np.empty_like(query_covariance)
    for head in np.ndindex(query_mean.shape[:-1]):
        mean[head] = turn.dot(query_mean[head])
        covariance[head] = np.linalg.multi_dot([turn, query_covariance[head], turn.T])
    return mean, covariance


def logits_by_matmul(keys, mean, covariance):
    linear = keys @ mean / math.sqrt(keys.shape[-1])
    return linear + ((keys @ covariance) * keys).sum(axis=-1) / (2 * keys.shape[-1])


def logits_by_einsum(keys, mean, covariance):
    scaled = keys / np.sqrt(keys.shape[-1])
    return np.einsum("td,d->t", scaled, mean) + 0.5 * np.einsum("ti,ij,tj->t", scaled, covariance, scaled)


def logits_token_by_token(keys, mean, covariance):
    size = len(mean)
    return np.array([key.dot(mean) / size**0.5 + key.dot(covariance).dot(key) / size / 2 for key in keys])


def logits_with_one_matrix(keys, mean, covariance):
    return (keys * (mean * len(mean) ** -0.5 + keys @ covariance / (2 * len(mean)))).sum(axis=-1)


def logits_in_long_double(keys, mean, covariance):
    keys = keys.astype(np.longdouble)
    linear = (keys * mean).sum(-1) / np.sqrt(np.longdouble(keys.shape[-1]))
    return (linear + (keys @ covariance * keys).sum(-1) / (2 * keys.shape[-1])).astype(np.float64)


def softmax_by_maximum(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def softmax_by_log_add_exp(logits):
    return np.exp(logits - np.logaddexp.reduce(logits))


def softmax_by_log_sum_exp(logits):
    return np.exp(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def softmax_by_differences(logits):
    with np.errstate(over="ignore"):
        return 1 / np.exp(logits - logits[:, None]).sum(axis=-1)


def softmax_in_lists(logits):
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return np.array([weight / math.fsum(weights) for weight in weights])


def softmax_online(logits):
    top, total = -math.inf, 0.0
    for x in logits:
        total = total * math.exp(top - max(top, x)) + math.exp(x - max(top, x))
        top = max(top, x)
    return np.exp(logits - top) / total


def norm_by_linalg(values):
    return np.linalg.norm(values, axis=-1)


def norm_by_einsum(values):
    return np.einsum("td,td->t", values, values) ** 0.5


def norm_by_hypot(values):
    return np.array([math.hypot(*row) for row in values.tolist()])


def score_in_loops(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    refuse(keys, values, query_mean, query_covariance, epsilon)
    group, out = query_mean.shape[1] // keys.shape[1], np.empty(keys.shape[:3])
    for batch, head in np.ndindex(keys.shape[:2]):
        weights = np.zeros(keys.shape[2])
        for reader in range(head * group, (head + 1) * group):
            weights += softmax(logits(keys[batch, head], query_mean[batch, reader], query_covariance[batch, reader]))
        out[batch, head] = (weights / group + epsilon) * norm(values[batch, head])
    return out


def score_by_stacking(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    refuse(keys, values, query_mean, query_covariance, epsilon)
    group = query_mean.shape[1] // keys.shape[1]

    def of(batch, query_head):
        return softmax(logits(keys[batch, query_head // group], query_mean[batch, query_head], query_covariance[batch, query_head]))

    weights = np.array([[of(batch, head) for head in range(query_mean.shape[1])] for batch in range(len(keys))])
    weights = weights.reshape(*keys.shape[:2], group, -1).mean(axis=2)
    norms = np.array([[norm(head) for head in item] for item in values])
    return weights * norms + epsilon * norms


RIGHT = {
    "query_statistics": (
        statistics_by_matmul,
        statistics_by_einsum,
        statistics_by_outer_products,
        statistics_by_cov,
        statistics_running,
    ),
    "rotation": (rotation_as_a_block, rotation_position_by_position, rotation_by_complex_numbers, rotation_in_lists),
    "average_rope": (rope_by_matmul, rope_by_einsum, rope_head_by_head),
    "logits": (
        logits_by_matmul,
        logits_by_einsum,
        logits_token_by_token,
        logits_with_one_matrix,
        logits_in_long_double,
    ),
    "softmax": (
        softmax_by_maximum,
        softmax_by_log_add_exp,
        softmax_by_log_sum_exp,
        softmax_by_differences,
        softmax_in_lists,
        softmax_online,
    ),
    "norm": (norm_by_linalg, norm_by_einsum, norm_by_hypot),
    "score": (score_in_loops, score_by_stacking),
}


def covariance_of_the_first_half(queries):
    half = queries[..., : (queries.shape[-2] + 1) // 2, :]
    return queries.mean(axis=-2), statistics_by_matmul(half)[1]


def correlation_for_covariance(queries):
    mean, covariance = statistics_by_matmul(queries)
    spread = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    product = spread[..., :, None] * spread[..., None, :]
    return mean, np.divide(covariance, product, out=np.zeros_like(covariance), where=product > 0)


def covariance_and_a_ridge(queries):
    mean, covariance = statistics_by_matmul(queries)
    return mean, covariance + 1e-6 * np.eye(mean.shape[-1])


def frequencies_without_the_two(head_dim, position, horizon, theta):
    angles = np.arange(position, position + horizon)[:, None] * theta ** (-np.arange(head_dim // 2) / head_dim)
    cos, sin = np.diag(np.cos(angles).mean(axis=0)), np.diag(np.sin(angles).mean(axis=0))
    return np.block([[cos, -sin], [sin, cos]])


def every_second_position(head_dim, position, horizon, theta):
    return (
        rotation_as_a_block(head_dim, position, 1, theta)
        if horizon == 1
        else sum(rotation_as_a_block(head_dim, place, 1, theta) for place in range(position, position + horizon, 2))
        / len(range(position, position + horizon, 2))
    )


def rotated_mean_alone(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    return rope_by_matmul(query_mean, query_covariance, position=position, horizon=horizon, theta=theta)[0], query_covariance


def covariance_turned_once(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    mean, _ = rope_by_matmul(query_mean, query_covariance, position=position, horizon=horizon, theta=theta)
    return mean, rotation(query_mean.shape[-1], position, horizon, theta) @ query_covariance


def logits_of_unit_keys(keys, mean, covariance):
    return logits_by_matmul(keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-300), mean, covariance)


def logits_in_float32(keys, mean, covariance):
    return logits_by_matmul(keys.astype(np.float32), mean.astype(np.float32), covariance.astype(np.float32)).astype(np.float64)


def softmax_and_1e_9(logits):
    weights = np.exp(logits - logits.max())
    return weights / (weights.sum() + 1e-9)


def softmax_cut_at_80(logits):
    return softmax_by_maximum(np.clip(logits, -80, 80))


def sum_of_absolute_values(values):
    return np.abs(values).sum(axis=-1)


def squared_norm(values):
    return (values**2).sum(axis=-1)


WRONG = {
    "query_statistics": (covariance_of_the_first_half, correlation_for_covariance, covariance_and_a_ridge),
    "rotation": (frequencies_without_the_two, every_second_position),
    "average_rope": (rotated_mean_alone, covariance_turned_once),
    "logits": (logits_of_unit_keys, logits_in_float32),
    "softmax": (softmax_and_1e_9, softmax_cut_at_80),
    "norm": (sum_of_absolute_values, squared_norm),
}
query_statistics, rotation, average_rope, logits, softmax, norm, score = (forms[0] for forms in RIGHT.values())
