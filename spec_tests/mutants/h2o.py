"""Wrong H2Os."""

from __future__ import annotations

import numpy as np

from evictionary.reference import h2o
from evictionary.reference.attention import attention_logits, by_group, causal_attention, softmax
from evictionary.reference.selection import top_k
from evictionary.spec_tests.harness.planted import mutant

SCORE, SELECT = "h2o.score", "h2o.select"


def scored(queries, keys, *, attend=causal_attention, over_queries=np.sum, over_group=np.mean):
    """H2O with attention [B, H_kv, G, M, T] or reductions of one's own; it refuses what H2O refuses."""
    return over_group(over_queries(attend(*by_group(queries, keys)), axis=-2), axis=2)


@mutant(SCORE, killed_by="H2-1", misconception="the causal mask left out")
def later_tokens_seen(queries, keys):
    return scored(queries, keys, attend=lambda *states: softmax(attention_logits(*states)))


@mutant(SCORE, killed_by="H2-1", misconception="the mean over all the queries instead of the sum")
def mean_over_queries(queries, keys):
    return scored(queries, keys, over_queries=np.mean)


@mutant(SCORE, killed_by="H2-1", misconception="the accumulated attention divided by the number of queries that saw the token")
def mean_over_the_seeing_queries(queries, keys):
    length = keys.shape[2]
    return h2o.score(queries, keys) / np.minimum(np.arange(length, 0, -1), np.shape(queries)[2])


@mutant(SCORE, killed_by="H2-1", misconception="the sum over the query heads of a group instead of the mean")
def sum_over_the_group(queries, keys):
    return scored(queries, keys, over_group=np.sum)


@mutant(SCORE, killed_by="H2-1", misconception="the largest score of a group instead of the mean")
def largest_of_the_group(queries, keys):
    return scored(queries, keys, over_group=np.max)


@mutant(SCORE, killed_by="H2-1", misconception="queries averaged over the group before the softmax")
def averaged_before_the_softmax(queries, keys):
    return scored(queries, keys, attend=lambda grouped, shared: causal_attention(grouped.mean(axis=2, keepdims=True), shared))


@mutant(SCORE, killed_by="H2-1", misconception="only the last query: attention of this step instead of all so far")
def last_query_only(queries, keys):
    return scored(queries, keys, over_queries=lambda weights, axis: weights[..., -1, :])


@mutant(SCORE, killed_by="H2-1", misconception="query head h reads KV head h % H_kv instead of h // G")
def interleaved_heads(queries, keys):
    h2o.score(queries, keys)
    order = np.arange(queries.shape[1]).reshape(-1, keys.shape[1]).T.ravel()
    return h2o.score(queries[:, order], keys)


@mutant(SCORE, killed_by="H2-1", misconception="the scale 1/sqrt(D) left out")
def no_scale(queries, keys):
    return scored(queries, keys, attend=lambda grouped, shared: causal_attention(grouped * np.sqrt(keys.shape[-1]), shared))


@mutant(SCORE, killed_by="H2-1", misconception="fewer queries than tokens aligned to the first tokens instead of the last")
def mask_from_the_upper_left(queries, keys):
    def attend(grouped, shared):
        logits = attention_logits(grouped, shared)
        return softmax(np.where(np.arange(logits.shape[-1]) <= np.arange(logits.shape[-2])[:, None], logits, -np.inf))

    return scored(queries, keys, attend=attend)


@mutant(SCORE, killed_by="H2-1", misconception="weights masked after the softmax and not normalised again")
def masked_after_the_softmax(queries, keys):
    def attend(grouped, shared):
        return np.tril(softmax(attention_logits(grouped, shared)), k=shared.shape[-2] - grouped.shape[-2])

    return scored(queries, keys, attend=attend)


@mutant(SCORE, killed_by="H2-1", misconception="blocks of 64 queries that overwrite each other: only the last block counts")
def last_block_only(queries, keys):
    h2o.score(queries, keys)
    start = (queries.shape[2] - 1) // h2o.BLOCK * h2o.BLOCK
    return h2o.score(queries[:, :, start:], keys)


