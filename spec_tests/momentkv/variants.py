"""Correct MomentKVs of other kinds."""

from __future__ import annotations

import math

import numpy as np
import torch

from evictionary.reference.momentkv import Moments, Recovered, Step
from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.variants import token_by_token as shared_token_by_token
from evictionary.spec_tests.shared.variants import torch_layer_sort

UPDATE, SCORE, ATTEND, RECOVER = (f"momentkv.{name}" for name in ("update", "score", "attend", "recover"))
STEP, SCORE_PROMPT, SELECT_PROMPT = (f"momentkv.{name}" for name in ("decode_step", "score_prompt", "select_prompt"))
SINGLE, WIDE, HALVES = ("float64", "float32"), ("float64", "float32", "bfloat16"), ("float64", "float32", "float16", "bfloat16")


def refuse(keys, values, moments=None, query=None, **masks) -> None:
    """Raise ValueError naming the argument that does not fit the keys, of NumPy or torch."""
    lead = tuple(keys.shape[:-1])
    if tuple(values.shape[:-1]) != lead:
        raise ValueError(f"values: got shape {tuple(values.shape)}, wanted the tokens of keys, {lead}")
    sizes = (), (keys.shape[-1],), (values.shape[-1],), (values.shape[-1], keys.shape[-1])
    for field, size in zip(moments or (), sizes, strict=True) if moments is not None else ():
        if tuple(field.shape) != (*lead[:2], *size):
            raise ValueError(f"moments: got shape {tuple(field.shape)}, wanted {(*lead[:2], *size)}")
    if moments is not None and bool((moments.count < 0).any()):
        raise ValueError("moments: got a negative count")
    for name, mask in masks.items():
        if tuple(mask.shape) != lead or mask.dtype not in (np.bool_, torch.bool):
            raise ValueError(f"{name}: got {mask.dtype} of shape {tuple(mask.shape)}, wanted booleans of shape {lead}")
    if query is not None and (query.shape[0] != lead[0] or query.shape[-1] != keys.shape[-1] or query.shape[1] % lead[1]):
        raise ValueError(
            f"query: got shape {tuple(query.shape)}, wanted [{lead[0]}, a multiple of {lead[1]}, .., {keys.shape[-1]}]"
        )


