r"""StreamingLLM (arXiv 2309.17453), a baseline: keep the first tokens, the attention sinks, and the most recent ones."""

from __future__ import annotations

import math

import torch

from evictionary.reference.checks import as_count

from .checks import require_states, working_dtype


def score(keys: torch.Tensor, *, sink_size: int = 4) -> torch.Tensor:
    r"""SL-1: `score_t = t`, and infinity for the first `sink_size` tokens: top-k of it is sinks plus the most recent.

    Args: keys [B, H_kv, T, D] (any leading axes), of which only shape, dtype and device are read; sink_size >= 0.
    Returns scores [B, H_kv, T], float32 (exact up to 16,777,216 tokens; float64 for float64 keys).
    Raises ValueError for a wrongly shaped or integer `keys` or a negative sink_size. Source: section 3.2 of the paper.
    """
    require_states("keys", keys, "... T D")
    sink_size = as_count("sink_size", sink_size, low=0)
    positions = torch.arange(keys.shape[-2], dtype=working_dtype(keys), device=keys.device)
    positions[:sink_size] = math.inf
    return positions.expand(keys.shape[:-1]).clone()
