r"""AdaKV (arXiv 2407.11550), an allocator: one budget for a layer, divided among its heads by one
top-k over all heads.
"""

import math
from fractions import Fraction

import numpy as np

from .contract import Mask, Open, Setting, contract
from .selection import top_k


@contract
def select(
    scores: Open[np.ndarray, "B H_kv T"],
    budget: Setting[int, ">= 0"],
    *,
    floor_ratio: Setting[float | Fraction, "[0, 1]"] = 0.2,
    protected: Mask[np.ndarray | None, "B H_kv T"] = None,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""AD-1..3: each head keeps its best floor(alpha * budget) tokens; the rest of `H_kv * budget`
    goes to the layer's best.

    Args: scores, comparable between the heads; budget, the mean number of tokens per head; floor_ratio
    (alpha), the fraction of the budget that each head keeps for itself, in [0, 1]: 1 gives every head the
    same budget, 0 guarantees none; protected, or None: tokens that their head keeps whatever they score.
    They are inside the budget, and alpha is the fraction of the rest of it. The kept tokens are ragged;
    each batch item keeps exactly `H_kv * min(budget, T)`. Raises ValueError for a head with more
    protected tokens than the budget. Source: algorithm 1, the safeguard of section 4 and, for what is
    protected, algorithm 2.
    """
    batch, num_kv_heads, length = scores.shape
    budget = min(budget, length)
    alpha = floor_ratio
    if protected is None:
        protected = np.zeros(scores.shape, dtype=bool)
    own = np.zeros(scores.shape, dtype=bool)
    for head in np.ndindex(batch, num_kv_heads):
        # Decision: as the observation window in the authors' code, what is protected leaves the
        # budget before it is shared out.
        taken = int(protected[head].sum())
        if taken > budget:
            raise ValueError(
                f"protected: got {taken} protected tokens in a head, wanted at most the budget, {budget}"
            )
        own[head] = top_k(scores[head], taken + math.floor(alpha * (budget - taken)), protected[head])
    # One row per batch item. Among equal scores the lower head comes first, then the lower
    # position.
    layer = scores.reshape(batch, num_kv_heads * length)
    return top_k(layer, num_kv_heads * budget, own.reshape(layer.shape)).reshape(scores.shape)
