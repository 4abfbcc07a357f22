r"""MomentKV (arXiv 2606.01563), its derivation and limits: the error of eviction, the expansion,
its bounds, the mixing weight.

Sections 2 and 3 (equations 1 to 8), appendices A and B (13 to 36), Algorithm 1 as printed and the
storage of the moments. The method itself is in `momentkv.py`; where a printed line does not hold,
the function gives the printed and the mended line, and the errata explain it. Every function reads
as one head: query [..., D], keys [..., T, D], values [..., T, D_v]; from equation 8 on, keys and
values are those of the evicted set. Centred logits must stay below 700 where their exponential
itself is asked for.
"""

from typing import NamedTuple

import numpy as np

from .attention import attention_logits, log_sum_exp, softmax
from .contract import Mask, Open, Real, Share, State, Weight, contract
from .expected_attention import norm
from .momentkv import Moments, attend, recover


def logits_of(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"]
) -> Real[np.ndarray, "... T"]:
    r"""MK-1: `s_i = q . k_i / sqrt(d)`. Source: section 2."""
    return attention_logits(query[..., None, :], keys)[..., 0, :]


def full_output(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"], values: Real[np.ndarray, "... T D_v"]
) -> Real[np.ndarray, "... D_v"]:
    r"""MK-1: `f = sum_i exp(s_i) v_i / Z`. Source: equation 1."""
    return (softmax(logits_of(query, keys))[..., None, :] @ values)[..., 0, :]


def _masked(query: np.ndarray, keys: np.ndarray, mask: np.ndarray) -> np.ndarray:
    if not mask.any(axis=-1).all():
        raise ValueError(
            "kept: got a row in which one of the two sets is empty, wanted a retained and an evicted token"
        )
    return np.where(mask, logits_of(query, keys), -np.inf)


def sub_outputs(
    query: Real[np.ndarray, "... D"],
    keys: Real[np.ndarray, "... T D"],
    values: Real[np.ndarray, "... T D_v"],
    kept: Mask[np.ndarray, "... T"],
) -> tuple[Real[np.ndarray, "... D_v"], Real[np.ndarray, "... D_v"]]:
    r"""MK-2: `f_R` and `f_E`, each normalised by its own partition function Z_R, Z_E.

    Raises ValueError where a set is empty. Source: equation 2.
    """
    of_retained, of_evicted = (
        softmax(_masked(query, keys, kept)),
        softmax(_masked(query, keys, ~kept)),
    )
    return (of_retained[..., None, :] @ values)[..., 0, :], (of_evicted[..., None, :] @ values)[..., 0, :]


def mass(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"], kept: Mask[np.ndarray, "... T"]
) -> tuple[Share[np.ndarray, "..."], Share[np.ndarray, "..."]]:
    r"""MK-3: `w_R = Z_R / Z` and `w_E = Z_E / Z`, which sum to 1; `f = w_R f_R + w_E f_E`. Equation 3."""
    total = log_sum_exp(logits_of(query, keys))
    retained, evicted = (log_sum_exp(_masked(query, keys, mask)) for mask in (kept, ~kept))
    return np.exp(retained - total), np.exp(evicted - total)


def eviction_error(
    retained_output: Real[np.ndarray, "... D_v"],
    evicted_output: Real[np.ndarray, "... D_v"],
    evicted_mass: Share[np.ndarray, "..."],
) -> Real[np.ndarray, "... D_v"]:
    r"""MK-4: `f - f_R = w_E (f_E - f_R)`. Source: equation 4."""
    return evicted_mass[..., None] * (evicted_output - retained_output)


def split_divergence(
    retained_output: Real[np.ndarray, "... D_v"], evicted_output: Real[np.ndarray, "... D_v"]
) -> tuple[Real[np.ndarray, "... D_v"], Real[np.ndarray, "... D_v"]]:
    r"""MK-5: `f_E - f_R = (|f_E| cos(theta) / |f_R| - 1) f_R + |f_E| sin(theta) n`, theta the
    angle, n orthogonal to f_R.

    Returns the parallel and the perpendicular part. Raises ValueError for f_R = 0, which has no
    direction. Source: equation 5.
    """
    squared = (retained_output * retained_output).sum(axis=-1, keepdims=True)
    if (squared == 0).any():
        raise ValueError("retained_output: got a zero vector, wanted one with a direction")
    along = (evicted_output * retained_output).sum(
        axis=-1, keepdims=True
    ) / squared  # |f_E| cos(theta) / |f_R|
    return (along - 1) * retained_output, evicted_output - along * retained_output


