"""The pages point at what exists: every test that the errata name, every file that a page links to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

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


def test_every_erratum_is_shown_by_a_test() -> None:
    errata = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    for entry in re.split(r"^#{3,4} ", errata, flags=re.MULTILINE)[1:]:
        if "**Printed**" in entry:
            assert "**Holds**" in entry and "**Matters?**" in entry, entry.splitlines()[0]
            # A wrong reference is seen by reading; everything else has a test.
            assert re.search(r"spec_tests/[\w/]+\.py::\w+|\*\*Shown by\*\* reading", entry), entry.splitlines()[0]
