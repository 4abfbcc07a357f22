r"""KeyDiff (arXiv 2504.15364): keep the keys that point away from the average direction of the cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from reference.attention import attention_logits, softmax
from reference.checks import as_count, as_float64, as_fraction, as_kept, require_shape
from reference.selection import top_k

METHOD = "keeps the keys least similar in direction to the mean of all keys"

ArrayMap = Callable[[np.ndarray], np.ndarray]  # as a scorer: keys [..., T, D] to scores [..., T], higher = keep


class Cache(NamedTuple):
    """What one block hands on to the next: keys [..., n, D], values [..., n, D_v], positions [..., n], number of tokens seen."""

    keys: np.ndarray
    values: np.ndarray
    positions: np.ndarray
    seen: int


def transformer_block(states: np.ndarray, attend: ArrayMap, feed_forward: ArrayMap) -> np.ndarray:
    r"""KD-1: `Y = FFN(CSA(X))`, causal self-attention and then the feed-forward network, position by position.

    Args: states [..., T, D]; attend and feed_forward, functions of such an array. Returns what feed_forward returns.
    The equation leaves out residual connections and normalisation; they belong into the two functions. Source: equation 1.
    """
    return feed_forward(attend(as_float64("states", states, "... T D")))


def causal_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    r"""KD-2: `softmax(Q K^T / sqrt(D) + M) V`, with M = -inf strictly above the diagonal and 0 elsewhere.

    Args: queries, keys [..., T, D], values [..., T, D_v], of one head (Q = X W_Q and so on; RoPE applied). Returns [..., T, D_v].
    Raises ValueError where the shapes disagree. Source: equation 2.
    """
    queries = as_float64("queries", queries, "... T D")
    keys = as_float64("keys", keys, "... T D")
    values = as_float64("values", values, "... T D_v")
    require_shape("keys", keys, queries.shape, "the shape of queries")
    require_shape("values", values, (*keys.shape[:-1], values.shape[-1]), "the tokens of keys")
    return _masked_attention(queries, keys, values)


def cached_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, cache: Cache) -> np.ndarray:
    r"""KD-3: `softmax(Q [K_c ; K]^T / sqrt(D) + M) [V_c ; V]`: the new tokens see all of the cache, and one another causally.

    Args: queries, keys [..., M, D], values [..., M, D_v] of the M new tokens; cache. Returns [..., M, D_v].
    Raises ValueError where the shapes disagree. Source: equation 3.
    """
    queries = as_float64("queries", queries, "... M D")
    keys = as_float64("keys", keys, "... M D")
    require_shape("keys", keys, queries.shape, "the shape of queries")
    joined = append(cache, keys, values)
    return _masked_attention(queries, joined.keys, joined.values)


def _masked_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attention of the last M tokens over all T: query m, the token at place T - M + m, sees the places up to its own."""
    num_queries, length = queries.shape[-2], keys.shape[-2]
    hidden = np.triu(np.ones((num_queries, length), dtype=bool), k=length - num_queries + 1)
    return softmax(np.where(hidden, -np.inf, attention_logits(queries, keys))) @ values


def append(cache: Cache | None, keys: np.ndarray, values: np.ndarray) -> Cache:
    r"""KD-3: `[K_c ; K], [V_c ; V]`: new tokens join a cache along the time axis; None is the empty cache.

    Args: keys [..., M, D], values [..., M, D_v]. Returns the Cache of n + M tokens. Raises ValueError where the shapes disagree.
    """
    keys = as_float64("keys", keys, "... M D")
    values = as_float64("values", values, "... M D_v")
    require_shape("values", values, (*keys.shape[:-1], values.shape[-1]), "the tokens of keys")
    seen = 0 if cache is None else cache.seen
    positions = np.broadcast_to(np.arange(seen, seen + keys.shape[-2]), keys.shape[:-1]).copy()
    if cache is None:
        return Cache(keys, values, positions, keys.shape[-2])
    cached_keys, cached_values = np.asanyarray(cache.keys), np.asanyarray(cache.values)
    require_shape("keys", keys, (*cached_keys.shape[:-2], *keys.shape[-2:-1], cached_keys.shape[-1]), "the heads of cache.keys")
    require_shape("values", values, (*values.shape[:-1], cached_values.shape[-1]), "the channels of cache.values")
    return Cache(
        np.concatenate([cached_keys, keys], axis=-2),
        np.concatenate([cached_values, values], axis=-2),
        np.concatenate([cache.positions, positions], axis=-1),
        seen + keys.shape[-2],
    )


