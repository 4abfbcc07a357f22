r"""Other arithmetics to run the reference in: each operation rounded to a dtype, to the nearest or up and
down at random.

The error that a correct implementation may make is not a constant: it depends on the dtype, on the input and
on the order in which sums are taken. Running the reference itself in the arithmetic of the dtype measures it.
Rounding at random (Monte Carlo arithmetic) shows what the digits of one lucky run hide: where a sum cancels,
the random runs scatter.

A sum of squares may lie beyond the range of float16 where its root does not: 300 is a length like any other,
and its square overflows. Libraries hold such a sum in float32. So it keeps the digits of float16 until its
root is taken, and a program that overflows there differs from what is allowed.

What is exact in every right form stays exact: a short number is not rounded,
nor a short sum of short dyadic numbers, which has no error in any order. So
on hand-sized inputs the allowance is zero and the comparison is equality.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# The distance from 1 to the next number, and the number of significant bits.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = {
    "float64": float(np.finfo(np.float64).max),
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
}
"""The largest number of each dtype."""
# Sums of half-precision numbers are accumulated in float32, by tensor cores and by every library.
ACCUMULATOR = {"float64": "float64", "float32": "float32", "float16": "float32", "bfloat16": "float32"}


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 numbers to the nearest that `dtype`
    represents (ties to even); the result is float64 again.
    """
    if dtype == "float64":
        return array
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(dtype).astype(np.float64)
    # bfloat16 is the upper half of a float32: add half of the last kept bit (ties to even), then drop the
    # lower half.
    with np.errstate(over="ignore"):
        bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isfinite(array), upper.astype(np.uint32).view(np.float32).astype(np.float64), array)


def digits_of(array: np.ndarray, dtype: str) -> np.ndarray:
    """`round_to`, but numbers beyond the range of float16 have its digits and the range of float32."""
    rounded = round_to(array, dtype)
    if dtype != "float16" or (np.isinf(rounded) == np.isinf(array)).all():
        return rounded
    mantissa, exponent = np.frexp(array)
    wide = np.ldexp(np.round(mantissa * 2 / EPSILON[dtype]) * EPSILON[dtype] / 2, exponent)
    return np.where(np.isinf(rounded), wide, rounded)


Rounding = Callable[[np.ndarray, str], np.ndarray]


