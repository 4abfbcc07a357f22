"""What moves on the pages: figures where their subject is taught, three of them held to `reference/` here,
pictures that step through time, and symbols of a formula that say their names.
"""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_figures
from playwright.sync_api import Browser, Locator, Page
from site_browser import new_page, watch

from docs_build import idea, methods, moving, pages, steps, symbols
from docs_build.entries import ROOT, entries
from evictionary.reference import ada_kv, cache, gvote, h2o, keydiff, paging, tova
from evictionary.reference.attention import attention_logits, softmax
from evictionary.reference.selection import top_k

browser, mathematics, show = test_figures.browser, test_figures.mathematics, test_figures.show
press, numbers = test_figures.press, test_figures.numbers
on_every_screen = test_figures.on_every_screen
DOCS = ROOT / "docs"
TAUGHT = {
    "keys": {"methods/keydiff", "methods/lagkv", "lessons/02", "lessons/03"},
    "moments": {"methods/momentkv", "lessons/06", "lessons/07"},
    "survivors": {"methods/index", "lessons/01"},
    "received": {"methods/h2o", "methods/tova", "lessons/14"},
    "heads": {"methods/ada_kv", "lessons/04"},
    "pages": {"paging", "lessons/12"},
}
"""Where a figure is beside its own page; a lesson by its number."""


# where figures are


def sources() -> dict[str, str]:
    """The pages and lessons by their address on the site, as they are written."""
    found = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
    found |= {f"lessons/{path.name}": path for path in pages.lessons()}
    return {uri: path.read_text(encoding="utf-8") for uri, path in found.items()}


def embedded() -> dict[str, list[str]]:
    """The figures of each page that has one."""
    marked = {
        uri: re.findall(r"^<!-- figure: (\w+) -->$", text, re.MULTILINE) for uri, text in sources().items()
    }
    return {uri: names for uri, names in marked.items() if names}


def test_a_figure_is_where_its_subject_is_taught() -> None:
    where: dict[str, set[str]] = {name: set() for name in moving.FIGURES}
    for uri, names in embedded().items():
        assert len(names) == 1, uri  # a page has one figure, with one id
        where[names[0]].add(re.sub(r"^(lessons/\d+).*", r"\1", uri.removesuffix(".md")))
    assert {name: found - {f"figures/{name}"} for name, found in where.items()} == TAUGHT
    assert all(f"figures/{name}" in found for name, found in where.items())


def test_a_figure_costs_a_page_few_bytes_and_its_scripts_exist_once() -> None:
    for name in moving.FIGURES:
        for uri in ("methods/keydiff.md", "paging.md"):
            shown = pages.filled(uri, f"<!-- figure: {name} -->")
            assert len(shown.encode()) < 1600
            assert f"(../figures/{name}.md)" in shown or f"(figures/{name}.md)" in shown
        assert all((DOCS / moving.ASSETS / file).is_file() for file in moving.files(name))
        own = pages.filled(f"figures/{name}.md", sources()[f"figures/{name}.md"])
        assert all(f"[{file}](assets/{file})" in own for file in moving.files(name))
    assert "assets/javascripts/moving.js" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


# figures in the browser


@pytest.mark.parametrize("name", moving.FIGURES)
def test_without_scripts_a_figure_says_what_it_says_at_its_start(
    show: Callable[..., Page], browser: Browser, name: str
) -> None:
    told = show(name).locator(f"#figure-{name} .told").inner_text()
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_content(moving.markup(name))
    assert told in page.locator(f"#figure-{name}").inner_text()
    context.close()


@pytest.mark.parametrize("name", moving.FIGURES)
def test_nothing_moves_by_itself_for_who_wants_less_motion(show: Callable[..., Page], name: str) -> None:
    page = show(name)

    def seconds(motion: Any) -> set[str]:
        page.emulate_media(reduced_motion=motion)
        found = page.locator(f"#figure-{name} *").evaluate_all(
            "all => all.map((one) => getComputedStyle(one))"
            ".map((style) => style.transitionDuration + style.animationName)"
        )
        return set(found)

    assert seconds("reduce") == {"0snone"}
    assert name not in ("received", "heads", "pages") or len(seconds("no-preference")) > 1


