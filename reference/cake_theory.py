r"""CAKE (arXiv 2503.12491): the cascade, in which earlier layers shrink while later ones read the prompt."""

import numpy as np

from . import cake
from .contract import Mask, Open, Setting, Weight, contract
from .selection import top_k


@contract
def cascade(
    scores: Open[np.ndarray, "L T"],
    preferences: Weight[np.ndarray, "L"],
    budget: Setting[int, ">= 1"],
    *,
    window_size: Setting[int, ">= 0"] = 0,
) -> tuple[Mask[np.ndarray, "L T"], int]:
    r"""CAKE-6: after each layer has read the prompt, the layers so far shrink to their new budgets.

    Args: budget, the mean per layer. Returns the kept tokens, and the most tokens that were stored at once.
    """
    (num_layers, length), stored, most = scores.shape, [], 0
    settings = {"num_layers": num_layers, "length": length, "window_size": window_size}
    for layer in range(num_layers):
        stored.append(np.arange(length))
        most = max(most, sum(map(len, stored)))
        shares = cake.budgets(budget, preferences[: layer + 1], **settings)
        stored = [
            own[top_k(row[own], share)] for own, row, share in zip(stored, scores, shares, strict=False)
        ]
    return np.array([np.isin(np.arange(length), own) for own in stored]), most
