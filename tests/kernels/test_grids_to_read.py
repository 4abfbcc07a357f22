"""The grids of the kernels to read, for long texts: CUDA takes 65,535 programs on a second axis."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.jit import KernelInterface

from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import load, oracle
from evictionary.spec_tests.memory.arguments import arguments_of

TO_READ = load("evictionary.optimized.teaching")
LONG, LONGER = 512, 1024
MOST = 65_535
TOKENS = 2**19
"""A text of half a million tokens is longer than today's models read."""


def apart(path: str, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments by place, which each file names as it likes, and those by name."""
    parameters = inspect.signature(oracle(path)).parameters
    named = {name for name in given if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY}
    by_place = [value for name, value in given.items() if name not in named]
    return by_place, {name: given[name] for name in named}


def grids(path: str, length: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grids of a call for a text of this length, in which no kernel runs."""
    found: list[tuple[int, ...]] = []

    def noted(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        found.append(grid)
        return lambda *given, **named: None

    case = Case("normal", length=length, num_kv_heads=2, group=2, num_queries=4, head_dim=16, value_dim=16)
    given = arguments_of(TO_READ, path, case)
    with monkeypatch.context() as patched:
        patched.setattr(KernelInterface, "__getitem__", noted)
        # What no kernel writes has to be a number: some functions go on with it as a place in a tensor.
        patched.setattr(torch, "empty", torch.zeros)
        patched.setattr(torch, "empty_like", torch.zeros_like)
        patched.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        by_place, by_name = apart(path, {name: TO_READ.native(value) for name, value in given.items()})
        TO_READ.function(path)(*by_place, **by_name)
    return found


@pytest.mark.parametrize("path", TO_READ.functions())
def test_a_long_text_fits_into_the_grid(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for grid, longer in zip(grids(path, LONG, monkeypatch), grids(path, LONGER, monkeypatch), strict=True):
        for size, more in zip(grid[1:], longer[1:], strict=True):
            of_a_token = (more - size) / (LONGER - LONG)
            assert size + of_a_token * (TOKENS - LONG) <= MOST, (
                f"{grid}, and {longer} for a text twice as long"
            )