def squared_error(
    retained_output: Real[np.ndarray, "... D_v"],
    evicted_output: Real[np.ndarray, "... D_v"],
    evicted_mass: Share[np.ndarray, "..."],
) -> Weight[np.ndarray, "..."]:
    r"""MK-6: `|f - f_R|^2 = w_E^2 [(|f_E| cos(theta) - |f_R|)^2 + |f_E|^2 sin(theta)^2]`.
    Source: equation 6.
    """
    parallel, perpendicular = split_divergence(retained_output, evicted_output)
    return evicted_mass**2 * (
        (parallel * parallel).sum(axis=-1) + (perpendicular * perpendicular).sum(axis=-1)
    )


def amplification(
    retained_output: Real[np.ndarray, "... D_v"],
    evicted_output: Real[np.ndarray, "... D_v"],
    evicted_mass: Share[np.ndarray, "..."],
) -> Open[np.ndarray, "..."]:
    r"""MK-7: `gamma = |f_E - f_R| / |f|`, so that `|f - f_R| / |f| = w_E gamma`; |f| makes it
    depend on w_E. Source: equation 7.
    """
    full = (1 - evicted_mass)[..., None] * retained_output + evicted_mass[..., None] * evicted_output
    return norm(evicted_output - retained_output) / norm(full)


def shifted_softmax(
    logits: Real[np.ndarray, "... T"], shift: np.ndarray | float
) -> Share[np.ndarray, "... T"]:
    r"""MK-13: `exp(s_i + c) / sum_j exp(s_j + c)`, the same for every c. Source: equation 13."""
    return softmax(logits + shift)


def centred_logits(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"]
) -> Real[np.ndarray, "... T"]:
    r"""MK-14, MK-15: `delta_i = q . (k_i - kbar) / sqrt(d)`,
    which sum to 0 for every query. Equations 14, 15.
    """
    return logits_of(query, keys - keys.mean(axis=-2, keepdims=True))


def centred_output(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"], values: Real[np.ndarray, "... T D_v"]
) -> Real[np.ndarray, "... D_v"]:
    r"""MK-8, MK-16: `f_E = sum exp(delta_i) v_i / sum exp(delta_i)`,
    in centred logits. Equations 8 and 16.
    """
    return (softmax(centred_logits(query, keys))[..., None, :] @ values)[..., 0, :]


class Expansion(NamedTuple):
    r"""MK-17..20, MK-26: the numerator A and the denominator
    B of f_E, each a first-order part and a remainder.

    count n; spread sigma = max |delta_i| [...]; largest_value V_max = max |v_i| [...]; denominator
    B = n + denominator_remainder [...]; numerator A = mean_part + linear_part + numerator_remainder
    [..., D_v], with n vbar and sum delta_i v_i for the parts.
    """

    count: int  # type: ignore[assignment]
    spread: np.ndarray
    largest_value: np.ndarray
    denominator: np.ndarray
    denominator_remainder: np.ndarray
    numerator: np.ndarray
    mean_part: np.ndarray
    linear_part: np.ndarray
    numerator_remainder: np.ndarray


def expansion(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"], values: Real[np.ndarray, "... T D_v"]
) -> Expansion:
    r"""MK-17..20, MK-26: expand `exp(delta) = 1 + delta + rest` in numerator and denominator.
    Equations 17 to 20 and 26.
    """
    delta = centred_logits(query, keys)
    rest = np.expm1(delta) - delta
    mean_part, linear_part, remainder = (
        (weight[..., None, :] @ values)[..., 0, :] for weight in (np.ones_like(delta), delta, rest)
    )
    return Expansion(
        count=keys.shape[-2],
        spread=np.abs(delta).max(axis=-1),
        largest_value=norm(values).max(axis=-1),
        denominator=np.exp(delta).sum(axis=-1),
        denominator_remainder=rest.sum(axis=-1),
        numerator=(np.exp(delta)[..., None, :] @ values)[..., 0, :],
        mean_part=mean_part,
        linear_part=linear_part,
        numerator_remainder=remainder,
    )


