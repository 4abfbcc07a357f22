"""Which selection, which allocator, which correction:
every composition of the dictionary on the same prompts.

The model reads a prompt once with the full cache. Each composition compresses a copy of that cache to each
size, and the model then reads the question and the right answer. The loss is the mean of -log p over the
tokens of the answer; a composition's *cost* is its loss minus that of the full cache, in nats for each token.
An answer is exact where each of its tokens is the likeliest one, which is where greedy decoding gives it. A
run that was stopped goes on; a line is one selector on one prompt at one ratio. The best of many compositions
looks better than it is, so a final of a few of them on other prompts decides what is recommended.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from evictionary import store
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import MethodError, UsageError, require, require_known
from evictionary.evaluation import tasks
from evictionary.evaluation.pages import drawn
from evictionary.evaluation.questions import likelihood, prefill
from evictionary.evaluation.run import ModelPlan, Unit, placed, require_lengths, require_some, versions
from evictionary.methods import catalogue
from evictionary.methods.method import Method, tokens_to_keep
from evictionary.methods.resolve import MOMENTS, resolve
from evictionary.palette import GREY, INK, PAPERS, colour_of, style

TASKS = ("passkey7", "needle_multikey", "variables", "copy", "perplexity")
RATIOS = (0.5, 0.75, 0.9)
# The options of a method that its defaults would not let evict from prompts of some hundred tokens.
OPTIONS: dict[str, dict[str, Any]] = {"lagkv": {"lag_size": 32}}

# The summary of the study of the embedded model, on which `evictionary run` relies where no method is named.
STORED = Path(__file__).with_name("study.json")

# The parts of it that choose what `--method auto` takes: each on other prompts than the final of real texts.
EARLIER = ("finals", "real", "real_2000", "real_4000")
# How often a model may read the prompt for it.
OFTEN = {1: "once", 2: "twice"}

# Bootstrap draws.
DRAWS = 2000

# Prompts of each task, at least: a bootstrap of fewer says nothing of others.
LEAST = 12

# model, lengths, versions, rows (one for each composition and ratio), effects, and what is recommended at
# each ratio, on how many prompts. A row's `own` says that the composition keeps more than was asked for: it
# is in no comparison at that ratio. STORED has more summaries beside these fields: `docs_build.study` names
# them.
Summary = dict[str, Any]


@dataclass(frozen=True)
class Plan(ModelPlan):
    """Every composition of each selector at each ratio, on each prompt: a task, a length in tokens and a
    seed. Without `allocators` each is tried that can divide the selector's budget.

    Raises UsageError for an unknown name, a value out of range or an empty list.
    """

    selectors: Sequence[str]
    tasks: Sequence[str] = TASKS
    seeds: Sequence[int] = range(40)
    ratios: Sequence[float] = RATIOS
    lengths: Sequence[int] = (512,)
    allocators: Sequence[str] | None = None

    IDENTITY = ("model", "seed", "task", "length", "selector", "ratio")

    def __post_init__(self) -> None:
        require_some(self, "selectors", "tasks", "seeds", "ratios", "lengths")
        for name in self.tasks:
            tasks.get(name)
        for length in self.lengths:
            require(length >= 1, f"lengths: got {length}, wanted at least 1")
        for name in self.allocators or ():
            require_known("allocators", name, catalogue.allocators())
        for name in self.selectors:
            compositions(name, self.allocators)
        for ratio in self.ratios:
            tokens_to_keep(1, ratio)

    def work(self) -> list[tuple[Unit, list[tuple[str, float]]]]:
        """Every prompt once, the tasks in turn: a run that is stopped has prompts of all of them."""
        parts = list(itertools.product(self.selectors, self.ratios))
        units = itertools.product(self.seeds, self.lengths, self.tasks)
        every = dict.fromkeys(Unit(task, length, seed) for seed, length, task in units)
        return [(unit, parts) for unit in every]

    def alike(self, unit: Unit) -> tuple[int, str]:
        return unit.length, unit.task

    def named(self, unit: Unit, part: tuple[str, float]) -> dict[str, Any]:
        return {**unit._asdict(), "selector": part[0], "ratio": part[1]}

    def check(self, folder: Path, found: Mapping[str, store.Line], work: store.Work) -> None:
        """Raise UsageError for a length that is too short for a task or too long for the model."""
        require_lengths(self.model, [unit for unit, _ in work], self.loading.revision)

    def measure(self, unit: Unit, parts: Sequence[tuple[str, float]]) -> Iterator[store.Line]:
        """The cells of a line are [loss, whether exact, tokens kept]."""
        model, tokenizer = self.opened()
        prompt = tasks.get(unit.task).make(tokenizer, unit.length, unit.seed)
        answer = (
            tasks.answer_ids(tokenizer, prompt.answers)
            if prompt.continuation is None
            else prompt.continuation
        )
        composed = {selector: compositions(selector, self.allocators) for selector, _ in parts}
        record = frozenset().union(
            *(method.captured for methods in composed.values() for method in methods.values())
        )
        full = EvictingCache(model, method=None, record=record)
        prefill(model, prompt.context_ids, full)

        def cell(cache: EvictingCache) -> list[float]:
            found = likelihood(model, cache, prompt.question_ids, answer)
            return [round(found.loss, 5), int(all(found.is_likeliest)), round(cache.tokens_kept, 2)]

        common: store.Line = {
            **self.common(),
            **placed(model),
            "full": cell(full),
            "versions": versions(),
        }
        scores: dict[str, dict[int, Any]] = {selector: {} for selector in composed}
        for selector, ratio in parts:
            cells, error = {}, None
            try:
                for name, method in composed[selector].items():
                    arguments = (
                        _remembering(method, scores[selector], len(full.layers)),
                        ratio,
                        OPTIONS.get(selector),
                    )
                    with EvictingCache.from_prefilled(model, full, *arguments, seed=unit.seed) as cache:
                        cells[name] = cell(cache)
            except MethodError as failed:
                error = f"{name}: {failed}"
            yield common | self.named(unit, (selector, ratio)) | {"cells": cells, "error": error}

    def text(self, line: store.Line) -> str:
        return f"{line['task']}, seed {line['seed']}: {line['selector']}, {100 * line['ratio']:g}% removed"


def selectors() -> list[str]:
    """Every method of the dictionary that evicts, and random eviction, with and without protected tokens."""
    return [*catalogue.evicting(), *catalogue.BASELINES]


def compositions(selector: str, allocators: Sequence[str] | None = None) -> dict[str, Method]:
    """The selector alone, with each allocator (all, if none are named), and each of these with MomentKV's
    correction, as far as they can be composed.
    """
    found: dict[str, Method] = {}
    tried = catalogue.allocators() if allocators is None else allocators
    for allocator, correction in itertools.product(("", *tried), ("", MOMENTS)):
        name = "+".join(part for part in (selector, allocator, correction) if part)
        alone = resolve(selector)
        if (correction and alone.corrected) or (allocator and "own_budget" in alone.traits):
            continue
        try:
            found[name] = resolve(name)
        except UsageError:
            if name == selector:
                raise
    return found


def _remembering(method: Method, scores: dict[int, Any], layers: int) -> Method:
    """The method with the scores of each layer computed only
    once, where they do not depend on the size asked for.
    """
    if (
        method.is_select
        or method.prompt_function
        or {"budget", "compression_ratio", "keep_ratio"} & set(method.inputs)
    ):
        return method
    if len(scores) == layers:
        return replace(method, function=lambda layer_index: scores[layer_index], inputs=("layer_index",))

    @functools.wraps(method.function)
    def score(layer_index: int, **arguments: Any) -> Any:
        if "layer_index" in method.inputs:
            arguments["layer_index"] = layer_index
        scores[layer_index] = method.function(**arguments)
        return scores[layer_index]

    return replace(
        method,
        function=score,
        inputs=(*(name for name in method.inputs if name != "layer_index"), "layer_index"),
    )


def summarise(lines: Sequence[store.Line]) -> Summary:
    """What the lines say, for each ratio of the prompts on
    which every selector was measured: costs, with intervals.

    A prompt is a task and a seed, with the same question at each length. A cost is the mean over the tasks of
    the means over their prompts and lengths; the share of exact answers is that over the tasks with a
    question. The intervals hold 95 % of the bootstrap draws of prompts within each task; all compositions
    share the draws, so differences are of the same prompts. A ratio with fewer than LEAST prompts of a task
    is left out; UsageError where all are.
    """
    lengths = sorted({line["length"] for line in lines})
    found: Summary = {
        "model": Plan.subject(lines[0]),
        "lengths": lengths,
        "versions": lines[0]["versions"],
        "rows": [],
        "effects": [],
        "recommended": [],
    }
    for by_task, rows, draws in by_ratio(lines):
        found["rows"] += rows
        found["effects"] += _effects(rows, draws)
        if not all(row["own"] for row in rows):
            counts = {task: len(each) for task, each in by_task.items()}
            found["recommended"].append(_recommended(rows, draws) | {"prompts": counts})
    require(
        found["rows"],
        f"study: got fewer than {LEAST} prompts of a task with every method, wanted more: the same command "
        "goes on",
    )
    return found


Prompts = Mapping[str, Sequence[Mapping[tuple[str, int], store.Line]]]
"""Of each task its prompts, each with the lines of its selectors and lengths."""


def by_ratio(lines: Sequence[store.Line]) -> Iterator[tuple[Prompts, list[dict[str, Any]], np.ndarray]]:
    """For each ratio that has LEAST prompts of each task: the prompts on which every selector was measured,
    the row of each composition, and its costs in the draws, [compositions, DRAWS].
    """
    lengths = sorted({line["length"] for line in lines})
    asked = set(itertools.product((line["selector"] for line in lines), lengths))
    by_prompt = store.grouped(
        ((line["ratio"], line["task"], line["seed"]), ((line["selector"], line["length"]), line))
        for line in lines
        if line["error"] is None
    )
    whole = {key: dict(pairs) for key, pairs in by_prompt.items() if set(dict(pairs)) == asked}
    for ratio in sorted({key[0] for key in whole}):
        by_task = {
            task: prompts
            for task in tasks.TASKS
            if (prompts := [each for key, each in sorted(whole.items()) if key[:2] == (ratio, task)])
        }
        if all(len(prompts) >= LEAST for prompts in by_task.values()):
            yield by_task, *_rows(ratio, lengths, by_task)


def _rows(ratio: float, lengths: Sequence[int], by_task: Prompts) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The row of each composition at a ratio, and the costs of the draws, [compositions, DRAWS]."""
    first = next(iter(by_task.values()))[0]
    keys = [
        (selector, name)
        for (selector, length), line in first.items()
        if length == lengths[0]
        for name in line["cells"]
    ]
    asked = [task for task in by_task if task not in tasks.GOES_ON]
    generator = np.random.default_rng(0)
    costs, of_lengths, worst, draws, exact, kept, size = (
        {},
        np.zeros((len(keys), len(lengths))),
        np.zeros((len(keys), 0)),
        np.zeros((len(keys), DRAWS)),
        np.zeros(len(keys)),
        np.zeros(len(keys)),
        0.0,
    )
    for task, prompts in by_task.items():
        # [keys, prompts, lengths, 3]
        cells = np.array(
            [
                [[each[selector, length]["cells"][name] for length in lengths] for each in prompts]
                for selector, name in keys
            ]
        )
        full = np.array([[each[keys[0][0], length]["full"] for length in lengths] for each in prompts])
        cost = cells[..., 0] - full[..., 0]
        counts = generator.multinomial(len(prompts), [1 / len(prompts)] * len(prompts), size=DRAWS)
        costs[task] = cost.mean(axis=(1, 2))
        of_lengths += cost.mean(axis=1) / len(by_task)
        worst = np.append(worst, cost.max(axis=2), axis=1)
        draws += cost.mean(axis=2) @ counts.T / len(prompts) / len(by_task)
        exact += 0 if task in tasks.GOES_ON else cells[..., 1].mean(axis=(1, 2)) / len(asked)
        kept += cells[..., 2].mean(axis=(1, 2)) / len(by_task)
        size += full[..., 2].mean() / len(by_task)
    mean = np.mean(list(costs.values()), axis=0)
    low, high = np.percentile(draws, [2.5, 97.5], axis=1)
    rows = [
        {
            "method": name,
            "ratio": ratio,
            "own": bool(kept[index] > 1.1 * (1 - ratio) * size),
            "cost": float(mean[index]),
            "interval": [float(low[index]), float(high[index])],
            "exact": float(exact[index]),
            "nine_of_ten": bound(worst[index]),
            "tokens_kept": float(kept[index]),
            "tasks": {task: float(costs[task][index]) for task in by_task},
            "lengths": dict(zip(map(str, lengths), of_lengths[index].tolist(), strict=True)),
        }
        for index, (_, name) in enumerate(keys)
    ]
    return rows, draws


