"""A law by hand has one to four channels, a kernel takes 64: channels of zeros are added, and queries grow
so that logits stay.

Where RoPE turns pairs (i, i + D/2), each half gets its zeros. The reference
says whether that leaves the answer as it is: a deviation over the channels
does not, nor do several pairs, whose frequencies are others among more.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from evictionary.reference import contract
from evictionary.spec_tests.judge.domain import Domain, channels


def widened(
    path: str, oracle: Callable[..., Any], arguments: Mapping[str, Any], domain: Domain
) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
    """The arguments of a call with as many channels as the
    domain takes, and what cuts its answer to the law's channels.

    None where no such channels are left to add, or where they change the answer.
    """
    if path not in contract.contracts() or not domain.head_dim:
        return None
    said = [
        (each, arguments[each.name])
        for each in contract.arguments(path)
        if arguments.get(each.name) is not None
    ]
    sizes = dict(channels(path, arguments))
    larger = [size for size in domain.head_dim if size >= sizes.get("D", math.inf)]
    # A power of four keeps the queries exact, for their logits are divided by the root of the channels.
    wide = {
        "D": min(
            [size for size in larger if math.log(size / sizes["D"], 4).is_integer()] or larger, default=0
        )
    }
    wide["D_v"] = min((size for size in domain.value_dim if size >= sizes.get("D_v", 0)), default=wide["D"])
    if any(size > wide[axis] for axis, size in sizes.items()) or not larger:
        return None
    root = math.sqrt(wide["D"] / sizes["D"]) if {"keys", "cache"} & set(arguments) else 1.0
    grown = {name: root ** (2 if "covariance" in name else "quer" in name) for name in arguments}
    turned = any("%" in axis or axis == "D/2" for each in contract.arguments(path) for axis in each.own)
    found = dict(arguments) | {
        each.name: _padded(each, value, wide, grown[each.name], turned) for each, value in said
    }
    try:
        narrow, same = oracle(**arguments), oracle(**found)
    except ValueError:
        return None
    shown = partial(cut, like=narrow, turned=turned)
    return (found, shown) if _alike(shown(same), narrow) else None


def overflows(arguments: Mapping[str, Any], largest: float) -> bool:
    """Whether a query times a key may be above the largest number of a dtype, before it is divided by the
    root of the channels: a right kernel may multiply first.
    """

    def longest(name: str) -> float:
        found = [np.asarray(each) for key, each in arguments.items() if name in key]
        arrays = [each for each in found if each.ndim and each.dtype.kind == "f" and each.size]
        return max((float(np.sqrt((each**2).sum(axis=-1)).max()) for each in arrays), default=0.0)

    return longest("quer") * longest("key") > largest


def cut(answer: Any, like: Any, turned: bool) -> Any:
    """An answer at the places that `like` has along each axis: without the channels of zeros."""
    if isinstance(answer, tuple) and isinstance(like, tuple):
        entries = [cut(*pair, turned) for pair in zip(answer, like, strict=True)]
        return type(answer)(*entries) if hasattr(answer, "_fields") else tuple(entries)
    if not isinstance(answer, np.ndarray) or answer.ndim != np.ndim(like):
        return answer
    return answer[np.ix_(*map(partial(_places, turned=turned), np.shape(like), answer.shape))]


def _places(size: int, wide: int, turned: bool) -> np.ndarray:
    """Where so many channels stand among `wide`: first of all, or first in each half."""
    places = np.arange(min(size, wide))
    return (
        places + (places >= size // 2) * (wide - size) // 2
        if turned and size % 2 == wide % 2 == 0
        else places
    )


def _padded(
    argument: contract.Argument, value: Any, wide: Mapping[str, int], grown: float, turned: bool
) -> Any:
    if argument.state:
        fields = {
            name: _padded(each, getattr(value, name), wide, 1, turned)
            for name, each in argument.fields.items()
        }
        return value._replace(**fields)
    lead = np.ndim(value) - len(argument.own)
    own = [axis.split("%")[0] for axis in argument.own]
    wanted = {**wide, "D/2": wide["D"] // 2}
    sizes = (
        *np.shape(value)[:lead],
        *(wanted.get(axis, size) for axis, size in zip(own, np.shape(value)[lead:], strict=True)),
    )
    if sizes == np.shape(value):
        return value
    found = np.zeros(sizes, np.asarray(value).dtype)
    halves = [False] * lead + [turned and axis == "D" for axis in own]
    found[np.ix_(*map(_places, np.shape(value), sizes, halves))] = value
    return found * grown


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(_alike(*pair) for pair in zip(one, other, strict=True))
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and (
        one.dtype.kind not in "fiub" or bool(np.allclose(one, other, 1e-9, 1e-12, equal_nan=True))
    )
