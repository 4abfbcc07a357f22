r"""ValueNorm (a toy, of no paper): keep the tokens whose values are longest."""

import numpy as np

from .contract import Real, contract

METHOD = "keeps the tokens whose values are longest"


@contract
def score(values: Real[np.ndarray, "... T D_v"]) -> np.ndarray:
    r"""VN-1: `score_i = |v_i|`.

    Args: values [B, H_kv, T, D_v] (any leading axes). Returns scores [B, H_kv, T], at least 0,
    higher = keep. Raises ValueError for an empty, non-finite or wrongly shaped `values`.
    """
    return np.sqrt((values * values).sum(axis=-1))
