"""What a method does in a cache beside choosing tokens. A file has the stem of its method, and nothing
else registers it.

A cache calls most methods in one way: it hands over the states of a layer, and evicts what the method does
not keep. A policy is for a method that keeps a state between compressions, has a pass that does more than
choose, attends in its own way, or reads an input that the cache does not have. The file is optional, and so
is each of its functions:

| function | what the cache wants of it |
|---|---|
| `serves(method)` | whether it serves a method; without it, the method of its own stem alone |
| `opened(compression)` | the state of a layer before its first compression |
| `keeps_all(method, options, state, stored)` | whether all stored tokens stay by the numbers alone; or None |
| `arguments(method, options, state, length, amount, removed, row)` | what its function gets for a row |
| `fused(compression)` | a function that stands for the method's own in this compression, or None |
| `skipped(state)` | what of a state no longer holds after a compression without the fused pass |
| `evicted(compression, kept)` | what follows from the kept mask [B, H_kv, N]: it changes the compression |
| `most(method, options, length, amount, removed)` | the tokens that may stay where `amount` were asked for |
| `attend_prompt(queries, keys, values)` | a prompt's attention and a note for its compression, or None |
| `part(queries, moments)` | output and log-sum-exp of the evicted tokens, beside those of the stored |
| `stepping(method)` | a function or None: attention of a token that takes another's slot in a full layer |
| `stepping_in_heads(method)` | the same where the heads of a layer share its budget |
| `attending(method)` | of one that is per query: a function or None: attention of a token in a layer |
| `supply(source, states, position)` | the `INPUTS` of the reference module, from the states of a layer |
| `calibrated(source, calibration)` | the same from a text, without a position; a file holds them |
| `refitted(source, readings)` | the same from texts that the model read twice |
| `at(source, state, position)` | what becomes of calibrated inputs at the position of the next token |
| `recent(options)` | of how many tokens before the new ones it reads hidden states while decoding |

`BEFORE_ROPE = True` says that it reads queries before RoPE, `ALL_KEYS = True` that it calibrates with all
keys of a prompt, `IN_HALVES = True` that it counts RoPE's pairs as channels of two halves, `UNCAPPED = True`
that its formula holds for logits without a cap alone, `SLOW = True` that one prompt takes a minute, so that
the demo runs it only when asked, `WHOLE = True` that what it keeps stands for the evicted tokens too, so that
no moments of these may be added.

A state is a dict. An entry is a tensor whose first axis is the batch, or a list with an item for each row.
The cache saves, copies and reorders the entries without reading them. Entries that are named after a field of
`Moments`, such as `moments.count`, join the attention. An entry `bias` [B, H_kv, n] is added to the logits of
the first n stored tokens.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
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
    is what `attend_prompt` returned.
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
    state: State = field(default_factory=dict)
    compressed: CompressedCache | None = None


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


@functools.cache
def load(stem: str) -> ModuleType:
    """The policy of a stem."""
    return importlib.import_module(f"{__name__}.{stem}")


@functools.cache
def stems() -> tuple[str, ...]:
    """The methods that have a policy."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def serving(method: Any) -> tuple[ModuleType, ...]:
    """The policies that serve a method."""
    package, _, stem = method.module.__name__.rpartition(".")
    is_ours = package in ("evictionary.optimized", "evictionary.reference")
    found = {
        each: getattr(load(each), "serves", lambda _, each=each: is_ours and stem == each) for each in stems()
    }
    return tuple(load(each) for each, serves in found.items() if serves(method))


def hooks(policies: Iterable[ModuleType], name: str) -> list[Callable[..., Any]]:
    """The functions of a name that some policies have."""
    return [getattr(policy, name) for policy in policies if hasattr(policy, name)]


def moments_of(state: State) -> Moments | None:
    """The moments of evicted tokens that a state holds: its own tensors, which a step writes into."""
    return Moments(*map(state.__getitem__, OF_MOMENTS)) if OF_MOMENTS[0] in state else None


def with_moments(moments: Moments) -> State:
    """A state that holds these moments."""
    return dict(zip(OF_MOMENTS, moments, strict=True))
