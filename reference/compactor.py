r"""Compactor (arXiv 2507.08143): keep the outliers among the keys, by their leverage scores, and the
tokens that their neighbours attend to.

Only the paper's abstract could be read. The definition follows the
presses that its author gave to NVIDIA/kvpress: compactor_press.py and
leverage_press.py at 8bb29b9, non_causal_attention_press.py at 15a267d.
"""

import numpy as np

from .attention import grouped, softmax
from .contract import Open, Real, Setting, Weight, contract
from .expected_attention import norm
from .snapkv import average_pool

METHOD = "keeps keys that others cannot replace (their leverage), and those that neighbours attend to"
TRAITS = {"prompt_only"}
INPUTS = {
    "unrotated_keys": ("queries", "[B, H_kv, T, D], the keys before RoPE"),
    "sketch": ("queries", "[B, H_kv, D, k], drawn from a normal distribution of variance 1/k"),
}
CUTOFF = 1e-6  # without a ridge, a singular value below this part of the largest counts as zero


@contract
def score(
    queries: Real[np.ndarray, "B H_q T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    unrotated_keys: Real[np.ndarray, "B H_kv T D"],
    sketch: Real[np.ndarray, "B H_kv D k"],
    *,
    compression_ratio: Setting[float, "[0, 1]"],
    sink_size: Setting[int, ">= 0"] = 8,
    recent_size: Setting[int, ">= 0"] = 4,
    chunk_size: Setting[int, ">= 1"] = 256,
) -> Open[np.ndarray, "B H_kv T"]:
    r"""CO-5: `score = r z(l) + z(p)` between the first and the last tokens, which have infinity:
    l the leverage of CO-2, and `p_t = (1/3) sum_{u = t-1}^{t+1} |v_u| (1/G) sum_g a_gu` with the
    attention a of CO-3, mean over the group.

    Args: queries of all tokens and keys, after RoPE; compression_ratio r, the fraction to remove, 0 to 1;
    sink_size and recent_size, the first and last tokens, at least 0. Returns scores, higher = keep.
    Source: compactor_press.py. Decision: a text without other tokens scores infinity everywhere.
    """
    first, last = sink_size, keys.shape[2] - recent_size
    scores = np.full(keys.shape[:3], np.inf)
    if first < last:
        tokens = (queries, keys, values, unrotated_keys)
        queries, keys, values, unrotated_keys = (each[:, :, first:last] for each in tokens)
        readers = grouped(queries, keys.shape[1])
        received = chunk_attention(readers, keys[:, :, None], chunk_size=chunk_size).mean(axis=2)
        attended = average_pool(received * norm(values), 3)
        outliers = sketched_leverage(unrotated_keys, sketch)
        scores[:, :, first:last] = compression_ratio * z_scores(outliers) + z_scores(attended)
    return scores


@contract
def leverage(
    keys: Real[np.ndarray, "... T D"], *, ridge: Setting[float, ">= 0"] = 0.0
) -> Real[np.ndarray, "... T"]:
    r"""CO-1: `l_t = k_t^T (K^T K + r I)^+ k_t`, the diagonal of the hat matrix: how little the other keys
    can replace key t.

    By the singular values s_j and right singular vectors
    v_j of K it is `sum_j (k_t . v_j)^2 / (s_j^2 + r)`.

    Returns numbers from 0 to 1; without a ridge they sum to the rank of K. Source: compute_leverage_scores.
    """
    _, sizes, right = np.linalg.svd(keys, full_matrices=False)
    total = np.where((sizes > CUTOFF * sizes[..., :1]) | (ridge > 0), sizes**2 + ridge, np.inf)
    return ((keys @ np.swapaxes(right, -1, -2)) ** 2 / total[..., None, :]).sum(axis=-1)


@contract
def sketched_leverage(
    keys: Real[np.ndarray, "* T D"],
    sketch: Real[np.ndarray, "* D k"],
    *,
    ridge: Setting[float, ">= 0"] = 0.01,
) -> Real[np.ndarray, "* T"]:
    r"""CO-2: the leverage of `(K - mean_t k_t) Phi`, keys in fewer channels.

    Args: keys, before RoPE; sketch Phi, each head its own. Returns numbers from 0 to 1, of sum at most k.
    Source: compute_leverage_scores, where the ridge makes a Cholesky factorisation possible. Decision: it
    stays 0.01, while the public code takes more where the factorisation fails.
    """
    return leverage((keys - keys.mean(axis=-2, keepdims=True)) @ sketch, ridge=ridge)


@contract
def chunk_attention(
    queries: Real[np.ndarray, "* T D"],
    keys: Real[np.ndarray, "* T D"],
    *,
    chunk_size: Setting[int, ">= 1"] = 256,
) -> Weight[np.ndarray, "* T"]:
    r"""CO-3: `a_t = sum_m softmax_t(q_m . k_t)` over the m and t of one chunk: the attention that a token
    receives from its chunk, before and after it.

    The logits are not divided by `sqrt(D)`, as in the public code.

    Args: queries and keys, after RoPE; chunk_size, at least 1, the last chunk may be shorter. Each chunk
    sums to its length. Source: non_causal_chunked_attn.
    """
    chunks = [slice(start, start + chunk_size) for start in range(0, keys.shape[-2], chunk_size)]
    logits = (queries[..., one, :] @ np.swapaxes(keys[..., one, :], -1, -2) for one in chunks)
    return np.concatenate([softmax(each).sum(axis=-2) for each in logits], axis=-1)


def z_scores(scores: Real[np.ndarray, "B H_kv T"]) -> Real[np.ndarray, "B H_kv T"]:
    r"""CO-4: `z = (x - mean x) / std x` over all heads and tokens of an item.

    Decision: the sample standard deviation, of at least 1e-6, as in the public code, which takes the
    items of a batch together; a single number has a z of 0.
    """
    centred = scores - scores.mean(axis=(-2, -1), keepdims=True)
    freedom = max(1, scores.shape[-2] * scores.shape[-1] - 1)
    variance = (centred * centred).sum(axis=(-2, -1), keepdims=True) / freedom
    return centred / np.maximum(np.sqrt(variance), 1e-6)