def _effects(rows: Sequence[Mapping[str, Any]], draws: np.ndarray) -> list[dict[str, Any]]:
    """What each addition changes in the cost at a ratio, on average over the compositions that lack it and
    can have it.
    """
    place = {row["method"]: index for index, row in enumerate(rows)}
    found = []
    for addition in (catalogue.PROTECT, *catalogue.allocators(), MOMENTS):
        without = {name: "+".join(part for part in name.split("+") if part != addition) for name in place}
        pairs = [
            (index, place[without[name]])
            for name, index in place.items()
            if not rows[index]["own"] and name != without[name] in place
        ]
        if not pairs:
            continue
        changes = [rows[one]["cost"] - rows[other]["cost"] for one, other in pairs]
        low, high = np.percentile(
            np.mean([draws[one] - draws[other] for one, other in pairs], axis=0), [2.5, 97.5]
        )
        found.append(
            {
                "addition": addition,
                "ratio": rows[0]["ratio"],
                "change": float(np.mean(changes)),
                "interval": [float(low), float(high)],
                "better": sum(change < 0 for change in changes),
                "of": len(changes),
            }
        )
    return found


def bound(costs: Sequence[float], share: float = 0.9, confidence: float = 0.9) -> float | None:
    """A cost that a `share` of all prompts like these stay below, with this confidence; None for too few.

    It is the k-th smallest of the n costs, k the least number for which n independent prompts, each below
    the share's quantile with that probability, are fewer than k below it with at least the confidence: an
    upper confidence bound of a quantile, whatever the distribution. As many prompts of each task as of
    another vary less than that.
    """
    n, fewer = len(costs), 0.0
    for k, cost in enumerate(sorted(costs), start=1):
        fewer += math.comb(n, k - 1) * share ** (k - 1) * (1 - share) ** (n - k + 1)
        if fewer >= confidence:
            return float(cost)
    return None


