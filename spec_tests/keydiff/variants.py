"""Correct KeyDiffs of other kinds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from evictionary.reference.keydiff import Cache
from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared import variants_attention as attention
from evictionary.spec_tests.shared.refusal import refuse_unless

SCORE, ATTENTION, CACHED = "keydiff.score", "keydiff_theory.causal_attention", "keydiff_theory.cached_attention"
BLOCK, PROMPT, DECODE = "keydiff.process_block", "keydiff.process_prompt", "keydiff.decode"
HALVES = ("float32", "float16", "bfloat16")


def refuse(keys) -> None:
    refuse_unless(keys=keys.ndim >= 2 and 0 not in keys.shape and (abs(keys) < math.inf).all())


def units(states):
    """NumPy, in the dtype of the states; a zero vector has no direction."""
    norms = np.linalg.norm(states, axis=-1, keepdims=True)
    return np.divide(states, norms, out=np.zeros_like(states), where=norms > 0)


def torch_units(states):
    """torch, at least in float32."""
    wide = torch.promote_types(states.dtype, torch.float32)
    return torch.nn.functional.normalize(states.to(wide), dim=-1, eps=1e-30)


@control(SCORE, dtypes=("float64", "float32"))
def tiled(keys):
    """The anchor summed tile by tile, the last tile shorter."""
    refuse(keys)
    directions = units(keys)
    total = sum(directions[..., start : start + 16, :].sum(axis=-2, keepdims=True) for start in range(0, keys.shape[-2], 16))
    return -(directions * units(total)).sum(axis=-1)


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
    directions = torch_units(keys)
    return -(directions @ torch_units(directions.mean(dim=-2))[..., None])[..., 0]


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
    by_token = keys.movedim(-2, 0)
    padded = torch.cat([by_token, torch.full((-length % 16, *by_token.shape[1:]), 1e3, dtype=keys.dtype)])
    real = (torch.arange(len(padded)) < length).view(-1, *[1] * (keys.ndim - 1))
    directions = torch_units(padded)
    tiles = torch.where(real, directions, 0).unflatten(0, (-1, 16)).sum(dim=1)
    return -(directions * torch_units(tiles.sum(dim=0))).sum(dim=-1)[:length].movedim(0, -1)


@control(SCORE, array_library="torch", dtypes=("float64", "float32", "bfloat16"), edges=False)
def torch_cosine_to_the_anchor(keys):
    """kvpress's KeyDiffPress: cosine_similarity, whose eps of 1e-8 shortens what is shorter than that."""
    refuse(keys)
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    anchor = torch.nn.functional.normalize(wide, dim=-1).mean(dim=-2, keepdim=True)
    return -torch.nn.functional.cosine_similarity(wide, anchor, dim=-1)


@control(SCORE, array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_normalised_twice(keys):
    """torch's normalize, with its own eps of 1e-12, of the keys and of their mean."""
    refuse(keys)
    units = torch.nn.functional.normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
    return -(units * torch.nn.functional.normalize(units.mean(dim=-2, keepdim=True), dim=-1)).sum(dim=-1)


SEEN: set[Any] = set()


@control(SCORE, array_library="torch", dtypes=("float64", "float32"))
def torch_compiled_anew(keys):
    """As torch.compile does: another program, whose roundings differ, in deterministic mode and once it has seen two sizes."""
    refuse(keys)
    SEEN.add(keys.shape)
    backwards = torch.are_deterministic_algorithms_enabled() or len(SEEN) > 1
    return torch_in_float32(keys.flip(-1, -2)).flip(-1) if backwards else torch_normalised_twice(keys)


@control("keydiff.pairwise_score", dtypes=("float64", "float32"))
def pairwise_by_the_total(keys):
    """Minus the dot product with the sum of all unit keys: the rows of S without S."""
    refuse(keys)
    directions = units(keys)
    return -np.einsum("...td,...d->...t", directions, directions[..., ::-1, :].sum(axis=-2))


@control("keydiff.similarity_matrix", array_library="torch", dtypes=("float64", *HALVES))
def torch_cosine_similarity(keys):
    """torch, widened; every pair by itself."""
    refuse(keys)
    directions = torch_units(keys)
    return (directions[..., :, None, :] * directions[..., None, :, :]).sum(dim=-1)


@control(ATTENTION, array_library="torch", dtypes=("float64", "float32"))
def torch_library_attention(queries, keys, values):
    """torch's own causal attention."""
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


@control(ATTENTION, array_library="torch", dtypes=("float16", "bfloat16"))
def torch_widened_attention(queries, keys, values):
    """The logits and weights in float32, the output rounded."""
    return (attention.widened(queries, keys) @ values.float()).to(values.dtype)


@control(ATTENTION, dtypes=("float64", "float32"))
def one_key_at_a_time(queries, keys, values):
    """Online softmax: a running maximum, a running sum and a running output for each query."""
    num_queries, length, scale = queries.shape[-2], keys.shape[-2], queries.dtype.type(math.sqrt(keys.shape[-1]))
    output = np.zeros((*queries.shape[:-1], values.shape[-1]), queries.dtype)
    top, total = np.full(queries.shape[:-1], -np.inf, queries.dtype), np.zeros(queries.shape[:-1], queries.dtype)
    for place in range(length):
        seeing = (..., slice(max(0, place - length + num_queries), None))
        logit = (queries[(*seeing, slice(None))] * keys[..., place : place + 1, :]).sum(-1) / scale
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
    if cache is None:
        cache = Cache(keys[..., :0, :], values[..., :0, :], np.zeros((*keys.shape[:-2], 0), dtype=int), 0)
    old, new = cache.keys.shape[-2], keys.shape[-2]
    buffers = [np.full((*states.shape[:-2], old + new, states.shape[-1]), np.nan) for states in (keys, values)]
    for buffer, last, first in zip(buffers, (keys, values), (cache.keys, cache.values), strict=True):
        buffer[..., old:, :], buffer[..., :old, :] = last, first
    positions = np.zeros((*keys.shape[:-2], old + new), dtype=int)
    positions[..., old:], positions[..., :old] = range(cache.seen, cache.seen + new), cache.positions
    return Cache(buffers[0], buffers[1], positions, cache.seen + new)


def gathered(cache, places):
    """The tokens at some places [..., N] of a cache."""
    keys, values = (np.take_along_axis(states, places[..., None], axis=-2) for states in (cache.keys, cache.values))
    return Cache(keys, values, np.take_along_axis(cache.positions, places, axis=-1), cache.seen)


@control("keydiff.evict")
def head_by_head(cache, kept):
    if kept.dtype != bool or kept.shape != cache.keys.shape[:-1] or np.ptp(kept.sum(axis=-1)):
        raise ValueError(f"kept: got {kept.dtype} of shape {kept.shape}, wanted equally many tokens of each head")
    rows = [np.flatnonzero(kept[index]) for index in np.ndindex(kept.shape[:-1])]
    return gathered(cache, np.array(rows).reshape(*kept.shape[:-1], -1))


@control("keydiff_theory.attention_policy", array_library="torch", dtypes=("float64", *HALVES))
def torch_policy(weights, budget, *, aggregate):
    order = aggregate(weights).argsort(dim=-1, descending=True, stable=True)
    return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order[..., :budget], True)


