"""What the grader asks beside the laws of the suite, written as laws."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import reject, strategies as st

from evictionary.classroom.child import StudentError
from evictionary.classroom.step import Step
from evictionary.errors import require
from evictionary.spec_tests.judge.by_hand import for_each_reader
from evictionary.spec_tests.judge.cases import Case, seeded_cases, seeds
from evictionary.spec_tests.judge.compare import agrees, equal
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.implementation import Implementation, oracle
from evictionary.spec_tests.judge.law import REQUIREMENTS, Law
from evictionary.spec_tests.judge.tolerance import Allowance, Violation
from evictionary.spec_tests.proof.planted import Mutant, load_mutants

must = functools.partial(require, error=Violation)
OWN = "grader::"  # what the names of these laws begin with


@dataclass(frozen=True)
class Check:
    """A law of the grader's own: the functions that it asks, what holds, how that is checked, and what is
    drawn for it.
    """

    functions: tuple[str, ...]
    sentence: str
    check: Callable[..., None]
    drawn: dict[str, Any] = field(default_factory=dict)
    examples: int = 0


def law(step: "Step", stem: str, constants: dict[str, Any], seed: int) -> Law:
    """The law of a step's `check`, for the file `stem` of a student with these constants. Raises KeyError
    where there is none.
    """
    one = CHECKS[step.check]
    return own_law(
        one if isinstance(one, Check) else one(step, stem, constants, seed), step.name, step.requirement
    )


def own_law(found: Check, name: str, requirement: str) -> Law:
    """A check as the law of a requirement."""

    def judging(impl: Implementation, **inputs: Any) -> None:
        impl.begin(f"{OWN}{name}")
        impl.asking, impl.drawn = "", impl.domain.fitted(inputs)
        try:
            found.check(impl, **impl.drawn)
        except OutsideDomain:  # an input that asks nothing neither holds nor fails
            reject()

    fields = (found.functions, f"{OWN}{name}", found.sentence, "", judging, found.drawn, lambda one: "")
    return replace(Law(REQUIREMENTS[requirement], *fields), examples=found.examples)


def _constants(step: "Step", stem: str, constants: dict[str, Any], seed: int) -> Check:
    """The defaults of the student's functions: the student's own constants, or those of the paper."""
    functions, check = {
        "lagkv": (("lagkv.retained_length", "lagkv.select"), _lagkv_defaults),
        "expected_attention": (("expected_attention.score",), _expected_attention_defaults),
    }[stem]
    shown = ", ".join(f"{name} {value}" for name, value in constants.items()) or "those of the paper"
    return Check(functions, f"The defaults are {shown}.", lambda impl: check(impl, constants))


def _expected_attention_defaults(impl: Implementation, constants: dict[str, Any]) -> None:
    case = Case(seed=3, num_kv_heads=2, length=9)
    query_mean = case.queries[:, :, 0]
    covariance = np.broadcast_to(np.eye(case.head_dim), (*query_mean.shape, case.head_dim))
    arguments = (case.keys, case.values, query_mean, covariance.copy())
    allowed = impl.allowance("expected_attention.score", *arguments, **constants)
    allowed.check(impl.expected_attention.score(*arguments), "the score")


def _lagkv_defaults(impl: Implementation, constants: dict[str, Any]) -> None:
    """Lengths that reveal another sink or lag size: the first compressed length, the length before it, and
    the next ones.
    """
    defaults = inspect.signature(oracle("lagkv.select")).parameters
    sink, lag = (constants.get(name, defaults[name].default) for name in ("sink_size", "lag_size"))
    for length in (sink + 2 * lag - 1, sink + 2 * lag, sink + 3 * lag - 1, sink + 3 * lag):
        expected = oracle("lagkv.retained_length")(length, keep_ratio=0.5, sink_size=sink, lag_size=lag)
        got = impl.lagkv.retained_length(length, keep_ratio=0.5)
        impl.calls.clear()  # thousands of tokens, of which the two lengths say all
        if got != expected:
            raise Violation(
                f"retained_length({length}, keep_ratio=0.5) = {got}, wanted {expected}", expected, got
            )
        states = np.random.default_rng(length).standard_normal((1, 1, length, 2))
        left = int(impl.lagkv.select(states, states, keep_ratio=0.5).sum())
        impl.calls.clear()
        if left != expected:
            raise Violation(
                f"select keeps {left} of {length} tokens with keep_ratio=0.5, wanted {expected}",
                expected,
                left,
            )


def _overflow(impl: Implementation, length: int, seed: int) -> None:
    """Deviations in the thousands: a softmax without its maximum
    overflows on each of them, not only on unlucky inputs.
    """
    states = np.random.default_rng(seed).standard_normal((4, 1, 2, length, 4))
    keys, values, next_keys, next_values = (*(1e4 * states[:2]), *states[2:])
    agrees(impl, "lagkv.score", keys, values, next_keys, next_values)


def _votes(impl: Implementation, case: Any, seed: int) -> None:
    """One sample in a head of its own: the top B_0 on drawn inputs. The union is not needed for it."""
    from evictionary.spec_tests.gvote.helpers import check_votes, drawn_queries, oracle_votes

    query, sampled = drawn_queries(case, seed, 1)
    kept = impl.gvote.select(query, case.keys, sampled)
    weights, logits = oracle_votes(impl, query, case.keys, sampled)
    check_votes(impl, kept, weights, logits, case.keys.shape[1], 0.95)


def _equal_numbers(impl: Implementation) -> None:
    """Groups without a range: the laws draw one only sometimes, and a smallest scale shows on no other."""
    numbers = np.repeat(np.array([[[7.0], [0.0], [-0.1]]]), 5, axis=-1)
    codes, _, scale = impl.quantisation.quantise(numbers)
    equal(scale, np.zeros((1, 3)), "the scale of equal numbers is not 0")
    equal(codes, np.zeros((1, 3, 5)), "the codes of equal numbers are not 0")


# What passes small inputs and is wrong on larger ones is wrong at one of these: batch items and heads,
# tokens, channels. A matrix over a thousand tokens, of all their channels too, fits the memory of an
# assignment.
LARGE = (
    Case(batch=5, num_kv_heads=9, group=2, length=20, head_dim=64, value_dim=64, num_queries=3),
    Case(length=1030, group=2, head_dim=64, value_dim=64, num_queries=3),
    Case(num_kv_heads=2, length=300, head_dim=128, value_dim=128, num_queries=3),
)
Asked = tuple[str, tuple[Any, ...], dict[str, Any]]  # a function and its arguments


def _at_a_size(stem: str, case: Case) -> list[Asked]:
    """What the functions of an assignment are asked at the size of a case."""
    keys, values, queries, query = case.keys, case.values, case.queries, case.queries[:, :, 0]
    match stem:
        case "keydiff":  # with any leading axes
            return [("score", (keys,), {}), ("score", (keys[0, 0],), {}), ("anchor", (keys[:, :, None],), {})]
        case "lagkv":
            settings = {"keep_ratio": 0.5, "sink_size": 3, "lag_size": case.length // 5}
            return [
                ("score", (keys, values, case.next_keys, case.next_values), {}),
                ("select", (keys, values), settings),
            ]
        case "gvote":
            weights = oracle("gvote.attention_weights")(query, for_each_reader(keys, queries))
            return [
                ("attention_weights", (query, for_each_reader(keys, queries)), {}),
                ("nucleus", (weights, 0.9), {}),
                ("select", (query, keys, queries[:, :, 1:]), {"p": 0.9}),
            ]
        case "expected_attention":
            statistics = oracle("expected_attention.query_statistics")(queries)
            return [
                ("query_statistics", (queries,), {}),
                ("average_rope", statistics, {"position": 1000, "horizon": 50}),
                ("score", (keys, values, *statistics), {}),
            ]
        case "momentkv":
            before = oracle("momentkv.no_moments")(keys, values)
            evicted = np.broadcast_to(np.arange(case.length) % 3 == 0, keys.shape[:3]).copy()
            moments = oracle("momentkv.update")(before, keys, values, evicted)
            return [
                ("update", (before, keys, values, evicted), {}),
                ("score", (query, keys, values, moments), {}),
                ("attend", (query, keys, values, ~evicted, moments), {}),
            ]
        case "h2o":
            return [("score", (queries, keys), {}), ("select", (queries, keys), {"budget": case.length // 2})]
        case "kv_cache":
            readers = for_each_reader(keys, queries)
            return [
                ("weights", (queries, readers), {}),
                ("attend", (queries, keys, values), {}),
                ("attend", (queries, keys, values), {"window": case.length // 3, "sinks": 2}),
                # An angle of a thousand radians is rounded, and a right answer may round it in another way.
                ("rotate", (keys, np.arange(case.length) % 32), {}),
            ]
        case "duo_attention":
            return [("estimate_gates", (query, keys[:, :, 0]), {"length": 200})]
        case "quantisation":
            whole = keys[:, :, : case.length // 4 * 4]  # groups of 4 divide its tokens
            return [
                ("quantise", (keys,), {"bits": 4}),
                ("pack", (oracle("quantisation.quantise")(keys)[0],), {}),
                ("by_token", (values,), {}),
                ("by_channel", (whole,), {"group_size": 4}),
                ("kivi", (keys, values), {"group_size": 16, "residual": 16}),
                ("hadamard", (keys,), {}),
            ]
    raise KeyError(stem)


def _sizes(step: "Step", stem: str, constants: dict[str, Any], seed: int) -> Check:
    """The functions that the file has, beside the oracle, at the sizes of a model; a mask has to be that
    of the oracle.
    """

    def check(impl: Implementation, seed: int) -> None:
        for case in (replace(each, seed=seed) for each in LARGE):
            impl.drawn = {"case": case}
            for name, args, kwargs in _at_a_size(stem, case):
                path = f"{stem}.{name}"
                wanted = oracle(path)(*args, **kwargs)
                if impl.missing((path,)):
                    continue
                if isinstance(wanted, np.ndarray) and wanted.dtype.kind == "b":
                    equal(impl.call(path, *args, **kwargs), wanted, f"{name} marks other tokens")
                else:
                    agrees(impl, path, *args, **kwargs)

    sentence = (
        "What holds for a few numbers holds for 5 batch items of 9 heads, for 128 channels, and for a "
        "thousand tokens."
    )
    asked = dict.fromkeys(f"{stem}.{name}" for name, _, _ in _at_a_size(stem, LARGE[0]) if name != "anchor")
    return Check(tuple(asked), sentence, check, {"seed": seeds()}, examples=1)


def _scales(impl: Implementation, case: Case) -> None:
    """Keys whose squares the dtype of a kernel does not
    hold, and those whose norms somebody takes for zero.
    """
    allowed = impl.allowance("keydiff.score", case.keys)
    for scale in (2.0**-66, 2.0**66):
        allowed.check(
            impl.keydiff.score(impl.round(case.keys) * scale), f"the score of keys of about {scale:.0e}"
        )


def _strides(impl: Any, case: Case) -> None:
    """Keys that lie in the memory channel by channel, as a transposed tensor does."""
    allowed, keys = (
        impl.allowance("keydiff.score", case.keys),
        np.asfortranarray(impl.round(case.keys), dtype=np.float32),
    )
    allowed.check(impl.child.call("score", keys), "the score of a transposed tensor")


LONG_PROMPT = 8192


def _blocks(impl: Implementation) -> None:
    """A prompt whose matrix of weights alone takes the memory that the assignment gives, with keys that
    spread attention evenly.
    """
    got = impl.h2o.score(np.ones((1, 1, LONG_PROMPT, 2)), np.zeros((1, 1, LONG_PROMPT, 2)))
    # query m gives 1 / (m + 1) to each token up to m
    expected = np.cumsum(1 / np.arange(LONG_PROMPT, 0, -1))[::-1]
    Allowance(expected[None, None], 1e-9, 1e-9).check(got, "the score of equal keys")


def _kernel(impl: Any, seed: int) -> None:
    """The scores depend on what a Triton kernel writes:
    all move when each number that it writes is changed.
    """
    keys = np.random.default_rng(seed).standard_normal((1, 2, 70, 64), dtype=np.float32)
    plain = impl.child.call("score", keys)
    # a file that notices the change has read what the kernel wrote
    with contextlib.suppress(ValueError, StudentError):
        changed = impl.child.call("score", keys, change_launches=True)
        if np.shape(changed) == np.shape(plain) and (np.asarray(changed) == plain).any():
            told = (
                "scores stay the same when every number that a Triton kernel writes is changed: no kernel "
                "computes them"
            )
            raise Violation(
                told, "scores that a function with @triton.jit writes, launched as kernel[grid](...)", None
            )


def _compiled(impl: Any, seed: int) -> None:
    """A kernel computes the scores of compiled code, right also at sizes that fill no tile. A launch that is
    stopped raises, and memory that nobody wrote is NaN.
    """
    for length, channels in ((37, 24), (5, 64), (130, 64)):
        keys = np.random.default_rng(seed).standard_normal((2, 3, length, channels), dtype=np.float32)
        agrees(impl, "keydiff.score", keys)
    _kernel(impl, seed)


MOST_SCORES = 2**18  # in the rows of a judge
Row = tuple[np.ndarray, int, np.ndarray | None]


def _rows(step: "Step", stem: str, constants: dict[str, Any], seed: int) -> Check:
    """Check that the student's rows of scores show the mistakes that the step names, on copies of top_k
    that have them.

    A row alone shows these, and no other mistake that begins above a size; the rows of a judge, which are
    many, show all of them.
    """
    bank = {
        name: one
        for name, one in load_mutants().items()
        if one.of == "selection.top_k" and (one.above or name in step.catches)
    }
    wanted = set(step.catches)

    def check(impl: Any) -> None:
        if step.longest:
            shown = _shown(bank, _row(impl.child.call(step.name), step.longest))
            _require(bank, missing=wanted - shown, others=shown - wanted)
            return
        answers = [
            impl.child.call(step.name, int(each))
            for each in np.random.default_rng(seed).integers(2**31, size=2)
        ]
        for answer in answers:
            must(
                isinstance(answer, tuple | list),
                f"{step.name} returned one {type(answer).__name__}, wanted a list of rows",
            )
            rows = [_row(each, MOST_SCORES) for each in answer]
            must(
                sum(len(scores) for scores, _, _ in rows) <= MOST_SCORES,
                f"{step.name} returned more than {MOST_SCORES} scores, wanted at most so many",
            )
            _require(bank, missing=wanted.difference(*(_shown(bank, row) for row in rows)), others=set())
        fixed = [one for one, other in zip(*answers, strict=False) if np.array_equal(one[0], other[0])]
        told = f"{step.name} returned the same scores for two seeds, wanted rows drawn with the seed"
        must(len(fixed) != len(answers[0]), told)
        small = {name for name in wanted if not bank[name].above}
        drawn = [
            row
            for row in (_row(each, MOST_SCORES) for each in answers[0])
            if not any(np.array_equal(row[0], one[0]) for one in fixed)
        ]
        if missing := small.difference(*(_shown(bank, row) for row in drawn)):
            raise Violation(
                f"{told}: those that are drawn do not show: "
                f"{'; '.join(bank[name].misconception for name in sorted(missing))}"
            )

    return Check((f"rows.{step.name}",), step.title + ".", check)


def _require(bank: dict[str, Mutant], missing: set[str], others: set[str]) -> None:
    told = [
        f"{word}: {'; '.join(bank[name].misconception for name in sorted(names))}"
        for word, names in (("what does not show", missing), ("what shows too", others))
        if names
    ]
    must(not told, "\n".join(told))


def _row(answer: Any, longest: int) -> Row:
    """A student's row: scores, budget, and protected
    tokens or None. Raises Violation unless top_k takes it.
    """
    must(
        isinstance(answer, tuple | list) and len(answer) in (2, 3),
        "a row is (scores, budget) or (scores, budget, protected)",
    )
    scores, budget, protected = (*answer, None)[:3]
    must(
        isinstance(scores, np.ndarray)
        and scores.ndim == 1
        and scores.dtype.kind == "f"
        and not np.isnan(scores).any(),
        "scores: wanted an array [T] of floats, none of them NaN",
    )
    must(0 < len(scores) <= longest, f"scores: got {len(scores)}, wanted 1 to {longest}")
    must(
        isinstance(budget, int | np.integer) and 0 < budget <= len(scores),
        f"budget: got {str(budget)[:40]}, wanted a whole number from 1 to {len(scores)}",
    )
    must(
        protected is None
        or (
            isinstance(protected, np.ndarray)
            and (protected.shape, protected.dtype) == (scores.shape, np.dtype(bool))
            and protected.sum() <= budget
        ),
        "protected: wanted a boolean array of the shape of scores, with at most as many True as the budget",
    )
    return scores.astype(np.float64), int(budget), protected


def _shown(bank: dict[str, Mutant], row: Row) -> set[str]:
    """The mistakes with which other tokens of the row stay."""
    with np.errstate(all="ignore"):
        right = oracle("selection.top_k")(*row)
        return {name for name, mutant in bank.items() if not np.array_equal(mutant.function(*row), right)}


# The checks that an assignment.toml may name; a function makes one for a student's step.
CHECKS: dict[str, Check | Callable[..., Check]] = {
    "constants": _constants,
    "overflow": Check(
        ("lagkv.score",),
        "Tokens ten thousand times as far apart as the next partition give finite scores.",
        _overflow,
        {"length": st.integers(2, 9), "seed": seeds()},
    ),
    "votes": Check(
        ("gvote.select",),
        "A single sample keeps its best tokens, as many as the nucleus of the current query holds.",
        _votes,
        {"case": seeded_cases(groups=(1,)), "seed": seeds()},
    ),
    "equal": Check(
        ("quantisation.quantise",),
        "A group of equal numbers has the scale 0 and the codes 0.",
        _equal_numbers,
    ),
    "sizes": _sizes,
    "compiled": Check(
        ("keydiff.score",),
        "The kernel, as Triton compiles it for an H100, stays inside its tensors. No two programs race, and "
        "the scores are right.",
        _compiled,
        {"seed": seeds()},
        examples=1,
    ),
    "scales": Check(
        ("keydiff.score",),
        "Keys of about 1e-20 and of about 1e20 score as their directions do.",
        _scales,
        {"case": seeded_cases(kinds=("normal",))},
    ),
    "strides": Check(
        ("keydiff.score",),
        "A transposed tensor with the same numbers has the same scores: use the strides or call "
        ".contiguous().",
        _strides,
        {"case": seeded_cases(min_length=2, kinds=("normal",))},
    ),
    "blocks": Check(
        ("h2o.score",),
        f"{LONG_PROMPT} queries on {LONG_PROMPT} tokens are scored without a matrix of their weights.",
        _blocks,
    ),
    "kernel": lambda step, stem, constants, seed: Check(
        ("keydiff.score",),
        "The scores come from a Triton kernel that the file defines and launches.",
        lambda impl: _kernel(impl, seed),
    ),
    "rows": _rows,
}
