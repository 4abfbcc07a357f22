"""The verdict: by requirement, one column for each implementation, and the files that carry it elsewhere.

`--report FOLDER` writes `conformance.json` (the schema is docs/conformance.md, its version is in the file), `junit.xml` and
`badge.json` (one line, in the format of shields.io endpoints).
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from evictionary.spec_tests.harness.implementation import Implementation
from evictionary.spec_tests.harness.law import REQUIREMENTS

SCHEMA = "evictionary/conformance/1"
# The column of the laws that are about a paper, not about an implementation.
PAPER = "the papers themselves"

JUDGED = pytest.StashKey[list[Implementation]]()
# (requirement, column, "not provided" or "not applicable", the reason)
LEFT_OUT = pytest.StashKey[list[tuple[str, str, str, str]]]()


class Verdict:
    """What the laws said, gathered from the reports of one run: a list of law outcomes for each requirement and column."""

    def __init__(self, terminal: Any, config: pytest.Config) -> None:
        self.judged = config.stash[JUDGED]
        self.laws: dict[tuple[str, str], list[dict[str, str]]] = {}
        self.reasons: dict[tuple[str, str], tuple[str, str]] = {}
        for outcome in ("passed", "failed", "error"):
            for result in terminal.stats.get(outcome, []):
                law = dict(getattr(result, "user_properties", [])).get("law")
                if law is not None and (result.when == "call" or result.failed):
                    requirement, column, name = law
                    entry = {"law": name, "outcome": "pass" if outcome == "passed" else "fail"}
                    if entry["outcome"] == "fail":
                        entry["message"] = str(result.longrepr)
                    self.laws.setdefault((requirement, column), []).append(entry)
        for requirement, column, verdict, reason in config.stash.get(LEFT_OUT, []):
            self.reasons.setdefault((requirement, column), (verdict, reason))
        self.columns = [str(implementation) for implementation in self.judged]
        if any(column == PAPER for _, column in self.laws):
            self.columns.append(PAPER)

    def of(self, requirement: str, column: str) -> tuple[str, str]:
        """("pass" | "fail" | "not provided" | "not applicable" | "", how many laws or why)."""
        laws = self.laws.get((requirement, column))
        if laws is None:
            return self.reasons.get((requirement, column), ("", ""))
        bad = sum(entry["outcome"] == "fail" for entry in laws)
        return ("fail", f"{bad} of {len(laws)} laws") if bad else ("pass", f"{len(laws)} laws" if len(laws) > 1 else "1 law")

    def missing(self, required: list[str]) -> list[str]:
        """Say what `--require` asks for and an implementation does not provide."""
        wanted = list(REQUIREMENTS) if "all" in required else required
        return [
            f"{requirement} is required of {column}: {reason}"
            for column in self.columns
            for requirement in wanted
            for verdict, reason in [self.of(requirement, column)]
            if verdict == "not provided"
        ]

    def write_table(self, terminal: Any) -> None:
        """One row for each requirement that the run touched; the reasons stand below."""
        rows = [name for name in REQUIREMENTS if any(self.of(name, column)[0] for column in self.columns)]
        if not rows:
            return
        terminal.section("verdict by requirement")
        width = max(22, *(len(column) + 2 for column in self.columns))
        terminal.write_line(f"{'':10}" + "".join(f"{column:{width}}" for column in self.columns))
        for name in rows:
            terminal.write(f"{name:10}")
            for column in self.columns:
                verdict, detail = self.of(name, column)
                shown = f"{verdict} ({detail})" if verdict in ("pass", "fail") else verdict or "-"
                terminal.write(f"{shown:{width}}", green=verdict == "pass", red=verdict == "fail", yellow=verdict[:3] == "not")
            terminal.write_line("")
        for (requirement, column), (verdict, reason) in sorted(self.reasons.items()):
            if (requirement, column) not in self.laws:
                terminal.write_line(f"{requirement:10}{verdict} by {column}: {reason}", yellow=True)

    def as_json(self) -> dict[str, Any]:
        """The content of conformance.json."""
        try:
            suite = version("evictionary")
        except PackageNotFoundError:
            suite = "unknown"
        return {"schema": SCHEMA, "suite": suite, "implementations": [self._column(one) for one in self.judged]}

    def _column(self, implementation: Implementation) -> dict[str, Any]:
        column = str(implementation)
        requirements: dict[str, dict[str, Any]] = {}
        for name, requirement in REQUIREMENTS.items():
            verdict, detail = self.of(name, column)
            if verdict:
                requirements[name] = {
                    "verdict": verdict,
                    "reason": detail if verdict.startswith("not") else "",
                    "statement": requirement.statement,
                    "source": requirement.source,
                    "laws": sorted(self.laws.get((name, column), []), key=lambda entry: entry["law"]),
                }
        counts = dict.fromkeys(("pass", "fail", "not provided", "not applicable"), 0)
        for entry in requirements.values():
            counts[entry["verdict"]] += 1
        return {
            "name": implementation.name,
            "array_library": implementation.array_library,
            "device": implementation.device,
            "dtype": implementation.dtype,
            "functions": implementation.functions(),
            "counts": counts,
            "requirements": requirements,
        }

    def write_files(self, folder: Path) -> None:
        """Write conformance.json and badge.json; pytest itself writes junit.xml beside them."""
        folder.mkdir(parents=True, exist_ok=True)
        content = self.as_json()
        (folder / "conformance.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        passed = sum(column["counts"]["pass"] for column in content["implementations"])
        failed = sum(column["counts"]["fail"] for column in content["implementations"])
        badge = {
            "schemaVersion": 1,
            "label": "evictionary",
            "message": f"{passed} of {passed + failed} requirements",
            "color": "red" if failed else "green",
        }
        (folder / "badge.json").write_text(json.dumps(badge) + "\n", encoding="utf-8")
