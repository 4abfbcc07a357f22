"""A cache in use: read, compress, crop, reorder, copy, save, load and reset in any order, against a model
that is masked by hand.

The model that is masked by hand has no cache. It reads the whole text again each time; a mask for each layer,
row and head hides the tokens that were evicted before a query was read. A drawn rule says what is evicted, so
the test knows it from no cache.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant as always,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tools.reading import masked_logits, read, refused, written
from transformers import LlamaForCausalLM

from evictionary import EvictingCache
from evictionary.cache import layers, saved
from evictionary.errors import UsageError

LAYERS, HEADS, CHANNELS = 2, 2, 8  # those of the tiny model

pytestmark = pytest.mark.filterwarnings("ignore:the cache compressed the first")

METHODS = """
import torch
from test_positions import TOLD

TRAITS = {"own_budget"}

def select_positions(keys, positions, layer_index):
    return TOLD[0](layer_index, keys.shape, positions)

def select_places(keys, layer_index):
    return TOLD[0](layer_index, keys.shape, torch.arange(keys.shape[2]))
"""


@dataclass(frozen=True)
class Rule:
    """Keep one of `step` tokens, and the last one if these
    are none. The steps of heads, rows or layers may differ.
    """

    first: int
    step: int
    differ: str

    def keeps(self, layer: int, row: int, head: int, places: torch.Tensor) -> torch.Tensor:
        step = self.step + {"layers": layer, "rows": row, "heads": head}.get(self.differ, 0)
        kept = (places + self.first) % step == 0
        kept[-1] |= not kept.any()
        return kept


class Told:
    """A rule for one compression, as the method's file calls it: row by row and head by head, or for
    several of them at once.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.asked: Counter[int] = Counter()

    def __call__(self, layer: int, shape: tuple[int, ...], places: torch.Tensor) -> torch.Tensor:
        first, count = self.asked[layer], shape[0] * shape[1]
        self.asked[layer] += count
        cells = [self.rule.keeps(layer, *divmod(cell, HEADS), places) for cell in range(first, first + count)]
        return torch.stack(cells).view(shape[:3])


TOLD = [Told(Rule(0, 1, "nothing"))]
"""What the methods do now."""


@dataclass(frozen=True)
class Text:
    """The tokens that were read, and which of them each head may see.

    ids [B, T]; padding [B], the number of padding tokens on the left of each row; held [L, B, H_kv, T], the
    tokens that were not evicted; visible [L, B, H_kv, T, T], the tokens that each query saw; evicted_at, the
    tokens read before the last compression.
    """

    ids: torch.Tensor
    padding: torch.Tensor
    held: torch.Tensor
    visible: torch.Tensor
    evicted_at: int = 0

    @classmethod
    def of(cls, padding: torch.Tensor) -> Text:
        """No tokens yet."""
        heads = (LAYERS, len(padding), HEADS)
        held, visible = (torch.zeros(*heads, *shape, dtype=torch.bool) for shape in ((0,), (0, 0)))
        return cls(torch.zeros(len(padding), 0, dtype=torch.long), padding, held, visible)

    @property
    def seen(self) -> int:
        return self.ids.shape[1]

    def read(self, new: torch.Tensor) -> Text:
        """With more tokens [B, M], which see what is held, and those of themselves that are not later."""
        count, places = new.shape[1], torch.arange(self.seen + new.shape[1])
        real = (places >= self.padding[:, None])[:, None].expand(-1, HEADS, -1)
        held = torch.cat([self.held, real[..., self.seen :].expand(LAYERS, -1, -1, -1)], dim=-1)
        visible = torch.nn.functional.pad(self.visible, (0, count, 0, count))
        visible[..., self.seen :, :] = held[..., None, :] & (places <= places[self.seen :, None])
        return replace(self, ids=torch.cat([self.ids, new], dim=1), held=held, visible=visible)

    def evict(self, rule: Rule, by_place: bool) -> Text:
        """After a compression by a rule of positions, without padding, or of the places among the tokens
        that a head holds.
        """
        held = torch.zeros_like(self.held)
        for layer, row, head in torch.cartesian_prod(*map(torch.arange, self.held.shape[:3])).tolist():
            places = self.held[layer, row, head].nonzero()[:, 0]
            numbers = torch.arange(len(places)) if by_place else places - self.padding[row]
            held[layer, row, head, places[rule.keeps(layer, row, head, numbers)]] = True
        return replace(self, held=held, evicted_at=self.seen)

    def crop(self, count: int) -> Text:
        end = self.seen - count
        return replace(
            self, ids=self.ids[:, :end], held=self.held[..., :end], visible=self.visible[..., :end, :end]
        )

    def rows(self, indices: torch.Tensor) -> Text:
        return replace(
            self,
            ids=self.ids[indices],
            padding=self.padding[indices],
            held=self.held[:, indices],
            visible=self.visible[:, indices],
        )

    def given(self, count: int) -> dict[str, torch.Tensor]:
        """What `generate` says of padding and positions to a
        model that reads the last `count` tokens with a cache.
        """
        places = torch.arange(self.seen)
        positions = (places - self.padding[:, None]).clamp(min=0)[:, -count:]
        return {"attention_mask": (places >= self.padding[:, None]).long(), "position_ids": positions}

    def logits(self, model: LlamaForCausalLM) -> torch.Tensor:
        """[B, T, vocabulary], of the whole text; padding,
        which no one reads, sees itself, so that it is no NaN.
        """
        visible = self.visible | torch.eye(self.seen, dtype=torch.bool)
        return masked_logits(
            model, self.ids, dict(enumerate(visible)), position_ids=self.given(self.seen)["position_ids"]
        )


