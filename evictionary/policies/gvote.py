"""GVote in a cache: queries of hidden states that are drawn from those so far vote."""

from collections.abc import Mapping
from typing import Any

import torch

from evictionary.models.queries import average_rotation, logit_factor, project, turned
from evictionary.policies import Policy, Source

SAMPLES = 8
"""Sampled queries for each query head: the paper takes 8 or more."""
SINKS = 4
"""First tokens whose hidden states are not counted (GV-A4)."""


class GVote(Policy):
    reads_before_rope = True

    def supply(self, source: Source, states: Mapping[str, Any], position: int) -> dict[str, torch.Tensor]:
        """GV-A4 to GV-A8: queries [B, H_q, S, D] of sampled hidden states, averaged over the next positions.

        The hidden states [B, M, C] are those of the last M tokens. The rows and the heads share the noise of
        the generator: a row keeps in a batch what it keeps alone.
        """
        hidden_states = states["hidden_states"]
        num_tokens = hidden_states.shape[1]
        # the last tokens of a long text include no such token
        sinks = max(0, SINKS - (position - num_tokens))
        observed = hidden_states[:, min(sinks, num_tokens - 1) :].float()
        mean = observed.mean(dim=1, keepdim=True)
        # In blocks that stay in a processor's cache: torch.var over an axis that is not the last takes ten
        # times as long on a CPU.
        squares = sum(
            (block - mean).square_().sum(dim=1, keepdim=True) for block in observed.split(128, dim=1)
        )
        variance = squares / observed.shape[1]
        noise = torch.randn(1, SAMPLES, observed.shape[2], generator=states["generator"])
        drawn = mean + variance.sqrt() * noise.to(observed.device)
        queries = project(source.model, source.module, drawn.to(hidden_states.dtype)).float()
        cos, sin = average_rotation(source.model, source.layer_index, position, queries.device)
        sampled = turned(queries, cos, sin) * logit_factor(source.module, queries.shape[-1])
        return {"sampled_queries": sampled.to(states["keys"].dtype)}
