"""A method: its inputs, its options, its traits, and the
kept mask that it chooses for the states of one layer.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from types import ModuleType
from typing import Any

import torch

from evictionary import policies
from evictionary.errors import UsageError, did_you_mean, require
from evictionary.methods import catalogue
from evictionary.methods.calling import call, checked_kept, checked_scores, typed_option
from evictionary.methods.ragged_batches import Piece, cut, pieces, put
from evictionary.optimized import protect, selection
from evictionary.optimized.softmax import Softmax, of_model
from evictionary.policies import Policy, dms
from evictionary.source import file_of

# A callback that computes an input that only the running model knows. Its arguments: the name of the input,
# the states of a piece and `kv_heads`, its heads, and the position of its next token. It returns that input
# by name, and others computed with it.
Supply = Callable[[str, Mapping[str, Any], int], dict[str, Any]]

# The number of last queries of the prompt that `select_prompt` receives (MK-P).
OBSERVED = 32


@dataclass(frozen=True)
class Request:
    """The settings for one call of a method on the states of one layer.

    Attributes:
        compression_ratio: The fraction to remove of the tokens that each row has seen.
        budget: The tokens to keep in each head, which replaces the ratio.
        options: The method's own options.
        layer_index: The layer, counted from 0.
        num_layers: The number of layers.
        seed: The seed of a method that draws.
        filled: [B, H_kv, T], False where there is no token; None for a token everywhere.
        seen: The tokens that each row has read without padding; None for T each.
        is_prompt: Whether the states cover all tokens of a prompt; later, queries and hidden_states cover
            only the last tokens.
        cap: The cap of the attention logits.
        state: The state of the layer, for its policies.
        preferences: Those of the layers that have read the prompt, for a method that compares them.
        supply: A callback that computes inputs, see Supply.
    """

    compression_ratio: float = 0.0
    budget: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    layer_index: int = 0
    num_layers: int = 1
    seed: int = 0
    filled: torch.Tensor | None = None
    seen: Sequence[int] | None = None
    is_prompt: bool = True
    cap: float | None = None
    state: policies.State = field(default_factory=dict)
    preferences: torch.Tensor | None = None
    supply: Supply | None = None


@dataclass(frozen=True, eq=False)
class Method:
    """One way to decide which tokens stay: a `select`
    function, or a `score` function whose highest scores stay.

    `resolve` makes it from a name, a file or a composition such as `name+pyramid_kv+ada_kv+moments`.

    Attributes:
        name: What `resolve` was given.
        module: The module that has the function.
        function: `score` or `select`.
        inputs: The names of the inputs that the function takes; its other arguments are options.
        options: The options with their defaults.
        traits: Words of catalogue.TRAITS.
        as_torch: Whether the function gets torch tensors; otherwise NumPy arrays in float64.
        prompt_function: What chooses for a prompt, if that is another function.
        layer_budgets: Divides a budget among layers.
        preference: Computes how much of a budget a layer should have, for an addition that compares layers.
        head_budgets: Divides a budget among the heads of a layer by their scores.
        choose: Keeps tokens of a head by their scores: the highest, whole chunks, or both ends first.
        corrected: Whether the moments of the evicted tokens correct the attention.
        merge: Gives the values of evicted tokens to kept ones.
        quantised: What quantises the kept tokens.
        rerotated: Whether the kept keys turn to consecutive positions.
        delays: Whether a threshold decides what goes of the tokens that leave a window.
    """

    name: str
    module: ModuleType
    function: Callable[..., Any]
    inputs: Sequence[str]
    options: dict[str, Any]
    traits: frozenset[str] = frozenset()
    as_torch: bool = True
    prompt_function: Callable[..., Any] | None = None
    layer_budgets: Callable[..., list[int]] | None = None
    preference: "Method | None" = None
    head_budgets: Callable[..., Any] | None = None
    choose: Callable[..., torch.Tensor] = selection.top_k
    corrected: bool = False
    merge: "Method | None" = None
    quantised: str = ""
    rerotated: bool = False
    delays: bool = False

    @property
    def is_select(self) -> bool:
        """Whether the function returns a kept mask; otherwise it returns scores."""
        return self.function.__name__.startswith("select")

    @property
    def is_top_k(self) -> bool:
        """Whether each head keeps the highest of its own scores."""
        return not self.delays and self.head_budgets is None and self.choose is selection.top_k

    @property
    def of_the_layer(self) -> bool:
        """Whether the scores of all heads of a layer decide together."""
        return self.delays or self.head_budgets is not None

    @property
    def protects(self) -> bool:
        """Whether the tokens at both ends stay whatever they score."""
        return self.choose is protect.choose

    @property
    def is_per_query(self) -> bool:
        """Whether nothing is evicted, and the function chooses what each query head of a token attends to."""
        return "per_query" in self.traits

    @property
    def reads_later(self) -> frozenset[str]:
        """Every input that the method names while decoding."""
        return frozenset([*self.inputs, *(self.merge.inputs if self.merge else ())])

    @property
    def reads(self) -> frozenset[str]:
        """Every input that the method names, for the prompt and while decoding."""
        prompt = catalogue.split_signature(self.prompt_function)[0] if self.prompt_function else []
        return self.reads_later.union(prompt, self.preference.inputs if self.preference else ())

    @functools.cached_property
    def policies(self) -> tuple[Policy, ...]:
        """What the method does in a cache besides choosing tokens."""
        return policies.serving(self)

    @property
    def suppliers(self) -> list[Policy]:
        """The policies that compute its inputs."""
        return [
            policies.load(stem)
            for stem in sorted(
                {catalogue.DECLARED[name][0] for name in self.reads & catalogue.DECLARED.keys()}
            )
        ]

    @property
    def captured(self) -> frozenset[str]:
        """The method's inputs that come only from the running model: some of "queries", "hidden_states"."""
        return catalogue.captured(self.reads)

    def readings(self, options: Mapping[str, Any] | None = None) -> int:
        """How often a model reads a prompt for it: twice where a second reading gives an input that no
        calibration file holds.
        """
        held = catalogue.CALIBRATED if (options or {}).get("calibration") else frozenset()
        return 1 + bool(catalogue.captured(self.reads - held) & catalogue.REPLAYED)

    def typed_options(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The given options in the types of their defaults, such as 128 for "128".

        Args:
            given: Options by name.

        Raises:
            UsageError: The method has no option of a name, or a value has another type.
        """
        # keep_ratio is the only input that a user may set instead of the budget, as papers report it.
        known = self.options | ({"keep_ratio": 0.5} if "keep_ratio" in self.inputs else {})
        for name in given or {}:
            if name not in known:
                wanted = f"wanted one of {', '.join(known)}" if known else "it has none"
                raise UsageError(
                    f"option {name}: {self.name} has no such option{did_you_mean(name, known)}; {wanted}"
                )
        return {name: typed_option(name, value, known[name]) for name, value in (given or {}).items()}

    def kept(self, states: Mapping[str, Any], request: Request) -> torch.Tensor:
        """Which tokens of one layer stay. The method gets rows and heads without empty places.

        Args:
            states: keys [B, H_kv, T, D], values [B, H_kv, T, D_v] and, if the method names them, queries,
                hidden_states and moments.
            request: The settings of this call.

        Returns:
            The kept mask [B, H_kv, T]; of a method that is per query, [B, H_q, T].

        Raises:
            UsageError: The request is out of range, or states that the method names were not recorded.
            MethodError: The method's own function raised, or returned neither scores nor a mask.

        Examples:
            >>> import torch
            >>> from evictionary.methods.method import Request
            >>> from evictionary.methods.resolve import resolve
            >>> keys = torch.eye(4)[None, None]
            >>> kept = resolve("knorm").kept({"keys": keys, "values": keys}, Request(budget=2))
            >>> kept.tolist()
            [[[True, True, False, False]]]
        """
        require(
            self.preference is None or request.preferences is not None,
            f"method: {self.name} compares the layers of a model, wanted an EvictingCache for it",
        )
        seen = request.seen or [states["keys"].shape[2]] * len(states["keys"])
        request = replace(request, seen=seen, options=self.typed_options(request.options))
        found = self._found(states, request)
        if found.dtype == torch.bool:
            return found
        return self._judged(found, request) if self.delays else self._shared_out(found, request, seen)

    def scores(self, states: Mapping[str, Any], request: Request) -> torch.Tensor:
        """Return the scores [B, H_kv, T] of one layer, -infinity where there is no token.

        Arguments and errors are those of `kept`; the request has `seen`, and options in their types.
        """
        return replace(self, head_budgets=self.head_budgets or self.choose)._found(states, request)

    def merged(
        self, states: Mapping[str, Any], request: Request, kept: torch.Tensor, new: int
    ) -> torch.Tensor:
        """Return the values [B, H_kv, T, D_v] after those of evicted tokens were merged into kept ones.

        `states` are those of `kept`, the mask [B, H_kv, T]; `new`, the tokens since the last compression,
        whose queries count.
        """
        assert self.merge is not None
        values, seen = states["values"].clone(), request.seen or ()
        recent = {name: states[name][:, :, -new:] for name in ("queries",) if name in states}
        given = {**states, **recent, "kept": kept}
        # a method that draws tokens must not find the same numbers
        asked = replace(request, options={}, seed=~request.seed)
        for piece in pieces(kept.shape, request.filled, one_row=len(set(seen)) > 1, one_head=False):
            row = piece.rows.start or 0
            own = cut(given, piece, kept.shape, is_prompt=request.is_prompt, seen=seen[row])
            length = own["keys"].shape[2]
            put(values, piece, self.merge._answer(own, piece, asked, seen[row], length, chooses=False)[1])
        return values

    def _found(self, states: Mapping[str, Any], request: Request) -> torch.Tensor:
        """The kept mask [B, H_kv, T], or the scores where the heads share a budget."""
        keys, seen, shape = states["keys"], request.seen or (), self._shape(states)
        kept = torch.zeros(shape, dtype=torch.bool, device=keys.device)
        scores = (
            torch.full(shape, -math.inf, dtype=torch.float32, device=keys.device)
            if self.of_the_layer
            else kept
        )
        one_head = "positions" in self.inputs and "positions" in states
        is_shared = False
        for piece in pieces(shape, request.filled, one_row=len(set(seen)) > 1, one_head=one_head):
            row = piece.rows.start or 0
            own = cut(states, piece, shape, is_prompt=request.is_prompt, seen=seen[row])
            found = self._of_piece(own, piece, shape, request, seen[row])
            is_shared = found.dtype != torch.bool
            put(scores if is_shared else kept, piece, found.to(scores.dtype) if is_shared else found)
        return scores if is_shared else kept

    def chosen(
        self,
        scores: torch.Tensor,
        amount: int,
        request: Request,
        row: int = 0,
        filled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The kept mask of scores [B, H_kv, T], of rows from `row` on: `amount` tokens stay in a head, or on
        average in heads that share a budget.

        filled [B, H_kv, T] is False where there is no token, None for a token everywhere. Raises UsageError
        for an option out of range.
        """
        if not self.protects:
            return (self.head_budgets or self.choose)(scores, amount)
        filled = torch.ones_like(scores, dtype=torch.bool) if filled is None else filled
        protected = self._protected(filled, amount, request, row)
        return (self.head_budgets or selection.top_k)(scores, amount, protected=protected)

    def _protected(self, filled: torch.Tensor, amount: int, request: Request, row: int) -> torch.Tensor:
        """The tokens [B, H_kv, T] that stay whatever they score, where a head keeps `amount`."""
        options = {**self.options, **request.options}
        prompt = request.state["prompt"][row] if "prompt" in request.state else 0
        require(
            amount >= min(prompt, filled.shape[2]),
            f"option prompt: got true with {amount} tokens to keep in a head, wanted a budget of at least "
            f"{prompt}, those of the prompt",
        )
        first = max(options["first"], prompt) if prompt else options["first"]
        try:
            return protect.protected(filled, amount, first=first, last=options["last"])
        except ValueError as error:
            raise UsageError(f"option {error}") from None

    def _judged(self, scores: torch.Tensor, request: Request) -> torch.Tensor:
        """The kept mask of scores [B, H_kv, T]: what leaves the window is judged by a threshold."""
        filled = torch.ones_like(scores, dtype=torch.bool) if request.filled is None else request.filled
        options = {**self.options, **request.options}
        stays = torch.zeros_like(filled)
        if self.protects:
            options["delay"] = max(options["delay"], options["last"])
            rows = enumerate(filled.split(1))
            stays = torch.cat([self._protected(here, here.shape[2], request, row) for row, here in rows])
        return dms.judged(scores, filled, stays, options, request)

    def _shared_out(self, scores: torch.Tensor, request: Request, seen: Sequence[int]) -> torch.Tensor:
        """The kept mask of scores [B, H_kv, T]: in each row the heads share the budget of the layer."""
        assert self.head_budgets is not None
        filled = torch.ones_like(scores, dtype=torch.bool) if request.filled is None else request.filled
        rows = []
        parts = zip(filled.split(1), scores.split(1), seen, strict=True)
        for row, (here, own_scores, own_seen) in enumerate(parts):
            amount = self.amount(own_seen, request)
            fits = int(here.sum()) <= amount * scores.shape[1]
            rows.append(here if fits else self.chosen(own_scores, amount, request, row, here) & here)
        return torch.cat(rows)

    def amount(self, seen: int, request: Request) -> int:
        """The tokens to keep in each head of this layer, on average over its heads; over the layers too,
        until these are compared.
        """
        amount = tokens_to_keep(seen, request.compression_ratio, request.budget)
        known = {name: getattr(request, name) for name in ("num_layers", "preferences")}
        if self.layer_budgets is None or amount == seen or (self.preference and known["preferences"] is None):
            return amount
        options = {**self.options, **request.options}
        window = options.get("window_size", 0)
        if self.protects:
            window = max(window, options["first"] + options["last"])
        known |= {"budget": amount, "length": seen, "window_size": window}
        return self.layer_budgets(**_accepted(self.layer_budgets, known))[request.layer_index]

    def _of_piece(
        self, states: Mapping[str, Any], piece: Piece, shape: tuple[int, ...], request: Request, seen: int
    ) -> torch.Tensor:
        """The kept mask [b, h, n] of a piece of a cache of
        `shape`, or its scores where the heads share a budget.
        """
        own_shape, device, length = self._shape(states), states["keys"].device, states["keys"].shape[2]
        amount, row = min(self.amount(seen, request), length), piece.rows.start or 0
        if (
            amount == length
            and "keep_ratio" not in request.options
            and not self.of_the_layer
            and "moving_window" not in self.traits
        ):
            return torch.ones(own_shape, dtype=torch.bool, device=device)
        label, result = self._answer(states, piece, request, seen, amount)
        if label.startswith("select"):
            kept = checked_kept(label, result, own_shape, device)
            if self.protects:  # a method that decides by itself how many stay leaves room for others
                kept = kept | self._protected(torch.ones_like(kept), length, request, row)
            return kept
        if label.startswith("preference "):  # one number for a row
            result = result[:, None, None].expand(own_shape)
        scores = checked_scores(label, result, own_shape, device)
        return scores if self.of_the_layer else self.chosen(scores, amount, request, row)

    def _answer(
        self,
        states: Mapping[str, Any],
        piece: Piece,
        request: Request,
        seen: int,
        amount: int,
        chooses: bool = True,
    ) -> tuple[str, Any]:
        """The name and the file of the function for a piece, of which `amount` tokens stay in a head, and
        what it returns; `chooses` says whether that is for a choice.
        """
        options, function, length = dict(request.options), self.function, states["keys"].shape[2]
        removed = request.compression_ratio if request.budget is None else 1 - amount / length
        available: dict[str, Any] = {
            "positions": torch.arange(length, device=states["keys"].device),
            **states,
            "length": length,
            "kv_heads": piece.heads,
            "layer_index": request.layer_index,
            "num_layers": request.num_layers,
            "budget": amount,
            "compression_ratio": removed,
        }
        if "keep_ratio" in self.inputs:
            available["keep_ratio"] = float(1 - Decimal(repr(float(removed))))
        if "queries" in states:
            available["query"] = states["queries"][:, :, -1]
        if self.prompt_function is not None and request.is_prompt:
            function = self.prompt_function
            if amount == 1 and "sink_size" in inspect.signature(function).parameters:
                # a budget of one token has no room for sinks beside the newest token
                options["sink_size"] = 0
            # it shares the budget out itself
            if self.head_budgets and "floor_ratio" in inspect.signature(function).parameters:
                options["floor_ratio"] = (
                    inspect.signature(self.head_budgets).parameters["floor_ratio"].default
                )
            if "queries" in states:
                available["queries"] = states["queries"][:, :, -min(OBSERVED, max(1, amount // 2)) :]
        inputs = self.inputs if function is self.function else catalogue.split_signature(function)[0]
        settings, row = self.options | dict(request.options), piece.rows.start or 0
        for policy in self.policies:
            options |= policy.arguments(self, settings, request.state, length, amount, removed, row)
        if not catalogue.DRAWN.isdisjoint(inputs):
            # drawn anew at each compression, and by each head that is scored alone; `seen` needs no state to
            # be saved with a cache
            place = 0 if request.is_prompt else seen
            head = piece.heads.start or 0 if "generator" in inputs else 0
            mixed = request.seed * 1_000_003 + request.layer_index + place * 2_654_435_761 + head * 40_503
            available["generator"] = torch.Generator().manual_seed(mixed % 2**64)
        with of_model(Softmax(request.cap, states.get("sinks"))):
            for name in inputs:
                if name not in available and request.supply is not None:
                    with torch.no_grad():  # what a method reads of a model is for its choice
                        available |= request.supply(name, available, seen)
            # a longer history serves only query_mean and query_covariance
            if available.get("queries") is not None:
                available["queries"] = available["queries"][:, :, -length:]
            self._require(inputs, available)
            arguments = {name: available[name] for name in inputs} | _accepted(function, options)
            label = f"{function.__name__} in {file_of(function).name}"
            in_numpy = not self.as_torch or function.__module__.startswith("evictionary.reference.")
            return label, call(function, label, arguments, as_torch=not in_numpy, chooses=chooses)

    def _shape(self, states: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of the mask: each KV head chooses, or each query head."""
        chooser = states["queries" if self.is_per_query else "keys"]
        return (*chooser.shape[:2], states["keys"].shape[2])

    def _require(self, inputs: Sequence[str], available: Mapping[str, Any]) -> None:
        absent = [name for name in inputs if available.get(name) is None]
        if absent:
            known = {name for name in absent if name not in catalogue.CAPTURED_FOR}
            record = sorted(catalogue.captured(absent) | known)
            raise UsageError(
                f"method {self.name}: reads {', '.join(absent)}, which this prefilled cache did not record; "
                f"prefill with record=({', '.join(map(repr, record))},) or run the prompt through the "
                "EvictingCache"
            )

    def most(self, length: int, request: Request) -> int:
        """The most tokens of a prompt of `length` tokens that the heads of a layer may keep on average.

        This is what the request asks for, or more where the
        method says so: one that sets its own budget may keep all.
        """
        if self.traits & {"own_budget", "per_query"}:
            return length
        amount = self.amount(length, request)
        options = {**self.options, **request.options}
        removed = request.compression_ratio
        return max(
            [amount, *(policy.most(self, options, length, amount, removed) for policy in self.policies)]
        )

    def why_nothing_removed(self, length: int, options: Mapping[str, Any] | None = None) -> str | None:
        """The method's own reason why a cache of `length` tokens stays whole, or None without a reason."""
        explain = getattr(self.module, "why_nothing_removed", None)
        return explain and explain(length, **_accepted(explain, self.options | self.typed_options(options)))


def _accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def tokens_to_keep(length: int, compression_ratio: float, budget: int | None = None) -> int:
    """Return how many of `length` tokens stay in each head. A budget larger than the cache keeps all tokens.

    Raises UsageError for a ratio outside [0, 1) or a budget below 1.
    """
    if budget is None:
        try:
            exact = _exact if isinstance(compression_ratio, float) else selection.budget
            return exact(length, compression_ratio)
        except ValueError as error:
            raise UsageError(str(error)) from None
    require(
        not isinstance(budget, bool) and isinstance(budget, int) and budget >= 1,
        f"budget: got {budget!r}, wanted a whole number of at least 1",
    )
    return min(budget, length)


# A cache asks the same of all its layers, and fractions are slow.
_exact = functools.lru_cache(maxsize=64)(selection.budget)
