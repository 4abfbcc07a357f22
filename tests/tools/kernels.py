"""What the tests of the kernels share: the files of kernels, which functions are kernels, and how to compile them."""

import importlib
import json
from typing import Any

from evictionary.optimized.kernels import compiling

from .programs import python

KERNELS = {stem: importlib.import_module(f"{compiling.__package__}.{stem}") for stem in compiling.stems()}


def launched_by_a_grid() -> dict[str, str]:
    """The name of each kernel that a launcher starts, and the stem of the file that defines it."""
    named = {(stem, name): getattr(value, "fn", None) for stem, file in KERNELS.items() for name, value in vars(file).items()}
    return {name: stem for (stem, name), function in named.items() if "Grid" in (getattr(function, "__doc__", None) or "")}


def compiled(*arguments: object, fused: bool = False, code: int | None = 0) -> list[dict[str, Any]]:
    """The JSON lines of a program without Triton's interpreter, which would take the place of the compiler."""
    done = python(*arguments, code=code, TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION=int(fused))
    return [json.loads(line) for line in done.stdout.splitlines()]
