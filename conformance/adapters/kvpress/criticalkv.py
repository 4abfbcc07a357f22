"""kvpress's `CriticalKVPress`: the lengths of the projected values, and its two stages around the importance
that the contract names, for it wraps any press.
"""

from types import SimpleNamespace

import torch
from kvpress import CriticalKVPress

from conformance.adapters.kvpress.given import Given
from conformance.borrowed import leave_out, leave_out_window
from evictionary.evaluation.kvpress import layer
from evictionary.reference import criticalkv as definition


def module_of(values, w_o):
    heads, channels, hidden = w_o.shape
    module = layer(heads, values.shape[1], channels, hidden_size=hidden)
    module.o_proj = SimpleNamespace(weight=w_o.reshape(heads * channels, hidden).T)
    return module


def projected_norms(values, w_o):
    return CriticalKVPress.vwl1norm(values, module_of(values, w_o))


def score(
    queries, keys, values, w_o, *, budget, window_size=32, kernel_size=5, first_share=0.5, epsilon=1e-4
):
    length, first = keys.shape[2], int(first_share * budget)
    leave_out_window(length, window_size)
    leave_out(first > length, "a first stage of more tokens than there are")
    leave_out(first_share > 0 and first < 1, "a first stage of no token, which the press makes one")
    attended = definition.importance(
        queries.double().numpy(), keys.double().numpy(), window_size=window_size, kernel_size=kernel_size
    )
    scores = torch.nn.functional.pad(
        torch.from_numpy(attended).to(keys.dtype), (0, window_size), value=torch.inf
    )
    # The press counts the tokens of its first stage as a share of all.
    share = (first + 0.5) / length if first else 0
    press = CriticalKVPress(Given(scores), epsilon=epsilon, first_stage_ratio=share)
    found = press.score(module_of(values, w_o), None, keys, values, None, {})
    return found.masked_fill(found == torch.finfo(found.dtype).max, torch.inf)
