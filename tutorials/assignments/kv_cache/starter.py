"""A KV cache from nothing: attention, positions, prefill, decode, memory. Write the six functions; NumPy
alone is needed.
"""

from typing import NamedTuple

import numpy as np


class KVCache(NamedTuple):
    """What a layer remembers of a text; leave this class as it is."""

    keys: np.ndarray  # [B, H_kv, n, D], each turned to its position
    values: np.ndarray  # [B, H_kv, n, D_v]
    seen: int  # how many tokens have been read, also those that are forgotten


def weights(
    queries: np.ndarray, keys: np.ndarray, *, window: int | None = None, sinks: int = 0
) -> np.ndarray:
    """The softmax of q . k / sqrt(D) over the tokens that a query sees: [..., M, T], 0 for all others.

    queries [..., M, D] are those of the last M tokens, keys [..., T, D]. Without a window a query sees all
    tokens up to its own. With one it sees the last `window` of them, and the first `sinks` tokens.
    """
    raise NotImplementedError


def attend(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    window: int | None = None,
    sinks: int = 0,
) -> np.ndarray:
    """The weighted sum of the values: [B, H_q, M, D_v].

    queries [B, H_q, M, D], keys [B, H_kv, T, D], values [B, H_kv, T, D_v]; query head h reads KV head
    h // (H_q / H_kv). Raises ValueError naming the argument that does not fit.
    """
    raise NotImplementedError


def rotate(states: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """RoPE: states [..., T, D] turned to their positions [T].

    Channels i and i + D/2 turn as a point, by the angle position * 10000 ** (-2 i / D).
    """
    raise NotImplementedError


def prefill(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[np.ndarray, KVCache]:
    """Read a prompt of T tokens: the output of each token [B, H_q, T, D_v], and the cache after it.

    queries [B, H_q, T, D] and keys [B, H_kv, T, D] are not turned yet; values [B, H_kv, T, D_v].
    """
    raise NotImplementedError


def decode(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    cache: KVCache,
    *,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[np.ndarray, KVCache]:
    """Read one more token: its output [B, H_q, D_v], and a new cache; the given one stays as it is.

    query [B, H_q, D] and key [B, H_kv, D] are not turned yet; value [B, H_kv, D_v].
    """
    raise NotImplementedError


def cache_bytes(
    length: int,
    *,
    num_layers: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bytes_per_number: int = 2,
    window: int | None = None,
    sinks: int = 0,
) -> int:
    """The bytes that the caches of all layers take after a text of `length` tokens."""
    raise NotImplementedError
