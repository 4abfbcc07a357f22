"""The interactive figures: their data is what `optimized/` and `reference/` give, their mathematics is that of `reference/`, and
in a browser they react to a mouse, a finger and a keyboard, light and dark, on a desk and on a phone."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from playwright.sync_api import Browser, sync_playwright
from transformers import PreTrainedTokenizerFast

from reference import h2o, keydiff, knorm, lagkv, momentkv, selection, snapkv, streaming_llm, tova
from reference.momentkv_theory import full_output
from workbench import catalogue, figures, methods, passkey
from workbench.cache import CAPTURED, EvictingCache
from workbench.questions import prefill

PAGES = Path(__file__).parent.parent / "docs" / "figures"
FIGURES = ("survivors", "moments", "keys")


def stored() -> Any:
    text = figures.OUTPUT.read_text(encoding="utf-8")
    return json.loads(text.removeprefix(figures.PREFIX).removesuffix(";\n"))


def decode(data: Any, method: Any) -> np.ndarray:
    """Masks [budgets, layers, H_kv, T] of one method of the figure's data."""
    shape = (data["layers"], data["heads"], len(data["tokens"]))
    if "levels" in method:
        levels = np.frombuffer(base64.b64decode(method["levels"]), dtype=np.uint8).reshape(shape)
        return levels <= np.arange(len(data["budgets"]))[:, None, None, None]
    bits = np.frombuffer(base64.b64decode(method["masks"]), dtype=np.uint8)
    count = len(data["budgets"]) * int(np.prod(shape))
    return np.unpackbits(bits, count=count, bitorder="little").astype(bool).reshape(-1, *shape)


# the data


def test_masks_come_back_from_their_text() -> None:
    masks = np.random.default_rng(0).random((5, 3, 2, 7)) < 0.5
    nested = np.logical_or.accumulate(masks)
    nested[-1, 0, 0, 0] = False  # kept by no budget
    nested[:, 0, 0, 0] = False
    for wanted, name in ((masks, "masks"), (nested, "levels")):
        encoded = figures.encode(wanted)
        assert list(encoded) == [name]
        data = {"layers": 3, "heads": 2, "tokens": [""] * 7, "budgets": range(5)}
        np.testing.assert_array_equal(decode(data, encoded), wanted)


def test_the_data_is_what_optimized_and_reference_keep(tokenizer: PreTrainedTokenizerFast) -> None:
    """Of a tiny model, where everything can be computed twice; main() does the same with the embedded model."""
    model = tiny_llama(max_position_embeddings=2048).double()
    prompt = passkey.make(tokenizer, depth=0.4, tokens=120)
    length = prompt.context_ids.shape[1]
    budgets = [64, 100, 150]
    names = [*catalogue.names(), catalogue.RANDOM]
    data = figures.survivors(model, prompt, ["x"] * length, names, budgets)
    assert json.loads(json.dumps(data)) == data
    assert [each["name"] for each in data["methods"]] == names
    masks = {each["name"]: decode(data, each) for each in data["methods"]}

    with EvictingCache(model, method=None, record=CAPTURED) as full:
        prefill(model, prompt.context_ids, full)
    for index, layer in enumerate(full.layers):
        keys, values = layer.keys, layer.values
        queries = full.recorded[index]["queries"]
        k, v, q = (states.numpy() for states in (keys, values, queries))
        scores = {
            "keydiff": keydiff.score(k),
            "knorm": knorm.score(k),
            "tova": tova.score(q, k),
        }
        for step, budget in enumerate(budgets):
            states = {"keys": keys, "values": values, "queries": queries}
            optimized = methods.resolve("keydiff").kept(states, budget=budget)
            np.testing.assert_array_equal(masks["keydiff"][step, index], optimized[0].numpy())
            for name, score in scores.items():  # equal tokens may score alike, so that rounding decides between them
                assert (masks[name][step, index].sum(axis=-1) == budget).all()
                assert (selection.regret(score[0], masks[name][step, index]) < 1e-12).all(), f"{name}, {budget} tokens"
            wanted = {
                "h2o": h2o.select(q, k, budget=budget),
                "momentkv": momentkv.select_prompt(q[:, :, -32:], k, v, budget),
                "snapkv": selection.top_k(snapkv.score(q, k), budget),
                "streaming_llm": selection.top_k(streaming_llm.score(k), budget),
            }
            options = figures.OPTIONS["lagkv"]
            ratio = lagkv.keep_ratio_for(length, budget, **options)
            wanted["lagkv"] = lagkv.select(k, v, keep_ratio=ratio, **options)
            for name, mask in wanted.items():
                np.testing.assert_array_equal(masks[name][step, index], mask[0], err_msg=f"{name}, {budget} tokens, layer {index}")
        for name in ("expected_attention", "gvote"):  # what they read of the model is tested with the workbench
            with EvictingCache.from_prefilled(model, full, name, budget=100, seed=figures.SEED) as cache:
                np.testing.assert_array_equal(masks[name][1], figures.kept(cache))


