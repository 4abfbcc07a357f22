"""Shared parts of the claims' pictures: size, bands over layers, small legends, a white background for any
page.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.facecolor": "white",
}


def save(
    draw: Callable[[Figure, dict[str, Any]], None], series: dict[str, Any], path: Path, *, rows: int = 1
) -> None:
    """Draw one paper's picture as a small PNG, 12 by 3.6 inches for each row of panels."""
    with rc_context(STYLE):
        figure = Figure(figsize=(12, 3.6 * rows), dpi=80, layout="constrained")
        engine: Any = figure.get_layout_engine()
        engine.set(h_pad=0.1)
        draw(figure, series)
        figure.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})


def band(axes: Axes, lines: Sequence[Sequence[float]], label: str, **style: Any) -> None:
    """Draw a line with a band around it over 0, 1, ..: `lines` are the low, middle and high value at each
    place.
    """
    low, middle, high = lines
    places = range(len(middle))
    (line,) = axes.plot(places, middle, label=label, **style)
    axes.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def finish(axes: Axes, **named: Any) -> None:
    """Set a panel's title, labels and limits, as `Axes.set` does, and a small legend without a frame."""
    axes.set(**named)
    axes.legend(frameon=False, fontsize=8)
