r"""SnapKV (arXiv 2404.14469), a baseline: keep the tokens that the prompt's last queries attend to,
smoothed over neighbours.
"""

import math

import torch
from torch.nn.functional import avg_pool1d

from evictionary.reference.checks import as_odd, as_window

from .checks import fits, require_fit, working_dtype
from .h2o import received_attention
from .operators import operator


@operator()
def average_pool(weights: torch.Tensor, kernel_size: int) -> torch.Tensor:
    r"""SN-1: `p_t = (1/K) sum of w_u over |u - t| <= (K - 1) / 2`, zeros beyond both ends, K odd.

    Args: kernel_size K. Returns [..., T] in float32 (float64 for float64). Raises ValueError for an even K.
    """
    require_fit("weights: ... N", weights)
    as_odd("kernel_size", kernel_size)
    rows = weights.to(working_dtype(weights)).reshape(-1, weights.shape[-1])
    # Decision: the ends divide by K as well, as the authors' code does: a token near an end scores as if
    # zeros lay beyond it.
    pooled = avg_pool1d(rows, kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True)
    return pooled.view(weights.shape)


@operator()
@fits()
def score(
    queries: torch.Tensor, keys: torch.Tensor, *, window_size: int = 32, kernel_size: int = 7
) -> torch.Tensor:
    r"""SN-1: the attention of the last `window_size` queries, averaged over them and the group, pooled;
    infinity for the window.

    Args: queries, of the last M tokens, after RoPE, at least those of the window. Returns scores
    [B, H_kv, T], higher = keep, float32 (float64 for float64); all infinite where T <= window_size. A budget
    of at least window_size keeps the whole window under `selection.top_k`. Raises ValueError naming the
    argument, and on a CPU for NaN or infinite numbers. Source: section 4 of the paper.
    """
    length = keys.shape[2]
    window = as_window(window_size, queries.shape[2], length)
    scores = keys.new_full(keys.shape[:3], math.inf, dtype=working_dtype(keys))
    if window < length:
        received = received_attention(queries[:, :, -window:], keys)
        # Decision: only the tokens before the window are pooled; the window's own attention does not leak
        # into its neighbours.
        scores[..., : length - window] = average_pool(received[..., : length - window] / window, kernel_size)
    return scores
