"""Shared preconditions of tensors: a ValueError names the argument, its value and the wanted form."""

from __future__ import annotations

import math

import torch


def require_states(name: str, value: torch.Tensor, axes: str, *, finite: bool = True) -> None:
    """Raise ValueError unless `value` is a floating tensor with the axes that `axes` spells, such as `"... T D"`.

    NaN and infinite numbers are refused on a CPU. On a GPU the check would wait for the result and stall every later launch:
    there NaN passes through to NaN scores and a NaN output, never to a wrong address.
    `finite=False` leaves that check to a caller that can do it at no cost.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: got {type(value).__name__}, wanted a torch tensor")
    if not value.is_floating_point():
        raise ValueError(f"{name}: got dtype {value.dtype}, wanted a floating dtype")
    wanted = axes.split()
    open_ended = wanted[0] == "..."
    count = len(wanted) - open_ended
    if value.ndim < count or (value.ndim > count and not open_ended):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, wanted [{', '.join(wanted)}]")
    if 0 in value.shape:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, wanted no empty axis in [{', '.join(wanted)}]")
    if finite:
        require_finite(name, value)


def require_finite(name: str, value: torch.Tensor) -> None:
    """Raise ValueError for NaN or infinite numbers in a CPU tensor; see `require_states` for GPUs."""
    if value.device.type == "cpu" and not is_finite(value):
        raise ValueError(f"{name}: got NaN or infinite numbers, wanted finite ones")


def is_finite(value: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinite numbers; on a GPU this waits for the result."""
    # NaN and infinite numbers make the sum NaN or infinite, and nothing else on a CPU reads memory as fast as a sum.
    if math.isfinite(value.sum().item()):
        return True
    # Or finite numbers overflow it. Any NaN makes both NaN. In the order of storage: a transposed view would be copied first.
    low, high = value.permute(sorted(range(value.ndim), key=value.stride, reverse=True)).aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())


def require_shape(name: str, value: torch.Tensor, wanted: tuple[int, ...], like: str) -> None:
    """Raise ValueError unless `value` has the shape `wanted`, which `like` explains ("the shape of keys")."""
    if tuple(value.shape) != tuple(wanted):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, wanted {tuple(wanted)} ({like})")


def require_same_device(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless `value` lives on the device of `other`."""
    if value.device != other.device:
        raise ValueError(f"{name}: got device {value.device}, wanted {other.device} (that of {other_name})")


def require_same_kind(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless `value` has the dtype of `other` and lives on its device."""
    if value.dtype != other.dtype:
        raise ValueError(f"{name}: got dtype {value.dtype}, wanted {other.dtype} (that of {other_name})")
    require_same_device(name, value, other_name, other)


def require_tokens(keys: torch.Tensor, values: torch.Tensor, lead: str = "... T") -> None:
    """Raise ValueError unless keys [lead, D] and values [lead, D_v] are the states of the same tokens."""
    require_states("keys", keys, f"{lead} D")
    require_states("values", values, f"{lead} D_v")
    require_shape("values", values, (*keys.shape[:-1], values.shape[-1]), "the batch, heads and tokens of keys")
    require_same_kind("values", values, "keys", keys)


def require_mask(name: str, value: torch.Tensor, like_name: str, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `value` is a boolean mask of the shape `shape` on the device of `like`."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{name}: got dtype {got}, wanted a boolean mask, True = keep")
    require_shape(name, value, shape, f"the batch, heads and tokens of {like_name}")
    require_same_device(name, value, like_name, like)


def working_dtype(value: torch.Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic and of the scores: float64 for float64, float32 for all others."""
    # Decision: scores of float16 and bfloat16 keys are float32. Rounded to bfloat16, the scores of a long cache have a few
    # hundred distinct values, and the choice among thousands of tokens would be left to the rule for ties.
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def working_room(value: torch.Tensor, most: int) -> torch.Tensor:
    """Return memory for `converted`: `most` numbers, or one token of all heads, of the working dtype of `value` [..., T, D].

    Memory that is used again block after block stays in the processor's cache. It is empty if nothing is to be converted.
    """
    dtype = working_dtype(value)
    size = min(max(most, value.numel() // value.shape[-2]), value.numel())
    return value.new_empty(0 if value.dtype == dtype else size, dtype=dtype)


def converted(value: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Return a block of `value` in its working dtype: as it is, or written into the room, where the next block overwrites it."""
    return value if value.dtype == room.dtype else room[: value.numel()].view(value.shape).copy_(value)
