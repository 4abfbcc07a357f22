"""What an argument becomes: an array of float64, a mask,
a number in its range; or a ValueError says what is wrong.
"""

from fractions import Fraction
from typing import Any

import numpy as np


def as_memory(name: str, value: Any) -> np.ndarray:
    """Return `value` as a float64 array, of which a part may be NaN: nobody has written it yet.

    Subclasses of `np.ndarray` keep their class, so that an array with its own arithmetic can run
    through the reference. Raises ValueError naming the argument unless it holds real numbers.
    """
    array = np.asanyarray(value)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: got dtype {array.dtype}, wanted real numbers")
    return np.asanyarray(array, dtype=np.float64)


def as_open(name: str, value: Any) -> np.ndarray:
    """Return `value` as `as_memory` does. Raises ValueError for NaN too."""
    array = as_memory(name, value)
    if np.isnan(np.asarray(array)).any():
        raise ValueError(f"{name}: got NaN, wanted numbers that can be ordered")
    return array


def as_float64(name: str, value: Any) -> np.ndarray:
    """Return `value` as `as_open` does. Raises ValueError for infinite numbers too."""
    array = as_memory(name, value)
    if not np.isfinite(np.asarray(array)).all():
        as_open(name, array)
        raise ValueError(f"{name}: got infinite numbers, wanted finite ones")
    return array


def as_weight(name: str, value: Any) -> np.ndarray:
    """Return `value` as `as_float64` does. Raises ValueError for negative numbers too."""
    array = as_float64(name, value)
    require_between(name, array, 0)
    return array


def as_share(name: str, value: Any) -> np.ndarray:
    """Return `value` as `as_float64` does. Raises ValueError for numbers outside [0, 1] too."""
    array = as_float64(name, value)
    require_between(name, array, 0, 1)
    return array


def as_cosine(name: str, value: Any) -> np.ndarray:
    """Return `value` as `as_float64` does. Raises ValueError for numbers outside [-1, 1] too."""
    array = as_float64(name, value)
    require_between(name, array, -1, 1)
    return array


def as_whole(name: str, value: Any) -> np.ndarray:
    """Return whole numbers in their own dtype. Raises ValueError for negative or broken ones."""
    array = np.asanyarray(value)
    if array.dtype.kind not in "fiu" or (array < 0).any() or (array != np.floor(array)).any():
        raise ValueError(f"{name}: got {array}, wanted whole numbers of at least 0")
    return array


def as_mask(name: str, value: Any) -> np.ndarray:
    """Return a boolean mask. Raises ValueError for another dtype."""
    mask = np.asarray(value)
    if mask.dtype != np.bool_:
        raise ValueError(f"{name}: got dtype {mask.dtype}, wanted a boolean mask, True = keep")
    return mask


READ = {
    "real": as_float64,
    "weight": as_weight,
    "share": as_share,
    "cosine": as_cosine,
    "open": as_open,
    "memory": as_memory,
    "bool": as_mask,
    "whole": as_whole,
}


def group_size(num_query_heads: int, num_kv_heads: int) -> int:
    """Return G = H_q / H_kv, the number of query heads that read one KV head. Raises ValueError if
    H_kv does not divide H_q.
    """
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"queries: got {num_query_heads} query heads, wanted a multiple of the {num_kv_heads} KV heads"
        )
    return num_query_heads // num_kv_heads


def as_window(window_size: Any, num_queries: int, length: int) -> int:
    """Return the tokens of the window that there are, `min(window_size, length)`.

    Raises ValueError for a window_size below 1, and where a token of the window has no query.
    """
    window = min(as_count("window_size", window_size, low=1), length)
    if num_queries < window:
        raise ValueError(f"queries: got those of {num_queries} tokens, wanted the {window} of the window")
    return window


def require_window(num_queries: int, length: int, window_size: int) -> None:
    """Raise ValueError unless there are the queries of the window, and tokens before it."""
    if as_window(window_size, num_queries, length) == length:
        raise ValueError(f"keys: got {length} tokens, wanted more than the window of {window_size}")


def require_between(name: str, value: Any, low: float, high: float = np.inf) -> None:
    """Raise ValueError unless all numbers of `value` are in [low, high], and finite."""
    least, most = (np.min(value), np.max(value)) if np.size(value) else (low, low)
    if not (low <= least and most <= high and most < np.inf):
        raise ValueError(f"{name}: got {least} to {most}, wanted numbers in [{low}, {high}]")


def as_odd(name: str, value: Any) -> int:
    """Return `value`. Raises ValueError unless it is an odd number of at least 1."""
    if as_count(name, value, low=1) % 2 == 0:
        raise ValueError(f"{name}: got {value}, wanted an odd number")
    return int(value)


def as_even(name: str, value: Any) -> int:
    """Return `value`. Raises ValueError unless it is an even number of at least 2."""
    if as_count(name, value, low=2) % 2:
        raise ValueError(f"{name}: got {value}, wanted an even number")
    return int(value)


def as_fraction(
    name: str,
    value: Any,
    *,
    low: float = 0,
    high: float = 1,
    closed_low: bool = True,
    closed_high: bool = True,
) -> Fraction:
    """Return a ratio exactly as it was written: 0.9 is nine tenths, not the nearest binary number.

    Raises ValueError outside [low, high]; an end that is not closed does not belong to it.
    """
    wanted = f"a number in {'(['[closed_low]}{low:g}, {high:g}{')]'[closed_high]}"
    try:
        exact = value if isinstance(value, Fraction) else Fraction(repr(float(value)))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: got {value!r}, wanted {wanted}") from None
    above = low <= exact if closed_low else low < exact
    below = exact <= high if closed_high else exact < high
    if not (above and below):
        raise ValueError(f"{name}: got {value}, wanted {wanted}")
    return exact


def as_count(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Return `value` as an int in [low, high]. Raises ValueError outside the range or for a number
    that is not whole.
    """
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name}: got {value!r}, wanted {wanted}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: got {value}, wanted {wanted}")
    return int(value)
