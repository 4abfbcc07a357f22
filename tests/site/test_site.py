"""What the site shows of the code is complete: every equation has a formula, a function and laws; every
link leads somewhere.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import saved, says

from docs_build import charts, entries as site, figures, finished, judging, methods, pages, written
from docs_build.running import said
from evictionary.methods import catalogue
from evictionary.spec_tests.judge.implementation import STEMS
from evictionary.spec_tests.judge.law import REQUIREMENTS
from evictionary.spec_tests.proof import alarms, power
from evictionary.spec_tests.proof.planted import load_controls, load_mutants

DOCS = site.ROOT / "docs"
METHOD_PAGES = sorted(set(site.PAGES.values()))
# The numbered equations of the papers, lines of algorithms among them; claims and tables have no formula.
EQUATIONS = [name for name in REQUIREMENTS if re.fullmatch(r"[A-Z][A-Z\d]-\d+|GV-A\d+", name)]


@pytest.mark.parametrize("identifier", EQUATIONS)
def test_every_equation_has_a_formula_a_function_and_laws(identifier: str) -> None:
    entry = site.entries()[identifier]
    assert entry.requirement.tex and entry.name and entry.reference and entry.laws


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_a_method_page_has_a_card_or_a_row_for_each_of_its_requirements(page: str) -> None:
    text = pages.filled(page, (DOCS / page).read_text(encoding="utf-8"))
    anchors = set(re.findall(r"\{ #([\w-]+) \}|<span id=\"([\w-]+)\">", text))
    assert {one or other for one, other in anchors} == {
        entry.anchor for entry in site.entries().values() if entry.page == page
    }


@pytest.mark.parametrize(
    "page", sorted(path for path in DOCS.rglob("*.md") if "<!-- " in path.read_text(encoding="utf-8"))
)
def test_code_in_a_sentence_is_shown_as_code(page: Path) -> None:
    """A reason why there is no law once showed its backticks, and a row joined the same words twice."""
    uri = page.relative_to(DOCS).as_posix()
    shown = pages.filled(uri, page.read_text(encoding="utf-8"))
    assert re.findall(r".{20}\\`.{20}", shown) == []
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    assert [row for row in rows if re.search(r"\b([a-z]{3,}(?: [a-z]+)*) and \1\b", row)] == []
    assert pages.escaped("a_b `c_d` e*") == r"a\_b `c_d` e\*"


def card_of(identifier: str) -> str:
    cards = pages.equations(site.entries()[identifier].page, site.stem_of()[identifier])
    return cards.partition(f"### {identifier} ")[2].partition("### ")[0]


def test_a_card_names_the_function_in_each_layer_its_laws_and_its_mistakes() -> None:
    """And says nothing of a mended formula where nothing was mended."""
    says(
        card_of("KD-8"),
        r"\mathrm{score}_i = -\cos(\mu, k_i)",
        "../reference/api/reference/keydiff.md#evictionary.reference.keydiff.score",
        "../reference/api/optimized/keydiff.md#evictionary.optimized.keydiff.score",
        "../reference/api/optimized/kernels/keydiff.md#evictionary.optimized.kernels.keydiff.score",
        f"{pages.REPOSITORY}/blob/main/spec_tests/keydiff/test_keydiff.py#L",
        "mean taken before normalising",
        "return -cosine(keys, anchor(keys))",
        never=("As printed", "As restored", "What holds"),
    )


@pytest.mark.parametrize(
    ("identifier", "printed", "other"),
    [
        ("KD-A1", "6nd + d + 18n", "6nd + 2d + 18n"),
        ("EA-1", r"\mathbb R^{h \times d}", r"\mathbb R^{d \times h}"),
        ("EA-9", r"\lVert W_o v_i \rVert", r"\lVert v_i \rVert"),
        ("KD-C1", r"\cos(k_*, q) \ge \frac a M - 1", r"k_*^\top q \ge a - M"),
        ("MK-28", r"O(\sigma^4)", r"R_{\mathrm{den}} \hat f_E"),
    ],
)
def test_a_card_keeps_the_form_of_the_paper_beside_the_other(
    identifier: str, printed: str, other: str
) -> None:
    restored = identifier in ("KD-A1", "KD-C1")
    left, _, right = card_of(identifier).partition("As used here:" if identifier == "EA-9" else "What holds:")
    assert printed in left.partition("As restored:" if restored else "As printed:")[2] and other not in left
    assert other in right.partition("</div>")[0]


def test_a_card_says_where_code_is_quoted_that_another_card_shows() -> None:
    says(card_of("LK-1"), "quoted at [LK-4](#lk-4)", never=["def project("])
    says(card_of("LK-4"), "def project(", never=["quoted at [LK-4]"])


@pytest.mark.parametrize("stem", pages.PAPERS)
def test_the_pages_of_a_paper_have_every_part_and_every_anchor_that_one_page_once_had(stem: str) -> None:
    short, long = (
        (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8") for name in (stem, f"{stem}_equations")
    )
    behind = (
        "Notation",
        "Find an equation",
        "What the laws say",
        "The claims, measured",
        "Decisions and errata",
        "A kernel to read",
    )
    assert re.findall(r"^## (.+)$", short, re.MULTILINE) == [*methods.SECTIONS, "All equations"]
    assert re.findall(r"^## (.+)$", long, re.MULTILINE) == [*behind, "The equations"]
    marked = {
        short: ("kept", "retrieved", "run", "ids"),
        long: ("overview", "measured", "errata", "equations"),
    }
    links = {
        short: ("](https://arxiv.org/abs/", "](../lessons/", "](../figures/"),
        long: (f"](../decisions.md#{stem.replace('_', '-')}",),
    }
    for text, markers in marked.items():
        says(text, *(f"<!-- {marker}: {stem} -->" for marker in markers), *links[text])
    anchors = {
        entry.anchor for entry in site.entries().values() if entry.page == f"methods/{stem}_equations.md"
    }
    anchors |= {
        title.lower().replace(" ", "-") for title in (*behind, "The equations") if "claims" not in title
    }
    assert set(re.findall(r"\{ #([\w-]+) \}", pages.filled(f"methods/{stem}.md", short))) == anchors


def test_the_method_in_short_shows_formulas_that_lead_to_their_cards() -> None:
    text = pages.filled("methods/keydiff.md", "<!-- formulas: KD-8, KD-7 -->")
    wanted = {
        "$$": 4,
        r"\mathrm{score}_i = -\cos(\mu, k_i)": 1,
        "[KD-8 · The score](keydiff_equations.md#kd-8){ .from }": 1,
        "(keydiff_equations.md#kd-7)": 1,
    }
    assert {part: text.count(part) for part in wanted} == wanted


def test_the_page_of_four_laws_quotes_each_law_and_lists_what_it_kills() -> None:
    page = (DOCS / "four_laws.md").read_text(encoding="utf-8")
    text = pages.filled("four_laws.md", page)
    for entry in (site.entries()[identifier] for identifier in re.findall(r"<!-- kills: (\S+) -->", page)):
        says(text, *(f"def {site.law_definition(law).name}(" for law in entry.laws), never=["<!--"])
        for mutant in entry.mutants:
            says(text, f"`{mutant.of}`: ", pages.escaped(mutant.misconception))


def test_what_a_small_model_finds_is_in_a_row_for_each_method_and_composition() -> None:
    table = pages.filled("methods/keydiff.md", "<!-- retrieved: keydiff -->")
    assert [line.split(" | ")[0] for line in re.findall(r"^\| .+ \| \d.+$", table, re.MULTILINE)] == [
        "| keydiff",
        "| keydiff+moments",
        r"| keydiff+ada\_kv",
        "| keydiff+cam",
        "| random",
        r"| random\_protected",
    ]


def test_a_marker_in_a_tab_is_replaced_by_indented_lines() -> None:
    text = pages.filled("index.md", '=== "A law"\n\n    <!-- code: reference/keydiff.py::anchor -->\n')
    says(text, "\n    ~~~~ python\n    @contract\n    def anchor(", never=["<!--"])
    assert all(line.startswith("    ") for line in text.splitlines()[2:] if line)


REPORTS = (DOCS / "judging.md").read_text(encoding="utf-8")


@pytest.mark.whole
@pytest.mark.parametrize("name", ["my_homework", "my_kernels"])
def test_a_report_on_the_page_is_what_its_program_is_told(name: str, tmp_path: Path) -> None:
    shown = re.search(
        rf"^KD-8 does not hold for keydiff\.score of {name} .*?^  this law alone .*?$",
        REPORTS,
        re.DOTALL | re.MULTILINE,
    )
    assert shown
    program = re.findall(r"^```python\n(.*?)^```$", REPORTS[: shown.start()], re.DOTALL | re.MULTILINE)[-1]
    saved(tmp_path / name / "keydiff.py", program)
    law = "spec_tests/keydiff/test_keydiff.py::test_score_is_minus_the_cosine_to_the_anchor"
    options = "--profile student -p no:cacheprovider --color=no"
    printed = said(f"pytest {law} --impl {tmp_path / name} {options}", site.ROOT).replace(f"{tmp_path}/", "")
    assert shown[0] in printed, printed


@pytest.mark.slow
def test_the_page_on_judging_is_what_its_programs_are_told_today() -> None:
    """`python -m docs_build.judging` writes the page."""
    assert judging.written(REPORTS) == REPORTS


def test_every_method_is_in_the_gallery_and_in_the_comparison_and_has_a_page() -> None:
    known = [
        stem
        for stem in STEMS
        if "METHOD = " in (site.ROOT / "reference" / f"{stem}.py").read_text(encoding="utf-8")
    ]
    assert [stem for stem in known if stem not in site.PAGES] == []
    cards, table = (
        pages.filled("methods/index.md", f"<!-- {marker} -->") for marker in ("gallery", "compared")
    )
    assert set(catalogue.evicting()) <= set(figures.strips(figures.stored()))
    says(cards, *(f"(../images/kept_{stem}.png)" for stem in catalogue.evicting()))
    kvzip = "keys, replay\\_keys, replay\\_queries | yes |  | with its queries |  | 145.1% |"
    says(table, *(f"| [`{stem}`](" for stem in known), f"| [`kvzip`](kvzip.md) | {kvzip}")


def test_the_kill_matrix_has_every_planted_mistake_and_other_pages_its_number() -> None:
    matrix = pages.filled("kill_matrix.md", (DOCS / "kill_matrix.md").read_text(encoding="utf-8"))
    rows = len(re.findall(r"^ *\| `", matrix.partition("## Every mistake")[2], flags=re.MULTILINE))
    assert f"{rows} killed, 0 survived, 0 crashed, 0 timed out, of {rows}." in matrix
    missing = [
        each
        for each in load_mutants().values()
        if f"| `{each.of}` | " + each.misconception.replace("|", "\\|") not in matrix
    ]
    # a method that is being added has not been measured
    assert len({each.of.partition(".")[0] for each in missing}) <= 1, missing
    for page in sorted(DOCS.rglob("*.md")):
        told = re.findall(r"([\d,]{3,}) planted mistakes", page.read_text(encoding="utf-8"))
        assert all(int(number.replace(",", "")) == rows for number in told), page.name


def test_the_kill_matrix_says_how_much_of_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page once spoke of "the last measurement", of 3 right variants of 286."""

    def asked() -> str:
        return pages.filled("kill_matrix.md", "<!-- killing: asked -->").replace(",", "")

    known, every = alarms.measured()["variants"], f"of {len(load_controls())} right variants were judged"
    judged = [
        len([name for name in found["mutants"] if name in load_mutants()]) for found in power.cells().values()
    ]
    span = f"{min(judged)} to {max(judged)}" if len(set(judged)) > 1 else f"{judged[0]}"
    says(asked(), f"{len(known)} {every}", f" {span} of {len(load_mutants())}.")
    newer = f"{len(alarms.earlier())} parts have laws or right variants that are newer."
    assert (newer in asked()) == bool(alarms.earlier())
    loud = {name: known[name] | {"seeds": 20, "alarms": [["law", "said"]]} for name in list(known)[:2]}
    monkeypatch.setattr(alarms, "measured", lambda: {"variants": loud, "mended": []})
    monkeypatch.setattr(alarms, "earlier", list)
    says(asked(), f"2 {every} with 20 seeds each", "They raised 2 alarms. 0 alarms from before")


