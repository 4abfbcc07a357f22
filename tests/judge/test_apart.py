"""Whatever a function does to the process that runs it, the verdict is told, and it is not a good one."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools import ROOT, judge, laid, pytest_of, refused, saved

from evictionary.spec_tests.judge import apart
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import UnusableImplementation

# Each of these files answers no law; what the report says of it.
DEADLY = {
    "keydiff": (
        "import ctypes\ndef score(keys):\n    ctypes.string_at(0)\n",
        "it ended the process: signal SIGSEGV",
        "KD-8",
    ),
    "knorm": ("import os\ndef score(keys):\n    os._exit(0)\n", "it ended the process: exit code 0", "KN-1"),
    "selection": (
        "def budget(*_):\n    while True:\n        pass\n",
        "it did not answer within 1 s, and was ended",
        "SEL-1",
    ),
    "cache": ("def compress(keys, *_):\n    raise MemoryError(7)\n", "out of memory at ", "CACHE-1"),
    "h2o": ("import sys\ndef score(*_):\n    sys.exit()\n", "it raised SystemExit()", "H2-1"),
    "tova": ("def score(*_):\n    raise KeyboardInterrupt\n", "it raised KeyboardInterrupt()", "TO-1"),
    "snapkv": (
        "import pytest\ndef score(*_, **__):\n    pytest.exit('bye')\n",
        "it raised Exit(bye)",
        "SN-1",
    ),
    "attention": (
        "import hypothesis\ndef attend(*_):\n    hypothesis.reject()\n",
        "it raised UnsatisfiedAssumption(",
        "ATT-1",
    ),
}
ONE_OF_EACH = (
    "cosine_to_the_anchor",
    "minus_the_norm",
    "budget_is_the_exact_floor",
    "test_the_cache_holds",
    "from_all_queries",
    "mean_attention_of_the_last_query",
    "pooled_attention_of_the_window",
    "output_is_softmax_attention",
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of files that answer no law."""
    return laid(tmp_path / "mine", {f"{stem}.py": text for stem, (text, *_) in DEADLY.items()})


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "report"


def laws(report: Path) -> dict[str, list[dict[str, Any]]]:
    """The laws of each requirement of conformance.json."""
    requirements = json.loads((report / "conformance.json").read_text())["implementations"][0]["requirements"]
    return {name: entry["laws"] for name, entry in requirements.items()}


def require_red(done: subprocess.CompletedProcess[str], report: Path) -> None:
    found = laws(report)
    for _, what, requirement in DEADLY.values():
        assert any(what in entry.get("message", "") for entry in found[requirement]), (
            what,
            found[requirement],
        )
    assert {entry["outcome"] for entries in found.values() for entry in entries} <= {"fail", "not judged"}
    assert json.loads((report / "badge.json").read_text())["color"] == "red"
    assert all(what in (report / "junit.xml").read_text() for _, what, _ in DEADLY.values())
    assert "FAIL: " in done.stdout and "no answer" in done.stdout, done.stdout + done.stderr


def test_what_ends_its_process_or_hangs_has_failed(mine: Path, report: Path) -> None:
    """One law of each, in one process."""
    done = judge(mine, "--law", " or ".join(ONE_OF_EACH), "--timeout", "1", "--report", report, code=1)
    require_red(done, report)
    assert f"{mine / 'keydiff.py'}:3, score" in done.stdout + json.dumps(laws(report))


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_every_law_of_what_ends_its_process_has_failed(jobs: int, mine: Path, report: Path) -> None:
    asked = ("--method", ",".join(DEADLY), "--jobs", jobs, "--timeout", "1", "--report", report)
    require_red(judge(mine, *asked, code=1), report)
    assert "is asked no more after 3 laws without an answer" in json.dumps(laws(report)["KD-8"])


@pytest.mark.slow
def test_pytest_from_a_clone_tells_the_same(mine: Path, report: Path) -> None:
    files = [path for stem in DEADLY for path in ROOT.glob(f"spec_tests/*/test_{stem}.py")]
    done = pytest_of(
        *files, "--impl", mine, "--call-timeout", "1", "--report", report, "--profile", "quick", code=1
    )
    require_red(done, report)


def test_a_function_that_closes_the_standard_output_has_failed(tmp_path: Path) -> None:
    file = saved(tmp_path / "knorm.py", "import sys\ndef score(keys):\n    sys.stdout.close()\n")
    told = judge(file, "--law", "minus_the_norm", code=1).stdout.splitlines()[-1]
    assert told == "FAIL: 1 law has no answer"


def test_a_failure_beside_a_function_without_its_gpu_counts(tmp_path: Path) -> None:
    files = {
        "keydiff.py": "def score(keys):\n    raise RuntimeError('Found no NVIDIA driver on your system')\n",
        "knorm.py": "def score(keys):\n    return (keys * keys).sum(-1)\n",
    }
    asked = (laid(tmp_path, files), "--law", "cosine_to_the_anchor or minus_the_norm")
    told = judge(*asked, code=1).stdout
    assert (
        "KN-1 does not hold" in told
        and "FAIL: 1 law of mathematics fails, 1 law needs a GPU: keydiff" in told
    )
    assert told.lstrip("\n") == told[1:], "above the report is one empty line, which pytest writes"
    assert "nothing was judged: keydiff.score" in judge(*asked, "--method", "keydiff", code=2).stdout


RAISES_LATE = """
import numpy as np

def score(keys):
    return np.linalg.norm(keys, axis=-1)  # the sign is wrong, and nothing is refused
"""


@pytest.mark.parametrize("processes", ["no:xdist", pytest.param("xdist", marks=pytest.mark.slow)])
def test_a_run_that_stops_early_is_no_good_one(processes: str, tmp_path: Path, report: Path) -> None:
    """The first failure is a refusal, which does not count; the laws behind it were not asked."""
    file = saved(tmp_path / "keydiff.py", RAISES_LATE)
    behind = "test_score_is_minus_the_cosine_to_the_anchor"
    asked = [
        *(f"spec_tests/keydiff/test_keydiff.py::{name}" for name in ("test_bad_shapes_are_refused", behind)),
        *("-x", "--impl", file, "-p", processes, "--report", report, "--profile", "quick"),
    ]
    assert "FAIL: 1 law" in pytest_of(*asked, code=1).stdout.splitlines()[-1]
    outcome = {entry["law"].partition("::")[2]: entry for entry in laws(report)["KD-8"]}[behind]
    assert outcome["outcome"] == "fail"
    assert processes == "xdist" or "the law was not asked" in outcome["message"]


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
    file = saved(tmp_path / "keydiff.py", text)
    monkeypatch.setattr(apart, "IMPORT_SECONDS", 1 if "while" in text else 60)
    refused(lambda: apart.described(str(file), [None], Domain()), wanted, UnusableImplementation)
