"""Shared preconditions: an argument becomes a float64 array of the wanted axes, or a ValueError
says what is wrong.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np


def as_float64(name: str, value: Any, axes: str) -> np.ndarray:
    """Return `value` as a finite float64 array with the axes that `axes` spells, such as
    `"B H_kv T D"` or `"... T D"`.

    Subclasses of `np.ndarray` keep their class, so that an array with its own arithmetic can run
    through the reference. Raises ValueError naming the argument, the value and the wanted form.
    """
    array = np.asanyarray(value)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: got dtype {array.dtype}, wanted real numbers")
    array = np.asanyarray(array, dtype=np.float64)
    wanted = axes.split()
    open_ended = wanted[0] == "..."
    count = len(wanted) - open_ended
    if array.ndim < count or (array.ndim > count and not open_ended):
        raise ValueError(f"{name}: got shape {array.shape}, wanted [{', '.join(wanted)}]")
    if 0 in array.shape:
        raise ValueError(
            f"{name}: got shape {array.shape}, wanted no empty axis in [{', '.join(wanted)}]"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: got NaN or infinite numbers, wanted finite ones")
    return array


def require_shape(name: str, array: np.ndarray, wanted: tuple[int, ...], like: str) -> None:
    """Raise ValueError unless `array` has the shape `wanted`, which `like` explains ("the shape of
    keys").
    """
    if array.shape != wanted:
        raise ValueError(f"{name}: got shape {array.shape}, wanted {wanted} ({like})")


def group_size(num_query_heads: int, num_kv_heads: int) -> int:
    """Return G = H_q / H_kv, the number of query heads that read one KV head. Raises ValueError if
    H_kv does not divide H_q.
    """
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"queries: got {num_query_heads} query heads, wanted a multiple of the {num_kv_heads} "
            "KV heads"
        )
    return num_query_heads // num_kv_heads


def require_window(num_queries: int, length: int, window_size: int) -> None:
    """Raise ValueError unless there are queries of the last `window_size` tokens, and tokens before
    those.
    """
    if num_queries < window_size or length <= window_size:
        raise ValueError(
            f"queries: got {num_queries} queries for {length} tokens, wanted {window_size} or "
            "more, for more tokens than that"
        )


def as_fraction(
    name: str, value: Any, *, low: int = 0, high: int = 1, closed_high: bool = True
) -> Fraction:
    """Return a ratio exactly as it was written: 0.9 is nine tenths, not the nearest binary number.

    Raises ValueError outside [low, high], or outside [low, high) when `closed_high` is False.
    """
    bracket = "]" if closed_high else ")"
    try:
        exact = value if isinstance(value, Fraction) else Fraction(repr(float(value)))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name}: got {value!r}, wanted a number in [{low}, {high}{bracket}"
        ) from None
    if not low <= exact <= high or (exact == high and not closed_high):
        raise ValueError(f"{name}: got {value}, wanted a number in [{low}, {high}{bracket}")
    return exact


def as_count(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Return `value` as an int in [low, high]. Raises ValueError outside the range or for a number
    that is not whole.
    """
    wanted = (
        f"a whole number of at least {low}"
        if high is None
        else f"a whole number from {low} to {high}"
    )
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name}: got {value!r}, wanted {wanted}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: got {value}, wanted {wanted}")
    return int(value)


def as_kept(name: str, value: Any, wanted: tuple[int, ...], like: str) -> np.ndarray:
    """Return a boolean mask of shape `wanted`. Raises ValueError for another dtype or shape."""
    mask = np.asarray(value)
    if mask.dtype != np.bool_:
        raise ValueError(f"{name}: got dtype {mask.dtype}, wanted a boolean mask, True = keep")
    require_shape(name, mask, wanted, like)
    return mask
