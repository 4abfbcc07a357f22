"""KeyDiff: keep the keys that point away from the average direction. Write the four functions; NumPy alone
is needed.
"""

import numpy as np


def unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)


def anchor(keys: np.ndarray) -> np.ndarray:
    return unit(keys).mean(axis=-2)


def score(keys: np.ndarray) -> np.ndarray:
    if keys.ndim < 2 or 0 in keys.shape:
        raise ValueError(f"keys: got shape {keys.shape}, wanted [..., T, D] with no empty axis")
    if not np.isfinite(keys).all():
        raise ValueError("keys: got NaN or infinite numbers")
    return -(unit(keys) @ unit(anchor(keys))[..., None])[..., 0]


def similarity_matrix(keys: np.ndarray) -> np.ndarray:
    directions = unit(keys)
    return directions @ np.swapaxes(directions, -1, -2)


def pairwise_score(keys: np.ndarray) -> np.ndarray:
    return -similarity_matrix(keys).sum(axis=-1)
