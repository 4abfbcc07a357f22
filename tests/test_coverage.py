"""Every requirement has laws or a reason, and the page says so."""

from __future__ import annotations

import re

import pytest

from evictionary.spec_tests.harness import coverage
from evictionary.spec_tests.harness.law import REQUIREMENTS, load_laws


def test_every_requirement_has_a_law_or_a_reason() -> None:
    assert coverage.uncovered() == []


def test_the_page_has_a_row_for_each_requirement() -> None:
    rows = re.findall(r"^\| ([A-Z]\S*) \|", coverage.page(), flags=re.MULTILINE)
    assert rows == sorted(REQUIREMENTS, key=list(REQUIREMENTS).index)


def test_a_false_statement_says_what_holds_and_a_mended_formula_differs_from_the_printed_one() -> None:
    assert {one.verdict for one in REQUIREMENTS.values()} <= {"definition", "true", "false", "restored", "measured"}
    assert [one.id for one in REQUIREMENTS.values() if one.verdict == "false" and not one.mended] == []
    mended = [one for one in REQUIREMENTS.values() if one.mended_tex]
    assert mended and all(one.tex and one.tex != one.mended_tex and one.mended for one in mended)


def test_the_page_judges_the_printed_statement_and_says_below_it_what_holds() -> None:
    (row,) = [line for line in coverage.page().splitlines() if line.startswith("| KD-A1 |")]
    printed, _, holds = row.partition("<br>*what holds:* ")
    assert "6nd + d + 18n + 12" in printed and holds.startswith("6nd + 2d + 18n + 12") and "| false |" in holds


def test_a_law_about_a_paper_alone_stands_in_the_folder_of_the_papers() -> None:
    assert [law.name for law in load_laws().values() if law.path.startswith("papers/") == bool(law.functions)] == []


@pytest.mark.parametrize(
    ("docstring", "ids"),
    [
        ("KD-7: S", ["KD-7"]),
        ("LK-7..11: score", ["LK-7", "LK-8", "LK-9", "LK-10", "LK-11"]),
        ("EA-1, EA-2: x", ["EA-1", "EA-2"]),
        ("GV-A1, GV-A9..11: x", ["GV-A1", "GV-A9", "GV-A10", "GV-A11"]),
        ("GV-A9..A11: x", ["GV-A9", "GV-A10", "GV-A11"]),
        ("LK-R: x", ["LK-R"]),
        ("H2-1: x", ["H2-1"]),
        ("H2-1..3, KD-7: x", ["H2-1", "H2-2", "H2-3", "KD-7"]),
        ("no id here: x", []),
        (None, []),
    ],
)
def test_ids_are_read_from_the_opening_of_a_docstring(docstring: str | None, ids: list[str]) -> None:
    assert coverage.ids_of(docstring) == ids
