r"""PyramidKV (arXiv 2406.02069), an allocator: budgets that fall linearly with depth, at the same
total.
"""

from __future__ import annotations

import math
from fractions import Fraction

from .checks import as_count, as_fraction


def budgets(budget: int, num_layers: int, *, beta: float = 20.0) -> list[int]:
    r"""PY-1, PY-2: `b_last = budget / beta`, `b_first = 2 budget - b_last`, an arithmetic sequence
    between them.

    Args: budget, the mean number of tokens per head and layer, at least 1; num_layers; beta, at
    least 1 (1 gives every layer the same). Returns one whole budget per layer, falling with depth,
    each at least 1, `num_layers * budget` in total. Raises ValueError naming the argument out of
    range. Source: section 4.2.
    """
    budget = as_count("budget", budget, low=1)
    num_layers = as_count("num_layers", num_layers, low=1)
    last = max(Fraction(1), budget / as_fraction("beta", beta, low=1, high=10**6))
    step = 2 * (budget - last) / max(1, num_layers - 1)
    exact = [
        budget if num_layers == 1 else 2 * budget - last - layer * step
        for layer in range(num_layers)
    ]
    whole = [math.floor(share) for share in exact]
    # Decision: tokens left over by the floors go to the largest fractions, lower layers first: the
    # total is exact, budgets fall.
    by_fraction = sorted(range(num_layers), key=lambda layer: (whole[layer] - exact[layer], layer))
    for layer in by_fraction[: num_layers * budget - sum(whole)]:
        whole[layer] += 1
    return whole
