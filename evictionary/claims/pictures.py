"""Shared parts of the claims' pictures: size, bands over
layers, small legends, a white background for any page.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from evictionary.palette import GREY, style

STYLE: Any = style() | {"font.size": 9, "axes.titlesize": 10, "savefig.facecolor": "white"}


def save(
    draw: Callable[[Figure, dict[str, Any]], None], series: dict[str, Any], path: Path, *, rows: int = 1
) -> None:
    """Draw one paper's picture as a small PNG, 12 by 3.6 inches for each row of panels."""
    with rc_context(STYLE):
        figure = Figure(figsize=(12, 3.6 * rows), dpi=80, layout="constrained")
        engine: Any = figure.get_layout_engine()
        engine.set(h_pad=0.1)
        draw(figure, series)
        drawn = io.BytesIO()
        figure.savefig(drawn, metadata={"Software": None})
    # 48 colours are all that a reader sees, in a third of the bytes
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(48, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def by_layer(
    axes: Axes,
    lines: Mapping[str, Sequence[Sequence[float]]],
    level: float | None = None,
    **named: Any,
) -> None:
    """A panel over the layers, with a line and a band around it for each label: the low, middle and high
    value of each layer.

    A grey line marks a level; `named` is what `finish` takes.
    """
    for label, (low, middle, high) in lines.items():
        (line,) = axes.plot(middle, label=label)
        axes.fill_between(range(len(middle)), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if level is not None:
        axes.axhline(level, color=GREY, linestyle="--" if level else "-", linewidth=1)
    finish(axes, xlabel="layer", **named)


def finish(axes: Axes, **named: Any) -> None:
    """Set a panel's title, labels and limits, as `Axes.set` does, and a small legend without a frame."""
    axes.set(**named)
    axes.legend(frameon=False, fontsize=8)
