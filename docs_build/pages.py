"""Markdown for the site, from `entries`: cards, tables, quoted code. Each function gets the page that it writes for."""

import inspect
import itertools
import json
import posixpath
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from docs_build.charts import CHARTS, RATIOS, at_ratios
from docs_build.entries import (
    PAGES,
    ROOT,
    Definition,
    Entry,
    definitions,
    entries,
    errata,
    law_definition,
    mutant_definition,
    stem_of,
)
from evictionary.evaluation import study
from evictionary.evaluation.pages import markdown as rendered
from evictionary.methods import catalogue
from evictionary.methods.resolve import MOMENTS, resolve
from evictionary.spec_tests.proof.planted import Mutant, load_mutants
from evictionary.store import table
from tutorials.build import heading, lessons, question

PAPERS = ("expected_attention", "keydiff", "lagkv", "momentkv", "gvote")
METHODS = (*PAPERS, *(name for name in catalogue.names() if name not in PAPERS))
# Inputs of a method that say how much to keep, and nothing of the text.
NOT_READ = {"budget", "keep_ratio", "moments", "query"}
LAYERS = ("reference", "optimized", "optimized/kernels")
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
ID = re.compile(r"(?<![\w`/#-])([A-Z][A-Z\d]{1,4}-[A-Z]?\d+[A-Z]?|[A-Z]{2}-[A-Z]{1,2})(?![\w`]|-\w)")


def relative(page: str, target: str) -> str:
    """The link from one page of the site to another, both given from the folder docs/; the target may have an anchor."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def source_url(path: str, name: str = "") -> str:
    """The address of a file of the repository, at the lines of a function of it."""
    found = definitions(path)[name] if name else None
    return f"{REPOSITORY}/blob/main/{path}" + (f"#L{found.first}-L{found.last}" if found else "")


def api_link(page: str, definition: Definition) -> str:
    """The link to a function in the pages of the API, or to its source where the API has no page of it."""
    if posixpath.dirname(definition.path) not in LAYERS:
        return source_url(definition.path, definition.name)
    module = definition.path.removesuffix(".py")
    return relative(page, f"reference/api/{module}.md#evictionary.{definition.module}.{definition.name}")


def escaped(text: str) -> str:
    """Plain text as Markdown, with special characters escaped; what stands in backticks is code and stays so."""
    parts = re.split(r"(`[^`]+`)", text)
    parts[::2] = [re.sub(r"([\\`*_{}\[\]#|$])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def link_to(page: str, identifier: str) -> str:
    entry = entries()[identifier]
    return relative(page, f"{entry.page}#{entry.anchor}")


def _sentence(statement: str) -> str:
    """A statement that begins with a word begins with a capital letter; one that begins with a symbol stays as it is."""
    return statement[0].upper() + statement[1:] if re.match(r"[a-z]{2,}[ ,:;-]|a ", statement) else statement


def _verdict(words: str) -> str:
    return " ".join(f'<span class="verdict verdict-{word.partition(" ")[0]}">{word}</span>' for word in words.split(", "))


def _named(page: str, found: Iterable[Definition]) -> str:
    return ", ".join(f"[`{one.name}`]({api_link(page, one)})" for one in found)


def _fence(code: str) -> str:
    return f"~~~~ python\n{code}\n~~~~"


def _of(stems: str) -> list[Entry]:
    wanted = stems.split(", ")
    return [entry for identifier, entry in entries().items() if stem_of()[identifier] in wanted]


def _is_equation(entry: Entry) -> bool:
    return bool(entry.formula or entry.reference or not entry.requirement.where)


def overview(page: str, stems: str) -> str:
    """A table of the equations: id, name, function, kernel, number of laws and planted mistakes, verdict."""
    return _rendered("overview", page, entries=filter(_is_equation, _of(stems)))


def equations(page: str, stems: str) -> str:
    """A card for each equation, and a table of the claims that have no function."""
    cards = [entry for entry in _of(stems) if _is_equation(entry)]
    claims = [entry for entry in _of(stems) if not _is_equation(entry)]
    # A function that writes several equations is quoted once, at the last of them.
    last = {one: entry.requirement.id for entry in cards for found in entry.layers.values() for one in found}

    def quoted(page: str, entry: Entry, found: Iterable[Definition]) -> str:
        """The functions of a card by name; a function of several equations gets a link to the card with its code."""
        names = []
        for one in found:
            elsewhere = last[one] != entry.requirement.id and not _is_program(one)
            names.append(_named(page, [one]) + (f" (quoted at [{last[one]}](#{entries()[last[one]].anchor}))" if elsewhere else ""))
        return ", ".join(names)

    def code_in(entry: Entry, found: Iterable[Definition]) -> str:
        sources = [one.source for one in found if last[one] == entry.requirement.id and not _is_program(one)]
        return _fence("\n\n\n".join(sources)) if sources else ""

    return _rendered("equations", page, cards=cards, claims=claims, quoted=quoted, code_in=code_in)


def _rendered(template: str, page: str, **content: Any) -> str:
    """A template of docs_build/templates, filled in for a page of the site."""
    filters = {"escaped": escaped, "sentence": _sentence, "verdict": _verdict}
    helpers = {
        "errata_links": _errata_links,
        "law_links": _law_links,
        "link_to": link_to,
        "mistake": _mistake,
        "named": _named,
        "relative": relative,
        "source_url": source_url,
    }
    path = Path(__file__).parent / "templates" / f"{template}.md.j2"
    return rendered(path, filters, page=page, **helpers, **content).rstrip("\n")


def _law_links(page: str, entry: Entry) -> list[str]:
    found = [(law, law_definition(law)) for law in entry.laws]
    return [f"[{escaped(law.sentence)}]({source_url(at.path, at.name)})" for law, at in found]


def _errata_links(page: str, entry: Entry) -> list[str]:
    return [f"[{escaped(title)}]({relative(page, 'errata.md')}#{anchor})" for title, anchor in entry.errata]


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


def gallery(page: str) -> str:
    """A card for each method: what it keeps of a text, its name and its idea; the five papers first."""
    cards = []
    for stem in METHODS:
        module = catalogue.definition(stem)
        name, idea = re.split(r" ?[(,:]", module.__doc__ or "")[0], catalogue.description(module)
        strip, target = relative(page, f"images/kept_{stem}.png"), relative(page, page_of(stem))
        cards.append(
            f"-   [![The tokens that {name} keeps]({strip}){{ .strip }}]({target})\n\n    **[{name}]({target})** {escaped(idea)}."
        )
    return '<div class="grid cards" markdown>\n\n' + "\n\n".join(cards) + "\n\n</div>"


def page_of(stem: str) -> str:
    """The page of a method."""
    return PAGES[stem].replace("_equations", "")


def kept(page: str, stem: str) -> str:
    """The picture of what a method keeps, as in the gallery."""
    strip, gallery = relative(page, f"images/kept_{stem}.png"), relative(page, "methods/index.md#gallery")
    caption = f"*What it keeps at half of the cache: [the gallery]({gallery}) explains it.*"
    return f"![The tokens that the method keeps]({strip}){{ .strip }}\n\n{caption}"


def run(page: str, stem: str) -> str:
    """The lines that run a method, in Python and in a terminal."""
    return f"""```python
from evictionary import EvictingCache
from evictionary.models.load import load

model, tokenizer = load("embedded")
inputs = tokenizer(open("book.txt").read(), return_tensors="pt")
cache = EvictingCache(model, method="{stem}", compression_ratio=0.5)
print(tokenizer.decode(model.generate(**inputs, past_key_values=cache, max_new_tokens=20)[0]))
```

