"""How long the pages of the built site are in a real browser, and whether their tables can be read:
`python -m tests.site.site_length build/site`, part of `make docs-check`.

A page fails where it has more than SCREENS screens of a phone while its folds are closed, where a table
neither fits nor scrolls, where a row is taller than a screen, and where a page of FOLDED shows none of its
contents on the first screen. An anchor in a closed fold has to open it, with and without scripts. A page with
each of these faults comes first, and has to be complained of.
"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from playwright.sync_api import Browser

from tests.site.site_browser import DRAWN, chromium

PHONE, DESK = (390, 844), (1440, 900)
SCREENS = 60
ANCHORS = 3
"""How many anchors of each page are asked: the first and the last in a fold, and one in the middle."""

MEASURE = """() => {
  const height = document.documentElement.scrollHeight;
  const folded = [...document.querySelectorAll("details [id]:not([id^=__])")].map((one) => one.id);
  document.querySelectorAll("details").forEach((one) => (one.open = true));
  const shown = [...document.querySelectorAll("table")].filter((one) => one.checkVisibility());
  const inside = (one) => {
    const box = one.getBoundingClientRect();
    return box.left > -2 && box.right < innerWidth + 2;
  };
  const cut = (table) => {
    for (let one = table; one !== document.body; one = one.parentElement) {
      if (inside(one)) return false;  // it fits, or what it is in scrolls
      if (one.parentElement.scrollWidth > one.parentElement.clientWidth + 1
        && getComputedStyle(one.parentElement).overflowX === "hidden") return true;
    }
    return true;
  };
  const told = (one) => one.textContent.trim().replace(/\\s+/g, " ").slice(0, 40);
  return {
    height, folded,
    cut: shown.filter(cut).map(told),
    tall: shown.flatMap((one) => [...one.rows]).filter((row) => row.clientHeight > innerHeight).map(told),
  };
}"""
SEEN = """(id) => {
  const one = document.getElementById(id), box = one.getBoundingClientRect();
  return box.bottom > 0 && box.top < innerHeight && !one.closest("details:not([open])");
}"""

FAULTY = """<!doctype html><meta name="viewport" content="width=device-width,initial-scale=1">
<body style="margin: 0"><table style="width: 3000px"><tr style="height: 60000px"><td>one row</td></tr></table>
<details ontoggle="this.open = false"><summary>more</summary><p id="there">hidden</p></details>"""
FAULTS = (" screens", "cut off: one row", "taller than a screen: one row", "#there stays closed")


def measured(browser: Browser, page: Path, size: tuple[int, int]) -> tuple[float, list[str], list[str]]:
    """The screens of a page with its folds closed, what is wrong with it, and the anchors in its folds."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, is_mobile=width < 500)
    shown = context.new_page()
    shown.goto(page.as_uri())
    shown.evaluate(DRAWN)
    seen: dict[str, Any] = shown.evaluate(MEASURE)
    context.close()
    screens = seen["height"] / height
    found = [f"a table is cut off: {told}" for told in seen["cut"]]
    found += [f"a row is taller than a screen: {told}" for told in seen["tall"]]
    if size == PHONE and screens > SCREENS:
        found.append(f"{screens:.0f} screens, more than {SCREENS}")
    return screens, found, seen["folded"]


def unopened(browser: Browser, page: Path, anchors: list[str]) -> list[str]:
    """The anchors in folds of a page, some of them, that do not lead there, with scripts or without."""
    found = []
    asked = dict.fromkeys((anchors[0], anchors[len(anchors) // 2], anchors[-1])) if anchors else {}
    for scripts, anchor in itertools.product((True, False), asked):
        context = browser.new_context(
            viewport={"width": PHONE[0], "height": PHONE[1]}, java_script_enabled=scripts
        )
        shown = context.new_page()
        shown.goto(f"{page.as_uri()}#{anchor}")
        shown.wait_for_timeout(300)
        if not shown.evaluate(SEEN, anchor):
            found.append(f"#{anchor} stays closed {'with' if scripts else 'without'} scripts")
        context.close()
    return found


def overlooked(browser: Browser) -> list[str]:
    """The faults of a faulty page that are not complained of: none, or the check itself is broken."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "faulty.html")
        page.write_text(FAULTY, encoding="utf-8")
        _, found, anchors = measured(browser, page, PHONE)
        told = "\n".join([*found, *unopened(browser, page, anchors)])
    return [fault for fault in FAULTS if fault not in told]


def main(
    site: Annotated[Path, typer.Argument(help="The folder of the built site.")],
    executable: Annotated[
        str | None, typer.Option("--chromium", help="The browser; by default chromium on the path.")
    ] = None,
    only: Annotated[str, typer.Option(help="Pages whose path contains this.")] = "",
    longest: Annotated[int, typer.Option(help="How many of the longest pages to print.")] = 12,
) -> None:
    """Measure every page of the built site on a phone and on a desk."""
    site = site.resolve()
    pages = [path for path in sorted(site.rglob("*.html")) if only in str(path.relative_to(site))]
    complaints, lengths = [], {}
    with chromium(executable) as browser:
        if missed := overlooked(browser):
            sys.exit(f"the check overlooks: {missed}")
        for page in pages:
            name = str(page.relative_to(site))
            (desk, wrong_there, _), (phone, wrong_here, anchors) = (
                measured(browser, page, size) for size in (DESK, PHONE)
            )
            lengths[name] = phone, desk
            complaints += [f"{name} at {DESK[0]}: {one}" for one in wrong_there]
            complaints += [f"{name} at {PHONE[0]}: {one}" for one in wrong_here]
            complaints += [f"{name}: {one}" for one in unopened(browser, page, anchors)]
    print("| page | screens of a phone | of a desk |\n|---|--:|--:|")
    for name in sorted(lengths, key=lengths.__getitem__, reverse=True)[:longest]:
        phone, desk = lengths[name]
        print(f"| {name} | {phone:.1f} | {desk:.1f} |")
    print("\n".join([*complaints, f"{len(pages)} pages; {len(complaints)} complaints"]))
    sys.exit(bool(complaints))


if __name__ == "__main__":
    typer.run(main)
