r"""AdaKV (arXiv 2407.11550), an allocator: one budget for a layer, divided among its heads by one top-k over all heads."""

from __future__ import annotations

import math

import numpy as np

from .checks import as_count, as_fraction
from .selection import top_k


def select(scores: np.ndarray, budget: int, *, floor_ratio: float = 0.2) -> np.ndarray:
    r"""AD-1, AD-2: each head keeps its best floor(alpha * budget) tokens; the rest of `H_kv * budget` goes to the layer's best.

    Args: scores [B, H_kv, T], comparable between the heads; budget, the mean number of tokens per head; floor_ratio (alpha), the
    fraction of the budget that each head keeps for itself, in [0, 1]: 1 gives every head the same budget, 0 guarantees none.
    Returns kept [B, H_kv, T], boolean, ragged; each batch item keeps exactly `H_kv * min(budget, T)`.
    Raises ValueError naming the argument out of range. Source: algorithm 1 and the safeguard of section 4.
    """
    scores = np.asanyarray(scores)
    if scores.ndim != 3:
        raise ValueError(f"scores: got shape {scores.shape}, wanted [B, H_kv, T]")
    batch, num_kv_heads, length = scores.shape
    budget = min(as_count("budget", budget, low=0), length)
    own = top_k(scores, math.floor(as_fraction("floor_ratio", floor_ratio) * budget))
    # One row per batch item. Among equal scores the lower head comes first, then the lower position.
    layer = scores.reshape(batch, num_kv_heads * length)
    return top_k(layer, num_kv_heads * budget, own.reshape(layer.shape)).reshape(scores.shape)
