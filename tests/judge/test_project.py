"""A project names its functions in pyproject.toml: `pytest` asks their laws beside its tests, and `judge`
asks the same.
"""

import json
import re

import pytest
from tools import laid, python, refused, saved

from evictionary.spec_tests.judge import project
from evictionary.spec_tests.judge.implementation import contract_functions

PROJECT = """
[tool.pytest.ini_options]
testpaths = ["tests"]

[tool.evictionary.functions]
"keydiff.score" = "my_kernels.scores:keydiff"
"""
KEYDIFF = """
import numpy as np


def keydiff(keys):
    unit = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-30)
    anchor = unit.mean(axis=-2, keepdims=True)
    return -(unit * anchor).sum(axis=-1) / np.maximum(np.linalg.norm(anchor, axis=-1), 1e-30)
"""


@pytest.fixture
def folder(tmp_path):
    own = "def test_own():\n    assert True\n"
    return laid(
        tmp_path, {"pyproject.toml": PROJECT, "my_kernels/scores.py": KEYDIFF, "tests/test_own.py": own}
    )


def run(folder, *command):
    return python("-m", *command, cwd=folder, code=None)


def test_pytest_asks_the_laws_beside_the_tests_of_the_project(folder):
    done = run(folder, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert "mathematics    5 hold" in done.stdout and "PASS: " in done.stdout
    (passed,) = [line for line in done.stdout.splitlines() if " passed" in line]
    assert (
        int(passed.split()[0]) == int(done.stdout.rpartition("PASS: ")[2].split()[0]) + 1
    )  # and the test of its own


def test_a_wrong_function_fails_the_run(folder):
    (folder / "my_kernels" / "scores.py").write_text(KEYDIFF.replace("return -", "return "))
    done = run(folder, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 1 and "FAIL: " in done.stdout


def test_a_file_that_is_named_is_all_that_is_run(folder):
    done = run(folder, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_own.py")
    assert done.returncode == 0 and "1 passed" in done.stdout and "PASS" not in done.stdout


def test_judge_takes_the_pyproject_of_a_project(folder):
    done = run(folder, "evictionary", "judge", "pyproject.toml", "--profile", "quick", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["implementations"][0]["functions"] == ["keydiff.score"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"keydiff.scor" = "my_kernels.scores:keydiff"', "keydiff.scor: no such function"),
        ('"keydiff.score" = "my_kernels.scores"', "wanted a module and a function"),
        (
            '"keydiff.score" = "my_kernels.scores:nothing"',
            "importing my_kernels.scores:nothing raised AttributeError",
        ),
        ('"keydiff.score" = 3', "got 3, wanted a module and a function"),
    ],
    ids=["function", "place", "attribute", "number"],
)
def test_a_table_that_cannot_be_used_names_its_key(folder, line, message):
    file = saved(folder / "pyproject.toml", f"[tool.evictionary.functions]\n{line}\n")
    wanted = rf"pyproject.toml: tool.evictionary.functions: .*{re.escape(message)}"
    refused(lambda: project.modules(file, frozenset(contract_functions())), wanted, project.BadProject)
    assert "ERROR" in (done := run(folder, "pytest", "-q")).stderr and done.returncode == 4


def test_a_key_that_is_unknown_is_named(folder):
    file = saved(folder / "pyproject.toml", '[tool.evictionary]\ndtypes = ["float32"]\n')
    refused(lambda: project.options(file), r"dtypes: got .* wanted one of functions", project.BadProject)


def test_a_contract_and_a_folder_to_begin_with(tmp_path):
    found = json.loads(run(tmp_path, "evictionary", "contract", "keydiff.score", "--json").stdout)
    assert (
        found["axes"] == {"keys": ["...", "T", "D"]}
        and list(found["equations"]) == ["KD-8"]
        and found["laws"] > 20
    )
    assert run(tmp_path, "evictionary", "contract").stdout.split() == contract_functions()
    assert "did you mean keydiff.score" in run(tmp_path, "evictionary", "contract", "keydif.score").stderr
    assert run(tmp_path, "evictionary", "new", *contract_functions()).returncode == 0
    for path in (tmp_path / "my_kernels").glob("*.py"):
        compile(path.read_text(), path.name, "exec")
    done = run(tmp_path, "evictionary", "judge", "my_kernels", "--method", "knorm", "--profile", "quick")
    assert "NotImplementedError" in done.stdout and done.returncode == 1
    again = run(tmp_path, "evictionary", "new", "keydiff.score")
    assert again.returncode == 2 and "is not written over" in again.stderr
    # A starter is one file, with the functions of a method that a cache calls.
    done = run(tmp_path, "evictionary", "judge", "--starter", "keydiff")
    assert done.stderr.strip().endswith("then run evictionary judge keydiff.py") and done.returncode == 0
    text = (tmp_path / "keydiff.py").read_text()
    assert [line for line in text.splitlines() if re.match("def |from |import ", line)] == [
        "import numpy as np",
        "def score(keys: np.ndarray) -> np.ndarray:",
    ]
    again = run(tmp_path, "evictionary", "judge", "--starter", "keydiff")
    assert (
        again.returncode == 2
        and "is not written over" in again.stderr
        and (tmp_path / "keydiff.py").read_text() == text
    )
    assert (
        "wanted one of the two"
        in run(tmp_path, "evictionary", "judge", "keydiff.py", "--starter", "keydiff").stderr
    )


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("absent.py", set()),
        ("absent", set()),
        ("keydiff.py --law test_no_such_law_at_all", set()),
        ("keydiff.py --dtype float31", {"--dtype"}),
    ],
)
def test_a_message_has_no_flag_that_nobody_typed(tmp_path, arguments, flags):
    saved(tmp_path / "keydiff.py", "def score(keys):\n    return keys.sum(-1)\n")
    done = run(tmp_path, "evictionary", "judge", *arguments.split())
    assert done.returncode == 2 and set(re.findall(r"--[a-z]+", done.stderr)) == flags


def test_a_function_without_a_docstring_gives_its_signature_and_no_body():
    from evictionary.cli.starter import _signature

    assert _signature(keydiff) == "def keydiff(keys):"


def keydiff(keys):
    return keys