class Rounded(np.ndarray):
    """A float64 array whose every operation is rounded to `dtype`; with a generator, up or down at random.

    Make one with `Rounded.of(array, dtype, generator)`. NumPy's functions work on it as on any array.
    """

    dtype_name: str
    generator: np.random.Generator | None
    of_squares: bool  # squares or their sum, which have the digits of the dtype and the range of float32

    @classmethod
    def of(cls, array: np.ndarray, dtype: str, generator: np.random.Generator | None = None) -> Rounded:
        result = np.array(array, dtype=np.float64).view(cls)
        result.dtype_name, result.generator = dtype, generator
        return result

    def __array_finalize__(self, parent: Any) -> None:
        self.dtype_name = getattr(parent, "dtype_name", "float64")
        self.generator = getattr(parent, "generator", None)
        self.of_squares = getattr(parent, "of_squares", False)

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        """In float16 the sum stays in its accumulator until it is divided: of thousands of numbers it may
        be beyond 65,504.
        """
        if self.dtype_name != "float16":
            return super().mean(*args, **kwargs)
        mean = Rounded.of(self, ACCUMULATOR["float16"], self.generator).mean(*args, **kwargs)
        return Rounded.of(self._rounded(np.asarray(_plain(mean))), self.dtype_name, self.generator)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any
    ) -> Any:
        summed = ufunc is np.add and method == "reduce" and inputs[0].of_squares
        squared = ufunc is np.square or (ufunc is np.multiply and len(inputs) == 2 and inputs[0] is inputs[1])
        plain = [_plain(entry) for entry in inputs]
        if not (summed or ufunc is np.sqrt):
            plain = [
                round_to(each, self.dtype_name) if getattr(entry, "of_squares", False) else each
                for entry, each in zip(inputs, plain, strict=True)
            ]
        kwargs = {key: _plain(value) for key, value in kwargs.items()}
        with np.errstate(all="ignore"):
            result = getattr(ufunc, method)(*plain, **kwargs)
            if isinstance(result, np.ndarray | np.floating) and np.asarray(result).dtype.kind == "f":
                result = np.asarray(result)
                is_sum = ufunc is np.matmul or (ufunc is np.add and method in ("reduce", "accumulate"))
                if is_sum and self.generator is not None:
                    result = self._summed(result, *_terms(ufunc, method, plain, kwargs))
                if ufunc not in _EXACT:
                    result = self._rounded(result, digits_of if squared or summed else round_to)
                result = Rounded.of(result, self.dtype_name, self.generator)
                result.of_squares = squared or summed
        if out is None:
            return result
        out[0][...] = _plain(result)
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # NumPy's own implementation runs, and the operations inside it come back to `__array_ufunc__`; but
        # some of its functions (where, einsum) hand out plain arrays, and einsum sums without a ufunc.
        result = super().__array_function__(function, types, args, kwargs)
        if not isinstance(result, np.ndarray) or result.dtype.kind != "f":
            return result
        values = np.asarray(_plain(result))
        if function is np.einsum:
            if self.generator is not None:
                subscripts, *operands = [_plain(argument) for argument in args]
                magnitude = np.einsum(subscripts, *(np.abs(operand) for operand in operands))
                lowest = float(np.prod([_lowest_bit(operand) for operand in operands]))
                values = self._summed(values, magnitude, max(operand.size for operand in operands), lowest)
            values = self._rounded(values)
        return Rounded.of(values, self.dtype_name, self.generator)

    def _rounded(self, exact: np.ndarray, round_it: Rounding = round_to) -> np.ndarray:
        nearest = round_it(exact, self.dtype_name)
        if self.generator is None:
            return nearest
        step = np.where((exact == nearest) & _short(exact, self.dtype_name), 0, EPSILON[self.dtype_name] / 2)
        sign = 2.0 * self.generator.integers(0, 2, size=exact.shape, dtype=np.int8) - 1.0
        return np.where(step == 0, exact, round_it(exact * (1 + 2 * step * sign), self.dtype_name))

    def _summed(self, exact: np.ndarray, magnitude: np.ndarray, count: int, lowest_bit: float) -> np.ndarray:
        """Add the error that a sum of `count` terms makes when taken in pairs, in an order that is not
        ours to know. Only sums that are rounded at random make one.
        """
        assert self.generator is not None
        epsilon = EPSILON[ACCUMULATOR[self.dtype_name]]
        # a partial sum may need more bits than the accumulator has
        inexact = magnitude * epsilon > 2 * lowest_bit
        sign = 2.0 * self.generator.integers(0, 2, size=exact.shape, dtype=np.int8) - 1.0
        return exact + np.where(inexact, sign * epsilon / 2 * (1 + np.log2(count)) * magnitude, 0)


_EXACT = {
    np.maximum,
    np.minimum,
    np.negative,
    np.absolute,
    np.sign,
    np.copysign,
    np.floor,
    np.ceil,
    np.positive,
}


def _short(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Whether numbers need half of the bits of a dtype, or less. Those alone are exact in any right form.

    Of float64 no record is left of what was rounded away. And where a quotient fits into float32 by luck, the
    same formula written in another order rounds.
    """
    if dtype == "float64":
        return exact == round_to(exact, "float32")
    if dtype == "float32":
        with np.errstate(over="ignore"):
            return exact.astype(np.float32).view(np.uint32) & 0xFFF == 0
    return np.ones(exact.shape, dtype=bool)


def _plain(value: Any) -> Any:
    if isinstance(value, Rounded):
        return value.view(np.ndarray)
    if isinstance(value, tuple):
        return tuple(_plain(entry) for entry in value)
    return value


def _lowest_bit(array: Any) -> float:
    """The smallest power of two of which every number of
    the array is a whole multiple; infinity for zeros alone.
    """
    values = np.abs(np.asarray(array, dtype=np.float64))
    values = values[(values > 0) & np.isfinite(values)]
    if not values.size:
        return np.inf
    mantissa, exponent = np.frexp(values)
    whole = (mantissa * 2.0**53).astype(np.int64)
    return float(np.ldexp((whole & -whole).astype(np.float64), exponent - 53).min())


def _terms(
    ufunc: np.ufunc, method: str, inputs: list[Any], kwargs: dict[str, Any]
) -> tuple[np.ndarray, int, float]:
    """For a sum: the sum of the magnitudes of its terms,
    their number, and the lowest bit that a term can have.
    """
    if ufunc is np.matmul:
        left, right = inputs
        lowest = _lowest_bit(left) * _lowest_bit(right)
        return np.matmul(np.abs(left), np.abs(right)), left.shape[-1], lowest
    array = np.asarray(inputs[0])
    magnitude = np.asarray(getattr(ufunc, method)(np.abs(array), *inputs[1:], **kwargs))
    return magnitude, max(1, array.size // max(1, magnitude.size)), _lowest_bit(array)