def log_sum_exp(logits: np.ndarray, axis: int) -> np.ndarray:
    """-inf where all logits are."""
    top = logits.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = np.exp(logits - top).sum(axis=axis)
    return np.where(total > 0, np.squeeze(top, axis) + np.log(np.where(total > 0, total, 1)), -np.inf)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis; 0 where all logits are -inf."""
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1)


# The moments


@control(UPDATE, dtypes=SINGLE)
def token_by_token(moments, keys, values, evicted):
    """One token after the other from the last to the first, in float64."""
    refuse(keys, values, moments, evicted=evicted)
    count, *sums = (np.array(field, dtype=np.int64 if place == 0 else np.float64) for place, field in enumerate(moments))
    for token in reversed(range(keys.shape[2])):
        for item, head in np.argwhere(evicted[:, :, token]):
            key, value = keys[item, head, token].astype(np.float64), values[item, head, token].astype(np.float64)
            count[item, head] += 1
            for total, term in zip(sums, (key, value, np.outer(value, key)), strict=True):
                total[item, head] += term
    return Moments(count, *sums)


@control(UPDATE, dtypes=SINGLE)
def gathered(moments, keys, values, evicted):
    """The evicted rows of each head gathered, and summed by matrix products, in the dtype of the keys."""
    refuse(keys, values, moments, evicted=evicted)
    count, *sums = (field.copy() for field in moments)
    for item, head in np.ndindex(*keys.shape[:2]):
        rows = np.flatnonzero(evicted[item, head])
        key, value, ones = keys[item, head, rows], values[item, head, rows], np.ones(len(rows), keys.dtype)
        count[item, head] += len(rows)
        for total, term in zip(sums, (ones @ key, ones @ value, value.T @ key), strict=True):
            total[item, head] += term
    return Moments(count, *sums)


@control(UPDATE, dtypes=SINGLE)
def one_matrix(moments, keys, values, evicted):
    """All four sums in one product: [1, v]^T [1, k] over tiles of 16 tokens, the last one padded with masked rows."""
    refuse(keys, values, moments, evicted=evicted)
    mask = evicted[..., None].astype(keys.dtype)
    left, right = (np.concatenate([np.ones_like(mask), states], axis=-1) * mask for states in (values, keys))
    total = np.zeros((*keys.shape[:2], left.shape[-1], right.shape[-1]), keys.dtype)
    for start in range(0, keys.shape[2], 16):
        tile = slice(start, start + 16)
        total += np.einsum("bhti,bhtj->bhij", left[:, :, tile], right[:, :, tile])
    added = np.rint(total[..., 0, 0]).astype(np.int64), total[..., 0, 1:], total[..., 1:, 0], total[..., 1:, 1:]
    return Moments(*(had + more for had, more in zip(moments, added, strict=True)))


@control(UPDATE, array_library="torch", dtypes=HALVES)
def torch_in_float32(moments, keys, values, evicted):
    """torch: masked sums in float32 at least, returned in it."""
    refuse(keys, values, moments, evicted=evicted)
    wide = torch.promote_types(keys.dtype, torch.float32)
    mask = evicted[..., None].to(wide)
    key, value = keys.to(wide) * mask, values.to(wide) * mask
    added = evicted.sum(dim=-1), key.sum(dim=2), value.sum(dim=2), torch.einsum("bhti,bhtj->bhij", value, key)
    fields = [moments.count, *(field.to(wide) for field in moments[1:])]
    return Moments(*(had + more for had, more in zip(fields, added, strict=True)))


@control(RECOVER, dtypes=SINGLE)
def means_first(moments):
    """Stilde = n (S / n - vbar kbar^T)."""
    count = np.maximum(moments.count, 1).astype(moments.key_sum.dtype)[..., None]
    mean_key, mean_value = moments.key_sum / count, moments.value_sum / count
    centred = moments.value_key_sum / count[..., None] - np.einsum("...i,...j->...ij", mean_value, mean_key)
    return Recovered(mean_key, mean_value, centred * count[..., None])


@control(RECOVER, dtypes=SINGLE)
def value_mean_outside(moments):
    """Stilde = S - vbar s_k^T, only the heads that have evicted something computed."""
    some = moments.count > 0
    fields = [np.zeros_like(field) for field in moments[1:]]
    count = moments.count[some].astype(moments.key_sum.dtype)[:, None]
    fields[0][some], fields[1][some] = moments.key_sum[some] / count, moments.value_sum[some] / count
    fields[2][some] = moments.value_key_sum[some] - fields[1][some][:, :, None] * moments.key_sum[some][:, None]
    return Recovered(*fields)


@control(RECOVER, array_library="torch", dtypes=WIDE)
def torch_recover(moments):
    """torch in the dtype of the moments."""
    count = moments.count.clamp(min=1)[..., None].to(moments.key_sum.dtype)
    mean_key, mean_value = moments.key_sum / count, moments.value_sum / count
    return Recovered(mean_key, mean_value, moments.value_key_sum - mean_value[..., :, None] * moments.key_sum[..., None, :])


# The eviction score


@control(SCORE, dtypes=SINGLE)
def tiled(query, keys, values, moments):
    """The softmax over tiles of 16 tokens with a running maximum, a second pass for the scores."""
    refuse(keys, values, moments, query)
    group, root = query.shape[1] // keys.shape[1], math.sqrt(keys.shape[-1])
    _, mean_value, covariance = means_first(moments)
    slope = covariance / (np.maximum(moments.count, 1).astype(keys.dtype) * root)[..., None, None]
    scores = np.zeros(keys.shape[:3], keys.dtype)
    for item, reader in np.ndindex(*query.shape[:2]):
        head = reader // group
        top, total = -np.inf, 0.0
        for start in range(0, keys.shape[2], 16):
            logits = keys[item, head, start : start + 16] @ query[item, reader] / root
            higher = max(top, logits.max())
            total = total * np.exp(top - higher) + np.exp(logits - higher).sum()
            top = higher
        scores[item, head] += np.exp(keys[item, head] @ query[item, reader] / root - top) / total / group
    for item, head in np.ndindex(*keys.shape[:2]):
        left = values[item, head] - mean_value[item, head] - np.einsum("ij,tj->ti", slope[item, head], keys[item, head])
        scores[item, head] *= np.linalg.norm(left, axis=-1)
    return scores


@control(SCORE, dtypes=SINGLE)
def affine_model(query, keys, values, moments):
    """Value, mean value and slope as one product [v, 1, k] W, tokens on the first axis, weights by a log-sum-exp."""
    refuse(keys, values, moments, query)
    batch, heads, _, head_dim = keys.shape
    _, mean_value, covariance = value_mean_outside(moments)
    count = np.maximum(moments.count, 1).astype(keys.dtype)[..., None, None]
    slope = covariance / (count * math.sqrt(head_dim))
    by_token = np.moveaxis(np.concatenate([values, np.ones_like(keys[..., :1]), keys], axis=-1), 2, 0)
    identity = np.broadcast_to(np.eye(values.shape[-1], dtype=keys.dtype), (batch, heads, values.shape[-1], values.shape[-1]))
    model = np.concatenate([identity, -mean_value[..., None], -slope], axis=-1)
    left = np.einsum("tbhc,bhic->tbhi", by_token, model)
    logits = np.einsum("bhgd,bhtd->tbhg", query.reshape(batch, heads, -1, head_dim), keys) / math.sqrt(head_dim)
    alpha = np.exp(logits - log_sum_exp(logits, 0)).mean(axis=-1)
    return np.moveaxis(alpha * np.sqrt(np.einsum("tbhi,tbhi->tbh", left, left)), 0, -1)


@control(SCORE, array_library="torch", dtypes=WIDE)
def torch_eager(query, keys, values, moments):
    """torch in the dtype of its inputs."""
    refuse(keys, values, moments, query)
    batch, heads, _, head_dim = keys.shape
    root = math.sqrt(head_dim)
    _, mean_value, covariance = torch_recover(moments)
    count = moments.count.clamp(min=1)[..., None, None].to(keys.dtype)
    left = values - mean_value[:, :, None] - keys @ (covariance / count / root).mT
    alpha = (query.reshape(batch, heads, -1, head_dim) @ keys.mT / root).softmax(dim=-1).mean(dim=2)
    return alpha * left.norm(dim=-1)


def widened(*states):
    """Tensors, alone or in Moments, in float32 at least."""
    return tuple(
        Moments(*widened(*state))
        if isinstance(state, tuple)
        else (state.to(torch.promote_types(state.dtype, torch.float32)) if state.is_floating_point() else state)
        for state in states
    )


@control(SCORE, array_library="torch", dtypes=HALVES)
def torch_widened(query, keys, values, moments):
    """torch, computing in float32 at least."""
    return torch_eager(*widened(query, keys, values, moments))


# The corrected attention


def estimate(query, moments):
    """fhat_E and log Zhat_E for queries [B, H_kv, G, D], NumPy: the logit and the value of one more token."""
    root = math.sqrt(query.shape[-1])
    mean_key, mean_value, covariance = means_first(moments)
    count = np.maximum(moments.count, 1).astype(query.dtype)[..., None]
    value = mean_value[:, :, None] + np.einsum("bhij,bhgj->bhgi", covariance, query) / (count * root)[..., None]
    logit = np.log(count) + np.einsum("bhgj,bhj->bhg", query, mean_key) / root
    return value, np.where(moments.count[..., None] > 0, logit, -np.inf)


@control(ATTEND, dtypes=SINGLE)
def one_more_token(query, keys, values, kept, moments):
    """The moments as one more token of each query head: its logit log n + sbar, its value fhat_E, one softmax over all."""
    refuse(keys, values, moments, query, kept=kept)
    grouped = query.reshape(*keys.shape[:2], -1, keys.shape[-1])
    value, logit = estimate(grouped, moments)
    logits = np.where(kept[:, :, None], grouped @ np.swapaxes(keys, -1, -2) / math.sqrt(keys.shape[-1]), -np.inf)
    weights = softmax(np.concatenate([logits, logit[..., None]], axis=-1))
    output = weights[..., :-1] @ values + weights[..., -1:] * value
    return output.reshape(*query.shape[:2], -1)


@control(ATTEND, dtypes=SINGLE)
def running_maximum(query, keys, values, kept, moments):
    """Only the kept rows read, in tiles of 16 from the end, with a running maximum, sum and output; the moments come first."""
    refuse(keys, values, moments, query, kept=kept)
    grouped = query.reshape(*keys.shape[:2], -1, keys.shape[-1])
    value, logit = estimate(grouped, moments)
    output = np.zeros((*grouped.shape[:3], values.shape[-1]), keys.dtype)
    for item, head, reader in np.ndindex(*grouped.shape[:3]):
        rows = np.flatnonzero(kept[item, head])[::-1]
        top = logit[item, head, reader]
        total, sums = (1.0, value[item, head, reader]) if np.isfinite(top) else (0.0, 0 * value[item, head, reader])
        for start in range(0, len(rows), 16):
            tile = rows[start : start + 16]
            logits = keys[item, head, tile] @ grouped[item, head, reader] / math.sqrt(keys.shape[-1])
            higher = max(top, logits.max())
            fade, weights = np.exp(top - higher), np.exp(logits - higher)
            total, sums, top = total * fade + weights.sum(), sums * fade + weights @ values[item, head, tile], higher
        output[item, head, reader] = sums / total if total else 0
    return output.reshape(*query.shape[:2], -1)


@control(ATTEND, dtypes=SINGLE)
def split_in_two(query, keys, values, kept, moments):
    """Odd and even tokens attended apart, on a storage padded to 16, and merged with the estimate by their log-sum-exps."""
    refuse(keys, values, moments, query, kept=kept)
    grouped = query.reshape(*keys.shape[:2], -1, keys.shape[-1])
    padding = [(0, 0), (0, 0), (0, -keys.shape[2] % 16)]
    keys, values = (np.pad(states, [*padding, (0, 0)], constant_values=77) for states in (keys, values))
    kept = np.pad(kept, padding)
    parts = [estimate(grouped, moments)]
    for start in (0, 1):
        logits = grouped @ np.swapaxes(keys[:, :, start::2], -1, -2) / math.sqrt(keys.shape[-1])
        logits = np.where(kept[:, :, None, start::2], logits, -np.inf)
        parts.append((softmax(logits) @ values[:, :, start::2], log_sum_exp(logits, -1)))
    outputs, log_totals = (np.stack(part, axis=-1) for part in zip(*parts, strict=True))
    output = (outputs @ softmax(log_totals)[..., None])[..., 0]
    return output.reshape(*query.shape[:2], -1)


@control(ATTEND, array_library="torch", dtypes=("float64",))
def torch_attend(query, keys, values, kept, moments):
    """torch in the dtype of its inputs: the moments as one more token."""
    refuse(keys, values, moments, query, kept=kept)
    batch, heads, _, head_dim = keys.shape
    root = math.sqrt(head_dim)
    mean_key, mean_value, covariance = torch_recover(moments)
    grouped = query.reshape(batch, heads, -1, head_dim)
    count = moments.count.clamp(min=1)[..., None].to(keys.dtype)
    logit = torch.where(moments.count[..., None] > 0, count.log() + (grouped @ mean_key[..., None])[..., 0] / root, -torch.inf)
    value = mean_value[:, :, None] + grouped @ covariance.mT / (count[..., None] * root)
    logits = (grouped @ keys.mT / root).masked_fill(~kept[:, :, None], -torch.inf)
    weights = torch.cat([logits, logit[..., None]], dim=-1).softmax(dim=-1).nan_to_num()
    output = weights[..., :-1] @ values + weights[..., -1:] * value
    return output.reshape(*query.shape[:2], -1)


@control(ATTEND, array_library="torch", dtypes=HALVES[1:])
def torch_attend_widened(query, keys, values, kept, moments):
    """torch, computing in float32 at least and rounding its output to the dtype of the query."""
    return torch_attend(*widened(query, keys, values, kept, moments)).to(query.dtype)


# A decoding step and the prompt


def refuse_step(new_key, new_value, keys, values, budget) -> None:
    for name, new, states in (("new_key", new_key, keys), ("new_value", new_value, values)):
        if tuple(new.shape) != (*states.shape[:2], states.shape[-1]):
            raise ValueError(f"{name}: got shape {tuple(new.shape)}")
    if budget < 1:
        raise ValueError(f"budget: got {budget}, wanted at least 1")


@control(STEP, dtypes=SINGLE)
def flagged_step(query, new_key, new_value, keys, values, moments, budget):
    """Evicted tokens flagged and skipped, the rows compacted once at the end."""
    refuse_step(new_key, new_value, keys, values, budget)
    keys, values = (np.concatenate([old, new[:, :, None]], axis=2) for old, new in ((keys, new_key), (values, new_value)))
    kept = np.ones(keys.shape[:3], dtype=bool)
    rows = np.arange(keys.shape[0])[:, None], np.arange(keys.shape[1])
    for left in range(keys.shape[2], budget, -1):
        places = np.nonzero(kept)[2].reshape(*keys.shape[:2], left)
        scores = affine_model(query, *(np.take_along_axis(states, places[..., None], 2) for states in (keys, values)), moments)
        lowest = left - 1 - scores[..., ::-1].argmin(axis=-1)  # of equal scores the last
        gone = np.zeros_like(kept)
        gone[(*rows, np.take_along_axis(places, lowest[..., None], axis=-1)[..., 0])] = True
        moments, kept = gathered(moments, keys, values, gone), kept & ~gone
    output = running_maximum(query, keys, values, kept, moments)
    order = np.argsort(~kept, axis=-1, kind="stable")[..., : min(budget, keys.shape[2]), None]
    keys, values = (np.take_along_axis(states, order, axis=2) for states in (keys, values))
    return Step(output, keys, values, moments)


@control(STEP, dtypes=SINGLE)
def head_by_head(query, new_key, new_value, keys, values, moments, budget):
    """Each head by itself, its tokens in a list from which rows are deleted."""
    refuse_step(new_key, new_value, keys, values, budget)
    group = query.shape[1] // keys.shape[1]
    left: tuple[list, list] = ([], [])
    outputs, after = np.zeros((*query.shape[:2], values.shape[-1]), keys.dtype), Moments(*(field.copy() for field in moments))
    for item, head in np.ndindex(*keys.shape[:2]):
        own = slice(item, item + 1), slice(head, head + 1)
        readers = slice(item, item + 1), slice(head * group, (head + 1) * group)
        key = np.concatenate([keys[own][0, 0], new_key[own][0]])[None, None]
        value = np.concatenate([values[own][0, 0], new_value[own][0]])[None, None]
        sums = Moments(*(field[own] for field in moments))
        while key.shape[2] > budget:
            scores = tiled(query[readers], key, value, sums)[0, 0]
            gone = np.flatnonzero(scores == scores.min())[-1]
            sums = token_by_token(sums, key, value, (np.arange(key.shape[2]) == gone)[None, None])
            sums = Moments(sums.count, *(field.astype(keys.dtype) for field in sums[1:]))
            key, value = np.delete(key, gone, axis=2), np.delete(value, gone, axis=2)
        outputs[readers] = one_more_token(query[readers], key, value, np.ones(key.shape[:3], dtype=bool), sums)
        for field, own_sum in zip(after, sums, strict=True):
            field[own] = own_sum
        for states, rows in zip(left, (key, value), strict=True):
            states.append(rows[0, 0])
    keys, values = (np.stack(states).reshape(*keys.shape[:2], -1, states[0].shape[-1]) for states in left)
    return Step(outputs, keys, values, after)


@control(STEP, array_library="torch", dtypes=SINGLE)
def torch_step(query, new_key, new_value, keys, values, moments, budget):
    """torch: the place of the lowest score (the last of equals), the rest gathered."""
    refuse_step(new_key, new_value, keys, values, budget)
    keys, values = torch.cat([keys, new_key[:, :, None]], dim=2), torch.cat([values, new_value[:, :, None]], dim=2)
    while keys.shape[2] > budget:
        scores, place = torch_eager(query, keys, values, moments), torch.arange(keys.shape[2])
        lowest = torch.where(scores == scores.amin(dim=-1, keepdim=True), place, -1).amax(dim=-1, keepdim=True)
        moments = torch_in_float32(moments, keys, values, place == lowest)
        order = torch.where(place[:-1] < lowest, place[:-1], place[1:])[..., None]
        keys, values = (states.gather(2, order.expand(-1, -1, -1, states.shape[-1])) for states in (keys, values))
    kept = torch.ones(keys.shape[:3], dtype=torch.bool)
    return Step(torch_attend(query, keys, values, kept, moments), keys, values, moments)


def refuse_prompt(queries, keys, values, chunk_size) -> None:
    refuse(keys, values)
    if queries.shape[2] > keys.shape[2]:
        raise ValueError(f"queries: got {queries.shape[2]}, wanted at most {keys.shape[2]}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, wanted at least 1")


@control(SCORE_PROMPT, dtypes=SINGLE)
def prompt_query_by_query(queries, keys, values, *, chunk_size=4):
    """Each query over the tokens that it sees, the chunks padded and the padding not counted."""
    refuse_prompt(queries, keys, values, chunk_size)
    (batch, heads, length, head_dim), (_, readers, window, _) = keys.shape, queries.shape
    alpha = np.zeros((batch, heads, length), keys.dtype)
    for item, reader, row in np.ndindex(batch, readers, window):
        head, seen = reader // (readers // heads), length - window + row + 1
        logits = keys[item, head, :seen] @ queries[item, reader, row] / math.sqrt(head_dim)
        alpha[item, head, :seen] += np.exp(logits - log_sum_exp(logits, 0))
    each = alpha / (readers // heads * window) * np.linalg.norm(values, axis=-1)
    padded = np.pad(each, [(0, 0), (0, 0), (0, -length % chunk_size)]).reshape(batch, heads, -1, chunk_size)
    sizes = np.minimum(chunk_size, length - chunk_size * np.arange(padded.shape[2]))
    return np.repeat(padded.sum(axis=-1) / sizes.astype(keys.dtype), chunk_size, axis=-1)[..., :length]


@control(SCORE_PROMPT, dtypes=SINGLE)
def prompt_by_products(queries, keys, values, *, chunk_size=4):
    """Chunks averaged by a matrix with 1 / size in it, the causal mask added to the logits."""
    refuse_prompt(queries, keys, values, chunk_size)
    (batch, heads, length, head_dim), window = keys.shape, queries.shape[2]
    grouped = queries.reshape(batch, heads, -1, window, head_dim)
    mask = np.triu(np.full((window, length), -np.inf, keys.dtype), k=length - window + 1)
    logits = np.einsum("bhgwd,bhtd->bhgwt", grouped, keys) / math.sqrt(head_dim) + mask
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    alpha = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=(2, 3)) / (grouped.shape[2] * window)
    chunk = np.arange(length) // chunk_size
    same = (chunk[:, None] == chunk).astype(keys.dtype)
    return (alpha * np.linalg.norm(values, axis=-1)) @ (same / same.sum(axis=0))


@control(SCORE_PROMPT, array_library="torch", dtypes=HALVES)
def torch_prompt(queries, keys, values, *, chunk_size=4):
    """torch, computing in float32 at least."""
    refuse_prompt(queries, keys, values, chunk_size)
    queries, keys, values = widened(queries, keys, values)
    (batch, heads, length, head_dim), window = keys.shape, queries.shape[2]
    grouped = queries.reshape(batch, heads, -1, window, head_dim)
    hidden = torch.ones(window, length, dtype=torch.bool).triu(length - window + 1)
    logits = (grouped @ keys[:, :, None].mT / math.sqrt(head_dim)).masked_fill(hidden, -torch.inf)
    each = logits.softmax(dim=-1).flatten(2, 3).mean(dim=2) * values.norm(dim=-1)
    return torch.cat([part.mean(dim=-1, keepdim=True).expand_as(part) for part in each.split(chunk_size, dim=-1)], dim=-1)


@control(SELECT_PROMPT, dtypes=SINGLE)
def chosen_by_partition(queries, keys, values, budget, *, sink_size=1, chunk_size=4, floor_ratio=None):
    """The protected tokens first, then the best of the rest by repeated argmax."""
    scores = prompt_by_products(queries, keys, values, chunk_size=chunk_size)
    place, length = np.arange(keys.shape[2]), keys.shape[2]
    kept = np.broadcast_to((place < sink_size) | (place >= length - queries.shape[2]), keys.shape[:3]).copy()
    counts = np.full(keys.shape[:2], min(budget, length))
    if floor_ratio is not None:
        mass = prompt_by_products(queries, keys, np.ones_like(keys[..., :1]), chunk_size=chunk_size)
        counts = shared_token_by_token(mass, budget, floor_ratio=floor_ratio, protected=kept).sum(axis=-1)
    for head in np.ndindex(counts.shape):
        while kept[head].sum() < counts[head]:
            kept[head][np.where(kept[head], -np.inf, scores[head]).argmax()] = True
    return kept


@control(SELECT_PROMPT, array_library="torch", dtypes=HALVES)
def torch_chosen(queries, keys, values, budget, *, sink_size=1, chunk_size=4, floor_ratio=None):
    """torch: infinite scores for what is protected, then a stable sort."""
    scores = torch_prompt(queries, keys, values, chunk_size=chunk_size)
    scores[..., :sink_size] = scores[..., keys.shape[2] - queries.shape[2] :] = torch.inf
    if floor_ratio is not None:
        mass = torch_prompt(queries, keys, torch.ones_like(values), chunk_size=chunk_size)
        budget = torch_layer_sort(mass, budget, floor_ratio=floor_ratio, protected=scores.isinf()).sum(dim=-1, keepdim=True)
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < budget
