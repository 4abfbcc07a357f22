"""H2O in a cache: the attention that each token receives is added up while the model reads its prompt."""

from collections.abc import Callable
from typing import Any

import torch

from evictionary.optimized import gradients, h2o, kernels, softmax
from evictionary.policies import AttendPrompt, Compression, Policy


class H2O(Policy):
    def attending_prompt(self, method: Any) -> AttendPrompt | None:
        return attend_prompt

    def fused(self, compression: Compression) -> Callable[..., torch.Tensor] | None:
        """H2-1 of the scores that the prompt has left."""
        scores = compression.note
        return (
            None
            if scores is None
            else lambda queries, keys, *, budget: h2o.select_scored(scores, budget=budget)
        )


def attend_prompt(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """ATT-6 and H2-1 from the same products, where they are fast and no gradient is asked for.

    Args: queries [B, H_q, T, D], keys and values of a prompt without a mask. Returns [B, H_q, T, D_v] and the
    scores [B, H_kv, T].
    """
    is_fast = keys.device.type == "cpu" or kernels.take("received_attention", queries, keys, values)
    if not is_fast or gradients.are_wanted(queries, keys, values, softmax.current()):
        return None  # the model's own attention gives them for less
    return h2o.attend_and_score(queries, keys, values)
