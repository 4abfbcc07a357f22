"""Correct equations of the MomentKV paper in other kinds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from evictionary.reference.momentkv_theory import Expansion
from evictionary.spec_tests.momentkv.variants import HALVES, SINGLE, log_sum_exp, widened
from evictionary.spec_tests.proof.planted import control

STEM = "momentkv_theory"


def logits_of(query, keys):
    """s_i, in NumPy or torch."""
    return (keys @ query[..., None])[..., 0] / math.sqrt(query.shape[-1])


def refuse(kept) -> None:
    if not (kept.any(-1) & ~kept.all(-1)).all():
        raise ValueError("kept: got a row in which one of the two sets is empty")


@control(f"{STEM}.full_output", dtypes=SINGLE)
def streamed(query, keys, values):
    """Token by token with a running maximum."""
    logits = np.einsum("...td,...d->...t", keys, query) / math.sqrt(query.shape[-1])
    top, total, sums = logits[..., 0], np.ones_like(logits[..., 0]), values[..., 0, :].copy()
    for token in range(1, keys.shape[-2]):
        higher = np.maximum(top, logits[..., token])
        fade, weight = np.exp(top - higher), np.exp(logits[..., token] - higher)
        top, total = higher, total * fade + weight
        sums = sums * fade[..., None] + weight[..., None] * values[..., token, :]
    return sums / total[..., None]


@control(f"{STEM}.full_output", array_library="torch", dtypes=HALVES)
def fused_attention(query, keys, values):
    """The fused attention of torch, in float32 at least."""
    query, keys, values = widened(query, keys, values)
    return torch.nn.functional.scaled_dot_product_attention(query[..., None, :], keys, values)[..., 0, :]


@control(f"{STEM}.sub_outputs", dtypes=SINGLE)
def exponentials_once(query, keys, values, kept):
    """The exponentials taken once, about the largest of each set, and summed by a matrix of two masks."""
    refuse(kept)
    logits = logits_of(query, keys)
    masks = np.stack([kept, ~kept], axis=-2)
    top = np.where(masks, logits[..., None, :], -np.inf).max(axis=-1, keepdims=True)
    weights = np.exp(np.where(masks, logits[..., None, :] - top, -np.inf))
    output = weights @ values / weights.sum(axis=-1, keepdims=True)
    return output[..., 0, :], output[..., 1, :]


@control(f"{STEM}.sub_outputs", array_library="torch", dtypes=HALVES)
def torch_sub_outputs(query, keys, values, kept):
    """torch, in float32 at least."""
    refuse(kept)
    query, keys, values = widened(query, keys, values)
    logits = logits_of(query, keys)
    parts = [logits.masked_fill(~mask, -torch.inf).softmax(dim=-1) for mask in (kept, ~kept)]
    return tuple((weights[..., None, :] @ values)[..., 0, :] for weights in parts)


@control(f"{STEM}.mass", dtypes=SINGLE)
def logistic(query, keys, kept):
    """w_R = 1 / (1 + exp(log Z_E - log Z_R))."""
    logits = np.einsum("...td,...d->...t", keys, query) / math.sqrt(query.shape[-1])
    difference = log_sum_exp(np.where(kept, -np.inf, logits), -1) - log_sum_exp(np.where(kept, logits, -np.inf), -1)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(difference)), 1 / (1 + np.exp(-difference))


@control(f"{STEM}.centred_logits", dtypes=SINGLE)
def mean_logit_subtracted(query, keys):
    """s_i - sbar instead of q . (k_i - kbar) / sqrt(d)."""
    logits = np.einsum("...td,...d->...t", keys, query) / math.sqrt(query.shape[-1])
    return logits - logits.mean(axis=-1, keepdims=True)


@control(f"{STEM}.centred_output", dtypes=SINGLE)
def not_centred_at_all(query, keys, values):
    """The plain softmax over the evicted tokens, which centring does not change."""
    return streamed(query, keys, values)


@control(f"{STEM}.expansion", array_library="torch", dtypes=SINGLE)
def torch_expansion(query, keys, values):
    """torch, with its own expm1."""
    delta = logits_of(query, keys - keys.mean(dim=-2, keepdim=True))
    rest = delta.expm1() - delta
    ones = torch.ones_like(delta)
    numerator, mean_part, linear_part, remainder = (
        torch.einsum("...t,...td->...d", weight, values) for weight in (delta.exp(), ones, delta, rest)
    )
    largest = delta.abs().amax(dim=-1), values.norm(dim=-1).amax(dim=-1)
    fields: Any = (*largest, delta.exp().sum(dim=-1), rest.sum(dim=-1), numerator, mean_part, linear_part, remainder)
    return Expansion(keys.shape[-2], *fields)


@control(f"{STEM}.log_partition", array_library="torch", dtypes=HALVES)
def torch_log_partition(query, keys):
    """torch, in float32 at least; the bound from the mean key."""
    query, keys = widened(query, keys)
    mean_logit = (query * keys.mean(dim=-2)).sum(dim=-1) / math.sqrt(query.shape[-1])
    return logits_of(query, keys).logsumexp(dim=-1), math.log(keys.shape[-2]) + mean_logit


@control(f"{STEM}.logit_variance", dtypes=SINGLE)
def mean_square_of_centred_logits(query, keys):
    """(1/n) sum delta^2."""
    delta = np.einsum("...td,...d->...t", keys - keys.mean(axis=-2, keepdims=True), query)
    return (delta * delta).mean(axis=-1) / query.shape[-1]
