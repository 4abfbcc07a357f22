"""The suite as a user meets it: --impl with a folder, a file, a package; the header, the sentence, the verdict, the errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

RAW_MEAN_ANCHOR = """
import numpy as np

def score(keys):
    if np.ndim(keys) < 2 or 0 in np.shape(keys):
        raise ValueError("keys: empty")
    mean = keys.mean(axis=-2, keepdims=True)
    size = np.linalg.norm(keys, axis=-1) * np.linalg.norm(mean, axis=-1)
    return -np.divide((keys * mean).sum(axis=-1), size, out=np.zeros_like(size), where=size > 0)
"""

PREVIOUS_PARTITION = """
import torch

def part(states, reference):
    low, high = reference.amin(-2, keepdim=True), reference.amax(-2, keepdim=True)
    spread = high - low
    states = torch.where(spread == 0, 0.0, (states - low) / torch.where(spread == 0, 1.0, spread))
    return (states.std(-1) if states.shape[-1] > 1 else 0 * states[..., 0]).softmax(-1)

def select(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    length, kept = keys.shape[2], torch.ones(keys.shape[:3], dtype=torch.bool)
    for start in range(sink_size, length - 2 * lag_size + 1, lag_size):
        own, before = slice(start, start + lag_size), slice(max(0, start - lag_size), max(1, start))
        scores = part(keys[:, :, own], keys[:, :, before]) + part(values[:, :, own], values[:, :, before])
        count = int(round(keep_ratio * 100)) * lag_size // 100
        order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
        kept[:, :, own] = torch.zeros_like(kept[:, :, own]).scatter(-1, order, True)
    return kept
"""


def judge(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


UNHALVED = """
import numpy as np

DOMAIN = {"head_dim": (128,), "length_multiple_of": 16, "group": (1,)}

def score(k, v, mu, sigma, epsilon=0.02):
    logits = (k @ mu[..., None])[..., 0] / np.sqrt(128) + ((k @ sigma) * k).sum(axis=-1) / 128
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) + epsilon) * np.linalg.norm(v, axis=-1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my_kernels"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_a_wrong_anchor_is_told_so(folder: Path) -> None:
    (folder / "keydiff.py").write_text(RAW_MEAN_ANCHOR)
    done = judge("spec_tests/keydiff/test_keydiff.py", "--impl", str(folder))
    assert done.returncode == 1
    assert "KD-8 does not hold for keydiff.score of my_kernels (numpy, cpu, float64)" in done.stdout
    assert "smallest input" in done.stdout
    assert "KD-8      fail" in done.stdout
    assert "my_kernels (numpy, cpu, float64) does not provide the functions of" in done.stdout
    assert "your numbers equal those of: mean taken before normalising (KD-8)" in done.stdout


@pytest.mark.slow
def test_the_previous_partition_is_told_so(folder: Path) -> None:
    (folder / "lagkv.py").write_text(PREVIOUS_PARTITION)
    done = judge("spec_tests/lagkv/test_lagkv.py", "--impl", str(folder / "lagkv.py"), "-k", "best_tokens")
    assert done.returncode == 1
    assert "LK-12 does not hold for lagkv.select of lagkv (torch, cpu, float32)" in done.stdout
    assert "more than one it keeps" in done.stdout


def test_the_printed_repro_runs(folder: Path) -> None:
    (folder / "keydiff.py").write_text(RAW_MEAN_ANCHOR)
    output = judge("spec_tests/keydiff/test_keydiff.py", "--impl", str(folder), "-k", "cosine_to_the_anchor").stdout
    program = printed_program(output)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("expected ")
    expected, got = done.stdout.split("got     ")
    assert expected.split()[1:] != got.split()
    shown = re.search(r"smallest input  keys = [\[ ]*(-?\d+\.\d{0,6})", output)
    assert shown, output
    assert shown[1] in program  # the repro has the input of the sentence


def test_a_repro_of_large_arguments_asks_the_law_again(folder: Path) -> None:
    """A covariance of 128 x 128 numbers, under names of the author's own."""
    (folder / "expected_attention.py").write_text(UNHALVED)
    output = judge(
        "spec_tests/expected_attention/test_expected_attention.py", "--impl", str(folder), "-k", "halving_the_keys"
    ).stdout
    program = printed_program(output)
    assert max(map(len, program.splitlines())) < 300
    imported = re.findall(r"^from \S+ import (.*)$", program, flags=re.MULTILINE)
    assert [name for names in imported for name in names.split(", ") if program.count(name) < 2] == []
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    expected, got = done.stdout.removeprefix("expected ").split("got     ")
    assert expected.split() != got.split()


def test_a_repro_of_a_refusal_prints_the_error_that_is_wanted(folder: Path) -> None:
    silent = 'import numpy as np\nDOMAIN = {"head_dim": 128}\ndef score(keys):\n    return np.zeros(keys.shape[:-1])\n'
    (folder / "keydiff.py").write_text(silent)
    output = judge("spec_tests/keydiff/test_keydiff.py", "--impl", str(folder), "--strict", "-k", "bad_shapes_are_refused").stdout
    done = subprocess.run([sys.executable, "-c", printed_program(output)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("expected a ValueError: keys: ")
    assert "got     " in done.stdout


def printed_program(output: str) -> str:
    """The lines below "to see it again, run"."""
    program = output.split("to see it again, run\n", 1)[1].split("  this law alone", 1)[0]
    return "\n".join(line.removeprefix("    ") for line in program.splitlines())


def test_too_few_results_are_told_so_with_a_program_that_runs(folder: Path) -> None:
    (folder / "momentkv.py").write_text("def recover(moments):\n    return moments.key_sum, moments.value_sum\n")
    output = judge("spec_tests/momentkv/test_momentkv.py", "--impl", str(folder), "-k", "means_are_recovered").stdout
    assert "MK-24 does not hold for momentkv.recover of my_kernels" in output
    assert "strict" not in output
    program = printed_program(output)
    assert "import Moments\n" in program
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("expected ")


@pytest.mark.slow
def test_the_header_names_what_is_judged() -> None:
    done = judge("spec_tests/knorm/test_knorm.py", "--impl", "reference", "-v")
    assert done.returncode == 0
    assert "judging reference (numpy, cpu, float64): " in done.stdout
    assert "knorm.score" in done.stdout


@pytest.mark.slow
def test_several_implementations_have_a_verdict_each(folder: Path) -> None:
    (folder / "knorm.py").write_text("def score(keys):\n    return -(keys**2).sum(-1)\n")
    done = judge("spec_tests/knorm/test_knorm.py", "--impl", "reference", "--impl", str(folder))
    assert done.returncode == 1
    row = next(line for line in done.stdout.splitlines() if line.startswith("KN-1  "))
    assert row.split()[1] == "pass"
    assert "fail (" in row


def test_the_verdict_is_written_to_files(folder: Path, tmp_path: Path) -> None:
    (folder / "knorm.py").write_text("def score(keys):\n    return -(keys**2).sum(-1) ** 0.5\n")
    done = judge("spec_tests/knorm/test_knorm.py", "--impl", str(folder), "--report", str(tmp_path / "out"))
    assert done.returncode == 0
    verdict = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert verdict["schema"] == "evictionary/conformance/2"
    assert verdict["implementations"][0]["requirements"]["KN-1"]["verdict"] == "pass"
    assert json.loads((tmp_path / "out" / "badge.json").read_text())["message"] == "1 of 1 requirements"
    assert "<testsuite" in (tmp_path / "out" / "junit.xml").read_text()


@pytest.mark.slow
def test_what_is_required_must_be_provided(folder: Path) -> None:
    (folder / "knorm.py").write_text("def score(keys):\n    return -(keys**2).sum(-1) ** 0.5\n")
    arguments = ("spec_tests/knorm/test_knorm.py", "spec_tests/shared/test_selection.py", "--impl", str(folder))
    assert judge(*arguments).returncode == 0
    done = judge(*arguments, "--require", "all")
    assert done.returncode == 1
    assert "SEL-1 is required of my_kernels (numpy, cpu, float64): no file selection.py" in done.stdout


def test_an_exception_of_the_implementation_is_located(folder: Path) -> None:
    (folder / "knorm.py").write_text("def score(keys):\n    return keys.nonsense()\n")
    done = judge("spec_tests/knorm/test_knorm.py", "--impl", str(folder))
    assert "KN-1 does not hold" in done.stdout
    assert "AttributeError" in done.stdout
    assert "knorm.py:2" in done.stdout


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({}, "provides no function of the contract"),
        ({"knorm.py": "def nothing(): pass"}, "provides no function of the contract"),
        ({"knorm.py": "import not_there"}, "importing it raised ModuleNotFoundError"),
        ({"knorm.py": "def score(:"}, "importing it raised SyntaxError"),
        ({"knorm.py": "raise SystemExit(3)"}, "importing it raised SystemExit: 3"),
    ],
)
def test_what_cannot_be_judged_is_an_error(folder: Path, content: dict[str, str], wanted: str) -> None:
    for name, text in content.items():
        (folder / name).write_text(text)
    done = judge("spec_tests", "--impl", str(folder))
    assert done.returncode == 4
    assert wanted in done.stderr


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--impl", "no_such_package"], "no_such_package: neither a folder, a .py file nor an importable package"),
        (["--impl", "no/such/keydiff.py"], "no such file or folder"),
        (["--dtype", "float8"], "--dtype: got 'float8'"),
        (["--require", "KD-99"], "--require: got 'KD-99'"),
        (["--impl", "reference", "--dtype", "bfloat16"], "NumPy, which has no bfloat16"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], wanted: str) -> None:
    done = judge("spec_tests", *arguments)
    assert done.returncode == 4
    assert wanted in done.stderr


def test_a_run_of_other_tests_alone_is_no_judgement() -> None:
    done = judge("spec_tests/memory/test_memory.py", "tests/cli/test_cli.py", "-k", "version_and_help")
    assert done.returncode == 0 and "nothing was judged" not in done.stdout, done.stdout
    assert judge("spec_tests/memory/test_memory.py", "-k", "version_and_help").returncode == 5
