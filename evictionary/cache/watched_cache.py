"""The half of a cache that a model calls: it takes new tokens, attends to what is stored, and compresses a
layer when it is due.
"""

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from transformers import Cache, PreTrainedModel

from evictionary.cache import calibration, callers, checks, compression, partial_attention
from evictionary.cache.arguments import checked
from evictionary.cache.inputs import require_suitable
from evictionary.cache.layers import KEPT_AS, RECENT, EvictingLayer, layers_of
from evictionary.cache.model_hooks import Attention, attention_modules, look, watch
from evictionary.cache.text import Text
from evictionary.errors import require
from evictionary.methods.catalogue import CALIBRATED, CAPTURED_FOR, REPLAYED, captured
from evictionary.methods.method import Method, Request
from evictionary.models import versions
from evictionary.models.load import FORGETFUL, require_supported, unwrapped
from evictionary.models.queries import logit_factor, softmax_of
from evictionary.models.weights import require_numbers
from evictionary.optimized.gradients import are_wanted
from evictionary.optimized.softmax import PLAIN, Softmax, of_model
from evictionary.policies import DEFAULT

CAPTURED = frozenset(CAPTURED_FOR.values())
"""The states that the model does not hand to a cache; the cache captures them if a method names them."""


class WatchedCache(Cache):
    """A cache that watches its model. The arguments are those of EvictingCache, the other half."""

    layers: list[Any]
    peak_tokens: int  # the largest number of tokens that any head has stored at once
    recorded: dict[int, dict[str, torch.Tensor]]
    padding: torch.Tensor | None  # [B], of the prompt
    counts_padding: bool  # whether the positions of the model count it
    text: Text  # the tokens that were read
    softmax: dict[int, Softmax]  # of the layers
    # of each layer that has read the prompt, for a method that compares them: its scores and preferences
    stages: list[tuple[int, torch.Tensor, torch.Tensor]]
    _finalizer: Any  # alive while the cache answers for the attention
    _reads: frozenset[str]  # the inputs of the method that it has to find
    _names: frozenset[str]
    _replaying: bool
    # of each layer that is still to be read a second time: its keys and values with their graph
    _with_graph: dict[int, tuple[torch.Tensor, torch.Tensor]]
    _is_announced: bool  # whether the model has begun a forward whose tokens have not come yet
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
            require_suitable(model, self.method, self.every, bool(path), type(self))
        self.calibrated = (
            calibration.read(model, path) if path and self.method and CALIBRATED & self.method.reads else {}
        )
        self.record = frozenset(record)
        require(
            self.record <= CAPTURED,
            f"record: got {', '.join(sorted(self.record))}, wanted some of {', '.join(sorted(CAPTURED))}",
        )
        config = model.config.get_text_config()
        layers = layers_of(model.config)
        # a calibration file holds the others
        self._reads = (self.method.reads if self.method else frozenset()) - (
            CALIBRATED if self.calibrated else frozenset()
        )
        require(
            not (self.record | captured(self._reads)) & REPLAYED
            or all(type(layer) is EvictingLayer for layer in layers),
            "model: got layers with a sliding window or a recurrent state, wanted full attention alone in "
            "all to read the prompt "
            "twice",
        )
        self._first = next(index for index, layer in enumerate(layers) if hasattr(layer, "get_seq_length"))
        self._policies = self.method.policies if self.method else ()
        self.softmax = {
            index: softmax_of(module, model) for index, module in attention_modules(model).items()
        }
        is_plain = all(softmax.sinks is None for softmax in self.softmax.values())
        stepping = self._policies if is_plain else ()  # a step knows no sink
        self._step = _first(policy.stepping(self.method) for policy in stepping)
        self._step_in_heads = _first(policy.stepping_in_heads(self.method) for policy in stepping)
        self._attend_chosen = _first(policy.attending(self.method) for policy in self._policies)
        self._attend_whole = _first(policy.attending_prompt(self.method) for policy in self._policies)
        self._is_forgetful = config.model_type in FORGETFUL
        self._longest = getattr(config, "max_position_embeddings", None)
        self._places = [index for index, layer in enumerate(layers) if isinstance(layer, EvictingLayer)]
        super().__init__(layers=layers)
        self._model = weakref.ref(model)
        self._wait()

    # a compiled model leaves its graph here: what a method keeps depends on the numbers
    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer; return the keys and values for
        its attention: all stored ones, without ragged heads.
        """
        layer = self.layers[layer_idx]
        if layer.get_seq_length() == 0:
            require_numbers(key_states)
        if layer_idx == self._first:
            read = checks.require_one_length(self.layers)
            checks.warn_of_length(read, key_states.shape[-2], self._longest)
            checks.require_remembered(self._is_forgetful, key_states.shape[-2], layer.get_seq_length())
            checks.require_announced(self._is_announced or not self._finalizer.alive)
            self._is_announced = False
        if isinstance(layer, EvictingLayer) and key_states.dtype != value_states.dtype:
            # under torch.autocast keys leave RoPE wider than values, and the attention casts both to the
            # narrower dtype
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
                layer.padding = None if self.padding is None else self.padding.to(keys.device, copy=True)
            self.peak_tokens = max(self.peak_tokens, layer.longest)
            if not self.is_warned and key_states.shape[-2] > 1:
                compression.warn_of_what_stays(self, layer)
            if self._finalizer.alive:
                self._handed[layer_idx] = keys
            elif not layer.is_plain or (layer.evicted_at == 0 and (self.method is not None or self.record)):
                raise RuntimeError(
                    f"layer {layer_idx}: got tokens after the cache was closed, wanted it open to see their "
                    "queries"
                )
        return keys, values

    def get_mask_sizes(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        """The sizes of a layer's mask. Raises UsageError for
        a forward without a token, which no model can read.
        """
        length = arguments[0] if arguments else named["query_length"]
        callers.require_new_tokens(length, self.get_seq_length(), None)
        return super().get_mask_sizes(*arguments, **named)

    def see_batch(self, tokens: torch.Tensor, named: Mapping[str, Any]) -> None:
        """Take a forward that will read `tokens`, ids [B, M] or embeddings [B, M, hidden], with these
        arguments; model_hooks.py calls this.

        Raises UsageError, and changes nothing, where its mask, its positions or the text of `generate()` are
        not of the text that was read. A model that attends by itself again may read padding in later turns;
        `compress` will know of it.
        """
        if not self._replaying:
            self._compare(tokens, named)
        self._is_announced = True

    def _compare(self, tokens: torch.Tensor, named: Mapping[str, Any]) -> None:
        """Compare what a caller says with what was read, and then take it."""
        mask, position_ids = named.get("attention_mask"), named.get("position_ids")
        (rows, length), seen = tokens.shape[:2], checks.require_one_length(self.layers)
        generating = callers.given_to_generate()
        whole = callers.whole_text(generating)
        callers.require_blocks(generating, seen)
        callers.require_new_tokens(length, seen, whole)
        checks.require_not_checkpointed(self.model)
        checks.require_read_twice(self.evicting.values(), bool(self._names & REPLAYED) and seen > 0)
        if seen:
            checks.require_rows(rows, self.rows)
        self.text.fit(seen, rows)
        callers.require_columns(generating, seen)
        if whole is not None and seen:
            callers.require_same_text(whole, self.text, self.padding_slots(rows))

        def is_looked_at(told: torch.Tensor) -> bool:
            return told.device.type == "cpu" or length > 1 or not seen or generating is not None

        real = None  # where the mask does not say, all tokens are
        if mask is not None:
            callers.require_mask(mask, rows, length, seen)
            if is_looked_at(mask):
                callers.require_ones_and_zeros(mask)
                callers.require_same_padding(mask, self.padding_slots(rows))
                real = mask[:, seen:].bool().cpu()
                checks.require_left_padding(real, seen, self._finalizer.alive)
        else:
            callers.require_told(self._is_padded and self._is_partly_the_models, seen, length)
        shifts = self.text.shifts
        if position_ids is None:
            is_padded = self._is_padded or (real is not None and not real.all())
            finds_own = self._finds_positions(is_padded, named)
            shifts = callers.shifts_without(shifts, seen, finds_own=finds_own)
        else:
            has_planes = getattr(position_ids, "ndim", 0) == 3 and self._has_planes
            callers.require_position_shape(position_ids, rows, length, has_planes=has_planes)
            if is_looked_at(position_ids):
                shifts = callers.shifts_after(position_ids, real, rows, seen, shifts)
        if real is not None and not real.all():
            self._take_padding(real, shifts)
        self.text.read(tokens)
        self.text.shifts = shifts

    def _take_padding(self, real: torch.Tensor, shifts: list[float]) -> None:
        """Remember the padding of a forward, whose tokens are real [B, M], with the shifts after it."""
        if not self.get_seq_length():
            self.padding = (~real).sum(dim=1)
            counted = torch.tensor(shifts).expand(len(real))[self.padding > 0]
            self.counts_padding = not (counted < 0).all()
        else:
            holes = torch.cat([self.padding_slots(len(real)), ~real], dim=1)
            for layer in self.evicting.values():
                layer.holes = torch.nn.functional.pad(holes, (0, 1)).to(layer.device)

    def padding_slots(self, rows: int) -> torch.Tensor:
        """Which of the tokens that were read are padding, [B, T], on the CPU."""
        seen = self.get_seq_length()
        padding = torch.zeros(rows, 1) if self.padding is None else self.padding[:, None]
        slots, holes = torch.arange(seen) < padding, next(iter(self.evicting.values())).holes
        if holes is not None:
            known = holes[:, :seen].cpu()
            slots[:, : known.shape[1]] |= known
        return slots

    @property
    def _is_padded(self) -> bool:
        return self.padding is not None or any(layer.holes is not None for layer in self.evicting.values())

    @property
    def _has_planes(self) -> bool:
        """Whether the positions of an image differ from plane to plane, as in an M-RoPE."""
        model: Any = self.model
        rope = getattr(model.config.get_text_config(), "rope_parameters", None)
        return hasattr(model.base_model, "rope_deltas") or "mrope" in str(rope)

    def _finds_positions(self, is_padded: bool, named: Mapping[str, Any]) -> bool:
        """Whether the model, given no positions, may take others than those of all tokens in a row."""
        base: Any = getattr(self.model, "base_model", None)
        if not hasattr(base, "rope_deltas"):
            return False
        goes_on = self.get_seq_length() > 0 and base.rope_deltas is not None
        return is_padded or goes_on or bool(checks.media(named))

    @property
    def _is_partly_the_models(self) -> bool:
        """Whether the model attends in some layer by itself, with its own mask."""
        return not self._finalizer.alive or any(getattr(layer, "is_sliding", False) for layer in self.layers)

    @property
    def rows(self) -> int:
        """The rows that are held, from where the slots lie: to ask for keys would sort them."""
        first = self.layers[self._first]
        return len(first.slots()[0] if isinstance(first, EvictingLayer) else first.keys)

    def see_end(self, tokens: torch.Tensor, named: Mapping[str, Any]) -> None:
        """After the prompt let the model read its tokens again, for a method that asks for it;
        model_hooks.py calls this with the arguments of the forward.

        Raises UsageError for a model that no method can watch, before a token is drawn from its first logits.
        Each layer compresses while it reads the tokens, and gives them back before. They follow the prompt
        without an instruction, which no cache could write in the words of a model's tokenizer.
        """
        model = self.model
        checks.require_stored(self._is_announced, model)
        is_asked = (
            self._names & REPLAYED
            and not self._replaying
            and not any(layer.evicted_at for layer in self.evicting.values())
        )
        if model is None or not (self._handed or is_asked):
            return
        try:
            checks.require_watchable(model, self._handed)
            checks.require_readable_twice(tokens.shape[1], self._longest, self.padding, named)
            self._replaying = True
            # what the layers hold with a graph, which the second reading is without
            self._with_graph = (
                {index: layer.slots() for index, layer in self.evicting.items()}
                if torch.is_grad_enabled()
                else {}
            )
            with torch.no_grad():
                model.base_model(
                    **{"input_ids" if tokens.ndim == 2 else "inputs_embeds": tokens},
                    **self.argument,
                    use_cache=True,
                )
        except Exception:
            self.close()
            raise
        finally:
            self._replaying = False
        self._close_if_settled()

    def see_failure(self) -> None:
        """Let go of the model after an exception that left a forward half read; model_hooks.py calls this.

        Such a cache refuses more tokens, and says the way out. One that has read nothing of it goes on.
        """
        read = {layer.get_seq_length() for layer in self.layers if hasattr(layer, "get_seq_length")}
        if self._handed or len(read) > 1:
            self.close()

    def see_hidden_states(self, layer_index: int, hidden_states: torch.Tensor) -> None:
        """Take the hidden states [B, M, hidden] that a layer reads; model_hooks.py calls this."""
        name = "replay_hidden_states" if self._replaying else "hidden_states"
        self._captured.setdefault(layer_index, {})[name] = hidden_states

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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the attention of a layer, and compress
        the layer when it is due; model_hooks.py calls this.

        Args: queries [B, H_q, M, D]; mask, the model's own; attention, the model's own, to be called with a
        mask. Under torch.autocast that one alone runs with it.
        """
        kind = queries.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return self._attend(layer_index, module, queries, mask, attention)
        dtype = torch.get_autocast_dtype(kind)

        def as_the_model_does(mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            with torch.autocast(kind, dtype=dtype):
                return attention(mask)

        with torch.autocast(kind, enabled=False):
            return self._attend(
                layer_index, module, queries.to(self.layers[layer_index].dtype), mask, as_the_model_does
            )

    def _attend(
        self,
        layer_index: int,
        module: torch.nn.Module,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        del self._handed[layer_index]
        layer = self.layers[layer_index]
        factor = logit_factor(module, queries.shape[-1])
        scaled = queries if abs(factor - 1) < 1e-6 else queries * factor
        is_prompt = layer.seen == queries.shape[2]
        if self._replaying:
            output = attention(mask)
            self._captured[layer_index] |= {
                "replay_queries": scaled,
                "replay_keys": layer.take_back(queries.shape[2]),
            }
            if is_graph := layer_index in self._with_graph:
                layer.keys, layer.values = self._with_graph.pop(layer_index)
            with torch.set_grad_enabled(is_graph):
                self._compress(layer_index)
            self._captured.pop(layer_index)
            return output
        try:
            if layer.waiting is not None and are_wanted(queries, layer.slots(), layer.moments):
                layer.append(*layer.waiting)  # a step writes into what a graph needs
                layer.waiting = None
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
            chooses = self.method is not None and self.method.is_per_query and queries.shape[2] == 1
            if chooses and self._attend_chosen is not None and layer.is_full:
                return self._attend_token(layer_index, scaled[:, :, 0], attention)
            output = attention(
                _mask(layer, queries, compression.chosen(self, layer_index) if chooses else None)
            )
        else:
            own = self.softmax.get(layer_index, PLAIN)
            output = (
                partial_attention.attend(scaled, layer, self._policies, own).transpose(1, 2).contiguous(),
                None,
            )
        if due:
            self._compress_if_memory_allows(layer_index)
        return output

    def _attend_token(
        self, layer_index: int, query: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention of a token [B, H_q, D] that chooses what it attends to, by a policy."""
        layer, request = self.layers[layer_index], self.request(layer_index)
        assert self.method is not None and self._attend_chosen is not None
        keys, values = layer.slots()
        checks.require_finite(layer_index, keys[:, :, -1:], values[:, :, -1:])
        options, (budget, *_) = {**self.method.options, **self.options}, self.amounts(layer_index, layer.seen)
        with of_model(self.softmax_of_batch(layer_index, len(query))):
            found = self._attend_chosen(
                query, keys, values, options, layer.known, request.layer_index, budget
            )
        return attention(None) if found is None else (found[:, None], None)

    def _attend_prompt(self, layer_index: int, queries: torch.Tensor) -> torch.Tensor | None:
        """The attention [B, M, H_q, D_v] of a policy, which leaves a note for the compression that
        follows; None without one.
        """
        if self._attend_whole is None:
            return None
        checks.require_finite(layer_index, *self.layers[layer_index].slots())
        with of_model(self.softmax_of_batch(layer_index, len(queries))):
            found = self._attend_whole(queries, *self.layers[layer_index].slots())
        if found is None:
            return None
        output, self._captured[layer_index]["note"] = found
        return output.transpose(1, 2).contiguous()

    def softmax_of_batch(self, layer_index: int, batch: int) -> Softmax:
        """The softmax of a layer with sinks [B, H_q]."""
        own = self.softmax.get(layer_index, PLAIN)
        return Softmax(own.cap, None if own.sinks is None else own.sinks.expand(batch, -1))

    def _is_due(self, layer: EvictingLayer, coming: int = 0) -> bool:
        return self.every > 0 and layer.seen + coming - layer.evicted_at >= self.every

    def request(self, layer_index: int, **named: Any) -> Request:
        """What the arguments ask of a layer, and what else is said of it."""
        return Request(
            self.compression_ratio,
            self.budget,
            self.options,
            self._places.index(layer_index),
            len(self._places),
            self.seed,
            **named,
        )

    def amounts(self, layer_index: int, seen: int) -> list[int]:
        """The tokens that each row of a batch may keep in a
        head of this layer, once `seen` tokens have been read.
        """
        assert self.method is not None
        request, padding = self.request(layer_index), self.padding_until(layer_index)[:, -1]
        return [self.method.amount(seen - count, request) for count in padding.tolist()]

    def padding_until(self, layer_index: int) -> torch.Tensor:
        """The padding [B or 1, N] up to each of the first positions, and in the last column all of it."""
        padding = torch.zeros(1, dtype=torch.int64) if self.padding is None else self.padding
        holes = self.layers[layer_index].holes  # of a full cache, the padding of its prompt too
        return padding[:, None] if holes is None else holes.cumsum(dim=1).cpu()

    def _replaces_a_token(self, layer_index: int, key_states: torch.Tensor) -> bool:
        """Whether the one token that comes takes the slot
        of another, in a layer that is filled to its budget.
        """
        layer = self.layers[layer_index]
        if (self._step or self._step_in_heads) is None or not isinstance(layer, EvictingLayer):
            return False
        is_one_token = key_states.shape[2] == 1 and not key_states.requires_grad
        if (
            not is_one_token
            or not layer.state
            or not self._is_due(layer, coming=1)
            or not self._finalizer.alive
        ):
            return False
        if layer.ragged_slots is not None:
            return self._step_in_heads is not None and layer.is_ragged_alone
        return (
            self._step is not None
            and layer.is_full
            and set(self.amounts(layer_index, layer.seen + 1)) == {layer.stored}
        )

    def _replace_a_token(self, layer_index: int, query: torch.Tensor) -> torch.Tensor:
        """The attention of the waiting token, [B, H_q, D_v], which takes the slot of the evicted token."""
        layer = self.layers[layer_index]
        key, value = layer.waiting
        checks.require_finite(layer_index, key, value)
        new = key[:, :, 0], value[:, :, 0]
        position = torch.full(key.shape[:2], layer.seen - 1, device=key.device)
        if layer.ragged_slots is None:
            assert self._step is not None
            slots = layer.slots_to_replace()
            layer.waiting = None
            output = self._step(query, *new, slots, layer.state, position)
        else:
            layer.waiting = None
            assert self._step_in_heads is not None
            budgets = self.amounts(layer_index, layer.seen)
            budgets *= len(key) // len(budgets)  # one for all rows where none is padded
            cache, state = layer.ragged_slots, layer.state_to_change()
            output, gone, stays = self._step_in_heads(query, *new, cache, state, position, budgets)
            layer.replace_in_heads(gone, stays, *new)
        layer.evicted_at = layer.seen
        return output

    def _observe(self, layer_index: int, queries: torch.Tensor, is_prompt: bool) -> None:
        """Keep the queries and hidden states that the method
        reads: those of the prompt, later the recent ones.
        """
        layer = self.layers[layer_index]
        captured = self._captured.setdefault(layer_index, {})
        if "queries" in self._names:
            captured["queries"] = queries
        for name in self._remembered & KEPT_AS.keys():
            recent = self._remember(layer, name, captured[name].detach())
            if not is_prompt:
                captured[name] = recent

    def _remember(self, layer: EvictingLayer, name: str, states: torch.Tensor) -> torch.Tensor:
        """Let a layer keep the last states that the method reads, and return them."""
        assert self.method is not None
        new = layer.seen - layer.evicted_at if layer.evicted_at else 0
        options = {**self.method.options, **self.options}
        windows = [window for policy in self._policies if (window := policy.recent(options)) is not None]
        return layer.remember(name, states, windows[0] + new if windows else RECENT)

    def _compress_if_memory_allows(self, layer_index: int) -> None:
        """Compress a layer, or leave it whole until it is due again where the memory of a GPU is too small
        to compress it.
        """
        layer = self.layers[layer_index]
        try:
            self._compress(layer_index)
        except Exception as error:
            if layer.evicted_at == 0 or not checks.is_out_of_memory(error):
                raise
            warnings.warn(
                f"layer {layer_index}: out of memory, so {layer.longest} tokens stay until the next "
                "compression",
                stacklevel=2,
            )

    def _compress(self, layer_index: int) -> None:
        """Compress a layer, or raise and change nothing."""
        layer, captured = self.layers[layer_index], dict(self._captured.get(layer_index, {}))
        if self.record and layer.evicted_at == 0:
            self.recorded.setdefault(layer_index, {name: captured[name] for name in self.record})
        if self.method is None:
            layer.evicted_at = layer.seen
        else:
            compression.compress(self, layer_index, captured.pop("note", None), captured)

    def _wait(self) -> None:
        """Wait for a prompt: watch the model until the cache no longer needs it, is closed, or is deleted."""
        self._handed, self._captured, self.recorded = {}, {}, {}
        self.stages = []
        self.padding, self.counts_padding, self.text = None, False, Text()
        self._replaying, self._with_graph = False, {}
        self._is_announced = False
        self.peak_tokens = 0
        # that later tokens stay; that a method keeps more than it may, or less than half of it
        self.is_warned = self.is_told = False
        self._names = self.record | captured(self._reads)
        # while decoding, `query` is the last one, and no history of it is needed
        later = self._reads & self.method.reads_later - {"query"} if self.method and self.every else set()
        self._remembered = frozenset(CAPTURED_FOR[name] for name in later if name in CAPTURED_FOR)
        self._watch()

    @property
    def argument(self) -> dict[str, Any]:
        """This cache as an argument: `model.generate(**inputs, **cache.argument)` in each transformers.

        It is `cache=cache` from transformers 5.24 on, and `past_key_values=cache` before.
        """
        return versions.argument(self)

    @property
    def evicting(self) -> dict[int, EvictingLayer]:
        """The layers that are compressed, by their places in the model."""
        return {index: self.layers[index] for index in self._places}

    @property
    def model(self) -> PreTrainedModel | None:
        """The model, which a cache does not keep alive."""
        return self._model()

    def _watch(self, attends: bool = True) -> None:
        model = self.model
        require(model is not None, "the model of this cache is gone", RuntimeError)
        if attends:
            self._finalizer = weakref.finalize(
                self,
                watch(self, model, hidden_states=any(name.endswith("hidden_states") for name in self._names)),
            )
        self._looking = weakref.finalize(self, look(self, model))

    def _close_if_settled(self) -> None:
        """Let the model attend by itself once it can do the rest: never, where nothing is evicted."""
        if self.method is not None and self.every:
            return
        layers = self.evicting.values()
        # asked after each layer of each token: the first layer that is not plain ends it
        if not all(layer.evicted_at and layer.is_plain for layer in layers):
            return
        # The mask of a model does not know that padding was removed.
        paddings = [self.padding, *(layer.holes for layer in layers)]
        if self.method is not None and any(each is not None for each in paddings):
            return
        # One mask serves all layers of a model. In the middle of a forward they have not seen the same tokens
        # yet.
        if len({(layer.longest, layer.seen) for layer in layers}) == 1:
            self._finalizer()

    def close(self) -> None:
        """Remove every hook from the model. A cache that is deleted does this by itself.

        As soon as possible the model has its own attention back.
        The one hook left then sees the padding of later turns.
        """
        self._finalizer()
        self._looking()
        self._handed.clear()


Function = TypeVar("Function")


def _first(functions: Iterable[Function | None]) -> Function | None:
    """The first function of a policy that has one."""
    return next((function for function in functions if function is not None), None)


def _mask(
    layer: EvictingLayer, queries: torch.Tensor, chosen: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The additive mask [B, 1, M, stored] of the last M tokens over a layer's stored tokens; None if
    nothing is masked.

    chosen [B, H_q, stored] says what one token attends to; the mask is [B, H_q, 1, stored] then.
    """
    num_queries, stored = queries.shape[2], layer.stored
    if num_queries == 1 and layer.is_full and chosen is None:
        return None
    causal = partial_attention.causal(num_queries, stored, queries.device)[None, None]
    visible = causal if chosen is None else chosen[:, :, None]
    if not layer.is_full:  # in all heads the same
        visible = visible & layer.contents()[3][:, :1, None]
    return torch.zeros(visible.shape, dtype=queries.dtype, device=queries.device).masked_fill(
        ~visible, torch.finfo(queries.dtype).min
    )
