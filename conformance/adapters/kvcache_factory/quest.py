"""KVCache-Factory's Quest, with as many heads of keys as of queries. The caller says which tokens are recent:
the last page.
"""

import torch

from conformance.borrowed import leave_out, take

_found = take(
    "kvcache_factory",
    "pyramidkv/quest.py",
    *("_last_query", "build_quest_page_metadata", "score_quest_pages"),
    *("select_quest_pages", "_expand_pages_to_tokens", "select_quest_tokens"),
)


def page_bounds(keys, *, page_size=16):
    return _found.build_quest_page_metadata(keys, page_size=page_size)


def for_each_query(query, *states):
    return [each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in states]


def bounds(query, low, high):
    return _found.score_quest_pages(query, *for_each_query(query, low, high))


def select(query, keys, layer_index, *, budget, page_size=16, skipped_layers=2):
    leave_out(layer_index < skipped_layers, "layers that attend to all, which are the caller's")
    length, recent = keys.shape[2], (keys.shape[2] - 1) % page_size + 1
    whole = budget if budget >= length else max(0, budget // page_size - 1) * page_size + recent
    found = _found.select_quest_tokens(
        query, *for_each_query(query, keys), page_size=page_size, token_budget=whole, recent_size=recent
    )
    return torch.zeros(*query.shape[:2], length, dtype=torch.bool).scatter(2, found, True)
