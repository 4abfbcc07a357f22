"""The charts of docs/results.md, drawn from stored results while the site is built: no chart can be older than its data."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs_build.entries import ROOT
from evictionary.evaluation.pages import drawn
from evictionary.evaluation.pictures import TEXT_COLOUR

BLUES = ("#9dc6ea", "#2f7fc1", "#123f66")
VERDICTS = {"holds here": "#4f9d4f", "undecided": "#c9c9c9", "does not hold here": "#e0662b"}
RATIOS = (0.25, 0.5, 0.75)
WIDTH = 5.6  # inches, in which a phone can still read the text


def retrieval(stored: Mapping[str, Any]) -> Figure:
    """Numbers found, of five, and the distance of the hidden states, for each method and share removed."""
    each = {label.partition(" (")[0]: summaries for label, summaries in at_ratios(stored).items()}
    order = sorted(each, key=lambda name: (sum(one["right"] for one in each[name]), -each[name][1]["error"]))
    figure, (grid, dots) = _panels(order, [1, 2])
    right = [[one["right"] for one in each[name]] for name in order]
    grid.imshow(right, cmap="Blues", vmin=0, vmax=8, aspect="auto", origin="lower")
    for height, row in enumerate(right):
        for place, count in enumerate(row):
            grid.text(place, height, count, ha="center", va="center", fontsize=8)
    grid.set_xticks(range(len(RATIOS)), [f"{ratio:.0%}" for ratio in RATIOS])
    grid.set_xlabel("found, of 5")
    series = {f"{ratio:.0%} removed": [each[name][place]["error"] for name in order] for place, ratio in enumerate(RATIOS)}
    _dots(dots, series, "distance of the hidden states", (6, 12, 25, 50, 100, 200))
    return figure


def at_ratios(stored: Mapping[str, Any]) -> dict[str, list[Any]]:
    """For each label of the retrieval results the summaries at RATIOS; a method with its own budget has the same one at each."""
    found: dict[str, dict[float | None, Any]] = {}
    for row in stored["rows"][1:]:  # the first is the full cache
        found.setdefault(row["summary"]["label"], {})[row["compression_ratio"]] = row["summary"]
    return {label: [rows.get(ratio, rows.get(None)) for ratio in RATIOS] for label, rows in found.items()}


def perplexity(stored: Mapping[str, Any]) -> Figure:
    """Perplexity of the next 64 tokens after half of the cache is removed, read at once and one by one."""
    found: dict[str, dict[str, float]] = {}
    for row in stored["rows"]:
        found.setdefault(row["method"], {})[row["task"]] = row["perplexity"]
    full = found.pop("full")["perplexity"]
    order = sorted(found, key=lambda name: -found[name]["perplexity"])
    figure, (axes,) = _panels(order, [1])
    tasks = {"perplexity": "read at once", "perplexity_decoding": "while decoding"}
    _dots(axes, {label: [found[name][task] for name in order] for task, label in tasks.items()}, "perplexity", (12, 15, 20, 25))
    axes.axvline(full, color=TEXT_COLOUR, linewidth=0.8)
    return figure


def finals(stored: Mapping[str, Any]) -> Figure:
    """The cost of the compositions in the final of the study, with intervals, at three sizes."""
    at = {(row["method"], row["ratio"]): row for row in stored["finals"]["rows"]}
    ratios = sorted({ratio for _, ratio in at})
    order = sorted({name for name, _ in at}, key=lambda name: -sum(at[name, ratio]["cost"] for ratio in ratios))
    figure, (axes,) = _panels(order, [1])
    series = {f"{ratio:.0%} removed": [at[name, ratio]["cost"] for name in order] for ratio in ratios}
    _dots(axes, series, "cost, nats a token above the full cache", (0.01, 0.1, 1))
    for (name, _), row in at.items():
        axes.plot(row["interval"], [order.index(name)] * 2, color=TEXT_COLOUR, linewidth=1, zorder=1)
    return figure


def claims(stored: Mapping[str, Any]) -> Figure:
    """How many claims of each paper hold in the small model."""
    papers = stored["papers"][::-1]
    figure, (axes,) = _panels([paper["paper"] for paper in papers], [1])
    left = [0] * len(papers)
    for verdict, colour in VERDICTS.items():
        counts = [sum(claim["verdict"] == verdict for claim in paper["claims"]) for paper in papers]
        bars = axes.barh(range(len(papers)), counts, left=left, color=colour, label=verdict)
        axes.bar_label(bars, label_type="center", fontsize=8)
        left = [one + count for one, count in zip(left, counts, strict=True)]
    axes.set_xlabel("claims")
    _legend(axes)
    return figure


def speed(stored: Mapping[str, Any]) -> Figure:
    """The time to compress a prompt, as a share of the time to read it."""
    rows = sorted(stored["compression"][1:], key=lambda row: -row["share_of_prefill"])  # the first is the reading itself
    figure, (axes,) = _panels([row["method"] for row in rows], [1])
    bars = axes.barh(range(len(rows)), [row["share_of_prefill"] for row in rows], color=BLUES[1])
    axes.bar_label(bars, [f"{row['share_of_prefill']:.1%}" for row in rows], fontsize=8, padding=3)
    axes.set_xscale("log")
    axes.set_xlim(right=4)
    axes.set_xticks([0.01, 0.1, 1], ["1%", "10%", "100%"])
    axes.set_xlabel("time, as a share of reading the prompt")
    return figure


def against_kvpress(stored: Mapping[str, Any]) -> Figure:
    """How many times faster our scores are than those of kvpress, by the number of tokens."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, 2, sharey=True), ("float32", "bfloat16"), strict=True):
        sizes = stored["methods"][dtype]
        for name in sizes[str(stored["tokens"][0])]:
            axes.plot([int(size) for size in sizes], [found[name]["ratio"]["value"] for found in sizes.values()], "o-", label=name)
        axes.set(xscale="log", yscale="log", title=dtype, xlabel="tokens")
        axes.set_xticks([int(size) for size in sizes], [f"{int(size) // 1024}K" for size in sizes], minor=False)
        axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axes.minorticks_off()
        axes.axhline(1, color=TEXT_COLOUR, linewidth=0.8)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("times faster than kvpress")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