def linear_part(
    query: Real[np.ndarray, "... D"], covariance: Real[np.ndarray, "... D_v D"]
) -> Real[np.ndarray, "... D_v"]:
    r"""MK-19: `sum_i delta_i v_i = Stilde q / sqrt(d)`, Stilde the covariance. Equation 19."""
    return (covariance @ query[..., None])[..., 0] / np.sqrt(query.shape[-1])


def remainder_bounds(
    terms: State[Expansion, ""],
) -> tuple[Weight[np.ndarray, "..."], Weight[np.ndarray, "..."]]:
    r"""MK-17, MK-18: `|R_den| <= n sigma^2 e^sigma / 2` and
    `|R_num| <= n sigma^2 V_max e^sigma / 2`. Equations 17 and 18.
    """
    bound = terms.count * terms.spread**2 * np.exp(terms.spread) / 2
    return bound, bound * terms.largest_value


def inverse_to_first_order(terms: State[Expansion, ""]) -> Real[np.ndarray, "... D_v"]:
    r"""MK-27: `A / B = A / n - A R_den / n^2 + O(sigma^4)`:
    the right side without the last term. Equation 27.
    """
    share = (terms.denominator_remainder / terms.count)[..., None]
    return terms.numerator / terms.count * (1 - share)


def approximation_error(terms: State[Expansion, ""]) -> Real[np.ndarray, "... D_v"]:
    r"""MK-28: `f_E - fhat_E = R_num / n - A R_den / n^2 + O(sigma^4)`: the right side without the
    last term. Equation 28.
    """
    share = (terms.denominator_remainder / terms.count)[..., None]
    return terms.numerator_remainder / terms.count - terms.numerator / terms.count * share


def approximation_error_exactly(terms: State[Expansion, ""]) -> Real[np.ndarray, "... D_v"]:
    r"""MK-28: `f_E - fhat_E = (R_num - R_den fhat_E) / B`,
    with no further term; the proof is in the errata.
    """
    approximate = (terms.mean_part + terms.linear_part) / terms.count
    return (
        terms.numerator_remainder - terms.denominator_remainder[..., None] * approximate
    ) / terms.denominator[..., None]


class ErrorBound(NamedTuple):
    """MK-29: the three printed lines without their O(sigma^4);
    the second lacks a factor n, which `middle_mended` has.
    """

    first: np.ndarray
    middle_as_printed: np.ndarray
    middle_mended: np.ndarray
    last: np.ndarray


def error_bound(terms: State[Expansion, ""]) -> ErrorBound:
    r"""MK-29: `|f_E - fhat_E| <= (sigma^2 e^sigma / 2) (V_max + |fhat_E|)`; the last line holds as
    it is. Equation 29.
    """
    half = terms.spread**2 * np.exp(terms.spread) / 2
    approximate = norm(terms.mean_part + terms.linear_part) / terms.count
    remainder = norm(terms.numerator_remainder) / terms.count
    first = remainder + norm(terms.numerator) * np.abs(terms.denominator_remainder) / terms.count**2
    second_term = (approximate + remainder) * half
    middle = half * terms.largest_value
    return ErrorBound(
        first,
        middle + second_term / terms.count,
        middle + second_term,
        half * (terms.largest_value + approximate),
    )


def geometric_bound(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"], values: Real[np.ndarray, "... T D_v"]
) -> Weight[np.ndarray, "..."]:
    r"""MK-30: `|q|^2 / (2d) e^(|q| r_max / sqrt(d)) r_max^2 (V_max + |fhat_E|)`, r_max = max |k_i -
    kbar|. Equation 30.
    """
    furthest = norm(keys - keys.mean(axis=-2, keepdims=True)).max(axis=-1)
    reach = norm(query) * furthest / np.sqrt(query.shape[-1])  # at least sigma, by Cauchy-Schwarz
    terms = expansion(query, keys, values)
    approximate = norm(terms.mean_part + terms.linear_part) / terms.count
    return reach**2 * np.exp(reach) / 2 * (terms.largest_value + approximate)


def log_partition(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"]
) -> tuple[Real[np.ndarray, "..."], Real[np.ndarray, "..."]]:
    r"""MK-31: `log Z_E` and its lower bound `log Zhat_E = log n + sbar`, by Jensen. Equation 31."""
    logits = logits_of(query, keys)
    return log_sum_exp(logits), np.log(keys.shape[-2]) + logits.mean(axis=-1)


