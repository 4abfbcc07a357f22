"""Wrong Expected Attentions."""

from __future__ import annotations

import numpy as np

from evictionary.reference.attention import attention_logits, softmax
from evictionary.reference.expected_attention import (
    average_rope,
    average_rotation,
    contribution,
    decode_step,
    expected_weights,
    log_expected_scores,
    norm,
    query_statistics,
    score,
    start_decoding,
)
from evictionary.reference.expected_attention_theory import (
    centre,
    correlation,
    project,
    residual_updates,
    skewness_and_kurtosis,
    update_norms,
)
from evictionary.reference.rope import frequencies, rotate
from evictionary.reference.selection import budget, top_k
from evictionary.spec_tests.harness.planted import mutant

STEM = "expected_attention"
SCORE, ROPE, STEP, LISTING = (f"{STEM}.{name}" for name in ("score", "average_rope", "decode_step", "listing_1"))


def mean_over_group(weights):
    return weights.mean(axis=2)


def scored(inputs, epsilon, *, logits=log_expected_scores, weigh=softmax, reduce=mean_over_group, length=norm):
    """The score with one part replaced: logits and weights are [B, H_kv, G, T], what `reduce` returns is [B, H_kv, T]."""
    score(*inputs, epsilon=epsilon)  # refuses what the reference refuses
    keys, values, *statistics = inputs
    mean, covariance = (entry.reshape(*keys.shape[:2], -1, *entry.shape[2:]) for entry in statistics)
    return (reduce(weigh(logits(keys[:, :, None], mean, covariance))) + epsilon) * length(values)


def parts(keys, mean, covariance):
    """mu.k and k^T Sigma k, neither of them scaled."""
    return (keys @ mean[..., None])[..., 0], ((keys @ covariance) * keys).sum(axis=-1)


@mutant(SCORE, killed_by="EA-7", misconception="the variance not halved: k^T Sigma k / d")
def variance_not_halved(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, 2 * query_covariance), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="the variance left out: the attention of the mean query")
def variance_left_out(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, 0 * query_covariance), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="the variance subtracted, as if it made a token less certain")
def variance_subtracted(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, -query_covariance), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="the mean's logit divided by d instead of sqrt(d)")
def mean_scaled_by_dimension(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean / np.sqrt(keys.shape[-1]), query_covariance), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="the mean's logit not divided by sqrt(d)")
def mean_not_scaled(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean * np.sqrt(keys.shape[-1]), query_covariance), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="the variance divided by sqrt(d) instead of d, like the mean's logit")
def variance_scaled_like_the_mean(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance * np.sqrt(keys.shape[-1])), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="the covariance cut to its diagonal: the variance of each channel alone")
def diagonal_covariance(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance * np.eye(keys.shape[-1])), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="only the upper triangle of the covariance summed, each pair of channels once")
def upper_triangle(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, np.triu(query_covariance)), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="the second moment in place of the covariance: the mean not subtracted")
def second_moment(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance + query_mean[..., None] * query_mean[..., None, :]), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="the covariance taken for its own square root: |Sigma k|^2 / (2 d)")
def covariance_taken_for_its_root(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance @ query_covariance), epsilon)


@mutant(SCORE, killed_by="EA-7", misconception="mean plus standard deviation of the logit, an upper confidence bound")
def standard_deviation_added(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    def logits(keys, mean, covariance):
        linear, quadratic = parts(keys, mean, covariance)
        return (linear + np.sqrt(np.maximum(quadratic, 0))) / np.sqrt(keys.shape[-1])

    return scored((keys, values, query_mean, query_covariance), epsilon, logits=logits)


@mutant(SCORE, killed_by="EA-7", misconception="logits rounded to float16 before the softmax")
def logits_in_half_precision(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    def logits(keys, mean, covariance):
        with np.errstate(over="ignore"):
            return np.float64(np.float16(np.clip(log_expected_scores(keys, mean, covariance), -6e4, 6e4)))

    return scored((keys, values, query_mean, query_covariance), epsilon, logits=logits)


@mutant(SCORE, killed_by="EA-8", misconception="the softmax taken over the KV heads instead of the tokens")
def softmax_over_heads(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance), epsilon, weigh=lambda logits: softmax(logits, axis=1))


@mutant(SCORE, killed_by="EA-8", misconception="the softmax taken over the query heads of the group instead of the tokens")
def softmax_over_the_group(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance), epsilon, weigh=lambda logits: softmax(logits, axis=2))


