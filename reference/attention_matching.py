r"""Attention Matching (arXiv 2602.16284): keep the most attended keys, and fit a bias and a value to
each of them, so that reference queries find the mass and the outputs of the whole cache.

The paper is known here from its public code: adamzweiger/compaction,
compaction/algorithms/base.py and highest_attention_keys.py at 2e59cc8, with the
settings AM-HighestAttnKeys-basic of evaluation/configs/algorithms/default.py.
"""

import math

import numpy as np

from .attention import attention_logits, grouped, softmax
from .contract import Mask, Real, Setting, Weight, contract
from .selection import gather, top_k

METHOD = (
    "keeps the tokens that a second reading attends to most, with a bias and a value that are fitted to it"
)
TRAITS = {"prompt_only"}
LOW, HIGH = math.exp(-3), math.exp(3)
"""The bounds of the weights: a bias lies between -3 and 3."""
CUTOFF = 1e-10
"""Singular values below this part of the largest count as zero, and so do gradients."""


@contract
def select(
    keys: Real[np.ndarray, "B H_kv T D"],
    replay_queries: Real[np.ndarray, "B H_q M D"],
    *,
    budget: Setting[int, ">= 1"],
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""AM-1: keep the `budget` tokens of the highest score in each head.

    Args: those of `score`.
    """
    return top_k(score(keys, replay_queries), budget)


@contract
def score(
    keys: Real[np.ndarray, "B H_kv T D"], replay_queries: Real[np.ndarray, "B H_q M D"]
) -> Weight[np.ndarray, "B H_kv T"]:
    r"""AM-1: `score_t = sqrt(mean_m A_mt^2)`, the root mean square of the attention of all reference
    queries, those of all query heads of the group.

    Args: replay_queries, later than all keys, so without a causal mask. Returns scores, higher = keep.
    Source: `_select_keys_highest_attention` with score_method rms.
    """
    return np.sqrt((softmax(logits_of_group(replay_queries, keys)) ** 2).mean(axis=-2))


def logits_of_group(
    queries: Real[np.ndarray, "B H_q M D"], keys: Real[np.ndarray, "B H_kv T D"]
) -> Real[np.ndarray, "B H_kv G*M T"]:
    r"""ATT-5: the logits of each query of each of the G heads of a group, one below the other."""
    rows = grouped(queries, keys.shape[1])
    return attention_logits(rows.reshape(*keys.shape[:2], -1, keys.shape[-1]), keys)


@contract
def bounded_least_squares(
    matrix: Real[np.ndarray, "... R n"], target: Real[np.ndarray, "... R"]
) -> Weight[np.ndarray, "... n"]:
    r"""AM-2: the w in [e^-3, e^3]^n with the least `|A w - y|`, by an active set (Lawson and Hanson's
    method for two bounds).

    Some weights are free, the others lie at a bound. The free weights go to
    their own least squares solution, or until one of them meets a bound, and
    stays there. Once they have arrived, the weight at a bound that the residual
    pulls inwards most becomes free. Where none is pulled, w is the optimum.

    Args: matrix A; target y. Source: `_nnls_pg` has this goal and these bounds; it clamps the solution
    without bounds, and takes two steps down the gradient.
    """
    # Decision: all weights begin at 1, so of many optima this is one near the cache as it was.
    weights = np.ones((*matrix.shape[:-2], matrix.shape[-1]))
    for place in np.ndindex(weights.shape[:-1]):
        weights[place] = active_set(weights[place], matrix[place], target[place])
    return weights


def active_set(
    weights: Real[np.ndarray, "n"], matrix: Real[np.ndarray, "R n"], target: Real[np.ndarray, "R"]
) -> Real[np.ndarray, "n"]:
    r"""AM-2 for one matrix: `weights`, moved to the optimum."""
    free = np.ones(weights.shape, dtype=bool)
    sizes = np.sqrt((matrix**2).sum(axis=0))
    sizes = np.where(sizes > 0, sizes, 1)
    none = CUTOFF * sizes * np.sqrt((target**2).sum())
    for _ in range(20 * (len(weights) + 1)):  # it ends by itself, unless roundings send it in a circle
        residual = target - matrix @ weights
        gradient = matrix.T @ residual
        pull = np.where(free, np.abs(gradient), np.where(weights == LOW, gradient, -gradient)) - none
        if pull.max() <= 0:
            break
        if pull[free].max(initial=0) <= 0:
            free[pull.argmax()] = True
        step = np.zeros_like(weights)
        step[free] = np.linalg.lstsq((matrix / sizes)[:, free], residual, rcond=CUTOFF)[0] / sizes[free]
        bound = np.where(step > 0, HIGH, LOW)
        reach = np.divide(bound - weights, step, out=np.full_like(step, np.inf), where=step != 0)
        meets = (reach <= 1) & (reach == reach.min())
        weights = np.where(meets, bound, weights + min(1, reach.min()) * step)
        free &= ~meets
    return weights


@contract
def fit_bias(
    queries: Real[np.ndarray, "B H_q M D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    kept: Mask[np.ndarray, "B H_kv T"],
) -> Real[np.ndarray, "B H_kv n"]:
    r"""AM-3: `beta_j = log w_j`, with the w of AM-2 for `sum_kept w_j exp(s_mj) = sum_t exp(s_mt)` at
    every reference query m, each line divided by its largest exponential.

    Args: queries, the reference queries; kept, n tokens of each head. Returns the bias of the kept keys
    in their order. Source: `_select_keys_highest_attention`.
    """
    require_equal_heads(kept)
    logits = logits_of_group(queries, keys)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    of_kept = np.swapaxes(gather(np.swapaxes(powers, -1, -2), kept), -1, -2)
    return np.log(bounded_least_squares(of_kept, powers.sum(axis=-1)))


@contract
def fit_values(
    queries: Real[np.ndarray, "B H_q M D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    kept: Mask[np.ndarray, "B H_kv T"],
    bias: Real[np.ndarray, "B H_kv kept"],
) -> Real[np.ndarray, "B H_kv n D_v"]:
    r"""AM-4: the C with the least `|X C - Y|`: X = `softmax(s_mj + beta_j)` over the kept keys, Y the
    outputs of the whole cache at the reference queries.

    Args: those of `fit_bias`. Returns C, a row for each of
    the n kept keys. Source: `_compute_C2` without a ridge.
    """
    count = require_equal_heads(kept)
    if bias.shape[-1] != count:
        raise ValueError(
            f"bias: got {bias.shape[-1]} numbers for a head, wanted {count}, one for each kept key"
        )
    weights = softmax(logits_of_group(queries, gather(keys, kept)) + bias[..., None, :])
    missing = softmax(logits_of_group(queries, keys)) @ values - weights @ gather(values, kept)
    # Decision: of many best C the one nearest to the old values; the public code takes the shortest.
    return gather(values, kept) + np.linalg.pinv(weights, CUTOFF) @ missing


def require_equal_heads(kept: Mask[np.ndarray, "B H_kv T"]) -> int:
    """Return how many tokens each head keeps. Raises ValueError for none, or where heads differ."""
    least, most = kept.sum(axis=-1).min(), kept.sum(axis=-1).max()
    if not 0 < least == most:
        raise ValueError(f"kept: got {least} to {most} tokens in a head, wanted as many in each")
    return int(most)


@contract
def attend(
    queries: Real[np.ndarray, "B H_q M D"],
    keys: Real[np.ndarray, "B H_kv kept D"],
    values: Real[np.ndarray, "B H_kv kept D_v"],
    bias: Real[np.ndarray, "B H_kv kept"],
) -> Real[np.ndarray, "B H_q M D_v"]:
    r"""AM-5, AM-6: `softmax_j(q . k_j / sqrt(D) + beta_j) C`,
    attention over the kept keys, with the fitted values.

    Args: queries, later than the cache.
    """
    weights = softmax(logits_of_group(queries, keys) + bias[..., None, :])
    return (weights @ values).reshape(*queries.shape[:-1], -1)
