r"""ValueNorm (a toy, of no paper): keep the tokens whose values are longest."""

import numpy as np

from .checks import array

METHOD = "keeps the tokens whose values are longest"


def score(values: np.ndarray) -> np.ndarray:
    r"""VN-1: `score_i = |v_i|`.

    Args: values [B, H_kv, T, D_v] (any leading axes). Returns scores [B, H_kv, T], at least 0,
    higher = keep. Raises ValueError for an empty, non-finite or wrongly shaped `values`.
    """
    values = array("values: ... T D_v", values)
    return np.sqrt((values * values).sum(axis=-1))
