"""Measures methods on tasks: a plan for the store, and the measurement of one prompt.

A unit of work is a prompt: a task, a length and a seed. The model reads the prompt's text once. Every method
at every setting then compresses a copy of the same cache, and each gives a line.
"""

import hashlib
import math
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, DynamicCache

from evictionary import __version__, store
from evictionary.cache.arguments import checked
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.layers import EvictingLayer
from evictionary.cache.model_hooks import require_prompt
from evictionary.errors import MethodError, UsageError, require
from evictionary.evaluation import tasks
from evictionary.evaluation.questions import Answer, ask, likelihood, prefill
from evictionary.methods.catalogue import BASELINES
from evictionary.methods.method import Method, Request, tokens_to_keep
from evictionary.methods.resolve import resolve
from evictionary.models.load import load as load_model
from evictionary.models.loading import Loading
from evictionary.models.names import located

# The name of the baseline that removes nothing.
FULL = "full"

# The fields of a successful measurement that are never None.
SCORED = ("exact", "partial", "tokens_kept", "bytes_before", "bytes_after", "seconds", "versions")

# nats: a token needs the context if its loss is so much smaller with the full cache than without the context
GAIN = 1.0


@dataclass(frozen=True)
class Setting:
    """A method with its options, and either the fraction to remove or the tokens to keep in each head."""

    method: str
    options: dict[str, Any] = field(hash=False, default_factory=dict)
    ratio: float | None = None
    budget: int | None = None

    @property
    def source(self) -> str | None:
        """A digest of the user's files that the method names: an edited file is measured again."""
        files = re.findall(r"[^+:]+\.py\b", self.method)
        contents = b"".join(Path(file).read_bytes() for file in files)
        return hashlib.sha256(contents).hexdigest()[:12] if files else None


@dataclass(frozen=True)
class ModelPlan(store.Plan):
    """A plan whose measurements need a model, loaded in one way: a folder of results has one of each.

    Its lines say what was asked of the model's numbers (`loading`), and on which device and in which type the
    model was (`device`, `dtype`); lines of different devices may stand in one folder.
    """

    model: str
    loading: Loading = field(default=Loading(), kw_only=True)

    def common(self) -> dict[str, Any]:
        return {"model": self.model, "loading": self.loading.numbers()}

    @classmethod
    def subject(cls, line: Mapping[str, Any]) -> str:
        return line["model"] + numbers_of(line)

    def in_worker(self) -> "ModelPlan":
        return replace(self, loading=self.loading.in_worker())

    def opened(self) -> tuple[Any, Any]:
        """The model and the tokenizer."""
        return loaded(self.model, self.loading)


def numbers_of(line: Mapping[str, Any]) -> str:
    """' with dtype bfloat16' of a line whose model was asked for so; '' for a model as its files have it."""
    # Lines of before there was a choice say nothing.
    asked = [f"{name} {value}" for name, value in line.get("loading", {}).items()]
    return f" with {', '.join(asked)}" if asked else ""


def placed(model: Any) -> dict[str, str]:
    """The fields of a line that say where a model is, on
    several devices perhaps, and in which type of numbers.
    """
    divided = getattr(model, "hf_device_map", None) or {"": model.device}
    devices = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in divided.values()}
    return {"device": ", ".join(sorted(devices)), "dtype": str(model.dtype).removeprefix("torch.")}


class Unit(NamedTuple):
    """One prompt."""

    task: str
    length: int
    seed: int


