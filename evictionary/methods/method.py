"""A method: what it reads, and what it keeps of the states of one layer."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from evictionary.errors import UsageError
from evictionary.methods import catalogue
from evictionary.methods.calling import call, checked_kept, checked_scores, typed_option
from evictionary.methods.ragged_batches import Piece, cut, pieces, put, query_heads
from evictionary.optimized import selection
from evictionary.reference import lagkv

Supply = Callable[[str, Mapping[str, Any], int], dict[str, Any]]
"""Given a name, the states of a piece and its next position: what a method wants of the future, by name, with what goes along."""

OBSERVED = 32
"""The last queries of the prompt that a `select_prompt` is given (MK-P)."""


@dataclass(frozen=True)
class Method:
    """One way to decide what stays: a `select` function, or a `score` function whose highest scores stay.

    A composition such as `snapkv+pyramid_kv+ada_kv+moments` adds to it: `layer_budgets` shares a budget out among layers and
    `head_budgets` among the heads of one, and `corrected` says that the moments of the evicted tokens correct the attention.
    """

    name: str
    description: str
    paper: str | None
    seams: tuple[str, ...]
    module: ModuleType
    function: Callable[..., Any]
    is_select: bool
    inputs: tuple[str, ...]
    options: dict[str, Any] = field(hash=False)
    as_torch: bool = True
    prompt_function: Callable[..., Any] | None = None
    layer_budgets: Callable[..., list[int]] | None = None
    head_budgets: Callable[..., Any] | None = None
    corrected: bool = False

    @property
    def label(self) -> str:
        """'score in keydiff.py', for messages."""
        return f"{self.function.__name__} in {Path(inspect.getsourcefile(self.function) or '?').name}"

    @property
    def every(self) -> int:
        """After how many new tokens the method compresses again by its own definition; 0: never, only the prompt."""
        return 1 if "moments" in self.inputs else 0

    @property
    def sets_own_budget(self) -> bool:
        """Whether it decides by itself how much stays, as GVote does: a ratio above 0 changes nothing."""
        return self.is_select and not self.reads & {"budget", "compression_ratio", "keep_ratio"}

    @property
    def is_recursive(self) -> bool:
        """Whether the method leaves alone what it has compressed once, as LagKV does (LK-R)."""
        return "keep_ratio" in self.inputs and "sink_size" in self.options

    @property
    def reads(self) -> frozenset[str]:
        """Everything it names, in decoding and for the prompt."""
        prompt = catalogue.split_signature(self.prompt_function)[0] if self.prompt_function else []
        return frozenset([*self.inputs, *prompt])

    @property
    def captured(self) -> frozenset[str]:
        """The states that only the running model has and that the method needs: some of "queries", "hidden_states"."""
        return frozenset(catalogue.CAPTURED_FOR[name] for name in self.reads if name in catalogue.CAPTURED_FOR)

    def typed_options(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the given options in the types of their defaults. Raises UsageError for an unknown one or a wrong type."""
        # keep_ratio is the one input that a user may set instead of the budget: LagKV's papers report it.
        known = dict(self.options) | ({"keep_ratio": 0.5} if "keep_ratio" in self.inputs else {})
        for name in given or {}:
            if name not in known:
                wanted = f"wanted one of {', '.join(known)}" if known else "it has none"
                raise UsageError(f"option {name}: {self.name} has no such option; {wanted}")
        return {name: typed_option(name, value, known[name]) for name, value in (given or {}).items()}

    def kept(
        self,
        states: Mapping[str, Any],
        *,
        compression_ratio: float = 0.0,
        budget: int | None = None,
        options: Mapping[str, Any] | None = None,
        layer_index: int = 0,
        num_layers: int = 1,
        seed: int = 0,
        filled: torch.Tensor | None = None,
        seen: Sequence[int] | None = None,
        is_prompt: bool = True,
        static: Sequence[int] | None = None,
        supply: Supply | None = None,
    ) -> torch.Tensor:
        """Return the kept mask [B, H_kv, T] of one layer.

        `states` has keys [B, H_kv, T, D], values [B, H_kv, T, D_v] and, if the method names them, queries, hidden_states and
        moments. `budget`, if given, takes the place of compression_ratio, which counts the tokens that each row has `seen`,
        padding aside (T by default). `filled` [B, H_kv, T] is False where there is no token; a method is given rows and heads
        without such places. `is_prompt` says that the states are of all tokens of a prompt; from the second compression on,
        queries and hidden_states are of the last tokens alone, and `static` says how many tokens of each row a recursive method
        leaves alone. `supply` makes what only the model knows. Raises UsageError for arguments out of range or states that the
        method names and nobody recorded, MethodError for what goes wrong inside the method.
        """
        keys = states["keys"]
        shape, options = tuple(keys.shape[:3]), self.typed_options(options)
        seen = [shape[2]] * shape[0] if seen is None else seen
        result = torch.zeros(shape, dtype=torch.bool, device=keys.device)
        scores = torch.full(shape, -math.inf, dtype=torch.float32, device=keys.device) if self.head_budgets else None
        one_head = "positions" in self.inputs and "positions" in states
        for piece in pieces(shape, filled, one_row=len(set(seen)) > 1, one_head=one_head):
            own_seen = seen[piece.rows.start or 0]
            own = cut(states, piece, shape, is_prompt=is_prompt, seen=own_seen)
            length = own["keys"].shape[2]
            amount = self._amount(own_seen, compression_ratio, budget, layer_index, num_layers)
            found = self._run(
                own,
                min(amount, length),
                ratio=compression_ratio if budget is None else 1 - min(amount, length) / length,
                options=options,
                layer_index=layer_index,
                num_layers=num_layers,
                seed=seed,
                seen=own_seen,
                is_prompt=is_prompt,
                static=None if static is None else static[piece.rows.start or 0],
                supply=supply and partial(_supplied, supply, piece, shape),
            )
            if found.dtype != torch.bool and scores is None:
                found = selection.top_k(found, min(amount, length))
            if found.dtype == torch.bool:
                put(result, piece, found)
            elif scores is not None:
                put(scores, piece, found.to(scores.dtype))
        if scores is None or self.is_select:
            return result
        assert self.head_budgets is not None
        for row in range(shape[0]):
            here = scores[row : row + 1].isfinite() if filled is None else filled[row : row + 1]
            amount = self._amount(seen[row], compression_ratio, budget, layer_index, num_layers)
            total = amount * shape[1]
            enough = filled is None or int(here.sum()) > total
            chosen = self.head_budgets(scores[row : row + 1], amount) if enough else here
            result[row] = chosen[0] if filled is None else (chosen & here)[0]
        return result

    def _amount(self, seen: int, ratio: float, budget: int | None, layer_index: int, num_layers: int) -> int:
        """The tokens to keep in each head of this layer, on average over its heads."""
        amount = tokens_to_keep(seen, ratio, budget)
        if self.layer_budgets is None or amount == seen:
            return amount
        return self.layer_budgets(amount, num_layers)[layer_index]

    def _run(
        self,
        states: dict[str, Any],
        amount: int,
        *,
        ratio: float,
        options: dict[str, Any],
        layer_index: int,
        num_layers: int,
        seed: int,
        seen: int,
        is_prompt: bool,
        static: int | None,
        supply: Supply | None,
    ) -> torch.Tensor:
        """Scores, or a boolean mask, [B, H_kv, T] of a piece."""
        keys = states["keys"]
        shape, length = tuple(keys.shape[:3]), keys.shape[2]
        if amount == length and "keep_ratio" not in options and not self.head_budgets:
            return torch.ones(shape, dtype=torch.bool, device=keys.device)
        function, inputs, is_select = self.function, list(self.inputs), self.is_select
        if self.prompt_function is not None and is_prompt:
            function, is_select = self.prompt_function, True
            inputs, prompt_options, _ = catalogue.split_signature(function)
            if amount == 1 and "sink_size" in prompt_options:  # a budget of one token has no room for sinks beside the newest
                options = options | {"sink_size": 0}
            if "queries" in states:
                states["queries"] = states["queries"][:, :, -min(OBSERVED, max(1, amount // 2)) :]
        available: dict[str, Any] = {
            **states,
            "length": length,
            "layer_index": layer_index,
            "num_layers": num_layers,
            "budget": amount,
            "compression_ratio": ratio,
        }
        if "positions" not in available:
            available["positions"] = torch.arange(length, device=keys.device)
        if "queries" in states:
            available["query"] = states["queries"][:, :, -1]
        if "keep_ratio" in inputs:
            available["keep_ratio"] = self._keep_ratio(length, amount, ratio, options, static)
        if static is not None:
            options = options | {"sink_size": static}
        if "generator" in inputs or "sampled_queries" in inputs:
            available["generator"] = torch.Generator().manual_seed(seed * 1_000_003 + layer_index)
        for name in inputs:
            if name not in available and supply is not None:
                available |= supply(name, available, seen)
        if available.get("queries") is not None:  # more than the cache has tokens serve statistics alone
            available["queries"] = available["queries"][:, :, -length:]
        absent = [name for name in inputs if available.get(name) is None]
        if absent:
            record = sorted({catalogue.CAPTURED_FOR.get(name, name) for name in absent})
            raise UsageError(
                f"method {self.name}: reads {', '.join(absent)}, which this prefilled cache did not record; "
                f"prefill with record=({', '.join(map(repr, record))},) or run the prompt through the EvictingCache"
            )
        arguments = {name: available[name] for name in inputs} | {
            name: value for name, value in options.items() if name in inspect.signature(function).parameters
        }
        result = call(function, self.label, arguments, as_torch=self.as_torch and _knows_torch(function))
        if is_select:
            return checked_kept(self.label, result, shape, keys.device)
        return checked_scores(self.label, result, shape, keys.device)

    def _keep_ratio(self, length: int, amount: int, removed: float, options: Mapping[str, Any], static: int | None) -> Any:
        """The ratio that meets the budget: solved by the method's own `keep_ratio_for` where it has one.

        Partitions that come one after another are all compressed by the same ratio, so there nothing is solved for.
        """
        solve = self._helper("keep_ratio_for")
        if solve is None or static is not None:
            return float(1 - Decimal(repr(float(removed))))
        return solve(length, amount, **_accepted(solve, {**self.options, **options}))

    def static_after(self, length: int, static: int, ratio: float, options: Mapping[str, Any]) -> int:
        """LK-R: how many tokens a recursive method leaves alone once it has compressed `length` tokens, `static` of them left."""
        settings = {**self.options, **options}
        partitions = max(0, (length - static) // settings["lag_size"] - 1)
        keep_ratio = settings.get("keep_ratio", self._keep_ratio(length, length, ratio, options, static))
        return static + partitions * lagkv.tokens_per_partition(keep_ratio, settings["lag_size"])

    def why_nothing_removed(self, length: int, options: Mapping[str, Any] | None = None) -> str | None:
        """Say why a cache of `length` tokens stays whole, in the method's own words, or None where it does not say."""
        explain = self._helper("why_nothing_removed")
        return explain and explain(length, **_accepted(explain, self.options | self.typed_options(options)))

    def _helper(self, name: str) -> Callable[..., Any] | None:
        """A helper of the method's module, or of the reference module with the same stem."""
        if hasattr(self.module, name):
            return getattr(self.module, name)
        stem = self.module.__name__.rpartition(".")[2]
        in_package = self.module.__name__.startswith("evictionary.optimized.")
        return getattr(importlib.import_module(f"evictionary.reference.{stem}"), name, None) if in_package else None


def _supplied(
    supply: Supply, piece: Piece, shape: tuple[int, ...], name: str, states: Mapping[str, Any], position: int
) -> dict[str, Any]:
    """What `supply` gives for a piece. Samples come from hidden states, which have no heads, so they are of all heads."""
    found = supply(name, states, position)
    if "sampled_queries" in found:
        found["sampled_queries"] = found["sampled_queries"][:, query_heads(piece, found["sampled_queries"], shape)]
    return found


def _knows_torch(function: Callable[..., Any]) -> bool:
    """Whether a function is none of the NumPy reference."""
    return not function.__module__.startswith("evictionary.reference.")


def _accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def tokens_to_keep(length: int, compression_ratio: float, budget: int | None = None) -> int:
    """Return how many of `length` tokens stay in each head. A budget larger than the cache keeps all.

    Raises UsageError for a ratio outside [0, 1) or a budget below 1.
    """
    if budget is None:
        try:
            return selection.budget(length, compression_ratio)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise UsageError(f"budget: got {budget!r}, wanted a whole number of at least 1")
    return min(budget, length)
