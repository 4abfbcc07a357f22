"""The demo: an evaluation of every method on a passkey at five depths, with |h - h_c| and pictures of
which tokens survive. Its report says who found the number, and of whom did not, what became of its digits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import MethodError, require
from evictionary.evaluation import passkey
from evictionary.evaluation.pages import render, short_name
from evictionary.evaluation.pictures import Picture, panels, survivors
from evictionary.evaluation.report import wilson
from evictionary.evaluation.run import FULL, Measurement, Setting, label, measure
from evictionary.evaluation.tasks import Prompt, score_number
from evictionary.methods import catalogue
from evictionary.methods.method import tokens_to_keep
from evictionary.methods.resolve import resolve
from evictionary.store import grouped, put

RATIOS = (0.25, 0.5, 0.75)
MAX_NEW_TOKENS = 12
MEANS = (
    "bytes_before",
    "bytes_after",
    "tokens_before",
    "tokens_after",
    "error",
    "relative_error",
    "seconds",
)

# The demo sets these options where a method has them, and the row shows it: 1,500 tokens are below LagKV's 16
# + 2 * 1024.
OPTIONS: dict[str, Any] = {"lag_size": 128}


METHOD_PAGES = "https://github.com/evictionary/evictionary/blob/main/docs/methods"


def page_of(method: str) -> str | None:
    """The address of the page of a method; None for random eviction and for a file of one's own."""
    name = method.partition("+")[0]
    if name not in catalogue.names():
        return None
    return f"{METHOD_PAGES}/{name}.md"


@dataclass
class Row:
    """The results of one method at one ratio (None: it sets its own budget); the lists of `measured` have
    one entry per depth.
    """

    method: str
    options: dict[str, Any]
    compression_ratio: float | None
    measured: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """'lagkv (lag_size=128)'."""
        return label({"method": self.method, "options": self.options})

    @property
    def asked(self) -> str:
        """'25%', or 'own' for a method that sets its own budget."""
        return "own" if self.compression_ratio is None else f"{self.compression_ratio:.0%}"

    def add(self, depth: float, full: Measurement, own: Measurement, prompt: passkey.Passkey) -> None:
        """Add the measurement of the prompt at one depth, compared with the full cache."""
        line = own.line
        if full.answer is None or own.answer is None:
            raise MethodError(line["error"])
        size = torch.linalg.norm(full.answer.hidden_states.double())
        distance = torch.linalg.norm((full.answer.hidden_states - own.answer.hidden_states).double())
        numbers = {
            "depths": depth,
            "bytes_before": line["bytes_before"],
            "bytes_after": line["bytes_after"],
            "tokens_before": line["tokens"],
            "tokens_after": line["tokens_kept"],
            "answers": line["answer"],
            "right": line["exact"] == 1,
            "digits_kept": digits_kept(own.cache, prompt),
            "error": float(distance),
            "relative_error": float(distance / size),
            "seconds": line["seconds"],
        }
        for name, number in numbers.items():
            self.measured.setdefault(name, []).append(number)

    def summary(self) -> dict[str, Any]:
        """The row of the table: means over the prompts, and the number of right answers."""
        right = self.measured["right"]
        means = {name: float(np.mean(self.measured[name])) for name in MEANS}
        return {
            "label": self.label,
            "asked": self.asked,
            "protected": catalogue.protected(self.method, self.options),
            **means,
            "right": sum(right),
            "of": len(right),
        }

    def as_json(self) -> dict[str, Any]:
        """Everything measured, and the summary."""
        return {
            "method": self.method,
            "options": self.options,
            "compression_ratio": self.compression_ratio,
            **self.measured,
            "summary": self.summary(),
        }


def digits_kept(cache: EvictingCache | None, prompt: passkey.Passkey) -> float:
    """The share of the number's tokens that a cache holds: a mean over layers, heads and both copies."""
    if cache is None:
        return 1.0
    digits = [position for copy in prompt.copies for position in range(*copy)]
    return float(survivors(cache)[:, :, digits].mean())


