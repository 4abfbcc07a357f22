"""What laws of several papers share: attention in plain loops, which each paper states anew, and checks that many laws make."""

from __future__ import annotations

from typing import Any

import numpy as np

from evictionary.spec_tests.harness.implementation import Implementation
from evictionary.spec_tests.harness.tolerance import Allowance, Violation, require_numbers


def causal_weights(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """softmax(q . k / sqrt(D)), query by query: of M queries [.., M, D] the m-th sees the keys [.., T, D] up to T - M + m.

    One query is that of the last token, which sees every key.
    """
    weights = np.zeros((*queries.shape[:-1], keys.shape[-2]))
    for place in np.ndindex(queries.shape[:-1]):
        seen = keys.shape[-2] - queries.shape[-2] + place[-1] + 1
        logits = keys[place[:-1]][:seen] @ queries[place] / keys.shape[-1] ** 0.5
        exponentials = np.exp(logits - logits.max())
        weights[place][:seen] = exponentials / exponentials.sum()
    return weights


def for_each_reader(states: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The states [B, H_kv, ..] of KV heads once for each of the query heads [B, H_q, ..] that read them: h reads h // G."""
    return np.repeat(states, queries.shape[1] // states.shape[1], axis=1)


def over_group(numbers: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """The mean of [B, H_q, ..] over the query heads of each KV head, [B, H_kv, ..]."""
    return numbers.reshape(numbers.shape[0], num_kv_heads, -1, *numbers.shape[2:]).mean(axis=2)


def require_loops(expected: np.ndarray, by_hand: np.ndarray, size: float = 1.0) -> None:
    """Raise Violation unless the oracle's numbers are those of the law's own loops; `size` is that of the numbers rounded."""
    if np.abs(expected - by_hand).max(initial=0) > 1e-12 * max(1.0, size):
        raise Violation("the oracle differs from the plain loop", by_hand, expected)


def require_equal(got: Any, expected: Any, message: str) -> None:
    """Raise Violation with this message unless `got` has the shape and numbers of `expected`; one number stands for all."""
    if not np.array_equal(got, np.broadcast_to(expected, np.shape(got)) if np.ndim(expected) == 0 else expected):
        raise Violation(message, expected, got)


def require_totals(got: Any, total: float, allowed: Allowance, what: str) -> None:
    """Raise Violation unless no number is negative and every row has this total, as softmax weights have 1."""
    require_numbers(got, allowed.expected.shape, what)
    totals = got.sum(axis=-1)
    if (got < 0).any() or np.abs(totals - total).max() > got.shape[-1] * allowed.largest + 1e-12 * total:
        raise Violation(f"{what} are negative somewhere, or do not sum to {total:g}", total, totals)


def check_permuted(impl: Implementation, path: str, seed: int, moving: tuple[np.ndarray, ...], *still: np.ndarray) -> None:
    """Raise Violation unless scores [B, H, T] move with their tokens when the states [B, H, T, ..] that come first are permuted."""
    allowed = impl.allowance(path, *moving, *still)
    order = np.random.default_rng(seed).permutation(moving[0].shape[2])
    got = impl.call(path, *(states[:, :, order] for states in moving), *still)
    allowed.check(got, "the permuted score", allowed.expected[:, :, order])


def check_heads_alone(impl: Implementation, path: str, *states: np.ndarray) -> None:
    """Raise Violation unless each head of each batch item gives alone what it gives among others.

    The first of the states [B, H, ..] has the KV heads; others may have the query heads, of which each head takes its readers.
    """
    allowed = impl.allowance(path, *states)
    together = impl.call(path, *states)
    require_numbers(together, allowed.expected.shape, "the result")
    num_kv_heads = states[0].shape[1]

    def of_head(array: np.ndarray, item: int, head: int) -> np.ndarray:
        group = array.shape[1] // num_kv_heads
        return array[item : item + 1, head * group : (head + 1) * group]

    for item, head in np.ndindex(states[0].shape[:2]):
        alone = impl.call(path, *(of_head(array, item, head) for array in states))
        expected = of_head(allowed.expected, item, head)
        allowed.check(of_head(together, item, head), "the head among others", expected)
        allowed.check(alone, "the head alone", expected)
