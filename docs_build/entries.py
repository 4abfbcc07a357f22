"""Collects the facts about each requirement: equation, functions, kernel, laws, planted mistakes, errata.

Sources: the requirements of spec_tests/, the docstrings of reference/ and optimized/ (read, not imported),
the registered laws and mutants, the headings of docs/errata.md.
"""

import ast
import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from markdown.extensions.toc import slugify

from evictionary.spec_tests.judge.law import REQUIREMENTS, Law, Requirement, load_laws
from evictionary.spec_tests.proof.planted import Mutant, load_mutants
from evictionary.spec_tests.verdict.coverage import functions, ids_of
from evictionary.store import grouped

ROOT = Path(__file__).parent.parent

SHARED = ("shared", "rope", "kv_cache", "memory")


def _page(stem: str) -> str:
    candidates = (f"methods/{stem}_equations.md", f"methods/{stem}.md", f"{stem}.md")
    own = (page for page in candidates if (ROOT / "docs" / page).exists())
    return next(own, "reference/shared_rules.md" if stem in SHARED else "methods/baselines.md")


# The page with the equations of each file of requirements: its own, if there is one.
PAGES = {
    path.parent.name: _page(path.parent.name)
    for path in sorted((ROOT / "spec_tests").glob("*/requirements.toml"))
}


@dataclass(frozen=True)
class Definition:
    """A function or class of the repository: its file, its name, its lines (from 1) and its docstring."""

    path: str
    name: str
    first: int
    last: int
    docstring: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def source(self) -> str:
        return "\n".join(
            (ROOT / self.path).read_text(encoding="utf-8").splitlines()[self.first - 1 : self.last]
        )


@dataclass(frozen=True)
class Entry:
    """One requirement with its functions, laws, planted mistakes and errata."""

    requirement: Requirement
    page: str
    reference: tuple[Definition, ...]
    torch: tuple[Definition, ...]
    kernels: tuple[Definition, ...]
    laws: tuple[Law, ...]
    mutants: tuple[Mutant, ...]
    errata: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The short name if the requirement is an equation; otherwise the place in the paper."""
        return self.requirement.name or self.requirement.where

    @property
    def layers(self) -> dict[str, tuple[Definition, ...]]:
        """The functions that compute it, by layer (NumPy, torch, Triton)."""
        return {"NumPy": self.reference, "torch": self.torch, "Triton": self.kernels}

    @property
    def anchor(self) -> str:
        return self.requirement.id.lower()


@functools.cache
def definitions(path: str) -> dict[str, Definition]:
    """The functions and classes at the top of a Python file, decorators included."""
    return {
        node.name: Definition(
            path,
            node.name,
            min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]),
            node.end_lineno or node.lineno,
            ast.get_docstring(node) or "",
        )
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


@functools.cache
def stem_of() -> dict[str, str]:
    """For each requirement the file that states it."""
    return {
        identifier: path.parent.name
        for path in sorted((ROOT / "spec_tests").glob("*/requirements.toml"))
        for identifier, value in tomllib.loads(path.read_text(encoding="utf-8")).items()
        if isinstance(value, dict)
    }


@functools.cache
def errata() -> dict[str, list[tuple[str, str]]]:
    """For each requirement the headings of docs/errata.md that name it, with their anchors."""
    page = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    return grouped(
        (identifier, (title.partition(": ")[2], slugify(title, "-")))
        for title in re.findall(r"^#{3,4} (.+)$", page, flags=re.MULTILINE)
        for identifier in ids_of(title)
    )


def _in_layer(folder: str, reference: tuple[Definition, ...], identifier: str) -> tuple[Definition, ...]:
    """The functions of a layer that compute the requirement: by the same name in the same file, or by the
    id in the docstring.
    """
    names = {(Path(definition.path).name, definition.name) for definition in reference}
    return tuple(
        definition
        for path in sorted((ROOT / folder).glob("*.py"))
        for definition in definitions(f"{folder}/{path.name}").values()
        if (path.name, definition.name) in names or identifier in ids_of(definition.docstring)
        if not definition.name.startswith("_")
    )


@functools.cache
def entries() -> dict[str, Entry]:
    """Every requirement of spec_tests/, by id."""
    written = {
        identifier: [path.partition(".") for path in paths] for identifier, paths in functions().items()
    }
    references = {
        identifier: tuple(
            definitions(f"reference/{stem}.py")[name] for stem, _, name in written.get(identifier, [])
        )
        for identifier in REQUIREMENTS
    }
    # The order in which laws were imported is that of whoever asked for some of them first.
    laws = sorted(load_laws().values(), key=lambda law: law.path)
    mutants = load_mutants().values()
    return {
        identifier: Entry(
            REQUIREMENTS[identifier],
            PAGES[stem_of()[identifier]],
            reference,
            _in_layer("optimized", reference, identifier),
            # the kernel to read, where no other one is needed
            _in_layer("optimized/kernels", reference, identifier)
            or _in_layer("optimized/teaching", reference, identifier),
            tuple(law for law in laws if law.requirement.id == identifier),
            tuple(mutant for mutant in mutants if mutant.killed_by == identifier),
            tuple(errata().get(identifier, [])),
        )
        for identifier, reference in references.items()
    }


def law_definition(law: Law) -> Definition:
    """The file and line of a law; of one that is made from
    the contract, those of the function that makes it.
    """
    found = definitions(f"spec_tests/{law.path}")
    return found.get(law.name.partition("::")[2]) or found["refusing"]


def mutant_definition(mutant: Mutant) -> Definition | None:
    """The place of a planted mistake that is a function; None for an edit of the right function."""
    if mutant.written is None:
        return None
    module = mutant.written.__module__.removeprefix("evictionary.")
    return definitions(module.replace(".", "/") + ".py")[mutant.written.__name__]
