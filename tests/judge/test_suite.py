"""The suite as a user meets it: --impl with a folder, a file, a package; the header, the sentence, the
verdict, the errors.
"""

import json
import re
from pathlib import Path

import pytest
from tools import pytest_of, python, says

from evictionary.spec_tests.judge.implementation import AS, UnusableImplementation, load

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


def judge(*arguments: object, code: int | None = 1) -> str:
    """What the suite prints."""
    done = pytest_of("-p", "no:xdist", *arguments, code=code)
    return done.stdout + done.stderr


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
    (tmp_path / "my_kernels").mkdir()
    return tmp_path / "my_kernels"


def judged(folder: Path, stem: str, text: str, *arguments: object, code: int = 1) -> str:
    """What the suite prints of a folder with this one file, asked by the laws of its stem."""
    (folder / f"{stem}.py").write_text(text)
    return judge(f"spec_tests/{stem}/test_{stem}.py", "--impl", folder, *arguments, code=code)


@pytest.mark.slow
def test_a_wrong_anchor_is_told_so(folder: Path) -> None:
    says(
        judged(folder, "keydiff", RAW_MEAN_ANCHOR),
        "KD-8 does not hold for keydiff.score of my_kernels (numpy, cpu, float64)",
        "smallest input",
        "KD-8      fail",
        "my_kernels (numpy, cpu, float64) does not provide the functions of",
        "your numbers match a known bug: mean taken before normalising (KD-8)",
    )


def test_laws_that_are_only_collected_have_not_failed() -> None:
    assert "FAIL" not in judge("spec_tests/knorm", "--impl", "reference", "--collect-only", code=0)


@pytest.mark.slow
def test_the_previous_partition_is_told_so(folder: Path) -> None:
    (folder / "lagkv.py").write_text(PREVIOUS_PARTITION)
    told = "LK-12 does not hold for lagkv.select of lagkv (torch, cpu, float32)"
    asked = ("spec_tests/lagkv/test_lagkv.py", "--impl", folder / "lagkv.py", "-k", "best_tokens")
    says(judge(*asked), told, "more than one it keeps")


def test_the_printed_repro_runs(folder: Path) -> None:
    output = judged(folder, "keydiff", RAW_MEAN_ANCHOR, "-k", "cosine_to_the_anchor")
    program, expected, got = repro(output)
    assert expected.split() != got.split()
    shown = re.search(r"smallest input  keys = [\[ ]*(-?\d+\.\d{0,6})", output)
    assert shown and shown[1] in program, output  # the repro has the input of the sentence


def test_a_repro_of_large_arguments_asks_the_law_again(folder: Path) -> None:
    """A covariance of 128 x 128 numbers, under names of the author's own."""
    program, expected, got = repro(
        judged(folder, "expected_attention", UNHALVED, "-k", "times_the_norm_of_the_value")
    )
    assert expected.split() != got.split()
    assert max(map(len, program.splitlines())) < 300
    imported = re.findall(r"^from \S+ import (.*)$", program, flags=re.MULTILINE)
    assert [name for names in imported for name in names.split(", ") if program.count(name) < 2] == []


def test_a_repro_of_a_refusal_prints_the_error_that_is_wanted(folder: Path) -> None:
    silent = (
        'import numpy as np\nDOMAIN = {"head_dim": 128}\ndef score(keys):\n    return '
        "np.zeros(keys.shape[:-1])\n"
    )
    _, expected, _ = repro(judged(folder, "keydiff", silent, "--strict", "-k", "bad_shapes_are_refused"))
    assert expected.startswith("a ValueError: keys: ")


def test_code_that_raises_breaks_no_relation(folder: Path) -> None:
    """It gives no answers that could be compared: the end says what it raises."""
    text = "def score(keys):\n    raise NotImplementedError\n"
    says(
        judged(folder, "keydiff", text, "--brief", "-k", "not long and not lost"),
        "; each time it raises NotImplementedError",
        "refusal        pass: KD-8 (for bad input any error passes; --strict wants a ValueError)",
        never=["it breaks too"],
    )


def test_code_that_needs_a_gpu_is_not_called_wrong(folder: Path) -> None:
    text = 'def score(keys):\n    raise RuntimeError("0 active drivers ([]). There should only be one.")\n'
    says(
        judged(folder, "keydiff", text, "--brief", "-k", "not long and not lost", code=4),
        "mathematics    no answer: KD-8",
        "edge           not judged: KD-8 (KD-8 has no answer)",
        "Triton kernels are judged without one by TRITON_INTERPRET=1 or --device compiled",
        never=["fail: ", "KD-8 fails", "it breaks too"],
    )


