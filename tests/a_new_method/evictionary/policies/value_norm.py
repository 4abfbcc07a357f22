"""ValueNorm in a cache: the norms of the values that stay are known, so a compression computes those of
the new values alone.
"""

from collections.abc import Callable

import torch

from evictionary.optimized import value_norm
from evictionary.policies import Compression, Policy, State


class ValueNorm(Policy):
    def fused(self, compression: Compression) -> Callable[..., torch.Tensor] | None:
        """VN-1 of the new values, beside the norms of the others."""
        before = compression.state.pop("norms", None)
        if not compression.method.is_top_k:
            return None
        new = value_norm.score(
            compression.values if before is None else compression.values[:, :, -compression.new :]
        )
        norms = new if before is None else torch.cat([before, new], dim=-1)
        compression.state["norms"] = norms
        return lambda values: norms

    def skipped(self, state: State) -> None:
        """Without the fused pass the norms are not kept up to date."""
        state.pop("norms", None)

    def evicted(self, compression: Compression, kept: torch.Tensor) -> None:
        """The norms of the values that stay; each head keeps as many."""
        if "norms" in compression.state:
            compression.state["norms"] = compression.state["norms"][kept].view(*kept.shape[:2], -1)
