"""The interactive figures: their data is what `optimized/` and `reference/` give, their mathematics is
that of `reference/`, and in a browser they react to a mouse, a finger and a keyboard, light and dark, on a
desk and on a phone.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from playwright.sync_api import Browser, Locator, Page
from site_browser import chromium, new_page, watch
from transformers import PreTrainedTokenizerFast

from docs_build import figures, moving
from docs_build.pages import filled
from evictionary.cache.evicting_cache import CAPTURED, EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import prefill
from evictionary.methods import catalogue
from evictionary.methods.method import Request as MethodRequest
from evictionary.methods.resolve import resolve
from evictionary.reference import (
    h2o,
    keydiff,
    knorm,
    lagkv,
    momentkv,
    momentkv_bounded,
    selection,
    snapkv,
    streaming_llm,
    tova,
)
from evictionary.reference.momentkv_theory import full_output

PAGES = Path(__file__).parents[2] / "docs" / "figures"
LOADER = PAGES.parent / "assets" / "javascripts" / "moving.js"
FIGURES = tuple(moving.FIGURES)
SAID = ("log", "debug", "info", "warning", "error", "assert")


# the data


def masks_of(data: dict[str, Any]) -> dict[str, np.ndarray]:
    return {each["name"]: figures.decode(data, each) for each in data["methods"]}


def test_masks_come_back_from_their_text() -> None:
    masks = np.random.default_rng(0).random((5, 3, 2, 7)) < 0.5
    nested = np.logical_or.accumulate(masks)
    nested[:, 0, 0, 0] = False  # kept by no budget
    data = {"layers": 3, "heads": 2, "tokens": [""] * 7, "budgets": range(5)}
    for wanted in (masks, nested):
        np.testing.assert_array_equal(figures.decode(data, figures.encode(wanted)), wanted)
    assert figures.encode(masks)["exceptions"] and not figures.encode(nested)["exceptions"]


def test_the_data_is_what_optimized_and_reference_keep(tokenizer: PreTrainedTokenizerFast) -> None:
    """Of a tiny model, where everything can be computed
    twice; main() does the same with the embedded model.
    """
    model = tiny_llama(max_position_embeddings=2048).double()
    prompt = passkey.make(tokenizer, depth=0.4, tokens=120)
    length, budgets, options = prompt.context_ids.shape[1], [64, 100, 150], figures.OPTIONS["lagkv"]
    names = [*catalogue.evicting(), catalogue.RANDOM]
    data = figures.survivors(model, prompt, ["x"] * length, names, budgets)
    assert json.loads(json.dumps(data)) == data
    masks = masks_of(data)
    assert list(masks) == names

    with EvictingCache(model, method=None, record=CAPTURED) as full:
        prefill(model, prompt.context_ids, full)
    for index, layer in enumerate(full.layers):
        states = {"keys": layer.keys, "values": layer.values, "queries": full.recorded[index]["queries"]}
        k, v, q = (each.numpy() for each in states.values())
        scores = {"keydiff": keydiff.score(k), "knorm": knorm.score(k), "tova": tova.score(q, k)}
        for step, budget in enumerate(budgets):
            optimized = resolve("keydiff").kept(states, MethodRequest(budget=budget))
            np.testing.assert_array_equal(masks["keydiff"][step, index], optimized[0].numpy())
            # equal tokens may score alike, so that rounding decides between them
            for name, score in scores.items():
                mask = masks[name][step, index]
                assert (mask.sum(axis=-1) == budget).all(), f"{name}, {budget} tokens"
                assert (selection.regret(score[0], mask) < 1e-12).all(), f"{name}, {budget} tokens"
            ratio = lagkv.keep_ratio_for(length, budget, **options)
            wanted = {
                "h2o": h2o.select(q, k, budget=budget),
                "lagkv": lagkv.select(k, v, keep_ratio=ratio, **options),
                "momentkv": momentkv.select_prompt(q[:, :, -32:], k, v, budget),
                "snapkv": selection.top_k(snapkv.score(q, k), budget),
                "streaming_llm": selection.top_k(streaming_llm.score(k), budget),
            }
            for name, mask in wanted.items():
                np.testing.assert_array_equal(
                    masks[name][step, index], mask[0], err_msg=f"{name}, {budget} tokens, layer {index}"
                )
        # what they read of the model is tested in test_phases.py
        for name in ("expected_attention", "gvote"):
            with EvictingCache.from_prefilled(model, full, name, budget=100, seed=figures.SEED) as cache:
                np.testing.assert_array_equal(masks[name][1], figures.kept(cache))


def test_the_stored_data_is_that_of_the_prompt_and_of_the_methods() -> None:
    """What can be known of it without the model: everything that does not depend on keys, and every count."""
    data = figures.stored()
    masks = masks_of(data)
    # `make pages` adds a method that came later: without it the figure is right, and less complete.
    assert list(masks) == [name for name in [*catalogue.evicting(), catalogue.RANDOM] if name in masks]
    assert len(masks) >= 18
    length, budgets = len(data["tokens"]), np.array(data["budgets"])
    assert data["needle"][1] <= length > budgets[-1]
    needle = "".join(data["tokens"][slice(*data["needle"])])
    assert re.fullmatch(r" ?The secret number is (\d{7})\. Remember it: \1 is the secret number\.", needle)

    for name, mask in masks.items():
        counts = mask.sum(axis=-1)
        if "own_budget" in catalogue.traits(catalogue.definition(name)):
            assert (mask == mask[0]).all(), name
        elif name == "lagkv":
            options = figures.OPTIONS[name]
            for budget, found in zip(data["budgets"], counts, strict=True):
                ratio = lagkv.keep_ratio_for(length, budget, **options)
                assert (found == lagkv.retained_length(length, keep_ratio=ratio, **options)).all()
            assert mask[..., : options["sink_size"]].all() and mask[..., -options["lag_size"] :].all()
        else:
            assert (counts == budgets[:, None, None]).all(), name
    for index, budget in enumerate(data["budgets"]):
        by_position = selection.top_k(streaming_llm.score(np.ones((1, 1, length, 1))), budget)
        assert (masks["streaming_llm"][index] == by_position[0]).all()
    keys = {"keys": torch.ones(1, data["heads"], length, 1)}
    for layer in range(data["layers"]):
        asked = MethodRequest(budget=data["budgets"][0], layer_index=layer, seed=figures.SEED)
        drawn = resolve("random").kept(keys, asked)
        np.testing.assert_array_equal(masks["random"][0, layer], drawn[0].numpy())
    assert (masks["tova"] == masks["tova"][:, :, :1]).all()
    assert masks["snapkv"][..., -32:].all() and masks["momentkv"][..., :1].all()


def test_everything_together_is_small() -> None:
    assert sum(path.stat().st_size for path in (PAGES / "assets").iterdir()) < 2_000_000


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_colours_can_be_told_from_the_ground() -> None:
    """WCAG: 4.5 for text, 3 for shapes, on the light and on the dark ground of the theme."""
    css = (PAGES / "assets" / "figures.css").read_text(encoding="utf-8")
    pairs = re.findall(r"--([\w-]+): [^;]*light-dark\((#\w{6}), (#\w{6})\)", css)
    colours = {name: shades for name, *shades in pairs} | {"ground": ["#ffffff", "#1e2129"]}
    for name, least in {"text": 4.5, "faint": 4.5, "kept": 3, "next": 3, "mark": 3}.items():
        assert min(map(contrast, colours[name], colours["ground"])) >= least, name
    assert min(map(contrast, colours["text"], colours["kept-ground"])) >= 4.5


# the browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def mathematics(browser: Browser) -> Iterator[Callable[..., Any]]:
    """Calls a function of mathematics.js."""
    page = browser.new_page()
    page.add_script_tag(path=PAGES / "assets" / "mathematics.js")

    def call(name: str, *arguments: Any) -> Any:
        given = [each.tolist() if isinstance(each, np.ndarray) else each for each in arguments]
        return page.evaluate("([name, given]) => evictionary.mathematics[name](...given)", [name, given])

    yield call
    page.close()


def close(got: Any, wanted: Any, what: str) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12, err_msg=what)


@pytest.mark.parametrize("seed", range(12))
def test_the_scores_in_the_browser_are_those_of_reference(mathematics: Callable[..., Any], seed: int) -> None:
    draw = np.random.default_rng(seed)
    length, lag, channels = draw.integers(1, 9), draw.integers(1, 6), draw.integers(1, 5)
    keys = draw.normal(size=(length, channels)) * 10.0 ** draw.integers(-2, 3)
    following = draw.normal(size=(lag, channels))
    if seed % 3 == 0:
        keys[0] = 0
        following[:, 0] = 1  # a channel that is constant in the next partition
    if seed % 3 == 1:
        keys = np.round(keys)  # ties
    for name, function, *given in (
        ("unit", keydiff.unit, keys[0]),
        ("anchor", keydiff.anchor, keys),
        ("keydiffScore", keydiff.score, keys),
        ("normalise", lagkv.normalise, keys, following),
        ("variationScore", lagkv.variation_score, lagkv.normalise(keys, following)),
    ):
        close(mathematics(name, *given), function(*given), name)
    scores = np.round(draw.normal(size=length))
    budget = int(draw.integers(0, length + 2))
    assert mathematics("topK", scores, budget) == selection.top_k(scores, budget).tolist()


@pytest.mark.parametrize("seed", range(12))
def test_momentkv_in_the_browser_is_that_of_reference(mathematics: Callable[..., Any], seed: int) -> None:
    draw = np.random.default_rng(seed)
    length, channels, width = draw.integers(1, 9), draw.integers(1, 5), draw.integers(1, 5)
    query = draw.normal(size=channels) * 10.0 ** draw.integers(-1, 3)
    keys, values = draw.normal(size=(length, channels)), draw.normal(size=(length, width))
    kept = draw.random(length) < (seed % 3) / 2  # none, some, all
    wanted = momentkv_by_reference(query, keys, values, kept)
    got = mathematics("momentkv", query, keys, values, kept)
    box = got.pop("box")
    np.testing.assert_allclose(got["full"], np.clip(got["full"], box["low"], box["high"]), atol=1e-9)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        close(got[name], value, name)


def momentkv_by_reference(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, kept: np.ndarray
) -> dict[str, Any]:
    """What mathematics.js returns apart from the box, in the order of the table in the figure."""
    logits = keys @ query[:, None] / np.sqrt(len(query))
    (retained, log_retained), (evicted, log_evicted) = (
        momentkv.retained_attention(logits.T, values, mask[None]) for mask in (kept, ~kept)
    )
    one_head, gone = (keys[None, None], values[None, None]), ~kept[None, None]
    moments = momentkv.update(momentkv.no_moments(*one_head), *one_head, gone)
    estimate = momentkv.log_evicted_partition(query, moments)[0]
    bounds = momentkv_bounded.update(momentkv_bounded.no_bounds(*one_head), *one_head, gone)
    asked = (query[None, None], *one_head, ~gone, moments)
    return {
        "full": full_output(query, keys, values),
        "retained": retained[0],
        "corrected": momentkv.attend(*asked)[0, 0],
        "certified": momentkv_bounded.attend_certified(*asked, bounds)[0, 0],
        "evicted": evicted[0],
        "estimate": momentkv.approximate_evicted(query, moments)[0, 0],
        "weight": np.exp(momentkv.log_mixing_weights(log_retained, log_evicted)[0][0]),
        "estimatedWeight": np.exp(momentkv.log_mixing_weights(log_retained, estimate)[0][0]),
    }


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens a figure from a file, with the markup and the loader of its page; in the end nothing may have
    gone wrong in it.
    """
    shown: list[tuple[Page, list[str]]] = []

    def show(name: str, width: int = 1280, scheme: str = "light") -> Page:
        text = filled(f"figures/{name}.md", (PAGES / f"{name}.md").read_text(encoding="utf-8"))
        parts = [
            *re.findall(r"<div id=.*?</div>", text, re.DOTALL),
            f'<script src="{LOADER.as_uri()}"></script>',
        ]
        viewport = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        ground = "<style>html { color-scheme: light dark }</style>"
        file = tmp_path / f"{name}.html"
        file.write_text(f"<!doctype html>{viewport}{ground}<body>{' '.join(parts)}", encoding="utf-8")
        page = new_page(browser, width, 800, scheme)
        shown.append((page, watch(page, (tmp_path.as_uri(), PAGES.parent.as_uri()), SAID)))
        page.goto(file.as_uri())
        page.locator(f"#figure-{name} .told").wait_for()
        return page

    yield show
    for page, complaints in shown:
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
            "the page scrolls sideways"
        )
        page.context.close()
        assert complaints == []


