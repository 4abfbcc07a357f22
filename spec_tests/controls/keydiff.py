"""Correct KeyDiffs of other kinds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from evictionary.reference.keydiff import Cache
from evictionary.spec_tests.harness.planted import control

SCORE, ATTENTION, CACHED = "keydiff.score", "keydiff_theory.causal_attention", "keydiff_theory.cached_attention"
BLOCK, PROMPT, DECODE = "keydiff.process_block", "keydiff.process_prompt", "keydiff.decode"
HALVES = ("float32", "float16", "bfloat16")


def refuse(keys) -> None:
    finite = keys.isfinite().all() if isinstance(keys, torch.Tensor) else np.isfinite(keys).all()
    if keys.ndim < 2 or 0 in keys.shape or not finite:
        raise ValueError(f"keys: got shape {tuple(keys.shape)}, wanted finite numbers [..., T, D]")


@control(SCORE, dtypes=("float64", "float32"))
def tiled(keys):
    """The anchor summed tile by tile, the last tile shorter."""
    refuse(keys)
    norms = np.linalg.norm(keys, axis=-1, keepdims=True)
    units = np.divide(keys, norms, out=np.zeros_like(keys), where=norms > 0)
    total = sum(units[..., start : start + 16, :].sum(axis=-2, keepdims=True) for start in range(0, keys.shape[-2], 16))
    length = np.linalg.norm(total, axis=-1, keepdims=True)
    return -(units * np.divide(total, length, out=np.zeros_like(total), where=length > 0)).sum(axis=-1)


@control(SCORE, dtypes=("float64", "float32"))
def summed_backwards(keys):
    """The anchor summed from the last token to the first, the cosine formed by einsum on a permuted layout."""
    refuse(keys)
    by_token = np.ascontiguousarray(np.moveaxis(keys, -2, 0))
    squares = np.einsum("t...d,t...d->t...", by_token, by_token)
    inverse = np.where(squares > 0, 1 / np.sqrt(np.where(squares > 0, squares, 1)), 0)
    total = np.zeros_like(by_token[0])
    for token, scale in zip(by_token[::-1], inverse[::-1], strict=True):
        total = total + token * scale[..., None]
    size = np.sqrt(np.einsum("...d,...d->...", total, total))
    cosine = np.einsum("t...d,...d->t...", by_token, total) * inverse / np.where(size > 0, size, 1)
    return -np.moveaxis(cosine, 0, -1)


@control(SCORE, array_library="torch", dtypes=("float64", *HALVES))
def torch_in_float32(keys):
    """torch, computing at least in float32 and returning that."""
    refuse(keys)
    wide = keys if keys.dtype == torch.float64 else keys.float()
    units = torch.nn.functional.normalize(wide, dim=-1, eps=1e-30)
    return -(units @ torch.nn.functional.normalize(units.mean(dim=-2), dim=-1, eps=1e-30)[..., None])[..., 0]


@control(SCORE, array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_rounding_each_step(keys):
    """torch in the dtype of the keys throughout, as eager code does it."""
    refuse(keys)
    norms = keys.norm(dim=-1, keepdim=True)
    units = torch.where(norms == 0, 0, keys / torch.where(norms == 0, 1, norms))
    anchor = units.mean(dim=-2, keepdim=True)
    length = anchor.norm(dim=-1, keepdim=True)
    return -(units * torch.where(length == 0, 0, anchor / torch.where(length == 0, 1, length))).sum(dim=-1)


@control(SCORE, array_library="torch", dtypes=("float64", *HALVES))
def torch_padded_and_permuted(keys):
    """Tokens before heads, filled up to whole tiles of 16 with rubbish that is masked, sums in float32 or wider."""
    refuse(keys)
    length = keys.shape[-2]
    wide = (keys if keys.dtype == torch.float64 else keys.float()).movedim(-2, 0)
    padded = torch.cat([wide, torch.full((-length % 16, *wide.shape[1:]), 1e3, dtype=wide.dtype)])
    real = (torch.arange(len(padded)) < length).view(-1, *[1] * (wide.ndim - 1))
    norms = padded.norm(dim=-1, keepdim=True)
    units = torch.where(norms > 0, padded / norms.clamp(min=1e-30), 0)
    tiles = torch.where(real, units, 0).unflatten(0, (-1, 16)).sum(dim=1)
    total = tiles.sum(dim=0)
    length_of_total = total.norm(dim=-1, keepdim=True)
    scores = (units * torch.where(length_of_total > 0, total / length_of_total.clamp(min=1e-30), 0)).sum(dim=-1)
    return -scores[:length].movedim(0, -1)


@control("keydiff.pairwise_score", dtypes=("float64", "float32"))
def pairwise_by_the_total(keys):
    """Minus the dot product with the sum of all unit keys: the rows of S without S."""
    refuse(keys)
    norms = np.linalg.norm(keys, axis=-1, keepdims=True)
    units = np.divide(keys, norms, out=np.zeros_like(keys), where=norms > 0)
    return -np.einsum("...td,...d->...t", units, units[..., ::-1, :].sum(axis=-2))


@control("keydiff.similarity_matrix", array_library="torch", dtypes=("float64", *HALVES))
def torch_cosine_similarity(keys):
    """torch, widened; every pair by itself."""
    refuse(keys)
    wide = keys if keys.dtype == torch.float64 else keys.float()
    units = torch.nn.functional.normalize(wide, dim=-1, eps=1e-30)
    return (units[..., :, None, :] * units[..., None, :, :]).sum(dim=-1)


@control(ATTENTION, array_library="torch", dtypes=("float64", "float32"))
def torch_library_attention(queries, keys, values):
    """torch's own causal attention."""
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


