"""The storage of one layer: the same number of tokens in
every head, or ragged heads, each with its own number.

While decoding on a GPU nothing here waits for it, and nothing copies the cache: a
new token is written behind the stored ones, into room that grows by an eighth of
the layer at a time, or into the slot of an evicted token (`EvictingLayer.slots`).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from evictionary.cache.checks import require_rows
from evictionary.errors import require
from evictionary.models.load import EVICTED
from evictionary.optimized import kernels
from evictionary.optimized.cache import CompressedCache, compress
from evictionary.optimized.states import Moments
from evictionary.policies import State, moments_of

GROWTH = 8
"""Storage that is too small grows by this part of its tokens; so each token costs a copy of eight, however
long the layer is.
"""
RECENT = 128
"""The last queries or hidden states that a layer remembers for a method that compresses while decoding."""
KEPT_AS = {"queries": "recent", "hidden_states": "recent_hidden"}
"""The attribute of a layer for each."""
OWN_TENSORS = ("keys", "values", "padding", "holes", "recent", "recent_hidden", "_kept_positions")
OF_THE_MODEL = ("keys", "values", "ragged.keys", "ragged.values", "recent", "recent_hidden")
"""The tensors that have the dtype of the model."""


class Clock(NamedTuple):
    """What changes from token to token, in memory: a step that reads it there is the same for each token.

    position [1], int64, is that of the new token; end [1],
    int64, is its place where it is stored behind the others.
    """

    position: torch.Tensor
    end: torch.Tensor


class EvictingLayer(DynamicLayer):
    """The keys and values of one layer, and the positions of the tokens that they belong to.

    As long as all heads keep the same number of tokens, `keys` [B, H_kv, stored, D] and `values` hold all
    tokens. Once heads differ, `ragged` holds the kept tokens (flat, without a byte of padding), and `keys`
    and `values` hold the tokens since then. `padding` [B] counts the tokens that each row is padded with on
    the left, or is None. `holes` [B, n], or None, is True where padding was read in a later turn; its last
    place speaks for all places after it. `state` is what its policies keep; `recent` [B, H_q, n, D] are the
    last queries and `recent_hidden` [B, n, hidden] the last hidden states, for a method that needs them.
    `waiting` is the token that has been seen and is not stored yet: it will take the slot of an evicted one.
    `clock` is there while a captured step runs (captured_step.py): `slots` are then all places that a layer
    has, with or without a token.
    """

    is_croppable = False  # what transformers reads where it would take back the last token of an answer

    def __init__(self) -> None:
        # [B, H_kv, room, D], of which the first `stored` places are in use
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.stored = 0
        # of the first places; those after them hold the last tokens seen
        self._kept_positions: torch.Tensor | None = None
        self._in_order = True  # whether the positions ascend
        # whether a graph may have saved the storage, which no write may change then
        self._is_saved = False
        # what a policy remembers of the stored tokens: forgotten as soon as one of them goes or moves
        self.known: dict[str, Any] = {}
        # the flat tensors of `ragged` with room behind them, once tokens were replaced there
        self._rows: tuple[torch.Tensor, ...] | None = None
        self._ragged: CompressedCache | None = None
        # how the kernels of `attention.attend` cut `ragged` into chunks, by the size of a chunk
        self.plans: dict[int, Any] = {}
        super().__init__()
        self.seen = 0
        self.evicted_at = 0
        self.ragged = None
        self.padding: torch.Tensor | None = None
        self.holes: torch.Tensor | None = None
        self.state: State = {}
        self.recent: torch.Tensor | None = None
        self.recent_hidden: torch.Tensor | None = None
        self.waiting: tuple[torch.Tensor, torch.Tensor] | None = None
        self.clock: Clock | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        """[B, H_kv, stored, D], in position order, without the ragged part."""
        self._restore_order()
        return None if self._keys is None else self._keys[:, :, : self.stored]

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keys = keys
        self.stored = 0 if keys is None else keys.shape[2]
        self.known = {}

    @property
    def values(self) -> torch.Tensor | None:
        """[B, H_kv, stored, D_v], in position order, without the ragged part."""
        self._restore_order()
        return None if self._values is None else self._values[:, :, : self.stored]

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._values = values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the batch, the heads, the channels, the dtype
        and the device of the states, without their tokens.
        """
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (states[:, :, :0].clone() for states in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H_kv, M, D] at the positions seen ..
        seen + M - 1. Returns the keys and values as `slots`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.append(key_states, value_states)
        self.seen += key_states.shape[-2]
        return self.slots()

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store [B, H_kv, M, D], the last M tokens that are seen."""
        assert self._keys is not None and self._values is not None
        require_rows(len(key_states), len(self._keys))
        end = self.stored + key_states.shape[2]
        if self.clock is not None:
            self._keys.index_copy_(2, self.clock.end, key_states)
            self._values.index_copy_(2, self.clock.end, value_states)
        else:
            self._keys, self._values = self._rooms(end)
            self._keys[:, :, self.stored : end] = key_states
            self._values[:, :, self.stored : end] = value_states
        self.stored = end

    def wait(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Let a token, [B, H_kv, 1, D], that is seen now wait for the slot of another."""
        self.waiting = key, value
        self.seen += 1

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [B, H_kv, stored, D] and values, without the ragged part, where they lie: in any
        order of positions.

        Only the tokens since the last eviction are sure to be the last ones, in order.
        """
        assert self._keys is not None and self._values is not None
        self._is_saved |= torch.is_grad_enabled()
        # a layer that is full to its budget, at each token
        if self.clock is not None or self._keys.shape[2] == self.stored:
            return self._keys, self._values
        return self._keys[:, :, : self.stored], self._values[:, :, : self.stored]

    def _rooms(self, needed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage of keys and values with room for `needed` tokens, to write into."""
        assert self._keys is not None and self._values is not None
        saved, self._is_saved = self._is_saved, False
        keys, values = (
            _with_room(states, self.stored, needed, saved) for states in (self._keys, self._values)
        )
        return keys, values

    def slots_to_replace(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `slots` and their positions [B, H_kv, stored], int64, for a caller that writes other
        tokens into them.
        """
        assert self._keys is not None and self._values is not None
        self._keys, self._values = self._rooms(self.stored)
        if self._kept_positions is None or self._kept_positions.shape[-1] < self.stored:
            self._kept_positions = self._positions_of_slots().to(torch.int64).contiguous()
        self._kept_positions = _writable(self._kept_positions.to(torch.int64))
        self.state_to_change()
        self._in_order = False
        return *self.slots(), self._kept_positions

    def position_of_newest(self) -> torch.Tensor:
        """The position of the last token seen, for each head: [B, H_kv], int64."""
        assert self._keys is not None
        heads = self._keys.shape[:2]
        if self.clock is None:
            return torch.full(heads, self.seen - 1, device=self._keys.device)
        return self.clock.position.expand(heads).contiguous()

    def memory(self) -> dict[str, torch.Tensor]:
        """The tensors that a captured step writes into, where they lie: `slots`, and the state."""
        assert self._keys is not None and self._values is not None
        if self.moments is None:  # new tokens are stored behind the others
            return {"keys": self._keys, "values": self._values}
        return dict(zip(("keys", "values", "positions"), self.slots_to_replace(), strict=True)) | self.state

    def count(self, has_replaced: bool) -> None:
        """Count a token that a CUDA graph has stored, in the slot of another one or behind the others."""
        self.seen += 1
        if has_replaced:
            self.evicted_at = self.seen
        else:
            self.stored += 1
        # as if torch had written: what it has saved for a gradient is not what was read
        torch.autograd.graph.increment_version((self._keys, self._values))

    def live_in(self, memory: dict[str, torch.Tensor]) -> None:
        """Let what is stored lie in tensors of the names and the sizes of `memory()`, or with more places."""
        for name, own in self.memory().items():
            if own is not memory[name]:
                stored = own[:, :, : self.stored] if name in ("keys", "values") else own
                memory[name][tuple(map(slice, stored.shape))] = stored
        if self._keys is not memory["keys"]:
            self._is_saved, self.known = False, {}
        self._keys, self._values = memory["keys"], memory["values"]
        self._kept_positions = memory.get("positions", self._kept_positions)
        self.state = {name: memory.get(name, entry) for name, entry in self.state.items()}

    def state_to_change(self) -> State:
        """Return the state, for a caller that writes into its tensors."""
        self.state = {name: _writable(entry) for name, entry in self.state.items()}
        return self.state

    def replace_in_heads(
        self, gone: torch.Tensor, stays: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Remove some rows of the flat tensors, and store the new token, of key [B, H_kv, D], where it stays
        [B, H_kv]. It is the last one seen.

        The order of the rows of a head is free. So a row that lies within the new bounds of its head is not
        moved: the few others and the new tokens fill the places that are left.
        """
        cache = self._ragged
        assert cache is not None
        is_gone, is_new = set(gone.tolist()), stays.flatten().tolist()
        movers, fillers, start, now = [], [], 0, 0  # rows and the places that they fill; the bounds of a head
        news, lengths, rows_of_new = [], [], []
        for head, length in enumerate(cache.lengths.flatten().tolist()):
            own = range(start, start + length)
            left = length - sum(row in own for row in is_gone) + is_new[head]
            bounds = range(now, now + left)
            inside = range(max(own.start, bounds.start), min(own.stop, bounds.stop))
            moving = [row for row in _without(own, inside) if row not in is_gone]
            free = [*_without(bounds, inside), *(row for row in is_gone if row in inside)]
            movers += moving
            fillers += free[: len(moving)]
            news += [head] * is_new[head]
            rows_of_new += free[len(moving) :]
            lengths.append(left)
            start, now = own.stop, bounds.stop
        new = key.flatten(0, 1)[news], value.flatten(0, 1)[news], torch.full((len(news),), self.seen - 1)
        held, moving_rows = self._rows or cache[:3], torch.tensor(movers, dtype=torch.int64)
        moved = [field[moving_rows] for field in held]
        self._rows = tuple(_with_rows(field, start, now) for field in held)
        filled = torch.tensor(fillers + rows_of_new, dtype=torch.int64)
        for field, one, other in zip(self._rows, moved, new, strict=True):
            field[filled] = torch.cat([one, other.to(one)])
        self._longest_ragged = max(lengths)
        counts = torch.tensor(lengths, device=cache.lengths.device).view_as(cache.lengths)
        keys, values, positions = (field[:now] for field in self._rows)
        self._ragged = CompressedCache(keys, values, positions, counts)
        self.plans, self._in_order = {}, False

    def take_back(self, count: int) -> torch.Tensor:
        """Remove the last `count` tokens from a layer that has
        evicted none; returns their keys [B, H_kv, count, D].
        """
        assert self.keys is not None and self.values is not None
        taken = self.keys[:, :, -count:].clone()
        self.keys, self.values = self.keys[:, :, :-count].clone(), self.values[:, :, :-count].clone()
        self.seen -= count
        return taken

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys [B, H_kv, N, D], values, positions [B, H_kv, N] and filled [B, H_kv, N], False where
        there is no token.

        Positions ascend along the filled places of each head.
        Ragged heads are padded to the longest one for this.
        """
        self._restore_order()
        keys, values = self.slots()
        batch, heads, length, _ = keys.shape
        if self.ragged is None:
            filled = torch.ones(batch, heads, length, dtype=torch.bool, device=keys.device)
            if self.padding is not None:
                filled &= self.positions >= self.padding[:, None, None]
            if self.holes is not None:
                filled &= ~at(self.holes, self.positions)
            return keys, values, self.positions, filled
        lengths = self.ragged.lengths
        slots = torch.arange(int(lengths.max()), device=lengths.device)
        inside = slots < lengths[..., None]
        starts = lengths.flatten().cumsum(0).view_as(lengths) - lengths
        rows = torch.where(inside, starts[..., None] + slots, 0)
        since = self._positions_since(length).expand(batch, heads, -1)
        return (
            torch.cat([self.ragged.keys[rows], keys], dim=2),
            torch.cat([self.ragged.values[rows], values], dim=2),
            torch.cat([self.ragged.positions[rows], since], dim=2),
            torch.cat([inside, torch.ones_like(since, dtype=torch.bool)], dim=2),
        )

    @property
    def is_full(self) -> bool:
        """Whether every place of `contents()` holds a token,
        as far as the host knows without asking a GPU.
        """
        return self._ragged is None and self.padding is None and self.holes is None

    @property
    def is_ragged_alone(self) -> bool:
        """Whether all tokens lie in `ragged`, of which torch may replace some where they lie."""
        cache = self._ragged
        if cache is None or self.stored or self.holes is not None:
            return False
        return not cache.keys.requires_grad and not kernels.take("attention", *cache[:2])

    def evict(self, kept: torch.Tensor, compressed: CompressedCache | None = None) -> None:
        """Keep the tokens of `contents()` where kept [B, H_kv, N]
        is True, in position order and in new storage.

        compressed: what `compress` returns for them, if a kernel has copied the tokens already. The old
        tensors are released, not written to: the attention of the prompt still holds and reads them. On a GPU
        this waits for the number of kept tokens. Nothing is changed before everything is allocated.
        """
        keys, values, positions, _ = self.contents()
        if compressed is None:
            compressed = compress(keys, values, kept)
        batch, heads = kept.shape[:2]
        if len(compressed.lengths.unique()) == 1:
            ragged, kept_positions = None, positions.gather(-1, compressed.positions.view(batch, heads, -1))
            keys, values = (
                states.view(batch, heads, -1, states.shape[-1])
                for states in (compressed.keys, compressed.values)
            )
        else:
            ragged, kept_positions = compressed._replace(positions=positions[kept]), None
            keys, values = keys[:, :, :0].clone(), values[:, :, :0].clone()
        self.ragged, self._kept_positions, self.keys, self.values = ragged, kept_positions, keys, values
        self._in_order = True
        self.padding = None  # padding is never kept
        self.evicted_at = self.seen

    def _positions_since(self, count: int) -> torch.Tensor:
        assert self._keys is not None
        # the token that waits has been seen, and has no slot yet
        end = self.seen - (self.waiting is not None)
        return torch.arange(end - count, end, device=self._keys.device, dtype=torch.int32)

    def _positions_of_slots(self) -> torch.Tensor:
        assert self._keys is not None
        kept = 0 if self._kept_positions is None else self._kept_positions.shape[-1]
        appended = self._positions_since(self.stored - kept).expand(*self._keys.shape[:2], -1)
        return (
            appended if self._kept_positions is None else torch.cat([self._kept_positions, appended], dim=-1)
        )

    def _restore_order(self) -> None:
        """Sort the slots by position, if tokens have been written into the slots of others."""
        if self._in_order:
            return
        self._in_order = True
        if self._ragged is not None:
            heads = torch.arange(self._ragged.lengths.numel(), device=self._ragged.lengths.device)
            owners = heads.repeat_interleave(self._ragged.lengths.flatten())
            order = self._ragged.positions.argsort()
            order = order[owners[order].argsort(stable=True)]
            keys, values, positions, lengths = self._ragged
            self.ragged = CompressedCache(keys[order], values[order], positions[order], lengths)
            return
        positions, order = self._positions_of_slots().sort(dim=-1)
        self.keys, self.values = (
            states.gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1])) for states in self.slots()
        )
        self._kept_positions = positions

    @property
    def positions(self) -> torch.Tensor:
        """The text positions of the tokens in `keys`,
        [B, H_kv, stored], ascending in each head; padding counts.
        """
        require(self._keys is not None, "positions: the cache is empty", ValueError)
        self._restore_order()
        return self._positions_of_slots()

    @property
    def lengths(self) -> torch.Tensor:
        """The tokens stored in each head, [B, H_kv], padding included."""
        if self._keys is None:
            raise ValueError("lengths: the cache is empty")
        dense = torch.full(self._keys.shape[:2], self.stored, device=self._keys.device)
        return dense if self.ragged is None else dense + self.ragged.lengths

    @property
    def longest(self) -> int:
        """The number of tokens in the longest head."""
        return self.stored + self._longest_ragged

    @property
    def ragged(self) -> CompressedCache | None:
        """The kept tokens of ragged heads, in position order, or None. Only setting it reads the longest
        length: each read makes a GPU wait.
        """
        if self._ragged is not None:
            self._restore_order()
        return self._ragged

    @ragged.setter
    def ragged(self, cache: CompressedCache | None) -> None:
        self._longest_ragged = 0 if cache is None else int(cache.lengths.max())
        self._ragged = cache
        self._rows = None
        self.plans = {}

    @property
    def ragged_slots(self) -> CompressedCache | None:
        """`ragged` as it lies: the rows of a head in any order."""
        return self._ragged

    @property
    def moments(self) -> Moments | None:
        """The moments of the evicted tokens, if the state holds them: they have a share of the attention."""
        return moments_of(self.state)

    @property
    def bias(self) -> torch.Tensor | None:
        """What the state adds to the logits of the first n stored tokens, [B, H_kv, n], or None."""
        return self.state.get("bias")

    @property
    def is_plain(self) -> bool:
        """Whether `keys` and `values` hold everything stored, so that the model's own attention is enough."""
        return self._ragged is None and self.moments is None and self.bias is None

    def get_seq_length(self) -> int:
        """The tokens SEEN, kept or not: the next token's true position."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(stored + new, offset): a column of the mask below the causal diagonal is a stored token,
        whatever its position.
        """
        return self.stored + query_length, self.seen - self.stored

    def remember(self, name: str, new: torch.Tensor, count: int = RECENT) -> torch.Tensor:
        """Add queries or hidden states [..., M, channels] to the recent ones; return these, of which the
        last `count` stay.
        """
        before = getattr(self, KEPT_AS[name])
        recent = (new if before is None else torch.cat([before, new], dim=-2))[..., -count:, :].clone()
        setattr(self, KEPT_AS[name], recent)
        return recent

    def require_croppable(self, tokens_to_remove: int) -> None:
        """Raise ValueError unless the last `-tokens_to_remove` tokens came after the last eviction."""
        count, most = -tokens_to_remove, self.seen - self.evicted_at
        why = "the tokens before that are of the prompt or were compressed, and cannot be restored"
        require(
            0 <= count <= most,
            f"crop: got {tokens_to_remove}, wanted a number from {-most} to 0"
            f"{': ' + why if count > most else ', minus the tokens to remove'}",
            ValueError,
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Raises
        ValueError for tokens before the last eviction.
        """
        self.require_croppable(tokens_to_remove)
        count = -tokens_to_remove
        if count and self.keys is not None and self.values is not None:
            # copies, so that the memory of the removed tokens is freed
            self.keys, self.values = (states[..., :-count, :].clone() for states in (self.keys, self.values))
            for name in KEPT_AS.values():
                states = getattr(self, name)
                if states is not None:
                    setattr(self, name, states[..., :-count, :].clone() if count < states.shape[-2] else None)
            self.seen -= count
            left = None if self.holes is None else self.holes[:, : self.seen]
            self.holes = None if left is None or not left.any() else torch.nn.functional.pad(left, (0, 1))

    def reset(self) -> None:
        super().reset()
        self.seen = self.evicted_at = 0
        self.ragged = self.padding = self.holes = self._kept_positions = self.waiting = self.recent = (
            self.recent_hidden
        ) = None
        self.state = {}
        self._in_order = True

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
        for name in ("_kept_positions", "padding", "holes", "recent", "recent_hidden"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[indices])
        self.state = {name: _rows_of(entry, indices) for name, entry in self.state.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the layer by name: `keys`, `values` and the flat tensors of ragged heads."""
        named = {name: getattr(self, name) for name in OWN_TENSORS} | self.state
        if self.ragged is not None:
            named |= {f"ragged.{name}": field for name, field in self.ragged._asdict().items()}
        return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}

    def numbers(self) -> dict[str, Any]:
        """What a file holds of the layer beside its tensors: two
        numbers, the lists of the state, and the tensors' names.
        """
        lists = {name: entry for name, entry in self.state.items() if not isinstance(entry, torch.Tensor)}
        return {"seen": self.seen, "evicted_at": self.evicted_at, **lists, "tensors": sorted(self.tensors())}

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any], dtype: torch.dtype) -> None:
        """Put `tensors` and `numbers` back into an empty layer of a model of `dtype`. Raises KeyError or
        TypeError for a lack.
        """
        tensors = {name: tensors[name] for name in numbers.get("tensors", tensors)}
        tensors |= {name: tensors[name].to(dtype) for name in OF_THE_MODEL if name in tensors}
        self.lazy_initialization(tensors["keys"], tensors["values"])
        flat = {
            name.partition(".")[2]: tensors.pop(name) for name in list(tensors) if name.startswith("ragged.")
        }
        self.ragged = CompressedCache(**flat) if flat else None
        for name in OWN_TENSORS:
            setattr(self, name, tensors.pop(name, None))
        self.seen, self.evicted_at = numbers["seen"], numbers["evicted_at"]
        lists = {
            name: entry for name, entry in numbers.items() if name not in ("seen", "evicted_at", "tensors")
        }
        self.state = tensors | {name: entry for name, entry in lists.items() if entry is not None}


