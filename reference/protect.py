r"""Protection of both ends of a text (arXiv 2605.18053): the first tokens and the last stay whatever
they score, and a method chooses the others.

The paper's text could not be read. Its abstract says that protection matters more than the score.
"""

import numpy as np

from .contract import Mask, Open, Setting, contract
from .selection import top_k


@contract
def protected(
    filled: Mask[np.ndarray, "... T"],
    budget: Setting[int, ">= 0"],
    *,
    first: Setting[int, ">= 0"] = 4,
    last: Setting[int, ">= 0"] = 32,
) -> Mask[np.ndarray, "... T"]:
    r"""PR-1, PR-2: the first tokens and the last ones of each row.

    Args: filled, False where there is no token; budget, the tokens that a row may keep; first and last,
    the tokens that stay at each end.
    """
    # Decision: a budget without room for all of them keeps the first tokens, and then the newest.
    front = min(first, budget)
    back = min(last, budget - front)
    place = filled.cumsum(axis=-1)
    return filled & ((place <= front) | (place > place[..., -1:] - back))


@contract
def choose(
    scores: Open[np.ndarray, "... T"],
    budget: Setting[int, ">= 0"],
    *,
    first: Setting[int, ">= 0"] = 4,
    last: Setting[int, ">= 0"] = 32,
) -> Mask[np.ndarray, "... T"]:
    r"""PR-3: the protected tokens, and of the others those with the highest scores.

    Args: budget, 0 to any number (more than T keeps all); first and last, the tokens that stay at each
    end. The protected tokens are inside the budget: each row keeps exactly `min(budget, T)`.
    """
    everywhere = np.ones(scores.shape, dtype=bool)
    return top_k(scores, budget, protected(everywhere, budget, first=first, last=last))
