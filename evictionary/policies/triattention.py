"""TriAttention in a cache: calibrated statistics of the
queries before RoPE, brought to the positions to come.
"""

from collections.abc import Mapping

import torch

from evictionary.models.queries import rotation, turned
from evictionary.optimized import triattention
from evictionary.policies import Calibration, Policy, Source

OFFSETS = 2 ** torch.arange(17)
"""The distances to future positions that the mean query is averaged over (TA-2): 1, 2, 4, ..., 65536."""


class TriAttention(Policy):
    reads_before_rope = True
    counts_in_halves = True  # TA-1 counts the pairs of two halves

    def calibrated(self, source: Source, given: Calibration) -> dict[str, torch.Tensor]:
        """TA-1: query_mean [B, H_q, D] before RoPE, and query_slack [B, H_q, D/2]."""
        mean, slack = triattention.statistics(given.before_rope)
        # Some RoPE variants scale cosine and sine, so the cached keys are longer than the slack counts
        # by that scale.
        return {
            "query_mean": mean,
            "query_slack": slack * (given.cos.square() + given.sin.square()).sqrt().mean(),
        }

    def at(self, source: Source, state: Mapping[str, torch.Tensor], position: int) -> dict[str, torch.Tensor]:
        """TA-2: query_direction [B, H_q, D] at the position of the next token."""
        mean = state["query_mean"]
        cos, sin = rotation(source.model, source.layer_index, position + OFFSETS.to(mean.device))
        return {
            "query_direction": turned(
                mean[..., None, :].expand(*mean.shape[:-1], len(OFFSETS), -1), cos, sin
            ).mean(dim=-2)
        }
