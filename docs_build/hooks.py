"""What MkDocs and ProperDocs call while they build the site. Its pages are in build/docs by then
(`docs_build.written`), and `docs_build.finished` does the rest to what was built.
"""

import re
from typing import Any

from docs_build import written
from docs_build.entries import ROOT


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Only a page that a reader can edit has a link to do so."""
    if not (ROOT / "docs" / page.file.src_uri).exists():
        page.edit_url = None


def on_page_content(html: str, **_: Any) -> str:
    """Formulas, code in tabs, laws and mistakes stay out of the search."""
    return re.sub(r'class="(?:arithmatex|failure|success|tabbed-block)"', r"\g<0> data-search-exclude", html)


def on_serve(server: Any, config: Any, **_: Any) -> None:
    """While you write: the pages are written again, and then built, when what they are made of changes."""
    for folder in ("docs", "tutorials"):
        server.watch(str(ROOT / folder))
    config["plugins"].events["pre_build"].append(lambda **_: written.write())
