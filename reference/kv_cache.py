r"""A KV cache from nothing: attention, prefill, decode, memory, a window with sinks (requirements
KVC-1 to KVC-8).

    prefill     q0 q1 q2  attend to  k0 k1 k2           the cache holds k0 k1 k2
    decode            q3  attends to k0 k1 k2 k3        the cache holds k0 k1 k2 k3

Keys are stored as RoPE has turned them, each to its own position. So an evicted token leaves the
positions of all others as they were. `cache.py` is about a cache whose heads keep different tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import rope
from .attention import attention_logits, softmax
from .contract import Real, Setting, Share, State, contract


@contract
def weights(
    queries: Real[np.ndarray, "... M<=T D"],
    keys: Real[np.ndarray, "... T D"],
    *,
    window: Setting[int | None, ">= 1"] = None,
    sinks: Setting[int, ">= 0"] = 0,
) -> Share[np.ndarray, "... M T"]:
    r"""KVC-1, KVC-2: `softmax(q . k / sqrt(D))` over the tokens that a query sees, 0 for all others.

    Args: queries, those of the last M tokens; window, how many tokens each sees, its own the last of them;
    None for all; sinks, so many first tokens are seen too.
    """
    seen = _seen(queries.shape[-2], keys.shape[-2], window, sinks)
    return softmax(np.where(seen, attention_logits(queries, keys), -np.inf))


@contract
def attend(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    *,
    window: Setting[int | None, ">= 1"] = None,
    sinks: Setting[int, ">= 0"] = 0,
) -> Real[np.ndarray, "B H_q M D_v"]:
    r"""KVC-3: the weighted sum of the values; query head h reads KV head h // G, with G = H_q / H_kv.

    Args: window and sinks, as for `weights`.
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    return weights(queries, keys, window=window, sinks=sinks) @ values


@contract
def rotate(states: Real[np.ndarray, "... T D%2"], positions: np.ndarray) -> Real[np.ndarray, "... T D"]:
    r"""KVC-4: RoPE: channels i and i + D/2 turn by the angle `position * 10000^(-2i/D)`.

    Args: positions [T].
    """
    return rope.rotate(states, positions)


class KVCache(NamedTuple):
    """What a layer remembers: keys turned to their positions, values, and how many tokens it has read,
    which is the position of the next one.
    """

    keys: Real[np.ndarray, "n D"]
    values: Real[np.ndarray, "n D_v"]
    seen: int


@contract
def prefill(
    queries: Real[np.ndarray, "B H_q T D%2"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    *,
    window: Setting[int | None, ">= 1"] = None,
    sinks: Setting[int, ">= 0"] = 0,
) -> tuple[Real[np.ndarray, "B H_q T D_v"], State[KVCache, "B H_kv"]]:
    r"""KVC-5, KVC-7: turn queries and keys to the positions 0 to T - 1, attend, and start a cache.

    Args: window and sinks, as for `weights`. Returns the output of every token, and the cache of the tokens
    that the last one sees.
    """
    positions = np.arange(keys.shape[2])
    queries, keys = rotate(queries, positions), rotate(keys, positions)
    output = attend(queries, keys, values, window=window, sinks=sinks)
    return output, _kept(KVCache(keys, values, keys.shape[2]), window, sinks)


@contract
def decode(
    query: Real[np.ndarray, "B H_q D%2"],
    key: Real[np.ndarray, "B H_kv D"],
    value: Real[np.ndarray, "B H_kv D_v"],
    cache: State[KVCache, "B H_kv"],
    *,
    window: Setting[int | None, ">= 1"] = None,
    sinks: Setting[int, ">= 0"] = 0,
) -> tuple[Real[np.ndarray, "B H_q D_v"], State[KVCache, "B H_kv"]]:
    r"""KVC-6, KVC-7: one more token: turn it to the position `cache.seen`, append it, forget what it does
    not see, and attend to the rest.

    Args: query, key and value of the new token; window and sinks, as for `weights`. Returns its output, and
    the new cache; the old one is left as it is.
    """
    position = np.array([cache.seen])
    query, key = rotate(query[:, :, None], position), rotate(key[:, :, None], position)
    keys = np.concatenate([cache.keys, key], axis=2)
    values = np.concatenate([cache.values, value[:, :, None]], axis=2)
    cache = _kept(KVCache(keys, values, cache.seen + 1), window, sinks)
    return attend(query, cache.keys, cache.values)[:, :, 0], cache


@contract
def cache_bytes(
    length: Setting[int, ">= 1"],
    *,
    num_layers: Setting[int, ">= 1"],
    num_query_heads: Setting[int, ">= 1"],
    num_kv_heads: Setting[int, ">= 1"],
    head_dim: Setting[int, ">= 1"],
    bytes_per_number: Setting[int, ">= 1"] = 2,
    window: Setting[int | None, ">= 1"] = None,
    sinks: Setting[int, ">= 0"] = 0,
) -> int:
    r"""KVC-8: `2 L H_kv D n b`: the bytes of the caches of all layers after a text of `length` tokens.

    Args: those of a model's configuration; a key and a value have head_dim numbers each. The query heads
    store nothing. With a window, n is at most sinks + window.
    """
    tokens = length if window is None else min(length, sinks + window)
    return 2 * num_layers * num_kv_heads * head_dim * tokens * bytes_per_number


def _seen(num_queries: int, length: int, window: int | None, sinks: int) -> np.ndarray:
    """KVC-1, KVC-2: which tokens each of the last queries sees, [M, T]."""
    token, own = np.arange(length), np.arange(length - num_queries, length)[:, None]
    recent = True if window is None else token > own - window
    return (token <= own) & (recent | (token < sinks))


def _kept(cache: KVCache, window: int | None, sinks: int) -> KVCache:
    """KVC-7: the tokens of a cache that the newest one sees."""
    seen = _seen(1, cache.keys.shape[2], window, sinks)[0]
    return KVCache(cache.keys[:, :, seen], cache.values[:, :, seen], cache.seen)
