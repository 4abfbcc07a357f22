"""A cache in two bits: codes, bytes, groups, the exact window, bytes of a cache, a rotation. Write the eleven
functions; NumPy alone is needed.
"""

import numpy as np


def quantise(numbers: np.ndarray, *, bits: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The codes [..., n] of groups of numbers [..., n], and of each group the zero [...] and the scale [...].

    The codes are whole numbers from 0 to 2 ** bits - 1. Raises ValueError naming what does not fit.
    """
    raise NotImplementedError


def dequantise(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The numbers [..., n] of codes [..., n]; zero and scale [...] are those of the groups."""
    raise NotImplementedError


def pack(codes: np.ndarray, *, bits: int = 2) -> np.ndarray:
    """Codes [..., n] in bytes [..., m], with m = n * bits / 8 rounded up; bits are 1, 2, 4 or 8."""
    raise NotImplementedError


def unpack(packed: np.ndarray, length: int, *, bits: int = 2) -> np.ndarray:
    """The first `length` codes of each row of bytes [..., m]: [..., length]."""
    raise NotImplementedError


def by_token(values: np.ndarray, *, bits: int = 2, group_size: int = 32) -> np.ndarray:
    """Values [..., T, D_v] quantised and given back; a group is `group_size` channels of one token."""
    raise NotImplementedError


def by_channel(keys: np.ndarray, *, bits: int = 2, group_size: int = 32) -> np.ndarray:
    """Keys [..., T, D] quantised and given back; a group is `group_size` tokens of one channel."""
    raise NotImplementedError


def quantised_tokens(length: int, *, group_size: int = 32, residual: int = 128) -> tuple[int, int]:
    """Of how many of `length` tokens the key is quantised, and the value."""
    raise NotImplementedError


def kivi(
    keys: np.ndarray, values: np.ndarray, *, bits: int = 2, group_size: int = 32, residual: int = 128
) -> tuple[np.ndarray, np.ndarray]:
    """Keys [B, H_kv, T, D] and values [B, H_kv, T, D_v] as the cache gives them back, the last ones exact."""
    raise NotImplementedError


def kivi_bytes(
    length: int,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    bits: int = 2,
    group_size: int = 32,
    residual: int = 128,
    bytes_per_number: int = 2,
) -> int:
    """The bytes of the caches of all layers after a text of `length` tokens."""
    raise NotImplementedError


def hadamard(states: np.ndarray) -> np.ndarray:
    """States [..., D] rotated by Sylvester's matrix, divided by the root of D."""
    raise NotImplementedError


def rotated(states: np.ndarray, *, bits: int = 4, group_size: int = 32) -> np.ndarray:
    """States [..., T, D] rotated, quantised by token, given back, and rotated back."""
    raise NotImplementedError