def evict(cache: Cache, kept: np.ndarray) -> Cache:
    r"""KD-4: `(K', V') = pi(K, V)`, a subset of the cache with K and V of a token together, in position order.

    Args: cache; kept [..., n], boolean, with equally many True in each row. Returns the smaller Cache.
    Raises ValueError for a mask of another shape or with rows of different counts. Source: equation 4.
    """
    kept = as_kept("kept", kept, cache.keys.shape[:-1], "the tokens of the cache")
    counts = kept.sum(axis=-1)
    if (counts != counts.flat[0]).any():
        raise ValueError(f"kept: got rows that keep {counts.min()} to {counts.max()} tokens, wanted equally many in each")
    rows = (*kept.shape[:-1], int(counts.flat[0]))
    return Cache(
        cache.keys[kept].reshape(*rows, -1), cache.values[kept].reshape(*rows, -1), cache.positions[kept].reshape(rows), cache.seen
    )


def attention_policy(weights: np.ndarray, budget: int, *, aggregate: ArrayMap) -> np.ndarray:
    r"""KD-5: `top_N of phi(A)`, the family of methods that KeyDiff leaves: phi = the last row of A is TOVA, its column sums H2O.

    Args: weights [..., M, T], attention of M queries; budget N; aggregate (phi), which maps them to scores [..., T].
    Returns kept [..., T], boolean. Raises ValueError as `selection.top_k` does. Source: equation 5.
    """
    return top_k(aggregate(as_float64("weights", weights, "... M T")), budget)


def unit(vectors: np.ndarray) -> np.ndarray:
    r"""`x / |x|` along the last axis, [..., D] to [..., D]."""
    # The largest component is divided out first: the square of 1e200 is not a number that float64 has.
    scale = np.abs(vectors).max(axis=-1, keepdims=True)
    vectors = vectors / np.where(scale == 0, 1, scale)
    length = np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    # Decision: the cosine with a zero vector is 0, so its unit vector is the zero vector.
    return vectors / np.where(length == 0, 1, length)


def cosine(keys: np.ndarray, direction: np.ndarray) -> np.ndarray:
    r"""`cos(k_i, a)` of every key with one vector: keys [..., T, D], direction [..., D] give [..., T]."""
    return (unit(keys) @ unit(direction)[..., None])[..., 0]


def similarity_matrix(keys: np.ndarray) -> np.ndarray:
    r"""KD-7: `S_ij = cos(k_i, k_j)`, every key against every key.

    Args: keys [..., T, D]. Returns [..., T, T]. Source: section 3.2, equation 7.
    """
    directions = unit(as_float64("keys", keys, "... T D"))
    return directions @ np.swapaxes(directions, -1, -2)


