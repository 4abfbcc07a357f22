"""What is planted to measure the laws: wrong implementations that must die, and correct ones on which no law may raise an alarm.

A mutant is a mistake that people make, with the requirement that must kill it and the misconception behind it; when an
implementation fails with the numbers of a mutant, the report names that mistake. A control is correct but different.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evictionary.spec_tests.harness.implementation import STEMS, Implementation
from evictionary.spec_tests.harness.law import REQUIREMENTS


def _import_files(folder: str) -> None:
    package = importlib.import_module(f"evictionary.spec_tests.{folder}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


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
    """Import every file of `mutants/` and return the mutants by name."""
    _import_files("mutants")
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
            vars(modules[stem]).update(vars(importlib.import_module(f"evictionary.reference.{stem}")))
    for path, function in functions.items():
        stem, attribute = path.split(".")
        setattr(modules[stem], attribute, function)
    return Implementation(name, modules, **fields)


@dataclass(frozen=True)
class Control:
    """A correct implementation of the function `of`, computing with NumPy or torch, at each of the dtypes that it claims."""

    name: str
    of: str
    array_library: str
    dtypes: tuple[str, ...]
    function: Callable[..., Any]

    def implementation(self, dtype: str) -> Implementation:
        """This one function, judged alone at a dtype; what else its laws call comes from the reference."""
        return replaced(f"control {self.name}", {self.of: self.function}, array_library=self.array_library, dtype=dtype)


CONTROLS: dict[str, Control] = {}


def control(
    of: str, *, array_library: str = "numpy", dtypes: tuple[str, ...] = ("float64",)
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a correct `of`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{of.split('.')[0]}.{function.__name__}"
        if name in CONTROLS:
            raise KeyError(f"{name}: registered twice")
        CONTROLS[name] = Control(name, of, array_library, dtypes, function)
        return function

    return decorate


def load_controls() -> dict[str, Control]:
    """Import every file of `controls/` and return the controls by name."""
    _import_files("controls")
    return CONTROLS
