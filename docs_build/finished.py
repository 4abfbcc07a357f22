"""Makes a built site smaller, and its search better, without a change that a reader sees:
`python -m docs_build.finished build/site`, the last step of `make docs`.

It works on the files of the site, whatever built them, so it needs no builder. What only Material's search
has, it looks for, and leaves alone where it is not.
"""

import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import minify_html
from PIL import Image

# How much a hit of the search counts, by its address and title: the first pattern that fits, else 1. A title
# with an id is that of a card.
BOOSTS = {
    r"which_method": 16,
    r"wild\.html#report-": 9,
    r"(coverage|kill_matrix|oracle|paging|verify)\.html ": 6,
    r"(bugs|wild)\.html |wild\.html#(what-was-found|not-judged|vllm) ": 3,
    r"decisions\.html#2-|results\.html#against-": 3,
    r"\S+ [A-Z]\w+-\w+ · ": 2,
    r"reference/api/(evicting_cache|load|methods|judge)\.": 4,
    r"methods/(\w+_equations|derivations)|claims/|reference/api/": 0.5,
    r"(bugs|decisions|errata|upstream|wild)\.": 0.5,
    r"methods/": 6,
    r"lessons/01_kv_cache\.html ": 8,
    r"lessons/\w+\.html ": 4,
    r"(faq|in_a_model|judging|ten_minutes|reference/(cli|glossary|plug_in))\.": 4,
}
# Long records, of which the search knows the title and the first paragraph alone.
RECORDS = re.compile(r"(coverage|kill_matrix|oracle)\.html")
# What no reader needs: source maps, the search's other languages, and the page for web servers, which does
# not open from a folder.
NOT_NEEDED = ("assets/**/*.map", "assets/javascripts/lunr/**/*.js", "404.html", "search/search_index.json")
# Faces of letters that no formula asks for, with the commands that would.
NOT_WRITTEN = {"Fraktur": "frak", "SansSerif": "sf", "Script": "scr", "Typewriter": "tt"}
# A script written into a page; minify_html leaves out the quotes of attributes.
SCRIPT = re.compile(r"<script>(.+?)</script>", re.DOTALL)
NAVIGATION = re.compile(r'<nav class="md-nav md-nav--primary.*?<div class="md-content"', re.DOTALL)
WORDS = re.compile(r'\s*<span class="md-ellipsis">\s*([^<]*?)\s*</span>\s*')
# The theme's settings in a page, which its program reads; two of them are paths from the page.
SETTINGS = re.compile(r"<script id=__config type=application/json>(.+?)</script>", re.DOTALL)
PATHS = ("base", "search")


def page(html: str) -> str:
    """The page in fewer bytes.

    The link to the repository does not ask its host for stars and forks. Until November 2026 the pages of the
    API named `reference.keydiff`: links to their anchors go on working. Names, whole numbers, signs and
    blanks in code need no colour, and the style of numbers in tables is shorter as a class. A drawing in HTML
    needs no namespace, and the words of the navigation no element of their own: no line of it is cut.
    """
    html = html.replace('data-md-component="source"', "")
    html = re.sub(r'<(\w+) id="evictionary\.([\w.]+)"', r'<a id="\2"></a>\g<0>', html)
    html = re.sub(r'<span class="(?:n|o|p|w|mi)">([^<]*)</span>', r"\1", html)
    html = html.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    html = NAVIGATION.sub(lambda nav: WORDS.sub(r"\1", nav[0]), html)
    html = html.replace('style="text-align: right;"', 'class="r"')
    return with_few_settings(minify_html.minify(html))


def boost(address: str, title: str) -> float:
    """How much the search counts a hit on this section."""
    hit = f"{address} {title}"
    return next((factor for pattern, factor in BOOSTS.items() if re.match(pattern, hit)), 1)


