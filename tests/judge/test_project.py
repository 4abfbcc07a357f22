"""A project names its functions in pyproject.toml: `pytest` asks their laws beside its tests, and `judge`
asks the same.
"""

import inspect
import json
import re

import pytest
from tools import invoke, laid, python, refused, saved, says

from evictionary import source
from evictionary.cli import starter
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


def run(folder, *command, code=0):
    return python("-m", *command, cwd=folder, code=code)


def test_pytest_asks_the_laws_beside_the_tests_of_the_project(folder):
    told = run(folder, "pytest", "-q", "-p", "no:cacheprovider").stdout
    says(told, "mathematics    pass: KD-8", "any function   pass: MEM-1, MEM-2, MEM-3, MEM-4", "PASS: ")
    # and the test of its own
    assert int(re.findall(r"(\d+) passed", told)[0]) == int(re.findall(r"PASS: (\d+)", told)[-1]) + 1


def test_a_wrong_function_fails_the_run(folder):
    (folder / "my_kernels" / "scores.py").write_text(KEYDIFF.replace("return -", "return "))
    says(run(folder, "pytest", "-q", "-p", "no:cacheprovider", code=1).stdout, "FAIL: ")


def test_a_file_that_is_named_is_all_that_is_run(folder):
    told = run(folder, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_own.py").stdout
    says(told, "1 passed", never=["PASS"])


def test_judge_takes_the_pyproject_of_a_project(folder):
    done = run(folder, "evictionary", "judge", "pyproject.toml", "--profile", "quick", "--json")
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
    says(run(folder, "pytest", "-q", code=4).stderr, "ERROR")


def test_a_key_that_is_unknown_is_named(folder):
    file = saved(folder / "pyproject.toml", '[tool.evictionary]\ndtypes = ["float32"]\n')
    refused(lambda: project.options(file), r"dtypes: got .* wanted one of functions", project.BadProject)


def test_a_contract_and_a_folder_to_begin_with(tmp_path):
    def asked(*words, code=0):
        return run(tmp_path, "evictionary", *words, code=code)

    found = json.loads(asked("contract", "keydiff.score", "--json").stdout)
    assert (found["axes"], [*found["equations"]]) == ({"keys": ["...", "T", "D"]}, ["KD-8"])
    assert found["answers"] == {"answer": {"kind": "cosine", "axes": ["...", "T"]}}
    assert found["laws"] > 20
    states = asked("contract", "keydiff.append").stdout
    says(states, "cache.keys: [..., n, D], finite numbers", "answer.positions: [..., n], whole numbers")
    assert asked("contract").stdout.split() == contract_functions()
    # Each method has at least one function, and a name that is neither is told what there is.
    for stem in {path.partition(".")[0] for path in contract_functions()}:
        own = [path for path in contract_functions() if path.startswith(f"{stem}.")]
        assert starter.functions_of(stem) == own != []
    assert asked("contract", "h2o").stdout.split() == ["h2o.score", "h2o.select"]
    for wrong, wanted in (
        ("keydif.score", "did you mean keydiff.score"),
        ("h20", "did you mean h2o"),
        ("h2o.scores", "wanted one of h2o.score, h2o.select"),
    ):
        says(asked("contract", wrong, code=2).stderr, wanted)
    asked("new", *contract_functions())
    for path in (tmp_path / "my_kernels").glob("*.py"):
        compile(path.read_text(), path.name, "exec")
    judging = ("judge", "my_kernels", "--method", "knorm", "--profile", "quick")
    says(asked(*judging, code=1).stdout, "NotImplementedError")
    says(asked("new", "keydiff.score", code=2).stderr, "is not written over")
    # A starter is one file, with the functions of a method that a cache calls.
    told = asked("judge", "--starter", "keydiff").stderr
    assert told.strip().endswith("then run evictionary judge keydiff.py")
    text = (tmp_path / "keydiff.py").read_text()
    assert re.findall("^(?:def |from |import ).*", text, re.MULTILINE) == [
        "import numpy as np",
        "from evictionary.reference.contract import Cosine, Real",
        'def score(keys: Real[np.ndarray, "... T D"]) -> Cosine[np.ndarray, "... T"]:',
    ]
    says(asked("judge", "--starter", "keydiff", code=2).stderr, "is not written over")
    assert (tmp_path / "keydiff.py").read_text() == text
    says(asked("judge", "keydiff.py", "--starter", "keydiff", code=2).stderr, "wanted one of the two")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("keydiff.py --law test_no_such_law", "no law that applies to it has test_no_such_law in its name"),
        ("keydiff.py --method lagkv", "it has no function of lagkv"),
        ("keydiff.py --method keydif", "wanted a method or a function that `evictionary contract` lists"),
        (
            "keydiff.py --dtype bfloat61",
            "--dtype: got 'bfloat61' (did you mean bfloat16?), wanted some of float64, float32, float16, "
            "bfloat16, separated by commas",
        ),
        ("odd", "evictionary judge odd/my_kernel.py --method keydiff.score"),
    ],
)
def test_where_nothing_is_judged_the_reason_is_the_only_result(tmp_path, arguments, reason):
    """The last line for a person, and a JSON for a program."""
    (tmp_path / "odd").mkdir()
    for file in ("keydiff.py", "odd/my_kernel.py"):
        saved(tmp_path / file, "def score(keys):\n    return keys.sum(-1)\n")
    done = run(tmp_path, "evictionary", "judge", *arguments.split(), "--jobs", "1", code=2)
    assert done.stdout.strip() == "" and done.stderr.rstrip().endswith(reason)
    assert "line above" not in done.stderr and done.stderr.count(reason) == 1
    done = run(tmp_path, "evictionary", "judge", *arguments.split(), "--jobs", "1", "--json", code=2)
    assert json.loads(done.stdout)["error"].endswith(reason)


@pytest.mark.parametrize(
    ("code", "said", "told", "end"),
    [
        (2, "FAIL: 32 laws have no answer", "", 130),
        (3, "PASS: 3 laws hold", "the run of keydiff.py ended before its verdict (pytest: 3)", 2),
    ],
    ids=["by a key", "by an error of pytest"],
)
def test_a_run_that_ends_early_has_no_verdict(tmp_path, monkeypatch, code, said, told, end):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "keydiff.py", "def score(keys):\n    return keys.sum(-1)\n")
    monkeypatch.setattr("evictionary.cli.judge._run_pytest", lambda *_, **__: (code, said))
    done = invoke("judge", "keydiff.py")
    assert done.exit_code == end and said not in done.output
    says(done.output, told)


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
    told = run(tmp_path, "evictionary", "judge", *arguments.split(), code=2).stderr
    assert set(re.findall(r"--[a-z]+", told)) == flags


def test_a_function_without_a_docstring_gives_its_signature_and_no_body():
    assert source.signature(inspect.getsource(keydiff)) == "def keydiff(keys):"


def keydiff(keys):
    return keys