Or in a terminal: `evictionary run --prompt-file book.txt --question "Who wrote it?" --method {stem} --compression-ratio 0.5`."""


def ids(page: str, stem: str) -> str:
    """The ids of a paper, each a link to its card, and the place of old links to it."""
    return " ".join(f"[{entry.requirement.id}]({link_to(page, entry.requirement.id)}){{ #{entry.anchor} }}" for entry in _of(stem))


def compared(page: str) -> str:
    """A table of the methods: what they need, what they cost and how good they are, from the catalogue and the stored results."""
    time = {row["method"]: row["share_of_prefill"] for row in CHARTS["speed"].data["compression"]}
    memory = CHARTS["against_kvpress"].data["methods"]["float32"]["4096"]
    cost = {row["method"]: row for row in CHARTS["finals"].data["rows"] if row["ratio"] == 0.5}
    rows = []
    for name in METHODS:
        method, row = resolve(name), cost[name]
        given = {each.removeprefix("replay_").replace("_", " ") for each in method.captured} - {"keys"}
        rows.append(
            (
                f"[`{name}`]({relative(page, page_of(name))})",
                escaped(", ".join(sorted(method.reads - NOT_READ))),
                "yes" if catalogue.REPLAYED & method.reads else "",
                "yes" if "own_budget" in method.traits else "",
                f"with its {' and '.join(sorted(given))}" if given else "yes",
                f"{memory[name]['ours_bytes'] / 2**20:.1f}" if name in memory else "",
                f"{time[name]:.1%}",
                f"{row['cost']:.3f}",
                *(f"{end:.3f}" for end in row["interval"]),
            )
        )
    head = ["method", "reads", "second pass", "own budget", "fused attention", "memory, MiB", "time", "cost", "from", "to"]
    return table(head, rows, "lllllrrrrr")


def counts(page: str) -> str:
    """The numbers of requirements, functions, laws and planted mistakes, in a sentence."""
    found = entries().values()
    laws, mutants = sum(len(entry.laws) for entry in found), sum(len(entry.mutants) for entry in found)
    functions = len({one for entry in found for one in entry.reference})
    return (
        f"There are {len(found)} equations and claims, {functions} reference functions, {laws} laws that can test any "
        f"implementation, and {mutants} planted mistakes: deliberately wrong implementations that test the laws."
    )


def lesson_table(page: str) -> str:
    """A table of the lessons and their questions."""
    rows = ((f"[{heading(lesson)}]({relative(page, f'lessons/{lesson.stem}.md')})", question(lesson)) for lesson in lessons())
    return table(["lesson", "question"], rows)


def errata_list(page: str, stem: str) -> str:
    """The errata of one paper, by title."""
    seen: dict[tuple[str, str], list[str]] = {}
    for identifier, found in errata().items():
        if stem_of().get(identifier) == stem:
            for title_and_anchor in found:
                seen.setdefault(title_and_anchor, []).append(identifier)
    return "\n".join(
        f"- {', '.join(identifiers)}: [{escaped(title)}]({relative(page, 'errata.md')}#{anchor})"
        for (title, anchor), identifiers in seen.items()
    )


def measured(page: str, stem: str) -> str:
    """The picture, the verdicts and the page of the measured claims, if results are stored."""
    stored = ROOT / "docs" / "claims" / "results.json"
    command = f"`evictionary claims --papers {stem}` measures the paper's statements on a model of yours."
    result = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {"papers": []}
    papers = [paper for paper in result["papers"] if paper["paper"] == stem]
    if not papers:
        return command
    link = relative(page, f"claims/{stem}.md")
    return _rendered("measured", page, paper=papers[0], date=result["date"], link=link, command=command)


def retrieved(page: str, stem: str) -> str:
    """A table of the retrieval results of the small model with a method, its compositions and random eviction, or with `all`."""
    result = CHARTS["retrieval"].data
    rows = []
    for label, summaries in at_ratios(result).items():
        if stem in ("all", re.split(r"[+ ]", label)[0]) or label == "random":
            removed = {f"{1 - each['bytes_after'] / each['bytes_before']:.0%}" for each in summaries}
            name = escaped(label) + (f", removes {removed.pop()}" if len(removed) == 1 else "")
            rows.append((name, *(each["right"] for each in summaries), *(f"{each['error']:.1f}" for each in summaries)))
    first = result["rows"][0]["summary"]
    head = ["method", *(f"{what} {ratio:.0%}" for what in ("found at", "moved at") for ratio in RATIOS)]
    shown = table(head, rows, "lrrrrrr")
    return _rendered("retrieved", page, tokens=first["tokens_before"], prompts=first["of"], date=result["date"], table=shown)


def chart(page: str, name: str) -> str:
    """A chart of the stored results, its data and the command that measures them."""
    found = CHARTS[name]
    picture, data = relative(page, f"images/results_{name}.svg"), source_url(found.stored)
    told = found.draw.__doc__
    return f"![{told}]({picture})\n\n{told} Data: [{found.stored}]({data}), measured by `{found.command}`."


def studied(page: str, part: str) -> str:
    """A part of what the stored study says: `recommended`, `corrected`, `effects` or `table`; the last two also of `finals.` and
    `pyramid.`, the final with PyramidKV's division.
    """
    found = json.loads(study.STORED.read_text(encoding="utf-8"))
    summary, dot, part = part.rpartition(".")
    found = found[summary] if dot else found
    return {"recommended": _recommended, "corrected": _corrected, "effects": _effects, "table": study.markdown}[part](found)


def _recommended(found: study.Summary) -> str:
    rows = []
    for entry in found["recommended"]:
        names = ", ".join(f"`{name}`" for name in entry["as_good"]) or "none"
        cost = study.with_interval(entry["cost"], entry)
        prompts = sum(entry["prompts"].values())
        rows.append((f"{entry['ratio']:.0%}", prompts, f"`{entry['method']}`", cost, f"{entry['exact']:.0%}", names))
    head = ["removed", "prompts", "least cost", "nats a token", "exact", "not to be told from it"]
    return table(head, rows, "rrlrrl")


def _corrected(found: study.Summary) -> str:
    """What MomentKV's correction changes behind each selection of the final, with one size for all heads and with AdaKV."""
    cost = {(row["method"], row["ratio"]): row["cost"] for row in found["rows"]}
    ratios = sorted({ratio for _, ratio in cost})
    selections = dict.fromkeys(row["method"].partition("+")[0] for row in found["finals"]["rows"])
    names = (f"{selection}{allocator}" for selection in selections for allocator in ("", "+ada_kv"))
    rows = [
        [f"`{name}`", *(f"{cost[name, ratio]:.3f} to {cost[f'{name}+{MOMENTS}', ratio]:.3f}" for ratio in ratios)] for name in names
    ]
    return table(["selection", *(f"{ratio:.0%} removed" for ratio in ratios)], rows, "lr")


