"""The axes of the arguments of every function that checks them, one line a function.

`checks.arrays` refuses by it, `optimized` too, and the laws of refusal are generated from it. A line
names the arrays in the order of the signature, `argument: kind axes`, and leaves the settings out.

An axis has one size wherever its name stands in a line, and is never empty. `...` are any leading
axes, the same wherever they stand; `*` are leading axes that broadcast. H_q is a multiple of H_kv.
`M<=T` is M, and at most T; `N>=0` is N, and may be empty; `D%2` is D, and even; `D/2` and `h*d_h` are
such a size.

The kinds: without a word finite real numbers; `weight`, of at least 0; `share`, from 0 to 1; `open`,
infinite ones too; `memory`, NaN too; `bool`, a mask; `whole`, whole numbers of at least 0; or the
name of a state, whose fields stand in STATES, each behind the axes that the line gives to the state.
An argument with a question mark may be None.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

TOKENS = "keys: B H_kv T D, values: B H_kv T D_v"
LAST_QUERIES = "queries: B H_q M<=T D, keys: B H_kv T D"
DECODING = f"query: B H_q D, {TOKENS}"
ATTENDED = f"{DECODING}, kept: bool B H_kv T, moments: Moments B H_kv"
NEW_TOKEN = "query: B H_q D, new_key: B H_kv D, new_value: B H_kv D_v"

CONTRACT = {
    "ada_kv.select": "scores: open B H_kv T, protected?: bool B H_kv T",
    "attention.attend": "queries: B H_q M D, cache: CompressedCache",
    "attention.by_group": LAST_QUERIES,
    "attention_matching.attend": (
        "queries: B H_q M D, keys: B H_kv kept D, values: B H_kv kept D_v, bias: B H_kv kept"
    ),
    "attention_matching.bounded_least_squares": "matrix: ... R n, target: ... R",
    "attention_matching.fit_bias": "queries: B H_q M D, keys: B H_kv T D, kept: bool B H_kv T",
    "attention_matching.fit_values": (
        "queries: B H_q M D, keys: B H_kv T D, values: B H_kv T D_v, kept: bool B H_kv T, bias: B H_kv kept"
    ),
    "attention_matching.score": "keys: B H_kv T D, replay_queries: B H_q M D",
    "attention_matching.select": "keys: B H_kv T D, replay_queries: B H_q M D",
    "cache.compress": f"{TOKENS}, kept: bool B H_kv T",
    "cake.budgets": "preferences: weight L",
    "cake.dispersion": "attention: weight ... M N",
    "cake.preference": LAST_QUERIES,
    "cake.shift": "attention: weight ... M N",
    "cake_theory.cascade": "scores: open L T, preferences: weight L",
    "cam.merge_values": (
        "values: B H_kv T D_v, attention: weight B H_kv T, kept: bool B H_kv T, draws: share B H_kv T"
    ),
    "cam.probabilities": "attention: weight ... T, kept: bool ... T",
    "cam.shares": "kept: bool ... T",
    "cam.spread": "values: ... T D_v, kept: bool ... T, weights: share ... T",
    "chunk_kv.choose": "scores: open ... T",
    "chunk_kv.chunk_means": "scores: open ... T",
    "compactor.chunk_attention": "queries: * T D, keys: * T D",
    "compactor.leverage": "keys: ... T D",
    "compactor.score": (
        "queries: B H_q T D, keys: B H_kv T D, values: B H_kv T D_v, unrotated_keys: B H_kv T D, "
        "sketch: B H_kv D k"
    ),
    "compactor.sketched_leverage": "keys: * T D, sketch: * D k",
    "criticalkv.importance": LAST_QUERIES,
    "criticalkv.projected_norms": "values: B H_kv T D_v, w_o: H_q D_v hidden",
    "criticalkv.score": f"{LAST_QUERIES}, values: B H_kv T D_v, w_o: H_q D_v hidden",
    "dropkv.score": f"{LAST_QUERIES}, values: B H_kv T D_v",
    "duo_attention.estimate_gates": "query_mean: B H_q D%2, key_mean: B H_kv D",
    "duo_attention.gated_attention": f"{LAST_QUERIES}, values: B H_kv T D_v, gates: share B H_kv",
    "duo_attention.select": "keys: B H_kv T D, gates: B H_kv",
    "duo_attention.training_loss": "hidden_states: N d, full_hidden_states: N d, gates: layers H_kv",
    "expected_attention.average_rope": "query_mean: ... D%2, query_covariance: ... D D",
    "expected_attention.decode_step": "state: Decoding, query: B H_q D, key: B H_kv D, value: B H_kv D_v",
    "expected_attention.query_statistics": "queries: ... N D",
    "expected_attention.score": f"{TOKENS}, query_mean: B H_q D, query_covariance: B H_q D D",
    "expected_attention.start_decoding": f"{TOKENS}, queries: B H_q M D",
    "gvote.algorithm_1": f"{DECODING}, hidden_states: B T C, query_weight: H_q C D, noise: B S C",
    "gvote.attention_weights": "query: * D, keys: * T D",
    "gvote.hidden_statistics": "hidden_states: ... T C",
    "gvote.nucleus": "attention: weight ... T",
    "gvote.project": "hidden_states: * S C, query_weight: * C D, query_bias?: * D",
    "gvote.prune": f"{TOKENS}, kept: bool B H_kv T",
    "gvote.rotate_by_average": "queries: ... S D%2",
    "gvote.sample_hidden_states": "mean: * C, variance: weight * C, noise: * S C",
    "gvote.sampled_logits": "sampled_queries: * S D, keys: * T D",
    "gvote.select": "query: B H_q D, keys: B H_kv T D, sampled_queries: B H_q S D",
    "gvote.single_step_budget": "candidates: bool ... T",
    "gvote.top_each": "scores: ... T, budgets: whole ...",
    "gvote.union": "votes: bool ... S T",
    "gvote_theory.attention_overlap": "attention: ... T, candidates: bool ... T",
    "gvote_theory.importance": "queries: * M D, keys: * T D",
    "gvote_theory.optimal_keep_set": "attention: ... M T",
    "gvote_theory.output": "attention: * T, values: * T D_v",
    "h2o.score": LAST_QUERIES,
    "h2o.select": LAST_QUERIES,
    "keydiff.anchor": "keys: ... T D",
    "keydiff.append": "cache?: Cache ..., keys: ... M D, values: ... M D_v",
    "keydiff.decode": "cache?: Cache ..., key: ... D, value: ... D_v",
    "keydiff.evict": "cache: Cache ..., kept: bool ... n",
    "keydiff.pairwise_score": "keys: ... T D",
    "keydiff.process_block": "cache?: Cache ..., keys: ... M D, values: ... M D_v",
    "keydiff.process_prompt": "keys: ... T D, values: ... T D_v",
    "keydiff.score": "keys: ... T D",
    "keydiff.similarity_matrix": "keys: ... T D",
    "keydiff_theory.anchor_cosine_bound": "key_query: *, anchor_query: *",
    "keydiff_theory.attention_policy": "weights: ... M T",
    "keydiff_theory.cached_attention": "queries: ... M D, keys: ... M D, values: ... M D_v, cache: Cache ...",
    "keydiff_theory.causal_attention": "queries: ... T D, keys: ... T D, values: ... T D_v",
    "keydiff_theory.pairwise_objective": "keys: ... T D, kept: bool ... T",
    "keydiff_theory.relaxed_objective": "keys: ... T D, kept: bool ... T",
    "keydiff_theory.score_step_by_step": "keys: ... T D",
    "keydiff_theory.squared_cosines": "vector: * D, basis: * D D",
    "keydiff_theory.transformer_block": "states: ... T D",
    "keydiff_variants.dot_product_score": "keys: ... T D",
    "keydiff_variants.euclidean_score": "keys: ... T D",
    "keydiff_variants.median_score": "keys: ... T D",
    "keydiff_variants.raw_mean_score": "keys: ... T D",
    "keydiff_variants.select_with_recent": "keys: ... T D",
    "knorm.score": "keys: ... T D",
    "kvzap.dms": "scores: open ... T",
    "kvzap.fit": "hidden_states: B T C, target_scores: B H_kv T",
    "kvzap.score": "hidden_states: B T C, surrogate_weights: B H_kv C, surrogate_bias: B H_kv",
    "kvzap.select": (
        "keys: B H_kv T D, hidden_states: B M<=T C, surrogate_weights: B H_kv C, surrogate_bias: B H_kv"
    ),
    "kvzap.target": (
        f"{TOKENS}, w_o: H_q D_v hidden, replay_queries: B H_q M D, replay_keys: B H_kv M D, "
        "replay_hidden_states: B M hidden"
    ),
    "kvzip.score": "keys: B H_kv T D, replay_queries: B H_q M D, replay_keys: B H_kv M D",
    "kvzip.top_r": "scores: L B H_kv T",
    "lagkv.append": "cached: ... N>=0 D, new: ... n D",
    "lagkv.score": "keys: ... L D, values: ... L D_v, next_keys: ... M D, next_values: ... M D_v",
    "lagkv.select": TOKENS,
    "lagkv.step": "stream?: Stream B H_kv, keys: B H_kv n D, values: B H_kv n D_v",
    "lagkv_theory.attention_output": "weights: ... h M T, values: ... h T d_h, output_weight: h*d_h d",
    "lagkv_theory.attention_weights": "queries: ... M<=T d_h, keys: ... T d_h",
    "lagkv_theory.project": "states: * n d, query_weight: * d D, key_weight: * d D, value_weight: * d D_v",
    "lagkv_variants.local_score": "keys: ... L D, values: ... L D_v",
    "lagkv_variants.local_select": TOKENS,
    "lagkv_variants.norm_select": TOKENS,
    "momentkv.attend": ATTENDED,
    "momentkv.decode_step": f"{NEW_TOKEN}, {TOKENS}, moments: Moments B H_kv",
    "momentkv.no_moments": "keys: ... T D, values: ... T D_v",
    "momentkv.score": f"{DECODING}, moments: Moments B H_kv",
    "momentkv.score_prompt": f"{LAST_QUERIES}, values: B H_kv T D_v",
    "momentkv.select_prompt": f"{LAST_QUERIES}, values: B H_kv T D_v",
    "momentkv.update": "moments: Moments ..., keys: ... T D, values: ... T D_v, evicted: bool ... T",
    "momentkv_bounded.attend": f"{ATTENDED}, bounds: Bounds B H_kv",
    "momentkv_bounded.attend_certified": f"{ATTENDED}, bounds: Bounds B H_kv",
    "momentkv_bounded.no_bounds": "keys: ... T D, values: ... T D_v",
    "momentkv_bounded.update": "bounds: Bounds ..., keys: ... T D, values: ... T D_v, evicted: bool ... T",
    "momentkv_theory.attend_zeroth_order": ATTENDED,
    "paging.attend_pages": "queries: B H_q M D, paged: PagedCache",
    "paging.compact_pages": "paged: PagedCache, kept: bool B H_kv n*S",
    "paging.gather_pages": "paged: PagedCache",
    "paging.slot_mapping": "paged: PagedCache",
    "q_filters.calibrate": "queries: B H_q N D",
    "q_filters.main_direction": "queries: ... N D",
    "q_filters.score": "keys: B H_kv T D, q_filters: B H_kv D",
    "quest.append": "low: B H_kv P D, high: B H_kv P D, key: B H_kv D",
    "quest.attend": f"{DECODING}, attended: bool B H_q T",
    "quest.bounds": "query: B H_q D, low: B H_kv P D, high: B H_kv P D",
    "quest.page_bounds": "keys: B H_kv T D",
    "quest.select": "query: B H_q D, keys: B H_kv T D",
    "rkv.importance": LAST_QUERIES,
    "rkv.redundancy": "keys: ... T D",
    "rkv.score": LAST_QUERIES,
    "rkv.similarities": "keys: ... T D",
    "rkv_variants.released_score": LAST_QUERIES,
    "rope.rotate": "states: ... T D%2",
    "selection.top_k": "scores: open ... T, protected?: bool ... T",
    "snapkv.score": LAST_QUERIES,
    "streaming_llm.score": "keys: ... T D",
    "tova.score": LAST_QUERIES,
    "triattention.average_over_offsets": "query_mean: ... D%2",
    "triattention.score": "keys: B H_kv T D, query_direction: B H_q D, query_slack: B H_q D/2",
    "triattention.statistics": "queries: ... N D%2",
}

SO_FAR = "keys: B H_kv n>=0 D, values: B H_kv n>=0 D_v"

STATES = {
    "Bounds": "key_low: open D, key_high: open D, value_low: open D_v, value_high: open D_v",
    "Cache": "keys: n D, values: n D_v, positions: whole n",
    "CompressedCache": "keys: N>=0 D, values: N>=0 D_v, positions: whole N>=0, lengths: whole B H_kv",
    "Decoding": f"{SO_FAR}, positions: whole B H_kv n>=0, queries: B H_q m>=0 D",
    "Moments": "count: whole, key_sum: D, value_sum: D_v, value_key_sum: D_v D",
    "PagedCache": "keys: memory P S H_kv D, values: memory P S H_kv D_v, positions: whole P S H_kv, "
    "block_table: whole B n, lengths: whole B H_kv, seen: whole B",
    "Stream": "keys: N>=0 D, values: N>=0 D_v, positions: whole N>=0",
}


KINDS = ("weight", "share", "open", "memory", "bool", "whole")


@dataclass(frozen=True)
class Argument:
    """An argument of a line: its name, its kind and its axes; whether it may be None."""

    name: str
    kind: str
    axes: tuple[str, ...]
    optional: bool

    @functools.cached_property
    def fields(self) -> dict[str, Argument]:
        """The fields of a state by their names, with the axes that are in front of all of them."""
        prefix, own = f"{self.name}.", arguments(self.kind)
        return {each.name: replace(each, name=prefix + each.name, axes=self.axes + each.axes) for each in own}

    @functools.cached_property
    def lead(self) -> str:
        """`...` or `*`, or an empty string where the argument has the named axes alone."""
        return self.axes[0] if self.axes and self.axes[0] in ("...", "*") else ""

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """The axes behind the leading ones."""
        return self.axes[bool(self.lead) :]

    @functools.cached_property
    def known(self) -> tuple[str, ...]:
        """The name of each of these axes, empty for those that are computed from others."""
        return tuple("" if re.search("[/*]", axis) else re.split("[<>%]", axis)[0] for axis in self.own)

    @functools.cached_property
    def rules(self) -> dict[int, list[str]]:
        """What is asked of an axis beside its own size, by its place: `M<=T` is `["M", "<=", "T"]`."""
        parts = [re.split("(<=|>=|[/%*])", axis) for axis in self.own]
        return {place: part for place, part in enumerate(parts) if len(part) > 1 or part == ["H_q"]}


@functools.cache
def arguments(line: str) -> tuple[Argument, ...]:
    """Return the arguments of a function of CONTRACT, of a state of STATES, or of a line itself."""
    line = CONTRACT.get(line) or STATES.get(line) or line
    return tuple(_argument(*text.split(": ")) for text in line.split(", "))


def _argument(name: str, axes: str) -> Argument:
    kind, *own = axes.split()
    if kind not in (*KINDS, *STATES):
        kind, own = "real", [kind, *own]
    return Argument(name.removesuffix("?"), kind, tuple(own), name.endswith("?"))


class Axes:
    """The sizes of the axes in one call, each with the argument in which it was first seen."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[Any, str]] = {}
        self.seen: list[tuple[Argument, tuple[int, ...], int]] = []

    def fit(self, argument: Argument, shape: tuple[int, ...]) -> None:
        """Take the sizes of an argument. Raises ValueError where an axis has another size already."""
        lead = len(shape) - len(argument.own)
        if lead < 0 or (lead and not argument.lead):
            raise self._error(argument, shape)
        if 0 in shape and (0 in shape[:lead] or any(map(self._empty, argument.own, shape[lead:]))):
            raise self._error(argument, shape, "no empty axis")
        self._agree(argument, shape, argument.known, shape[lead:])
        if argument.lead == "...":
            self._agree(argument, shape, ("...",), (shape[:lead],))
        if argument.rules or argument.lead == "*":
            self.seen.append((argument, shape, lead))

    @staticmethod
    def _empty(axis: str, size: int) -> bool:
        return size == 0 and not axis.endswith(">=0")

    def _agree(
        self, argument: Argument, shape: tuple[int, ...], names: tuple[str, ...], own: tuple[Any, ...]
    ) -> None:
        for name, size in zip(names, own, strict=True):
            if name:
                wanted, first = self.sizes.setdefault(name, (size, argument.name))
                if size != wanted:
                    raise self._error(argument, shape, f"{name} = {wanted}", first)

    def relate(self) -> None:
        """Compare the axes with one another, when all are known. Raises ValueError as `fit` does."""
        broad: tuple[int, ...] = ()
        for argument, shape, lead in self.seen:
            for place, rule in argument.rules.items():
                if misfit := self._misfit(rule, shape[lead + place]):
                    raise self._error(argument, shape, *misfit)
            if argument.lead == "*":
                try:
                    broad = np.broadcast_shapes(broad, shape[:lead])
                except ValueError:
                    raise self._error(argument, shape, f"leading axes that broadcast to {broad}") from None

    def _misfit(self, rule: list[str], size: int) -> tuple[str, str] | None:
        """What an axis must be by another one, and where that was seen; None where it is."""
        said = "".join(rule)
        match rule:
            case ["H_q"] if "H_kv" in self.sizes:
                other, first = self.sizes["H_kv"]
                return (f"H_q a multiple of H_kv = {other}", first) if size % other else None
            case [_, "<=", most]:
                other, first = self.sizes[most]
                return (f"{said} = {other}", first) if size > other else None
            case [_, "%", parts]:
                return (f"{said} = 0", "") if size % int(parts) else None
            case [whole, "/", parts]:
                other, first = self.sizes[whole]
                return (f"{said} = {other / int(parts)}", first) if size * int(parts) != other else None
            case [left, "*", right]:
                (other, _), (by, first) = self.sizes[left], self.sizes[right]
                return (f"{said} = {other * by}", first) if size != other * by else None
        return None

    @staticmethod
    def _error(argument: Argument, shape: tuple[int, ...], rule: str = "", first: str = "") -> ValueError:
        because = f" with {rule}" * bool(rule) + f", as in {first}" * bool(first)
        return ValueError(f"{argument.name}: got shape {shape}, wanted [{', '.join(argument.axes)}]{because}")
