"""Correct MomentKVs, and correct equations of its paper, of other kinds."""

from typing import Any

from evictionary.reference.momentkv import Moments, Recovered, Step
from evictionary.reference.momentkv_theory import Expansion
from evictionary.spec_tests.momentkv import forms
from evictionary.spec_tests.shared.forms import (
    softmax_by_log_sum_exp,
    softmax_online,
    top_by_repeated_argmax,
)
from evictionary.spec_tests.shared.variants import *
from evictionary.spec_tests.shared.variants import (
    softmax,
    token_by_token as shared_token_by_token,
    torch_layer_sort,
)

UPDATE, SCORE, ATTEND, RECOVER = (f"momentkv.{name}" for name in ("update", "score", "attend", "recover"))
STEP, SCORE_PROMPT, SELECT_PROMPT = (
    f"momentkv.{name}" for name in ("decode_step", "score_prompt", "select_prompt")
)
WIDE = (*NUMPY, "bfloat16")


# The moments

control(UPDATE, dtypes=NUMPY, name="token_by_token")(forms.update_token_by_token)
control(RECOVER, dtypes=NUMPY, name="means_first")(forms.means_by_divide)


@control(UPDATE, dtypes=NUMPY)
def one_matrix(moments, keys, values, evicted):
    """All four sums in one product: [1, v]^T [1, k] over
    tiles of 16 tokens, the last one padded with masked rows.
    """
    mask = evicted[..., None].astype(keys.dtype)
    left, right = (np.concatenate([np.ones_like(mask), states], axis=-1) * mask for states in (values, keys))
    total = np.zeros((*keys.shape[:2], left.shape[-1], right.shape[-1]), keys.dtype)
    for start in range(0, keys.shape[2], 16):
        tile = slice(start, start + 16)
        total += np.einsum("bhti,bhtj->bhij", left[:, :, tile], right[:, :, tile])
    added = (
        np.rint(total[..., 0, 0]).astype(np.int64),
        total[..., 0, 1:],
        total[..., 1:, 0],
        total[..., 1:, 1:],
    )
    return Moments(*(had + more for had, more in zip(moments, added, strict=True)))


@control(UPDATE, array_library="torch", dtypes=ALL)
@in_float32
def torch_in_float32(moments, keys, values, evicted):
    key, value = keys * evicted[..., None], values * evicted[..., None]
    added = evicted.sum(dim=-1), key.sum(dim=2), value.sum(dim=2), torch.einsum("bhti,bhtj->bhij", value, key)
    return Moments(*(had + more for had, more in zip(moments, added, strict=True)))


@control(RECOVER, array_library="torch", dtypes=WIDE)
def torch_recover(moments):
    count = moments.count.clamp(min=1)[..., None].to(moments.key_sum.dtype)
    mean_key, mean_value = moments.key_sum / count, moments.value_sum / count
    return Recovered(
        mean_key, mean_value, moments.value_key_sum - mean_value[..., :, None] * moments.key_sum[..., None, :]
    )


# The eviction score


tiled = control(SCORE, dtypes=NUMPY, name="tiled")(
    put_together(
        forms, "score", score=forms.score_by_einsum, softmax=softmax_online, means=forms.means_by_divide
    )
)


@control(SCORE, dtypes=NUMPY)
def affine_model(query, keys, values, moments):
    """Value, mean value and slope as one product [v, 1, k]
    W, tokens on the first axis, weights by a log-sum-exp.
    """
    batch, heads, _, head_dim = keys.shape
    _, mean_value, covariance = forms.means_by_maximum(moments)
    slope = covariance / (np.maximum(moments.count, 1)[..., None, None] * math.sqrt(head_dim))
    by_token = np.moveaxis(np.concatenate([values, np.ones_like(keys[..., :1]), keys], axis=-1), 2, 0)
    identity = np.broadcast_to(
        np.eye(values.shape[-1], dtype=keys.dtype), (batch, heads, values.shape[-1], values.shape[-1])
    )
    left = np.einsum(
        "tbhc,bhic->bhti", by_token, np.concatenate([identity, -mean_value[..., None], -slope], axis=-1)
    )
    logits = np.einsum("bhgd,bhtd->bhgt", query.reshape(batch, heads, -1, head_dim), keys) / math.sqrt(
        head_dim
    )
    return softmax_by_log_sum_exp(logits).mean(axis=2) * np.sqrt(np.einsum("bhti,bhti->bht", left, left))