def _effects(found: study.Summary) -> str:
    rows = []
    for effect in found["effects"]:
        change = study.with_interval(effect["change"], effect, "+")
        rows.append((f"`{effect['addition']}`", f"{effect['ratio']:.0%}", change, f"{effect['better']} of {effect['of']}"))
    return table(["addition", "removed", "change of the cost, nats a token", "better in"], rows, "lr")


def head_map(page: str, stored: str) -> str:
    """The gates of a training, from a file of benchmarks/results: a square for each KV head, the darker the larger its gate."""
    result = json.loads((ROOT / "benchmarks" / "results" / stored).read_text(encoding="utf-8"))
    curve = result["curve"]
    steps = [*range(0, len(curve), max(1, len(curve) // 8)), len(curve) - 1]
    rows = (
        ["distance", *(f"{curve[step][0]:.3g}" for step in steps)],
        ["mean gate", *(f"{curve[step][1]:.2f}" for step in steps)],
    )
    head = ["step", *(str(step + 1) for step in steps)]
    return _rendered("head_map", page, table=table(head, rows), size=20, heads_in_all=result["heads"], **result)


def compiled(page: str) -> str:
    """A table for each kernel file: what Triton makes of its kernels, as `make compile-all` measured it."""
    stored = json.loads((ROOT / "docs" / "kernels.json").read_text(encoding="utf-8"))
    columns = ("registers", "programs", "instructions", "loop")
    lines = []
    for stem, kernels in itertools.groupby(stored, key=lambda kernel: kernel.partition(".")[0]):
        rows = []
        for kernel in kernels:
            places = {place: figures for place, figures in stored[kernel].items() if not place.startswith("before ")}
            for place, figures in sorted(places.items(), key=lambda one: (one[0].split()[1] != "sm_90", one[0])):
                before = stored[kernel].get(f"before {place}", {})
                changes = (_change(before.get(column), figures.get(column, "")) for column in columns)
                rows.append([f"`{kernel.partition('.')[2]}`", place, *changes])
        lines += ["", f"## {stem}", "", table(["kernel", "Triton, target", *columns], rows)]
    return "\n".join(lines[1:])


def _change(before: int | None, now: int | str) -> str:
    return str(now) if before in (None, now) else f"{before} → {now}"


def formulas(page: str, identifiers: str) -> str:
    """The typeset equations of some requirements, each with the link to its card."""
    found = [entries()[identifier] for identifier in identifiers.split(", ")]
    return "\n".join(
        f"$$\n{entry.formula}\n$$\n\n[{entry.requirement.id} · {escaped(entry.name)}]"
        f"({link_to(page, entry.requirement.id)}){{ .from }}\n"
        for entry in found
    )


def laws(page: str, identifiers: str) -> str:
    """The laws of some requirements, each with its file, its sentence and, folded, its source."""
    found = [(law, law_definition(law)) for identifier in identifiers.split(", ") for law in entries()[identifier].laws]
    return _rendered("laws", page, found=found, fence=_fence) + "\n"


def kills(page: str, identifiers: str) -> str:
    """The planted mistakes that the laws of some requirements kill, as `python -m docs_build.kills` measured it."""
    measured, planted = json.loads((ROOT / "docs" / "four_laws.json").read_text(encoding="utf-8")), load_mutants()
    found = {}
    for identifier in identifiers.split(", "):
        # What is planted for a requirement dies by it, or a test fails, so it belongs here before the next measurement too.
        own = {mutant.name for mutant in entries()[identifier].mutants if not mutant.above}
        killed = {*measured[identifier]["killed"], *own}
        found[identifier] = ([planted[name] for name in sorted(killed)], len(set(measured[identifier]["not_seen"]) - killed))
    return _rendered("kills", page, found=found) + "\n"


def _first_paragraph(docstring: str) -> str:
    return inspect.cleandoc(docstring).partition("\n\n")[0].replace("\n", " ")


def signature(page: str, path: str) -> str:
    """The first lines of a function of reference/, up to its docstring, and the first paragraph of that."""
    sentence, head = summary(path)
    found = definitions(f"reference/{path.partition('.')[0]}.py")[path.partition(".")[2]]
    return f"[`{path}`]({api_link(page, found)}): {escaped(sentence)}\n\n{_fence(head)}"


def summary(path: str) -> tuple[str, str]:
    """The first paragraph of what a function of reference/ says of itself, and its lines up to that."""
    stem, _, name = path.partition(".")
    found = definitions(f"reference/{stem}.py")[name]
    return _first_paragraph(found.docstring).replace("`", ""), re.split(r'\n\s+r?"""', found.source)[0]


def code(page: str, target: str) -> str:
    """A function (`path::name`) or a whole file, quoted, with a link to its page."""
    path, _, name = target.partition("::")
    if name:
        found = definitions(path)[name]
        return f"{_fence(found.source)}\n\n[{path}]({source_url(path, name)})" + "{ .from }"
    language = {"py": "python"}.get(Path(path).suffix[1:], Path(path).suffix[1:])
    return f"~~~~ {language}\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n~~~~"


MARKERS: dict[str, Callable[..., str]] = {
    "overview": overview,
    "equations": equations,
    "gallery": gallery,
    "kept": kept,
    "run": run,
    "ids": ids,
    "compared": compared,
    "counts": counts,
    "errata": errata_list,
    "lessons": lesson_table,
    "formulas": formulas,
    "kills": kills,
    "laws": laws,
    "measured": measured,
    "head_map": head_map,
    "retrieved": retrieved,
    "studied": studied,
    "chart": chart,
    "signature": signature,
    "code": code,
    "compiled": compiled,
}


def filled(page: str, markdown: str) -> str:
    """The page with its markers, `<!-- name: argument -->` on lines of their own, replaced by their content.

    A marker that is indented, as in a tab, is replaced by lines with the same indent. What stands below one, up to `<!-- end -->`,
    is for readers of the file itself (`docs_build.contract`), and is replaced with it.
    """

    def fill(match: re.Match[str]) -> str:
        return textwrap.indent(MARKERS[match["name"]](page, *([match["argument"]] if match["argument"] else [])), match["indent"])

    return re.sub(
        rf"^(?P<indent> *)<!-- (?P<name>{'|'.join(MARKERS)})(?:: (?P<argument>.+?))? -->(?:\n(?:(?!<!--).*\n)+<!-- end -->)?$",
        fill,
        markdown,
        flags=re.MULTILINE,
    )


def linked(page: str, markdown: str) -> str:
    """The page with links added: ids to their equations, tests to their lines there, files outside docs/ to the repository."""
    lines, fenced, before = [], "", ""
    for line in markdown.splitlines():
        fence = re.match(r"\s*(`{3,}|~{3,})", line)
        if fence and (not fenced or line.strip() == fenced):
            fenced = "" if fenced else fence.group(1)
        elif not fenced and not line.startswith(("    ", "<", "#")):
            if re.match(r"[^\[\]]*\]\(", line) and re.search(r"\[[^\[\]]*$", before):
                lines.pop()  # the text of this link began on the line before
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
                lambda match: f"[{match[0]}]({link_to(page, match[0])})" if match[0] in entries() else match[0], part
            )
        elif test := re.fullmatch(r"`((?:spec_)?tests/[\w/]+\.py)::(\w+)`", part):
            parts[place] = f"[{part}]({source_url(*test.groups())})"
        elif file := re.fullmatch(r"(\[[^\]]*\])\((\.\./[^)#]+)\)", part):
            path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), file[2]))
            parts[place] = part if path.startswith("docs/") else f"{file[1]}({source_url(path)})"
    return "".join(parts)


def api_pages() -> dict[str, str]:
    """A page for each module of the three layers, for mkdocstrings to fill."""
    paths = [path for folder in LAYERS for path in sorted((ROOT / folder).glob("*.py")) if path.stem != "__init__"]
    found = {}
    for path in (each.relative_to(ROOT).as_posix() for each in paths):
        module = "evictionary." + path.removesuffix(".py").replace("/", ".")
        found[f"reference/api/{path.removesuffix('.py')}.md"] = f"# {path}\n\n[Source]({source_url(path)})\n\n::: {module}\n"
    return found
