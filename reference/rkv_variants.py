r"""R-KV (arXiv 2505.24133), the score of the released code, Zefan-Cai/R-KV at d15c976."""

import numpy as np

from .attention import softmax
from .contract import Open, Real, Setting, contract
from .rkv import combined, importance, similarities


@contract
def released_score(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    *,
    window_size: Setting[int, ">= 1"] = 8,
    kernel_size: Setting[int, "odd"] = 7,
    importance_share: Setting[float, "[0, 1]"] = 0.07,
    threshold: Setting[float, "[-inf, inf]"] = 0.5,
) -> Open[np.ndarray, "B H_kv T"]:
    r"""RK-6: `score`, but a row of S without a similar key leaves out token 0: its latest similar
    key is searched from 0.

    Args: those of `rkv.score`, T > window_size. Returns scores, higher = keep; infinity for the window.
    """
    attended = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
    similarity = similarities(keys)
    places = np.arange(similarity.shape[-1])
    latest = np.where(similarity > threshold, places, 0).max(axis=-1, keepdims=True)
    repeated = softmax(np.where(places == latest, 0.0, similarity).mean(axis=-2))[..., :-window_size]
    return combined(attended, repeated, importance_share, window_size)