@control(SCORE, array_library="torch", dtypes=WIDE)
def torch_eager(query, keys, values, moments):
    batch, heads, _, head_dim = keys.shape
    root = math.sqrt(head_dim)
    _, mean_value, covariance = torch_recover(moments)
    count = moments.count.clamp(min=1)[..., None, None].to(keys.dtype)
    left = values - mean_value[:, :, None] - keys @ (covariance / count / root).mT
    alpha = (query.reshape(batch, heads, -1, head_dim) @ keys.mT / root).softmax(dim=-1).mean(dim=2)
    return alpha * left.norm(dim=-1)


control(SCORE, array_library="torch", dtypes=ALL, name="torch_widened")(in_float32(torch_eager))


# The corrected attention


def estimate(query, keys, moments):
    """The queries [B, H_kv, G, D] of each KV head, NumPy, and for each fhat_E and log Zhat_E: the value and
    the logit of one more token.
    """
    root, query = math.sqrt(query.shape[-1]), query.reshape(*keys.shape[:2], -1, query.shape[-1])
    mean_key, mean_value, covariance = forms.means_by_divide(moments)
    count = np.maximum(moments.count, 1)[..., None]
    value = (
        mean_value[:, :, None] + np.einsum("bhij,bhgj->bhgi", covariance, query) / (count * root)[..., None]
    )
    logit = np.log(count) + np.einsum("bhgj,bhj->bhg", query, mean_key) / root
    return query, value, np.where(moments.count[..., None] > 0, logit, -np.inf)


@control(ATTEND, dtypes=NUMPY)
def running_maximum(query, keys, values, kept, moments):
    """Only the kept rows read, from the end, with a running
    maximum, sum and output, and merged with the estimate.
    """
    grouped, value, logit = estimate(query, keys, moments)
    output = np.zeros((*grouped.shape[:3], values.shape[-1]), keys.dtype)
    for head in np.ndindex(keys.shape[:2]):
        rows = np.flatnonzero(kept[head])[::-1]
        output[head] = merged(
            (value[head], logit[head]), online(grouped[head], keys[head][rows], values[head][rows])
        )
    return output.reshape(*query.shape[:2], -1)


@control(ATTEND, dtypes=NUMPY)
def split_in_two(query, keys, values, kept, moments):
    """Odd and even tokens attended apart, on a storage padded
    to 16, and merged with the estimate by their log-sum-exps.
    """
    grouped, *evicted = estimate(query, keys, moments)
    padding = [(0, 0), (0, 0), (0, -keys.shape[2] % 16)]
    keys, values = (np.pad(states, [*padding, (0, 0)], constant_values=77) for states in (keys, values))
    kept = np.pad(kept, padding)
    parts = [evicted]
    for start in (0, 1):
        logits = grouped @ np.swapaxes(keys[:, :, start::2], -1, -2) / math.sqrt(keys.shape[-1])
        logits = np.where(kept[:, :, None, start::2], logits, -np.inf)
        parts.append((softmax(logits) @ values[:, :, start::2], np.logaddexp.reduce(logits, axis=-1)))
    return merged(*parts).reshape(*query.shape[:2], -1)


def torch_attend(query, keys, values, kept, moments):
    """torch in the dtype of its inputs: the moments as one more token."""
    batch, heads, _, head_dim = keys.shape
    root = math.sqrt(head_dim)
    mean_key, mean_value, covariance = torch_recover(moments)
    grouped = query.reshape(batch, heads, -1, head_dim)
    count = moments.count.clamp(min=1)[..., None].to(keys.dtype)
    logit = torch.where(
        moments.count[..., None] > 0, count.log() + (grouped @ mean_key[..., None])[..., 0] / root, -torch.inf
    )
    value = mean_value[:, :, None] + grouped @ covariance.mT / (count[..., None] * root)
    logits = (grouped @ keys.mT / root).masked_fill(~kept[:, :, None], -torch.inf)
    weights = torch.cat([logits, logit[..., None]], dim=-1).softmax(dim=-1).nan_to_num()
    return (weights[..., :-1] @ values + weights[..., -1:] * value).reshape(*query.shape[:2], -1)


control(ATTEND, array_library="torch", dtypes=ALL, name="torch_attend_widened")(through_float32(torch_attend))


# A decoding step and the prompt


