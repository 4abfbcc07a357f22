"""Every requirement has laws or a reason, and the page says so."""

import re
import tomllib

import pytest

from docs_build import pages
from evictionary.spec_tests.judge.law import REQUIREMENTS, SUITE, judging_files, load_laws
from evictionary.spec_tests.verdict import coverage


def test_every_requirement_has_a_law_or_a_reason() -> None:
    assert coverage.uncovered() == []


def test_the_page_has_a_row_for_each_requirement() -> None:
    assert re.findall(r"^\| ([A-Z]\S*) \|", pages.coverage(), flags=re.MULTILINE) == sorted(
        REQUIREMENTS, key=list(REQUIREMENTS).index
    )


def test_a_verdict_is_one_word_or_the_grades_of_the_errata_with_what_holds() -> None:
    for one in REQUIREMENTS.values():
        words = one.verdict.split(", ")
        grades = [word for word in coverage.GRADES if word in words]
        beside = [word for word in words if word not in grades]
        # A formula that was lost and a claim that needs a model can have errata, in the words around them.
        assert words == beside + grades and set(words) <= set(coverage.VERDICTS), one.id
        assert len(beside) == 1 if not grades else set(beside) <= {"restored", "measured"}, one.id
        assert one.mended or not grades, one.id


def test_a_mended_formula_differs_from_the_printed_one() -> None:
    mended = [one for one in REQUIREMENTS.values() if one.mended_tex]
    assert mended and all(one.tex and one.tex != one.mended_tex and one.mended for one in mended)


def test_the_page_judges_the_printed_statement_and_says_below_it_what_holds() -> None:
    (row,) = [line for line in pages.coverage().splitlines() if line.startswith("| KD-A1 |")]
    printed, _, holds = row.partition("<br>*what holds:* ")
    assert (
        "6nd + d + 18n + 12" in printed
        and holds.startswith("6nd + 2d + 18n + 12")
        and "| restored, imprecise |" in holds
    )
    assert "## KeyDiff, arXiv 2504.15364 (v1)\n" in pages.coverage()


PRINTED = tomllib.loads((SUITE / "papers" / "printed.toml").read_text(encoding="utf-8"))
NUMBER = r"(?:[A-Z]\.)?\d+"
NUMBERS = rf"{NUMBER}(?:(?:, | and | to ){NUMBER})*"


def spelled_out(numbers: str) -> set[str]:
    """The numbers of "1 and 6 to 8, A.1": 1, 6, 7, 8, A.1."""
    found = set()
    for part in re.split(r", | and ", numbers):
        first, _, last = part.partition(" to ")
        found |= set(map(str, range(int(first), int(last) + 1))) if last else {first}
    return found


def placed(stem: str) -> dict[str, set[str]]:
    """What the places of a paper's requirements name by a number: {"figure": {"1", "6"}}."""
    found: dict[str, set[str]] = {}
    for requirement in tomllib.loads(
        (SUITE / stem / "requirements.toml").read_text(encoding="utf-8")
    ).values():
        where = requirement["where"].lower() if isinstance(requirement, dict) else ""
        for kind, numbers in re.findall(
            r"(equation|listing|theorem|lemma|table|figure|algorithm|line)s? "
            rf"({NUMBERS.replace('A-Z', 'a-z')})",
            where,
        ):
            found.setdefault(kind, set()).update(each.upper() for each in spelled_out(numbers))
    return found


@pytest.mark.parametrize("stem", sorted(PRINTED))
def test_every_numbered_object_of_a_paper_has_a_requirement(stem: str) -> None:
    """Equations, algorithm lines, theorems, tables and figures: those of the list are those that a
    requirement has as its place.
    """
    # Places name figures and tables of the paper at hand alone, so the two are equal.
    assert placed(stem) == {kind: spelled_out(numbers) for kind, numbers in PRINTED[stem]["numbered"].items()}


@pytest.mark.parametrize("stem", sorted(PRINTED))
def test_every_figure_that_a_paper_claims_has_a_requirement_of_that_paper(stem: str) -> None:
    own = tomllib.loads((SUITE / stem / "requirements.toml").read_text(encoding="utf-8"))
    assert {identifier for identifier in PRINTED[stem]["claims"].values() if identifier not in own} == set()
    # And no claim that is judged is missing from the list: claims have ids without an equation.
    judged = {name for name in own if re.fullmatch(r"[A-Z]{2}-(S\d+|C\d+S?|M|MI|O|H|V|P2?|\d+[A-Z])", name)}
    assert judged - {name for name in judged if stem == "keydiff" and name.startswith("KD-C")} <= set(
        PRINTED[stem]["claims"].values()
    )


def test_a_law_about_a_paper_alone_stands_in_a_file_of_its_own() -> None:
    judging = {path.relative_to(SUITE).as_posix() for path in judging_files()}
    assert [law.name for law in load_laws().values() if (law.path in judging) != bool(law.functions)] == []


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
        ("MK-36S, MK-MI: x", ["MK-36S", "MK-MI"]),
        ("H2-1..3, KD-7: x", ["H2-1", "H2-2", "H2-3", "KD-7"]),
        ("no id here: x", []),
        (None, []),
    ],
)
def test_ids_are_read_from_the_opening_of_a_docstring(docstring: str | None, ids: list[str]) -> None:
    assert coverage.ids_of(docstring) == ids
