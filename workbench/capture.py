"""Lets a cache see what only the model sees while the prompt runs: its padding, the hidden states and the queries.

Three of transformers' and torch's own extension points, in place only until the prompt has been processed: a forward
pre-hook on the decoder, forward pre-hooks on its attention modules, and an attention function registered beside the model's.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workbench.errors import UsageError

PREFIX = "evictionary_recording_"


class Watcher(Protocol):
    """What a cache does with what it is shown."""

    def see_hidden_states(self, layer_index: int, hidden_states: torch.Tensor) -> None: ...
    def see_queries(self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor) -> None: ...


_awaiting_queries: weakref.WeakSet[Any] = weakref.WeakSet()
_recording: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, int]] = weakref.WeakKeyDictionary()
"""For each model with a recording attention: the implementation to go back to, and how many caches need the recording."""


def watch_prompt(cache: Watcher, model: PreTrainedModel, *, names: frozenset[str]) -> Callable[[], None]:
    """Show `cache` the prompt of `model`, with the states in `names`, until the returned function is called.

    Nothing here keeps the cache alive. Raises UsageError for a model whose attention cannot be recorded.
    """
    reference: weakref.ref[Any] = weakref.ref(cache)
    modules = attention_modules(model) if "hidden_states" in names else []
    if "queries" in names:
        _start_recording(model)
        _awaiting_queries.add(cache)
    # nothing below raises, so whatever is put in place is also taken out
    hook = _hidden_states_hook(reference)
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    handles.append(model.base_model.register_forward_pre_hook(_prompt_check(reference, model), with_kwargs=True))

    def stop() -> None:
        for handle in handles:
            handle.remove()
        if "queries" in names:
            alive = reference()
            if alive is not None:  # the set has dropped a dead one by itself
                _awaiting_queries.discard(alive)
            _stop_recording(model)

    return stop


def attention_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The attention modules of a decoder: those whose class says so and that know their layer."""
    found = [module for module in model.modules() if "Attention" in type(module).__name__ and hasattr(module, "layer_idx")]
    if not found:
        raise UsageError(f"model: found no attention modules with a layer index in {type(model).__name__}")
    return found


def _prompt_check(reference: weakref.ref[Any], model: PreTrainedModel) -> Callable[..., None]:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def check(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = named.get("past_key_values")
        if cache is None or cache is not reference():
            return
        tokens = named.get("input_ids")
        tokens = named.get("inputs_embeds") if tokens is None else tokens
        tokens = arguments[0] if tokens is None and arguments else tokens
        if tokens is not None:
            require_prompt(tokens.shape[1], longest)
        mask = named.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask.bool().all():
            raise UsageError("attention_mask: got padding, wanted prompts of equal length without any: padding would be scored")

    return check


def require_prompt(length: int, longest: int | None) -> None:
    """Raise UsageError for an empty prompt, or one of more tokens than the model has positions."""
    if length == 0:
        raise UsageError("prompt: got no tokens, wanted at least one")
    if longest is not None and length > longest:
        raise UsageError(f"prompt: got {length} tokens, wanted at most the model's context of {longest}")


def _layer_index(module: Any) -> int:
    return int(module.layer_idx)


def _hidden_states_hook(reference: weakref.ref[Watcher]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = reference()
        is_its_own = named.get("past_key_values") is cache
        if cache is not None and is_its_own:
            hidden_states = named["hidden_states"] if "hidden_states" in named else arguments[0]
            cache.see_hidden_states(_layer_index(module), hidden_states)

    return hook


def _start_recording(model: PreTrainedModel) -> None:
    underlying, count = _recording.get(model, (model.config._attn_implementation, 0))
    if count == 0:
        AttentionInterface.register(PREFIX + underlying, _recording_attention(underlying))
        if underlying in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(PREFIX + underlying, ALL_MASK_ATTENTION_FUNCTIONS[underlying])
        model.set_attn_implementation(PREFIX + underlying)
        if model.config._attn_implementation != PREFIX + underlying:
            raise UsageError(f"model: {type(model).__name__} has a fixed attention, so a method cannot read its queries")
    _recording[model] = (underlying, count + 1)


def _stop_recording(model: PreTrainedModel) -> None:
    underlying, count = _recording.pop(model)
    if count > 1:
        _recording[model] = (underlying, count - 1)
    elif model.config._attn_implementation == PREFIX + underlying:
        model.set_attn_implementation(underlying)


def _recording_attention(underlying: str) -> Callable[..., Any]:
    """The attention function of that name, which then shows its queries to the caches that wait for them."""

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        if underlying == "eager":  # each modeling file has its own
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = ALL_ATTENTION_FUNCTIONS[underlying]
        output = function(module, query, key, value, *rest, **named)
        for cache in list(_awaiting_queries):
            cache.see_queries(_layer_index(module), query, key)
        return output

    return attention
