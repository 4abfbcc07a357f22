"""Hooks that mkdocs calls while it builds the site:
they add generated pages and fill in markers and links.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from docs_build import charts, figures, pages
from docs_build.entries import ROOT
from tutorials.build import LessonError, built, heading, is_built, lessons, moved

# Pages whose tables need the width of the navigation, with the style sheet's class for their columns.
WIDE = {
    "coverage.md": "coverage",
    "kill_matrix.md": "kills",
    **dict.fromkeys(
        ("study.md", "claims/index.md", *(f"claims/{name}.md" for name in pages.PAPERS)), "measured"
    ),
}
# Records for maintainers, and what another page says again: a reader's search should not find them.
NOT_SEARCHED = re.compile(
    r"(changelog|coverage|kill_matrix|oracle|four_laws|claims/index)\.md|classroom/(class|mistakes|styles)\.md|reference/api/optimized/"
)

# How much a hit of the search counts, by its address and title: the first pattern that fits, else 1. A title
# with an id is that of a card.
BOOSTS = {
    r"which_method": 16,
    r"\S+ [A-Z]\w+-\w+ · ": 2,
    r"methods/(\w+_equations|derivations)|claims/|reference/api/": 0.5,
    r"(bugs|decisions|errata|upstream|wild)\.": 0.5,
    r"methods/": 6,
    r"lessons/\w+\.html ": 4,
    r"(faq|in_a_model|judging|ten_minutes|reference/(cli|glossary|plug_in))\.": 4,
}

log = logging.getLogger("mkdocs.hooks.lessons")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the coverage page, the pictures of methods and results,
    and a page for each module (the API) and each lesson.
    """
    made = {
        "coverage.md": pages.coverage(),
        **pages.api_pages(),
        **{f"images/kept_{name}.png": picture for name, picture in figures.strips(figures.stored()).items()},
        **{f"images/results_{name}.svg": chart.svg() for name, chart in charts.CHARTS.items()},
    }
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    for folder in lesson_folders():
        for path in sorted(folder.rglob("*.*")):
            files.append(
                File.generated(
                    config, f"lessons/{path.relative_to(folder).as_posix()}", abs_src_path=str(path)
                )
            )
    return files


def lesson_folders() -> list[Path]:
    """The folder of each lesson, with page, notebook and
    pictures; changed lessons are run, and the log names them.
    """
    changed = [lesson for lesson in lessons() if not is_built(lesson)]
    try:
        for number, lesson in enumerate(changed, 1):
            log.info("running lesson %s (%s of %s)", lesson.stem, number, len(changed))
            built(lesson)
        return [built(lesson) for lesson in lessons()]
    except LessonError as error:
        raise PluginError(str(error)) from None


def on_serve(server: Any, **_: Any) -> None:
    """Build the site again when a lesson changes."""
    server.watch(str(ROOT / "tutorials"))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill markers, then link ids, tests and files."""
    uri = page.file.src_uri
    if uri in WIDE:
        page.meta["hide"] = ["navigation"]
    if NOT_SEARCHED.match(uri):
        page.meta["search"] = {"exclude": True}
    return pages.linked(uri, pages.filled(uri, markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make code smaller by the spans of names, signs and blanks, which need no colour.

    Formulas, code in tabs, laws and mistakes stay out of the search.
    """
    if page.file.src_uri in WIDE:
        html = f'<div class="wide {WIDE[page.file.src_uri]}">{html}</div>'
    # Until November 2026 the pages of the API named `reference.keydiff`: links to their anchors go on
    # working.
    html = re.sub(r'<(\w+) id="evictionary\.([\w.]+)"', r'<a id="\2"></a>\g<0>', html)
    html = re.sub(r'class="(?:arithmatex|failure|success|tabbed-block)"', r"\g<0> data-search-exclude", html)
    return re.sub(r'<span class="(?:n|o|p|w)">([^<]*)</span>', r"\1", html)


def on_post_page(output: str, **_: Any) -> str:
    """Keep the link to the repository from asking its host for stars and forks, leave out the blanks around
    the article, and write the style of numbers in its tables as a class, which is shorter.
    """
    before, article, after = re.split(r"(<article.*</article>)", output, maxsplit=1, flags=re.DOTALL)
    before, after = (re.sub(r"\s*\n\s*", "\n", part) for part in (before, after))
    return "".join(
        [
            before.replace('data-md-component="source"', ""),
            article.replace('style="text-align: right;"', 'class="r"'),
            after,
        ]
    )


def boost(address: str, title: str) -> float:
    """How much the search counts a hit on this section."""
    hit = f"{address} {title}"
    return next((factor for pattern, factor in BOOSTS.items() if re.match(pattern, hit)), 1)


def keep_addresses(folder: Path) -> None:
    """Write a page and a notebook at each earlier address of a lesson, in the site's folder of lessons.

    The page leads to the lesson, and to the same place in it. The notebook is that of the lesson.
    """
    for name, lesson in moved().items():
        page, title = f"{lesson.stem}.html", heading(lesson)
        lines = (
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            f'<title>{title}</title><link rel="canonical" href="{page}">',
            f'<script>location.replace("{page}" + location.hash)</script>',
            f'<noscript><meta http-equiv="refresh" content="0; url={page}"></noscript>',
            f'<p>This lesson has another number now: <a href="{page}">{title}</a>.</p></html>',
        )
        (folder / f"{name}.html").write_text("\n".join(lines), encoding="utf-8")
        shutil.copyfile(folder / f"{lesson.stem}.ipynb", folder / f"{name}.ipynb")


def on_post_build(config: MkDocsConfig) -> None:
    """Keep earlier addresses. Tell the search how much each section counts.
    Leave out what no reader needs: source maps, the search's other languages,
    and the page for web servers, which does not open from a folder.
    """
    site = Path(config.site_dir)
    keep_addresses(site / "lessons")
    index = site / "search" / "search_index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    for section in content["docs"]:
        section["boost"] = boost(section["location"], section["title"])
    index.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
    for path in [
        *site.glob("assets/**/*.map"),
        *site.glob("assets/javascripts/lunr/**/*.js"),
        site / "404.html",
    ]:
        path.unlink()
