"""What a cache warns of once: that later tokens outnumber what was asked for, and that a method keeps more
than it may, or much less.
"""

import warnings
from collections.abc import Sequence

import torch

from evictionary.cache.layers import EvictingLayer
from evictionary.cache.settings import Settings
from evictionary.methods.method import Request, tokens_to_keep


class Notices:
    """The warnings of one cache."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.is_warned = False  # that later tokens stay
        self.is_told = False  # that a method keeps more than it may, or less than half of it

    def of_what_stays(self, layer: EvictingLayer) -> None:
        """Warn of a prompt that is read in blocks without
        `every`: later tokens outnumber it and what was asked for.
        """
        since, settings = layer.seen - layer.evicted_at, self.settings
        if self.is_warned or settings.every or settings.method is None or not 0 < layer.evicted_at <= since:
            return
        self.is_warned = since > tokens_to_keep(layer.seen, settings.compression_ratio, settings.budget)
        if self.is_warned:
            warnings.warn(
                f"the cache compressed the first {layer.evicted_at} tokens, and {since} later ones stay: to "
                "compress a prompt in blocks give the cache every=N, and after a turn of a chat call "
                "cache.compress()",
                stacklevel=2,
            )

    def of_what_is_too_much(self, request: Request, kept: torch.Tensor) -> None:
        """Warn where a select keeps more tokens [B, H_kv, T] than it may."""
        method = self.settings.method
        assert method is not None
        grows = "recursive" in method.traits and self.settings.every  # it keeps a fraction of each part
        if self.is_told or grows or not method.is_select or "own_budget" in method.traits:
            return
        for count, seen in zip(kept.sum(dim=(1, 2)).tolist(), request.seen or (), strict=True):
            stored, asked = count / kept.shape[1], method.most(seen, request)
            if stored > asked:
                self.is_told = True
                warnings.warn(
                    f"method {method.name}: the cache stores {stored:.5g} of {seen} tokens in each head of "
                    f"layer {request.layer_index}, where {asked} were asked for; a method that decides by "
                    'itself how many stay says TRAITS = {"own_budget"}',
                    stacklevel=2,
                )
                return

    def of_what_is_wasted(
        self, layer_index: int, seen: int, padding: Sequence[int], kept: torch.Tensor
    ) -> None:
        """Warn where a select keeps less than half of the tokens [B, H_kv, T] that it may; `padding` is that
        of each row, or of all.
        """
        method = self.settings.method
        assert method is not None
        decides = method.traits & {"own_budget", "moving_window", "recursive"}
        if self.is_told or not method.is_select or decides:
            return
        asked = sum(self.settings.amounts(layer_index, seen, padding))
        in_a_head = int(kept.sum()) / kept.shape[1]
        self.is_told = 2 * in_a_head < asked
        if self.is_told:
            warnings.warn(
                f"method {method.name}: keeps {in_a_head / len(kept):.4g} tokens in a head, where the budget "
                f"is {asked / len(kept):.4g}; a method that decides by itself how many stay says TRAITS = "
                '{"own_budget"}',
                stacklevel=2,
            )
