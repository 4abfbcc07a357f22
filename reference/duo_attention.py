r"""DuoAttention (arXiv 2410.10819): keep everything in retrieval heads, and the first and the last
tokens in the others.

The paper is known here from public code: NVIDIA/kvpress, kvpress/presses/duo_attention_press.py at
00a150c, and for the training of the gates mit-han-lab/duo-attention, duo_attn/ at 03dca84.
"""

import numpy as np

from .attention import attention_logits, by_group, grouped, softmax
from .checks import as_count
from .contract import Mask, Real, Setting, Share, contract
from .rope import rotate

METHOD = "keeps all tokens of retrieval heads, and the first and the last tokens of the others"
TRAITS = {"moving_window", "own_budget"}
INPUTS = {
    "gates": (
        "calibration",
        "[B, H_kv], high for a retrieval head: trained, or estimated from a text (DA-1)",
    )
}


@contract
def select(
    keys: Real[np.ndarray, "B H_kv T D"],
    gates: Real[np.ndarray, "B H_kv"],
    *,
    threshold: Setting[float, "[-inf, inf]"] = 0.5,
    sink_size: Setting[int, ">= 0"] = 128,
    recent_size: Setting[int, ">= 0"] = 256,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""DA-2: a head with `g >= threshold` keeps all tokens, another one the first `sink_size` and
    the last `recent_size`.

    Args: keys, of which only the shape is read; gates, trained or estimated; sink_size and recent_size,
    at least 0 and together at least 1.
    """
    length = keys.shape[2]
    # Decision: a streaming head keeps a token at least.
    recent_size = as_count("recent_size", recent_size, low=0 if sink_size else 1)
    places = np.arange(length)
    streaming = (places < sink_size) | (places >= length - recent_size)
    return (gates >= threshold)[..., None] | streaming


@contract
def estimate_gates(
    query_mean: Real[np.ndarray, "B H_q D%2"],
    key_mean: Real[np.ndarray, "B H_kv D"],
    *,
    length: Setting[int, ">= 1"] = 500,
    theta: Setting[float, "> 0"] = 10000.0,
) -> Share[np.ndarray, "B H_kv"]:
    r"""DA-1: `g_h = mean_g (1/n) sum_t sum_{u <= t} a_u`,
    a the attention of the mean query on n mean keys.

    The area under the cumulated attention: near 0 for a head that looks at the last tokens, 1/2 for
    one that looks everywhere. It estimates gates without the paper's training; the public code
    calls it experimental.

    Args: query_mean and key_mean, before RoPE; length n; theta, the base of RoPE.
    """
    places = np.arange(length)
    keys = rotate(np.repeat(key_mean[:, :, None], places.size, axis=2), places, theta)[:, :, None]
    last = rotate(grouped(query_mean, key_mean.shape[1])[..., None, :], places[-1:], theta)
    weights = softmax(attention_logits(last, keys))[..., 0, :]
    # The token at place t is in the cumulated sums of the n - t places from t on.
    return (weights * (places.size - places) / places.size).sum(axis=-1).mean(axis=2)


@contract
def gated_attention(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    gates: Share[np.ndarray, "B H_kv"],
    *,
    sink_size: Setting[int, ">= 0"] = 128,
    recent_size: Setting[int, ">= 1"] = 256,
) -> Real[np.ndarray, "B H_q M D_v"]:
    r"""DA-3: `o_h = g_h softmax_full(Q K^T) V + (1 - g_h) softmax_streaming(Q K^T) V`.

    What a head gives while its gate is trained. Full attention sees
    the tokens up to its own; streaming attention sees of these the
    first `sink_size` and the last `recent_size`, its own among them.

    Args: queries, those of the last M tokens.
    """
    num_queries, length = queries.shape[2], keys.shape[2]
    places = np.arange(length)
    ago = places[length - num_queries :, None] - places
    full = ago >= 0
    is_first = places < sink_size
    streaming = full & (is_first | (ago < recent_size))
    logits = attention_logits(*by_group(queries, keys))
    of_full, of_streaming = (
        softmax(np.where(visible, logits, -np.inf)) @ values[:, :, None] for visible in (full, streaming)
    )
    shares = gates[:, :, None, None, None]
    mixed = shares * of_full + (1 - shares) * of_streaming
    return mixed.reshape(*queries.shape[:3], -1)


@contract
def training_loss(
    hidden_states: Real[np.ndarray, "N d"],
    full_hidden_states: Real[np.ndarray, "N d"],
    gates: Real[np.ndarray, "layers H_kv"],
    *,
    penalty: Setting[float, ">= 0"],
) -> float:
    r"""DA-4: `L = (1/(N d)) sum_n ||h_n - h_n^full||^2 + penalty sum_h |g_h|`.

    Args: the final hidden states of the tokens that say the answer, with DA-3 in every head, and those of
    the full model.
    """
    return float(((hidden_states - full_hidden_states) ** 2).mean() + penalty * np.abs(gates).sum())
