"""Shows a cache the model's padding, hidden states and queries, and lets the cache compute the attention.

It uses three extension points of transformers and torch, only as long as a cache needs them: a forward
pre-hook on the decoder, forward pre-hooks on its attention modules, and an attention function registered
beside the model's.
"""

import copy
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evictionary.errors import UsageError, require
from evictionary.models.load import loaded
from evictionary.models.queries import softmax_of
from evictionary.optimized.softmax import PLAIN

PREFIX = "evictionary_"
# what some models hand to their attention beside keys, values and a mask
MORE = ("position_bias", "sinks", "indices", "block_indices")

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""The model's own attention: called with another mask, it gives the output [B, M, H_q, D_v] and the
weights or None.
"""


class Watcher(Protocol):
    """The methods of a cache that the hooks call."""

    def see_hidden_states(self, layer_index: int, hidden_states: torch.Tensor) -> None: ...
    def see_end(self, tokens: torch.Tensor, named: Mapping[str, Any]) -> None: ...
    def handed(self, layer_index: int, keys: torch.Tensor) -> int | None: ...
    def attend(
        self,
        layer_index: int,
        module: torch.nn.Module,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


_underlying: dict[str, str] = {}
"""For each attention that is registered here, the one of transformers that it stands in front of."""
_watching: weakref.WeakSet[Any] = weakref.WeakSet()
_replaced: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, set[object]]] = weakref.WeakKeyDictionary()
"""For each model with our attention: the implementation to restore, and a token for each cache that needs
ours.
"""
_lock = threading.RLock()
"""Held while a cache starts or stops watching. The same thread may come again, where the garbage collector
deletes a cache.
"""


def watch(cache: Watcher, model: PreTrainedModel, *, hidden_states: bool = False) -> Callable[[], None]:
    """Show `cache` the forwards of `model`, and let it compute the attention, until the returned function
    is called.

    hidden_states says whether the cache wants to see those.
    Nothing here keeps the cache alive. Raises UsageError for a model whose attention is fixed.
    """
    reference: weakref.ref[Any] = weakref.ref(cache)
    modules = list(attention_modules(model).values()) if hidden_states else []
    user = object()
    with _lock:
        _start(model, user)
        _watching.add(cache)
    # nothing below raises, so every hook that is set is also removed
    hook = _hidden_states_hook(reference)
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    handles.append(model.base_model.register_forward_hook(_end_hook(reference), with_kwargs=True))

    def stop() -> None:
        for handle in handles:
            handle.remove()
        alive = reference()
        with _lock:
            if alive is not None:  # the weak set removes a deleted cache by itself
                _watching.discard(alive)
            _stop(model, user)

    return stop


def attention_modules(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The attention modules of a decoder by layer: modules with "Attention" in the class name and a layer
    index.
    """
    found = {
        int(module.layer_idx): module
        for module in model.modules()
        if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) is not None
    }
    require(
        found,
        f"model: got {type(model).__name__}, whose attention modules have no layer index, wanted a model "
        "with one in each",
    )
    return found


def attention_module(model: PreTrainedModel, layer_index: int) -> torch.nn.Module:
    """The attention module of a layer. Raises UsageError for a layer that shares that of another one."""
    found = attention_modules(model).get(layer_index)
    require(
        found is not None,
        f"model: got {type(model).__name__}, whose layers share an attention module, wanted a method that "
        "reads no weights of it",
    )
    return found


def output_projection(module: Any, values: torch.Tensor) -> torch.Tensor:
    """W_o of an attention module by query head, [H_q, D_v, hidden], in the dtype and on the device of values
    [..., D_v]. Raises UsageError for a module without `o_proj` or `dense`.
    """
    projection = getattr(module, "o_proj", None) or getattr(module, "dense", None)
    require(
        projection is not None,
        f"model: {type(module).__name__} has no o_proj or dense, which this method reads",
    )
    weight = loaded(projection, "weight").detach()
    return weight.to(values).T.unflatten(0, (-1, values.shape[-1]))


