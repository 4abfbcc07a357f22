r"""R-KV (arXiv 2505.24133): keep the last tokens, and those that the last queries attend to and
whose keys no other repeats.

The paper is known here from its public code: Zefan-Cai/R-KV, rkv/compression/r1_kv.py and
rkv/utils.py at d15c976.
"""

import numpy as np

from .attention import attention_logits, by_group, softmax
from .checks import arrays, as_count, as_fraction, as_odd, require_window
from .keydiff import similarity_matrix

METHOD = "keeps the last tokens, and those that get attention and whose keys no other key repeats"


def score(
    queries: np.ndarray,
    keys: np.ndarray,
    *,
    window_size: int = 8,
    kernel_size: int = 7,
    importance_share: float = 0.07,
    threshold: float = 0.5,
) -> np.ndarray:
    r"""RK-5: `lambda I_t - (1 - lambda) R_t`, lambda = importance_share; infinity for the window.

    Args: those of `importance` and `redundancy`; importance_share in [0, 1]. The keys of the window
    count for the redundancy of the others. Returns scores [B, H_kv, T], higher = keep; all infinite
    where T <= window_size. Raises ValueError naming the argument. Source: the public code, whose
    defaults these are.
    """
    share = float(as_fraction("importance_share", importance_share))
    queries, keys = arrays("rkv.score", queries, keys)
    if keys.shape[2] <= as_count("window_size", window_size, low=1):
        return np.full(keys.shape[:-1], np.inf)
    attended = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
    repeated = redundancy(keys, threshold=threshold)[..., :-window_size]
    return combined(attended, repeated, share, window_size)


def similarities(keys: np.ndarray) -> np.ndarray:
    r"""RK-1: `S_ij = cos(k_i, k_j)`, and 0 for `i = j`. Keys [..., T, D] to [..., T, T]; a zero key
    resembles none.
    """
    similarity = similarity_matrix(keys)
    return similarity * (1 - np.eye(similarity.shape[-1]))


def without_latest(similarity: np.ndarray, threshold: float = 0.5) -> np.ndarray:
    r"""RK-2: `S_ij = 0` for the latest j with `S_ij > threshold`, in each row i that has one.
    [..., T, T] to [..., T, T].

    The latest of the keys that resemble key i is not redundant on its account: it may stay in the
    place of the others.
    """
    places = np.arange(similarity.shape[-1])
    latest = np.where(similarity > threshold, places, -1).max(axis=-1, keepdims=True)
    # Decision: a row without a similar key loses nothing. The public code takes token 0 for its
    # latest one.
    return np.where(places == latest, 0.0, similarity)


def redundancy(keys: np.ndarray, *, threshold: float = 0.5) -> np.ndarray:
    r"""RK-3: `R_j = softmax_j((1/T) sum_i S_ij)`, S without the latest similar key of each row: the
    means of the columns.

    Args: keys [B, H_kv, T, D] (any leading axes); threshold, the cosine above which two keys are
    similar. Returns [B, H_kv, T], summing to 1; it costs O(T^2). Raises ValueError for unusable
    keys.
    """
    return softmax(without_latest(similarities(keys), threshold).mean(axis=-2))


def importance(
    queries: np.ndarray, keys: np.ndarray, *, window_size: int = 8, kernel_size: int = 7
) -> np.ndarray:
    r"""RK-4: `I_t = max over |u - t| <= (K - 1) / 2 of mean_m softmax_u(max_g q_gm . k_u /
    sqrt(D))`, before the window.

    The largest logit of the group goes into the softmax, which is over the tokens before the
    window.

    Args: queries [B, H_q, M, D], of the last M >= window_size tokens, after RoPE; keys
    [B, H_kv, T, D], T > window_size; kernel_size K, odd. Returns [B, H_kv, T - window_size]. Raises
    ValueError naming the argument.
    """
    window_size = as_count("window_size", window_size, low=1)
    kernel_size = as_odd("kernel_size", kernel_size)
    queries, keys = by_group(queries, keys)
    require_window(queries.shape[-2], keys.shape[-2], window_size)
    logits = attention_logits(queries[..., -window_size:, :], keys[..., :-window_size, :])
    received = softmax(logits.max(axis=2)).mean(axis=-2)
    beyond = np.zeros((*received.shape[:-1], kernel_size // 2))
    padded = np.concatenate([beyond, received, beyond], axis=-1)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel_size, axis=-1, subok=True).max(axis=-1)


def combined(attended: np.ndarray, repeated: np.ndarray, share: float, window_size: int) -> np.ndarray:
    r"""RK-5: `lambda I_t - (1 - lambda) R_t`, then infinity for the window: [..., T] in all."""
    scores = share * attended - (1 - share) * repeated
    return np.concatenate([scores, np.full((*scores.shape[:-1], window_size), np.inf)], axis=-1)
