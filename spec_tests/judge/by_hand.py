"""What laws of several papers share: attention in plain loops, which each paper states anew, and what long
sums may be wrong by.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from evictionary.spec_tests.judge.arithmetic import ACCUMULATOR, EPSILON
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import Implementation
from evictionary.spec_tests.judge.tolerance import FACTOR, FACTOR_OF, require_numbers


def causal_weights(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """softmax(q . k / sqrt(D)), query by query: of M queries [.., M, D] the m-th sees the keys [.., T, D]
    up to T - M + m.

    One query is that of the last token, which sees every key.
    """
    weights = np.zeros((*queries.shape[:-1], keys.shape[-2]))
    for place in np.ndindex(queries.shape[:-1]):
        seen = keys.shape[-2] - queries.shape[-2] + place[-1] + 1
        logits = keys[place[:-1]][:seen] @ queries[place] / keys.shape[-1] ** 0.5
        exponentials = np.exp(logits - logits.max())
        weights[place][:seen] = exponentials / exponentials.sum()
    return weights


def lengths(vectors: np.ndarray) -> np.ndarray:
    """The Euclidean norm of each vector [.., D], number by number."""
    return np.array([math.hypot(*row) for row in vectors.reshape(-1, vectors.shape[-1]).tolist()]).reshape(
        vectors.shape[:-1]
    )


def linear(states: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Each state [.., C] through a linear layer [C, D], sum by sum, [.., D]."""
    rows = [
        [math.fsum(x * w for x, w in zip(state, column, strict=True)) for column in weight.T.tolist()]
        for state in states.reshape(-1, states.shape[-1]).tolist()
    ]
    return np.array(rows).reshape(*states.shape[:-1], weight.shape[-1])


def directions(keys: np.ndarray) -> np.ndarray:
    """Each key [.., D] divided by its length, number by number; a zero key stays one."""
    return keys / np.where(lengths(keys) == 0, 1, lengths(keys))[..., None]


def mean_cosines(keys: np.ndarray) -> np.ndarray:
    """The mean of the cosines of each key [.., T, D] to all keys of its head, pair by pair, [.., T]:
    `khat_i . mu` of KeyDiff.
    """
    means = np.zeros(keys.shape[:-1])
    for place in np.ndindex(keys.shape[:-2]):
        rows = directions(keys[place]).tolist()
        means[place] = [
            math.fsum(x * y for other in rows for x, y in zip(row, other, strict=True)) / len(rows)
            for row in rows
        ]
    return means


