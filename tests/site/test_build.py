"""The site is built in three steps: pages are written as plain Markdown, a
builder makes HTML of them, and what was built is made smaller. The first and
the last step are tested here; tests/site/site_builders.py tries the builders.
"""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from docs_build import finished, hooks, written
from docs_build.entries import ROOT
from tests.site.site_builders import Article, differences

BUNDLE = (
    'a;function k(){return location.protocol==="file:"?s(`${new URL("search/search_index.js",b)}`):j("x")}'
)


def test_a_page_is_written_with_its_markers_filled_its_ids_linked_and_its_settings() -> None:
    shown = written.page(
        "four_laws.md", "---\nhide:\n  - toc\n---\n# A\n\n<!-- kills: KD-8 -->\n\nSee KD-8.\n"
    )
    assert shown.startswith("---\nhide:\n- toc\nsearch:\n  exclude: true\n---\n# A\n")
    assert "[KD-8](methods/keydiff_equations.md#kd-8)" in shown and "<!--" not in shown
    assert written.page("tolerance.md", "# A\n\ntext\n") == "# A\n\ntext\n"


def test_only_what_changed_is_written_and_what_is_no_longer_made_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"index.md": "# A\n", "images/a.png": b"\x89"}
    monkeypatch.setattr(written, "contents", lambda: made.items())
    written.write(tmp_path)
    (tmp_path / "old.md").write_text("old")
    (tmp_path / "images" / "a.png").touch()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    made["index.md"] = "# B\n"
    written.write(tmp_path)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    assert {path.name for path in after} == {"index.md", "a.png"}
    assert [path.name for path in after if after[path] == before[path]] == ["a.png"]
    assert (tmp_path / "index.md").read_text(encoding="utf-8") == "# B\n"


def test_measurements_and_settings_stay_out_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "lesson_folders", list)  # running lessons takes minutes
    names = [name for name, _ in written.contents()]
    assert len(names) == len(set(names)) and {".nav.yml", "index.md", "coverage.md"} <= set(names)
    assert [name for name in names if re.search(r"\.(json|toml|xz)$", name)] == []
    assert "reference/api/reference/keydiff.md" in names and "images/results_finals.svg" in names


def test_a_page_that_is_made_by_code_has_no_link_to_edit_it() -> None:
    class Page:
        def __init__(self, uri: str) -> None:
            self.file = type("File", (), {"src_uri": uri})
            self.edit_url: str | None = "somewhere"

    written_by_hand, made = Page("index.md"), Page("coverage.md")
    for page in (written_by_hand, made):
        hooks.on_page_markdown("", page)
    assert (written_by_hand.edit_url, made.edit_url) == ("somewhere", None)


def test_formulas_and_code_in_tabs_stay_out_of_the_search() -> None:
    html = hooks.on_page_content('<p class="arithmatex">x</p><p class="other">y</p>')
    assert html == '<p class="arithmatex" data-search-exclude>x</p><p class="other">y</p>'


def test_a_finished_page_shows_the_same_in_fewer_bytes() -> None:
    html = """<!doctype html>
<html><head><title>A</title></head><body>
  <h2 id="evictionary.reference.keydiff.score">score</h2>
  <p>one  <b>two</b>
  three</p>
<pre><code><span class="n">a</span>  <span class="o">=</span> <span class="s2">"b"</span>
</code></pre><table><tr><td style="text-align: right;">1</td></tr></table></body></html>"""
    short = finished.page(html)
    assert len(short) < len(html) and "<p>one <b>two</b> three" in short
    assert "<pre><code>a  = <span class=s2>" in short and "<td class=r>1" in short
    # an address of the API that was in use until November 2026
    assert "<a id=reference.keydiff.score></a><h2 id=evictionary.reference.keydiff.score>" in short


def built(site: Path, bundle: str = BUNDLE) -> Path:
    """A small site as a builder leaves it."""
    files = {
        "search/search_index.json": json.dumps(
            {"docs": [{"location": "which_method.html", "title": "Which", "text": "ü"}]}
        ),
        "search/search_index.js": "old",
        "assets/javascripts/bundle.1.min.js": bundle,
        "assets/javascripts/bundle.1.min.js.map": "{}",
        "index.html": "<!doctype html><p>a<script>let one = 1;</script><script>let two = 2;</script>",
        "a/page.html": "<!doctype html><p>b<script>let one = 1;</script>",
        "a/other.html": "<!doctype html><p>c<script>let one = 1;</script>",
        "a.svg": '<svg>\n <path d="M 12.3456 0.0156"/>\n</svg>',
        "404.html": "",
    }
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    Image.effect_noise((64, 64), 9).convert("RGB").save(site / "a.png", compress_level=0)
    return site


