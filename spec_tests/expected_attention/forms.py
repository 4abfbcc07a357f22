"""Expected Attention as different people write it, in parts."""

import math

import numpy as np

from evictionary.spec_tests.shared.forms import SOFTMAX, running_statistics


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
    return running_statistics(
        np.moveaxis(queries, -2, 0), lambda one, other: one[..., :, None] * other[..., None, :]
    )


def waves_of_a_table(head_dim, position, horizon, theta):
    """The averages of cosine and sine over the window, a number for each pair of channels."""
    angles = np.arange(position, position + horizon)[:, None] * theta ** (
        -2 * np.arange(head_dim // 2) / head_dim
    )
    return np.cos(angles).mean(axis=0), np.sin(angles).mean(axis=0)


def waves_position_by_position(head_dim, position, horizon, theta):
    cos, sin = np.zeros(head_dim // 2), np.zeros(head_dim // 2)
    for place in range(position, position + horizon):
        angle = place * theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
        cos, sin = cos + np.cos(angle), sin + np.sin(angle)
    return cos / horizon, sin / horizon


def waves_as_complex_numbers(head_dim, position, horizon=512, theta=10000.0):
    """Summed from the last position on."""
    places = np.arange(position + horizon - 1, position - 1, -1)
    turned = np.exp(1j * np.outer(places, 1 / theta ** (np.arange(0, head_dim, 2) / head_dim))).mean(axis=0)
    return turned.real, turned.imag


def waves_in_closed_form(head_dim, position, horizon=512, theta=10000.0):
    """The angle at the middle of the window, shrunk by sin(n w / 2) / (n sin(w / 2))."""
    rates = 1 / theta ** (np.arange(head_dim // 2) / (head_dim // 2))
    shrunk = np.sin(horizon * rates / 2) / (horizon * np.sin(rates / 2))
    middle = rates * (position + (horizon - 1) / 2)
    return shrunk * np.cos(middle), shrunk * np.sin(middle)


def waves_in_lists(head_dim, position, horizon, theta):
    def mean_of(wave, frequency):
        return math.fsum(wave(place * frequency) for place in range(position, position + horizon)) / horizon

    frequencies = [math.pow(theta, -2 * channel / head_dim) for channel in range(head_dim // 2)]
    return ([mean_of(wave, frequency) for frequency in frequencies] for wave in (math.cos, math.sin))


def rotation_as_a_block(head_dim, position, horizon, theta):
    cos, sin = map(np.diag, waves(head_dim, position, horizon, theta))
    return np.block([[cos, -sin], [sin, cos]])


def rotation_pair_by_pair(head_dim, position, horizon, theta):
    result, half = np.zeros((head_dim, head_dim)), head_dim // 2
    for channel, (cos, sin) in enumerate(zip(*waves(head_dim, position, horizon, theta), strict=True)):
        result[channel, channel] = result[channel + half, channel + half] = cos
        result[channel + half, channel], result[channel, channel + half] = sin, -sin
    return result


def rope_by_matmul(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    turn = rotation(query_mean.shape[-1], position, horizon, theta)
    return query_mean @ turn.T, turn @ query_covariance @ turn.T


def rope_by_einsum(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    turn = rotation(query_mean.shape[-1], position, horizon, theta)
    mean = np.einsum("ij,...j->...i", turn, query_mean)
    return mean, np.einsum("ij,...jk,lk->...il", turn, query_covariance, turn)


def rope_head_by_head(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
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


def norm_by_linalg(values):
    return np.linalg.norm(values, axis=-1)


def norm_by_einsum(values):
    return np.einsum("td,td->t", values, values) ** 0.5


def norm_by_hypot(values):
    return np.array([math.hypot(*row) for row in values.tolist()])


def score_in_loops(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    group, out = query_mean.shape[1] // keys.shape[1], np.empty(keys.shape[:3])
    for batch, head in np.ndindex(keys.shape[:2]):
        weights = np.zeros(keys.shape[2])
        for reader in range(head * group, (head + 1) * group):
            weights += softmax(
                logits(keys[batch, head], query_mean[batch, reader], query_covariance[batch, reader])
            )
        out[batch, head] = (weights / group + epsilon) * norm(values[batch, head])
    return out


def score_by_stacking(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    group = query_mean.shape[1] // keys.shape[1]

    def of(batch, query_head):
        return softmax(
            logits(
                keys[batch, query_head // group],
                query_mean[batch, query_head],
                query_covariance[batch, query_head],
            )
        )

    weights = np.array(
        [[of(batch, head) for head in range(query_mean.shape[1])] for batch in range(len(keys))]
    )
    weights = weights.reshape(*keys.shape[:2], group, -1).mean(axis=2)
    norms = np.array([[norm(head) for head in item] for item in values])
    return weights * norms + epsilon * norms


FORMS: dict = {
    "query_statistics": (
        statistics_by_matmul,
        statistics_by_einsum,
        statistics_by_outer_products,
        statistics_by_cov,
        statistics_running,
    ),
    "waves": (
        waves_of_a_table,
        waves_position_by_position,
        waves_as_complex_numbers,
        waves_in_closed_form,
        waves_in_lists,
    ),
    "rotation": (rotation_as_a_block, rotation_pair_by_pair),
    "average_rope": (rope_by_matmul, rope_by_einsum, rope_head_by_head),
    "logits": (
        logits_by_matmul,
        logits_by_einsum,
        logits_token_by_token,
        logits_with_one_matrix,
        logits_in_long_double,
    ),
    "softmax": SOFTMAX,
    "norm": (norm_by_linalg, norm_by_einsum, norm_by_hypot),
    "score": (score_in_loops, score_by_stacking),
}
query_statistics, waves, rotation, average_rope, logits, softmax, norm, score = (
    forms[0] for forms in FORMS.values()
)
