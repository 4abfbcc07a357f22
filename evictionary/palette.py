"""The colours of all pictures, on the pages, in reports and in lessons.

Petrol carries what stays and vermilion what goes. Each of the five papers has a colour, the same in every
chart, and all else is grey. Each colour has a contrast of 4.5 or more with a light page, and the site turns
its brightness round in the dark.
"""

from typing import Any

PAPERS = {
    "expected_attention": "#7a3d9a",
    "keydiff": "#0b6170",
    "lagkv": "#2c6e3f",
    "momentkv": "#b03f0a",
    "gvote": "#b02a5b",
}
GREY, INK, FAINT = "#6b7478", "#1b2b30", "#d8dad6"
STAYS, GOES = "#14707f", "#b03f0a"
# What has no paper's colour: lines in this order.
LINES = (STAYS, GOES, PAPERS["expected_attention"], PAPERS["lagkv"], PAPERS["gvote"], GREY)


def colour_of(name: str) -> str:
    """The colour of a method, or of a composition by the method that it begins with."""
    return PAPERS.get(name.partition("+")[0].partition("_protected")[0], GREY)


def style() -> dict[str, Any]:
    """Settings of Matplotlib for a picture of our own: its lines and texts have these colours, and it has
    neither a frame nor ticks in black.
    """
    from cycler import cycler

    return {
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "axes.prop_cycle": cycler(color=LINES),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "legend.frameon": False,
        "text.color": INK,
        "xtick.color": GREY,
        "ytick.color": GREY,
    }


def shades() -> Any:
    """A colour map of Matplotlib from white to what stays."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["white", STAYS])
