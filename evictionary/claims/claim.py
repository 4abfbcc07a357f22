"""A claim of a paper, the numbers measured for it with their
intervals, and the rule that turns them into a verdict.

The texts of the claims are in a TOML file for each paper, beside this one: the statement, how it is
measured, the conditions of the rule, and what each number means.
"""

import math
import operator
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evictionary.errors import did_you_mean, require

# The papers with claims, in the order of the pages.
PAPERS = ("expected_attention", "keydiff", "lagkv", "momentkv", "gvote")
HOLDS, FAILS, UNDECIDED, OTHER_MODEL = "holds here", "does not hold here", "undecided", "other model needed"

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

DRAWS = 1000
CONFIDENCE = 0.95
# Fewer texts give no interval: a percentile bootstrap of two or three values repeats them and says nothing of
# others.
LEAST_TEXTS = 12


@dataclass(frozen=True)
class Number:
    """One measured number: its value over all texts, the bootstrap interval, the count of texts, the value
    by kind of text.

    The ends of the interval are None below LEAST_TEXTS. `by_text` is empty for a number that compares the
    kinds with each other.
    """

    value: float
    low: float | None
    high: float | None
    texts: int
    by_text: dict[str, float]
    meaning: str


class Numbers(dict[str, Number]):
    """The numbers of a paper by their names, each with its meaning from the paper's file and an interval
    over the texts.

    `kinds` names the kind of each text; every kind has as many texts. The interval is the percentile
    bootstrap in two steps: each draw takes kinds at random, with repetition, and texts of each of them. Texts
    of one kind are much alike, so drawing texts alone would give intervals that leave out every other kind. A
    draw takes one kind and one text fewer than there are: with all n the variance of a mean would come out
    too small by the factor (n - 1) / n.
    """

    def __init__(self, meanings: Mapping[str, str], kinds: Sequence[str]) -> None:
        super().__init__()
        self.meanings = meanings
        self.rows = {kind: np.flatnonzero(np.array(kinds) == kind) for kind in dict.fromkeys(kinds)}
        table = np.stack(list(self.rows.values()))
        draw, (count, each) = np.random.default_rng(0), table.shape
        chosen = draw.integers(count, size=(DRAWS, max(1, count - 1), 1))
        texts = draw.integers(each, size=(DRAWS, count, max(1, each - 1)))
        self.draws = table[chosen, texts[:, : chosen.shape[1]]].reshape(DRAWS, -1)
        self.within_kinds = table[np.arange(count)[:, None], texts].reshape(DRAWS, -1)

    def add(
        self, name: str, statistic: Callable[..., Any], *values: Any, compares_kinds: bool = False
    ) -> None:
        """Add `statistic(*values)`; the first axis of each array of `values` is the text.

        Every draw for a number that compares the kinds has all kinds, and so a number on a single kind means
        nothing. Raises KeyError for a name without a meaning, ValueError for values that are not finite.
        """
        arrays = [np.asarray(each, dtype=np.float64) for each in values]
        if not all(each.size and np.isfinite(each).all() for each in arrays):
            raise ValueError(f"values of {name}: got none, NaN or infinite ones, wanted finite ones")

        def over(rows: np.ndarray) -> float:
            return float(statistic(*(each[rows] for each in arrays)))

        outside = (1 - CONFIDENCE) / 2
        draws = self.within_kinds if compares_kinds else self.draws
        everywhere = np.concatenate(list(self.rows.values()))
        low = high = None
        if len(everywhere) >= LEAST_TEXTS:
            low, high = np.quantile([over(rows) for rows in draws], [outside, 1 - outside]).tolist()
        by_text = {} if compares_kinds else {kind: over(rows) for kind, rows in self.rows.items()}
        self[name] = Number(over(everywhere), low, high, len(everywhere), by_text, self.meanings[name])

    def means(self, **values: Any) -> None:
        """Add means over the texts and all other axes, by name. It raises what add does."""
        for name, of in values.items():
            array = np.asarray(of, dtype=np.float64)
            self.add(name, np.mean, array.reshape(len(array), -1).mean(axis=-1))

    def medians(self, **values: Any) -> None:
        """Add medians over the texts and all other axes, by name. It raises what add does."""
        for name, of in values.items():
            self.add(name, np.median, of)