LAW = site.definitions("spec_tests/knorm/test_knorm.py")["test_score_is_minus_the_norm"]


@pytest.mark.parametrize(
    ("page", "text", "linked"),
    [
        (
            "methods/a.md",
            "See KD-8, `KD-8`, $KD-8$, [KD-8](x.md).\n# KD-8\n```\nKD-8\n```\n",
            "See [KD-8](keydiff_equations.md#kd-8), `KD-8`, $KD-8$, [KD-8](x.md).\n# KD-8\n```\nKD-8\n```\n",
        ),
        (
            "tolerance.md",
            "`spec_tests/knorm/test_knorm.py::test_score_is_minus_the_norm` KD-8\n",
            "[`spec_tests/knorm/test_knorm.py::test_score_is_minus_the_norm`]"
            f"({pages.REPOSITORY}/blob/main/spec_tests/knorm/test_knorm.py#L{LAW.first}-L{LAW.last}) "
            "[KD-8](methods/keydiff_equations.md#kd-8)\n",
        ),
        (
            "tolerance.md",
            "[a file](../README.md) [a page](../docs/a.md) UTF-8",
            f"[a file]({pages.REPOSITORY}/blob/main/README.md) [a page](../docs/a.md) UTF-8\n",
        ),
        (  # a link whose text is broken over two lines stays one link
            "lessons/a.md",
            "[the entry\nKD-8](../errata.md#kd-8). KD-8\n",
            "[the entry\nKD-8](../errata.md#kd-8). [KD-8](../methods/keydiff_equations.md#kd-8)\n",
        ),
        (  # the link after it was taken for a part of the code once, and led nowhere
            "a.md",
            "See `judge my\nkernels` and [it](../README.md).\n",
            f"See `judge my\nkernels` and [it]({pages.REPOSITORY}/blob/main/README.md).\n",
        ),
    ],
)
def test_ids_tests_and_files_become_links_and_code_and_formulas_stay(
    page: str, text: str, linked: str
) -> None:
    assert pages.linked(page, text) == linked


