"""What the law of gradients asks: the slope of the oracle of every function of the contract.

It is asked for at generic numbers, where there is a slope, away from ties, zeros and bounds.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.implementation import Implementation, oracle
from evictionary.spec_tests.judge.libraries import to_numpy
from evictionary.spec_tests.judge.tolerance import Violation
from evictionary.spec_tests.memory.arguments import arguments_inside
from evictionary.spec_tests.memory.helpers import (
    agree_within_rounding,
    as_called,
    ask,
    leaves,
    natives_of,
    taken,
)

STEP = 2.0**-20
"""How far the numbers move for a slope: the oracle's float64 leaves ten digits of it, and seldom a tie lies
between.
"""


def calls_of_the_contract(impl: Implementation, case: Case) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Each provided function, its arguments by name, and what it gives without a
    graph; not where it raises, of which the laws of its equation say.
    """
    silent = "it takes no arguments of such sizes"
    asked = False
    for path in impl.asked_of_memory():
        arguments = taken(impl, path, arguments_inside(impl, path, case))
        if arguments is None:
            continue
        silent = "each of its functions raises, of which the laws of its equation say"
        try:
            plain = to_numpy(ask(impl, path, natives_of(impl, arguments)))
        except Violation:
            continue
        asked = True
        yield path, arguments, plain
    if not asked:
        raise OutsideDomain(silent)


Name = tuple[str, str]
"""An argument, and a field of it or an empty string."""


def numbers(given: dict[str, Any]) -> Iterator[tuple[Name, np.ndarray]]:
    """Each array of floating numbers among arguments."""
    for name, value in given.items():
        fields = value._asdict().items() if hasattr(value, "_asdict") else [("", value)]
        for field, array in fields:
            if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                yield (name, field), array


def entry(given: dict[str, Any], name: Name) -> Any:
    """The argument, or the field of it, of this name."""
    return getattr(given[name[0]], name[1]) if name[1] else given[name[0]]


def directions_of(given: dict[str, Any], seed: int) -> Iterator[tuple[Name, np.ndarray]]:
    """For each array of floating numbers a direction to move it in; what is infinite stays."""
    generator = np.random.default_rng(seed)
    for name, array in numbers(given):
        yield name, np.where(np.isfinite(array), generator.normal(size=array.shape), 0)


def slope(path: str, given: dict[str, Any], name: Name, along: np.ndarray, seed: int) -> float:
    """How fast the oracle's `weighed` sum moves when one array moves along a direction."""

    def moved(by: float) -> Any:
        argument, field = name
        array = entry(given, name) + by * along
        value = given[argument]._replace(**{field: array}) if field else array
        return weighed(oracle(path)(**given | {argument: value}), seed)

    return float(moved(STEP) - moved(-STEP)) / (2 * STEP)


def floats(answer: Any) -> list[Any]:
    """The floating numbers of an answer, arrays or tensors."""
    return [leaf for leaf in leaves(answer) if "float" in str(leaf.dtype)]


def weighed(answer: Any, seed: int) -> Any:
    """The sum of the finite numbers of an answer, each times 1, -1, 1/2 or -1/2, which no dtype rounds."""
    generator, found = np.random.default_rng(seed), 0.0
    for leaf in floats(answer):
        weights = generator.choice([1, -1, 0.5, -0.5], size=tuple(leaf.shape))
        if isinstance(leaf, np.ndarray):
            found = found + (np.where(np.isfinite(leaf), leaf, 0) * weights).sum()
        else:
            finite = leaf.double().masked_fill(~leaf.isfinite(), 0)
            found = found + (finite * finite.new_tensor(weights)).sum()
    return found


def gradients(
    impl: Implementation, path: str, given: dict[str, Any], seed: int
) -> tuple[Any, dict[Name, np.ndarray | None]] | None:
    """The answer of a call that records a graph, and the gradient of its `weighed` sum by argument, None
    without a graph. None where the call is refused by the name of the function.

    Raises Violation where it raises otherwise, and where the graph cannot be walked back.
    """
    natives = {name: impl.native(value) for name, value in given.items()}
    asked = {name: entry(natives, name).requires_grad_() for name, _ in numbers(given)}
    try:
        args, kwargs = as_called(path, natives)
        answer = impl.function(path)(*args, **kwargs)
    except Exception as error:
        if path in str(error) or not impl.strict:
            return None
        said = f"{type(error).__name__}: {error}"
        raise Violation(
            f"{path} neither carries the graph nor refuses the call by its name: {said}", path, said
        ) from error
    whole = weighed(answer, seed)
    if getattr(whole, "requires_grad", False):
        try:
            whole.backward()
        except Exception as error:
            raise Violation(
                f"the graph of {path} cannot be walked back: {error}", "a gradient", None
            ) from error
    return answer, {name: None if leaf.grad is None else to_numpy(leaf.grad) for name, leaf in asked.items()}


def is_wrong(impl: Implementation, path: str, given: dict[str, Any], answer: Any) -> bool:
    """Whether an answer is not the oracle's, whatever its gradient."""
    try:
        agree_within_rounding(impl, path, given, oracle(path)(**given), answer)
    except Violation:
        return True
    return False
