"""Pages from templates, with the pictures inside: a page loads nothing from the network."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, PackageLoader, StrictUndefined, select_autoescape
from matplotlib.figure import Figure


def render(template: str, **values: Any) -> str:
    """Render a file of evictionary/templates with `values`."""
    environment = Environment(
        loader=PackageLoader("evictionary"), autoescape=select_autoescape(["html"]), trim_blocks=True
    )
    environment.filters |= {
        "short": "{:.3g}".format,
        "end": lambda end: "none" if end is None else f"{end:.3g}",
        "range": _range,
        "interval": interval,
    }
    return environment.get_template(template).render(**values)


def markdown(template: Path, filters: Mapping[str, Any] | None = None, **content: Any) -> str:
    """A Markdown page from a template, which may name nothing but `content`."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= filters or {}
    return environment.get_template(template.name).render(**content)


def interval(number: Mapping[str, Any]) -> str:
    """'0.12 to 0.34', the interval of a number with `low` and `high`, which are None if there are too few
    texts for one.
    """
    return "no interval" if number["low"] is None else f"{number['low']:.3g} to {number['high']:.3g}"


def _range(values: Mapping[str, float]) -> str:
    """'0.2 (code) to 0.7 (chat)', or a dash for none."""
    ends = sorted(values, key=lambda name: values[name])
    return f"{values[ends[0]]:.3g} ({ends[0]}) to {values[ends[-1]]:.3g} ({ends[-1]})" if ends else "-"


def drawn(figure: Figure, kind: str) -> bytes:
    """The figure as the bytes of a "png" or "svg" file."""
    buffer = io.BytesIO()
    # a fixed salt and no date: the same results give the same file; text stays text, which is small and can
    # be searched
    with matplotlib.rc_context({"svg.hashsalt": "evictionary", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def inline(svg: bytes) -> str:
    """An SVG as a data URL, for the src of an image."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


def short_name(path: str) -> str:
    """A model's short name: the last part of a path or of a hub name."""
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]
