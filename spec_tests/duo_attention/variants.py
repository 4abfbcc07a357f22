"""Correct DuoAttentions of other kinds."""

from __future__ import annotations

import numpy as np
import torch

from evictionary.reference.rope import rotate
from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.rope.variants import rotate_half, torch_angles
from evictionary.spec_tests.shared.refusal import refuse_unless
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY

ESTIMATE, SELECT, GATED = "duo_attention.estimate_gates", "duo_attention.select", "duo_attention.gated_attention"


def refuse(keys, gates, sink_size, recent_size) -> None:
    refuse_unless(
        gates=tuple(gates.shape) == tuple(keys.shape[:2]),
        sink_size=isinstance(sink_size, int) and sink_size >= 0,
        recent_size=isinstance(recent_size, int) and recent_size >= 0 and sink_size + recent_size > 0,
    )


@control(ESTIMATE)
def by_distances(query_mean, key_mean, *, length=500, theta=10000.0):
    """The query turned back by each distance and the key left where it is; the area as one minus the mean place."""
    group, back = query_mean.shape[1] // key_mean.shape[1], -np.arange(length)[::-1]
    turned = rotate(np.repeat(query_mean[:, :, None], length, axis=2), -back, theta)
    logits = (turned * np.repeat(key_mean, group, axis=1)[:, :, None]).sum(axis=-1) / query_mean.shape[-1] ** 0.5
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    places = (powers * np.arange(length)).sum(axis=-1) / powers.sum(axis=-1)
    return (1 - places / length).reshape(*key_mean.shape[:2], group).mean(axis=-1)


@control(ESTIMATE, array_library="torch", dtypes=ALL)
def torch_estimate(query_mean, key_mean, *, length=500, theta=10000.0):
    """torch, at least in float32: keys turned by RoPE, a softmax, the cumulated attention averaged."""
    wide, group = torch.promote_types(query_mean.dtype, torch.float32), query_mean.shape[1] // key_mean.shape[1]
    query, keys = query_mean.to(wide), key_mean.to(wide).repeat_interleave(group, dim=1)[:, :, None]
    angles = torch_angles(query, torch.arange(length), theta, wide)
    keys = keys * angles.cos() + rotate_half(keys) * angles.sin()
    query = query * angles[-1].cos() + rotate_half(query) * angles[-1].sin()
    weights = ((keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5).softmax(dim=-1)
    return weights.cumsum(dim=-1).mean(dim=-1).unflatten(1, (key_mean.shape[1], group)).mean(dim=-1)


@control(SELECT, dtypes=NUMPY)
def head_by_head(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    """The middle of each streaming head taken out."""
    refuse(keys, gates, sink_size, recent_size)
    kept = np.ones(keys.shape[:3], dtype=bool)
    for place in np.argwhere(gates < threshold):
        kept[tuple(place)][sink_size : max(sink_size, keys.shape[2] - recent_size)] = False
    return kept


@control(SELECT, array_library="torch", dtypes=ALL)
def torch_by_distance(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    """torch: the distances from both ends compared."""
    refuse(keys, gates, sink_size, recent_size)
    places = torch.arange(keys.shape[2])
    middle = (places >= sink_size) & (places.flip(0) >= recent_size)
    return ~(middle & (gates < threshold)[..., None])


@control(GATED)
def mixed_weights(queries, keys, values, gates, *, sink_size=128, recent_size=256):
    """The weights of both attentions mixed before the values are read, one query head after the other."""
    refuse_unless(gates=((gates >= 0) & (gates <= 1)).all(), recent_size=recent_size > 0)
    group, (_, _, count, width) = queries.shape[1] // keys.shape[1], queries.shape
    places = np.arange(keys.shape[2])
    ago = places[-count:, None] - places
    output = []
    for head in range(queries.shape[1]):
        powers = np.exp(np.clip(queries[:, head] @ np.swapaxes(keys[:, head // group], 1, 2) / width**0.5, -700, 700)) * (ago >= 0)
        near = powers * ((ago < recent_size) | (places < sink_size))
        share = gates[:, head // group, None, None]
        weights = share * powers / powers.sum(axis=-1, keepdims=True) + (1 - share) * near / near.sum(axis=-1, keepdims=True)
        output.append(weights @ values[:, head // group])
    return np.stack(output, axis=1)
