r"""KeyDiff (arXiv 2504.15364), its derivation: the
attention, the objective, the operation counts, the theorems.
"""

import math
from typing import NamedTuple

import numpy as np

from .attention import attention_logits, softmax
from .contract import Cosine, Mask, Real, Setting, Share, State, contract
from .keydiff import ArrayMap, Cache, anchor, append, cosine, unit
from .selection import top_k


@contract
def transformer_block(
    states: Real[np.ndarray, "... T D"], attend: ArrayMap, feed_forward: ArrayMap
) -> Real[np.ndarray, "... T D"]:
    r"""KD-1: `Y = FFN(CSA(X))`, causal self-attention and
    then the feed-forward network, position by position.

    Args: attend and feed_forward, functions of such an array. Returns what feed_forward returns.
    The equation leaves out residual connections and normalisation; they belong into the two
    functions. Source: equation 1.
    """
    return feed_forward(attend(states))


@contract
def causal_attention(
    queries: Real[np.ndarray, "... T D"],
    keys: Real[np.ndarray, "... T D"],
    values: Real[np.ndarray, "... T D_v"],
) -> Real[np.ndarray, "... T D_v"]:
    r"""KD-2: `softmax(Q K^T / sqrt(D) + M) V`, with M
    = -inf strictly above the diagonal and 0 elsewhere.

    Args: queries, keys, values, of one head (Q = X W_Q and so on; RoPE applied). Source: equation 2.
    """
    return _masked_attention(queries, keys, values)


@contract
def cached_attention(
    queries: Real[np.ndarray, "... M D"],
    keys: Real[np.ndarray, "... M D"],
    values: Real[np.ndarray, "... M D_v"],
    cache: State[Cache, "..."],
) -> Real[np.ndarray, "... M D_v"]:
    r"""KD-3: `softmax(Q [K_c ; K]^T / sqrt(D) + M) [V_c ; V]`: the new tokens see all of the cache,
    and one another causally.

    Args: queries, keys, values of the M new tokens. Source: equation 3.
    """
    joined = append(cache, keys, values)
    return _masked_attention(queries, joined.keys, joined.values)


