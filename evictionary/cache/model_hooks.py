"""Shows a watcher the model's padding, hidden states and queries, and lets it compute the attention. A cache
has one, its session.

Three extension points of transformers and torch do it: a forward pre-hook and a forward hook on the decoder,
forward pre-hooks on its attention modules, and an attention function registered beside the model's.

Hooks are set once for each model, by its first cache, and go with its last one. They know no cache: each call
brings its own among its arguments, and that has its watcher. So a cache that comes or goes in one thread
changes nothing for a forward in another, and a watched model can be pickled.
"""

import copy
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evictionary.errors import UsageError, require
from evictionary.models import versions
from evictionary.models.queries import softmax_of
from evictionary.models.weights import device_of
from evictionary.optimized.softmax import PLAIN

PREFIX = "evictionary_"
# what some models hand to their attention beside keys, values and a mask
MORE = ("position_bias", "sinks", "indices", "block_indices")

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""The model's own attention: called with another mask, it gives the output [B, M, H_q, D_v] and the
weights or None.
"""


class Watcher(Protocol):
    """What the hooks call."""

    @property
    def model(self) -> PreTrainedModel | None: ...
    def see_batch(self, tokens: torch.Tensor, named: Mapping[str, Any]) -> None: ...
    def see_hidden_states(self, layer_index: int, hidden_states: torch.Tensor) -> None: ...
    def see_end(self, tokens: torch.Tensor, named: Mapping[str, Any]) -> None: ...
    def see_failure(self) -> None: ...
    def handed(self, layer_index: int, keys: torch.Tensor) -> int | None: ...
    def attend(
        self,
        layer_index: int,
        module: torch.nn.Module,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


_looking: weakref.WeakKeyDictionary[Cache, "_Look"] = weakref.WeakKeyDictionary()
"""For each cache that sees the forwards of a model, how."""
_attending: weakref.WeakSet[Watcher] = weakref.WeakSet()
"""The watchers that compute the attention of their model."""
_capturing: weakref.WeakSet[Watcher] = weakref.WeakSet()
"""The watchers that want the hidden states too."""
_underlying: dict[str, str] = {}
"""For each attention that is registered here, the one of transformers that it stands in front of."""
_lock = threading.RLock()
"""Held while a watcher starts or stops; the first and the last one of a model hold it while the model changes
its attention. The same thread may come again, where the garbage collector deletes a cache.
"""
_thread = threading.local()
"""The watcher of the forward that this thread has begun last, as a weak reference."""


class _Look(NamedTuple):
    """Whose forwards a cache sees, a decoder's, and who looks; a cache keeps its watcher alive."""

    decoder: weakref.ref[torch.nn.Module]
    watcher: weakref.ref[Watcher]


@dataclass
class _Users:
    """Who needs what is set on a model: a token for each watcher."""

    hooks: set[object] = field(default_factory=set)
    hidden_states: set[object] = field(default_factory=set)
    attention: set[object] = field(default_factory=set)
    underlying: str = ""  # the attention to restore


_users: weakref.WeakKeyDictionary[PreTrainedModel, _Users] = weakref.WeakKeyDictionary()


def look(cache: Cache, watcher: Watcher, model: PreTrainedModel) -> Callable[[], None]:
    """Show `watcher` the mask and the tokens of each forward
    with `cache`, until the returned function is called.

    Nothing here keeps one of the three alive.
    """
    user, alive, its_model = object(), weakref.ref(cache), weakref.ref(model)
    with _lock:
        users = _users.setdefault(model, _Users())
        # before anything else: another cache that is deleted meanwhile leaves the hooks in their place
        users.hooks.add(user)
        if len(users.hooks) == 1:
            _unhook(model.base_model)  # of a copy of a watched model
            model.base_model.register_forward_pre_hook(_see_batch, with_kwargs=True)
            model.base_model.register_forward_hook(_see_end, with_kwargs=True, always_call=True)
        _looking[cache] = _Look(weakref.ref(model.base_model), weakref.ref(watcher))

    def stop() -> None:
        with _lock:
            if (own := alive()) is not None:  # a deleted cache has left by itself
                _looking.pop(own, None)
            if (watched := its_model()) is not None:
                users.hooks.discard(user)
                if not users.hooks:
                    _unhook(watched.base_model)

    return stop


