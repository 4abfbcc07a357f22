"""GVote as different people write it: each function of RIGHT is one form of a part, each of WRONG a mistake in a part."""

import heapq
import math
from fractions import Fraction

import numpy as np


def refuse(query, keys, sampled_queries):
    if keys.ndim != 4 or 0 in keys.shape or not np.isfinite(keys).all():
        raise ValueError("keys: wanted finite numbers in [B, H_kv, T, D]")
    if query.ndim != 3 or (query.shape[0], query.shape[2]) != (keys.shape[0], keys.shape[3]) or not np.isfinite(query).all():
        raise ValueError("query: wanted finite numbers, with the batch and channels of keys")
    if query.shape[1] % keys.shape[1]:
        raise ValueError("queries: wanted a multiple of the KV heads")
    shape = (*query.shape[:2], sampled_queries.shape[2] if sampled_queries.ndim == 4 else 0, query.shape[2])
    if sampled_queries.shape != shape or 0 in shape or not np.isfinite(sampled_queries).all():
        raise ValueError("sampled_queries: wanted finite numbers, with the batch, heads and channels of query")


def refuse_nucleus(attention, p):
    if not 0 <= p <= 1:
        raise ValueError("p: wanted a number in [0, 1]")
    if not (np.asarray(attention) >= 0).all():
        raise ValueError("attention: wanted weights of at least 0")


def logits_by_matmul(query, keys):
    return (keys @ query[..., None])[..., 0] / math.sqrt(keys.shape[-1])


def logits_by_einsum(query, keys):
    return np.einsum("...td,...d->...t", keys, query) / math.sqrt(keys.shape[-1])


def logits_by_sum(query, keys):
    return (keys * query[..., None, :]).sum(axis=-1) / keys.shape[-1] ** 0.5


def logits_in_loops(query, keys):
    heads, length = np.broadcast_shapes(query.shape[:-1], keys.shape[:-2]), keys.shape[-2]
    query, keys = np.broadcast_to(query, (*heads, query.shape[-1])), np.broadcast_to(keys, (*heads, *keys.shape[-2:]))
    out = np.empty((*heads, length))
    for head in np.ndindex(heads):
        out[head] = [np.dot(query[head], key) / math.sqrt(len(key)) for key in keys[head]]
    return out


def softmax_by_maximum(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_by_log_add_exp(logits):
    return np.exp(logits - np.logaddexp.reduce(logits, axis=-1)[..., None])


def softmax_by_log_sum_exp(logits):
    top = logits.max(axis=-1, keepdims=True)
    return np.exp(logits - (top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))))


def softmax_by_differences(logits):
    with np.errstate(over="ignore"):
        return 1 / np.exp(logits[..., None, :] - logits[..., :, None]).sum(axis=-1)


def softmax_in_place(logits):
    work = np.array(logits)
    work -= np.maximum.reduce(work, axis=-1)[..., None]
    np.exp(work, out=work)
    work /= np.add.reduce(work, axis=-1)[..., None]
    return work


def softmax_in_long_double(logits):
    return softmax_by_maximum(logits.astype(np.longdouble)).astype(np.float64)


def weights_of_a_softmax(query, keys):
    return softmax(logits(query, keys))


def weights_one_row_at_a_time(query, keys):
    scores = logits(query, keys)
    return np.stack([softmax(row) for row in scores.reshape(-1, scores.shape[-1])]).reshape(scores.shape)


def nucleus_by_the_tail(attention, p):
    refuse_nucleus(attention, p)
    attention = np.asarray(attention, dtype=float)
    order = np.argsort(-attention, axis=-1, kind="stable")
    falling = np.take_along_axis(attention, order, axis=-1)
    tail = np.cumsum(falling[..., ::-1], axis=-1)[..., ::-1]
    needed = tail > float(1 - Fraction(str(p))) * tail[..., :1]
    needed[..., 0] = True
    kept = np.zeros(attention.shape, dtype=bool)
    np.put_along_axis(kept, order, needed, axis=-1)
    return kept