@control(ATTENTION, array_library="torch", dtypes=("float16", "bfloat16"))
def torch_widened_attention(queries, keys, values):
    """The logits and weights in float32, the output rounded."""
    logits = queries.float() @ keys.float().mT * queries.shape[-1] ** -0.5
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return (logits.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values.float()).to(values.dtype)


@control(ATTENTION, dtypes=("float64", "float32"))
def one_key_at_a_time(queries, keys, values):
    """Online softmax: a running maximum, a running sum and a running output for each query."""
    num_queries, length = queries.shape[-2], keys.shape[-2]
    output = np.zeros((*queries.shape[:-1], values.shape[-1]), queries.dtype)
    top, total = np.full(queries.shape[:-1], -np.inf, queries.dtype), np.zeros(queries.shape[:-1], queries.dtype)
    for place in range(length):
        seeing = (..., slice(max(0, place - length + num_queries), None))
        logit = (queries[(*seeing, slice(None))] * keys[..., place : place + 1, :]).sum(-1) / np.sqrt(
            queries.dtype.type(keys.shape[-1])
        )
        higher = np.maximum(top[seeing], logit)
        old, new = np.exp(top[seeing] - higher), np.exp(logit - higher)
        output[(*seeing, slice(None))] *= old[..., None]
        output[(*seeing, slice(None))] += new[..., None] * values[..., place : place + 1, :]
        top[seeing], total[seeing] = higher, total[seeing] * old + new
    return output / total[..., None]


def part(queries, keys, values, hidden):
    """The output over some keys and its log-sum-exp."""
    logits = np.where(hidden, -np.inf, queries @ np.swapaxes(keys, -1, -2) * queries.dtype.type(queries.shape[-1] ** -0.5))
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total @ values, top + np.log(total)


@control(CACHED, dtypes=("float64", "float32"))
def merged_by_log_sum_exp(queries, keys, values, cache):
    """Cache and block attended to apart, and merged as split kernels do it."""
    old, old_size = part(queries, cache.keys, cache.values, False)
    new, new_size = part(queries, keys, values, ~np.tri(queries.shape[-2], dtype=bool))
    share = 1 / (1 + np.exp(np.clip(new_size - old_size, -80, 80)))
    return share * old + (1 - share) * new


@control("keydiff.append")
def written_into_a_buffer(cache, keys, values):
    """A buffer of the final size, filled from both ends."""
    old = 0 if cache is None else cache.keys.shape[-2]
    seen = 0 if cache is None else cache.seen
    new = keys.shape[-2]
    buffers = [np.full((*states.shape[:-2], old + new, states.shape[-1]), np.nan) for states in (keys, values)]
    positions = np.zeros((*keys.shape[:-2], old + new), dtype=int)
    for buffer, states in zip(buffers, (keys, values), strict=True):
        buffer[..., old:, :] = states
    positions[..., old:] = range(seen, seen + new)
    if cache is not None:
        buffers[0][..., :old, :], buffers[1][..., :old, :], positions[..., :old] = cache.keys, cache.values, cache.positions
    return Cache(buffers[0], buffers[1], positions, seen + new)