RULES = st.builds(
    Rule, st.integers(0, 5), st.integers(1, 3), st.sampled_from(["nothing", "heads", "rows", "layers"])
)
TOKENS = st.integers(3, 250)
PROMPTS = st.lists(st.integers(2, 9), min_size=1, max_size=3)  # the lengths of the rows of a batch


class CacheInUse(RuleBasedStateMachine):
    """A cache and the text that it has read, and beside them a copy and a file of earlier ones."""

    models: Mapping[str, LlamaForCausalLM]
    folder: Path
    cache: EvictingCache | None = None
    other: tuple[EvictingCache, Text] | None = None
    saved: Text | None = None

    def teardown(self) -> None:
        for cache in (self.cache, self.other and self.other[0]):
            if cache is not None:
                cache.close()

    @initialize(
        attention=st.sampled_from(["sdpa", "eager"]),
        by_place=st.booleans(),
        every=st.sampled_from([0, 0, 3, 5]),
        lengths=PROMPTS,
        token=TOKENS,
        rule=RULES,
    )
    def start(
        self, attention: str, by_place: bool, every: int, lengths: list[int], token: int, rule: Rule
    ) -> None:
        self.model, self.by_place, self.every = self.models[attention], by_place, every
        self.cache = EvictingCache(self.model, self.method, budget=1, every=every)
        self.read_prompt(lengths, token, rule)

    @property
    def method(self) -> str:
        return f"{self.folder / 'mine.py'}:{'select_places' if self.by_place else 'select_positions'}"

    def read_prompt(self, lengths: list[int], token: int, rule: Rule) -> None:
        self.text = Text.of(max(lengths) - torch.tensor(lengths))
        self.read(max(lengths), token, rule)

    def step(self, count: int, token: int) -> None:
        """The same logits from more tokens."""
        new = (torch.arange(count) * 7 + torch.arange(len(self.text.ids))[:, None] * 31 + token) % 256 + 3
        self.text = self.text.read(new)
        got, wanted = (
            read(self.model, new, self.cache, **self.text.given(count)),
            self.text.logits(self.models["by hand"]),
        )
        real = (torch.arange(self.text.seen) >= self.text.padding[:, None])[:, -count:]
        assert (got - wanted[:, -count:])[real].abs().max() <= 1e-4 * wanted.abs().max()

    @rule(count=st.integers(1, 6), token=TOKENS, rule=RULES)
    def read(self, count: int, token: int, rule: Rule) -> None:
        """More tokens; the layers are compressed after the prompt, and when they are due."""
        TOLD[0] = Told(rule)
        self.step(count, token)
        if self.text.evicted_at == 0 or (self.every and self.text.seen - self.text.evicted_at >= self.every):
            self.evict(rule)

    def evict(self, rule: Rule) -> None:
        assert TOLD[0].asked == Counter(dict.fromkeys(range(LAYERS), len(self.text.ids) * HEADS))
        self.text = self.text.evict(rule, self.by_place)

    @precondition(lambda self: self.text.evicted_at < self.text.seen)
    @rule(rule=RULES)
    def compress(self, rule: Rule) -> None:
        """The end of a turn."""
        TOLD[0] = Told(rule)
        self.cache.compress()
        self.evict(rule)

    @rule(count=st.integers(0, 6))
    def crop(self, count: int) -> None:
        """Take tokens back that came after the last compression, and no others."""
        if count <= self.text.seen - self.text.evicted_at:
            self.cache.crop(-count)
            self.text = self.text.crop(count)
        else:
            refused(lambda: self.cache.crop(-count), "cannot be restored", ValueError)

    @rule(indices=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def reorder(self, indices: list[int]) -> None:
        """Beam search: some rows go on, once or more often."""
        chosen = torch.tensor(indices) % len(self.text.ids)
        self.cache.reorder_cache(chosen)
        self.text = self.text.rows(chosen)

    @precondition(lambda self: not self.other)
    @rule()
    def copy(self) -> None:
        """Another question: the cache and its copy go on, each for itself."""
        self.other = copy.deepcopy(self.cache), self.text

    @precondition(lambda self: self.other)
    @rule(count=st.integers(1, 3), token=TOKENS, rule=RULES)
    def take_turns(self, count: int, token: int, rule: Rule) -> None:
        """The cache and its copy read different tokens."""
        for turn in range(3):
            self.read(count, token + turn, rule)
            self.other, (self.cache, self.text) = (self.cache, self.text), self.other

    @precondition(lambda self: not self.saved)
    @rule()
    def save(self) -> None:
        self.cache.save(self.folder / "cache")
        self.saved = self.text

    @precondition(lambda self: self.saved)
    @rule()
    def load(self) -> None:
        self.cache.close()
        self.cache, self.text, self.saved = (
            EvictingCache.load(self.folder / "cache", self.model),
            self.saved,
            None,
        )

    @precondition(lambda self: self.text.seen > 20)
    @rule(lengths=PROMPTS, token=TOKENS, rule=RULES)
    def another_prompt(self, lengths: list[int], token: int, rule: Rule) -> None:
        self.cache.reset()
        self.read_prompt(lengths, token, rule)

    @precondition(lambda self: self.text.seen > 20)
    @rule(lengths=PROMPTS, more=st.integers(0, 3), token=TOKENS, rule=RULES)
    def a_prompt_of_another_cache(self, lengths: list[int], more: int, token: int, rule: Rule) -> None:
        """A prompt, and more of it, that a full cache has read."""
        self.cache.close()
        self.cache = full = EvictingCache(self.model, None)
        self.text = Text.of(max(lengths) - torch.tensor(lengths))
        for count in (max(lengths), *([more] if more else [])):
            self.step(count, token)
        TOLD[0] = Told(rule)
        self.cache = EvictingCache.from_prefilled(self.model, full, self.method, budget=1, every=self.every)
        full.close()
        self.evict(rule)

    @always()
    def the_cache_holds_what_heads_may_see(self) -> None:
        """The true positions in ascending order, and the memory of as many tokens."""
        for cache, text in ((self.cache, self.text), *([self.other] if self.other else ())):
            assert cache.get_seq_length() == text.seen
            for layer, held in zip(cache.layers, text.held, strict=True):
                _, _, positions, filled = layer.contents()
                assert torch.equal(filled.sum(dim=-1), held.sum(dim=-1))
                assert torch.equal(positions[filled].long(), held.nonzero()[:, 2])
            stored, bytes_of_one = int(text.held.sum()), 2 * CHANNELS * 4
            assert cache.tokens_kept == pytest.approx(stored / (LAYERS * len(text.ids) * HEADS))
            assert stored * bytes_of_one <= cache.nbytes <= stored * bytes_of_one * (1 + 1 / layers.GROWTH)
            assert cache.nbytes_full == LAYERS * len(text.ids) * HEADS * text.seen * bytes_of_one
            assert cache.peak_tokens >= max(layer.longest for layer in cache.layers)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[CacheInUse]:
    # most tokens are written into room that a layer has, as in long texts
    monkeypatch.setattr(layers, "GROWTH", 1)
    written(tmp_path, METHODS)
    attentions = {"sdpa": "sdpa", "eager": "eager", "by hand": "sdpa"}
    models = {name: tiny_llama(attn_implementation=attention) for name, attention in attentions.items()}
    return type("Machine", (CacheInUse,), {"models": models, "folder": tmp_path})


def run(machine: type[CacheInUse], examples: int, **more: Any) -> None:
    given: dict[str, Any] = {
        "max_examples": examples,
        "stateful_step_count": 20,
        "derandomize": True,
        "database": None,
    } | more
    patient = settings(
        deadline=None, report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow], **given
    )
    run_state_machine_as_test(machine, settings=patient)


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_cache_in_use_sees_what_a_model_masked_by_hand_sees(
    machine: type[CacheInUse], examples: int
) -> None:
    run(machine, examples)


