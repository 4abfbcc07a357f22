"""The charts of docs/results.md, drawn from stored results while the site is built: no chart can be older
than its data.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs_build.entries import ROOT
from evictionary.evaluation.pages import drawn
from evictionary.evaluation.pictures import TEXT_COLOUR
from evictionary.store import grouped

BLUES = ("#9dc6ea", "#2f7fc1", "#123f66")
VERDICTS = {"holds here": "#4f9d4f", "undecided": "#c9c9c9", "does not hold here": "#e0662b"}
RATIOS = (0.25, 0.5, 0.75)
WIDTH = 5.6  # inches, in which a phone can still read the text
STYLE = {
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "legend.frameon": False,
    "legend.handletextpad": 0.3,
    "lines.markersize": 4,
}
ABOVE = {"loc": "outside upper center", "ncols": 3}


def retrieval(stored: Mapping[str, Any]) -> Figure:
    """Numbers found, of five, and the distance of the hidden states, for each method and share removed."""
    each = {label.partition(" (")[0]: summaries for label, summaries in at_ratios(stored).items()}
    order = sorted(each, key=lambda name: (sum(one["right"] for one in each[name]), -each[name][1]["error"]))
    right = np.array([[one["right"] for one in each[name]] for name in order])
    figure, (grid, dots) = _panels(order, [1, 2])
    grid.imshow(right, cmap="Blues", vmin=0, vmax=8, aspect="auto", origin="lower")
    for (height, place), count in np.ndenumerate(right):
        grid.text(place, height, count, ha="center", va="center")
    grid.set(
        xticks=range(len(RATIOS)), xticklabels=[f"{ratio:.0%}" for ratio in RATIOS], xlabel="found, of 5"
    )
    _dots(
        dots,
        [f"{ratio:.0%} removed" for ratio in RATIOS],
        [[one["error"] for one in each[name]] for name in order],
        "distance of the hidden states",
        (6, 12, 25, 50, 100, 200),
    )
    return figure


def at_ratios(stored: Mapping[str, Any]) -> dict[str, list[Any]]:
    """For each label of the retrieval results the summaries at RATIOS; a method with its own budget has
    the same one at each.
    """
    # the first is the full cache
    found = grouped(
        (row["summary"]["label"], (row["compression_ratio"], row["summary"])) for row in stored["rows"][1:]
    )
    return {
        label: [rows.get(ratio, rows.get(None)) for ratio in RATIOS]
        for label, rows in zip(found, map(dict, found.values()), strict=True)
    }


def perplexity(stored: Mapping[str, Any]) -> Figure:
    """Perplexity of the next 64 tokens after half of the cache is removed, read at once and one by one."""
    found = {(row["method"], row["task"]): row["perplexity"] for row in stored["rows"]}
    order = sorted({name for name, _ in found if name != "full"}, key=lambda name: -found[name, "perplexity"])
    figure, (axes,) = _panels(order, [1])
    values = [[found[name, task] for task in ("perplexity", "perplexity_decoding")] for name in order]
    _dots(axes, ["read at once", "while decoding"], values, "perplexity", (12, 15, 20, 25))
    axes.axvline(found["full", "perplexity"], color=TEXT_COLOUR, linewidth=0.8)
    return figure


def finals(stored: Mapping[str, Any]) -> Figure:
    """The cost of the compositions in the final of the study, with intervals, at three sizes."""
    at = {(row["method"], row["ratio"]): row for row in stored["finals"]["rows"]}
    ratios = sorted({ratio for _, ratio in at})
    order = sorted(
        {name for name, _ in at}, key=lambda name: -sum(at[name, ratio]["cost"] for ratio in ratios)
    )
    figure, (axes,) = _panels(order, [1])
    _dots(
        axes,
        [f"{ratio:.0%} removed" for ratio in ratios],
        [[at[name, ratio]["cost"] for ratio in ratios] for name in order],
        "cost, nats a token above the full cache",
        (0.01, 0.1, 1),
    )
    axes.hlines(
        [order.index(name) for name, _ in at],
        *zip(*(row["interval"] for row in at.values()), strict=True),
        TEXT_COLOUR,
        zorder=1,
    )
    return figure


def claims(stored: Mapping[str, Any]) -> Figure:
    """How many claims of each paper hold in the small model."""
    names = [paper["paper"] for paper in stored["papers"]]
    counts = [
        [sum(claim["verdict"] == one for claim in paper["claims"]) for one in VERDICTS]
        for paper in stored["papers"]
    ]
    figure, (axes,) = _panels(names, [1])
    for left, width, (verdict, colour) in zip(
        (np.cumsum(counts, 1) - counts).T, np.transpose(counts), VERDICTS.items(), strict=True
    ):
        axes.bar_label(axes.barh(names, width, left=left, color=colour, label=verdict), label_type="center")
    axes.set_xlabel("claims")
    figure.legend(**ABOVE)
    return figure


def speed(stored: Mapping[str, Any]) -> Figure:
    """The time to compress a prompt, as a share of the time to read it."""
    # the first is the reading itself
    rows = sorted(stored["compression"][1:], key=lambda row: -row["share_of_prefill"])
    names, shares = [row["method"] for row in rows], [row["share_of_prefill"] for row in rows]
    figure, (axes,) = _panels(names, [1])
    axes.bar_label(axes.barh(names, shares, color=BLUES[1]), [f"{share:.1%}" for share in shares], padding=3)
    axes.set(
        xscale="log",
        xlim=(0.005, 4),
        xticks=[0.01, 0.1, 1],
        xticklabels=["1%", "10%", "100%"],
        xlabel="time, as a share of reading the prompt",
    )
    return figure


def against_kvpress(stored: Mapping[str, Any]) -> Figure:
    """How many times faster our scores are than those of kvpress, by the number of tokens."""
    figure = Figure(figsize=(WIDTH, 3.2))
    sizes = stored["tokens"]
    for axes, (dtype, found) in zip(
        figure.subplots(1, 2, sharey=True), stored["methods"].items(), strict=True
    ):
        for name in found[str(sizes[0])]:
            axes.loglog(sizes, [found[str(size)][name]["ratio"]["value"] for size in sizes], "o-", label=name)
        axes.set(
            title=dtype,
            xlabel="tokens",
            xticks=sizes,
            xticklabels=[f"{size // 1024}K" for size in sizes],
            ylabel="times faster than kvpress",
            yticks=[0.5, 1, 2, 4, 8, 16],
            yticklabels=["0.5", "1", "2", "4", "8", "16"],
        )
        axes.minorticks_off()
        axes.axhline(1, color=TEXT_COLOUR, linewidth=0.8)
        axes.label_outer()
    figure.legend(*axes.get_legend_handles_labels(), **ABOVE)
    return figure


def _panels(names: Sequence[str], widths: Sequence[float]) -> tuple[Figure, Sequence[Axes]]:
    """A figure with the names down its left side, the
    last one on top, and panels of these relative widths.
    """
    figure = Figure(figsize=(WIDTH, 0.9 + 0.24 * len(names)))
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    panels[0].set_yticks(range(len(names)), names)
    return figure, panels


def _dots(axes: Axes, labels: Sequence[str], values: Any, label: str, ticks: Sequence[float]) -> None:
    """A row of dots for each list of values, a shade for each label."""
    for column, name, colour in zip(np.transpose(values), labels, BLUES[-len(labels) :], strict=True):
        axes.semilogx(column, range(len(column)), "o", color=colour, label=name)
    axes.set(xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks], xlabel=label)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.figure.legend(**ABOVE)


class Chart(NamedTuple):
    """A chart, the stored results that it is drawn from, and the command that measured them."""

    draw: Callable[[Mapping[str, Any]], Figure]
    stored: str
    command: str

    @property
    def data(self) -> Any:
        return json.loads((ROOT / self.stored).read_text(encoding="utf-8"))

    def svg(self) -> bytes:
        with matplotlib.rc_context(STYLE):
            return drawn(self.draw(self.data), "svg")


EVAL = "evictionary eval --tasks perplexity,perplexity_decoding --lengths 1000 --samples 4 --ratios 0.5"
CHARTS = {
    chart.draw.__name__: chart
    for chart in (
        Chart(retrieval, "benchmarks/results/retrieval.json", "evictionary demo"),
        Chart(perplexity, "benchmarks/results/perplexity.json", EVAL),
        Chart(finals, "evictionary/evaluation/study.json", "evictionary study"),
        Chart(claims, "docs/claims/results.json", "evictionary claims"),
        Chart(speed, "benchmarks/results/model.json", "python -m benchmarks.model"),
        Chart(against_kvpress, "benchmarks/results/cpu.json", "python -m benchmarks.cpu"),
    )
}
