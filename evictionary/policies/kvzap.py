"""KVzap in a cache: a surrogate that is fitted to a text, or to the prompt, and a window that moves."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evictionary.optimized import kvzap
from evictionary.policies import Policy, Source, State

READ = ("keys", "values", "w_o", "replay_queries", "replay_keys", "replay_hidden_states")


class KVzap(Policy):
    reads_all_keys = True

    def keeps_all(self, method: Any, options: Mapping[str, Any], state: State, stored: int) -> bool:
        """A layer stays whole as long as its tokens fit into the window, whatever a budget says."""
        return bool(stored <= options["window_size"])

    def recent(self, options: Mapping[str, Any]) -> int:
        """The window: the tokens before it have been judged."""
        return int(options["window_size"])

    def refitted(
        self, source: Source, readings: Sequence[Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """ZA-3, ZA-4: surrogate_weights [B, H_kv, hidden] and surrogate_bias [B, H_kv],
        of all texts together.
        """
        targets = [kvzap.target(*(states[name] for name in READ)) for states in readings]
        hidden_states = torch.cat([states["hidden_states"] for states in readings], dim=1)
        weights, bias = kvzap.fit(hidden_states, torch.cat(targets, dim=2))
        return {"surrogate_weights": weights.contiguous(), "surrogate_bias": bias}
