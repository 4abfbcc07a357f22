r"""CriticalKV (arXiv 2502.03805): keep half of the budget by attention, and half by attention times
the length of W_o v.

The attention is aggregated as in DefensiveKV (arXiv 2510.13334). Both papers are known here from
their public code: NVIDIA/kvpress, kvpress/presses/criticalkv_press.py at 0603dec, and
FFY0/DefensiveKV, kvpress/presses/efficient_defensivekv_press.py at c278cd0.
"""

import math
from fractions import Fraction

import numpy as np

from .attention import by_group, causal_attention
from .checks import require_window
from .contract import Mask, Open, Real, Setting, Weight, contract
from .selection import top_k
from .snapkv import average_pool

METHOD = (
    "keeps half of its budget by the attention of the last queries, aggregated as in DefensiveKV, "
    "half by that times the length of W_o v"
)


@contract
def score(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    w_o: Real[np.ndarray, "H_q D_v hidden"],
    *,
    budget: Setting[int, ">= 1"],
    window_size: Setting[int, ">= 1"] = 32,
    kernel_size: Setting[int, "odd"] = 5,
    first_share: Setting[float | Fraction, "[0, 1]"] = 0.5,
    epsilon: Setting[float, ">= 0"] = 1e-4,
) -> Open[np.ndarray, "B H_kv T"]:
    r"""CK-4: `(a_t + epsilon) n_t`; infinity for the window, and for the `first_share * budget`
    tokens of the highest a.

    Args: those of `importance` and `projected_norms`; budget >= 1, the tokens that top-k will keep, the
    window among them. Returns scores, higher = keep; all infinite where T <= window_size. Source: the
    public codes; half and 1e-4 are CriticalKV's defaults, 32 and 5 DefensiveKV's.
    """
    if keys.shape[2] <= window_size:
        return np.full(keys.shape[:3], np.inf)
    norms = projected_norms(values, w_o)
    attended = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
    window = np.full((*attended.shape[:-1], window_size), np.inf)
    # Decision: the window is the first part of the first stage, as in the public code.
    first = top_k(np.concatenate([attended, window], axis=-1), math.floor(first_share * budget))
    second = np.concatenate([(attended + epsilon) * norms[..., :-window_size], window], axis=-1)
    return np.where(first, np.inf, second)


@contract
def projected_norms(
    values: Real[np.ndarray, "B H_kv T D_v"], w_o: Real[np.ndarray, "H_q D_v hidden"]
) -> Weight[np.ndarray, "B H_kv T"]:
    r"""CK-1: `n_t = (1/G) sum_g |W_o^g v_t|_1`, the length of what a token adds to the residual
    stream, for a weight of 1.

    Args: w_o, the rows of the output projection that belong to each query head.
    """
    projected = values[:, :, None] @ w_o.reshape(values.shape[1], -1, *w_o.shape[1:])
    return np.abs(projected).sum(axis=-1).mean(axis=2)


def defend(weights: Weight[np.ndarray, "... G M T"]) -> Weight[np.ndarray, "... T"]:
    r"""CK-2: `a_t = max(b_t, mean_u b_u)`, `b_t = max_gm w_gmt`: DefensiveKV's aggregation.

    The worst case counts in place of the average: a token that any query of any head needs is
    needed. A token that no query needed yet counts as the mean one.
    """
    largest = weights.max(axis=(-3, -2))
    return np.maximum(largest, largest.mean(axis=-1, keepdims=True))


@contract
def importance(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    *,
    window_size: Setting[int, ">= 1"] = 32,
    kernel_size: Setting[int, "odd"] = 5,
) -> Weight[np.ndarray, "B H_kv T-window_size"]:
    r"""CK-3: `a = defend(w)`, w the attention of the last queries on the tokens before them, pooled
    at an unchanged sum.

    Args: queries, of the last M >= window_size tokens, after RoPE; keys, T > window_size.
    """
    queries, keys = by_group(queries, keys)
    require_window(queries.shape[-2], keys.shape[-2], window_size)
    weights = causal_attention(queries[..., -window_size:, :], keys)[..., :-window_size]
    pooled = average_pool(weights, kernel_size)
    total = pooled.sum(axis=-1, keepdims=True)
    # Decision: a query whose attention stays within the window to the last digit says nothing, in
    # place of 0/0.
    return defend(pooled * (weights.sum(axis=-1, keepdims=True) / np.where(total == 0, 1, total)))


def error_bound(
    weights: Weight[np.ndarray, "... T"], norms: Weight[np.ndarray, "... T"], kept: Mask[np.ndarray, "... T"]
) -> Real[np.ndarray, "..."]:
    r"""CK-5: `C - (2 - 1/S) sum_kept p_t n_t`, `C = sum p_t n_t`, `S = sum_kept p_t`: it bounds the
    error of the output.

    Evicted tokens leave `p_t W_o v_t` out, and the kept ones weigh p_t / S instead of p_t: the
    lengths of these changes add up to it. With S > 1/2, which the first stage is for, more kept
    `p_t n_t` lowers the bound.

    Args: weights, summing to 1; norms, |W_o v_t|_1; kept, some in each row. Returns the bound of the L1
    distance between W_o o and W_o o of the kept tokens.
    """
    part = (weights * norms * kept).sum(axis=-1)
    return (weights * norms).sum(axis=-1) - (2 - 1 / (weights * kept).sum(axis=-1)) * part
