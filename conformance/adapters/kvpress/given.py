"""What presses around another press are given here: one whose scores are known, and a layer's projections."""

from types import SimpleNamespace

import torch
from kvpress import ScorerPress


class Given(ScorerPress):
    """A press that returns the scores that it was made with."""

    def __init__(self, scores, compression_ratio=0.0):
        super().__init__(compression_ratio)
        self.scores = scores

    def score(self, *unused):
        return self.scores.clone()


def layer(num_heads, num_kv_heads, head_dim, **more):
    """What presses read of an attention layer; its query projection is the identity."""
    config = SimpleNamespace(
        num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=head_dim,
        _attn_implementation="sdpa", **more,
    )  # fmt: skip
    return SimpleNamespace(
        config=config, layer_idx=0, head_dim=head_dim, num_key_value_groups=num_heads // num_kv_heads,
        q_proj=torch.nn.Identity(),
    )  # fmt: skip
