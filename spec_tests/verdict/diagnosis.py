"""Which planted mistake an implementation makes: the one
whose numbers it gives, where larger inputs leave no other.

On the smallest input many mistakes coincide: a mean over too few tokens and one with wrong weights may be the
same number. So the law is asked again, of larger inputs, and a mistake is named only where it is the only one
that is left.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

from evictionary.spec_tests.judge.arithmetic import EPSILON, round_to
from evictionary.spec_tests.judge.degenerate import MATHEMATICS
from evictionary.spec_tests.judge.domain import NothingToAsk
from evictionary.spec_tests.judge.implementation import Call, Implementation, oracle
from evictionary.spec_tests.judge.law import LAWS, Law
from evictionary.spec_tests.judge.process import ProgramFailed
from evictionary.spec_tests.proof.planted import Mutant, answer, load_mutants
from evictionary.store import grouped

# How many inputs are drawn to tell mistakes apart, and how many of the largest calls are compared.
DRAWN, COMPARED = 24, 8
# Numbers among the arguments of a call: with fewer, mistakes coincide; with more, comparing takes long.
LEAST, MOST = 24, 2**15
# How many laws more are asked where one leaves several mistakes.
OTHER_LAWS = 3
# Where the largest error is a smaller share of the largest number, only the last digits are wrong.
LAST_DIGITS = 1e-4


def misconceptions(law: Law, implementation: Implementation) -> list[Mutant]:
    """The planted mistakes that give this implementation's numbers, for each function that the failing
    example called: one or none.

    A few answers may differ: where a sum cancels, two programs with one mistake disagree in the noise.
    """
    calls = [call for call in implementation.calls if call.result is not None]
    wrong = [call for call in calls if differs(oracle(call.function), call, implementation.dtype)]
    suspects: dict[str, list[Mutant]] = {}
    for mutant in load_mutants().values():
        # On a long input only mistakes of size are tried: the others show on short ones. A mistake that is
        # written for tensors cannot take the arrays of a call.
        if mutant.array_library == "torch" or (law.examples and not mutant.above):
            continue
        own = [call for call in wrong if call.function == mutant.of]
        # A reference that was changed has no place for some edits: such a mistake is not named.
        with suppress(ValueError):
            if own and not any(differs(mutant.function, call, implementation.dtype) for call in own):
                suspects.setdefault(mutant.of, []).append(mutant)
    if not suspects:
        return []
    if law.examples or law.kind != MATHEMATICS:
        # A long input tells mistakes apart. A degenerate or a bad one has one cause, of several that an
        # implementation may have.
        return [mutants[0] for mutants in suspects.values() if len(mutants) == 1]
    shown = set()
    for asked in [law, *_others(law, suspects, implementation)]:
        larger = _larger(asked, implementation, suspects)
        for function, mutants in suspects.items():
            calls = larger.get(function, [])
            # Where the answer is right, many mistakes give it too: a mistake has to give the wrong ones, of
            # two inputs at least.
            own = [call for call in calls if differs(oracle(function), call, implementation.dtype)]
            suspects[function] = [
                mutant
                for mutant in mutants
                if all(_agrees(mutant.function, each, implementation.dtype) for each in (calls, own))
            ]
            if len(own) > 1:
                shown.add(function)
        if all(
            not mutants or (len(mutants) == 1 and function in shown) for function, mutants in suspects.items()
        ):
            break
    return [mutants[0] for function, mutants in suspects.items() if len(mutants) == 1 and function in shown]


def _others(law: Law, suspects: dict[str, list[Mutant]], implementation: Implementation) -> list[Law]:
    """A few more laws of the same functions: one law may draw no input at which two mistakes differ."""
    numeric = [
        each for each in LAWS.values() if each.drawn and not each.examples and each.kind == MATHEMATICS
    ]
    same = [each for each in numeric if each is not law and set(suspects) & set(each.functions)]
    found = [each for each in same if not each.brute_force and not each.missing(implementation)[0]]
    return sorted(found, key=lambda each: each.requirement.id != law.requirement.id)[:OTHER_LAWS]


def _larger(law: Law, implementation: Implementation, functions: Container[str]) -> dict[str, list[Call]]:
    """The largest calls that the law makes of each of these functions, and of those before them, and the
    largest wrong ones.
    """
    asked = replace(implementation, calls=[], history=deque(implementation.history, maxlen=1024), drawn={})

    def ask(**arguments: Any) -> None:
        with suppress(Exception):  # it fails, or cannot be asked this: its calls are recorded
            law.check(asked, **arguments)

    if law.drawn:
        quietly = settings(
            max_examples=DRAWN,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
        )
        # If nothing can be drawn, or a program dies, the earlier calls have to do.
        with suppress(Exception, NothingToAsk, ProgramFailed):
            quietly(given(**law.drawn)(ask))()
    answered = (call for call in asked.history if call.result is not None and call.function in functions)
    sized = [(numbers_in(tuple(call.arguments.values())), call) for call in answered]
    # A call of plain numbers has no size that could be too small.
    sized = [(size, call) for size, call in sized if not size or LEAST <= size <= MOST]
    found = grouped((call.function, call) for _, call in sorted(sized, key=lambda one: -one[0]))
    for function, calls in found.items():
        # A mistake that few inputs show may show on none of the largest.
        wrong = (each for each in calls[COMPARED:] if differs(oracle(function), each, implementation.dtype))
        found[function] = [*calls[:COMPARED], *itertools.islice(wrong, COMPARED)]
    return found


def sign(implementation: Implementation, law: Law | None = None) -> str:
    """What wrong answers look like where no planted mistake gives them, in a sentence; empty where they
    look like nothing.

    The largest of the latest answers are looked at, and with a law those of larger inputs of it: one number
    looks like anything.
    """
    answered = [
        call
        for call in (*implementation.history, *implementation.calls)
        if isinstance(call.result, np.ndarray)
    ]
    larger = (
        _larger(law, implementation, law.functions)
        if law and not law.examples and law.kind == MATHEMATICS
        else {}
    )
    found = [
        *(call for calls in larger.values() for call in calls if isinstance(call.result, np.ndarray)),
        *sorted(answered, key=lambda call: -numbers_in(tuple(call.arguments.values()))),
    ]
    wrong = (call for call in found if differs(oracle(call.function), call, implementation.dtype))
    some = itertools.islice(wrong, COMPARED)
    rights = ((call, answer(oracle(call.function), **call.arguments)) for call in some)
    return next(
        (
            looks
            for call, right in rights
            if isinstance(right, np.ndarray)
            for looks in _signs(call, right, implementation, answered)
        ),
        "",
    )


def _signs(
    call: Call, right: np.ndarray, implementation: Implementation, answered: list[Call]
) -> Iterator[str]:
    """All that a wrong answer looks like, the most telling first."""
    got, function, dtype = call.result, oracle(call.function), implementation.dtype
    both = got.dtype.kind == right.dtype.kind == "f"
    if both and np.isnan(got).sum() > np.isnan(right).sum():
        told = "a division of zero by zero, or memory that nothing was written to"
        yield f"{np.isnan(got).sum()} of {got.size} numbers are NaN: {told}"
    yield from _axes(call, right, dtype)
    if got.size and (got == got.flat[0]).all() and (got.size > 1 or not got.any()):
        yield f"every number of the answer is {got.flat[0]}"
    if any(np.array_equal(value, got) for value in call.arguments.values()):
        yield "the answer is one of the arguments"
    for earlier in answered:
        # Of few tokens the same ones are kept by chance.
        enough = 64 if got.dtype == bool else 2
        alike = earlier.function == call.function and got.size >= enough and earlier.result.shape == got.shape
        if alike and not _unlike(got, answer(function, **earlier.arguments), dtype):
            yield (
                "the answer is that to an earlier input: does the code remember it by its address, its "
                "shape or a part of it?"
            )
    if not both or got.shape != right.shape or not np.isfinite(right).all() or not right.any():
        return
    factor = float((got * right).sum() / (right * right).sum())
    if abs(factor - 1) > 1e-3 and right.size > 1 and not _unlike(got, factor * right, dtype):
        yield f"the answer is {factor:.6g} times the right one"
    for coarse in (name for name in EPSILON if EPSILON[name] > EPSILON[dtype]):
        rounded = {
            key: round_to(each, coarse) if isinstance(each, np.ndarray) and each.dtype.kind == "f" else each
            for key, each in call.arguments.items()
        }
        for what, numbers in (
            ("the inputs", answer(function, **rounded)),
            ("the answers", round_to(right, coarse)),
        ):
            if not _unlike(got, numbers, dtype):
                yield f"{what} are rounded to {coarse}"
    own = _error(got, right)
    if own[1] < LAST_DIGITS:
        # A report shows the last call: a reader looks for the error of that one.
        shown = [
            each
            for each in implementation.calls[-1:]
            if isinstance(each.result, np.ndarray) and differs(oracle(each.function), each, dtype)
        ]
        errors = [_error(each.result, answer(oracle(each.function), **each.arguments)) for each in shown]
        largest, share = next((each for each in errors if 0 < each[1] < LAST_DIGITS), own)
        told = (
            "more than rounding explains: a number added for safety (norm + 1e-12) or a step in a lower "
            "precision does this"
        )
        yield f"the largest error is {largest:.1e}, {share:.1e} of the largest number, {told}"


def _error(got: np.ndarray, right: Any) -> tuple[float, float]:
    """The largest error of an answer, and its share of the
    largest right number; infinite where they cannot be compared.
    """
    both = isinstance(right, np.ndarray) and got.dtype.kind == right.dtype.kind == "f"
    if not both or got.shape != right.shape or not np.isfinite(right).all() or not right.any():
        return math.inf, math.inf
    largest = float(np.abs(got - right).max())
    return largest, largest / float(np.abs(right).max())


def _axes(call: Call, right: np.ndarray, dtype: str) -> Iterator[str]:
    """Whether the answer has the axes of tokens and heads
    exchanged, or the code takes them so in its arguments.
    """
    got = call.result
    if right.ndim < 3 or got.ndim != right.ndim:
        return
    wanted, turned = (("B", "H", "T", "D")[: right.ndim], ("B", "T", "H", "D")[: right.ndim])
    if got.shape != right.shape or right.shape[1] > 1 < right.shape[2]:
        told = f"the axes are [{', '.join(turned)}], wanted [{', '.join(wanted)}]"
        if not _unlike(np.swapaxes(got, 1, 2), right, dtype):
            yield f"{told}: exchange the second and the third of the answer"
        exchanged = {
            name: np.swapaxes(value, 1, 2) if isinstance(value, np.ndarray) and value.ndim > 2 else value
            for name, value in call.arguments.items()
        }
        other = answer(oracle(call.function), **exchanged)
        if isinstance(other, np.ndarray) and not all(
            _unlike(got, each, dtype) for each in (other, np.swapaxes(other, 1, 2))
        ):
            yield f"{told}: the code takes the second axis of its arguments for the tokens"


def numbers_in(value: Any) -> int:
    """How many numbers an argument has, those in a tuple among them."""
    return (
        sum(map(numbers_in, value))
        if isinstance(value, tuple)
        else value.size
        if isinstance(value, np.ndarray)
        else 0
    )


def _agrees(function: Callable[..., Any], calls: list[Call], dtype: str) -> bool:
    return sum(differs(function, call, dtype) for call in calls) <= 0.25 * len(calls)


def differs(function: Callable[..., Any], call: Call, dtype: str) -> bool:
    """Whether a function gives another answer than the call got, by more than the dtype explains."""
    numbers = answer(function, **call.arguments)
    return isinstance(numbers, Exception) or _unlike(call.result, numbers, dtype)


def _unlike(got: Any, other: Any, dtype: str) -> bool:
    """Whether two results differ by more than the dtype explains; tuples entry by entry."""
    if isinstance(got, tuple) or isinstance(other, tuple):
        if not isinstance(got, tuple) or not isinstance(other, tuple) or len(got) != len(other):
            return True
        return any(_unlike(mine, theirs, dtype) for mine, theirs in zip(got, other, strict=True))
    got, other = np.asarray(got), np.asarray(other)
    if got.shape != other.shape:
        return True
    if got.dtype.kind != "f" or other.dtype.kind != "f":
        return not np.array_equal(got, other)
    # The mutant computes in float64: the numbers agree to what the dtype can hold.
    size = np.abs(other[np.isfinite(other)]).max(initial=0)
    return not np.allclose(got, other, rtol=0, atol=64 * EPSILON[dtype] * size, equal_nan=True)
