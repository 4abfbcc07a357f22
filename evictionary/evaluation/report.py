"""Summarises an evaluation's lines as JSON, Markdown tables, plots and one HTML page that loads nothing
from the network.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from evictionary import store
from evictionary.evaluation import tasks
from evictionary.evaluation.pages import drawn, inline, render, short_name
from evictionary.evaluation.run import FULL, label, numbers_of
from evictionary.methods.catalogue import BASELINES, protected
from evictionary.palette import FAINT, GREY, INK, PAPERS, colour_of, shades, style

Row = dict[str, Any]

MARKERS = "osD^vP*Xh<>"
STYLE = style() | {
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.titlesize": 10,
    "grid.alpha": 0.25,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


def summarise(lines: Sequence[store.Line]) -> list[Row]:
    """One row for each task, length, method and setting:
    means over the prompts, in the order of the tables.

    removed is the measured fraction of the cache's bytes that was freed. Failed measurements are counted in
    `failed` and are in no mean; if all of them failed, the means are None.
    """
    groups = store.grouped(((line["task"], line["length"], *_place(line)), line) for line in lines)
    rows = []
    for group in groups.values():
        good = [line for line in group if line["error"] is None]
        first = group[0]
        rows.append(
            {
                **{name: first[name] for name in ("task", "length", "method", "options", "ratio", "budget")},
                "label": label(first),
                "protected": protected(first["method"], first["options"]),
                "exact": _mean(line["exact"] for line in good),
                "exact_interval": wilson(sum(line["exact"] == 1 for line in good), len(good))
                if good
                else None,
                "partial": _mean(line["partial"] for line in good),
                "perplexity": _geometric_mean(good, "perplexity"),
                "needing_perplexity": _geometric_mean(good, "needing_perplexity", "needing"),
                "needing": sum(line.get("needing", 0) for line in good),
                "removed": _mean(1 - line["bytes_after"] / line["bytes_before"] for line in good),
                "tokens_kept": _mean(line["tokens_kept"] for line in good),
                "seconds": _mean(line["seconds"] for line in good),
                "prompts": len(good),
                "failed": len(group) - len(good),
                "example": next(
                    ({name: line.get(name) for name in ("seed", "expected", "answer")} for line in good), None
                ),
            }
        )
    known = list(tasks.TASKS)
    return sorted(rows, key=lambda row: (row["length"], known.index(row["task"]), *_place(row)))


def summary(lines: Sequence[store.Line]) -> dict[str, Any]:
    """The content of summary.json: the model and how it was loaded, its devices, the versions of the
    software, the failures, and the rows.
    """
    seen = {json.dumps(line["versions"], sort_keys=True): line["versions"] for line in lines}
    return {
        "model": lines[0]["model"],
        "loading": lines[0].get("loading", {}),
        "devices": sorted({line["device"] for line in lines if "device" in line}),
        "versions": list(seen.values()),
        "measurements": len(lines),
        "failures": failures(lines),
        "rows": summarise(lines),
    }


def failures(lines: Sequence[store.Line]) -> list[dict[str, Any]]:
    """Which method failed, why, and on how many prompts."""
    counts = Counter((label(line), line["error"]) for line in lines if line["error"] is not None)
    return [{"label": name, "error": error, "count": count} for (name, error), count in counts.items()]


def write(lines: Sequence[store.Line], folder: Path) -> dict[str, Any]:
    """Write summary.json, table.md, scores and heatmap as .png and .svg, and report.html into the folder;
    return the summary.
    """
    found = summary(lines)
    rows = found["rows"]
    store.put(folder / "summary.json", json.dumps(found, indent=1) + "\n")
    store.put(folder / "table.md", markdown(rows))
    images = {}
    for name, figure in (("scores", scores_figure), ("heatmap", heatmap_figure)):
        for kind in ("png", "svg"):
            # a new figure each time: a legend outside the axes shrinks the axes at every drawing
            data = drawn(figure(rows), kind)
            store.put(folder / f"{name}.{kind}", data)
        images[name] = inline(data)
    page = render(
        "evaluation.html",
        found=found,
        model=short_name(found["model"]) + numbers_of(found),
        detail=detail,
        tables=[(length, *pivot(group)) for length, group in _by_length(rows)],
        examples=[
            row | {"asked": asked(row)} for row in rows if row["example"] and row["perplexity"] is None
        ],
        doubt=doubt(rows),
        descriptions={row["task"]: tasks.TASKS[row["task"]].description for row in rows},
        prompts=sorted({row["prompts"] + row["failed"] for row in rows}),
        images=images,
    )
    store.put(folder / "report.html", page)
    return found


def pivot(rows: Sequence[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (task names, one dictionary for each method and setting) of rows of one length.

    A dictionary has label, asked ('50% removed' or '256 tokens kept'), removed,
    cells (for each task a row or None), and mean: the partial score as a mean
    over the tasks with a question, or None unless each of them has one.
    """
    names = list(dict.fromkeys(row["task"] for row in rows))
    table = []
    for _, group in groupby(sorted(rows, key=_place), key=_place):
        by_task = {row["task"]: row for row in group}
        cells = [by_task.get(name) for name in names]
        scores = [
            cell and cell["partial"]
            for name, cell in zip(names, cells, strict=True)
            if name not in tasks.GOES_ON
        ]
        any_row = next(iter(by_task.values()))
        table.append(
            {
                "label": any_row["label"],
                "asked": asked(any_row),
                "protected": any_row["protected"],
                "removed": _mean(row["removed"] for row in by_task.values() if row["removed"] is not None),
                "cells": cells,
                "mean": None if None in scores else _mean(scores),
            }
        )
    return names, table


