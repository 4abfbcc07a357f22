"""Writes the site's pages to build/docs, as plain Markdown that any builder of sites can read:
`python -m docs_build.written`, the first half of `make docs`.

A page of docs/ has markers and ids, and the rest is made from the code: the coverage, the API, the
charts, the lessons. Here markers are filled, ids become links, and what is made is a file like any other. So
a builder needs nothing of this project but a folder.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import yaml

from docs_build import charts, figures, pages
from docs_build.entries import ROOT
from tutorials.build import LessonError, built, heading, is_built, lessons, moved

OUTPUT = ROOT / "build" / "docs"
# Measurements line by line, and what pages are made of, are in the repository and not on the site.
LEFT_OUT = {".xz", ".json", ".toml"}
# Pages whose tables need the width of the navigation, or of their own contents where these are a table too,
# with the style sheet's class for their columns.
WIDE = {
    "coverage.md": "coverage",
    "kill_matrix.md": "kills",
    **dict.fromkeys(
        ("study.md", "claims/index.md", *(f"claims/{name}.md" for name in pages.PAPERS)), "measured"
    ),
}
# Records for maintainers, and what another page says again: a reader's search should not find them. Of three
# more, docs_build/finished.py leaves the title and the first paragraph in the search.
NOT_SEARCHED = re.compile(
    r"(changelog|four_laws|claims/index)\.md|classroom/(class|mistakes|styles)\.md|reference/api/optimized/"
)


def page(uri: str, source: str) -> str:
    """A page as a builder reads it: its settings, and its text with markers filled and links added."""
    head, text = _parts(source)
    text = pages.linked(uri, pages.filled(uri, text))
    if uri in WIDE:
        head["hide"] = ["toc" if WIDE[uri] in ("coverage", "kills") else "navigation"]
        title, text = text.split("\n", 1)
        text = f'{title}\n\n<div class="wide {WIDE[uri]}" markdown>\n{text}\n</div>\n'
    if NOT_SEARCHED.match(uri):
        head["search"] = {"exclude": True}
    return f"---\n{yaml.safe_dump(head)}---\n{text}" if head else text


def _parts(source: str) -> tuple[dict[str, Any], str]:
    """The settings above a page's text, and the text."""
    settings = re.match(r"---\n(.*?)^---\n", source, re.DOTALL | re.MULTILINE)
    return (yaml.safe_load(settings[1]), source[settings.end() :]) if settings else ({}, source)


def contents() -> Iterator[tuple[str, str | bytes]]:
    """Every file of the site's source by its path there: text of pages, bytes of all else."""
    docs = ROOT / "docs"
    for path in sorted(one for one in docs.rglob("*") if one.is_file() and one.suffix not in LEFT_OUT):
        yield path.relative_to(docs).as_posix(), path.read_bytes()
    yield "coverage.md", pages.coverage()
    yield from pages.api_pages().items()
    for name, picture in figures.strips(figures.stored()).items():
        yield f"images/kept_{name}.png", picture
    for name, chart in charts.CHARTS.items():
        yield f"images/results_{name}.svg", chart.svg()
    for folder in lesson_folders():
        for path in sorted(folder.rglob("*.*")):
            yield f"lessons/{path.relative_to(folder).as_posix()}", path.read_bytes()
    for name, lesson in moved().items():
        yield f"lessons/{name}.html", leading_to(lesson)
        yield f"lessons/{name}.ipynb", notebook_leading_to(lesson)


def leading_to(lesson: Path) -> str:
    """The page at an earlier address of a lesson: it leads to the lesson, and to the same place in it."""
    address, title = f"{lesson.stem}.html", heading(lesson)
    lines = (
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f'<title>{title}</title><link rel="canonical" href="{address}">',
        f'<script>location.replace("{address}" + location.hash)</script>',
        f'<noscript><meta http-equiv="refresh" content="0; url={address}"></noscript>',
        f'<p>This lesson has another number now: <a href="{address}">{title}</a>.</p></html>',
    )
    return "\n".join(lines)


def notebook_leading_to(lesson: Path) -> str:
    """The notebook at an earlier address of a lesson: it says where the lesson is."""
    text = f"This lesson has another number now: [{heading(lesson)}]({lesson.stem}.ipynb)."
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id=lesson.stem)])
    return str(nbformat.writes(notebook)) + "\n"


def lesson_folders() -> list[Path]:
    """The folder of each lesson, with page, notebook and pictures; changed lessons are run, which takes a
    while, and a line names each. Raises LessonError.
    """
    changed = [lesson for lesson in lessons() if not is_built(lesson)]
    for number, lesson in enumerate(changed, 1):
        print(f"running lesson {lesson.stem} ({number} of {len(changed)})", flush=True)
        built(lesson)
    return [built(lesson) for lesson in lessons()]


def write(output: Path = OUTPUT) -> None:
    """Write what has changed, and remove what is no longer made: a server that watches the folder then builds
    only for a reason.
    """
    made = set()
    for uri, content in contents():
        if uri.endswith(".md"):
            content = page(uri, content if isinstance(content, str) else content.decode("utf-8"))
        new = content if isinstance(content, bytes) else content.encode("utf-8")
        path = output / uri
        made.add(path)
        if not path.exists() or path.read_bytes() != new:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(new)
    for path in output.rglob("*"):
        if path.is_file() and path not in made:
            path.unlink()


if __name__ == "__main__":
    try:
        write()
    except LessonError as error:
        sys.exit(str(error))
