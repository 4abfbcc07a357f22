"""MomentKV: evicted tokens leave four sums behind, which correct the attention. NumPy alone is needed."""

from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Sums over the evicted tokens of each head; leave this class as it is."""

    count: np.ndarray  # [B, H_kv]
    key_sum: np.ndarray  # [B, H_kv, D]
    value_sum: np.ndarray  # [B, H_kv, D_v]
    value_key_sum: np.ndarray  # [B, H_kv, D_v, D], the sum of v k^T


def update(moments: Moments, keys: np.ndarray, values: np.ndarray, evicted: np.ndarray) -> Moments:
    """Add the tokens that `evicted` [B, H_kv, T] marks of keys [B, H_kv, T, D] and values [B, H_kv, T, D_v].

    Raises ValueError naming the argument that does not fit.
    """
    raise NotImplementedError


def score(query: np.ndarray, keys: np.ndarray, values: np.ndarray, moments: Moments) -> np.ndarray:
    """Attention of the query over the keys, times the norm of what the moments do not explain of the
    value: [B, H_kv, T].

    query [B, H_q, D]. The attention of a group of query heads is averaged after the softmax. Where nothing
    has been evicted the residual is the value. Raises ValueError naming the argument that does not fit.
    """
    raise NotImplementedError


def attend(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, kept: np.ndarray, moments: Moments
) -> np.ndarray:
    """The output [B, H_q, D_v]: attention over the kept
    tokens mixed with the estimate for the evicted ones.

    kept [B, H_kv, T], boolean; what is not kept is not read. The weights in the log domain. With no moments
    it is plain attention over the kept; a head that keeps nothing and has no moments gives 0. Raises
    ValueError naming the argument that does not fit.
    """
    raise NotImplementedError