def _masked_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attention of the last M tokens over all T: query m, the token at place T - M + m, sees the
    places up to its own.
    """
    num_queries, length = queries.shape[-2], keys.shape[-2]
    hidden = np.triu(np.ones((num_queries, length), dtype=bool), k=length - num_queries + 1)
    return softmax(np.where(hidden, -np.inf, attention_logits(queries, keys))) @ values


@contract
def attention_policy(
    weights: Real[np.ndarray, "... M T"], budget: Setting[int, ">= 0"], *, aggregate: ArrayMap
) -> Mask[np.ndarray, "... T"]:
    r"""KD-5: `top_N of phi(A)`, scores from attention, unlike KeyDiff: phi = the last row of A is
    TOVA, its column sums H2O.

    Args: weights, attention of M queries; budget N; aggregate (phi), which maps them to scores [..., T].
    Raises ValueError as `selection.top_k` does. Source: equation 5.
    """
    return top_k(aggregate(weights), budget)


@contract
def pairwise_objective(
    keys: Real[np.ndarray, "... T D"], kept: Mask[np.ndarray, "... T"]
) -> Real[np.ndarray, "..."]:
    r"""KD-O: `sum_{i in S} sum_{j in S} cos(k_i, k_j) = N sum_{i in S} khat_i . mu(S)`, the
    objective that section 3.3 minimises.

    Args: kept (S).
    """
    chosen = unit(keys) * kept[..., None]
    total = chosen.sum(axis=-2)
    return (total * total).sum(axis=-1)


@contract
def relaxed_objective(
    keys: Real[np.ndarray, "... T D"], kept: Mask[np.ndarray, "... T"]
) -> Real[np.ndarray, "..."]:
    r"""KD-O: `sum_{i in S} khat_i . mu`, with the mean over ALL keys instead of the mean over S;
    KeyDiff minimises this.

    Args as `pairwise_objective`. Source: section 3.3.
    """
    return ((unit(keys) @ anchor(keys)[..., None])[..., 0] * kept).sum(axis=-1)


class Operations(NamedTuple):
    """The number of operations of each kind; a comparison counts as an addition."""

    multiplications: int
    additions: int
    divisions: int
    square_roots: int


@contract
def score_step_by_step(
    keys: Real[np.ndarray, "... T D"], *, epsilon: Setting[float, ">= 0"] = 1e-8
) -> Cosine[np.ndarray, "... T"]:
    r"""KD-A1: KD-8 in the operations that appendix A.2.1
    counts: norms, unit keys, anchor, dot products, quotients.

    Args: keys without zero keys, by whose norm it divides; epsilon bounds the denominators from below.
    Raises ValueError for a zero key. Source: appendix A.2.1.
    """
    if (np.abs(keys).max(axis=-1) == 0).any():
        raise ValueError("keys: got a zero key, wanted none: each key is divided by its norm")
    norms = np.sqrt((keys * keys).sum(axis=-1, keepdims=True))
    # An array with one number for each head, so that a count of array operations includes this
    # division.
    count = np.full_like(norms[..., 0, :], keys.shape[-2])
    mu = (keys * (1 / norms)).sum(axis=-2) * (1 / count)
    dots = keys @ mu[..., None]
    length = np.sqrt((mu * mu).sum(axis=-1))[..., None, None]
    return -(dots / np.maximum(norms * length, epsilon))[..., 0]


@contract
def operation_count(length: Setting[int, ">= 1"], head_dim: Setting[int, ">= 1"]) -> Operations:
    r"""KD-A1: the operations of `score_step_by_step` for one head of n keys of d channels.

    `n(3d + 1) + 2d` multiplications, `3nd - n - 1` additions, `2n + 1` divisions, `n + 1` square
    roots. The paper's list has d multiplications fewer: it counts the reciprocal of n, but not the
    products of the anchor's channels with it.
    """
    n, d = length, head_dim
    return Operations(n * (3 * d + 1) + 2 * d, 3 * n * d - n - 1, 2 * n + 1, n + 1)


def flops(count: State[Operations, ""], *, division: int = 5, square_root: int = 8) -> int:
    r"""KD-A1: the weighted sum; with division = 5 and square root = 8 the paper's is
    `6nd + d + 18n + 12` (equation A.1).
    """
    return (
        count.multiplications
        + count.additions
        + division * count.divisions
        + square_root * count.square_roots
    )


@contract
def alignment_bound(
    count: Setting[int, ">= 1"], weight: Setting[float, "(0, 1)"], largest_norm: Setting[float, "> 0"]
) -> float:
    r"""KD-C1: `a / M - 1` with `a = log n + log(w / (1 - w))`: the least cosine of q with a key
    that gets the weight w.

    Args: count n of other keys; weight w in (0, 1); largest_norm M > 0, above
    the norm of every key, for a unit query and logits k . q. Always
    `k* . q >= a - M`; the cosine is at least the returned number where that is
    >= 0 or `k* . q >= 0`, and may be below it otherwise. Source: theorem C.1.
    """
    return (math.log(count) + math.log(weight / (1 - weight))) / largest_norm - 1


@contract
def squared_cosines(
    vector: Real[np.ndarray, "* D"], basis: Real[np.ndarray, "* D D"]
) -> Share[np.ndarray, "* D"]:
    r"""KD-C2: `cos(x, e_i)^2` for the rows e_i of an
    orthonormal basis; they sum to 1 (to 0 for the zero vector).

    Source: lemma C.2.
    """
    return cosine(basis, vector) ** 2


@contract
def anchor_cosine_bound(
    key_query: Cosine[np.ndarray, "*"], anchor_query: Cosine[np.ndarray, "*"]
) -> Cosine[np.ndarray, "*"]:
    r"""KD-C3: `cos(k*, kbar) <= 1 - (bq - bk)^2 / 2` with
    bq = cos(k*, q) and bk = cos(kbar, q), of any signs.

    The least upper bound is the cosine of the difference of the two angles,
    `bq bk + sqrt((1 - bq^2)(1 - bk^2))`. Source: theorem C.3.
    """
    return 1 - (key_query - anchor_query) ** 2 / 2
