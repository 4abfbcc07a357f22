"""Random eviction with the protection that other methods have: the first tokens and the last ones stay. It
belongs to no paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evictionary.methods import random_baseline

if TYPE_CHECKING:
    import torch

METHOD = "keeps the first tokens, the last ones, and random tokens between them (the baseline to beat)"


def score(
    keys: torch.Tensor, generator: torch.Generator, *, sinks: int = 4, window: int = 32
) -> torch.Tensor:
    """Return scores [B, H_kv, T]: uniform ones, and above these the first `sinks` tokens, and then the
    last `window`, latest first.

    So a budget without room for all of them keeps the first tokens
    and the newest. Raises ValueError for a negative number.
    """
    for name, count in (("sinks", sinks), ("window", window)):
        if count < 0:
            raise ValueError(f"{name}: got {count}, wanted a whole number of at least 0")
    scores = random_baseline.score(keys, generator)
    length = keys.shape[2]
    recent = min(window, length)
    scores[..., length - recent :] = scores.new_ones(recent).cumsum(dim=0)
    scores[..., :sinks] = length + 1
    return scores
