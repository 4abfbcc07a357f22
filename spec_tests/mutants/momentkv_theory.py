"""Wrong equations of the MomentKV paper: the error of eviction, the expansion, the mixing weight."""

from __future__ import annotations

import numpy as np

from evictionary.reference import momentkv_theory as theory
from evictionary.reference.attention import softmax
from evictionary.reference.momentkv_theory import centred_logits, logits_of, norm
from evictionary.spec_tests.harness.planted import mutant
from evictionary.spec_tests.mutants.momentkv import square, wrong

STEM = "momentkv_theory"
FULL, PARTS, MASS, ERROR = (f"{STEM}.{name}" for name in ("full_output", "sub_outputs", "mass", "eviction_error"))
SPLIT, SQUARED, GAMMA = f"{STEM}.split_divergence", f"{STEM}.squared_error", f"{STEM}.amplification"
SHIFTED, CENTRED, OUTPUT = f"{STEM}.shifted_softmax", f"{STEM}.centred_logits", f"{STEM}.centred_output"
EXPANSION, LINEAR, PARTITION = f"{STEM}.expansion", f"{STEM}.linear_part", f"{STEM}.log_partition"
RATIO, VARIANCE, BIAS = f"{STEM}.partition_ratio", f"{STEM}.logit_variance", f"{STEM}.weight_bias"
ESTIMATED, SOURCES = f"{STEM}.estimated_evicted_weight", f"{STEM}.output_error"


def averaged(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    return (weights[..., None, :] @ values)[..., 0, :]


@mutant(FULL, killed_by="MK-1", misconception="the scale 1/sqrt(d) left out of the logits")
def logits_without_scale(query, keys, values):
    return theory.full_output(query * np.sqrt(query.shape[-1]), keys, values)


@mutant(FULL, killed_by="MK-1", misconception="logits divided by d instead of sqrt(d)")
def logits_over_d(query, keys, values):
    return theory.full_output(query / np.sqrt(query.shape[-1]), keys, values)


@mutant(FULL, killed_by="MK-1", misconception="keys averaged in the place of values")
def keys_averaged(query, keys, values):
    return theory.full_output(query, keys, keys if square(keys, values) else values)


@mutant(FULL, killed_by="MK-1", misconception="the plain mean of the values, attention left out")
def plain_mean(query, keys, values):
    return values.mean(axis=-2)


@wrong(PARTS, "MK-2", "both parts normalised by the partition function of all tokens")
def common_partition(query, keys, values, kept):
    weights = softmax(logits_of(query, keys))
    return averaged(weights * kept, values), averaged(weights * ~kept, values)


@wrong(PARTS, "MK-2", "the evicted part returned first")
def parts_in_the_other_order(query, keys, values, kept):
    return theory.sub_outputs(query, keys, values, ~kept)


@wrong(PARTS, "MK-2", "the mask multiplied into the logits: hidden tokens have logit 0")
def masked_logits_zero(query, keys, values, kept):
    logits = logits_of(query, keys)
    return averaged(softmax(logits * kept), values), averaged(softmax(logits * ~kept), values)


@mutant(PARTS, killed_by="MK-2", misconception="an empty set given the output 0 in silence")
def empty_set_in_silence(query, keys, values, kept):
    def part(mask):
        weights = np.exp(logits_of(query, keys) - logits_of(query, keys).max(axis=-1, keepdims=True)) * mask
        return averaged(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300), values)

    return part(kept), part(~kept)


@wrong(PARTS, "MK-8", "the evicted part taken over all tokens")
def evicted_part_of_all(query, keys, values, kept):
    return theory.sub_outputs(query, keys, values, kept)[0], theory.full_output(query, keys, values)


@wrong(MASS, "MK-3", "the share of the tokens in the place of the share of the partition function")
def share_of_the_tokens(query, keys, kept):
    share = kept.mean(axis=-1)
    return share, 1 - share


@wrong(MASS, "MK-3", "the two shares in the other order")
def shares_in_the_other_order(query, keys, kept):
    return theory.mass(query, keys, kept)[::-1]


@wrong(MASS, "MK-3", "Z_R / Z_E, the partition functions compared with each other")
def odds_for_shares(query, keys, kept):
    retained, evicted = theory.mass(query, keys, kept)
    with np.errstate(all="ignore"):
        return retained / evicted, evicted / retained


@mutant(ERROR, killed_by="MK-4", misconception="the sign turned: f_R - f")
def error_turned(retained_output, evicted_output, evicted_mass):
    return -theory.eviction_error(retained_output, evicted_output, evicted_mass)


