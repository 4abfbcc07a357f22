"""Shared preconditions of tensors: a ValueError names the argument, its value and the wanted form."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from evictionary.reference.contract import Argument, Axes, arguments, contract_of, naming

from . import gradients

# The numbers of a kind, where it has not all of them.
BETWEEN = {"weight": (0, math.inf), "share": (0, 1), "cosine": (-1, 1)}
Function = TypeVar("Function", bound=Callable[..., Any])


def fits(*, free: tuple[str, ...] = (), finite: bool = True) -> Callable[[Function], Function]:
    """Check the arguments of a function as the signature of the same function in `reference` says: its
    tensors as `require_fit` does, which free and finite are for, and the range of each setting.
    """

    def decorate(function: Function) -> Function:
        path = f"{function.__module__.split('.')[-1]}.{function.__name__}"
        by_name = naming(inspect.signature(function))

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            said, given = contract_of(path), by_name(*args, **kwargs)
            if said.arguments:
                require_fit(path, *(given[each.name] for each in said.arguments), free=free, finite=finite)
            return function(**said.settled(given))

        return checked  # type: ignore[return-value]

    return decorate


def require_fit(line: str, *given: Any, free: tuple[str, ...] = (), finite: bool = True) -> None:
    """Raise ValueError unless the tensors fit the signature of a function of the reference, or a line,
    and one another.

    All live on one device. Tensors of floating numbers have the dtype of the first of
    them, those named in `free` and the fields of states excepted. NaN and infinite numbers
    are refused on a CPU. On a GPU the check would wait for the result and stall every
    later launch: there NaN passes through to NaN scores and a NaN output, never to a wrong
    address. `finite=False` leaves the check to a caller that can do it at no cost.
    """
    tensors = list(_tensors(arguments(line), given))
    _require_alike(tuple((argument, each.dtype, each.shape, each.device) for argument, each in tensors), free)
    for argument, value in tensors:
        if finite and value.is_cpu:
            _require_numbers(argument, value)


@functools.lru_cache(maxsize=1024)  # a step of decoding has the same shapes as the one before
def _require_alike(
    tensors: tuple[tuple[Argument, torch.dtype, torch.Size, torch.device], ...], free: tuple[str, ...]
) -> None:
    """Raise ValueError unless the kinds, shapes, devices and dtypes of tensors fit one another."""
    axes = Axes()
    for argument, dtype, shape, _ in tensors:
        _require_kind(argument, dtype)
        axes.fit(argument, tuple(shape))
    axes.relate()
    first, wanted, _, there = tensors[0]
    for argument, dtype, _, device in tensors:
        _require_device(argument.name, device, first.name, there)
        alike = dtype.is_floating_point and wanted.is_floating_point and "." not in argument.name
        if alike and argument.name not in free and dtype != wanted:
            raise ValueError(f"{argument.name}: got dtype {dtype}, wanted {wanted} (that of {first.name})")


def _tensors(line: tuple[Argument, ...], given: tuple[Any, ...]) -> Iterator[tuple[Argument, torch.Tensor]]:
    """Each tensor with its argument, those of a state one by one. Raises ValueError for what is neither."""
    for argument, value in zip(line, given, strict=True):
        if value is None and argument.optional:
            continue
        if argument.state:
            fields = argument.fields
            if not all(hasattr(value, name) for name in fields):
                raise ValueError(
                    f"{argument.name}: got {type(value).__name__}, wanted "
                    f"{argument.kind}({', '.join(fields)})"
                )
            yield from _tensors(tuple(fields.values()), tuple(getattr(value, name) for name in fields))
        elif not isinstance(value, torch.Tensor):
            raise ValueError(f"{argument.name}: got {type(value).__name__}, wanted a torch tensor")
        else:
            yield argument, value


def _require_kind(argument: Argument, dtype: torch.dtype) -> None:
    """Raise ValueError unless a tensor has the dtype of its kind. A field of a state may hold whole
    numbers of any dtype.
    """
    real = dtype != torch.bool and not dtype.is_complex
    match argument.kind:
        case "bool":
            fits, wanted = dtype == torch.bool, "a boolean mask, True = keep"
        case "whole":
            fits, wanted = real and ("." in argument.name or not dtype.is_floating_point), "whole numbers"
        case "open":
            fits, wanted = real, "real numbers"
        case _:
            fits, wanted = dtype.is_floating_point, "a floating dtype"
    if not fits:
        raise ValueError(f"{argument.name}: got dtype {dtype}, wanted {wanted}")


def _require_numbers(argument: Argument, value: torch.Tensor) -> None:
    """Raise ValueError for numbers on a CPU that the kind of the argument does not have."""
    match argument.kind:
        case "bool" | "memory":
            return
        case "open":
            if value.isnan().any():
                raise ValueError(f"{argument.name}: got NaN, wanted numbers that can be ordered")
        case "whole":
            if (value < 0).any() or (value.is_floating_point() and (value != value.floor()).any()):
                raise ValueError(
                    f"{argument.name}: got a negative or broken number, wanted whole numbers of at least 0"
                )
        case kind:
            require_finite(argument.name, value)
            low, high = BETWEEN.get(kind, (-math.inf, math.inf))
            if kind in BETWEEN and ((value < low).any() or (value > high).any()):
                raise ValueError(f"{argument.name}: got numbers outside their range, wanted a {kind}")


def require_finite(name: str, value: torch.Tensor) -> None:
    """Raise ValueError for NaN or infinite numbers in a CPU tensor; see `require_fit` for GPUs."""
    if value.device.type == "cpu" and not is_finite(value):
        raise ValueError(f"{name}: got NaN or infinite numbers, wanted finite ones")


def require_finite_by(scores: torch.Tensor, **given: torch.Tensor) -> None:
    """Raise ValueError as `require_finite` does for each of `given`, if the scores that they make are not
    finite. NaN and infinity reach the scores, and these are fewer numbers to read.
    """
    if scores.device.type == "cpu" and not is_finite(scores):
        for name, value in given.items():
            require_finite(name, value)


def is_finite(value: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinite numbers; on a GPU this waits for the result."""
    # NaN and infinite numbers make the sum NaN or infinite, and nothing else on a CPU reads memory as fast as
    # a sum.
    if math.isfinite(value.sum().item()):
        return True
    # Or finite numbers overflow it. Any NaN makes both NaN. In the order of storage: a transposed view would
    # be copied first.
    low, high = value.permute(sorted(range(value.ndim), key=value.stride, reverse=True)).aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())


