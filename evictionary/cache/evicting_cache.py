"""A transformers cache that physically removes what a method does not keep: after the prompt, in blocks,
or while decoding.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from evictionary.cache import callers, checks, saved, sizes
from evictionary.cache.layers import EvictingLayer, is_recurrent, layers_of, recurrent, restore_recurrent
from evictionary.cache.session import Session
from evictionary.cache.settings import CAPTURED, settled
from evictionary.errors import UsageError, require
from evictionary.methods.method import Method
from evictionary.models import versions
from evictionary.models.load import require_supported, unwrapped
from evictionary.policies import DEFAULT

__all__ = ["CAPTURED", "EvictingCache"]


class EvictingCache(Cache):
    """A cache for `model.generate(..., **cache.argument)` that compresses the tokens it has read.

    The prompt is the first forward of the model with this cache. Its tokens attend to one another in full;
    then each layer keeps the tokens that `method` chooses. Later tokens are appended, at their true
    positions. With `every`, a layer compresses again after that many new tokens: a prompt that is read in
    blocks of `every` tokens never takes more than the budget and a block, and a long answer does not grow the
    cache. Heads may keep different numbers of tokens; they are stored ragged, without padding, and rows of a
    batch may be padded on the left. Layers with a sliding window, or with a state in the place of a cache,
    are left alone. Caches of one model may be used in several threads, each cache in one.

    Three objects do the work. `layers` store the tokens (layers.py). A session watches the model, and attends
    (session.py). One step of compression says what a layer keeps (compression.py).

    Args:
        model: A decoder with rotary positions, also inside of a wrapper such as PEFT's.
        method: A name, a `path/to/file.py[:function]`, a composition such as `name+ada_kv` or `name+moments`,
            a `Method`, or None to keep everything.
        compression_ratio: The fraction to remove of all tokens seen, in [0, 1).
        options: The method's own options by name. `evictionary methods` lists them.
        budget: The tokens to keep in each head, which replaces the ratio.
        every: The tokens between two compressions; 0 for only the prompt, by default the method's own value.
        seed: The seed of a method that draws random numbers.
        record: The states of the prompt to keep for `from_prefilled`: "queries", "hidden_states" or both.

    Raises:
        UsageError: An argument cannot be used; the message names it, what it got and what is wanted.

    Examples:
        Half of the cache of a text, and an answer from the other half:

        >>> from evictionary import EvictingCache
        >>> from evictionary.models.load import load
        >>> model, tokenizer = load()
        >>> inputs = tokenizer("The key of the safe is 4817263. " * 20, return_tensors="pt").to(model.device)
        >>> cache = EvictingCache(model, method="keydiff", compression_ratio=0.5)
        >>> output = model.generate(**inputs, **cache.argument, max_new_tokens=4, do_sample=False)
        >>> cache.nbytes < cache.nbytes_full
        True

        A budget of 64 tokens in each head, shared by the heads of a layer:

        >>> with EvictingCache(model, "snapkv+ada_kv", budget=64) as cache:
        ...     output = model.generate(**inputs, **cache.argument, max_new_tokens=4, do_sample=False)
        ...     cache.budget
        64
    """

    layers: list[Any]
    _session_type: type[Session] = Session

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
        layers = layers_of(model.config)
        settings = settled(
            model, layers, method, compression_ratio, options, budget, every, seed, record, _recorded
        )
        super().__init__(layers=layers)
        self._session = self._session_type(self, model, settings)

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

        Args:
            model: The model that has read the prompt.
            prefilled: The full cache. A method that reads queries or hidden_states needs one that is an
                `EvictingCache(model, method=None, record=(...))`.
            *arguments: Those of EvictingCache from `method` on.
            attention_mask: The mask [B, T] of a padded batch: a cache of another class does not know it.
            **named: Those of EvictingCache, by name.

        Raises:
            UsageError: Tokens were removed from `prefilled`, or an argument cannot be used.

        Examples:
            One reading of a text, two methods:

            >>> full = EvictingCache(model, method=None)
            >>> output = model.generate(**inputs, **full.argument, max_new_tokens=1)
            >>> half = EvictingCache.from_prefilled(model, full, "keydiff", 0.5)
            >>> tenth = EvictingCache.from_prefilled(model, full, "keydiff", 0.9)
            >>> tenth.nbytes < half.nbytes < full.nbytes
            True
        """
        cache = cls(model, *arguments, **named)
        session, ours = cache._session, isinstance(prefilled, EvictingCache)
        recorded = prefilled.recorded if ours else {}
        try:
            require(
                len(prefilled.layers) == len(cache.layers),
                f"prefilled: got {len(prefilled.layers)} layers with tokens, wanted the model's "
                f"{len(cache.layers)}",
            )
            masked = session.reading.take(
                prefilled, prefilled._session.reading if ours else None, attention_mask
            )
            for index, layer in enumerate(cache.layers):
                full: Any = prefilled.layers[index]
                if not isinstance(layer, EvictingLayer):
                    cache.layers[index] = copy.deepcopy(full)
                    continue
                restore_recurrent(layer, recurrent(full), model.dtype)
                checks.require_whole(full, index, recorded.get(index, {}))
                layer.update(full.keys, full.values)
                padding = getattr(full, "padding", masked)
                layer.padding = None if padding is None else padding.to(full.keys.device)
                layer.holes = getattr(full, "holes", None)
                session.compress_prefilled(index, recorded.get(index, {}))
        except Exception:
            cache.close()
            raise
        session.close_if_settled()
        return cache

    # What was asked for, and what has come of it

    @property
    def method(self) -> Method | None:
        """The method, or None for a cache that keeps everything."""
        return self._session.settings.method

    @property
    def options(self) -> dict[str, Any]:
        """The options of the method that were given, in their types."""
        return self._session.settings.options

    @property
    def compression_ratio(self) -> float:
        """The fraction to remove of all tokens seen."""
        return self._session.settings.compression_ratio

    @property
    def budget(self) -> int | None:
        """The tokens to keep in each head, in the place of the ratio, or None."""
        return self._session.settings.budget

    @property
    def every(self) -> int:
        """The tokens between two compressions; 0 for only the prompt."""
        return self._session.settings.every

    @property
    def seed(self) -> int:
        """The seed of a method that draws."""
        return self._session.settings.seed

    @property
    def record(self) -> frozenset[str]:
        """The states of the prompt that are kept in `recorded`."""
        return self._session.settings.record

    @property
    def recorded(self) -> dict[int, dict[str, torch.Tensor]]:
        """The states of the prompt that `record` names, by layer."""
        return self._session.recorded

    @property
    def peak_tokens(self) -> int:
        """The largest number of tokens that any head has stored at once."""
        return self._session.peak_tokens

    @property
    def model(self) -> PreTrainedModel | None:
        """The model, which a cache does not keep alive."""
        return self._session.model

    @property
    def argument(self) -> dict[str, Any]:
        """This cache as an argument: `model.generate(**inputs, **cache.argument)` in each transformers.

        It is `cache=cache` from transformers 5.24 on, and `past_key_values=cache` before.
        """
        return versions.argument(self)

    # A text that goes on

    # a compiled model leaves its graph here: what a method keeps depends on the numbers
    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer, and return the keys and values for its attention.

        These are all that are stored, if no head is ragged.
        """
        session = self._session
        key_states, value_states = session.take(layer_idx, key_states, value_states)
        if session.waits(layer_idx, key_states):
            self.layers[layer_idx].wait(key_states, value_states)
            keys, values = key_states, value_states
        else:
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        session.hand(layer_idx, keys, key_states.shape[-2])
        return keys, values

    def get_mask_sizes(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        """The sizes of a layer's mask.

        Raises UsageError for a forward without a token, which no model can read.
        """
        length = arguments[0] if arguments else named["query_length"]
        callers.require_new_tokens(length, self.get_seq_length(), None)
        return super().get_mask_sizes(*arguments, **named)

    def compress(self) -> None:
        """Compress the tokens read since the last compression: the rest of a block, or a turn of a chat.

        Raises:
            UsageError: The cache has no `every`, and its method reads recent queries or compresses each token
                once.
        """
        method = self.method
        if method is None or method.is_per_query:
            return
        require(
            self.every or (not method.captured and not (method.traits & {"recursive", "prompt_only"})),
            f"compress: got {method.name} with every=0, wanted a cache made with every=N, which remembers "
            "what it needs",
        )
        self._session.compress_again()

    def rest_of(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """What is new of a whole text [B, T] that begins with what the cache has read.

        Args:
            input_ids: The token ids of the whole text.
            attention_mask: Its mask, if rows are padded on the left.

        Returns:
            Arguments of `model.generate` or of the model: the new input_ids [B, M], padded on the left where
                rows differ, and the attention_mask of the whole text; also position_ids [B, M] where a row is
                padded.

        Raises:
            UsageError: The text begins in another way (the message says where they part), or has nothing new.
        """
        return self._session.reading.rest_of(input_ids, attention_mask)

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
        """Whether `crop` undoes each forward, because nothing is evicted.

        transformers asks before it reads drafts.
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

        Args:
            tokens_to_remove: Minus the number of tokens, as in the caches of transformers.

        Raises:
            ValueError: The tokens lie before the last eviction.
            RuntimeError: A sliding window has lost tokens, or a layer has a recurrent state.
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
        evicting = self._session.reading.evicting
        for layer in evicting:
            layer.require_croppable(tokens_to_remove)
        others = [layer for layer in self.layers if not isinstance(layer, EvictingLayer)]
        # sliding windows refuse, all of them, before a layer is changed
        self._session.reading.crop(self.model, tokens_to_remove, (*others, *evicting))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        for layer in self.layers:
            # a recurrent state has the other name alone
            getattr(layer, "batch_select_indices", layer.reorder_cache)(indices)
        self._session.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.get_seq_length():
            rows = self._session.reading.rows
            self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    reorder_cache = batch_select_indices  # of beam search

    def reset(self) -> None:
        """Forget everything and wait for a new prompt."""
        self._session.reset()

    def close(self) -> None:
        """Remove every hook from the model. A cache that is deleted does this by itself.

        As soon as possible the model has its own attention back.
        The one hook left then sees the padding of later turns.
        """
        self._session.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        """Return a copy with its own tensors, for another
        question; the copies share the method and the model.
        """
        require(self.get_seq_length() != 0, "deepcopy: the cache has not read its prompt yet", ValueError)
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        twin.layers = copy.deepcopy(self.layers, memo)
        twin._session = self._session.copy(twin)
        return twin

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file, to be loaded again with the same model.

        Args:
            path: The file to write.

        Raises:
            ValueError: The cache has not read a prompt.
            UsageError: The path cannot be written.

        Examples:
            >>> cache = EvictingCache(model, "knorm", budget=32)
            >>> output = model.generate(**inputs, **cache.argument, max_new_tokens=1)
            >>> cache.save("text.safetensors")
            >>> again = EvictingCache.load("text.safetensors", model)
            >>> again.tokens_kept == cache.tokens_kept
            True
        """
        saved.write(self._session, path)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> EvictingCache:
        """Read a cache that `save` wrote with the same model.

        Args:
            path: The file that `save` wrote.
            model: The same model, which then reads on.

        Raises:
            UsageError: It is another file, or the model does not fit.
        """
        model = unwrapped(model)
        settings, tensors = saved.read(path)
        cache = None
        try:
            cache = cls(model, settings["method"], **{name: settings[name] for name in saved.ARGUMENTS})
            saved.restore(cache._session, model, settings, tensors, path)
        except (KeyError, TypeError) as error:
            if cache is not None:
                cache.close()
            raise UsageError(
                f"path: got {path}, wanted a file with every setting and tensor of a cache; it lacks {error}"
            ) from None
        cache._session.close_if_settled()
        return cache

    @property
    def nbytes(self) -> int:
        """The bytes that the keys and values allocate: the sizes of their storages, each counted once.

        Of a layer with a sliding window only its window counts, which may be a view of more. Quantised tokens
        (`+kivi`, `+hadamard`, `+fp8`) count as packed codes with their scales; the cache holds the numbers
        that the codes give back.
        """
        settings = self._session.settings
        is_quantised = settings.method is not None and settings.method.quantised
        return sizes.packed(self.layers, settings) if is_quantised else sizes.stored(self.layers)

    @property
    def nbytes_full(self) -> int:
        """The bytes that the same tokens would take if nothing had been removed."""
        return sizes.full(self.layers)

    @property
    def nbytes_beside(self) -> int:
        """The bytes of all that is neither a key nor a value.

        They hold positions, lengths, moments, recent queries, states in the place of a cache, and the ids of
        all tokens that were read.
        """
        return sizes.beside(self.layers) + self._session.reading.text.nbytes

    @property
    def tokens_kept(self) -> float:
        """The tokens stored in each head, on average.

        The average is over the batch, the heads and the layers that are compressed.
        """
        return sizes.tokens_kept(self.layers)


def _recorded(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    """The queries and the hidden states of each layer, while a model reads ids [1, T]."""
    with EvictingCache(model, None, record=("queries", "hidden_states")) as cache:
        model.base_model(ids, **cache.argument, use_cache=True)
        return cache.recorded
