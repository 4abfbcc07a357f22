"""Correct DuoAttentions of other kinds."""

from evictionary.spec_tests.duo_attention import forms
from evictionary.spec_tests.rope.variants import torch_angles, torch_turned
from evictionary.spec_tests.shared.variants import *

ESTIMATE, SELECT, GATED = (
    "duo_attention.estimate_gates",
    "duo_attention.select",
    "duo_attention.gated_attention",
)

control(ESTIMATE, name="by_distances")(
    put_together(
        forms, "estimate_gates", attention=forms.attention_by_distances, area=forms.area_by_the_mean_place
    )
)


@control(ESTIMATE, array_library="torch", dtypes=ALL)
@through_float32
def torch_estimate(query_mean, key_mean, *, length=500, theta=10000.0):
    """Keys turned by RoPE, a softmax, the cumulated attention averaged."""
    query, group = query_mean[:, :, None], query_mean.shape[1] // key_mean.shape[1]
    angles = torch_angles(query, torch.arange(length), theta)
    keys = torch_turned(
        key_mean.repeat_interleave(group, dim=1)[:, :, None].expand(-1, -1, length, -1), angles
    )
    weights = ((keys @ torch_turned(query, angles[-1]).mT)[..., 0] / query.shape[-1] ** 0.5).softmax(dim=-1)
    return weights.cumsum(dim=-1).mean(dim=-1).unflatten(1, (key_mean.shape[1], group)).mean(dim=-1)


@control(SELECT, array_library="torch", dtypes=ALL)
def torch_by_distance(keys, gates, *, threshold=0.5, sink_size=128, recent_size=256):
    places = torch.arange(keys.shape[2])
    return ~(((places >= sink_size) & (places.flip(0) >= recent_size)) & (gates < threshold)[..., None])


@control(GATED)
def mixed_weights(queries, keys, values, gates, *, sink_size=128, recent_size=256):
    """The weights of both attentions mixed before the values are read, one query head after the other."""
    group, (_, _, count, width) = queries.shape[1] // keys.shape[1], queries.shape
    places = np.arange(keys.shape[2])
    ago = places[-count:, None] - places
    streamed = (ago >= 0) & ((ago < recent_size) | (places < sink_size))
    output = []
    for head in range(queries.shape[1]):
        logits = queries[:, head] @ np.swapaxes(keys[:, head // group], 1, 2) / width**0.5
        full, near = (forms.softmax(np.where(seen, logits, -np.inf)) for seen in (ago >= 0, streamed))
        share = gates[:, head // group, None, None]
        output.append((share * full + (1 - share) * near) @ values[:, head // group])
    return np.stack(output, axis=1)
