"""The interactive figures, wherever a page has one.

A figure has a page of its own, and `<!-- figure: keys -->` puts it into any
other page or lesson. It loads its scripts when it comes near the window, so
a page costs a few hundred bytes. Without scripts its words stay.
"""

import html
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from docs_build import idea
from docs_build.entries import ROOT

ASSETS = "figures/assets"
SHARED = ("mathematics.js", "drawing.js")


class Figure(NamedTuple):
    """A figure: what a reader does with it, what it says at its start, and the numbers that it is given.

    Args: files, scripts that it needs beside its own and the shared ones.
    """

    does: str
    told: str
    given: Callable[[], dict[str, Any]] = dict
    files: tuple[str, ...] = ()


def _twelve() -> dict[str, Any]:
    return {"keys": idea.KEYS.tolist(), "queries": idea.QUERIES.tolist()}


def _four_heads() -> dict[str, Any]:
    """The twelve keys, in another order in each head, and a direction for their queries."""
    heads = [np.roll(idea.KEYS, 3 * head, axis=0).tolist() for head in range(4)]
    return {"heads": heads, "query": [-0.6, 0.8]}


def _two_heads() -> dict[str, Any]:
    return {"heads": [np.round(keys, 3).tolist() for keys in idea.two_heads()]}


FIGURES = {
    "survivors": Figure(
        "Move the budget and see which tokens of a real prompt each method keeps.",
        "With 100 tokens a head: expected_attention keeps 31 % of the needle; gvote keeps 60 % of the "
        "needle; keydiff keeps 35 % of the needle; lagkv keeps 24 % of the needle.",
        files=("survivors.data.js",),
    ),
    "keys": Figure(
        "Move a key and see the scores of KeyDiff and LagKV change.",
        "KeyDiff evicts 1, 6, 7; LagKV evicts 1, 3, 6.",
    ),
    "moments": Figure(
        "Move the query and see how much of the error MomentKV's correction leaves.",
        "The correction leaves 18 % of the error.",
    ),
    "received": Figure(
        "Read a text token by token and see which tokens stay by the attention that they get.",
        "After 8 tokens 0, 1, 2, 5, 6 and 7 stay. Token 4 went last, with 0.60. Read at once, the same "
        "tokens stay.",
        _twelve,
    ),
    "heads": Figure(
        "Divide a budget among four heads and see how much attention stays.",
        "With 3 tokens for each head, 79.3 % of the attention stays. Shared, the heads keep 1, 2, 3 and 6 "
        "tokens, and 83.6 % stays.",
        _four_heads,
    ),
    "pages": Figure(
        "Evict tokens step by step and see when a page is free.",
        "By KeyDiff's scores, the heads keep 6 and 6 of 12 tokens. Left where they are, they free 0 of 3 "
        "pages; moved together, 1 of 3 pages. The block table has 3 entries that count.",
        _two_heads,
    ),
}


def files(name: str) -> tuple[str, ...]:
    """The scripts of a figure, in the order in which they are loaded."""
    return (*SHARED, *FIGURES[name].files, f"{name}.js")


def title(name: str) -> str:
    """The title of a figure's page."""
    text = (ROOT / "docs" / "figures" / f"{name}.md").read_text(encoding="utf-8")
    return next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def markup(name: str) -> str:
    """The element that the figure's script fills; its words are what a page without scripts shows."""
    figure = FIGURES[name]
    given = figure.given()
    data = f" data-given='{json.dumps(given, separators=(',', ':'))}'" if given else ""
    words = f"The figure moves with scripts. At its start it says: {figure.told}"
    return (
        f'<div id="figure-{name}" class="figure" data-files="{" ".join(files(name))}"{data} markdown="0">'
        f"<p>{html.escape(words)}</p></div>"
    )