def look(cache: Any, model: PreTrainedModel) -> Callable[[], None]:
    """Show `cache` the mask and the tokens of each forward, until the returned function is called."""
    reference: Callable[[], Any] = weakref.ref(cache)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    @torch.compiler.disable
    def check(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        named, tokens = _read(module, arguments, named)
        cache = named.get("past_key_values")
        if cache is None or cache is not reference():
            return
        require(
            named.get("use_cache") is not False,
            "use_cache: got False with a cache, wanted True or no cache: each forward would read the whole "
            "text into it again",
        )
        if tokens is None:
            return
        attention = model.config._attn_implementation
        require(
            attention in _underlying or model not in _replaced,
            f"model: got the attention {attention}, chosen after the cache was made; wanted "
            "model.set_attn_implementation() "
            "before EvictingCache(model)",
        )
        if tokens.shape[1] or not cache.get_seq_length():
            require_prompt(tokens.shape[1], longest)
        mask, seen, several = named.get("attention_mask"), cache.get_seq_length(), tokens.shape[1] > 1
        require(
            mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2),
            f"attention_mask: got {getattr(mask, 'shape', type(mask))}, wanted [batch, tokens]: beside a "
            "method every token sees all tokens before it",
        )
        kinds = named.get("token_type_ids")
        require(
            not (seen and several and kinds is not None and kinds[:, -tokens.shape[1] :].any()),
            "token_type_ids: got an image after the first prompt, wanted images in the first prompt alone: "
            "this model reads them in both directions",
        )
        cache.see_batch(tokens, named)

    return model.base_model.register_forward_pre_hook(check, with_kwargs=True).remove


