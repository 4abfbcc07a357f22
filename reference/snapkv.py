r"""SnapKV (arXiv 2404.14469), a baseline: keep the tokens that the prompt's last queries attend to,
smoothed over neighbours.
"""

import numpy as np

from .attention import by_group, causal_attention
from .checks import as_window
from .contract import Open, Real, Setting, contract

METHOD = (
    "keeps the last tokens, and those before that the last queries attend to, smoothed over "
    "neighbouring tokens"
)


@contract
def score(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    *,
    window_size: Setting[int, ">= 1", 64] = 32,
    kernel_size: Setting[int, "odd", 5] = 7,
) -> Open[np.ndarray, "B H_kv T"]:
    r"""SN-1: the attention of the last `window_size` queries, averaged over them and the group,
    pooled; infinity for the window.

    Args: queries, of the last M tokens, after RoPE, at least those of the window. Returns scores,
    higher = keep; all infinite where T <= window_size. A budget of at least window_size keeps the whole
    window under `selection.top_k`. Source: section 4 of the paper.
    """
    queries, keys = by_group(queries, keys)
    length = keys.shape[-2]
    window = as_window(window_size, queries.shape[-2], length)
    if window == length:
        return np.full((*keys.shape[:2], length), np.inf)
    attention = causal_attention(queries[..., -window:, :], keys)
    # Decision: only the tokens before the window are pooled; the window's own attention does not
    # leak into its neighbours.
    before = attention[..., : length - window].mean(axis=(2, 3))
    pooled = average_pool(before, kernel_size)
    return np.concatenate([pooled, np.full((*pooled.shape[:-1], window), np.inf)], axis=-1)


@contract
def average_pool(
    weights: Real[np.ndarray, "... T"], kernel_size: Setting[int, "odd"]
) -> Real[np.ndarray, "... T"]:
    r"""SN-1: `p_t = (1/K) sum of w_u over |u - t| <= (K - 1) / 2`, zeros beyond both ends, K odd."""
    # Decision: the ends divide by K as well, as the authors' code does: a token near an end scores
    # as if zeros lay beyond it.
    beyond = np.zeros((*weights.shape[:-1], kernel_size // 2))
    padded = np.concatenate([beyond, weights, beyond], axis=-1)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel_size, axis=-1, subok=True).mean(axis=-1)
