r"""What counts as equal: the one place where a tolerance is made.

An implementation passes if its error against the float64 oracle is at most `FACTOR` (in float64, more) times
the error of the plain computation in the same dtype, plus the rounding of the output; the largest error and
the mean error are both bound. The plain computation is the reference itself, run in the arithmetic of the
dtype (`arithmetic.py`): once rounding to the nearest, a few times rounding at random, and once more with each
softmax through its logarithm; the largest error counts. NaN never passes. Selections are judged by how many
tokens they keep and by what those score, not by positions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from evictionary.reference import attention
from evictionary.spec_tests.judge.arithmetic import ACCUMULATOR, EPSILON, Rounded, round_to

RANDOM_RUNS = 6
# Of large arrays, whose largest error is one of many, fewer runs say as much.
FEW_RUNS, MANY_NUMBERS = 2, 2**14
# Twice, as is usual in kernel tests, and twice again because the largest of eight runs falls short of the
# largest error.
FACTOR = 4.0
# In float64 sixteen times that: a formula has many right forms (log-add-exp token by token for a softmax),
# whose roundings differ by the number of terms, and no mistake is as small as the 1e-12 or so that this comes
# to.
FACTOR_OF = {"float64": 64.0}
# A weight that underflows to 0 in one right form is e^-700 in another, whose exponents are kept from
# overflowing.
NOTHING = {name: float(np.finfo(name).tiny / np.finfo(name).eps) for name in ("float64", "float32")}


class Violation(AssertionError):
    """A law does not hold; `expected`, `got` and `difference` are what the report shows."""

    def __init__(self, message: str, expected: Any = None, got: Any = None) -> None:
        super().__init__(message)
        self.message, self.expected, self.got = message, expected, got


class Unlike(Violation):
    """Two answers of one implementation are not related as a law says; `expected` follows from the one, `got`
    is the other.
    """


# Where somebody listens: for each comparison the mean error that is allowed, in parts of the mean number that
# is expected.
LISTENERS: list[list[float]] = []


def note(slack: Any, expected: np.ndarray) -> None:
    """Tell the listeners what a comparison allows; slack
    is a number, an array, or a function that gives one.
    """
    if LISTENERS and (size := float(np.abs(expected[np.isfinite(expected)]).mean())) > 0:
        allowed = np.broadcast_to(slack() if callable(slack) else slack, expected.shape)
        for listener in LISTENERS:
            listener.append(float(allowed[np.isfinite(expected)].mean()) / size)


class Allowance:
    """The oracle's numbers and the error allowed on them; `largest` is infinite where the dtype cannot
    hold the result.
    """

    def __init__(self, expected: np.ndarray, largest: float, mean: float) -> None:
        self.expected, self._errors = expected, (largest, mean)

    def errors(self) -> tuple[float, float]:
        """The largest and the mean error that are allowed."""
        return self._errors

    @property
    def largest(self) -> float:
        return self.errors()[0]

    @property
    def mean(self) -> float:
        return self.errors()[1]

    def covers(self, largest: float, mean: float) -> bool:
        """Whether a largest and a mean error are allowed."""
        return largest <= self.largest and mean <= self.mean

    def wider(self, largest: float, mean: float | None = None) -> Allowance:
        """The same numbers with so much more allowed, on
        average as much as at most unless `mean` says otherwise.
        """
        return Wider(self, largest, largest if mean is None else mean)

    def of_two(self, own: np.ndarray) -> Allowance:
        """What two answers of one implementation may differ by, where its answer to these arguments is `own`.

        Each may be wrong by as much as one may. Where its numbers are larger than the oracle's, so is what
        their rounding comes to.
        """
        size, wanted = (
            float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0)) for numbers in (own, self.expected)
        )
        return OfTwo(self, max(1.0, size / wanted) if wanted > 0 else 1.0)

    def check(
        self,
        got: Any,
        what: str = "the result",
        expected: np.ndarray | None = None,
        violation: Callable[[str, Any, Any], Violation] = Violation,
    ) -> None:
        """Raise Violation, or that of another kind, unless
        `got` equals the expected numbers within the allowance.
        """
        expected = self.expected if expected is None else expected
        try:
            require_numbers(got, expected.shape, what)
        except Violation:
            # before an answer is called wrong all runs are made, for the dtype may not hold the result
            self.errors()
            raise
        same = (got == expected) | (
            ~np.isfinite(expected) & (np.sign(got) == np.sign(expected)) & np.isinf(got)
        )
        error = np.where(same, 0, np.abs(got - np.where(np.isfinite(expected), expected, 0)))
        error = np.where(np.isfinite(expected) | same, error, np.inf)
        largest, mean = float(error.max(initial=0)), float(error.mean()) if error.size else 0.0
        note(lambda: self.mean, expected)
        if not self.covers(largest, mean):
            raise violation(
                f"{what} differs by {largest:.3g} at most and {mean:.3g} on average; "
                f"allowed are {self.largest:.3g} and {self.mean:.3g}",
                expected,
                got,
            )


class Wider(Allowance):
    """Another allowance with so much more allowed, measured only as far as a question needs."""

    def __init__(self, of: Allowance, largest: float, mean: float) -> None:
        super().__init__(of.expected, largest, mean)
        self._of, self._more = of, (largest, mean)

    def errors(self) -> tuple[float, float]:
        """The largest and the mean error that are allowed."""
        largest, mean = self._of.errors()
        return largest + self._more[0], mean + self._more[1]

    def covers(self, largest: float, mean: float) -> bool:
        """Whether a largest and a mean error are allowed."""
        return self._of.covers(largest - self._more[0], mean - self._more[1])


def require_numbers(got: Any, shape: tuple[int, ...], what: str) -> None:
    """Raise Violation unless `got` is an array of real numbers of that shape without NaN."""
    if not isinstance(got, np.ndarray) or got.dtype.kind not in "fiu":
        raise Violation(
            f"{what} is {_describe(got)}, wanted an array of real numbers of shape {shape}", None, got
        )
    if got.shape != shape:
        raise Violation(f"{what} has shape {got.shape}, wanted {shape}", None, got)
    if np.isnan(got).any():
        raise Violation(f"{what} holds {int(np.isnan(got).sum())} NaN", None, got)


class OfTwo(Allowance):
    """Twice another allowance, of numbers so many times as large."""

    def __init__(self, of: Allowance, size: float) -> None:
        super().__init__(of.expected, size, size)
        self._of, self._times = of, 2 * size

    def errors(self) -> tuple[float, float]:
        """The largest and the mean error that are allowed."""
        largest, mean = self._of.errors()
        return self._times * largest, self._times * mean

    def covers(self, largest: float, mean: float) -> bool:
        """Whether a largest and a mean error are allowed."""
        return self._of.covers(largest / self._times, mean / self._times)


class Measured(Allowance):
    """An allowance measured run by run, only as far as a question needs: more runs never allow less.

    Most answers are so near that few runs or none have to be made for them.
    """

    def __init__(
        self, runs: Iterator[np.ndarray | None], dtype: str, unrepresentable: Callable[[], Any]
    ) -> None:
        expected = next(runs)
        assert expected is not None
        self.expected = expected.copy()  # the runs are remembered, and a law may write into what it is given
        self._runs, self._dtype, self._unrepresentable = runs, dtype, unrepresentable
        self._finite = np.isfinite(self.expected)
        size = np.abs(self.expected[self._finite])
        self._size = np.array([size.max(initial=0), size.mean() if size.size else 0.0])
        self._error = np.zeros(2)  # the largest and the mean
        # The rounding of the output, where sums made an error and where no run made one.
        self._of_a_sum = FACTOR_OF.get(dtype, FACTOR) * EPSILON[ACCUMULATOR[dtype]]
        self._of_one = self._of_a_sum if dtype == "float64" else EPSILON[dtype] / 2
        if dtype != "float64":
            # it tells whether the dtype can hold the result, before anything is said of an answer
            self._more()

    def _more(self) -> bool:
        """Make one more run; whether there was one to make."""
        for run in self._runs:
            # what comes back has the range of the dtype, whatever lay between
            if run is None or not np.isfinite(round_to(run[self._finite], self._dtype)).all():
                self._error[:] = np.inf
                self._unrepresentable()
            elif self._finite.any():
                error = np.abs(run[self._finite] - self.expected[self._finite])
                self._error = np.maximum(self._error, [error.max(), error.mean()])
            return True
        return False

    def _allowed(self, rounding: float) -> tuple[float, float]:
        """What the runs made so far allow, with this much for the rounding of the output."""
        largest, mean = (
            FACTOR_OF.get(self._dtype, FACTOR) * self._error
            + rounding * self._size
            + NOTHING[ACCUMULATOR[self._dtype]]
        )
        return float(largest), float(mean)

    def covers(self, largest: float, mean: float) -> bool:
        least = min(self._of_a_sum, self._of_one)
        while True:
            allowed = self._allowed(least)
            if largest <= allowed[0] and mean <= allowed[1]:
                return True
            if not self._more():
                return super().covers(largest, mean)

    def errors(self) -> tuple[float, float]:
        while self._more():
            pass
        # Where these runs made no error at all, another way may: exp(-log 64) is not 1/64 to the last bit.
        return self._allowed(self._of_a_sum if self._error[0] == 0 else self._of_one)


def allowance(
    function: Callable[..., Any],
    *args: Any,
    dtype: str,
    pick: int | None = None,
    unrepresentable: Callable[[], Any] = lambda: None,
    **kwargs: Any,
) -> Allowance:
    """Return what `function` of the reference gives on these inputs and the error that `dtype` is allowed.

    pick selects one entry of a tuple result. Arrays among the arguments must be representable in `dtype`.
    unrepresentable is called when it turns out that the dtype cannot hold the result.
    """

    def picked(result: Any) -> np.ndarray | None:
        return (
            None
            if result is None
            else np.asarray(result if pick is None else result[pick], dtype=np.float64).view(np.ndarray)
        )

    return Measured(map(picked, _runs(function, args, kwargs, dtype)), dtype, unrepresentable)


# A suite that judges many implementations draws the same inputs for each, and the runs below are most of what
# a law costs.
_REMEMBERED = 4096
_remembered: OrderedDict[bytes, list[Any]] = OrderedDict()


def forget() -> None:
    """Forget the runs: the reference is another one now."""
    _remembered.clear()


def _runs(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtype: str
) -> Iterator[Any]:
    """What `function` gives in float64, and then in the arithmetic of `dtype`: to the nearest, and at
    random a few times.

    Each run is made when it is asked for. The last is None where
    the reference refuses what overflowed in this arithmetic.
    """
    # A lambda may be another one next time.
    lasting = getattr(sys.modules.get(function.__module__), function.__name__, None) is function
    made: list[Any] = []
    if lasting:
        made = _remembered.setdefault(key := _key(function, args, kwargs, dtype), made)
        _remembered.move_to_end(key)
    if len(_remembered) > _REMEMBERED:
        _remembered.popitem(last=False)

    def run(wrap: Callable[[np.ndarray], np.ndarray]) -> Any:
        def wrapped(value: Any) -> Any:
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                return wrap(value)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*(wrapped(entry) for entry in value))
            return value

        with np.errstate(all="ignore"):
            return function(
                *(wrapped(value) for value in args),
                **{name: wrapped(value) for name, value in kwargs.items()},
            )

    def rounded(generator: np.random.Generator | None) -> Any:
        try:
            return run(functools.partial(Rounded.of, dtype=dtype, generator=generator))
        except ValueError:
            return None

    def through_logarithm() -> Any:
        plain, other = attention.softmax, mock.Mock(wraps=softmax_through_logarithm)
        with contextlib.ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith("evictionary.reference.") and vars(module).get("softmax") is plain:
                    stack.enter_context(mock.patch.object(module, "softmax", other))
            result = at_random(FEW_RUNS)  # the same however many runs there were before
        # without a softmax it is one random run more, for nothing
        return result if other.called else made[-1]

    def at_random(seed: int) -> Any:
        return rounded(np.random.default_rng(seed))

    numbers = sum(value.size for value in (*args, *kwargs.values()) if isinstance(value, np.ndarray))
    random_runs = FEW_RUNS if numbers > MANY_NUMBERS else RANDOM_RUNS
    runs: list[Callable[[], Any]] = [
        lambda: run(lambda value: value),
        lambda: rounded(None),
        *(functools.partial(at_random, seed) for seed in range(random_runs)),
        through_logarithm,
    ]
    for place, make in enumerate(runs):
        if place == len(made):
            made.append(make())
        yield made[place]
        if made[place] is None:
            return


def softmax_through_logarithm(logits: Rounded, axis: int = -1) -> np.ndarray:
    """`exp(x - log sum exp x)`, as kernels that hold a log-sum-exp compute it: right, but it rounds a
    logarithm as large as x.
    """
    wide = Rounded.of(logits, ACCUMULATOR[logits.dtype_name], logits.generator)
    top = wide.max(axis=axis, keepdims=True)
    weights = np.exp(wide - (top + np.log(np.exp(wide - top).sum(axis=axis, keepdims=True))))
    return Rounded.of(round_to(np.asarray(weights), logits.dtype_name), logits.dtype_name, logits.generator)


def _key(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtype: str) -> bytes:
    """A fingerprint of a call: the name of the function, the dtype, and every number of the arguments."""
    digest = hashlib.blake2b(f"{function.__module__}.{function.__name__} {dtype}".encode(), digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, tuple | list):
            digest.update(f"{type(value).__name__} {len(value)}".encode())
            for entry in value:
                add(entry)
        else:
            digest.update(repr(value).encode())

    add(args)
    add([entry for name in sorted(kwargs) for entry in (name, kwargs[name])])
    return digest.digest()


def require_mask(kept: Any, shape: tuple[int, ...], what: str) -> None:
    """Raise Violation unless `kept` is a boolean array of that shape."""
    if not isinstance(kept, np.ndarray) or kept.dtype != np.bool_:
        raise Violation(f"{what} is {_describe(kept)}, wanted a boolean mask of shape {shape}", None, kept)
    if kept.shape != shape:
        raise Violation(f"{what} has shape {kept.shape}, wanted {shape}", None, kept)


def _describe(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