def require_shape(name: str, value: torch.Tensor, wanted: tuple[int, ...], like: str) -> None:
    """Raise ValueError unless `value` has the shape `wanted`, which `like` explains ("the shape of keys")."""
    if tuple(value.shape) != tuple(wanted):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, wanted {tuple(wanted)} ({like})")


def require_same_device(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless `value` lives on the device of `other`."""
    _require_device(name, value.device, other_name, other.device)


def _require_device(name: str, device: torch.device, other_name: str, wanted: torch.device) -> None:
    if device != wanted:
        raise ValueError(f"{name}: got device {device}, wanted {wanted} (that of {other_name})")


def require_same_kind(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless `value` has the dtype of `other` and lives on its device."""
    if value.dtype != other.dtype:
        raise ValueError(f"{name}: got dtype {value.dtype}, wanted {other.dtype} (that of {other_name})")
    require_same_device(name, value, other_name, other)


def working_dtype(value: torch.Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic and of the scores: float64 for float64, float32 for all others."""
    # Decision: scores of float16 and bfloat16 keys are float32. Rounded to bfloat16, the scores of a long
    # cache have a few hundred distinct values, and the choice among thousands of tokens would be left to the
    # rule for ties.
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def working_room(value: torch.Tensor, most: int) -> torch.Tensor:
    """Return memory for `converted`: `most` numbers, or one token of all heads, of the working dtype of
    `value` [..., T, D].

    Memory that is used again block after block stays in the
    processor's cache. It is empty if nothing is to be converted.
    """
    return (
        value.new_empty(0, dtype=value.dtype)
        if value.dtype == working_dtype(value)
        else room_for(value, most)
    )


def room_for(value: torch.Tensor, most: int) -> torch.Tensor:
    """Return the memory of `working_room`, also where nothing is to be converted."""
    size = min(max(most, value.numel() // value.shape[-2]), value.numel())
    return value.new_empty(size, dtype=working_dtype(value))


def converted(value: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Return a block of `value` in its working dtype: as it is, or written into the room, where the next
    block overwrites it; in memory of its own where a gradient is wanted.
    """
    if value.dtype == room.dtype or gradients.are_wanted(value):
        return value.to(room.dtype)
    return room[: value.numel()].view(value.shape).copy_(value)
