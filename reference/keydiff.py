r"""KeyDiff (arXiv 2504.15364): keep the keys that
point away from the average direction of the cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .contract import Cosine, Mask, Real, Setting, State, Whole, contract
from .selection import gather, top_k

METHOD = "keeps the keys least similar in direction to the mean of all keys"

# As a scorer: keys [..., T, D] to scores [..., T], higher = keep.
ArrayMap = Callable[[np.ndarray], np.ndarray]


@contract
def score(keys: Real[np.ndarray, "... T D"]) -> Cosine[np.ndarray, "... T"]:
    r"""KD-8: `score_i = -cos(mu, k_i)`, in O(T).

    Returns scores, higher = keep. Source: section 3.2, equation 8.
    """
    return -cosine(keys, anchor(keys))


class Cache(NamedTuple):
    """The cache between two blocks, with the position of each token and how many tokens were seen."""

    keys: Real[np.ndarray, "n D"]
    values: Real[np.ndarray, "n D_v"]
    positions: Whole[np.ndarray, "n"]
    seen: int


@contract
def append(
    cache: State[Cache | None, "..."],
    keys: Real[np.ndarray, "... M D"],
    values: Real[np.ndarray, "... M D_v"],
) -> State[Cache, "..."]:
    r"""KD-3: `[K_c ; K], [V_c ; V]`: new tokens join a
    cache along the time axis; None is the empty cache.

    Returns the Cache of n + M tokens.
    """
    seen = 0 if cache is None else cache.seen
    positions = np.broadcast_to(np.arange(seen, seen + keys.shape[-2]), keys.shape[:-1]).copy()
    new = Cache(keys, values, positions, seen + keys.shape[-2])
    if cache is None:
        return new
    return Cache(
        np.concatenate([cache.keys, keys], axis=-2),
        np.concatenate([cache.values, values], axis=-2),
        np.concatenate([cache.positions, positions], axis=-1),
        new.seen,
    )


@contract
def evict(cache: State[Cache, "..."], kept: Mask[np.ndarray, "... n"]) -> State[Cache, "..."]:
    r"""KD-4: `(K', V') = pi(K, V)`, a subset of the cache
    with K and V of a token together, in position order.

    Args: kept, with equally many True in each row. Returns the smaller Cache. Raises ValueError for
    rows of different counts. Source: equation 4.
    """
    counts = kept.sum(axis=-1)
    if (counts != counts.flat[0]).any():
        raise ValueError(f"kept: got rows of {counts.min()} to {counts.max()} tokens, wanted equally many")
    keys, values, positions, seen = cache
    return Cache(gather(keys, kept), gather(values, kept), gather(positions, kept), seen)


@contract
def process_block(
    cache: State[Cache | None, "..."],
    keys: Real[np.ndarray, "... M D"],
    values: Real[np.ndarray, "... M D_v"],
    *,
    budget: Setting[int, ">= 1", 2048],
    scorer: ArrayMap = score,
) -> State[Cache, "..."]:
    r"""KD-6: `C_t = pi([C_(t-1) ; K_t, V_t])`: the block joins the cache and is scored with it;
    then N tokens are kept.

    Args: cache, None before the first block; budget N >= 1; scorer, any of this file. Returns the
    Cache of min(N, n + B) tokens. Source: equation 6.
    """
    joined = append(cache, keys, values)
    # Decision: the anchor is the mean over cache and block, as equation 8 reads; evicted keys are
    # forgotten. Nothing is protected.
    return evict(joined, top_k(scorer(joined.keys), budget))


@contract
def process_prompt(
    keys: Real[np.ndarray, "... T D"],
    values: Real[np.ndarray, "... T D_v"],
    *,
    budget: Setting[int, ">= 1", 2048],
    block_size: Setting[int, ">= 1", 1, 128],
    scorer: ArrayMap = score,
) -> State[Cache, "..."]:
    r"""KD-6: block prompt processing of T tokens in blocks of B, the last one shorter: at most N +
    B tokens are held at a time.

    Args: as `process_block`, with keys and values of the whole prompt; block_size B >= 1 (B >= T is
    one shot). Returns the Cache. In a model the keys of later layers depend on the tokens that
    earlier blocks kept: call `process_block`. Source: section 2.4.
    """
    length = min(block_size, keys.shape[-2])
    cache = process_block(None, keys[..., :length, :], values[..., :length, :], budget=budget, scorer=scorer)
    for start in range(block_size, keys.shape[-2], block_size):
        block = (..., slice(start, start + block_size), slice(None))
        cache = process_block(cache, keys[block], values[block], budget=budget, scorer=scorer)
    return cache


@contract
def decode(
    cache: State[Cache | None, "..."],
    key: Real[np.ndarray, "... D"],
    value: Real[np.ndarray, "... D_v"],
    *,
    budget: Setting[int, ">= 1"],
    scorer: ArrayMap = score,
) -> State[Cache, "..."]:
    r"""KD-6: token generation is block processing with B = 1: the key and the value of one new token."""
    return process_block(cache, key[..., None, :], value[..., None, :], budget=budget, scorer=scorer)


@contract
def similarity_matrix(keys: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... T T"]:
    r"""KD-7: `S_ij = cos(k_i, k_j)`, every key against every key. Source: section 3.2, equation 7."""
    directions = unit(keys)
    return directions @ np.swapaxes(directions, -1, -2)


@contract
def pairwise_score(keys: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... T"]:
    r"""KD-7: `score = -S 1`, minus the sum of each row of the similarity matrix; it costs O(T^2).

    It ranks the tokens as `score` does: row i sums to
    `T |mu| cos(k_i, mu)`. Source: section 3.2, equation 7.
    """
    return -similarity_matrix(keys).sum(axis=-1)


@contract
def anchor(keys: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... D"]:
    r"""KD-8: `mu = (1/T) sum_i k_i / |k_i|`, the mean of the unit keys (not the mean of the keys).

    Source: section 3.2, equation 8.
    """
    return unit(keys).mean(axis=-2)


def cosine(
    keys: Real[np.ndarray, "... T D"], direction: Real[np.ndarray, "... D"]
) -> Cosine[np.ndarray, "... T"]:
    r"""`cos(k_i, a)` of every key with one vector a, the direction."""
    return (unit(keys) @ unit(direction)[..., None])[..., 0]


def unit(vectors: Real[np.ndarray, "... D"]) -> Real[np.ndarray, "... D"]:
    r"""`x / |x|` along the last axis."""
    # The vector is divided by its largest component first: the square of 1e200 overflows in
    # float64.
    scale = np.abs(vectors).max(axis=-1, keepdims=True)
    vectors = vectors / np.where(scale == 0, 1, scale)
    length = np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    # Decision: the cosine with a zero vector is 0, so its unit vector is the zero vector.
    return vectors / np.where(length == 0, 1, length)