def drag(page: Page, point: Locator, right: float, up: float) -> None:
    """Move a point by so many pixels: with a finger on a phone, with a mouse elsewhere."""
    point.scroll_into_view_if_needed()
    box: Any = point.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    if page.viewport_size["width"] > 500:  # type: ignore[index]
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + right, y - up, steps=4)
        page.mouse.up()
        return
    scrolled = page.evaluate("window.scrollY")
    session = page.context.new_cdp_session(page)
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for part in (0.25, 0.5, 0.75, 1):
        moved = [{"x": x + part * right, "y": y - part * up}]
        session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": moved})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert page.evaluate("window.scrollY") == scrolled, "the page scrolls under the finger"


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", text.replace("\u2212", "-"))]


def place(point: Locator) -> np.ndarray:
    return np.array(numbers(point.get_attribute("aria-valuetext") or ""))


def places(points: Locator) -> np.ndarray:
    return np.array(
        [numbers(text) for text in points.evaluate_all("all => all.map((one) => one.ariaValueText)")]
    )


def cells_of(figure: Locator) -> list[list[str]]:
    return figure.locator("tbody tr").evaluate_all(
        "all => all.map((row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent))"
    )


def shown(got: str, *wanted: float, digits: int) -> None:
    """The text shows these numbers, rounded."""
    assert np.abs(np.array(numbers(got)) - wanted).max() <= 0.5 * 10**-digits + 1e-9, (got, wanted)


