"""KeyDiff in a cache: the sum of the unit keys goes from one compression to the next, which saves a pass
over the keys.
"""

from collections.abc import Callable

import torch

from evictionary.optimized import kernels, keydiff
from evictionary.policies import Compression, Policy, State


class KeyDiff(Policy):
    def fused(self, compression: Compression) -> Callable[..., torch.Tensor] | None:
        """KD-8 with the anchor that KD-6 has kept up to date, where kernels read the keys once then."""
        keys, before = compression.keys, compression.state.pop("anchor", None)
        if not compression.every or not compression.method.is_top_k or not kernels.take("keydiff", keys):
            return None
        added = (
            None if before is None else keydiff.update_anchor(before, keys[:, :, -compression.new :], None)
        )
        anchor = keydiff.anchor_sum(keys) if added is None else added
        compression.state["anchor"] = anchor
        return lambda keys: keydiff.score_with_anchor(keys, anchor)

    def skipped(self, state: State) -> None:
        """Without the fused pass the sum is not kept up to date."""
        state.pop("anchor", None)

    def evicted(self, compression: Compression, kept: torch.Tensor) -> None:
        """KD-6: the unit keys that go leave the sum; each head loses as many."""
        gone = compression.keys[~kept]
        if "anchor" in compression.state and len(gone):
            gone = gone.view(*kept.shape[:2], -1, gone.shape[-1])
            compression.state["anchor"] = keydiff.update_anchor(compression.state["anchor"], None, gone)
