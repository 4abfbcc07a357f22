"""The vectors: every case follows the schema, catches what it says, and is enough for a checker that has
none of our code.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tools import PLAIN_KEYDIFF, ROOT, invoke, python, refused

from evictionary.spec_tests.judge.arithmetic import round_to
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import oracle
from evictionary.spec_tests.proof.planted import load_mutants
from evictionary.spec_tests.verdict import vectors

CHECKER = ROOT / "conformance" / "clients" / "check_vectors.py"

PART = (
    "score_is_minus_the_cosine_to_the_anchor",
    "mean_of_unit_keys",
    "that_are_not_finite_do_not_pass_in_silence",
)


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """The files of KNorm and of a part of KeyDiff's score."""
    laws = [
        law
        for law in vectors.laws_of(["knorm", "keydiff"])
        if law.requirement.id == "KN-1" or law.name.endswith(PART)
    ]
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


def run(*arguments: object, code: int = 0) -> str:
    done = invoke("vectors", *arguments)
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def validator(folder: Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((folder / "vectors.schema.json").read_text()))


def test_the_files_follow_the_schema_and_the_schema_is_strict(folder: Path) -> None:
    schema = validator(folder)
    schema.check_schema(schema.schema)
    for name in ("vectors.json", "KD-8.json", "KN-1.json"):
        schema.validate(json.loads((folder / name).read_text(), parse_constant=pytest.fail))
    broken = json.loads((folder / "KN-1.json").read_text())
    broken["cases"][0]["kind"] = "luck"
    assert not schema.is_valid(broken)


def cheap(
    function: Callable[..., Any], *args: Any, dtype: str, pick: int | None = None, **kwargs: Any
) -> SimpleNamespace:
    """In place of an allowance, which is dear: what one is made of has to be a number."""
    value = function(*args, **kwargs)
    assert vectors._is_numeric(value if pick is None else value[pick]), function
    return SimpleNamespace(largest=0.0, mean=0.0)