def _recommended(rows: Sequence[Mapping[str, Any]], draws: np.ndarray) -> dict[str, Any]:
    """The composition of the least cost at a ratio, what 9 of 10 prompts cost with it at most, and those
    whose difference to it has an interval that holds 0.
    """
    indices = [index for index, row in enumerate(rows) if not row["own"]]
    best = min(indices, key=lambda index: rows[index]["cost"])
    lows = np.percentile(draws[indices] - draws[best], 2.5, axis=1)
    equals = [
        rows[index]["method"] for index, low in zip(indices, lows, strict=True) if low <= 0 and index != best
    ]
    told = ("ratio", "method", "cost", "interval", "exact", "nine_of_ten")
    return {name: rows[best][name] for name in told} | {"as_good": equals}


def recommended(ratio: float, readings: int = 1) -> tuple[str, str]:
    """The composition that the stored study recommends for removing a fraction, of those for which the model
    reads the prompt at most so often, and what it costs beside the one for another number of readings.

    Earlier prompts choose: of the compositions in all of EARLIER it cost least on average. The numbers are
    those of the final of real texts, which has no part in choosing.
    """
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    final = stored["real_finals"]
    entry = min(final["recommended"], key=lambda each: abs(each["ratio"] - ratio))
    rows = {row["method"]: row for row in final["rows"] if row["ratio"] == entry["ratio"]}
    costs = store.grouped((row["method"], row["cost"]) for name in EARLIER for row in stored[name]["rows"])
    most = max(map(len, costs.values()))
    tried = sorted((name for name in rows if len(costs.get(name, ())) == most), key=lambda x: sum(costs[x]))
    often = {name: resolve(name).readings() for name in tried}
    best = {count: next(name for name in tried if often[name] <= count) for count in OFTEN}
    name, other = best[readings], best[min(OFTEN.keys() - {readings})]
    cost = {each: f"{rows[each]['cost']:.2f}" for each in (name, other)}
    prompts, (shortest, *_, longest) = sum(entry["prompts"].values()), final["lengths"]
    return name, (
        f"auto: {name}, for which the model reads the prompt {OFTEN[often[name]]}. At "
        f"{100 * entry['ratio']:g}% removed it cost {cost[name]} nats for each token of the answer. {other} "
        f"reads it {OFTEN[often[other]]} and cost {cost[other]}: --readings {often[other]} takes it. These "
        f"are {prompts} prompts of {shortest:,} to {longest:,} tokens that people wrote, with one small "
        f"model, {stored['model']}: 9 of 10 prompts like these lose at most "
        f"{rows[name]['nine_of_ten']:.2g} nats (90% confidence). Your model and text may want another one"
    )