@control("keydiff.evict")
def head_by_head(cache, kept):
    if kept.dtype != bool or kept.shape != cache.keys.shape[:-1] or np.ptp(kept.sum(axis=-1)):
        raise ValueError(f"kept: got {kept.dtype} of shape {kept.shape}, wanted equally many tokens of each head")
    rows = [np.flatnonzero(kept[index]) for index in np.ndindex(kept.shape[:-1])]
    order = np.array(rows).reshape(*kept.shape[:-1], -1)
    keys, values = (np.take_along_axis(entry, order[..., None], axis=-2) for entry in (cache.keys, cache.values))
    return Cache(keys, values, np.take_along_axis(cache.positions, order, axis=-1), cache.seen)


@control("keydiff_theory.attention_policy", array_library="torch", dtypes=("float64", *HALVES))
def torch_policy(weights, budget, *, aggregate):
    order = aggregate(weights).argsort(dim=-1, descending=True, stable=True)
    return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order[..., :budget], True)


def refuse_block(keys, values, **sizes) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, wanted at least 1")
    if tuple(values.shape[:-1]) != tuple(keys.shape[:-1]):
        raise ValueError(f"values: got shape {tuple(values.shape)}, wanted the tokens of keys")


@control(BLOCK, dtypes=("float64", "float32"))
def worst_token_sorted_out(cache, keys, values, *, budget, scorer=None):
    """The order by a stable sort of minus the scores of another implementation, the kept places sorted again."""
    refuse_block(keys, values, budget=budget)
    if cache is not None and cache.keys.shape[:-2] != keys.shape[:-2]:
        raise ValueError(f"keys: got shape {keys.shape}, wanted the heads of the cache")
    joined = written_into_a_buffer(cache, keys, values)
    states = [entry.astype(keys.dtype) for entry in (joined.keys, joined.values)]
    places = np.sort(np.argsort(-summed_backwards(states[0]), axis=-1, kind="stable")[..., :budget], axis=-1)
    held_keys, held_values = (np.take_along_axis(entry, places[..., None], axis=-2) for entry in states)
    return Cache(held_keys, held_values, np.take_along_axis(joined.positions, places, axis=-1), joined.seen)


@control(PROMPT, dtypes=("float64", "float32"))
def places_of_the_prompt(keys, values, *, budget, block_size, scorer=None):
    """Only the places of the prompt are carried from block to block; the numbers are gathered once, at the end."""
    refuse_block(keys, values, budget=budget, block_size=block_size)
    length = keys.shape[-2]
    places = np.zeros((*keys.shape[:-2], 0), dtype=int)
    for start in range(0, length, block_size):
        block = np.broadcast_to(
            np.arange(start, min(start + block_size, length)), (*keys.shape[:-2], min(block_size, length - start))
        )
        places = np.concatenate([places, block], axis=-1)
        scores = tiled(np.take_along_axis(keys, places[..., None], axis=-2))
        best = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :budget], axis=-1)
        places = np.take_along_axis(places, best, axis=-1)
    held_keys, held_values = (np.take_along_axis(entry, places[..., None], axis=-2) for entry in (keys, values))
    return Cache(held_keys, held_values, places, length)


@control(PROMPT, array_library="torch", dtypes=("float64", *HALVES))
def torch_prompt(keys, values, *, budget, block_size, scorer=None):
    """torch, scored in float32 or wider; a token is kept if fewer than `budget` come before it."""
    refuse_block(keys, values, budget=budget, block_size=block_size)
    held_keys, held_values = keys[..., :0, :], values[..., :0, :]
    positions: Any = torch.zeros((*keys.shape[:-2], 0), dtype=torch.long)
    for start in range(0, keys.shape[-2], block_size):
        stop = min(start + block_size, keys.shape[-2])
        held_keys = torch.cat([held_keys, keys[..., start:stop, :]], dim=-2)
        held_values = torch.cat([held_values, values[..., start:stop, :]], dim=-2)
        positions = torch.cat([positions, torch.arange(start, stop).expand(*keys.shape[:-2], -1)], dim=-1)
        rank = torch_in_float32(held_keys).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        kept = rank < budget
        held_keys, held_values = (states[kept].view(*keys.shape[:-2], -1, states.shape[-1]) for states in (held_keys, held_values))
        positions = positions[kept].view(*keys.shape[:-2], -1)
    return Cache(held_keys, held_values, positions, keys.shape[-2])


