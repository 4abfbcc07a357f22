"""KeyDiff: keep the keys that point away from the average direction. Write the four functions; NumPy alone
is needed.
"""

import numpy as np


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def anchor(keys: np.ndarray) -> np.ndarray:
    return unit(keys).mean(axis=-2)


def score(keys: np.ndarray) -> np.ndarray:
    return -(unit(keys) * unit(anchor(keys))[..., None, :]).sum(axis=-1)
