"""The charts of docs/results.md, drawn from stored results while the site is built: no chart can be older
than its data.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from docs_build.entries import ROOT
from evictionary.evaluation.pages import drawn
from evictionary.palette import FAINT, GREY, INK, PAPERS, colour_of, style
from evictionary.store import grouped

# The grammar of all charts. A row for each method, the best on top. The five papers have a colour each, the
# same in every chart, and all else is grey. What has an interval shows it. Words stand beside what they name,
# and no chart has a legend.
VERDICTS = {
    "holds here": PAPERS["keydiff"],
    "undecided": FAINT,
    "other model needed": GREY,
    "does not hold here": PAPERS["momentkv"],
}
RATIOS = (0.25, 0.5, 0.75)
SHADES = (0.35, 0.65, 1.0)  # from the first dot of a row to its last
WIDTH = 5.0  # inches, in which a phone can still read the text
STYLE = style() | {
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 8,
    "lines.markersize": 4.5,
    "ytick.left": False,
}


def tint(colour: str, share: float) -> tuple[float, ...]:
    """A colour on white, in this strength."""
    return tuple(1 - share * (1 - part) for part in to_rgb(colour))


def retrieval(stored: Mapping[str, Any]) -> Figure:
    """Numbers found, of five, and the distance of the hidden states, for each method and share removed."""
    each = {label.partition(" (")[0]: summaries for label, summaries in at_ratios(stored).items()}
    order = sorted(each, key=lambda name: (sum(one["right"] for one in each[name]), -each[name][1]["error"]))
    figure, (grid, dots) = _panels(order, [1, 2])
    found = [[one["right"] for one in each[name]] for name in order]
    shades = [
        [tint(colour_of(name), count / 8) for count in row] for name, row in zip(order, found, strict=True)
    ]
    grid.imshow(shades, aspect="auto", interpolation="none")
    for height, row in enumerate(found):
        for place, count in enumerate(row):
            grid.text(place, height, count, ha="center", va="center")
    grid.set(
        xticks=range(len(RATIOS)),
        xticklabels=[f"{ratio:.0%}" for ratio in RATIOS],
        xlabel="found, of 5",
        xlim=(-0.5, 2.5),
        ylim=(-0.6, len(order) + 0.3),
    )
    grid.spines["bottom"].set_visible(False)
    _dots(
        dots,
        order,
        [f"{ratio:.0%}" for ratio in RATIOS],
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
    _dots(axes, order, ["read at once", "while decoding"], values, "perplexity", (12, 15, 20, 25))
    axes.axvline(found["full", "perplexity"], color=GREY, linewidth=0.8, zorder=0)
    axes.text(found["full", "perplexity"], len(order) - 0.1, " full cache", color=GREY, va="center")
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
        order,
        [f"{ratio:.0%} removed" for ratio in ratios],
        [[at[name, ratio]["cost"] for ratio in ratios] for name in order],
        "cost, nats a token above the full cache",
        (0.01, 0.1, 1),
        [[at[name, ratio]["interval"] for ratio in ratios] for name in order],
    )
    return figure


def claims(stored: Mapping[str, Any]) -> Figure:
    """How many claims of each paper hold in the small model."""
    papers = stored["papers"][::-1]
    figure, (axes,) = _panels([paper["paper"] for paper in papers], [1])
    for height, paper in enumerate(papers):
        left = 0
        for verdict, colour in VERDICTS.items():
            count = sum(claim["verdict"] == verdict for claim in paper["claims"])
            axes.barh(height, count, 0.72, left, color=colour)
            if count:
                said = "white" if colour != FAINT else INK
                axes.text(left + count / 2, height, count, color=said, ha="center", va="center")
            left += count
    axes.set(xlabel="claims", xticks=[])
    axes.spines["bottom"].set_visible(False)
    # Their words stand in two lines, since one is too short.
    places = [(left, height) for height in (0.2, -0.3) for left in (0, 8)]
    for (left, height), (verdict, colour) in zip(places, VERDICTS.items(), strict=True):
        said = GREY if colour == FAINT else colour
        axes.text(left, len(papers) + height, verdict, color=said, weight="bold")
    return figure


def speed(stored: Mapping[str, Any]) -> Figure:
    """The time to compress a prompt, as a share of the time to read it."""
    # the first is the reading itself
    rows = sorted(stored["compression"][1:], key=lambda row: -row["share_of_prefill"])
    names, shares = [row["method"] for row in rows], [row["share_of_prefill"] for row in rows]
    figure, (axes,) = _panels(names, [1])
    bars = axes.barh(names, shares, 0.72, color=[colour_of(name) for name in names])
    axes.bar_label(bars, [f"{share:.1%}" for share in shares], padding=3)
    axes.axvline(1, color=GREY, linewidth=0.8, zorder=0)
    axes.set(
        xscale="log",
        xlim=(0.005, 4),
        xticks=[0.01, 0.1, 1],
        xticklabels=["1%", "10%", "100%"],
        xlabel="time, as a share of reading the prompt",
    )
    axes.minorticks_off()
    return figure


def against_kvpress(stored: Mapping[str, Any]) -> Figure:
    """How many times faster our scores are than those of kvpress, by the number of tokens."""
    figure = Figure(figsize=(WIDTH, 4.2))
    sizes = stored["tokens"]
    for axes, (dtype, found) in zip(
        figure.subplots(1, 2, sharey=True), stored["methods"].items(), strict=True
    ):
        ends = {name: found[str(sizes[-1])][name]["ratio"]["value"] for name in found[str(sizes[0])]}
        for name in ends:
            ratios = [found[str(size)][name]["ratio"]["value"] for size in sizes]
            axes.loglog(sizes, ratios, "o-", color=colour_of(name), zorder=2 + (name in PAPERS))
        for name, height in _apart(ends, 1.17).items():
            weight = "bold" if name in PAPERS else "normal"
            axes.text(
                sizes[-1] * 1.25, height, name, color=colour_of(name), va="center", weight=weight, size=7
            )
        axes.set(
            title=dtype,
            xlabel="tokens",
            xlim=(sizes[0] * 0.8, sizes[-1] * 40),
            xticks=sizes,
            xticklabels=[f"{size // 1024}K" for size in sizes],
            ylabel="times faster than kvpress",
            yticks=[0.5, 1, 2, 4, 8, 16],
            yticklabels=["0.5", "1", "2", "4", "8", "16"],
        )
        axes.minorticks_off()
        axes.spines["bottom"].set_bounds(sizes[0], sizes[-1])
        axes.axhline(1, color=GREY, linewidth=0.8, zorder=0)
        axes.label_outer()
    return figure


def _apart(heights: Mapping[str, float], factor: float) -> dict[str, float]:
    """The heights of labels on a logarithmic axis, moved up until each is `factor` above the one below."""
    placed: dict[str, float] = {}
    lowest = 0.0
    for name, height in sorted(heights.items(), key=lambda each: each[1]):
        placed[name] = lowest = max(height, lowest * factor)
    return placed


def _panels(names: Sequence[str], widths: Sequence[float]) -> tuple[Figure, Sequence[Axes]]:
    """A figure with the names down its left side, the last one on top, and panels of these widths."""
    figure = Figure(figsize=(WIDTH, 1.0 + 0.24 * len(names)))
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(-0.6, len(names) + 0.3)
    for label, name in zip(panels[0].get_yticklabels(), names, strict=True):
        label.set(color=colour_of(name) if name.partition("+")[0] in PAPERS else INK)
        label.set(weight="bold" if name in PAPERS else "normal")
    for axes in panels:
        axes.spines["left"].set_visible(False)
    return figure, panels


def _dots(
    axes: Axes,
    names: Sequence[str],
    labels: Sequence[str],
    values: Sequence[Sequence[float]],
    label: str,
    ticks: Sequence[float],
    intervals: Sequence[Sequence[tuple[float, float]]] | None = None,
) -> None:
    """A row of dots for each method, darker from one label to the next, with their intervals. The labels are
    above the dots of one row.
    """
    shades = SHADES[-len(labels) :]
    for height, (name, row) in enumerate(zip(names, values, strict=True)):
        axes.plot([min(row), max(row)], [height] * 2, color=FAINT, linewidth=1, zorder=1)
        for place, (value, shade) in enumerate(zip(row, shades, strict=True)):
            colour = tint(colour_of(name), shade)
            if intervals:
                axes.hlines(height, *intervals[height][place], colors=[colour], linewidth=2.2, zorder=2)
            axes.plot(value, height, "o", color=colour, zorder=3)
    axes.set(xscale="log", xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks], xlabel=label)
    axes.minorticks_off()
    # the first row whose dots are far enough apart for words
    labelled = next(
        height
        for height, row in reversed(list(enumerate(values)))
        if all(after / before > 1.3 for before, after in pairwise(row))
    )
    for said, value in zip(labels, values[labelled], strict=True):
        axes.text(value, labelled + 0.5, said, color=GREY, ha="center", va="center", size=7)


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
