"""Pictures of which tokens survive in each layer and head."""

from dataclasses import dataclass

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.evaluation.pages import drawn, inline
from evictionary.palette import GOES, STAYS
from evictionary.store import grouped

TEXT_COLOUR = "#8a8a8a"  # readable on a light page and on a dark one


@dataclass(frozen=True)
class Picture:
    """The tokens of one prompt that one method kept: kept [layers, H_kv, T], and the place of the number."""

    label: str
    asked: str
    kept: np.ndarray
    needle: tuple[int, int]


def survivors(cache: EvictingCache) -> np.ndarray:
    """The tokens of a batch's first row that the cache still holds, as a mask [layers, H_kv, T]."""
    masks = np.zeros(
        (len(cache.layers), cache.layers[0].lengths.shape[1], cache.get_seq_length()), dtype=bool
    )
    for mask, layer in zip(masks, cache.layers, strict=True):
        _, _, positions, filled = layer.contents()
        for head in range(len(mask)):
            mask[head, positions[0, head][filled[0, head]].cpu().numpy()] = True
    return masks


def panels(pictures: list[Picture]) -> list[dict[str, str]]:
    """For each method a label, the removed fractions, and one figure with its pictures as a data URL."""
    return [
        {
            "label": label,
            "removed": ", ".join(picture.asked for picture in own),
            "image": inline(drawn(survival_figure(own), "svg")),
        }
        for label, own in grouped((picture.label, picture) for picture in pictures).items()
    ]


def survival_figure(pictures: list[Picture]) -> Figure:
    """One picture for each ratio, side by side: x = position, y = layer and head, coloured = kept."""
    figure = Figure(figsize=(4.2 * len(pictures), 3.0), dpi=110, layout="constrained")
    figure.patch.set_alpha(0)
    for axes, picture in zip(figure.subplots(1, len(pictures), squeeze=False)[0], pictures, strict=True):
        axes.patch.set_alpha(0)
        layers, heads, length = picture.kept.shape
        rows = layers * heads
        colours = ListedColormap(["#00000000", STAYS])
        axes.imshow(
            picture.kept.reshape(rows, length),
            aspect="auto",
            cmap=colours,
            vmin=0,
            vmax=1,
            interpolation="none",
        )
        axes.axvspan(picture.needle[0] - 0.5, picture.needle[1] - 0.5, color=GOES, alpha=0.35, linewidth=0)
        axes.plot(
            sum(picture.needle) / 2,
            -0.02 * rows,
            marker="v",
            color=GOES,
            clip_on=False,
            markersize=6,
        )
        axes.set(xlim=(-0.5, length - 0.5), ylim=(rows - 0.5, -0.5))
        axes.set_title(f"removed: {picture.asked}", color=TEXT_COLOUR, fontsize=10, pad=10)
        axes.set_xlabel("position in the text", color=TEXT_COLOUR, fontsize=9)
        axes.set_ylabel("layer (each with its heads)", color=TEXT_COLOUR, fontsize=9)
        axes.set_yticks(range(0, rows, 5 * heads), [str(layer) for layer in range(0, layers, 5)])
        axes.tick_params(colors=TEXT_COLOUR, labelsize=8)
        for spine in axes.spines.values():
            spine.set_color(TEXT_COLOUR)
    return figure
