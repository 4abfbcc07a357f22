r"""Q-Filters (arXiv 2503.02812): keep the keys that
point along the main direction of calibrated queries.

The paper is known here from its public code: NathanGodey/qfilters, make_filters.py and
src/hf_cache.py at cda5c38.
"""

import numpy as np

from .checks import group_size
from .contract import Real, Setting, contract

METHOD = "keeps the keys with the largest projection on the main direction of calibrated queries"
INPUTS = {"q_filters": ("calibration", "[B, H_kv, D], main directions of calibrated queries (QF-2)")}


@contract
def score(
    keys: Real[np.ndarray, "B H_kv T D"], q_filters: Real[np.ndarray, "B H_kv D"]
) -> Real[np.ndarray, "B H_kv T"]:
    r"""QF-3: `score_t = f . k_t`, which is proportional to the expected logit where queries are
    spread around f.

    Args: keys, after RoPE; q_filters, of `calibrate`. Returns scores, higher = keep. Source: the public
    code, where both the stored filter and the score have the other sign.
    """
    return (keys @ q_filters[..., None])[..., 0]


@contract
def main_direction(queries: Real[np.ndarray, "... N D"]) -> Real[np.ndarray, "... D"]:
    r"""QF-1: the first right singular vector v of the queries, with the sign for which most of them
    have `q . v > 0`.

    The direction has length 1.
    """
    direction = np.linalg.svd(queries, full_matrices=False)[2][..., 0, :]
    ahead = ((queries @ direction[..., None])[..., 0] > 0).mean(axis=-1)
    # Decision: a majority is more than half, as in the public code.
    return np.where(ahead > 0.5, 1.0, -1.0)[..., None] * direction


@contract
def calibrate(
    queries: Real[np.ndarray, "B H_q N D"], num_kv_heads: Setting[int, ">= 1"]
) -> Real[np.ndarray, "B num_kv_heads D"]:
    r"""QF-2: `f_h = (1/G) sum_g v_{hG + g}`, the filter of a KV head: the mean of the directions of
    its query heads.

    Args: queries, of a calibration text, after RoPE. Returns filters of length at most 1.
    """
    directions = main_direction(queries)
    group = group_size(directions.shape[1], num_kv_heads)
    return directions.reshape(directions.shape[0], num_kv_heads, group, -1).mean(axis=2)
