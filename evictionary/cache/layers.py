"""The storage of one layer: the same number of tokens in every head, or ragged heads, each with its own number."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from evictionary.optimized.cache import CompressedCache, compress
from evictionary.optimized.momentkv import Moments

RECENT = 128
"""The last queries or hidden states that a layer remembers for a method that compresses while decoding (EA)."""


class EvictingLayer(DynamicLayer):
    """The keys and values of one layer, and the positions of the tokens that they belong to.

    As long as all heads keep the same number of tokens, `keys` [B, H_kv, stored, D] and `values` hold all tokens. Once heads
    differ, `ragged` holds the kept tokens (flat, without a byte of padding), and `keys` and `values` hold the tokens since then.
    `padding` [B] counts the tokens that each row is padded with on the left, or is None; `moments` are those of the evicted tokens,
    `recent` [B, H_q, n, D] the last queries, `recent_hidden` [B, n, hidden] the last hidden states and `static` the number of
    tokens that LagKV never compresses again; each is set only for a method that needs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.evicted_at = 0
        self.ragged = None
        self.padding: torch.Tensor | None = None
        self.moments: Moments | None = None
        self.recent: torch.Tensor | None = None
        self.recent_hidden: torch.Tensor | None = None
        self.static: list[int] | None = None
        self._kept_positions: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H_kv, M, D] at the positions seen .. seen + M - 1. Returns `keys` and `values`, without the ragged part."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.seen += key_states.shape[-2]
        return keys, values

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys [B, H_kv, N, D], values, positions [B, H_kv, N] and filled [B, H_kv, N], False where there is no token.

        Positions ascend along the filled places of each head. Ragged heads are padded to the longest one for this.
        """
        assert self.keys is not None and self.values is not None
        batch, heads, length, _ = self.keys.shape
        if self.ragged is None:
            filled = torch.ones(batch, heads, length, dtype=torch.bool, device=self.keys.device)
            if self.padding is not None:
                filled &= self.positions >= self.padding[:, None, None]
            return self.keys, self.values, self.positions, filled
        lengths = self.ragged.lengths
        slots = torch.arange(int(lengths.max()), device=lengths.device)
        inside = slots < lengths[..., None]
        starts = lengths.flatten().cumsum(0).view_as(lengths) - lengths
        rows = torch.where(inside, starts[..., None] + slots, 0)
        since = self._positions_since(length).expand(batch, heads, -1)
        return (
            torch.cat([self.ragged.keys[rows], self.keys], dim=2),
            torch.cat([self.ragged.values[rows], self.values], dim=2),
            torch.cat([self.ragged.positions[rows], since], dim=2),
            torch.cat([inside, torch.ones_like(since, dtype=torch.bool)], dim=2),
        )

    def evict(self, kept: torch.Tensor) -> None:
        """Keep the tokens of `contents()` where kept [B, H_kv, N] is True, in position order and in new storage.

        The old tensors are released, not written to: the attention of the prompt still holds and reads them.
        """
        keys, values, positions, _ = self.contents()
        counts = kept.sum(dim=-1)
        if bool((counts == counts[0, 0]).all()):
            # nonzero walks row by row, so each row's indices ascend: position order
            index = kept.nonzero()[:, 2].view(*counts.shape, -1)
            self.ragged = None
            self._kept_positions = positions.gather(-1, index)
            self.keys, self.values = _take(keys, index), _take(values, index)
        else:
            compressed = compress(keys, values, kept)
            self.ragged = compressed._replace(positions=positions[kept])
            self._kept_positions = None
            self.keys, self.values = keys[:, :, :0].clone(), values[:, :, :0].clone()
        self.padding = None  # padding is never kept
        self.evicted_at = self.seen

    def _positions_since(self, count: int) -> torch.Tensor:
        assert self.keys is not None
        return torch.arange(self.seen - count, self.seen, device=self.keys.device, dtype=torch.int32)

    @property
    def positions(self) -> torch.Tensor:
        """The text positions of the tokens in `keys`, [B, H_kv, stored], ascending in each head; padding counts."""
        if self.keys is None:
            raise ValueError("positions: the cache is empty")
        batch, heads, stored, _ = self.keys.shape
        kept = 0 if self._kept_positions is None else self._kept_positions.shape[-1]
        appended = self._positions_since(stored - kept).expand(batch, heads, -1)
        return appended if self._kept_positions is None else torch.cat([self._kept_positions, appended], dim=-1)

    @property
    def lengths(self) -> torch.Tensor:
        """The tokens stored in each head, [B, H_kv], padding included."""
        if self.keys is None:
            raise ValueError("lengths: the cache is empty")
        batch, heads, stored, _ = self.keys.shape
        dense = torch.full((batch, heads), stored, device=self.keys.device)
        return dense if self.ragged is None else dense + self.ragged.lengths

    @property
    def longest(self) -> int:
        """The number of tokens in the longest head."""
        stored = 0 if self.keys is None else self.keys.shape[2]
        return stored + self._longest_ragged

    @property
    def ragged(self) -> CompressedCache | None:
        """The kept tokens of ragged heads, or None. Only setting it reads the longest length: each read makes a GPU wait."""
        return self._ragged

    @ragged.setter
    def ragged(self, cache: CompressedCache | None) -> None:
        self._ragged = cache
        self._longest_ragged = 0 if cache is None else int(cache.lengths.max())

    @property
    def is_plain(self) -> bool:
        """Whether `keys` and `values` hold everything stored, so that the model's own attention is enough."""
        return self.ragged is None and self.moments is None

    def get_seq_length(self) -> int:
        """The tokens SEEN, kept or not: the next token's true position."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(stored + new, offset): a column of the mask below the causal diagonal is a stored token, whatever its position."""
        stored = 0 if self.keys is None else self.keys.shape[-2]
        return stored + query_length, self.seen - stored

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Raises ValueError for tokens before the last eviction."""
        count = -tokens_to_remove
        if count < 0 or count > self.seen - self.evicted_at:
            raise ValueError(
                f"crop: got {tokens_to_remove}, wanted a number from {self.evicted_at - self.seen} to 0: "
                "the tokens before that have been compressed and cannot be restored"
            )
        if count and self.keys is not None and self.values is not None:
            # a copy, so that the memory of the removed tokens is freed
            self.keys = self.keys[..., :-count, :].clone()
            self.values = self.values[..., :-count, :].clone()
            self.seen -= count

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen = self.evicted_at = 0
        self.ragged = self.padding = self.moments = self.static = self._kept_positions = None
        self.recent = self.recent_hidden = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.keys is None or self.values is None:
            return
        indices = indices.to(self.keys.device)
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.keys, self.values = self.keys[indices], self.values[indices]
        if self.ragged is not None:
            self.ragged = _rows_of_batch(self.ragged, indices)
        if self.moments is not None:
            self.moments = Moments(*(field[indices] for field in self.moments))
        for name in ("_kept_positions", "padding", "recent", "recent_hidden"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[indices])
        if self.static is not None:
            self.static = [self.static[index] for index in indices.tolist()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the layer by name: `keys`, `values` and the flat tensors of ragged heads."""
        named = {name: getattr(self, name) for name in ("keys", "values", "padding", "recent", "recent_hidden", "_kept_positions")}
        for part in ("ragged", "moments"):
            value = getattr(self, part)
            if value is not None:
                named |= {f"{part}.{name}": field for name, field in value._asdict().items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _take(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows `index` [B, H, n] of states [B, H, T, D], as [B, H, n, D] in storage of its own."""
    return states.gather(2, index[..., None].expand(-1, -1, -1, states.shape[-1]))


def _rows_of_batch(cache: CompressedCache, indices: torch.Tensor) -> CompressedCache:
    """The ragged cache with only the batch items `indices`."""
    ends = cache.lengths.sum(dim=1).cumsum(0).tolist()
    spans = [slice(ends[item - 1] if item else 0, ends[item]) for item in indices.tolist()]
    keys, values, positions = (torch.cat([field[span] for span in spans]) for field in (cache.keys, cache.values, cache.positions))
    return CompressedCache(keys, values, positions, cache.lengths[indices])