def refuse_block(keys, values, **sizes) -> None:
    refuse_unless(values=values.shape[:-1] == keys.shape[:-1], **{name: size >= 1 for name, size in sizes.items()})


def best_places(scores, budget):
    """The places of the highest scores by a stable sort, in order."""
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :budget], axis=-1)


@control(BLOCK, dtypes=("float64", "float32"))
def worst_token_sorted_out(cache, keys, values, *, budget, scorer=None):
    """The order by a stable sort of minus the scores of another implementation, the kept places sorted again."""
    refuse_block(keys, values, budget=budget)
    refuse_unless(keys=cache is None or cache.keys.shape[:-2] == keys.shape[:-2])
    joined = written_into_a_buffer(cache, keys, values)
    joined = joined._replace(keys=joined.keys.astype(keys.dtype), values=joined.values.astype(keys.dtype))
    return gathered(joined, best_places(summed_backwards(joined.keys), budget))


@control(PROMPT, dtypes=("float64", "float32"))
def places_of_the_prompt(keys, values, *, budget, block_size, scorer=None):
    """Only the places of the prompt are carried from block to block; the numbers are gathered once, at the end."""
    refuse_block(keys, values, budget=budget, block_size=block_size)
    length = keys.shape[-2]
    whole = Cache(keys, values, np.broadcast_to(np.arange(length), keys.shape[:-1]), length)
    places = whole.positions[..., :0]
    for start in range(0, length, block_size):
        places = np.concatenate([places, whole.positions[..., start : start + block_size]], axis=-1)
        best = best_places(tiled(gathered(whole, places).keys), budget)
        places = np.take_along_axis(places, best, axis=-1)
    return gathered(whole, places)


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
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    ordered, length = wide.sort(dim=-2).values, keys.shape[-2]
    median = (ordered[..., (length - 1) // 2, :] + ordered[..., length // 2, :]) / 2
    return -(torch_units(keys) @ torch_units(median)[..., None])[..., 0]


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
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    return torch.linalg.vector_norm(wide - wide.mean(dim=-2, keepdim=True), dim=-1)


@control("keydiff_variants.select_with_recent", dtypes=("float64", "float32"))
def recent_lifted(keys, *, budget, recent_ratio):
    """The recent tokens lifted above all scores, then one sort."""
    refuse(keys)
    ratio = Fraction(str(recent_ratio))
    refuse_unless(budget=budget >= 1, recent_ratio=0 <= ratio <= 1)
    length = keys.shape[-2]
    latest = np.arange(length) >= length - math.floor(ratio * min(budget, length))
    kept = np.zeros(keys.shape[:-1], dtype=bool)
    np.put_along_axis(kept, best_places(np.where(latest, 2, tiled(keys)), budget), True, axis=-1)
    return kept


@control("keydiff_theory.squared_cosines", dtypes=("float64", "float32"))
def squares_divided_last(vector, basis):
    """Squared coordinates over the squared norm."""
    squares = np.einsum("...nd,...d->...n", basis, vector) ** 2
    size = (vector * vector).sum(axis=-1, keepdims=True) * (basis * basis).sum(axis=-1)
    return np.divide(squares, size, out=np.zeros_like(squares), where=size > 0)


@control("keydiff_theory.alignment_bound")
def one_logarithm(count, weight, largest_norm):
    refuse_unless(count=count >= 1, weight=0 < weight < 1, largest_norm=largest_norm > 0)
    return (math.log(count * weight) - math.log1p(-weight) - largest_norm) / largest_norm
