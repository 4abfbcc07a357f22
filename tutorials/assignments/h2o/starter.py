"""H2O: keep the tokens that received most attention, and the most recent ones. Write the functions; NumPy
alone is needed.
"""

import numpy as np


def score(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The attention that each token receives from all
    queries, mean over the group: [B, H_kv, T], higher = keep.

    queries [B, H_q, M, D] are those of the last M tokens, keys [B, H_kv, T, D];
    query head h reads KV head h // (H_q / H_kv). No array of M x T numbers is
    stored. Raises ValueError naming the argument that does not fit.
    """
    raise NotImplementedError


def select(queries: np.ndarray, keys: np.ndarray, *, budget: int) -> np.ndarray:
    """The kept tokens, boolean [B, H_kv, T]: the last
    ceil(budget / 2), and the highest scores among the others.

    A budget above T keeps all. Raises ValueError naming the argument that does not fit.
    """
    raise NotImplementedError
