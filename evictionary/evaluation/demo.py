"""The demo: an evaluation of every method on a passkey at five depths, with |h - h_c| and pictures of
which tokens survive.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from evictionary.errors import MethodError, require
from evictionary.evaluation import passkey
from evictionary.evaluation.pages import render, short_name
from evictionary.evaluation.pictures import Picture, panels, survivors
from evictionary.evaluation.run import FULL, Measurement, Setting, label, measure
from evictionary.evaluation.tasks import Prompt, score_number
from evictionary.methods import catalogue
from evictionary.methods.method import tokens_to_keep
from evictionary.methods.resolve import resolve
from evictionary.store import put

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

    def add(self, depth: float, full: Measurement, own: Measurement) -> None:
        """Add the measurement at one depth, compared with the full cache."""
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


@dataclass
class Result:
    """The rows of the table in order, the pictures of the
    middle prompt, and the reasons why methods were left out.
    """

    model: str
    seed: int
    rows: list[Row]
    pictures: list[Picture]
    left_out: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Everything but the pictures."""
        return {
            "model": self.model,
            "seed": self.seed,
            "rows": [row.as_json() for row in self.rows],
            "left_out": self.left_out,
        }


def write(result: Result, path: Path) -> None:
    """Write the report, one HTML file."""
    rows = [row.summary() for row in result.rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    put(
        path,
        render(
            "demo.html",
            model=short_name(result.model),
            result=result,
            rows=rows,
            panels=panels(result.pictures),
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
    made = (passkey.make(tokenizer, depth=depth, seed=seed, tokens=tokens) for depth in depths)
    prompts = [
        Prompt(
            each.context_ids,
            each.question_ids,
            (each.answer,),
            (each.needle,),
            MAX_NEW_TOKENS,
            partial(score_number, each.answer),
        )
        for each in made
    ]
    plan(len(prompts) * len(rows))
    pictures = []
    for index, (depth, prompt) in enumerate(zip(depths, prompts, strict=True)):
        measurements = measure(model, tokenizer, prompt, [Setting(FULL), *settings], seed + index)
        place = f"prompt {index + 1} of {len(prompts)}"
        advance(f"{place}: reading {prompt.context_ids.shape[1]} tokens")
        full = next(measurements)
        rows[0].add(depth, full, full)
        for row in rows[1:]:
            advance(f"{place}: {row.method}, removed: {row.asked}")
            own = next(measurements)
            row.add(depth, full, own)
            if index == len(prompts) // 2:
                assert own.cache is not None
                pictures.append(Picture(row.label, row.asked, survivors(own.cache), prompt.needles[0]))
    return Result(str(model.config.name_or_path), seed, rows, pictures, left_out)


def _rows(name: str, ratios: Sequence[float]) -> Iterator[Row]:
    asked = [None] if "own_budget" in resolve(name).traits else ratios
    return (Row(name, options_of(name), ratio) for ratio in asked)