@control(STEP, dtypes=NUMPY)
def flagged_step(query, new_key, new_value, keys, values, moments, budget):
    """Evicted tokens flagged and skipped, the rows compacted once at the end."""
    keys, values = (
        np.concatenate([old, new[:, :, None]], axis=2) for old, new in ((keys, new_key), (values, new_value))
    )
    kept = np.ones(keys.shape[:3], dtype=bool)
    rows = np.arange(keys.shape[0])[:, None], np.arange(keys.shape[1])
    for left in range(keys.shape[2], budget, -1):
        places = np.nonzero(kept)[2].reshape(*keys.shape[:2], left)
        scores = affine_model(
            query, *(np.take_along_axis(states, places[..., None], 2) for states in (keys, values)), moments
        )
        lowest = left - 1 - scores[..., ::-1].argmin(axis=-1)  # of equal scores the last
        gone = np.zeros_like(kept)
        gone[(*rows, np.take_along_axis(places, lowest[..., None], axis=-1)[..., 0])] = True
        moments, kept = forms.update_head_by_head(moments, keys, values, gone), kept & ~gone
    output = running_maximum(query, keys, values, kept, moments)
    order = np.argsort(~kept, axis=-1, kind="stable")[..., : min(budget, keys.shape[2]), None]
    keys, values = (np.take_along_axis(states, order, axis=2) for states in (keys, values))
    return Step(output, keys, values, moments)


@control(STEP, array_library="torch", dtypes=NUMPY)
def torch_step(query, new_key, new_value, keys, values, moments, budget):
    """torch: the place of the lowest score (the last of equals), the rest gathered."""
    keys, values = (
        torch.cat([keys, new_key[:, :, None]], dim=2),
        torch.cat([values, new_value[:, :, None]], dim=2),
    )
    while keys.shape[2] > budget:
        scores, place = torch_eager(query, keys, values, moments), torch.arange(keys.shape[2])
        lowest = torch.where(scores == scores.amin(dim=-1, keepdim=True), place, -1).amax(
            dim=-1, keepdim=True
        )
        moments = torch_in_float32(moments, keys, values, place == lowest)
        order = torch.where(place[:-1] < lowest, place[:-1], place[1:])[..., None]
        keys, values = (
            states.gather(2, order.expand(-1, -1, -1, states.shape[-1])) for states in (keys, values)
        )
    kept = torch.ones(keys.shape[:3], dtype=torch.bool)
    return Step(torch_attend(query, keys, values, kept, moments), keys, values, moments)


@control(SCORE_PROMPT, dtypes=NUMPY)
def prompt_query_by_query(queries, keys, values, *, chunk_size=4):
    """Each query over the tokens that it sees, the chunks padded and the padding not counted."""
    length = keys.shape[2]
    each = streamed(queries, keys).reshape(*keys.shape[:2], -1, length).mean(axis=2) * np.linalg.norm(
        values, axis=-1
    )
    padded = np.pad(each, [(0, 0), (0, 0), (0, -length % chunk_size)]).reshape(
        *keys.shape[:2], -1, chunk_size
    )
    sizes = np.minimum(chunk_size, length - chunk_size * np.arange(padded.shape[2]))
    return np.repeat(padded.sum(axis=-1) / sizes.astype(keys.dtype), chunk_size, axis=-1)[..., :length]


@control(SCORE_PROMPT, array_library="torch", dtypes=ALL)
@in_float32
def torch_prompt(queries, keys, values, *, chunk_size=4):
    alpha = torch_weights(queries, keys).unflatten(1, (keys.shape[1], -1)).mean(dim=(2, 3))
    parts = (alpha * values.norm(dim=-1)).split(chunk_size, dim=-1)
    return torch.cat([part.mean(dim=-1, keepdim=True).expand_as(part) for part in parts], dim=-1)


@control(SELECT_PROMPT, dtypes=NUMPY)
def chosen_by_partition(queries, keys, values, budget, *, sink_size=1, chunk_size=4, floor_ratio=None):
    """The protected tokens first, then the best of the rest by repeated argmax."""
    scores = prompt_query_by_query(queries, keys, values, chunk_size=chunk_size)
    place, length = np.arange(keys.shape[2]), keys.shape[2]
    kept = np.broadcast_to((place < sink_size) | (place >= length - queries.shape[2]), keys.shape[:3]).copy()
    counts = np.full(keys.shape[:2], min(budget, length))
    if floor_ratio is not None:
        mass = prompt_query_by_query(queries, keys, np.ones_like(keys[..., :1]), chunk_size=chunk_size)
        counts = shared_token_by_token(mass, budget, floor_ratio=floor_ratio, protected=kept).sum(axis=-1)
    for head in np.ndindex(counts.shape):
        kept[head] = top_by_repeated_argmax(np.where(kept[head], np.inf, scores[head]), counts[head])
    return kept


