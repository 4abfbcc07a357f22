r"""Gradients: the answer of a function carries the graph of its arguments, or the call is refused by name.

The rule for every function of `optimized`, whether kernels or torch compute it:

- A gradient is *wanted* where torch records a graph and an argument requires one. There `kernels.take` says
  no, for no kernel carries a graph. The torch path computes with functions that torch differentiates.
- A mask or whole numbers have no gradient. A function that gives nothing else computes as under
  `torch.no_grad()`, by its decorator.
- A function that writes into its arguments is refused, as is a kernel that is called without `kernels.take`.

`torch.no_grad()`, inference mode and arguments that require no gradient change nothing.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def are_wanted(*given: Any) -> bool:
    """Whether torch records a graph, and a tensor of `given`, alone or in a tuple, requires a gradient."""
    # Decision: a graph or a refusal; a kernel that detaches gives the same loss and no gradient.
    return torch.is_grad_enabled() and next(_requiring("", given), None) is not None


def require_unwanted(function: str, why: str, **given: Any) -> None:
    """Raise ValueError, naming the function and the argument, where a gradient is wanted of one."""
    if not torch.is_grad_enabled():
        return
    for argument, value in given.items():
        for name in _requiring(argument, value):
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, wanted one that requires none: "
                f"{function} {why}; call it under torch.no_grad(), or with {name}.detach()"
            )


def _requiring(name: str, value: Any) -> Iterator[str]:
    """The names of the tensors that require a gradient: the value itself, or the fields of a tuple."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield name
    elif isinstance(value, tuple | list):
        for field, own in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from _requiring(f"{name}.{field}", own)


LAUNCHES = "launches kernels, which carry no graph"


def refuse(
    function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], why: str = LAUNCHES
) -> None:
    """Raise ValueError where a gradient is wanted of an argument of a function that carries no graph."""
    if are_wanted(given, tuple(named.values())):
        path = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        arguments = inspect.signature(function).bind(*given, **named).arguments
        require_unwanted(path, why, **arguments)


def forward_only(function: Function, why: str = LAUNCHES) -> Function:
    """Let a function that carries no graph refuse arguments of which a gradient is wanted, and say why."""

    @functools.wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        refuse(function, given, named, why)
        return function(*given, **named)

    return checked  # type: ignore[return-value]
