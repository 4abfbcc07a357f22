"""Protection in a cache: both ends of a text stay behind
any method, of a prompt, of blocks and while decoding.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.reading import (
    IDS,
    after,
    cached,
    generate,
    loaded,
    padded,
    places,
    positions_of,
    read,
    refused,
    same,
    small,
    written,
)

from evictionary import EvictingCache, reference
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve

ENDS = {"first": 3, "last": 5}
SCORERS = [
    name
    for name in [*catalogue.names(), *catalogue.BASELINES]
    if not resolve(name).is_select and resolve(name).prompt_function is None
]


def both_ends(cache: EvictingCache, first: int, last: int) -> bool:
    """Whether each head holds the first tokens that its layer has read, and the last."""
    return all(
        head[:first] == [*range(first)] and head[-last:] == [*range(layer.seen - last, layer.seen)]
        for layer in cache.layers
        for head in positions_of(layer)
    )


@pytest.mark.parametrize("method", SCORERS)
def test_both_ends_of_a_prompt_stay_and_the_budget_holds(model: Any, method: str) -> None:
    cache = cached(model, IDS, f"{method}+protect", 0.75, {**small(method), **ENDS})
    assert both_ends(cache, 3, 5) and {layer.longest for layer in cache.layers} == {15}


@pytest.mark.parametrize("sizes", [[40, *[1] * 10], [20, 20, 7, 1, 1]])
@pytest.mark.parametrize(
    "method", ["keydiff", "tova", "random", "rkv", "expected_attention", "keydiff+moments"]
)
def test_both_ends_stay_in_blocks_and_while_decoding(model: Any, method: str, sizes: list[int]) -> None:
    """After each part of a text; a part may be longer than the window."""
    base = method.partition("+")[0]
    cache = EvictingCache(model, f"{method}+protect", 0, {**small(base), **ENDS}, budget=12, every=1)
    for ids in IDS[:, : sum(sizes)].split(sizes, dim=1):
        read(model, ids, cache)
        assert both_ends(cache, 3, 5) and {layer.longest for layer in cache.layers} == {12}


@pytest.mark.parametrize("method", ["keydiff", "snapkv", "knorm", "streaming_llm"])
def test_no_protected_token_is_the_method_alone(model: Any, method: str) -> None:
    settings: dict[str, Any] = {"budget": 12, "sizes": [40, *[1] * 8], "every": 1}
    alone = cached(model, IDS, method, options=small(method), **settings)
    cache = cached(
        model, IDS, f"{method}+protect", options={**small(method), "first": 0, "last": 0}, **settings
    )
    same(cache, alone)


def test_the_others_are_the_best_of_what_is_between_the_ends(model: Any) -> None:
    """As the mathematics has it: a top-k of the middle with the rest of the budget."""
    full = cached(model, IDS, None)
    cache = cached(model, IDS, "knorm+protect", budget=20, options=ENDS)
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        kept = np.ones((1, 2, 60), dtype=bool)
        scores = reference.knorm.score(np.asarray(whole.keys, dtype=np.float64))
        kept[..., 3:55] = reference.selection.top_k(scores[..., 3:55], 12)
        assert positions_of(layer) == places(kept)


@pytest.mark.parametrize("budget", [2, 6, 20])
def test_random_with_protection_is_the_baseline(model: Any, budget: int) -> None:
    """With the same seed, of a prompt and while decoding; a small budget keeps the first and the newest."""
    settings: dict[str, Any] = {"budget": budget, "every": 1, "seed": 4, "sizes": [50, *[1] * 5]}
    cache = cached(model, IDS, "random+protect", options={"first": 3, "last": 6}, **settings)
    baseline = cached(model, IDS, "random_protected", options={"sinks": 3, "window": 6}, **settings)
    same(cache, baseline)
    if budget == 6:
        assert positions_of(cache.layers[1]) == [[0, 1, 2, 52, 53, 54]] * 2


@pytest.mark.parametrize(
    "method",
    [
        "keydiff+ada_kv+protect",
        "snapkv+protect+ada_kv+moments",
        "knorm+pyramid_kv+protect",
        "snapkv+protect+cake",
        "snapkv+ada_kv+protect+cake",
        "tova+protect+cam",
    ],
)
def test_both_ends_stay_whatever_divides_the_budget(deep_model: Any, method: str) -> None:
    """Each head of each layer keeps them, and the total holds."""
    options = small(method.partition("+")[0])
    cache = cached(deep_model, IDS, method, 0.75, {**options, **ENDS})
    assert both_ends(cache, 3, 5) and cache.tokens_kept == 15


def test_the_order_of_an_allocator_and_the_protection_is_free(model: Any) -> None:
    settings: dict[str, Any] = {"options": ENDS, "budget": 12, "every": 1, "sizes": [40, *[1] * 4]}
    first, second = (
        cached(model, IDS, f"keydiff+{name}", **settings) for name in ("ada_kv+protect", "protect+ada_kv")
    )
    same(first, second)
    assert both_ends(first, 3, 5) and first.layers[0].ragged is not None


@pytest.mark.parametrize("method", ["gvote", "kvzap", "duo_attention"])
def test_a_method_with_its_own_budget_keeps_both_ends_beside_it(model: Any, method: str) -> None:
    cache, alone = (
        cached(model, IDS, name, options={**small(method), **ends})
        for name, ends in ((f"{method}+protect", ENDS), (method, {}))
    )
    assert both_ends(cache, 3, 5)
    for layer, without in zip(cache.layers, alone.layers, strict=True):
        for head, own in zip(positions_of(layer), positions_of(without), strict=True):
            assert head == sorted({*own, *range(3), *range(55, 60)})


@pytest.mark.parametrize("method", ["keydiff+protect", "keydiff+ada_kv+protect"])
def test_rows_of_a_padded_batch_keep_what_they_keep_alone(model: Any, method: str) -> None:
    (ids, given), token = padded(30, 21), IDS[:, :1]
    settings: dict[str, Any] = {"options": ENDS, "budget": 12, "every": 1}
    cache = cached(model, ids, method, given=given, **settings)
    read(model, token.expand(2, 1), cache, **after(given))
    for row, start in enumerate((0, 9)):
        alone = EvictingCache(model, method, **settings)
        read(model, ids[row : row + 1, start:], alone)
        read(model, token, alone)
        assert both_ends(alone, 3, 5)
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            _, _, positions, filled = ours.contents()
            own = [head[there] - start for head, there in zip(positions[row], filled[row], strict=True)]
            assert [head.tolist() for head in own] == positions_of(theirs)


# the whole prompt


@pytest.mark.parametrize("method", ["random", "keydiff", "tova", "keydiff+ada_kv"])
def test_a_whole_prompt_stays_while_decoding(tmp_path: Path, model: Any, method: str) -> None:
    """The generated tokens compete for the rest of the budget, in a file of the cache too."""
    options = {"prompt": True, "first": 0, "last": 4}
    cache = cached(model, IDS[:, :20], f"{method}+protect", options=options, budget=30, every=1)
    for each in (cache, loaded(cache, tmp_path, model)):
        for ids in IDS[:, 20:50].split(1, dim=1):
            read(model, ids, each)
        assert both_ends(each, 20, 4) and each.tokens_kept == 30


def test_the_prompt_of_a_padded_row_is_its_own(model: Any) -> None:
    """The row of 21 tokens keeps 21 of its prompt, not 30."""
    ids, given = padded(30, 21)
    settings: dict[str, Any] = {"options": {"prompt": True, "first": 0, "last": 1}, "budget": 32, "every": 1}
    cache = cached(model, ids, "streaming_llm+protect", given=given, **settings)
    for step in range(1, 16):
        read(model, IDS[:, step : step + 1].expand(2, 1), cache, **after(given, step))
    _, _, positions, filled = cache.layers[0].contents()
    assert positions[0, 0][filled[0, 0]].tolist() == [*range(30), 43, 44]
    assert positions[1, 0][filled[1, 0]].tolist() == [*range(9, 30), *range(34, 45)]


def test_a_budget_below_the_prompt_is_refused(model: Any) -> None:
    options = {"prompt": True}
    wanted = "option prompt: got true with 20 tokens to keep in a head, wanted a budget of at least 60"
    refused(lambda: cached(model, IDS, "keydiff+protect", options=options, budget=20, every=1), wanted)
    generate(model, IDS[:, :9], EvictingCache(model, "keydiff+protect", options=options, budget=20, every=1))


# what is refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lagkv+protect",
            r"lagkv chooses its tokens itself and keeps first 16, last 1024, but protect chooses them by"
            " scores; wanted its options lag_size and sink_size, or a scorer first",
        ),
        (
            "h2o+protect",
            "keeps last half of the budget, but protect chooses them by scores; wanted a scorer first",
        ),
        ("attention_matching+protect", "keeps no token by itself"),
        ("quest+protect", "keeps no token by itself"),
        ("momentkv+protect", "keeps first 1, last 32 of a prompt"),
        ("keydiff+chunk_kv+protect", "'protect' after another addition that chooses tokens by scores"),
        ("keydiff+protect+chunk_kv", "'chunk_kv' after another addition that chooses tokens by scores"),
    ],
)
def test_methods_without_scores_are_refused_and_told_the_way_out(name: str, message: str) -> None:
    refused(lambda: resolve(name), message)


def test_options_out_of_range_are_refused_before_a_prompt(tmp_path: Path, model: Any) -> None:
    for options, message in (
        ({"first": -1}, "option first: got -1, wanted"),
        ({"last": 2.5}, "option last: got 2.5, wanted a whole number"),
        ({"prompt": "maybe"}, "option prompt: got 'maybe', wanted true or false"),
    ):
        refused(lambda options=options: EvictingCache(model, "keydiff+protect", options=options), message)
    refused(lambda: EvictingCache(model, "keydiff", options={"first": 1}), "keydiff has no such option")
    file = written(tmp_path, "def score(keys, first=2):\n    return keys[..., 0]\n")
    refused(lambda: resolve(f"{file}+protect"), "has an option first, which protect has too")
