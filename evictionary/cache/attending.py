"""The attention of new tokens over what a layer stores: by a policy's own function, over parts of several
lengths, or of a token that takes the slot of an evicted one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from evictionary.cache import checks, partial_attention
from evictionary.cache.layers import EvictingLayer
from evictionary.cache.reading import Reading
from evictionary.cache.settings import Settings
from evictionary.optimized.softmax import PLAIN, of_model

Output = tuple[torch.Tensor, torch.Tensor | None]
"""What the attention of a model returns: [B, M, H_q, D_v], and the weights or None."""


class Attending:
    """The attention in the layers of a cache, with what the policies of its method bring to it.

    `step` and `step_in_heads` are the functions of a policy for a token that takes another's slot, or None.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        policies, method = settings.policies, settings.method
        is_plain = all(softmax.sinks is None for softmax in settings.softmaxes.values())
        is_exact = method is None or not method.quantised
        stepping = policies if is_plain and is_exact else ()  # a step knows no sink, and quantises nothing
        self.step = _first(policy.stepping(method) for policy in stepping)
        self.step_in_heads = _first(policy.stepping_in_heads(method) for policy in stepping)
        self._of_chosen = _first(policy.attending(method) for policy in policies)
        self._of_prompt = _first(policy.attending_prompt(method) for policy in policies)

    def over_prompt(
        self, layer_index: int, layer: EvictingLayer, queries: torch.Tensor
    ) -> tuple[torch.Tensor, Any] | None:
        """The attention [B, M, H_q, D_v] of a policy, with its
        note for the compression that follows; None without one.
        """
        if self._of_prompt is None:
            return None
        checks.require_finite(layer_index, *layer.slots())
        with of_model(self.settings.softmax(layer_index, len(queries))):
            found = self._of_prompt(queries, *layer.slots())
        if found is None:
            return None
        output, note = found
        return output.transpose(1, 2).contiguous(), note

    def over_parts(self, layer_index: int, layer: EvictingLayer, queries: torch.Tensor) -> torch.Tensor:
        """The attention [B, M, H_q, D_v] over the parts of a layer: ragged heads, later tokens, moments."""
        softmax = self.settings.softmaxes.get(layer_index, PLAIN)
        output = partial_attention.attend(queries, layer, self.settings.policies, softmax)
        return output.transpose(1, 2).contiguous()

    def serves_token(self, layer: EvictingLayer) -> bool:
        """Whether a policy attends for a token that chooses what it attends to."""
        return self._of_chosen is not None and layer.is_full

    def over_chosen(
        self, layer_index: int, layer: EvictingLayer, reading: Reading, query: torch.Tensor
    ) -> torch.Tensor | None:
        """The attention [B, 1, H_q, D_v] of a token [B, H_q, D] that chooses what it attends to; None where
        it attends to all tokens.
        """
        assert self._of_chosen is not None
        settings = self.settings
        keys, values = layer.slots()
        checks.require_finite(layer_index, keys[:, :, -1:], values[:, :, -1:])
        budget, *_ = settings.amounts(layer_index, layer.seen, reading.padding_of_rows(layer))
        place = settings.places.index(layer_index)
        with of_model(settings.softmax(layer_index, len(query))):
            found = self._of_chosen(query, keys, values, settings.all_options, layer.known, place, budget)
        return None if found is None else found[:, None]

    def replaces_a_token(
        self, layer_index: int, layer: EvictingLayer, reading: Reading, keys: torch.Tensor
    ) -> bool:
        """Whether the one token that comes takes the slot
        of another, in a layer that is filled to its budget.
        """
        if (self.step or self.step_in_heads) is None:
            return False
        is_one_token = keys.shape[2] == 1 and not keys.requires_grad
        is_due = self.settings.is_due(layer.seen + 1 - layer.evicted_at)
        if not (is_one_token and layer.state and is_due):
            return False
        if layer.ragged_slots is not None:
            return self.step_in_heads is not None and layer.is_ragged_alone
        if self.step is None or not layer.is_full:
            return False
        amounts = self.settings.amounts(layer_index, layer.seen + 1, reading.padding_of_rows(layer))
        return set(amounts) == {layer.stored}

    def in_another_slot(
        self, layer_index: int, layer: EvictingLayer, reading: Reading, query: torch.Tensor
    ) -> torch.Tensor:
        """The attention [B, H_q, D_v] of the waiting token, which takes the slot of the evicted token."""
        assert layer.waiting is not None
        key, value = layer.waiting
        checks.require_finite(layer_index, key, value)
        new = key[:, :, 0], value[:, :, 0]
        position = layer.position_of_newest()
        if layer.ragged_slots is None:
            assert self.step is not None
            slots = layer.slots_to_replace()
            layer.waiting = None
            output = self.step(query, *new, slots, layer.state, position)
        else:
            layer.waiting = None
            assert self.step_in_heads is not None
            budgets = self.settings.amounts(layer_index, layer.seen, reading.padding_of_rows(layer))
            budgets *= len(key) // len(budgets)  # one for all rows where none is padded
            cache, state = layer.ragged_slots, layer.state_to_change()
            output, gone, stays = self.step_in_heads(query, *new, cache, state, position, budgets)
            layer.replace_in_heads(gone, stays, *new)
        layer.evicted_at = layer.seen
        return output


def mask_of(
    layer: EvictingLayer, queries: torch.Tensor, chosen: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The additive mask [B, 1, M, stored] of the last M tokens over a layer's stored tokens; None if
    nothing is masked.

    chosen [B, H_q, stored] says what one token attends to; the mask is [B, H_q, 1, stored] then.
    """
    num_queries, stored = queries.shape[2], layer.stored
    if num_queries == 1 and layer.is_full and chosen is None and layer.clock is None:
        return None
    if layer.clock is None:
        causal = partial_attention.causal(num_queries, stored, queries.device)[None, None]
    else:  # the places behind the token are empty
        places = torch.arange(len(layer.slots()[0][0, 0]), device=queries.device)
        causal = (places <= layer.clock.end)[None, None, None]
    visible = causal if chosen is None else chosen[:, :, None]
    if not layer.is_full:  # in all heads the same
        visible = visible & layer.contents()[3][:, :1, None]
    return torch.zeros(visible.shape, dtype=queries.dtype, device=queries.device).masked_fill(
        ~visible, torch.finfo(queries.dtype).min
    )


Function = TypeVar("Function")


def _first(functions: Iterable[Function | None]) -> Function | None:
    """The first function of a policy that has one."""
    return next((function for function in functions if function is not None), None)