def sections(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sections of the search: of RECORDS the first paragraph alone, and each with how much it counts."""
    kept = []
    for section in found:
        if RECORDS.match(section["location"]):
            if "#" in section["location"]:
                continue
            section = section | {"text": "".join(section["text"].partition("</p>")[:2])}
        factor = boost(section["location"], section["title"])
        kept.append(section | ({"boost": factor} if factor != 1 else {}))
    return kept


def search(site: Path) -> None:
    """Leave in Material's search what readers ask for, and keep its index once: as a script, which a page
    may load from a folder too. Raises ValueError if the theme's program would not find it there.
    """
    index = site / "search" / "search_index.json"
    if not index.exists():
        return
    content = json.loads(index.read_text(encoding="utf-8"))
    content["docs"] = sections(content["docs"])
    written = _short(content)
    index.with_suffix(".js").write_text(f"var __index={written}", encoding="utf-8")
    (program,) = site.glob("assets/javascripts/bundle.*.js")
    # The theme loads the script only where the address begins with file:, and elsewhere the same as JSON.
    code, found = re.subn(
        r'location\.protocol==="file:"\?(?=[^?]{1,40}search/search_index\.js)',
        "true?",
        program.read_text(encoding="utf-8"),
    )
    if found != 1:
        raise ValueError(f"{program.name}: {found} places load the search index, wanted 1")
    program.write_text(code, encoding="utf-8")


def with_few_settings(html: str) -> str:
    """The page with the theme's settings in two parts: what is its own, and a script with all others."""
    found = SETTINGS.search(html)
    if not found:
        return html
    settings = json.loads(found[1])
    own = {name: settings.pop(name) for name in PATHS}
    adding = (
        'var settings=document.getElementById("__config");'
        f"settings.textContent=JSON.stringify(Object.assign({_short(settings)},JSON.parse(settings.textContent)))"
    )
    parts = f"<script id=__config type=application/json>{_short(own)}</script><script>{adding}</script>"
    return html.replace(found[0], parts)


def _short(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def shared(site: Path, pages: dict[Path, str]) -> dict[Path, str]:
    """The pages with a script that is on most of them in a file of its own, which runs at the same place."""
    scripts = Counter(code for html in pages.values() for code in set(SCRIPT.findall(html)))
    names = {
        code: f"assets/javascripts/shared.{number}.js"
        for number, (code, count) in enumerate(scripts.items())
        if count > len(pages) / 2
    }
    for code, name in names.items():
        (site / name).write_text(code, encoding="utf-8")

    def linked(path: Path, html: str) -> str:
        root = "../" * (len(path.relative_to(site).parts) - 1)
        return SCRIPT.sub(
            lambda found: f"<script src={root}{names[found[1]]}></script>" if found[1] in names else found[0],
            html,
        )

    return {path: linked(path, html) for path, html in pages.items()}


def drawing(svg: str) -> str:
    """The drawing with places to a hundredth of a point, and without blanks between its elements."""
    return re.sub(r">\s+<", "><", re.sub(r"([1-9]\d*\.\d\d)\d+", r"\1", svg))


def picture(path: Path) -> None:
    """A picture in the 256 colours that it needs most, where that is smaller."""
    with Image.open(path) as full:
        opaque = full.convert("RGBA").getextrema()[3] == (255, 255)
        few = full.convert("RGB" if opaque else "RGBA").quantize(256, dither=Image.Dither.NONE)
        written = io.BytesIO()
        few.save(written, "png", optimize=True)
    if written.tell() < path.stat().st_size:
        path.write_bytes(written.getvalue())


def finish(site: Path) -> None:
    """Do all of this to the site in a folder, once."""
    search(site)
    faces = (f"assets/vendor/katex/fonts/KaTeX_{face}-*" for face in NOT_WRITTEN)
    for pattern in (*NOT_NEEDED, *faces):
        for path in site.glob(pattern):
            path.unlink()
    pages = {path: page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    drawings = {path: drawing(path.read_text(encoding="utf-8")) for path in site.rglob("*.svg")}
    for path, text in (shared(site, pages) | drawings).items():
        path.write_text(text, encoding="utf-8")
    for path in site.rglob("*.png"):
        picture(path)


if __name__ == "__main__":
    finish(Path(sys.argv[1]))
