"""LagKV: a partition of the cache is scored against the
next one, and keeps its best tokens. NumPy alone is needed.
"""

from fractions import Fraction

import numpy as np


def score(keys: np.ndarray, values: np.ndarray, next_keys: np.ndarray, next_values: np.ndarray) -> np.ndarray:
    """The score of each token of one partition: score(keys)
    + score(values), each against the next partition.

    keys [..., L, D], values [..., L, D_v], next_keys [..., L', D], next_values
    [..., L', D_v]; returns [..., L], higher = keep. A channel that is constant in the
    next partition normalises to 0; the deviation is that of a sample (ddof=1). Raises
    ValueError naming the argument that does not fit.
    """
    raise NotImplementedError


def retained_length(
    length: int, *, keep_ratio: float | Fraction, sink_size: int = 16, lag_size: int = 1024
) -> int:
    """How many of `length` tokens are left: all of them below sink_size + 2 * lag_size.

    floor(keep_ratio * lag_size) is exact: 0.29 of 100 is
    29. Raises ValueError naming an argument out of range.
    """
    raise NotImplementedError


def select(
    keys: np.ndarray,
    values: np.ndarray,
    *,
    keep_ratio: float | Fraction,
    sink_size: int = 16,
    lag_size: int = 1024,
) -> np.ndarray:
    """The kept mask [B, H_kv, T] of keys [B, H_kv, T, D] and values [B, H_kv, T, D_v]: True = keep.

    The sinks stay, and the last whole partition and what follows it; every partition before keeps its best
    floor(keep_ratio * lag_size) tokens, of equal ones the earlier. Raises ValueError naming the argument.
    """
    raise NotImplementedError