def pairwise_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-7: `score = -S 1`, minus the sum of each row of the similarity matrix; it costs O(T^2).

    Args: keys [..., T, D]. Returns [..., T]. It ranks the tokens as `score` does: row i sums to `T |mu| cos(k_i, mu)`.
    Source: section 3.2, equation 7.
    """
    return -similarity_matrix(keys).sum(axis=-1)


def anchor(keys: np.ndarray) -> np.ndarray:
    r"""KD-8: `mu = (1/T) sum_i k_i / |k_i|`, the mean of the unit keys (not the mean of the keys).

    Args: keys [..., T, D]. Returns [..., D]. Source: section 3.2, equation 8.
    """
    return unit(as_float64("keys", keys, "... T D")).mean(axis=-2)


def score(keys: np.ndarray) -> np.ndarray:
    r"""KD-8: `score_i = -cos(mu, k_i)`, in O(T).

    Args: keys [B, H_kv, T, D] (any leading axes). Returns scores [B, H_kv, T] in [-1, 1], higher = keep.
    Raises ValueError for an empty, non-finite or wrongly shaped `keys`. Source: section 3.2, equation 8.
    """
    keys = as_float64("keys", keys, "... T D")
    return -cosine(keys, anchor(keys))


def process_block(cache: Cache | None, keys: np.ndarray, values: np.ndarray, *, budget: int, scorer: ArrayMap = score) -> Cache:
    r"""KD-6: `C_t = pi([C_(t-1) ; K_t, V_t])`: the block joins the cache, is scored with it, and all but N tokens go.

    Args: cache, None before the first block; keys [..., B, D], values [..., B, D_v]; budget N >= 1; scorer, any of this file.
    Returns the Cache of min(N, n + B) tokens. Raises ValueError where shapes disagree or budget < 1. Source: equation 6.
    """
    joined = append(cache, keys, values)
    # Decision: the anchor is the mean over cache and block, as equation 8 reads; evicted keys are forgotten. Nothing is protected.
    return evict(joined, top_k(scorer(joined.keys), as_count("budget", budget, low=1)))


def process_prompt(keys: np.ndarray, values: np.ndarray, *, budget: int, block_size: int, scorer: ArrayMap = score) -> Cache:
    r"""KD-6: block prompt processing of T tokens in blocks of B, the last one shorter: at most N + B tokens are held at a time.

    Args: as `process_block`, with keys and values of the whole prompt; block_size B >= 1 (B >= T is one shot). Returns the Cache.
    In a model the keys of later layers depend on what earlier blocks kept; call `process_block` from there. Source: section 2.4.
    """
    keys = as_float64("keys", keys, "... T D")
    values = as_float64("values", values, "... T D_v")
    block_size = as_count("block_size", block_size, low=1)
    length = min(block_size, keys.shape[-2])
    cache = process_block(None, keys[..., :length, :], values[..., :length, :], budget=budget, scorer=scorer)
    for start in range(block_size, keys.shape[-2], block_size):
        block = (..., slice(start, start + block_size), slice(None))
        cache = process_block(cache, keys[block], values[block], budget=budget, scorer=scorer)
    return cache


def decode(cache: Cache, key: np.ndarray, value: np.ndarray, *, budget: int, scorer: ArrayMap = score) -> Cache:
    r"""KD-6: token generation is block processing with B = 1: key [..., D] and value [..., D_v] of one new token."""
    key, value = as_float64("key", key, "... D"), as_float64("value", value, "... D_v")
    return process_block(cache, key[..., None, :], value[..., None, :], budget=budget, scorer=scorer)


def pairwise_objective(keys: np.ndarray, kept: np.ndarray) -> np.ndarray:
    r"""KD-O: `sum_{i in S} sum_{j in S} cos(k_i, k_j) = N sum_{i in S} khat_i . mu(S)`, what section 3.3 sets out to minimise.

    Args: keys [..., T, D]; kept [..., T], boolean (S). Returns [...]. Raises ValueError for a mask of another shape.
    """
    chosen = unit(as_float64("keys", keys, "... T D")) * as_kept("kept", kept, np.shape(keys)[:-1], "the tokens of keys")[..., None]
    total = chosen.sum(axis=-2)
    return (total * total).sum(axis=-1)


def relaxed_objective(keys: np.ndarray, kept: np.ndarray) -> np.ndarray:
    r"""KD-O: `sum_{i in S} khat_i . mu`, with the mean over ALL keys in the place of the mean over S; KeyDiff minimises this.

    Args and Returns as `pairwise_objective`. Source: section 3.3.
    """
    directions = unit(as_float64("keys", keys, "... T D"))
    kept = as_kept("kept", kept, directions.shape[:-1], "the tokens of keys")
    return ((directions @ anchor(keys)[..., None])[..., 0] * kept).sum(axis=-1)


class Operations(NamedTuple):
    """How often each arithmetic operation is carried out; a comparison counts as an addition."""

    multiplications: int
    additions: int
    divisions: int
    square_roots: int


def score_step_by_step(keys: np.ndarray, *, epsilon: float = 1e-8) -> np.ndarray:
    r"""KD-A1: KD-8 in the operations that appendix A.2.1 counts: norms, unit keys, anchor, dot products, quotients.

    Args: keys [..., T, D] without zero keys, by whose norm it divides; epsilon bounds the denominators from below.
    Returns scores [..., T]. Raises ValueError for a zero key. Source: appendix A.2.1.
    """
    keys = as_float64("keys", keys, "... T D")
    if (np.abs(keys).max(axis=-1) == 0).any():
        raise ValueError("keys: got a zero key, wanted none: each key is divided by its norm")
    norms = np.sqrt((keys * keys).sum(axis=-1, keepdims=True))
    # An array of one number for each head, so that whoever counts the operations on arrays counts this division too.
    count = np.full_like(norms[..., 0, :], keys.shape[-2])
    mu = (keys * (1 / norms)).sum(axis=-2) * (1 / count)
    dots = keys @ mu[..., None]
    length = np.sqrt((mu * mu).sum(axis=-1))[..., None, None]
    return -(dots / np.maximum(norms * length, epsilon))[..., 0]


def operation_count(length: int, head_dim: int) -> Operations:
    r"""KD-A1: the operations of `score_step_by_step` for one head of n keys of d channels.

    `n(3d + 1) + 2d` multiplications, `3nd - n - 1` additions, `2n + 1` divisions, `n + 1` square roots. The paper's list has d
    multiplications fewer: it counts the reciprocal of n, but not the products of the anchor's channels with it.
    """
    n, d = as_count("length", length, low=1), as_count("head_dim", head_dim, low=1)
    return Operations(n * (3 * d + 1) + 2 * d, 3 * n * d - n - 1, 2 * n + 1, n + 1)


def flops(count: Operations, *, division: int = 5, square_root: int = 8) -> int:
    r"""KD-A1: the weighted sum; with division = 5 and square root = 8 the paper's is `6nd + d + 18n + 12` (equation A.1)."""
    return count.multiplications + count.additions + division * count.divisions + square_root * count.square_roots


