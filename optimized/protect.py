r"""Protection of both ends of a text (arXiv 2605.18053): the first tokens and the last stay whatever they
score, and a method chooses the others.
"""

import torch

from .checks import fits
from .operators import operator
from .selection import top_k


@operator()
@fits()
@torch.no_grad()
def protected(filled: torch.Tensor, budget: int, *, first: int = 4, last: int = 32) -> torch.Tensor:
    r"""PR-1, PR-2: the first tokens and the last ones of each row.

    Args: filled [..., T], boolean, False where there is no token; budget, the tokens that a row may keep;
    first and last, the tokens that stay at each end. Returns [..., T], boolean. Raises ValueError naming the
    argument out of range.
    """
    # Decision: a budget without room for all of them keeps the first tokens, and then the newest.
    front = min(first, budget)
    back = min(last, budget - front)
    place = filled.cumsum(dim=-1)
    return filled & ((place <= front) | (place > place[..., -1:] - back))


@operator()
@fits()
@torch.no_grad()
def choose(scores: torch.Tensor, budget: int, *, first: int = 4, last: int = 32) -> torch.Tensor:
    r"""PR-3: the protected tokens, and of the others those with the highest scores.

    Args: scores, infinities allowed; budget, more than T keeps all; first and last,
    the tokens that stay at each end. Returns kept [..., T], boolean, with exactly
    `min(budget, T)` True in each row: the protected tokens are inside the budget.
    Raises ValueError naming the argument out of range, and on a CPU for NaN scores.
    """
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    return top_k(scores, budget, protected(everywhere, budget, first=first, last=last))
