"""The vectors: every case follows the schema, catches what it says, and is enough for a checker that has none of our code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from evictionary.cli.app import app
from evictionary.spec_tests.judge.implementation import oracle
from evictionary.spec_tests.proof.planted import load_mutants
from evictionary.spec_tests.verdict import vectors

ROOT = Path(__file__).parent.parent
CHECKER = ROOT / "conformance" / "clients" / "check_vectors.py"

# KeyDiff as somebody writes it who has the paper and no NumPy.
PLAIN_KEYDIFF = """
import math


def unit(vector):
    length = math.hypot(*vector)
    return [x / length if length else 0.0 for x in vector]


def score(keys):
    if isinstance(keys, list) and keys and isinstance(keys[0], list) and keys[0] and isinstance(keys[0][0], list):
        return [score(each) for each in keys]
    if not keys or not isinstance(keys[0], list) or not all(keys) or not all(map(math.isfinite, sum(keys, []))):
        raise ValueError("keys: empty or not finite")
    directions = [unit(key) for key in keys]
    anchor = unit([sum(channel) / len(keys) for channel in zip(*directions)])
    return [-sum(x * y for x, y in zip(direction, anchor)) for direction in directions]
"""


PART = ("score_is_minus_the_cosine_to_the_anchor", "mean_of_unit_keys", "that_are_not_finite_do_not_pass_in_silence")


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """The files of KNorm and of a part of KeyDiff's score."""
    laws = [law for law in vectors.laws_of(["knorm", "keydiff"]) if law.requirement.id == "KN-1" or law.name.endswith(PART)]
    steps: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "LONGER_LOOK", 5)
        found = vectors.generate(laws, steps.append)
    assert len(steps) == len(laws) + 2
    return found


