"""Functions that do more in one pass than decide.

LagKV's copies what it keeps, KeyDiff's scores with an anchor that is known, H2O's adds up a prompt's attention while computing it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from evictionary.methods.method import Method
from evictionary.optimized import h2o, keydiff, lagkv
from evictionary.optimized.kernels.launching import kernels_for
from evictionary.optimized.states import CompressedCache


def copying(method: Method, copies: list[CompressedCache]) -> Method:
    """LagKV, of whose `select` every call also adds the compressed cache to `copies`; every other method as it is."""
    if method.function is not lagkv.select:
        return method

    @functools.wraps(lagkv.select)
    def select(keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
        copies.append(lagkv.compress(keys, values, **options))
        kept = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        return kept.scatter_(2, copies[-1].positions.view(*keys.shape[:2], -1), True)

    return replace(method, function=select)


def anchored(method: Method, anchor: torch.Tensor) -> Method:
    """KeyDiff with the sum of all unit keys [B, H_kv, D], which saves it a pass over the keys."""

    @functools.wraps(keydiff.score)
    def score(keys: torch.Tensor) -> torch.Tensor:
        return keydiff.score_with_anchor(keys, anchor)

    return replace(method, function=score)


def anchor_of(keys: torch.Tensor, before: torch.Tensor | None, new: int) -> torch.Tensor:
    """The sum of the unit keys [B, H_kv, T, D], from the sum `before` the last `new` tokens where it is known."""
    return keydiff.anchor_sum(keys) if before is None else keydiff.update_anchor(before, keys[:, :, -new:], None)


def anchor_without(anchor: torch.Tensor, keys: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The sum of the unit keys that are kept; each head loses as many."""
    gone = keys[~kept].view(*keys.shape[:2], -1, keys.shape[-1])
    return keydiff.update_anchor(anchor, None, gone) if gone.shape[2] else anchor


def can_attend_and_score(method: Method | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `h2o.attend_and_score` may stand for a model's own causal attention, which no mask restricts further."""
    is_h2o = method is not None and method.function is h2o.select
    is_fast = keys.device.type == "cpu" or kernels_for("received_attention", queries, keys, values) is not None
    return is_h2o and is_fast and not queries.requires_grad


def scored(method: Method, scores: torch.Tensor) -> Method:
    """H2O with the attention [B, H_kv, T] that its tokens have received."""

    @functools.wraps(h2o.select)
    def select(queries: torch.Tensor, keys: torch.Tensor, *, budget: int) -> torch.Tensor:
        return h2o.select_scored(scores, budget=budget)

    return replace(method, function=select)
