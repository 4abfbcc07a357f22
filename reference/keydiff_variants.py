r"""KeyDiff (arXiv 2504.15364), the variants that its ablations compare: other anchors, other
similarities, a recent window.
"""

import math
from fractions import Fraction

import numpy as np

from .contract import Cosine, Mask, Real, Setting, contract
from .keydiff import cosine, score
from .selection import top_k


@contract
def median_score(keys: Real[np.ndarray, "... T D"]) -> Cosine[np.ndarray, "... T"]:
    r"""KD-T2: `score_i = -cos(m, k_i)`, m the median of the keys in each channel. Section 4.3."""
    # Decision: the median of the keys as cached; section 4.3 calls only the mean one of normalised
    # keys.
    return -cosine(keys, np.median(keys, axis=-2))


@contract
def raw_mean_score(keys: Real[np.ndarray, "... T D"]) -> Cosine[np.ndarray, "... T"]:
    r"""KD-T2: `score_i = -cos(kbar, k_i)`, kbar the mean of the keys, where long keys count more. Section
    4's wording; table 2 has no row for it.
    """
    return -cosine(keys, keys.mean(axis=-2))


@contract
def dot_product_score(keys: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... T"]:
    r"""KD-T3: `score_i = -k_i . kbar`, kbar the mean of the keys: it ranks as `-sum_j k_i . k_j`."""
    # Decision: the anchor follows from equation 7 with this similarity; for dot products it is the
    # mean of the keys.
    return -(keys @ keys.mean(axis=-2)[..., None])[..., 0]


@contract
def euclidean_score(keys: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... T"]:
    r"""KD-T3: `score_i = |k_i - kbar|`, with minus the distance to the mean of the keys as similarity."""
    # Decision: as for dot products; `sum_j |k_i - k_j|^2` is `T |k_i - kbar|^2` and a number that
    # no token changes.
    difference = keys - keys.mean(axis=-2, keepdims=True)
    return np.sqrt((difference * difference).sum(axis=-1))


@contract
def select_with_recent(
    keys: Real[np.ndarray, "... T D"],
    *,
    budget: Setting[int, ">= 1"],
    recent_ratio: Setting[float | Fraction, "[0, 1]"],
) -> Mask[np.ndarray, "... T"]:
    r"""KD-T11: keep the `floor(recent_ratio * budget)` latest tokens, and fill the budget by
    `score` over all keys.

    Source: appendix B.4.
    """
    scores = score(keys)
    budget = min(budget, scores.shape[-1])
    recent = math.floor(recent_ratio * budget)
    latest = np.broadcast_to(np.arange(scores.shape[-1]) >= scores.shape[-1] - recent, scores.shape)
    return top_k(scores, budget, latest)
