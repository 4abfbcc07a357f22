"""Correct DropKVs of other kinds."""

from __future__ import annotations

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY, hidden
from evictionary.spec_tests.snapkv.variants import checked, convolved, finite_window, torch_pooled

SCORE = "dropkv.score"


def refuse_values(keys, values) -> None:
    if values.shape[:-1] != keys.shape[:-1]:
        raise ValueError(f"values: got shape {tuple(values.shape)}, beside keys of {tuple(keys.shape)}")


@control(SCORE, dtypes=NUMPY, max_length=512)
def leaving_each_out(queries, keys, values, *, window_size=32, kernel_size=7):
    """The attention computed again without each token, as the law says it."""
    window = checked(queries, keys, window_size, kernel_size)
    refuse_values(keys, values)
    length, group = keys.shape[2], queries.shape[1] // keys.shape[1]
    scores = np.full(keys.shape[:3], np.inf, keys.dtype)
    if window == length:
        return scores
    total = np.zeros(keys.shape[:3], keys.dtype)
    for item, reader in np.ndindex(queries.shape[:2]):
        head = reader // group
        for place in range(length - window, length):
            query = queries[item, reader, place - length] / keys.dtype.type(keys.shape[-1] ** 0.5)
            logits, seen = keys[item, head, : place + 1] @ query, values[item, head, : place + 1]
            masked = np.where(np.eye(place + 1, dtype=bool), -np.inf, logits)
            powers = np.exp(masked - masked.max(axis=-1, keepdims=True))
            without = powers @ seen / powers.sum(axis=-1, keepdims=True)
            weights = np.exp(logits - logits.max())
            changes = (weights / weights.sum())[:, None] * (seen - without)
            total[item, head, : place + 1] += (changes * changes).sum(axis=-1)
    scores[..., : length - window] = convolved(total / group, kernel_size)[..., : length - window]
    return scores


def torch_changes(queries, keys, values, window):
    """|o without j - o|^2 of each query of the window, [B, H_q, W, T], by the log of p / (1 - p)."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (states.repeat_interleave(group, dim=1) for states in (keys, values))
    logits = queries[:, :, -window:] @ keys.mT / keys.shape[-1] ** 0.5
    logits = logits.masked_fill(hidden(window, keys.shape[2]), -torch.inf)
    top, place = logits.max(dim=-1, keepdim=True)
    powers = (logits - top).exp()
    rest = powers.scatter(-1, place, 0)
    total = rest.sum(dim=-1, keepdim=True) + 1
    output = powers @ values / total
    second = logits.scatter(-1, place, -torch.inf)
    without = second.softmax(dim=-1) @ values
    odds = rest / (total - rest)
    changes = odds.square() * (values.unsqueeze(2) - output.unsqueeze(3)).square().sum(dim=-1)
    chosen = (
        values.unsqueeze(2).expand(-1, -1, window, -1, -1).gather(3, place.unsqueeze(-1).expand(*place.shape, values.shape[-1]))
    )
    return changes.scatter(-1, place, (chosen[:, :, :, 0] - without).square().sum(dim=-1, keepdim=True) / total.square())


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_by_odds(queries, keys, values, *, window_size=32, kernel_size=7):
    """torch, at least in float32, the softmax never normalised."""
    window = checked(queries, keys, window_size, kernel_size)
    refuse_values(keys, values)
    wide, length = torch.promote_types(keys.dtype, torch.float32), keys.shape[2]
    scores = torch.full(keys.shape[:3], torch.inf, dtype=wide)
    if window < length:
        changes = torch_changes(queries.to(wide), keys.to(wide), values.to(wide), window)
        total = changes.sum(dim=2).unflatten(1, (keys.shape[1], -1)).mean(dim=2)
        scores[..., : length - window] = torch_pooled(total, kernel_size)[..., : length - window]
    return scores.to(keys.dtype)


@control(SCORE, array_library="torch", dtypes=("float64", "float32"))
def torch_group_first(queries, keys, values, *, window_size=32, kernel_size=7):
    """The mean over the group before the sum over the window, the pooling of each query by itself."""
    window = checked(queries, keys, window_size, kernel_size)
    refuse_values(keys, values)
    length = keys.shape[2]
    scores = torch.full(keys.shape[:3], torch.inf, dtype=keys.dtype)
    if window < length:
        means = torch_changes(queries, keys, values, window).unflatten(1, (keys.shape[1], -1)).mean(dim=2)
        scores[..., : length - window] = torch_pooled(means, kernel_size).sum(dim=2)[..., : length - window]
    return scores


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_window_above_the_rest(queries, keys, values, *, window_size=32, kernel_size=7):
    """The window scores one more than twice the best token before it."""
    return finite_window(torch_by_odds(queries, keys, values, window_size=window_size, kernel_size=kernel_size))
