"""How large the inputs are that a function was asked for: KV heads, groups, sequences, channels, tokens."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from evictionary.reference import contract

UNITS = {
    "tokens": ("T", "n"),
    "KV heads": ("H_kv",),
    "query heads of each": ("group",),
    "sequences": ("B",),
    "channels": ("D", "D_v"),
}
"""What is counted, in words, and the axes that count it: those of a signature, and `group`, which is the
query heads of a KV head.
"""

Reach = dict[str, dict[str, float]]
"""By function: the largest number that it was asked for of each unit, and of each setting by its name."""


def extend(reach: Reach, path: str, arguments: Mapping[str, Any]) -> None:
    """Note the sizes of a call."""
    merge(reach, {path: _sizes(path, arguments)})


def merge(reach: Reach, other: Reach) -> None:
    """Note what was asked elsewhere."""
    for path, sizes in other.items():
        own = reach.setdefault(path, {})
        for unit, size in sizes.items():
            own[unit] = max(size, own.get(unit, size))


def largest(reach: Reach) -> dict[str, int]:
    """Of all functions, the largest number of each unit."""
    return {
        unit: int(max(found))
        for unit in UNITS
        if (found := [sizes[unit] for sizes in reach.values() if unit in sizes])
    }


def in_a_line(reach: Reach) -> str:
    """The same in words: `1,000 tokens, 16 KV heads, 1 sequence (each alone)`. No input has all at once."""
    sizes = [f"{size:,} {unit if size != 1 else _one(unit)}" for unit, size in largest(reach).items()]
    return ", ".join(sizes) + " (each alone)" * (len(sizes) > 1)


def _one(unit: str) -> str:
    """A unit of which there is one: `query head of each`."""
    return re.sub(r"s\b", "", unit, count=1)


def units(axes: Collection[str]) -> list[str]:
    """What is counted where there are these axes."""
    return [unit for unit, names in UNITS.items() if not {*names}.isdisjoint(axes)]


def _sizes(path: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    axes: dict[str, int] = {}
    settings = dict(arguments)
    for each in contract.arguments(path):
        if (value := settings.pop(each.name, None)) is not None:
            for axis, size in _axes(each, value):
                axes[axis] = max(size, axes.get(axis, 0))
    if {"P", "S", "n"} <= axes.keys():  # a cache in pages: n pages of S places for each sequence
        axes["T"] = axes.pop("n") * axes["S"]
    if "H_q" in axes and axes.get("H_kv"):
        axes["group"] = axes["H_q"] // axes["H_kv"]
    found: dict[str, float] = {
        unit: max(axes[name] for name in UNITS[unit] if name in axes) for unit in units(axes)
    }
    for name, value in settings.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


def _axes(argument: contract.Argument, value: Any) -> Iterator[tuple[str, int]]:
    """The axes of an argument with their sizes. Two axes that a signature leaves open are the sequences and
    their KV heads.
    """
    if argument.state:
        for name, each in argument.fields.items():
            yield from _axes(each, getattr(value, name))
        return
    shape = np.shape(value)
    lead = len(shape) - len(argument.own)
    if argument.lead == "..." and lead == 2:
        yield from zip(("B", "H_kv"), shape, strict=False)
    yield from zip(argument.known, shape[max(lead, 0) :], strict=False)