def partition_ratio(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"]
) -> Weight[np.ndarray, "..."]:
    r"""MK-32, MK-33: `Z_E / Zhat_E = (1/n) sum exp(delta_i) = 1 + Var(delta) / 2 + O(sigma^3)`,
    exactly. Equations 32 and 33.
    """
    return np.exp(centred_logits(query, keys)).mean(axis=-1)


def logit_variance(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"]
) -> Weight[np.ndarray, "..."]:
    r"""MK-34: `Var(delta) = q^T Sigma_k q / d`, Sigma_k the
    covariance (over n) of the evicted keys. Equation 34.
    """
    centred = keys - keys.mean(axis=-2, keepdims=True)
    covariance = np.swapaxes(centred, -1, -2) @ centred / keys.shape[-2]
    return (query * (covariance @ query[..., None])[..., 0]).sum(axis=-1) / query.shape[-1]


class WeightBias(NamedTuple):
    """MK-35: `what_R - w_R` by its three printed lines; the third is false, `third_mended` is
    `w_R what_E epsilon`.
    """

    first: np.ndarray
    second: np.ndarray
    third_as_printed: np.ndarray
    third_mended: np.ndarray


def weight_bias(
    retained: Weight[np.ndarray, "..."],
    evicted: Weight[np.ndarray, "..."],
    estimate: Weight[np.ndarray, "..."],
) -> WeightBias:
    r"""MK-35: the bias of the mixing weight. Args:
    Z_R, Z_E and Zhat_E, positive. Source: equation 35.

    epsilon = (Z_E - Zhat_E) / Zhat_E. The printed third line,
    `w_R what_E epsilon / (1 + epsilon what_E)`, divides once too often: it is right with what_R
    instead of w_R, or without its denominator.
    """
    epsilon = (evicted - estimate) / estimate
    retained_weight, estimated_weight = (
        retained / (retained + evicted),
        estimate / (retained + estimate),
    )
    return WeightBias(
        first=retained / (retained + estimate) - retained / (retained + (1 + epsilon) * estimate),
        second=retained * epsilon * estimate / ((retained + estimate) * (retained + evicted)),
        third_as_printed=retained_weight * estimated_weight * epsilon / (1 + epsilon * estimated_weight),
        third_mended=retained_weight * estimated_weight * epsilon,
    )


def estimated_evicted_weight(
    evicted_mass: Share[np.ndarray, "..."], ratio: Share[np.ndarray, "..."]
) -> Share[np.ndarray, "..."]:
    r"""MK-36: `what_E = w_E rho / (w_R + w_E rho)`
    with `rho = Zhat_E / Z_E` in (0, 1]. Equation 36.
    """
    return evicted_mass * ratio / (1 - evicted_mass + evicted_mass * ratio)


class Error(NamedTuple):
    """MK-36: `f - fhat` as the sum of two errors, of the approximation and of the weight,
    [..., D_v] each.
    """

    of_approximation: np.ndarray
    of_weight: np.ndarray


def output_error(
    retained_output: Real[np.ndarray, "... D_v"],
    evicted_output: Real[np.ndarray, "... D_v"],
    approximate: Real[np.ndarray, "... D_v"],
    mass: Share[np.ndarray, "..."],
    estimated_mass: Share[np.ndarray, "..."],
) -> Error:
    r"""MK-36: `f - fhat = w_E (f_E - fhat_E) + (w_E - what_E) (fhat_E - f_R)`,
    which says when the correction helps.

    Derived here; the paper claims without proof that it always helps.
    """
    of_approximation = mass[..., None] * (evicted_output - approximate)
    return Error(of_approximation, (mass - estimated_mass)[..., None] * (approximate - retained_output))


def largest_harmless_error(
    retained_output: Real[np.ndarray, "... D_v"], evicted_output: Real[np.ndarray, "... D_v"]
) -> Weight[np.ndarray, "..."]:
    r"""MK-36S: fhat is no worse than f_R while
    `|fhat_E - f_E| <= |f_E - f_R|`, whatever the weights are.

    Derived here: as what_E <= w_E (MK-11), the error
    `f - fhat = (w_E - what_E) (f_E - f_R) - what_E (fhat_E - f_E)` is then at most `w_E |f_E - f_R|`,
    that of f_R. Sufficient, not necessary; no larger bound is.
    """
    return norm(evicted_output - retained_output)