@mutant(ERROR, killed_by="MK-4", misconception="the divergence weighed by w_R")
def error_weighed_by_the_retained(retained_output, evicted_output, evicted_mass):
    return theory.eviction_error(retained_output, evicted_output, 1 - evicted_mass)


@mutant(ERROR, killed_by="MK-4", misconception="w_E f_E, the whole evicted part, as if f_R kept its weight")
def evicted_part_for_the_error(retained_output, evicted_output, evicted_mass):
    return evicted_mass[..., None] * evicted_output


@wrong(SPLIT, "MK-5", "the whole component of f_E along f_R, from which f_R is not subtracted")
def component_for_difference(retained_output, evicted_output):
    parallel, perpendicular = theory.split_divergence(retained_output, evicted_output)
    return parallel + retained_output, perpendicular


@wrong(SPLIT, "MK-5", "the cosine multiplied with f_R without |f_E| / |f_R|")
def cosine_without_lengths(retained_output, evicted_output):
    lengths = norm(retained_output) * norm(evicted_output)
    cosine = (retained_output * evicted_output).sum(axis=-1) / np.where(lengths == 0, 1, lengths)
    parallel = (cosine - 1)[..., None] * retained_output
    return parallel, evicted_output - retained_output - parallel


@wrong(SPLIT, "MK-5", "split along f_E instead of f_R")
def split_along_the_evicted(retained_output, evicted_output):
    squared = (evicted_output * evicted_output).sum(axis=-1, keepdims=True)
    along = (evicted_output * retained_output).sum(axis=-1, keepdims=True) / np.where(squared == 0, 1, squared)
    return (1 - along) * evicted_output, along * evicted_output - retained_output


@mutant(SPLIT, killed_by="MK-5", misconception="a zero f_R given a direction in silence")
def zero_output_in_silence(retained_output, evicted_output):
    squared = (retained_output * retained_output).sum(axis=-1, keepdims=True)
    along = (evicted_output * retained_output).sum(axis=-1, keepdims=True) / np.where(squared == 0, 1, squared)
    return (along - 1) * retained_output, evicted_output - along * retained_output


@wrong(SQUARED, "MK-6", "w_E instead of its square")
def mass_not_squared(retained_output, evicted_output, evicted_mass):
    return theory.squared_error(retained_output, evicted_output, np.sqrt(evicted_mass))


@wrong(SQUARED, "MK-6", "the perpendicular part alone")
def perpendicular_alone(retained_output, evicted_output, evicted_mass):
    return (evicted_mass * norm(theory.split_divergence(retained_output, evicted_output)[1])) ** 2


@wrong(SQUARED, "MK-6", "the norms of the two parts added before they are squared")
def norms_added(retained_output, evicted_output, evicted_mass):
    return (evicted_mass * sum(norm(part) for part in theory.split_divergence(retained_output, evicted_output))) ** 2


@mutant(GAMMA, killed_by="MK-7", misconception="divided by |f_R| instead of |f|")
def divided_by_the_retained(retained_output, evicted_output, evicted_mass):
    size = norm(retained_output)
    return norm(evicted_output - retained_output) / np.where(size == 0, 1, size)


@mutant(GAMMA, killed_by="MK-7", misconception="the relative error w_E gamma returned for gamma")
def relative_error(retained_output, evicted_output, evicted_mass):
    return evicted_mass * theory.amplification(retained_output, evicted_output, evicted_mass)


@mutant(GAMMA, killed_by="MK-7", misconception="the mixture weighed the other way round: w_E f_R + w_R f_E")
def mixture_turned(retained_output, evicted_output, evicted_mass):
    size = norm(evicted_mass[..., None] * retained_output + (1 - evicted_mass)[..., None] * evicted_output)
    return norm(evicted_output - retained_output) / np.where(size == 0, 1, size)


@mutant(SHIFTED, killed_by="MK-13", misconception="the shift added to the numerator alone")
def numerator_shifted(logits, shift):
    return softmax(logits) * np.exp(np.clip(shift, -700, 700))


@mutant(SHIFTED, killed_by="MK-13", misconception="logits scaled instead of shifted")
def scaled_for_shifted(logits, shift):
    return softmax(logits * shift)


@mutant(SHIFTED, killed_by="MK-13", misconception="the softmax taken without subtracting the largest logit: it overflows")
def shift_overflowing(logits, shift):
    with np.errstate(all="ignore"):
        weights = np.exp(logits + shift)
        return weights / weights.sum(axis=-1, keepdims=True)


@mutant(CENTRED, killed_by="MK-14", misconception="the logits themselves, not centred")
def not_centred(query, keys):
    return logits_of(query, keys)