def nucleus_token_by_token(attention, p):
    refuse_nucleus(attention, p)
    attention = np.asarray(attention, dtype=float)
    kept = np.zeros(attention.shape, dtype=bool)
    for row in np.ndindex(attention.shape[:-1]):
        wanted, mass = Fraction(str(p)) * sum(map(Fraction, attention[row].tolist())), Fraction(0)
        for token in sorted(range(attention.shape[-1]), key=lambda token, row=row: (-attention[row][token], token)):
            if mass >= wanted and kept[row].any():
                break
            kept[row][token] = True
            mass += Fraction(float(attention[row][token]))
    return kept


def nucleus_by_counting(attention, p):
    refuse_nucleus(attention, p)
    attention = np.asarray(attention, dtype=float)
    order = np.argsort(-attention, axis=-1, kind="stable")
    falling = np.take_along_axis(attention, order, axis=-1)
    missing = np.cumsum(falling[..., ::-1], axis=-1)[..., ::-1] / np.maximum(falling.sum(axis=-1, keepdims=True), 1e-300)
    count = np.maximum(1, (missing > float(1 - Fraction(str(p)))).sum(axis=-1, keepdims=True))
    return np.argsort(order, axis=-1) < count


def nucleus_from_the_light_end(attention, p):
    refuse_nucleus(attention, p)
    attention = np.asarray(attention, dtype=float)
    kept = np.ones(attention.shape, dtype=bool)
    for row in np.ndindex(attention.shape[:-1]):
        weights, spare = attention[row].tolist(), Fraction(0)
        may_go = (1 - Fraction(str(p))) * sum(map(Fraction, weights))
        for token in sorted(range(len(weights)), key=lambda token, weights=weights: (weights[token], -token))[:-1]:
            spare += Fraction(weights[token])
            if spare > may_go:
                break
            kept[row][token] = False
    return kept


def budget_by_sum(candidates):
    return candidates.sum(axis=-1)


def budget_by_count(candidates):
    return np.count_nonzero(candidates, axis=-1)


def budget_in_lists(candidates):
    return np.array([sum(row) for row in candidates.reshape(-1, candidates.shape[-1]).tolist()], dtype=int).reshape(
        candidates.shape[:-1]
    )


def top_by_argsort(scores, count):
    kept = np.zeros(len(scores), dtype=bool)
    kept[np.argsort(-scores, kind="stable")[:count]] = True
    return kept


def top_by_sorted(scores, count):
    best = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:count]
    return np.isin(np.arange(len(scores)), best)


def top_by_a_heap(scores, count):
    best = heapq.nsmallest(count, range(len(scores)), key=lambda token: (-scores[token], token))
    return np.array([token in best for token in range(len(scores))])


def top_by_comparing(scores, count):
    mine, other = scores[:, None], scores[None, :]
    earlier = np.arange(len(scores))[None, :] < np.arange(len(scores))[:, None]
    return ((other > mine) | ((other == mine) & earlier)).sum(axis=1) < count


def top_by_lexsort(scores, count):
    places = np.empty(len(scores), dtype=int)
    places[np.lexsort((np.arange(len(scores)), -scores))] = np.arange(len(scores))
    return places < count