def test_a_page_of_wide_tables_exists_and_has_columns_in_the_style_sheet() -> None:
    style = (DOCS / "stylesheets" / "extra.css").read_text(encoding="utf-8")
    for uri, kind in written.WIDE.items():
        assert (DOCS / uri).exists() or uri == "coverage.md"  # made with the site
        shown = written.page(uri, "---\ntitle: a\n---\n# A\n\nIt has a\ntable.\n")
        head, _, text = shown.removeprefix("---\n").partition("---\n")
        # Two of them have their contents in a table, and keep the navigation.
        hidden = "toc" if uri in ("coverage.md", "kill_matrix.md") else "navigation"
        assert yaml.safe_load(head).items() >= {"title": "a", "hide": [hidden]}.items()
        assert text == f'# A\n\n<div class="wide {kind}" markdown>\n\nIt has a\ntable.\n\n</div>\n'
        assert re.search(rf"\.{kind}( details)? td:nth-child\(5\)", style)


def test_the_navigation_names_what_exists() -> None:
    def named(items: Any) -> list[str]:
        """Every page of a tree of titles, lists and globs."""
        if isinstance(items, str):
            return [items]
        parts = items.values() if isinstance(items, dict) else items
        return [] if "glob" in items else [page for part in parts for page in named(part)]

    generated = [
        *pages.api_pages(),
        "coverage.md",
        *(f"lessons/{lesson.stem}.md" for lesson in pages.lessons()),
    ]
    for target in named(yaml.safe_load((DOCS / ".nav.yml").read_text(encoding="utf-8"))["nav"]):
        assert (DOCS / target).exists() or any(
            page == target or page.startswith(f"{target}/") for page in generated
        ), target


