r"""Scaled dot-product attention, which all the papers use (requirements ATT-1 to ATT-6)."""

import numpy as np

from .cache import CompressedCache, heads
from .contract import Open, Real, Share, State, contract


def softmax(logits: Real[np.ndarray, "... T"], axis: int = -1) -> Share[np.ndarray, "... T"]:
    r"""`exp(x_i) / sum_j exp(x_j)` along `axis`; the maximum is subtracted first, so logits of 1e4
    do not overflow.
    """
    weights = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


def log_sum_exp(logits: Real[np.ndarray, "... T"], axis: int = -1) -> Real[np.ndarray, "..."]:
    r"""`log sum_j exp(x_j)` along `axis`, in the log domain."""
    top = logits.max(axis=axis, keepdims=True)
    return np.squeeze(top, axis=axis) + np.log(np.exp(logits - top).sum(axis=axis))


def attention_logits(
    queries: Real[np.ndarray, "... M D"], keys: Real[np.ndarray, "... T D"]
) -> Real[np.ndarray, "... M T"]:
    r"""`q_m . k_t / sqrt(D)` for each query m and each key t."""
    return queries @ np.swapaxes(keys, -1, -2) / np.sqrt(keys.shape[-1])


def attention(
    queries: Real[np.ndarray, "... M D"],
    keys: Real[np.ndarray, "... T D"],
    values: Real[np.ndarray, "... T D_v"],
) -> Real[np.ndarray, "... M D_v"]:
    r"""ATT-1: `softmax(Q K^T / sqrt(D)) V` for one head."""
    return softmax(attention_logits(queries, keys)) @ values


@contract
def attend(
    queries: Real[np.ndarray, "B H_q M D"], cache: State[CompressedCache, ""]
) -> tuple[Real[np.ndarray, "B H_q M D_v"], Open[np.ndarray, "B H_q M"]]:
    r"""ATT-1..3: attention of every query over the kept tokens of its KV head, with the log-sum-exp
    of the logits.

    Args: queries, all later than the cache (no causal mask); cache, from `cache.compress`. Returns output
    and log-sum-exp (natural logarithm, scaled logits). With it the attention over two disjoint sets of
    tokens can be merged exactly. A head that keeps no token gives output 0 and log-sum-exp -inf.
    """
    batch, num_query_heads, num_queries, _ = queries.shape
    group = num_query_heads // cache.lengths.shape[1]
    output = np.zeros((batch, num_query_heads, num_queries, cache.values.shape[-1]))
    normaliser = np.full((batch, num_query_heads, num_queries), -np.inf)
    for item, kv_head, rows in heads(cache):
        if rows.start == rows.stop:
            continue
        readers = slice(kv_head * group, (kv_head + 1) * group)
        logits = attention_logits(queries[item, readers], cache.keys[rows])
        normaliser[item, readers] = log_sum_exp(logits)
        # The softmax reuses the log-sum-exp: an implementation may do so too, and the tolerance
        # comes from this rounding.
        output[item, readers] = np.exp(logits - normaliser[item, readers, :, None]) @ cache.values[rows]
    return output, normaliser


@contract
def by_group(
    queries: Real[np.ndarray, "B H_q M<=T D"], keys: Real[np.ndarray, "B H_kv T D"]
) -> tuple[Real[np.ndarray, "B H_kv G M D"], Real[np.ndarray, "B H_kv 1 T D"]]:
    r"""ATT-5: queries in groups of G = H_q / H_kv beside the keys that they read: query head
    `h = kv_head * G + g` reads KV head h // G.

    Args: queries, those of the last M tokens.
    """
    return grouped(queries, keys.shape[1]), keys[:, :, None]


def grouped(
    states: Real[np.ndarray, "B H_q M D"], num_kv_heads: int
) -> Real[np.ndarray, "B num_kv_heads G M D"]:
    r"""ATT-5: the query heads in groups, G = H_q / num_kv_heads for each KV head."""
    return states.reshape(states.shape[0], num_kv_heads, -1, *states.shape[2:])


def causal_attention(
    queries: Real[np.ndarray, "... M<=T D"], keys: Real[np.ndarray, "... T D"]
) -> Share[np.ndarray, "... M T"]:
    r"""ATT-6: `softmax(Q K^T / sqrt(D))` under the causal mask: the m-th of the last M queries sees
    the tokens up to T - M + m.

    The weights are 0 beyond each query's own position.
    """
    logits = attention_logits(queries, keys)
    num_queries, length = logits.shape[-2:]
    visible = np.arange(length) <= np.arange(length - num_queries, length)[:, None]
    return softmax(np.where(visible, logits, -np.inf))