def asked(row: Mapping[str, Any]) -> str:
    """'50% removed' or '256 tokens kept', or a dash for the full cache."""
    if row["method"] == FULL:
        return "-"
    return f"{100 * row['ratio']:g}% removed" if row["budget"] is None else f"{row['budget']} tokens kept"


def cell_text(row: Row | None) -> str:
    """'0.75 (50%)': the partial score and the share of exact answers, or the perplexity; 'failed' or a
    dash without a score.
    """
    if row is None:
        return "-"
    if row["partial"] is None:
        return "failed"
    return f"{row['partial']:.2f} ({detail(row)})" + (f", {row['failed']} failed" if row["failed"] else "")


def detail(row: Row) -> str:
    """'50%', the share of exact answers, or 'ppl 12.3', the perplexity of a text that goes on."""
    return f"{row['exact']:.0%}" if row["perplexity"] is None else f"ppl {row['perplexity']:.3g}"


def wilson(right: int, of: int) -> list[float]:
    """The 95 % interval of a share (E. B. Wilson, 1927), which holds for a few prompts too: none of five
    may be up to 43 %.
    """
    z = 1.96
    middle, spread = right + z * z / 2, z * (right * (of - right) / of + z * z / 4) ** 0.5
    return [max(0.0, (middle - spread) / (of + z * z)), min(1.0, (middle + spread) / (of + z * z))]


