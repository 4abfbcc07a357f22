"""KeyDiff: keep the keys that point away from the average
direction. Write the four functions; NumPy alone is needed.
"""

import numpy as np


def anchor(keys: np.ndarray) -> np.ndarray:
    """The mean of the unit keys: keys [..., T, D] to
    [..., D]. A zero key counts as a token of direction 0.
    """
    raise NotImplementedError


def score(keys: np.ndarray) -> np.ndarray:
    """Minus the cosine of each key with the anchor: keys [B, H_kv, T, D] to [B, H_kv, T], higher = keep.

    The cosine with a zero vector is 0. Raises ValueError, with the word "keys" in its message, for fewer than
    two axes or an empty axis, and for NaN or infinite numbers.
    """
    raise NotImplementedError


def similarity_matrix(keys: np.ndarray) -> np.ndarray:
    """The cosines of all pairs of keys: keys [..., T, D] to [..., T, T]."""
    raise NotImplementedError


def pairwise_score(keys: np.ndarray) -> np.ndarray:
    """Minus the sum of the cosines of a key with every
    key, itself among them: keys [..., T, D] to [..., T].
    """
    raise NotImplementedError
