"""The wild page: its sources are pinned, each fail is explained, and a source that cannot be had costs
itself alone. No network.
"""

import ast
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tools import refused, run, saved

from benchmarks.cpu import KVPRESS
from conformance import wild
from evictionary.spec_tests.judge import law
from evictionary.spec_tests.proof.planted import load_mutants

SOURCES = wild.sources()
METHODS = [(source, method, said) for source in SOURCES for method, said in source.methods.items()]
ADAPTERS = wild.HERE / "adapters"
STORED = json.loads(wild.RESULTS.read_text(encoding="utf-8"))
HELPERS = {"selection", "clusters", "caches", "given"}
"""Files beside the adapters that are no method: a top-k of ours, and what several adapters share."""

RIGHT = "def norms(keys):\n    return torch.norm(keys, dim=-1)\n"
WRONG = "def norms(keys):\n    return (keys * keys).sum(dim=-1)\n"
ADAPTER = """
from conformance.borrowed import take

norms = take("{name}", "norms.py", "norms").norms


def score(keys):
    return -norms(keys)
"""


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_source_is_pinned_and_has_its_adapters(source: wild.Source) -> None:
    assert source.url.startswith("https://github.com/") and source.licence and source.title
    assert (
        re.fullmatch("[0-9a-f]{40}", source.commit)
        if source.commit
        else source.package == f"kvpress=={KVPRESS}"
    )
    assert source.files and all(
        re.fullmatch("[0-9a-f]{64}", digest) or (source.commit and not digest)
        for digest in source.files.values()
    )
    written = {path.stem for path in (ADAPTERS / source.name).glob("*.py")} - HELPERS
    assert {stem.removesuffix("_variants") for stem in written} == set(source.methods)


def test_every_method_is_judged_and_every_fail_is_explained() -> None:
    assert list(STORED["rows"]) == [f"{source.name}/{method}" for source, method, _ in METHODS]
    assert wild.unchecked(SOURCES, STORED["rows"]) == []
    for source, method, said in METHODS:
        found = STORED["rows"][f"{source.name}/{method}"]
        assert "not reached" in found or set(said.reasons) == {
            name for name, entry in found.get("requirements", {}).items() if entry["verdict"] == "fail"
        }, f"{source.name}/{method}"
        for why in said.reasons.values():
            assert re.search(r"section \d|their settings|released code", why), (
                "it names no place of the paper"
            )
            assert re.search(r"\w+\.(py|cpp)", why), "it names no file of the source"


