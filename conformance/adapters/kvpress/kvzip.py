"""kvpress's `KVzipPress` for a text that is one chunk: its score, given the states of the second reading."""

import torch
from kvpress import KVzipPress

from conformance.adapters.kvpress.given import layer

ARRAY_LIBRARY = "torch"
DOMAIN = {"dtype": ("float32",)}


def score(keys, replay_queries, replay_keys):
    batch, heads, length, head_dim = keys.shape
    num_heads, replayed = replay_queries.shape[1:3]
    press = KVzipPress()
    press.context_length = press.end_idx = length
    press.score_val = torch.zeros(1, batch, heads, length)
    hidden = replay_queries.transpose(1, 2).reshape(batch, replayed, -1)
    no_turn = torch.ones(batch, replayed, head_dim), torch.zeros(batch, replayed, head_dim)
    both = torch.cat([keys, replay_keys], dim=2)
    press.score_kvzip(
        layer(num_heads, heads, head_dim), hidden, both, both, None, {"position_embeddings": no_turn}
    )
    return press.score_val[0]