@dataclass(frozen=True)
class Plan(ModelPlan):
    """Everything to measure: each method at each ratio and
    each budget, and the two baselines, on each prompt.

    `methods` are pairs of a name and options; lengths are in tokens, of context and question together. The
    fields of a line, beside those that identify it: exact, partial, answer, expected, perplexity (of a text
    that goes on; then answer is None), needing and needing_perplexity (how many of its tokens need the
    context, and theirs; for code), tokens (of the context), tokens_kept, bytes_before, bytes_after, seconds
    (to compress, ask and answer), error (None, or why the method failed; then there are no scores), source (a
    digest of a user's own file), versions, and those of ModelPlan. Raises UsageError for an unknown name, a
    value out of range or an empty list.
    """

    methods: Sequence[tuple[str, Mapping[str, Any]]]
    tasks: Sequence[str]
    lengths: Sequence[int]
    seeds: Sequence[int]
    ratios: Sequence[float] = ()
    budgets: Sequence[int] = ()

    IDENTITY = ("model", "task", "length", "seed", "method", "options", "ratio", "budget")

    def __post_init__(self) -> None:
        require_some(self, "methods", "tasks", "lengths", "seeds")
        require(self.ratios or self.budgets, "ratios: got none and no budgets, wanted at least one")
        for name in self.tasks:
            tasks.get(name)
        for length in self.lengths:
            require(length >= 1, f"lengths: got {length}, wanted at least 1")
        for ratio in self.ratios:
            tokens_to_keep(1, ratio)
        for budget in self.budgets:
            tokens_to_keep(1, 0.0, budget)

    def settings(self) -> list[Setting]:
        """The full cache, then each method and the baselines at each ratio and budget, without
        repetitions. Where the full cache is the only method, it is alone.
        """
        found = [Setting(FULL, ratio=0.0)]
        methods = [(name, options) for name, options in self.methods if name != FULL]
        for name, options in [*methods, *((name, {}) for name in BASELINES if methods)]:
            typed = checked(name, 0.0, options, None, 0)[1]
            found += [
                *(Setting(name, typed, ratio=float(ratio)) for ratio in self.ratios),
                *(Setting(name, typed, budget=budget) for budget in self.budgets),
            ]
        return [setting for index, setting in enumerate(found) if setting not in found[:index]]

    def work(self) -> list[tuple[Unit, list[Setting]]]:
        settings = self.settings()
        every = (
            Unit(task, length, seed) for task in self.tasks for length in self.lengths for seed in self.seeds
        )
        return [(unit, settings) for unit in dict.fromkeys(every)]

    def named(self, unit: Unit, part: Setting) -> dict[str, Any]:
        return {**unit._asdict(), **vars(part)}

    def alike(self, unit: Unit) -> tuple[int, str]:
        return unit.length, unit.task

    @classmethod
    def conditions(cls, line: store.Line) -> dict[str, Any]:
        """A method of the user's own files has one digest of them."""
        source = {f"the file of {line['method']}": line["source"]} if line.get("source") else {}
        return super().conditions(line) | source

    @classmethod
    def identify(cls, line: store.Line) -> str:
        if line["error"] is None and any(line[name] is None for name in SCORED):
            raise ValueError("a score is missing")
        return cls.key(line)

    def is_done(self, line: store.Line, part: Setting) -> bool:
        """A measurement of a method whose file has changed is made again too."""
        return line["error"] is None and line.get("source") == part.source

    def check(self, folder: Path, found: Mapping[str, store.Line], work: store.Work) -> None:
        """Raise UsageError for a length that is too short for a task or too long for the model."""
        require_lengths(self.model, [unit for unit, _ in work], self.loading.revision)

    def measure(self, unit: Unit, parts: Sequence[Setting]) -> Iterator[store.Line]:
        model, tokenizer = self.opened()
        prompt = tasks.get(unit.task).make(tokenizer, unit.length, unit.seed)
        for measured in measure(model, tokenizer, prompt, parts, unit.seed):
            yield {**self.common(), **unit._asdict(), **measured.line, **placed(model)}

    def text(self, line: store.Line) -> str:
        return f"{line['task']}, {line['length']} tokens, seed {line['seed']}: {label(line)}"


def require_lengths(model: str, units: Sequence[Unit], revision: str | None = None) -> None:
    """Raise UsageError, before a model is loaded, for a length
    that is too short for a task or too long for the model.
    """
    if not units:
        return
    place = located(model)
    try:
        tokenizer, config = (
            kind.from_pretrained(
                place.name, revision=revision or "main", local_files_only=place.is_local, **place.file
            )
            for kind in (AutoTokenizer, AutoConfig)
        )
    except (OSError, ValueError, KeyError):
        return  # loading the model will say what is wrong with it
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    for unit in {(unit.task, unit.length): unit for unit in units}.values():
        prompt = tasks.get(unit.task).make(tokenizer, unit.length, unit.seed)
        require_prompt(
            prompt.context_ids.shape[1] + prompt.question_ids.shape[1] + prompt.max_new_tokens, longest
        )


def require_some(plan: store.Plan, *names: str) -> None:
    """Raise UsageError for a list of the plan that is empty."""
    for name in names:
        require(getattr(plan, name), f"{name}: got none, wanted at least one")


class Measurement(NamedTuple):
    """The result of one setting on one prompt: its line
    without the model and the unit, the answer, and the cache.

    The answer is None if the method failed, or if the text goes on without a question.
    """

    line: store.Line
    answer: Answer | None
    cache: EvictingCache | None


def label(line: Mapping[str, Any]) -> str:
    """'lagkv (lag_size=128)', for a line or any dictionary with method and options."""
    options = ", ".join(f"{name}={value}" for name, value in line["options"].items())
    return f"{line['method']} ({options})" if options else line["method"]