def select_in_loops(query, keys, sampled_queries, *, p=0.95):
    refuse(query, keys, sampled_queries)
    refuse_nucleus(0, p)
    group, kept = query.shape[1] // keys.shape[1], np.zeros(keys.shape[:3], dtype=bool)
    for batch, head in np.ndindex(query.shape[:2]):
        states = keys[batch, head // group]
        budget = int(single_step_budget(nucleus(attention_weights(query[batch, head], states), p)))
        for sample in sampled_queries[batch, head]:
            kept[batch, head // group] |= top(logits(sample, states), budget)
    return kept


def select_by_groups(query, keys, sampled_queries, *, p=0.95):
    refuse(query, keys, sampled_queries)
    refuse_nucleus(0, p)
    group = query.shape[1] // keys.shape[1]
    budgets = single_step_budget(nucleus(attention_weights(query, np.repeat(keys, group, axis=1)), p))
    votes = [
        [
            [top(logits(sample, keys[b, h // group]), budgets[b, h]) for sample in sampled_queries[b, h]]
            for h in range(query.shape[1])
        ]
        for b in range(len(keys))
    ]
    return np.array(votes).reshape(*keys.shape[:2], -1, keys.shape[2]).any(axis=2)


RIGHT = {
    "logits": (logits_by_matmul, logits_by_einsum, logits_by_sum, logits_in_loops),
    "softmax": (
        softmax_by_maximum,
        softmax_by_log_add_exp,
        softmax_by_log_sum_exp,
        softmax_by_differences,
        softmax_in_place,
        softmax_in_long_double,
    ),
    "attention_weights": (weights_of_a_softmax, weights_one_row_at_a_time),
    "nucleus": (nucleus_by_the_tail, nucleus_token_by_token, nucleus_by_counting, nucleus_from_the_light_end),
    "single_step_budget": (budget_by_sum, budget_by_count, budget_in_lists),
    "top": (top_by_argsort, top_by_sorted, top_by_a_heap, top_by_comparing, top_by_lexsort),
    "select": (select_in_loops, select_by_groups),
}


def softmax_and_1e_9(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / (weights.sum(axis=-1, keepdims=True) + 1e-9)


def softmax_in_float32(logits):
    return softmax_by_maximum(logits.astype(np.float32)).astype(np.float64)


def softmax_at_twice_the_temperature(logits):
    return softmax_by_maximum(logits / 2)


def a_nucleus_of_two_at_least(attention, p):
    kept = nucleus_by_the_tail(attention, p)
    order = np.argsort(-np.asarray(attention, dtype=float), axis=-1, kind="stable")
    np.put_along_axis(kept, order[..., :2], True, axis=-1)
    return kept


def a_nucleus_whose_mass_is_squared(attention, p):
    return nucleus_by_the_tail(np.square(attention) * np.sign(attention), p)


def a_nucleus_of_at_most_eight(attention, p):
    kept = nucleus_by_the_tail(attention, p)
    return kept & (np.cumsum(kept, axis=-1) <= 8)


def a_budget_of_one_at_least_less_one(candidates):
    return np.maximum(1, candidates.sum(axis=-1) - 1)


def a_budget_of_the_first_half(candidates):
    return candidates[..., : (candidates.shape[-1] + 1) // 2].sum(axis=-1)


def the_best_by_size(scores, count):
    return top_by_argsort(np.abs(scores), count)


def the_first_tokens(scores, count):
    return np.arange(len(scores)) < count


def rounded_before_they_rank(scores, count):
    return top_by_argsort(np.round(scores, 3), count)


def samples_that_never_vote(query, keys, sampled_queries, *, p=0.95):
    refuse(query, keys, sampled_queries)
    refuse_nucleus(0, p)
    group = query.shape[1] // keys.shape[1]
    kept = nucleus(attention_weights(query, np.repeat(keys, group, axis=1)), p)
    return kept.reshape(*keys.shape[:2], group, -1).any(axis=2)


def the_first_two_samples(query, keys, sampled_queries, *, p=0.95):
    return select_in_loops(query, keys, sampled_queries[:, :, :2], p=p)


WRONG = {
    "softmax": (softmax_and_1e_9, softmax_in_float32, softmax_at_twice_the_temperature),
    "nucleus": (a_nucleus_of_two_at_least, a_nucleus_whose_mass_is_squared, a_nucleus_of_at_most_eight),
    "single_step_budget": (a_budget_of_one_at_least_less_one, a_budget_of_the_first_half),
    "top": (the_best_by_size, the_first_tokens, rounded_before_they_rank),
    "select": (samples_that_never_vote, the_first_two_samples),
}
logits, softmax, attention_weights, nucleus, single_step_budget, top, select = (forms[0] for forms in RIGHT.values())