RIGHT = """
import numpy as np

def score(keys):
    def unit(vectors):
        norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
        return np.divide(vectors, norm, out=np.zeros_like(vectors), where=norm > 0)
    return -(unit(keys) * unit(unit(keys).mean(axis=-2, keepdims=True))).sum(axis=-1)
"""


def test_bad_input_that_is_taken_is_no_wrong_mathematics(folder: Path) -> None:
    says(
        judged(folder, "keydiff", RIGHT, "--brief", "-k", "refuse or silence", code=0),
        "keydiff.score of my_kernels (numpy, cpu, float64) does not refuse bad input as KD-8 says",
        'not wanted?     the file may say CONVENTIONS = ("unchecked",): it checks no argument',
        never=["does not hold", "your numbers"],
    )


def repro(output: str) -> tuple[str, str, str]:
    """The program below "to see it again, run", and what it prints as expected and as got."""
    program = output.split("to see it again, run\n", 1)[1].split("  this law alone", 1)[0]
    program = "\n".join(line.removeprefix("    ") for line in program.splitlines())
    expected, got = python("-c", program).stdout.split("got     ")
    assert expected.startswith("expected ")
    return program, expected.removeprefix("expected "), got


def test_too_few_results_are_told_so_with_a_program_that_runs(folder: Path) -> None:
    text = "def recover(moments):\n    return moments.key_sum, moments.value_sum\n"
    output = judged(folder, "momentkv", text, "-k", "means_are_recovered")
    says(output, "MK-24 does not hold for momentkv.recover of my_kernels", never=["strict"])
    assert "import Moments\n" in repro(output)[0]


@pytest.mark.slow
def test_the_header_names_what_is_judged() -> None:
    asked = ("spec_tests/knorm/test_knorm.py", "--impl", "reference", "-v")
    says(judge(*asked, code=0), "judging reference (numpy, cpu, float64): ", "knorm.score")


@pytest.mark.slow
def test_several_implementations_have_a_verdict_each(folder: Path) -> None:
    (folder / "knorm.py").write_text("def score(keys):\n    return -(keys**2).sum(-1)\n")
    output = judge("spec_tests/knorm/test_knorm.py", "--impl", "reference", "--impl", folder)
    row = next(line for line in output.splitlines() if line.startswith("KN-1  "))
    assert row.split()[1] == "pass" and "fail (" in row


RIGHT = "def score(keys):\n    return -(keys**2).sum(-1) ** 0.5\n"


def test_the_verdict_is_written_to_files(folder: Path, tmp_path: Path) -> None:
    judged(folder, "knorm", RIGHT, "--report", tmp_path / "out", code=0)
    verdict = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert verdict["schema"] == "evictionary/conformance/2"
    assert verdict["verdict"].startswith(("PASS: ", "FAIL: "))
    assert (verdict["first_failure"] is None) == verdict["verdict"].startswith("PASS: ")
    assert verdict["implementations"][0]["requirements"]["KN-1"]["verdict"] == "pass"
    assert json.loads((tmp_path / "out" / "badge.json").read_text())["message"] == "1 of 1 requirements"
    assert "<testsuite" in (tmp_path / "out" / "junit.xml").read_text()


@pytest.mark.slow
def test_what_is_required_must_be_provided(folder: Path) -> None:
    judged(folder, "knorm", RIGHT, "spec_tests/shared/test_selection.py", code=0)
    assert "SEL-1 is required of my_kernels (numpy, cpu, float64): no file selection.py" in judged(
        folder, "knorm", RIGHT, "spec_tests/shared/test_selection.py", "--require", "all"
    )


@pytest.mark.parametrize(
    ("stem", "text", "wanted"),
    [
        (
            "knorm",
            "def score(keys):\n    return keys.nonsense()\n",
            ("KN-1 does not hold", "AttributeError", "knorm.py:2, score"),
        ),
        (  # a setting that the contract has and this function has not
            "snapkv",
            "\ndef score(queries, keys):\n    return keys\n",
            ("SN-1 does not hold", "TypeError", "snapkv.py:2, score: def score("),
        ),
    ],
)
def test_an_exception_of_the_implementation_is_located(
    folder: Path, stem: str, text: str, wanted: tuple[str, ...]
) -> None:
    says(judged(folder, stem, text), *wanted)


