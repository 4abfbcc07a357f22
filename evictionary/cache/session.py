"""Watches the model of a cache: it takes what each forward reads, attends to what is stored, and has a layer
compressed when it is due.

A forward of the model calls in this order: `see_batch`; in each layer `see_hidden_states`, `take` and `hand`
around the storage, and `attend`; `see_end`. The cache calls `take` and `hand`, model_hooks.py the others.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from evictionary.cache import checks
from evictionary.cache.attending import Attending, Output, mask_of
from evictionary.cache.compression import Asked, Compressor
from evictionary.cache.layers import KEPT_AS, RECENT, EvictingLayer, forget_recurrent, is_recurrent
from evictionary.cache.model_hooks import Attention, look, watch
from evictionary.cache.reading import Reading
from evictionary.cache.settings import Settings
from evictionary.errors import require
from evictionary.models import versions
from evictionary.models.load import FORGETFUL
from evictionary.models.queries import logit_factor
from evictionary.models.weights import require_numbers
from evictionary.optimized.gradients import are_wanted


class Session:
    """What a cache does in a model, from a prompt to the last token. It keeps neither of the two alive.

    `recorded` are the states of the prompt that the settings name, by layer; `peak_tokens` is the largest
    number of tokens that any head has stored at once.
    """

    def __init__(self, cache: Cache, model: PreTrainedModel, settings: Settings) -> None:
        config = model.config.get_text_config()
        self.settings = settings
        self.attending = Attending(settings)
        self.reading = Reading(cache.layers)
        self._cache, self._model = weakref.ref(cache), weakref.ref(model)
        self._is_forgetful = config.model_type in FORGETFUL
        self._longest = getattr(config, "max_position_embeddings", None)
        self._start()

    def _start(self) -> None:
        """Wait for a prompt: watch the model until the cache no longer needs it, is closed, or is deleted."""
        self.reading.forget()
        self.compressor = Compressor(self.settings)
        self.recorded: dict[int, dict[str, torch.Tensor]] = {}
        self.peak_tokens = 0
        self.is_replaying = False
        self.is_stepping = False  # whether a captured step runs, which knows what it reads
        # of each layer that is still to be read a second time: its keys and values with their graph
        self._with_graph: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._is_announced = False  # whether the model has begun a forward whose tokens have not come yet
        # keys handed to the attention of a layer that has not called back yet
        self._handed: dict[int, torch.Tensor] = {}
        self.captured: dict[int, dict[str, Any]] = {}
        self.watch()

    @property
    def model(self) -> PreTrainedModel | None:
        """The model, or None once it is gone."""
        return self._model()

    @property
    def layers(self) -> list[Any]:
        """The storage of the cache."""
        return self.reading.layers

    # Watching the model

    def watch(self, attends: bool = True) -> None:
        """Look at the forwards of the model, and attend in its place. Raises RuntimeError if it is gone."""
        model, cache = self.model, self._cache()
        require(model is not None and cache is not None, "the model of this cache is gone", RuntimeError)
        if attends:
            is_shown = any(name.endswith("hidden_states") for name in self.settings.captured)
            self._attends = weakref.finalize(self, watch(self, model, hidden_states=is_shown))
        self._looks = weakref.finalize(self, look(cache, self, model))

    @property
    def is_watching(self) -> bool:
        """Whether the cache answers for the attention of the model."""
        return self._attends.alive

    def close(self) -> None:
        """Remove every hook from the model."""
        self._attends()
        self._looks()
        self._handed.clear()

    def close_if_settled(self) -> None:
        """Let the model attend by itself once it can do the rest: never, where nothing is evicted."""
        if self.settings.method is not None and self.settings.every:
            return
        layers = self.reading.evicting
        # asked after each layer of each token: the first layer that is not plain ends it
        if not all(layer.evicted_at and layer.is_plain for layer in layers):
            return
        # The mask of a model does not know that padding was removed.
        if self.settings.method is not None and self.reading.is_padded:
            return
        # One mask serves all layers of a model. In the middle of a forward they have not seen the same tokens
        # yet.
        if len({(layer.longest, layer.seen) for layer in layers}) == 1:
            self._attends()

    def reset(self) -> None:
        """Forget everything and wait for a new prompt."""
        self.close()
        for layer in self.layers:  # older versions of transformers would keep as many zeros instead
            if is_recurrent(layer):
                forget_recurrent(layer)
            if hasattr(layer, "get_seq_length"):
                layer.keys, layer.values, layer.is_initialized = None, None, False
            layer.reset()
        self._start()

    def copy(self, cache: Cache) -> Session:
        """The session of a copy of the cache, with layers of its own, to go on in another way."""
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        twin._cache = weakref.ref(cache)
        twin.reading, twin.compressor = self.reading.copy(cache.layers), self.compressor.copy()
        twin._handed, twin.captured = {}, {}
        if self._looks.alive:
            twin.watch(self.is_watching)
        return twin

    def select(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order; the layers have done so."""
        self.recorded = {
            index: {name: state[indices.to(state.device)] for name, state in recorded.items()}
            for index, recorded in self.recorded.items()
        }
        self.reading.select(indices)

    # A forward

    def see_batch(self, tokens: torch.Tensor, named: Mapping[str, Any]) -> None:
        """Take a forward that will read `tokens`, ids [B, M]
        or embeddings [B, M, hidden], with these arguments.

        Raises UsageError, and changes nothing, where its mask, its positions or the text of `generate()` are
        not of the text that was read. A model that attends by itself again may read padding in later turns;
        a later compression will know of it.
        """
        if not (self.is_replaying or self.is_stepping):
            is_twice = self.settings.reads_twice
            self.reading.compare(self.model, tokens, named, is_watched=self.is_watching, is_twice=is_twice)
        self._is_announced = True

    def see_step(self, tokens: torch.Tensor) -> None:
        """Take the tokens [B, 1] of a captured step, of which no caller says more."""
        checks.warn_of_length(self.reading.seen, 1, self._longest)
        self.reading.go_on(tokens)

    def see_hidden_states(self, layer_index: int, hidden_states: torch.Tensor) -> None:
        """Take the hidden states [B, M, hidden] that a layer reads."""
        name = "replay_hidden_states" if self.is_replaying else "hidden_states"
        self.captured.setdefault(layer_index, {})[name] = hidden_states

    def take(
        self, layer_index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the keys and values of new tokens, before a layer stores them: in one dtype. Raises UsageError
        or RuntimeError for tokens that it cannot go on with.
        """
        layer = self.layers[layer_index]
        if layer.get_seq_length() == 0:
            require_numbers(keys)
        if layer_index == self.reading.first:
            read, new = checks.require_one_length(self.layers), keys.shape[-2]
            if not self.is_stepping:
                checks.warn_of_length(read, new, self._longest)
            checks.require_remembered(self._is_forgetful, new, layer.get_seq_length())
            checks.require_announced(self._is_announced or not self.is_watching)
            self._is_announced = False
        if isinstance(layer, EvictingLayer) and keys.dtype != values.dtype:
            # under torch.autocast keys leave RoPE wider than values, and the attention casts both to the
            # narrower dtype
            dtype = min(keys.dtype, values.dtype, key=lambda each: each.itemsize)
            keys, values = keys.to(dtype), values.to(dtype)
        checks.require_seen(layer_index, layer_index in self._handed)
        return keys, values

    def waits(self, layer_index: int, keys: torch.Tensor) -> bool:
        """Whether the token that comes waits for the slot of another, and is not stored behind it."""
        layer = self.layers[layer_index]
        return (
            self.is_watching
            and isinstance(layer, EvictingLayer)
            and self.attending.replaces_a_token(layer_index, layer, self.reading, keys)
        )

    def hand(self, layer_index: int, keys: torch.Tensor, new: int) -> None:
        """Hand keys to the attention of a layer, which has seen `new` more tokens. Raises RuntimeError in a
        closed cache that would not see their queries.
        """
        layer = self.layers[layer_index]
        if not isinstance(layer, EvictingLayer):
            return
        if layer.seen == new:
            padding = self.reading.padding
            layer.padding = None if padding is None else padding.to(keys.device, copy=True)
        self.peak_tokens = max(self.peak_tokens, layer.longest)
        if new > 1:
            self.compressor.notices.of_what_stays(layer)
        needs_queries = self.settings.method is not None or bool(self.settings.record)
        if self.is_watching:
            self._handed[layer_index] = keys
        elif not layer.is_plain or (layer.evicted_at == 0 and needs_queries):
            raise RuntimeError(
                f"layer {layer_index}: got tokens after the cache was closed, wanted it open to see their "
                "queries"
            )

    def handed(self, layer_index: int, keys: torch.Tensor) -> int | None:
        """The layer whose attention was handed these keys by this cache; layers may share a module, which
        names one of them.
        """
        # a copy, made in one step: a forward of this cache in another thread may be changing it
        return next((index for index, own in list(self._handed.items()) if own is keys), None)

    def attend(
        self,
        layer_index: int,
        module: torch.nn.Module,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> Output:
        """Compute the attention of a layer, and compress the layer when it is due.

        Args: queries [B, H_q, M, D]; mask, the model's own; attention, the model's own, to be called with a
        mask. Under torch.autocast that one alone runs with it.
        """
        kind = queries.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return self._attend(layer_index, module, queries, mask, attention)
        dtype = torch.get_autocast_dtype(kind)

        def as_the_model_does(mask: torch.Tensor | None) -> Output:
            with torch.autocast(kind, dtype=dtype):
                return attention(mask)

        with torch.autocast(kind, enabled=False):
            queries = queries.to(self.layers[layer_index].dtype)
            return self._attend(layer_index, module, queries, mask, as_the_model_does)

    def _attend(
        self,
        layer_index: int,
        module: torch.nn.Module,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> Output:
        del self._handed[layer_index]
        layer = self.layers[layer_index]
        factor = logit_factor(module, queries.shape[-1])
        scaled = queries if abs(factor - 1) < 1e-6 else queries * factor
        is_prompt = layer.seen == queries.shape[2]
        if self.is_replaying:
            output = attention(mask)
            self._compress_replayed(layer_index, scaled)
            return output
        try:
            records = torch.is_grad_enabled() and layer.waiting is not None
            if records and are_wanted(queries, layer.slots(), layer.moments):
                layer.append(*layer.waiting)  # a step writes into what a graph needs
                layer.waiting = None
            if layer.waiting is not None:
                query = scaled[:, :, 0]
                replaced = self.attending.in_another_slot(layer_index, layer, self.reading, query)
                output = replaced[:, None], None
            elif is_prompt and self.settings.reads_twice:
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
        self.captured.pop(layer_index, None)
        self.close_if_settled()
        return output

    def _attend_and_compress(
        self,
        layer_index: int,
        queries: torch.Tensor,
        scaled: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> Output:
        layer, method = self.layers[layer_index], self.settings.method
        is_prompt, is_one_token = layer.seen == queries.shape[2], queries.shape[2] == 1
        self._observe(layer_index, scaled, is_prompt)
        is_due = layer.evicted_at == 0 or self.settings.is_due(layer.seen - layer.evicted_at)
        is_due &= not self.is_stepping  # a captured step compresses after its forward
        evicts_first = method is not None and "evicts_first" in method.traits
        if is_due and evicts_first and not is_prompt and is_one_token:
            self._compress_if_memory_allows(layer_index)
            is_due = False
        if is_prompt:
            output = self._attend_prompt(layer_index, scaled, mask, attention)
        elif layer.is_plain:
            chooses = method is not None and method.is_per_query and is_one_token
            if chooses and self.attending.serves_token(layer):
                query = scaled[:, :, 0]
                found = self.attending.over_chosen(layer_index, layer, self.reading, query)
                return attention(None) if found is None else (found, None)
            chosen = self.compressor.chosen(self.asked(layer_index)) if chooses else None
            output = attention(mask_of(layer, queries, chosen))
        else:
            output = self.attending.over_parts(layer_index, layer, scaled), None
        if is_due:
            self._compress_if_memory_allows(layer_index)
        return output

    def _attend_prompt(
        self,
        layer_index: int,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> Output:
        """The attention of a prompt: the model's own, or that
        of a policy, whose note waits for the compression.
        """
        layer = self.layers[layer_index]
        found = self.attending.over_prompt(layer_index, layer, queries) if mask is None else None
        if found is None:
            return attention(mask)
        output, self.captured[layer_index]["note"] = found
        return output, None

    def _observe(self, layer_index: int, queries: torch.Tensor, is_prompt: bool) -> None:
        """Keep the queries and hidden states that the method
        reads: those of the prompt, later the recent ones.
        """
        captured = self.captured.setdefault(layer_index, {})
        if "queries" in self.settings.captured:
            captured["queries"] = queries
        for name in self.settings.remembered & KEPT_AS.keys():
            recent = self.remember(layer_index, name, captured[name].detach())
            if not is_prompt:
                captured[name] = recent

    def remember(self, layer_index: int, name: str, states: torch.Tensor) -> torch.Tensor:
        """Let a layer keep the last states that the method reads, and return them."""
        layer: EvictingLayer = self.layers[layer_index]
        new = layer.seen - layer.evicted_at if layer.evicted_at else 0
        window = self.settings.window
        return layer.remember(name, states, RECENT if window is None else window + new)

    def see_end(self, tokens: torch.Tensor, named: Mapping[str, Any]) -> None:
        """After the prompt let the model read its tokens again, for a method that asks for it; `named` are
        the arguments of the forward.

        Raises UsageError for a model that no method can watch, before a token is drawn from its first logits.
        Each layer compresses while it reads the tokens, and gives them back before. They follow the prompt
        without an instruction, which no cache could write in the words of a model's tokenizer.
        """
        model, cache, layers = self.model, self._cache(), self.reading.evicting
        checks.require_stored(self._is_announced, model)
        is_new = not self.is_replaying and not any(layer.evicted_at for layer in layers)
        if model is None or not (self._handed or (self.settings.reads_twice and is_new)):
            return
        try:
            checks.require_watchable(model, self._handed)
            checks.require_readable_twice(tokens.shape[1], self._longest, self.reading.padding, named)
            self.is_replaying = True
            # what the layers hold with a graph, which the second reading is without
            is_graph = torch.is_grad_enabled()
            places = self.settings.places if is_graph else ()
            self._with_graph = {index: self.layers[index].slots() for index in places}
            given = {"input_ids" if tokens.ndim == 2 else "inputs_embeds": tokens}
            with torch.no_grad():
                model.base_model(**given, **versions.argument(cache), use_cache=True)
        except Exception:
            self.close()
            raise
        finally:
            self.is_replaying = False
        self.close_if_settled()

    def _compress_replayed(self, layer_index: int, queries: torch.Tensor) -> None:
        """Compress a layer that has read its prompt a second time, after it has given these tokens back."""
        layer = self.layers[layer_index]
        self.captured[layer_index] |= {
            "replay_queries": queries,
            "replay_keys": layer.take_back(queries.shape[2]),
        }
        if is_graph := layer_index in self._with_graph:
            layer.keys, layer.values = self._with_graph.pop(layer_index)
        with torch.set_grad_enabled(is_graph):
            self.compress(layer_index)
        self.captured.pop(layer_index)

    def see_failure(self) -> None:
        """Let go of the model after an exception that left a forward half read.

        Such a cache refuses more tokens, and says the way out. One that has read nothing of it goes on.
        """
        read = {layer.get_seq_length() for layer in self.layers if hasattr(layer, "get_seq_length")}
        if self._handed or len(read) > 1:
            self.close()

    # Compressing

    def asked(self, layer_index: int) -> Asked:
        """What a compression of a layer begins with."""
        captured = dict(self.captured.get(layer_index, {}))
        note = captured.pop("note", None)
        return Asked(self.model, self.reading, layer_index, captured, note)

    def compress(self, layer_index: int) -> None:
        """Compress a layer, or raise and change nothing."""
        layer, asked = self.layers[layer_index], self.asked(layer_index)
        if self.settings.record and layer.evicted_at == 0:
            recorded = {name: asked.captured[name] for name in self.settings.record}
            self.recorded.setdefault(layer_index, recorded)
        if self.settings.method is None:
            layer.evicted_at = layer.seen
            return
        for eviction in self.compressor.evictions(asked):
            eviction.carry_out()

    def compress_prefilled(self, layer_index: int, captured: Mapping[str, torch.Tensor]) -> None:
        """Compress a layer that was given a whole prompt, with the states that were captured of it."""
        self.peak_tokens = max(self.peak_tokens, self.layers[layer_index].longest)
        self.captured[layer_index] = dict(captured)
        self.compress(layer_index)
        for name in self.settings.remembered & KEPT_AS.keys():
            self.remember(layer_index, name, captured[name])

    def _compress_if_memory_allows(self, layer_index: int) -> None:
        """Compress a layer, or leave it whole until it is due again
        where the memory of a GPU is too small to compress it.
        """
        layer = self.layers[layer_index]
        try:
            self.compress(layer_index)
        except Exception as error:
            if layer.evicted_at == 0 or not checks.is_out_of_memory(error):
                raise
            warnings.warn(
                f"layer {layer_index}: out of memory, so {layer.longest} tokens stay until the next "
                "compression",
                stacklevel=2,
            )

    def compress_due(self) -> None:
        """Compress the layers that are due after a captured step, which compresses none."""
        for index in self.settings.places:
            layer = self.layers[index]
            if self.settings.is_due(layer.seen - layer.evicted_at):
                self._compress_if_memory_allows(index)

    def compress_again(self) -> None:
        """Compress the tokens that all layers have read since their last compression."""
        for index in self.settings.places:
            layer = self.layers[index]
            if 0 < layer.evicted_at < layer.seen:
                recent = {name: getattr(layer, kept_as) for name, kept_as in KEPT_AS.items()}
                self.captured[index] = {name: own for name, own in recent.items() if own is not None}
                self.compress(index)
                self.captured.pop(index)
        if not self.is_watching:
            self.close()
            self.watch()  # heads or layers may differ now
        self.close_if_settled()
