"""What a function gives, said once: behind the arrow of its signature, in the notation of its arguments.

    def score(queries: Real[np.ndarray, "B H_q M<=T D"], keys: Real[np.ndarray, "B H_kv T D"], *,
              window_size: Setting[int, ">= 1"] = 32) -> Open[np.ndarray, "B H_kv T"]:

An axis of an answer has the size of that name among the arguments: of an axis, or of a setting, as in
`head_dim/2`. `T+1` and `T-window_size` are such a size too. Any other name is an axis that the function alone
decides, and its docstring says how. A tuple of arrays gives each of them its own axes.
"""

from __future__ import annotations

import functools
import operator
import re
from typing import Any, get_args, get_origin

import numpy as np

from . import checks
from .contract import Argument, argument_of, contract_of, said_of


@functools.cache
def answers(path: str) -> tuple[Argument | None, ...]:
    """What a function of the reference gives, by its path: one part, or those of a tuple. A part that is an
    array or a state has the name `answer`, or `answer 1`, `answer 2` and so on; any other part is None.
    """
    annotation = contract_of(path).signature.return_annotation
    parts = get_args(annotation) if get_origin(annotation) is tuple else (annotation,)
    names = ["answer"] if len(parts) == 1 else [f"answer {place}" for place in range(1, len(parts) + 1)]
    found = [(name, said_of(part)) for name, part in zip(names, parts, strict=True)]
    return tuple(argument_of(name, *said) if said else None for name, said in found)


def require_answer(path: str, given: dict[str, Any], answer: Any) -> None:
    """Raise ValueError where an answer is not what the signature says of it.

    Args: given, the arguments of the call by name, defaults too; answer, what the function gave.
    """
    sizes = {name: value for name, value in given.items() if isinstance(value, int)}
    for argument in contract_of(path).arguments:
        _learn(argument, given[argument.name], sizes)
    parts = answers(path)
    for wanted, own in zip(parts, answer if len(parts) > 1 else [answer], strict=True):
        if wanted is not None:
            _compare(wanted, own, sizes)


def size_of(axis: str, sizes: dict[str, Any]) -> Any:
    """The size of an axis by those of the arguments; None where the function alone decides."""
    name = re.sub("[<>%].*", "", axis)
    if name in sizes:
        return sizes[name]
    if name.isdecimal():
        return int(name)
    for sign, result in OF_SIGN.items():
        left, found, right = name.partition(sign)
        one, other = (size_of(left, sizes), size_of(right, sizes)) if found else (None, None)
        if one is not None and other is not None:
            return result(one, other)
    return None


OF_SIGN = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def _fields(argument: Argument, value: Any) -> list[tuple[Argument, Any]]:
    """An array with what is said of it, or each field of a state."""
    if value is None:
        return []
    if argument.state:
        return [(field, getattr(value, name)) for name, field in argument.fields.items()]
    return [(argument, value)]


OF_TOKENS = {"N", "n", "m"}
"""How many tokens a state holds: one that is given holds as many, and one that is given back holds others."""


def _learn(argument: Argument, value: Any, sizes: dict[str, Any]) -> None:
    """Take the sizes of the axes of an argument. Leading axes broadcast, where an argument says so."""
    for field, array in _fields(argument, value):
        shape = np.shape(array)
        lead = len(shape) - len(field.own)
        sizes.update((name, size) for name, size in zip(field.known, shape[lead:], strict=True) if name)
        if field.lead:
            sizes[field.lead] = np.broadcast_shapes(sizes.get(field.lead, ()), shape[:lead])


def _compare(wanted: Argument, value: Any, sizes: dict[str, Any]) -> None:
    if wanted.state:
        sizes = {name: size for name, size in sizes.items() if name not in OF_TOKENS}
    for field, array in _fields(wanted, value):
        shape = checks.READ[field.kind](field.name, array).shape
        lead = len(shape) - len(field.own)
        own = [size_of(axis, sizes) for axis in field.own]
        leading = sizes.get(field.lead, shape[:lead]) if field.lead else ()
        if lead < 0 or shape[:lead] != leading or any(map(_differ, own, shape[lead:])):
            raise ValueError(f"{field.name}: got shape {shape}, wanted [{', '.join(field.axes)}]")
        if wanted.state:
            _learn(field, array, sizes)


def _differ(wanted: int | None, got: int) -> bool:
    return wanted not in (None, got)
