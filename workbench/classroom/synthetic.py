"""A class that never was: right, wrong and hostile submissions, to see that the grader grades.

`python -m workbench.classroom.synthetic FOLDER` writes one for each of the reference, every planted mistake and every attack of
the NumPy assignment `--assignment`, and fills up with copies under other names to `--count`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import reference
from spec_tests.implementation import STEMS
from spec_tests.mutants import Mutant, load_mutants
from workbench.classroom.assignment import Assignment

_LOADER = '''"""A whole package in one file: what a student hands in who has it right, or who has made one mistake."""

import sys
import types

SOURCES = {sources!r}
for name, source in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, stem = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], stem, module)
    else:
        module.__path__ = []
    exec(compile(source, name, "exec"), vars(module))
for name, value in vars(sys.modules["bundled.{stem}"]).items():
    if not name.startswith("_"):
        globals()[name] = value
{last}
'''
_MUTANT_STUB = "def mutant(*args, **kwargs):\n    return lambda function: function\n"


def bundled(stem: str, mutant: Mutant | None = None) -> str:
    """The reference of a method as one file that imports NumPy alone; a mutant takes the place of the right function."""
    sources = {"bundled": ""}
    for name in STEMS:
        _add(name, sources)
    last = ""
    if mutant is not None:
        spec_tests = importlib.import_module("spec_tests")
        tests = Path(next(iter(spec_tests.__path__)))
        sources["bundled.oracle"] = (
            "import importlib\ndef oracle(path):\n    stem, name = path.split('.')\n"
            "    return getattr(importlib.import_module(f'bundled.{stem}'), name)\n"
        )
        sources["bundled.arithmetic"] = _renamed((tests / "arithmetic.py").read_text(encoding="utf-8"))
        sources["bundled.mutants"] = _MUTANT_STUB
        source_file = inspect.getsourcefile(inspect.unwrap(mutant.function)) or ""
        sources["bundled.wrong"] = _renamed(Path(source_file).read_text(encoding="utf-8"))
        function = mutant.of.split(".")[1]
        last = f'{function} = vars(sys.modules["bundled.wrong"])["{mutant.name.split(".")[1]}"]'
    return _LOADER.format(sources=sources, stem=stem, last=last)


def _add(name: str, sources: dict[str, str]) -> None:
    """Add a module of the reference after those that it imports."""
    source = (Path(next(iter(reference.__path__))) / f"{name}.py").read_text(encoding="utf-8")
    for module, listed in re.findall(r"^from reference(?:\.(\w+))? import \(?([\w, ]*)", source, flags=re.MULTILINE):
        for needed in [module] if module else re.findall(r"\w+", listed):
            if f"bundled.{needed}" not in sources:
                _add(needed, sources)
    sources.setdefault(f"bundled.{name}", _renamed(source))


def _renamed(source: str) -> str:
    source = re.sub(r"\bfrom spec_tests\.implementation import", "from bundled.oracle import", source)
    return re.sub(r"\b(from|import) (reference|spec_tests)\b", r"\1 bundled", source)


def mutants_of(assignment: Assignment) -> list[Mutant]:
    """The planted mistakes that the assignment asks about: in one of its functions, against one of its requirements."""
    from spec_tests.matrix import load_laws

    laws = load_laws()
    functions = {function for step in assignment.steps for name in step.laws for function in laws[name].functions}
    requirements = {laws[name].requirement.id for step in assignment.steps for name in step.laws}
    return [one for one in load_mutants().values() if one.of in functions and one.killed_by in requirements]
