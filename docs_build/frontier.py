"""Bytes against quality of eviction, of quantisation and of both, from docs/study/quantised.jsonl.xz, which
`evictionary eval` wrote: docs/methods/quantisation.md has the command.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from docs_build.entries import ROOT
from evictionary.evaluation import run
from evictionary.evaluation.report import wilson
from evictionary.store import Line, grouped, read

MEASURED = ROOT / "docs" / "study" / "quantised.jsonl"
DRAWS = 2000
TEXT, FOUND = "perplexity", "essay_multikey"


class Point(NamedTuple):
    """A composition at a ratio: its mean share of the bytes of the full cache; its mean cost in nats a token
    on so many texts that go on, and the numbers that it finds of so many, each with its interval.
    """

    method: str
    bits: int | None
    ratio: float
    share: float
    texts: int
    cost: float
    of_cost: tuple[float, float]
    asked: int
    right: int
    of_right: tuple[float, float]


@functools.cache
def points() -> tuple[Point, ...]:
    """All of them, from the most bytes to the least, and beside equal bytes from the least cost."""
    lines = list(read(MEASURED, run.Plan.identify).values())
    full = {(line["task"], line["seed"]): line for line in lines if line["method"] == "full"}
    by_point = grouped(((line["method"], line["options"].get("bits"), line["ratio"]), line) for line in lines)
    found = [_point(*key, each, full) for key, each in by_point.items()]
    return tuple(sorted(found, key=lambda point: (-round(point.share, 2), point.cost)))


def _point(
    method: str, bits: int | None, ratio: float, lines: Sequence[Line], full: dict[tuple[str, int], Line]
) -> Point:
    costs = [
        math.log(line["perplexity"] / full[TEXT, line["seed"]]["perplexity"])
        for line in lines
        if line["task"] == TEXT
    ]
    questions = [line["exact"] for line in lines if line["task"] == FOUND]
    drawn = np.random.default_rng(0).choice(costs, size=(DRAWS, len(costs))).mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    right = int(sum(questions))
    least, most = wilson(right, len(questions))
    return Point(
        method,
        bits,
        ratio,
        float(np.mean([line["bytes_after"] / line["bytes_before"] for line in lines])),
        len(costs),
        float(np.mean(costs)),
        (float(low), float(high)),
        len(questions),
        right,
        (least, most),
    )
