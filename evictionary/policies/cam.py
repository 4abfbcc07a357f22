"""CaM in a cache, behind any method: what the tokens have received, and a number drawn for each."""

from collections.abc import Mapping
from typing import Any

import torch

from evictionary.optimized import h2o
from evictionary.policies import Policy, Source


class CaM(Policy):
    stands_for_evicted = True  # CAM-4 gives the values of the evicted tokens to the kept ones

    def serves(self, method: Any) -> bool:
        return method.merge is not None

    def supply(self, source: Source, states: Mapping[str, Any], position: int) -> dict[str, torch.Tensor]:
        """CAM-2, CAM-4: attention and draws, [B, H_kv, T].

        The attention comes from the queries [B, H_q, M, D] of the tokens since the last compression, the
        last of those stored. Each head has its own draws. The rows share theirs: a row is in a batch
        what it is alone.
        """
        keys, heads = states["keys"], states["kv_heads"]
        drawn = torch.rand(heads.stop or keys.shape[1], position, generator=states["generator"])
        draws = drawn[heads, : keys.shape[2]].to(keys.device)
        return {"attention": h2o.score(states["queries"], keys), "draws": draws.expand(len(keys), -1, -1)}
