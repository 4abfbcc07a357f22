"""A transformers cache that physically removes what a method does not keep: after the prompt, in blocks,
or while decoding.
"""

from __future__ import annotations

import copy
import math
import operator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from evictionary.cache import callers, checks, saved, sizes
from evictionary.cache.layers import (
    KEPT_AS,
    EvictingLayer,
    forget_recurrent,
    is_recurrent,
    recurrent,
    restore_recurrent,
)
from evictionary.cache.watched_cache import CAPTURED, WatchedCache
from evictionary.errors import UsageError, require
from evictionary.models.load import unwrapped

__all__ = ["CAPTURED", "EvictingCache"]


class EvictingCache(WatchedCache):
    """A cache for `model.generate(..., **cache.argument)` that compresses the tokens it has read.

    The prompt is the first forward of the model with this cache. Its tokens attend to one another in full;
    then each layer keeps the tokens that `method` chooses. Later tokens are appended, at their true
    positions. With `every`, a layer compresses again after that many new tokens: a prompt that is read in
    blocks of `every` tokens never takes more than the budget and a block, and a long answer does not grow the
    cache. Heads may keep different numbers of tokens; they are stored ragged, without padding, and rows of a
    batch may be padded on the left. Layers with a sliding window, or with a state in the place of a cache,
    are left alone.

    Args: model, a decoder with rotary positions, also inside of a wrapper such as PEFT's; method, a name, a
    `path/to/file.py[:function]`, a composition such as `name+ada_kv` or `name+moments`, or None to keep
    everything; compression_ratio, the fraction to remove of all tokens seen, in [0, 1), or budget, the tokens
    to keep in each head, which replaces the ratio; options, the method's own; every, 0 for the prompt alone,
    by default the method's own value; seed, for methods that draw; record, states ("queries",
    "hidden_states") to keep for `from_prefilled`. Caches of one model may be used in several threads, each
    cache in one. Raises UsageError for an argument that cannot be used.
    """

    @classmethod
    def from_prefilled(
        cls,
        model: PreTrainedModel,
        prefilled: Cache,
        *arguments: Any,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> EvictingCache:
        """Compress a prompt that `prefilled`, a full cache, already holds; `prefilled` stays unchanged.

        The other arguments are those of EvictingCache. A method that reads queries or hidden_states needs a
        `prefilled` that is an `EvictingCache(model, method=None, record=(...))`. A cache of another class
        does not know its padding: give the attention_mask [B, T] of a padded batch. Raises UsageError if
        tokens were removed from `prefilled`.
        """
        cache = cls(model, *arguments, **named)
        recorded = getattr(prefilled, "recorded", {})
        try:
            require(
                len(prefilled.layers) == len(cache.layers),
                f"prefilled: got {len(prefilled.layers)} layers with tokens, wanted the model's "
                f"{len(cache.layers)}",
            )
            masked = cache._take_text(prefilled, attention_mask)
            for index, layer in enumerate(cache.layers):
                full: Any = prefilled.layers[index]
                if not isinstance(layer, EvictingLayer):
                    cache.layers[index] = copy.deepcopy(full)
                    continue
                restore_recurrent(layer, recurrent(full), model.dtype)
                checks.require_whole(full, index, recorded.get(index, {}))
                layer.update(full.keys, full.values)
                cache.peak_tokens = max(cache.peak_tokens, layer.longest)
                padding = getattr(full, "padding", masked)
                layer.padding = None if padding is None else padding.to(full.keys.device)
                layer.holes = getattr(full, "holes", None)
                cache._captured[index] = dict(recorded.get(index, {}))
                cache._compress(index)
                for name in cache._remembered & KEPT_AS.keys():
                    cache._remember(layer, name, recorded[index][name])
        except Exception:
            cache.close()
            raise
        cache._close_if_settled()
        return cache

    def _take_text(self, prefilled: Any, mask: torch.Tensor | None) -> torch.Tensor | None:
        """What another cache has read; returns the padding [B] by a mask [B, T]."""
        seen, masked = prefilled.get_seq_length(), None
        if mask is not None and seen:
            callers.require_mask(mask, len(prefilled.layers[self._first].keys), 0, seen)
            callers.require_ones_and_zeros(mask)
            real = mask.bool().cpu()
            checks.require_left_padding(real, 0, is_watched=False)
            masked = None if real.all() else (~real).sum(dim=1)
        if isinstance(prefilled, WatchedCache):
            if mask is not None and seen:
                callers.require_same_padding(mask, prefilled.padding_slots(len(mask)))
            self.padding, self.counts_padding = prefilled.padding, prefilled.counts_padding
            self.text = prefilled.text.copy()
        elif masked is not None:  # whether its positions count the padding no one knows
            self.padding = masked
            self.text.shifts = [math.nan if count else 0.0 for count in masked.tolist()]
        return masked

    def compress(self) -> None:
        """Compress the tokens read since the last compression: the rest of a block, or a turn of a chat.

        Raises UsageError for a method that reads recent queries,
        or compresses each token once, in a cache without `every`.
        """
        if self.method is None or self.method.is_per_query:
            return
        require(
            self.every
            or (not self.method.captured and not (self.method.traits & {"recursive", "prompt_only"})),
            f"compress: got {self.method.name} with every=0, wanted a cache made with every=N, which "
            "remembers what it needs",
        )
        for index, layer in self.evicting.items():
            if 0 < layer.evicted_at < layer.seen:
                recent = {name: getattr(layer, kept_as) for name, kept_as in KEPT_AS.items()}
                self._captured[index] = {
                    name: states for name, states in recent.items() if states is not None
                }
                self._compress(index)
                self._captured.pop(index)
        if not self._finalizer.alive:
            self.close()
            self._watch()  # heads or layers may differ now
        self._close_if_settled()

    def rest_of(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """What is new of a whole text [B, T] that begins with what the cache has read.

        Returns arguments of `model.generate` or of the model: the new input_ids [B, M], padded on the left
        where rows differ, and the attention_mask of the whole text; also position_ids [B, M] where a row is
        padded. Raises UsageError for a text that begins in another way, and says where they part, and for
        one with nothing new.
        """
        callers.require_ids(input_ids, attention_mask)
        seen = self.get_seq_length()
        if not seen:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return {"input_ids": input_ids, "attention_mask": real}
        checks.require_rows(len(input_ids), self.rows)
        if attention_mask is not None:
            callers.require_mask(attention_mask, len(input_ids), input_ids.shape[1], 0)
        self.text.fit(seen, self.rows)
        return callers.rest_of_rows(input_ids, attention_mask, self.text, self.padding_slots(self.rows))

    def activate_past_recording(self) -> None:
        """Refuse assisted generation, which calls this before its first token."""
        require(
            self.method is None,
            "generate: got assisted generation (assistant_model, prompt_lookup_num_tokens or use_mtp), "
            "wanted it without drafts: a forward that reads a prompt and drafts would compress both",
        )
        super().activate_past_recording()

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` undoes each forward: where nothing
        is evicted. transformers asks before it reads drafts.
        """
        others = (layer for layer in self.layers if not isinstance(layer, EvictingLayer))
        return self.method is None and all(getattr(layer, "is_croppable", False) for layer in others)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an EvictingCache watches its model, so it cannot be pickled; wanted cache.save(path)"
        )

    def __enter__(self) -> EvictingCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, or raise and change nothing.

        Raises ValueError for tokens before the last eviction, and RuntimeError where a sliding window has
        lost tokens or a layer has a recurrent state.
        """
        require(
            not any(map(is_recurrent, self.layers)),
            "crop: got layers with a recurrent state, which no token can be taken out of; wanted "
            "copy.deepcopy(cache) from before",
            RuntimeError,
        )
        try:
            tokens_to_remove = operator.index(tokens_to_remove)  # transformers 5.17 hands a tensor
        except TypeError:
            wanted = "wanted a whole number, minus the tokens to remove"
            raise ValueError(f"crop: got {tokens_to_remove!r}, {wanted}") from None
        evicting = self.evicting.values()
        for layer in evicting:
            layer.require_croppable(tokens_to_remove)
        left = self.get_seq_length() + tokens_to_remove
        had_padding = self._is_padded and self.padding_slots(self.rows)[:, left:].any()
        sliding = [layer for layer in self.layers if not isinstance(layer, EvictingLayer)]
        for layer in (*sliding, *evicting):  # sliding windows refuse, all of them, before a layer is changed
            layer.crop(tokens_to_remove)
        if had_padding or (tokens_to_remove and self._has_planes):
            # what went may have been padding or an image: no one knows how many positions it took
            self.text.shifts = [math.nan]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        for layer in self.layers:
            # a recurrent state has the other name alone
            getattr(layer, "batch_select_indices", layer.reorder_cache)(indices)
        self.recorded = {
            index: {name: state[indices.to(state.device)] for name, state in recorded.items()}
            for index, recorded in self.recorded.items()
        }
        self.text.select(indices)
        if self.padding is not None:
            self.padding = self.padding[indices.to(self.padding.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.get_seq_length():
            batch = self.layers[self._first].keys.shape[0]
            self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))

    reorder_cache = batch_select_indices  # of beam search

    def reset(self) -> None:
        """Forget everything and wait for a new prompt."""
        self.close()
        for layer in self.layers:  # older versions of transformers would keep as many zeros instead
            if is_recurrent(layer):
                forget_recurrent(layer)
            if hasattr(layer, "get_seq_length"):
                layer.keys, layer.values, layer.is_initialized = None, None, False
        super().reset()
        self._wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        """Return a copy with tensors of its own, for another
        question; the copies share the method and the model.
        """
        require(self.get_seq_length() != 0, "deepcopy: the cache has not read its prompt yet", ValueError)
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        twin.layers = copy.deepcopy(self.layers, memo)
        twin._handed, twin._captured, twin.text = {}, {}, self.text.copy()
        if self._looking.alive:
            twin._watch(self._finalizer.alive)
        return twin

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file, to be loaded again with the same model.

        Raises ValueError before the prompt, and UsageError for a path that cannot be written.
        """
        saved.write(self, path)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> EvictingCache:
        """Read a cache that `save` wrote with the same model. Raises UsageError for another file or a
        model that does not fit.
        """
        model = unwrapped(model)
        settings, tensors = saved.read(path)
        cache = None
        try:
            cache = cls(model, settings["method"], **{name: settings[name] for name in saved.ARGUMENTS})
            saved.restore(cache, model, settings, tensors, path)
        except (KeyError, TypeError) as error:
            if cache is not None:
                cache.close()
            raise UsageError(
                f"path: got {path}, wanted a file with every setting and tensor of a cache; it lacks {error}"
            ) from None
        cache._close_if_settled()
        return cache

    @property
    def nbytes(self) -> int:
        """The bytes that the keys and values allocate: the sizes of their storages, each counted once.

        Of a layer with a sliding window only its window counts, which may be a view of more.
        """
        return sizes.stored(self.layers)

    @property
    def nbytes_full(self) -> int:
        """The bytes that the same tokens would take if nothing had been removed."""
        return sizes.full(self.layers)

    @property
    def nbytes_beside(self) -> int:
        """The bytes beside keys and values: positions, lengths, moments, recent queries, states in the place
        of a cache, and the ids of all tokens that were read.
        """
        return sizes.beside(self.layers) + self.text.nbytes

    @property
    def tokens_kept(self) -> float:
        """The tokens stored in each head, on average over the
        batch, the heads and the layers that are compressed.
        """
        return sizes.tokens_kept(self.layers)
