"""GVote as different people write it, in parts."""

import math
from fractions import Fraction

import numpy as np

from evictionary.spec_tests.shared.forms import LOGITS, SOFTMAX, TOP


def logits_in_loops(query, keys):
    heads, length = np.broadcast_shapes(query.shape[:-1], keys.shape[:-2]), keys.shape[-2]
    query, keys = (
        np.broadcast_to(query, (*heads, query.shape[-1])),
        np.broadcast_to(keys, (*heads, *keys.shape[-2:])),
    )
    out = np.empty((*heads, length))
    for head in np.ndindex(heads):
        out[head] = [np.dot(query[head], key) / math.sqrt(len(key)) for key in keys[head]]
    return out


def weights_of_a_softmax(query, keys):
    return softmax(logits(query, keys))


def weights_one_row_at_a_time(query, keys):
    scores = logits(query, keys)
    return np.stack([softmax(row) for row in scores.reshape(-1, scores.shape[-1])]).reshape(scores.shape)


def nucleus_by_the_tail(attention, p):
    attention = np.asarray(attention, dtype=float)
    order = np.argsort(-attention, axis=-1, kind="stable")
    tail = np.cumsum(np.take_along_axis(attention, order, axis=-1)[..., ::-1], axis=-1)[..., ::-1]
    needed = tail > float(1 - Fraction(str(p))) * tail[..., :1]
    needed[..., 0] = True
    kept = np.zeros(attention.shape, dtype=bool)
    np.put_along_axis(kept, order, needed, axis=-1)
    return kept


def nucleus_token_by_token(attention, p):
    kept = np.zeros(attention.shape, dtype=bool)
    for row in np.ndindex(attention.shape[:-1]):
        wanted, mass = Fraction(str(p)) * sum(map(Fraction, attention[row].tolist())), Fraction(0)
        for token in sorted(
            range(attention.shape[-1]), key=lambda token, row=row: (-attention[row][token], token)
        ):
            if mass >= wanted and kept[row].any():
                break
            kept[row][token] = True
            mass += Fraction(float(attention[row][token]))
    return kept


def nucleus_by_counting(attention, p):
    order = np.argsort(-attention, axis=-1, kind="stable")
    falling = np.take_along_axis(attention, order, axis=-1)
    missing = np.cumsum(falling[..., ::-1], axis=-1)[..., ::-1] / np.maximum(
        falling.sum(axis=-1, keepdims=True), 1e-300
    )
    count = np.maximum(1, (missing > float(1 - Fraction(str(p)))).sum(axis=-1, keepdims=True))
    return np.argsort(order, axis=-1) < count


def nucleus_from_the_light_end(attention, p):
    kept = np.ones(attention.shape, dtype=bool)
    for row in np.ndindex(attention.shape[:-1]):
        weights, spare = attention[row].tolist(), Fraction(0)
        may_go = (1 - Fraction(str(p))) * sum(map(Fraction, weights))
        for token in sorted(range(len(weights)), key=lambda token, weights=weights: (weights[token], -token))[
            :-1
        ]:
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
    return np.array(
        [sum(row) for row in candidates.reshape(-1, candidates.shape[-1]).tolist()], dtype=int
    ).reshape(candidates.shape[:-1])


def select_in_loops(query, keys, sampled_queries, *, p=0.95):
    group, kept = query.shape[1] // keys.shape[1], np.zeros(keys.shape[:3], dtype=bool)
    for batch, head in np.ndindex(query.shape[:2]):
        states = keys[batch, head // group]
        budget = int(single_step_budget(nucleus(attention_weights(query[batch, head], states), p)))
        for sample in sampled_queries[batch, head]:
            kept[batch, head // group] |= top(logits(sample, states), budget)
    return kept


def select_by_groups(query, keys, sampled_queries, *, p=0.95):
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


FORMS: dict = {
    "logits": (*LOGITS, logits_in_loops),
    "softmax": SOFTMAX,
    "attention_weights": (weights_of_a_softmax, weights_one_row_at_a_time),
    "nucleus": (nucleus_by_the_tail, nucleus_token_by_token, nucleus_by_counting, nucleus_from_the_light_end),
    "single_step_budget": (budget_by_sum, budget_by_count, budget_in_lists),
    "top": TOP,
    "select": (select_in_loops, select_by_groups),
}
logits, softmax, attention_weights, nucleus, single_step_budget, top, select = (
    forms[0] for forms in FORMS.values()
)
