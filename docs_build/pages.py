"""Markdown for the site, from `entries`: cards, tables,
quoted code. Each function gets the page that it writes for.
"""

import json
import posixpath
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from markdown.extensions.toc import slugify

from docs_build import (
    abstracts,
    api,
    course,
    facts,
    figures,
    frontier,
    methods,
    moving,
    sizes,
    steps,
    symbols,
)
from docs_build.charts import CHARTS, at_ratios
from docs_build.entries import (
    PAGES,
    ROOT,
    Definition,
    Entry,
    definitions,
    entries,
    law_definition,
    mutant_definition,
    stem_of,
)
from docs_build.idea import picture
from docs_build.study import changes, memory
from evictionary import source
from evictionary.cli.app import app
from evictionary.evaluation import study
from evictionary.evaluation.pages import markdown as rendered
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import STEPS, contract_functions, load
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.memory.arguments import arguments_of
from evictionary.spec_tests.proof import alarms, matrix, power
from evictionary.spec_tests.proof.planted import Mutant, load_mutants
from evictionary.spec_tests.verdict.coverage import GRADES, VERDICTS, functions
from evictionary.store import cell
from tests import rulers
from tutorials.build import REPOSITORY, heading, lessons, question

PAPERS = ("expected_attention", "keydiff", "lagkv", "momentkv", "gvote")
METHODS = (*PAPERS, *(name for name in catalogue.names() if name not in PAPERS))
PROGRAM: Any = typer.main.get_command(app)
TEMPLATES = Path(__file__).parent / "templates"
ID = re.compile(r"(?<![\w`/#-])([A-Z][A-Z\d]{1,4}-[A-Z]?\d+[A-Z]?|[A-Z]{2}-[A-Z]{1,2})(?![\w`]|-\w)")


def relative(page: str, target: str) -> str:
    """The link from one page of the site to another, both
    given from the folder docs/; the target may have an anchor.
    """
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def source_url(path: str, name: str = "") -> str:
    """The address of a file of the repository, at the lines of a function of it."""
    found = definitions(path)[name] if name else None
    return f"{REPOSITORY}/blob/main/{path}" + (f"#L{found.first}-L{found.last}" if found else "")


def api_link(page: str, definition: Definition) -> str:
    """The link to a function in the pages of the API, or to its source where the API has no page of it."""
    if posixpath.dirname(definition.path) not in api.LAYERS or definition.name.startswith("_"):
        return source_url(definition.path, definition.name)
    module = definition.path.removesuffix(".py")
    return relative(page, f"reference/api/{module}.md#evictionary.{definition.module}.{definition.name}")


