"""DuoAttention: retrieval heads keep everything, streaming heads both ends. Write the two functions; NumPy
alone is needed.
"""

import numpy as np


def estimate_gates(
    query_mean: np.ndarray, key_mean: np.ndarray, *, length: int = 500, theta: float = 10000.0
) -> np.ndarray:
    """The gate of each KV head, [B, H_kv]: the area under the cumulated attention of the mean query on
    `length` mean keys.

    query_mean [B, H_q, D] and key_mean [B, H_kv, D] are means before RoPE;
    query head h reads KV head h // (H_q / H_kv), and the gate of a KV head
    is the mean over its group. In RoPE channel i turns with channel i + D/2.
    """
    raise NotImplementedError


def select(
    keys: np.ndarray,
    gates: np.ndarray,
    *,
    threshold: float = 0.5,
    sink_size: int = 128,
    recent_size: int = 256,
) -> np.ndarray:
    """The kept tokens, boolean [B, H_kv, T]: all in heads with a gate of at least the threshold, both ends
    in the others.

    keys [B, H_kv, T, D], whose numbers decide nothing; gates [B, H_kv]. Raises ValueError naming the argument
    that does not fit.
    """
    raise NotImplementedError
