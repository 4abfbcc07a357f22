"""How values travel between two processes: as JSON, with the bytes of each array beside it.

A program in another language reads the arrays from files (`process.py`). A process of our own gets a frame:
two lengths, the JSON, and the arrays one after another. The child of the classroom loads this file by its
path: it imports NumPy and nothing of ours.
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np

STORED = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "bool": "?",
}
"""How a file holds the numbers of each dtype: little-endian, without a header; bfloat16 as its 16 bits,
bool as a byte.
"""
NATIVE = {np.dtype(each).name: each for each in "?bhilqBHILQefdg"}
"""The dtypes of a frame: both of its ends are on one machine."""

LARGEST_TEXT = 2**20


class BadMessage(Exception):
    """What came, or what should go, is not something that travels; the message says why."""


def to_json(value: Any, leaf: Callable[[Any, str], Any], name: str = "") -> Any:
    """A value as JSON has it. `leaf` gives the JSON of what
    is no tuple and no list, such as an array, by its name.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return {
            "type": type_name(value),
            **{field: to_json(each, leaf, f"{name}.{field}") for field, each in fields},
        }
    if isinstance(value, tuple | list):
        return [to_json(each, leaf, f"{name}.{place}") for place, each in enumerate(value)]
    return leaf(value, name)


def from_json(
    content: Any, array: Callable[[dict[str, Any]], Any], named: Callable[[str, dict[str, Any]], Any]
) -> Any:
    """The value that JSON stands for. `array` reads an
    array, `named` makes the tuple of a type and its fields.

    A list with anything in it that is no number or text is a
    tuple. Raises BadMessage for a fraction of other things.
    """
    if isinstance(content, list):
        entries = [from_json(each, array, named) for each in content]
        plain = all(isinstance(each, list | str | int | float | Fraction | None) for each in entries)
        return entries if plain else tuple(entries)
    if not isinstance(content, dict):
        return float(content) if content in ("nan", "inf", "-inf") else content
    if "type" in content:
        fields = {key: from_json(each, array, named) for key, each in content.items() if key != "type"}
        return named(str(content["type"]), fields)
    if "fraction" in content:
        parts = content["fraction"]  # not a text: Fraction("1e999999999") never ends
        if not isinstance(parts, list) or [*map(type, parts)] != [int, int] or not parts[1]:
            raise BadMessage('a fraction that is not "fraction": [above, below]')
        return Fraction(*parts)
    return array(content)


