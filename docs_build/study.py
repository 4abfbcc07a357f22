"""Makes what is stored of the study: `python -m docs_build.study` reads docs/study/, writes its summary
and its picture.

results.jsonl.xz has the measurements of every composition on texts that programs made, finals.jsonl.xz those
of its final, and pyramid.jsonl.xz those of the final with PyramidKV's division on some of its prompts.
real.jsonl.xz, real_2000.jsonl.xz, real_4000.jsonl.xz and real_finals.jsonl.xz are of texts that people wrote.
protected.jsonl.xz compares selections with and without `+protect`. `evictionary study` writes such a file,
and `xz -9e` compresses it.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from docs_build.entries import ROOT
from evictionary.evaluation import study
from evictionary.evaluation.pages import drawn
from evictionary.methods.resolve import resolve
from evictionary.store import Line, put, read

MEASURED = ROOT / "docs" / "study"
PICTURE = ROOT / "docs" / "images" / "study.svg"


def lines(name: str) -> list[Line]:
    """The measurements in a file of docs/study/."""
    return list(read(MEASURED / name, study.Plan.identify).values())


class Measured(NamedTuple):
    """A composition at a ratio: its row of the study, and its cost in each draw."""

    row: Mapping[str, Any]
    draws: np.ndarray

    @property
    def cost(self) -> float:
        return float(self.row["cost"])

    @property
    def kept(self) -> float:
        return float(self.row["tokens_kept"])


@functools.cache
def measured(part: str) -> dict[float, dict[str, Measured]]:
    """Each composition of a part of the study, by the share that is removed and by its name."""
    return {
        rows[0]["ratio"]: {row["method"]: Measured(row, own) for row, own in zip(rows, draws, strict=True)}
        for _, rows, draws in study.by_ratio(lines(f"{part}.jsonl"))
    }


def interval(one: Measured, other: Measured) -> tuple[float, float]:
    """The ends that hold 95 % of the draws of a difference of two costs, of the same prompts."""
    low, high = np.percentile(one.draws - other.draws, [2.5, 97.5])
    return float(low), float(high)


class Change(NamedTuple):
    """A composition at a ratio without an addition and with it: both costs, and the interval of the
    difference, in nats a token.
    """

    method: str
    removed: float
    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.after - self.before


def changes(part: str, addition: str) -> list[Change]:
    """What an addition changes in each composition of a part
    of the study that lacks it, in the order of their names.
    """
    found = [
        Change(without, removed, of[without].cost, of[name].cost, *interval(of[name], of[without]))
        for removed, of in measured(part).items()
        for name in of
        if (without := "+".join(each for each in name.split("+") if each != addition)) != name
    ]
    return sorted(found, key=lambda one: (one.method, one.removed))


CHANNELS = 64
"""Of a head of SmolLM2-135M, the model of the study."""


def of_moments(channels: int = CHANNELS) -> float:
    """The tokens of a head whose keys and values take as much memory as its moments: two sums and a matrix in
    float32, as keys and values are here, and a count of twice that width.
    """
    return (channels**2 + 2 * channels + 2) / (2 * channels)


def memory(row: Mapping[str, Any]) -> float:
    """What a composition of the study holds of a head, in tokens: those that it keeps, and the moments of
    those that it evicted.
    """
    return float(row["tokens_kept"]) + (of_moments() if resolve(row["method"]).corrected else 0)


def summary() -> study.Summary:
    """The whole study, its finals, and what `--method auto` takes: the composition of least cost in the final
    of real texts. Of these the study of real texts chooses the same one, on average over the sizes, so these
    prompts had no part in choosing it.
    """
    names = ("results", "finals", "pyramid", "real", "real_2000", "real_4000", "real_finals", "protected")
    found, *others = (study.summarise(lines(f"{name}.jsonl")) for name in names)
    found |= dict(zip(names[1:], others, strict=True))
    return found | {"recommended": found["real_finals"]["recommended"]}


if __name__ == "__main__":
    found = summary()
    put(study.STORED, json.dumps(found, indent=1) + "\n")
    put(PICTURE, drawn(study.picture(found), "svg"))
    print(f"Wrote {study.STORED} and {PICTURE}.")