@pytest.fixture(scope="module")
def folder(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    vectors.write(content, folder)
    return folder


def run(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["vectors", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_the_files_follow_the_schema_and_the_schema_is_strict(folder: Path) -> None:
    schema = json.loads((folder / "vectors.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for name in ("vectors.json", "KD-8.json", "KN-1.json"):
        validator.validate(json.loads((folder / name).read_text(), parse_constant=pytest.fail))
    broken = json.loads((folder / "KN-1.json").read_text())
    broken["cases"][0]["kind"] = "luck"
    assert not validator.is_valid(broken)


def cheap(function: Callable[..., Any], *args: Any, dtype: str, pick: int | None = None, **kwargs: Any) -> SimpleNamespace:
    """In place of an allowance, which is dear: what one is made of has to be a number."""
    value = function(*args, **kwargs)
    assert vectors._is_numeric(value if pick is None else value[pick]), function
    return SimpleNamespace(largest=0.0, mean=0.0)


@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_method_has_vectors_that_follow_the_schema(measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law may ask for a text or for nothing, as one of LagKV's does: neither can be a case."""
    monkeypatch.setattr(vectors, "load_mutants", dict)
    monkeypatch.setattr(vectors._Pool, "draw", lambda pool, law: pool._run(law, pool.narrow, 1))
    if not measured:
        monkeypatch.setattr(vectors, "allowance", cheap)
    laws = vectors.laws_of()
    assert {law.name.partition("::")[0] for law in laws} >= {"test_lagkv", "test_lagkv_stream", "test_momentkv", "test_selection"}
    index = vectors.write(vectors.generate(laws, lambda step: None), tmp_path)
    validator = jsonschema.Draft202012Validator(json.loads((tmp_path / "vectors.schema.json").read_text()))
    for path in tmp_path.glob("[A-Z]*.json"):
        validator.validate(json.loads(path.read_text(), parse_constant=pytest.fail))
    assert len(index["files"]) > 100 and "LK-12.json" in index["files"]


def test_the_cases_say_what_the_reference_says(content: dict[str, Any]) -> None:
    cases = [case for file in content.values() for case in file["cases"]]
    assert {case["kind"] for case in cases} >= {"mathematics", "refusal"}
    for case in cases:
        keys = vectors.read(case["arguments"]["keys"])
        assert np.array_equal(keys, keys.astype(np.float32), equal_nan=True)
        if case["kind"] == "refusal":
            with pytest.raises(ValueError, match="keys"):
                oracle(case["function"])(keys)
        else:
            assert np.array_equal(vectors.read(case["expected"]), oracle(case["function"])(keys))
    sizes = {case["arguments"]["keys"]["shape"][-1] for case in cases}
    assert sizes & {64, 128} and min(sizes) <= 2


def test_a_case_catches_the_mistakes_that_it_names_and_no_others(content: dict[str, Any]) -> None:
    mutants = {
        name: each
        for name, each in load_mutants().items()
        if each.of == "knorm.score" and each.killed_by == "KN-1" and not each.above
    }
    file = content["KN-1.json"]
    assert file["not_caught"] == []
    assert set(file["mistakes"]) == set(mutants)
    for case in file["cases"]:
        for name, mutant in mutants.items():
            with np.errstate(all="ignore"):
                got = np.asarray(mutant.function(vectors.read(case["arguments"]["keys"])))
            expected, allowed = vectors.read(case["expected"]), case["expected"]["tolerance"]["float32"]
            same = got.shape == expected.shape and np.abs(got - expected).max() <= allowed["largest"]
            assert same != (name in case["catches"]), (case["id"], name)


def test_mistakes_that_show_in_the_same_cases_get_one_that_tells_them_apart() -> None:
    """Lengths other than 1 show the square and the wrong sign alike; of the length 1 the square is right."""
    two, twice, one = (
        vectors.Example("knorm.score", {"keys": keys}, {"keys": vectors.written(keys)})
        for keys in (np.full((1, 1, 3, 1), 2.0), np.full((1, 1, 2, 1), 3.0), np.ones((1, 1, 4, 1)))
    )
    square, sign = (load_mutants()[f"knorm.{name}"] for name in ("squared_norm", "longest_kept"))
    pool, chosen = vectors._Pool(), {"KN-1": [two]}
    pool.examples["knorm.score"] = {example.key: example for example in (two, twice, one)}
    pool.tell_apart([square, sign], chosen)
    assert chosen == {"KN-1": [two, one]}
    assert [one.catches(each) for each in (square, sign)] == [False, True]


def test_a_checker_without_our_code_passes_the_right_one_and_names_the_mistake_of_a_wrong_one(folder: Path, tmp_path: Path) -> None:
    def checked(program: str, *dtype: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "mine.py").write_text(program)
        command = [sys.executable, "-I", "-S", CHECKER, folder, "keydiff.score", tmp_path / "mine.py", *dtype]
        return subprocess.run(command, capture_output=True, text=True)

    assert CHECKER.read_text().count("\n") <= 60
    for dtype in ("float32", "float64"):
        done = checked(PLAIN_KEYDIFF, dtype)
        assert done.returncode == 0 and "cases hold" in done.stdout, done.stdout + done.stderr
    done = checked(PLAIN_KEYDIFF.replace("zip(*directions)", "zip(*keys)"))
    assert done.returncode == 1
    assert "these are the cases that catch: mean taken before normalising" in done.stdout
    done = checked(PLAIN_KEYDIFF.replace("raise ValueError", "return ValueError"))
    assert done.returncode == 1 and "accepted what is to be refused" in done.stdout


def test_the_command_writes_the_same_bytes_again_and_checks_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert "cases of 1 requirements" in run("--output", tmp_path / name, "--method", "knorm")
    assert [path.read_bytes() for path in sorted((tmp_path / "one").iterdir())] == [
        path.read_bytes() for path in sorted((tmp_path / "two").iterdir())
    ]
    assert "every file is as vectors.json says" in run("--check", tmp_path / "one")
    (tmp_path / "one" / "KN-1.json").write_text("{}")
    (tmp_path / "one" / "KD-8.json").write_text("{}")
    (tmp_path / "one" / "vectors.schema.json").unlink()
    found = json.loads(run("--check", tmp_path / "one", "--json", code=1))["problems"]
    assert [each.partition(":")[0] for each in found] == [
        "KN-1.json has been changed",
        "vectors.schema.json is missing",
        "KD-8.json is not listed in vectors.json",
    ]
    index = json.loads(run("--output", tmp_path / "two", "--method", "knorm", "--json"))  # a folder of vectors is written anew
    assert set(index["files"]) == {"KN-1.json", "vectors.schema.json"}


def test_what_cannot_be_used_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert "wanted a new folder or one of vectors" in run("--output", tmp_path, code=2)
    assert "wanted a new folder or one of vectors" in run("--output", tmp_path / "thesis.tex", code=2)
    assert "--method: got 'keydif', wanted some of" in run("--output", tmp_path / "new", "--method", "keydif", code=2)
    assert "wanted a folder with a vectors.json" in run("--check", tmp_path, code=2)
    assert "wanted one of the two" in run(code=2)
    (tmp_path / "vectors.json").write_text('{"schema": "evictionary/vectors/0"}')
    assert "evictionary/vectors/0" in run("--check", tmp_path, code=2)