@control(SELECT_PROMPT, array_library="torch", dtypes=ALL)
def torch_chosen(queries, keys, values, budget, *, sink_size=1, chunk_size=4, floor_ratio=None):
    """torch: infinite scores for what is protected, then a stable sort."""
    scores = torch_prompt(queries, keys, values, chunk_size=chunk_size)
    scores[..., :sink_size] = scores[..., keys.shape[2] - queries.shape[2] :] = torch.inf
    if floor_ratio is not None:
        mass = torch_prompt(queries, keys, torch.ones_like(values), chunk_size=chunk_size)
        budget = torch_layer_sort(mass, budget, floor_ratio=floor_ratio, protected=scores.isinf()).sum(
            dim=-1, keepdim=True
        )
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < budget


# The equations of the paper


def logits_of(query, keys):
    return (keys @ query[..., None])[..., 0] / math.sqrt(query.shape[-1])


@control("momentkv_theory.full_output", dtypes=NUMPY, name="streamed")
def token_after_token(query, keys, values):
    return online(query[..., None, :], keys, values)[0][..., 0, :]


@control("momentkv_theory.full_output", array_library="torch", dtypes=ALL)
@in_float32
def fused_attention(query, keys, values):
    return torch.nn.functional.scaled_dot_product_attention(query[..., None, :], keys, values)[..., 0, :]


@control("momentkv_theory.sub_outputs", dtypes=NUMPY)
def exponentials_once(query, keys, values, kept):
    """The exponentials taken once, about the largest of each set, and summed by a matrix of two masks."""
    logits = logits_of(query, keys)
    masks = np.stack([kept, ~kept], axis=-2)
    top = np.where(masks, logits[..., None, :], -np.inf).max(axis=-1, keepdims=True)
    weights = np.exp(np.where(masks, logits[..., None, :] - top, -np.inf))
    output = weights @ values / weights.sum(axis=-1, keepdims=True)
    return output[..., 0, :], output[..., 1, :]


@control("momentkv_theory.sub_outputs", array_library="torch", dtypes=ALL)
@in_float32
def torch_sub_outputs(query, keys, values, kept):
    logits = logits_of(query, keys)
    parts = [logits.masked_fill(~mask, -torch.inf).softmax(dim=-1) for mask in (kept, ~kept)]
    return tuple((weights[..., None, :] @ values)[..., 0, :] for weights in parts)


@control("momentkv_theory.mass", dtypes=NUMPY)
def logistic(query, keys, kept):
    """w_R = 1 / (1 + exp(log Z_E - log Z_R))."""
    logits = logits_of(query, keys)
    evicted, retained = (
        np.logaddexp.reduce(np.where(mask, logits, -np.inf), axis=-1) for mask in (~kept, kept)
    )
    difference = evicted - retained
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(difference)), 1 / (1 + np.exp(-difference))


@control("momentkv_theory.centred_logits", dtypes=NUMPY)
def mean_logit_subtracted(query, keys):
    """s_i - sbar instead of q . (k_i - kbar) / sqrt(d)."""
    logits = logits_of(query, keys)
    return logits - logits.mean(axis=-1, keepdims=True)


# Centring does not change the softmax over the evicted tokens.
control("momentkv_theory.centred_output", dtypes=NUMPY, name="not_centred_at_all")(token_after_token)


@control("momentkv_theory.expansion", array_library="torch", dtypes=NUMPY)
def torch_expansion(query, keys, values):
    delta = logits_of(query, keys - keys.mean(dim=-2, keepdim=True))
    rest = delta.expm1() - delta
    ones = torch.ones_like(delta)
    numerator, mean_part, linear_part, remainder = (
        torch.einsum("...t,...td->...d", weight, values) for weight in (delta.exp(), ones, delta, rest)
    )
    largest = delta.abs().amax(dim=-1), values.norm(dim=-1).amax(dim=-1)
    fields: Any = (
        *largest,
        delta.exp().sum(dim=-1),
        rest.sum(dim=-1),
        numerator,
        mean_part,
        linear_part,
        remainder,
    )
    return Expansion(keys.shape[-2], *fields)


@control("momentkv_theory.log_partition", array_library="torch", dtypes=ALL)
@in_float32
def torch_log_partition(query, keys):
    """The bound from the mean key."""
    mean_logit = (query * keys.mean(dim=-2)).sum(dim=-1) / math.sqrt(query.shape[-1])
    return logits_of(query, keys).logsumexp(dim=-1), math.log(keys.shape[-2]) + mean_logit


@control("momentkv_theory.logit_variance", dtypes=NUMPY)
def mean_square_of_centred_logits(query, keys):
    """(1/n) sum delta^2."""
    delta = np.einsum("...td,...d->...t", keys - keys.mean(axis=-2, keepdims=True), query)
    return (delta * delta).mean(axis=-1) / query.shape[-1]
