"""Which function and which laws stand for each requirement; the site has it as a page.

The ids of a function are those that its docstring begins with: `KD-7: ...`, `LK-7..11: ...`, `EA-1, EA-2:
...`.
"""

import functools
import importlib
import inspect
import re
from collections import defaultdict

from evictionary.spec_tests.judge.implementation import STEMS
from evictionary.spec_tests.judge.law import REQUIREMENTS, Law, Requirement, load_laws
from evictionary.spec_tests.proof.planted import load_mutants
from evictionary.store import table

_ID = r"[A-Z][A-Z\d]{1,4}-[A-Z]{0,2}\d*[A-Z]?"

# What the errata can say of a statement, the gravest first, and what else its verdict may be.
GRADES = ("wrong", "not reproducible from the text", "imprecise", "typo")
VERDICTS = (*GRADES, "restored", "measured", "definition", "true")
_OPENING = re.compile(rf"^({_ID}(?:\.\.[A-Z]?\d+)?(?:, {_ID}(?:\.\.[A-Z]?\d+)?)*):")


def ids_of(docstring: str | None) -> list[str]:
    """The requirement ids that a docstring begins with, ranges spelled out."""
    opening = _OPENING.match((docstring or "").strip())
    found: list[str] = []
    for part in opening.group(1).split(", ") if opening else []:
        first, _, last = part.partition("..")
        found.append(first)
        prefix, number = re.match(r"(.*?)(\d*)$", first).groups()  # type: ignore[union-attr]
        found += [f"{prefix}{n}" for n in range(int(number or 0) + 1, int(re.sub(r"\D", "", last) or 0) + 1)]
    return found


@functools.cache
def functions() -> dict[str, list[str]]:
    """For each requirement id, the functions of `reference` whose docstring begins with it."""
    found: dict[str, list[str]] = defaultdict(list)
    for stem in STEMS:
        module = importlib.import_module(f"evictionary.reference.{stem}")
        for name, member in vars(module).items():
            if (
                inspect.isfunction(member) or inspect.isclass(member)
            ) and member.__module__ == module.__name__:
                for identifier in ids_of(member.__doc__):
                    found[identifier].append(f"{stem}.{name}")
    return dict(found)  # the same for all that ask: looking up an id must not add it


def uncovered() -> list[str]:
    """Say what is missing: an id without function, law or reason; an id in a docstring that no requirement
    has.
    """
    written, laws = functions(), {law.requirement.id for law in load_laws().values()}
    problems = [
        f"{identifier}: no law, and no reason why"
        for identifier, requirement in REQUIREMENTS.items()
        if identifier not in laws and not requirement.no_law
    ]
    problems += [
        f"{identifier} ({', '.join(names)}): no such requirement"
        for identifier, names in written.items()
        if identifier not in REQUIREMENTS
    ]
    return problems


def page() -> str:
    """The coverage page as Markdown: one table for each paper, one row for each requirement."""
    written = functions()
    laws: dict[str, list[Law]] = defaultdict(list)
    mutants: dict[str, int] = defaultdict(int)
    for law in load_laws().values():
        laws[law.requirement.id].append(law)
    for mutant in load_mutants().values():
        mutants[mutant.killed_by] += 1
    papers: dict[str, list[Requirement]] = defaultdict(list)
    for requirement in REQUIREMENTS.values():
        papers[requirement.paper].append(requirement)
    lines = [
        "# Coverage",
        "",
        "Every numbered equation, theorem, table and claim, with the function that implements it and the "
        "laws that test it.",
        "A test fails where an id has no law and no reason. The verdict is on the statement as the paper "
        "prints it, in the version",
        "that the heading names. *True* statements hold as printed; a *definition* is used as printed. "
        "*Restored* formulas were",
        "lost in the text that was read, and are derived anew. *Measured* claims need a real model. The "
        "other words are the grades",
        "of the [errata](errata.md), where each has its entry; a test holds both pages to the same words. "
        "Where something else",
        "holds, or less, it stands below the statement. Another test compares the requirements with the list "
        "of all that papers",
        "print under a number and of the figures that they claim (`spec_tests/papers/printed.toml`).",
        "",
        f"{len(REQUIREMENTS)} requirements, {len(load_laws())} laws, {len(load_mutants())} planted mistakes.",
        "",
    ]
    for paper, requirements in papers.items():
        total = sum(len(laws[requirement.id]) for requirement in requirements)
        heading = f"{paper[0].upper()}{paper[1:]}" + (
            f" ({requirements[0].version})" if requirements[0].version else ""
        )
        lines += [f"## {heading}", "", f"{len(requirements)} requirements, {total} laws.", ""]
        rows = []
        for requirement in requirements:
            own = laws[requirement.id]
            names = (
                "<br>".join(f"`{name}`" for name in written.get(requirement.id, [])) or "the laws compute it"
            )
            listed = "<br>".join(f"{law.sentence}" for law in own) or f"none: {requirement.no_law}"
            row = [
                requirement.id,
                requirement.statement
                + (f" ({requirement.where})" if requirement.where else "")
                + (f"<br>*what holds:* {requirement.mended}" if requirement.mended else ""),
                requirement.verdict,
                names,
                listed,
                str(mutants[requirement.id] or ""),
            ]
            rows.append(row)
        lines += [table(["id", "statement", "verdict", "function", "laws", "planted mistakes"], rows), ""]
    return "\n".join(lines)