on_every_screen = pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")]
)


@on_every_screen
def test_survivors_follow_the_budget(show: Callable[..., Page], width: int, scheme: str) -> None:
    figure, data = show("survivors", width, scheme).locator("#figure-survivors"), figures.stored()
    masks, length = masks_of(data), len(data["tokens"])
    slider = figure.get_by_role("slider", name="Budget")

    def check(layer: slice = slice(None), head: slice = slice(None)) -> None:
        step = int(slider.input_value())
        assert slider.get_attribute("aria-valuetext") == f"{data['budgets'][step]} of {length} tokens"
        for panel in figure.locator(".panel:visible").all():
            method = panel.get_attribute("data-method") or ""
            kept = masks[method][step, layer, head].reshape(-1, length)
            tokens, percent = panel.locator(".summary").inner_text().split(";")
            shown(tokens, kept.sum(axis=1).mean(), digits=1)
            shown(percent, 100 * kept[:, slice(*data["needle"])].mean(), digits=0)
            shares = panel.locator(".prompt span").evaluate_all(
                "all => all.map(one => Number(one.style.getPropertyValue('--share')))"
            )
            np.testing.assert_allclose(shares, kept.mean(axis=0), atol=5.1e-4)

    assert figure.locator(".panel:visible").count() == 4
    check()
    first = figure.locator(".panel:visible").first
    before = first.screenshot()
    box: Any = slider.bounding_box()
    at: Any = {"x": 0.8 * box["width"], "y": box["height"] / 2}
    slider.tap(position=at) if width < 500 else slider.click(position=at)
    assert int(slider.input_value()) > len(data["budgets"]) // 2
    check()
    assert first.screenshot() != before
    for key in ("Home", "ArrowRight", "End"):
        slider.press(key)
        check()
    figure.get_by_role("checkbox", name="snapkv").press("Space")
    assert figure.locator(".panel:visible").count() == 5
    slider.press("PageDown")
    figure.get_by_role("combobox", name="Layer").select_option("17")
    check(slice(17, 18))
    figure.get_by_role("combobox", name="KV head").select_option("2")
    check(slice(17, 18), slice(2, 3))