@mutant(SCORE, killed_by="EA-8", misconception="one softmax over all heads and tokens of a batch item")
def softmax_over_the_layer(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    def weigh(logits):
        return softmax(logits.reshape(logits.shape[0], -1)).reshape(logits.shape)

    return scored((keys, values, query_mean, query_covariance), epsilon, weigh=weigh)


@mutant(SCORE, killed_by="EA-8", misconception="zhat not normalised over the tokens")
def not_normalised(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    with np.errstate(over="ignore", invalid="ignore"):
        return scored((keys, values, query_mean, query_covariance), epsilon, weigh=np.exp)


@mutant(SCORE, killed_by="EA-8", misconception="exponentials taken without subtracting the maximum")
def overflowing_softmax(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    def weigh(logits):
        return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)

    with np.errstate(all="ignore"):
        return scored((keys, values, query_mean, query_covariance), epsilon, weigh=weigh)


@mutant(
    SCORE,
    killed_by="EA-8",
    misconception="an unmasked tail tile: padding up to a multiple of 16 counted in the normaliser with logit 0",
)
def tail_tile_not_masked(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    def weigh(logits):
        length = logits.shape[-1]
        return softmax(np.pad(logits, [(0, 0)] * 3 + [(0, -length % 16)]))[..., :length]

    return scored((keys, values, query_mean, query_covariance), epsilon, weigh=weigh)


@mutant(SCORE, killed_by="EA-8", misconception="a tiled softmax whose running sum is not rescaled when the maximum rises")
def running_sum_not_rescaled(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    def weigh(logits):
        highest = np.maximum.accumulate(logits, axis=-1)  # a tile of one token
        total = np.exp(logits - highest).sum(axis=-1, keepdims=True)
        return np.exp(logits - highest[..., -1:]) / total

    return scored((keys, values, query_mean, query_covariance), epsilon, weigh=weigh)


@mutant(SCORE, killed_by="EA-8", misconception="weights rounded to bfloat16")
def weights_in_bfloat16(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    def weigh(logits):
        return np.float64((softmax(logits).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32))

    return scored((keys, values, query_mean, query_covariance), epsilon, weigh=weigh)


@mutant(SCORE, killed_by="EA-9", misconception="epsilon added to the product, not to the weight")
def epsilon_outside_the_product(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return score(keys, values, query_mean, query_covariance, epsilon=epsilon) + epsilon * (1 - norm(values))


@mutant(
    SCORE, killed_by="EA-9", misconception="the logits of the group averaged before the softmax instead of the weights after it"
)
def group_reduced_before_the_softmax(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    inputs = keys, values, query_mean, query_covariance
    return scored(inputs, epsilon, weigh=mean_over_group, reduce=softmax)


@mutant(SCORE, killed_by="EA-9", misconception="one Gaussian for the group: means and covariances averaged over its query heads")
def statistics_averaged_over_the_group(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    def logits(keys, mean, covariance):
        return log_expected_scores(keys, mean.mean(axis=2, keepdims=True), covariance.mean(axis=2, keepdims=True))

    return scored((keys, values, query_mean, query_covariance), epsilon, logits=logits)


@mutant(SCORE, killed_by="EA-9", misconception="the largest weight of the group instead of the mean")
def maximum_over_the_group(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance), epsilon, reduce=lambda weights: weights.max(axis=2))


@mutant(SCORE, killed_by="EA-9", misconception="the weights of the group summed: the more query heads, the less epsilon counts")
def sum_over_the_group(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance), epsilon, reduce=lambda weights: weights.sum(axis=2))


@mutant(SCORE, killed_by="EA-9", misconception="the first query head of a group speaking for all")
def first_query_head_of_the_group(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance), epsilon, reduce=lambda weights: weights[:, :, 0])


@mutant(SCORE, killed_by="EA-9", misconception="query head h reads KV head h % H_kv instead of h // G")
def interleaved_heads(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    score(keys, values, query_mean, query_covariance, epsilon=epsilon)
    order = np.arange(query_mean.shape[1]).reshape(-1, keys.shape[1]).T.ravel()
    return scored((keys, values, query_mean[:, order], query_covariance[:, order]), epsilon)


@mutant(SCORE, killed_by="EA-9", misconception="the statistics of batch item 0 used for the whole batch")
def statistics_of_the_first_batch_item(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    score(keys, values, query_mean, query_covariance, epsilon=epsilon)
    repeated = (np.repeat(entry[:1], keys.shape[0], axis=0) for entry in (query_mean, query_covariance))
    return scored((keys, values, *repeated), epsilon)


@mutant(SCORE, killed_by="EA-9", misconception="the covariance of query head 0 used for all heads")
def covariance_of_the_first_head(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    score(keys, values, query_mean, query_covariance, epsilon=epsilon)
    return scored((keys, values, query_mean, np.repeat(query_covariance[:, :1], query_mean.shape[1], axis=1)), epsilon)


@mutant(SCORE, killed_by="EA-9", misconception="epsilon 0 unless given, as in the authors' library")
def epsilon_zero_by_default(keys, values, query_mean, query_covariance, *, epsilon=0.0):
    return score(keys, values, query_mean, query_covariance, epsilon=epsilon)


@mutant(SCORE, killed_by="EA-9", misconception="a negative epsilon taken for 0 in silence")
def negative_epsilon_accepted(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return score(keys, values, query_mean, query_covariance, epsilon=max(epsilon, 0.0))


@mutant(SCORE, killed_by="EA-9", misconception="query heads beyond a multiple of the KV heads left out in silence")
def query_heads_left_out(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    heads = query_mean.shape[1] // keys.shape[1] * keys.shape[1]
    return score(keys, values, query_mean[:, :heads], query_covariance[:, :heads], epsilon=epsilon)


@mutant(SCORE, killed_by="EA-9", misconception="the value left out: expected attention alone")
def attention_alone(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    inputs = keys, values, query_mean, query_covariance
    return scored(inputs, epsilon, length=lambda values: np.ones(values.shape[:-1]))


@mutant(SCORE, killed_by="EA-9", misconception="the norm of the key instead of the value")
def norm_of_the_key(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance), epsilon, length=lambda _: norm(keys))


@mutant(SCORE, killed_by="EA-9", misconception="the sum of absolute values instead of the Euclidean norm of the value")
def manhattan_norm(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    inputs = keys, values, query_mean, query_covariance
    return scored(inputs, epsilon, length=lambda values: np.abs(values).sum(axis=-1))


@mutant(SCORE, killed_by="EA-9", misconception="the squared norm of the value")
def squared_norm(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return scored((keys, values, query_mean, query_covariance), epsilon, length=lambda values: norm(values) ** 2)


@mutant(SCORE, killed_by="EA-9", misconception="the first 4 tokens forced in, as in the authors' library")
def sinks_forced_in(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    scores = score(keys, values, query_mean, query_covariance, epsilon=epsilon)
    scores[..., :4] = scores.max()
    return scores


@mutant(SCORE, killed_by="MEM-1", misconception="the values weighted in place")
def values_weighted_in_place(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    scores = score(keys, values, query_mean, query_covariance, epsilon=epsilon)
    length = norm(values)
    values *= (scores / np.where(length == 0, 1, length))[..., None]
    return scores


@mutant(f"{STEM}.contribution", killed_by="EA-9", misconception="W_o ignored: the norm of the value as it is")
def output_projection_ignored(weights, values, epsilon, w_o=None):
    return contribution(weights, values, epsilon)


@mutant(f"{STEM}.contribution", killed_by="EA-9", misconception="the norm of W_o times the norm of the value: a bound, not |W_o v|")
def product_of_norms(weights, values, epsilon, w_o=None):
    return contribution(weights, values, epsilon) * (1 if w_o is None else np.linalg.norm(w_o, ord=2))


@mutant(f"{STEM}.expected_weights", killed_by="EA-8", misconception="the softmax of zhat instead of log zhat")
def softmax_of_the_expectations(keys, query_mean, query_covariance):
    with np.errstate(over="ignore"):
        return softmax(np.minimum(np.exp(log_expected_scores(keys, query_mean, query_covariance)), 1e300))


@mutant(
    f"{STEM}.expected_weights", killed_by="EA-8", misconception="the attention of the mean query: the expectation taken inside exp"
)
def expectation_inside_the_exponential(keys, query_mean, query_covariance):
    return expected_weights(keys, query_mean, 0 * query_covariance)


@mutant(f"{STEM}.log_expected_scores", killed_by="EA-7", misconception="the 1/2 of the variance dropped")
def half_dropped(keys, query_mean, query_covariance):
    return log_expected_scores(keys, query_mean, 2 * query_covariance)


@mutant(f"{STEM}.log_expected_scores", killed_by="EA-7", misconception="zhat itself instead of its logarithm")
def logarithm_left_out(keys, query_mean, query_covariance):
    with np.errstate(over="ignore"):
        return np.exp(log_expected_scores(keys, query_mean, query_covariance))


def averaged(query_mean, query_covariance, settings, *, matrix=average_rotation, turn=lambda turned, states: turned @ states):
    """The average over RoPE by another matrix; `turn` makes the covariance's left half, of which the right half is the mirror."""
    average_rope(query_mean, query_covariance, **settings)  # refuses what the reference refuses
    rotation = matrix(query_mean.shape[-1], **settings)
    return query_mean @ rotation.T, turn(rotation, query_covariance) @ rotation.T


def window(*, position, horizon=512, theta=10000.0):
    return position, horizon, theta


@mutant(ROPE, killed_by="EA-6", misconception="the covariance left unturned, the mean alone averaged")
def covariance_unturned(query_mean, query_covariance, **settings):
    return average_rope(query_mean, query_covariance, **settings)[0], query_covariance.copy()


@mutant(ROPE, killed_by="EA-6", misconception="the window starting one position after the next token's")
def window_one_too_late(query_mean, query_covariance, **settings):
    average_rope(query_mean, query_covariance, **settings)
    return average_rope(query_mean, query_covariance, **settings | {"position": settings["position"] + 1})


@mutant(ROPE, killed_by="EA-6", misconception="the window one position too long: both ends counted")
def window_one_too_long(query_mean, query_covariance, **settings):
    average_rope(query_mean, query_covariance, **settings)
    return average_rope(query_mean, query_covariance, **settings | {"horizon": settings.get("horizon", 512) + 1})


@mutant(ROPE, killed_by="EA-6", misconception="the window counted from position 0: where the sequence stands ignored")
def position_ignored(query_mean, query_covariance, **settings):
    average_rope(query_mean, query_covariance, **settings)
    return average_rope(query_mean, query_covariance, **settings | {"position": 0})


@mutant(ROPE, killed_by="EA-6", misconception="the next position alone, not the average over the window")
def first_position_alone(query_mean, query_covariance, **settings):
    average_rope(query_mean, query_covariance, **settings)
    return average_rope(query_mean, query_covariance, **settings | {"horizon": 1})


@mutant(ROPE, killed_by="EA-6", misconception="one rotation to the middle of the window, nothing shrunk")
def middle_of_the_window(query_mean, query_covariance, **settings):
    average_rope(query_mean, query_covariance, **settings)
    position, horizon, theta = window(**settings)
    return average_rope(query_mean, query_covariance, position=position + horizon // 2, horizon=1, theta=theta)


@mutant(ROPE, killed_by="EA-6", misconception="the base of RoPE fixed at 10000")
def theta_ignored(query_mean, query_covariance, **settings):
    average_rope(query_mean, query_covariance, **settings)
    return average_rope(query_mean, query_covariance, **settings | {"theta": 10000.0})


@mutant(ROPE, killed_by="EA-6", misconception="the frequencies theta^(-i/D) instead of theta^(-2i/D)")
def exponent_halved(query_mean, query_covariance, **settings):
    average_rope(query_mean, query_covariance, **settings)
    return average_rope(query_mean, query_covariance, **settings | {"theta": window(**settings)[2] ** 0.5})


@mutant(ROPE, killed_by="EA-6", misconception="neighbouring channels (2i, 2i + 1) paired instead of (i, i + D/2)")
def neighbours_paired(query_mean, query_covariance, **settings):
    def matrix(head_dim, **settings):
        order = np.arange(head_dim).reshape(2, -1).T.ravel()
        return average_rotation(head_dim, **settings)[order][:, order]

    return averaged(query_mean, query_covariance, settings, matrix=matrix)


@mutant(ROPE, killed_by="EA-6", misconception="rotated the wrong way round: the matrix transposed")
def rotated_backwards(query_mean, query_covariance, **settings):
    return averaged(query_mean, query_covariance, settings, matrix=lambda *args, **window: average_rotation(*args, **window).T)


@mutant(ROPE, killed_by="EA-6", misconception="only the cosines averaged, the sines left out")
def cosines_alone(query_mean, query_covariance, **settings):
    def matrix(head_dim, **settings):
        return average_rotation(head_dim, **settings) * np.eye(head_dim)

    return averaged(query_mean, query_covariance, settings, matrix=matrix)


@mutant(ROPE, killed_by="EA-6", misconception="the rotations summed, not averaged")
def rotations_summed(query_mean, query_covariance, **settings):
    def matrix(head_dim, **settings):
        return average_rotation(head_dim, **settings) * window(**settings)[1]

    return averaged(query_mean, query_covariance, settings, matrix=matrix)


@mutant(ROPE, killed_by="EA-6", misconception="angles computed in float16")
def angles_in_half_precision(query_mean, query_covariance, **settings):
    def matrix(head_dim, **settings):
        position, horizon, theta = window(**settings)
        steps = np.arange(position, position + horizon).astype(np.float16)
        angles = np.float64(steps[:, None] * np.float16(frequencies(head_dim, theta)))
        cos, sin = np.diag(np.cos(angles).mean(axis=0)), np.diag(np.sin(angles).mean(axis=0))
        return np.block([[cos, -sin], [sin, cos]])

    return averaged(query_mean, query_covariance, settings, matrix=matrix)


@mutant(ROPE, killed_by="EA-6", misconception="the covariance turned on one side only")
def covariance_turned_on_one_side(query_mean, query_covariance, **settings):
    return averaged(query_mean, query_covariance, settings, turn=lambda rotation, states: states)


@mutant(ROPE, killed_by="EA-6", misconception="the covariance as Rbar^T Sigma Rbar")
def covariance_turned_back(query_mean, query_covariance, **settings):
    mean, _ = average_rope(query_mean, query_covariance, **settings)
    rotation = average_rotation(query_mean.shape[-1], **settings)
    return mean, rotation.T @ query_covariance @ rotation


@mutant(ROPE, killed_by="EA-6", misconception="R Sigma R^T averaged over the positions instead of Rbar Sigma Rbar^T")
def covariances_averaged(query_mean, query_covariance, **settings):
    mean, _ = average_rope(query_mean, query_covariance, **settings)
    position, horizon, theta = window(**settings)
    total = np.zeros_like(query_covariance)
    for place in range(position, position + horizon):
        rotation = average_rotation(query_mean.shape[-1], position=place, horizon=1, theta=theta)
        total += rotation @ query_covariance @ rotation.T
    return mean, total / horizon


@mutant(ROPE, killed_by="EA-6", misconception="an empty window taken for one position in silence")
def empty_window_accepted(query_mean, query_covariance, **settings):
    return average_rope(query_mean, query_covariance, **settings | {"horizon": max(1, settings.get("horizon", 512))})


@mutant(ROPE, killed_by="EA-6", misconception="the last of an odd number of channels left where it is, in silence")
def odd_channel_left_alone(query_mean, query_covariance, **settings):
    even = query_mean.shape[-1] // 2 * 2
    mean, covariance = query_mean.copy(), query_covariance.copy()
    turned = average_rope(query_mean[..., :even], query_covariance[..., :even, :even], **settings)
    mean[..., :even], covariance[..., :even, :even] = turned
    return mean, covariance


@mutant(f"{STEM}.average_rotation", killed_by="EA-6", misconception="the sum of the rotations, not divided by the horizon")
def sum_of_rotations(head_dim, *, position, horizon=512, theta=10000.0):
    return average_rotation(head_dim, position=position, horizon=horizon, theta=theta) * horizon


@mutant(f"{STEM}.average_rotation", killed_by="EA-6", misconception="the average rescaled to a rotation: no length lost")
def shrinking_undone(head_dim, *, position, horizon=512, theta=10000.0):
    rotation = average_rotation(head_dim, position=position, horizon=horizon, theta=theta)
    size = np.linalg.norm(rotation, axis=0)
    return rotation / np.where(size == 0, 1, size)


@mutant(
    f"{STEM}.project_statistics", killed_by="EA-5", misconception="hidden channels taken as independent: variances alone projected"
)
def variances_alone_projected(hidden_mean, hidden_covariance, w_q):
    return (w_q @ hidden_mean[..., None])[..., 0], w_q @ (hidden_covariance * np.eye(w_q.shape[-1])) @ w_q.T


@mutant(f"{STEM}.query_statistics", killed_by="EA-5", misconception="the covariance divided by N - 1")
def unbiased_covariance(queries):
    mean, covariance = query_statistics(queries)
    count = queries.shape[-2]
    return mean, covariance * count / max(1, count - 1)


@mutant(f"{STEM}.query_statistics", killed_by="EA-5", misconception="the mean not subtracted: E[q q^T] for the covariance")
def queries_not_centred(queries):
    return query_statistics(queries)[0], np.swapaxes(queries, -1, -2) @ queries / queries.shape[-2]


@mutant(f"{STEM}.query_statistics", killed_by="EA-5", misconception="the queries of the first 4 tokens left out")
def first_queries_left_out(queries):
    return query_statistics(queries[..., min(4, queries.shape[-2] - 1) :, :])


@mutant(f"{STEM}.query_statistics", killed_by="EA-5", misconception="the covariance as E[q q^T] - mu mu^T in float32: it cancels")
def one_pass_covariance(queries):
    narrow = queries.astype(np.float32)
    mean = narrow.mean(axis=-2)
    second = np.swapaxes(narrow, -1, -2) @ narrow / np.float32(queries.shape[-2])
    return query_statistics(queries)[0], np.float64(second - mean[..., None] * mean[..., None, :])


@mutant("expected_attention_theory.project", killed_by="EA-1", misconception="the values rotated too")
def values_rotated(hidden, w_q, w_k, w_v, positions, theta=10000.0):
    queries, keys, values = project(hidden, w_q, w_k, w_v, positions, theta)
    return queries, keys, rotate(values, positions, theta)


@mutant("expected_attention_theory.project", killed_by="EA-1", misconception="the keys left without their positions")
def keys_not_rotated(hidden, w_q, w_k, w_v, positions, theta=10000.0):
    queries, _, values = project(hidden, w_q, w_k, w_v, positions, theta)
    return queries, hidden @ w_k.T, values


@mutant("expected_attention_theory.attention_weights", killed_by="EA-2", misconception="the scale 1/sqrt(d) left out")
def no_scale(query, keys):
    return softmax(attention_logits(query[..., None, :], keys) * np.sqrt(keys.shape[-1]))[..., 0, :]


@mutant(
    "expected_attention_theory.residual_updates", killed_by="EA-3", misconception="W_o reshaped to [d, h] instead of transposed"
)
def output_projection_reshaped(weights, values, w_o):
    return weights[..., None] * (values @ w_o.reshape(w_o.shape[::-1]))


@mutant("expected_attention_theory.update_norms", killed_by="EA-4", misconception="W_o left out of the norm")
def update_without_projection(weights, values, w_o):
    return weights * norm(values)


@mutant(
    "expected_attention_theory.removal_error",
    killed_by="EA-4",
    misconception="the size of the token's own update: the weights that stay not renormalised",
)
def own_update(weights, values, w_o):
    return update_norms(weights, values, w_o)


@mutant("expected_attention_theory.removal_error", killed_by="EA-4", misconception="the output not subtracted: a / (1 - a) |W_o v|")
def output_not_subtracted(weights, values, w_o):
    return norm(residual_updates(weights / (1 - weights), values, w_o))


def listing_scores(queries, keys, values):
    return expected_weights(keys, *query_statistics(queries)) * norm(values)


@mutant(LISTING, killed_by="EA-L1", misconception="int(T (1 - ratio)) in binary floating point, as printed")
def float_budget(queries, keys, values, compression_ratio):
    kept = top_k(listing_scores(queries, keys, values), int(keys.shape[0] * (1 - compression_ratio)))
    return keys[kept], values[kept]


@mutant(LISTING, killed_by="EA-L1", misconception="the kept tokens in the order of their scores, not of their positions")
def score_order(queries, keys, values, compression_ratio):
    order = np.argsort(-listing_scores(queries, keys, values), kind="stable")[: budget(len(keys), compression_ratio)]
    return keys[order], values[order]


@mutant(LISTING, killed_by="EA-L1", misconception="the norm of the value left out of the ranking")
def ranked_by_attention_alone(queries, keys, values, compression_ratio):
    kept = top_k(expected_weights(keys, *query_statistics(queries)), budget(len(keys), compression_ratio))
    return keys[kept], values[kept]


@mutant(LISTING, killed_by="EA-L1", misconception="the keys gathered, the values cut to the first tokens")
def listing_values_left_behind(queries, keys, values, compression_ratio):
    kept = top_k(listing_scores(queries, keys, values), budget(len(keys), compression_ratio))
    return keys[kept], values[: kept.sum()]


START = f"{STEM}.start_decoding"


@mutant(START, killed_by="EA-10", misconception="the oldest queries of the prompt in the buffer instead of the latest")
def oldest_queries(keys, values, queries, *, buffer_size=128):
    return start_decoding(keys, values, queries, buffer_size=buffer_size)._replace(queries=queries[:, :, :buffer_size])


@mutant(START, killed_by="EA-10", misconception="the position of the last token instead of the next one's")
def position_of_the_last_token(keys, values, queries, *, buffer_size=128):
    return start_decoding(keys, values, queries, buffer_size=buffer_size)._replace(position=keys.shape[2] - 1)


UNDUE = 10**9


def with_token(state, token, settings):
    """The state with the token added and nothing evicted yet."""
    decode_step(state, *token, **settings)  # refuses what the reference refuses
    return decode_step(state, *token, **settings | {"interval": UNDUE})


def stepped(state, token, settings, *, position=lambda grown: grown.position, queries=lambda grown: grown.queries, choose=top_k):
    """One step with another position or other queries for the statistics, or another choice from the scores."""
    grown = with_token(state, token, settings)
    if grown.steps < settings.get("interval", 512):
        return grown
    if grown.keys.shape[2] <= settings["target"]:
        return grown._replace(steps=0)
    used = {name: value for name, value in settings.items() if name in ("horizon", "theta")}
    statistics = average_rope(*query_statistics(queries(grown)), position=position(grown), **used)
    kept = choose(score(grown.keys, grown.values, *statistics, epsilon=settings.get("epsilon", 0.02)), settings["target"])
    keys, values, positions = (
        rows[kept].reshape(*rows.shape[:2], -1, *rows.shape[3:]) for rows in (grown.keys, grown.values, grown.positions)
    )
    return grown._replace(keys=keys, values=values, positions=positions, steps=0)


@mutant(STEP, killed_by="EA-10", misconception="the position taken from the buffer's length, as in published code")
def position_from_the_buffer(state, query, key, value, **settings):
    return stepped(state, (query, key, value), settings, position=lambda grown: grown.queries.shape[2])


@mutant(STEP, killed_by="EA-10", misconception="the position taken from the cache's length: evicted tokens forgotten")
def position_from_the_cache(state, query, key, value, **settings):
    return stepped(state, (query, key, value), settings, position=lambda grown: grown.keys.shape[2])


@mutant(STEP, killed_by="EA-10", misconception="the statistics without the query of this step (stale by one)")
def newest_query_missing(state, query, key, value, **settings):
    return stepped(
        state, (query, key, value), settings, queries=lambda grown: grown.queries[:, :, : max(1, grown.queries.shape[2] - 1)]
    )


@mutant(STEP, killed_by="EA-10", misconception="the newest query alone instead of the buffer")
def newest_query_alone(state, query, key, value, **settings):
    return stepped(state, (query, key, value), settings, queries=lambda grown: grown.queries[:, :, -1:])


@mutant(STEP, killed_by="EA-10", misconception="the buffer never cut: the queries of all steps kept")
def buffer_never_cut(state, query, key, value, **settings):
    return stepped(state, (query, key, value), settings)._replace(
        queries=np.concatenate([state.queries, query[:, :, None]], axis=2)
    )


@mutant(STEP, killed_by="EA-10", misconception="the buffer emptied at every compression")
def buffer_emptied(state, query, key, value, **settings):
    after = decode_step(state, query, key, value, **settings)
    return after._replace(queries=after.queries[:, :, :0]) if after.steps == 0 else after


@mutant(STEP, killed_by="EA-10", misconception="the newest token never evicted")
def newest_token_protected(state, query, key, value, **settings):
    def choose(scores, target):
        scores[..., -1] = np.inf
        return top_k(scores, target)

    return stepped(state, (query, key, value), settings, choose=choose)


@mutant(STEP, killed_by="EA-10", misconception="the choice of batch item 0 used for the whole batch")
def first_batch_item_chooses(state, query, key, value, **settings):
    def choose(scores, target):
        return np.repeat(top_k(scores[:1], target), scores.shape[0], axis=0)

    return stepped(state, (query, key, value), settings, choose=choose)


@mutant(STEP, killed_by="EA-10", misconception="one choice for all heads of a layer, by the mean of their scores")
def heads_choose_together(state, query, key, value, **settings):
    def choose(scores, target):
        return np.repeat(top_k(scores.mean(axis=1, keepdims=True), target), scores.shape[1], axis=1)

    return stepped(state, (query, key, value), settings, choose=choose)


@mutant(STEP, killed_by="EA-10", misconception="the lowest scores kept")
def worst_tokens_kept(state, query, key, value, **settings):
    return stepped(state, (query, key, value), settings, choose=lambda scores, target: top_k(-scores, target))


@mutant(STEP, killed_by="EA-10", misconception="one token fewer than the target kept")
def target_missed_by_one(state, query, key, value, **settings):
    return stepped(state, (query, key, value), settings, choose=lambda scores, target: top_k(scores, max(1, target - 1)))


@mutant(STEP, killed_by="EA-10", misconception="compressed one step late: steps > interval instead of steps >= interval")
def one_step_late(state, query, key, value, **settings):
    decode_step(state, query, key, value, **settings)
    return decode_step(state, query, key, value, **settings | {"interval": settings.get("interval", 512) + 1})


@mutant(STEP, killed_by="EA-10", misconception="steps not counted from 0 again after a compression")
def steps_not_reset(state, query, key, value, **settings):
    return decode_step(state, query, key, value, **settings)._replace(steps=state.steps + 1)


@mutant(STEP, killed_by="EA-10", misconception="the next position counted from the tokens left, not from those seen")
def position_restarted(state, query, key, value, **settings):
    after = decode_step(state, query, key, value, **settings)
    return after._replace(position=after.keys.shape[2])


@mutant(STEP, killed_by="EA-10", misconception="the values not compressed together with the keys: the latest ones kept instead")
def values_left_behind(state, query, key, value, **settings):
    after = decode_step(state, query, key, value, **settings)
    return after._replace(values=with_token(state, (query, key, value), settings).values[:, :, -after.keys.shape[2] :])


@mutant(STEP, killed_by="EA-10", misconception="the rows stored from the newest to the oldest")
def rows_reversed(state, query, key, value, **settings):
    after = decode_step(state, query, key, value, **settings)
    if after.keys.shape[2] > state.keys.shape[2]:
        return after
    return after._replace(keys=after.keys[:, :, ::-1], values=after.values[:, :, ::-1], positions=after.positions[:, :, ::-1])


@mutant(
    STEP, killed_by="EA-10", misconception="compressed every 128 steps unless told otherwise: the interval taken for the buffer"
)
def interval_of_the_buffer(state, query, key, value, **settings):
    return decode_step(state, query, key, value, **{"interval": 128} | settings)


@mutant(STEP, killed_by="EA-10", misconception="epsilon 0 unless given")
def decoding_without_epsilon(state, query, key, value, **settings):
    return decode_step(state, query, key, value, **{"epsilon": 0.0} | settings)


@mutant(STEP, killed_by="EA-10", misconception="a target of 0 taken for 1 in silence")
def empty_target_accepted(state, query, key, value, **settings):
    return decode_step(state, query, key, value, **settings | {"target": max(1, settings["target"])})


@mutant(
    "expected_attention_theory.reconstruction_error", killed_by="EA-A", misconception="summed over the tokens instead of averaged"
)
def error_summed(hidden, compressed):
    return norm(hidden - compressed).sum(axis=-1)


@mutant(
    "expected_attention_theory.reconstruction_error",
    killed_by="EA-A",
    misconception="the root of the mean squared norm instead of the mean norm",
)
def root_mean_square(hidden, compressed):
    return np.sqrt((norm(hidden - compressed) ** 2).mean(axis=-1))


@mutant(
    "expected_attention_theory.correlation",
    killed_by="EA-A",
    misconception="the cosine of the two rows: their means not subtracted",
)
def cosine_for_correlation(observed, expected):
    size = norm(observed) * norm(expected)
    return (observed * expected).sum(axis=-1) / np.where(size == 0, 1, size)


@mutant(
    "expected_attention_theory.correlation",
    killed_by="EA-A",
    misconception="the correlation of the ranks (Spearman) instead of the numbers",
)
def rank_correlation(observed, expected):
    return correlation(*(weights.argsort(axis=-1).argsort(axis=-1).astype(np.float64) for weights in (observed, expected)))


MEASURES = "expected_attention_theory.skewness_and_kurtosis"


@mutant(MEASURES, killed_by="EA-A", misconception="the kurtosis without the 3 subtracted: a Gaussian has 3")
def plain_kurtosis(states):
    skewness, kurtosis = skewness_and_kurtosis(states)
    return skewness, kurtosis + 3


@mutant(MEASURES, killed_by="EA-A", misconception="standardised with the N - 1 deviation")
def unbiased_deviation(states):
    centred, count = centre(states), states.shape[-2]
    deviation = np.sqrt((centred**2).sum(axis=-2, keepdims=True) / max(1, count - 1))
    standard = centred / np.where(deviation == 0, 1, deviation)
    return (standard**3).mean(axis=-2), (standard**4).mean(axis=-2) - 3
