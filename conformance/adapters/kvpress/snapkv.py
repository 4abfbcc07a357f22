"""kvpress's `SnapKVPress`, given the attention that a model would hand to it."""

import math
from types import SimpleNamespace

import torch
from kvpress import SnapKVPress

from conformance.borrowed import causal_attention, for_all_queries, leave_out_window


def score(queries, keys, *, window_size=32, kernel_size=7):
    length = keys.shape[2]
    leave_out_window(length, window_size)
    module = SimpleNamespace(config=SimpleNamespace(num_attention_heads=queries.shape[1]))
    attention = causal_attention(for_all_queries(queries, length), keys)
    press = SnapKVPress(window_size=window_size, kernel_size=kernel_size)
    scores = press.score(module, torch.zeros(keys.shape[0], length, 1), keys, None, attention, {})
    # The window gets the maximum plus one, where the contract has infinity: either stands before all others.
    if (scores[..., -window_size:] <= scores[..., :-window_size].max()).any():
        return scores
    scores[..., -window_size:] = math.inf
    return scores
