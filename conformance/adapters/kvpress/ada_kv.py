"""kvpress's `AdaKVPress` around given scores: it leaves the
cache whole and says which tokens attention shall not see.
"""

import torch
from kvpress import AdaKVPress

from conformance.adapters.kvpress.given import Given
from conformance.borrowed import leave_out
from evictionary.evaluation.kvpress import layer


def select(scores, budget, *, floor_ratio=0.2):
    kept, length = torch.ones_like(scores, dtype=torch.bool), scores.shape[2]
    leave_out(budget == 0, "a budget of no token")
    if budget < length:
        # The press is told a ratio, and keeps the whole part of what it leaves.
        press = AdaKVPress(Given(scores, 1 - (budget + 0.5) / length), float(floor_ratio))
        module = layer(scores.shape[1], scores.shape[1], 1)
        press.compress(module, None, scores[..., None], None, None, {})
        kept[module.masked_key_indices] = False
    return kept
