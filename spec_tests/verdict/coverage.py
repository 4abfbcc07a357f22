"""Which function stands for each requirement, and whether each has a law; the site has it as a page.

The ids of a function are those that its docstring begins
with: `KD-7: ...`, `LK-7..11: ...`, `EA-1, EA-2: ...`.
"""

import functools
import importlib
import inspect
import re

from evictionary.spec_tests.judge.implementation import STEMS
from evictionary.spec_tests.judge.law import REQUIREMENTS, load_laws
from evictionary.store import grouped

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
    modules = {stem: importlib.import_module(f"evictionary.reference.{stem}") for stem in STEMS}
    return grouped(
        (identifier, f"{stem}.{name}")
        for stem, module in modules.items()
        for name, member in vars(module).items()
        if inspect.isfunction(member) or inspect.isclass(member)
        if member.__module__ == module.__name__
        for identifier in ids_of(member.__doc__)
    )


def uncovered() -> list[str]:
    """Say what is missing: an id without function, law or
    reason; an id in a docstring that no requirement has.
    """
    laws = {law.requirement.id for law in load_laws().values()}
    return [
        f"{identifier}: no law, and no reason why"
        for identifier, requirement in REQUIREMENTS.items()
        if identifier not in laws and not requirement.no_law
    ] + [
        f"{identifier} ({', '.join(names)}): no such requirement"
        for identifier, names in functions().items()
        if identifier not in REQUIREMENTS
    ]
