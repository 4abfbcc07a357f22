"""Wrong MomentKVs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from evictionary.reference import momentkv, momentkv_theory
from evictionary.reference.attention import attention_logits, softmax
from evictionary.reference.momentkv import Moments, Step, no_moments, recover, residual, residual_norm
from evictionary.reference.selection import top_k
from evictionary.spec_tests.harness.arithmetic import round_to
from evictionary.spec_tests.harness.implementation import oracle
from evictionary.spec_tests.harness.planted import mutant

UPDATE, MERGE, RECOVER, SCORE, ATTEND = (f"momentkv.{name}" for name in ("update", "merge", "recover", "score", "attend"))
APPROXIMATE, RESIDUAL, NORM = "momentkv.approximate_evicted", "momentkv.residual", "momentkv.residual_norm"
WEIGHT, LOG_WEIGHTS, LOG_EVICTED = "momentkv_theory.mixing_weight", "momentkv.log_mixing_weights", "momentkv.log_evicted_partition"
RETAINED, ZEROTH, STEP = "momentkv.retained_attention", "momentkv_theory.attend_zeroth_order", "momentkv.decode_step"
SCORE_PROMPT, SELECT_PROMPT = "momentkv.score_prompt", "momentkv.select_prompt"


def wrong(of: str, killed_by: str, misconception: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Plant a wrong function that refuses what the right one refuses: it dies by its numbers."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def refusing(*args, **kwargs):
            oracle(of)(*args, **kwargs)
            return function(*args, **kwargs)

        return mutant(of, killed_by=killed_by, misconception=misconception)(refusing)

    return decorate


def outer(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return values[..., :, None] * keys[..., None, :]


def square(keys: np.ndarray, values: np.ndarray) -> bool:
    """Whether keys and values can be confused: their numbers of channels are equal, as in every model."""
    return keys.shape[-1] == values.shape[-1]


def grouped(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[B, H_q, ..., D] to [B, H_kv, G, ..., D]."""
    return query.reshape(*keys.shape[:2], -1, *query.shape[2:])