def test_nothing_of_the_theme_is_fetched_from_elsewhere() -> None:
    settings = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings and f"repo_url: {pages.REPOSITORY}\n" in settings
    # the theme would ask the host of the repository for its stars
    assert "data-md-component" not in finished.page('<a data-md-component="source">a</a>')
    assert [
        path
        for path in re.findall(r"(?:-|logo:|favicon:) (assets/\S+|stylesheets/\S+)", settings)
        if not (DOCS / path).exists()
    ] == []
    style = (DOCS / "assets/vendor/katex/katex.min.css").read_text(encoding="utf-8")
    assert all(
        (DOCS / "assets/vendor/katex" / Path(font)).exists()
        for font in re.findall(r"url\((fonts/\S+?\.woff2)\)", style)
    )


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_chart_of_the_results_names_its_rows_its_data_and_its_command(name: str) -> None:
    chart, page = charts.CHARTS[name], (DOCS / "results.md").read_text(encoding="utf-8")
    wanted = (f"(images/results_{name}.svg)", f"/{chart.stored})", f"`{chart.command}`")
    says(pages.filled("results.md", page), *wanted)
    assert chart.svg() == chart.svg() and b"keydiff" in chart.svg()


def test_the_charts_and_tables_of_retrieval_show_the_stored_numbers() -> None:
    for page, marker, row in (
        ("retrieval.md", "retrieved: all", "| keydiff+moments | - | 5 | 5 | 5 | 8.8 | 19.8 | 34.4 |"),
        # a budget of its own: the same at every size
        ("retrieval.md", "retrieved: all", "| gvote, removes 64% | - | 0 | 0 | 0 | 63.2 | 63.2 | 63.2 |"),
        (
            "real_texts.md",
            "real_texts: full",
            "| `squad` | 1,000 | 10 | 0 | 0% | 28% | 0% | does none of it |",
        ),
        ("real_texts.md", "real_texts: 1000", "| - | 75% | - | - | 2 | 9 | 7 | 0 | 57% | - | - |"),
        ("real_texts.md", "real_texts: 1000", "| 0 | 1 | 8 | 5 | 0 | 42% | 3.87 | 25.9 |"),
    ):
        assert row in pages.filled(page, f"<!-- {marker} -->")
    rows = pages.filled("retrieval.md", "<!-- retrieved: all -->").count("\n| ")
    assert rows == 1 + len(charts.at_ratios(charts.CHARTS["retrieval"].data))