def escaped(text: str) -> str:
    """Plain text as Markdown, with special characters
    escaped; what stands in backticks is code and stays so.
    """
    parts = re.split(r"(`[^`]+`)", text)
    parts[::2] = [re.sub(r"([\\`*_{}\[\]#|$])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def link_to(page: str, identifier: str) -> str:
    entry = entries()[identifier]
    return relative(page, f"{entry.page}#{entry.anchor}")


def _sentence(statement: str) -> str:
    """A statement that begins with a word begins with a capital letter; one that begins with a symbol
    stays as it is.
    """
    return statement[0].upper() + statement[1:] if re.match(r"[a-z]{2,}[ ,:;-]|a ", statement) else statement


def _named(page: str, found: Iterable[Definition]) -> str:
    return ", ".join(f"[`{one.name}`]({api_link(page, one)})" for one in found)


def _fence(code: str) -> str:
    return f"~~~~ python\n{code}\n~~~~"


def _of(stems: str) -> list[Entry]:
    return [entry for identifier, entry in entries().items() if stem_of()[identifier] in stems.split(", ")]


def _is_equation(entry: Entry) -> bool:
    return bool(entry.requirement.tex or entry.reference or not entry.requirement.where)


def equations(page: str, stems: str) -> str:
    """A card for each equation, and a table of the claims that have no function."""
    cards = [entry for entry in _of(stems) if _is_equation(entry)]
    claims = [entry for entry in _of(stems) if not _is_equation(entry)]
    # A function that writes several equations is quoted once, at the last of them.
    last = {one: entry.requirement.id for entry in cards for found in entry.layers.values() for one in found}

    def quoted(page: str, entry: Entry, found: Iterable[Definition]) -> str:
        """The functions of a card by name; a function of
        several equations gets a link to the card with its code.
        """
        last_here = {one: last[one] for one in found if not _is_program(one)}
        links = {
            one: f" (quoted at [{id}](#{entries()[id].anchor}))"
            for one, id in last_here.items()
            if id != entry.requirement.id
        }
        return ", ".join(_named(page, [one]) + links.get(one, "") for one in found)

    def code_in(entry: Entry, found: Iterable[Definition]) -> str:
        sources = [one.source for one in found if last[one] == entry.requirement.id and not _is_program(one)]
        return _fence("\n\n\n".join(sources)) if sources else ""

    return _rendered("equations", page, cards=cards, claims=claims, quoted=quoted, code_in=code_in)


def _rendered(template: str, page: str, **content: Any) -> str:
    """A template of docs_build/templates, filled in for a page of the site."""
    filters = {
        "anchor": lambda title: slugify(title, "-"),
        "cell": cell,
        "escaped": escaped,
        "sentence": _sentence,
        "verdict": lambda words: " ".join(
            f'<span class="verdict verdict-{word.partition(" ")[0]}">{word}</span>'
            for word in words.split(", ")
        ),
    }
    helpers = {
        "about": methods,
        "abstracts": abstracts.ABSTRACTS,
        "comparison": abstracts.rows,
        "changes": changes,
        "at_ratios": at_ratios,
        "catalogue": catalogue,
        "cards": lambda stems: filter(_is_equation, _of(stems)),
        "charts": CHARTS,
        "commands": PROGRAM.commands,
        "counts": facts.counts(),
        "method": catalogue.definition,
        "picture": picture,
        "planted": load_mutants(),
        "proof": matrix,
        "power": power,
        "alarms": alarms,
        "methods": METHODS,
        "moving": moving,
        "evicting": catalogue.evicting(),
        "page_of": page_of,
        "question": question,
        "requirements": _of,
        "resolve": resolve,
        "entries": entries(),
        "errata_links": lambda page, entry: [
            f"[{escaped(title)}]({relative(page, 'errata.md')}#{anchor})" for title, anchor in entry.errata
        ],
        "fence": _fence,
        "frontier": frontier.points,
        "heading": heading,
        "law_definition": law_definition,
        "law_links": lambda page, entry: [
            f"[{escaped(law.sentence)}]({source_url(at.path, at.name)})"
            for law in entry.laws
            for at in [law_definition(law)]
        ],
        "lessons": lessons(),
        "link_to": link_to,
        "mistake": _mistake,
        "named": _named,
        "relative": relative,
        "source_url": source_url,
        "steps_of": steps.element,
        "stored": stored,
        "symbols_of": symbols.listed,
    }
    return rendered(TEMPLATES / f"{template}.md.j2", filters, page=page, **helpers | content).rstrip("\n")


def coverage() -> str:
    """The coverage page: a row for each paper, and for each of its requirements."""
    return (
        _rendered("coverage", "coverage.md", functions=functions(), laws=load_laws(), verdicts=VERDICTS)
        + "\n"
    )


def _mistake(page: str, mutant: Mutant) -> str:
    """A planted mistake: a link to its function, or the edits of the right function."""
    if at := mutant_definition(mutant):
        return f"[{escaped(mutant.misconception)}]({source_url(at.path, at.name)})"
    edits = [[" ".join(code.split()) for code in edit] for edit in mutant.edits]
    told = (f"<br>`{was}` " + (f"became `{now}`" if now else "left out") for was, now in edits)
    return escaped(mutant.misconception) + "".join(told)


def _is_program(definition: Definition) -> bool:
    """Whether a function runs on the GPU: a card does not quote it, because its file explains it."""
    return "@triton.jit" in definition.source


def page_of(stem: str) -> str:
    """The page of a method."""
    return PAGES[stem].replace("_equations", "")


def graded(page: str) -> str:
    """How many entries of the errata each paper has of each grade, and those that a computation refutes, from
    the tables of docs/errata.md: of a paper with a newer version than the one that was read, with both.
    """
    text = (ROOT / "docs/errata.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+\(arXiv .+\))$", text, flags=re.MULTILINE)
    read = re.findall(r"^\| (.+?) \| arXiv \S+, (v\d+) \| (v\d+)", text, re.MULTILINE)
    newer = {paper: f" {old}; the newest is {new}" for paper, old, new in read if old != new}
    titles = dict(zip(parts[1::2], parts[2::2], strict=True))
    # entry, place, grade, in one line
    row = r"^\| \[(?P<name>.+?)\]\(#(?P<anchor>.+?)\) \| (?P<place>.+?)"
    row += r" \| \*(?P<grade>.+?)\* \| (?P<told>.+?) \|$"
    found = [
        found.groupdict() | {"paper": title.partition(" (")[0]}
        for title, text in titles.items()
        for found in re.finditer(row, text, re.MULTILINE)
    ]
    anchors = {title.partition(" (")[0]: slugify(title, "-") for title in titles}
    return _rendered("graded", page, entries=found, of_paper=anchors, grades=GRADES, newer=newer)


def studied(page: str, part: str) -> str:
    """A part of what the stored study says: `corrected`, `needles`,
    `protected`, `recommended`, `effects` or `table`; the last three also of the
    parts that `docs_build.study` names, such as `finals.` and `real_2000.`.
    """
    found = stored("evictionary/evaluation/study.json")
    summary, dot, part = part.rpartition(".")
    found = found[summary] if dot else found
    cost = {(row["method"], row["ratio"]): row["cost"] for row in found["rows"]}
    return (
        study.markdown(found, memory)
        if part == "table"
        else _rendered(f"studied_{part}", page, found=found, cost=cost)
    )


def stored(path: str) -> Any:
    """The content of a JSON or TOML file of the repository."""
    return (tomllib if path.endswith(".toml") else json).loads((ROOT / path).read_text(encoding="utf-8"))


def signature(page: str, path: str) -> str:
    """The first lines of a function of reference/, up to its docstring, and the first paragraph of that."""
    sentence, head = summary(path)
    found = definitions(f"reference/{path.partition('.')[0]}.py")[path.partition(".")[2]]
    return f"[`{path}`]({api_link(page, found)}): {escaped(sentence)}\n\n{_fence(head)}"


def summary(path: str) -> tuple[str, str]:
    """The first paragraph of what a function of reference/ says of itself, and its signature."""
    stem, _, name = path.partition(".")
    found = definitions(f"reference/{stem}.py")[name]
    return source.first_paragraph(found.docstring).replace("`", ""), source.signature(found.source)


def code(page: str, target: str) -> str:
    """A function (`path::name`) or a whole file, quoted, with a link to its page."""
    path, _, name = target.partition("::")
    if name:
        return f"{_fence(definitions(path)[name].source)}\n\n[{path}]({source_url(path, name)})" + "{ .from }"
    language = {"py": "python"}.get(Path(path).suffix[1:], Path(path).suffix[1:])
    return f"~~~~ {language}\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n~~~~"


def included(page: str, path: str) -> str:
    """A page of the repository, with its links as they are from the folder docs/."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda match: "](" if match[1] else "](../", text)


def reached(page: str) -> str:
    """Which functions the laws of memory call: a row for each file of the contract."""
    impl, case = load("reference"), Case(batch=2, num_kv_heads=2, group=2, num_queries=2)
    called = [path for path in contract_functions() if arguments_of(impl, path, case) is not None]
    rows: dict[str, list[str]] = {}
    for path in called:
        stem, _, name = path.partition(".")
        rows.setdefault(stem, []).append(f"`{name}`" + r"\*" * (path in STEPS))
    return (
        f"The laws of memory call {len(called)} of the {len(contract_functions())} functions:\n\n"
        "| file | functions |\n|---|---|\n"
        + "\n".join(f"| {stem} | {', '.join(names)} |" for stem, names in rows.items())
        + "\n\n\\* a step that no other law names. A helper of that name which does something else is left "
        "alone."
    )


def measured_by_rulers(page: str) -> str:
    """What a question takes of the code of today, in files, functions and lines."""
    return rulers.markdown(rulers.rulers())


def cover(page: str) -> str:
    """What three methods keep of one text, for the first page."""
    return figures.cover(figures.stored())


# Any other marker is the name of a template, which gets its argument as `of`.
MARKERS: dict[str, Callable[..., str]] = {
    "equations": equations,
    "graded": graded,
    "studied": studied,
    "signature": signature,
    "code": code,
    "cover": cover,
    "included": included,
    "reached": reached,
    "sizes_of_models": sizes.beside_models,
    "sizes_of_functions": sizes.of_functions,
    "rulers": measured_by_rulers,
    "weeks": course.weeks,
    "handed_in": course.handed_in,
    "systems": course.systems,
}


def filled(page: str, markdown: str) -> str:
    """The page with its markers, `<!-- name: argument -->`
    on lines of their own, replaced by their content.

    A marker that is indented, as in a tab, is replaced by lines with the same indent. What stands below one,
    up to `<!-- end -->`, is for readers of the file itself (`docs_build.contract`), and is replaced with it.
    A whole page of a method, from its title on, has all sections of one.
    """
    stem = page.removeprefix("methods/").removesuffix(".md")
    if stem in methods.PAGES and markdown.startswith("# "):
        markdown = methods.completed(stem, markdown)

    def fill(match: re.Match[str]) -> str:
        written = MARKERS.get(match["name"], lambda page, of="": _rendered(match["name"], page, of=of))
        return textwrap.indent(
            written(page, *([match["argument"]] if match["argument"] else [])), match["indent"]
        )

    names = "|".join([*MARKERS, *(path.name.partition(".")[0] for path in TEMPLATES.iterdir())])
    return re.sub(
        rf"^(?P<indent> *)<!-- (?P<name>{names})(?:: (?P<argument>.+?))? -->(?:\n(?:(?!<!--).*\n)+<!-- end "
        r"-->)?$",
        fill,
        markdown,
        flags=re.MULTILINE,
    )


def linked(page: str, markdown: str) -> str:
    """The page with links added: ids to their equations, tests to their lines there, files outside docs/
    to the repository.
    """
    lines: list[str] = []
    fenced = before = ""
    for line in markdown.splitlines():
        fence = re.match(r"\s*(`{3,}|~{3,})", line)
        if fence and (not fenced or line.strip() == fenced):
            fenced, before = "" if fenced else fence.group(1), ""
        elif fenced or line.startswith(("    ", "<", "#")):
            before = ""
        else:
            in_link = re.match(r"[^\[\]]*\]\(", line) and re.search(r"\[[^\[\]]*$", before)
            if in_link or before.count("`") % 2:
                lines.pop()  # a link's text or a piece of code began on the line before
                line = f"{before}\n{line}"
            before, line = line, _linked_line(page, line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _linked_line(page: str, line: str) -> str:
    # Odd parts are links, formulas and code; they stay unchanged, except names of tests in code.
    parts = re.split(r"(\[[^\]]*\]\([^)]*\)|\$\$?[^$]+\$\$?|`[^`]+`|<[^>]+>)", line)
    for place, part in enumerate(parts):
        if place % 2 == 0:
            parts[place] = ID.sub(
                lambda match: (
                    f"[{match[0]}]({link_to(page, match[0])})" if match[0] in entries() else match[0]
                ),
                part,
            )
        elif test := re.fullmatch(r"`((?:spec_)?tests/[\w/]+\.py)::(\w+)`", part):
            parts[place] = f"[{part}]({source_url(*test.groups())})"
        elif file := re.fullmatch(r"(\[[^\]]*\])\((\.\./[^)#]+|[^)#:]+\.json)\)", part):
            path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), file[2]))
            on_site = path.startswith("docs/") and not path.endswith(".json")
            parts[place] = part if on_site else f"{file[1]}({source_url(path)})"
    return "".join(parts)


def api_pages() -> dict[str, str]:
    """Every page of the API."""
    return api.pages(_rendered, source_url)
