"""Planted wrong implementations: mistakes that people make, each with the law that must kill it and the misconception behind it.

A file per method, `mutants/<stem>.py`; a mutant is a function with the signature of the one it replaces, in NumPy, ten lines or so.
They measure the laws (every mutant must die by its own requirement) and they are the bank of misconceptions: when an implementation
fails with the numbers of a mutant, the report names that mistake.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec_tests.implementation import STEMS, Implementation
from spec_tests.law import REQUIREMENTS


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation of the function `of`; `killed_by` is the requirement whose laws must kill it."""

    name: str
    of: str
    killed_by: str
    misconception: str
    function: Callable[..., Any]
    array_library: str = "numpy"

    def implementation(self) -> Implementation:
        """The reference with this one function replaced."""
        fields = {"array_library": "torch", "dtype": "float32"} if self.array_library == "torch" else {}
        return replaced(f"mutant {self.name}", {self.of: self.function}, **fields)


MUTANTS: dict[str, Mutant] = {}


def mutant(
    of: str, *, killed_by: str, misconception: str, array_library: str = "numpy"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Plant the decorated function as a wrong `of`; the misconception completes "your numbers equal those of: ..."."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{of.split('.')[0]}.{function.__name__}"
        if killed_by not in REQUIREMENTS:
            raise KeyError(f"{name}: killed_by={killed_by!r} is no requirement")
        if name in MUTANTS:
            raise KeyError(f"{name}: planted twice")
        MUTANTS[name] = Mutant(name, of, killed_by, misconception, function, array_library)
        return function

    return decorate


def load_mutants() -> dict[str, Mutant]:
    """Import every file of this folder and return the mutants by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return MUTANTS


def replaced(name: str, functions: dict[str, Callable[..., Any]], **fields: Any) -> Implementation:
    """The reference as an implementation to judge, with some functions (`stem.function`) replaced.

    The reference takes no tensors: a replacement that computes with torch is judged alone.
    """
    alone = fields.get("array_library") == "torch"
    modules = {}
    for stem in sorted({path.split(".")[0] for path in functions}) if alone else STEMS:
        modules[stem] = types.ModuleType(stem)
        if not alone:
            vars(modules[stem]).update(vars(importlib.import_module(f"reference.{stem}")))
    for path, function in functions.items():
        stem, attribute = path.split(".")
        setattr(modules[stem], attribute, function)
    return Implementation(name, modules, **fields)
