"""Measures the claims of the chosen papers on one model and writes the numbers, the pictures and a page for each paper."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from evictionary.claims import expected_attention, gvote, keydiff, lagkv, momentkv, pictures, texts
from evictionary.claims.claim import Findings
from evictionary.claims.recording import Lab, Observed, Scale, record
from evictionary.errors import UsageError
from evictionary.evaluation import pages
from evictionary.evaluation.run import versions

SCHEMA_VERSION = 1
PAPERS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module for module in (expected_attention, keydiff, lagkv, momentkv, gvote)
}


@dataclass
class Report:
    """The measurements of each paper, and their settings; cpu_seconds is the time of the whole process."""

    model: str
    weights: str
    command: str
    seed: int
    scale: Scale
    findings: dict[str, Findings]
    seconds: float
    cpu_seconds: float
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    def as_json(self) -> dict[str, Any]:
        """Everything, with the verdicts, as results.json holds it."""
        named = {name: getattr(self, name) for name in ("model", "weights", "command", "date", "seed")}
        return {
            "schema_version": SCHEMA_VERSION,
            **named,
            "seconds": round(self.seconds),
            "cpu_seconds": round(self.cpu_seconds),
            "versions": versions() | {"numpy": np.__version__},
            "scale": asdict(self.scale),
            "papers": [_paper(name, findings) for name, findings in self.findings.items()],
        }


def _paper(name: str, findings: Findings) -> dict[str, Any]:
    paper = PAPERS[name].PAPER
    claims = [
        {
            **{key: getattr(claim, key) for key in ("id", "source", "statement", "measured", "rule")},
            "verdict": claim.verdict(findings.numbers),
            "numbers": {number: asdict(findings.numbers[number]) for number in claim.numbers},
        }
        for claim in paper.claims
    ]
    named = {"paper": name, "title": paper.title, "arxiv": paper.arxiv, "picture": f"{name}.png", "shown": paper.shown}
    return {**named, "claims": claims, "series": _rounded(findings.series)}


def _rounded(value: Any) -> Any:
    """Round floats to five significant digits; no measurement is more precise."""
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def check_papers(names: Sequence[str] | None) -> list[str]:
    """The papers of these names, all of them for None. Raises UsageError for an unknown name or none."""
    chosen = list(PAPERS) if names is None else list(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in PAPERS]
    if unknown or not chosen:
        raise UsageError(f"papers: got {', '.join(unknown) or 'none'}, wanted some of {', '.join(PAPERS)}")
    return chosen


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    model_name: str,
    papers: Sequence[str] | None = None,
    seed: int = 0,
    scale: Scale | None = None,
    command: str = "evictionary claims",
    plan: Callable[[int], None] = lambda steps: None,
    advance: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure the claims of the papers. Raises UsageError for an unknown paper or a model that cannot be recorded.

    `plan` is called once with the number of steps, `advance` before each step with its description.
    """
    start = time.perf_counter()
    chosen = check_papers(papers)
    lab = Lab(model, tokenizer, scale or Scale(), seed)
    observing = [name for name in chosen if name != "lagkv"]
    wanted = [(kind, number) for number in range(lab.scale.seeds) for kind in texts.KINDS] if observing else []
    plan(len(wanted) * (1 + len(observing)) + (lagkv.steps(lab) if "lagkv" in chosen else 0))
    observed: dict[str, list[Observed]] = {name: [] for name in observing}
    for index, (kind, number) in enumerate(wanted):
        place = f"text {index + 1} of {len(wanted)} ({kind})"
        advance(f"{place}: reading")
        recording = record(lab, kind, number)  # about 200 MB: one text at a time
        for name in observing:
            advance(f"{place}: {PAPERS[name].PAPER.title}")
            observed[name].append(PAPERS[name].observe(lab, recording))
    findings = {
        name: PAPERS[name].conclude(lab, observed[name]) if name in observed else lagkv.measure(lab, advance) for name in chosen
    }
    weights = Path(str(model.config.name_or_path)).name
    seconds = time.perf_counter() - start
    return Report(model_name, weights, command, seed, lab.scale, findings, seconds, time.process_time())


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the result of `Report.as_json`: results.json, a picture and a page for each paper, index.md, and claims.html with all.

    Returns the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "results.json": json.dumps(result, indent=1) + "\n",
        "claims.html": pages.render("claims.html", result=result),
        "index.md": pages.render("claims_index.md", result=result),
    }
    for paper in result["papers"]:
        name = paper["paper"]
        pictures.save(PAPERS[name].draw, paper["series"], folder / paper["picture"], rows=PAPERS[name].PAPER.rows)
        contents[f"{name}.md"] = pages.render("claims.md", result=result, paper=paper)
    for name, text in contents.items():
        pages.put(folder / name, text)
    return [folder / name for name in contents] + [folder / paper["picture"] for paper in result["papers"]]
