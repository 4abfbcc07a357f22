"""Q-Filters in a cache: the filters of a text, or of the prompt."""

import torch

from evictionary.optimized import q_filters
from evictionary.policies import Calibration, Policy, Source


class QFilters(Policy):
    def calibrated(self, source: Source, given: Calibration) -> dict[str, torch.Tensor]:
        """QF-2: q_filters [B, H_kv, D]."""
        return {"q_filters": q_filters.calibrate(given.queries, given.keys.shape[1]).float()}