@mutant(CENTRED, killed_by="MK-15", misconception="the largest logit subtracted instead of the mean")
def centred_at_the_largest(query, keys):
    logits = logits_of(query, keys)
    return logits - logits.max(axis=-1, keepdims=True)


@mutant(CENTRED, killed_by="MK-15", misconception="the mean taken over the channels of a key instead of the tokens")
def centred_over_channels(query, keys):
    return logits_of(query, keys - keys.mean(axis=-1, keepdims=True))


@mutant(CENTRED, killed_by="MK-14", misconception="the scale 1/sqrt(d) left out of the centred logits")
def centred_without_scale(query, keys):
    return centred_logits(query * np.sqrt(query.shape[-1]), keys)


@mutant(OUTPUT, killed_by="MK-16", misconception="the sum of the exponentials taken for n: equation 8 without its denominator")
def denominator_of_n(query, keys, values):
    return averaged(np.exp(centred_logits(query, keys)) / keys.shape[-2], values)


@mutant(OUTPUT, killed_by="MK-16", misconception="the values centred as well")
def centred_values(query, keys, values):
    return theory.centred_output(query, keys, values) - values.mean(axis=-2)


@mutant(OUTPUT, killed_by="MK-8", misconception="the scale 1/sqrt(d) left out")
def centred_output_without_scale(query, keys, values):
    return theory.centred_output(query * np.sqrt(query.shape[-1]), keys, values)


@mutant(OUTPUT, killed_by="MK-8", misconception="the first-order approximation 1 + delta for exp(delta)")
def first_order_weights(query, keys, values):
    return averaged((1 + centred_logits(query, keys)) / keys.shape[-2], values)


@mutant(EXPANSION, killed_by="MK-26", misconception="the remainder of exp(delta) - 1, the linear term left in it")
def linear_term_in_the_remainder(query, keys, values):
    terms = theory.expansion(query, keys, values)
    return terms._replace(numerator_remainder=terms.numerator_remainder + terms.linear_part)


@mutant(EXPANSION, killed_by="MK-26", misconception="the mean value for n times the mean value")
def mean_for_sum(query, keys, values):
    terms = theory.expansion(query, keys, values)
    return terms._replace(mean_part=terms.mean_part / terms.count)


@mutant(EXPANSION, killed_by="MK-26", misconception="the standard deviation of the centred logits for their largest size")
def deviation_for_spread(query, keys, values):
    terms = theory.expansion(query, keys, values)
    return terms._replace(spread=np.sqrt((centred_logits(query, keys) ** 2).mean(axis=-1)))


@mutant(EXPANSION, killed_by="MK-26", misconception="the largest entry of the values for their largest norm")
def largest_entry(query, keys, values):
    return theory.expansion(query, keys, values)._replace(largest_value=np.abs(values).max(axis=(-2, -1)))


@mutant(EXPANSION, killed_by="MK-26", misconception="the denominator without its n: the remainder alone")
def denominator_without_n(query, keys, values):
    terms = theory.expansion(query, keys, values)
    return terms._replace(denominator=terms.denominator_remainder)


@mutant(EXPANSION, killed_by="MK-26", misconception="the second-order term delta^2 / 2 for the whole remainder")
def second_order_for_the_remainder(query, keys, values):
    delta = centred_logits(query, keys)
    return theory.expansion(query, keys, values)._replace(denominator_remainder=(delta * delta).sum(axis=-1) / 2)


@mutant(LINEAR, killed_by="MK-19", misconception="the scale 1/sqrt(d) left out")
def linear_without_scale(query, covariance):
    return theory.linear_part(query * np.sqrt(query.shape[-1]), covariance)


@mutant(LINEAR, killed_by="MK-19", misconception="the scale taken from the channels of the values, sqrt(d_v)")
def scale_of_the_values(query, covariance):
    return theory.linear_part(query, covariance) * np.sqrt(query.shape[-1] / covariance.shape[-2])


@mutant(LINEAR, killed_by="MK-19", misconception="Stilde transposed: q^T Stilde")
def transposed_product(query, covariance):
    return theory.linear_part(query, np.swapaxes(covariance, -1, -2) if query.shape[-1] == covariance.shape[-2] else covariance)


@mutant(PARTITION, killed_by="MK-31", misconception="the count left out of Zhat_E")
def bound_without_count(query, keys):
    exact, bound = theory.log_partition(query, keys)
    return exact, bound - np.log(keys.shape[-2])


@mutant(PARTITION, killed_by="MK-31", misconception="the largest logit for the mean in Zhat_E, which is an upper bound")
def bound_from_above(query, keys):
    exact, _ = theory.log_partition(query, keys)
    return exact, np.log(keys.shape[-2]) + logits_of(query, keys).max(axis=-1)