def measure(
    model: Any, tokenizer: Any, prompt: tasks.Prompt, settings: Sequence[Setting], seed: int
) -> Iterator[Measurement]:
    """Read one prompt, then compress a copy of its cache by
    each setting and ask it. `seed` is for methods that draw.
    """
    chosen = {setting.method: resolve(setting.method) for setting in settings if setting.method != FULL}
    record = frozenset().union(*(method.captured for method in chosen.values()))
    full = EvictingCache(model, method=None, record=record)
    prefill(model, prompt.context_ids, full)
    needing = _needing(model, full, prompt)
    for setting in settings:
        line: store.Line = {
            "method": setting.method,
            "options": setting.options,
            "ratio": setting.ratio,
            "budget": setting.budget,
            "source": setting.source,
            "expected": list(prompt.answers),
            "tokens": prompt.context_ids.shape[1],
        }
        answer, cache, start = None, None, time.perf_counter()
        try:
            method = chosen.get(setting.method)
            arguments = (method, setting.ratio or 0.0, setting.options, setting.budget)
            cache = full if method is None else _compressed(model, full, arguments, prompt.every, seed)
            found = {
                "tokens_kept": cache.tokens_kept,
                "bytes_before": full.nbytes,
                "bytes_after": cache.nbytes,
            }
            with cache:
                if method is not None:
                    _require_shrunk(
                        cache, method, Request(setting.ratio or 0.0, setting.budget, setting.options)
                    )
                if prompt.continuation is None:
                    answer = ask(model, tokenizer, cache, prompt.question_ids, prompt.max_new_tokens)
                    scores = {**prompt.score(answer.text)._asdict(), "answer": answer.text}
                else:
                    scores = _foretold(model, cache, prompt, prompt.continuation, needing)
            line |= {**found, **scores, "error": None}
        except MethodError as error:
            line["error"] = str(error)
        yield Measurement(
            line | {"seconds": time.perf_counter() - start, "versions": versions()}, answer, cache
        )


def _compressed(model: Any, full: EvictingCache, arguments: Any, every: int, seed: int) -> EvictingCache:
    """A compressed copy that compresses again while decoding, if its method can; one that cannot
    compresses the prompt alone.

    So does a recursive method: again and again it keeps what
    each partition says, and not the amount that was asked for.
    """
    again = 0 if "recursive" in arguments[0].traits else every
    try:
        return EvictingCache.from_prefilled(model, full, *arguments, every=again, seed=seed)
    except UsageError:
        return EvictingCache.from_prefilled(model, full, *arguments, every=0, seed=seed)


def _needing(model: Any, full: EvictingCache, prompt: tasks.Prompt) -> list[bool]:
    """Which tokens of the continuation need the context, by GAIN; empty where the task does not ask."""
    if prompt.alone is None or prompt.continuation is None:
        return []
    with full:
        read = likelihood(model, full, prompt.question_ids, prompt.continuation)
    alone = likelihood(model, DynamicCache(config=model.config), prompt.alone, prompt.continuation)
    return [
        with_it - without >= GAIN
        for with_it, without in zip(read.log_probabilities, alone.log_probabilities, strict=True)
    ]


def _foretold(
    model: Any,
    cache: EvictingCache,
    prompt: tasks.Prompt,
    continuation: torch.Tensor,
    needing: Sequence[bool],
) -> dict[str, Any]:
    """exact: whether each token of the continuation is the likeliest one; partial: the share of those that
    are; the perplexity.
    """
    found = likelihood(
        model, cache, prompt.question_ids, continuation, block_size=1 if prompt.every else None
    )
    right = sum(found.is_likeliest) / len(found.is_likeliest)
    line = {"exact": float(right == 1), "partial": right, "perplexity": math.exp(found.loss), "answer": None}
    if not needing:
        return line
    losses = [-log for log, needs in zip(found.log_probabilities, needing, strict=True) if needs]
    return line | {
        "needing": len(losses),
        "needing_perplexity": math.exp(sum(losses) / len(losses)) if losses else None,
    }


def _require_shrunk(cache: EvictingCache, method: Method, request: Request) -> None:
    """Raise MethodError for a cache with more tokens than asked
    for: its score would stand beside those of smaller caches.
    """
    length = cache.get_seq_length()
    layers = [index for index, layer in enumerate(cache.layers) if isinstance(layer, EvictingLayer)]
    each = [
        method.most(length, replace(request, layer_index=index, num_layers=len(cache.layers)))
        for index in layers
    ]
    asked = sum(each) / len(each)
    require(
        cache.tokens_kept <= asked + 1e-6,
        f"{method.name}: the cache stores {cache.tokens_kept:.5g} of {length} tokens in each head, where "
        f"{asked:.5g} were "
        'asked for; a method that decides by itself how many stay says TRAITS = {"own_budget"}',
        MethodError,
    )


def versions() -> dict[str, str]:
    """The software versions that can change a result."""
    return {
        "evictionary": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


@lru_cache(maxsize=1)
def loaded(model_name: str, loading: Loading) -> tuple[Any, Any]:
    """The model and the tokenizer, loaded once in each process. A process has room for one model: another
    one takes its place.
    """
    from transformers.utils import logging

    loaded.cache_clear()
    logging.disable_progress_bar()  # a worker's progress bar would mix with ours
    return load_model(model_name, **vars(loading))
