"""How large the inputs are that the laws ask each function for, beside the sizes of today's models.

`python -m docs_build.sizes` asks all laws of the reference (some minutes) and stores what they asked in
docs/sizes.json. The page docs/reference/sizes.md is made from that.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs_build.running import ROOT
from evictionary.reference.contract import contract_of
from evictionary.spec_tests.judge.implementation import contract_functions
from evictionary.spec_tests.judge.reach import UNITS, Reach, units
from evictionary.spec_tests.memory.models import (
    ALL_PAIRS,
    BATCHES,
    LENGTHS,
    NOT_ASKED,
    sizes,
    values_in_use,
)

STORED = ROOT / "docs" / "sizes.json"

WANTED: dict[str, int] = {
    "tokens": max(LENGTHS),
    "KV heads": max(sizes("num_kv_heads")),
    "query heads of each": max(sizes("group")),
    "sequences": max(BATCHES),
    "channels": max(sizes("head_dim")),
}
"""The largest number of each unit that a model has; of tokens and sequences, that the laws of sizes ask."""


class Gap(NamedTuple):
    """A unit or a setting of a function that is asked for less than models, papers and defaults use."""

    function: str
    what: str
    wanted: float
    asked: float
    reason: str


def stored() -> Reach:
    """What the laws asked when they were last counted."""
    reach: Reach = json.loads(STORED.read_text(encoding="utf-8"))
    return reach


def units_of(path: str) -> list[str]:
    """The units that a function has by its signature, tokens first. Axes that it leaves open are sequences
    and their KV heads.
    """
    arrays = [
        own
        for each in contract_of(path).arguments
        for own in (each.fields.values() if each.state else [each])
    ]
    axes = {axis for each in arrays for axis in each.known}
    if any(each.lead == "..." for each in arrays):
        axes |= {"B", "H_kv"}
    if {"H_q", "H_kv"} <= axes:
        axes.add("group")
    return units(axes)


def wanted(path: str) -> dict[str, float]:
    """What a function should be asked for: each unit of it, and each setting that has values in use."""
    names = contract_of(path).signature.parameters
    used = {name: values for name in names if (values := values_in_use(path, name))}
    return {unit: WANTED[unit] for unit in units_of(path)} | {name: max(of) for name, of in used.items()}


def reason(path: str, what: str) -> str:
    """Why a function is asked for less; empty where nothing says so."""
    return NOT_ASKED.get(path, "") or (ALL_PAIRS.get(path, "") if what == "tokens" else "")


def gaps(reach: Reach) -> Iterator[Gap]:
    """What is asked for less than is wanted, with the reason where there is one."""
    for path in contract_functions():
        for what, most in wanted(path).items():
            if (asked := reach.get(path, {}).get(what, 0)) < most:
                yield Gap(path, what, most, asked, reason(path, what))


def beside_models(page: str) -> str:
    """A row for each unit: what is wanted, and how many functions are asked for that much."""
    reach, lacking = stored(), {(gap.function, gap.what): gap for gap in gaps(stored())}
    rows, notes = [], {}
    for unit, most in WANTED.items():
        having = [path for path in contract_functions() if unit in units_of(path)]
        short = [lacking[path, unit] for path in having if (path, unit) in lacking]
        largest = max(reach[path].get(unit, 0) for path in having)
        rows.append(f"| {unit} | {most:,} | {largest:,.0f} | {len(having) - len(short)} of {len(having)} |")
        for gap in short:
            notes.setdefault((unit, gap.reason), []).append(f"`{gap.function}` ({gap.asked:,.0f})")
    head = "| | wanted | most that is asked | functions that are asked for it |\n|---|--:|--:|--:|\n"
    told = [f"- {unit}: {', '.join(paths)}: {why}." for (unit, why), paths in notes.items()]
    return head + "\n".join(rows) + "\n\nThese are asked for less:\n\n" + "\n".join(told)


def of_functions(page: str) -> str:
    """A row for each function: the largest number of each unit, and of each setting."""
    reach = stored()
    rows = []
    for path in contract_functions():
        own = reach.get(path, {})
        counts = [f"{own[unit]:,.0f}" if unit in own and unit in units_of(path) else "" for unit in UNITS]
        settings = ", ".join(
            f"{name} {own[name]:,.10g}" for name in contract_of(path).signature.parameters if name in own
        )
        rows.append(f"| `{path}` | {' | '.join(counts)} | {settings} |")
    names = " | ".join(UNITS)
    return f"| function | {names} | settings |\n|---|{'--:|' * len(UNITS)}---|\n" + "\n".join(rows)


def count() -> Reach:
    """Ask all laws of the reference, and read what they asked."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "-n", "2", "-p", "no:cacheprovider", "--impl", "reference", "--report", folder]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, "spec_tests"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        )
        content = json.loads((Path(folder) / "conformance.json").read_text(encoding="utf-8"))
    (column,) = content["implementations"]
    return column["asked"]


def main() -> None:
    reach = count()
    ordered = {path: reach[path] for path in contract_functions() if path in reach}
    STORED.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    for gap in gaps(ordered):
        print(f"{gap.function} {gap.what}: {gap.asked:g} of {gap.wanted:g} {gap.reason or 'NO REASON'}")


if __name__ == "__main__":
    main()
