r"""DuoAttention (arXiv 2410.10819): keep everything in retrieval heads, and the first and the last
tokens in the others.

The paper is known here from public code: NVIDIA/kvpress, kvpress/presses/duo_attention_press.py at
00a150c, which names mit-han-lab/duo-attention.
"""

from __future__ import annotations

import numpy as np

from .attention import attention_logits, softmax
from .checks import as_count, as_float64, group_size, require_shape
from .rope import rotate

METHOD = "keeps all tokens of retrieval heads, and the first and the last tokens of the others"
TRAITS = {"moving_window", "own_budget"}


def estimate_gates(
    query_mean: np.ndarray, key_mean: np.ndarray, *, length: int = 500, theta: float = 10000.0
) -> np.ndarray:
    r"""DA-1: `g_h = mean_g (1/n) sum_t sum_{u <= t} a_u`, a the attention of the mean query on n
    mean keys.

    The area under the cumulated attention: near 0 for a head that looks at the last tokens, 1/2 for
    one that looks everywhere. It estimates gates without the paper's training; the public code
    calls it experimental.

    Args: query_mean [B, H_q, D] and key_mean [B, H_kv, D], before RoPE; length n; theta, the base
    of RoPE. Returns [B, H_kv]. Raises ValueError naming the argument.
    """
    query = as_float64("query_mean", query_mean, "B H_q D")
    key = as_float64("key_mean", key_mean, "B H_kv D")
    require_shape(
        "key_mean",
        key,
        (query.shape[0], key.shape[1], query.shape[2]),
        "the batch and channels of query_mean",
    )
    group = group_size(query.shape[1], key.shape[1])
    places = np.arange(as_count("length", length, low=1))
    keys = rotate(np.repeat(key[:, :, None], places.size, axis=2), places, theta)[:, :, None]
    last = rotate(query.reshape(*key.shape[:2], group, 1, -1), places[-1:], theta)
    weights = softmax(attention_logits(last, keys))[..., 0, :]
    # The token at place t is in the cumulated sums of the n - t places from t on.
    return (weights * (places.size - places) / places.size).sum(axis=-1).mean(axis=2)


def select(
    keys: np.ndarray,
    gates: np.ndarray,
    *,
    threshold: float = 0.5,
    sink_size: int = 128,
    recent_size: int = 256,
) -> np.ndarray:
    r"""DA-2: a head with `g >= threshold` keeps all tokens, another one the first `sink_size` and
    the last `recent_size`.

    Args: keys [B, H_kv, T, D], of which only the shape is read; gates [B, H_kv], trained or
    estimated; sink_size and recent_size, at least 0 and together at least 1. Returns kept
    [B, H_kv, T], boolean. Raises ValueError naming the argument.
    """
    keys, gates = as_float64("keys", keys, "B H_kv T D"), as_float64("gates", gates, "B H_kv")
    require_shape("gates", gates, keys.shape[:2], "the batch and heads of keys")
    sink_size, length = as_count("sink_size", sink_size, low=0), keys.shape[2]
    # Decision: a streaming head keeps a token at least.
    recent_size = as_count("recent_size", recent_size, low=0 if sink_size else 1)
    places = np.arange(length)
    streaming = (places < sink_size) | (places >= length - recent_size)
    return (gates >= threshold)[..., None] | streaming