Calls = list[tuple[str, dict[str, Any]]]
ALL, HALF = Rule(0, 1, "nothing"), Rule(0, 2, "nothing")


# where a graph may be wanted, a write copies first, and hides a copy that shares its tensors
@torch.no_grad()
def replay(machine: type[CacheInUse], calls: Calls) -> None:
    """A short run of the machine."""
    one = machine()
    usual = {
        "start": {"attention": "sdpa", "by_place": False, "every": 0, "rule": HALF, "token": 7},
        "read": {"rule": ALL, "token": 7},
        "take_turns": {"rule": ALL, "token": 7},
        "a_prompt_of_another_cache": {"rule": HALF, "token": 7, "more": 0},
    }
    try:
        for name, given in calls:
            getattr(one, name)(**usual.get(name, {}) | given)
            one.the_cache_holds_what_heads_may_see()
    finally:
        one.teardown()


HEADS_DIFFER, ONE_MORE = Rule(0, 1, "heads"), ("read", {"count": 1})
RUNS: dict[str, Calls] = {
    "one head of two keeps every token": [
        ("start", {"lengths": [6], "rule": HEADS_DIFFER}),
        ("read", {"count": 2}),
        ("compress", {"rule": HALF}),
    ],
    "in the middle of a forward the layers hold as many tokens": [
        ("start", {"lengths": [5], "rule": Rule(4, 3, "layers")}),
        ONE_MORE,
        ONE_MORE,
    ],
    "later tokens at once": [("start", {"lengths": [9]}), ("read", {"count": 5})],
    "later tokens one by one": [
        ("start", {"lengths": [9], "attention": "eager"}),
        ONE_MORE,
        ONE_MORE,
        ("read", {"count": 3}),
    ],
    "compressed while decoding": [
        ("start", {"lengths": [9], "every": 3}),
        *[ONE_MORE] * 7,
        ("read", {"count": 6}),
    ],
    "ragged heads": [
        ("start", {"lengths": [9], "rule": HEADS_DIFFER}),
        ONE_MORE,
        ONE_MORE,
        ("read", {"count": 3}),
    ],
    "ragged heads of an eager model": [
        ("start", {"lengths": [9], "rule": Rule(1, 2, "heads"), "by_place": True, "attention": "eager"}),
        ONE_MORE,
        ("read", {"count": 4}),
    ],
    "ragged heads cropped back to the compression, and no further": [
        ("start", {"lengths": [9], "rule": HEADS_DIFFER}),
        *[("read", {"count": 5}), ("crop", {"count": 5})] * 2,
        ("crop", {"count": 1}),
    ],
    "ragged rows in another order": [
        ("start", {"lengths": [9, 9], "rule": HEADS_DIFFER}),
        ("reorder", {"indices": [1, 0, 1]}),
        ONE_MORE,
    ],
    "beams of a padded batch": [
        ("start", {"lengths": [9, 5], "every": 2}),
        ("reorder", {"indices": [1, 0]}),
        *[ONE_MORE] * 4,
    ],
    "beams of a padded batch with ragged heads": [
        ("start", {"lengths": [9, 5], "every": 2, "rule": HEADS_DIFFER}),
        ("reorder", {"indices": [1, 0]}),
        *[("read", {"count": 1, "rule": HEADS_DIFFER})] * 4,
    ],
    "a file of a padded batch": [("start", {"lengths": [9, 5]}), ("save", {}), ("load", {}), ONE_MORE],
    "a padded prompt of another cache": [
        ("start", {"lengths": [4]}),
        ("a_prompt_of_another_cache", {"lengths": [9, 2]}),
        ONE_MORE,
    ],
    "two questions": [
        ("start", {"lengths": [9]}),
        ("copy", {}),
        ("read", {"count": 3}),
        ("crop", {"count": 3}),
        ("take_turns", {"count": 2}),
    ],
}


