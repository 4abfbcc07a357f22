"""Wrong arguments made from the contract: an axis longer, empty or missing, and numbers of another kind."""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from evictionary.reference.contract import PARITIES, Argument, Range, arguments, contract_of
from evictionary.spec_tests.judge.implementation import oracle

SIZES = {"B": 1, "H_kv": 2, "H_q": 4, "T": 4, "M": 2, "N": 2, "D": 4, "h": 2, "kept": 4}
"""Each axis has its own size where two can be confused; an axis that is not named here has 3."""

SETTINGS: dict[str, Any] = {
    "aggregate": lambda weights: weights.sum(axis=-2),
    "attend": lambda states: states,
    "budget": 4,
    "feed_forward": lambda states: states,
    "num_kv_heads": 2,
    "positions": np.arange(4),
}
"""What a function takes beside its arrays, where the least number of its range does not fit the arrays here,
or where no signature says a range.
"""


class Misfit(NamedTuple):
    """A call that must be refused: what is wrong with which argument, and all arguments by name.

    `reads_numbers`, where the implementation has to look at the numbers of an array to know; `shows`, where a
    NaN in the answer is as good as a refusal. `others` are the arguments that disagree with it: nobody can
    know which of them is wrong, so each may be named.
    """

    argument: str
    what: str
    given: dict[str, Any]
    reads_numbers: bool = False
    shows: bool = False
    others: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        """A pattern of the arguments that a message may name."""
        return "|".join((self.argument, *self.others))


def fitting(path: str, *, optional: bool = False) -> dict[str, Any]:
    """Arguments of a function of the contract that fit one another: ones, and settings; with its optional
    arrays or without.
    """
    named = {each.name: each for each in arguments(path)}
    given: dict[str, Any] = {}
    ranges = contract_of(path).settings
    for name, parameter in inspect.signature(oracle(path)).parameters.items():
        if name in named:
            if optional or not named[name].optional:
                given[name] = _made(named[name])
            elif parameter.default is parameter.empty:
                given[name] = None
        elif parameter.default is parameter.empty or name == "window_size":
            given[name] = SETTINGS[name] if name in SETTINGS else within(ranges[name])
    return given


def within(allowed: Range) -> Any:
    """A setting of this range: the least number, or one near it or in the middle."""
    low, high, closed_low, _ = allowed.limits
    if allowed.whole:
        return int(low)
    if low == -math.inf:
        return 0.0
    return (low + high) / 2 if high < math.inf else low if closed_low else low + 1


def misfits(path: str) -> Iterator[Misfit]:
    """Every wrong call of a function that its line tells.
    Optional arrays come in the calls of their own misfits.
    """
    line = arguments(path)
    for optional in {argument.optional for argument in line}:
        given = fitting(path, optional=optional)
        present = [argument for argument in line if argument.name in given]
        tied = _tied(argument for argument in line if optional or not argument.optional)
        for argument in (each for each in line if each.optional == optional):
            for name, field in argument.fields.items() if argument.state else [("", argument)]:
                for what, wrong, numbers in _wrong(field, tied, inside=bool(name)):
                    value = given[argument.name]._replace(**{name: wrong}) if name else wrong
                    shows = numbers and bool(np.isnan(wrong).any() | np.isinf(wrong).any())
                    others = () if numbers else _beside(argument, present)
                    told, wrong_given = f"{field.name}: {what}", given | {argument.name: value}
                    yield Misfit(argument.name, told, wrong_given, numbers, shows, others)
    ranges = contract_of(path).settings
    for name, allowed in ranges.items():
        for value in beyond(allowed):
            yield Misfit(name, f"{name}: {value}", fitting(path) | {name: value})
    if any(each.name == "queries" and "M<=T" in each.axes for each in line) and "window_size" in ranges:
        longer = fitting(path) | {"window_size": SIZES["M"] + 1}
        yield Misfit("queries", "window_size: longer than the queries reach", longer)


def beyond(allowed: Range) -> list[Any]:
    """What a setting of this range cannot be."""
    low, high, closed_low, closed_high = allowed.limits
    found: list[Any] = [low - 1] if low > -math.inf else []
    found += [low] if low > -math.inf and not closed_low else []
    found += [high] if high < math.inf and not closed_high else [high + 1] if high < math.inf else []
    found = [int(number) if number.is_integer() and allowed.whole else number for number in found]
    found += [1.5] if allowed.whole else [math.nan]
    return [*found, int(low) + 1] if allowed.text in PARITIES else found


