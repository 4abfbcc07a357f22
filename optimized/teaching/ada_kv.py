r"""AdaKV to read: one budget for a layer, divided among its heads (AD-1 to AD-3). It is two calls of the
kernel of `selection`.

In the first, a row is a head, and keeps the tokens that the head has for itself. In the second, a row is a
whole layer, in which these tokens are protected, and the rest of the layer's budget goes to the best scores
of any head.
"""

import torch

from evictionary.reference.checks import as_fraction

from .selection import keep_each


@torch.no_grad()
def select(
    scores: torch.Tensor, budget: int, *, floor_ratio: float = 0.2, protected: torch.Tensor | None = None
) -> torch.Tensor:
    r"""AD-1..3: scores [B, H_kv, T] give kept [B, H_kv, T]
    with `H_kv * min(budget, T)` True in each batch item.

    Each head keeps its protected tokens, and floor(floor_ratio * rest) others, where rest is its budget
    without the protected ones.
    """
    batch, num_kv_heads, length = scores.shape
    budget, alpha = min(budget, length), as_fraction("floor_ratio", floor_ratio)
    if protected is None:
        protected = torch.zeros_like(scores, dtype=torch.bool)
    shares = [alpha.numerator * rest // alpha.denominator for rest in range(budget + 1)]
    taken = protected.sum(dim=-1)
    own = keep_each(scores, taken + torch.tensor(shares, device=scores.device)[budget - taken], protected)
    counts = torch.full((batch,), num_kv_heads * budget, device=scores.device)
    return keep_each(scores.reshape(batch, -1), counts, own.reshape(batch, -1)).reshape(scores.shape)
