"""The pages point at what exists: tests that the errata name, files that a page links to. And their
language is plain.
"""

import re
import tomllib
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from docs_build import contract, pages
from evictionary.spec_tests.judge.law import REQUIREMENTS, SUITE, judging_files, load_laws
from evictionary.spec_tests.verdict import coverage

ROOT = Path(__file__).parents[2]
ERRATA, UPSTREAM = (
    (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("errata.md", "upstream.md")
)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# Pages that are made when the site is built.
MADE = {
    ROOT / "docs" / "coverage.md",
    *(ROOT / "docs" / "lessons" / path.name for path in ROOT.glob("tutorials/*.md")),
}


every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@every_page
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:spec_)?tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    assert [
        (file, test)
        for file, test in named
        if not (ROOT / file).exists()
        or not re.search(rf"^ *def {test}\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    ] == []


@every_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )  # kernel[grid](...) is no link
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    # A picture of a lesson is made with the lesson; the strict build looks for it.
    assert [
        each
        for each in [(page.parent / link).resolve() for link in links]
        if not each.exists() and each not in MADE and each.parents[1] != ROOT / "docs/lessons"
    ] == []


@every_page
def test_every_file_that_a_page_quotes_exists(page: Path) -> None:
    """A formatter once took the mark of a quotation for Python
    and put spaces into it, and the page showed the mark.
    """
    marks = re.findall(r"^ *--8 *<.*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    quoted = {mark: re.fullmatch(r' *--8<-- "(\S+)"', mark) for mark in marks}
    assert [mark for mark, named in quoted.items() if not named or not (ROOT / named[1]).is_file()] == []


def test_the_contract_holds_the_signatures_of_today() -> None:
    """In the file itself, for who reads it in a clone; `python -m docs_build.contract` writes them."""
    text = contract.PAGE.read_text(encoding="utf-8")
    assert 'def score(keys: Real[np.ndarray, "... T D"]) -> Cosine[np.ndarray, "... T"]:' in text
    assert text == contract.written(text)
    assert "<!-- end -->" not in pages.filled("reference/contract.md", text)


def errata() -> dict[str, str]:
    """The title of each entry of the errata to its text."""
    sections = (section.partition("\n") for section in re.split(r"^##+ ", ERRATA, flags=re.MULTILINE)[1:])
    return {title: body for title, _, body in sections if re.match(r"[A-Z]{2}-", title)}


def test_every_erratum_has_the_same_five_parts_a_grade_and_a_test() -> None:
    parts = ["Place", "Kindest reading", "Computation", "Test", "Grade"]
    for title, body in errata().items():
        assert re.findall(r"^- \*\*(.+?)\*\*", body, flags=re.MULTILINE) == parts, title
        # A wrong reference is seen by reading; everything else has a test.
        assert re.search(
            r"^- \*\*Test\*\* (`spec_tests/[\w/]+\.py::\w+`|reading: )", body, flags=re.MULTILINE
        ), title


def test_the_tables_of_the_errata_list_every_entry_with_its_grade() -> None:
    rows = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \|.*\| \*(.+?)\* \|", ERRATA, flags=re.MULTILINE)
    assert rows == [
        (
            title.partition(": ")[0],
            slugify(title, "-"),
            re.findall(r"^- \*\*Grade\*\* \*(.+?)\*", body, flags=re.MULTILINE)[0],
        )
        for title, body in errata().items()
    ]
    assert {grade for *_, grade in rows} == set(coverage.GRADES)


def test_a_refuted_sentence_names_its_version_where_a_newer_one_is_known() -> None:
    shown = pages.filled("errata.md", "<!-- graded -->")
    wrong = re.findall(r"^- \[(.+?)\]\(.+?\) \((.+?)[,;]", shown, flags=re.MULTILINE)
    assert ("KD-O", "KeyDiff v1") in wrong and ("MK-T5", "MomentKV") in wrong
    assert shown.count("(KeyDiff v1; the newest is v4; ") == len(
        [paper for _, paper in wrong if paper == "KeyDiff v1"]
    )


def test_the_coverage_and_the_errata_count_and_say_what_they_count() -> None:
    """One had 58 and the other 62, without a word of why."""
    text = " ".join(pages.coverage().split())
    ids = {identifier for title in errata() for identifier in coverage.ids_of(title)}
    assert (
        f"counts requirements, {len(ids)} in all. The [errata](errata.md) have {len(errata())} entries"
        in text
    )


def test_the_grades_of_the_errata_are_the_verdicts_of_the_requirements() -> None:
    """The coverage page once called false what the errata call imprecise, and true what they grade."""
    graded: dict[str, set[str]] = {identifier: set() for identifier in REQUIREMENTS}
    for title, body in errata().items():
        for identifier in coverage.ids_of(title):
            graded[identifier].add(body.partition("- **Grade** *")[2].partition("*")[0])
    assert graded == {
        one.id: set(one.verdict.split(", ")) & set(coverage.GRADES) for one in REQUIREMENTS.values()
    }
    # What was taken back is no erratum any more, and keeps its requirement.
    dropped = re.findall(
        r"^\| ([A-Z]{2}-\S+) \|", ERRATA.partition("## Entries that were taken back")[2], flags=re.MULTILINE
    )
    assert dropped and all(
        REQUIREMENTS[identifier].verdict in ("true", "definition") for identifier in dropped
    )


def test_the_pages_that_judge_a_paper_name_the_version_that_was_read() -> None:
    texts = [ERRATA, UPSTREAM]
    methods = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "methods").glob("*.md"))
    read = {(one.paper.rpartition(" ")[2], one.version) for one in REQUIREMENTS.values() if one.version}
    assert len(read) == 5
    for paper, version in read:
        assert all(
            re.search(rf"^## .+ \(arXiv {paper}, {version}\)$", text, flags=re.MULTILINE) for text in texts
        ), paper
        assert f"(https://arxiv.org/abs/{paper}{version})" in methods, paper