@mutant(PARTITION, killed_by="MK-31", misconception="the partition functions themselves instead of their logarithms")
def partitions_for_logarithms(query, keys):
    with np.errstate(over="ignore"):
        exact, bound = (np.exp(part) for part in theory.log_partition(query, keys))
    return exact, bound


@mutant(RATIO, killed_by="MK-32", misconception="the ratio turned: Zhat_E / Z_E, at most 1")
def ratio_turned(query, keys):
    return 1 / theory.partition_ratio(query, keys)


@mutant(RATIO, killed_by="MK-32", misconception="the sum of the exponentials instead of their mean")
def sum_for_mean(query, keys):
    return theory.partition_ratio(query, keys) * keys.shape[-2]


@mutant(RATIO, killed_by="MK-32", misconception="its second-order estimate 1 + Var / 2 for the ratio itself")
def second_order_ratio(query, keys):
    return 1 + theory.logit_variance(query, keys) / 2


@mutant(VARIANCE, killed_by="MK-34", misconception="the covariance of the keys over n - 1")
def variance_over_n_less_one(query, keys):
    count = keys.shape[-2]
    return theory.logit_variance(query, keys) * count / max(1, count - 1)


@mutant(VARIANCE, killed_by="MK-34", misconception="divided by sqrt(d) instead of d")
def variance_over_the_root(query, keys):
    return theory.logit_variance(query, keys) * np.sqrt(query.shape[-1])


@mutant(VARIANCE, killed_by="MK-34", misconception="the mean square of the logits: the keys not centred")
def keys_not_centred(query, keys):
    return (logits_of(query, keys) ** 2).mean(axis=-1)


@mutant(VARIANCE, killed_by="MK-34", misconception="the standard deviation for the variance")
def deviation_for_variance(query, keys):
    return np.sqrt(np.maximum(theory.logit_variance(query, keys), 0))


@mutant(BIAS, killed_by="MK-35", misconception="the third line as printed, divided by 1 + epsilon what_E once too often")
def third_line_as_printed(retained, evicted, estimate):
    lines = theory.weight_bias(retained, evicted, estimate)
    return lines._replace(third_mended=lines.third_as_printed)


@mutant(BIAS, killed_by="MK-35", misconception="epsilon relative to Z_E instead of Zhat_E")
def epsilon_of_the_exact(retained, evicted, estimate):
    lines = theory.weight_bias(retained, evicted, estimate)
    return lines._replace(third_mended=lines.third_mended * estimate / evicted)


@mutant(BIAS, killed_by="MK-35", misconception="the sign turned: w_R - what_R")
def bias_turned(retained, evicted, estimate):
    return theory.WeightBias(*(-line for line in theory.weight_bias(retained, evicted, estimate)))


@mutant(ESTIMATED, killed_by="MK-36", misconception="w_E rho, not normalised again")
def not_normalised_again(evicted_mass, ratio):
    return evicted_mass * ratio


@mutant(ESTIMATED, killed_by="MK-36", misconception="rho turned: Z_E / Zhat_E")
def rho_turned(evicted_mass, ratio):
    return theory.estimated_evicted_weight(evicted_mass, 1 / ratio)


@mutant(ESTIMATED, killed_by="MK-36", misconception="the weight of the retained part returned")
def retained_weight_returned(evicted_mass, ratio):
    return 1 - theory.estimated_evicted_weight(evicted_mass, ratio)


@mutant(SOURCES, killed_by="MK-36", misconception="the error of the weight paired with f_E in the place of fhat_E")
def weight_error_at_the_evicted(retained_output, evicted_output, approximate, mass, estimated_mass):
    parts = theory.output_error(retained_output, evicted_output, approximate, mass, estimated_mass)
    return parts._replace(of_weight=(mass - estimated_mass)[..., None] * (evicted_output - retained_output))


@mutant(SOURCES, killed_by="MK-36", misconception="the error of the approximation weighed by what_E")
def approximation_by_the_estimate(retained_output, evicted_output, approximate, mass, estimated_mass):
    parts = theory.output_error(retained_output, evicted_output, approximate, mass, estimated_mass)
    return parts._replace(of_approximation=estimated_mass[..., None] * (evicted_output - approximate))


@mutant(SOURCES, killed_by="MK-36", misconception="the sign of the weight's error turned")
def weight_error_turned(retained_output, evicted_output, approximate, mass, estimated_mass):
    parts = theory.output_error(retained_output, evicted_output, approximate, mass, estimated_mass)
    return parts._replace(of_weight=-parts.of_weight)
