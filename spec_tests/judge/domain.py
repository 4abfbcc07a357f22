"""What an implementation accepts: the laws draw inside it,
and a law that cannot be asked there is not applicable.

An implementation says it in its module or package, or `--domain head_dim=64,128` says it for it:

    DOMAIN = {"head_dim": (64, 128), "dtype": ("bfloat16",),
    "group": (1, 4, 8), "lag_size": (128,), "max_length": 131072}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from evictionary.errors import did_you_mean, require
from evictionary.reference import contract
from evictionary.spec_tests.judge.arithmetic import EPSILON
from evictionary.spec_tests.judge.cases import LONG_LENGTHS, Case, Tiny

ONE_NUMBER = ("min_length", "max_length", "length_multiple_of")


class BadDomain(ValueError):
    """A DOMAIN that cannot be read; the message names the key, what was got and what is wanted."""


class OutsideDomain(Exception):
    """A law asked for something outside the domain; the
    message says what. always: it would with any input.
    """

    def __init__(self, message: str, *, always: bool = False) -> None:
        super().__init__(message)
        self.always = always


class NothingToAsk(BaseException):
    """A law has found no input inside the domain. No Exception: hypothesis would draw hundreds more before
    it gave up.
    """


@dataclass(frozen=True)
class Domain:
    """The sizes and dtypes that an implementation takes.
    An empty tuple, or a length of None, bounds nothing.

    group is the number of query heads of each KV head; lengths
    are numbers of tokens, of a cache and of a partition alike.
    """

    head_dim: tuple[int, ...] = ()
    value_dim: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    lag_size: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    dtype: tuple[str, ...] = ()
    min_length: int = 1
    max_length: int | None = None
    length_multiple_of: int = 1

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Domain:
        """Check what a DOMAIN says. Raises BadDomain for a key that no domain has, or a value that leaves
        nothing to draw.
        """
        known = [each.name for each in fields(cls)]
        found: dict[str, Any] = {}
        for key, value in content.items():
            require(
                key in known,
                f"{key}: got a key that no domain has{did_you_mean(key, known)}, wanted some of "
                f"{', '.join(known)}",
                BadDomain,
            )
            if key in ONE_NUMBER:
                found[key] = _whole(key, value)
                continue
            values = (
                (value,)
                if isinstance(value, int | str)
                else tuple(value)
                if isinstance(value, Iterable)
                else ()
            )
            require(
                values,
                f"{key}: got {value!r}, which leaves nothing to draw; wanted one value or several",
                BadDomain,
            )
            if key == "dtype":
                if unknown := [each for each in values if each not in EPSILON]:
                    raise BadDomain(
                        f"dtype: got {unknown[0]!r}{did_you_mean(unknown[0], EPSILON)}, wanted some of "
                        f"{', '.join(EPSILON)}"
                    )
                found[key] = values
            else:
                found[key] = tuple(_whole(key, each) for each in values)
        domain = cls(**found)
        require(
            domain.length(domain.min_length) >= domain.min_length,
            f"max_length: got {domain.max_length}, with which no length is left: wanted a multiple of "
            f"{domain.length_multiple_of} from {domain.min_length} on",
            BadDomain,
        )
        return domain

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Domain:
        """Read what `--domain` says: `head_dim=64,128`, several times or with blanks between."""
        content: dict[str, Any] = {}
        for text in " ".join(texts).split():
            key, equals, values = text.partition("=")
            if not equals or not values:
                raise BadDomain(f"{text}: got no value, wanted key=value such as head_dim=64,128")
            listed = values.split(",")
            try:
                content[key] = listed if key == "dtype" else [int(each) for each in listed]
            except ValueError:
                raise BadDomain(
                    f"{key}: got {values!r}, wanted whole numbers with commas between them"
                ) from None
            if key in ONE_NUMBER:
                content[key] = content[key][0]
        return cls.read(content)

    def __or__(self, other: Domain) -> Domain:
        """This domain, with what `other` says in the place of what this one does."""
        return replace(self, **other.said())

    def said(self) -> dict[str, Any]:
        """What bounds anything, as it is written in a DOMAIN."""
        plain = Domain()
        return {
            each.name: value
            for each in fields(self)
            if (value := getattr(self, each.name)) != getattr(plain, each.name)
        }

    @property
    def excludes_small(self) -> bool:
        """Whether nothing in the domain is so small that it can be checked by hand."""
        return min(self.head_dim, default=1) > 8 or self.length(1) > 8

    def length(self, wanted: int) -> int:
        """The allowed length nearest to `wanted` from above; from below where there is none above."""
        step = self.length_multiple_of
        length = max(wanted, self.min_length, 1)
        length = -(-length // step) * step
        if self.max_length is not None and length > self.max_length:
            length = self.max_length // step * step
        return length

    def fitted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What a law has drawn, moved into the domain: cases get sizes of it, `lag` a lag size of it."""
        if self == Domain():
            return dict(arguments)
        found = dict(arguments)
        scale = 1
        if isinstance(lag := arguments.get("lag"), int) and self.lag_size and lag not in self.lag_size:
            found["lag"] = self.lag_size[lag % len(self.lag_size)]
            scale = max(1, found["lag"] // max(1, lag))
        for name, value in arguments.items():
            if isinstance(value, Case):
                long = value.length >= min(LONG_LENGTHS)  # it has many partitions of any size
                found[name] = self._case(value if long else replace(value, length=value.length * scale))
            elif isinstance(value, Tiny) and not self._holds(value):
                found[name] = self._case(value.as_case())
        return found

    def _case(self, case: Case) -> Case:
        """A case of allowed sizes; which of them, its seed says."""

        def one(allowed: tuple[int, ...], drawn: int) -> int:
            return drawn if not allowed or drawn in allowed else allowed[case.seed % len(allowed)]

        # RoPE turns pairs of channels: a law that wants pairs draws an even number, and gets one.
        alike = tuple(size for size in self.head_dim if size % 2 == case.head_dim % 2)
        head_dim = one(alike or self.head_dim, case.head_dim)
        # A kernel that says nothing of the values has as many channels for them as for the keys.
        value_dim = one(self.value_dim, case.value_dim) if self.value_dim or not self.head_dim else head_dim
        return replace(
            case,
            batch=one(self.batch, case.batch),
            group=one(self.group, case.group),
            length=self.length(case.length),
            head_dim=head_dim,
            value_dim=value_dim,
        )

    def _holds(self, tiny: Tiny) -> bool:
        arguments = {
            "keys": tiny.keys,
            "values": tiny.values,
            "next_keys": tiny.next_keys,
            "queries": tiny.queries,
        }
        return not self.excludes(arguments)

    def excludes(self, arguments: Mapping[str, Any], path: str = "") -> str:
        """Say which argument of a call lies outside the domain, or return an empty string.

        Channels are found by the names of the arguments, and in a
        call of the function `path` by the axes of its contract.
        """
        shapes = {name: value.shape for name, value in arguments.items() if isinstance(value, np.ndarray)}
        rows = {
            name: shape
            for name, shape in shapes.items()
            if name in ("keys", "values", "next_keys", "next_values", "queries")
        }
        keys, query = shapes.get("keys", ()), shapes.get("queries", shapes.get("query", ()))
        asked: dict[str, list[int]] = {
            "head_dim": [shape[-1] for name, shape in rows.items() if "values" not in name],
            "value_dim": [shape[-1] for name, shape in rows.items() if "values" in name],
            "batch": [keys[0]] if len(keys) == 4 else [],
            "group": [query[1] // keys[1]] if len(keys) == 4 and len(query) >= 3 and keys[1] else [],
            "lag_size": [arguments["lag_size"]] if "lag_size" in arguments else [],
        }
        for axis, size in channels(path, arguments):
            asked["head_dim" if axis == "D" else "value_dim"].append(size)
        for name, values in asked.items():
            allowed = getattr(self, name)
            if name == "value_dim" and not allowed and self.head_dim:
                allowed = tuple(dict.fromkeys(asked["head_dim"])) or self.head_dim
            if outside := [value for value in values if allowed and value not in allowed]:
                return f"{name} {outside[0]} lies outside its domain ({', '.join(map(str, allowed))})"
        lengths = [shape[-2] for name, shape in rows.items() if len(shape) >= 2 and name != "queries"]
        lengths += [shapes["scores"][-1]] if shapes.get("scores") else []
        for length in lengths:
            if length != self.length(length):
                return f"a length of {length} lies outside its domain"
        return ""


def channels(path: str, arguments: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The axes of a call that are channels of keys (D) and of values (D_v), each with its size: those that
    its contract names.
    """
    if path not in contract.contracts():
        return []
    given = [
        (each, arguments[each.name])
        for each in contract.arguments(path)
        if arguments.get(each.name) is not None
    ]
    return [pair for each, value in given for pair in _channels(each, value)]


def _channels(argument: contract.Argument, value: Any) -> list[tuple[str, int]]:
    if argument.state:
        return [
            pair for name, each in argument.fields.items() for pair in _channels(each, getattr(value, name))
        ]
    own = zip(argument.own[::-1], np.shape(value)[::-1], strict=False)
    return [(axis.split("%")[0], size) for axis, size in own if axis.split("%")[0] in ("D", "D_v")]


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadDomain(f"{key}: got {value!r}, wanted a whole number of at least 1")
    return value
