"""Correct TriAttentions of other kinds."""

from __future__ import annotations

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.rope.variants import rotate_half, torch_angles
from evictionary.spec_tests.shared.refusal import refuse_unless
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY

STATISTICS, AVERAGE, LOGITS, SCORE = (f"triattention.{name}" for name in ("statistics", "average_over_offsets", "logits", "score"))


def refuse(keys, query_direction, query_slack) -> None:
    shape = tuple(query_direction.shape)
    fits = len(shape) == 3 and shape[0] == keys.shape[0] and shape[2] == keys.shape[3] and shape[1] % keys.shape[1] == 0
    refuse_unless(query_direction=fits)
    refuse_unless(query_slack=tuple(query_slack.shape) == (*shape[:2], shape[2] // 2))


@control(STATISTICS, dtypes=NUMPY)
def query_by_query(queries):
    """Complex numbers, one query after the other."""
    half = queries.shape[-1] // 2
    total, length = 0, 0
    for place in range(queries.shape[-2]):
        pair = queries[..., place, :half] + 1j * queries[..., place, half:]
        total, length = total + pair, length + np.abs(pair)
    mean, length = total / queries.shape[-2], length / queries.shape[-2]
    return np.concatenate([mean.real, mean.imag], axis=-1).astype(queries.dtype), (length - np.abs(mean)).astype(queries.dtype)


@control(AVERAGE, array_library="torch", dtypes=ALL)
def torch_tables(query_mean, *, position, max_offset=65536, theta=10000.0):
    """torch, with the tables of RoPE as transformers makes them: angles in float32 at least, all offsets at once."""
    wide = torch.promote_types(query_mean.dtype, torch.float32)
    states = query_mean.to(wide)[..., None, :]
    angles = torch_angles(states, position + 2 ** torch.arange(max_offset.bit_length()), theta, wide)
    return (states * angles.cos() + rotate_half(states) * angles.sin()).mean(dim=-2).to(query_mean.dtype)


@control(LOGITS, array_library="torch", dtypes=ALL)
def torch_pair_by_pair(keys, query_direction, query_slack):
    """torch, at least in float32: each pair's product and bonus added, then all pairs."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    pairs, direction = (states.to(wide).unflatten(-1, (2, -1)) for states in (keys, query_direction))
    products = (pairs * direction[..., None, :, :]).sum(dim=-2)
    return (products + pairs.norm(dim=-2) * query_slack.to(wide)[..., None, :]).sum(dim=-1)


@control(SCORE, dtypes=NUMPY)
def head_by_head(keys, query_direction, query_slack):
    """One query head after the other; the deviation after the first token is subtracted."""
    refuse(keys, query_direction, query_slack)
    group, half = query_direction.shape[1] // keys.shape[1], keys.shape[3] // 2
    scores = np.full(keys.shape[:3], -np.inf, keys.dtype)
    for item, reader in np.ndindex(query_direction.shape[:2]):
        of_head = keys[item, reader // group]
        lengths = np.hypot(of_head[:, :half], of_head[:, half:])
        row = np.einsum("td,d->t", of_head, query_direction[item, reader]) + lengths @ query_slack[item, reader]
        row = row - row[0]
        standard = (row - row.mean()) / max(row.std(), keys.dtype.type(1e-6))
        scores[item, reader // group] = np.maximum(scores[item, reader // group], standard)
    return scores


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_with_longer_keys(keys, query_direction, query_slack):
    """torch, at least in float32: the lengths of the pairs as further channels, one product for both parts."""
    refuse(keys, query_direction, query_slack)
    wide = torch.promote_types(keys.dtype, torch.float32)
    keys = keys.to(wide)
    lengths = keys.unflatten(-1, (2, -1)).norm(dim=-2)
    longer = torch.cat([keys, lengths], dim=-1)
    readers = torch.cat([query_direction.to(wide), query_slack.to(wide)], dim=-1).unflatten(1, (keys.shape[1], -1))
    rows = torch.einsum("bhgc,bhtc->bhgt", readers, longer)
    deviation, mean = torch.std_mean(rows, dim=-1, correction=0, keepdim=True)
    return ((rows - mean) / deviation.clamp(min=1e-6)).amax(dim=2)
