"""`evictionary verify`: right code passes, and each exploit of `conformance` is caught and named."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tools import failed, invoke, judge, sampled, says
from tools.grader import SOLUTION, bundled, text_of, written

from conformance.verifiers import BASES, BENCHMARKS, EXPLOITS, RESULTS, source_of
from evictionary.classroom import grading, verifier
from evictionary.classroom.child import Child
from evictionary.reference import kv_cache, momentkv as moments
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import Implementation
from evictionary.spec_tests.judge.law import Law
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.proof.planted import load_mutants

ROOT = Path(__file__).parents[2]
# Few and short inputs, for there are many exploits.
SETTINGS: dict[str, Any] = {"seed": 1, "examples": 3, "seconds": 4, "domain": Domain(max_length=129)}


def verified(source: str, method: str = "keydiff.score", **settings: Any) -> dict[str, Any]:
    return verifier.verify(source.encode(), method.split(".")[0], (method,), **SETTINGS | settings)


def judged(exploit: dict[str, Any]) -> dict[str, Any]:
    """What becomes of an exploit; one that is `long` is asked for long inputs too."""
    settings = {"domain": Domain()} if exploit.get("long") else {}
    calls = calls_at_first() if "AT_FIRST" in str(exploit) else 0
    return verified(source_of(exploit, calls), exploit.get("method", "keydiff.score"), **settings)


@cache
def calls_at_first() -> int:
    """How often the laws call a right function before the time is taken."""
    calls, until = list[str](), list[int]()
    ask = Child.call
    with patch.object(
        Child,
        "call",
        lambda child, name, *args, **named: calls.append(name) or ask(child, name, *args, **named),
    ):
        verified(SOLUTION, advance=lambda told: until.append(len(calls)) if told == "the time" else None)
    return until[0]


@pytest.mark.parametrize("name", sampled(EXPLOITS, every=11))
def test_an_exploit_is_caught_and_named(name: str) -> None:
    exploit = EXPLOITS[name]
    found = judged(exploit)
    said = " ".join(found[key] for key in ("verdict", "looks_like", "wrong", "misconception"))
    assert not found["correct"] and found["score"] < 1
    assert found["score"] == 0 or exploit["named"] not in ("missing", "tried", "remembered", "time")
    assert exploit["named"] in found["reasons"] and exploit.get("told", "") in said, said


@pytest.mark.parametrize(
    ("source", "functions"),
    [
        ("", ("keydiff.score",)),
        ("", ()),
        ("score = 3", ("keydiff.score",)),
        ("def scores(keys): ...", ("keydiff.score",)),
        (SOLUTION, ("keydiff.score", "keydiff.process_block")),
    ],
    ids=["an empty file", "of a method", "a number", "another name", "one of two"],
)
def test_what_a_file_lacks_holds_no_law_and_earns_nothing(source: str, functions: tuple[str, ...]) -> None:
    found = verifier.verify(source.encode(), "keydiff", functions, **SETTINGS)
    assert (found["correct"], found["score"], [*found["reasons"]]) == (False, 0, ["missing"])
    assert source == SOLUTION or found["laws"]["hold"] == found["laws"]["fail"] == []


@pytest.mark.parametrize("law", [verifier.IN_TURN, *verifier.SIZES_OF_MODELS], ids=lambda law: law.name)
def test_a_law_that_calls_nothing_is_not_asked(law: Law) -> None:
    """No rotation takes three channels, and code without a function takes nothing."""
    rotating = ModuleType("kv_cache")
    rotating.rotate = kv_cache.rotate  # type: ignore[attr-defined]
    narrow: Any = Implementation("narrow", {"kv_cache": rotating}, domain=Domain.parse(["head_dim=3"]))
    narrow.slow = True
    for nothing in (narrow, Implementation("nothing", {})):
        assert outcome(law, nothing, max_examples=2)[0] == "not asked"


@pytest.mark.parametrize("base", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_right_code_is_correct(base: str, tmp_path: Path) -> None:
    path = written(tmp_path, BASES[base], "keydiff.py")
    done = invoke("verify", path, "--method", "keydiff.score", "--examples", 2, "--seed", 3, "--json")
    found = json.loads(done.stdout)
    wanted = {"correct": True, "score": 1, "reasons": {}, "seed": 3}
    assert done.exit_code == 0 and found.items() >= wanted.items(), found
    assert found["seconds"]["keydiff.score"] > 0
    assert re.search(r"PASS: \d+ laws hold \(seed 3\)", done.stderr)


@pytest.mark.slow
def test_a_full_machine_accuses_nobody(tmp_path: Path) -> None:
    """Six programs beside it that compute: a process that
    waits for its turn has not remembered its answers.
    """
    with ExitStack() as beside:
        for _ in range(6):
            beside.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        test_right_code_is_correct("numpy", tmp_path)


@pytest.mark.parametrize(
    "answer",
    [
        (np.ones(3), moments.no_moments(np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2)))),
        Fraction(1, 3),
        "too short",
    ],
    ids=["a state", "a fraction", "a text"],
)
def test_states_fractions_and_texts_are_answers(answer: Any) -> None:
    """A step of MomentKV returns a state inside a tuple, and
    LagKV's ratio is a fraction: both were once no arrays.
    """
    assert grading._of_the_form("step", answer, answer, 8) is answer


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["lagkv", "cache", "gvote", "expected_attention", "selection"])
def test_the_reference_of_a_method_is_correct(stem: str) -> None:
    found = verifier.verify(bundled(stem).encode(), stem, **SETTINGS | {"seconds": 60})
    assert (found["correct"], found["score"]) == (True, 1), found["verdict"]


def test_a_mistake_is_named(tmp_path: Path) -> None:
    wrong = SOLUTION.replace("return unit(keys).mean(axis=-2)", "return keys.mean(axis=-2)")
    done = invoke("verify", written(tmp_path, wrong, "keydiff.py"), "--examples", 2)
    found = json.loads(done.stdout)
    assert (done.exit_code, 0 < found["score"] < 1, [*found["reasons"]]) == (1, True, ["laws"])
    counts = [int(each) for each in re.findall(r"\d+", found["reasons"]["laws"])]
    assert counts[0] + counts[2] == len(found["laws"]["fail"]) and counts[2] > 0
    assert "mean taken before normalising" in found["misconception"] and "FAIL: " in done.stderr
    assert found["input"].startswith("keys = ") and len(found["input"].splitlines()) <= 10


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.py"], "file: got nothing.py, wanted a file that can be read"),
        (["answer.py"], "file: got 'answer.py', wanted --method, or a file that has the name of a method"),
        (["answer.py", "--method", "keydif.score"], "such as keydiff.score (did you mean keydiff.score?)"),
        (["answer.py", "--method", "keydiff", "--domain", "colour=3"], "--domain"),
        (["answer.py", "--method", "keydiff", "--examples", 0], "--examples: got 0, wanted at least 1"),
    ],
)
def test_what_cannot_be_verified_is_a_usage_error(
    words: list[str], told: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, SOLUTION, "answer.py")
    assert told in failed("verify", *words, code=2)


def test_the_page_lists_every_exploit_and_what_two_benchmarks_say() -> None:
    page, said = text_of(ROOT / "docs" / "verify.md"), json.loads(text_of(RESULTS))
    taken = {name: ", ".join(each[0] for each in found) or "-" for name, found in said["exploits"].items()}
    rows = [
        f"| {name} | {each['does']} | {each['named']} | {taken.get(name, 'not asked')} |"
        for name, each in EXPLOITS.items()
    ]
    assert (
        re.findall(r"(?m)^\| .* \| (?:laws|no answer|missing|tried|remembered|time|later) \| .* \|$", page)
        == rows
    )
    for kind in ("mistakes", "right variants"):
        found = said[kind].values()
        counts = [sum(name in each for each in found) for name in BENCHMARKS]
        assert f" | {len(found)} | {counts[0]} | {counts[1]} | " in page
    sized = sum(bool(load_mutants()[name].above) for name in said["mistakes"])
    says(page, f"{len(rows)} exploits", f"{sized} of them begin at a size")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "def score(queries): ...",
            "got score(queries), wanted a function that can be called as score(queries",
        ),
        (
            "def score(queries, keys, *, bias): ...",
            "got score(queries, keys, *, bias), wanted a function that",
        ),
        (
            "def score(queries, keys): ...\ndef score(): ...",
            "got score(), wanted a function that can be called",
        ),
        ("def score(queries, keys, window_size=2 ** 5, eps=1e-6): ...", ""),
        ("def score(*arrays, **settings): ...", ""),
        ("def made(): ...\nscore = made", ""),
        ("import functools\n@functools.cache\ndef score(): ...", ""),
        ("def score(): ...\nif True:\n    def score(queries, keys): ...", ""),
        ("def score(:", ""),
    ],
)
def test_a_signature_that_does_not_fit_is_said_in_the_words_of_judge(source: str, said: str) -> None:
    """Before any law, and from the text alone."""
    misfit, found = verifier.called_otherwise_in(source.encode(), ["snapkv.score"])
    assert said in found and bool(said) == bool(found)
    assert misfit == ("snapkv.score" if said else "")


def test_verify_says_what_judge_says_of_a_signature(tmp_path: Path) -> None:
    (tmp_path / "snapkv.py").write_text("def score(queries):\n    return queries.sum(-1)\n")
    told = invoke("verify", tmp_path / "snapkv.py")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["functions"] == ["snapkv.score"]
    reason = json.loads(told.stdout)["reasons"]["no answer"]
    assert reason in " ".join(judge(tmp_path / "snapkv.py", code=2).stderr.split())
    assert json.loads(told.stdout)["laws"]["hold"] == []
