"""What the site shows of the code is complete: every equation has a formula, a function and laws; every link leads somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from docs_build import entries as site
from docs_build import pages
from spec_tests.implementation import STEMS
from spec_tests.law import REQUIREMENTS

DOCS = site.ROOT / "docs"
METHOD_PAGES = sorted(set(site.PAGES.values()))
# The numbered equations of the papers, lines of algorithms among them; claims and tables have no formula.
EQUATIONS = [name for name in REQUIREMENTS if re.fullmatch(r"(EA|KD|LK|MK|KN|SL|TO|H2|SN|AD|PY)-\d+|GV-A?\d+", name)]


@pytest.mark.parametrize("identifier", EQUATIONS)
def test_every_equation_has_a_formula_a_function_and_laws(identifier: str) -> None:
    entry = site.entries()[identifier]
    assert entry.formula and entry.name and entry.reference and entry.laws


def test_every_formula_belongs_to_a_requirement() -> None:
    assert set(site.FORMULAS) <= set(REQUIREMENTS)


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_a_method_page_has_a_card_or_a_row_for_each_of_its_requirements(page: str) -> None:
    text = pages.filled(page, (DOCS / page).read_text(encoding="utf-8"))
    anchors = set(re.findall(r"\{ #([\w-]+) \}|<span id=\"([\w-]+)\">", text))
    wanted = {entry.anchor for entry in site.entries().values() if entry.page == page}
    assert {one or other for one, other in anchors} == wanted


def test_a_card_names_the_function_in_each_layer_its_laws_and_its_mistakes() -> None:
    text = pages.equations("methods/keydiff.md", "keydiff")
    card = text.partition("### KD-8 ")[2].partition("### ")[0]
    for wanted in (
        r"\mathrm{score}_i = -\cos(\mu, k_i)",
        "../reference/api/reference/keydiff.md#reference.keydiff.score",
        "../reference/api/optimized/keydiff.md#optimized.keydiff.score",
        "../reference/api/optimized/kernels/keydiff.md#optimized.kernels.keydiff.score",
        "../source/spec_tests/test_keydiff.md#test_rescaling_each_key_changes_nothing",
        "mean taken before normalising",
        "return -cosine(keys, anchor(keys))",
    ):
        assert wanted in card


def test_every_method_is_in_the_table_and_has_a_page() -> None:
    table = pages.method_table("index.md")
    methods = [stem for stem in STEMS if "METHOD = " in (site.ROOT / "reference" / f"{stem}.py").read_text(encoding="utf-8")]
    assert [stem for stem in methods if stem not in site.PAGES] == []
    assert table.count("\n") + 1 == 2 + len(methods) + 2  # a head of two lines, and two allocators


def test_a_source_page_holds_the_file_and_an_anchor_for_each_function() -> None:
    path = "spec_tests/test_knorm.py"
    text = pages.source_page(path)
    code = "\n".join(re.findall(r"^~~~~ .*?\n(.*?)^~~~~$", text, flags=re.DOTALL | re.MULTILINE))
    original = (site.ROOT / path).read_text(encoding="utf-8")
    assert re.sub(r"\n+", "\n", code) == re.sub(r"\n+", "\n", original)
    assert all(f"{{ #{name} .source }}" in text for name in site.definitions(path))


def test_ids_tests_and_files_become_links_and_code_and_formulas_stay() -> None:
    text = pages.linked(
        "tolerance.md",
        "See KD-8, `KD-8`, $KD-8$ and [KD-8](x.md).\n# KD-8\n```\nKD-8\n```\n"
        "`spec_tests/test_knorm.py::test_score_is_minus_the_norm` [a file](../spec_tests/law.py) UTF-8",
    )
    assert text == (
        "See [KD-8](methods/keydiff.md#kd-8), `KD-8`, $KD-8$ and [KD-8](x.md).\n# KD-8\n```\nKD-8\n```\n"
        "[`spec_tests/test_knorm.py::test_score_is_minus_the_norm`](source/spec_tests/test_knorm.md#test_score_is_minus_the_norm) "
        "[a file](source/spec_tests/law.md) UTF-8\n"
    )


def test_the_navigation_names_what_exists() -> None:
    def named(items: list[object]) -> list[str]:
        found = []
        for item in items:
            value = next(iter(item.values())) if isinstance(item, dict) else item
            if isinstance(item, dict) and "glob" in item:
                continue
            found += named(value) if isinstance(value, list) else [str(value)]
        return found

    generated = pages.api_pages()
    for target in named(yaml.safe_load((DOCS / ".nav.yml").read_text(encoding="utf-8"))["nav"]):
        assert (DOCS / target).exists() or any(page.startswith(f"{target}/") for page in generated), target


def test_nothing_of_the_theme_is_fetched_from_elsewhere() -> None:
    settings = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "repo_url" not in settings  # the theme would ask the host of the repository for its stars
    for path in re.findall(r"- (assets/\S+|stylesheets/\S+)", settings):
        assert (DOCS / path).exists(), path
    style = (DOCS / "assets/vendor/katex/katex.min.css").read_text(encoding="utf-8")
    assert all((DOCS / "assets/vendor/katex" / Path(font)).exists() for font in re.findall(r"url\((fonts/\S+?\.woff2)\)", style))


def test_measured_claims_appear_once_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.measured("methods/keydiff.md", "keydiff").startswith("`evictionary claims --papers keydiff`")
    paper = {"paper": "keydiff", "picture": "keydiff.png", "claims": [{"statement": "|a| < 1", "verdict": "not seen"}]}
    (tmp_path / "docs" / "claims").mkdir(parents=True)
    (tmp_path / "docs" / "claims" / "results.json").write_text(json.dumps({"date": "2026-01-01", "papers": [paper]}))
    text = pages.measured("methods/keydiff.md", "keydiff")
    assert "(../claims/keydiff.png)](../claims/keydiff.md)" in text
    assert r"| \|a\| &lt; 1 | not seen |" in text
    assert pages.measured("methods/lagkv.md", "lagkv").startswith("`evictionary claims --papers lagkv`")
