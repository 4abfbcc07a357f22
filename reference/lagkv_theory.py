r"""LagKV (arXiv 2504.04704), the attention of its
section 2.1, with the cache that the method compresses.
"""

import numpy as np

from .attention import attention_logits, softmax
from .contract import Real, Share, contract


@contract
def project(
    states: Real[np.ndarray, "* n d"],
    query_weight: Real[np.ndarray, "* d D"],
    key_weight: Real[np.ndarray, "* d D"],
    value_weight: Real[np.ndarray, "* d D_v"],
) -> tuple[Real[np.ndarray, "* n D"], Real[np.ndarray, "* n D"], Real[np.ndarray, "* n D_v"]]:
    r"""LK-1, LK-4: `Q = X W_Q, K = X W_K, V = X W_V` of one head; with a single row x, the q, k and
    v of a decoding step.

    Returns queries, keys and values. Source: section 2.1, equations 1 and 4.
    """
    return states @ query_weight, states @ key_weight, states @ value_weight


@contract
def attention_output(
    weights: Real[np.ndarray, "... h M T"],
    values: Real[np.ndarray, "... h T d_h"],
    output_weight: Real[np.ndarray, "h*d_h d"],
) -> Real[np.ndarray, "... M d"]:
    r"""LK-2: `Y = Concat_i(A_i V_i) W_O`, the heads i side by side. Source: section 2.1, equation 2."""
    side_by_side = np.swapaxes(weights @ values, -2, -3)
    return side_by_side.reshape(*side_by_side.shape[:-2], len(output_weight)) @ output_weight


@contract
def attention_weights(
    queries: Real[np.ndarray, "... M<=T d_h"], keys: Real[np.ndarray, "... T d_h"]
) -> Share[np.ndarray, "... M T"]:
    r"""LK-3, LK-6: `A = softmax(Q K^T / sqrt(d_h))`, causal; the queries are those of the last M of
    the T tokens.

    M = T is the prefill, M = 1 a decoding step. Source: section 2.1, equations 3 and 6.
    """
    num_queries, length = queries.shape[-2], keys.shape[-2]
    # Decision: causal. Equation 3 is printed without a mask; then a cached prefill would differ
    # from the uncached prefill.
    own_position = length - num_queries + np.arange(num_queries)[:, None]
    logits = attention_logits(queries, keys)
    return softmax(np.where(np.arange(length) <= own_position, logits, -np.inf))
