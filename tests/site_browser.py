"""Looks at the built site in a real browser: `python -m tests.site_browser build/site`, part of `make docs-check`.

Each page is opened from its file at two widths. A page fails where the console has an error, where a request fails or leaves the
folder, where a formula is not typeset, where Markdown is shown as it was written, or where the page scrolls sideways. A page with
each of these faults comes first, and has to be complained of. At the end the search is asked for a word.

The browser is Debian's chromium, spoken to in the DevTools protocol over a pipe: messages in JSON, each ended by a zero byte.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

WIDTHS = (1280, 390)
HEIGHT = 900
LIMIT = 25 * 2**20
SECONDS = 60

FAULTY = """<!doctype html><meta name="viewport" content="width=device-width,initial-scale=1"><body>
<p class="arithmatex">\\(x^2\\)</p><p class="katex-error"></p><div style="width: 2000px">wide</div>
<div class="md-content">a `name`, <p>a [link](page.md#there)</p></div>
<img src="missing.png"><img src="http://localhost:9/elsewhere.png"><script>console.error("said"); throw Error("thrown")</script>"""
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

LOOK = """
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
    text.querySelectorAll("code, pre, .arithmatex, script, style, .headerlink").forEach((part) => part.remove());
    return text.textContent.match(/.{0,30}(`|\]\(|\.md#).{0,30}/g) || [];
  }).flat(),
})
"""
SEARCH = """
[...document.querySelectorAll(".md-search-result__link")].map((one) => one.textContent.trim().replace(/\\s+/g, " ").slice(0, 80))
"""


class Browser:
    """A headless chromium and the events that it reported since they were last taken."""

    def __init__(self, executable: str) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands_out, self.commands = os.pipe()
        self.answers, answers_in = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands_out} 4>&{answers_in}', "bash", executable, "--headless=new", "--no-sandbox",
             "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--allow-file-access-from-files",
             f"--user-data-dir={self.profile.name}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=(commands_out, answers_in),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands_out)
        os.close(answers_in)
        self.numbers = itertools.count(1)
        self.buffer = b""
        self.events: list[dict[str, Any]] = []
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait()
        self.profile.cleanup()

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], SECONDS)[0]:
                raise TimeoutError(f"chromium said nothing for {SECONDS} s")
            received = os.read(self.answers, 2**20)
            if not received:
                raise ConnectionError("chromium has ended")
            self.buffer += received
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are kept."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def open(self, url: str, width: int) -> list[dict[str, Any]]:
        """Open a page at a width, wait until it is loaded, and return what happened meanwhile."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=width < 500)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        # Scripts that run at "load" have run once two frames are drawn.
        frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.call("Runtime.evaluate", expression=f"document.fonts.ready.then(() => {frames})", awaitPromise=True)
        return list(self.events)


def complaints(events: list[dict[str, Any]]) -> list[str]:
    """What a page should not do: errors on the console, requests that fail or leave the folder."""
    found, requested = [], {}
    for event in events:
        method, parameters = event["method"], event.get("params", {})
        if method == "Runtime.exceptionThrown":
            found.append(f"exception: {parameters['exceptionDetails'].get('exception', {}).get('description', 'unknown')}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            found.append(f"console: {' '.join(str(one.get('value', one.get('description'))) for one in parameters['args'])}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            found.append(f"log: {parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            url = requested[parameters["requestId"]] = parameters["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                found.append(f"external request: {url}")
        elif method == "Network.loadingFailed" and not parameters.get("canceled"):
            found.append(f"request failed: {requested.get(parameters['requestId'])}: {parameters['errorText']}")
    return found


def look(browser: Browser, page: Path, width: int) -> list[str]:
    """What is wrong with one page at one width."""
    found = complaints(browser.open(page.as_uri(), width))
    seen = browser.evaluate(LOOK.replace("WIDTH", str(width)))
    if seen["typeset"] < seen["formulas"] or seen["refused"]:
        found.append(f"{seen['formulas'] - seen['typeset']} of {seen['formulas']} formulas not typeset, {seen['refused']} refused")
    # On a phone the window grows with what does not fit, so the width that was asked for counts.
    if seen["width"] > width:
        found.append(f"scrolls {seen['width'] - width} pixels sideways: {', '.join(seen['wide'])}")
    found += [f"picture without content: {source}" for source in seen["broken"]]
    found += [f"raw Markdown: {text}" for text in seen["raw"]]
    return found


def overlooked(browser: Browser) -> list[str]:
    """The faults of a faulty page that are not complained of: none, or the check itself is broken."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "faulty.html")
        page.write_text(FAULTY, encoding="utf-8")
        found = {width: "\n".join(look(browser, page, width)) for width in WIDTHS}
    return [f"{fault} at {width}" for width in WIDTHS for fault in FAULTS if fault not in found[width]]


def search(browser: Browser, site: Path, word: str) -> list[str]:
    """The titles that the search of the site finds for a word."""
    events = browser.open(f"{(site / 'index.html').as_uri()}?q={word}", WIDTHS[0])
    if complaints(events):
        raise RuntimeError(f"search: {complaints(events)}")
    deadline = time.monotonic() + SECONDS
    while not (found := browser.evaluate(SEARCH)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Look at every page of the built site in a real browser.")
    parser.add_argument("site", type=Path, help="the folder of the built site")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser (default: chromium on the path)")
    parser.add_argument("--only", default="", help="pages whose path contains this")
    arguments = parser.parse_args()
    if not arguments.chromium:
        sys.exit("no chromium on the path: install Debian's package chromium, or give --chromium")
    site = arguments.site.resolve()
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    pages = [path for path in sorted(site.rglob("*.html")) if arguments.only in str(path.relative_to(site))]
    wrong = [] if size <= LIMIT else [f"the site has {size / 2**20:.1f} MiB, more than {LIMIT / 2**20:.0f}"]
    formulas = 0
    with Browser(arguments.chromium) as browser:
        if missed := overlooked(browser):
            sys.exit(f"the check overlooks: {missed}")
        for page, width in itertools.product(pages, WIDTHS):
            wrong += [f"{page.relative_to(site)} at {width}: {one}" for one in look(browser, page, width)]
            formulas += browser.evaluate("document.querySelectorAll('.arithmatex').length") if width == WIDTHS[0] else 0
        found = search(browser, site, "Jensen")
        if not found:
            wrong.append("the search does not find Jensen")
    print("\n".join(wrong))
    print(
        f"{len(pages)} pages at {WIDTHS}, {formulas} formulas, {size / 2**20:.1f} MiB; Jensen: {found[:3]}; {len(wrong)} complaints"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