def beside(path: str, argument: str, value: Any) -> tuple[str, ...]:
    """The other arguments of a function that may be blamed for this value: none where its numbers are wrong,
    and those that share an axis with it where it is an array of another shape.
    """
    line = arguments(path)
    own = [each for each in line if each.name == argument]
    numbers = isinstance(value, np.ndarray) and value.dtype.kind == "f" and np.isfinite(value).all()
    return _beside(own[0], line) if own and numbers else ()


def _beside(argument: Argument, line: Iterable[Argument]) -> tuple[str, ...]:
    """The other arguments that share an axis with this one."""
    own = _all_letters(argument)
    return tuple(each.name for each in line if each is not argument and own & _all_letters(each))


def _all_letters(argument: Argument) -> set[str]:
    fields = argument.fields.values() if argument.state else [argument]
    axes = (letter for field in fields for axis in field.axes for letter in _letters(axis))
    # the heads of queries are a multiple of those of keys
    return {"H" if letter in ("H_q", "H_kv") else letter for letter in axes} - {"*"}


def _axes(argument: Argument) -> list[str]:
    return [axis for axis in argument.axes if axis not in ("...", "*")]


def _letters(axis: str) -> list[str]:
    """The sizes that an axis depends on: M of `M<=T`, D of `D/2` and `D%2`, h and d_h of `h*d_h`."""
    return re.split("[<>/%]", axis)[0].split("*") if axis != "..." else ["..."]


def _tied(line: Iterator[Argument]) -> set[str]:
    """The axes whose size something else in the call says too."""
    found: Counter[str] = Counter()
    for argument in line:
        for each in argument.fields.values() if argument.state else [argument]:
            for axis in each.axes:
                found.update([] if axis == "*" else _letters(axis))
                found.update({"D": 1} if "%" in axis else {})
    if "H_q" in found and "H_kv" in found:
        found.update(["H_q", "H_kv"])
    return {axis for axis, count in found.items() if count > 1}


def _size(axis: str) -> int:
    if "/" in axis:
        return _size(axis.partition("/")[0]) // 2
    if "*" in axis:
        return int(np.prod([_size(letter) for letter in axis.split("*")]))
    return SIZES.get(_letters(axis)[0], 3)


def _shape(argument: Argument) -> tuple[int, ...]:
    lead = (1, 2) if "..." in argument.axes else ()
    return (*lead, *map(_size, _axes(argument)))


def _made(argument: Argument) -> Any:
    """Ones of the shape and kind of an argument, or a state of them; what else a state holds is 1."""
    if not argument.state:
        return _ones(argument.kind, _shape(argument))
    arrays = {name: _made(field) for name, field in argument.fields.items()}
    return argument.state(**{name: arrays.get(name, 1) for name in argument.state._fields})


def _ones(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, {"bool": bool, "whole": np.int64}.get(kind, np.float64))


def _wrong(argument: Argument, tied: set[str], *, inside: bool) -> Iterator[tuple[str, np.ndarray, bool]]:
    """What is wrong, the array, and whether only its numbers tell; of a field of a state the shape alone."""
    shape, axes = _shape(argument), _axes(argument)
    ones: Callable[[tuple[int, ...]], np.ndarray] = lambda shape: _ones(argument.kind, shape)  # noqa: E731
    lead = len(shape) - len(axes)
    if lead and "..." in tied:
        yield "other leading axes", ones((shape[0] + 1, *shape[1:])), False
    for place, axis in enumerate(axes, lead):
        if "<=" in axis or tied & set(_letters(axis)):
            longer = _size("T") + 1 if "<=" in axis else shape[place] + 1
            yield f"a longer axis {axis}", ones((*shape[:place], longer, *shape[place + 1 :])), False
        if not axis.endswith(">=0") and not inside:
            yield f"an empty axis {axis}", ones((*shape[:place], 0, *shape[place + 1 :])), False
    if axes:
        yield "an axis too few", ones(shape[lead + 1 :]), False
    if inside:
        return
    if argument.kind == "bool":
        yield "whole numbers", np.ones(shape, np.int64), False
        return
    beyond = {"whole": [-1.0, 0.5], "weight": [-1.0], "share": [-0.5, 1.5], "cosine": [-1.5, 1.5]}.get(
        argument.kind, []
    )
    unordered = (
        [] if argument.kind == "whole" else [np.nan] if argument.kind == "open" else [np.nan, np.inf, -np.inf]
    )
    for number in beyond + unordered:
        array = np.ones(shape)
        array.flat[-1] = number
        yield f"{number}", array, True
