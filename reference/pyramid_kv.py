r"""PyramidKV (arXiv 2406.02069), an allocator: budgets
that fall linearly with depth, at the same total.
"""

import math
from fractions import Fraction

from .contract import Setting, contract


@contract
def budgets(
    budget: Setting[int, ">= 1"],
    num_layers: Setting[int, ">= 1"],
    *,
    beta: Setting[float | Fraction, "[1, 1e6]"] = 20.0,
    length: Setting[int | None, ">= 1"] = None,
    window_size: Setting[int, ">= 0"] = 0,
) -> list[int]:
    r"""PY-1..3: `b_last = budget / beta`, `b_first = 2 budget - b_last`, an arithmetic sequence
    between them, beside the window that every layer keeps.

    Args: budget, the mean number of tokens per head and layer, at least 1, window included;
    num_layers; beta, at least 1 (1 gives every layer the same); length, the tokens that there are
    to keep, None for more than any layer's budget; window_size, the last tokens that the scores
    protect. Returns one whole budget per layer, falling with depth, each at least 1 and at most
    length, `num_layers * min(budget, length)` in total. Source: section 4.2.
    """
    # Decision: a budget below the window is the same in every layer.
    window = min(budget, window_size)
    last = max(Fraction(1), window + (budget - window) / Fraction(beta))
    if length is not None:
        # Decision: no layer is given more tokens than there are. What the first layer cannot hold
        # goes to the last, as in the authors' code, and the total stays.
        budget = min(budget, length)
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
