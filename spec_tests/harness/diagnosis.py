"""Which planted mistake an implementation makes: the one whose numbers it gives, where larger inputs leave no other.

On the smallest input many mistakes coincide: a mean over too few tokens and one with wrong weights may be the same number.
So the law is asked again, of larger inputs, and a mistake is named only where it is the only one that is left.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

from evictionary.spec_tests.harness.arithmetic import EPSILON
from evictionary.spec_tests.harness.degenerate import MATHEMATICS
from evictionary.spec_tests.harness.implementation import Call, Implementation, oracle
from evictionary.spec_tests.harness.law import Law
from evictionary.spec_tests.harness.planted import Mutant, load_mutants
from evictionary.spec_tests.harness.process import ProgramFailed

# How many inputs are drawn to tell mistakes apart, and how many of the largest calls are compared.
DRAWN, COMPARED = 24, 8
# Numbers among the arguments of a call: with fewer, mistakes coincide; with more, comparing takes long.
LEAST, MOST = 24, 2**15


def misconceptions(law: Law, implementation: Implementation) -> list[Mutant]:
    """The planted mistakes that give this implementation's numbers, for each function that the failing example called: one or none.

    A few answers may differ: where a sum cancels, two programs with one mistake disagree in the noise.
    """
    calls = [call for call in implementation.calls if call.result is not None]
    wrong = [call for call in calls if _differs(oracle(call.function), call, implementation.dtype)]
    suspects: dict[str, list[Mutant]] = {}
    for mutant in load_mutants().values():
        if law.examples and not mutant.above:
            continue  # on a long input only mistakes of size are tried: the others show on short ones
        own = [call for call in wrong if call.function == mutant.of]
        if own and not any(_differs(mutant.function, call, implementation.dtype) for call in own):
            suspects.setdefault(mutant.of, []).append(mutant)
    if not suspects:
        return []
    if law.examples or law.kind != MATHEMATICS:
        # A long input tells mistakes apart. A degenerate or a bad one has one cause, of several that an implementation may have.
        return [mutants[0] for mutants in suspects.values() if len(mutants) == 1]
    larger = _larger(law, implementation)
    found = []
    for function, mutants in suspects.items():
        seen = [call for call in larger if call.function == function]
        shown = sum(_differs(oracle(function), call, implementation.dtype) for call in seen)
        left = [mutant for mutant in mutants if _agrees(mutant.function, seen, implementation.dtype)]
        found += left if shown and len(left) == 1 else []
    return found


def _larger(law: Law, implementation: Implementation) -> list[Call]:
    """The largest calls that the law makes of the implementation, and of those before them, the largest first."""
    asked = replace(implementation, calls=[], history=deque(implementation.history, maxlen=1024), drawn={})

    def ask(**arguments: Any) -> None:
        try:
            law.check(asked, **arguments)
        except Exception:
            return  # it fails, or cannot be asked this: its calls are recorded

    if law.drawn:
        quietly = settings(max_examples=DRAWN, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
        with suppress(Exception, ProgramFailed):  # if nothing can be drawn, or a program dies, the earlier calls have to do
            quietly(given(**law.drawn)(ask))()
    calls = {id(call): (numbers_in(tuple(call.arguments.values())), call) for call in asked.history if call.result is not None}
    # A call of plain numbers has no size that could be too small.
    fitting = sorted((one for one in calls.values() if one[0] == 0 or LEAST <= one[0] <= MOST), key=lambda one: -one[0])
    by_function: dict[str, list[Call]] = {}
    for _, call in fitting:
        by_function.setdefault(call.function, []).append(call)
    return [call for found in by_function.values() for call in found[:COMPARED]]


def numbers_in(value: Any) -> int:
    """How many numbers an argument has, those in a tuple among them."""
    return sum(map(numbers_in, value)) if isinstance(value, tuple) else value.size if isinstance(value, np.ndarray) else 0


def _agrees(function: Callable[..., Any], calls: list[Call], dtype: str) -> bool:
    return sum(not _differs(function, call, dtype) for call in calls) >= 0.75 * len(calls)


def _differs(function: Callable[..., Any], call: Call, dtype: str) -> bool:
    try:
        with np.errstate(all="ignore"):
            numbers = function(**copy.deepcopy(call.arguments))  # some planted mistakes write into their inputs
    except Exception:
        return True
    return _unlike(call.result, numbers, dtype)


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
