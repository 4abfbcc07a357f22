r"""KeyDiff (arXiv 2504.15364): keep the keys that point away from the average direction of the cache."""

from __future__ import annotations

import numpy as np

from reference.checks import as_float64

METHOD = "keeps the keys least similar in direction to the mean of all keys"


def unit(vectors: np.ndarray) -> np.ndarray:
    r"""`x / |x|` along the last axis, [..., D] to [..., D]."""
    # The largest component is divided out first: the square of 1e200 is not a number that float64 has.
    scale = np.abs(vectors).max(axis=-1, keepdims=True)
    vectors = vectors / np.where(scale == 0, 1, scale)
    length = np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    # Decision: the cosine with a zero vector is 0, so its unit vector is the zero vector.
    return vectors / np.where(length == 0, 1, length)


def similarity_matrix(keys: np.ndarray) -> np.ndarray:
    r"""KD-7: `S_ij = cos(k_i, k_j)`, every key against every key.

    Args: keys [..., T, D]. Returns [..., T, T]. Source: section 3.2, equation 7.
    """
    directions = unit(as_float64("keys", keys, "... T D"))
    return directions @ np.swapaxes(directions, -1, -2)


def pairwise_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-7: `score = -S 1`, minus the sum of each row of the similarity matrix; it costs O(T^2).

    Args: keys [..., T, D]. Returns [..., T]. It ranks the tokens as `score` does: row i sums to `T |mu| cos(k_i, mu)`.
    Source: section 3.2, equation 7.
    """
    return -similarity_matrix(keys).sum(axis=-1)


def anchor(keys: np.ndarray) -> np.ndarray:
    r"""KD-8: `mu = (1/T) sum_i k_i / |k_i|`, the mean of the unit keys (not the mean of the keys).

    Args: keys [..., T, D]. Returns [..., D]. Source: section 3.2, equation 8.
    """
    return unit(as_float64("keys", keys, "... T D")).mean(axis=-2)


def score(keys: np.ndarray) -> np.ndarray:
    r"""KD-8: `score_i = -cos(mu, k_i)`, in O(T).

    Args: keys [B, H_kv, T, D] (any leading axes). Returns scores [B, H_kv, T] in [-1, 1], higher = keep.
    Raises ValueError for an empty, non-finite or wrongly shaped `keys`. Source: section 3.2, equation 8.
    """
    keys = as_float64("keys", keys, "... T D")
    mu = unit(anchor(keys))
    return -(unit(keys) @ mu[..., None])[..., 0]
