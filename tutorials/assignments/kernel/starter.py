"""KeyDiff on a GPU: write a Triton kernel that scores keys, and launch it from `score`."""

import torch
import triton
import triton.language as tl


@triton.jit
def score_keys(keys, scores, tokens, channels, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """One program for each head: the mean of the unit keys, then minus the cosine of each key with it."""
    pass


def score(keys: torch.Tensor) -> torch.Tensor:
    """Minus the cosine of each key with the mean of the unit keys: [B, H_kv, T, D] to float32 [B, H_kv,
    T], higher = keep.

    The cosine with a zero vector is 0. Raises ValueError, with the word "keys"
    in its message, for fewer than two axes or an empty axis; NaN or infinite
    numbers show as NaN in the scores of their head, or raise ValueError.
    """
    raise NotImplementedError
