"""Expected Attention: future queries as a Gaussian, and what attention they will pay on average. NumPy
alone is needed.
"""

import numpy as np


def query_statistics(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean [..., D] and the covariance [..., D, D] (divided by N) of queries [..., N, D]."""
    raise NotImplementedError


def average_rope(
    query_mean: np.ndarray,
    query_covariance: np.ndarray,
    *,
    position: int,
    horizon: int = 512,
    theta: float = 10000.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Both statistics under the mean of the rotations of positions position .. position + horizon - 1.

    Channel i turns with channel i + D/2. query_mean [B, H_q, D], query_covariance [B, H_q, D, D]. Raises
    ValueError naming the argument out of range.
    """
    raise NotImplementedError


def score(
    keys: np.ndarray,
    values: np.ndarray,
    query_mean: np.ndarray,
    query_covariance: np.ndarray,
    *,
    epsilon: float = 0.02,
) -> np.ndarray:
    """(expected attention + epsilon) times the norm of the value: [B, H_kv, T], higher = keep.

    keys [B, H_kv, T, D], values [B, H_kv, T, D_v], query_mean [B, H_q, D], query_covariance [B, H_q, D, D];
    query head h reads KV head h // (H_q / H_kv), has a softmax of its own, and the group is averaged after
    it. Raises ValueError naming the argument that does not fit.
    """
    raise NotImplementedError
