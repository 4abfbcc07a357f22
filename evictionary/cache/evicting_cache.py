"""A transformers cache that physically removes what a method does not keep: after the prompt, in blocks, or while decoding."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from evictionary.cache import calibration, checks, compression, file, partial_attention
from evictionary.cache.arguments import checked
from evictionary.cache.inputs import require_suitable
from evictionary.cache.layers import KEPT_AS, EvictingLayer
from evictionary.cache.model_hooks import Attention, watch
from evictionary.errors import UsageError
from evictionary.methods.catalogue import CALIBRATED, CAPTURED_FOR, REPLAYED
from evictionary.methods.method import Method, Request, tokens_to_keep
from evictionary.models.load import is_sliding, require_supported, unwrapped
from evictionary.models.queries import logit_factor
from evictionary.policies import DEFAULT, hooks

CAPTURED = frozenset(CAPTURED_FOR.values())
"""The states that the model does not hand to a cache; the cache captures them if a method names them."""


class EvictingCache(Cache):
    """A cache for `model.generate(..., past_key_values=cache)` that compresses the tokens it has read.

    The prompt is the first forward of the model with this cache. Its tokens attend to one another in full; then each layer keeps
    the tokens that `method` chooses. Later tokens are appended, at their true positions. With `every`, a layer compresses again
    after that many new tokens: a prompt that is read in blocks of `every` tokens never takes more than the budget and a block,
    and a long answer does not grow the cache. Heads may keep different numbers of tokens; they are stored ragged, without
    padding, and rows of a batch may be padded on the left. Layers with a sliding window are left alone.

    Args: model, a decoder with rotary positions, also inside of a wrapper such as PEFT's; method, a name, a
    `path/to/file.py[:function]`, a composition such as `name+ada_kv` or `name+moments`, or None to keep everything;
    compression_ratio, the fraction to remove of all tokens seen, in [0, 1), or budget, the tokens to keep in each head, which
    replaces the ratio; options, the method's own; every, 0 for the prompt alone, by default the method's own value;
    seed, for methods that draw; record, states ("queries", "hidden_states") to keep for `from_prefilled`. Caches of one model may
    be used in several threads, each cache in one.
    Raises UsageError for an argument that cannot be used.
    """

    layers: list[Any]
    peak_tokens: int  # the largest number of tokens that any head has stored at once
    recorded: dict[int, dict[str, torch.Tensor]]
    padding: torch.Tensor | None  # [B], of the prompt
    counts_padding: bool  # whether the positions of the model count it
    calibrated: dict[int, calibration.State]
    _finalizer: Any
    _names: frozenset[str]
    _replaying: bool
    _is_announced: bool  # whether the model has begun a forward whose tokens have not come yet
    _is_warned: bool  # that later tokens stay
    _is_told: bool  # that a method keeps less than half of what it may
    _handed: dict[int, torch.Tensor]  # keys handed to the attention of a layer that has not called back yet
    _captured: dict[int, dict[str, torch.Tensor]]

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method | None = DEFAULT,
        compression_ratio: float = 0.5,
        options: Mapping[str, Any] | None = None,
        budget: int | None = None,
        *,
        every: int | None = None,
        seed: int = 0,
        record: Iterable[str] = (),
    ) -> None:
        model = unwrapped(model)
        require_supported(model)
        self.method, self.options, self.every = checked(method, compression_ratio, options, budget, every)
        self.compression_ratio = compression_ratio
        self.budget = budget
        self.seed = seed
        path = self.options.get("calibration")
        if self.method:
            require_suitable(model, self.method, self.every, bool(path), EvictingCache)
        self.calibrated = calibration.read(model, path) if path and self.method and CALIBRATED & self.method.reads else {}
        self.record = frozenset(record)
        if not self.record <= CAPTURED:
            raise UsageError(f"record: got {', '.join(sorted(self.record))}, wanted some of {', '.join(sorted(CAPTURED))}")
        config = model.config.get_text_config()
        layers: list[Any] = [
            DynamicSlidingWindowLayer(config.sliding_window) if is_sliding(config, index) else EvictingLayer()
            for index in range(config.num_hidden_layers)
        ]
        if (self.record | (self.method.captured if self.method else frozenset())) & REPLAYED and not all(
            isinstance(layer, EvictingLayer) for layer in layers
        ):
            raise UsageError("model: got layers with a sliding window, wanted full attention in all to read the prompt twice")
        self._policies = self.method.policies if self.method else ()
        self._step = next(filter(None, (stepping(self.method) for stepping in hooks(self._policies, "stepping"))), None)
        self._longest = getattr(config, "max_position_embeddings", None)
        super().__init__(layers=layers)
        self._model = weakref.ref(model)
        self._wait()

    @classmethod
    def from_prefilled(cls, model: PreTrainedModel, prefilled: Cache, *arguments: Any, **named: Any) -> EvictingCache:
        """Compress a prompt that `prefilled`, a full cache, already holds; `prefilled` stays unchanged.

        The other arguments are those of EvictingCache. A method that reads queries or hidden_states needs a `prefilled` that
        is an `EvictingCache(model, method=None, record=(...))`. Raises UsageError if tokens were removed from `prefilled`.
        """
        cache = cls(model, *arguments, **named)
        recorded = getattr(prefilled, "recorded", {})
        cache.padding = getattr(prefilled, "padding", None)
        cache.counts_padding = getattr(prefilled, "counts_padding", False)
        try:
            if len(prefilled.layers) != len(cache.layers):
                raise UsageError(
                    f"prefilled: got {len(prefilled.layers)} layers with tokens, wanted the model's {len(cache.layers)}"
                )
            for index, layer in enumerate(cache.layers):
                full: Any = prefilled.layers[index]
                if not isinstance(layer, EvictingLayer):
                    cache.layers[index] = copy.deepcopy(full)
                    continue
                checks.require_whole(full, index, recorded.get(index, {}))
                layer.update(full.keys, full.values)
                cache.peak_tokens = max(cache.peak_tokens, layer.longest)
                layer.padding = getattr(full, "padding", None)
                cache._captured[index] = dict(recorded.get(index, {}))
                cache._compress(index)
                for name in cache._remembered & KEPT_AS.keys():
                    layer.remember(name, recorded[index][name])
        except Exception:
            cache.close()
            raise
        cache._close_if_settled()
        return cache

    # called by the model

    @torch.compiler.disable  # a compiled model leaves its graph here: what a method keeps depends on the numbers
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer; return the keys and values for its attention: all stored ones, without ragged heads."""
        layer = self.layers[layer_idx]
        if layer_idx == 0:
            checks.require_one_text(self.layers, key_states.shape[-2], self._longest)
            checks.require_announced(self._is_announced or not self._finalizer.alive)
            self._is_announced = False
        if isinstance(layer, EvictingLayer) and key_states.dtype != value_states.dtype:
            # under torch.autocast keys leave RoPE wider than values, and the attention casts both to the narrower dtype
            dtype = min(key_states.dtype, value_states.dtype, key=lambda each: each.itemsize)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        checks.require_seen(layer_idx, layer_idx in self._handed)
        if self._replaces_a_token(layer_idx, key_states):
            layer.waiting = keys, values = key_states, value_states
            layer.seen += 1
        else:
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if isinstance(layer, EvictingLayer):
            if layer.seen == key_states.shape[-2]:
                layer.padding = None if self.padding is None else self.padding.to(keys.device)
            self.peak_tokens = max(self.peak_tokens, layer.longest)
            if layer_idx == 0 and key_states.shape[-2] > 1:
                self._warn_of_what_stays(layer)
            if self._finalizer.alive:
                self._handed[layer_idx] = keys
            elif not layer.is_plain or (layer.evicted_at == 0 and (self.method is not None or self.record)):
                raise RuntimeError(f"layer {layer_idx}: got tokens after the cache was closed, wanted it open to see their queries")
        return keys, values

    def get_mask_sizes(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        """The sizes of a layer's mask. Raises UsageError for a forward without a token, which no model can read."""
        checks.require_tokens(arguments[0] if arguments else named["query_length"], self.get_seq_length())
        return super().get_mask_sizes(*arguments, **named)

    def see_batch(self, padding: torch.Tensor | None, position_ids: torch.Tensor | None, length: int) -> None:
        """Take the padding and positions of a forward that will read `length` tokens of each row; model_hooks.py calls this."""
        self._is_announced = True
        checks.require_padding(padding, self.padding, length, self.get_seq_length())
        if self.get_seq_length() == 0:
            self.padding = None if padding is None else padding.cpu()
            self.counts_padding = padding is not None and position_ids is None

    def see_end(self, tokens: torch.Tensor) -> None:
        """After the prompt let the model read its tokens again, for a method that asks for it; model_hooks.py calls this.

        Raises UsageError for a model that no method can watch, before a token is drawn from its first logits. Each layer compresses
        while it reads the tokens, and gives them back before. They follow the prompt without an instruction, which no cache could
        write in the words of a model's tokenizer.
        """
        model = self.model
        if model is None:
            return
        try:
            checks.require_watchable(model, self._handed)
            if not self._names & REPLAYED or self._replaying or any(layer.evicted_at for layer in self.layers):
                return
            checks.require_readable_twice(tokens.shape[1], self._longest, self.padding)
            self._replaying = True
            with torch.no_grad():
                model.base_model(
                    **{"input_ids" if tokens.ndim == 2 else "inputs_embeds": tokens}, past_key_values=self, use_cache=True
                )
        except Exception:
            self.close()
            raise
        finally:
            self._replaying = False
        self._close_if_settled()

    def see_hidden_states(self, layer_index: int, hidden_states: torch.Tensor) -> None:
        """Take the hidden states [B, M, hidden] that a layer reads; model_hooks.py calls this."""
        if self._replaying:
            return
        self._captured.setdefault(layer_index, {})["hidden_states"] = hidden_states

    def handed(self, layer_index: int, keys: torch.Tensor) -> bool:
        """Whether the attention of a layer was handed these keys by this cache."""
        return self._handed.get(layer_index) is keys

    def attend(
        self, layer_index: int, module: torch.nn.Module, queries: torch.Tensor, mask: torch.Tensor | None, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the attention of a layer, and compress the layer when it is due; model_hooks.py calls this.

        Args: queries [B, H_q, M, D]; mask, the model's own; attention, the model's own, to be called with a mask. Under
        torch.autocast that one alone runs with it.
        """
        kind = queries.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return self._attend(layer_index, module, queries, mask, attention)
        dtype = torch.get_autocast_dtype(kind)

        def as_the_model_does(mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            with torch.autocast(kind, dtype=dtype):
                return attention(mask)

        with torch.autocast(kind, enabled=False):
            return self._attend(layer_index, module, queries.to(self.layers[layer_index].dtype), mask, as_the_model_does)

    def _attend(
        self, layer_index: int, module: torch.nn.Module, queries: torch.Tensor, mask: torch.Tensor | None, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        del self._handed[layer_index]
        layer = self.layers[layer_index]
        factor = logit_factor(module, queries.shape[-1])
        scaled = queries if abs(factor - 1) < 1e-6 else queries * factor
        is_prompt = layer.seen == queries.shape[2]
        if self._replaying:
            output = attention(mask)
            self._captured[layer_index] |= {"replay_queries": scaled, "replay_keys": layer.take_back(queries.shape[2])}
            self._compress(layer_index)
            self._captured.pop(layer_index)
            return output
        try:
            if layer.waiting is not None:
                output = self._replace_a_token(layer_index, scaled[:, :, 0])[:, None], None
            elif is_prompt and self._names & REPLAYED:
                self._observe(layer_index, scaled, is_prompt)
                return attention(mask)
            else:
                output = self._attend_and_compress(layer_index, queries, scaled, mask, attention)
        except Exception as error:
            if is_prompt and checks.is_out_of_memory(error):
                self.reset()  # as it was before this prompt
            else:
                self.close()  # the tokens just read are lost; the model gets its own attention back
            raise
        self._captured.pop(layer_index, None)
        self._close_if_settled()
        return output

    def _attend_and_compress(
        self,
        layer_index: int,
        queries: torch.Tensor,
        scaled: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = self.layers[layer_index]
        is_prompt = layer.seen == queries.shape[2]
        self._observe(layer_index, scaled, is_prompt)
        due = layer.evicted_at == 0 or self._is_due(layer)
        evicts_first = self.method is not None and "evicts_first" in self.method.traits
        if due and evicts_first and not is_prompt and queries.shape[2] == 1:
            self._compress_if_memory_allows(layer_index)
            due = False
        if is_prompt and mask is None and (ours := self._attend_prompt(layer_index, scaled)) is not None:
            output = ours, None
        elif is_prompt:
            output = attention(mask)
        elif layer.is_plain:
            output = attention(_mask(layer, queries))
        else:
            output = partial_attention.attend(scaled, layer, self._policies).transpose(1, 2).contiguous(), None
        if due:
            self._compress_if_memory_allows(layer_index)
        return output

    def _attend_prompt(self, layer_index: int, queries: torch.Tensor) -> torch.Tensor | None:
        """The attention [B, M, H_q, D_v] of a policy, which leaves a note for the compression that follows; None without one."""
        for attend_prompt in hooks(self._policies, "attend_prompt"):
            checks.require_finite(layer_index, *self.layers[layer_index].slots())
            found = attend_prompt(queries, *self.layers[layer_index].slots())
            if found is not None:
                self._captured[layer_index]["note"] = found[1]
                return found[0].transpose(1, 2).contiguous()
        return None

    # compression

    def _warn_of_what_stays(self, layer: EvictingLayer) -> None:
        if not (self._is_warned or self.every or self.method is None):
            asked = tokens_to_keep(layer.seen, self.compression_ratio, self.budget)
            self._is_warned = compression.warn_of_what_stays(layer.seen, layer.evicted_at, asked)

    def warn_of_what_is_wasted(self, kept: torch.Tensor, layer_index: int) -> None:
        """Warn, once, where a select keeps less than half of the tokens [B, H_kv, T] that it may."""
        method = self.method
        if method and method.is_select and not self._is_told and not method.traits & {"own_budget", "moving_window", "recursive"}:
            asked = sum(self.amounts(layer_index, self.layers[layer_index].seen))
            self._is_told = compression.warn_of_what_is_wasted(method.name, kept, asked)

    def _is_due(self, layer: EvictingLayer, coming: int = 0) -> bool:
        return self.every > 0 and layer.seen + coming - layer.evicted_at >= self.every

    def request(self, layer_index: int, **named: Any) -> Request:
        """What the arguments ask of a layer, and what else is said of it."""
        return Request(self.compression_ratio, self.budget, self.options, layer_index, len(self.layers), self.seed, **named)

    def amounts(self, layer_index: int, seen: int) -> list[int]:
        """The tokens that each row of a batch may keep in a head of this layer, once `seen` tokens have been read."""
        assert self.method is not None
        paddings = [0] if self.padding is None else self.padding.tolist()
        request = self.request(layer_index)
        return [self.method.amount(seen - padding, request) for padding in paddings]

    def _replaces_a_token(self, layer_index: int, key_states: torch.Tensor) -> bool:
        """Whether the one token that comes takes the slot of another, in a layer that is filled to its budget."""
        layer = self.layers[layer_index]
        if self._step is None or not isinstance(layer, EvictingLayer) or not self._finalizer.alive:
            return False
        is_one_token = key_states.shape[2] == 1 and not key_states.requires_grad
        if not is_one_token or not layer.state or not layer.is_full or not self._is_due(layer, coming=1):
            return False
        return set(self.amounts(layer_index, layer.seen + 1)) == {layer.stored}

    def _replace_a_token(self, layer_index: int, query: torch.Tensor) -> torch.Tensor:
        """The attention of the waiting token, [B, H_q, D_v], which takes the slot of the evicted token."""
        layer = self.layers[layer_index]
        key, value = layer.waiting
        checks.require_finite(layer_index, key, value)
        slots = layer.slots_to_replace()
        layer.waiting = None
        position = torch.full(slots[2].shape[:2], layer.seen - 1, device=slots[2].device)
        assert self._step is not None
        output = self._step(query, key[:, :, 0], value[:, :, 0], slots, layer.state, position)
        layer.evicted_at = layer.seen
        return output

    def _observe(self, layer_index: int, queries: torch.Tensor, is_prompt: bool) -> None:
        """Keep the queries and hidden states that the method reads: those of the prompt, later the recent ones."""
        layer = self.layers[layer_index]
        captured = self._captured.setdefault(layer_index, {})
        if "queries" in self._names:
            captured["queries"] = queries
        for name in self._remembered & KEPT_AS.keys():
            recent = layer.remember(name, captured[name].detach())
            if not is_prompt:
                captured[name] = recent

    def _compress_if_memory_allows(self, layer_index: int) -> None:
        """Compress a layer, or leave it whole until it is due again where the memory of a GPU is too small to compress it."""
        layer = self.layers[layer_index]
        try:
            self._compress(layer_index)
        except Exception as error:
            if layer.evicted_at == 0 or not checks.is_out_of_memory(error):
                raise
            warnings.warn(
                f"layer {layer_index}: out of memory, so {layer.longest} tokens stay until the next compression", stacklevel=2
            )

    def _compress(self, layer_index: int) -> None:
        """Compress a layer, or raise and change nothing."""
        layer, captured = self.layers[layer_index], dict(self._captured.get(layer_index, {}))
        if self.record and layer.evicted_at == 0:
            self.recorded[layer_index] = {name: captured[name] for name in self.record}
        if self.method is None:
            layer.evicted_at = layer.seen
        else:
            compression.compress(self, layer_index, captured.pop("note", None), captured)

    def compress(self) -> None:
        """Compress the tokens read since the last compression: the rest of a block, or a turn of a chat.

        Raises UsageError for a method that reads recent queries, or compresses each token once, in a cache without `every`.
        """
        if self.method is None:
            return
        if not self.every and (self.method.captured or self.method.traits & {"recursive", "prompt_only"}):
            raise UsageError(
                f"compress: got {self.method.name} with every=0, wanted a cache made with every=N, which remembers what it needs"
            )
        for index, layer in enumerate(self.layers):
            if isinstance(layer, EvictingLayer) and 0 < layer.evicted_at < layer.seen:
                recent = {name: getattr(layer, kept_as) for name, kept_as in KEPT_AS.items()}
                self._captured[index] = {name: states for name, states in recent.items() if states is not None}
                self._compress(index)
                self._captured.pop(index)
        if not self._finalizer.alive:
            self._watch()  # heads or layers may differ now
        self._close_if_settled()

    # opening and closing the cache

    def activate_past_recording(self) -> None:
        """Refuse assisted generation, which calls this before its first token."""
        if self.method is not None:
            raise UsageError(
                "generate: got assisted generation (assistant_model or prompt_lookup_num_tokens), wanted it without drafts: a "
                "forward that reads a prompt together with drafts would compress both"
            )
        super().activate_past_recording()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an EvictingCache watches its model, so it cannot be pickled; wanted cache.save(path)")

    def _wait(self) -> None:
        """Wait for a prompt: watch the model until the cache no longer needs it, is closed, or is deleted."""
        self._handed, self._captured, self.recorded = {}, {}, {}
        self.padding, self.counts_padding = None, False
        self._replaying = False
        self._is_announced = False
        self.peak_tokens = 0
        self._is_warned = self._is_told = False
        self._names = self.record | (self.method.captured if self.method else frozenset())
        # while decoding, `query` is the last one, and no history of it is needed
        later = set(self.method.inputs) - {"query"} if self.method and self.every else set()
        self._remembered = frozenset(CAPTURED_FOR[name] for name in later if name in CAPTURED_FOR)
        self._watch()

    @property
    def model(self) -> PreTrainedModel | None:
        """The model, which a cache does not keep alive."""
        return self._model()

    def _watch(self) -> None:
        model = self.model
        if model is None:
            raise RuntimeError("the model of this cache is gone")
        self._finalizer = weakref.finalize(self, watch(self, model, hidden_states="hidden_states" in self._names))

    def _close_if_settled(self) -> None:
        """Stop watching the model once its own attention can do the rest."""
        layers = [layer for layer in self.layers if isinstance(layer, EvictingLayer)]
        if self.method is not None and self.every:
            return
        if any(layer.evicted_at == 0 for layer in layers) or not all(layer.is_plain for layer in layers):
            return
        # One mask serves all layers of a model, so it must fit all layers; it does not know that padding was removed.
        unpadded = self.padding is None or self.method is None
        # In the middle of a forward, the layers have not seen the same tokens yet.
        if unpadded and len({(layer.longest, layer.seen) for layer in layers}) == 1:
            self.close()

    def close(self) -> None:
        """Remove every hook from the model. The cache does this by itself as soon as possible, and when it is deleted."""
        self._finalizer()
        self._handed.clear()

    def __enter__(self) -> EvictingCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, or raise and change nothing.

        Raises ValueError for tokens before the last eviction, and RuntimeError where a sliding window has lost tokens.
        """
        evicting = [layer for layer in self.layers if isinstance(layer, EvictingLayer)]
        for layer in evicting:
            layer.require_croppable(tokens_to_remove)
        sliding = [layer for layer in self.layers if not isinstance(layer, EvictingLayer)]
        for layer in (*sliding, *evicting):  # sliding windows refuse, all of them, before a layer is changed
            layer.crop(tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        super().batch_select_indices(indices)
        self.recorded = {
            index: {name: state[indices.to(state.device)] for name, state in recorded.items()}
            for index, recorded in self.recorded.items()
        }
        if self.padding is not None:
            self.padding = self.padding[indices.to(self.padding.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.get_seq_length():
            self.batch_select_indices(torch.arange(self.layers[0].keys.shape[0]).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder the batch for beam search."""
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        """Forget everything and wait for a new prompt."""
        self.close()
        for layer in self.layers:  # older versions of transformers would keep as many zeros instead
            layer.keys, layer.values, layer.is_initialized = None, None, False
        super().reset()
        self._wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        """Return a copy with tensors of its own, for another question; the copies share the method and the model."""
        if self.get_seq_length() == 0:
            raise ValueError("deepcopy: the cache has not read its prompt yet")
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        twin.layers = copy.deepcopy(self.layers, memo)
        twin._handed, twin._captured = {}, {}
        if self._finalizer.alive:
            twin._watch()
        return twin

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file, to be loaded again with the same model.

        Raises ValueError before the prompt, and UsageError for a path that cannot be written.
        """
        file.write(self, path)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> EvictingCache:
        """Read a cache that `save` wrote with the same model. Raises UsageError for another file or a model that does not fit."""
        model = unwrapped(model)
        settings, tensors = file.read(path, str(model.device))
        cache = None
        try:
            cache = cls(model, settings["method"], **{name: settings[name] for name in file.ARGUMENTS})
            file.restore(cache, model, settings, tensors, path)
        except (KeyError, TypeError) as error:
            if cache is not None:
                cache.close()
            raise UsageError(
                f"path: got {path}, wanted a file with every setting and tensor of a cache; it lacks {error}"
            ) from None
        cache._close_if_settled()
        return cache

    # memory

    @property
    def nbytes(self) -> int:
        """The bytes that the keys and values allocate: the sizes of their storages, each counted once.

        Of a layer with a sliding window only its window counts, which may be a view of more.
        """
        states = [state for layer in self.layers if isinstance(layer, EvictingLayer) for state in _states(layer)]
        windows = [state for layer in self.layers if not isinstance(layer, EvictingLayer) for state in _states(layer)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in states}
        return sum(storages.values()) + sum(state.nbytes for state in windows)

    @property
    def nbytes_full(self) -> int:
        """The bytes that the same tokens would take if nothing had been removed."""
        total = 0
        for layer in self.layers:
            seen = layer.get_seq_length()
            for state in (layer.keys, layer.values):
                if state is not None:
                    batch, heads, stored, width = state.shape
                    total += batch * heads * (seen if isinstance(layer, EvictingLayer) else stored) * width * state.element_size()
        return total

    @property
    def nbytes_beside(self) -> int:
        """The bytes beside keys and values: positions, lengths, moments and recent queries."""
        layers = [layer for layer in self.layers if isinstance(layer, EvictingLayer)]
        everything = sum(tensor.nbytes for layer in layers for tensor in layer.tensors().values())
        return everything - sum(state.nbytes for layer in layers for state in _states(layer))

    @property
    def tokens_kept(self) -> float:
        """The tokens stored in each head, on average over the batch, the heads and the layers without a sliding window."""
        layers = [layer for layer in self.layers if isinstance(layer, EvictingLayer) and layer.keys is not None]
        if not layers:
            return 0
        mean = float(torch.stack([layer.lengths.double().mean().cpu() for layer in layers]).mean())
        return int(mean) if mean == int(mean) else mean


def _states(layer: Any) -> list[torch.Tensor]:
    """The key and value tensors of a layer, including the flat tensors of ragged heads."""
    ragged = getattr(layer, "ragged", None)
    states = [layer.keys, layer.values, *((ragged.keys, ragged.values) if ragged is not None else ())]
    return [state for state in states if state is not None]


def _mask(layer: EvictingLayer, queries: torch.Tensor) -> torch.Tensor | None:
    """The additive mask [B, 1, M, stored] of the last M tokens over a layer's stored tokens; None if nothing is masked."""
    assert layer.keys is not None
    num_queries, stored = queries.shape[2], layer.keys.shape[2]
    if num_queries == 1 and layer.padding is None:
        return None
    visible = partial_attention.causal(num_queries, stored, queries.device)[None, None]
    if layer.padding is not None:  # nothing has been evicted yet
        visible = visible & (torch.arange(stored, device=queries.device) >= layer.padding[:, None, None, None])
    return torch.zeros(visible.shape, dtype=queries.dtype, device=queries.device).masked_fill(
        ~visible, torch.finfo(queries.dtype).min
    )