@mutant(SCORE, killed_by="H2-1", misconception="the last block of 64 queries filled up with zero queries that are counted")
def tail_block_not_masked(queries, keys):
    scores, queries_missing = h2o.score(queries, keys), -queries.shape[2] % h2o.BLOCK
    return scores + queries_missing / keys.shape[2]


@mutant(SCORE, killed_by="H2-1", misconception="attention accumulated in float16")
def accumulated_in_half_precision(queries, keys):
    def total(weights, axis):
        return weights.astype(np.float16).sum(axis=axis, dtype=np.float16).astype(np.float64)

    return scored(queries, keys, over_queries=total)


@mutant(SCORE, killed_by="H2-1", misconception="batch item 0 deciding for the whole batch")
def first_batch_item_decides(queries, keys):
    scores = h2o.score(queries, keys)
    return np.broadcast_to(scores[:1], scores.shape).copy()


@mutant(
    SCORE, killed_by="H2-1", misconception="query heads that no group divides, or queries of other channels, cut off in silence"
)
def nothing_refused(queries, keys):
    if np.ndim(queries) != 4 or 0 in np.shape(queries):
        return np.zeros(keys.shape[:3])
    heads = queries.shape[1] // keys.shape[1] * keys.shape[1]
    return h2o.score(queries[: keys.shape[0], :heads, -keys.shape[2] :, : keys.shape[-1]], keys[..., : queries.shape[-1]])


def chosen(queries, keys, budget, *, recent, scores=None):
    """The last `recent` tokens and the highest scores, `budget` in all; it refuses what H2O refuses."""
    h2o.select(queries, keys, budget=budget)
    scores = h2o.score(queries, keys) if scores is None else scores
    latest = np.arange(keys.shape[2]) >= keys.shape[2] - recent
    return top_k(scores, budget, protected=np.broadcast_to(latest, scores.shape))


@mutant(SELECT, killed_by="H2-1", misconception="the recent half rounded down")
def recent_half_rounded_down(queries, keys, *, budget):
    return chosen(queries, keys, budget, recent=budget // 2)


@mutant(SELECT, killed_by="H2-1", misconception="no recent tokens: the heavy hitters alone")
def heavy_hitters_only(queries, keys, *, budget):
    return chosen(queries, keys, budget, recent=0)


@mutant(SELECT, killed_by="H2-1", misconception="the recent tokens alone (a sliding window)")
def recent_only(queries, keys, *, budget):
    return chosen(queries, keys, budget, recent=budget)


@mutant(
    SELECT,
    killed_by="H2-1",
    misconception="heavy hitters chosen among all tokens, the recent ones too: those chosen twice leave places empty",
)
def recent_tokens_chosen_twice(queries, keys, *, budget):
    latest = np.arange(keys.shape[2]) >= keys.shape[2] - (budget + 1) // 2
    h2o.select(queries, keys, budget=budget)
    return top_k(h2o.score(queries, keys), budget // 2) | latest


@mutant(SELECT, killed_by="H2-1", misconception="the recent tokens kept on top of the budget")
def recent_on_top(queries, keys, *, budget):
    latest = np.arange(keys.shape[2]) >= keys.shape[2] - (budget + 1) // 2
    h2o.select(queries, keys, budget=budget)
    return top_k(h2o.score(queries, keys), budget) | latest


@mutant(SELECT, killed_by="H2-1", misconception="the first tokens protected in place of the recent ones")
def first_half_protected(queries, keys, *, budget):
    h2o.select(queries, keys, budget=budget)
    scores = h2o.score(queries, keys)
    first = np.arange(keys.shape[2]) < (budget + 1) // 2
    return top_k(scores, budget, protected=np.broadcast_to(first, scores.shape))


@mutant(SELECT, killed_by="H2-1", misconception="one set for all heads, chosen by their mean score")
def one_set_for_the_layer(queries, keys, *, budget):
    scores = h2o.score(queries, keys)
    return chosen(
        queries, keys, budget, recent=(budget + 1) // 2, scores=np.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape)
    )


@mutant(SELECT, killed_by="H2-1", misconception="a budget of 0 or of half a token raised or cut in silence")
def any_budget_taken(queries, keys, *, budget):
    return h2o.select(queries, keys, budget=max(1, int(budget)))