@on_every_screen
def test_a_query_moves(show: Callable[..., Page], width: int, scheme: str) -> None:
    page = show("moments", width, scheme)
    figure = page.locator("#figure-moments")
    query = figure.get_by_role("slider", name="query")
    keys, values = (figure.get_by_role("slider", name=f"{what} of token") for what in ("key", "value"))
    boxes, planes = figure.get_by_role("checkbox"), [figure.locator("svg").first, figure.locator("svg").last]
    right = dict.fromkeys(("retained", "corrected", "certified"), "full")
    right |= {"estimate": "evicted", "estimatedWeight": "weight"}

    def check() -> None:
        kept = np.array(boxes.evaluate_all("all => all.map((one) => !one.checked)"))
        wanted = momentkv_by_reference(place(query), places(keys), places(values), kept)
        for cells, (name, value) in zip(cells_of(figure), wanted.items(), strict=True):
            if cells[0] != "none":
                shown(cells[0], *np.atleast_1d(value), digits=3 if "eight" in name else 2)
                if name in right:
                    shown(cells[1], np.linalg.norm(value - wanted[right[name]]), digits=3)

    check()
    for point in (query, keys.nth(1), values.nth(2)):
        before, pictures = place(point), [plane.screenshot() for plane in planes]
        drag(page, point, -60, 40)
        size: Any = planes[0].bounding_box()
        np.testing.assert_allclose(place(point) - before, np.array([-60, 40]) * 6 / size["width"], atol=0.1)
        assert [plane.screenshot() for plane in planes] != pictures
        check()
    before = place(query)
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "Shift+ArrowDown"):
        query.press(key)
        check()
    np.testing.assert_allclose(place(query) - before, [0.2, -0.4], atol=1e-9)
    for _ in range(12):
        query.press("Shift+ArrowLeft")
    assert place(query)[0] == -3  # not beyond the plane
    for checked, summary in ((False, "Nothing is evicted"), (True, "Nothing is kept")):
        for box in boxes.all():
            box.set_checked(checked)
            check()
        assert summary in figure.locator(".summary").inner_text()


