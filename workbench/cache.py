"""A transformers cache that removes what a method does not keep, physically, once the prompt has been read."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from workbench.capture import watch_prompt
from workbench.errors import MethodError, UsageError
from workbench.methods import Method, resolve, tokens_to_keep
from workbench.models import require_supported

CAPTURED = frozenset({"queries", "hidden_states"})
"""The states that a cache is not handed by the model and has to capture, if a method names them."""


class EvictingLayer(DynamicLayer):
    """The keys [B, H_kv, stored, D] and values of one layer, and the positions of the tokens that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.evicted_at = 0
        self._kept_positions: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H_kv, M, D] at the positions seen .. seen + M - 1. Returns everything stored."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.seen += key_states.shape[-2]
        return keys, values

    def evict(self, kept: torch.Tensor) -> None:
        """Keep the tokens where kept [B, H_kv, stored] is True, in position order and in new storage.

        Every row has to keep the same number. The old tensors are let go of, not written to: the attention of the prompt,
        which still holds them, reads them whole.
        """
        batch, heads, _ = kept.shape
        # nonzero walks row by row, so each row's indices ascend: position order
        index = kept.nonzero()[:, 2].view(batch, heads, -1)
        assert self.keys is not None and self.values is not None
        self._kept_positions = self.positions.gather(-1, index)
        self.keys = _take(self.keys, index)
        self.values = _take(self.values, index)
        self.evicted_at = self.seen

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the stored tokens in the text, [B, H_kv, stored], ascending in each head."""
        if self.keys is None:
            raise ValueError("positions: the cache is empty")
        batch, heads, stored, _ = self.keys.shape
        kept = 0 if self._kept_positions is None else self._kept_positions.shape[-1]
        appended = torch.arange(self.seen - (stored - kept), self.seen, device=self.keys.device, dtype=torch.int32)
        appended = appended.expand(batch, heads, -1)
        return appended if self._kept_positions is None else torch.cat([self._kept_positions, appended], dim=-1)

    def get_seq_length(self) -> int:
        """The tokens SEEN, kept or not: the next token's true position."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(stored + new, offset): a column of the mask below the causal diagonal is a stored token, whatever its position."""
        stored = 0 if self.keys is None else self.keys.shape[-2]
        return stored + query_length, self.seen - stored

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens away again. Raises ValueError beyond the last eviction."""
        count = -tokens_to_remove
        if count < 0 or count > self.seen - self.evicted_at:
            raise ValueError(
                f"crop: got {tokens_to_remove}, wanted a number from {self.evicted_at - self.seen} to 0: "
                "the tokens before that have been compressed and cannot be given back"
            )
        if count and self.keys is not None and self.values is not None:
            # a copy, so that the memory of the removed tokens is really free
            self.keys = self.keys[..., :-count, :].clone()
            self.values = self.values[..., :-count, :].clone()
            self.seen -= count

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen = self.evicted_at = 0
        self._kept_positions = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the batch for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        if self.keys is not None and self.values is not None:
            indices = indices.to(self.keys.device)
            self.keys, self.values = self.keys[indices], self.values[indices]
            if self._kept_positions is not None:
                self._kept_positions = self._kept_positions[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))


def _take(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows `index` [B, H, n] of states [B, H, T, D], as [B, H, n, D] in storage of its own."""
    return states.gather(2, index[..., None].expand(-1, -1, -1, states.shape[-1]))