def test_the_stored_data_is_that_of_the_prompt_and_of_the_methods() -> None:
    """What can be known of it without the model: everything that does not depend on keys, and every count."""
    data = stored()
    masks = {each["name"]: decode(data, each) for each in data["methods"]}
    assert list(masks) == [*catalogue.names(), catalogue.RANDOM]
    length, budgets = len(data["tokens"]), np.array(data["budgets"])
    assert data["needle"][1] <= length > budgets[-1]
    needle = "".join(data["tokens"][slice(*data["needle"])])
    assert re.fullmatch(r" ?The secret number is (\d{7})\. Remember it: \1 is the secret number\.", needle)

    for name, mask in masks.items():
        counts = mask.sum(axis=-1)
        if name == "gvote":
            assert (mask == mask[0]).all()
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
    assert (masks["tova"] == masks["tova"][:, :, :1]).all()
    random = methods.resolve("random")
    keys = {"keys": torch.ones(1, data["heads"], length, 1)}
    for layer in range(data["layers"]):
        wanted = random.kept(keys, budget=data["budgets"][0], layer_index=layer, seed=figures.SEED)
        np.testing.assert_array_equal(masks["random"][0, layer], wanted[0].numpy())
    for mask, protected in ((masks["snapkv"], slice(-32, None)), (masks["momentkv"], slice(0, 1))):
        assert mask[..., protected].all()


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
    colours = {name: shades for name, *shades in pairs}
    for index, ground in enumerate(("#ffffff", "#1e2129")):
        for name, least in {"text": 4.5, "faint": 4.5, "kept": 3, "next": 3, "mark": 3}.items():
            assert contrast(colours[name][index], ground) >= least, (name, ground)
        assert contrast(colours["text"][index], colours["kept-ground"][index]) >= 4.5


# the browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        installed = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")]
        path = next(filter(None, installed), playwright.chromium.executable_path)
        if not Path(path).exists():
            pytest.fail("no Chromium found: install the package chromium, or run `python -m playwright install chromium`")
        # Without the sandbox it starts in a container too; it opens nothing but this repository's own pages.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


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
    keys, values = draw.normal(size=(2, length, channels)) * 10.0 ** draw.integers(-2, 3)
    following = draw.normal(size=(2, lag, channels))
    if seed % 3 == 0:
        keys[0] = 0
        following[0, :, 0] = 1  # a channel that is constant in the next partition
    if seed % 3 == 1:
        keys = np.round(keys)  # ties
    close(mathematics("unit", keys[0]), keydiff.unit(keys[0]), "unit")
    close(mathematics("anchor", keys), keydiff.anchor(keys), "anchor")
    close(mathematics("keydiffScore", keys), keydiff.score(keys), "keydiff.score")
    close(mathematics("normalise", keys, following[0]), lagkv.normalise(keys, following[0]), "lagkv.normalise")
    normalised = lagkv.normalise(keys, following[0])
    close(mathematics("variationScore", normalised), lagkv.variation_score(normalised), "lagkv.variation_score")
    close(mathematics("lagkvScore", keys, values, *following), lagkv.score(keys, values, *following), "lagkv.score")
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
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        close(got[name], value, name)


def momentkv_by_reference(query: np.ndarray, keys: np.ndarray, values: np.ndarray, kept: np.ndarray) -> dict[str, Any]:
    """What mathematics.js returns, one head, kept boolean [T]."""
    logits = keys @ query[:, None] / np.sqrt(len(query))
    (retained, log_retained), (evicted, log_evicted) = (
        momentkv.retained_attention(logits.T, values, mask[None]) for mask in (kept, ~kept)
    )
    one_head = (keys[None, None], values[None, None])
    moments = momentkv.update(momentkv.no_moments(*one_head), *one_head, ~kept[None, None])
    estimate = momentkv.log_evicted_partition(query, moments)[0]
    return {
        "full": full_output(query, keys, values),
        "retained": retained[0],
        "evicted": evicted[0],
        "estimate": momentkv.approximate_evicted(query, moments)[0, 0],
        "corrected": momentkv.attend(query[None, None], *one_head, kept[None, None], moments)[0, 0],
        "weight": np.exp(momentkv.log_mixing_weights(log_retained, log_evicted)[0][0]),
        "estimatedWeight": np.exp(momentkv.log_mixing_weights(log_retained, estimate)[0][0]),
    }
