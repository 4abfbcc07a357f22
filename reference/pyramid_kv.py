r"""PyramidKV (arXiv 2406.02069), an allocator: budgets that fall linearly with depth, at the same
total.
"""

import math
from fractions import Fraction

from .checks import as_count, as_fraction


def budgets(
    budget: int,
    num_layers: int,
    *,
    beta: float = 20.0,
    length: int | None = None,
    window_size: int = 0,
) -> list[int]:
    r"""PY-1..3: `b_last = budget / beta`, `b_first = 2 budget - b_last`, an arithmetic sequence
    between them, beside the window that every layer keeps.

    Args: budget, the mean number of tokens per head and layer, at least 1, window included;
    num_layers; beta, at least 1 (1 gives every layer the same); length, the tokens that there are
    to keep, None for more than any layer's budget; window_size, the last tokens that the scores
    protect. Returns one whole budget per layer, falling with depth, each at least 1 and at most
    length, `num_layers * min(budget, length)` in total. Raises ValueError naming the argument out
    of range. Source: section 4.2.
    """
    budget = as_count("budget", budget, low=1)
    num_layers = as_count("num_layers", num_layers, low=1)
    # Decision: a budget below the window is the same in every layer.
    window = min(budget, as_count("window_size", window_size, low=0))
    last = max(Fraction(1), window + (budget - window) / as_fraction("beta", beta, low=1, high=10**6))
    if length is not None:
        # Decision: no layer is given more tokens than there are. What the first layer cannot hold
        # goes to the last, as in the authors' code, and the total stays.
        budget = min(budget, as_count("length", length, low=1))
        last = max(min(last, Fraction(budget)), Fraction(2 * budget - length))
    step = 2 * (budget - last) / max(1, num_layers - 1)
    exact = [budget if num_layers == 1 else 2 * budget - last - layer * step for layer in range(num_layers)]
    whole = [math.floor(share) for share in exact]
    # Decision: tokens left over by the floors go to the largest fractions, lower layers first: the
    # total is exact, budgets fall.
    by_fraction = sorted(range(num_layers), key=lambda layer: (whole[layer] - exact[layer], layer))
    for layer in by_fraction[: num_layers * budget - sum(whole)]:
        whole[layer] += 1
    return whole