class EvictingCache(Cache):
    """A cache for `model.generate(..., past_key_values=cache)` that compresses the prompt once it has been read.

    The prompt is the first thing the model reads with this cache, in one forward. Its tokens attend to one another in full;
    then each layer keeps what `method` chooses. Later tokens are appended, at their true positions.

    Args: model, a decoder with rotary positions; method, a name, a `path/to/file.py[:function]`, or None to keep everything;
    compression_ratio, the fraction to remove, in [0, 1), or budget, the tokens to keep in each head, which takes its place;
    options, the method's own; seed, for methods that draw; record, states ("queries", "hidden_states") to keep for
    `from_prefilled`.
    Raises UsageError for any of them that cannot be used.
    """

    layers: list[EvictingLayer]  # type: ignore[assignment]
    recorded: dict[int, dict[str, torch.Tensor]]
    _awaited: set[int]  # the layers that have not compressed the prompt yet
    _pending: dict[int, torch.Tensor]  # the keys of layers that wait for the queries of the prompt
    _captured: dict[int, dict[str, torch.Tensor]]
    _count: int | None  # what each head of the first compressed layer keeps

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method | None = "keydiff",
        compression_ratio: float = 0.5,
        options: Mapping[str, Any] | None = None,
        budget: int | None = None,
        *,
        seed: int = 0,
        record: Iterable[str] = (),
    ) -> None:
        require_supported(model)
        self.method = resolve(method) if isinstance(method, str) else method
        self.compression_ratio = compression_ratio
        self.budget = budget
        self.seed = seed
        tokens_to_keep(1, compression_ratio, budget)  # refuses values out of range before the prompt is read
        if options and self.method is None:
            raise UsageError("options: got some without a method, wanted none")
        self.options = self.method.typed_options(options) if self.method else {}
        self.record = frozenset(record)
        if not self.record <= CAPTURED:
            raise UsageError(f"record: got {', '.join(sorted(self.record))}, wanted some of {', '.join(sorted(CAPTURED))}")
        num_layers = model.config.get_text_config().num_hidden_layers
        super().__init__(layers=[EvictingLayer() for _ in range(num_layers)])
        self._model = weakref.ref(model)
        self._await_prompt()

    @classmethod
    def from_prefilled(cls, model: PreTrainedModel, prefilled: Cache, *arguments: Any, **named: Any) -> EvictingCache:
        """Compress a prompt that `prefilled`, a full cache, already holds; it stays as it is.

        The other arguments are those of EvictingCache. A method that reads queries or hidden_states needs a `prefilled` that
        is an `EvictingCache(model, method=None, record=(...))`. Raises UsageError where something was removed from it.
        """
        cache = cls(model, *arguments, **named)
        cache.close()
        recorded = getattr(prefilled, "recorded", {})
        if len(prefilled.layers) != len(cache.layers):
            raise UsageError(f"prefilled: got {len(prefilled.layers)} layers with tokens, wanted the model's {len(cache.layers)}")
        for layer_index, layer in enumerate(cache.layers):
            full: Any = prefilled.layers[layer_index]
            stored, seen = 0 if full.keys is None else full.keys.shape[-2], full.get_seq_length()
            if not stored or stored != seen:
                raise UsageError(f"prefilled: got {stored} of {seen} tokens in layer {layer_index}, wanted all tokens of a prompt")
            layer.update(full.keys, full.values)
            cache._captured[layer_index] = dict(recorded.get(layer_index, {}))
            cache._compress(layer_index)
        return cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer and return what its attention reads; the prompt is returned whole and stored compressed."""
        if layer_idx in self._pending:
            raise RuntimeError(
                f"layer {layer_idx}: the prompt was read but its queries never seen, so it could not be compressed; "
                "was the cache closed, or the attention implementation changed, in between?"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self._awaited:
            if "queries" in self._names:
                self._pending[layer_idx] = keys
            else:
                self._compress(layer_idx)
        return keys, values

    def see_hidden_states(self, layer_index: int, hidden_states: torch.Tensor) -> None:
        """Take the prompt's hidden states [B, T, hidden] of a layer; capture.py calls this."""
        if layer_index in self._awaited:
            self._captured.setdefault(layer_index, {})["hidden_states"] = hidden_states

    def see_queries(self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Take the prompt's queries [B, H_q, T, D] of a layer, if `keys` are this cache's own; capture.py calls this."""
        if self._pending.get(layer_index) is keys:
            del self._pending[layer_index]
            self._captured.setdefault(layer_index, {})["queries"] = queries
            self._compress(layer_index)

    def _compress(self, layer_index: int) -> None:
        try:
            self._keep(layer_index)
        except Exception:
            self.close()  # the prompt is lost, and the model is to be as it was
            raise
        self._awaited.discard(layer_index)
        if not self._awaited:
            self.close()

    def _keep(self, layer_index: int) -> None:
        layer = self.layers[layer_index]
        assert layer.keys is not None and layer.values is not None
        captured = self._captured.pop(layer_index, {})
        if self.record:
            self.recorded[layer_index] = {name: captured[name] for name in self.record}
        if self.method is not None:
            _require_finite(layer_index, layer.keys, layer.values)
            kept = self.method.kept(
                {"keys": layer.keys, "values": layer.values, **captured},
                compression_ratio=self.compression_ratio,
                budget=self.budget,
                options=self.options,
                layer_index=layer_index,
                num_layers=len(self.layers),
                seed=self.seed,
            )
            count = self._require_even(layer_index, kept)
            if count < layer.seen:
                layer.evict(kept)
        layer.evicted_at = layer.seen

    def _require_even(self, layer_index: int, kept: torch.Tensor) -> int:
        """The tokens that every head of every layer keeps. Raises MethodError where they differ."""
        counts = kept.sum(dim=-1)
        expected = int(counts.flatten()[0]) if self._count is None else self._count
        low, high = min(expected, int(counts.min())), max(expected, int(counts.max()))
        self._count = expected
        if low != high:
            assert self.method is not None
            raise MethodError(
                f"{self.method.label} keeps {low} tokens in one head and {high} in another (layer {layer_index}), "
                "wanted the same number in every head and layer: this cache does not store ragged heads yet"
            )
        return high

    def _await_prompt(self) -> None:
        named = set(self.method.inputs) if self.method else set()
        self._names = frozenset(CAPTURED & (named | self.record))
        self._awaited = set(range(len(self.layers)))
        self._pending = {}
        self._captured = {}
        self.recorded = {}
        self._count = None
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this cache is gone")
        # runs once: at the end of the prompt, at close(), or when the cache is dropped
        self._finalizer = weakref.finalize(self, watch_prompt(self, model, names=self._names))

    def close(self) -> None:
        """Take every hook out of the model again. Happens by itself after the prompt, and when the cache is dropped."""
        self._finalizer()

    def __enter__(self) -> EvictingCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def reset(self) -> None:
        """Forget everything and wait for a new prompt."""
        self.close()
        super().reset()
        self._await_prompt()

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        """A cache with tensors of its own, for another question; the method and the model are shared."""
        if self._awaited:
            raise ValueError("deepcopy: the cache has not read its prompt yet")
        twin = copy.copy(self)
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    @property
    def nbytes(self) -> int:
        """The bytes that the keys and values really allocate: the sizes of their storages, each counted once."""
        tensors = [state for layer in self.layers for state in (layer.keys, layer.values) if state is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    @property
    def nbytes_full(self) -> int:
        """The bytes that the same tokens would take if nothing had been removed."""
        total = 0
        for layer in self.layers:
            for state in (layer.keys, layer.values):
                if state is not None:
                    batch, heads, _, width = state.shape
                    total += batch * heads * layer.seen * width * state.element_size()
        return total

    @property
    def tokens_kept(self) -> int:
        """The tokens stored in each head."""
        keys = self.layers[0].keys
        return 0 if keys is None else keys.shape[-2]


def _require_finite(layer_index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    for name, states in (("keys", keys), ("values", values)):
        if not states.isfinite().all():
            raise MethodError(f"{name}: got NaN or infinite numbers in layer {layer_index}, wanted finite ones")
