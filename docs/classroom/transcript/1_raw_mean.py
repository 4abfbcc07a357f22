"""KeyDiff: keep the keys that point away from the average direction. Write the four functions; NumPy alone
is needed.
"""

import numpy as np


def anchor(keys: np.ndarray) -> np.ndarray:
    return keys.mean(axis=-2)


def score(keys: np.ndarray) -> np.ndarray:
    mu = anchor(keys)[..., None, :]
    return -(keys * mu).sum(axis=-1) / (np.linalg.norm(keys, axis=-1) * np.linalg.norm(mu, axis=-1))