def test_ten_notes_for_the_authors_name_entries_of_the_errata() -> None:
    notes = re.split(r"^### ", UPSTREAM, flags=re.MULTILINE)[1:]
    anchors = [re.findall(r"\(errata\.md#(.+?)\)", note) for note in notes]
    assert len(notes) == 10 and all(len(found) == 1 for found in anchors)
    assert {found for (found,) in anchors} <= {slugify(title, "-") for title in errata()}
    assert all(re.search(r"`spec_tests/\w+/\w+\.py::\w+`", note) for note in notes)


# The coverage: every requirement has laws or a reason, and the page says so.


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


# Sentences do not get longer than language.toml has them, and private words have their common names.
RULES = tomllib.loads(Path(__file__).with_name("language.toml").read_text(encoding="utf-8"))
NOT_PROSE = (
    r"\A---\n[\s\S]*?^---$",  # the head of a page
    r"^ *(```+|~~~+).*\n[\s\S]*?^ *\1$",
    r"^    options:\n(?:^      .*\n)+",  # of a page of the API
    r"^ *(?:\||!\[|#|\$ |:::|<!?|\?\?\?|!!!|=== ).*$",  # tables, pictures, headings, markers, names of boxes
    r"\$\$[\s\S]*?\$\$",
    r"\{ ?[.#:][^}]*\}",
)


def sentences(markdown: str) -> list[str]:
    """The sentences of a page's prose: a code span or formula is one word of it, and an item of a list
    begins a sentence.
    """
    for pattern in NOT_PROSE:
        markdown = re.sub(pattern, "\n\n", markdown, flags=re.MULTILINE)
    plain = re.sub(r"`[^`]+`|\$[^$\n]+\$", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown))
    blocks = re.split(
        r"\n\s*\n|^ *(?:[-*]|\d+\.) +",
        re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", plain),
        flags=re.MULTILINE,
    )
    return [
        one
        for block in blocks
        for one in re.split(r"(?<=[.!?]) +(?=[\W\d]*[A-Z]|code)|(?<=。) *", " ".join(block.split()))
        if " " in one
    ]


def measured(markdown: str) -> tuple[float, float]:
    """The mean number of words of a sentence, and the percentage of the sentences that have more words
    than RULES allow.
    """
    counts = [len(re.findall(r"[\w'-]+", one)) for one in sentences(markdown)] or [0]
    return sum(counts) / len(counts), 100 * sum(count > RULES["most_words"] for count in counts) / len(counts)


def test_sentences_are_told_from_code_tables_and_headings() -> None:
    page = (
        "---\na: b\n---\n# A heading\n\nOne `a b c` two. Three\nfour [five](x.md).\n\n- six $x + y$ "
        "seven\n- *eight* nine\n\n| a | b |\n|---|---|\n| in a table. | Not prose. |\n\n"
        "```text\nNo prose here. None.\n```\n\n<!-- marker: one -->\nTen eleven."
    )
    told = ["One code two.", "Three four five.", "six code seven", "eight nine", "Ten eleven."]
    assert sentences(page) == told
    assert measured(page) == (2.6, 0) and measured("word " * 23 + "end. A short one.")[1] == 50


@every_page
def test_a_page_is_no_harder_to_read_than_it_was(page: Path) -> None:
    """Whoever rewrites a page lowers its limits, so that
    it does not go back; a new page has the common ones.
    """
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    limits, (mean, long) = RULES["pages"].get(name, RULES["new_page"]), measured(text)
    assert mean <= limits["mean"] and long <= limits["long"], (round(mean, 1), round(long), limits)
    old = [
        (bad, one)
        for bad in RULES["words"]
        for one in sentences(text)
        if re.search(rf"\b(?:{bad})\b", one, re.IGNORECASE)
    ]
    assert name in RULES["old_words_stay"] or old == []


def test_the_words_of_the_glossary_are_in_order() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    words = [word.lower().replace("-", " ") for word in re.findall(r"^\*\*(.+?)\*\*$", text, flags=re.M)]
    assert len(words) > 40 and words == sorted(words)