def by_remainder(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[B, H_q, ..., D] to [B, H_kv, G, ..., D], query head h at the KV head h % H_kv."""
    return np.swapaxes(query.reshape(keys.shape[0], -1, keys.shape[1], *query.shape[2:]), 1, 2)


# The moments


@wrong(UPDATE, "MK-22", "what is kept summed up instead of what is evicted")
def kept_for_evicted(moments, keys, values, evicted):
    return momentkv.update(moments, keys, values, ~evicted)


@wrong(UPDATE, "MK-22", "the moments of the latest eviction alone: what was there before is overwritten")
def earlier_evictions_forgotten(moments, keys, values, evicted):
    return momentkv.update(no_moments(keys, values), keys, values, evicted)


@wrong(UPDATE, "MK-22", "sum of k v^T: the rows are channels of the keys")
def transposed_products(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    added = new.value_key_sum - moments.value_key_sum
    return new._replace(value_key_sum=moments.value_key_sum + np.swapaxes(added, -1, -2)) if square(keys, values) else new


@wrong(UPDATE, "MK-22", "keys and values exchanged in the two sums")
def sums_exchanged(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    return new._replace(key_sum=new.value_sum, value_sum=new.key_sum) if square(keys, values) else new


@wrong(UPDATE, "MK-25", "the product of the two sums in the place of the sum of the products")
def product_of_sums(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    return new._replace(value_key_sum=outer(new.value_sum, new.key_sum))


@wrong(UPDATE, "MK-25", "the count raised by one for each call, however many tokens are evicted")
def calls_counted(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    return new._replace(count=moments.count + evicted.any(axis=-1))


@wrong(UPDATE, "MK-25", "every token counted, evicted or not")
def all_tokens_counted(moments, keys, values, evicted):
    return momentkv.update(moments, keys, values, evicted)._replace(count=moments.count + keys.shape[2])


@wrong(UPDATE, "MK-25", "the values of all tokens summed, the mask applied to the keys alone")
def values_not_masked(moments, keys, values, evicted):
    return momentkv.update(moments, keys, values, evicted)._replace(value_sum=moments.value_sum + values.sum(axis=2))


@wrong(UPDATE, "MK-22", "means stored in the place of sums")
def means_stored(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    divisor = np.maximum(new.count, 1)[..., None]
    return new._replace(key_sum=new.key_sum / divisor, value_sum=new.value_sum / divisor)


@wrong(UPDATE, "MK-25", "keys centred by the mean so far before they enter the products")
def centred_by_the_mean_so_far(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    added = new.value_sum - moments.value_sum
    return new._replace(value_key_sum=new.value_key_sum - outer(added, recover(moments).mean_key))


@wrong(UPDATE, "MK-25", "earlier moments fading by a hundredth with each update (a moving average)")
def fading_moments(moments, keys, values, evicted):
    faded = moments._replace(**{name: 0.99 * getattr(moments, name) for name in ("key_sum", "value_sum", "value_key_sum")})
    return momentkv.update(faded, keys, values, evicted)


@wrong(UPDATE, "MK-22", "the mask of the first head applied to all heads")
def first_head_evicts(moments, keys, values, evicted):
    return momentkv.update(moments, keys, values, np.broadcast_to(evicted[:, :1], evicted.shape).copy())


@wrong(UPDATE, "MK-22", "the mask of batch item 0 used for the whole batch")
def first_batch_item_evicts(moments, keys, values, evicted):
    return momentkv.update(moments, keys, values, np.broadcast_to(evicted[:1], evicted.shape).copy())


@wrong(UPDATE, "MK-22", "the tokens after the last whole tile of 16 left out of the sums")
def tail_tile_not_summed(moments, keys, values, evicted):
    whole = max(1, keys.shape[2] // 16) * 16
    return momentkv.update(moments, keys, values, evicted & (np.arange(keys.shape[2]) < whole))


@wrong(UPDATE, "MK-22", "evicted tokens with a zero key not counted")
def zero_keys_not_counted(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    return new._replace(count=moments.count + (evicted & keys.any(axis=-1)).sum(axis=-1))


def rounded_moments(moments: Moments, dtype: str) -> Moments:
    return Moments(moments.count, *(round_to(np.asarray(field), dtype) for field in moments[1:]))


@wrong(UPDATE, "MK-C2", "the moments kept in float16")
def moments_in_float16(moments, keys, values, evicted):
    return rounded_moments(momentkv.update(moments, keys, values, evicted), "float16")


@wrong(UPDATE, "MK-C2", "the moments kept in bfloat16, like the cache")
def moments_in_bfloat16(moments, keys, values, evicted):
    return rounded_moments(momentkv.update(moments, keys, values, evicted), "bfloat16")


@mutant(UPDATE, killed_by="MK-25", misconception="a mask of whole numbers taken for booleans in silence")
def any_mask_accepted(moments, keys, values, evicted):
    return momentkv.update(moments, keys, values, np.asarray(evicted).astype(bool))


@mutant(UPDATE, killed_by="MK-25", misconception="a negative count taken for 0 in silence")
def negative_count_accepted(moments, keys, values, evicted):
    return momentkv.update(moments._replace(count=np.maximum(moments.count, 0)), keys, values, evicted)


@wrong(UPDATE, "MEM-1", "the moments given added to in place")
def moments_added_to_in_place(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    for field, sums in zip(moments[1:], new[1:], strict=True):
        field[...] = sums
    return new


@mutant(UPDATE, killed_by="MEM-2", misconception="the very moments given returned where nothing is evicted")
def same_moments_returned(moments, keys, values, evicted):
    new = momentkv.update(moments, keys, values, evicted)
    return new if np.any(evicted) else moments


@mutant("momentkv.no_moments", killed_by="MK-22", misconception="the count of the empty set set to 1, against a division by zero")
def counting_from_one(keys, values):
    empty = no_moments(keys, values)
    return empty._replace(count=empty.count + 1)


@mutant(MERGE, killed_by="MK-25", misconception="the sums averaged with the counts as weights, as means are merged")
def merged_like_means(first, second):
    total = np.maximum(first.count + second.count, 1)
    fields = []
    for mine, theirs in zip(first[1:], second[1:], strict=True):
        extra = (...,) + (None,) * (mine.ndim - total.ndim)
        fields.append((first.count[extra] * mine + second.count[extra] * theirs) / total[extra])
    return Moments(first.count + second.count, *fields)


@mutant(MERGE, killed_by="MK-25", misconception="the moments of the larger set taken")
def larger_set_taken(first, second):
    larger = first.count >= second.count
    return Moments(
        *(
            np.where(larger[(...,) + (None,) * (mine.ndim - larger.ndim)], mine, theirs)
            for mine, theirs in zip(first, second, strict=True)
        )
    )


@mutant(MERGE, killed_by="MK-25", misconception="the matrix of the union formed from the sums of the union")
def merged_product_of_sums(first, second):
    union = momentkv.merge(first, second)
    return union._replace(value_key_sum=outer(union.value_sum, union.key_sum))


@mutant(MERGE, killed_by="MK-25", misconception="the count of the first set kept")
def count_not_added(first, second):
    return momentkv.merge(first, second)._replace(count=first.count)


# Means and covariance


@mutant(RECOVER, killed_by="MK-23", misconception="S itself for Stilde: the product of the means not subtracted")
def not_centred(moments):
    return recover(moments)._replace(covariance=moments.value_key_sum)


@mutant(RECOVER, killed_by="MK-23", misconception="the product of the means subtracted once instead of n times")
def one_mean_product_subtracted(moments):
    found = recover(moments)
    return found._replace(covariance=moments.value_key_sum - outer(found.mean_value, found.mean_key))


@mutant(RECOVER, killed_by="MK-24", misconception="Stilde divided by n, a mean in the place of a sum")
def covariance_averaged(moments):
    found = recover(moments)
    return found._replace(covariance=found.covariance / np.maximum(moments.count, 1)[..., None, None])


@mutant(RECOVER, killed_by="MK-24", misconception="means over n - 1")
def means_over_n_less_one(moments):
    divisor = np.maximum(moments.count - 1, 1)[..., None]
    mean_key, mean_value = moments.key_sum / divisor, moments.value_sum / divisor
    return momentkv.Recovered(mean_key, mean_value, moments.value_key_sum - outer(moments.value_sum, mean_key))


@mutant(RECOVER, killed_by="MK-24", misconception="means over n + 1, so that nothing is divided by zero")
def means_over_n_plus_one(moments):
    divisor = (moments.count + 1)[..., None]
    mean_key, mean_value = moments.key_sum / divisor, moments.value_sum / divisor
    return momentkv.Recovered(mean_key, mean_value, moments.value_key_sum - outer(moments.value_sum, mean_key))


@mutant(RECOVER, killed_by="MK-24", misconception="0 divided by 0 where nothing was evicted")
def empty_set_divided(moments):
    with np.errstate(all="ignore"):
        divisor = moments.count[..., None].astype(np.float64)
        mean_key, mean_value = moments.key_sum / divisor, moments.value_sum / divisor
        return momentkv.Recovered(mean_key, mean_value, moments.value_key_sum - outer(moments.value_sum, mean_key))


@mutant(RECOVER, killed_by="MK-C2", misconception="entries of Stilde below 1e-6 set to zero, as appendix C.2 has it")
def small_entries_cut(moments):
    found = recover(moments)
    return found._replace(covariance=np.where(np.abs(found.covariance) < 1e-6, 0, found.covariance))


@mutant(RECOVER, killed_by="MK-24", misconception="the count of the first head used for all heads")
def count_of_the_first_head(moments):
    count = np.broadcast_to(moments.count[:, :1], moments.count.shape)
    return recover(moments._replace(count=count))


@mutant(RECOVER, killed_by="MK-24", misconception="mean key and mean value exchanged")
def means_exchanged(moments):
    found = recover(moments)
    return found._replace(mean_key=found.mean_value, mean_value=found.mean_key) if square(*found[:2]) else found


# The eviction score


def group_attention(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The weights of each query head, [B, H_kv, G, T]."""
    return softmax(attention_logits(grouped(query, keys), keys))


def attention_shares(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The right alpha, [B, H_kv, T]."""
    return group_attention(query, keys).mean(axis=2)


def scale_of(moments: Moments, keys: np.ndarray) -> np.ndarray:
    """The right divisor of Stilde k, [B, H_kv, 1, 1]."""
    return np.maximum(moments.count, 1)[..., None, None] * np.sqrt(keys.shape[-1])


def norms(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt((vectors * vectors).sum(axis=-1))


def explained(keys: np.ndarray, values: np.ndarray, moments: Moments) -> np.ndarray:
    """The right Stilde k_j / (n sqrt(d)), [B, H_kv, T, D_v]."""
    return keys @ np.swapaxes(recover(moments).covariance, -1, -2) / scale_of(moments, keys)


@wrong(SCORE, "MK-10", "the scale 1/sqrt(d) left out of the attention")
def attention_without_scale(query, keys, values, moments):
    return attention_shares(query * np.sqrt(keys.shape[-1]), keys) * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "the scale 1/sqrt(d) left out of the residual")
def residual_without_scale(query, keys, values, moments):
    mean_value = recover(moments).mean_value[..., None, :]
    unexplained = values - mean_value - explained(keys, values, moments) * np.sqrt(keys.shape[-1])
    return attention_shares(query, keys) * norms(unexplained)


@wrong(SCORE, "MK-10", "Stilde not divided by n in the residual")
def residual_without_count(query, keys, values, moments):
    times = np.maximum(moments.count, 1)[..., None, None]
    unexplained = values - recover(moments).mean_value[..., None, :] - explained(keys, values, moments) * times
    return attention_shares(query, keys) * norms(unexplained)


@wrong(SCORE, "MK-10", "the linear part added to the residual instead of subtracted")
def linear_part_added(query, keys, values, moments):
    unexplained = values - recover(moments).mean_value[..., None, :] + explained(keys, values, moments)
    return attention_shares(query, keys) * norms(unexplained)


@wrong(SCORE, "MK-10", "S for Stilde in the residual: the matrix not centred")
def residual_not_centred(query, keys, values, moments):
    unexplained = values - recover(moments).mean_value[..., None, :]
    unexplained = unexplained - keys @ np.swapaxes(moments.value_key_sum, -1, -2) / scale_of(moments, keys)
    return attention_shares(query, keys) * norms(unexplained)


@wrong(SCORE, "MK-10", "k_j centred in the residual, which the equation does not do")
def residual_of_centred_keys(query, keys, values, moments):
    found = recover(moments)
    unexplained = values - found.mean_value[..., None, :]
    unexplained = unexplained - explained(keys - found.mean_key[..., None, :], values, moments)
    return attention_shares(query, keys) * norms(unexplained)


@wrong(SCORE, "MK-10", "Stilde transposed in the residual")
def residual_transposed(query, keys, values, moments):
    matrix = recover(moments).covariance
    matrix = matrix if square(keys, values) else np.swapaxes(matrix, -1, -2)
    unexplained = values - recover(moments).mean_value[..., None, :] - keys @ matrix / scale_of(moments, keys)
    return attention_shares(query, keys) * norms(unexplained)


@wrong(SCORE, "MK-10", "the query in the place of the key: |v_j - fhat(q)|")
def residual_at_the_query(query, keys, values, moments):
    per_query = Moments(*(field[:, :, None] for field in moments))
    estimate = momentkv.approximate_evicted(grouped(query, keys), per_query)  # [B, H_kv, G, D_v]
    distance = norms(values[:, :, None] - estimate[..., None, :])
    return (group_attention(query, keys) * distance).mean(axis=2)


@wrong(SCORE, "MK-10", "keys and values exchanged")
def keys_and_values_exchanged(query, keys, values, moments):
    if not square(keys, values):
        return momentkv.score(query, keys, values, moments)
    exchanged = Moments(moments.count, moments.value_sum, moments.key_sum, np.swapaxes(moments.value_key_sum, -1, -2))
    return momentkv.score(query, values, keys, exchanged)


@wrong(SCORE, "MK-10", "the attention alone, without the residual")
def attention_alone(query, keys, values, moments):
    return attention_shares(query, keys)


@wrong(SCORE, "MK-10", "the residual alone, without the attention")
def residual_alone(query, keys, values, moments):
    return residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "attention times the norm of the value: the moments play no part")
def moments_ignored(query, keys, values, moments):
    return attention_shares(query, keys) * norms(values)


@wrong(SCORE, "MK-10", "the distance to the mean value: Stilde plays no part")
def covariance_ignored(query, keys, values, moments):
    return attention_shares(query, keys) * norms(values - recover(moments).mean_value[..., None, :])


@wrong(SCORE, "MK-10", "the squared norm of the residual")
def squared_residual(query, keys, values, moments):
    return attention_shares(query, keys) * residual_norm(keys, values, moments) ** 2


@wrong(SCORE, "MK-10", "the sum of the absolute values for the norm of the residual")
def absolute_residual(query, keys, values, moments):
    return attention_shares(query, keys) * np.abs(residual(keys, values, moments)).sum(axis=-1)


@wrong(SCORE, "MK-10", "the queries of a group averaged before the softmax")
def mean_query(query, keys, values, moments):
    mean = grouped(query, keys).mean(axis=2)
    return attention_shares(mean, keys) * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "the largest probability of the group instead of the mean")
def largest_of_the_group(query, keys, values, moments):
    return group_attention(query, keys).max(axis=2) * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "the probabilities of the group summed instead of averaged")
def sum_over_the_group(query, keys, values, moments):
    return group_attention(query, keys).sum(axis=2) * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "the first query head of a group standing for all")
def first_query_head(query, keys, values, moments):
    return group_attention(query, keys)[:, :, 0] * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "query head h read with the KV head h % H_kv")
def score_by_remainder(query, keys, values, moments):
    alpha = softmax(attention_logits(by_remainder(query, keys), keys)).mean(axis=2)
    return alpha * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "the attention shared with the evicted part: alpha divided by Z_R + Zhat_E")
def attention_over_everything(query, keys, values, moments):
    per_query = Moments(*(field[:, :, None] for field in moments))
    queries = grouped(query, keys)
    estimated = momentkv.log_evicted_partition(queries, per_query)[..., None]
    logits = np.concatenate([attention_logits(queries, keys), estimated], axis=-1)
    return softmax(logits)[..., :-1].mean(axis=2) * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "exponentials taken without subtracting the largest logit")
def score_overflowing(query, keys, values, moments):
    with np.errstate(all="ignore"):
        weights = np.exp(attention_logits(grouped(query, keys), keys))
        alpha = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=2)
        return alpha * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "0 divided by 0 where nothing was evicted, as line 10 is printed")
def nothing_evicted_divided(query, keys, values, moments):
    unknown = np.where(moments.count == 0, np.nan, 0.0)[..., None]
    return momentkv.score(query, keys, values, moments) + unknown


@wrong(SCORE, "MK-10", "score 0 where nothing was evicted")
def nothing_evicted_scores_zero(query, keys, values, moments):
    return momentkv.score(query, keys, values, moments) * (moments.count > 0)[..., None]


@wrong(SCORE, "MK-10", "the moments of batch item 0 used for the whole batch")
def moments_of_the_first_batch_item(query, keys, values, moments):
    first = Moments(*(np.broadcast_to(field[:1], field.shape) for field in moments))
    return momentkv.score(query, keys, values, first)


@wrong(SCORE, "MK-10", "the attention of batch item 0 used for the whole batch")
def attention_of_the_first_batch_item(query, keys, values, moments):
    return attention_shares(query, keys)[:1] * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "one set of moments for all heads of a layer")
def moments_of_the_layer(query, keys, values, moments):
    shared = Moments(*(np.broadcast_to(field.sum(axis=1, keepdims=True), field.shape) for field in moments))
    return momentkv.score(query, keys, values, shared)


@wrong(SCORE, "MK-10", "the scores of a layer averaged over its heads")
def scores_shared_by_the_heads(query, keys, values, moments):
    scores = momentkv.score(query, keys, values, moments)
    return np.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape).copy()


@wrong(SCORE, "MK-10", "the last tile of 16 tokens filled up with zero keys that enter the softmax: an unmasked tail")
def tail_tile_in_the_softmax(query, keys, values, moments):
    logits = attention_logits(grouped(query, keys), keys)
    padding = np.zeros((*logits.shape[:-1], -logits.shape[-1] % 16))
    alpha = softmax(np.concatenate([logits, padding], axis=-1))[..., : logits.shape[-1]].mean(axis=2)
    return alpha * residual_norm(keys, values, moments)


@wrong(SCORE, "MK-10", "Stilde formed in float16")
def covariance_in_float16(query, keys, values, moments):
    half = round_to(recover(moments).covariance, "float16")
    with np.errstate(all="ignore"):
        unexplained = values - recover(moments).mean_value[..., None, :]
        unexplained = unexplained - keys @ np.swapaxes(half, -1, -2) / scale_of(moments, keys)
        return attention_shares(query, keys) * norms(unexplained)


def without_small_entries(moments: Moments) -> Moments:
    found = recover(moments)
    cut = np.where(np.abs(found.covariance) < 1e-6, 0, found.covariance)
    return moments._replace(value_key_sum=cut + outer(moments.value_sum, found.mean_key))


@wrong(SCORE, "MK-10", "entries of Stilde below 1e-6 set to zero (appendix C.2): a threshold that knows nothing of the scale")
def small_entries_cut_from_the_residual(query, keys, values, moments):
    return momentkv.score(query, keys, values, without_small_entries(moments))


@wrong(SCORE, "MK-10", "scores rounded to bfloat16")
def scores_in_bfloat16(query, keys, values, moments):
    return round_to(momentkv.score(query, keys, values, moments), "bfloat16")


@wrong(SCORE, "MK-10", "the newest token always scored highest (a protected window)")
def newest_token_protected(query, keys, values, moments):
    scores = momentkv.score(query, keys, values, moments)
    scores[..., -1] = 1 + scores.max(axis=-1)
    return scores


@mutant(SCORE, killed_by="MK-10", misconception="query heads beyond a whole multiple of the KV heads dropped in silence")
def surplus_heads_dropped(query, keys, values, moments):
    return momentkv.score(query[:, : query.shape[1] // keys.shape[1] * keys.shape[1]], keys, values, moments)


@mutant(RESIDUAL, killed_by="MK-10", misconception="the linear part left unscaled: Stilde k / n without sqrt(d)")
def linear_part_without_scale(keys, values, moments):
    return values - recover(moments).mean_value[..., None, :] - explained(keys, values, moments) * np.sqrt(keys.shape[-1])


@mutant(RESIDUAL, killed_by="MK-10", misconception="the sign turned: the approximation minus the value")
def turned_residual(keys, values, moments):
    return -residual(keys, values, moments)


@mutant(RESIDUAL, killed_by="MK-10", misconception="the mean value left in the residual")
def mean_value_not_subtracted(keys, values, moments):
    return values - explained(keys, values, moments)


@mutant(NORM, killed_by="MK-10", misconception="the root left out of the norm of the residual")
def norm_without_root(keys, values, moments):
    return residual_norm(keys, values, moments) ** 2


@mutant(NORM, killed_by="MK-10", misconception="the norm divided by sqrt(D_v), a root mean square")
def root_mean_square(keys, values, moments):
    return residual_norm(keys, values, moments) / np.sqrt(values.shape[-1])


# The approximation, the partition functions and the weights


@mutant(APPROXIMATE, killed_by="MK-9", misconception="the scale 1/sqrt(d) left out of the linear part")
def approximation_without_scale(query, moments):
    return momentkv.approximate_evicted(query * np.sqrt(query.shape[-1]), moments)


@mutant(APPROXIMATE, killed_by="MK-9", misconception="Stilde not divided by n")
def approximation_without_count(query, moments):
    mean_value = recover(moments).mean_value
    linear = momentkv.approximate_evicted(query, moments) - mean_value
    return mean_value + linear * np.maximum(moments.count, 1)[..., None]


@mutant(APPROXIMATE, killed_by="MK-9", misconception="S for Stilde: the matrix not centred")
def approximation_not_centred(query, moments):
    scale = np.maximum(moments.count, 1)[..., None] * np.sqrt(query.shape[-1])
    return recover(moments).mean_value + (moments.value_key_sum @ query[..., None])[..., 0] / scale


@mutant(APPROXIMATE, killed_by="MK-9", misconception="the mean value alone, of zeroth order")
def mean_value_alone(query, moments):
    mean_value = recover(moments).mean_value
    return np.broadcast_to(mean_value, np.broadcast_shapes(mean_value.shape, (*query.shape[:-1], 1))).copy()


@mutant(APPROXIMATE, killed_by="MK-9", misconception="the linear part alone, the mean value forgotten")
def linear_part_alone(query, moments):
    return momentkv.approximate_evicted(query, moments) - recover(moments).mean_value


@mutant(APPROXIMATE, killed_by="MK-9", misconception="the sum of the values in the place of their mean")
def value_sum_for_the_mean(query, moments):
    return momentkv.approximate_evicted(query, moments) - recover(moments).mean_value + moments.value_sum


@mutant(LOG_EVICTED, killed_by="MK-11", misconception="the count left out: exp of the mean logit")
def partition_without_count(query, moments):
    return momentkv.log_evicted_partition(query, moments) - np.log(np.maximum(moments.count, 1))


@mutant(LOG_EVICTED, killed_by="MK-11", misconception="the scale 1/sqrt(d) left out of the mean logit")
def mean_logit_without_scale(query, moments):
    return momentkv.log_evicted_partition(query * np.sqrt(query.shape[-1]), moments)


@mutant(LOG_EVICTED, killed_by="MK-11", misconception="the logit of the sum of the keys instead of their mean")
def logit_of_the_key_sum(query, moments):
    return momentkv.log_evicted_partition(query * np.maximum(moments.count, 1)[..., None], moments)


@mutant(LOG_EVICTED, killed_by="MK-11", misconception="a partition function of 1 (logarithm 0) where nothing was evicted")
def empty_partition_of_one(query, moments):
    return np.where(moments.count > 0, momentkv.log_evicted_partition(query, moments), 0)


@mutant(WEIGHT, killed_by="MK-12", misconception="the weight of the evicted part returned for that of the retained")
def weight_of_the_evicted(retained_partition, evicted_partition):
    return 1 - momentkv_theory.mixing_weight(retained_partition, evicted_partition)


@mutant(WEIGHT, killed_by="MK-12", misconception="the ratio of the two partition functions")
def ratio_for_weight(retained_partition, evicted_partition):
    return retained_partition / (evicted_partition + 1)


@mutant(LOG_WEIGHTS, killed_by="MK-37", misconception="the exponentials added outside the log domain: they overflow")
def added_as_numbers(log_retained, log_evicted):
    with np.errstate(all="ignore"):
        total = np.log(np.exp(log_retained) + np.exp(log_evicted))
        return log_retained - total, log_evicted - total


@mutant(LOG_WEIGHTS, killed_by="MK-37", misconception="the two weights in the other order")
def weights_in_the_other_order(log_retained, log_evicted):
    return momentkv.log_mixing_weights(log_retained, log_evicted)[::-1]


@mutant(LOG_WEIGHTS, killed_by="MK-37", misconception="logarithms in base 2")
def binary_logarithms(log_retained, log_evicted):
    return tuple(weight / np.log(2) for weight in momentkv.log_mixing_weights(log_retained, log_evicted))


@mutant(LOG_WEIGHTS, killed_by="MK-37", misconception="the larger of the two for the sum of both")
def larger_for_the_sum(log_retained, log_evicted):
    total = np.maximum(log_retained, log_evicted)
    return log_retained - total, log_evicted - total


@mutant(RETAINED, killed_by="MK-2", misconception="weights masked after the softmax and not normalised again")
def output_masked_late(logits, values, kept):
    return (softmax(logits) * kept) @ values, momentkv.retained_attention(logits, values, kept)[1]


@mutant(RETAINED, killed_by="MK-2", misconception="the partition function of all tokens returned for that of the kept ones")
def partition_of_all_tokens(logits, values, kept):
    everything = momentkv.retained_attention(logits, values, np.ones_like(kept))
    return momentkv.retained_attention(logits, values, kept)[0], everything[1]


@mutant(RETAINED, killed_by="MK-2", misconception="the logarithm of the partition function without the maximum subtracted before")
def maximum_not_added_again(logits, values, kept):
    output, log_total = momentkv.retained_attention(logits, values, kept)
    top = np.where(kept, logits, -np.inf).max(axis=-1)
    return output, log_total - np.where(np.isfinite(top), top, 0)


# The corrected attention


def per_query_head(moments: Moments) -> Moments:
    """Moments with an axis for the query heads of a group."""
    return Moments(*(field[:, :, None] for field in moments))


def mixed(
    query,
    keys,
    values,
    kept,
    moments,
    *,
    group=grouped,
    retained=momentkv.retained_attention,
    log_evicted=momentkv.log_evicted_partition,
    approximate=momentkv.approximate_evicted,
    weights=momentkv.log_mixing_weights,
):
    """The right output, with one part of it replaced."""
    queries, moments = group(query, keys), per_query_head(moments)
    from_retained, log_retained = retained(attention_logits(queries, keys), values, kept[..., None, :])
    of_retained, of_evicted = weights(log_retained, log_evicted(queries, moments))
    output = np.exp(of_retained)[..., None] * from_retained + np.exp(of_evicted)[..., None] * approximate(queries, moments)
    return output.reshape(*query.shape[:2], values.shape[-1])


@wrong(ATTEND, "MK-12", "the moments not used: attention renormalised over what is kept")
def no_correction(query, keys, values, kept, moments):
    return momentkv.attend(query, keys, values, kept, no_moments(keys, values))


@wrong(ATTEND, "MK-12", "the estimate added on top of f_R, whose weight stays 1")
def retained_weight_forgotten(query, keys, values, kept, moments):
    def weights(log_retained, log_evicted):
        return np.where(np.isfinite(log_retained), 0, -np.inf), momentkv.log_mixing_weights(log_retained, log_evicted)[1]

    return mixed(query, keys, values, kept, moments, weights=weights)


@wrong(ATTEND, "MK-12", "the two weights exchanged")
def weights_exchanged(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, weights=weights_in_the_other_order)


@wrong(ATTEND, "MK-12", "parts weighed by how many tokens they have, not by their partition functions")
def weights_by_count(query, keys, values, kept, moments):
    with np.errstate(divide="ignore"):
        counts = [np.log(count)[:, :, None] for count in (kept.sum(axis=-1), moments.count)]

    def weights(log_retained, log_evicted):
        return momentkv.log_mixing_weights(*(np.broadcast_to(count, log_retained.shape) for count in counts))

    return mixed(query, keys, values, kept, moments, weights=weights)


@wrong(ATTEND, "MK-11", "the count left out of Zhat_E: the evicted set weighs like one token")
def evicted_set_as_one_token(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, log_evicted=partition_without_count)


@wrong(ATTEND, "MK-11", "Zhat_E = n_e: the mean logit left out")
def mean_logit_left_out(query, keys, values, kept, moments):
    return mixed(
        query, keys, values, kept, moments, log_evicted=lambda query, moments: momentkv.log_evicted_partition(0 * query, moments)
    )


@wrong(ATTEND, "MK-11", "the scale 1/sqrt(d) left out of the mean logit in Zhat_E")
def evicted_partition_without_scale(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, log_evicted=mean_logit_without_scale)


@wrong(ATTEND, "MK-11", "the logit of the sum of the evicted keys in the place of their mean")
def evicted_partition_of_the_sum(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, log_evicted=logit_of_the_key_sum)


@wrong(ATTEND, "MK-9", "S for Stilde in the approximation: the matrix not centred")
def output_not_centred(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, approximate=approximation_not_centred)


@wrong(ATTEND, "MK-12", "Stilde transposed in the approximation")
def output_transposed(query, keys, values, kept, moments):
    found = recover(moments)
    if not square(keys, values):
        return momentkv.attend(query, keys, values, kept, moments)
    turned = np.swapaxes(found.covariance, -1, -2) + outer(moments.value_sum, found.mean_key)
    return momentkv.attend(query, keys, values, kept, moments._replace(value_key_sum=turned))


@wrong(ATTEND, "MK-12", "the scale 1/sqrt(d) left out of the approximation")
def output_without_scale(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, approximate=approximation_without_scale)


@wrong(ATTEND, "MK-12", "Stilde not divided by n in the approximation")
def output_without_count(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, approximate=approximation_without_count)


@wrong(ATTEND, "MK-12", "the evicted part estimated by the mean value alone (the 0th-order variant)")
def zeroth_order(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, approximate=mean_value_alone)


@wrong(ATTEND, "MK-12", "the sum of the evicted values in the place of their mean")
def value_sum_mixed_in(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, approximate=value_sum_for_the_mean)


@wrong(ATTEND, "MK-37", "equation 12 as printed, outside the log domain: it overflows")
def partitions_as_numbers(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, weights=added_as_numbers)


@wrong(ATTEND, "MK-37", "the largest retained logit subtracted on both sides: the evicted side overflows")
def retained_maximum_alone(query, keys, values, kept, moments):
    logits = attention_logits(grouped(query, keys), keys)
    top = np.where(kept[:, :, None], logits, -np.inf).max(axis=-1)
    top = np.where(np.isfinite(top), top, 0)

    def weights(log_retained, log_evicted):
        with np.errstate(all="ignore"):
            total = np.log(np.exp(log_retained - top) + np.exp(log_evicted - top))
            total = np.where(total == -np.inf, 0, total + top)
            return log_retained - total, log_evicted - total

    return mixed(query, keys, values, kept, moments, weights=weights)


@wrong(ATTEND, "MK-37", "logits cut off at 80 so that their exponentials stay finite")
def logits_cut_off(query, keys, values, kept, moments):
    def weights(log_retained, log_evicted):
        return momentkv.log_mixing_weights(np.minimum(log_retained, 80), np.minimum(log_evicted, 80))

    return mixed(query, keys, values, kept, moments, weights=weights)


@wrong(ATTEND, "MK-12", "the mask ignored: tokens that are not kept read as well")
def mask_ignored(query, keys, values, kept, moments):
    return momentkv.attend(query, keys, values, np.ones_like(kept), moments)


@wrong(ATTEND, "MK-2", "weights masked after the softmax and not normalised again")
def masked_after_the_softmax(query, keys, values, kept, moments):
    return mixed(query, keys, values, kept, moments, retained=output_masked_late)


@wrong(ATTEND, "MK-2", "logits of tokens that are not kept set to 0 instead of -inf")
def hidden_logits_zero(query, keys, values, kept, moments):
    def retained(logits, values, kept):
        return momentkv.retained_attention(np.where(kept, logits, 0), values, np.ones_like(kept))

    return mixed(query, keys, values, kept, moments, retained=retained)


@wrong(ATTEND, "MK-2", "logits of tokens that are not kept set to -10000: a head that keeps none reads all of them")
def hidden_logits_finite(query, keys, values, kept, moments):
    def retained(logits, values, kept):
        return momentkv.retained_attention(np.where(kept, logits, -1e4), values, np.ones_like(kept))

    return mixed(query, keys, values, kept, moments, retained=retained)


@wrong(ATTEND, "MK-2", "0 divided by 0 in a head that keeps nothing and has evicted nothing")
def empty_head_divided(query, keys, values, kept, moments):
    output = momentkv.attend(query, keys, values, kept, moments)
    empty = (~kept.any(axis=-1) & (moments.count == 0)).repeat(query.shape[1] // keys.shape[1], axis=1)
    output[empty] = np.nan
    return output


@wrong(ATTEND, "MK-12", "0 divided by 0 in a head that has evicted nothing")
def empty_moments_divided(query, keys, values, kept, moments):
    output = momentkv.attend(query, keys, values, kept, moments)
    output[(moments.count == 0).repeat(query.shape[1] // keys.shape[1], axis=1)] = np.nan
    return output


@wrong(ATTEND, "MK-12", "query head h reading the KV head h % H_kv")
def output_by_remainder(query, keys, values, kept, moments):
    output = mixed(query, keys, values, kept, moments, group=by_remainder)
    # Back to the order of the query heads: [B, H_kv, G] to [B, G, H_kv].
    return np.swapaxes(output.reshape(*keys.shape[:2], -1, values.shape[-1]), 1, 2).reshape(output.shape)


@wrong(ATTEND, "MK-12", "the query heads of a group averaged: all give the same output")
def one_output_for_the_group(query, keys, values, kept, moments):
    queries = grouped(query, keys)
    mean = np.broadcast_to(queries.mean(axis=2, keepdims=True), queries.shape).reshape(query.shape)
    return momentkv.attend(mean, keys, values, kept, moments)


@wrong(ATTEND, "MK-12", "the moments of the first head used for all heads")
def output_with_moments_of_the_first_head(query, keys, values, kept, moments):
    first = Moments(*(np.broadcast_to(field[:, :1], field.shape) for field in moments))
    return momentkv.attend(query, keys, values, kept, first)


@wrong(ATTEND, "MK-12", "the moments of batch item 0 used for the whole batch")
def output_with_moments_of_the_first_item(query, keys, values, kept, moments):
    first = Moments(*(np.broadcast_to(field[:1], field.shape) for field in moments))
    return momentkv.attend(query, keys, values, kept, first)


@wrong(ATTEND, "MK-12", "the mask of the first head applied to all heads")
def mask_of_the_first_head(query, keys, values, kept, moments):
    return momentkv.attend(query, keys, values, np.broadcast_to(kept[:, :1], kept.shape).copy(), moments)


@wrong(ATTEND, "MK-12", "the tokens after the last whole tile of 16 not read")
def tail_tile_not_read(query, keys, values, kept, moments):
    whole = max(1, keys.shape[2] // 16) * 16
    return momentkv.attend(query, keys, values, kept & (np.arange(keys.shape[2]) < whole), moments)


@wrong(ATTEND, "MK-2", "the last tile of 16 tokens filled up with zero keys and values that count: an unmasked tail")
def tail_tile_not_masked(query, keys, values, kept, moments):
    padding = [(0, 0), (0, 0), (0, -keys.shape[2] % 16)]
    keys, values = (np.pad(states, [*padding, (0, 0)]) for states in (keys, values))
    return momentkv.attend(query, keys, values, np.pad(kept, padding, constant_values=True), moments)


@wrong(ATTEND, "MK-12", "mixing weights rounded to bfloat16")
def weights_in_bfloat16(query, keys, values, kept, moments):
    def weights(log_retained, log_evicted):
        with np.errstate(divide="ignore"):
            return tuple(
                np.log(round_to(np.exp(weight), "bfloat16")) for weight in momentkv.log_mixing_weights(log_retained, log_evicted)
            )

    return mixed(query, keys, values, kept, moments, weights=weights)


@wrong(ATTEND, "MK-C2", "entries of Stilde below 1e-6 set to zero, as appendix C.2 has it")
def small_entries_cut_from_the_output(query, keys, values, kept, moments):
    return momentkv.attend(query, keys, values, kept, without_small_entries(moments))


@mutant(ATTEND, killed_by="MK-12", misconception="a mask of one head stretched over all in silence")
def mask_stretched(query, keys, values, kept, moments):
    return momentkv.attend(query, keys, values, np.broadcast_to(kept, keys.shape[:3]).copy(), moments)


@wrong(ZEROTH, "MK-T4", "value_key_sum set to 0, which leaves Stilde = -s_v s_k^T / n")
def products_set_to_zero(query, keys, values, kept, moments):
    return momentkv.attend(query, keys, values, kept, moments._replace(value_key_sum=0 * moments.value_key_sum))


@wrong(ZEROTH, "MK-T4", "the first-order output: Stilde still used")
def first_order(query, keys, values, kept, moments):
    return momentkv.attend(query, keys, values, kept, moments)


@wrong(ZEROTH, "MK-T4", "no estimate of the evicted output: w_R f_R alone")
def estimate_left_out(query, keys, values, kept, moments):
    zero = Moments(moments.count, moments.key_sum, 0 * moments.value_sum, 0 * moments.value_key_sum)
    return momentkv.attend(query, keys, values, kept, zero)


@wrong(ZEROTH, "MK-T4", "the mean key left out as well: Zhat_E = n_e")
def keys_left_out_as_well(query, keys, values, kept, moments):
    constant = moments._replace(key_sum=0 * moments.key_sum, value_key_sum=0 * moments.value_key_sum)
    return momentkv.attend(query, keys, values, kept, constant)


# A decoding step


def joined(states: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.concatenate([states, new[:, :, None]], axis=2)


def left(states: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return states[kept].reshape(*states.shape[:2], int(kept[0, 0].sum()), states.shape[-1])


def attended(query, keys, values, moments):
    return momentkv.attend(query, keys, values, np.ones(keys.shape[:3], dtype=bool), moments)


def stepped(query, new_key, new_value, keys, values, moments, budget, choose):
    """A step in which `choose(query, keys, values, moments)` says, each time, which tokens stay."""
    keys, values = joined(keys, new_key), joined(values, new_value)
    while keys.shape[2] > budget:
        kept = choose(query, keys, values, moments)
        moments = momentkv.update(moments, keys, values, ~kept)
        keys, values = left(keys, kept), left(values, kept)
    return Step(attended(query, keys, values, moments), keys, values, moments)


def all_but_the_lowest(scores: np.ndarray) -> np.ndarray:
    return top_k(scores, scores.shape[-1] - 1)


@wrong(STEP, "MK-A1", "the means from before the last eviction used with the count after it, as lines 22 and 23 are printed")
def stale_means(query, new_key, new_value, keys, values, moments, budget):
    step = momentkv.decode_step(query, new_key, new_value, keys, values, moments, budget)
    if keys.shape[2] < budget:
        return step
    old = recover(momentkv.decode_step(query, new_key, new_value, keys, values, moments, budget + 1).moments)
    count = step.moments.count
    value_sum = old.mean_value * count[..., None]
    stale = Moments(count, old.mean_key * count[..., None], value_sum, old.covariance + outer(value_sum, old.mean_key))
    return step._replace(output=attended(query, step.keys, step.values, stale))


@wrong(STEP, "MK-A1", "all tokens above the budget evicted at once, by scores that know nothing of one another")
def evicted_in_one_go(query, new_key, new_value, keys, values, moments, budget):
    def choose(*state):
        return top_k(momentkv.score(*state), budget)

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "the attention of the residuals brought up to date, their moments left as they were before the step")
def stale_residuals(query, new_key, new_value, keys, values, moments, budget):
    def choose(query, keys, values, _):
        return all_but_the_lowest(momentkv.score(query, keys, values, moments))

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "the new token never evicted")
def new_token_protected(query, new_key, new_value, keys, values, moments, budget):
    def choose(*state):
        return all_but_the_lowest(newest_token_protected(*state))

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "room made before the new token is added: the old ones are scored without it")
def evicted_before_the_new_token(query, new_key, new_value, keys, values, moments, budget):
    while keys.shape[2] >= budget:
        kept = all_but_the_lowest(momentkv.score(query, keys, values, moments))
        moments = momentkv.update(moments, keys, values, ~kept)
        keys, values = left(keys, kept), left(values, kept)
        if not keys.shape[2]:
            break
    keys, values = joined(keys, new_key), joined(values, new_value)
    return Step(attended(query, keys, values, moments), keys, values, moments)


@wrong(STEP, "MK-A1", "the highest score evicted")
def highest_score_evicted(query, new_key, new_value, keys, values, moments, budget):
    def choose(*state):
        return all_but_the_lowest(-momentkv.score(*state))

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "the oldest token evicted (a sliding window)")
def oldest_token_evicted(query, new_key, new_value, keys, values, moments, budget):
    def choose(query, keys, values, moments):
        return np.broadcast_to(np.arange(keys.shape[2]) > 0, keys.shape[:3])

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "the token of lowest attention evicted, the residual left out")
def lowest_attention_evicted(query, new_key, new_value, keys, values, moments, budget):
    def choose(query, keys, values, moments):
        return all_but_the_lowest(attention_shares(query, keys))

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "one choice for all heads of a layer, by the mean of their scores")
def heads_choose_together(query, new_key, new_value, keys, values, moments, budget):
    def choose(*state):
        return all_but_the_lowest(scores_shared_by_the_heads(*state))

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "the choice of batch item 0 used for the whole batch")
def first_batch_item_chooses(query, new_key, new_value, keys, values, moments, budget):
    def choose(query, keys, *state):
        kept = all_but_the_lowest(momentkv.score(query, keys, *state))
        return np.broadcast_to(kept[:1], kept.shape)

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "of equal scores the later token kept")
def later_of_equal_tokens(query, new_key, new_value, keys, values, moments, budget):
    def choose(*state):
        return all_but_the_lowest(momentkv.score(*state)[..., ::-1])[..., ::-1]

    return stepped(query, new_key, new_value, keys, values, moments, budget, choose)


@wrong(STEP, "MK-A1", "the last token moved into the slot of the evicted one: the order of the positions is lost")
def slot_filled_from_the_end(query, new_key, new_value, keys, values, moments, budget):
    keys, values = joined(keys, new_key), joined(values, new_value)
    while keys.shape[2] > budget:
        kept = all_but_the_lowest(momentkv.score(query, keys, values, moments))
        moments = momentkv.update(moments, keys, values, ~kept)
        place, last = np.arange(keys.shape[2] - 1), keys.shape[2] - 1
        order = np.where(kept[..., :-1], place, last)[..., None]
        keys, values = (np.take_along_axis(states, order, axis=2) for states in (keys, values))
    return Step(attended(query, keys, values, moments), keys, values, moments)


@wrong(STEP, "MK-A1", "the budget counted without the new token: L + 1 tokens stay")
def new_token_on_top(query, new_key, new_value, keys, values, moments, budget):
    return momentkv.decode_step(query, new_key, new_value, keys, values, moments, budget + 1)


@wrong(STEP, "MK-A1", "evicted tokens dropped: their sums never reach the moments")
def moments_left_as_they_are(query, new_key, new_value, keys, values, moments, budget):
    return momentkv.decode_step(query, new_key, new_value, keys, values, moments, budget)._replace(moments=moments)


@wrong(STEP, "MK-A1", "the new token summed up in the place of the evicted one")
def new_token_summed(query, new_key, new_value, keys, values, moments, budget):
    step = momentkv.decode_step(query, new_key, new_value, keys, values, moments, budget)
    if keys.shape[2] < budget:
        return step
    all_keys, all_values = joined(keys, new_key), joined(values, new_value)
    newest = np.broadcast_to(np.arange(all_keys.shape[2]) >= budget, all_keys.shape[:3])
    after = momentkv.update(moments, all_keys, all_values, newest)
    return step._replace(moments=after, output=attended(query, step.keys, step.values, after))


@wrong(STEP, "MK-A1", "the output taken before the eviction, with the token that then goes")
def output_before_the_eviction(query, new_key, new_value, keys, values, moments, budget):
    step = momentkv.decode_step(query, new_key, new_value, keys, values, moments, budget)
    return step._replace(output=attended(query, joined(keys, new_key), joined(values, new_value), moments))


@wrong(STEP, "MK-A1", "the output of the retained tokens alone, without the correction")
def output_without_correction(query, new_key, new_value, keys, values, moments, budget):
    step = momentkv.decode_step(query, new_key, new_value, keys, values, moments, budget)
    return step._replace(output=attended(query, step.keys, step.values, no_moments(keys, values)))


@mutant(STEP, killed_by="MK-A1", misconception="a budget of 0 taken for 1 in silence")
def empty_budget_raised(query, new_key, new_value, keys, values, moments, budget):
    return momentkv.decode_step(query, new_key, new_value, keys, values, moments, max(1, budget))


# The prompt


def prompt_scores(
    queries, keys, values, chunk_size, *, group=grouped, hidden=None, reduce=lambda weights: weights.mean(axis=(2, 3))
):
    """The right score of a prompt, with one part of it replaced; `hidden` [W, T] is True where a query does not see a key."""
    length, window = keys.shape[2], queries.shape[2]
    if hidden is None:
        hidden = np.arange(length) > np.arange(length - window, length)[:, None]
    logits = attention_logits(group(queries, keys), keys[:, :, None])
    each = reduce(softmax(np.where(hidden, -np.inf, logits))) * norms(values)
    return chunk_means(each, chunk_size)


def chunk_means(each: np.ndarray, chunk_size: int) -> np.ndarray:
    starts = np.arange(0, each.shape[-1], chunk_size)
    return spread(np.add.reduceat(each, starts, axis=-1) / sizes_of(each, chunk_size), each, chunk_size)


def sizes_of(each: np.ndarray, chunk_size: int) -> np.ndarray:
    return np.diff(np.arange(0, each.shape[-1], chunk_size), append=each.shape[-1])


def spread(chunks: np.ndarray, each: np.ndarray, chunk_size: int) -> np.ndarray:
    return np.repeat(chunks, sizes_of(each, chunk_size), axis=-1)


def each_token(queries, keys, values):
    return momentkv.score_prompt(queries, keys, values, chunk_size=1)


@wrong(SCORE_PROMPT, "MK-P", "the window not causal: its queries see later tokens")
def window_not_causal(queries, keys, values, *, chunk_size=4):
    return prompt_scores(queries, keys, values, chunk_size, hidden=np.zeros((1, 1), dtype=bool))


@wrong(SCORE_PROMPT, "MK-P", "the causal mask off by one: a query sees the token after its own")
def mask_off_by_one(queries, keys, values, *, chunk_size=4):
    length, window = keys.shape[2], queries.shape[2]
    hidden = np.arange(length) > np.arange(length - window, length)[:, None] + 1
    return prompt_scores(queries, keys, values, chunk_size, hidden=hidden)


@wrong(SCORE_PROMPT, "MK-P", "the window hidden from its own queries: only the tokens before it get attention")
def window_hidden(queries, keys, values, *, chunk_size=4):
    length, window = keys.shape[2], queries.shape[2]
    return prompt_scores(queries, keys, values, chunk_size, hidden=np.arange(length)[None] >= max(1, length - window))


@wrong(SCORE_PROMPT, "MK-P", "the queries taken for those of the first tokens")
def window_at_the_start(queries, keys, values, *, chunk_size=4):
    hidden = np.arange(keys.shape[2]) > np.arange(queries.shape[2])[:, None]
    return prompt_scores(queries, keys, values, chunk_size, hidden=hidden)


@wrong(SCORE_PROMPT, "MK-P", "the attention of the window summed instead of averaged")
def window_summed(queries, keys, values, *, chunk_size=4):
    return momentkv.score_prompt(queries, keys, values, chunk_size=chunk_size) * queries.shape[2]


@wrong(SCORE_PROMPT, "MK-P", "the last query alone, as in decoding")
def last_query_alone(queries, keys, values, *, chunk_size=4):
    return momentkv.score_prompt(queries[:, :, -1:], keys, values, chunk_size=chunk_size)


@wrong(SCORE_PROMPT, "MK-P", "the queries of a group averaged before the softmax")
def prompt_of_the_mean_query(queries, keys, values, *, chunk_size=4):
    return prompt_scores(grouped(queries, keys).mean(axis=2), keys, values, chunk_size)


@wrong(SCORE_PROMPT, "MK-P", "the largest attention over group and window instead of the mean")
def largest_attention(queries, keys, values, *, chunk_size=4):
    return prompt_scores(queries, keys, values, chunk_size, reduce=lambda weights: weights.max(axis=(2, 3)))


@wrong(SCORE_PROMPT, "MK-P", "query head h read with the KV head h % H_kv")
def prompt_by_remainder(queries, keys, values, *, chunk_size=4):
    return prompt_scores(queries, keys, values, chunk_size, group=by_remainder)


@wrong(SCORE_PROMPT, "MK-P", "the norm of the value left out (SnapKV's score)")
def prompt_without_values(queries, keys, values, *, chunk_size=4):
    return prompt_scores(queries, keys, np.ones((*values.shape[:3], 1)), chunk_size)


@wrong(SCORE_PROMPT, "MK-P", "the norm of the key in the place of the value's")
def prompt_with_norms_of_keys(queries, keys, values, *, chunk_size=4):
    return momentkv.score_prompt(queries, keys, keys, chunk_size=chunk_size)


@wrong(SCORE_PROMPT, "MK-P", "attention and norm averaged over the chunk apart, then multiplied")
def product_of_chunk_means(queries, keys, values, *, chunk_size=4):
    alpha = prompt_without_values(queries, keys, values, chunk_size=chunk_size)
    return alpha * chunk_means(norms(values), chunk_size)


@wrong(SCORE_PROMPT, "MK-P", "a chunk given the largest score of its tokens instead of the mean")
def largest_of_the_chunk(queries, keys, values, *, chunk_size=4):
    each = each_token(queries, keys, values)
    return spread(np.maximum.reduceat(each, np.arange(0, each.shape[-1], chunk_size), axis=-1), each, chunk_size)


@wrong(SCORE_PROMPT, "MK-P", "a chunk given the sum of its scores instead of the mean")
def sum_of_the_chunk(queries, keys, values, *, chunk_size=4):
    each = each_token(queries, keys, values)
    return chunk_means(each, chunk_size) * np.repeat(sizes_of(each, chunk_size), sizes_of(each, chunk_size))


@wrong(SCORE_PROMPT, "MK-P", "the sum of the last, shorter chunk divided by the full chunk size: an unmasked tail")
def short_chunk_padded(queries, keys, values, *, chunk_size=4):
    return sum_of_the_chunk(queries, keys, values, chunk_size=chunk_size) / chunk_size


@wrong(SCORE_PROMPT, "MK-P", "chunks counted from the end of the prompt: the first one is the shorter")
def chunks_from_the_end(queries, keys, values, *, chunk_size=4):
    return chunk_means(each_token(queries, keys, values)[..., ::-1], chunk_size)[..., ::-1]


@wrong(SCORE_PROMPT, "MK-P", "a sliding mean over neighbours in the place of chunks")
def sliding_mean(queries, keys, values, *, chunk_size=4):
    each = each_token(queries, keys, values)
    padded = np.pad(each, [(0, 0), (0, 0), (chunk_size // 2, chunk_size - 1 - chunk_size // 2)])
    return np.lib.stride_tricks.sliding_window_view(padded, chunk_size, axis=-1).mean(axis=-1)


@wrong(SCORE_PROMPT, "MK-P", "tokens scored one by one unless told otherwise (chunks of 1)")
def no_chunks_by_default(queries, keys, values, *, chunk_size=1):
    return momentkv.score_prompt(queries, keys, values, chunk_size=chunk_size)


@mutant(SCORE_PROMPT, killed_by="MK-P", misconception="a chunk size of 0 taken for 1 in silence")
def empty_chunk_raised(queries, keys, values, *, chunk_size=4):
    return momentkv.score_prompt(queries, keys, values, chunk_size=max(1, chunk_size))


@mutant(SCORE_PROMPT, killed_by="MK-P", misconception="of more queries than tokens the first dropped in silence")
def surplus_queries_dropped(queries, keys, values, *, chunk_size=4):
    return momentkv.score_prompt(queries[:, :, -keys.shape[2] :], keys, values, chunk_size=chunk_size)


def chosen(queries, keys, values, budget, *, sink_size=1, chunk_size=4, window=None, score=momentkv.score_prompt):
    """The right selection of a prompt, with another window protected or another score."""
    position, length = np.arange(keys.shape[2]), keys.shape[2]
    window = queries.shape[2] if window is None else window
    protected = np.broadcast_to((position < sink_size) | (position >= length - window), keys.shape[:3])
    return top_k(score(queries, keys, values, chunk_size=chunk_size), budget, protected)


@wrong(SELECT_PROMPT, "MK-P", "the first token not protected")
def first_token_not_protected(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    return chosen(queries, keys, values, budget, sink_size=0, chunk_size=chunk_size)


@wrong(SELECT_PROMPT, "MK-P", "the observation window not protected")
def window_not_protected(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    return chosen(queries, keys, values, budget, sink_size=sink_size, chunk_size=chunk_size, window=0)


@wrong(SELECT_PROMPT, "MK-P", "one token of the window left unprotected: an off-by-one")
def window_short_by_one(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    return chosen(queries, keys, values, budget, sink_size=sink_size, chunk_size=chunk_size, window=queries.shape[2] - 1)


@wrong(SELECT_PROMPT, "MK-P", "the protected tokens kept on top of the budget")
def protected_on_top(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    settings: dict[str, int] = {"sink_size": sink_size, "chunk_size": chunk_size}
    kept = chosen(queries, keys, values, budget, sink_size=0, chunk_size=chunk_size, window=0)
    return kept | momentkv.select_prompt(queries, keys, values, budget, **settings)


@wrong(SELECT_PROMPT, "MK-P", "every chunk of a chosen token kept whole, beyond the budget")
def chunks_kept_whole(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    kept = momentkv.select_prompt(queries, keys, values, budget, sink_size=sink_size, chunk_size=chunk_size)
    return chunk_means(kept.astype(np.float64), chunk_size) > 0


@wrong(SELECT_PROMPT, "MK-P", "the lowest scores kept")
def lowest_scores_kept(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    def score(*prompt, chunk_size):
        return -momentkv.score_prompt(*prompt, chunk_size=chunk_size)

    return chosen(queries, keys, values, budget, sink_size=sink_size, chunk_size=chunk_size, score=score)


@wrong(SELECT_PROMPT, "MK-P", "tokens chosen one by one, the chunks ignored")
def chunks_ignored(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    return chosen(queries, keys, values, budget, sink_size=sink_size, chunk_size=1)


@wrong(SELECT_PROMPT, "MK-P", "the number of protected first tokens fixed at 1")
def sink_size_ignored(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    return chosen(queries, keys, values, budget, chunk_size=chunk_size)


@wrong(SELECT_PROMPT, "MK-P", "four first tokens protected unless told otherwise, as in StreamingLLM")
def four_sinks_by_default(queries, keys, values, budget, *, sink_size=4, chunk_size=4):
    sinks = min(sink_size, max(1, budget - queries.shape[2]))
    return chosen(queries, keys, values, budget, sink_size=sinks, chunk_size=chunk_size)


@wrong(SELECT_PROMPT, "MK-P", "the choice of the first head used for all heads")
def first_head_chooses(queries, keys, values, budget, *, sink_size=1, chunk_size=4):
    kept = momentkv.select_prompt(queries, keys, values, budget, sink_size=sink_size, chunk_size=chunk_size)
    return np.broadcast_to(kept[:, :1], kept.shape).copy()
