"""kvpress's `ExpectedAttentionPress` without its sinks: the
score of given statistics, and their averaging over RoPE.
"""

from types import SimpleNamespace

import torch
from kvpress import ExpectedAttentionPress


def score(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    module = SimpleNamespace(config=SimpleNamespace(num_attention_heads=query_mean.shape[1]))
    press = ExpectedAttentionPress(n_sink=0, epsilon=epsilon)
    press.get_query_statistics = lambda *unused: (query_mean, query_covariance)
    return press.score(module, None, keys, values, None, {})


def average_rope(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    head_dim = query_mean.shape[-1]

    def turns(states, positions):  # what a model's rotary embedding returns
        angles = positions[0, :, None] * theta ** (
            -torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        )
        both = torch.cat([angles, angles], dim=-1)[None]
        return both.cos().to(states.dtype), both.sin().to(states.dtype)

    module = SimpleNamespace(head_dim=head_dim, rotary_emb=turns)
    return ExpectedAttentionPress(n_future_positions=horizon).apply_avg_rope(
        module, query_mean, query_covariance, position
    )
