"""Correct but different implementations: other summation orders, tiles, float32 inside, torch. No law may raise an alarm on them.

A file per method, `controls/<stem>.py`. Together with the mutants they measure the laws in both directions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec_tests.implementation import Implementation
from spec_tests.mutants import replaced


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
    """Import every file of this folder and return the controls by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return CONTROLS
