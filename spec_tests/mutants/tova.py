"""Wrong TOVAs."""

from __future__ import annotations

import numpy as np

from evictionary.reference import tova
from evictionary.reference.attention import attention_logits, by_group, softmax
from evictionary.spec_tests.harness.planted import mutant

SCORE = "tova.score"


def scored(queries, keys, *, row=-1, change=lambda logits: logits, weigh=softmax, reduce=lambda weights: weights.mean(axis=(1, 2))):
    """TOVA with a query, logits [B, H_kv, G, T], a softmax or a mean over the heads of one's own; it refuses what TOVA refuses."""
    grouped, shared = by_group(queries, keys)
    scores = reduce(weigh(change(attention_logits(grouped[..., row, None, :], shared)[..., 0, :])))
    return np.broadcast_to(scores[:, None], keys.shape[:3]).copy() if scores.ndim == 2 else scores


@mutant(SCORE, killed_by="TO-1", misconception="the first of the queries read instead of the last")
def first_query(queries, keys):
    return scored(queries, keys, row=0)


@mutant(SCORE, killed_by="TO-1", misconception="the attention of all the queries averaged, not that of the last one")
def all_queries(queries, keys):
    tova.score(queries, keys)
    return np.mean([scored(queries, keys, row=row) for row in range(queries.shape[2])], axis=0)


@mutant(SCORE, killed_by="TO-1", misconception="each KV head scored by its own group instead of one score for the layer")
def each_head_for_itself(queries, keys):
    return scored(queries, keys, reduce=lambda weights: weights.mean(axis=2))


@mutant(SCORE, killed_by="TO-1", misconception="the first KV head deciding for the layer")
def first_head_decides(queries, keys):
    return scored(queries, keys, reduce=lambda weights: weights[:, 0].mean(axis=1))


@mutant(SCORE, killed_by="TO-1", misconception="batch item 0 deciding for the whole batch")
def first_batch_item_decides(queries, keys):
    scores = tova.score(queries, keys)
    return np.broadcast_to(scores[:1], scores.shape).copy()


@mutant(SCORE, killed_by="TO-1", misconception="the largest weight of the heads instead of their mean")
def largest_of_the_heads(queries, keys):
    return scored(queries, keys, reduce=lambda weights: weights.max(axis=(1, 2)))


@mutant(SCORE, killed_by="TO-1", misconception="the sum over the query heads instead of the mean")
def sum_of_the_heads(queries, keys):
    return scored(queries, keys, reduce=lambda weights: weights.sum(axis=(1, 2)))


@mutant(SCORE, killed_by="TO-1", misconception="logits averaged over the heads before the softmax")
def averaged_before_the_softmax(queries, keys):
    return scored(queries, keys, weigh=lambda logits: logits.mean(axis=(1, 2)), reduce=softmax)


@mutant(SCORE, killed_by="TO-1", misconception="the softmax over the query heads of a group instead of the tokens")
def softmax_over_heads(queries, keys):
    return scored(queries, keys, weigh=lambda logits: softmax(logits, axis=2))


@mutant(SCORE, killed_by="TO-1", misconception="the scale 1/sqrt(D) left out")
def no_scale(queries, keys):
    return scored(queries, keys, change=lambda logits: logits * np.sqrt(keys.shape[-1]))


@mutant(SCORE, killed_by="TO-1", misconception="logits divided by D instead of sqrt(D)")
def scale_by_dimension(queries, keys):
    return scored(queries, keys, change=lambda logits: logits / np.sqrt(keys.shape[-1]))


@mutant(SCORE, killed_by="TO-1", misconception="query head h reads KV head h % H_kv instead of h // G")
def interleaved_heads(queries, keys):
    tova.score(queries, keys)
    order = np.arange(queries.shape[1]).reshape(-1, keys.shape[1]).T.ravel()
    return tova.score(queries[:, order], keys)


@mutant(SCORE, killed_by="TO-1", misconception="the last token protected: it need not earn its place")
def last_token_protected(queries, keys):
    scores = tova.score(queries, keys)
    scores[..., -1] = 1
    return scores


@mutant(SCORE, killed_by="TO-1", misconception="the first token protected as a sink")
def first_token_protected(queries, keys):
    scores = tova.score(queries, keys)
    scores[..., 0] = 1
    return scores


@mutant(SCORE, killed_by="TO-1", misconception="the last token left out of the softmax: the query does not see its own token")
def own_token_hidden(queries, keys):
    def hide(logits):
        logits = logits.copy()
        if logits.shape[-1] > 1:
            logits[..., -1] = -np.inf
        return logits

    return scored(queries, keys, change=hide)


@mutant(SCORE, killed_by="TO-1", misconception="exponentials taken without subtracting the maximum")
def overflowing_softmax(queries, keys):
    def weigh(logits):
        with np.errstate(all="ignore"):
            weights = np.exp(logits)
            return weights / weights.sum(axis=-1, keepdims=True)

    return scored(queries, keys, weigh=weigh)


@mutant(SCORE, killed_by="TO-1", misconception="the last tile of 16 tokens filled up with logits of 0 that enter the softmax")
def tail_tile_not_masked(queries, keys):
    def weigh(logits):
        return softmax(np.pad(logits, [(0, 0)] * 3 + [(0, -logits.shape[-1] % 16)]))[..., : logits.shape[-1]]

    return scored(queries, keys, weigh=weigh)


@mutant(SCORE, killed_by="TO-1", misconception="weights rounded to float16")
def weights_in_half_precision(queries, keys):
    return scored(queries, keys, weigh=lambda logits: softmax(logits).astype(np.float16).astype(np.float64))


@mutant(
    SCORE, killed_by="TO-1", misconception="query heads that no group divides, or queries of other channels, cut off in silence"
)
def nothing_refused(queries, keys):
    if np.ndim(queries) != 4 or 0 in np.shape(queries):
        return np.full(keys.shape[:3], 1 / keys.shape[2])
    heads = queries.shape[1] // keys.shape[1] * keys.shape[1]
    return tova.score(queries[: keys.shape[0], :heads, -1:, : keys.shape[-1]], keys[..., : queries.shape[-1]])
