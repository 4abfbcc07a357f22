r"""GVote (arXiv 2509.03136): sampled future queries vote on the tokens to keep, each for as many as
the current query needs.
"""

from fractions import Fraction

import numpy as np

from .attention import attention_logits, grouped, softmax
from .cache import CompressedCache, compress
from .contract import Cosine, Mask, Real, Setting, Share, State, Weight, Whole, contract
from .rope import frequencies

METHOD = "keeps the union of the tokens that sampled future queries attend to most; it sets its own budget"
TRAITS = {"own_budget"}
INPUTS = {
    "sampled_queries": (
        "hidden_states",
        "[B, H_q, 8, D], samples of future queries (GV-A8)",
    )
}


@contract
def select(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    sampled_queries: Real[np.ndarray, "B H_q S D"],
    *,
    p: Setting[float | Fraction, "[0, 1]"] = 0.95,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""GV-A1..3, GV-A9..11: keep what any sampled query has among its top B_0, for any query head
    of the group.

    Args: query, that of the last prompt token; all after RoPE. The kept tokens are ragged: from max B_0
    to min(T, S * sum of B_0) tokens, over the query heads of a group. Source: section 3.2; Algorithm 1,
    lines 1 to 3 and 9 to 11.
    """
    (batch, num_kv_heads, length, _), samples = keys.shape, sampled_queries.shape[2]
    per_query_head = keys[:, :, None]
    current, sampled = (grouped(each, num_kv_heads) for each in (query, sampled_queries))

    budgets = single_step_budget(nucleus(attention_weights(current, per_query_head), p))
    logits = sampled_logits(sampled, per_query_head)
    votes = top_each(logits, np.repeat(budgets[..., None], samples, axis=-1))
    # Decision: the query heads of a group share one cache, so it keeps every token that any of them
    # voted for. The tokens of K_0 itself are not added, and no sink is protected: the paper's union
    # has only the sets of the samples.
    return union(votes.reshape(batch, num_kv_heads, -1, length))


@contract
def attention_weights(
    query: Real[np.ndarray, "* D"], keys: Real[np.ndarray, "* T D"]
) -> Share[np.ndarray, "* T"]:
    r"""GV-1, GV-A1: `A_0 = softmax(q K^T / sqrt(D))`, one query over all the tokens.

    The weights sum to 1. Source: equation 1; Algorithm 1, line 1.
    """
    return softmax(attention_logits(query[..., None, :], keys))[..., 0, :]


@contract
def nucleus(
    attention: Weight[np.ndarray, "... T"], p: Setting[float | Fraction, "[0, 1]"]
) -> Mask[np.ndarray, "... T"]:
    r"""GV-A2: `K_0 = the smallest set of tokens with mass >= p`, and never empty.

    Source: section 3.2, step 1; Algorithm 1, line 2.
    """
    beyond = float(1 - p)
    order = np.argsort(-attention, axis=-1, kind="stable")
    falling = np.take_along_axis(attention, order, axis=-1)
    # A token is needed as long as those before it hold less than p, that is, as it and those after
    # it hold more than 1 - p. The tail is summed from its small end, so that at p = 1 no weight
    # above 0 is lost to rounding.
    tail = np.cumsum(falling[..., ::-1], axis=-1)[..., ::-1]
    # Decision: mass is relative to the sum of the row, which is not exactly 1 in low precision.
    needed = np.asarray(tail > beyond * tail[..., :1])
    needed[..., 0] = True
    kept = np.zeros(attention.shape, dtype=bool)
    np.put_along_axis(kept, order, needed, axis=-1)
    return kept


@contract
def single_step_budget(candidates: Mask[np.ndarray, "... T"]) -> Whole[np.ndarray, "..."]:
    r"""GV-A3: `B_0 = |K_0|`. Source: Algorithm 1, line 3."""
    return candidates.sum(axis=-1)


@contract
def hidden_statistics(
    hidden_states: Real[np.ndarray, "... T C"], *, sink_size: Setting[int, ">= 0"] = 4
) -> tuple[Real[np.ndarray, "... C"], Weight[np.ndarray, "... C"]]:
    r"""GV-A4: `mu_c, sigma^2_c`: mean and variance over the tokens of each channel of the
    normalised hidden states, sinks skipped.

    Args: hidden_states, the layer norm's output, which the attention reads; sink_size, first tokens to
    skip (of a shorter prompt all but the last). Returns mean and variance. Source: section 3.2, step 2;
    Algorithm 1, line 4.
    """
    # Decision: 4 sinks as in StreamingLLM, and the variance divides by the number of tokens.
    skipped = min(sink_size, hidden_states.shape[-2] - 1)
    observed = hidden_states[..., skipped:, :]
    mean = observed.mean(axis=-2)
    deviation = observed - mean[..., None, :]
    return mean, (deviation * deviation).mean(axis=-2)


@contract
def sample_hidden_states(
    mean: Real[np.ndarray, "* C"], variance: Weight[np.ndarray, "* C"], noise: Real[np.ndarray, "* S C"]
) -> Real[np.ndarray, "* S C"]:
    r"""GV-A5: `x_s = mu + sigma * e_s` is a sample of N(mu, diag(sigma^2)) if the noise e_s is a
    sample of N(0, I).

    Source: section 3.2, step 3; Algorithm 1, line 5.
    """
    return mean[..., None, :] + np.sqrt(variance)[..., None, :] * noise


@contract
def project(
    hidden_states: Real[np.ndarray, "* S C"],
    query_weight: Real[np.ndarray, "* C D"],
    query_bias: Real[np.ndarray | None, "* D"] = None,
) -> Real[np.ndarray, "* S D"]:
    r"""GV-A6: `Q = X W_Q (+ b)`, the linear layer of the model, before RoPE.

    Args: query_weight, the transpose of torch's; query_bias or None. Source: section 3.2, step 3;
    Algorithm 1, line 6.
    """
    queries = hidden_states @ query_weight
    return queries if query_bias is None else queries + query_bias[..., None, :]


@contract
def average_cos_sin(
    head_dim: Setting[int, "even"],
    *,
    position: Setting[int, ">= 0"],
    horizon: Setting[int, ">= 1"] = 512,
    theta: Setting[float, "> 0"] = 10000.0,
) -> tuple[Cosine[np.ndarray, "head_dim/2"], Cosine[np.ndarray, "head_dim/2"]]:
    r"""GV-A7: `mean over t of cos(t w_i), and of sin(t w_i)`, for t = position .. position +
    horizon - 1.

    Args: position, that of the next token. Returns cos and
    sin. Source: section 3.2, step 3; Algorithm 1, line 7.
    """
    angles = np.arange(position, position + horizon)[:, None] * frequencies(head_dim, theta)
    return np.cos(angles).mean(axis=0), np.sin(angles).mean(axis=0)


@contract
def rotate_by_average(
    queries: Real[np.ndarray, "... S D%2"],
    *,
    position: Setting[int, ">= 0"],
    horizon: Setting[int, ">= 1"] = 512,
    theta: Setting[float, "> 0"] = 10000.0,
) -> Real[np.ndarray, "... S D"]:
    r"""GV-A8: `RoPE with the averaged cos and sin`, which is the mean of the query rotated to each
    of the positions.

    Args: queries, before RoPE; the settings of `average_cos_sin`. Source: Algorithm 1, line 8.
    """
    cos, sin = average_cos_sin(queries.shape[-1], position=position, horizon=horizon, theta=theta)
    first, second = np.split(queries, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@contract
def sampled_logits(
    sampled_queries: Real[np.ndarray, "* S D"], keys: Real[np.ndarray, "* T D"]
) -> Real[np.ndarray, "* S T"]:
    r"""GV-A9: `q_s . k_t / sqrt(D)` of each sampled query. Source: section 3.4; Algorithm 1, line 9."""
    # Decision: the logits, not their softmax. The ranking is the same, but very low logits have a
    # softmax of 0: ties.
    return attention_logits(sampled_queries, keys)


@contract
def top_each(
    scores: Real[np.ndarray, "... T"], budgets: Whole[np.ndarray, "..."]
) -> Mask[np.ndarray, "... T"]:
    r"""GV-5, GV-A10: `K_h = top-b_h(I_h)`: every row keeps its own number of tokens.

    Of equal scores the lower position is kept. Source: equation 5; Algorithm 1, line 10.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, order, np.arange(scores.shape[-1]) < budgets[..., None], axis=-1)
    return kept