def test_every_fail_is_mended_or_has_an_issue_of_two_lines_of_code() -> None:
    for source, _, said in METHODS:
        assert set(said.issues) == set(said.fails) - set(said.mended) and set(said.mended) <= set(said.fails)
        assert all(commit in said.fails[name] for name, commit in said.mended.items())
        for text in said.issues.values():
            (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
            assert len(ast.parse(code).body) == 2
            assert (source.commit[:7] or source.package.replace("==", " ")) in text


def test_the_report_is_of_the_law_that_shows_the_reason() -> None:
    """AdaKV's note once spoke of rounding, beside a report of the least number of tokens."""
    for source, method, said in METHODS:
        found = STORED["rows"][f"{source.name}/{method}"]["requirements"]
        assert all(law in found[name]["failing"] for name, law in said.shows.items())
    laws = [
        {"law": f"file::{name}", "kind": "mathematics", "outcome": "fail", "message": f"  expected  {told}"}
        for name, told in (("test_short", "1"), ("test_long", "a long one"))
    ]
    entry = {"laws": laws, "kinds": {"mathematics": "fail"}, "verdict": "fail", "reason": ""}
    reports = [wild._shortened(entry, name)["report"] for name in ("", "test_long")]
    assert reports == ["expected  1", "expected  a long one"]


def test_a_row_judged_by_other_laws_than_todays_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    page, said = wild.PAGE.read_text(encoding="utf-8"), ", by earlier laws |"
    assert page == wild.page(SOURCES, STORED)
    stale = [
        name
        for name, row in STORED["rows"].items()
        if row["laws"] != wild.laws_version(name.partition("/")[2])
    ]
    assert wild.stale(STORED["rows"]) == stale
    assert page.count(said) == len(stale), f"`python -m conformance.wild` judges them anew: {stale}"
    days = [row["date"] for row in STORED["rows"].values()]
    first, second = page.split("\n\n")[1].split(". ")[0], f"The laws of {len(stale)} rows"
    assert min(days) in first and max(days) in first
    assert (second in page) == bool(stale)
    monkeypatch.setattr(wild, "laws_version", lambda method: "another")
    every = wild.page(SOURCES, STORED)
    assert every.count(said) == len(STORED["rows"]) and f"The laws of {len(STORED['rows'])} rows" in every


def test_the_files_that_were_judged_are_a_click_away() -> None:
    """Those of a release are in its package: the notes give their lines."""
    page = wild.PAGE.read_text(encoding="utf-8")
    assert f"version `kvpress=={KVPRESS}` of the package index" in page
    assert "[open an issue](https://github.com/evictionary/evictionary/issues/new)" in page
    for source in SOURCES:
        for file in source.files:
            assert not source.commit or f"[`{file}`]({source.url}/blob/{source.commit}/{file})" in page
        for said in source.methods.values():
            assert source.commit or all(re.search(r"\.py, lines? \d+", why) for why in said.reasons.values())


def test_code_that_is_only_related_to_a_method_has_its_own_name() -> None:
    page = wild.PAGE.read_text(encoding="utf-8")
    for source, method, said in METHODS:
        row = f"| [{source.title.partition(',')[0]}](#{source.name}) |"
        assert any(
            line.startswith(row) and f"| {said.named or method} |" in line for line in page.splitlines()
        )
        # It says "related to" in the code, so no row calls it the method.
        assert "related to" not in said.note or said.named


def test_the_days_of_the_rows_are_said() -> None:
    assert wild.when({"a/x": {"date": "2026-01-02"}}) == "on 2026-01-02"
    two = {"a/x": {"date": "2026-01-02"}, "a/y": {"date": "2026-01-01"}}
    assert wild.when(two) == "from 2026-01-01 to 2026-01-02"


def test_the_digest_is_of_code_and_not_of_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "SUITE", tmp_path / "spec_tests")

    def digest(text: str) -> str:
        saved(tmp_path / "reference" / "knorm.py", text)
        law.laws_version.cache_clear()
        return law.laws_version("knorm")

    assert (
        digest("def score(keys):\n    'What it is.'\n    return -keys\n")
        == digest("def score(keys):\n    'Other words.'\n    return -keys  # why\n")
        != digest("def score(keys):\n    return keys\n")
    )
    law.laws_version.cache_clear()


def test_the_readme_counts_methods_and_code_bases() -> None:
    told = f"{len(STORED['rows'])} implementations in {len(SOURCES)} public code bases"
    for page in (wild.ROOT / "README.md", wild.PAGE):
        assert told in " ".join(page.read_text(encoding="utf-8").split())


def test_the_ledger_names_laws_and_mistakes_that_exist() -> None:
    ledger = (wild.ROOT / "docs" / "bugs.md").read_text(encoding="utf-8")
    caught = re.findall(r"^\| \[[^|]*\|[^|]*\| ([^|]*) \|([^|]*)\|$", ledger, flags=re.MULTILINE)
    assert caught
    for requirements, mistakes in caught:
        assert set(requirements.split(", ")) <= set(law.REQUIREMENTS)
        for name in re.findall(r"`(\w+\.\w+)`", mistakes):
            assert load_mutants()[name].killed_by in requirements.split(", "), name


