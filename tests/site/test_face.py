"""The colours of the site can be read: the style sheet's pairs of a text and its ground, and the colours of
the charts, on the light page and on the dark one.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from docs_build import charts, figures

DOCS = Path(__file__).parents[2] / "docs"
STYLE = (DOCS / "stylesheets" / "face.css").read_text(encoding="utf-8")
SCHEMES = {
    scheme: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for scheme, block in re.findall(
        r'^\[data-md-color-scheme="(\w+)"\] \{(.*?)^\}', STYLE, re.DOTALL | re.MULTILINE
    )
}
# A text and what it is on, as the theme uses them.
PAIRS = [
    *(
        (f"md-{text}", "md-default-bg-color")
        for text in ("default-fg-color", "default-fg-color--light", "typeset-color", "typeset-a-color")
    ),
    ("md-accent-fg-color", "md-default-bg-color"),
    ("goes", "md-default-bg-color"),
    ("md-typeset-color", "stays"),
    ("md-primary-bg-color", "md-primary-fg-color"),
    ("md-primary-bg-color--light", "md-primary-fg-color"),
    ("md-footer-fg-color--light", "md-footer-bg-color--dark"),
    *(
        (f"md-code-{name}", "md-code-bg-color")
        for name in (
            "fg-color",
            "hl-comment-color",
            "hl-function-color",
            "hl-operator-color",
            "hl-punctuation-color",
        )
    ),
]


def luminance(colour: Sequence[float]) -> float:
    """The relative luminance of WCAG 2.2."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """The contrast of WCAG 2.2, from 1 to 21; AA asks for 4.5 in a text and 3 in a large one or a drawing."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_of_known_pairs() -> None:
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert contrast(to_rgb("#777777"), (1, 1, 1)) == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_a_text_can_be_read_on_its_ground(scheme: str) -> None:
    colours = SCHEMES[scheme]
    inherited = {"md-footer-fg-color--light": SCHEMES["default"]["md-footer-fg-color--light"]}
    named = inherited | colours
    low = {pair: contrast(*(to_rgb(named[one]) for one in pair)) for pair in PAIRS}
    assert {pair: round(value, 2) for pair, value in low.items() if value < 4.5} == {}


def in_the_dark(colour: Sequence[float]) -> np.ndarray:
    """What the style sheet makes of a picture's colour on the dark page: `invert(1) hue-rotate(180deg)`, by
    the matrix of the filter effects of CSS, and `mix-blend-mode: screen`.
    """
    grey = np.array([0.213, 0.715, 0.072])
    turned = (2 * np.tile(grey, (3, 1)) - np.eye(3)) @ (1 - np.array(colour))
    ground = np.array(to_rgb(SCHEMES["slate"]["md-default-bg-color"]))
    return 1 - (1 - np.clip(turned, 0, 1)) * (1 - ground)


COLOURS = {**charts.PAPERS, "grey": charts.GREY, "ink": charts.INK}


@pytest.mark.parametrize("name", COLOURS)
def test_a_colour_of_the_charts_can_be_read_in_the_light_and_in_the_dark(name: str) -> None:
    colour = to_rgb(COLOURS[name])
    light, dark = (to_rgb(SCHEMES[scheme]["md-default-bg-color"]) for scheme in ("default", "slate"))
    assert contrast(np.multiply(colour, light), light) >= 4.5  # mix-blend-mode: multiply
    assert contrast(in_the_dark(colour), dark) >= 4.5


def test_the_five_papers_have_a_colour_each_and_all_else_is_grey() -> None:
    assert len(set(charts.PAPERS.values())) == 5
    assert charts.colour_of("keydiff+ada_kv") == charts.colour_of("keydiff") == charts.PAPERS["keydiff"]
    assert charts.colour_of("snapkv") == charts.colour_of("random_protected") == charts.GREY
    shown = charts.CHARTS["speed"].svg().decode()
    assert all(colour in shown for colour in (*charts.PAPERS.values(), charts.GREY))


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_chart_has_words_beside_what_they_name_and_no_legend(name: str) -> None:
    chart = charts.CHARTS[name]
    drawn = chart.draw(chart.data)
    assert not drawn.legends and not any(axes.get_legend() for axes in drawn.axes)


def test_a_final_of_the_study_shows_its_intervals() -> None:
    chart = charts.CHARTS["finals"]
    (axes,) = chart.draw(chart.data).axes
    shown = {tuple(line.get_segments()[0][:, 0]) for line in axes.collections}
    stored = {tuple(row["interval"]) for row in chart.data["finals"]["rows"]}
    assert shown == stored


def test_the_picture_of_the_readme_is_that_of_the_stored_data() -> None:
    drawn, stored = (
        np.asarray(Image.open(picture).convert("RGBA"), dtype=float)
        for picture in (io.BytesIO(figures.picture(figures.stored())), figures.PICTURE)
    )
    # another release of Matplotlib may set the letters elsewhere
    assert drawn.shape == stored.shape and np.abs(drawn - stored).mean() < 3


def test_no_page_has_the_colours_that_the_theme_comes_with() -> None:
    settings = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"(?:primary|accent): (\w+)", settings)) == {"custom"}
