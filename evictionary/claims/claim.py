"""A claim of a paper, the numbers measured for it, and the rule that turns them into one word.

The texts of the claims stand in a TOML file for each paper, beside this one: the statement, how it is measured, the conditions of
the rule, and what each number means.
"""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEEN, NOT_SEEN, OTHER_MODEL = "seen", "not seen", "other model needed"

SIGNS: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class Number:
    """One measured number: its value, and the 10th percentile, 90th percentile and count of the values that it summarises."""

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


def _summary(middle: Callable[..., Any], values: Any, meaning: str) -> Number:
    flat = np.asarray(values, dtype=np.float64).ravel()
    if not flat.size or not np.isfinite(flat).all():
        raise ValueError(f"values of {meaning!r}: got {flat.size} of them, {np.isfinite(flat).sum()} finite; wanted finite ones")
    low, high = np.percentile(flat, [10, 90])
    return Number(float(middle(flat)), float(low), float(high), flat.size, meaning)


class Numbers(dict[str, Number]):
    """The numbers of a paper by their names, each with its meaning from the paper's file."""

    def __init__(self, meanings: Mapping[str, str]) -> None:
        super().__init__()
        self.meanings = meanings

    def mean(self, name: str, values: Any) -> None:
        """Add a mean. Raises KeyError for a name without a meaning, ValueError as mean_of does."""
        self[name] = mean_of(values, self.meanings[name])

    def median(self, name: str, values: Any) -> None:
        """Add a median. It raises what mean does."""
        self[name] = median_of(values, self.meanings[name])

    def share(self, name: str, flags: np.ndarray) -> None:
        """Add the share of `flags` [texts, ...] that are true, with its spread over the texts."""
        self.mean(name, flags.reshape(len(flags), -1).mean(axis=-1))


def holds(condition: str, numbers: Mapping[str, Number]) -> bool:
    """Whether the measured number meets the bound: 'evicted_mass < 0.08'."""
    number, sign, bound = condition.split()
    return SIGNS[sign](numbers[number].value, float(bound))


@dataclass(frozen=True)
class Claim:
    """A paper's statement, how it is measured here, and the rule for "seen".

    Every condition of `seen_if`, such as 'evicted_mass < 0.08', has to hold for "seen". If a condition of `possible_if` fails, the
    model cannot show the claim, and the verdict is "other model needed". `beside` names numbers that are reported, without a rule.
    """

    id: str
    source: str
    statement: str
    measured: str
    seen_if: tuple[str, ...]
    possible_if: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The rule in words."""
        possible = f"{OTHER_MODEL} unless {' and '.join(self.possible_if)}; " if self.possible_if else ""
        return f"{possible}{SEEN} if {' and '.join(self.seen_if)}; otherwise {NOT_SEEN}"

    @property
    def numbers(self) -> list[str]:
        """The names of the numbers that the claim reads, in order, each once."""
        conditions = (*self.seen_if, *self.possible_if)
        return list(dict.fromkeys([*(condition.split()[0] for condition in conditions), *self.beside]))

    def verdict(self, numbers: Mapping[str, Number]) -> str:
        """The verdict, by the rule."""
        if not all(holds(condition, numbers) for condition in self.possible_if):
            return OTHER_MODEL
        return SEEN if all(holds(condition, numbers) for condition in self.seen_if) else NOT_SEEN


@dataclass(frozen=True)
class Findings:
    """The measurements for one paper: the numbers that the rules read, and the series that the picture shows."""

    numbers: dict[str, Number]
    series: dict[str, Any]


@dataclass(frozen=True)
class Paper:
    """The content of a paper's file: its claims, the picture's caption `shown` and `rows` of panels, the meanings of numbers."""

    title: str
    arxiv: str
    shown: str
    rows: int
    claims: tuple[Claim, ...]
    meanings: dict[str, str]

    def numbers(self, **words: Any) -> Numbers:
        """An empty collection of numbers; `words` replace the names in braces in the meanings."""
        return Numbers({name: text.format(**words) for name, text in self.meanings.items()})


def read_paper(name: str) -> Paper:
    """Read the file of a paper. `[words]` has texts that several claims share; a claim names such a text in braces."""
    read = tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))
    words = {key: _one_line(text) for key, text in read.get("words", {}).items()}
    claims = []
    for each in read["claims"]:
        said: dict[str, Any] = {key: tuple(each.pop(key, ())) for key in ("seen_if", "possible_if", "beside")}
        said |= {key: _one_line(text).format(**words) for key, text in each.items()}
        claims.append(Claim(**said))
    meanings = {key: _one_line(text) for key, text in read["numbers"].items()}
    return Paper(read["title"], read["arxiv"], read["shown"], read.get("rows", 1), tuple(claims), meanings)


def _one_line(text: str) -> str:
    return " ".join(text.split())
