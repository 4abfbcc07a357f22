"""kvpress's `KVzipPress` for a text that is one chunk: its score, given the states of the second reading."""

import torch
from kvpress import KVzipPress

from evictionary.evaluation.kvpress import layer, unturned


def score(keys, replay_queries, replay_keys):
    batch, heads, length, head_dim = keys.shape
    press = KVzipPress()
    press.context_length = press.end_idx = length
    press.score_val = torch.zeros(1, batch, heads, length)
    hidden, turns = unturned(replay_queries)
    both, module = torch.cat([keys, replay_keys], dim=2), layer(replay_queries.shape[1], heads, head_dim)
    press.score_kvzip(module, hidden, both, both, None, {"position_embeddings": turns})
    return press.score_val[0]
