r"""Expected Attention (arXiv 2510.00636): keep the tokens that future queries, modelled as
Gaussian, are expected to use most.
"""

from typing import NamedTuple

import numpy as np

from .attention import grouped, softmax
from .contract import Real, Setting, Share, State, Weight, Whole, contract
from .rope import frequencies
from .selection import budget, gather, top_k

METHOD = "keeps the tokens that add most to the output under a Gaussian model of the queries to come"
INPUTS = {
    "query_mean": (
        "queries",
        "[B, H_q, D], of the queries so far, averaged over the next 512 positions (EA-6)",
    ),
    "query_covariance": (
        "queries",
        "[B, H_q, D, D], of the same queries, averaged over the same positions",
    ),
}


@contract
def score(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    query_mean: Real[np.ndarray, "B H_q D"],
    query_covariance: Real[np.ndarray, "B H_q D D"],
    *,
    epsilon: Setting[float, ">= 0", 0.0] = 0.02,
) -> Weight[np.ndarray, "B H_kv T"]:
    r"""EA-7..9, EA-V: `(mean over the group of ahat_i + epsilon) |v_i|`; head-adaptive budgets are
    `ada_kv` on these scores.

    Args: query_mean and query_covariance, averaged over RoPE by `average_rope`; epsilon >= 0 (0.02 in the
    paper, 0 for needle retrieval). Returns scores, higher = keep. With W_o v as the values it is equation
    9 as printed (EA-9), otherwise that of the experiments (EA-V). Source: section 2.2, equations 7 to 9.
    """
    grouped_mean, grouped_covariance = (
        grouped(each, keys.shape[1]) for each in (query_mean, query_covariance)
    )
    # Decision: softmax for each query head, then the mean over the group; each query head attends
    # by itself.
    weights = expected_weights(keys[:, :, None], grouped_mean, grouped_covariance).mean(axis=2)
    return contribution(weights, values, epsilon)


@contract
def query_statistics(
    queries: Real[np.ndarray, "... N D"],
) -> tuple[Real[np.ndarray, "... D"], Real[np.ndarray, "... D D"]]:
    r"""EA-5, EA-L1: `mu = mean of q`,
    `Sigma = (1/N) sum (q - mu)(q - mu)^T`, of queries before RoPE.

    Args: queries, all of one head. Returns mean and covariance. Source: section 2.2; `compute_statistics`
    in listing 1.
    """
    mean = queries.mean(axis=-2)
    centred = queries - mean[..., None, :]
    # Decision: divided by N, as in the authors' library; with N - 1 a buffer of one query would
    # have no covariance.
    return mean, np.swapaxes(centred, -1, -2) @ centred / queries.shape[-2]


def project_statistics(
    hidden_mean: Real[np.ndarray, "... h"],
    hidden_covariance: Real[np.ndarray, "... h h"],
    w_q: Real[np.ndarray, "D h"],
) -> tuple[Real[np.ndarray, "... D"], Real[np.ndarray, "... D D"]]:
    r"""EA-5: `mu_q = W_Q mu`, `Sigma_q = W_Q Sigma W_Q^T`:
    queries before RoPE of Gaussian hidden states.

    The paper prints d for h. R_t turns mean and covariance as in EA-6 with horizon 1. QK-norm is not
    linear: take `query_statistics` there. Source: equation 5.
    """
    return (w_q @ hidden_mean[..., None])[..., 0], w_q @ hidden_covariance @ np.swapaxes(w_q, -1, -2)


@contract
def average_rotation(
    head_dim: Setting[int, "even"],
    *,
    position: Setting[int, ">= 0"],
    horizon: Setting[int, ">= 1"] = 512,
    theta: Setting[float, "> 0"] = 10000.0,
) -> Real[np.ndarray, "head_dim head_dim"]:
    r"""EA-6: `Rbar = (1/T) sum_{j=1..T} R_{t+j}`, T = horizon, t + 1 = position.

    Each pair (i, i + D/2), D = head_dim, is turned by its angle at the middle of the window and shrunk by
    `sin(T w_i / 2) / (T sin(w_i / 2))`. Arguments and errors of `average_rope`. Source: equation 6.
    """
    angles = (position + np.arange(horizon))[:, None] * frequencies(head_dim, theta)
    cos, sin = np.diag(np.cos(angles).mean(axis=0)), np.diag(np.sin(angles).mean(axis=0))
    return np.block([[cos, -sin], [sin, cos]])


