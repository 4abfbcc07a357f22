"""Wrong budgets, selections, caches and attention, and wrong baselines and allocators that are a line long."""

from __future__ import annotations

import numpy as np

from evictionary.reference import ada_kv, attention, cache, pyramid_kv, selection
from evictionary.spec_tests.harness.planted import mutant

BUDGET, TOP_K, COMPRESS, ATTEND = "selection.budget", "selection.top_k", "cache.compress", "attention.attend"


def checked(length, compression_ratio):
    selection.budget(length, compression_ratio)
    return length, float(compression_ratio)


@mutant(BUDGET, killed_by="SEL-1", misconception="int(length * (1 - ratio)) in binary floating point")
def float_budget(length, compression_ratio):
    length, ratio = checked(length, compression_ratio)
    return max(1, int(length * (1 - ratio)))


@mutant(BUDGET, killed_by="SEL-1", misconception="a budget of 0 tokens allowed")
def empty_budget(length, compression_ratio):
    checked(length, compression_ratio)
    return int(round(length * (1000 - round(compression_ratio * 1000))) // 1000)


@mutant(BUDGET, killed_by="SEL-1", misconception="the ratio taken as the fraction kept")
def ratio_kept(length, compression_ratio):
    length, ratio = checked(length, compression_ratio)
    return max(1, length - selection.budget(length, ratio))


@mutant(BUDGET, killed_by="SEL-1", misconception="the budget rounded to the nearest whole number")
def rounded_budget(length, compression_ratio):
    length, ratio = checked(length, compression_ratio)
    return max(1, round(length * (1 - ratio)))


@mutant(BUDGET, killed_by="SEL-1", misconception="ratios outside [0, 1) clipped in silence")
def clipped_ratio(length, compression_ratio):
    try:
        return selection.budget(length, compression_ratio)
    except ValueError:
        return 1


@mutant(TOP_K, killed_by="SEL-3", misconception="of equal scores the higher position kept")
def ties_to_the_higher_position(scores, budget, protected=None):
    mirrored = None if protected is None else protected[..., ::-1]
    return selection.top_k(scores[..., ::-1], budget, mirrored)[..., ::-1]


@mutant(TOP_K, killed_by="SEL-2", misconception="the lowest scores kept")
def lowest_scores(scores, budget, protected=None):
    return selection.top_k(-scores, budget, protected)


@mutant(TOP_K, killed_by="SEL-2", misconception="every token that reaches the threshold kept, ties above the budget too")
def threshold_keeps_ties(scores, budget, protected=None):
    kept = selection.top_k(scores, budget, protected)
    least = np.where(kept, scores, np.inf).min(axis=-1, keepdims=True)
    return scores >= least


@mutant(TOP_K, killed_by="SEL-2", misconception="the selection of batch item 0 used for the whole batch")
def first_batch_item_selects(scores, budget, protected=None):
    return np.broadcast_to(selection.top_k(scores[:1], budget, None if protected is None else protected[:1]), scores.shape).copy()


@mutant(TOP_K, killed_by="SEL-2", misconception="a budget beyond the length refused")
def large_budget_truncated(scores, budget, protected=None):
    return selection.top_k(scores, min(budget, scores.shape[-1] - (budget > scores.shape[-1])), protected)


@mutant(TOP_K, killed_by="SEL-4", misconception="protected tokens treated like all others")
def protection_ignored(scores, budget, protected=None):
    if protected is not None:
        selection.top_k(scores, budget, protected)
    return selection.top_k(scores, budget)


@mutant(TOP_K, killed_by="SEL-4", misconception="the protected tokens kept on top of the budget")
def protected_beyond_the_budget(scores, budget, protected=None):
    kept = selection.top_k(scores, budget)
    return kept if protected is None else kept | protected


@mutant(TOP_K, killed_by="SEL-4", misconception="more protected tokens than the budget cut off in silence")
def protected_cut_off(scores, budget, protected=None):
    if protected is None:
        return selection.top_k(scores, budget)
    return selection.top_k(np.where(protected, np.inf, scores), budget)


@mutant(COMPRESS, killed_by="CACHE-1", misconception="the kept tokens stored in another order than that of their positions")
def reversed_order(keys, values, kept):
    stored = cache.compress(keys, values, kept)
    order = np.concatenate([np.arange(rows.start, rows.stop)[::-1] for _, _, rows in cache.heads(stored)]).astype(int)
    return cache.CompressedCache(stored.keys[order], stored.values[order], stored.positions[order], stored.lengths)


@mutant(COMPRESS, killed_by="CACHE-1", misconception="positions counted within the compressed cache, not in the sequence")
def positions_from_the_buffer(keys, values, kept):
    stored = cache.compress(keys, values, kept)
    places = [np.arange(rows.stop - rows.start) for _, _, rows in cache.heads(stored)]
    return stored._replace(positions=np.concatenate(places).astype(int))


@mutant(COMPRESS, killed_by="CACHE-2", misconception="keys gathered, values left behind: row n of the two are different tokens")
def values_of_other_tokens(keys, values, kept):
    stored = cache.compress(keys, values, kept)
    return stored._replace(values=np.roll(stored.values, 1, axis=0))


@mutant(COMPRESS, killed_by="CACHE-2", misconception="keys stored in the place of values")
def keys_for_values(keys, values, kept):
    stored = cache.compress(keys, values, kept)
    return stored._replace(values=stored.keys)


@mutant(COMPRESS, killed_by="CACHE-1", misconception="the mask of the first head applied to all heads")
def first_head_decides(keys, values, kept):
    return cache.compress(keys, values, np.broadcast_to(kept[:, :1], kept.shape).copy())


@mutant(COMPRESS, killed_by="CACHE-3", misconception="every head said to hold as many tokens as the fullest one")
def padded_lengths(keys, values, kept):
    stored = cache.compress(keys, values, kept)
    return stored._replace(lengths=np.full_like(stored.lengths, stored.lengths.max()))


@mutant(COMPRESS, killed_by="CACHE-3", misconception="lengths as offsets into the storage")
def offsets_for_lengths(keys, values, kept):
    stored = cache.compress(keys, values, kept)
    return stored._replace(lengths=np.cumsum(stored.lengths).reshape(stored.lengths.shape))


def attended(queries, stored, *, scale=None, reader=None, change=lambda logits: logits):
    """Attention with a scale, a head mapping or logits of one's own."""
    group = queries.shape[1] // stored.lengths.shape[1]
    output = np.zeros((*queries.shape[:3], stored.values.shape[-1]))
    normaliser = np.full(queries.shape[:3], -np.inf)
    for item, kv_head, rows in cache.heads(stored):
        for head in range(queries.shape[1]):
            if (reader(head) if reader else head // group) == kv_head and rows.start < rows.stop:
                logits = queries[item, head] @ stored.keys[rows].T * (scale or queries.shape[-1] ** -0.5)
                logits = change(logits)
                output[item, head] = attention.softmax(logits) @ stored.values[rows]
                normaliser[item, head] = attention.log_sum_exp(logits)
    return output, normaliser


@mutant(ATTEND, killed_by="ATT-1", misconception="the scale 1/sqrt(D) left out")
def no_scale(queries, cache):
    return attended(queries, cache, scale=1.0)


@mutant(ATTEND, killed_by="ATT-1", misconception="logits divided by D instead of sqrt(D)")
def scale_by_dimension(queries, cache):
    return attended(queries, cache, scale=1 / queries.shape[-1])


@mutant(ATTEND, killed_by="ATT-1", misconception="query head h reads KV head h % H_kv instead of h // G")
def interleaved_heads(queries, cache):
    return attended(queries, cache, reader=lambda head: head % cache.lengths.shape[1])


@mutant(ATTEND, killed_by="ATT-1", misconception="the last kept token of each head not attended to")
def last_token_missed(queries, cache):
    def change(logits):
        logits = logits.copy()
        if logits.shape[-1] > 1:
            logits[..., -1] = -1e30
        return logits

    return attended(queries, cache, change=change)


@mutant(ATTEND, killed_by="ATT-2", misconception="the log-sum-exp in base 2")
def base_two(queries, cache):
    output, normaliser = attention.attend(queries, cache)
    return output, normaliser / np.log(2)


@mutant(ATTEND, killed_by="ATT-2", misconception="the log-sum-exp without the maximum that was subtracted")
def maximum_forgotten(queries, cache):
    output, normaliser = attended(queries, cache, change=lambda logits: logits - logits.max(axis=-1, keepdims=True))
    return output, normaliser


@mutant(ATTEND, killed_by="ATT-3", misconception="the log-sum-exp of the unscaled logits")
def unscaled_normaliser(queries, cache):
    return attention.attend(queries, cache)[0], attended(queries, cache, scale=1.0)[1]


@mutant(ATTEND, killed_by="ATT-4", misconception="exponentials taken without subtracting the maximum")
def overflowing_softmax(queries, cache):
    group = queries.shape[1] // cache.lengths.shape[1]
    output, normaliser = attention.attend(queries, cache)
    for item, kv_head, rows in attention.heads(cache):
        for head in range(kv_head * group, (kv_head + 1) * group):
            if rows.start < rows.stop:
                with np.errstate(all="ignore"):
                    weights = np.exp(queries[item, head] @ cache.keys[rows].T * queries.shape[-1] ** -0.5)
                    output[item, head] = weights / weights.sum(axis=-1, keepdims=True) @ cache.values[rows]
    return output, normaliser


@mutant("knorm.score", killed_by="KN-1", misconception="the longest keys kept")
def longest_kept(keys):
    return np.linalg.norm(keys, axis=-1)


@mutant("knorm.score", killed_by="KN-1", misconception="the squared norm instead of the norm")
def squared_norm(keys):
    return -(keys * keys).sum(axis=-1)


@mutant("knorm.score", killed_by="KN-1", misconception="the sum of absolute values instead of the Euclidean norm")
def manhattan_norm(keys):
    return -np.abs(keys).sum(axis=-1)


def _recency(keys, sink_size):
    if sink_size < 0:
        raise ValueError("sink_size")
    scores = np.broadcast_to(np.arange(keys.shape[2], dtype=np.float64), keys.shape[:3]).copy()
    scores[..., :sink_size] = np.inf
    return scores


@mutant("streaming_llm.score", killed_by="SL-1", misconception="the sinks not protected: only the most recent tokens kept")
def no_sinks(keys, *, sink_size=4):
    return _recency(keys, min(sink_size, 0))


@mutant("streaming_llm.score", killed_by="SL-1", misconception="one sink token too many")
def one_sink_more(keys, *, sink_size=4):
    return _recency(keys, sink_size + 1)


@mutant("streaming_llm.score", killed_by="SL-1", misconception="the oldest tokens kept instead of the most recent")
def oldest_kept(keys, *, sink_size=4):
    return -_recency(keys, 0 * sink_size if sink_size >= 0 else sink_size)


@mutant("streaming_llm.score", killed_by="SL-1", misconception="ties among the recent broken by the norms of the keys")
def norms_break_ties(keys, *, sink_size=4):
    return _recency(keys, sink_size) - 1e-3 * np.tanh(np.linalg.norm(keys, axis=-1))


@mutant("streaming_llm.score", killed_by="SL-1", misconception="a negative sink_size taken for none")
def negative_sinks_accepted(keys, *, sink_size=4):
    return _recency(keys, max(0, sink_size))


@mutant("ada_kv.select", killed_by="AD-1", misconception="settings out of range clipped in silence")
def settings_clipped(scores, budget, *, floor_ratio=0.2):
    return ada_kv.select(scores, max(0, budget), floor_ratio=min(1.0, max(0.0, floor_ratio)))


@mutant("ada_kv.select", killed_by="AD-1", misconception="the same budget for every head: no allocation at all")
def uniform_budgets(scores, budget, *, floor_ratio=0.2):
    ada_kv.select(scores, budget, floor_ratio=floor_ratio)
    return selection.top_k(scores, budget)


@mutant("ada_kv.select", killed_by="AD-1", misconception="the floors given on top of the shared budget: the layer total drifts")
def floors_on_top(scores, budget, *, floor_ratio=0.2):
    kept = ada_kv.select(scores, budget, floor_ratio=0.0)
    return kept | ada_kv.select(scores, budget, floor_ratio=floor_ratio) | selection.top_k(scores, int(budget * floor_ratio))


@mutant("ada_kv.select", killed_by="AD-2", misconception="the safeguard left out: a head can lose everything")
def no_floor(scores, budget, *, floor_ratio=0.2):
    ada_kv.select(scores, budget, floor_ratio=floor_ratio)
    return ada_kv.select(scores, budget, floor_ratio=0.0)


@mutant("ada_kv.select", killed_by="AD-1", misconception="budgets shared over the batch as well as over the heads")
def shared_over_the_batch(scores, budget, *, floor_ratio=0.2):
    batch, heads, length = scores.shape
    joined = ada_kv.select(scores.reshape(1, batch * heads, length), budget, floor_ratio=floor_ratio)
    return joined.reshape(scores.shape)


@mutant("pyramid_kv.budgets", killed_by="PY-1", misconception="settings out of range clipped in silence")
def pyramid_settings_clipped(budget, num_layers, *, beta=20.0):
    return pyramid_kv.budgets(max(1, budget), max(1, num_layers), beta=max(1.0, beta))


@mutant("pyramid_kv.budgets", killed_by="PY-1", misconception="budgets that rise with depth")
def rising(budget, num_layers, *, beta=20.0):
    return pyramid_kv.budgets(budget, num_layers, beta=beta)[::-1]


@mutant("pyramid_kv.budgets", killed_by="PY-2", misconception="each layer rounded down: the total is not preserved")
def rounded_down(budget, num_layers, *, beta=20.0):
    pyramid_kv.budgets(budget, num_layers, beta=beta)
    last = max(1.0, budget / beta)
    step = 2 * (budget - last) / max(1, num_layers - 1)
    return [int(2 * budget - last - layer * step) for layer in range(num_layers)] if num_layers > 1 else [budget]


@mutant(
    "pyramid_kv.budgets",
    killed_by="PY-1",
    misconception="the first layer given the whole of twice the budget, the last one nothing of its share",
)
def too_steep(budget, num_layers, *, beta=20.0):
    pyramid_kv.budgets(budget, num_layers, beta=beta)
    return pyramid_kv.budgets(budget, num_layers, beta=10.0**6)
