"""How large the inputs are that a function was asked for: KV heads, groups, sequences, channels, tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from evictionary.reference import contract

UNITS = {
    "tokens": ("T", "n"),
    "KV heads": ("H_kv",),
    "query heads of each": ("H_q",),
    "sequences": ("B",),
    "channels": ("D", "D_v"),
}
"""What is counted, in words, and the axes of a signature that count it."""

Reach = dict[str, dict[str, float]]
"""By function: the largest number that it was asked for of each unit, and of each setting by its name."""


def extend(reach: Reach, path: str, arguments: Mapping[str, Any]) -> None:
    """Note the sizes of a call."""
    own = reach.setdefault(path, {})
    for unit, size in _sizes(path, arguments):
        own[unit] = max(size, own.get(unit, size))


def merge(reach: Reach, other: Reach) -> None:
    """Note what another process has asked."""
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
    """The same in words: `1,000 tokens, 16 KV heads, 8 sequences`."""
    return ", ".join(f"{size:,} {unit}" for unit, size in largest(reach).items())


def _sizes(path: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    axes: dict[str, int] = {}
    arrays = {each.name for each in contract.arguments(path)}
    for each in contract.arguments(path):
        if (value := arguments.get(each.name)) is not None:
            for axis, size in _axes(each, value):
                axes[axis] = max(size, axes.get(axis, 0))
    if {"P", "S", "n"} <= axes.keys():  # a cache in pages: n pages of S places for each sequence
        axes["T"] = axes.pop("n") * axes["S"]
    for unit, names in UNITS.items():
        if unit != "query heads of each" and (found := [axes[name] for name in names if name in axes]):
            yield unit, max(found)
    if "H_q" in axes and axes.get("H_kv"):
        yield "query heads of each", axes["H_q"] // axes["H_kv"]
    for name, value in arguments.items():
        if name not in arrays and isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


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
    for axis, size in zip(argument.own, shape[max(lead, 0) :], strict=False):
        yield axis.split("%")[0].split("<")[0].split(">")[0], size