class EvictingHybridLayer(LinearAttentionAndFullAttentionLayer, EvictingLayer):
    """Attention with a recurrent state beside it (Falcon-H1, Zamba2): the keys and values are evicted, the
    state is left alone.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        EvictingLayer.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)

    def lazy_initialization(self, *states: torch.Tensor, **named: Any) -> None:
        """Two states by place are keys and values; named ones are those of the recurrence."""
        if states:
            EvictingLayer.lazy_initialization(self, *states)
        else:
            super().lazy_initialization(**named)

    def reset(self) -> None:
        forget_recurrent(self)
        EvictingLayer.reset(self)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        LinearAttentionCacheLayerMixin.reorder_cache(self, indices)
        EvictingLayer.batch_select_indices(self, indices)


RECURRENT = ("conv_states.", "recurrent_states.")
"""How the tensors of a layer with a state in the place of a cache are named in a file."""


def layers_of(config: PreTrainedConfig) -> list[Any]:
    """A layer of storage for each layer of a model: ours for full attention, transformers' own for all
    that grows no further.
    """
    return [_ours(layer) if type(layer) in EVICTED else layer for layer in DynamicCache(config=config).layers]


def evicting(layers: Iterable[Any]) -> list[EvictingLayer]:
    """The layers of a cache that are compressed."""
    return [layer for layer in layers if isinstance(layer, EvictingLayer)]


def _ours(layer: Any) -> EvictingLayer:
    return EvictingHybridLayer(layer.number_of_states) if is_recurrent(layer) else EvictingLayer()


def is_recurrent(layer: Any) -> bool:
    """Whether a layer has a state that no token can be taken out of again."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def forget_recurrent(layer: Any) -> None:
    """Let a layer forget its states, and the batch that they were of; transformers' own reset keeps that."""
    LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)


