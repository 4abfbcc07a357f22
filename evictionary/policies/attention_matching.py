"""Attention Matching in a cache: the kept tokens have a bias and values that fit the second reading."""

from collections.abc import Callable

import torch

from evictionary.optimized import attention_matching
from evictionary.optimized.cache import compress
from evictionary.policies import Compression, Policy


class AttentionMatching(Policy):
    needs_no_cap = True  # AM-3 counts exponentials of logits without a cap
    is_slow = True  # it solves for as many numbers as are kept, in each head
    stands_for_evicted = True  # AM-3 gives the mass of the evicted tokens to the kept ones

    def fused(self, compression: Compression) -> Callable[..., torch.Tensor]:
        """AM-1, AM-3 and AM-4: the mask, the bias as a part of the state, and the fitted values in place of
        the old ones. A choice is made without a graph; bias and values carry the one that the cache records.
        """
        is_recording = torch.is_grad_enabled()

        def select(keys: torch.Tensor, replay_queries: torch.Tensor, *, budget: int) -> torch.Tensor:
            kept = attention_matching.select(keys, replay_queries, budget=budget)
            with torch.set_grad_enabled(is_recording):
                bias = attention_matching.fit_bias(replay_queries, keys, kept)
                values = attention_matching.fit_values(replay_queries, keys, compression.values, kept, bias)
                own = compress(keys, compression.values, kept)
                compression.compressed = own._replace(values=values.flatten(0, 2).to(own.values))
            compression.state["bias"] = bias
            return kept

        return select