def write(lines: Sequence[store.Line], folder: Path) -> Summary:
    """Write summary.json, table.md and study.svg into the folder; return the summary."""
    found = summarise(lines)
    store.put(folder / "summary.json", json.dumps(found, indent=1) + "\n")
    store.put(folder / "table.md", markdown(found))
    store.put(folder / "study.svg", drawn(picture(found), "svg"))
    return found


def markdown(found: Summary, memory: Callable[[Mapping[str, Any]], float] | None = None) -> str:
    """A table for each ratio: the cost of each composition, its interval and the share of exact answers,
    from the least cost on. `memory` says of a row what it holds, in tokens of a head.
    """
    lengths = found["lengths"] if len(found["lengths"]) > 1 else []
    of_lengths = [f"{length:,} tokens" for length in lengths]
    head = ["composition", "protected", "cost", "low", "high", *of_lengths, "exact", "tokens kept"]
    head += ["memory, in tokens"] if memory else []
    parts = []
    for ratio in sorted({row["ratio"] for row in found["rows"]}):
        rows = sorted(
            (row for row in found["rows"] if row["ratio"] == ratio), key=lambda row: (row["own"], row["cost"])
        )
        body = [
            [
                f"`{row['method']}`",
                catalogue.protected(row["method"], OPTIONS.get(row["method"].partition("+")[0], {})),
                *(f"{number:.3f}" for number in (row["cost"], *row["interval"])),
                *(f"{row['lengths'][str(length)]:.3f}" for length in lengths),
                f"{row['exact']:.0%}",
                f"{row['tokens_kept']:.0f}",
                *([f"{memory(row):.0f}"] if memory else []),
            ]
            for row in rows
        ]
        parts.append(f"**{100 * ratio:g} % removed**\n\n{store.table(head, body, 'llr')}\n")
    return "\n".join(parts)


