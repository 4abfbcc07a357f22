"""A claim of a paper, the numbers measured for it, and the rule that turns them into one word."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SEEN, NOT_SEEN, OTHER_MODEL = "seen", "not seen", "other model needed"

SIGNS: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class Number:
    """One measured number: its value, the 10th and 90th percentile of what it summarises, and how many those were."""

    value: float
    low: float
    high: float
    count: int
    meaning: str


def mean_of(values: Any, meaning: str) -> Number:
    """The mean of `values`, any shape, with their spread. Raises ValueError for none, or for NaN or infinite ones."""
    return _summary(np.mean, values, meaning)


def median_of(values: Any, meaning: str) -> Number:
    """The median of `values`, any shape, with their spread. Raises ValueError for none, or for NaN or infinite ones."""
    return _summary(np.median, values, meaning)


def share_of(flags: np.ndarray, meaning: str) -> Number:
    """The share of `flags` [texts, ...] that are true, with its spread over the texts."""
    return mean_of(flags.reshape(len(flags), -1).mean(axis=-1), meaning)


def _summary(middle: Callable[..., Any], values: Any, meaning: str) -> Number:
    flat = np.asarray(values, dtype=np.float64).ravel()
    if not flat.size or not np.isfinite(flat).all():
        raise ValueError(f"values of {meaning!r}: got {flat.size} of them, {np.isfinite(flat).sum()} finite; wanted finite ones")
    low, high = np.percentile(flat, [10, 90])
    return Number(float(middle(flat)), float(low), float(high), flat.size, meaning)


@dataclass(frozen=True)
class Condition:
    """`number sign bound`, such as `evicted_mass < 0.08`."""

    number: str
    sign: str
    bound: float

    def holds(self, numbers: Mapping[str, Number]) -> bool:
        """Whether the measured number meets the bound."""
        return SIGNS[self.sign](numbers[self.number].value, self.bound)

    def __str__(self) -> str:
        return f"{self.number} {self.sign} {self.bound:g}"


@dataclass(frozen=True)
class Claim:
    """What a paper says, how it is measured here, and when it counts as seen.

    Every condition of `seen_if` has to hold for "seen". Where one of `possible_if` fails, the model cannot show the claim at
    all, and the word is "other model needed". `beside` names numbers that are reported and decide nothing.
    """

    id: str
    source: str
    statement: str
    measured: str
    seen_if: tuple[Condition, ...]
    possible_if: tuple[Condition, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The rule in words."""
        possible = f"{OTHER_MODEL} unless {_all(self.possible_if)}; " if self.possible_if else ""
        return f"{possible}{SEEN} if {_all(self.seen_if)}; otherwise {NOT_SEEN}"

    @property
    def numbers(self) -> list[str]:
        """The names of the numbers that the claim reads, in order and once each."""
        conditions = (*self.seen_if, *self.possible_if)
        return list(dict.fromkeys([*(condition.number for condition in conditions), *self.beside]))

    def verdict(self, numbers: Mapping[str, Number]) -> str:
        """The word, by the rule."""
        if not all(condition.holds(numbers) for condition in self.possible_if):
            return OTHER_MODEL
        return SEEN if all(condition.holds(numbers) for condition in self.seen_if) else NOT_SEEN


def _all(conditions: Sequence[Condition]) -> str:
    return " and ".join(map(str, conditions))


@dataclass(frozen=True)
class Findings:
    """What was measured for one paper: the numbers that the rules read, and the series that the picture shows."""

    numbers: dict[str, Number]
    series: dict[str, Any]