@on_every_screen
def test_a_key_moves(show: Callable[..., Page], width: int, scheme: str) -> None:
    page = show("keys", width, scheme)
    figure = page.locator("#figure-keys")
    planes = figure.locator("svg").all()
    budget = figure.get_by_role("slider", name="Budget")

    def check() -> None:
        keys = places(planes[0].get_by_role("slider"))
        np.testing.assert_array_equal(keys, places(planes[1].get_by_role("slider")))
        rows, count = cells_of(figure), int(budget.input_value())
        by_keydiff = keydiff.score(keys)
        by_lagkv = lagkv.variation_score(lagkv.normalise(keys[:6], keys[6:]))
        for column, plane, scores, kept in (
            (0, planes[0], by_keydiff, selection.top_k(by_keydiff, count)),
            (2, planes[1], by_lagkv, np.append(selection.top_k(by_lagkv, count - 5), [True] * 5)),
        ):
            for row, score in zip(rows, scores, strict=False):
                shown(row[column], score, digits=3)
            drawn = plane.locator(".handle").evaluate_all(
                "all => all.map(one => !one.classList.contains('evicted'))"
            )
            assert [row[column + 1] == "yes" for row in rows] == drawn == kept.tolist()

    check()
    for plane, name in ((planes[0], "key 4"), (planes[1], "key 10, of the next partition")):
        pictures = [each.screenshot() for each in planes]
        drag(page, plane.get_by_role("slider", name=name), 50, 30)
        assert all(each.screenshot() != picture for each, picture in zip(planes, pictures, strict=True))
        check()
    for key in ("ArrowLeft", "ArrowDown", "Shift+ArrowRight"):
        planes[1].get_by_role("slider", name="key 2").press(key)
        check()
    for key in ("Home", "ArrowRight", "End"):
        budget.press(key)
        check()


