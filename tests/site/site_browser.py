"""Looks at the built site in a real browser:
`python -m tests.site.site_browser build/site`, part of `make docs-check`.

Each page is opened from its file at two widths. A page fails where the console has an error, where a request
fails or leaves the folder, where a formula is not typeset, where Markdown is shown as it was written, or
where the page scrolls sideways. A page with each of these faults comes first, and has to be complained of. At
the end the search is asked what readers ask (tests/site/questions.toml): from the folder, and once as a web
server gives the site, where the theme runs its search in another way.
"""

import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, TimeoutError, sync_playwright

from tests.site.site_search import QUESTIONS, wrong

WIDTHS = (1280, 390)
HEIGHT = 900
LIMIT = 15_000_000  # bytes
SECONDS = 60
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

FAULTY = """<!doctype html><meta name="viewport" content="width=device-width,initial-scale=1"><body>
<p class="arithmatex">\\(x^2\\)</p><p class="katex-error"></p><div style="width: 2000px">wide</div>
<div class="md-content">a `name`, <p>a [link](page.md#there)</p></div>
<img src="missing.png"><img src="http://localhost:9/elsewhere.png">
<script>console.error("said"); throw Error("thrown")</script>"""
FAULTS = (
    "console: said",
    "exception: ",
    "external request: ",
    "request failed: ",
    "formulas not typeset",
    "sideways",
    "picture",
    "raw Markdown",
)

LOOK = r"""
({
  formulas: document.querySelectorAll(".arithmatex").length,
  typeset: [...document.querySelectorAll(".arithmatex")].filter((one) => one.querySelector(".katex")).length,
  refused: document.querySelectorAll(".katex-error").length,
  broken: [...document.images].filter((one) => one.complete && !one.naturalWidth).map((one) => one.src),
  width: document.documentElement.scrollWidth,
  wide: [...document.querySelectorAll(".md-content *")]
    .filter((one) => one.getBoundingClientRect().right > WIDTH + 1 && one.clientWidth)
    .slice(0, 3).map((one) => one.tagName + "." + one.className),
  raw: [...document.querySelectorAll(".md-content")].map((one) => {
    const text = one.cloneNode(true);
    const other = "code, pre, .arithmatex, script, style, .headerlink";
    text.querySelectorAll(other).forEach((part) => part.remove());
    return text.textContent.match(/.{0,30}(`|\]\(|\.md#).{0,30}/g) || [];
  }).flat(),
})
"""
FOUND = """(found) => found.map((page) => [...page.querySelectorAll(".md-search-result__link")].map(
  (one) => { const address = new URL(one.href); return address.pathname + address.hash; }))"""
# Scripts that run at "load" have run once two frames are drawn.
DRAWN = (
    "document.fonts.ready.then(() => new Promise((done) => requestAnimationFrame(() => "
    "requestAnimationFrame(done))))"
)


@contextmanager
def chromium(executable: str | None = None) -> Iterator[Browser]:
    """A headless Chromium: the given one, one of NAMES on the path, or playwright's own. Raises
    FileNotFoundError without one.
    """
    with sync_playwright() as playwright:
        path = next(
            filter(None, [executable, *map(shutil.which, NAMES)]), playwright.chromium.executable_path
        )
        if not Path(path).exists():
            raise FileNotFoundError(
                "no Chromium: install the package chromium, or run `python -m playwright install chromium`"
            )
        # Without the sandbox it starts in a container too; it opens nothing but this repository's own pages.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--allow-file-access-from-files"]
        )
        yield browser
        browser.close()


def new_page(browser: Browser, width: int, height: int = HEIGHT, scheme: Any = "light") -> Page:
    """A page in a context of its own: a phone's where it is narrow."""
    phone = width < 500
    return browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, is_mobile=phone, has_touch=phone
    ).new_page()


