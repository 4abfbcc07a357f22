r"""Re-rotation after eviction: the keys that stay turn to consecutive positions. StreamingLLM
(arXiv 2309.17453, section 3.2) counts positions in the cache, not in the text.

    text       0 1 2 3 . . 6 7 8 9     the next token is at 10
    cache      0 1 2 3     4 5 6 7     the next token is at 8

A key is cached after RoPE, at its position in the text. So it is turned by the distance between its two
positions. Values have no position.
"""

import numpy as np

from .cache import CompressedCache, compress
from .contract import Mask, Real, Setting, State, Whole, contract
from .rope import rotate


@contract
def rerotated(
    keys: Real[np.ndarray, "B H_kv T D%2"],
    old: Whole[np.ndarray, "B H_kv T"],
    new: Whole[np.ndarray, "B H_kv T"],
    *,
    theta: Setting[float, "> 0"] = 10000.0,
) -> Real[np.ndarray, "B H_kv T D"]:
    r"""RR-1..5: `R_{q - p} k`, the keys at the positions `new`, cached after RoPE at the positions `old`.

    Args: theta, that of the rotation which the keys were cached with.
    """
    return rotate(keys, new.astype(np.float64) - old, theta)


@contract
def positions_after(kept: Mask[np.ndarray, "B H_kv T"]) -> Whole[np.ndarray, "B H_kv T"]:
    r"""RR-6: the kept tokens of a head get the positions 0 .. M - 1, in their order.

    Returns the new position of each kept token. The number of an evicted token means nothing.
    """
    # Decision: each head counts its own tokens, so a token may have another position in each head.
    return kept.cumsum(axis=-1) - kept


@contract
def next_position(kept: Mask[np.ndarray, "B H_kv T"]) -> Whole[np.ndarray, "B H_kv"]:
    r"""RR-7: the next token is at M, the number of tokens that its head holds."""
    return kept.sum(axis=-1)


@contract
def rotated_query(
    query: Real[np.ndarray, "B H_q D%2"],
    kept: Mask[np.ndarray, "B H_kv T"],
    *,
    theta: Setting[float, "> 0"] = 10000.0,
) -> Real[np.ndarray, "B H_q D"]:
    r"""RR-7: `R_M q`, the next query at the position that follows the tokens of its KV head.

    Args: query, before RoPE; theta, that of the keys.
    """
    group = query.shape[1] // kept.shape[1]
    return rotate(query, np.repeat(next_position(kept), group, axis=1), theta)


@contract
def compact(
    keys: Real[np.ndarray, "B H_kv T D%2"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    kept: Mask[np.ndarray, "B H_kv T"],
    *,
    theta: Setting[float, "> 0"] = 10000.0,
) -> State[CompressedCache, ""]:
    r"""RR-8: the cache of the kept tokens with re-rotated keys; values and positions stay as they were.

    Args: keys, cached after RoPE at the positions 0 .. T - 1; theta, that of this rotation. The positions of
    the answer are those in the text.
    """
    places = np.broadcast_to(np.arange(kept.shape[-1]), kept.shape)
    return compress(rerotated(keys, places, positions_after(kept), theta=theta), values, kept)


@contract
def positions_before(
    kept: Mask[np.ndarray, "B H_kv T"], length: Setting[int | None, ">= 1"] = None
) -> Whole[np.ndarray, "B H_kv T"]:
    r"""RR-9: the same positions, moved so that the next token is at its place in the text, `length`: the kept
    tokens of a head get `length - M .. length - 1`.

    All distances are those of `positions_after`. So a model goes on with the true position of the next
    token, and heads may keep different numbers of tokens. Args: length, the tokens of the text so far, T
    unless told. Raises ValueError for fewer.
    """
    length = kept.shape[-1] if length is None else length
    if length < kept.shape[-1]:
        raise ValueError(f"length: got {length}, wanted at least {kept.shape[-1]}, the tokens of `kept`")
    # Decision: a cache counts back from the next token's true position. Counted from 0, heads that keep other
    # numbers of tokens would each need a query of their own.
    return length - next_position(kept)[..., None] + positions_after(kept)