def watch(watcher: Watcher, model: PreTrainedModel, *, hidden_states: bool = False) -> Callable[[], None]:
    """Let `watcher` compute the attention of `model`, until
    the returned function is called; that of a cache looks too.

    hidden_states says whether it wants to see those. Nothing here keeps the watcher or the model alive.
    Raises UsageError for a model whose attention is fixed.
    """
    user, alive, its_model = object(), weakref.ref(watcher), weakref.ref(model)
    modules = list(attention_modules(model).values()) if hidden_states else []
    with _lock:
        users = _users.setdefault(model, _Users())
        _replace_attention(model, users, user)
        _attending.add(watcher)
        if hidden_states:
            _capturing.add(watcher)
            users.hidden_states.add(user)
            if len(users.hidden_states) == 1:
                for module in modules:
                    _unhook(module)
                    module.register_forward_pre_hook(_see_hidden_states, with_kwargs=True)

    def stop() -> None:
        with _lock:
            if (own := alive()) is not None:  # a deleted watcher has left by itself
                _attending.discard(own)
                _capturing.discard(own)
            if (watched := its_model()) is None:
                return
            users.hidden_states.discard(user)
            if hidden_states and not users.hidden_states:
                for module in attention_modules(watched).values():
                    _unhook(module)
            _restore_attention(watched, users, user)

    return stop


