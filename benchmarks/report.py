"""The page of the stored results: `python -m benchmarks.report`
writes docs/benchmarks.md from benchmarks/results/*.json.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.costs import LIMIT, compared
from benchmarks.cpu import KVPRESS
from benchmarks.gpu import ROWS
from benchmarks.timing import RESULTS, ROOT
from evictionary.evaluation.pages import markdown

PAGE = ROOT / "docs" / "benchmarks.md"
CLOCKS = {"process_time": "processor time", "perf_counter": "wall-clock time"}
# The goals, as largest ratios: compressing over reading the prompt, and a token's time and the bytes over the
# full cache's.
MODEL_GOALS = {"compression": 0.05, "decoding": 1.0, "blocks": 0.4}


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the results in a folder."""
    stored = {name: folder / f"{name}.json" for name in ("gpu", "cpu", "model", "costs", "host")}
    found = {
        name: json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        for name, path in stored.items()
    }
    settings = {"clocks": CLOCKS, "model_goals": MODEL_GOALS, "kvpress": KVPRESS, "rows": ROWS}
    parts = compared(found["costs"]) if found["costs"] else []
    return rendered("benchmarks.md.j2", **found, **settings, parts=parts, limit=LIMIT)


def rendered(template: str, **content: Any) -> str:
    """A page of templates/, filled in."""
    filters = {
        "goals": _goals,
        "made": _made,
        "mb": lambda count: f"{count / 1e6:.1f}",
        "peers": _peers,
        "percent": lambda share, digits=1: f"{share:.{digits}%}",
        "ratio": _ratio,
        "us": _microseconds,
    }
    return markdown(Path(__file__).parent / "templates" / template, filters, **content)


def _goals(row: dict[str, Any]) -> str:
    """The goals of a row of the GPU benchmark: a time, a ratio, both or neither."""
    goals = [] if row["goal_s"] is None else [_microseconds(row["goal_s"]) + " us"]
    return ", ".join(goals + ([] if row["goal_ratio"] is None else [f"{row['goal_ratio']:g} x"]))


def _peers(row: dict[str, Any]) -> str:
    """The other arms of a row: time and ratio of each that ran, the fastest first, and the reason for each
    that did not.
    """
    others = {name: arm for name, arm in row["arms"].items() if name != "ours"}
    ran = sorted((arm["seconds"]["p50"], name) for name, arm in others.items() if "seconds" in arm)
    told = [f"{name} {_microseconds(median)}, {_ratio(row['ratios'][name])}" for median, name in ran]
    told += [f"{name}: {arm['status']}" for name, arm in others.items() if "seconds" not in arm]
    for name, why in row["missing"].items():
        told.append(f"{name}: {'not installed' if 'No module' in why else why}")
    return "; ".join(told)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}"


def _ratio(one: dict[str, Any]) -> str:
    return f"{'' if one['claimed'] else '~'}{one['value']:.2f} x"


def _made(result: dict[str, Any]) -> str:
    """The versions, commit and date of a result."""
    versions = ", ".join(
        f"{name} {number}" for name, number in result["versions"].items() if number != "not installed"
    )
    return f"{versions}; commit {result['commit']}, {result['date']}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
