r"""R-KV (arXiv 2505.24133): keep the last tokens, and those that the last queries attend to and
whose keys no other repeats.

The paper is known here from its public code: Zefan-Cai/R-KV, rkv/compression/r1_kv.py and
rkv/utils.py at d15c976.
"""

import numpy as np

from .attention import attention_logits, by_group, softmax
from .checks import require_window
from .contract import Open, Real, Setting, Share, Weight, contract
from .keydiff import similarity_matrix

METHOD = "keeps the last tokens, and those that get attention and whose keys no other key repeats"


@contract
def score(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    *,
    window_size: Setting[int, ">= 1"] = 8,
    kernel_size: Setting[int, "odd"] = 7,
    importance_share: Setting[float, "[0, 1]"] = 0.07,
    threshold: Setting[float, "[-inf, inf]"] = 0.5,
) -> Open[np.ndarray, "B H_kv T"]:
    r"""RK-5: `lambda I_t - (1 - lambda) R_t`, lambda = importance_share; infinity for the window.

    Args: those of `importance` and `redundancy`. The keys of the window count for the redundancy of the
    others. Returns scores, higher = keep; all infinite where T <= window_size. Source: the public code,
    whose defaults these are.
    """
    if keys.shape[2] <= window_size:
        return np.full(keys.shape[:-1], np.inf)
    attended = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
    repeated = redundancy(keys, threshold=threshold)[..., :-window_size]
    return combined(attended, repeated, importance_share, window_size)


@contract
def similarities(keys: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... T T"]:
    r"""RK-1: `S_ij = cos(k_i, k_j)`, and 0 for `i = j`; a zero key resembles none."""
    similarity = similarity_matrix(keys)
    return similarity * (1 - np.eye(similarity.shape[-1]))


def without_latest(
    similarity: Real[np.ndarray, "... T T"], threshold: float = 0.5
) -> Real[np.ndarray, "... T T"]:
    r"""RK-2: `S_ij = 0` for the latest j with `S_ij > threshold`, in each row i that has one.

    The latest of the keys that resemble key i is not redundant on its account: it may stay in the
    place of the others.
    """
    places = np.arange(similarity.shape[-1])
    latest = np.where(similarity > threshold, places, -1).max(axis=-1, keepdims=True)
    # Decision: a row without a similar key loses nothing. The public code takes token 0 for its
    # latest one.
    return np.where(places == latest, 0.0, similarity)


@contract
def redundancy(
    keys: Real[np.ndarray, "... T D"], *, threshold: Setting[float, "[-inf, inf]"] = 0.5
) -> Share[np.ndarray, "... T"]:
    r"""RK-3: `R_j = softmax_j((1/T) sum_i S_ij)`, S without the latest similar key of each row: the
    means of the columns.

    Args: threshold, the cosine above which two keys are similar.
    The redundancy of a head sums to 1; it costs O(T^2).
    """
    return softmax(without_latest(similarities(keys), threshold).mean(axis=-2))


@contract
def importance(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    *,
    window_size: Setting[int, ">= 1"] = 8,
    kernel_size: Setting[int, "odd"] = 7,
) -> Share[np.ndarray, "B H_kv T-window_size"]:
    r"""RK-4: `I_t = max over |u - t| <= (K - 1) / 2 of mean_m softmax_u(max_g q_gm . k_u /
    sqrt(D))`, before the window.

    The largest logit of the group goes into the
    softmax, which is over the tokens before the window.

    Args: queries, of the last M >= window_size tokens, after RoPE; keys, T > window_size; kernel_size K.
    """
    queries, keys = by_group(queries, keys)
    require_window(queries.shape[-2], keys.shape[-2], window_size)
    logits = attention_logits(queries[..., -window_size:, :], keys[..., :-window_size, :])
    received = softmax(logits.max(axis=2)).mean(axis=-2)
    beyond = np.zeros((*received.shape[:-1], kernel_size // 2))
    padded = np.concatenate([beyond, received, beyond], axis=-1)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel_size, axis=-1, subok=True).max(axis=-1)


def combined(
    attended: Weight[np.ndarray, "... T"], repeated: Real[np.ndarray, "... T"], share: float, window_size: int
) -> Open[np.ndarray, "... T+window_size"]:
    r"""RK-5: `lambda I_t - (1 - lambda) R_t`, then infinity for the window."""
    scores = share * attended - (1 - share) * repeated
    return np.concatenate([scores, np.full((*scores.shape[:-1], window_size), np.inf)], axis=-1)