def _panels(names: Sequence[str], widths: Sequence[float]) -> tuple[Figure, Sequence[Axes]]:
    """A figure with the names down its left side, the last one on top, and panels of these relative widths."""
    figure = Figure(figsize=(WIDTH, 0.9 + 0.24 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    panels[0].set_yticks(range(len(names)), names)
    for axes in panels:
        axes.tick_params(labelsize=8)
    return figure, panels


def _dots(axes: Axes, series: Mapping[str, Sequence[float]], label: str, ticks: Sequence[float]) -> None:
    """A row of dots for each name, a shade for each series."""
    for (name, values), colour in zip(series.items(), BLUES[-len(series) :], strict=True):
        axes.plot(values, range(len(values)), "o", color=colour, markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=8, handletextpad=0.3, columnspacing=1)


@dataclass(frozen=True)
class Chart:
    """A chart, the stored results that it is drawn from, and the command that measured them."""

    draw: Callable[[Mapping[str, Any]], Figure]
    stored: str
    command: str

    @property
    def data(self) -> Any:
        return json.loads((ROOT / self.stored).read_text(encoding="utf-8"))

    @property
    def sentence(self) -> str:
        return (self.draw.__doc__ or "").strip()

    def svg(self) -> bytes:
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            return drawn(self.draw(self.data), "svg")


CHARTS = {
    chart.draw.__name__: chart
    for chart in (
        Chart(retrieval, "benchmarks/results/retrieval.json", "evictionary demo"),
        Chart(
            perplexity,
            "benchmarks/results/perplexity.json",
            "evictionary eval --tasks perplexity,perplexity_decoding --lengths 1000 --samples 4 --ratios 0.5",
        ),
        Chart(finals, "evictionary/evaluation/study.json", "evictionary study"),
        Chart(claims, "docs/claims/results.json", "evictionary claims"),
        Chart(speed, "benchmarks/results/model.json", "python -m benchmarks.model"),
        Chart(against_kvpress, "benchmarks/results/cpu.json", "python -m benchmarks.cpu"),
    )
}
