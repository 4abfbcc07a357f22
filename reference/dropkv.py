r"""DropKV (openreview MqfNzH3TVH): keep the last tokens, and those whose removal alone would change
the output most.

The paper is known here from its public code: NVIDIA/kvpress, pull requests 284 and 285,
kvpress/presses/dropkv_press.py at 7fb8625.
"""

import numpy as np

from .attention import attention_logits, by_group, softmax
from .checks import as_window
from .contract import Open, Real, Setting, Weight, contract
from .expected_attention import norm
from .snapkv import average_pool

METHOD = "keeps the last tokens, and those whose removal alone would change the last outputs most"


@contract
def score(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    *,
    window_size: Setting[int, ">= 1"] = 32,
    kernel_size: Setting[int, "odd"] = 7,
) -> Open[np.ndarray, "B H_kv T"]:
    r"""DK-2: `s_j = pool_K (1/G) sum_g sum_m (p_gmj / (1 - p_gmj))^2 |v_j - o_gm|^2`
    over the last queries.

    Args: queries, of the last M tokens, after RoPE, at least those of the window; kernel_size K, odd.
    Returns scores, higher = keep; infinity for the window, all infinite where T <= window_size. Source:
    the public code, whose defaults these are.
    """
    length = keys.shape[2]
    window = as_window(window_size, queries.shape[2], length)
    if window == length:
        return np.full(keys.shape[:3], np.inf)
    queries, keys = by_group(queries, keys)
    total = np.zeros((*queries.shape[:3], length))
    for place in range(length - window, length):
        logits = attention_logits(queries[..., [place - length], :], keys)[..., 0, :]
        seen = np.where(np.arange(length) <= place, logits, -np.inf)
        total = total + perturbation(seen, values[:, :, None]) ** 2
    # Decision: the scores of the window are pooled with the others, as the public code does;
    # SnapKV's are not.
    pooled = average_pool(total.mean(axis=2), kernel_size)
    return np.where(np.arange(length) >= length - window, np.inf, pooled)


def perturbation(
    logits: Real[np.ndarray, "... T"], values: Real[np.ndarray, "... T D_v"]
) -> Weight[np.ndarray, "... T"]:
    r"""DK-1: `p_j / (1 - p_j) |v_j - o|`, the change of the output `o = sum_j p_j v_j` when only
    token j is evicted.

    It is the removal error of EA-4 without W_o. The token of the largest weight is computed as
    `p_j |v_j - o'|`, o' the output without it: the same number, but where p_j rounds to 1 the other
    form is infinity times 0.

    Args: logits, finite for two tokens or more, -inf for those that are not seen. Returns 0 for tokens
    that are not seen.
    """
    weights = softmax(logits)
    first = np.arange(logits.shape[-1]) == logits.argmax(axis=-1)[..., None]
    output = (weights[..., None, :] @ values)[..., 0, :]
    without = (softmax(np.where(first, -np.inf, logits))[..., None, :] @ values)[..., 0, :]
    others = np.where(first, 0.0, weights)
    # Decision: no epsilon. With the public code's, a token that holds all the attention has the
    # score 0.
    errors = others / (1 - others) * norm(values - output[..., None, :])
    return np.where(first, weights * norm(values - without[..., None, :]), errors)