@contract
def average_rope(
    query_mean: Real[np.ndarray, "... D%2"],
    query_covariance: Real[np.ndarray, "... D D"],
    *,
    position: Setting[int, ">= 0"],
    horizon: Setting[int, ">= 1"] = 512,
    theta: Setting[float, "> 0"] = 10000.0,
) -> tuple[Real[np.ndarray, "... D"], Real[np.ndarray, "... D D"]]:
    r"""EA-6: `mu_bar = Rbar mu`, `Sigma_bar = Rbar Sigma Rbar^T`: statistics of queries averaged
    over the next positions.

    Args: query_mean, query_covariance, before RoPE; position, that of the next token (the tokens seen,
    evicted ones too); horizon, how many positions from there on; theta, the base of RoPE. Source: section
    2.2, equation 6.
    """
    head_dim = query_mean.shape[-1]
    rotation = average_rotation(head_dim, position=position, horizon=horizon, theta=theta)
    return query_mean @ rotation.T, rotation @ query_covariance @ rotation.T


def log_expected_scores(
    keys: Real[np.ndarray, "... T D"],
    query_mean: Real[np.ndarray, "... D"],
    query_covariance: Real[np.ndarray, "... D D"],
) -> Real[np.ndarray, "... T"]:
    r"""EA-7: `log zhat_i = mu . k_i / sqrt(d) + k_i^T Sigma k_i / (2 d)`, zhat_i =
    E[exp(q . k_i / sqrt(d))] of a Gaussian q.

    The answer is in the log domain: zhat itself overflows from 710 on. Source: section 2.2, equation 7.
    """
    head_dim = keys.shape[-1]
    linear = (keys @ query_mean[..., None])[..., 0]
    quadratic = ((keys @ query_covariance) * keys).sum(axis=-1)
    return linear / np.sqrt(head_dim) + quadratic / (2 * head_dim)


def expected_weights(
    keys: Real[np.ndarray, "... T D"],
    query_mean: Real[np.ndarray, "... D"],
    query_covariance: Real[np.ndarray, "... D D"],
) -> Share[np.ndarray, "... T"]:
    r"""EA-8: `ahat_i = zhat_i / sum_j zhat_j`; it is a ratio
    of expectations, not the expected attention E[a_i].

    The weights sum to 1. Source: section 2.2, equation 8.
    """
    return softmax(log_expected_scores(keys, query_mean, query_covariance))


def contribution(
    weights: Weight[np.ndarray, "... T"],
    values: Real[np.ndarray, "... T D"],
    epsilon: float,
    w_o: np.ndarray | None = None,
) -> Weight[np.ndarray, "... T"]:
    r"""EA-9, EA-V: `(ahat_i + epsilon) |W_o v_i|` with w_o, equation 9 as printed;
    `(ahat_i + epsilon) |v_i|` without.

    Args: epsilon >= 0; w_o [h, D] or None. Source: equation 9; section 3.1, implementation details, for
    the form without w_o.
    """
    # Decision: |v|, as in the paper's experiments; W_o would need every value projected.
    return (weights + epsilon) * norm(values if w_o is None else values @ np.swapaxes(w_o, -1, -2))


def listing_1(
    queries: Real[np.ndarray, "N D"],
    keys: Real[np.ndarray, "T D"],
    values: Real[np.ndarray, "T D_v"],
    compression_ratio: float,
) -> tuple[Real[np.ndarray, "n D"], Real[np.ndarray, "n D_v"]]:
    r"""EA-L1: listing 1 for one head, corrected so that it runs: einsum over every token, exact
    budget, tokens in position order.

    Args: compression_ratio in [0, 1). Returns the n kept keys and values. No RoPE average and epsilon 0,
    as listed. Raises ValueError for a bad ratio. Source: listing 1.
    """
    mean, covariance = query_statistics(queries)
    head_dim = keys.shape[-1]
    logits = keys @ mean / np.sqrt(head_dim)
    logits = logits + np.einsum("ti,ij,tj->t", keys, covariance, keys) / (2 * head_dim)
    scores = softmax(logits) * norm(values)
    kept = top_k(scores, budget(keys.shape[0], compression_ratio))
    return keys[kept], values[kept]


