"""kvpress's `CAMPress.compress`, one head at a time, for all heads of a text evict the same tokens there. A
press whose scores are the mask chooses, and every evicted token may merge.
"""

from types import SimpleNamespace
from unittest import mock

import torch
from kvpress import CAMPress

from conformance.adapters.kvpress.given import Given
from conformance.borrowed import each_head, leave_out

DOMAIN = {"dtype": ("float32",)}


def compressed(values, attention, kept, merge_size, drawn):
    """The values [T, D] of one head afterwards, and the probabilities, from which `drawn` makes the mask."""
    leave_out(not kept.any(), "a head of which nothing stays")
    press = CAMPress(Given(kept[None, None].float()), target_size=int(kept.sum()), merge_budget=merge_size)
    press.layer_step_counts, press._running_attn_sum = {0: len(kept)}, {0: attention[None, None]}
    values = values.clone()[None, None]
    with mock.patch.object(torch, "bernoulli", side_effect=drawn) as bernoulli:
        press.compress(SimpleNamespace(layer_idx=0), None, values, values, attention[None, None], {})
    return values[0, 0], bernoulli.call_args[0][0] if bernoulli.called else torch.zeros(0)


def probabilities(attention, kept, *, merge_size=32):
    found = torch.zeros(kept.shape)
    for row, mask, received in each_head(found, kept, attention):
        row[~mask] = compressed(received[:, None], received, mask, merge_size, torch.zeros_like)[1].flatten()
        row[mask.nonzero().max() :] = 0  # what it finds after the last kept token merges nothing
    return found


def merged(values, attention, kept, draws, merge_size, rule):
    """`rule(draw, probability)` is the part of each evicted value that is merged."""
    found = [
        compressed(value, received, mask, merge_size, lambda p, draw=draw[~mask]: rule(draw, p))[0]
        for mask, value, received, draw in each_head(kept, values, attention, draws)
    ]
    return torch.stack(found).view(values.shape)


def spread(values, kept, weights, *, merge_size=32):
    return merged(
        values, torch.ones(kept.shape), kept, weights, merge_size, lambda draw, p: draw.view(p.shape)
    )


def merge_values(values, attention, kept, draws, *, merge_size=32):
    return merged(values, attention, kept, draws, merge_size, lambda draw, p: (draw < p).float())
