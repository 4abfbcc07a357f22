"""What a cache has read, and what a caller says of it: the text, its padding, and its positions.

Nothing of the text changes before all that a caller says has been compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from evictionary.cache import callers, checks
from evictionary.cache.layers import EvictingLayer, evicting
from evictionary.cache.text import Text


class Reading:
    """The text that the layers of a cache have read.

    `evicting` are the layers that are compressed, and `first` is the one that reads each forward before the
    others. `text` holds the tokens; `padding` [B] is that of the prompt, or None; `counts_padding` says
    whether the positions of the model count it.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.evicting = layers, evicting(layers)
        self.first = next(index for index, layer in enumerate(layers) if hasattr(layer, "get_seq_length"))
        self.forget()

    def forget(self) -> None:
        """Have read nothing."""
        self.text = Text()
        self.padding: torch.Tensor | None = None
        self.counts_padding = False

    @property
    def seen(self) -> int:
        """The tokens that have been read, evicted or not, padding too."""
        return int(self.layers[self.first].get_seq_length())

    @property
    def rows(self) -> int:
        """The rows that are held, from where the slots lie: to ask for keys would sort them."""
        first = self.layers[self.first]
        return len(first.slots()[0] if isinstance(first, EvictingLayer) else first.keys)

    def compare(
        self, model: Any, tokens: torch.Tensor, named: Mapping[str, Any], *, is_watched: bool, is_twice: bool
    ) -> None:
        """Compare what a caller says with what was read, and then take it.

        Args: tokens, ids [B, M] or embeddings [B, M, hidden], with the other arguments of the forward;
        is_watched, whether the cache attends in place of the model; is_twice, whether the prompt was to be
        read twice. Raises UsageError or RuntimeError, and changes nothing, for what is not of this text.
        """
        mask, position_ids = named.get("attention_mask"), named.get("position_ids")
        (rows, length), seen = tokens.shape[:2], checks.require_one_length(self.layers)
        generating = callers.given_to_generate()
        whole = callers.whole_text(generating)
        callers.require_blocks(generating, seen)
        callers.require_new_tokens(length, seen, whole)
        checks.require_not_checkpointed(model)
        checks.require_read_twice(self.evicting, is_twice and seen > 0)
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
                checks.require_left_padding(real, seen, is_watched)
        else:
            callers.require_told(self.is_padded and self._is_partly_the_models(is_watched), seen, length)
        shifts = self.text.shifts
        if position_ids is None:
            is_padded = self.is_padded or (real is not None and not real.all())
            finds_own = self._finds_positions(model, is_padded, named)
            shifts = callers.shifts_without(shifts, seen, finds_own=finds_own)
        else:
            planes = getattr(position_ids, "ndim", 0) == 3 and has_planes(model)
            callers.require_position_shape(position_ids, rows, length, has_planes=planes)
            if is_looked_at(position_ids):
                shifts = callers.shifts_after(position_ids, real, rows, seen, shifts)
        if real is not None and not real.all():
            self._take_padding(real, shifts)
        self.text.read(tokens)
        self.text.shifts = shifts

    def go_on(self, tokens: torch.Tensor) -> None:
        """Take the next token of each row, ids [B, 1], where no caller says anything of it."""
        seen = checks.require_one_length(self.layers)
        checks.require_rows(len(tokens), self.rows)
        self.text.fit(seen, len(tokens))
        self.text.read(tokens)

    def _take_padding(self, real: torch.Tensor, shifts: list[float]) -> None:
        """Remember the padding of a forward, whose tokens are real [B, M], with the shifts after it."""
        if not self.seen:
            self.padding = (~real).sum(dim=1)
            counted = torch.tensor(shifts).expand(len(real))[self.padding > 0]
            self.counts_padding = not (counted < 0).all()
        else:
            holes = torch.cat([self.padding_slots(len(real)), ~real], dim=1)
            for layer in self.evicting:
                layer.holes = torch.nn.functional.pad(holes, (0, 1)).to(layer.device)

    def padding_slots(self, rows: int) -> torch.Tensor:
        """Which of the tokens that were read are padding, [B, T], on the CPU."""
        padding = torch.zeros(rows, 1) if self.padding is None else self.padding[:, None]
        slots, holes = torch.arange(self.seen) < padding, self.evicting[0].holes
        if holes is not None:
            known = holes[:, : self.seen].cpu()
            slots[:, : known.shape[1]] |= known
        return slots

    def padding_until(self, layer: EvictingLayer) -> torch.Tensor:
        """The padding [B or 1, N] up to each of the first positions, and in the last column all of it."""
        padding = torch.zeros(1, dtype=torch.int64) if self.padding is None else self.padding
        # of a full cache, the holes are the padding of its prompt too
        return padding[:, None] if layer.holes is None else layer.holes.cumsum(dim=1).cpu()

    def padding_of_rows(self, layer: EvictingLayer) -> list[int]:
        """The tokens of each row, or of all, that are padding."""
        if self.padding is None and layer.holes is None:
            return [0]
        return list(self.padding_until(layer)[:, -1].tolist())

    @property
    def is_padded(self) -> bool:
        """Whether some token that was read is padding."""
        return self.padding is not None or any(layer.holes is not None for layer in self.evicting)

    def _is_partly_the_models(self, is_watched: bool) -> bool:
        """Whether the model attends in some layer by itself, with its own mask."""
        return not is_watched or any(getattr(layer, "is_sliding", False) for layer in self.layers)

    def _finds_positions(self, model: Any, is_padded: bool, named: Mapping[str, Any]) -> bool:
        """Whether the model, given no positions, may take others than those of all tokens in a row."""
        base: Any = getattr(model, "base_model", None)
        if not hasattr(base, "rope_deltas"):
            return False
        goes_on = self.seen > 0 and base.rope_deltas is not None
        return is_padded or goes_on or bool(checks.media(named))

    def rest_of(self, ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """What is new of a whole text ids [B, T] with its mask, as arguments of the model."""
        callers.require_ids(ids, mask)
        if not self.seen:
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
        checks.require_rows(len(ids), self.rows)
        if mask is not None:
            callers.require_mask(mask, len(ids), ids.shape[1], 0)
        self.text.fit(self.seen, self.rows)
        return callers.rest_of_rows(ids, mask, self.text, self.padding_slots(self.rows))

    def take(self, prefilled: Any, other: Reading | None, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Have read what a full cache has read, of which `other` knows more; returns the padding [B] by a
        mask [B, T].
        """
        seen, masked = prefilled.get_seq_length(), None
        if mask is not None and seen:
            callers.require_mask(mask, len(prefilled.layers[self.first].keys), 0, seen)
            callers.require_ones_and_zeros(mask)
            real = mask.bool().cpu()
            checks.require_left_padding(real, 0, is_watched=False)
            masked = None if real.all() else (~real).sum(dim=1)
        if other is not None:
            if mask is not None and seen:
                callers.require_same_padding(mask, other.padding_slots(len(mask)))
            self.padding, self.counts_padding = other.padding, other.counts_padding
            self.text = other.text.copy()
        elif masked is not None:  # whether its positions count the padding no one knows
            self.padding = masked
            self.text.shifts = [math.nan if count else 0.0 for count in masked.tolist()]
        return masked

    def crop(self, model: PreTrainedModel | None, count: int, remove: Iterable[Any]) -> None:
        """Let each layer of `remove` crop its last `-count` tokens, and forget the positions that these took
        where no one knows how many: of padding, or of an image.
        """
        had_padding = self.is_padded and self.padding_slots(self.rows)[:, self.seen + count :].any()
        for layer in remove:
            layer.crop(count)
        if had_padding or (count and has_planes(model)):
            self.text.shifts = [math.nan]

    def select(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order; the layers have done so."""
        self.text.select(indices)
        if self.padding is not None:
            self.padding = self.padding[indices.to(self.padding.device)]

    def copy(self, layers: list[Any]) -> Reading:
        """The same of other layers, to go on in another way."""
        twin = Reading(layers)
        twin.text, twin.padding, twin.counts_padding = self.text.copy(), self.padding, self.counts_padding
        return twin


def has_planes(model: Any) -> bool:
    """Whether the positions of an image differ from plane to plane, as in an M-RoPE."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    return hasattr(model.base_model, "rope_deltas") or "mrope" in str(rope)
