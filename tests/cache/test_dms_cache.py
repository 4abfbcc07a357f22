"""Delayed eviction in a cache: a threshold behind any method
with scores, of a prompt, in blocks and while decoding.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tiny_llama
from tools.reading import (
    IDS,
    after,
    cached,
    loaded,
    padded,
    places,
    positions_of,
    read,
    read_in,
    refused,
    same,
    small,
)

from evictionary import EvictingCache, reference
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve

DELAY = {"delay": 8}
SCORERS = [
    name
    for name in [*catalogue.names(), *catalogue.BASELINES]
    if not resolve(name).is_select and resolve(name).prompt_function is None
]


def knorm_scores(model: Any) -> list[np.ndarray]:
    """The scores [1, H_kv, 60] of each layer."""
    full = cached(model, IDS, None)
    return [reference.knorm.score(np.asarray(layer.keys, dtype=np.float64)) for layer in full.layers]


@pytest.mark.parametrize("method", SCORERS)
def test_the_window_of_a_prompt_stays_and_half_of_the_others(model: Any, method: str) -> None:
    """The heads of a layer share what goes: 26 of 52 in each of two heads; equal scores stay together."""
    cache = cached(model, IDS, f"{method}+dms", 0.5, {**small(method), **DELAY})
    for layer in cache.layers:
        heads = positions_of(layer)
        assert all(head[-8:] == [*range(52, 60)] for head in heads)
        ties = sum(map(len, heads)) - 2 * (60 - 26)
        assert ties == 0 or (ties > 0 and method in {"streaming_llm", "tova", "chunk_kv", "random_protected"})


def test_a_prompt_is_judged_as_the_mathematics_says(model: Any) -> None:
    """Heads keep other numbers of tokens."""
    cache = cached(model, IDS, "knorm+dms", 0.75, DELAY)
    numbers = [len(head) for layer in cache.layers for head in positions_of(layer)]
    assert len(set(numbers)) > 1
    for layer, scores in zip(cache.layers, knorm_scores(model), strict=True):
        filled = np.ones(scores.shape, dtype=bool)
        due = reference.dms.due(filled, 60, window_size=8)
        tau = reference.dms.threshold(scores, due, np.array([104 - 26]))
        assert positions_of(layer) == places(reference.dms.judge(scores, filled, tau, 60, window_size=8))


def test_a_number_is_a_threshold(model: Any) -> None:
    """As KVzap's rule has it, whatever the ratio."""
    scores = knorm_scores(model)
    number = float(np.median(scores[0]))
    cache = cached(model, IDS, "knorm+dms", 0.9, {**DELAY, "cutoff": number})
    for layer, own in zip(cache.layers, scores, strict=True):
        wanted = reference.kvzap.dms(own, threshold=number, window_size=8)
        assert positions_of(layer) == places(wanted)


def test_a_budget_is_what_a_prompt_keeps(model: Any) -> None:
    """On average over the heads; a budget that the window fills leaves the window."""
    assert cached(model, IDS, "knorm+dms", budget=20, options=DELAY).tokens_kept == 20
    assert cached(model, IDS, "knorm+dms", budget=5, options=DELAY).tokens_kept == 8


@pytest.mark.parametrize("sizes", [[20, 20, 20], [7, 33, *[1] * 20], [1] * 60])
def test_blocks_end_as_the_text_at_once(sizes: list[int]) -> None:
    """Where a score is that of a token alone: one layer, whose keys know nothing of other tokens."""
    model = tiny_llama(num_hidden_layers=1)
    number = float(np.median(knorm_scores(model)[0]))
    options = {**DELAY, "cutoff": number}
    at_once = cached(model, IDS, "knorm+dms", 0.5, options, every=1)
    in_parts = cached(model, IDS, "knorm+dms", 0.5, options, every=1, sizes=sizes)
    assert positions_of(in_parts.layers[0]) == positions_of(at_once.layers[0])


@pytest.mark.parametrize("method", ["keydiff", "random", "snapkv", "tova", "knorm+protect"])
@pytest.mark.parametrize("every", [1, 5])
def test_a_token_is_judged_once(model: Any, method: str, every: int) -> None:
    """Of what was judged none goes later, and none comes back; the window stays; the threshold too."""
    options = {**small(method), **DELAY}
    if method.endswith("protect"):
        options |= {"first": 3, "last": 4}
    cache = EvictingCache(model, f"{method}+dms", 0.5, options, every=every)
    old, judged, thresholds = None, 0, None
    for ids in IDS.split([30, *[1] * 30], dim=1):
        read(model, ids, cache)
        layer = cache.layers[1]
        now = [set(head) for head in positions_of(layer)]
        assert all(head >= {*range(layer.seen - 8, layer.seen)} for head in now)
        if old is not None:
            assert [{t for t in head if t < judged} for head in now] == old
            assert thresholds is None or bool((layer.state["dms.threshold"] == thresholds).all())
        thresholds = layer.state["dms.threshold"]
        judged = max(0, layer.evicted_at - 8)
        old = [{t for t in head if t < judged} for head in now]
        if method.endswith("protect"):
            assert all(head >= {0, 1, 2} for head in now)


def test_without_a_ratio_nothing_goes(model: Any) -> None:
    cache = cached(model, IDS, "keydiff+dms", 0, DELAY, every=1, sizes=[40, *[1] * 20])
    assert cache.tokens_kept == 60


