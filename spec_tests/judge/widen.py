"""A law by hand has one to four channels, a kernel takes 64: channels of zeros are added, and queries grow so that logits stay.

The reference says whether that leaves the answer as it is. RoPE, which turns pairs, and a deviation over the channels do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from evictionary.reference import contract
from evictionary.spec_tests.judge.domain import Domain


def widened(
    path: str, oracle: Callable[..., Any], arguments: Mapping[str, Any], domain: Domain
) -> tuple[dict[str, Any], Any] | None:
    """The arguments of a call with as many channels as the domain takes, and an answer of the form that the law expects.

    None where no such channels are left to add, or where they change the answer.
    """
    if path not in contract.CONTRACT or not domain.head_dim:
        return None
    said = [(each, arguments[each.name]) for each in contract.arguments(path) if arguments.get(each.name) is not None]
    sizes = {axis: size for each, value in said for axis, size in _channels(each, value)}
    larger = [size for size in domain.head_dim if size >= sizes.get("D", math.inf)]
    # A power of four keeps the queries exact, for their logits are divided by the root of the channels.
    wide = {"D": min([size for size in larger if math.log(size / sizes["D"], 4).is_integer()] or larger, default=0)}
    wide["D_v"] = min((size for size in domain.value_dim if size >= sizes.get("D_v", 0)), default=wide["D"])
    if any(size > wide[axis] for axis, size in sizes.items()) or not larger:
        return None
    root = math.sqrt(wide["D"] / sizes["D"]) if {"keys", "cache"} & set(arguments) else 1.0
    grown = {name: root ** (2 if "covariance" in name else "quer" in name) for name in arguments}
    found = dict(arguments) | {each.name: _padded(each, value, wide, grown[each.name]) for each, value in said}
    try:
        narrow, same = oracle(**arguments), oracle(**found)
    except ValueError:
        return None
    return (found, narrow) if _alike(cut(same, narrow), narrow) else None


def cut(answer: Any, like: Any) -> Any:
    """The first of an answer along each axis, as many as `like` has: without the channels of zeros."""
    if isinstance(answer, tuple) and isinstance(like, tuple):
        entries = [cut(*pair) for pair in zip(answer, like, strict=True)]
        return type(answer)(*entries) if hasattr(answer, "_fields") else tuple(entries)
    if not isinstance(answer, np.ndarray) or answer.ndim != np.ndim(like):
        return answer
    return answer[tuple(slice(size) for size in np.shape(like))]


def _channels(argument: contract.Argument, value: Any) -> list[tuple[str, int]]:
    """The axes of an argument, or of the fields of a state, that are channels of keys and of values, and their sizes."""
    if argument.kind in contract.STATES:
        return [pair for name, each in argument.fields.items() for pair in _channels(each, getattr(value, name))]
    own = zip(argument.own[::-1], np.shape(value)[::-1], strict=False)
    return [(axis.split("%")[0], size) for axis, size in own if axis.split("%")[0] in ("D", "D_v")]


def _padded(argument: contract.Argument, value: Any, wide: Mapping[str, int], grown: float) -> Any:
    if argument.kind in contract.STATES:
        return value._replace(**{name: _padded(each, getattr(value, name), wide, 1) for name, each in argument.fields.items()})
    own = [axis.split("%")[0] for axis in argument.own]
    before = [(0, 0)] * (np.ndim(value) - len(own))
    more = [(0, wide[axis] - size if axis in wide else 0) for axis, size in zip(own, np.shape(value)[len(before) :], strict=True)]
    return np.pad(value, before + more) * grown if any(after for _, after in more) else value


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(_alike(*pair) for pair in zip(one, other, strict=True))
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and (one.dtype.kind not in "fiub" or bool(np.allclose(one, other, 1e-9, 1e-12, equal_nan=True)))