def for_each_reader(states: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The states [B, H_kv, ..] of KV heads once for each of the query heads [B, H_q, ..] that read them: h
    reads h // G.
    """
    return np.repeat(states, queries.shape[1] // states.shape[1], axis=1)


def over_group(numbers: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """The mean of [B, H_q, ..] over the query heads of each KV head, [B, H_kv, ..]."""
    return numbers.reshape(numbers.shape[0], num_kv_heads, -1, *numbers.shape[2:]).mean(axis=2)


def heads_alone(queries: np.ndarray, keys: np.ndarray) -> Iterator[tuple[Any, Any]]:
    """The place of each head of each batch item in keys [B, H_kv, ..], and in queries [B, H_q, ..] that of
    those that read it.
    """
    group = queries.shape[1] // keys.shape[1]
    for item, head in np.ndindex(keys.shape[:2]):
        batch = slice(item, item + 1)
        yield (batch, slice(head, head + 1)), (batch, slice(head * group, (head + 1) * group))


def above_all(got: Any, chosen: np.ndarray) -> Any:
    """The scores [.., T] with infinity for the chosen tokens [T], where each of them scores more than all
    others of its row.

    Any such number keeps them, as infinity does.
    """
    scores = np.array(got)
    top = scores[..., ~chosen].max(axis=-1, initial=-np.inf)
    lifted = scores[..., chosen].min(axis=-1, initial=np.inf) > top
    return np.where(chosen & lifted[..., None], np.inf, scores)


def window_above_all(got: Any, keys: np.ndarray, window_size: int) -> np.ndarray:
    """The scores of keys [B, H, T, D], infinite in the window of the last tokens where it scores more than
    all before it.

    Raises Violation for anything but one number for each key.
    """
    require_numbers(got, keys.shape[:3], "the score")
    return above_all(got, np.arange(keys.shape[2]) >= keys.shape[2] - window_size)


def rounding(impl: Implementation, terms: int = 1) -> float:
    """What a number may be wrong by, in parts of the sum
    of the magnitudes of the `terms` that it is the sum of.

    A few roundings to the dtype, and a sum in its accumulator, one term after the other: its errors grow like
    a random walk. For long inputs, where to run the oracle in other arithmetics costs too much; mistakes of
    size are larger by far.
    """
    factor = FACTOR_OF.get(impl.dtype, FACTOR)
    return float(factor * (2 * EPSILON[impl.dtype] + EPSILON[ACCUMULATOR[impl.dtype]] * np.sqrt(terms)))


def of_dtype(impl: Implementation, states: np.ndarray) -> np.ndarray:
    """The states rounded to the dtype; what it cannot hold (1e-7
    and 1e4 in float16) says nothing about an implementation.
    """
    rounded = impl.round(states)
    if impl.dtype == "float16" and not 1e-3 < np.abs(states).mean() < 1e3:
        impl.unrepresentable()
    return rounded


def width(impl: Implementation, wanted: int = 2) -> int:
    """As many channels as wanted, or as few as the domain
    allows: for laws whose numbers do not depend on them.
    """
    allowed = impl.domain.head_dim
    return wanted if not allowed or wanted in allowed else min(allowed)


def largest_product(impl: Implementation, head_dim: int) -> float:
    """`q . k` of a logit of 1e4, or what float16 holds: an
    implementation may multiply before it divides by sqrt(D).
    """
    return min(1e4 * float(np.sqrt(head_dim)), 6e4 if impl.dtype == "float16" else np.inf)


def in_parts(function: Callable[..., Any], *states: np.ndarray, size: int = 3000) -> list[Any]:
    """The results of `function` for one part after the other
    of the tokens, the next to last axis of all states.
    """
    return [
        function(*(each[..., start : start + size, :] for each in states))
        for start in range(0, states[0].shape[-2], size)
    ]


def attention_in_parts(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one KV head and its log-sum-exp, part by part: [M, D], [T, D] and [T, D_v] give [M,
    D_v] and [M].

    The parts are added up beside a maximum that grows.
    """
    top, total = np.full(len(queries), -np.inf), np.zeros(len(queries))
    output = np.zeros((len(queries), values.shape[-1]))
    for key_part, value_part in in_parts(lambda *parts: parts, keys, values):
        logits = queries @ key_part.T / np.sqrt(keys.shape[-1])
        higher = np.maximum(top, logits.max(axis=-1))
        weights, shrunk = np.exp(logits - higher[:, None]), np.exp(top - higher)
        total = total * shrunk + weights.sum(axis=-1)
        output = output * shrunk[:, None] + weights @ value_part
        top = higher
    return output / total[:, None], top + np.log(total)


def weights_in_parts(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The attention of queries [M, D] on all of the keys [T, D] of
    one head, [M, T], by the log-sum-exp of `attention_in_parts`.
    """
    normaliser = attention_in_parts(queries, keys, keys[:, :1])[1]
    return np.exp(queries @ keys.T / np.sqrt(keys.shape[-1]) - normaliser[:, None])


def looking(case: Case, readers: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Queries [1, H_q, D] and keys [1, H_kv, T, D] with which query head readers[i] looks at tokens[i],
    and at no other tokens.

    A head looks at all of its tokens alike: the products are exact there, and equal, so that rounded logits
    hide no split of a long row. All of them are negative, so that padding shows.
    """
    heads = np.arange(case.num_kv_heads * case.group)
    channels = heads % case.group % case.head_dim
    queries = np.zeros((1, len(heads), case.head_dim))
    queries[0, heads, channels] = math.isqrt(case.head_dim)
    keys = np.full((1, case.num_kv_heads, case.length, case.head_dim), -64.0)
    keys[0, readers // case.group, tokens, channels[readers]] = -2
    return queries, keys


def neighbours(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """A few neighbouring tokens for each query head, from the first to the last token of a long row: the
    heads, and the tokens.
    """
    heads = case.num_kv_heads * case.group
    tokens = np.linspace(0, case.length - 1, max(64, 4 * heads)).astype(int)
    return np.arange(len(tokens)) * heads // len(tokens), tokens


def accumulating(impl: Implementation) -> float:
    """The distance from 1 to the next number of the dtype in which sums are accumulated."""
    return EPSILON[ACCUMULATOR[impl.dtype]]


def final_rounding(impl: Implementation) -> float:
    """What a number of size 1 may be wrong by that is rounded to the dtype twice."""
    return 2 * EPSILON[impl.dtype]


def angle_error(impl: Implementation, position: Any) -> Any:
    """What an angle t w up to this position (or each of these) may be wrong by: float32 or wider rounds
    frequency and product.
    """
    return 2 * position * accumulating(impl)


def sum_errors(
    impl: Implementation, terms: int, total: np.ndarray, squares: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """What a sum of so many exact terms may be wrong by; `squares` and `sizes` are the sums of their
    squares and magnitudes.

    The terms are rounded to the dtype, independently of each other, and so is the sum; the accumulator adds
    them one by one.
    """
    factor = FACTOR_OF.get(impl.dtype, FACTOR)
    rounded = EPSILON[impl.dtype] * (np.abs(total) + np.sqrt(squares))
    return np.asarray(factor * (2 * rounded + accumulating(impl) * np.sqrt(terms) * sizes))


def logit_errors(impl: Implementation, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """What each logit q . k / sqrt(D) of queries [.., M, D]
    and keys [.., T, D] may be wrong by, [.., M, T].

    The inputs are exact. The logit is rounded to the dtype, or the query times 1 / sqrt(D) is; the
    accumulator adds the products.
    """
    root, across = np.sqrt(keys.shape[-1]), np.swapaxes(keys, -1, -2)
    products = queries @ across, queries**2 @ across**2, np.abs(queries) @ np.abs(across)
    return sum_errors(impl, keys.shape[-1], *products) / root


def softmax_slack(impl: Implementation, weights: np.ndarray, errors: Any) -> np.ndarray:
    """What softmax weights [.., T] may be wrong by, at most 1, where their logits may be by `errors`, [..,
    T] or one number.
    """
    errors = np.minimum(errors, 50.0)
    least = (weights * np.exp(-errors)).sum(axis=-1, keepdims=True)
    smallest = 2.0**-23 if impl.dtype == "float16" else 1e-37  # below it numbers lose their digits
    return (
        np.minimum(weights * (np.exp(errors) / least - 1 + rounding(impl, weights.shape[-1])), 1) + smallest
    )


def attended(impl: Implementation, queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The causal weights [B, H_q, M, T] of queries [B, H_q, M, D] on the keys of KV heads, and what they
    may be wrong by.
    """
    keys = for_each_reader(keys, queries)
    weights = causal_weights(queries, keys)
    slack = np.empty_like(weights)
    for head in np.ndindex(weights.shape[:2]):  # one after the other: of long prompts they are large
        slack[head] = softmax_slack(impl, weights[head], logit_errors(impl, queries[head], keys[head]))
    return weights, slack


def output_slack(
    impl: Implementation, queries: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """What attention of queries [M, D] on one KV head, keys
    [T, D] and values [T, D_v], may be wrong by, [M, D_v].

    Errors of weights are independent of each other, so they add up by their squares. Where the query itself
    is rounded, all logits move together: so much as one such query moves the output.
    """
    weights, output = weights_in_parts(queries, keys), attention_in_parts(queries, keys, values)[0]
    signs = np.random.default_rng(len(keys)).choice([-1, 1], size=queries.shape)
    moved = attention_in_parts(queries * (1 + EPSILON[impl.dtype] * signs), keys, values)[0]
    together = FACTOR_OF.get(impl.dtype, FACTOR) * np.abs(moved - output).max()
    each = softmax_slack(impl, weights, logit_errors(impl, queries, keys))
    added = sum_errors(impl, len(keys), output, weights**2 @ values**2, weights @ np.abs(values))
    return np.asarray(np.sqrt(each**2 @ values**2) + together + added)
