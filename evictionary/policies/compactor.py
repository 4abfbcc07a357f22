"""Compactor in a cache: the keys of the prompt brought to before RoPE, and a sketch that is drawn."""

from collections.abc import Mapping
from typing import Any

import torch

from evictionary.models.queries import rotation, unrotated
from evictionary.policies import Policy, Source

CHANNELS = 48  # of a sketch, as in the public code


class Compactor(Policy):
    reads_before_rope = True

    def supply(self, source: Source, states: Mapping[str, Any], position: int) -> dict[str, torch.Tensor]:
        """CO-2: unrotated_keys [B, H_kv, T, D] and sketch [B, H_kv, D, k].

        Each head has its own sketch. The rows share theirs: a row keeps in a batch what it keeps alone.
        """
        keys, turns = states["keys"], rotation(source.model, source.layer_index, states["positions"])
        drawn = torch.randn(1, keys.shape[1], keys.shape[3], CHANNELS, generator=states["generator"])
        sketch = drawn.to(keys.device).expand(len(keys), -1, -1, -1) / CHANNELS**0.5
        return {"unrotated_keys": unrotated(keys, *turns), "sketch": sketch}