def recurrent(layer: Any) -> dict[str, torch.Tensor]:
    """The states of a layer by name, `conv_states.0` and so on; none for a layer without."""
    named = {
        f"{kind}{index}": state
        for kind in RECURRENT
        for index, state in getattr(layer, kind[:-1], {}).items()
    }
    return {name: state for name, state in named.items() if state is not None}


def restore_recurrent(layer: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Put the states among `tensors` back into an empty layer of a model of `dtype`; the recurrence keeps
    its own precision.
    """
    for name, state in tensors.items():
        kind, _, index = name.partition(".")
        if kind == "conv_states":
            layer.update_conv_state(state.to(dtype), int(index))
        elif kind == "recurrent_states":
            layer.update_recurrent_state(state, int(index))


def at(told: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What `told` [B, n] says of positions [B, H, N]; of those from n on, what it says of the last."""
    return told[:, None].take_along_dim(positions.long().clamp(max=told.shape[1] - 1), dim=2)


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether torch allows to write into a tensor: not into one that was made in inference mode, outside
    of that mode.
    """
    return torch.is_inference_mode_enabled() or not tensor.is_inference()


def _writable(entry: Any) -> Any:
    is_kept = isinstance(entry, torch.Tensor) and (entry.requires_grad or not _is_writable(entry))
    return entry.clone() if is_kept else entry


def _rows_of(entry: Any, indices: torch.Tensor) -> Any:
    """The rows of an entry of a state."""
    return entry[indices] if isinstance(entry, torch.Tensor) else [entry[index] for index in indices.tolist()]


def _with_room(states: torch.Tensor, stored: int, needed: int, saved: bool) -> torch.Tensor:
    """Return storage for `needed` tokens with the first `stored` ones of states [B, H, room, D]: `states`
    if it has the room, and no graph has `saved` it.
    """
    if needed <= states.shape[2] and not (saved or states.requires_grad) and _is_writable(states):
        return states
    batch, heads, _, channels = states.shape
    # the tokens of a first prompt take no room beyond them: they are compressed at once
    grown = states.new_empty(batch, heads, needed + (needed // GROWTH if stored else 0), channels)
    grown[:, :, :stored] = states[:, :, :stored]
    return grown


def _without(whole: range, part: range) -> list[int]:
    """The numbers of a range outside of a part of it, which may be empty."""
    return (
        [*range(whole.start, min(part.start, whole.stop)), *range(max(part.stop, whole.start), whole.stop)]
        if part
        else [*whole]
    )


def _with_rows(rows: torch.Tensor, stored: int, needed: int) -> torch.Tensor:
    """Return flat storage for `needed` rows with the first `stored` ones of `rows`: itself if it has them."""
    if needed <= len(rows) and _is_writable(rows):
        return rows
    grown = rows.new_empty(needed + needed // GROWTH, *rows.shape[1:])
    grown[:stored] = rows[:stored]
    return grown


def _rows_of_batch(cache: CompressedCache, indices: torch.Tensor) -> CompressedCache:
    """The ragged cache with only the batch items `indices`."""
    ends = cache.lengths.sum(dim=1).cumsum(0).tolist()
    spans = [slice(ends[item - 1] if item else 0, ends[item]) for item in indices.tolist()]
    keys, values, positions = (
        torch.cat([field[span] for span in spans]) for field in (cache.keys, cache.values, cache.positions)
    )
    return CompressedCache(keys, values, positions, cache.lengths[indices])
