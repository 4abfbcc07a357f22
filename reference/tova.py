r"""TOVA (arXiv 2401.06104), a baseline: keep the tokens that the last query attends to, one set for
the whole layer.
"""

import numpy as np

from .attention import attention_logits, by_group, softmax
from .contract import Real, Share, contract

METHOD = "keeps the tokens that the last query attends to, averaged over all heads of the layer"


@contract
def score(
    queries: Real[np.ndarray, "B H_q M<=T D"], keys: Real[np.ndarray, "B H_kv T D"]
) -> Share[np.ndarray, "B H_kv T"]:
    r"""TO-1: `score_t = (1/H_q) sum_h softmax(q_h K^T / sqrt(D))_t` for the last query, the same
    for every KV head.

    Args: queries, the last M after RoPE, of which the last one is read. Returns scores, higher = keep,
    summing to 1. Source: section 3.2 of the paper.
    """
    queries, keys = by_group(queries, keys)
    # Decision: nothing is protected; the last token attends to itself and competes like any other,
    # as in the authors' code.
    received = softmax(attention_logits(queries[..., -1:, :], keys))[..., 0, :]
    scores = received.mean(axis=(1, 2))
    return np.repeat(scores[:, None], keys.shape[1], axis=1)
