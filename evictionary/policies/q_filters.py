"""Q-Filters in a cache: the filters of a text, or of the prompt."""

from __future__ import annotations

import torch

from evictionary.optimized import q_filters
from evictionary.policies import Calibration, Source


def calibrated(source: Source, given: Calibration) -> dict[str, torch.Tensor]:
    """QF-2: q_filters [B, H_kv, D]."""
    return {"q_filters": q_filters.calibrate(given.queries, given.keys.shape[1]).float()}
