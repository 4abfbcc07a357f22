"""kvpress's `QFilterPress` with filters that are given. The stored ones point the other way."""

import torch
from kvpress import QFilterPress

from evictionary.evaluation.kvpress import layer


def score(keys, q_filters):
    press, module, found = QFilterPress(), layer(keys.shape[1], *keys.shape[1::2]), []
    for item, filters in zip(keys, q_filters, strict=True):  # a press has one set of filters
        press.q_filters = -filters[None]
        found.append(press.score(module, None, item[None], None, None, {}))
    return torch.cat(found)
