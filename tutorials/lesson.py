"""Helpers of the lessons: show a tested function, judge an exercise, draw pictures, load the model."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from IPython.display import Markdown, display
from matplotlib import colormaps

from evictionary import palette
from evictionary.source import file_of

ROOT = Path(__file__).parent.parent
BLUE, ORANGE, GREEN, GREY = palette.STAYS, palette.GOES, palette.PAPERS["lagkv"], palette.GREY

colormaps.register(palette.shades(), name="shades", force=True)
plt.rcParams.update(
    palette.style()
    | {
        "image.cmap": "shades",
        "figure.figsize": (6.4, 3.2),
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "font.size": 10,
    }
)


def show(*functions: Callable[..., Any]) -> None:
    """Show the source of functions of the project."""
    for function in functions:
        function = getattr(function, "fn", function)  # a Triton kernel wraps the function that it was made of
        file = file_of(function)
        path = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
        display(Markdown(f'```python title="{path}"\n{inspect.getsource(function).rstrip()}\n```'))


def report(check: Callable[[Any], None], attempt: Any) -> None:
    """Say whether an answer passes its check, without stopping the lesson if it does not."""
    try:
        check(attempt)
    except NotImplementedError:
        print("not yet: this function is still to be written")
    except Exception as error:
        print(f"not yet: {error or type(error).__name__}")
    else:
        print("right")


@functools.cache
def embedded() -> tuple[Any, Any]:
    """The embedded SmolLM2-135M-Instruct and its tokenizer, loaded once."""
    from evictionary.models.load import load

    return load()


def draw_kept(axes: Any, cache: Any, needle: tuple[int, int], title: str) -> None:
    """Draw which tokens each layer and KV head of a compressed
    cache kept; the needle's tokens lie between the lines.
    """
    import numpy as np

    rows = []
    for layer in cache.layers:
        _, _, positions, filled = layer.contents()
        for head in range(positions.shape[1]):
            row = np.zeros(layer.get_seq_length(), dtype=bool)
            row[positions[0, head][filled[0, head]].numpy()] = True
            rows.append(row)
    axes.imshow(np.array(rows), aspect="auto", interpolation="nearest")
    for place in needle:
        axes.axvline(place - 0.5, color=ORANGE, linewidth=1.5)
    axes.set(title=title, xlabel="position in the text (tokens)", ylabel="layer and head")
