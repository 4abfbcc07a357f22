r"""KNorm (arXiv 2406.11430), a baseline: keep the keys of smallest norm."""

import numpy as np

from .contract import Real, contract

METHOD = "keeps the keys of smallest Euclidean norm"


@contract
def score(keys: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... T"]:
    r"""KN-1: `score_i = -|k_i|`.

    Returns scores, at most 0, higher = keep. Source: the paper's abstract and section 3.
    """
    return -np.sqrt((keys * keys).sum(axis=-1))
