r"""ValueNorm (a toy, of no paper): keep the tokens whose values are longest."""

import numpy as np

from .contract import Real, Weight, contract

METHOD = "keeps the tokens whose values are longest"


@contract
def score(values: Real[np.ndarray, "... T D_v"]) -> Weight[np.ndarray, "... T"]:
    r"""VN-1: `score_i = |v_i|`. Higher = keep."""
    return np.sqrt((values * values).sum(axis=-1))
