r"""KeyDiff (arXiv 2504.15364): keep the keys that point away from the average direction of the cache."""

from __future__ import annotations

import math

import torch
from torch.linalg import vector_norm

from optimized.checks import require_finite, require_states, runs_on_gpu, working_dtype

# Between these norms the square of no component overflows float32, and what underflows is too small to count.
SAFE_NORMS = (1e-15, 1e18)


def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `score_i = -cos(mu, k_i)`, mu = the mean of the unit keys, in O(T).

    The unit keys are never stored: with `w_i = 1 / |k_i|`, mu points along the product of the row w with K, and the scores are
    the product of K with mu, times w. That is one pass for the norms and two for the products.

    Args: keys [B, H_kv, T, D] (any leading axes), any strides. Returns scores [B, H_kv, T] in [-1, 1], higher = keep, float32
    (float64 for float64 keys). Raises ValueError for an empty, wrongly shaped or integer `keys`, and on a CPU for NaN or
    infinite numbers. Source: section 3.2, equation 8.
    """
    require_states("keys", keys, "... T D", finite=False)
    if runs_on_gpu(keys):
        from optimized.kernels import keydiff as kernels

        return kernels.score(keys)
    keys = keys.to(working_dtype(keys))
    norms = vector_norm(keys, dim=-1, keepdim=True)
    # A norm within the safe range vouches for every component, so only other caches are looked at again.
    if not ((norms > SAFE_NORMS[0]) & (norms < SAFE_NORMS[1])).all():
        require_finite("keys", keys)
        largest = vector_norm(keys, ord=math.inf, dim=-1, keepdim=True)
        keys = keys / torch.where(largest == 0, 1, largest)
        norms = vector_norm(keys, dim=-1, keepdim=True)
    # Decision: the cosine with a zero vector is 0, for a zero key as for an anchor whose keys cancel.
    weights = torch.where(norms == 0, 0, 1 / norms)
    anchor = keys.mT @ weights
    anchor_norm = vector_norm(anchor, dim=-2, keepdim=True)
    anchor = anchor / torch.where(anchor_norm == 0, 1, anchor_norm)
    return -(keys @ anchor * weights).squeeze(-1)
