"""The figures that pages say in their sentences, each from the code or the file that it comes from.

A page that is a plain file, such as a README, cannot be filled in. So it says the figure, and
tests/site/test_said.py compares the sentence with what this module computes.
"""

import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import wild
from docs_build.charts import CHARTS, RATIOS, at_ratios
from docs_build.entries import ROOT, entries
from evictionary.classroom import names as assignments
from evictionary.methods import catalogue
from evictionary.methods.resolve import MOMENTS
from evictionary.models import embedded
from evictionary.optimized.kernels.compiling import SMALL, TARGETS
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.proof.planted import load_mutants
from tutorials.build import lessons

STUDY = "evictionary/evaluation/study.json"
REAL = "benchmarks/results/real_texts.json"
MIB = 2**20


@functools.cache
def stored(path: str) -> Any:
    """The content of a JSON or TOML file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return (tomllib if Path(path).suffix == ".toml" else json).loads(text)


@functools.cache
def counts() -> Mapping[str, int]:
    """How many there are of what the pages count."""
    judged = stored("conformance/results.json")["rows"]
    return {
        "methods": len(catalogue.names()),
        "additions": len([*catalogue.additions(), MOMENTS, *catalogue.QUANTISERS]),
        "requirements": len(entries()),
        "functions": len({one for entry in entries().values() for one in entry.reference}),
        "laws": sum(bool(law.functions) for law in load_laws().values()),
        "laws of the papers": sum(not law.functions for law in load_laws().values()),
        "mistakes": len(load_mutants()),
        "lessons": len(lessons()),
        "assignments": len(assignments()),
        "implementations": len(judged),
        "code bases": len(wild.sources()),
        **wild.differing(wild.sources(), judged),
        "exploits": len(stored("conformance/exploits.toml")) - len(["base"]),
        "selections": len(
            {row["method"].partition("+")[0] for row in stored(STUDY)["rows"]} - set(catalogue.BASELINES)
        ),
        "GPUs": len(TARGETS) - len(SMALL),
        "MB of the model": int(embedded.MODEL.size.partition(" ")[0]),
    }


@functools.cache
def retrieved() -> Mapping[str, Sequence[Any]]:
    """For each method, without its options, the summaries of docs/retrieval.md at RATIOS."""
    return {
        label.partition(" (")[0]: summaries
        for label, summaries in at_ratios(CHARTS["retrieval"].data).items()
    }


def moved(method: str) -> list[str]:
    """The distance of the hidden states at RATIOS, as the pages have it."""
    return [f"{one['error']:.1f}" for one in retrieved()[method]]


def found(method: str, ratio: float) -> int:
    """The prompts of docs/retrieval.md whose number a method keeps."""
    return int(retrieved()[method][RATIOS.index(ratio)]["right"])


def real(task: str, method: str, length: int, ratio: float = 0) -> int:
    """The right answers of a method on a task of docs/real_texts.md; of the full cache without a ratio."""
    rows = stored(REAL)["rows"] if ratio else stored(REAL)["full"] + stored(REAL)["rows"]
    row = next(
        row
        for row in rows
        if (row["task"], row["method"], row["length"], row["ratio"]) == (task, method, length, ratio)
    )
    return round(row["exact"] * row["prompts"])


def cost(part: str, method: str, ratio: float, of: str = "") -> float:
    """The cost of a composition in a part of the study, such as `finals`, or in the first one: of all
    prompts, or of one task or length.
    """
    rows = (stored(STUDY)[part] if part else stored(STUDY))["rows"]
    (row,) = [row for row in rows if (row["method"], row["ratio"]) == (method, ratio)]
    return float((row["tasks"] | row["lengths"])[of] if of else row["cost"])


def timed(row: str, arm: str) -> float:
    """How many times as fast as an arm ours is, in a row of the GPU benchmark."""
    (one,) = [one for one in stored("benchmarks/results/gpu.json")["rows"] if one["id"] == row]
    return float(one["ratios"][arm]["value"])
