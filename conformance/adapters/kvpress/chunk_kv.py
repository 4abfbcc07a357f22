"""kvpress's `ChunkKVPress` around given scores, for one
head of one text at a time and budgets of whole chunks.
"""

import torch
from kvpress import ChunkKVPress

from conformance.adapters.kvpress.given import Given
from conformance.borrowed import leave_out, mask, positions_as_values
from evictionary.evaluation.kvpress import layer


def choose(scores, budget, *, chunk_size=10):
    length = scores.shape[-1]
    leave_out(
        length % chunk_size > 0 or budget % chunk_size > 0 or not 0 < budget < length,
        "a text or a budget that is no number of whole chunks",
    )
    return torch.stack([chosen(row, budget, chunk_size) for row in scores.reshape(-1, length)]).reshape(
        scores.shape
    )


def chosen(row, budget, chunk_size):
    length = len(row)
    states = positions_as_values(row[None, None, :, None])
    ratio = 1 - (budget + chunk_size / 2) / length  # the press keeps the whole part of what this leaves
    press = ChunkKVPress(Given(row[None, None], ratio), chunk_size)
    _, values = press.compress(layer(1, 1, 1), None, states, states, None, {})
    return mask(values, length)[0, 0]