def _read(
    module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The arguments of a forward by name, given by place or not, and the ids [B, M] or the embeddings
    [B, M, hidden] that it reads.
    """
    if arguments:  # by the names of the class, whatever wraps the forward of the module
        named = dict(zip(_names(type(module).forward), arguments, strict=False)) | named
    return named, named.get("inputs_embeds") if named.get("input_ids") is None else named["input_ids"]


@functools.cache
def _names(forward: Callable[..., Any]) -> list[str]:
    """The arguments of a forward after `self`. Hooks ask at each token."""
    return list(inspect.signature(forward).parameters)[1:]


def _end_hook(reference: weakref.ref[Watcher]) -> Callable[..., None]:
    @torch.compiler.disable
    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        cache, (named, tokens) = reference(), _read(module, arguments, named)
        if named.get("past_key_values") is cache and cache is not None and tokens is not None:
            cache.see_end(tokens, named)

    return hook


def require_prompt(length: int, longest: int | None) -> None:
    """Raise UsageError for an empty prompt, or one of more tokens than the model has positions."""
    require(length != 0, "prompt: got no tokens, wanted at least one")
    require(
        longest is None or length <= longest,
        f"prompt: got {length} tokens, wanted at most the model's context of {longest}",
    )


def _hidden_states_hook(reference: weakref.ref[Watcher]) -> Callable[..., None]:
    @torch.compiler.disable
    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache, named = reference(), _read(module, arguments, named)[0]
        # GPT-NeoX calls its cache layer_past
        is_its_own = named.get("past_key_values", named.get("layer_past")) is cache
        if cache is not None and is_its_own:
            hidden_states = named["hidden_states"] if "hidden_states" in named else arguments[0]
            cache.see_hidden_states(int(module.layer_idx), hidden_states)

    return hook


def _start(model: PreTrainedModel, user: object) -> None:
    # a model that shares its config with a watched model has our attention already
    now = model.config._attn_implementation
    underlying, users = _replaced.get(model, (_underlying.get(now, now), set()))
    ours = _name(underlying)
    require(
        underlying in ("sdpa", "eager", "flex_attention") or "flash" in underlying or "/" in underlying,
        f"model: got {type(model).__name__} with the attention {underlying}, wanted "
        "attn_implementation='sdpa', 'eager', "
        "'flex_attention', a flash kind or a kernel of the hub",
    )
    require(
        model.device.type != "cpu" or ALL_ATTENTION_FUNCTIONS.get(underlying) is not flash_attention_forward,
        f"model: got {type(model).__name__} on a CPU with the attention {underlying}, which runs on GPUs "
        "alone; "
        "wanted attn_implementation='sdpa'",
    )
    _replaced[model] = (underlying, users)
    # before anything else: another cache that is deleted meanwhile leaves our attention in its place
    users.add(user)
    if len(users) == 1:
        AttentionInterface.register(ours, _answering_attention(underlying))
        if underlying in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(ours, ALL_MASK_ATTENTION_FUNCTIONS[underlying])
        _underlying[ours] = underlying
        model.set_attn_implementation(ours)
        if model.config._attn_implementation != ours:
            del _replaced[model]
            raise UsageError(
                f"model: {type(model).__name__} has a fixed attention, so no method can read its queries"
            )


def _name(underlying: str) -> str:
    """The name of our attention. transformers would load a kernel for a name with "flash" or "/" in it."""
    return PREFIX + underlying.replace("flash", "fused").replace("/", "_")


def _stop(model: PreTrainedModel, user: object) -> None:
    underlying, users = _replaced[model]
    users.discard(user)
    if users:
        return
    del _replaced[model]
    is_shared = any(other.config is model.config for other in _replaced)
    if model.config._attn_implementation == _name(underlying) and not is_shared:
        # a kernel that the user allowed before
        model.set_attn_implementation(underlying, allow_all_kernels=True)


def _answering_attention(underlying: str) -> Callable[..., Any]:
    """An attention function that calls the cache which handed out the keys, or else the model's own
    function `underlying`.
    """

    @torch.compiler.disable
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        def model_attention(mask: torch.Tensor | None) -> Any:
            is_the_caches = mask is not None and mask is not attention_mask
            # each modeling file has its own eager function, which alone knows a cap and a sink
            if underlying == "eager" or (is_the_caches and softmax_of(module) != PLAIN):
                function = sys.modules[type(module).__module__].eager_attention_forward
            else:  # the flash kinds and flex_attention take other masks than the cache makes
                function = ALL_ATTENTION_FUNCTIONS["sdpa" if is_the_caches else underlying]
            asked = module if underlying in ("sdpa", "eager") else _under_its_own_name(module, underlying)
            return function(asked, query, key, value, mask, *rest, **named)

        index = getattr(module, "layer_idx", None)  # that of an image or of sound has none
        with _lock:
            caches = list(_watching)
        for cache in caches:
            place = None if index is None else cache.handed(index, key)
            if place is not None:
                require_known_softmax(module, named)
                return cache.attend(place, module, query, attention_mask, model_attention)
        return model_attention(attention_mask)

    return attention


def require_known_softmax(module: torch.nn.Module, named: Mapping[str, Any]) -> None:
    """Raise UsageError where a model caps its logits or adds sinks in another way than its module says, or
    where its attention reads more.
    """
    told = named.get("softcap"), named.get("s_aux") is not None
    cap, sinks = softmax_of(module)
    require(
        not (more := [name for name in MORE if named.get(name) is not None]),
        f"model: got {type(module).__name__}, whose attention in layer {module.layer_idx} reads "
        f"{', '.join(more)} too: it is made for all tokens in a row; wanted keys and queries alone",
    )
    require(
        told == (cap, sinks is not None),
        f"model: got {type(module).__name__} with a softmax of its own, wanted a plain one, or a cap in "
        "attn_logit_softcapping "
        "and sinks in sinks",
    )


def _under_its_own_name(module: Any, underlying: str) -> Any:
    """A view of a module whose configuration names `underlying`: by this name the flash kinds look their
    kernel up.

    The model's own configuration stays as it is, for other threads read it.
    """
    view = copy.copy(module)
    view.config = copy.copy(module.config)
    view.config._attn_implementation_internal = underlying
    return view