def test_a_short_prompt_waits_for_its_threshold(model: Any) -> None:
    """The first tokens that leave the window give it; a window that is not full is kept whole."""
    cache = cached(model, IDS[:, :8], "knorm+dms", 0.5, DELAY, every=4)
    assert "dms.threshold" not in cache.layers[0].state and cache.tokens_kept == 8
    read(model, IDS[:, 8:12], cache)
    # four tokens leave the window in each of two heads, and four of the eight go
    assert all(sum(map(len, positions_of(layer))) == 2 * 12 - 4 for layer in cache.layers)


def test_a_request_is_judged_alone_as_in_a_batch(model: Any) -> None:
    """Rows of other lengths, of which one has no token outside the window yet."""
    ids, given = padded(30, 17, 6)
    cache = cached(model, ids, "knorm+dms", 0.5, DELAY, every=1, given=given)
    for step in range(1, 6):
        read(model, IDS[:, 40 + step : 41 + step].expand(3, 1), cache, **after(given, step))
    for row, length in enumerate((30, 17, 6)):
        own = IDS[:, 10 * row : 10 * row + 30][:, 30 - length :]
        alone = cached(model, own, "knorm+dms", 0.5, DELAY, every=1)
        for step in range(1, 6):
            read(model, IDS[:, 40 + step : 41 + step], alone)
        for layer, wanted in zip(cache.layers, alone.layers, strict=True):
            _, _, positions, filled = layer.contents()
            found = [
                (positions[row, head][filled[row, head]] - (30 - length)).tolist()
                for head in range(positions.shape[1])
            ]
            assert found == positions_of(wanted)


def test_a_file_goes_on_as_the_cache(model: Any, tmp_path: Path) -> None:
    cache = cached(model, IDS[:, :40], "keydiff+dms", 0.5, DELAY, every=1)
    again = loaded(cache, tmp_path, model)
    for each in (cache, again):
        read_in(model, each, [1] * 20, IDS[:, 40:])
    same(again, cache)


@pytest.mark.parametrize(
    "method",
    ["keydiff+dms+protect", "keydiff+dms+moments", "snapkv+dms+cam", "knorm+dms+kivi", "knorm+dms+rerotate"],
)
def test_other_additions_keep_what_the_threshold_leaves(model: Any, method: str) -> None:
    base = method.partition("+")[0]
    options = {**small(base), **DELAY}
    if method.endswith("protect"):
        options |= {"first": 0, "last": 0}
    cache = cached(model, IDS, method, 0.5, options)
    alone = cached(model, IDS, f"{base}+dms", 0.5, {**small(base), **DELAY})
    # later layers read what the first one keeps
    assert positions_of(cache.layers[0]) == positions_of(alone.layers[0])
    assert cache.tokens_kept == alone.tokens_kept


def test_the_order_of_the_threshold_and_the_protection_is_free(model: Any) -> None:
    settings: dict[str, Any] = {
        "options": {**DELAY, "first": 3, "last": 12},
        "every": 1,
        "sizes": [40, *[1] * 20],
    }
    first, second = (
        cached(model, IDS, f"knorm+{name}", 0.5, **settings) for name in ("dms+protect", "protect+dms")
    )
    same(first, second)
    # a window that is protected is not judged
    assert all(
        head[:3] == [0, 1, 2] and head[-12:] == [*range(48, 60)] for head in positions_of(first.layers[1])
    )


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("snapkv+ada_kv+dms", "no budget to divide"),
        ("knorm+dms+ada_kv", "no budget to divide"),
        ("knorm+protect+dms+ada_kv", "no budget to divide"),
        ("knorm+dms+pyramid_kv", "no budget to divide"),
        ("knorm+dms+chunk_kv", "no budget to divide"),
        ("knorm+cake+dms", "no budget to divide"),
        ("lagkv+dms", "chooses its tokens itself"),
        ("kvzap+dms", "chooses its tokens itself"),
        ("h2o+dms", "chooses its tokens itself"),
        ("momentkv+dms", "chooses its tokens itself"),
        ("quest+dms", "chooses its tokens itself"),
        ("knorm+dms+dms", "twice"),
    ],
)
def test_what_has_no_place_for_a_threshold_is_refused(method: str, said: str) -> None:
    refused(lambda: resolve(method), said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": 0}, "option delay: got 0"),
        ({"cutoff": "high"}, "option cutoff: got 'high'"),
        ({"cutoff": True}, "option cutoff: got True"),
        ({"cutoff": float("nan")}, "option cutoff: got nan"),
    ],
)
def test_an_option_out_of_range_is_refused(model: Any, options: dict[str, Any], said: str) -> None:
    refused(lambda: EvictingCache(model, "knorm+dms", 0.5, options), said)


def test_a_budget_while_decoding_is_refused(model: Any) -> None:
    refused(
        lambda: EvictingCache(model, "knorm+dms", budget=12, every=1),
        "budget: got 12.*compression_ratio or the option cutoff",
    )


def test_what_stays_by_itself_is_said() -> None:
    assert catalogue.protected("knorm+dms", {}) == "last 128"
    assert catalogue.protected("knorm+dms", {"delay": 16}) == "last 16"