def watch(page: Page, allowed: tuple[str, ...], kinds: tuple[str, ...] = ("error", "assert")) -> list[str]:
    """A list that grows with what goes wrong in a page: console messages of `kinds`, requests that fail or
    are not `allowed`.
    """
    found: list[str] = []

    def requested(request: Request) -> None:
        if not request.url.startswith(allowed):
            found.append(f"external request: {request.url}")

    def failed(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page itself has given it up
            found.append(f"request failed: {request.url}: {request.failure}")

    def said(message: ConsoleMessage) -> None:
        if message.type in kinds:
            found.append(f"console: {message.text} {message.location['url']}")

    page.on("request", requested)
    page.on("requestfailed", failed)
    page.on("console", said)
    page.on("pageerror", lambda error: found.append(f"exception: {error}"))
    return found


def look(browser: Browser, page: Path, width: int) -> tuple[list[str], int]:
    """What is wrong with one page at one width, and the number of its formulas."""
    shown = new_page(browser, width)
    found = watch(shown, ("file:", "data:", "blob:", "about:"))
    shown.goto(page.as_uri())
    shown.evaluate(DRAWN)
    seen = shown.evaluate(LOOK.replace("WIDTH", str(width)))
    shown.context.close()
    if seen["typeset"] < seen["formulas"] or seen["refused"]:
        found.append(
            f"{seen['formulas'] - seen['typeset']} of {seen['formulas']} formulas not typeset, "
            f"{seen['refused']} refused"
        )
    # On a phone the window grows with what does not fit, so the width that was asked for counts.
    if seen["width"] > width:
        found.append(f"scrolls {seen['width'] - width} pixels sideways: {', '.join(seen['wide'])}")
    found += [f"picture without content: {source}" for source in seen["broken"]]
    found += [f"raw Markdown: {text}" for text in seen["raw"]]
    return found, seen["formulas"]


def overlooked(browser: Browser) -> list[str]:
    """The faults of a faulty page that are not complained of: none, or the check itself is broken."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "faulty.html")
        page.write_text(FAULTY, encoding="utf-8")
        found = {width: "\n".join(look(browser, page, width)[0]) for width in WIDTHS}
    return [f"{fault} at {width}" for width in WIDTHS for fault in FAULTS if fault not in found[width]]


def search(browser: Browser, site: str, question: str) -> list[list[str]]:
    """The pages that the search of the site at this address finds for a question, the best first: of each the
    addresses of its sections, or its own, without that of the site.
    """
    page = new_page(browser, WIDTHS[0])
    page.goto(f"{site}/index.html?q={quote(question)}")
    found = page.locator(".md-search-result__item")
    try:
        found.first.wait_for(state="attached", timeout=SECONDS * 1000)
    except TimeoutError:
        return []
    pages = found.evaluate_all(FOUND)
    page.context.close()
    folder = f"{urlsplit(site).path}/"
    # A page is shown before its sections, whichever was hit.
    return [[address.removeprefix(folder) for address in shown[1:] or shown] for shown in pages]


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of the site while a web server of this machine gives it."""
    with ThreadingHTTPServer(("localhost", 0), partial(Silent, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


class Silent(SimpleHTTPRequestHandler):
    """Prints no line for each request."""

    def log_message(self, *_: Any) -> None:
        pass


def unanswered(browser: Browser, site: Path) -> list[str]:
    """What the search answers wrongly: all questions from the folder, and the first from a web server."""
    found = {question: search(browser, site.as_uri(), question) for question in QUESTIONS}
    first = next(iter(QUESTIONS))
    with served(site) as address:
        online = {first: search(browser, address, first)}
    return [*wrong(found), *wrong(online)]


def main(
    site: Annotated[Path, typer.Argument(help="The folder of the built site.")],
    executable: Annotated[
        str | None, typer.Option("--chromium", help="The browser; by default chromium on the path.")
    ] = None,
    only: Annotated[str, typer.Option(help="Pages whose path contains this.")] = "",
) -> None:
    """Look at every page of the built site in a real browser."""
    site = site.resolve()
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    pages = [path for path in sorted(site.rglob("*.html")) if only in str(path.relative_to(site))]
    complaints = [] if size <= LIMIT else [f"the site has {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}"]
    formulas = 0
    with chromium(executable) as browser:
        if missed := overlooked(browser):
            sys.exit(f"the check overlooks: {missed}")
        for page, width in itertools.product(pages, WIDTHS):
            found, count = look(browser, page, width)
            complaints += [f"{page.relative_to(site)} at {width}: {one}" for one in found]
            formulas += count if width == WIDTHS[0] else 0
        complaints += unanswered(browser, site)
    told = f"{len(pages)} pages at {WIDTHS}, {formulas} formulas, {size / 1e6:.1f} MB"
    asked = f"{len(QUESTIONS)} questions to the search"
    print("\n".join([*complaints, f"{told}; {asked}; {len(complaints)} complaints"]))
    sys.exit(bool(complaints))


if __name__ == "__main__":
    typer.run(main)