@pytest.mark.parametrize(
    "page", ["study.md", "retrieval.md", *(f"claims/{name}.md" for name in ("index", *pages.PAPERS))]
)
def test_a_cell_of_a_table_of_results_holds_one_number(page: str) -> None:
    told = pages.filled(page, (DOCS / page).read_text(encoding="utf-8"))
    cells = [cell for line in told.splitlines() if line.lstrip().startswith("|") for cell in line.split("|")]
    assert (
        len(cells) > 100
        and [cell for cell in cells if re.match(r" *[-+]?\d[\d.]*%?( to | \(|, |/).*\d", cell)] == []
    )


def test_the_reference_of_commands_has_every_command_with_its_options() -> None:
    text = pages.filled("reference/cli.md", "<!-- cli -->")
    for name, command in pages.PROGRAM.commands.items():
        section = text.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        says(section, *(f"| `{one.opts[0]}`" for one in command.params), command.help.split()[0])


def test_the_bibliography_has_every_paper() -> None:
    text = (DOCS / "reference" / "papers.bib").read_text(encoding="utf-8")
    assert {
        number for one in REQUIREMENTS.values() for number in re.findall(r"arXiv (\d{4}\.\d{5})", one.paper)
    } == set(re.findall(r"eprint = \{(.+?)\}", text))
    assert {*pages.METHODS, "ada_kv", "pyramid_kv"} <= set(re.findall(r"@misc\{(\w+),", text))


def test_a_page_of_the_repository_is_included_with_links_that_lead_somewhere() -> None:
    text = pages.filled("contributing.md", (DOCS / "contributing.md").read_text(encoding="utf-8"))
    assert (
        "](testing.md)" in text
        and f"]({pages.REPOSITORY}/blob/main/requirements/tested.txt)"
        in pages.linked("contributing.md", text)
    )


def test_measured_claims_appear_once_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    paper = {
        "paper": "keydiff",
        "picture": "keydiff.png",
        "claims": [{"statement": "|a| < 1", "verdict": "not seen"}],
    }
    saved(
        tmp_path / "docs" / "claims" / "results.json", json.dumps({"date": "2026-01-01", "papers": [paper]})
    )
    text = pages.filled("methods/keydiff.md", "<!-- measured: keydiff -->")
    assert "(../claims/keydiff.png)](../claims/keydiff.md)" in text and r"| \|a\| &lt; 1 | not seen |" in text
    assert pages.filled("methods/lagkv.md", "<!-- measured: lagkv -->").startswith(
        "`evictionary claims --papers lagkv`"
    )
