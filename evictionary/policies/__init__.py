"""What a method does in a cache besides choosing tokens. A file has the stem of its method and one subclass
of `Policy`, and nothing else registers it.

A cache calls most methods in one way: it hands over the states of a layer, and evicts what the method does
not keep. A policy is for a method that keeps a state between compressions, has a pass that does more than
choose, attends in its own way, or reads an input that the cache does not have. The file is optional. A policy
overrides what it needs of `Policy`; the rest stays as it is without a policy.

A state is a dict. An entry is a tensor whose first axis is the batch, or a list with an item for each row.
The cache saves, copies and reorders the entries without reading them. Entries that are named after a field of
`Moments`, such as `moments.count`, join the attention. An entry `bias` [B, H_kv, n] is added to the logits of
the first n stored tokens.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from evictionary.optimized.states import CompressedCache, Moments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT = "keydiff"
"""The method of a cache that names none."""

State = dict[str, Any]
"""What a policy keeps of a layer between compressions."""
OF_MOMENTS = tuple(f"moments.{name}" for name in Moments._fields)


@dataclass
class Compression:
    """One compression of a layer. A policy reads it, and changes `state` and `compressed`.

    keys [B, H_kv, N, D] and values [B, H_kv, N, D_v] are those of the layer; filled [B, H_kv, N] is False
    where there is no token, None for a token everywhere; options are the method's own, with their defaults;
    ratio is the fraction to remove, every the tokens between compressions, new those since the last one; note
    is what the policy's own attention of the prompt left; is_final is False where layers share a budget, and
    this one will shrink again; model and layer_index say whose layer it is; model is None once it is gone.
    """

    method: Any
    options: Mapping[str, Any]
    ratio: float
    every: int
    keys: torch.Tensor
    values: torch.Tensor
    filled: torch.Tensor | None = None
    new: int = 0
    note: Any = None
    is_final: bool = True
    state: State = field(default_factory=dict)
    compressed: CompressedCache | None = None
    model: PreTrainedModel | None = None
    layer_index: int = 0


class Calibration(NamedTuple):
    """What calibrates: queries [B, H_q, N, D] after RoPE and before it, RoPE's cos and sin [N, R] at their
    places, and keys.

    keys [B, H_kv, T, D] are after RoPE; key_positions [T] is None where tokens have been evicted.
    """

    queries: torch.Tensor
    before_rope: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    keys: torch.Tensor
    key_positions: torch.Tensor | None


class Source(NamedTuple):
    """The layer of a model that an input is computed from: its own attention module, and its number."""

    model: PreTrainedModel
    module: Any
    layer_index: int


class Policy:
    """All that a cache asks of a method besides its choice. Every default is that of a
    method without a policy.

    A policy has no state: one object serves every cache, in every thread.
    """

    reads_before_rope = False
    """Whether it reads queries before RoPE."""
    reads_all_keys = False
    """Whether it calibrates with all keys of a prompt."""
    counts_in_halves = False
    """Whether it counts RoPE's pairs as channels of two halves."""
    needs_no_cap = False
    """Whether its formula holds only for logits without a cap."""
    stands_for_evicted = False
    """Whether what it keeps stands for the evicted tokens too, so that no moments of these may be added."""
    is_slow = False
    """Whether one prompt takes a minute, so that the demo runs it only when asked."""

    @property
    def stem(self) -> str:
        """The name of its file."""
        return type(self).__module__.rpartition(".")[2]

    def serves(self, method: Any) -> bool:
        """Whether it serves a method: by default only the one of its own stem."""
        package, _, stem = method.module.__name__.rpartition(".")
        return package in ("evictionary.optimized", "evictionary.reference") and stem == self.stem

    # A compression, in the order of its hooks.

    def opened(self, compression: Compression) -> State:
        """The state of a layer before its first compression."""
        return {}

    def keeps_all(self, method: Any, options: Mapping[str, Any], state: State, stored: int) -> bool | None:
        """Whether the numbers of tokens say that all stored ones stay; None leaves that to the budget."""
        return None

    def fused(self, compression: Compression) -> Callable[..., torch.Tensor] | None:
        """A function that stands for the method's own in this compression, or None."""
        return None

    def skipped(self, state: State) -> None:
        """Take out of a state what no longer holds after a compression without the fused pass."""

    def arguments(
        self,
        method: Any,
        options: Mapping[str, Any],
        state: State,
        length: int,
        amount: int,
        removed: float,
        row: int,
    ) -> dict[str, Any]:
        """More arguments of the method's function for a row: `amount` of `length` tokens stay in a head, and
        the fraction `removed` goes.
        """
        return {}

    def evicted(self, compression: Compression, kept: torch.Tensor) -> None:
        """Change a compression by what follows from the kept mask [B, H_kv, N]."""

    def saved(
        self, method: Any, options: Mapping[str, Any], state: State, keys: torch.Tensor, values: torch.Tensor
    ) -> int:
        """The bytes that a layer of these keys [B, H_kv, n, D] and values would take less in packed codes."""
        return 0

    def most(self, method: Any, options: Mapping[str, Any], length: int, amount: int, removed: float) -> int:
        """The tokens of a prompt of `length` that may stay in a head where `amount` were asked for."""
        return amount

    # The attention. Each of these gives a function where it serves this method with one.

    def attending_prompt(self, method: Any) -> AttendPrompt | None:
        """A function or None: a prompt's attention and a note for its compression."""
        return None

    def attending(self, method: Any) -> Callable[..., torch.Tensor | None] | None:
        """A function or None, of a method that is per query: the attention of a token in a layer."""
        return None

    def stepping(self, method: Any) -> Callable[..., torch.Tensor] | None:
        """A function or None: the attention of a token that takes another's slot in a full layer."""
        return None

    def stepping_in_heads(self, method: Any) -> Callable[..., Any] | None:
        """The same where the heads of a layer share its budget."""
        return None

    def part(self, queries: torch.Tensor, moments: Moments) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Output and log-sum-exp of the evicted tokens, to join to the output of the stored ones, or None."""
        return None

    # The inputs that its reference module declares, by name.

    def supply(self, source: Source, states: Mapping[str, Any], position: int) -> dict[str, torch.Tensor]:
        """The `INPUTS` of the reference module, from the states of a layer."""
        raise NotImplementedError(f"{self.stem} declares INPUTS, and its policy supplies none")

    def calibrated(self, source: Source, given: Calibration) -> dict[str, torch.Tensor]:
        """The inputs that a text calibrates, without a position; a file holds them."""
        return {}

    def refitted(
        self, source: Source, readings: Sequence[Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """The same from texts that the model read twice."""
        return {}

    def at(self, source: Source, state: Mapping[str, torch.Tensor], position: int) -> dict[str, torch.Tensor]:
        """What becomes of calibrated inputs at the position of the next token."""
        return {}

    def recent(self, options: Mapping[str, Any]) -> int | None:
        """Of how many tokens before the new ones it reads hidden states while decoding; None for the number
        that a layer remembers by itself.
        """
        return None


AttendPrompt = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any] | None]
"""Given queries [B, H_q, T, D], keys and values of a prompt without a mask: its attention [B, H_q, T, D_v]
and a note, or None where the model's own attention costs less.
"""


@functools.cache
def load(stem: str) -> Policy:
    """The policy of a stem: an object of the one class that its file defines."""
    module = importlib.import_module(f"{__name__}.{stem}")
    (policy,) = (each for each in Policy.__subclasses__() if each.__module__ == module.__name__)
    return policy()


@functools.cache
def stems() -> tuple[str, ...]:
    """The methods that have a policy."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def known() -> list[Policy]:
    """All policies."""
    return [load(stem) for stem in stems()]


def serving(method: Any) -> tuple[Policy, ...]:
    """The policies that serve a method."""
    return tuple(policy for policy in known() if policy.serves(method))


def moments_of(state: State) -> Moments | None:
    """The moments of evicted tokens that a state holds: its own tensors, which a step writes into."""
    return Moments(*map(state.__getitem__, OF_MOMENTS)) if OF_MOMENTS[0] in state else None


def with_moments(moments: Moments) -> State:
    """A state that holds these moments."""
    return dict(zip(OF_MOMENTS, moments, strict=True))
