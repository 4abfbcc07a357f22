"""What the tests of the kernels share: the files of kernels,
which functions are kernels, and how to compile them.
"""

import importlib
import json
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from evictionary.optimized.kernels import compiling

from . import ROOT, python

KERNELS = {stem: importlib.import_module(f"{compiling.__package__}.{stem}") for stem in compiling.stems()}


def launched_by_a_grid() -> set[str]:
    """The names of the kernels that launchers start."""
    named = {
        name: getattr(value, "fn", None) for file in KERNELS.values() for name, value in vars(file).items()
    }
    return {name for name, function in named.items() if "Grid" in (getattr(function, "__doc__", None) or "")}


def compiled(*arguments: object, fused: bool = False, code: int | None = 0) -> list[dict[str, Any]]:
    """The JSON lines of a program without Triton's
    interpreter, which would take the place of the compiler.
    """
    environment = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": int(fused), "PYTHONPATH": ROOT}
    return [json.loads(line) for line in python(*arguments, code=code, **environment).stdout.splitlines()]


def assert_close(got: Any, wanted: Any, bound: float) -> None:
    """Whole numbers and masks are equal; other numbers differ
    by at most `bound` of the largest one of their tensor.
    """
    for mine, exact in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        assert mine.shape == exact.shape
        finite = exact.isfinite()
        if not exact.is_floating_point() or not finite.any():
            assert torch.equal(mine.to(exact.dtype), exact)
        else:
            assert torch.equal(mine[~finite].double(), exact[~finite])
            away, size = (
                (mine.double() - exact)[finite].abs().amax(),
                exact[finite].abs().amax().clamp(min=1e-30),
            )
            assert away <= bound * size, f"{away / size} of the largest number"
