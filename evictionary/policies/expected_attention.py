"""Expected Attention in a cache: the queries to come are those so far, brought to before RoPE and on to
the next positions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from evictionary.models.queries import average_rotation, rotation, turned, unrotated
from evictionary.optimized.expected_attention import BLOCK_TOKENS, statistics_of_blocks
from evictionary.policies import Policy, Source


class ExpectedAttention(Policy):
    reads_before_rope = True
    needs_no_cap = True  # EA-7 is the mean of exp(q . k), which has no closed form under a cap

    def supply(self, source: Source, states: Mapping[str, Any], position: int) -> dict[str, torch.Tensor]:
        queries = states["queries"]
        positions = torch.arange(position - queries.shape[2], position, device=queries.device)
        mean, covariance = future_statistics(source.model, source.layer_index, queries, positions, position)
        return {"query_mean": mean, "query_covariance": covariance}


def future_statistics(
    model: PreTrainedModel, layer_index: int, queries: torch.Tensor, positions: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """EA-5, EA-6: mean [B, H_q, D] and covariance [B, H_q, D, D]
    of the queries, averaged over the next positions.

    Args: queries [B, H_q, N, D], after RoPE, at positions [N]; position, of the next token.
    """
    parts = (queries, *rotation(model, layer_index, positions))
    blocks = zip(*(part.split(BLOCK_TOKENS, dim=-2) for part in parts), strict=True)
    mean, covariance = statistics_of_blocks(unrotated(*block) for block in blocks)
    cos, sin = average_rotation(model, layer_index, position, queries.device)
    covariance = turned(turned(covariance, cos, sin).mT, cos, sin).mT.contiguous()
    return turned(mean, cos, sin), covariance