def _composed(method: str) -> tuple[str, str, bool]:
    """The selector of a composition, with the additions that are no allocator, its allocator or an empty
    string, and whether the correction is in it.
    """
    base, *additions = method.split("+")
    allocator = next((name for name in additions if name in MARKERS), "")
    others = [name for name in additions if name not in (allocator, MOMENTS)]
    return "+".join([base, *others]), allocator, MOMENTS in additions


MARKERS = {"": "o", "ada_kv": "D", "pyramid_kv": "^"}


def _drawn_as(method: str) -> tuple[str, str, bool]:
    """The colour of a composition's marks, its allocator, and whether it has the correction."""
    selector, allocator, is_corrected = _composed(method)
    return colour_of(selector), allocator, is_corrected


@rc_context(style())
def picture(found: Summary) -> Figure:
    """The cost of each composition: selectors down, a panel for each ratio, a mark for each allocator;
    hollow without moments. The five papers have their colours, and all else is grey.
    """
    rows = [row for row in found["rows"] if not row["own"]]
    ratios = sorted({row["ratio"] for row in rows})
    costs = store.grouped((_composed(row["method"])[0], row["cost"]) for row in rows)
    order = sorted(costs, key=lambda selector: min(costs[selector]), reverse=True)
    figure = Figure(figsize=(3.6 * len(ratios) + 1.4, 1.4 + 0.36 * len(order)), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
    for axes, ratio in zip(panels, ratios, strict=True):
        own = [row for row in rows if row["ratio"] == ratio]
        alike = store.grouped((_drawn_as(row["method"]), row) for row in own)
        for (colour, allocator, is_corrected), group in alike.items():
            up = 0.2 * list(MARKERS).index(allocator) - 0.2 + 0.07 * is_corrected
            heights = [order.index(_composed(row["method"])[0]) + up for row in group]
            face = colour if is_corrected else "white"
            look = {"color": colour, "markerfacecolor": face, "markersize": 4}
            axes.hlines(
                heights, *zip(*(row["interval"] for row in group), strict=True), colors=colour, linewidth=1
            )
            axes.plot([row["cost"] for row in group], heights, MARKERS[allocator], **look)
        axes.set_xscale("symlog", linthresh=0.1)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_title(f"{100 * ratio:g} % removed", fontsize=10)
        axes.set_yticks(range(len(order)), order, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    for named, selector in zip(panels[0].get_yticklabels(), order, strict=True):
        named.set(color=colour_of(selector), weight="bold" if selector in PAPERS else "normal")
    figure.supxlabel("cost: nats for each token of the answer more than the full cache", fontsize=9)
    allocators = {_composed(row["method"])[1] for row in rows}
    marks = [
        ("the same budget for each head", "", "white"),
        *((name, name, "white") for name in MARKERS if name and name in allocators),
        ("with MomentKV's correction", "", INK),
    ]
    handles = [
        panels[-1].plot([], [], MARKERS[name], color=INK, markerfacecolor=face, label=label)[0]
        for label, name, face in marks
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    return figure
