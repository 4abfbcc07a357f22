r"""MomentKV (arXiv 2606.01563): sum the evicted tokens up in four moments, and estimate their share
of the attention from them.

The derivation of the approximation, its error bounds and the analysis of eviction (equations 1 to
8, 13 to 36) are in `momentkv_theory.py`. E is the evicted set, R the retained one; logits are
`s_i = q . k_i / sqrt(d)`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import ada_kv
from .attention import attention_logits, by_group, causal_attention, grouped, softmax
from .contract import Mask, Open, Real, Setting, State, Weight, Whole, contract
from .selection import gather, top_k

METHOD = (
    "evicts what the moments of the evicted tokens already predict, and adds their estimate to "
    "the attention output"
)
PROTECTED = "last 32 of a prompt"
TRAITS = {"every_token", "evicts_first"}


@contract
def score(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    moments: State[Moments, "B H_kv"],
) -> Weight[np.ndarray, "B H_kv T"]:
    r"""MK-10: `score_j = alpha_j |r_j|`, with alpha
    the attention of the query over the retained keys.

    Args: query, the decode query; keys and values of the retained tokens; moments of the evicted ones.
    Returns scores, higher = keep; alpha is the mean of the probabilities that the query heads of a group
    give. Source: section 4.2, equation 10, Algorithm 1 lines 7 to 12.
    """
    # Decision: a KV head is scored once for its group: the mean over its query heads, after the
    # softmax.
    alpha = softmax(attention_logits(grouped(query, keys.shape[1]), keys)).mean(axis=-2)
    return alpha * residual_norm(keys, values, moments)


class Moments(NamedTuple):
    r"""MK-22: `n_e = |E|`, `s_k = sum k_i`, `s_v = sum v_i`, `S = sum v_i k_i^T` over the evicted
    tokens of each KV head.

    Source: equation 22.
    """

    # Decision: float32 or wider for any dtype of the cache: a half-precision sum stops growing
    # (MK-C2).
    count: Whole[np.ndarray, ""]  # type: ignore[assignment]
    key_sum: Real[np.ndarray, "D"]
    value_sum: Real[np.ndarray, "D_v"]
    value_key_sum: Real[np.ndarray, "D_v D"]


class Recovered(NamedTuple):
    """Statistics of the evicted set; the covariance is a sum."""

    mean_key: Real[np.ndarray, "D"]
    mean_value: Real[np.ndarray, "D_v"]
    covariance: Real[np.ndarray, "D_v D"]


def recover(moments: State[Moments, "B H_kv"]) -> State[Recovered, "B H_kv"]:
    r"""MK-23, MK-24: `kbar = s_k / n_e`, `vbar = s_v / n_e`, `Stilde = S - s_v s_k^T / n_e`; all
    zero where nothing was evicted.

    Args: moments, with any leading axes. Source: equations 23 and 24, Algorithm 1 line 7.
    """
    # Decision: the clamp of small entries of Stilde to 0 (appendix C.2) is off: a threshold of 1e-6
    # knows nothing of the scale.
    divisor = np.maximum(moments.count, 1)[..., None]
    mean_key, mean_value = moments.key_sum / divisor, moments.value_sum / divisor
    covariance = moments.value_key_sum - moments.value_sum[..., :, None] * mean_key[..., None, :]
    return Recovered(mean_key, mean_value, covariance)


@contract
def update(
    moments: State[Moments, "..."],
    keys: Real[np.ndarray, "... T D"],
    values: Real[np.ndarray, "... T D_v"],
    evicted: Mask[np.ndarray, "... T"],
) -> State[Moments, "..."]:
    r"""MK-25: `n_e += 1, s_k += k_j, s_v += v_j, S += v_j k_j^T`
    for every evicted token j, in any order.

    Args: moments, before; evicted, True = evicted now.
    Returns the Moments after. Source: equation 25.
    """
    gone_keys, gone_values = keys * evicted[..., None], values * evicted[..., None]
    return Moments(
        moments.count + evicted.sum(axis=-1),
        moments.key_sum + gone_keys.sum(axis=-2),
        moments.value_sum + gone_values.sum(axis=-2),
        moments.value_key_sum + np.swapaxes(gone_values, -1, -2) @ gone_keys,
    )


@contract
def no_moments(
    keys: Real[np.ndarray, "... T D"], values: Real[np.ndarray, "... T D_v"]
) -> State[Moments, "..."]:
    r"""MK-22: the moments of the empty set, for the heads of these keys and values."""
    lead, head_dim, value_dim = keys.shape[:-2], keys.shape[-1], values.shape[-1]
    return Moments(
        np.zeros(lead, dtype=np.int64),
        np.zeros((*lead, head_dim)),
        np.zeros((*lead, value_dim)),
        np.zeros((*lead, value_dim, head_dim)),
    )


def merge(first: State[Moments, "..."], second: State[Moments, "..."]) -> State[Moments, "..."]:
    r"""MK-25: the moments of the union of two disjoint evicted sets, which is their sum."""
    return Moments(*(mine + theirs for mine, theirs in zip(first, second, strict=True)))


def approximate_evicted(
    query: Real[np.ndarray, "B H_kv D"], moments: State[Moments, "B H_kv"]
) -> Real[np.ndarray, "B H_kv D_v"]:
    r"""MK-9, MK-21: `fhat_E(q) = vbar + Stilde q / (n_e sqrt(d))`, the evicted output to first
    order; 0 where nothing was evicted.

    Args: moments, whose leading axes may broadcast to those of the query. The output may leave the convex
    hull of the evicted values. Source: equations 9 and 21, Algorithm 1 line 23.
    """
    recovered = recover(moments)
    scale = np.maximum(moments.count, 1)[..., None] * np.sqrt(query.shape[-1])
    return recovered.mean_value + (recovered.covariance @ query[..., None])[..., 0] / scale


def residual(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    moments: State[Moments, "B H_kv"],
) -> Real[np.ndarray, "B H_kv T D_v"]:
    r"""MK-10: `r_j = v_j - vbar - Stilde k_j / (n_e sqrt(d))`; where nothing was evicted,
    `r_j = v_j`.

    Source: equation 10, Algorithm 1 line 10.
    """
    # Decision: with n_e = 0 the printed line is 0/0; the means are then set to 0, so the residual
    # is v_j.
    recovered = recover(moments)
    scale = np.maximum(moments.count, 1)[..., None, None] * np.sqrt(keys.shape[-1])
    return (
        values - recovered.mean_value[..., None, :] - keys @ np.swapaxes(recovered.covariance, -1, -2) / scale
    )


def residual_norm(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    moments: State[Moments, "B H_kv"],
) -> Weight[np.ndarray, "B H_kv T"]:
    r"""MK-10: `|r_j|`, the Euclidean norm of each `residual`."""
    unexplained = residual(keys, values, moments)
    return np.sqrt((unexplained * unexplained).sum(axis=-1))


def log_evicted_partition(
    query: Real[np.ndarray, "B H_kv D"], moments: State[Moments, "B H_kv"]
) -> Open[np.ndarray, "B H_kv"]:
    r"""MK-11: `log Zhat_E = log n_e + q . kbar / sqrt(d)`, at most log Z_E (Jensen); -inf where
    nothing was evicted.

    Source: equation 11, Algorithm 1 line 22.
    """
    mean_logit = (query * recover(moments).mean_key).sum(axis=-1) / np.sqrt(query.shape[-1])
    return np.where(moments.count > 0, np.log(np.maximum(moments.count, 1)) + mean_logit, -np.inf)


@contract
def attend(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    kept: Mask[np.ndarray, "B H_kv T"],
    moments: State[Moments, "B H_kv"],
) -> Real[np.ndarray, "B H_q D_v"]:
    r"""MK-12, MK-37: `fhat(q) = what_R f_R(q) + (1 - what_R) fhat_E(q)`,
    the weights in the log domain.

    Args: kept (other tokens are not read; if they have been evicted, `moments` holds them); moments of
    the evicted tokens. With no moments the output is f_R; a head that keeps nothing and has no moments
    gives 0. Source: section 4.2, equations 12 and 37, Algorithm 1 lines 19 to 25.
    """
    queries = grouped(query, keys.shape[1])
    from_retained, log_retained = retained_attention(
        attention_logits(queries, keys), values, kept[..., None, :]
    )
    of_each_query = Moments(
        *(field[:, :, None] for field in moments)
    )  # one more axis: the query heads of a group share the keys
    log_weights = log_mixing_weights(log_retained, log_evicted_partition(queries, of_each_query))
    retained_weight, evicted_weight = (np.exp(log_weight)[..., None] for log_weight in log_weights)
    output = retained_weight * from_retained + evicted_weight * approximate_evicted(queries, of_each_query)
    return output.reshape(output.shape[0], -1, output.shape[-1])


def log_mixing_weights(
    log_retained: Open[np.ndarray, "..."], log_evicted: Open[np.ndarray, "..."]
) -> tuple[Open[np.ndarray, "..."], Open[np.ndarray, "..."]]:
    r"""MK-37: `log what_R = log Z_R - logsumexp(log Z_R, log n_e + sbar)` and the same for
    `log what_E`, in the log domain.

    Args: log_retained, log Z_R; log_evicted, log Zhat_E;
    each may be -inf (an empty set). Source: equation 37.
    """
    total = np.logaddexp(log_retained, log_evicted)
    total = np.where(np.isfinite(total), total, 0)
    return log_retained - total, log_evicted - total


def retained_attention(
    logits: Real[np.ndarray, "... M T"],
    values: Real[np.ndarray, "... T D_v"],
    kept: Mask[np.ndarray, "... 1 T"],
) -> tuple[Real[np.ndarray, "... M D_v"], Open[np.ndarray, "... M"]]:
    r"""MK-2: `f_R` and `log Z_R`, attention renormalised over the kept tokens; 0 and -inf where
    none is kept.

    Source: Algorithm 1 line 20.
    """
    top = np.where(kept, logits, -np.inf).max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = np.exp(np.where(kept, logits - top, -np.inf)).sum(axis=-1, keepdims=True)
    log_total = np.where(total > 0, top + np.log(np.where(total > 0, total, 1)), -np.inf)
    # The weights come from the log-sum-exp, as in a merge of parts: the tolerance comes from this
    # rounding.
    weights = np.exp(np.where(kept, logits - np.where(total > 0, log_total, 0), -np.inf))
    return weights @ values, log_total[..., 0]


class Step(NamedTuple):
    """After a decoding step: output [B, H_q, D_v], the retained keys [B, H_kv, L, D] and values in
    position order, the Moments.
    """

    output: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    moments: Moments


@contract
def decode_step(
    query: Real[np.ndarray, "B H_q D"],
    new_key: Real[np.ndarray, "B H_kv D"],
    new_value: Real[np.ndarray, "B H_kv D_v"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    moments: State[Moments, "B H_kv"],
    budget: Setting[int, ">= 1"],
) -> Step:
    r"""MK-A1: Algorithm 1, mended: add the new token, evict the lowest scores one by one, then
    attend with the moments as they are.

    Args: the retained keys and values, and the moments, before; budget (L), at least 1. The new
    token may be evicted at once.
    """
    keys = np.concatenate([keys, new_key[:, :, None]], axis=2)
    values = np.concatenate([values, new_value[:, :, None]], axis=2)
    while keys.shape[2] > budget:
        kept = top_k(score(query, keys, values, moments), keys.shape[2] - 1)
        moments = update(moments, keys, values, ~kept)
        keys, values = gather(keys, kept), gather(values, kept)
    # Decision: the means are recovered after the last eviction; the printed lines 22 and 23 reuse
    # the means from before it.
    output = attend(query, keys, values, np.ones(keys.shape[:-1], dtype=bool), moments)
    return Step(output, keys, values, moments)


@contract
def score_prompt(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    *,
    chunk_size: Setting[int, ">= 1"] = 4,
) -> Weight[np.ndarray, "B H_kv T"]:
    r"""MK-P: score a prompt once: `alpha_j |v_j|`, alpha averaged over the observation window and
    the group, then over each chunk.

    Args: queries, those of the last M tokens (32 in the paper), causal among themselves; keys and values
    of the whole prompt; chunk_size, neighbours that share one score. Source: section 5.1.
    """
    alpha = causal_attention(*by_group(queries, keys)).mean(axis=(2, 3))
    each = alpha * residual_norm(keys, values, no_moments(keys, values))
    # Decision: a chunk gets the mean score of its tokens; the last chunk may be shorter.
    length = keys.shape[2]
    starts = np.arange(0, length, chunk_size)
    sizes = np.diff(starts, append=length)
    return np.repeat(np.add.reduceat(each, starts, axis=-1) / sizes, sizes, axis=-1)


@contract
def select_prompt(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    budget: Setting[int, ">= 1", 128, 256, 512, 1024],
    *,
    sink_size: Setting[int, ">= 0"] = 1,
    chunk_size: Setting[int, ">= 1"] = 4,
    floor_ratio: Setting[float | None, "[0, 1]", 0.2] = None,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""MK-P, MK-P2: keep the first token, the observation window and the best others, in one shot;
    `update` takes the evicted ones.

    Args: as `score_prompt`, and budget, the tokens of a head, at least the protected ones; floor_ratio: a
    number, such as 0.2, and the heads of a layer share H_kv * budget by their attention, by
    `ada_kv.select`, as the paper has it; None, and each head keeps the budget. The kept tokens are ragged
    where the heads share. Source: section 5.1.
    """
    scores = score_prompt(queries, keys, values, chunk_size=chunk_size)
    length, window = scores.shape[-1], np.shape(queries)[2]
    position = np.arange(length)
    protected = (position < sink_size) | (position >= length - window)
    if floor_ratio is None:
        return top_k(scores, budget, np.broadcast_to(protected, scores.shape))
    # The attention alone says how much a head may keep, the score which of its tokens: values of
    # length one leave the attention.
    mass = score_prompt(queries, keys, np.ones((*scores.shape, 1)), chunk_size=chunk_size)
    shared = np.broadcast_to(protected, scores.shape)
    counts = ada_kv.select(mass, budget, floor_ratio=floor_ratio, protected=shared).sum(axis=-1)
    kept = np.zeros(scores.shape, dtype=bool)
    for head in np.ndindex(counts.shape):
        kept[head] = top_k(scores[head], int(counts[head]), protected)
    return kept