@dataclass
class Result:
    """The rows of the table in order, the texts with their numbers, the pictures of the middle text, and the
    reasons why methods were left out.
    """

    model: str
    seed: int
    rows: list[Row]
    texts: list["Text"]
    pictures: list[Picture]
    left_out: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Everything but the texts and the pictures."""
        return {
            "model": self.model,
            "seed": self.seed,
            "rows": [row.as_json() for row in self.rows],
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class Text:
    """One text, cut where the sentence with the number begins and ends, and the number."""

    depth: float
    before: str
    needle: str
    after: str
    number: str


@dataclass(frozen=True)
class Told:
    """What the report says of one method: its rows, whose sizes are the columns, and a sentence of what
    became of the number.
    """

    label: str
    page: str | None
    rows: list[Row]
    sentence: str

    @property
    def found(self) -> int:
        return sum(sum(row.measured["right"]) for row in self.rows)

    @property
    def bytes_after(self) -> float:
        return float(np.mean([row.measured["bytes_after"] for row in self.rows]))

    @property
    def asked(self) -> int:
        return sum(len(row.measured["right"]) for row in self.rows)


def told(result: Result) -> list[Told]:
    """What the report says of each method: those that found the number most often first, and of these those
    with the least memory.
    """
    full = result.rows[0]
    found = [
        Told(name, page_of(rows[0].method), rows, reason(rows, full))
        for name, rows in grouped((row.label, row) for row in result.rows[1:]).items()
    ]
    return sorted(found, key=lambda one: (-one.found / one.asked, one.bytes_after))


def reason(rows: Sequence[Row], full: Row) -> str:
    """A sentence on the number under one method, of the weakest compression at which it was not found: its
    digits had left the cache, or they were there and the answer was another.
    """
    missed = next((row for row in rows if not all(row.measured["right"])), None)
    if missed is None:
        worst = min(rows, key=lambda row: float(np.mean(row.measured["digits_kept"])))
        kept = float(np.mean(worst.measured["digits_kept"]))
        return f"Found every time. {_size(worst)}, {kept:.0%} of the digits stayed."
    wrong = [index for index, right in enumerate(missed.measured["right"]) if not right]
    if not any(full.measured["right"][index] for index in wrong):
        return f"{_size(missed)} it was missed only where the full cache misses it too."
    kept = float(np.mean([missed.measured["digits_kept"][index] for index in wrong]))
    tokens = float(np.mean([missed.measured["tokens_after"][index] for index in wrong]))
    share = tokens / float(np.mean([missed.measured["tokens_before"][index] for index in wrong]))
    counted = f"{_size(missed)}, {kept:.0%} of the digits stayed, and {share:.0%} of all tokens"
    if kept == 0:
        return f"{_size(missed)}, every head had evicted every digit."
    if round(100 * kept) < round(100 * share):  # as the sentence shows them
        return f"{counted}: it evicts them more than others."
    answer = " ".join(missed.measured["answers"][wrong[0]].split()) or "nothing"
    return f"{counted}: it evicts them no more than others, but the model answered {answer[:40]!r}."


def _size(row: Row) -> str:
    return "With its own budget" if row.compression_ratio is None else f"At {row.asked} removed"


def summary(result: Result, methods: Sequence[Told]) -> list[str]:
    """What the report says at its top: how many methods found the number in every text, and which of them
    needs the least memory.
    """
    full, texts = result.rows[0], len(result.texts)
    sentences = []
    if not all(full.measured["right"]):
        sentences.append(
            f"The full cache itself finds the number in {sum(full.measured['right'])} of {texts} texts."
        )
    by_size = grouped((_size(row), row) for one in methods for row in one.rows)
    for size, rows in sorted(by_size.items()):
        found = sum(all(row.measured["right"]) for row in rows)
        sentences.append(f"{size}, {found} of {len(rows)} methods found the number in every text.")
    always = [row for one in methods for row in one.rows if all(row.measured["right"])]
    if always:
        least = min(always, key=lambda row: float(np.mean(row.measured["bytes_after"])))
        sizes = [np.mean(row.measured["bytes_after"]) / 2**20 for row in (full, least)]
        sentences.append(
            f"The smallest cache with every answer right is that of {least.label}: "
            f"{sizes[1]:.1f} MiB instead of {sizes[0]:.1f}."
        )
    low, _ = wilson(texts, texts)
    sentences.append(f"{texts} of {texts} right answers may mean {low:.0%} in the long run (95 % interval).")
    return sentences


def write(result: Result, path: Path) -> None:
    """Write the report, one HTML file."""
    methods = told(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    put(
        path,
        render(
            "demo.html",
            model=short_name(result.model),
            result=result,
            full=result.rows[0].summary(),
            methods=methods,
            sizes=sorted({row.asked for row in result.rows[1:] if row.compression_ratio is not None}),
            summary=summary(result, methods),
            question=passkey.QUESTION,
            rows=[row.summary() for row in result.rows],
            panels={panel["label"]: panel for panel in panels(result.pictures)},
        ),
    )


def options_of(name: str) -> dict[str, Any]:
    """The options that the demo gives to a method."""
    return {option: value for option, value in OPTIONS.items() if option in resolve(name).options}


def default_methods() -> tuple[list[str], dict[str, str]]:
    """Every method with a torch path that needs only a prompt,
    and the baselines; and why the others are left out.
    """
    runnable, left_out = [], {}
    for name in catalogue.names():
        function = catalogue.entry(catalogue.definition(name))
        missing = catalogue.split_signature(function)[2] if function else ["more"]
        if missing:
            left_out[name] = f"reads {', '.join(missing)}, which a prompt alone does not give"
        elif resolve(name).is_per_query:
            left_out[name] = f"evicts nothing, so no picture tells what it keeps: --methods {name} runs it"
        elif not resolve(name).as_torch:  # H2O in NumPy takes half a minute for one prompt
            left_out[name] = f"has only its NumPy reference, which may be slow: --methods {name} runs it"
        elif any(policy.is_slow for policy in resolve(name).policies):
            left_out[name] = f"takes a minute or more for each prompt: --methods {name} runs it"
        else:
            runnable.append(name)
    return [*runnable, *catalogue.BASELINES], left_out


def require_usable(
    method_names: Sequence[str] | None, ratios: Sequence[float], depths: Sequence[float], tokens: int
) -> None:
    """Raise UsageError, before a model is loaded, as `run` does."""
    for name, values in (("ratios", ratios), ("depths", depths)):
        require(values, f"{name}: got none, wanted at least one")
    for ratio in ratios:
        tokens_to_keep(1, ratio)
    for depth in depths:
        passkey.require_made(depth, tokens)
    for method in method_names or ():
        resolve(method)


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    method_names: Sequence[str] | None = None,
    *,
    ratios: Sequence[float] = RATIOS,
    depths: Sequence[float] = passkey.DEPTHS,
    seed: int = 0,
    tokens: int = 1500,
    advance: Callable[[str], None] = lambda text: None,
    plan: Callable[[int], None] = lambda steps: None,
) -> Result:
    """Run the full cache, and every method at every ratio, on one prompt for each depth.

    `plan` is called once with the number of steps, `advance` before each step with its description. Raises
    UsageError for an unknown method, a ratio or a depth out of range, or none of them; MethodError for a
    method that fails.
    """
    require_usable(method_names, ratios, depths, tokens)
    wanted, left_out = default_methods() if method_names is None else (method_names, {})
    rows = [
        Row("full cache", {}, 0.0),
        *(row for name in dict.fromkeys(wanted) for row in _rows(name, ratios)),
    ]
    settings = [
        Setting(row.method, row.options, max(ratios) if row.asked == "own" else row.compression_ratio)
        for row in rows[1:]
    ]
    made = [passkey.make(tokenizer, depth=depth, seed=seed, tokens=tokens) for depth in depths]
    plan(len(made) * len(rows))
    pictures = []
    for index, (depth, text) in enumerate(zip(depths, made, strict=True)):
        prompt = Prompt(
            text.context_ids,
            text.question_ids,
            (text.answer,),
            (text.needle,),
            MAX_NEW_TOKENS,
            partial(score_number, text.answer),
        )
        measurements = measure(model, tokenizer, prompt, [Setting(FULL), *settings], seed + index)
        place = f"prompt {index + 1} of {len(made)}"
        advance(f"{place}: reading {prompt.context_ids.shape[1]} tokens")
        full = next(measurements)
        rows[0].add(depth, full, full, text)
        for row in rows[1:]:
            advance(f"{place}: {row.method}, removed: {row.asked}")
            own = next(measurements)
            row.add(depth, full, own, text)
            if index == len(made) // 2:
                assert own.cache is not None
                pictures.append(Picture(row.label, row.asked, survivors(own.cache), prompt.needles[0]))
    texts = [_text(tokenizer, *each) for each in zip(depths, made, strict=True)]
    return Result(str(model.config.name_or_path), seed, rows, texts, pictures, left_out)


def _text(tokenizer: Any, depth: float, made: passkey.Passkey) -> Text:
    first, last = made.needle
    ids = made.context_ids[0]
    before, needle, after = (tokenizer.decode(part) for part in (ids[:first], ids[first:last], ids[last:]))
    return Text(depth, before, needle, after, made.answer)


def _rows(name: str, ratios: Sequence[float]) -> Iterator[Row]:
    asked = [None] if "own_budget" in resolve(name).traits else ratios
    return (Row(name, options_of(name), ratio) for ratio in asked)
