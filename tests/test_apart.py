"""Whatever a function does to the process that runs it, the verdict is told, and it is not a good one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evictionary.spec_tests.judge import apart
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import UnusableImplementation

ROOT = Path(__file__).parent.parent

# Each of these files answers no law; what the report says of it.
DEADLY = {
    "keydiff": ("import ctypes\ndef score(keys):\n    ctypes.string_at(0)\n", "it ended the process: signal SIGSEGV", "KD-8"),
    "knorm": ("import os\ndef score(keys):\n    os._exit(0)\n", "it ended the process: exit code 0", "KN-1"),
    "selection": ("def budget(*_):\n    while True:\n        pass\n", "it did not answer within 1 s, and was ended", "SEL-1"),
    "cache": ("def compress(keys, *_):\n    raise MemoryError(7)\n", "out of memory at ", "CACHE-1"),
    "h2o": ("import sys\ndef score(*_):\n    sys.exit()\n", "it ended the process: sys.exit(None)", "H2-1"),
}
ONE_OF_EACH = ("cosine_to_the_anchor", "minus_the_norm", "budget_is_the_exact_floor", "test_the_cache_holds", "from_all_queries")


def judge(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evictionary", "judge", *map(str, arguments), "--profile", "quick"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def pytest_of(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments), "--profile", "quick"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def deadly(folder: Path) -> Path:
    folder.mkdir()
    for stem, (text, *_) in DEADLY.items():
        (folder / f"{stem}.py").write_text(text)
    return folder


def laws(report: Path) -> dict[str, list[dict[str, Any]]]:
    """The laws of each requirement of conformance.json."""
    requirements = json.loads((report / "conformance.json").read_text())["implementations"][0]["requirements"]
    return {name: entry["laws"] for name, entry in requirements.items()}


def require_red(done: subprocess.CompletedProcess[str], report: Path) -> None:
    found = laws(report)
    for _, what, requirement in DEADLY.values():
        assert any(what in entry.get("message", "") for entry in found[requirement]), (what, found[requirement])
    assert {entry["outcome"] for entries in found.values() for entry in entries} <= {"fail", "not judged"}
    assert json.loads((report / "badge.json").read_text())["color"] == "red"
    junit = (report / "junit.xml").read_text()
    assert all(what in junit for _, what, _ in DEADLY.values())
    assert done.returncode == 1 and "FAIL: " in done.stdout and "no answer" in done.stdout, done.stdout + done.stderr


def test_what_ends_its_process_or_hangs_has_failed(tmp_path: Path) -> None:
    """One law of each, in one process."""
    done = judge(deadly(tmp_path / "mine"), "--law", " or ".join(ONE_OF_EACH), "--timeout", "1", "--report", tmp_path / "report")
    require_red(done, tmp_path / "report")
    assert f"{tmp_path / 'mine' / 'keydiff.py'}:3, score" in done.stdout + json.dumps(laws(tmp_path / "report"))


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_every_law_of_what_ends_its_process_has_failed(jobs: int, tmp_path: Path) -> None:
    methods = ("--method", ",".join(DEADLY))
    mine = deadly(tmp_path / "mine")
    done = judge(mine, *methods, "--jobs", str(jobs), "--timeout", "1", "--report", tmp_path / "report")
    require_red(done, tmp_path / "report")
    assert "is asked no more after 3 laws without an answer" in json.dumps(laws(tmp_path / "report")["KD-8"])


@pytest.mark.slow
def test_pytest_from_a_clone_tells_the_same(tmp_path: Path) -> None:
    files = [f"spec_tests/test_{stem}.py" for stem in DEADLY]
    mine = deadly(tmp_path / "mine")
    done = pytest_of(*files, "--impl", mine, "--call-timeout", "1", "--report", tmp_path / "report")
    require_red(done, tmp_path / "report")


RAISES_LATE = """
import numpy as np

def score(keys):
    return np.linalg.norm(keys, axis=-1)  # the sign is wrong, and nothing is refused
"""


@pytest.mark.parametrize("processes", ["no:xdist", pytest.param("xdist", marks=pytest.mark.slow)])
def test_a_run_that_stops_early_is_no_good_one(processes: str, tmp_path: Path) -> None:
    """The first failure is a refusal, which does not count; the laws behind it were not asked."""
    (tmp_path / "keydiff.py").write_text(RAISES_LATE)
    refusal = "spec_tests/keydiff/test_keydiff.py::test_bad_shapes_are_refused"
    behind = "spec_tests/keydiff/test_keydiff.py::test_score_is_minus_the_cosine_to_the_anchor"
    done = pytest_of(refusal, behind, "-x", "--impl", tmp_path / "keydiff.py", "-p", processes, "--report", tmp_path / "report")
    assert done.returncode == 1, done.stdout
    outcomes = {entry["law"].partition("::")[2]: entry for entry in laws(tmp_path / "report")["KD-8"]}
    assert "FAIL: 1 law" in done.stdout.splitlines()[-1]
    assert outcomes["test_score_is_minus_the_cosine_to_the_anchor"]["outcome"] == "fail"
    if processes == "no:xdist":
        assert "the law was not asked" in outcomes["test_score_is_minus_the_cosine_to_the_anchor"]["message"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import os; os._exit(0)", "the process that imports it ended with exit code 0"),
        ("import ctypes; ctypes.string_at(0)", "the process that imports it ended with signal SIGSEGV"),
        ("while True: pass", "the process that imports it did not answer within 1 s"),
    ],
)
def test_what_ends_the_process_that_imports_it_is_a_sentence(
    text: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keydiff.py").write_text(text)
    monkeypatch.setattr(apart, "IMPORT_SECONDS", 1 if "while" in text else 60)
    with pytest.raises(UnusableImplementation, match=wanted):
        apart.described(str(tmp_path / "keydiff.py"), [None], Domain())
