"""What the law of gradients asks: arguments of every function of the contract, and the slope of its oracle.

The arguments are drawn from the lines of `reference/contract.py`, at generic numbers: a slope is asked for
where there is one, away from ties, zeros and bounds.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from evictionary.reference import momentkv_bounded
from evictionary.reference.contract import CONTRACT, STATES, Argument, arguments
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.implementation import Implementation, oracle
from evictionary.spec_tests.judge.libraries import to_numpy
from evictionary.spec_tests.judge.misfits import SETTINGS
from evictionary.spec_tests.judge.tolerance import Violation
from evictionary.spec_tests.memory.helpers import (
    ARGUMENTS,
    agree_within_rounding,
    in_pages,
    leaves,
    mask,
    moments_of,
    natives_of,
)

STEP = 2.0**-20
"""How far the numbers move for a slope: the oracle's float64 leaves ten digits of it, and seldom a tie lies
between.
"""


UNCHECKED = {
    "compactor.z_scores": "scores: B H_kv T",
    "momentkv.merge": "first: Moments B H_kv, second: Moments B H_kv",
    "momentkv.recover": "moments: Moments B H_kv",
    "snapkv.average_pool": "weights: ... T",
    "triattention.pair_lengths": "states: ... T D%2",
}
"""The lines of functions that check no argument, and have none in the contract."""


def calls_of_the_contract(impl: Implementation, case: Case) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Each provided function that `drawn` can call, its arguments by name, and what it gives without a
    graph; not where it raises, of which the laws of its equation say.
    """
    asked = False
    for path in impl.asked_of_memory():
        arguments = drawn(impl, path, case)
        if arguments is None or impl.domain.excludes(arguments, path):
            continue
        try:
            plain = to_numpy(impl.function(path)(**natives_of(impl, arguments)))
        except Exception:
            continue
        asked = True
        yield path, arguments, plain
    if not asked:
        raise OutsideDomain("no arguments are made for what it provides")


def drawn(impl: Implementation, path: str, case: Case) -> dict[str, Any] | None:
    """Arguments of a function by name, its settings among them, in the sizes of a case and rounded to the
    dtype; None where the contract does not say them, or the oracle refuses them.
    """
    if path not in CONTRACT and path not in UNCHECKED:
        return None
    generator = np.random.default_rng(case.seed)
    line = {each.name: each for each in arguments(UNCHECKED.get(path, path))}
    given: dict[str, Any] = {}
    settings = SETTINGS | {"count": 1, "kernel_size": 3, "budget": case.length - 2}
    for name, parameter in inspect.signature(oracle(path)).parameters.items():
        if name in line and (not line[name].optional or parameter.default is parameter.empty):
            given[name] = _made(line[name], case, generator)
        elif name == "positions":
            given[name] = np.arange(case.length)
        elif name in settings and (parameter.default is parameter.empty or name == "window_size"):
            given[name] = settings[name]
    if {"low", "high"} <= line.keys():
        given["high"] = given["low"] + np.abs(given["high"])
    given = {name: impl.rounded(value) for name, value in given.items()}
    try:
        oracle(path)(**given)
    except ValueError:
        return None
    return given


def _made(argument: Argument, case: Case, generator: np.random.Generator) -> Any:
    if argument.kind in STATES:
        return STATES_OF[argument.kind](case) if argument.kind in STATES_OF else None
    lead = (case.batch, case.num_kv_heads) if argument.lead else ()
    shape = (*lead, *(_size(axis, case) for axis in argument.own))
    match argument.kind:
        case "bool":  # as many in each row, half of them or the last one
            ranks = generator.random(shape).argsort(axis=-1).argsort(axis=-1)
            return ranks >= shape[-1] // 2
        case "whole":
            return generator.integers(1, 3, size=shape)
        case "weight" | "share":
            return generator.uniform(0.1, 0.9, size=shape)
        case _:
            return generator.normal(size=shape)


def _size(axis: str, case: Case) -> int:
    sizes = {
        "B": case.batch,
        "H_kv": case.num_kv_heads,
        "H_q": case.num_kv_heads * case.group,
        "T": case.length,
        "M": min(case.length, case.num_queries + 1),
        "D": case.head_dim,
        "D_v": case.value_dim,
        "kept": case.length - case.length // 2,
        "n*S": case.length,
    }
    name = axis.split("<")[0].split(">")[0].split("%")[0]
    return sizes["D"] // 2 if name == "D/2" else sizes.get(name, 5)


def _bounds(case: Case) -> momentkv_bounded.Bounds:
    """Those of the evicted tokens of `moments_of`, somewhat wider: their mean is not on an edge."""
    exact = momentkv_bounded.update(
        momentkv_bounded.no_bounds(case.keys, case.values),
        case.next_keys,
        case.next_values,
        mask(case, case.keys.shape[:3], 0.5),
    )
    return exact._replace(
        **{name: getattr(exact, name) + (0.5 if name.endswith("high") else -0.5) for name in exact._fields}
    )


STATES_OF = {
    "Moments": moments_of,
    "Bounds": _bounds,
    "PagedCache": in_pages,
    "CompressedCache": ARGUMENTS["cache"],
}


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
        answer = impl.function(path)(**natives)
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