@pytest.mark.parametrize("calls", RUNS.values(), ids=RUNS)
def test_a_short_run_sees_what_a_model_masked_by_hand_sees(machine: type[CacheInUse], calls: Calls) -> None:
    replay(machine, calls)


CROP, SELECT, FILL, RESTORE = (
    layers.EvictingLayer.crop,
    layers.EvictingLayer.batch_select_indices,
    layers.EvictingLayer.restore,
    saved.restore,
)


def crop_to_kept(layer: layers.EvictingLayer, tokens_to_remove: int) -> None:
    CROP(layer, tokens_to_remove)
    layer.seen = layer.longest


def select_without_positions(layer: layers.EvictingLayer, indices: torch.Tensor) -> None:
    before = layer.ragged and layer.ragged.positions, layer._kept_positions
    SELECT(layer, indices)
    if layer.ragged is not None and len(layer.ragged.positions) == len(before[0]):
        layer.ragged = layer.ragged._replace(positions=before[0])
    elif layer._kept_positions is not None and layer._kept_positions.shape == before[1].shape:
        layer._kept_positions = before[1]


def fill_without_positions(layer: layers.EvictingLayer, *given: Any) -> None:
    FILL(layer, *given)
    layer._kept_positions = None


def restore_without_padding(session: Any, model: Any, settings: dict[str, Any], *rest: Any) -> None:
    RESTORE(session, model, settings | {"padding": None}, *rest)


