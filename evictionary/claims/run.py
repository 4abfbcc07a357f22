"""Measures the claims of the chosen papers on one model and writes the numbers, the pictures and a page
for each paper.

A measurement is a paper on one text, one line of `results.jsonl`. The model reads a text once for four of the
papers; LagKV has prompts of its own, one batch of all kinds for each seed.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from evictionary import store
from evictionary.claims import expected_attention, gvote, keydiff, lagkv, momentkv, pictures, texts
from evictionary.claims.claim import CONFIDENCE, DRAWS, LEAST_TEXTS, PAPERS as NAMES, Claim, require_some
from evictionary.claims.recording import Lab, Observed, Scale, record
from evictionary.errors import require
from evictionary.evaluation import pages, run as evaluation

SCHEMA_VERSION = 2
PAPERS: dict[str, ModuleType] = dict(
    zip(NAMES, (expected_attention, keydiff, lagkv, momentkv, gvote), strict=True)
)
# The fields of a line of results.jsonl; model, paper, text and seed are its identity.
FIELDS = ("model", "weights", "paper", "text", "seed", "scale", "versions", "cpu_seconds", "values")


@dataclass(frozen=True)
class Plan(evaluation.ModelPlan):
    """The claims to measure, as check_claims returns them, on the texts of each kind and seed; `seeds_of`
    some papers differ.

    Raises UsageError for an unknown kind or paper, or fewer than two seeds.
    """

    claims: Mapping[str, Sequence[Claim]]
    texts: Sequence[str] = tuple(texts.KINDS)
    seeds: Sequence[int] = (0, 1, 2)
    scale: Scale = field(default_factory=Scale)
    seeds_of: Mapping[str, Sequence[int]] = field(default_factory=dict)

    IDENTITY = ("model", "paper", "text", "seed")

    def __post_init__(self) -> None:
        unknown = [name for name in self.texts if name not in texts.KINDS]
        require_some("texts", self.texts, unknown, texts.KINDS)
        unknown = sorted(self.seeds_of.keys() - PAPERS.keys())
        require_some("seeds_of", PAPERS, unknown, PAPERS)
        for name, seeds in {"seeds": self.seeds, **self.seeds_of}.items():
            told = f"{name}: got {len(set(seeds))}, wanted at least 2: one text of a kind gives no interval"
            require(len(set(seeds)) >= 2, told)

    def lines(self) -> list[tuple[str, str, int]]:
        """(paper, kind of text, seed) of every measurement, each once."""
        papers = [(paper, self.seeds_of.get(paper, self.seeds)) for paper in self.claims]
        return list(
            dict.fromkeys(
                (paper, kind, seed) for paper, seeds in papers for seed in seeds for kind in self.texts
            )
        )

    def work(self) -> list[tuple[int, list[tuple[str, str]]]]:
        """Seeds, each with the papers on one text, or with one batch for LagKV."""
        # the batches of LagKV first: they take longest
        units = store.grouped(
            ((paper != "lagkv", seed, "" if paper == "lagkv" else kind), (paper, kind))
            for paper, kind, seed in self.lines()
        )
        return [(place[1], units[place]) for place in sorted(units)]

    def own(self, lines: Sequence[store.Line]) -> list[store.Line]:
        """The lines of this plan, of those in a folder."""
        wanted = set(self.lines())
        return [line for line in lines if (line["paper"], line["text"], line["seed"]) in wanted]

    def named(self, unit: int, part: tuple[str, str]) -> dict[str, Any]:
        return {"paper": part[0], "text": part[1], "seed": unit}

    @classmethod
    def identify(cls, line: store.Line) -> str:
        _ = [line[name] for name in FIELDS]
        return cls.key(line)

    def check(self, folder: Path, found: Mapping[str, store.Line], work: store.Work) -> None:
        """Raise UsageError for measurements of another scale
        or of other versions: their mean would be of neither.
        """
        here = {"scale": _rounded(asdict(self.scale)), "versions": versions()}
        for line in found.values():
            for name, value in here.items():
                for key in value.keys() | line[name].keys():
                    got, wanted = line[name].get(key), value.get(key)
                    told = f"measurements with {key} {got}, wanted a folder of its own for {key} {wanted}"
                    require(got == wanted, f"output: {folder} holds {told}")

    def measure(self, unit: int, parts: Sequence[tuple[str, str]]) -> Iterator[store.Line]:
        """Measure papers on one text, or LagKV on all kinds of text."""
        start = time.process_time()
        lab = Lab(*self.opened(), self.scale, unit)
        common = {
            **self.common(),
            **evaluation.placed(lab.model),
            "weights": Path(str(lab.model.config.name_or_path)).name,
            "seed": unit,
            "scale": _rounded(asdict(self.scale)),
            "versions": versions(),
        }
        for (paper, kind), values in zip(parts, _observed(lab, parts), strict=True):
            now = time.process_time()
            yield {
                **common,
                "paper": paper,
                "text": kind,
                "cpu_seconds": round(now - start, 1),
                "values": _rounded(values),
            }
            start = now

    def text(self, line: store.Line) -> str:
        return f"{PAPERS[line['paper']].PAPER.title}, {line['text']}, seed {line['seed']}"


def versions() -> dict[str, str]:
    """The software versions that can change a result."""
    return evaluation.versions() | {"numpy": np.__version__}


def _observed(lab: Lab, wanted: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    first, kind = wanted[0]
    if first == "lagkv":
        yield from lagkv.observe(lab, [kind for _, kind in wanted])
        return
    recording = record(lab, kind)  # about 200 MB: one text at a time
    yield from (PAPERS[paper].observe(lab, recording) for paper, _ in wanted)


def report(plan: Plan, lines: Sequence[store.Line], command: str = "evictionary claims") -> dict[str, Any]:
    """Everything that the lines of the plan say, of those in
    a folder, with the verdicts, as results.json holds it.
    """
    lines = plan.own(lines)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": plan.model,
        "weights": lines[0]["weights"] + evaluation.numbers_of(lines[0]),
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "texts": list(plan.texts),
        "seeds": list(plan.seeds),
        "seeds_of": {paper: list(seeds) for paper, seeds in plan.seeds_of.items()},
        "confidence": CONFIDENCE,
        "draws": DRAWS,
        "cpu_seconds": round(sum(line["cpu_seconds"] for line in lines)),
        "versions": lines[0]["versions"],
        "scale": lines[0]["scale"],
        "papers": [_paper(plan, name, lines) for name in plan.claims],
    }


def _paper(plan: Plan, name: str, lines: Sequence[store.Line]) -> dict[str, Any]:
    paper = PAPERS[name].PAPER
    mine = sorted(
        (plan.texts.index(line["text"]), line["seed"], line["values"])
        for line in lines
        if line["paper"] == name
    )
    observed = [Observed(plan.texts[kind], values) for kind, _, values in mine]
    numbers, series = PAPERS[name].conclude(plan.scale, observed)
    claims = [
        {
            **{key: getattr(claim, key) for key in ("id", "source", "statement", "measured", "rule")},
            "verdict": claim.verdict(numbers),
            "changes": claim.changes(numbers),
            "texts": len(observed),
            "deciding": {each.text: each.number for each in (*claim.possible_if, *claim.holds_if)},
            "numbers": {number: _rounded(asdict(numbers[number])) for number in claim.numbers},
        }
        for claim in plan.claims[name]
    ]
    return {
        "paper": name,
        "title": paper.title,
        "arxiv": paper.arxiv,
        "picture": f"{name}.png",
        "shown": paper.shown,
        "claims": claims,
        "series": _rounded(series),
    }


def _rounded(value: Any) -> Any:
    """Arrays as lists, and floats with four significant digits; no measurement is more precise."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the result of `report`: results.json, a picture and a page for each paper, index.md, and
    claims.html with all.

    Returns the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "results.json": json.dumps(result, indent=1) + "\n",
        "claims.html": pages.render("claims.html", result=result),
        "index.md": pages.render("claims_index.md", result=result, least_texts=LEAST_TEXTS),
    }
    for paper in result["papers"]:
        name = paper["paper"]
        pictures.save(
            PAPERS[name].draw, paper["series"], folder / paper["picture"], rows=PAPERS[name].PAPER.rows
        )
        contents[f"{name}.md"] = pages.render("claims.md", result=result, paper=paper)
    for name, text in contents.items():
        store.put(folder / name, text)
    return [folder / name for name in contents] + [folder / paper["picture"] for paper in result["papers"]]