@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_method_has_vectors_that_follow_the_schema(
    measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A law may ask for a text or for nothing, as one of LagKV's does: neither can be a case."""
    monkeypatch.setattr(vectors, "load_mutants", dict)
    monkeypatch.setattr(vectors._Pool, "draw", lambda pool, law: pool._run(law, pool.narrow, 1))
    if not measured:
        monkeypatch.setattr(vectors, "allowance", cheap)
    laws = vectors.laws_of()
    assert {law.name.partition("::")[0] for law in laws} >= {
        "test_lagkv",
        "test_lagkv_stream",
        "test_momentkv",
        "test_selection",
    }
    index = vectors.write(vectors.generate(laws, lambda step: None), tmp_path)
    for path in tmp_path.glob("[A-Z]*.json"):
        validator(tmp_path).validate(json.loads(path.read_text(), parse_constant=pytest.fail))
    assert len(index["files"]) > 100 and "LK-12.json" in index["files"]


def test_the_cases_say_what_the_reference_says(content: dict[str, Any]) -> None:
    cases = [case for file in content.values() for case in file["cases"]]
    assert {case["kind"] for case in cases} >= {"mathematics", "refusal"}
    for case in cases:
        keys = vectors.read(case["arguments"]["keys"])
        assert np.array_equal(keys, keys.astype(np.float32), equal_nan=True)
        asked = functools.partial(oracle(case["function"]), keys)
        if case["kind"] == "refusal":
            refused(asked, "keys", ValueError)
        else:
            assert np.array_equal(vectors.read(case["expected"]), asked())
    sizes = {case["arguments"]["keys"]["shape"][-1] for case in cases}
    assert sizes & {64, 128} and min(sizes) <= 2


@np.errstate(all="ignore")
def test_a_case_catches_the_mistakes_that_it_names_and_no_others(content: dict[str, Any]) -> None:
    planted = [
        each for each in load_mutants().values() if each.of == "knorm.score" and each.killed_by == "KN-1"
    ]
    file = content["KN-1.json"]
    mutants = {each.name: each for each in planted if not each.above and each.array_library == "numpy"}
    assert file["not_caught"] == [] and set(file["mistakes"]) == set(mutants)
    for case in file["cases"]:
        expected, allowed = vectors.read(case["expected"]), case["expected"]["tolerance"]["float32"]
        for name, mutant in mutants.items():
            got = np.asarray(mutant.function(vectors.read(case["arguments"]["keys"])))
            same = got.shape == expected.shape and np.abs(got - expected).max() <= allowed["largest"]
            assert same != (name in case["catches"]), (case["id"], name)


def test_mistakes_that_show_in_the_same_cases_get_one_that_tells_them_apart() -> None:
    """Lengths other than 1 show the square and the wrong sign alike; of the length 1 the square is right."""
    two, twice, one = (
        vectors.Example("knorm.score", {"keys": keys}, {"keys": vectors.written(keys)})
        for keys in (np.full((1, 1, 3, 1), 2.0), np.full((1, 1, 2, 1), 3.0), np.ones((1, 1, 4, 1)))
    )
    square, sign = (load_mutants()[f"knorm.{name}"] for name in ("squared_norm", "longest_kept"))
    pool, chosen = vectors._Pool("float32", Domain()), {"KN-1": [two]}
    pool.examples["knorm.score"] = {example.key: example for example in (two, twice, one)}
    pool.tell_apart([square, sign], chosen)
    assert chosen == {"KN-1": [two, one]}
    assert [one.catches(each) for each in (square, sign)] == [False, True]


def test_half_precision_and_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input is exact in bfloat16 and has the channels
    of the domain; each case tells what bfloat16 allows.
    """
    monkeypatch.setattr(vectors, "load_mutants", dict)
    laws = [law for law in vectors.laws_of(["keydiff"]) if law.name.endswith(PART[0])]
    found = vectors.generate(laws, lambda step: None, "bfloat16", Domain(head_dim=(64,)))
    cases = [case for file in found.values() for case in file["cases"] if case["kind"] == "mathematics"]
    for case in cases:
        keys = vectors.read(case["arguments"]["keys"])
        assert keys.shape[-1] == 64 and np.array_equal(keys, round_to(keys, "bfloat16"))
        allowed = case["expected"]["tolerance"]
        assert (
            allowed["float64"]["largest"] < allowed["float32"]["largest"] < allowed["bfloat16"]["largest"] < 1
        )
    assert max(case["arguments"]["keys"]["shape"][-2] for case in cases) >= vectors.MANY_TOKENS


def test_the_checker_is_short() -> None:
    assert CHECKER.read_text().count("\n") <= 60


@pytest.mark.parametrize(
    ("edit", "dtype", "code", "said"),
    [
        (("", ""), ["float32"], 0, "cases hold"),
        (("", ""), ["float64"], 0, "cases hold"),
        (
            ("zip(*directions)", "zip(*keys)"),
            [],
            1,
            "these are the cases that catch: mean taken before normalising",
        ),
        (("raise ValueError", "return ValueError"), [], 1, "accepted what is to be refused"),
    ],
    ids=["right in float32", "right in float64", "wrong", "refuses nothing"],
)
def test_a_checker_without_our_code_tells_right_from_wrong(
    folder: Path, tmp_path: Path, edit: tuple[str, str], dtype: list[str], code: int, said: str
) -> None:
    (tmp_path / "mine.py").write_text(PLAIN_KEYDIFF.replace(*edit))
    assert (
        said
        in python(
            "-I", "-S", CHECKER, folder, "keydiff.score", tmp_path / "mine.py", *dtype, code=code
        ).stdout
    )


def test_the_command_writes_the_same_bytes_again_and_checks_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        assert "cases of 1 requirements" in run("--output", folder, "--method", "knorm")
    assert [path.read_bytes() for path in sorted(one.iterdir())] == [
        path.read_bytes() for path in sorted(two.iterdir())
    ]
    assert "every file is as vectors.json says" in run("--check", one)
    for name in ("KN-1.json", "KD-8.json"):
        (one / name).write_text("{}")
    (one / "vectors.schema.json").unlink()
    assert [
        each.partition(":")[0] for each in json.loads(run("--check", one, "--json", code=1))["problems"]
    ] == [
        "KN-1.json has been changed",
        "vectors.schema.json is missing",
        "KD-8.json is not listed in vectors.json",
    ]
    # a folder of vectors is written anew
    index = json.loads(run("--output", two, "--method", "knorm", "--json"))
    assert set(index["files"]) == {"KN-1.json", "vectors.schema.json"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "."], "wanted a new folder or one of vectors"),
        (["--output", "thesis.tex"], "wanted a new folder or one of vectors"),
        (
            ["--output", "new", "--method", "keydif"],
            "--method: got 'keydif' (did you mean keydiff?), wanted one of",
        ),
        (
            ["--output", "new", "--dtype", "float1"],
            "--dtype: got 'float1' (did you mean float16?), wanted one of float32",
        ),
        (["--output", "new", "--domain", "head=64"], "--domain: head: got a key that no domain has"),
        (["--check", "."], "wanted a folder with a vectors.json"),
        ([], "wanted one of the two"),
        (["--check", "old"], "evictionary/vectors/0"),
    ],
)
def test_what_cannot_be_used_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("thesis.tex").write_text("precious")
    Path("old").mkdir()
    Path("old/vectors.json").write_text('{"schema": "evictionary/vectors/0"}')
    assert said in run(*arguments, code=2)
