r"""KeyDiff (arXiv 2504.15364), the variants that its ablations compare: other anchors, other
similarities, a recent window.
"""

import math
from fractions import Fraction

import numpy as np

from .checks import array, as_count, as_fraction
from .keydiff import cosine, score
from .selection import top_k


def median_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-T2: `score_i = -cos(m, k_i)`, m the median of the keys in each channel. [..., T, D] to
    [..., T]. Section 4.3.
    """
    keys = array("keydiff_variants.median_score", keys)
    # Decision: the median of the keys as cached; section 4.3 calls only the mean one of normalised
    # keys.
    return -cosine(keys, np.median(keys, axis=-2))


def raw_mean_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-T2: `score_i = -cos(kbar, k_i)`, kbar the mean of the keys, where long keys count more.
    [..., T, D] to [..., T]. Section 4's wording; table 2 has no row for it.
    """
    keys = array("keydiff_variants.raw_mean_score", keys)
    return -cosine(keys, keys.mean(axis=-2))


def dot_product_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-T3: `score_i = -k_i . kbar`, kbar the mean of the keys: it ranks as `-sum_j k_i . k_j`.
    [..., T, D] to [..., T].
    """
    keys = array("keydiff_variants.dot_product_score", keys)
    # Decision: the anchor follows from equation 7 with this similarity; for dot products it is the
    # mean of the keys.
    return -(keys @ keys.mean(axis=-2)[..., None])[..., 0]


def euclidean_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-T3: `score_i = |k_i - kbar|`, with minus the distance to the mean of the keys as
    similarity. [..., T, D] to [..., T].
    """
    keys = array("keydiff_variants.euclidean_score", keys)
    # Decision: as for dot products; `sum_j |k_i - k_j|^2` is `T |k_i - kbar|^2` and a number that
    # no token changes.
    difference = keys - keys.mean(axis=-2, keepdims=True)
    return np.sqrt((difference * difference).sum(axis=-1))


def select_with_recent(keys: np.ndarray, *, budget: int, recent_ratio: float | Fraction) -> np.ndarray:
    r"""KD-T11: keep the `floor(recent_ratio * budget)` latest tokens, and fill the budget by
    `score` over all keys.

    Args: keys [..., T, D]; budget >= 1; recent_ratio in [0, 1]. Returns kept [..., T], boolean.
    Source: appendix B.4.
    """
    scores = score(keys)
    budget = min(as_count("budget", budget, low=1), scores.shape[-1])
    recent = math.floor(as_fraction("recent_ratio", recent_ratio) * budget)
    latest = np.broadcast_to(np.arange(scores.shape[-1]) >= scores.shape[-1] - recent, scores.shape)
    return top_k(scores, budget, latest)