def repository(folder: Path, text: str) -> str:
    """A git repository with one file; returns its commit."""
    saved(folder / "norms.py", text)
    for asked in ("init --quiet", "add .", "commit --quiet -m norms", "rev-parse HEAD"):
        done = run("git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@x", *asked.split())
    return done.stdout.strip()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, wild.Source]:
    """Two sources in repositories of their own, one right and one wrong, with their adapters."""
    monkeypatch.setattr(wild, "FETCHED", tmp_path / "fetched")
    found = {}
    for name, text in (("right", RIGHT), ("wrong", WRONG)):
        found[name] = wild.Source(
            name,
            name,
            (tmp_path / name).as_uri(),
            "MIT",
            {"norms.py": hashlib.sha256(text.encode()).hexdigest()},
            {"knorm": wild.Method("`norms`")},
            repository(tmp_path / name, text),
        )
        saved(tmp_path / "adapters" / name / "knorm.py", ADAPTER.format(name=name))
    return found


@pytest.mark.slow
def test_a_source_is_brought_by_its_commit_and_judged(made: dict[str, wild.Source], tmp_path: Path) -> None:
    told: list[str] = []
    rows = wild.survey(
        list(made.values()), {}, profile="quick", adapters=tmp_path / "adapters", say=told.append
    )
    right, wrong = (rows[f"{name}/knorm"]["requirements"]["KN-1"] for name in ("right", "wrong"))
    assert (right["verdict"], wrong["verdict"]) == ("pass", "fail")
    assert "test_a_three_four_key_scores_minus_five" in wrong["failing"]
    assert "smallest input" in wrong["report"] and str(tmp_path) not in wrong["report"]
    assert wild.unchecked(list(made.values()), rows) == ["wrong/knorm: KN-1"]
    assert "right/knorm: pass KN-1" in told and "wrong/knorm: fail KN-1" in told
    page = wild.page(
        list(made.values()), {"rows": {name: row | {"date": "2026-01-01"} for name, row in rows.items()}}
    )
    assert re.search(r"KN-1 \(\d+ laws\)", page) and "smallest input" not in page
    assert "KN-1 fails, and nobody has looked at it yet." in page


def test_what_is_not_to_be_had_costs_itself_alone(made: dict[str, wild.Source], tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "other": {"files": {"norms.py": "0" * 64}},
        "nowhere": {"url": (tmp_path / "nowhere").as_uri()},
        "commit": {"commit": "0" * 40},
        "folder": {"files": {"missing.py": "0" * 64}},
    }
    told = {
        "other": r"norms.py: got SHA-256 \w{64}, wanted 0{64}: .*",
        "nowhere": "git fetch ended with 128: fatal: (?s:.*)",
        "commit": "git fetch ended with 128: fatal: (?s:.*)",
        "folder": re.escape(f"missing.py: no such file in {tmp_path / 'right'}"),
    }
    rows = wild.survey(
        [replace(made["right"], name=name, **changed) for name, changed in changes.items()],
        dict.fromkeys(("other", "folder"), tmp_path / "right"),
        profile="quick",
        adapters=tmp_path / "adapters",
    )
    for name, pattern in told.items():
        assert re.fullmatch(pattern, rows[f"{name}/knorm"]["not reached"])


def test_a_judge_that_judges_nothing_says_so(made: dict[str, wild.Source], tmp_path: Path) -> None:
    (tmp_path / "adapters" / "right" / "knorm.py").write_text(
        "raise ImportError('no such thing')\n", encoding="utf-8"
    )
    row = wild.survey([made["right"]], {}, profile="quick", adapters=tmp_path / "adapters")["right/knorm"]
    assert "the judge ended with 2" in row["not reached"] and "no such thing" in row["not reached"]


@pytest.mark.parametrize(
    ("option", "text"),
    [("only", "nothing"), ("from", "snapkv"), ("from", "nothing=/"), ("from", "snapkv=/no/folder")],
)
def test_bad_arguments_are_refused(option: str, text: str) -> None:
    refused(
        lambda: wild.main(**{{"from": "folders"}.get(option, option): [text]}),
        f"--{option}: got '{text}'",
        typer.BadParameter,
    )
