"""Protection of both ends behind any method (`+protect`),
and with `prompt=true` of the whole prompt while decoding.

The state is `prompt`: the tokens of each row that the first forward has read.
"""

from typing import Any

import torch

from evictionary.policies import Compression, Policy, State


class Protect(Policy):
    def serves(self, method: Any) -> bool:
        return bool(method.protects)

    def opened(self, compression: Compression) -> State:
        """The length of a prompt without padding, where it is to stay."""
        batch, _, length, _ = compression.keys.shape
        return {"prompt": [length] * batch} if compression.options["prompt"] else {}

    def evicted(self, compression: Compression, kept: torch.Tensor) -> None:
        """The length of a padded prompt, once it is known which places hold a token."""
        is_prompt, filled = compression.new == kept.shape[2], compression.filled
        if "prompt" in compression.state and is_prompt and filled is not None:
            compression.state["prompt"] = filled[:, 0].sum(dim=-1).tolist()