@pytest.mark.parametrize("seed", range(8))
def test_received_attention_in_the_browser_is_that_of_reference(
    mathematics: Callable[..., Any], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    length = int(draw.integers(1, 10))
    queries, keys = draw.normal(size=(2, length, 3))
    if seed % 4 == 0:
        keys[:] = 0  # ties
    budget = int(draw.integers(1, length + 2))
    for recent, is_sum in (((budget + 1) // 2, True), (0, False)):
        wanted = steps.read(queries, keys, budget, recent, is_sum)
        got = mathematics("received", queries, keys, budget, recent, is_sum)
        for step, moment in zip(got, wanted, strict=True):
            assert step["kept"] == moment.stay and step["gone"] == sorted({*moment.there} - {*moment.stay})
            assert [token for token, weight in enumerate(step["row"]) if weight is not None] == moment.there
            row = [step["row"][token] for token in moment.there]
            np.testing.assert_allclose(row, moment.weights, rtol=1e-11)
            np.testing.assert_allclose(step["numbers"], moment.numbers, rtol=1e-11, atol=1e-15)


def test_a_text_without_evictions_has_the_scores_of_h2o_and_tova() -> None:
    queries, keys = idea.QUERIES, idea.KEYS
    one = queries[None, None], keys[None, None]
    sums, last = (steps.read(queries, keys, idea.TOKENS, 0, is_sum)[-1].numbers for is_sum in (True, False))
    np.testing.assert_allclose(sums, h2o.score(*one)[0, 0], rtol=1e-12)
    np.testing.assert_allclose(last, tova.score(*one)[0, 0], rtol=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_budgets_of_heads_in_the_browser_are_those_of_reference(
    mathematics: Callable[..., Any], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    heads, length = int(draw.integers(1, 5)), int(draw.integers(1, 9))
    scores = draw.normal(size=(heads, length))
    scores = np.round(scores) if seed % 2 else scores
    for floor in np.arange(11) / 10:
        budget = int(draw.integers(0, length + 1))
        wanted = ada_kv.select(scores[None], budget, floor_ratio=float(floor))[0]
        assert mathematics("adaSelect", scores, budget, float(floor)) == wanted.tolist()


def in_pages(length: int, table: list[int], size: int, heads: int) -> cache.PagedCache:
    """A sequence of so many tokens in pages; a key is the token's place in the text."""
    pool = np.full((max(table) + 1, size, heads, 1), np.nan)
    positions = np.zeros(pool.shape[:3], dtype=int)
    for place in range(length):
        at = table[place // size], place % size
        pool[at], positions[at] = place, place
    lengths = np.full((1, heads), length)
    return cache.PagedCache(pool, pool.copy(), positions, np.array([table]), lengths, np.array([length]))


@pytest.mark.parametrize("seed", range(8))
def test_pages_in_the_browser_are_those_of_reference(mathematics: Callable[..., Any], seed: int) -> None:
    draw = np.random.default_rng(seed)
    size, entries, heads = (int(each) for each in draw.integers(1, 5, size=3))
    length = int(draw.integers((entries - 1) * size + 1, entries * size + 1))
    table = draw.permutation(entries + 2)[:entries].tolist()
    kept = draw.random((heads, length)) < seed / 7  # none, some, all
    padded = np.zeros((1, heads, entries * size), dtype=bool)
    padded[0, :, :length] = kept
    after, freed = paging.compact_pages(in_pages(length, table, size, heads), padded)
    got = mathematics("compactPages", kept, table, size)
    assert sorted(got["freed"]) == np.flatnonzero(freed).tolist()
    for head, count in enumerate(after.lengths[0]):
        places = after.keys[table, :, head, 0].reshape(-1)[:count]
        assert got["places"][head] == [*places.astype(int), *[None] * (entries * size - count)]
    left = mathematics("leavePages", kept, table, size)
    empty = ~padded.reshape(heads, entries, size).any(axis=(0, 2))
    assert left["freed"] == [page for page, is_empty in zip(table, empty, strict=True) if is_empty]
    assert left["places"] == [
        [place if stays else None for place, stays in enumerate(row)] for row in padded[0]
    ]


def set_to(figure: Locator, name: str, value: int) -> None:
    """Move a slider with the keyboard."""
    slider = figure.get_by_role("slider", name=name)
    slider.press("Home")
    for _ in range(value - int(slider.input_value())):
        slider.press("ArrowRight")
    assert int(slider.input_value()) == value


@on_every_screen
def test_attention_is_read_token_by_token(show: Callable[..., Page], width: int, scheme: str) -> None:
    figure = show("received", width, scheme).locator("#figure-received")
    read = figure.get_by_role("slider", name="Read")

    def check(is_sum: bool = True) -> None:
        seen, budget = int(read.input_value()), int(figure.get_by_role("slider", name="Budget").input_value())
        recent = (budget + 1) // 2 if is_sum else 0
        asked, keys = idea.QUERIES[:seen], idea.KEYS[:seen]
        moments = steps.read(asked, keys, budget, recent, is_sum)
        told = figure.locator(".told").inner_text()
        assert [int(one) for one in numbers(told.partition(" stay")[0])] == [seen, *moments[-1].stay]
        if is_sum:
            at_once = np.flatnonzero(h2o.select(asked[None, None], keys[None, None], budget=budget)[0, 0])
        else:
            at_once = np.flatnonzero(top_k(tova.score(asked[None, None], keys[None, None])[0, 0], budget))
        same = at_once.tolist() == moments[-1].stay
        said = "the same tokens" if same else idea.plural("", at_once.tolist(), "").strip()
        assert f"Read at once, {said} " in told
        shares = figure.locator(".weight").evaluate_all(
            "all => all.map((one) => "
            "one.classList.contains('absent') ? -1 : Number(one.style.getPropertyValue('--share')))"
        )
        wanted = np.full((idea.TOKENS, idea.TOKENS), -1.0)
        for query, moment in enumerate(moments):
            wanted[query, moment.there] = moment.weights
        np.testing.assert_allclose(shares, wanted.ravel(), atol=5.1e-4)

    check()
    for button in ("Step forward", "Step back", "Step back"):
        figure.get_by_role("button", name=button).press("Enter")
        check()
    assert int(read.input_value()) == 7
    for name, value in (("Budget", 3), ("Read", 12)):
        set_to(figure, name, value)
        check()
    figure.get_by_role("checkbox").press("Space")
    check(is_sum=False)


@on_every_screen
def test_a_budget_is_shared_by_heads(show: Callable[..., Page], width: int, scheme: str) -> None:
    figure = show("heads", width, scheme).locator("#figure-heads")
    given = moving.FIGURES["heads"].given()

    def check(factor: float = 1) -> None:
        value = {
            each: int(figure.get_by_role("slider", name=each).input_value()) for each in ("Budget", "Floor")
        }
        lengths = [int(figure.get_by_role("slider", name=f"Head {name}").input_value()) for name in "ABCD"]
        query = np.array(given["query"])
        weights = np.stack(
            [
                softmax(attention_logits(length * query[None], np.array(keys)))[0]
                for length, keys in zip(lengths, given["heads"], strict=True)
            ]
        )
        scores = (weights * np.array([1, 1, 1, factor])[:, None])[None]
        shared = ada_kv.select(scores, value["Budget"], floor_ratio=value["Floor"] / 10)[0]
        equal = top_k(scores, value["Budget"])[0]
        stays = figure.locator(".bar").evaluate_all(
            "all => all.map((one) => one.classList.contains('stays'))"
        )
        assert stays == [*equal.ravel(), *shared.ravel()]
        budget, before, *counts, after = numbers(figure.locator(".told").inner_text())
        assert [budget, *counts] == [value["Budget"], *shared.sum(axis=1)]
        np.testing.assert_allclose(
            [before, after], [25 * (weights * mask).sum() for mask in (equal, shared)], atol=0.0501
        )

    check()
    for name, value in (("Budget", 5), ("Floor", 9), ("Head A", 3), ("Head D", 12)):
        set_to(figure, name, value)
        check()
    figure.get_by_role("checkbox").press("Space")
    check(factor=10)


@on_every_screen
def test_pages_are_freed_while_tokens_go(show: Callable[..., Page], width: int, scheme: str) -> None:
    figure = show("pages", width, scheme).locator("#figure-pages")
    scores = np.stack([keydiff.score(np.array(keys)) for keys in moving.FIGURES["pages"].given()["heads"]])
    moved, shared = figure.get_by_role("checkbox").all()

    def check() -> None:
        budget = idea.TOKENS - int(figure.get_by_role("slider", name="Evicted").input_value())
        size = int(figure.get_by_role("slider", name="Page").input_value())
        table = [2, 0, 3, 5, 1, 4][: -(-idea.TOKENS // size)]
        kept = np.zeros((1, 2, len(table) * size), dtype=bool)
        found = (
            ada_kv.select(scores[None], budget, floor_ratio=0)
            if shared.is_checked()
            else top_k(scores, budget)[None]
        )
        kept[..., : idea.TOKENS] = found
        _, freed = paging.compact_pages(in_pages(idea.TOKENS, table, size, 2), kept)
        told = figure.locator(".told").inner_text()
        empty = ~kept.reshape(2, len(table), size).any(axis=(0, 2))
        is_moved = moved.is_checked()
        free = freed.sum() if is_moved else empty.sum()
        assert numbers(told) == [
            *kept.sum(axis=-1)[0],
            idea.TOKENS,
            empty.sum(),
            len(table),
            freed.sum(),
            len(table),
            len(table) - free,
        ]
        assert figure.locator(".page.free").count() == free
        assert figure.locator(".slot.held").count() == kept.sum()

    check()
    for button in ("Step forward", "Step forward", "Step back"):
        figure.get_by_role("button", name=button).press("Enter")
        check()
    for box in (moved, shared):
        box.press("Space")
        for name, value in (("Page", 3), ("Evicted", 9), ("Evicted", 12)):
            set_to(figure, name, value)
            check()


def test_buttons_show_where_eviction_frees_a_page_and_where_sums_and_floors_matter(
    show: Callable[..., Page],
) -> None:
    figure = show("pages").locator("#figure-pages")
    assert numbers(press(figure, "Start again"))[3] == 0 < numbers(press(figure, "Moved together"))[5]
    assert numbers(press(figure, "Where nothing has to move"))[3] > 0
    figure = show("received").locator("#figure-received")
    assert "0, 1, 2, 9, 10 and 11 stay" in press(figure, "equal tokens")
    assert "would stay" in press(figure, "too early")
    figure = show("heads").locator("#figure-heads")
    gains, same, loses, saved = (
        numbers(press(figure, name)) for name in ("Where it gains", "nothing", "Where it fails", "floor")
    )
    assert (
        gains[-1] > gains[1] + 5
        and same[-1] == same[1]
        and loses[-1] < loses[1]
        and saved[-1] > loses[-1] + 5
    )


# pictures that step


def frames(stem: str) -> Any:
    return json.loads(re.sub(r"</?script[^>]*>", "", steps.element(stem)))


def tokens_of(data: Any, frame: Any) -> str:
    """The last row of a step: its tokens."""
    return "".join(data["lines"][line] for line in frame["lines"]).rpartition("<g transform=")[2]


@pytest.mark.parametrize("stem", steps.STEPS)
def test_a_step_shows_twelve_tokens_and_each_line_is_stored_once(stem: str) -> None:
    data = frames(stem)
    assert len(data["frames"]) >= 4 and len(set(data["lines"])) == len(data["lines"])
    for frame in data["frames"]:
        last = tokens_of(data, frame)
        assert len(re.findall(r'<rect class="(?:stays|goes|waits)"', last)) == idea.TOKENS
        words = re.findall(r"\. (?:Token|Tokens) ([\d, and]+) goe?s?\b", frame["told"])
        struck = {int(one) for one in re.findall(r'<text class="off" [^>]*>(\d+)<', last)}
        assert {int(one) for one in re.findall(r"\d+", "".join(words))} <= struck
    assert steps.element("knorm") == "" and len(steps.element(stem).encode()) < 20_000
    shown = pages.filled(f"methods/{stem}.md", f"<!-- idea: {stem} -->")
    assert steps.element(stem) in shown and "</script>\n</div>" in shown


def stays(stem: str) -> list[int]:
    """Who stays at the end of the steps."""
    data = frames(stem)
    last = tokens_of(data, data["frames"][-1])
    return [int(one) for one in re.findall(r'<text class="on" [^>]*>(\d+)<', last)]


def test_the_last_step_is_where_the_method_arrives() -> None:
    for stem in ("lagkv", "gvote"):  # one reading, shown in parts
        assert stays(stem) == np.flatnonzero(idea.kept(stem)[0]).tolist()
    cut = keydiff.process_prompt(idea.KEYS, idea.VALUES, budget=6, block_size=steps.BLOCK)
    np.testing.assert_array_equal(cut.keys, idea.KEYS[stays("keydiff")])
    for stem, recent, is_sum in (("h2o", 3, True), ("tova", 0, False)):
        assert stays(stem) == steps.read(idea.QUERIES, idea.KEYS, 6, recent, is_sum)[-1].stay


def test_the_votes_are_those_of_reference() -> None:
    known = idea.inputs()
    told = [frame["told"] for frame in frames("gvote")["frames"]]
    size = int(numbers(told[0])[-1])
    nucleus = gvote.nucleus(gvote.attention_weights(known["query"][0], idea.KEYS), 0.5)[0]
    assert numbers(told[0])[:-1] == np.flatnonzero(nucleus).tolist() and size == nucleus.sum()
    for sample, words in zip(known["sampled_queries"][0, 0], told[1:], strict=True):
        ballot = top_k(idea.KEYS @ sample, size)
        assert numbers(words.partition(".")[0])[1:] == np.flatnonzero(ballot).tolist()


@pytest.mark.parametrize("stem", steps.STEPS)
@pytest.mark.parametrize("width", [390, 1280])
def test_a_picture_steps_by_the_keyboard_and_comes_back(
    browser: Browser, tmp_path: Path, stem: str, width: int
) -> None:
    file = tmp_path / "picture.html"
    style = f'<link rel="stylesheet" href="{(DOCS / "stylesheets/extra.css").as_uri()}">'
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    script = f'<script src="{test_figures.LOADER.as_uri()}"></script>'
    body = f"<body>{idea.picture(stem).svg(steps.element(stem))}{script}"
    file.write_text(head + style + body, encoding="utf-8")
    page = new_page(browser, width)
    complaints = watch(page, (tmp_path.as_uri(), DOCS.as_uri()))
    page.goto(file.as_uri())
    picture, told = page.locator(".idea"), page.locator(".idea .told[aria-live=polite]")
    whole = picture.locator("svg").inner_html()
    data = frames(stem)
    for frame in data["frames"]:
        picture.get_by_role("button", name="Step forward").press("Enter")
        assert told.inner_text().endswith(frame["told"])
        assert picture.locator("svg").get_attribute("aria-label") == frame["told"]
        assert picture.locator("svg rect:is(.stays, .goes, .waits)").count() == idea.TOKENS
    picture.get_by_role("button", name="Step back").press("Enter")
    assert told.inner_text().endswith(data["frames"][-2]["told"])
    picture.get_by_role("button", name="Whole picture").press("Enter")
    assert picture.locator("svg").inner_html() == whole
    assert page.evaluate("document.documentElement.scrollWidth") <= width and complaints == []
    page.context.close()


# symbols of formulas


PAGES = (*methods.PAGES, "quantisation")
"""The pages with a list of symbols; the three additions that quantise share one."""


def formulas(stem: str) -> tuple[str, list[str]]:
    """The ids of a method page's formulas, and the formulas."""
    text = sources()[f"methods/{stem}.md"]
    text = methods.completed(stem, text) if stem in methods.PAGES else text
    (ids,) = re.findall(r"<!-- formulas: (.*) -->", text)
    return ids, [entries()[name].requirement.tex for name in ids.split(", ")]


with_formulas = pytest.mark.parametrize("stem", PAGES)


@with_formulas
def test_the_symbols_of_a_method_are_in_its_formulas_and_have_a_shape(stem: str) -> None:
    ids, tex = formulas(stem)
    found = symbols.symbols(stem, tex)
    assert found
    assert len({json.dumps(symbol.drawn) for symbol in found}) == len(found)
    for symbol in found:
        assert any(symbols.is_in(symbol.tex, formula) for formula in tex), symbol.tex
        assert re.match(r"(a number|\[[\w, ]+\]|a set|a function|0 or 1|true or false)", symbol.shape)
    shown = pages.filled(f"methods/{stem}.md", f"<!-- formulas: {ids} -->")
    assert shown.count('<li tabindex="0"') == len(found) and len(symbols.listed(ids)) < 4000


def test_every_symbol_that_has_words_is_in_a_formula() -> None:
    words = symbols.words()
    used = {stem: {one.tex for one in symbols.symbols(stem, formulas(stem)[1])} for stem in PAGES}
    assert [
        (stem, tex) for stem in words for tex in words[stem] if stem != "shared" and tex not in used[stem]
    ] == []
    assert words["shared"].keys() <= set().union(*used.values())


def test_a_shape_is_that_of_the_contract() -> None:
    def said(stem: str, tex: str) -> str:
        (shape,) = (one.shape for one in symbols.symbols(stem, formulas(stem)[1]) if one.tex == tex)
        return shape

    assert said("keydiff", "k_i") == "[D], of keys [..., T, D]"
    assert said("h2o", "G") == "a number"
    assert said("compactor", r"\Phi") == "[D, k], of sketch [B, H_kv, D, k]"
    assert said("quest", "b") == "a number: budget"
    assert symbols.arguments("kvzap")["hidden_states"] == ("B", "T", "C")


@pytest.mark.parametrize(
    ("tex", "formula", "is_there"),
    [
        ("T", r"\frac 1 T x^\top", True),
        ("T", r"\mathrm{T} x^\top", False),
        ("k_i", r"\lVert k_i \rVert", True),
        ("b", r"b_{\text{first}} + \beta", False),
        (r"\tau", r"\tau_1", False),
    ],
)
def test_a_letter_of_a_word_or_with_a_subscript_is_another_symbol(
    tex: str, formula: str, is_there: bool
) -> None:
    assert symbols.is_in(tex, formula) == is_there


@pytest.fixture(scope="module")
def typeset(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The formulas of all method pages with their lists, typeset by the site's scripts."""
    folder = DOCS / "assets"
    files = ["vendor/katex/katex.min.js", "vendor/katex/auto-render.min.js", "javascripts/formulas.js"]
    scripts = "".join(f'<script src="{(folder / file).as_uri()}"></script>' for file in files)
    parts = ['<!doctype html><meta charset="utf-8"><body>']
    for stem in PAGES:
        ids, tex = formulas(stem)
        shown = "".join(f'<div class="arithmatex">\\[{html.escape(one)}\\]</div>' for one in tex)
        parts.append(f'<section id="{stem}"><div>{shown}{symbols.listed(ids)}</div></section>')
    file = tmp_path_factory.mktemp("symbols") / "all.html"
    file.write_text("".join([*parts, scripts]), encoding="utf-8")
    page = new_page(browser, 1280)
    complaints = watch(page, ("file:",))
    page.goto(file.as_uri())
    assert complaints == []
    return page


@with_formulas
def test_each_symbol_of_the_list_is_named_in_a_formula_and_nothing_else_is(typeset: Page, stem: str) -> None:
    found = symbols.symbols(stem, formulas(stem)[1])
    part = typeset.locator(f"section#{stem}")
    titles = part.locator(".katex [title]").evaluate_all("all => all.map((one) => one.title)")
    assert set(titles) == {f"{one.words}, {one.shape}" for one in found}
    # no symbol is inside of another one that has a name
    drawn = part.locator(".katex [title]").evaluate_all("all => all.map((one) => one.textContent)")
    assert all(len(text) <= 14 for text in drawn), drawn
    part.locator("summary").press("Enter")
    for index, entry in enumerate(part.locator("li").all()):
        entry.focus()
        marked = part.locator(".katex .marked")
        assert marked.count() >= 1
        assert set(marked.evaluate_all("all => all.map((one) => one.title)")) == {
            f"{found[index].words}, {found[index].shape}"
        }
