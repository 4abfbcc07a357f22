"""DuoAttention in a cache: the gates of a text, or of the prompt, where none were trained."""

import torch

from evictionary.models.queries import rotation, turned, unrotated
from evictionary.policies import Calibration, Policy, Source

PLACES = 500
"""The places on which a gate is estimated (DA-1)."""


class DuoAttention(Policy):
    reads_before_rope = True
    reads_all_keys = True

    def calibrated(self, source: Source, given: Calibration) -> dict[str, torch.Tensor]:
        """DA-1 with the model's own RoPE: gates [B, H_kv] from the mean query and the mean key before RoPE.

        There are none without the positions of the keys, as when tokens have been evicted.
        """
        if given.key_positions is None:
            return {}
        model, index = source.model, source.layer_index
        key_mean = unrotated(given.keys, *rotation(model, index, given.key_positions)).mean(dim=-2)
        cos, sin = rotation(model, index, torch.arange(PLACES, device=key_mean.device))
        keys = turned(key_mean[:, :, None].expand(-1, -1, PLACES, -1), cos, sin)
        last = turned(given.before_rope.mean(dim=-2), cos[-1], sin[-1]).unflatten(1, (key_mean.shape[1], -1))
        weights = (last @ keys.mT / keys.shape[-1] ** 0.5).softmax(dim=-1)
        return {"gates": weights.cumsum(dim=-1).mean(dim=(2, 3))}
