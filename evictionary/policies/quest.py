"""Quest in a cache: the bounds of the pages go from one token to the next, and a token attends without a mask
of the model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from evictionary.optimized import quest
from evictionary.policies import Policy


class Quest(Policy):
    def attending(self, method: Any) -> Callable[..., torch.Tensor | None] | None:
        return attend_token if method.function is quest.select else None


def attend_token(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    options: Mapping[str, Any],
    known: dict[str, Any],
    layer_index: int,
    budget: int,
) -> torch.Tensor | None:
    """QU-2..4: the attention [B, H_q, D_v] of the last token, or None where it attends to all tokens.

    Args: query [B, H_q, D]; keys [B, H_kv, T, D] and values, its own included; known, what the layer
    remembers of its stored tokens until one of them goes; budget, the tokens that each query head reads.
    """
    if budget >= keys.shape[2] or layer_index < options["skipped_layers"]:
        return None
    if "pages" not in known:
        known["pages"] = quest.Pages(keys.detach(), options["page_size"])
    return quest.attend_pages(query, keys, values, known["pages"], budget)