def plain(value: Any) -> Any:
    """A number, a text or nothing as JSON has it: a number
    that is not finite as the text nan, inf or -inf.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadMessage(f"a {type(value).__name__}; wanted arrays, numbers or tuples of them")


def type_name(value: Any) -> str:
    """`cache.CompressedCache` for the named tuple of that name."""
    return f"{type(value).__module__.rpartition('.')[2]}.{type(value).__name__}"


def parsed(text: str | bytes) -> Any:
    """What JSON says. Raises BadMessage for text that is none: NaN and Infinity are no numbers of JSON."""

    def refuse(name: str) -> NoReturn:
        raise BadMessage(
            f'something that is no JSON, which has no {name}: wanted the text "nan", "inf" or "-inf"'
        )

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"something that is no JSON ({type(error).__name__})") from None


# Arrays


def size_of(content: dict[str, Any], stored: dict[str, str]) -> int:
    """How many bytes an array of this description has. Raises
    BadMessage for a shape or a dtype that there is not.
    """
    shape, dtype = content.get("shape"), content.get("dtype")
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise BadMessage(f"an array of shape {shown(shape)}, wanted a list of whole numbers")
    if not isinstance(dtype, str) or dtype not in stored:
        raise BadMessage(f"an array of dtype {shown(dtype)}, wanted one of {', '.join(stored)}")
    return math.prod(shape) * np.dtype(stored[dtype]).itemsize


def numbers(content: dict[str, Any], data: bytes | memoryview, stored: dict[str, str]) -> np.ndarray:
    """The array of a description and its bytes. Raises BadMessage where they do not fit one another."""
    size, shape, dtype = size_of(content, stored), content["shape"], content["dtype"]
    if len(data) != size:
        raise BadMessage(f"{len(data)} bytes for an array of shape {tuple(shape)} and {dtype}, wanted {size}")
    bits = np.frombuffer(data, np.uint8 if dtype == "bool" else stored[dtype])
    if dtype == "bool" and (bits > 1).any():
        raise BadMessage(f"a bool of {bits.max()}, wanted bytes of 0 and 1")
    if dtype == "bfloat16":
        bits = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    try:
        found = bits.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise BadMessage(f"an array of shape {shown(shape)}: {error}") from None
    return found.astype(bool if dtype == "bool" else found.dtype.newbyteorder("="))


# Frames


def frame(message: dict[str, Any], values: Sequence[Any] = ()) -> bytes:
    """A frame of a message and values. Raises BadMessage for a value that does not travel."""
    parts: list[bytes] = []

    def leaf(value: Any, _: str) -> Any:
        if hasattr(value, "detach"):  # of torch
            value = value.detach().cpu()
            value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
        if isinstance(value, Fraction):
            return {"fraction": [value.numerator, value.denominator]}
        if not isinstance(value, np.ndarray | np.generic):
            return plain(value)
        array = np.asarray(value)
        if array.dtype.name not in NATIVE:
            raise BadMessage(f"an array of {array.dtype}; wanted numbers or booleans")
        # A batch that repeats one item arrives as one, and every second number of a buffer as that.
        repeated = [axis for axis, step in enumerate(array.strides) if step == 0 and array.shape[axis] > 1]
        # In a Fortran array the last axis may step as far, with numbers between.
        steps = [step for step, size in zip(array.strides, array.shape, strict=True) if size > 1]
        gaps = bool(steps) and not repeated and min(steps) == array.strides[-1] == 2 * array.itemsize
        layout = {"repeated": {axis: array.shape[axis] for axis in repeated}, "gaps": gaps}
        array = array[tuple(slice(1) if axis in repeated else slice(None) for axis in range(array.ndim))]
        # The axes travel in the order in which they lie in the memory, so that a transposed array arrives as
        # one.
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        parts.append(array.transpose(order).astype(NATIVE[array.dtype.name]).tobytes())
        told = {"shape": [array.shape[axis] for axis in order], "dtype": array.dtype.name, "order": order}
        return told | {key: each for key, each in layout.items() if each}

    text = json.dumps({**message, "values": [to_json(each, leaf) for each in values]}).encode()
    return struct.pack(">QQ", len(text), sum(map(len, parts))) + text + b"".join(parts)


def sizes(header: bytes, largest: int) -> tuple[int, int]:
    """The lengths of the two parts that follow a header
    of 16 bytes. Raises BadMessage if they are too large.
    """
    text, body = struct.unpack(">QQ", header)
    for length, most in ((text, LARGEST_TEXT), (body, largest)):
        if length > most:
            raise BadMessage(f"{length} bytes, more than {most}")
    return text, body


def read(
    text: bytes,
    body: bytes,
    named: Callable[[str, dict[str, Any]], Any],
    native: Callable[[np.ndarray], Any] = lambda array: array,
) -> tuple[dict[str, Any], list[Any]]:
    """The message and the values of a frame; `native` is called with each array. Raises BadMessage.

    Each array takes the bytes after those of the one before: a small frame cannot claim large arrays that lie
    over each other.
    """
    message, left = parsed(text), memoryview(body)
    if not isinstance(message, dict) or not isinstance(message.get("values"), list):
        raise BadMessage("no message")

    def array(content: dict[str, Any]) -> Any:
        nonlocal left
        size = size_of(content, NATIVE)
        numbers_of_it, left = left[:size], left[size:]
        found = numbers(content, numbers_of_it, NATIVE)
        order = content.get("order", [*range(found.ndim)])
        if sorted(order) != [*range(found.ndim)]:
            raise BadMessage(f"the axes {shown(order)} of an array of shape {found.shape}")
        found = found.transpose(np.argsort(order))
        if content.get("gaps"):
            buffer = np.full((*found.shape[:-1], 2 * found.shape[-1]), 77, found.dtype)
            buffer[..., ::2] = found
            found = buffer[..., ::2]
        own = native(found)
        if repeated := content.get("repeated"):
            whole = [repeated.get(str(axis), size) for axis, size in enumerate(own.shape)]
            own = own.expand(whole) if hasattr(own, "expand") else np.broadcast_to(own, whole)
        return own if own.ndim else own[()]

    values = [from_json(each, array, named) for each in message["values"]]
    if left:
        raise BadMessage(f"{len(left)} bytes that belong to no array")
    return message, values


def shown(value: Any) -> str:
    """The first 80 characters of what came."""
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text[:80]) + ("..." if len(text) > 80 else "")