def alignment_bound(count: int, weight: float, largest_norm: float) -> float:
    r"""KD-C1: `a / M - 1` with `a = log n + log(w / (1 - w))`: the least cosine of q with a key that draws the weight w.

    Args: count n of other keys; weight w in (0, 1); largest_norm M > 0, above the norm of every key, for a unit query and logits
    k . q. Always `k* . q >= a - M`; the cosine is at least the returned number where that is >= 0 or `k* . q >= 0`, and
    may be below it otherwise. Raises ValueError naming an argument out of range. Source: theorem C.1.
    """
    count = as_count("count", count, low=1)
    if not 0 < weight < 1:
        raise ValueError(f"weight: got {weight}, wanted a number in (0, 1)")
    if not largest_norm > 0:
        raise ValueError(f"largest_norm: got {largest_norm}, wanted a positive number")
    return (math.log(count) + math.log(weight / (1 - weight))) / largest_norm - 1


def squared_cosines(vector: np.ndarray, basis: np.ndarray) -> np.ndarray:
    r"""KD-C2: `cos(x, e_i)^2` for the rows e_i of an orthonormal basis; they sum to 1 (to 0 for the zero vector).

    Args: vector [..., D]; basis [..., D, D]. Returns [..., D]. Source: lemma C.2.
    """
    vector = as_float64("vector", vector, "... D")
    return cosine(as_float64("basis", basis, "... D D"), vector) ** 2


def anchor_cosine_bound(key_query: np.ndarray, anchor_query: np.ndarray) -> np.ndarray:
    r"""KD-C3: `cos(k*, kbar) <= 1 - (bq - bk)^2 / 2` with bq = cos(k*, q) and bk = cos(kbar, q), of any signs.

    Args: two arrays of cosines that broadcast. Raises ValueError for a number outside [-1, 1]. The least upper bound is the cosine
    of the difference of the two angles, `bq bk + sqrt((1 - bq^2)(1 - bk^2))`. Source: theorem C.3.
    """
    return 1 - (_as_cosine("key_query", key_query) - _as_cosine("anchor_query", anchor_query)) ** 2 / 2


def _as_cosine(name: str, value: np.ndarray) -> np.ndarray:
    array = as_float64(name, value, "...")
    if (np.abs(array) > 1).any():
        raise ValueError(f"{name}: got a number outside [-1, 1], wanted cosines")
    return array


def median_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-T2: `score_i = -cos(m, k_i)`, m the median of the keys in each channel. [..., T, D] to [..., T]. Section 4.3."""
    keys = as_float64("keys", keys, "... T D")
    # Decision: the median of the keys as cached; section 4.3 calls only the mean one of normalised keys.
    return -cosine(keys, np.median(keys, axis=-2))


def raw_mean_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-T2: `score_i = -cos(kbar, k_i)`, kbar the mean of the keys, where long keys count more. [..., T, D] to [..., T]."""
    keys = as_float64("keys", keys, "... T D")
    return -cosine(keys, keys.mean(axis=-2))


def dot_product_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-T3: `score_i = -k_i . kbar`, kbar the mean of the keys: it ranks as `-sum_j k_i . k_j`. [..., T, D] to [..., T]."""
    keys = as_float64("keys", keys, "... T D")
    # Decision: the anchor is the one that equation 7 with this similarity leads to; for dot products that is the mean of the keys.
    return -(keys @ keys.mean(axis=-2)[..., None])[..., 0]


def euclidean_score(keys: np.ndarray) -> np.ndarray:
    r"""KD-T3: `score_i = |k_i - kbar|`, similarity being minus the distance to the mean of the keys. [..., T, D] to [..., T]."""
    keys = as_float64("keys", keys, "... T D")
    # Decision: as for dot products; `sum_j |k_i - k_j|^2` is `T |k_i - kbar|^2` and a number that no token changes.
    difference = keys - keys.mean(axis=-2, keepdims=True)
    return np.sqrt((difference * difference).sum(axis=-1))


def select_with_recent(keys: np.ndarray, *, budget: int, recent_ratio: float | Fraction) -> np.ndarray:
    r"""KD-T11: keep the `floor(recent_ratio * budget)` latest tokens, and fill the budget by `score` over all keys.

    Args: keys [..., T, D]; budget >= 1; recent_ratio in [0, 1]. Returns kept [..., T], boolean. Source: appendix B.4.
    """
    scores = score(keys)
    budget = min(as_count("budget", budget, low=1), scores.shape[-1])
    recent = math.floor(as_fraction("recent_ratio", recent_ratio) * budget)
    latest = np.broadcast_to(np.arange(scores.shape[-1]) >= scores.shape[-1] - recent, scores.shape)
    return top_k(scores, budget, latest)
