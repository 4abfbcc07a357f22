"""Writes the demo's result as one HTML file that asks the network for nothing."""

from __future__ import annotations

import base64
import io
import os
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from evictionary.evaluation.demo import Picture, Result

KEPT_COLOUR = "#2f7fc1"
NEEDLE_COLOUR = "#e0662b"
TEXT_COLOUR = "#8a8a8a"  # readable on a light page and on a dark one


def write(result: Result, path: Path) -> None:
    """Write the report to `path`, completely or not at all."""
    environment = Environment(loader=PackageLoader("evictionary"), autoescape=select_autoescape())
    panels = [
        {"label": label, "image": survival_image(group), "removed": ", ".join(picture.asked for picture in group)}
        for label, group in ((label, list(group)) for label, group in groupby(result.pictures, key=lambda each: each.label))
    ]
    rows = [row.summary() for row in result.rows]
    page = environment.get_template("report.html").render(result=result, rows=rows, panels=panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)


def survival_image(pictures: list[Picture]) -> str:
    """The figure as an SVG in a data URI; the masks in it stay one pixel for each cell, so it is small."""
    buffer = io.BytesIO()
    survival_figure(pictures).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def survival_figure(pictures: list[Picture]) -> Figure:
    """One picture for each ratio, side by side: x = position, y = layer and head, coloured = kept."""
    figure = Figure(figsize=(4.2 * len(pictures), 3.0), dpi=110, layout="constrained")
    figure.patch.set_alpha(0)
    for index, picture in enumerate(pictures):
        axes = figure.add_subplot(1, len(pictures), index + 1)
        axes.patch.set_alpha(0)
        rows, length = picture.kept.shape
        colours = ListedColormap(["#00000000", KEPT_COLOUR])
        axes.imshow(picture.kept, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="none")
        axes.axvspan(picture.needle[0] - 0.5, picture.needle[1] - 0.5, color=NEEDLE_COLOUR, alpha=0.35, linewidth=0)
        axes.plot(sum(picture.needle) / 2, -0.02 * rows, marker="v", color=NEEDLE_COLOUR, clip_on=False, markersize=6)
        axes.set_xlim(-0.5, length - 0.5)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_title(f"removed: {picture.asked}", color=TEXT_COLOUR, fontsize=10, pad=10)
        axes.set_xlabel("position in the text", color=TEXT_COLOUR, fontsize=9)
        step = picture.heads * 5
        axes.set_yticks(range(0, rows, step), [str(row // picture.heads) for row in range(0, rows, step)])
        axes.set_ylabel("layer (each with its heads)", color=TEXT_COLOUR, fontsize=9)
        axes.tick_params(colors=TEXT_COLOUR, labelsize=8)
        for spine in axes.spines.values():
            spine.set_color(TEXT_COLOUR)
    return figure