def doubt(rows: Sequence[Row]) -> str:
    """How far a share of exact answers can be trusted, for the cells with the fewest prompts."""
    prompts = min(row["prompts"] for row in rows)
    low, high = wilson(prompts // 2, max(prompts, 1))
    return (
        f"With {prompts} prompts in a cell, {prompts // 2} right answers may mean {low:.0%} to {high:.0%} "
        "(95 % interval)."
    )


def percent(value: float | None) -> str:
    """'50.0%', or a dash."""
    return "-" if value is None else f"{100 * value:.1f}%"


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table for each length."""
    parts = []
    for length, group in _by_length(rows):
        names, table = pivot(group)
        told = f"Partial score, and in brackets the share of exact answers or the perplexity. {doubt(group)}"
        head = ["method", "asked", "protected", "cache removed", *names, "mean"]
        body = [
            [
                row["label"],
                row["asked"],
                row["protected"],
                percent(row["removed"]),
                *map(cell_text, row["cells"]),
                number(row["mean"]),
            ]
            for row in table
        ]
        parts.append(f"## {length} tokens\n\n{told}\n\n{store.table(head, body, 'lllr')}\n")
    return "\n".join(parts)


def number(value: float | None) -> str:
    """'0.75', or a dash."""
    return "-" if value is None else f"{value:.2f}"


def scores_figure(rows: Sequence[Row]) -> Figure:
    """Partial score against the fraction of the cache removed: a panel for each task and length, a line
    for each method.
    """
    lengths = sorted({row["length"] for row in rows})
    names = [name for name in tasks.TASKS if any(row["task"] == name for row in rows)]
    labels = list(dict.fromkeys(row["label"] for row in sorted(rows, key=_place) if row["method"] != FULL))
    columns = min(3, len(names))
    deep = -(-len(names) // columns)
    figure = Figure(
        figsize=(4.1 * columns, 0.6 + 2.9 * deep * len(lengths) + 0.22 * len(labels) / columns),
        dpi=110,
        layout="constrained",
    )
    with matplotlib.rc_context(STYLE):
        grid = figure.subplots(deep * len(lengths), columns, squeeze=False, sharex=True, sharey=True)
    taken = {colour_of(name) for name in labels}
    free = [colour for colour in (*PAPERS.values(), INK) if colour not in taken]
    others = [name for name in labels if colour_of(name) == GREY]
    chosen = {name: free[place % len(free)] for place, name in enumerate(others)}
    for at, length in enumerate(lengths):
        for index in range(deep * columns):
            axes = grid[at * deep + index // columns][index % columns]
            if index >= len(names):
                axes.set_axis_off()
                continue
            here = [
                row
                for row in rows
                if (row["task"], row["length"]) == (names[index], length) and row["partial"] is not None
            ]
            for full in (row for row in here if row["method"] == FULL):
                axes.axhline(full["partial"], color=INK, linestyle="--", linewidth=1, label="full cache")
            for which, name in enumerate(labels):
                mine = sorted((row for row in here if row["label"] == name), key=lambda row: row["removed"])
                is_random = name in BASELINES
                axes.plot(
                    [100 * row["removed"] for row in mine],
                    [row["partial"] for row in mine],
                    label=name,
                    color=GREY if is_random else chosen.get(name, colour_of(name)),
                    linestyle=":" if is_random else "-",
                    marker=MARKERS[which % len(MARKERS)],
                    markersize=5,
                    linewidth=1.4,
                    alpha=0.85,
                    clip_on=False,
                )
            axes.set(
                title=names[index] if len(lengths) == 1 else f"{names[index]}, {length} tokens",
                xlabel="cache removed, % of its bytes",
                xlim=(0, 100),
                ylim=(-0.03, 1.03),
            )
            axes.tick_params(labelbottom=True, labelleft=True)
    figure.supylabel("score (partial)", fontsize=9)
    handles = {
        _short(name): handle
        for axes in figure.axes
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=max(1, int(figure.get_figwidth() / (0.9 + 0.07 * max(map(len, handles))))),
        fontsize=8,
        frameon=False,
    )
    return figure


def heatmap_figure(rows: Sequence[Row]) -> Figure:
    """Partial score of each method and setting (down) on each task (across), a panel for each length."""
    tables = [(length, *pivot(group)) for length, group in _by_length(rows)]
    labels = [
        [
            _short(row["label"]) if row["asked"] == "-" else f"{_short(row['label'])}, {row['asked']}"
            for row in table
        ]
        for _, _, table in tables
    ]
    width = 2 + sum(
        0.75 * len(names) + 0.08 * max(map(len, texts))
        for (_, names, _), texts in zip(tables, labels, strict=True)
    )
    height = 1.9 + 0.27 * max(len(table) for _, _, table in tables)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    colours = shades().with_extremes(bad=FAINT)
    grid = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (length, names, table), texts in zip(grid, tables, labels, strict=True):
        scores = [
            [np.nan if cell is None or cell["partial"] is None else cell["partial"] for cell in row["cells"]]
            for row in table
        ]
        image = axes.imshow(np.ma.masked_invalid(scores), cmap=colours, vmin=0, vmax=1, aspect="auto")
        for down, row in enumerate(scores):
            for across, score in enumerate(row):
                text = "-" if np.isnan(score) else f"{score:.2f}"
                colour = "white" if score > 0.6 else INK
                axes.text(across, down, text, ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        axes.set_yticks(range(len(table)), texts, fontsize=8)
        axes.set_title(f"{length} tokens", fontsize=10)
    figure.colorbar(image, ax=list(grid), label="score (partial)", fraction=0.05)
    return figure


def _short(name: str) -> str:
    """A label that fits into a figure: a long path is cut at the front, because its end says most."""
    return name if len(name) <= 40 else f"...{name[-37:]}"


def _by_length(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    return [(length, list(group)) for length, group in groupby(rows, key=lambda row: row["length"])]


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The sorting key: the full cache first, then the methods by name, random eviction last; weak
    compression before strong.
    """
    amount = (row["budget"] is not None, row["ratio"] if row["budget"] is None else -row["budget"])
    return (
        row["method"] in BASELINES,
        row["method"] != FULL,
        row["method"],
        json.dumps(row["options"], sort_keys=True),
        *amount,
    )


def _geometric_mean(lines: Sequence[store.Line], name: str, weight: str = "") -> float | None:
    """The perplexity of texts of one length together, each with the same weight or as many as it says;
    None without a text.
    """
    found = [line for line in lines if line.get(name) is not None]
    weights = [line.get(weight, 1) for line in found]
    return (
        float(np.exp(np.average([np.log(line[name]) for line in found], weights=weights))) if found else None
    )


def _mean(values: Any) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None
