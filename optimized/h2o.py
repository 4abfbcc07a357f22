r"""H2O (arXiv 2306.14048), a baseline: keep the tokens with most attention so far (heavy hitters), and as many recent tokens."""

from __future__ import annotations

import torch

from evictionary.reference.checks import as_count

from .attention import grouped_attention, require_queries
from .checks import working_dtype
from .selection import top_k

# Entries of the attention matrix at a time, over all heads, for any length of the prompt. On a CPU they take 4 MiB in float32 and
# stay in its cache.
TILE = 2**20
TILE_ON_GPU = 2**24


def score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""H2-1: `score_t = (1/G) sum_g sum_m A_gmt`, the attention that token t received from all queries, mean over the group.

    The attention matrix is computed for a block of queries at a time, and only for the tokens that the block sees.

    Args: queries [B, H_q, M, D], of the last M tokens, after RoPE (M = T for H2O itself); keys [B, H_kv, T, D], any strides.
    Returns scores [B, H_kv, T], higher = keep, summing to M, float32 (float64 for float64); it costs O(M T).
    Raises ValueError naming what does not fit, and on a CPU for NaN or infinite numbers.
    Source: section 4.1 of the paper, the accumulated attention score.
    """
    require_queries(queries, keys)
    batch, num_query_heads, num_queries, _ = queries.shape
    length = keys.shape[2]
    keys = keys.to(working_dtype(keys))  # once, not for every tile
    queries = queries.to(keys.dtype)
    total = keys.new_zeros(keys.shape[:3])
    block = max(1, (TILE_ON_GPU if keys.is_cuda else TILE) // (batch * num_query_heads * length))
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        seen = length - num_queries + stop  # no query of the block sees a later token
        received = grouped_attention(queries[:, :, start:stop], keys[:, :, :seen])
        total[..., :seen] += received.mean(dim=2).sum(dim=2)
    return total


def select(queries: torch.Tensor, keys: torch.Tensor, *, budget: int) -> torch.Tensor:
    r"""H2-1: keep the last `ceil(budget / 2)` tokens, and fill the budget with the highest scores among the others.

    Args: those of `score`; budget >= 1, more than T keeps all. Returns kept [B, H_kv, T] with min(budget, T) True in each row.
    Raises ValueError naming the argument. Source: section 4.2 of the paper; half and half as in its experiments.
    """
    budget = as_count("budget", budget, low=1)
    scores = score(queries, keys)
    length = scores.shape[-1]
    # Decision: the odd token of a budget goes to the recent half, so that a budget of 1 keeps the last token.
    recent = torch.arange(length, device=scores.device) >= length - (budget + 1) // 2
    return top_k(scores, budget, protected=recent.expand(scores.shape))