def algorithm_1(
    query: Real[np.ndarray, "D"],
    new_key: Real[np.ndarray, "D"],
    new_value: Real[np.ndarray, "D_v"],
    keys: Real[np.ndarray, "T D"],
    values: Real[np.ndarray, "T D_v"],
    moments: State[Moments, ""],
    budget: int,
) -> tuple[Real[np.ndarray, "D_v"], Real[np.ndarray, "n D"], Real[np.ndarray, "n D_v"], State[Moments, ""]]:
    r"""MK-A1: lines 4 to 25 of Algorithm 1 as printed, for
    one head, to be compared with `momentkv.decode_step`.

    Args: new_value, which line 3 projects from the new hidden state; keys and values, the retained ones;
    budget (L). Returns the output, and the keys, values and moments after it. Raises FloatingPointError
    if a token is evicted with n_e = 0 (line 10 divides 0 by 0), UnboundLocalError if nothing is evicted
    with n_e > 0 (line 22 reads means that were never set). Otherwise the output mixes with the means from
    before the last eviction and the count from after it.
    """
    count, key_sum, value_sum, value_key_sum = moments
    keys, values = (
        np.concatenate([keys, new_key[None]]),
        np.concatenate([values, new_value[None]]),
    )  # line 4
    root = np.sqrt(query.shape[-1])
    while len(keys) > budget:
        if count > 0:
            mean_key, mean_value = key_sum / count, value_sum / count
            covariance = value_key_sum - np.outer(value_sum, key_sum) / count
        else:
            mean_value, covariance = (
                np.zeros_like(value_sum),
                np.zeros_like(value_key_sum),
            )  # line 7 does not set the mean key
        alpha = softmax(keys @ query / root)
        with np.errstate(divide="raise", invalid="raise"):
            residuals = values - mean_value - keys @ covariance.T / (count * root)
        evicted = int(np.argmin(alpha * norm(residuals)))
        count = count + 1
        key_sum, value_sum = key_sum + keys[evicted], value_sum + values[evicted]
        value_key_sum = value_key_sum + np.outer(values[evicted], keys[evicted])
        keys, values = np.delete(keys, evicted, axis=0), np.delete(values, evicted, axis=0)
    after = Moments(count, key_sum, value_sum, value_key_sum)
    retained_logits = keys @ query / root
    retained_output, retained_partition = (
        softmax(retained_logits) @ values,
        np.exp(retained_logits).sum(),
    )
    if count == 0:
        return retained_output, keys, values, after
    evicted_partition = count * np.exp(query @ mean_key / root)
    approximate = mean_value + covariance @ query / (count * root)
    weight = retained_partition / (retained_partition + evicted_partition)
    return weight * retained_output + (1 - weight) * approximate, keys, values, after


def numbers_stored(head_dim: int, *, order: int = 1) -> int:
    r"""MK-T5, MK-T4: numbers per KV head: `d^2 + 2d` to first order, `2d` to zeroth (the count left
    out, as in the paper).
    """
    return head_dim * head_dim * (order == 1) + 2 * head_dim


def share_of_cache(head_dim: int, budget: int) -> float:
    r"""MK-T5: moments over retained cache, `(d^2 + 2d) / (2 L d) = (d + 2) / (2 L)`: the same for
    every model of this d.
    """
    return numbers_stored(head_dim) / (2 * budget * head_dim)


def mixing_weight(
    retained_partition: Weight[np.ndarray, "..."], evicted_partition: Weight[np.ndarray, "..."]
) -> Share[np.ndarray, "..."]:
    r"""MK-12: `what_R = Z_R / (Z_R + Zhat_E)`, as printed; it overflows where the logits exceed
    709. Source: equation 12.
    """
    return retained_partition / (retained_partition + evicted_partition)


@contract
def attend_zeroth_order(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    kept: Mask[np.ndarray, "B H_kv T"],
    moments: State[Moments, "B H_kv"],
) -> Real[np.ndarray, "B H_q D_v"]:
    r"""MK-T4: `what_R f_R(q) + (1 - what_R) vbar`, the variant with 2d numbers per head:
    value_key_sum is not used.

    Args and returns as `attend`. Source: table 4 ("0th").
    """
    # With S = s_v s_k^T / n_e there is no variation around the mean: Stilde is 0.
    uncorrelated = moments.value_sum[..., :, None] * recover(moments).mean_key[..., None, :]
    return attend(query, keys, values, kept, moments._replace(value_key_sum=uncorrelated))
