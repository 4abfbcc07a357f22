r"""Quantised caches: KIVI (arXiv 2402.02750), Hadamard rotation (as QuaRot, arXiv 2404.00456) and fp8
(e4m3, arXiv 2209.05433): each number of a cache in 8 bits or fewer.

A rounded number has no slope. So a call of which a gradient is wanted is refused, but for `dequantise` and
`hadamard`, which carry the graph.
"""

import functools

import torch

from evictionary.reference.quantisation import LARGEST, kivi_bytes, quantised_tokens

from . import gradients
from .checks import fits, working_dtype
from .operators import operator

__all__ = [
    "by_channel",
    "by_token",
    "dequantise",
    "e4m3",
    "fp8",
    "hadamard",
    "kivi",
    "kivi_bytes",
    "pack",
    "quantise",
    "quantised_tokens",
    "rotated",
    "unpack",
]

_rounding = functools.partial(gradients.forward_only, why="rounds, and a rounded number has no slope")


@operator(torch.uint8, "numbers", "numbers")
@_rounding
@fits()
def quantise(numbers: torch.Tensor, *, bits: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""QC-1: `c = round((x - z) / s)` with `z = min x` and `s = (max x - min x) / (2^bits - 1)`, of a group.

    Args: numbers [..., n], the last axis is a group; bits of a code, 1 to 8. Returns the codes [..., n],
    uint8, from 0 to 2^bits - 1, and of each group z and s [...], in the dtype of numbers. Raises ValueError
    for bits out of range, and on a CPU for NaN or infinite numbers.
    """
    codes, zero, scale = _quantised(numbers, bits)
    return codes.to(torch.uint8), zero.clone(), scale


@operator("zero")
@fits()
def dequantise(codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    r"""QC-2: `x' = z + s c`, at most half a scale away from x.

    Args: those that `quantise` returns. Returns [..., n] in the dtype of zero.
    """
    dtype = working_dtype(zero)
    return torch.addcmul(zero[..., None].to(dtype), scale[..., None].to(dtype), codes.to(dtype)).to(
        zero.dtype
    )


@operator(torch.uint8)
@fits()
def pack(codes: torch.Tensor, *, bits: int = 2) -> torch.Tensor:
    r"""QC-3: the codes in bytes, `8 / bits` in each, the first in the lowest bits.

    Args: codes [..., n] of whole numbers below 2^bits; bits, 1, 2, 4 or 8. Returns [..., m], uint8, with
    m = ceil(n bits / 8). Raises ValueError for other bits, and on a CPU for a code that does not fit.
    """
    _require_packable(bits)
    if codes.is_cpu and int(codes.max()) >= 2**bits:
        raise ValueError(f"codes: got {int(codes.max())}, wanted codes below {2**bits}, in {bits} bits")
    each = 8 // bits
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % each))
    shifts = bits * torch.arange(each, dtype=torch.uint8, device=codes.device)
    return (padded.unflatten(-1, (-1, each)) << shifts).sum(dim=-1, dtype=torch.uint8)


@operator(torch.uint8)
@fits()
def unpack(packed: torch.Tensor, length: int, *, bits: int = 2) -> torch.Tensor:
    r"""QC-3: the codes of bytes, as `pack` was given them.

    Args: packed [..., m], below 256; length, the codes of a row; bits, 1, 2, 4 or 8. Returns [..., length],
    uint8. Raises ValueError for other bits, and for a length of more codes than there are.
    """
    _require_packable(bits)
    held = packed.shape[-1] * 8 // bits
    if length > held:
        raise ValueError(f"length: got {length}, wanted at most the {held} codes of {packed.shape[-1]} bytes")
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.to(torch.uint8)[..., None] >> shifts) & 2**bits - 1
    return codes.flatten(-2)[..., :length].clone()


@operator("values")
@_rounding
@fits()
def by_token(values: torch.Tensor, *, bits: int = 2, group_size: int = 32) -> torch.Tensor:
    r"""QC-4: values as a cache gives them back: a group is `group_size` channels in a row of one token.

    Args: bits of a code; group_size. Returns [..., T, D_v] in the dtype of values. Raises ValueError where
    the groups do not divide the channels, and on a CPU for NaN or infinite numbers.
    """
    return _given_back(values, bits, group_size)


@operator("keys")
@_rounding
@fits()
def by_channel(keys: torch.Tensor, *, bits: int = 2, group_size: int = 32) -> torch.Tensor:
    r"""QC-5: keys as a cache gives them back: a group is one channel of `group_size` tokens in a row.

    Args: bits of a code; group_size. Returns [..., T, D] in the dtype of keys. Raises ValueError where the
    groups do not divide the tokens, and on a CPU for NaN or infinite numbers.
    """
    return _given_back(keys.mT, bits, group_size).mT


@operator("keys", "values")
@_rounding
@fits()
def kivi(
    keys: torch.Tensor, values: torch.Tensor, *, bits: int = 2, group_size: int = 32, residual: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""QC-6: keys and values of a text as KIVI's cache gives them back: the last tokens are exact.

    The last T mod residual keys are exact, and the last `residual` values. Returns them in their dtype.
    Raises ValueError for a residual that the groups do not divide, and as `by_token` does.
    """
    old_keys, old_values = quantised_tokens(keys.shape[2], group_size=group_size, residual=residual)
    _groups(values.shape[-1], group_size)
    keys, values = keys.clone(), values.clone()
    keys[:, :, :old_keys] = _given_back(keys[:, :, :old_keys].mT, bits, group_size).mT
    values[:, :, :old_values] = _given_back(values[:, :, :old_values], bits, group_size)
    return keys, values


@operator("states")
@fits()
def hadamard(states: torch.Tensor) -> torch.Tensor:
    r"""QC-8: `H x / sqrt(D)` with Sylvester's matrix H, whose entries are 1 and -1; it is its own inverse.

    It adds and subtracts halves log2(D) times, and needs no matrix. Returns [..., D] in the dtype of states.
    Raises ValueError unless D is a power of two, and on a CPU for NaN or infinite numbers.
    """
    return _turned(states.to(working_dtype(states))).to(states.dtype)


@operator("states")
@_rounding
@fits()
def rotated(states: torch.Tensor, *, bits: int = 4, group_size: int = 32) -> torch.Tensor:
    r"""QC-9: keys or values as a rotated cache gives them back: `H Q(H x)`, with Q of `by_token`.

    Args: bits of a code; group_size. Returns [..., T, D] in the dtype of states. Raises ValueError as
    `hadamard` and `by_token` do.
    """
    turned = _turned(states.to(working_dtype(states)))
    return _turned(_given_back(turned, bits, group_size)).to(states.dtype)


@operator("numbers")
@_rounding
@fits()
def e4m3(numbers: torch.Tensor) -> torch.Tensor:
    r"""QC-10: the nearest numbers of e4m3: a sign, 4 bits of exponent, 3 of mantissa; of two the even one.

    Returns [..., n] in the dtype of numbers, at most 448.
    Raises ValueError on a CPU for NaN or infinite numbers.
    """
    return _e4m3(numbers.to(working_dtype(numbers))).to(numbers.dtype)


@operator("states")
@_rounding
@fits()
def fp8(states: torch.Tensor) -> torch.Tensor:
    r"""QC-11: `s e4m3(x / s)` with `s = max |x| / 448` of each token: its largest number becomes 448.

    Returns keys or values [..., T, D] as the cache gives them back, in their dtype. Raises ValueError on a
    CPU for NaN or infinite numbers.
    """
    wide = states.to(working_dtype(states))
    scale = wide.abs().amax(dim=-1, keepdim=True) / LARGEST
    scale = torch.where(scale == 0, 1, scale)
    return (_e4m3(wide / scale) * scale).to(states.dtype)


def _quantised(numbers: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes in the working dtype, and z and s in that of the numbers: codes count in the stored scale."""
    dtype, most = working_dtype(numbers), 2**bits - 1
    zero, largest = numbers.aminmax(dim=-1)
    scale = ((largest.to(dtype) - zero.to(dtype)) / most).to(numbers.dtype)
    step = torch.where(scale == 0, 1, scale).to(dtype)
    steps = (numbers.to(dtype) - zero.to(dtype)[..., None]) / step[..., None]
    return steps.round().clamp(0, most), zero, scale


def _given_back(states: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Each group of the last axis, quantised and dequantised."""
    if states.numel() == 0:
        return states
    groups = states.unflatten(-1, (_groups(states.shape[-1], group_size), -1))
    codes, zero, scale = _quantised(groups, bits)
    return torch.addcmul(zero[..., None].to(codes), scale[..., None].to(codes), codes).to(states).flatten(-2)


def _turned(states: torch.Tensor) -> torch.Tensor:
    channels, apart = states.shape[-1], 1
    if channels & (channels - 1):
        raise ValueError(f"states: got {channels} channels, wanted a power of two")
    while apart < channels:
        first, second = states.unflatten(-1, (-1, 2, apart)).unbind(dim=-2)
        states = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        apart *= 2
    return states / channels**0.5


def _e4m3(numbers: torch.Tensor) -> torch.Tensor:
    exponent = torch.frexp(numbers).exponent
    step = torch.ldexp(torch.ones_like(numbers), exponent.sub(1).clamp(min=-6).sub(3))
    return ((numbers / step).round() * step).clamp(-LARGEST, LARGEST)


def _groups(count: int, group_size: int) -> int:
    """How many groups `count` numbers are; a group is at most the whole axis."""
    size = min(group_size, count)
    if count % size:
        raise ValueError(f"group_size: got {group_size}, wanted a divisor of {count}")
    return count // size


def _require_packable(bits: int) -> None:
    """Raise ValueError unless a byte is full of codes."""
    if 8 % bits:
        raise ValueError(f"bits: got {bits}, wanted 1, 2, 4 or 8, of which a byte is full")