MISTAKES: list[tuple[Any, str, Callable[..., Any], Calls]] = [
    # the next position is the number of kept tokens
    (layers.EvictingLayer, "get_seq_length", lambda layer: layer.longest, [("start", {"lengths": [6]})]),
    (
        layers.EvictingLayer,
        "crop",
        crop_to_kept,
        [("start", {"lengths": [6]}), ("read", {"count": 3}), ("crop", {"count": 2})],
    ),
    (
        layers.EvictingLayer,
        "batch_select_indices",
        select_without_positions,
        [("start", {"lengths": [6, 4], "rule": Rule(0, 1, "rows")}), ("reorder", {"indices": [1, 0]})],
    ),
    # the copy writes into the same tensors
    (
        layers.EvictingLayer,
        "__deepcopy__",
        lambda layer, memo: copy.copy(layer),
        [("start", {"lengths": [6]}), ONE_MORE, ("copy", {}), ("take_turns", {"count": 1})],
    ),
    (
        layers.EvictingLayer,
        "restore",
        fill_without_positions,
        [("start", {"lengths": [6]}), ("save", {}), ("load", {})],
    ),
    (saved, "restore", restore_without_padding, RUNS["a file of a padded batch"]),
]


@pytest.mark.parametrize(("owner", "name", "mistake", "calls"), MISTAKES)
def test_a_short_run_shows_a_planted_mistake(
    machine: type[CacheInUse],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    mistake: Callable[..., Any],
    calls: Calls,
) -> None:
    replay(machine, calls)
    monkeypatch.setattr(owner, name, mistake, raising=False)
    refused(lambda: replay(machine, calls), "", (AssertionError, UsageError))


RARE = ("batch_select_indices", "__deepcopy__")
"""Mistakes that only some orders of calls show."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "mistake"), [found[:3] for found in MISTAKES if found[1] not in RARE]
)
def test_the_machine_finds_a_planted_mistake(
    machine: type[CacheInUse],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    mistake: Callable[..., Any],
) -> None:
    monkeypatch.setattr(owner, name, mistake, raising=False)
    refused(lambda: run(machine, 1000, phases=[Phase.generate]), "", (AssertionError, UsageError))
