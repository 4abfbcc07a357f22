"""Your own method: which tokens should a head keep? Try it: evictionary demo --methods
work/scorer.py,lagkv --ratios 0.75
"""

import torch


def score(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One finite number for each token of each head, higher = keep: keys [B, H_kv, T, D], values [B, H_kv,
    T, D_v] to [B, H_kv, T].

    Keys are cached after RoPE. The budget is the same for every head: the best scores stay.
    """
    raise NotImplementedError