def press(figure: Locator, name: str) -> str:
    """Press one of a figure's buttons; the sentence that the figure says then, and that is read out."""
    figure.get_by_role("button", name=name).click()
    return figure.locator(".told[aria-live=polite]").inner_text()


def test_buttons_show_where_the_methods_lose_the_needle(show: Callable[..., Page]) -> None:
    figure = show("survivors", 1440).locator("#figure-survivors")
    start, panels = figure.locator(".told").inner_text(), figure.locator(".panel:visible")
    tops = panels.evaluate_all("all => all.map((one) => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1 and len(tops) == 4  # side by side
    for button, count, least, most in (
        ("fail", 4, 0, 2),
        ("work", 4, 65, 100),
        ("own", 2, 50, 100),
        ("All", len(figures.stored()["methods"]), 0, 100),
    ):
        told = press(figure, button)
        shares = [numbers(text)[1] for text in panels.locator(".summary").all_inner_texts()]
        assert len(shares) == count and all(least <= share <= most for share in shares), button
        assert [numbers(part)[-1] for part in told.split("; ")[:4]] == shares[:4]
    assert press(figure, "Start again") == start


def test_buttons_show_where_the_correction_hurts_misses_and_works(show: Callable[..., Page]) -> None:
    figure = show("moments").locator("#figure-moments")
    start = figure.locator(".told").inner_text()
    assert press(figure, "hurts") == "Here the correction makes the error 2.1 times as large."
    press(figure, "misses")
    # the weight, and its estimate
    assert [numbers(row[0])[0] > 0.5 for row in cells_of(figure)[-2:]] == [False, True]
    assert press(figure, "works") == "The correction leaves 0 % of the error."
    assert press(figure, "Start again") == start


def test_buttons_show_where_each_score_fails(show: Callable[..., Page]) -> None:
    figure = show("keys", 1440).locator("#figure-keys")
    start, points = figure.locator(".told").inner_text(), figure.locator("svg").first.get_by_role("slider")
    box = {part: figure.locator(part).bounding_box() or {} for part in (".planes", ".numbers")}
    assert box[".numbers"]["x"] > box[".planes"]["x"] + box[".planes"]["width"]  # beside, where there is room
    two = press(figure, "two opposite groups")
    assert np.linalg.norm(keydiff.anchor(places(points))) < 0.1  # so that one key decides which of them stay
    for key in ["Shift+ArrowRight"] * 6 + ["Shift+ArrowUp"] * 2:
        points.nth(3).press(key)
    assert not set(numbers(two.partition(";")[0])) & set(
        numbers(figure.locator(".told").inner_text().partition(";")[0])
    )
    kept, evicted = start.partition("LagKV")[2], press(figure, "longest key").partition("LagKV")[2]
    longest = np.linalg.norm(places(points), axis=-1).argmax() + 1
    assert longest in numbers(evicted) and longest not in numbers(kept)
    assert press(figure, "Start again") == start


@pytest.mark.parametrize("name", FIGURES)
def test_every_button_changes_what_the_figure_says(show: Callable[..., Page], name: str) -> None:
    """One of a failure once left the sentence as it was at the start."""
    figure = show(name, 1440).locator(f"#figure-{name}")
    buttons = figure.locator(".presets button").all_inner_texts()
    told = {button: press(figure, button) for button in buttons}
    assert buttons[0] == "Start again" and len(set(told.values())) == len(buttons) > 2, told


@pytest.mark.parametrize("name", FIGURES)
def test_the_theme_of_the_site_decides_between_light_and_dark(show: Callable[..., Page], name: str) -> None:
    """Not the reader's system, where they disagree; without a theme the system decides."""
    page = show(name)

    def colour(theme: str, system: Any) -> str:
        page.emulate_media(color_scheme=system)
        page.evaluate("theme => document.body.setAttribute('data-md-color-scheme', theme)", theme)
        return page.locator(f"#figure-{name}").evaluate("one => getComputedStyle(one).color")

    light, dark = colour("", "light"), colour("", "dark")
    assert light != dark
    assert colour("default", "light") == colour("default", "dark") == light
    assert colour("slate", "light") == colour("slate", "dark") == dark
