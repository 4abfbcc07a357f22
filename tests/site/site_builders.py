"""Builds the site with each builder that is installed, and compares what they make with what MkDocs makes:
`python -m tests.site.site_builders`, which is `make docs-builders`.

The pages are written once (`docs_build.written`), every builder reads the same folder and the same settings,
and `docs_build.finished` does its part to each site. A builder fails if it stops, if a page of MkDocs is
missing, or if the text of a page lacks words that it has there. What only MkDocs needs is not compared: the
theme around a page and the search.
"""

import importlib.metadata
import re
import subprocess
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from docs_build import finished, written
from docs_build.entries import ROOT

BUILDERS = {
    "mkdocs": ["build", "--quiet", "--strict"],
    "properdocs": ["build", "--quiet", "--strict"],
    "zensical": ["build", "--clean"],
}
TRIED = ROOT / "build" / "builders"
# Zensical writes its own, which is for web servers, and MkDocs' is left out.
NOT_COMPARED = {"404.html"}


class Article(HTMLParser):
    """The words of a page's article, where scripts, drawings and the links of headings do not count."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.inside = 0
        self.quiet = ""
        self.words: Counter[str] = Counter()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kinds = (dict(attrs).get("class") or "").split()
        if tag == "article":
            self.inside += 1
        elif tag in ("script", "style", "svg") or {"headerlink", "md-content__button"} & set(kinds):
            self.quiet = self.quiet or tag

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self.inside -= 1
        elif tag == self.quiet:
            self.quiet = ""

    def handle_data(self, data: str) -> None:
        if self.inside and not self.quiet:
            self.words.update(re.findall(r"\w+", data))


def built(name: str) -> Path:
    """The site as one builder makes it, in a folder of its own. Raises CalledProcessError if it stops."""
    site = TRIED / name
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    # Beside mkdocs.yml, because a builder reads nothing above the folder of its settings.
    file = ROOT / f".{name}.yml"
    own = text.replace("site_dir: build/site", f"site_dir: {site.relative_to(ROOT)}")
    file.write_text(own, encoding="utf-8")
    try:
        options = [*BUILDERS[name], "--config-file", file.name]
        subprocess.run([sys.executable, "-m", name, *options], cwd=ROOT, check=True)
    finally:
        file.unlink()
    finished.finish(site)
    return site


def articles(site: Path) -> dict[str, Counter[str]]:
    """The words of every page that a builder made of Markdown."""
    found = {
        path.relative_to(site).as_posix(): Article(path.read_text(encoding="utf-8")).words
        for path in site.rglob("*.html")
    }
    return {name: words for name, words in found.items() if name not in NOT_COMPARED}


def differences(wanted: dict[str, Counter[str]], found: dict[str, Counter[str]]) -> list[str]:
    """Pages that are missing, and the words that a page lacks."""
    missing = [f"no page {name}" for name in sorted(wanted.keys() - found.keys())]
    lacking = {name: wanted[name] - found[name] for name in sorted(wanted.keys() & found.keys())}
    return missing + [
        f"{name} lacks {', '.join(list(words)[:5])}" for name, words in lacking.items() if words
    ]


def main() -> int:
    """Try all builders; return how many of those installed make another site."""
    written.write()
    wanted: dict[str, Counter[str]] = {}
    failed = 0
    for name in BUILDERS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not installed, so not tried; `pip install {name}` installs it")
            continue
        begun = time.monotonic()
        try:
            site = built(name)
        except subprocess.CalledProcessError as error:
            print(f"{name} {version}: stopped with {error.returncode}")
            failed += 1
            continue
        found = articles(site)
        wanted = wanted or found
        unlike = differences(wanted, found)
        size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
        told = f"{len(found)} pages, {size / 1e6:.1f} MB, {time.monotonic() - begun:.0f} s"
        print("\n  ".join([f"{name} {version}: {told}, {len(unlike)} differences", *unlike[:20]]))
        failed += bool(unlike)
    return failed


if __name__ == "__main__":
    sys.exit(main())