def test_a_finished_site_has_its_search_once_and_its_scripts_once(tmp_path: Path) -> None:
    site = built(tmp_path)
    size = (site / "a.png").stat().st_size
    finished.finish(site)
    index = (site / "search/search_index.js").read_text(encoding="utf-8")
    assert json.loads(index.removeprefix("var __index="))["docs"] == [
        {"location": "which_method.html", "title": "Which", "text": "ü", "boost": 16}
    ]
    # the theme loads the script from a web server too, where it would ask for the JSON
    bundle = (site / "assets/javascripts/bundle.1.min.js").read_text(encoding="utf-8")
    assert bundle == BUNDLE.replace('location.protocol==="file:"', "true")
    assert [name for name in ("404.html", "search/search_index.json") if (site / name).exists()] == []
    assert not list(site.rglob("*.map"))
    (script,) = site.glob("assets/javascripts/shared.*.js")
    assert script.read_text(encoding="utf-8") == "let one = 1;"
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    address = script.relative_to(site).as_posix()
    assert f"<script src={address}></script>" in pages["index.html"] and "let two" in pages["index.html"]
    assert f"<script src=../{address}></script>" in pages["page.html"]
    assert (site / "a.svg").read_text(encoding="utf-8") == '<svg><path d="M 12.34 0.0156"/></svg>'
    assert (site / "a.png").stat().st_size < size / 2


def test_of_a_long_record_the_search_knows_title_and_first_paragraph() -> None:
    """A reader once found neither the kill matrix nor the page of the oracle."""
    found = [
        {"location": "kill_matrix.html", "title": "Kill matrix", "text": "<p>What it is.</p> <p>More.</p>"},
        {"location": "kill_matrix.html#false-alarms", "title": "False alarms", "text": "<p>An alarm.</p>"},
        {"location": "tolerance.html#a", "title": "A", "text": "<p>One.</p> <p>Two.</p>"},
    ]
    kept = {"location": "kill_matrix.html", "title": "Kill matrix", "text": "<p>What it is.</p>", "boost": 6}
    assert finished.sections(found) == [kept, found[2]]


def test_the_settings_of_a_page_are_its_own_and_those_of_all_pages() -> None:
    settings = '{"base": "..", "features": ["a"], "search": "../b.js"}'
    told = f"<script id=__config type=application/json>{settings}</script>"
    shown = finished.with_few_settings(f"<p>text{told}<p>more")
    own, adding = re.findall(r"<script[^>]*>(.*?)</script>", shown)
    assert json.loads(own) == {"base": "..", "search": "../b.js"}
    assert 'Object.assign({"features":["a"]},JSON.parse(' in adding
    assert shown.startswith("<p>text<script") and shown.endswith("<p>more")
    assert finished.with_few_settings("<p>text") == "<p>text"


def test_no_formula_asks_for_letters_that_are_left_out() -> None:
    commands = "|".join(finished.NOT_WRITTEN.values())
    asks = re.compile(rf"\\\\?(?:math(?:{commands})|text(?:{commands})|(?:{commands}))\b")
    assert asks.search(r"$\mathsf{x}$") and not asks.search(r"\mathcal{E}")
    places = (
        "docs/**/*.md",
        "tutorials/**/*.md",
        "spec_tests/*/*.toml",
        "reference/*.py",
        "docs_build/**/*.j2",
    )
    paths = [path for place in places for path in ROOT.glob(place)]
    assert len(paths) > 150
    assert [path.name for path in paths if asks.search(path.read_text(encoding="utf-8"))] == []


def test_a_theme_that_loads_its_search_in_another_way_is_complained_of(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 places load the search index, wanted 1"):
        finished.finish(built(tmp_path, bundle="nothing"))


def test_the_builders_get_the_folder_that_is_written() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"docs_dir: {written.OUTPUT.relative_to(ROOT)}\n" in settings


def words(html: str) -> dict[str, int]:
    return dict(Article(html).words)


def test_the_words_of_a_page_are_those_of_its_article() -> None:
    html = """<nav>no</nav><article><h1>A title<a class="headerlink" href="#a">no</a></h1><script>no</script>
<p>one <code>two_three</code> one<svg><text>no</text></svg></article>no"""
    assert words(html) == {"A": 1, "title": 1, "one": 2, "two_three": 1}


def test_a_page_that_is_missing_and_a_word_that_is_missing_are_differences() -> None:
    wanted = {"a.html": Article("<article>one two").words, "b.html": Article("<article>three").words}
    assert differences(wanted, wanted) == []
    assert differences(wanted, wanted | {"c.html": Article("<article>more").words}) == []
    found = {"a.html": Article("<article>one other").words}
    assert differences(wanted, found) == ["no page b.html", "a.html lacks two"]
