"""Wrong GVotes."""

from __future__ import annotations

import numpy as np

from evictionary.reference import cache, gvote, gvote_theory
from evictionary.reference.attention import attention_logits, softmax
from evictionary.reference.gvote import attention_weights, nucleus, sampled_logits, single_step_budget, top_each
from evictionary.reference.rope import frequencies, rotate
from evictionary.reference.selection import top_k
from evictionary.spec_tests.harness.planted import mutant

WEIGHTS, NUCLEUS, SELECT = "gvote.attention_weights", "gvote.nucleus", "gvote.select"
STATISTICS, SAMPLE, PROJECT = (f"gvote.{name}" for name in ("hidden_statistics", "sample_hidden_states", "project"))
COS_SIN, ROTATION, LOGITS = (f"gvote.{name}" for name in ("average_cos_sin", "average_rotation", "sampled_logits"))
TOP_EACH, ALLOCATE, UNION, PRUNE = "gvote.top_each", "gvote_theory.allocate", "gvote.union", "gvote.prune"
ALGORITHM, OPTIMAL, OVERLAP = "gvote.algorithm_1", "gvote_theory.optimal_keep_set", "gvote_theory.attention_overlap"


def to_bfloat16(array):
    return (np.asarray(array, dtype=np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


# The attention of the current query, the output and the scores that other methods use.


@mutant(WEIGHTS, killed_by="GV-1", misconception="the scale 1/sqrt(D) left out")
def no_scale(query, keys):
    return attention_weights(query * np.sqrt(keys.shape[-1]), keys)


@mutant(WEIGHTS, killed_by="GV-1", misconception="logits divided by D instead of sqrt(D)")
def scale_by_dimension(query, keys):
    return attention_weights(query / np.sqrt(keys.shape[-1]), keys)


@mutant(WEIGHTS, killed_by="GV-1", misconception="the softmax over the heads instead of the tokens")
def softmax_over_heads(query, keys):
    return softmax(attention_logits(query[..., None, :], keys)[..., 0, :], axis=-2)


@mutant(WEIGHTS, killed_by="GV-1", misconception="the last tile of 16 tokens filled up with logits of 0 that enter the softmax")
def tail_tile_not_masked(query, keys):
    length = keys.shape[-2]
    return attention_weights(query, np.pad(keys, [(0, 0)] * (keys.ndim - 2) + [(0, -length % 16), (0, 0)]))[..., :length]


@mutant(WEIGHTS, killed_by="GV-1", misconception="weights rounded to bfloat16")
def weights_in_bfloat16(query, keys):
    return to_bfloat16(attention_weights(query, keys))


@mutant(WEIGHTS, killed_by="GV-1", misconception="the query of batch item 0 for the whole batch")
def query_of_the_first_batch_item(query, keys):
    return attention_weights(np.broadcast_to(query[:1], query.shape), keys)


@mutant(WEIGHTS, killed_by="GV-A1", misconception="exponentials taken without subtracting the maximum")
def overflowing_softmax(query, keys):
    with np.errstate(all="ignore"):
        weights = np.exp(attention_logits(query[..., None, :], keys)[..., 0, :])
        return weights / weights.sum(axis=-1, keepdims=True)


@mutant("gvote_theory.output", killed_by="GV-2", misconception="weights divided by their sum once more")
def normalised_again(attention, values):
    total = attention.sum(axis=-1, keepdims=True)
    return gvote_theory.output(attention / np.where(total == 0, 1, total), values)


@mutant("gvote_theory.output", killed_by="GV-2", misconception="the mean over the tokens instead of the sum")
def mean_over_tokens(attention, values):
    return gvote_theory.output(attention, values) / values.shape[-2]


@mutant("gvote_theory.output", killed_by="GV-2", misconception="the value of the heaviest token alone")
def heaviest_value(attention, values):
    return np.take_along_axis(values, attention.argmax(axis=-1)[..., None, None], axis=-2)[..., 0, :]


@mutant("gvote_theory.importance", killed_by="GV-3", misconception="the mean over the queries instead of the sum")
def mean_over_queries(queries, keys):
    return gvote_theory.importance(queries, keys) / queries.shape[-2]


@mutant("gvote_theory.importance", killed_by="GV-3", misconception="the softmax over the queries instead of the tokens")
def softmax_over_queries(queries, keys):
    return softmax(attention_logits(queries, keys), axis=-2).sum(axis=-2)


@mutant("gvote_theory.importance", killed_by="GV-3", misconception="the queries averaged before the softmax")
def queries_averaged_before_the_softmax(queries, keys):
    return queries.shape[-2] * gvote_theory.importance(queries.mean(axis=-2, keepdims=True), keys)


@mutant("gvote_theory.importance", killed_by="GV-3", misconception="the largest weight of the queries instead of their sum")
def largest_of_the_queries(queries, keys):
    return softmax(attention_logits(queries, keys)).max(axis=-2)


@mutant(ALLOCATE, killed_by="GV-4", misconception="the budget shared equally, whatever the scores; the remainder is lost")
def equal_quotas(scores, budget):
    return np.minimum(scores.shape[-1], np.zeros(scores.shape[:-1], dtype=int) + budget // int(np.prod(scores.shape[:-1])))


@mutant(ALLOCATE, killed_by="GV-4", misconception="the whole budget given to each head")
def budget_for_each_head(scores, budget):
    return np.zeros(scores.shape[:-1], dtype=int) + min(budget, scores.shape[-1])


@mutant(ALLOCATE, killed_by="GV-4", misconception="quotas of the lowest scores")
def lowest_scores(scores, budget):
    return gvote_theory.allocate(-scores, budget)


@mutant(ALLOCATE, killed_by="GV-4", misconception="every score at the threshold counted: ties exceed the budget")
def ties_counted(scores, budget):
    kept = top_k(scores.reshape(-1), budget)
    least = np.where(kept, scores.reshape(-1), np.inf).min(initial=np.inf)
    return (scores >= least).sum(axis=-1)


@mutant(TOP_EACH, killed_by="GV-5", misconception="of equal scores the higher position kept")
def ties_to_the_higher_position(scores, budgets):
    return top_each(scores[..., ::-1], budgets)[..., ::-1]


@mutant(TOP_EACH, killed_by="GV-5", misconception="the lowest scores kept")
def lowest_each(scores, budgets):
    return top_each(-scores, budgets)


@mutant(TOP_EACH, killed_by="GV-5", misconception="the largest budget for every row (one k for the batched top-k)")
def one_k_for_all_rows(scores, budgets):
    return top_each(scores, np.broadcast_to(np.max(budgets), np.shape(budgets)))


@mutant(TOP_EACH, killed_by="GV-5", misconception="at least one token kept where the budget is 0")
def empty_budget_raised(scores, budgets):
    top_each(scores, budgets)
    return top_each(scores, np.maximum(1, budgets))


@mutant(TOP_EACH, killed_by="GV-A10", misconception="negative, fractional or too many budgets taken in silence")
def any_budgets_taken(scores, budgets):
    rows = np.resize(np.maximum(0, np.asarray(budgets).astype(int)), scores.shape[:-1])
    return top_each(scores, rows)


# The nucleus and its size.


def found(attention, p, needed, *, sign=-1):
    """The mask of what `needed(falling, mass before, mass up to and with, p)` says of the sorted weights."""
    nucleus(attention, p)
    order = np.argsort(sign * attention, axis=-1, kind="stable")
    falling = np.take_along_axis(attention, order, axis=-1)
    mass = np.cumsum(falling, axis=-1)
    kept = np.zeros(attention.shape, dtype=bool)
    np.put_along_axis(kept, order, needed(falling, mass - falling, mass, p * mass[..., -1:]), axis=-1)
    return kept


def first_of_all(needed):
    needed[..., 0] = True
    return needed


@mutant(NUCLEUS, killed_by="GV-A2", misconception="the largest set with mass of at most p: the token that crosses p left out")
def crossing_token_left_out(attention, p):
    return found(attention, p, lambda falling, before, mass, wanted: first_of_all(mass <= wanted))


@mutant(NUCLEUS, killed_by="GV-A2", misconception="a mass of more than p wanted: at exactly p one token more")
def more_than_p(attention, p):
    return found(attention, p, lambda falling, before, mass, wanted: first_of_all((before <= wanted) & (falling > 0)))


@mutant(NUCLEUS, killed_by="GV-A2", misconception="one token more than needed")
def one_token_more(attention, p):
    def needed(falling, before, mass, wanted):
        enough = first_of_all(before < wanted)
        return np.concatenate([enough[..., :1], enough[..., :-1]], axis=-1)

    return found(attention, p, needed)


@mutant(NUCLEUS, killed_by="GV-A2", misconception="the tokens added in the order of their positions, not sorted by weight")
def in_position_order(attention, p):
    nucleus(attention, p)
    mass = np.cumsum(attention, axis=-1)
    return first_of_all(mass - attention < p * mass[..., -1:])


@mutant(NUCLEUS, killed_by="GV-A2", misconception="the tokens that weigh at least 1 - p (a threshold on the weight)")
def threshold_on_the_weight(attention, p):
    nucleus(attention, p)
    heaviest = np.arange(attention.shape[-1]) == attention.argmax(axis=-1)[..., None]
    return (attention >= 1 - p) & (attention > 0) | heaviest


@mutant(NUCLEUS, killed_by="GV-A2", misconception="the tokens that weigh at least 1 - p of the heaviest")
def threshold_relative_to_the_heaviest(attention, p):
    nucleus(attention, p)
    heaviest = attention.max(axis=-1, keepdims=True)
    first = np.arange(attention.shape[-1]) == attention.argmax(axis=-1)[..., None]
    return (attention >= (1 - p) * heaviest) & (attention > 0) | first


@mutant(NUCLEUS, killed_by="GV-A2", misconception="the best share p of the tokens, whatever they weigh")
def share_of_the_tokens(attention, p):
    nucleus(attention, p)
    return top_k(attention, max(1, int(np.ceil(float(p) * attention.shape[-1]))))


@mutant(NUCLEUS, killed_by="GV-A2", misconception="the lightest tokens first")
def lightest_first(attention, p):
    return found(attention, p, lambda rising, before, mass, wanted: first_of_all(before < wanted), sign=1)


@mutant(NUCLEUS, killed_by="GV-A2", misconception="all but p: tokens until a mass of 1 - p is reached")
def complement_of_p(attention, p):
    nucleus(attention, p)
    return found(attention, 1 - p, lambda falling, before, mass, wanted: first_of_all(before < wanted))


@mutant(NUCLEUS, killed_by="GV-A2", misconception="every token that weighs as much as the last one needed, ties too")
def ties_all_kept(attention, p):
    kept = nucleus(attention, p)
    return attention >= np.where(kept, attention, np.inf).min(axis=-1, keepdims=True)


@mutant(NUCLEUS, killed_by="GV-A2", misconception="of equal weights the one at the higher position")
def equal_weights_from_the_end(attention, p):
    return nucleus(attention[..., ::-1], p)[..., ::-1]


@mutant(NUCLEUS, killed_by="GV-A2", misconception="mass compared with p itself, not with p of the sum that rounding left")
def absolute_mass(attention, p):
    return found(attention, p, lambda falling, before, mass, wanted: first_of_all(before < p))


@mutant(NUCLEUS, killed_by="GV-A2", misconception="an empty nucleus where p is 0 or the row without weight")
def empty_nucleus(attention, p):
    return found(attention, p, lambda falling, before, mass, wanted: before < wanted)


@mutant(NUCLEUS, killed_by="GV-A2", misconception="mass summed in float16")
def mass_in_half_precision(attention, p):
    def needed(falling, before, mass, wanted):
        half = np.cumsum(falling.astype(np.float16), axis=-1, dtype=np.float16)
        return first_of_all((half - falling.astype(np.float16)) < np.float16(p) * half[..., -1:])

    return found(attention, p, needed)


@mutant(NUCLEUS, killed_by="GV-A2", misconception="p fixed at 0.95, whatever is given")
def p_of_the_paper(attention, p):
    nucleus(attention, p)
    return nucleus(attention, 0.95)


@mutant(NUCLEUS, killed_by="GV-A2", misconception="the nucleus of the first row for all rows")
def first_row_for_all(attention, p):
    kept = nucleus(attention, p)
    return np.broadcast_to(kept.reshape(-1, kept.shape[-1])[0], kept.shape).copy()


@mutant(NUCLEUS, killed_by="GV-A2", misconception="negative weights and a p outside [0, 1] clipped in silence")
def bad_nucleus_clipped(attention, p):
    return nucleus(np.maximum(attention, 0), min(1.0, max(0.0, p)) if p == p else 0.95)


@mutant(
    "gvote.single_step_budget", killed_by="GV-A3", misconception="the place of the last kept token instead of the number of them"
)
def place_of_the_last(candidates):
    return (candidates * np.arange(1, candidates.shape[-1] + 1)).max(axis=-1)


@mutant("gvote.single_step_budget", killed_by="GV-A3", misconception="the tokens outside the nucleus counted")
def evicted_counted(candidates):
    return (~candidates).sum(axis=-1)


@mutant("gvote.single_step_budget", killed_by="GV-A3", misconception="one B_0 for all rows, the largest")
def largest_for_all(candidates):
    counts = candidates.sum(axis=-1)
    return np.broadcast_to(counts.max(), counts.shape).copy()


@mutant("gvote.single_step_budget", killed_by="GV-A3", misconception="off by one: the index of the last token in falling order")
def index_for_count(candidates):
    return candidates.sum(axis=-1) - 1


# The sampled queries.


def observed(hidden_states, sink_size):
    gvote.hidden_statistics(hidden_states, sink_size=sink_size)
    return hidden_states[..., min(sink_size, hidden_states.shape[-2] - 1) :, :]


@mutant(STATISTICS, killed_by="GV-A4", misconception="the sinks included")
def sinks_included(hidden_states, *, sink_size=4):
    observed(hidden_states, sink_size)
    return gvote.hidden_statistics(hidden_states, sink_size=0)


@mutant(STATISTICS, killed_by="GV-A4", misconception="4 sinks skipped, whatever is given")
def four_sinks(hidden_states, *, sink_size=4):
    observed(hidden_states, sink_size)
    return gvote.hidden_statistics(hidden_states)


@mutant(STATISTICS, killed_by="GV-A4", misconception="the last tokens skipped instead of the first")
def last_tokens_skipped(hidden_states, *, sink_size=4):
    return gvote.hidden_statistics(hidden_states[..., ::-1, :], sink_size=sink_size)


@mutant(STATISTICS, killed_by="GV-A4", misconception="the variance divided by N - 1 (ddof=1)")
def unbiased_variance(hidden_states, *, sink_size=4):
    states = observed(hidden_states, sink_size)
    mean, variance = gvote.hidden_statistics(hidden_states, sink_size=sink_size)
    return mean, variance * states.shape[-2] / max(1, states.shape[-2] - 1)


@mutant(STATISTICS, killed_by="GV-A4", misconception="the standard deviation in place of the variance")
def deviation_for_variance(hidden_states, *, sink_size=4):
    mean, variance = gvote.hidden_statistics(hidden_states, sink_size=sink_size)
    return mean, np.sqrt(variance)


@mutant(STATISTICS, killed_by="GV-A4", misconception="the mean of the squares, the mean not subtracted")
def mean_of_squares(hidden_states, *, sink_size=4):
    states = observed(hidden_states, sink_size)
    return states.mean(axis=-2), (states * states).mean(axis=-2)


@mutant(STATISTICS, killed_by="GV-A4", misconception="one pass in float32, E[x^2] - E[x]^2, which cancels")
def one_pass_in_float32(hidden_states, *, sink_size=4):
    states = observed(hidden_states, sink_size).astype(np.float32)
    mean, squares = states.mean(axis=-2), (states * states).mean(axis=-2)
    return mean.astype(np.float64), np.maximum(0, squares - mean * mean).astype(np.float64)


@mutant(STATISTICS, killed_by="GV-A4", misconception="one pass, E[x^2] - E[x]^2, which cancels where the mean is large")
def one_pass(hidden_states, *, sink_size=4):
    states = observed(hidden_states, sink_size)
    mean = states.mean(axis=-2)
    return mean, np.maximum(0, (states * states).mean(axis=-2) - mean * mean)


@mutant(STATISTICS, killed_by="GV-A4", misconception="one mean and variance for all channels")
def pooled_over_channels(hidden_states, *, sink_size=4):
    states = observed(hidden_states, sink_size)
    shape = (*states.shape[:-2], states.shape[-1])
    return tuple(
        np.broadcast_to(value, shape).copy() for value in (states.mean((-2, -1))[..., None], states.var((-2, -1))[..., None])
    )


@mutant(STATISTICS, killed_by="GV-A4", misconception="statistics of batch item 0 for the whole batch")
def statistics_of_the_first_batch_item(hidden_states, *, sink_size=4):
    mean, variance = gvote.hidden_statistics(hidden_states, sink_size=sink_size)
    return np.broadcast_to(mean[:1], mean.shape).copy(), np.broadcast_to(variance[:1], variance.shape).copy()


@mutant(SAMPLE, killed_by="GV-A5", misconception="noise multiplied by the variance instead of the standard deviation")
def variance_for_deviation(mean, variance, noise):
    return mean[..., None, :] + variance[..., None, :] * noise


@mutant(SAMPLE, killed_by="GV-A5", misconception="the mean left out")
def mean_left_out(mean, variance, noise):
    return np.sqrt(variance)[..., None, :] * noise


@mutant(SAMPLE, killed_by="GV-A5", misconception="noise drawn inside instead of taken from the argument: the seed is ignored")
def own_noise(mean, variance, noise):
    return gvote.sample_hidden_states(mean, variance, np.random.default_rng(0).normal(size=noise.shape))


@mutant(SAMPLE, killed_by="GV-A5", misconception="one number of noise for all channels of a sample")
def noise_shared_by_channels(mean, variance, noise):
    return gvote.sample_hidden_states(mean, variance, np.broadcast_to(noise[..., :1], noise.shape))


@mutant(PROJECT, killed_by="GV-A6", misconception="the weight read in torch's layout [D, C] without transposing it")
def weight_in_torch_layout(hidden_states, query_weight, query_bias=None):
    gvote.project(hidden_states, query_weight, query_bias)
    shape = query_weight.shape
    return gvote.project(hidden_states, np.swapaxes(query_weight.reshape(*shape[:-2], shape[-1], shape[-2]), -1, -2), query_bias)


@mutant(PROJECT, killed_by="GV-A6", misconception="the bias left out")
def bias_left_out(hidden_states, query_weight, query_bias=None):
    return gvote.project(hidden_states, query_weight)


@mutant(PROJECT, killed_by="GV-A6", misconception="the projected queries normalised to length one")
def queries_normalised(hidden_states, query_weight, query_bias=None):
    queries = gvote.project(hidden_states, query_weight, query_bias)
    norm = np.linalg.norm(queries, axis=-1, keepdims=True)
    return queries / np.where(norm == 0, 1, norm)


@mutant(PROJECT, killed_by="GV-A6", misconception="hidden states normalised a second time before the projection")
def normalised_before(hidden_states, query_weight, query_bias=None):
    norm = np.sqrt((hidden_states * hidden_states).mean(axis=-1, keepdims=True))
    return gvote.project(hidden_states / np.where(norm == 0, 1, norm), query_weight, query_bias)


def averages(head_dim, positions, theta):
    angles = np.asarray(positions)[:, None] * frequencies(head_dim, theta)
    return np.cos(angles).mean(axis=0), np.sin(angles).mean(axis=0)


@mutant(COS_SIN, killed_by="GV-A7", misconception="positions starting at that of the last token instead of the next")
def from_the_last_token(head_dim, *, position, horizon=512, theta=10000.0):
    gvote.average_cos_sin(head_dim, position=position, horizon=horizon, theta=theta)
    return averages(head_dim, range(position - 1, position - 1 + horizon), theta)


@mutant(COS_SIN, killed_by="GV-A7", misconception="the end included: horizon + 1 positions")
def end_included(head_dim, *, position, horizon=512, theta=10000.0):
    gvote.average_cos_sin(head_dim, position=position, horizon=horizon, theta=theta)
    return averages(head_dim, range(position, position + horizon + 1), theta)


@mutant(COS_SIN, killed_by="GV-A7", misconception="the cosine of the mean position instead of the mean of the cosines")
def cosine_of_the_mean_position(head_dim, *, position, horizon=512, theta=10000.0):
    gvote.average_cos_sin(head_dim, position=position, horizon=horizon, theta=theta)
    return averages(head_dim, [position + (horizon - 1) / 2], theta)


@mutant(COS_SIN, killed_by="GV-A7", misconception="positions counted from 0: distances instead of the positions after the prompt")
def positions_from_zero(head_dim, *, position, horizon=512, theta=10000.0):
    gvote.average_cos_sin(head_dim, position=position, horizon=horizon, theta=theta)
    return averages(head_dim, range(horizon), theta)


@mutant(COS_SIN, killed_by="GV-A7", misconception="sine and cosine exchanged")
def sine_for_cosine(head_dim, *, position, horizon=512, theta=10000.0):
    return gvote.average_cos_sin(head_dim, position=position, horizon=horizon, theta=theta)[::-1]


@mutant(COS_SIN, killed_by="GV-A7", misconception="theta fixed at 10000, whatever the model has")
def theta_ignored(head_dim, *, position, horizon=512, theta=10000.0):
    return gvote.average_cos_sin(head_dim, position=position, horizon=horizon)


@mutant(COS_SIN, killed_by="GV-A7", misconception="angles in float16")
def angles_in_half_precision(head_dim, *, position, horizon=512, theta=10000.0):
    gvote.average_cos_sin(head_dim, position=position, horizon=horizon, theta=theta)
    angles = (np.arange(position, position + horizon)[:, None] * frequencies(head_dim, theta)).astype(np.float16).astype(np.float64)
    return np.cos(angles).mean(axis=0), np.sin(angles).mean(axis=0)


@mutant(COS_SIN, killed_by="GV-A7", misconception="a negative position, an empty horizon or an odd head_dim taken in silence")
def any_positions_taken(head_dim, *, position, horizon=512, theta=10000.0):
    return averages(head_dim // 2 * 2, range(position, position + max(1, horizon)), theta)


def turned(queries, cos, sin):
    first, second = np.split(queries, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@mutant(ROTATION, killed_by="GV-A8", misconception="channels paired with their neighbours (0, 1), (2, 3) instead of (i, i + D/2)")
def neighbours_paired(queries, *, position, horizon=512, theta=10000.0):
    settings = {"position": position, "horizon": horizon, "theta": theta}
    split = np.concatenate([queries[..., ::2], queries[..., 1::2]], axis=-1)
    first, second = np.split(gvote.average_rotation(split, **settings), 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(queries.shape)


@mutant(ROTATION, killed_by="GV-A8", misconception="turned the other way: the sign of the sine")
def turned_backwards(queries, *, position, horizon=512, theta=10000.0):
    cos, sin = gvote.average_cos_sin(queries.shape[-1], position=position, horizon=horizon, theta=theta)
    return turned(queries, cos, -sin)


@mutant(ROTATION, killed_by="GV-A8", misconception="rotated to the first of the positions, not averaged")
def first_position_only(queries, *, position, horizon=512, theta=10000.0):
    gvote.average_rotation(queries, position=position, horizon=horizon, theta=theta)
    return rotate(queries, np.array(position), theta)


@mutant(ROTATION, killed_by="GV-A8", misconception="rotated to the middle of the positions: a rotation, which an average is not")
def middle_position(queries, *, position, horizon=512, theta=10000.0):
    gvote.average_rotation(queries, position=position, horizon=horizon, theta=theta)
    return rotate(queries, np.array(position + (horizon - 1) / 2), theta)


@mutant(ROTATION, killed_by="GV-A8", misconception="averaged queries scaled back to the length that they had")
def length_restored(queries, *, position, horizon=512, theta=10000.0):
    rotated = gvote.average_rotation(queries, position=position, horizon=horizon, theta=theta)
    norm = np.linalg.norm(rotated, axis=-1, keepdims=True)
    return rotated * np.linalg.norm(queries, axis=-1, keepdims=True) / np.where(norm == 0, 1, norm)


@mutant(ROTATION, killed_by="GV-A8", misconception="theta fixed at 10000, whatever the model has")
def theta_of_the_paper(queries, *, position, horizon=512, theta=10000.0):
    return gvote.average_rotation(queries, position=position, horizon=horizon)


# The vote.


@mutant(LOGITS, killed_by="GV-A9", misconception="the scale 1/sqrt(D) left out")
def unscaled_logits(sampled_queries, keys):
    return sampled_logits(sampled_queries, keys) * np.sqrt(keys.shape[-1])


@mutant(LOGITS, killed_by="GV-A9", misconception="the softmax of the logits, which ties where they are distant")
def softmax_of_the_logits(sampled_queries, keys):
    return softmax(sampled_logits(sampled_queries, keys))


@mutant(LOGITS, killed_by="GV-A9", misconception="cosines instead of dot products: the length of a key does not count")
def cosines(sampled_queries, keys):
    norm = np.linalg.norm(keys, axis=-1, keepdims=True)
    return sampled_logits(sampled_queries, keys / np.where(norm == 0, 1, norm))


@mutant(LOGITS, killed_by="GV-A9", misconception="the mean sample compared with every key: one row for all samples")
def mean_sample(sampled_queries, keys):
    mean = np.broadcast_to(sampled_queries.mean(axis=-2, keepdims=True), sampled_queries.shape)
    return sampled_logits(mean, keys)


@mutant(UNION, killed_by="GV-A11", misconception="the intersection: only what all samples vote for")
def intersection(votes):
    return votes.all(axis=-2)


@mutant(UNION, killed_by="GV-A11", misconception="the majority: what more than half of the samples vote for")
def majority(votes):
    return 2 * votes.sum(axis=-2) > votes.shape[-2]


@mutant(UNION, killed_by="GV-A11", misconception="the votes of the last sample alone (overwritten instead of or-ed)")
def last_sample(votes):
    return votes[..., -1, :]


@mutant(UNION, killed_by="GV-A11", misconception="one vote cancelling another (exclusive or)")
def exclusive(votes):
    return np.logical_xor.reduce(votes, axis=-2)


def elected(query, keys, sampled_queries, p, *, weigh=None, size=nucleus, count=None, rank=None, unite=None):
    """GVote with weights [B, H_kv, G, T], B_0 [B, H_kv, G], logits [B, H_kv, G, S, T] or a union of one's own; refuses as GVote."""
    gvote.select(query, keys, sampled_queries, p=p)
    batch, num_kv_heads, _, head_dim = keys.shape
    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    sampled = sampled_queries.reshape(*grouped.shape[:3], -1, head_dim)
    weights = attention_weights(grouped, keys[:, :, None])
    budgets = single_step_budget(size(weigh(weights) if weigh else weights, p))
    budgets = np.broadcast_to(count(budgets) if count else budgets, grouped.shape[:3])
    logits = sampled_logits(sampled, keys[:, :, None])
    logits = rank(logits) if rank else logits
    votes = top_each(logits, np.broadcast_to(budgets[..., None], logits.shape[:-1]))
    return unite(votes, weights) if unite else votes.any(axis=(2, 3))


@mutant(SELECT, killed_by="GV-A11", misconception="the nucleus K_0 of the current query kept as well")
def current_nucleus_added(query, keys, sampled_queries, *, p=0.95):
    def unite(votes, weights):
        return votes.any(axis=(2, 3)) | nucleus(weights, p).any(axis=2)

    return elected(query, keys, sampled_queries, p, unite=unite)


@mutant(SELECT, killed_by="GV-A11", misconception="the first 4 tokens protected as sinks")
def sinks_protected(query, keys, sampled_queries, *, p=0.95):
    kept = gvote.select(query, keys, sampled_queries, p=p)
    kept[..., :4] = True
    return kept


@mutant(SELECT, killed_by="GV-A11", misconception="the last token protected")
def last_token_protected(query, keys, sampled_queries, *, p=0.95):
    kept = gvote.select(query, keys, sampled_queries, p=p)
    kept[..., -1] = True
    return kept


@mutant(SELECT, killed_by="GV-A11", misconception="only the tokens that every sample votes for")
def unanimous(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, unite=lambda votes, weights: votes.all(axis=(2, 3)))


@mutant(SELECT, killed_by="GV-A11", misconception="the tokens that at least half of the samples vote for")
def half_of_the_votes(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, unite=lambda votes, weights: 2 * votes.mean(axis=(2, 3)) >= 1)


@mutant(SELECT, killed_by="GV-A11", misconception="the union cut to the B_0 tokens with the most votes")
def most_votes(query, keys, sampled_queries, *, p=0.95):
    def unite(votes, weights):
        budgets = single_step_budget(nucleus(weights, p)).max(axis=2)
        return top_each(votes.sum(axis=(2, 3)).astype(float), budgets)

    return elected(query, keys, sampled_queries, p, unite=unite)


@mutant(SELECT, killed_by="GV-A11", misconception="the samples averaged before the vote")
def samples_averaged(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, rank=lambda logits: logits.mean(axis=3, keepdims=True))


@mutant(SELECT, killed_by="GV-A11", misconception="the logits of a group averaged before the vote")
def group_averaged(query, keys, sampled_queries, *, p=0.95):
    return elected(
        query, keys, sampled_queries, p, rank=lambda logits: np.broadcast_to(logits.mean(axis=2, keepdims=True), logits.shape)
    )


@mutant(SELECT, killed_by="GV-A11", misconception="the votes of the first query head of a group alone")
def first_head_of_the_group(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, unite=lambda votes, weights: votes[:, :, 0].any(axis=2))


@mutant(SELECT, killed_by="GV-A11", misconception="one set for the layer: the union over all KV heads")
def union_over_the_layer(query, keys, sampled_queries, *, p=0.95):
    kept = gvote.select(query, keys, sampled_queries, p=p)
    return np.broadcast_to(kept.any(axis=1, keepdims=True), kept.shape).copy()


@mutant(SELECT, killed_by="GV-A11", misconception="query head h votes in KV head h % H_kv instead of h // G")
def votes_interleaved(query, keys, sampled_queries, *, p=0.95):
    gvote.select(query, keys, sampled_queries, p=p)
    order = np.arange(query.shape[1]).reshape(-1, keys.shape[1]).T.ravel()
    return gvote.select(query[:, order], keys, sampled_queries[:, order], p=p)


@mutant(SELECT, killed_by="GV-A11", misconception="the samples of batch item 0 for the whole batch")
def samples_of_the_first_batch_item(query, keys, sampled_queries, *, p=0.95):
    gvote.select(query, keys, sampled_queries, p=p)
    return gvote.select(query, keys, np.broadcast_to(sampled_queries[:1], sampled_queries.shape), p=p)


@mutant(SELECT, killed_by="GV-A3", misconception="B_0 of batch item 0 for the whole batch")
def budget_of_the_first_batch_item(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, count=lambda budgets: budgets[:1])


@mutant(SELECT, killed_by="GV-A11", misconception="samples drawn from a hidden generator: the argument does not decide")
def hidden_generator(query, keys, sampled_queries, *, p=0.95):
    gvote.select(query, keys, sampled_queries, p=p)
    return gvote.select(query, keys, np.random.default_rng(0).normal(size=sampled_queries.shape), p=p)


@mutant(SELECT, killed_by="GV-A11", misconception="p fixed at 0.95, whatever is given")
def p_ignored(query, keys, sampled_queries, *, p=0.95):
    gvote.select(query, keys, sampled_queries, p=p)
    return gvote.select(query, keys, sampled_queries)


@mutant(SELECT, killed_by="GV-A11", misconception="arguments that do not fit answered by keeping every token")
def everything_kept_on_error(query, keys, sampled_queries, *, p=0.95):
    try:
        return gvote.select(query, keys, sampled_queries, p=p)
    except ValueError:
        return np.ones(keys.shape[:3], dtype=bool)


@mutant(SELECT, killed_by="GV-A9", misconception="logits rounded to bfloat16 before they are ranked")
def ranked_in_bfloat16(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, rank=to_bfloat16)


@mutant(SELECT, killed_by="GV-A3", misconception="the largest B_0 of the group for all its query heads")
def largest_budget_of_the_group(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, count=lambda budgets: budgets.max(axis=2, keepdims=True))


@mutant(SELECT, killed_by="GV-A3", misconception="the smallest B_0 of the group for all its query heads")
def smallest_budget_of_the_group(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, count=lambda budgets: budgets.min(axis=2, keepdims=True))


@mutant(SELECT, killed_by="GV-A3", misconception="one B_0 for the layer, the mean of the heads")
def mean_budget_of_the_layer(query, keys, sampled_queries, *, p=0.95):
    def count(budgets):
        return np.maximum(1, np.rint(budgets.mean(axis=(1, 2), keepdims=True)).astype(int))

    return elected(query, keys, sampled_queries, p, count=count)


@mutant(SELECT, killed_by="GV-A3", misconception="one nucleus for the group, of its mean attention")
def nucleus_of_the_mean_attention(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, weigh=lambda weights: weights.mean(axis=2, keepdims=True))


@mutant(
    SELECT,
    killed_by="GV-A3",
    misconception="one nucleus for the group, of the softmax of its mean logits: reduced before the softmax",
)
def nucleus_of_the_mean_query(query, keys, sampled_queries, *, p=0.95):
    def weigh(weights):
        return attention_weights(query.reshape(*weights.shape[:3], -1).mean(axis=2), keys)[:, :, None]

    return elected(query, keys, sampled_queries, p, weigh=weigh)


@mutant(SELECT, killed_by="GV-A9", misconception="the samples ranked by their softmax, in which distant logits tie at 0")
def ranked_by_softmax(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, rank=softmax)


@mutant(SELECT, killed_by="GV-A10", misconception="only the tokens with a positive logit voted for")
def positive_logits_only(query, keys, sampled_queries, *, p=0.95):
    kept = gvote.select(query, keys, sampled_queries, p=p)
    repeated = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)
    positive = (sampled_logits(sampled_queries, repeated) > 0).any(axis=2)
    return kept & positive.reshape(*keys.shape[:2], -1, keys.shape[2]).any(axis=2)


@mutant(SELECT, killed_by="GV-A10", misconception="the nucleus of each sample itself instead of its top B_0")
def nucleus_of_each_sample(query, keys, sampled_queries, *, p=0.95):
    gvote.select(query, keys, sampled_queries, p=p)
    repeated = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)
    votes = nucleus(softmax(sampled_logits(sampled_queries, repeated)), p)
    return votes.reshape(*keys.shape[:2], -1, keys.shape[2]).any(axis=2)


@mutant(SELECT, killed_by="GV-A10", misconception="one token more than B_0 for each sample")
def one_vote_too_many(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, count=lambda budgets: budgets + 1)


@mutant(SELECT, killed_by="GV-A10", misconception="B_0 divided among the samples, rounded up: all votes together are B_0")
def budget_divided(query, keys, sampled_queries, *, p=0.95):
    return elected(query, keys, sampled_queries, p, count=lambda budgets: -(-budgets // sampled_queries.shape[2]))


@mutant(SELECT, killed_by="GV-A10", misconception="the votes of all samples ranked together: a long sample outvotes the short ones")
def ranked_together(query, keys, sampled_queries, *, p=0.95):
    gvote.select(query, keys, sampled_queries, p=p)
    repeated = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)
    logits = sampled_logits(sampled_queries, repeated)
    budgets = single_step_budget(nucleus(attention_weights(query, repeated), p)) * logits.shape[2]
    votes = top_each(logits.reshape(*budgets.shape, -1), budgets).reshape(logits.shape)
    return votes.reshape(*keys.shape[:2], -1, keys.shape[2]).any(axis=2)


@mutant(SELECT, killed_by="GV-A10", misconception="of equal logits the higher position voted for")
def equal_logits_to_the_higher_position(query, keys, sampled_queries, *, p=0.95):
    return gvote.select(query, keys[:, :, ::-1], sampled_queries, p=p)[..., ::-1]


@mutant(SELECT, killed_by="GV-A10", misconception="B_0 taken as the share p of the tokens")
def share_of_the_length(query, keys, sampled_queries, *, p=0.95):
    share = max(1, int(np.ceil(p * keys.shape[2]))) if 0 <= p <= 1 else 1
    return elected(query, keys, sampled_queries, p, count=lambda budgets: 0 * budgets + share)


# Line 12, the whole algorithm and its figures.


@mutant(PRUNE, killed_by="GV-A12", misconception="values left behind: row n of keys and values are different tokens")
def values_of_other_tokens(keys, values, kept):
    stored = cache.compress(keys, values, kept)
    return stored._replace(values=np.roll(stored.values, 1, axis=0))


@mutant(PRUNE, killed_by="GV-A12", misconception="positions counted within the compressed cache")
def positions_from_the_buffer(keys, values, kept):
    stored = cache.compress(keys, values, kept)
    places = [np.arange(length) for length in stored.lengths.ravel()]
    return stored._replace(positions=np.concatenate(places).astype(int))


@mutant(PRUNE, killed_by="GV-A12", misconception="the union over all heads gathered, so that every head holds as many tokens")
def equal_lengths(keys, values, kept):
    return cache.compress(keys, values, np.broadcast_to(kept.any(axis=1, keepdims=True), kept.shape).copy())


@mutant(PRUNE, killed_by="GV-A12", misconception="the evicted tokens gathered")
def evicted_gathered(keys, values, kept):
    return cache.compress(keys, values, ~kept)


def ran(inputs, settings, *, sink_size=None, rotated=None, p=None, noise=None, project=gvote.project):
    """Algorithm 1 with a setting, samples, noise or a projection of one's own."""
    query, keys, values, hidden_states, query_weight, given = inputs
    skipped = settings["sink_size"] if sink_size is None else sink_size
    mean, variance = gvote.hidden_statistics(hidden_states, sink_size=skipped)
    noise = given if noise is None else noise
    sampled = project(gvote.sample_hidden_states(mean, variance, noise)[:, None], query_weight)
    rope = {"position": keys.shape[2], "horizon": settings["horizon"], "theta": settings["theta"]}
    turned = rotated(sampled, rope) if rotated else gvote.average_rotation(sampled, **rope)
    return cache.compress(keys, values, gvote.select(query, keys, turned, p=settings["p"] if p is None else p))


def algorithm(misconception):
    """Plant a wrong Algorithm 1: a function of the six arrays and of the settings p, sink_size, horizon and theta."""

    def decorate(function):
        def algorithm_1(
            query, keys, values, hidden_states, query_weight, noise, *, p=0.95, sink_size=4, horizon=512, theta=10000.0
        ):
            settings = {"p": p, "sink_size": sink_size, "horizon": horizon, "theta": theta}
            return function((query, keys, values, hidden_states, query_weight, noise), settings)

        algorithm_1.__name__ = function.__name__
        return mutant(ALGORITHM, killed_by="GV-A12", misconception=misconception)(algorithm_1)

    return decorate


@algorithm("the sampled queries not rotated: compared with the keys as they were before RoPE")
def not_rotated(inputs, settings):
    return ran(inputs, settings, rotated=lambda sampled, rope: sampled)


@algorithm("the averaged positions starting at 0 instead of after the prompt")
def rotated_from_zero(inputs, settings):
    return ran(inputs, settings, rotated=lambda sampled, rope: gvote.average_rotation(sampled, **{**rope, "position": 0}))


@algorithm("the averaged positions starting at that of the last prompt token")
def rotated_from_the_last_token(inputs, settings):
    def rotated(sampled, rope):
        return gvote.average_rotation(sampled, **{**rope, "position": rope["position"] - 1})

    return ran(inputs, settings, rotated=rotated)


@algorithm("512 positions averaged, whatever horizon is given")
def horizon_ignored(inputs, settings):
    return ran(inputs, settings, rotated=lambda sampled, rope: gvote.average_rotation(sampled, **{**rope, "horizon": 512}))


@algorithm("theta fixed at 10000, whatever the model has")
def theta_fixed(inputs, settings):
    return ran(inputs, {**settings, "theta": 10000.0})


@algorithm("the sinks included in mean and variance")
def sinks_in_the_statistics(inputs, settings):
    return ran(inputs, settings, sink_size=0)


@algorithm("4 sinks skipped, whatever is given")
def four_sinks_skipped(inputs, settings):
    return ran(inputs, settings, sink_size=4)


@algorithm("p fixed at 0.95, whatever is given")
def algorithm_without_p(inputs, settings):
    return ran(inputs, settings, p=0.95)


@algorithm("the mean query alone: samples without noise")
def without_noise(inputs, settings):
    return ran(inputs, settings, noise=0 * inputs[-1])


@algorithm("the first sample alone")
def one_sample(inputs, settings):
    return ran(inputs, settings, noise=inputs[-1][:, :1])


@algorithm("noise drawn inside instead of taken from the argument: the seed is ignored")
def noise_drawn_inside(inputs, settings):
    return ran(inputs, settings, noise=np.random.default_rng(0).normal(size=inputs[-1].shape))


@algorithm("the noise of batch item 0 for the whole batch")
def noise_of_the_first_batch_item(inputs, settings):
    return ran(inputs, settings, noise=np.broadcast_to(inputs[-1][:1], inputs[-1].shape))


@algorithm("the projection of query head 0 for all query heads")
def first_projection(inputs, settings):
    return ran(inputs, settings, project=lambda states, weight: gvote.project(states, np.broadcast_to(weight[:1], weight.shape)))


@algorithm("keys stored in the place of values")
def keys_for_values(inputs, settings):
    query, keys, _, *rest = inputs
    return ran((query, keys, keys, *rest), settings)


@mutant(OPTIMAL, killed_by="GV-O", misconception="the nucleus of the mean attention of the future queries")
def nucleus_of_the_mean(attention, p):
    return nucleus(attention.mean(axis=-2), p)


@mutant(OPTIMAL, killed_by="GV-O", misconception="what is in the nucleus of every query (the intersection)")
def common_nucleus(attention, p):
    return nucleus(attention, p).all(axis=-2)


@mutant(OPTIMAL, killed_by="GV-O", misconception="the nucleus of the first future query")
def first_query(attention, p):
    return nucleus(attention, p)[..., 0, :]


@mutant(OVERLAP, killed_by="GV-F3", misconception="the share of the tokens that are candidates, whatever they weigh")
def share_of_candidates(attention, candidates):
    return candidates.mean(axis=-1)


@mutant(OVERLAP, killed_by="GV-F3", misconception="the mean weight of the candidates instead of the sum")
def mean_of_the_candidates(attention, candidates):
    return gvote_theory.attention_overlap(attention, candidates) / np.maximum(1, candidates.sum(axis=-1))


@mutant(OVERLAP, killed_by="GV-F3", misconception="the attention outside the candidates: what is missed")
def attention_missed(attention, candidates):
    return gvote_theory.attention_overlap(attention, ~candidates)