def attention_modules(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The attention modules of a decoder by layer: modules
    with "Attention" in the class name and a layer index.
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


# a compiled model leaves its graph in each hook: what a cache does depends on the numbers
@torch.compiler.disable
def _see_batch(module: torch.nn.Module, arguments: tuple[Any, ...], *given: Any) -> None:
    found = _forward(module, arguments, *given)
    if found is None:
        return
    watcher, cache, named, tokens = found
    _thread.watcher = weakref.ref(watcher)
    require(
        named.get("use_cache") is not False,
        "use_cache: got False with a cache, wanted True or no cache: each forward would read the whole "
        "text into it again",
    )
    if tokens is None:
        return
    model: Any = watcher.model
    _require_our_attention(watcher, model)
    if tokens.shape[1] or not cache.get_seq_length():
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
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
    watcher.see_batch(tokens, named)


@torch.compiler.disable
def _see_end(module: torch.nn.Module, arguments: tuple[Any, ...], *given: Any) -> None:
    *named, output = given
    found = _forward(module, arguments, *named)
    if found is None:
        return
    watcher, _, own, tokens = found
    if output is None:  # torch calls this hook after an exception too
        watcher.see_failure()
    elif watcher in _attending and tokens is not None:
        watcher.see_end(tokens, own)


@torch.compiler.disable
def _see_hidden_states(module: torch.nn.Module, arguments: tuple[Any, ...], *given: Any) -> None:
    if not given:
        return
    named = _by_name(module, arguments, given[0])
    watcher = _watcher_of(versions.cache_of(named))
    if watcher is not None and watcher in _capturing:
        hidden_states = named["hidden_states"] if "hidden_states" in named else arguments[0]
        watcher.see_hidden_states(int(module.layer_idx), hidden_states)


def _watcher_of(cache: Any) -> Watcher | None:
    """Who looks at the forwards with a cache, or None."""
    look = _looking.get(cache) if isinstance(cache, Cache) else None
    return None if look is None else look.watcher()


def _forward(
    module: torch.nn.Module, arguments: tuple[Any, ...], *given: dict[str, Any]
) -> tuple[Watcher, Cache, dict[str, Any], torch.Tensor | None] | None:
    """The watcher and the cache of a forward of its own model, the arguments by name, and the ids [B, M] or
    embeddings [B, M, hidden] that it reads; None for a forward without such a cache.

    torch leaves the named arguments out where another thread is just setting or removing the hook. The cache
    of this forward holds the hook, so that forward has none.
    """
    if not given:
        return None
    named = _by_name(module, arguments, given[0])
    cache = versions.cache_of(named)
    look = _looking.get(cache) if isinstance(cache, Cache) else None
    watcher = None if look is None or look.decoder() is not module else look.watcher()
    if watcher is None:
        return None
    tokens = named.get("inputs_embeds") if named.get("input_ids") is None else named["input_ids"]
    return watcher, cache, named, tokens


def _by_name(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name, given by place or not."""
    if arguments:  # by the names of the class, whatever wraps the forward of the module
        return dict(zip(_names(type(module).forward), arguments, strict=False)) | named
    return named


@functools.cache
def _names(forward: Callable[..., Any]) -> list[str]:
    """The arguments of a forward after `self`. Hooks ask at each token."""
    return list(inspect.signature(forward).parameters)[1:]


def _unhook(module: torch.nn.Module) -> None:
    """Remove our hooks from a module: those that were set here, and those that a copy brought with it."""
    for hooks, *flags in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ):
        for key in [key for key, hook in hooks.items() if hook in (_see_batch, _see_end, _see_hidden_states)]:
            for each in (hooks, *flags):
                each.pop(key, None)


def require_prompt(length: int, longest: int | None) -> None:
    """Raise UsageError for an empty prompt, or one of more tokens than the model has positions."""
    require(length != 0, "prompt: got no tokens, wanted at least one")
    require(
        longest is None or length <= longest,
        f"prompt: got {length} tokens, wanted at most the model's context of {longest}",
    )


def _require_our_attention(watcher: Watcher, model: PreTrainedModel) -> None:
    """Raise UsageError where the user has chosen another attention since the watcher began to attend."""
    with _lock:  # another thread may be changing it
        attention = model.config._attn_implementation
        is_replaced = attention in _underlying or watcher not in _attending
    require(
        is_replaced,
        f"model: got the attention {attention}, chosen after the cache was made; wanted "
        "model.set_attn_implementation() before EvictingCache(model)",
    )


def _replace_attention(model: PreTrainedModel, users: _Users, user: object) -> None:
    now = model.config._attn_implementation
    # a model that shares its config with a watched model has our attention already
    underlying = users.underlying if users.attention else _underlying.get(now, now)
    ours = _name(underlying)
    require(
        _can_be_replaced(underlying),
        f"model: got {type(model).__name__} with the attention {underlying}, wanted "
        "attn_implementation='sdpa', 'eager', "
        "'flex_attention', a flash kind or a kernel of the hub",
    )
    require(
        ALL_ATTENTION_FUNCTIONS.get(underlying) is not flash_attention_forward
        or device_of(model).type != "cpu",
        f"model: got {type(model).__name__} on a CPU with the attention {underlying}, which runs on GPUs "
        "alone; "
        "wanted attn_implementation='sdpa'",
    )
    require(
        underlying != "sdpa" or all(softmax_of(each, model) == PLAIN for each in model.modules()),
        f"model: got {type(model).__name__} with the attention sdpa, which leaves out the cap or the sinks "
        "of its softmax; wanted attn_implementation='eager'",
    )
    # before anything else: another cache that is deleted meanwhile leaves our attention in its place
    users.attention.add(user)
    users.underlying = underlying
    if len(users.attention) == 1:
        _register(underlying)
        model.set_attn_implementation(ours)
        if model.config._attn_implementation != ours:
            users.attention.discard(user)
            raise UsageError(
                f"model: {type(model).__name__} has a fixed attention, so no method can read its queries"
            )


def _restore_attention(model: PreTrainedModel, users: _Users, user: object) -> None:
    users.attention.discard(user)
    if users.attention:
        return
    is_shared = any(other.config is model.config for other, theirs in _users.items() if theirs.attention)
    if model.config._attn_implementation == _name(users.underlying) and not is_shared:
        # a kernel that the user allowed before
        model.set_attn_implementation(users.underlying, allow_all_kernels=True)


def _can_be_replaced(underlying: str) -> bool:
    return underlying in ("sdpa", "eager", "flex_attention") or "flash" in underlying or "/" in underlying


def _register(underlying: str) -> None:
    """Register our attention in front of one of transformers, under a name of its own."""
    ours = _name(underlying)
    if ours not in _underlying:
        AttentionInterface.register(ours, _answering_attention(underlying))
        if underlying in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(ours, ALL_MASK_ATTENTION_FUNCTIONS[underlying])
        _underlying[ours] = underlying


def _name(underlying: str) -> str:
    """The name of our attention. transformers would load a kernel for a name with "flash" or "/" in it."""
    return PREFIX + underlying.replace("flash", "fused").replace("/", "_")


def _answering_attention(underlying: str) -> Callable[..., Any]:
    """An attention function that calls the watcher which handed
    out the keys, or else the model's own function `underlying`.
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

        index: Any = getattr(module, "layer_idx", None)  # that of an image or of sound has none
        for watcher in () if index is None else _candidates():
            place = watcher.handed(index, key)
            if place is not None:
                require_known_softmax(module, named)
                return watcher.attend(place, module, query, attention_mask, model_attention)
        return model_attention(attention_mask)

    return attention


def _candidates() -> Iterator[Watcher]:
    """The watchers that may have handed out the keys of an attention: first that of this thread's forward,
    then all that attend, for a model may run its layers in other threads.
    """
    own = getattr(_thread, "watcher", lambda: None)()
    if own is not None and own in _attending:
        yield own
    with _lock:
        others = [watcher for watcher in _attending if watcher is not own]
    yield from others


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
    """A view of a module whose configuration names `underlying`:
    by this name the flash kinds look their kernel up.

    The model's own configuration stays as it is, for other threads read it.
    """
    view = copy.copy(module)
    view.config = copy.copy(module.config)
    view.config._attn_implementation_internal = underlying
    return view


# Once, before any model runs: so a model that was pickled while a cache watched it finds its attention again.
for _each in ("eager", *ALL_ATTENTION_FUNCTIONS):
    if _can_be_replaced(_each) and not _each.startswith((PREFIX, "paged")):
        _register(_each)
