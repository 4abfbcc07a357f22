"""Measures every method on the passkey task: one prefill for each prompt, then many ways to compress it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import UsageError
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import Answer, ask, prefill
from evictionary.methods import catalogue
from evictionary.methods.method import tokens_to_keep
from evictionary.methods.resolve import resolve

RATIOS = (0.25, 0.5, 0.75)
MAX_NEW_TOKENS = 12
FULL = "full cache"

DEMO_OPTIONS: dict[str, Any] = {"lag_size": 128}
"""A method that has one of these options runs with it, and its row says so: 1,500 tokens are below LagKV's 16 + 2 * 1024."""


@dataclass
class Row:
    """What one method did at one ratio (None: it sets its own budget); the lists have one entry for each depth."""

    method: str
    options: dict[str, Any]
    compression_ratio: float | None
    depths: list[float] = field(default_factory=list)
    bytes_before: list[int] = field(default_factory=list)
    bytes_after: list[int] = field(default_factory=list)
    tokens_before: list[int] = field(default_factory=list)
    tokens_after: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    relative_error: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """'lagkv (lag_size=128)'."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.method} ({options})" if options else self.method

    @property
    def asked(self) -> str:
        """'25%', or 'own' for a method that sets its own budget."""
        return "own" if self.compression_ratio is None else f"{self.compression_ratio:.0%}"

    def summary(self) -> dict[str, Any]:
        """The row of the table: means over the prompts, and how many answers were right."""
        means = ("bytes_before", "bytes_after", "tokens_before", "tokens_after", "error", "relative_error", "seconds")
        numbers = {name: float(np.mean(getattr(self, name))) for name in means}
        return {"label": self.label, "asked": self.asked, **numbers, "right": sum(self.right), "of": len(self.right)}

    def as_json(self) -> dict[str, Any]:
        """Everything measured, and the summary."""
        return {**asdict(self), "summary": self.summary()}


@dataclass(frozen=True)
class Picture:
    """The tokens that one method kept of one prompt: kept [layers * H_kv, T], and where the number stands."""

    label: str
    asked: str
    kept: np.ndarray
    heads: int
    needle: tuple[int, int]


@dataclass
class Result:
    """The rows of the table in its order, the pictures of the middle prompt, and why methods were left out."""

    model: str
    seed: int
    rows: list[Row]
    pictures: list[Picture]
    left_out: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Everything but the pictures."""
        return {"model": self.model, "seed": self.seed, "rows": [row.as_json() for row in self.rows], "left_out": self.left_out}


def default_methods() -> tuple[list[str], dict[str, str]]:
    """Every method with a torch path that a prompt alone can feed, and the random baseline; and why the others are left out."""
    runnable, left_out = [], {}
    for name in catalogue.names():
        function = catalogue.entry(catalogue.definition(name))
        missing = catalogue.split_signature(function)[2] if function else ["more"]
        if missing:
            left_out[name] = f"reads {', '.join(missing)}, which a prompt alone does not give"
        elif not resolve(name).as_torch:  # H2O in NumPy takes half a minute for one prompt
            left_out[name] = f"has only its NumPy reference, which may be slow: --methods {name} runs it"
        else:
            runnable.append(name)
    return [*runnable, catalogue.RANDOM], left_out


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    method_names: Sequence[str] | None = None,
    ratios: Sequence[float] = RATIOS,
    depths: Sequence[float] = passkey.DEPTHS,
    seed: int = 0,
    tokens: int = 1500,
    advance: Callable[[str], None] = lambda text: None,
    plan: Callable[[int], None] = lambda steps: None,
) -> Result:
    """Run every method at every ratio on one prompt for each depth, and the full cache beside them.

    `plan` is told once how many steps there are and `advance` what each of them is about to do.
    Raises UsageError for an unknown method, a ratio or a depth out of range, or none of them.
    """
    for name, values in (("ratios", ratios), ("depths", depths)):
        if not values:
            raise UsageError(f"{name}: got none, wanted at least one")
    wanted, left_out = default_methods() if method_names is None else (method_names, {})
    chosen = [resolve(name) for name in wanted]
    for ratio in ratios:
        tokens_to_keep(1, ratio)
    prompts = [passkey.make(tokenizer, depth=depth, seed=seed, tokens=tokens) for depth in depths]
    full_row = Row(FULL, {}, 0.0)
    rows: dict[str, list[Row]] = {}
    for method in chosen:
        options = {name: value for name, value in DEMO_OPTIONS.items() if name in method.options}
        asked = [None] if "own_budget" in method.traits else ratios
        rows[method.name] = [Row(method.name, options, ratio) for ratio in asked]
    pictures: list[Picture] = []
    plan(len(prompts) * (2 + sum(map(len, rows.values()))))
    record = frozenset().union(*(method.captured for method in chosen))
    for index, prompt in enumerate(prompts):
        place = f"prompt {index + 1} of {len(prompts)}"
        advance(f"{place}: reading {prompt.context_ids.shape[1]} tokens")
        full = EvictingCache(model, method=None, record=record)
        prefill(model, prompt.context_ids, full)
        advance(f"{place}: asking the full cache")
        start = time.perf_counter()
        baseline = ask(model, tokenizer, full, prompt.question_ids, MAX_NEW_TOKENS)
        _measure(full_row, prompt, full, full, baseline, baseline, time.perf_counter() - start)
        for method in chosen:
            for row in rows[method.name]:
                advance(f"{place}: {method.name}, removed: {row.asked}")
                ratio = max(ratios) if row.compression_ratio is None else row.compression_ratio
                start = time.perf_counter()
                cache = EvictingCache.from_prefilled(model, full, method, ratio, row.options, seed=seed + index)
                answer = ask(model, tokenizer, cache, prompt.question_ids, MAX_NEW_TOKENS)
                _measure(row, prompt, full, cache, baseline, answer, time.perf_counter() - start)
                if index == len(prompts) // 2:
                    pictures.append(_picture(row, prompt, cache))
    return Result(
        str(model.config.name_or_path), seed, [full_row, *itertools.chain.from_iterable(rows.values())], pictures, left_out
    )


def _measure(
    row: Row, prompt: passkey.Passkey, full: EvictingCache, cache: EvictingCache, baseline: Answer, answer: Answer, seconds: float
) -> None:
    difference = torch.linalg.norm((baseline.hidden_states - answer.hidden_states).double())
    row.depths.append(prompt.depth)
    row.bytes_before.append(full.nbytes)
    row.bytes_after.append(cache.nbytes)
    row.tokens_before.append(full.get_seq_length())
    row.tokens_after.append(cache.tokens_kept)
    row.answers.append(answer.text)
    row.right.append(prompt.is_right(answer.text))
    row.error.append(float(difference))
    row.relative_error.append(float(difference / torch.linalg.norm(baseline.hidden_states.double())))
    row.seconds.append(seconds)


def _picture(row: Row, prompt: passkey.Passkey, cache: EvictingCache) -> Picture:
    length = prompt.context_ids.shape[1]
    kept = np.zeros((len(cache.layers), cache.layers[0].lengths.shape[1], length), dtype=bool)
    for each, layer in zip(kept, cache.layers, strict=True):
        _, _, positions, filled = layer.contents()
        for head in range(len(each)):
            each[head, positions[0, head][filled[0, head]].cpu()] = True
    return Picture(row.label, row.asked, kept.reshape(-1, length), kept.shape[1], prompt.needle)