@dataclass(frozen=True)
class Condition:
    """A bound on a number: 'evicted_mass < 0.08'."""

    text: str

    @property
    def number(self) -> str:
        return self.text.split()[0]

    @property
    def bound(self) -> float:
        return float(self.text.split()[2])

    def met_by(self, value: float) -> bool:
        """Whether a value is on the claim's side of the bound."""
        return SIGNS[self.text.split()[1]](value, self.bound)

    def decided(self, numbers: Mapping[str, Number]) -> bool | None:
        """True if the whole interval is on the claim's side, False if it is wholly on the other, None if
        neither or without one.
        """
        number = numbers[self.number]
        if number.low is None or number.high is None:
            return None
        low, high = self.met_by(number.low), self.met_by(number.high)
        return low if low == high else None

    def reach(self, numbers: Mapping[str, Number]) -> float:
        """How many times as wide the interval would have to be to end at the bound; below 1 if it has the
        bound in it.
        """
        number = numbers[self.number]
        assert number.low is not None and number.high is not None
        half = (number.value - number.low) if number.value > self.bound else (number.high - number.value)
        distance = abs(number.value - self.bound)
        return distance / half if half > 0 else math.inf if distance else 0.0


@dataclass(frozen=True)
class Claim:
    """A paper's statement, how it is measured here, and the rule of its verdict.

    Every condition of `holds_if`, such as 'evicted_mass < 0.08', has to be met. If a condition of
    `possible_if` is not met, the model cannot show the claim, and the verdict is "other model needed". It
    fails the task with its full cache, or a method does no better than chance.
    `beside` names numbers that are reported, without a rule.
    """

    id: str
    source: str
    statement: str
    measured: str
    holds_if: tuple[Condition, ...]
    possible_if: tuple[Condition, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        possible = f"{OTHER_MODEL} unless {_and(self.possible_if)}; " if self.possible_if else ""
        return f"{possible}{HOLDS} if {_and(self.holds_if)}"

    @property
    def numbers(self) -> list[str]:
        """The names of the numbers that the claim reads, in order, each once."""
        return list(
            dict.fromkeys([*(each.number for each in (*self.holds_if, *self.possible_if)), *self.beside])
        )

    def verdict(self, numbers: Mapping[str, Number]) -> str:
        """The verdict: a condition is met or not met only if the whole interval says so."""
        possible = [condition.decided(numbers) for condition in self.possible_if]
        decided = [condition.decided(numbers) for condition in self.holds_if]
        if False in possible:
            return OTHER_MODEL
        if False in decided and None not in possible:
            return FAILS
        return UNDECIDED if None in (*possible, *decided) else HOLDS

    def changes(self, numbers: Mapping[str, Number]) -> str:
        """What would change the verdict: more texts, or another
        kind of text. Another model can change every verdict.
        """
        deciding = [numbers[each.number] for each in (*self.possible_if, *self.holds_if)]
        if any(number.low is None for number in deciding):
            return f"An interval needs {LEAST_TEXTS} texts, and there are only {deciding[0].texts}."
        needed = (
            f"A model with {_and(self.possible_if)} would. " if self.verdict(numbers) == OTHER_MODEL else ""
        )
        return f"{needed}{self._more_texts(numbers)} {self._other_texts(numbers)}"

    def _deciding(self, numbers: Mapping[str, Number]) -> tuple[Condition, ...]:
        """The conditions that a verdict rests on: where another model is needed, no others are read."""
        other = self.verdict(numbers) == OTHER_MODEL
        return self.possible_if if other else (*self.possible_if, *self.holds_if)

    def _more_texts(self, numbers: Mapping[str, Number]) -> str:
        every, verdict = self._deciding(numbers), self.verdict(numbers)
        if verdict == UNDECIDED:
            # the width of an interval falls with the root of the number of texts
            return " ".join(_needed(each, numbers) for each in every if each.decided(numbers) is None)
        if verdict == HOLDS:
            nearest = min(every, key=lambda condition: condition.reach(numbers))
        else:
            failed = [each for each in every if each.decided(numbers) is False]
            nearest = max(failed, key=lambda condition: condition.reach(numbers))
        reach = nearest.reach(numbers)
        if math.isinf(reach):
            return f"Robust to more texts: {nearest.number} is the same in every draw."
        likely = "Robust to more texts" if reach >= 2 else "More texts may change it"
        return (
            f"{likely}. The interval of {nearest.number} would have to be {reach:.3g} times as wide to "
            f"reach {nearest.bound:g}."
        )

    def _other_texts(self, numbers: Mapping[str, Number]) -> str:
        every = self._deciding(numbers)
        if not all(numbers[each.number].by_text for each in every):
            return "Other kinds of text may change it: the claim compares the kinds."
        kinds = numbers[every[0].number].by_text
        met = all(each.met_by(numbers[each.number].value) for each in every)
        other = [
            kind
            for kind in kinds
            if met != all(each.met_by(numbers[each.number].by_text[kind]) for each in every)
        ]
        if not other:
            return "Robust to other texts. No single kind of text gives another verdict."
        return (
            f"Other texts would change it: {' or '.join(f'{kind} alone' for kind in other)} gives another "
            "verdict."
        )


def _needed(condition: Condition, numbers: Mapping[str, Number]) -> str:
    number, reach = numbers[condition.number], condition.reach(numbers)
    if reach < 0.03:
        return f"No number of texts would: {condition.number} lies on its bound {condition.bound:g}."
    more = "texts and kinds" if number.by_text else "texts"
    return f"About {1 / reach**2:.1f} times as many {more} would decide {condition.text}, if the value stays."


def _and(conditions: Sequence[Condition]) -> str:
    return " and ".join(condition.text for condition in conditions)


# The measurements for one paper: the numbers that the rules read, and the series that the picture shows.
Findings = tuple[dict[str, Number], dict[str, Any]]


@dataclass(frozen=True)
class Paper:
    """The content of a paper's file: its claims, the picture's caption `shown` and `rows` of panels, the
    meanings of numbers.
    """

    title: str
    arxiv: str
    shown: str
    rows: int
    claims: tuple[Claim, ...]
    meanings: dict[str, str]

    def numbers(self, kinds: Sequence[str], **words: Any) -> Numbers:
        """An empty collection of numbers over texts of these
        kinds; `words` replace the names in braces in the meanings.
        """
        return Numbers({name: text.format(**words) for name, text in self.meanings.items()}, kinds)


def read_paper(name: str) -> Paper:
    """Read the file of a paper. `[words]` has texts that
    several claims share; a claim names such a text in braces.
    """
    read = tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))
    words = {key: _one_line(text) for key, text in read.get("words", {}).items()}
    lists: dict[str, Any] = {"holds_if": Condition, "possible_if": Condition, "beside": str}
    claims: list[dict[str, Any]] = [
        {
            key: tuple(map(lists[key], said)) if key in lists else _one_line(said).format(**words)
            for key, said in each.items()
        }
        for each in read["claims"]
    ]
    meanings = {key: _one_line(text) for key, text in read["numbers"].items()}
    every = tuple(Claim(**each) for each in claims)
    return Paper(read["title"], read["arxiv"], read["shown"], read.get("rows", 1), every, meanings)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def require_some(argument: str, given: Collection[str], unknown: Sequence[str], known: Iterable[str]) -> None:
    """Raise UsageError for unknown names, and for none."""
    close = "".join(did_you_mean(name, known) for name in unknown[:1])
    require(
        given and not unknown,
        f"{argument}: got {', '.join(unknown) or 'none'}{close}, wanted some of {', '.join(known)}",
    )


def check_claims(
    papers: Sequence[str] | None = None, only: Sequence[str] | None = None
) -> dict[str, list[Claim]]:
    """The claims of these papers, of all for None; `only` keeps those of these ids: 'KD-7', or 'KD-7
    (diversity)' for one of them.

    It reads only the papers' files, so a wrong name is told before torch is imported.

    Raises UsageError for an unknown name or none.
    """
    chosen = list(PAPERS) if papers is None else list(dict.fromkeys(papers))
    require_some("papers", chosen, [name for name in chosen if name not in PAPERS], PAPERS)
    claims = {name: list(read_paper(name).claims) for name in chosen}
    if only is None:
        return claims
    known = [claim.id for each in claims.values() for claim in each]
    require_some("only", only, [name for name in only if not any(_is_named(id, name) for id in known)], known)
    return {
        paper: named
        for paper, each in claims.items()
        if (named := [claim for claim in each if any(_is_named(claim.id, name) for name in only)])
    }


def _is_named(id: str, name: str) -> bool:
    return name in (id, id.partition(" ")[0])