@contract
def union(votes: Mask[np.ndarray, "... S T"]) -> Mask[np.ndarray, "... T"]:
    r"""GV-A11: `K = union of the K_s`. Source: Algorithm 1, line 11."""
    return np.logical_or.reduce(votes, axis=-2)


@contract
def prune(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    kept: Mask[np.ndarray, "B H_kv T"],
) -> State[CompressedCache, ""]:
    r"""GV-A12: `K, V restricted to the keep set of each head`, ragged; see `cache.compress`.
    Source: Algorithm 1, line 12.
    """
    return compress(keys, values, kept)


@contract
def algorithm_1(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    hidden_states: Real[np.ndarray, "B T C"],
    query_weight: Real[np.ndarray, "H_q C D"],
    noise: Real[np.ndarray, "B S C"],
    *,
    p: Setting[float | Fraction, "[0, 1]"] = 0.95,
    sink_size: Setting[int, ">= 0"] = 4,
    horizon: Setting[int, ">= 1"] = 512,
    theta: Setting[float, "> 0"] = 10000.0,
) -> State[CompressedCache, ""]:
    r"""GV-A1..12: the whole of Algorithm 1 on one layer's prompt: `select` with queries sampled
    from the hidden states.

    Args: query, after RoPE, that of the last prompt token; keys, after RoPE; noise, standard
    normal, shared by the heads of the layer. Returns the compressed cache. Source: Algorithm 1.
    """
    mean, variance = hidden_statistics(hidden_states, sink_size=sink_size)
    sampled = project(sample_hidden_states(mean, variance, noise)[:, None], query_weight)
    # Decision: the averaged positions start at that of the next token, the length of the prompt.
    rotated = rotate_by_average(sampled, position=np.shape(keys)[2], horizon=horizon, theta=theta)
    return prune(keys, values, select(query, keys, rotated, p=p))
