"""The pages point at what exists: every test that the errata name, every file that a page links to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from docs_build import contract, pages
from evictionary.spec_tests.harness.coverage import ids_of
from evictionary.spec_tests.harness.law import REQUIREMENTS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# Pages that are made when the site is built.
MADE = {ROOT / "docs" / "coverage.md", *(ROOT / "docs" / "lessons" / path.name for path in ROOT.glob("tutorials/*.md"))}


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:spec_)?tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    assert [(file, test) for file, test in named if not (ROOT / file).exists() or test not in names_in(ROOT / file)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )  # kernel[grid](...) is no link
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    assert [link for link in links if not (target := (page.parent / link).resolve()).exists() and target not in MADE] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_quotes_exists(page: Path) -> None:
    """A formatter once took the mark of a quotation for Python and put spaces into it, and the page showed the mark."""
    marks = re.findall(r"^ *--8 *<.*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    quoted = [re.fullmatch(r' *--8<-- "(\S+)"', mark) for mark in marks]
    assert [mark for mark, match in zip(marks, quoted, strict=True) if not match or not (ROOT / match[1]).is_file()] == []


def test_the_contract_holds_the_signatures_of_today() -> None:
    """In the file itself, for who reads it in a clone; `python -m docs_build.contract` writes them."""
    text = contract.PAGE.read_text(encoding="utf-8")
    assert "def score(keys: np.ndarray) -> np.ndarray:" in text
    assert text == contract.written(text)
    assert "<!-- end -->" not in pages.filled("reference/contract.md", text)


GRADES = {"wrong", "imprecise", "typo", "not reproducible from the text"}


def errata() -> dict[str, str]:
    """The title of each entry of the errata to its text."""
    text = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    sections = (section.partition("\n") for section in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:])
    return {title: body for title, _, body in sections if re.match(r"[A-Z]{2}-", title)}


def test_every_erratum_has_the_same_five_parts_a_grade_and_a_test() -> None:
    parts = ["Place", "Kindest reading", "Computation", "Test", "Grade"]
    for title, body in errata().items():
        assert re.findall(r"^- \*\*(.+?)\*\*", body, flags=re.MULTILINE) == parts, title
        # A wrong reference is seen by reading; everything else has a test.
        assert re.search(r"^- \*\*Test\*\* (`spec_tests/[\w/]+\.py::\w+`|reading: )", body, flags=re.MULTILINE), title


def test_the_tables_of_the_errata_list_every_entry_with_its_grade() -> None:
    text = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \|.*\| \*(.+?)\* \|", text, flags=re.MULTILINE)
    graded = [
        (title.partition(": ")[0], slugify(title, "-"), re.findall(r"^- \*\*Grade\*\* \*(.+?)\*", body, flags=re.MULTILINE)[0])
        for title, body in errata().items()
    ]
    assert rows == graded
    assert {grade for *_, grade in rows} == GRADES


def test_what_is_graded_wrong_is_a_statement_that_the_requirements_call_false() -> None:
    for title, body in errata().items():
        if "- **Grade** *wrong*" in body:
            assert "false" in {REQUIREMENTS[identifier].verdict for identifier in ids_of(title)}, title


def test_ten_notes_for_the_authors_name_entries_of_the_errata() -> None:
    upstream = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
    notes = re.split(r"^### ", upstream, flags=re.MULTILINE)[1:]
    anchors = [re.findall(r"\(errata\.md#(.+?)\)", note) for note in notes]
    assert len(notes) == 10 and all(len(found) == 1 for found in anchors)
    assert {found for (found,) in anchors} <= {slugify(title, "-") for title in errata()}
    assert all(re.search(r"`spec_tests/papers/\w+\.py::\w+`", note) for note in notes)
