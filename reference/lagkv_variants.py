r"""LagKV (arXiv 2504.04704), the variants of its section 4.4: the range of the partition itself,
and norms of keys.
"""

from fractions import Fraction

import numpy as np

from . import knorm
from .contract import Mask, Real, Setting, Weight, contract
from .lagkv import _kept_after, score


@contract
def local_score(
    keys: Real[np.ndarray, "... L D"], values: Real[np.ndarray, "... L D_v"]
) -> Weight[np.ndarray, "... L"]:
    r"""LK-14, LK-15: LocalKV, `score` with `min_c` and `max_c` over the tokens of Z[p] itself
    instead of Z[p+1]: Zbar is in [0, 1].

    Returns scores, higher = keep. Source: section 4.4, equations 14 and 15.
    """
    return score(keys, values, keys, values)


@contract
def local_select(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    *,
    keep_ratio: Setting[float | Fraction, "[0, 1]"],
    sink_size: Setting[int, ">= 0", 4] = 16,
    lag_size: Setting[int, ">= 1", 128, 512] = 1024,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""LK-14, LK-15: `select` with the score of LocalKV; sinks and sliding window as they were.
    Source: section 4.4.
    """
    return _kept_after(
        sink_size, lambda k, v, *following: local_score(k, v), keys, values, keep_ratio, lag_size
    )


@contract
def norm_select(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    *,
    layer: Setting[int, ">= 0"],
    keep_ratio: Setting[float | Fraction, "[0, 1]"],
    sink_size: Setting[int, ">= 0", 4] = 16,
    lag_size: Setting[int, ">= 1", 128, 512] = 1024,
    skipped_layers: Setting[int, ">= 0"] = 2,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""LK-16: `select` with `score_i = -|k_i|`, and
    no eviction in the first `skipped_layers` layers.

    Args: layer, counted from 0; the others as in `select`. Source: equation 16.
    """
    skipped = layer < skipped_layers
    kept = _kept_after(sink_size, lambda k, *others: knorm.score(k), keys, values, keep_ratio, lag_size)
    return np.ones_like(kept) if skipped else kept
