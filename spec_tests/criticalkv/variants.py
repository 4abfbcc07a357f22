"""Correct CriticalKVs of other kinds."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.refusal import refuse_unless
from evictionary.spec_tests.shared.variants import counted_before
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY, streamed, torch_weights
from evictionary.spec_tests.snapkv.variants import checked, shifted_sums, torch_pooled

NORMS, IMPORTANCE, SCORE, BOUND = (f"criticalkv.{name}" for name in ("projected_norms", "importance", "score", "error_bound"))


def refuse_settings(queries, keys, values, w_o, budget, first_share, epsilon) -> None:
    refuse_unless(
        values=values.shape[:3] == keys.shape[:3],
        w_o=len(w_o.shape) == 3 and w_o.shape[0] == queries.shape[1] and w_o.shape[1] == values.shape[-1],
        budget=isinstance(budget, int) and budget >= 1,
        first_share=0 <= first_share <= 1,
        epsilon=epsilon >= 0,
    )


@control(NORMS, dtypes=NUMPY)
def component_by_component(values, w_o):
    """One component of the hidden state after the other, the group's heads apart until the end."""
    group = w_o.shape[0] // values.shape[1]
    lengths = np.zeros((values.shape[0], w_o.shape[0], values.shape[2]), values.dtype)
    for column in range(w_o.shape[-1]):
        lengths += np.abs(np.einsum("bhtd,hd->bht", np.repeat(values, group, axis=1), w_o[..., column]))
    return lengths.reshape(*values.shape[:2], group, -1).mean(axis=2)


@control(IMPORTANCE, dtypes=NUMPY)
def query_by_query(queries, keys, *, window_size=32, kernel_size=5):
    """Streamed attention, pooled by shifted sums, and a running maximum over the queries of the group."""
    refuse_unless(queries=queries.shape[2] >= window_size)
    weights = streamed(queries[:, :, -window_size:], keys)[..., :-window_size]
    pooled = shifted_sums(weights, kernel_size)
    lost = pooled.sum(axis=-1, keepdims=True)
    pooled = pooled / np.where(lost == 0, 1, lost) * weights.sum(axis=-1, keepdims=True)
    rows = pooled.reshape(*keys.shape[:2], -1, pooled.shape[-1])
    largest = rows[:, :, 0]
    for row in range(1, rows.shape[2]):
        largest = np.maximum(largest, rows[:, :, row])
    least = np.einsum("bht->bh", largest) / keys.dtype.type(largest.shape[-1])
    return np.where(largest < least[..., None], least[..., None], largest)


def first_count(share, budget) -> int:
    return int(Fraction(repr(float(share))) * budget)


@control(SCORE, dtypes=NUMPY)
def by_counted_ranks(queries, keys, values, w_o, *, budget, window_size=32, kernel_size=5, first_share=0.5, epsilon=1e-4):
    """The first stage by counting the tokens before each one."""
    window = checked(queries, keys, window_size, kernel_size)
    refuse_settings(queries, keys, values, w_o, budget, first_share, epsilon)
    scores = np.full(keys.shape[:3], np.inf, keys.dtype)
    if window < keys.shape[2]:
        scores[..., :-window] = query_by_query(queries, keys, window_size=window, kernel_size=kernel_size)
        first = counted_before(scores) < first_count(first_share, budget)
        norms = component_by_component(values, w_o)
        scores[..., :-window] = scores[..., :-window] * norms[..., :-window] + keys.dtype.type(epsilon) * norms[..., :-window]
        scores[first] = np.inf
    return scores


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_score(queries, keys, values, w_o, *, budget, window_size=32, kernel_size=5, first_share=0.5, epsilon=1e-4):
    """torch, at least in float32; the first stage by a stable sort."""
    window = checked(queries, keys, window_size, kernel_size)
    refuse_settings(queries, keys, values, w_o, budget, first_share, epsilon)
    wide = torch.promote_types(keys.dtype, torch.float32)
    scores = torch.full(keys.shape[:3], torch.inf, dtype=wide)
    if window < keys.shape[2]:
        weights = torch_weights(queries[:, :, -window:].to(wide), keys.to(wide))[..., :-window]
        pooled = torch_pooled(weights, kernel_size)
        lost = pooled.sum(dim=-1, keepdim=True)
        pooled = pooled * weights.sum(dim=-1, keepdim=True) / lost.where(lost > 0, 1)
        largest = pooled.amax(dim=2).unflatten(1, (keys.shape[1], -1)).amax(dim=2)
        scores[..., :-window] = largest.clamp(min=largest.mean(dim=-1, keepdim=True))
        order = scores.argsort(dim=-1, descending=True, stable=True)[..., : first_count(first_share, budget)]
        repeated = values.to(wide).repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
        norms = (
            torch.einsum("bhtd,hdc->bhtc", repeated, w_o.to(wide)).abs().sum(dim=-1).unflatten(1, (keys.shape[1], -1)).mean(dim=2)
        )
        scores[..., :-window] = (scores[..., :-window] + epsilon) * norms[..., :-window]
        scores.scatter_(-1, order, torch.inf)
    return scores.to(keys.dtype)


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_largest_of_the_dtype(queries, keys, values, w_o, **settings):
    """As in kvpress's CriticalKVPress, the first stage and the window have the largest number of the dtype."""
    scores = torch_score(queries, keys, values, w_o, **settings)
    return scores.clamp(max=torch.finfo(scores.dtype).max)


@control(BOUND, dtypes=NUMPY)
def change_by_change(weights, norms, kept):
    """The lengths of the changes of the tokens added up: p n of the evicted, p n (1/S - 1) of the kept."""
    share = np.where(kept, weights, 0).sum(axis=-1, keepdims=True)
    return (weights * norms * np.where(kept, 1 / share - 1, 1)).sum(axis=-1)