@control(DECODE, dtypes=("float64", "float32"))
def worst_place_deleted(cache, key, value, *, budget, scorer=None):
    """The last of the lowest scores leaves, one token at a time."""
    joined = written_into_a_buffer(cache, key[..., None, :], value[..., None, :])
    held = [joined.keys.astype(key.dtype), joined.values.astype(key.dtype), joined.positions]
    while held[2].shape[-1] > budget:
        scores = tiled(held[0])
        worst = scores.shape[-1] - 1 - scores[..., ::-1].argmin(axis=-1)
        left = np.arange(scores.shape[-1]) != worst[..., None]
        held = [entry[left].reshape(*left.shape[:-1], left.shape[-1] - 1, *entry.shape[left.ndim :]) for entry in held]
    return Cache(held[0], held[1], held[2], joined.seen)


@control("keydiff_variants.median_score", array_library="torch", dtypes=("float64", *HALVES))
def torch_middle_of_the_sorted(keys):
    """The mean of the two in the middle of a sort, which are one where the number is odd."""
    refuse(keys)
    wide = keys if keys.dtype == torch.float64 else keys.float()
    ordered, length = wide.sort(dim=-2).values, keys.shape[-2]
    median = (ordered[..., (length - 1) // 2, :] + ordered[..., length // 2, :]) / 2
    units = torch.nn.functional.normalize(wide, dim=-1, eps=1e-30)
    return -(units @ torch.nn.functional.normalize(median, dim=-1, eps=1e-30)[..., None])[..., 0]


@control("keydiff_variants.raw_mean_score", dtypes=("float64", "float32"))
def raw_total(keys):
    """The sum for the mean: a cosine does not see the difference."""
    refuse(keys)
    total = np.einsum("...td->...d", keys)
    norms, size = np.linalg.norm(keys, axis=-1), np.linalg.norm(total, axis=-1)[..., None]
    products = norms * size
    return -np.divide(np.einsum("...td,...d->...t", keys, total), products, out=np.zeros_like(products), where=products > 0)


@control("keydiff_variants.dot_product_score", dtypes=("float64", "float32"))
def mean_of_the_products(keys):
    """Dot products with every key, and then their mean."""
    refuse(keys)
    return -np.einsum("...td,...sd->...ts", keys, keys).mean(axis=-1)


@control("keydiff_variants.euclidean_score", array_library="torch", dtypes=("float64", *HALVES))
def torch_distance(keys):
    refuse(keys)
    wide = keys if keys.dtype == torch.float64 else keys.float()
    return torch.linalg.vector_norm(wide - wide.mean(dim=-2, keepdim=True), dim=-1)


@control("keydiff_variants.select_with_recent", dtypes=("float64", "float32"))
def recent_lifted(keys, *, budget, recent_ratio):
    """The recent tokens lifted above all scores, then one sort."""
    refuse(keys)
    ratio = Fraction(str(recent_ratio))
    for name, value, good in (("budget", budget, budget >= 1), ("recent_ratio", recent_ratio, 0 <= ratio <= 1)):
        if not good:
            raise ValueError(f"{name}: got {value}")
    length = keys.shape[-2]
    latest = np.arange(length) >= length - math.floor(ratio * min(budget, length))
    order = np.argsort(np.where(latest, -2, -tiled(keys)), axis=-1, kind="stable")
    kept = np.zeros(keys.shape[:-1], dtype=bool)
    np.put_along_axis(kept, order[..., :budget], True, axis=-1)
    return kept


@control("keydiff_theory.squared_cosines", dtypes=("float64", "float32"))
def squares_divided_last(vector, basis):
    """Squared coordinates over the squared norm."""
    squares = np.einsum("...nd,...d->...n", basis, vector) ** 2
    size = (vector * vector).sum(axis=-1, keepdims=True) * (basis * basis).sum(axis=-1)
    return np.divide(squares, size, out=np.zeros_like(squares), where=size > 0)


@control("keydiff_theory.alignment_bound")
def one_logarithm(count, weight, largest_norm):
    for name, value, good in (
        ("count", count, count >= 1),
        ("weight", weight, 0 < weight < 1),
        ("largest_norm", largest_norm, largest_norm > 0),
    ):
        if not good:
            raise ValueError(f"{name}: got {value}")
    return (math.log(count * weight) - math.log1p(-weight) - largest_norm) / largest_norm