class Decoding(NamedTuple):
    """EA-10: the state of decoding between two steps: the cache with the
    true position of each row, the latest queries before RoPE, the
    position of the next token, and the steps since the last compression.
    """

    keys: Real[np.ndarray, "B H_kv n>=0 D"]
    values: Real[np.ndarray, "B H_kv n>=0 D_v"]
    positions: Whole[np.ndarray, "B H_kv n>=0"]
    queries: Real[np.ndarray, "B H_q m>=0 D"]
    position: int
    steps: int


@contract
def start_decoding(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    queries: Real[np.ndarray, "B H_q M D"],
    *,
    buffer_size: Setting[int, ">= 1"] = 128,
) -> State[Decoding, ""]:
    r"""EA-10: the state after an uncompressed prompt: keys, values, and queries before RoPE.

    After a compressed prompt, build `Decoding` from the kept tokens, with position = the tokens
    seen, not the tokens kept. Source: section 3.1, implementation details.
    """
    length = keys.shape[2]
    positions = np.broadcast_to(np.arange(length), keys.shape[:3]).copy()
    return Decoding(keys, values, positions, queries[:, :, -buffer_size:], length, 0)


@contract
def decode_step(
    state: State[Decoding, ""],
    query: Real[np.ndarray, "B H_q D"],
    key: Real[np.ndarray, "B H_kv D"],
    value: Real[np.ndarray, "B H_kv D_v"],
    *,
    target: Setting[int, ">= 1"],
    interval: Setting[int, ">= 1"] = 512,
    buffer_size: Setting[int, ">= 1"] = 128,
    horizon: Setting[int, ">= 1"] = 512,
    theta: Setting[float, "> 0"] = 10000.0,
    epsilon: Setting[float, ">= 0", 0.0] = 0.02,
) -> State[Decoding, ""]:
    r"""EA-10: add one token; after every `interval` steps keep the `target` best tokens by EA-9, or
    all tokens if there are fewer.

    Args: query before RoPE, key after RoPE, value of the new token; target and interval in tokens;
    buffer_size, the number of latest queries for the statistics. Returns the next state. Source:
    section 3.1, implementation details, and section 4.2.
    """
    keys, values = appended(state.keys, key), appended(state.values, value)
    queries = appended(state.queries, query)[:, :, -buffer_size:]
    positions = np.concatenate([state.positions, np.full((*keys.shape[:2], 1), state.position)], axis=2)
    grown = Decoding(keys, values, positions, queries, state.position + 1, state.steps + 1)
    if grown.steps < interval:
        return grown
    if keys.shape[2] <= target:
        return grown._replace(steps=0)
    # Decision: the average starts at the true next position; the buffer's length, used elsewhere,
    # is a long past position.
    mean, covariance = average_rope(
        *query_statistics(queries), position=grown.position, horizon=horizon, theta=theta
    )
    kept = top_k(score(keys, values, mean, covariance, epsilon=epsilon), target)
    keys, values, positions = gather(keys, kept), gather(values, kept), gather(positions, kept)
    return grown._replace(keys=keys, values=values, positions=positions, steps=0)


def appended(
    rows: Real[np.ndarray, "B H_kv T D"], row: Real[np.ndarray, "B H_kv D"]
) -> Real[np.ndarray, "B H_kv T+1 D"]:
    """One more token after the rows."""
    return np.concatenate([rows, row[:, :, None]], axis=2)


def norm(vectors: Real[np.ndarray, "... D"]) -> Weight[np.ndarray, "..."]:
    r"""`|x|`, the Euclidean norm along the last axis."""
    return np.sqrt((vectors * vectors).sum(axis=-1))