def test_a_repro_of_a_relation_prints_both_answers(folder: Path) -> None:
    joint = "def score(keys):\n    return keys.sum(axis=-1) - keys.mean(axis=(1, 2, 3))[0]\n"
    output = judged(folder, "keydiff", joint, "-k", "heads_do_not_see_each_other")
    says(output, "the score of each head alone differs by", "its own answer", "the other")
    program = output.split("to see it again, run\n", 1)[1].split("  this law alone", 1)[0]
    told = python("-c", "\n".join(line.removeprefix("    ") for line in program.splitlines())).stdout
    own, other = told.removeprefix("its own answer ").split("the other      ")
    assert own.split() != other.split()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "provides no function of the contract"),
        ("def nothing(): pass", "provides no function of the contract"),
        ("import not_there", "importing it raised ModuleNotFoundError"),
        ("def score(:", "importing it raised SyntaxError"),
        ("raise SystemExit(3)", "importing it raised SystemExit: 3"),
    ],
)
def test_what_cannot_be_judged_is_an_error(folder: Path, content: str | None, wanted: str) -> None:
    if content is not None:
        (folder / "knorm.py").write_text(content)
    assert wanted in judge("spec_tests", "--impl", folder, code=4)


RANK = "import numpy as np\n\n\ndef rank(keys):\n    return -np.linalg.norm(keys, axis=-1)\n"


def test_a_file_of_another_name_is_told_its_command(folder: Path) -> None:
    """Alone or in a folder; what the message proposes is accepted."""
    file = folder / "my_kernel.py"
    file.write_text(RANK)
    with pytest.raises(UnusableImplementation) as told:
        load(str(folder))
    command = f"evictionary judge {file} --method keydiff.score"
    assert "the name of my_kernel.py is that of no method" in str(told.value)
    assert str(told.value).endswith(command)
    assert load(f"{file}{AS}keydiff.score").functions() == ["keydiff.score"]
    with pytest.raises(UnusableImplementation) as told:
        load(f"{file}{AS}keydiff")
    (line,) = re.findall("IMPLEMENTS = .*", str(told.value))
    assert line == 'IMPLEMENTS = {"rank": "keydiff.score"}'
    file.write_text(f"{RANK}\n\n{line}\n")
    assert load(str(file)).functions() == ["keydiff.score"]
    with pytest.raises(UnusableImplementation) as told:
        load(str(folder))
    assert str(told.value).endswith(f"evictionary judge {file}")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ["--impl", "no_such_package"],
            "no_such_package: neither a folder, a .py file nor an importable package",
        ),
        (["--impl", "no/such/keydiff.py"], "no such file or folder"),
        (["--dtype", "float8"], "--dtype: got 'float8'"),
        (["--require", "KD-99"], "--require: got 'KD-99'"),
        (["--impl", "reference", "--dtype", "bfloat16"], "numpy, which has no bfloat16"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], wanted: str) -> None:
    assert wanted in judge("spec_tests", *arguments, code=4)


def test_a_run_of_other_tests_alone_is_no_judgement() -> None:
    asked = ("-k", "version_and_help")
    assert "nothing was judged" not in judge(
        "spec_tests/memory/test_memory.py", "tests/cli/test_cli.py", *asked, code=0
    )
    judge("spec_tests/memory/test_memory.py", *asked, code=5)


def test_a_brief_verdict_leaves_the_summary_of_plugins_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest 8 asks no plugin for its summary after --no-summary, so that judge wrote no verdict."""
    (folder / "older.py").write_text(
        "def pytest_configure(config):\n    assert not config.option.no_summary\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "knorm.py").write_text(
        "import numpy as np\ndef score(keys): return -np.linalg.norm(keys, axis=-1)\n"
    )
    report = folder / "report"
    asked = ["spec_tests/knorm/test_knorm.py", "--impl", folder / "knorm.py", "-k", "minus_the_norm"]
    told = judge(*asked, "--brief", "--report", report, "-p", "older", "-rA", code=0)
    assert (report / "conformance.json").is_file()
    assert told.splitlines()[-1].startswith("PASS") and "short test summary" not in told, told
