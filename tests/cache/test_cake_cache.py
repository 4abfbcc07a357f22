"""CAKE in a cache: layers share the total while they read the prompt, and keep what they would at once."""

from typing import Any

import pytest
import torch
from tools.reading import IDS, cached, padded, places, positions_of, refused, same, same_moments

from evictionary import EvictingCache
from evictionary.methods.method import Request
from evictionary.methods.resolve import resolve
from evictionary.reference import cake, momentkv, selection, snapkv

WINDOW = {"window_size": 4}


def test_a_cache_keeps_what_the_mathematics_keeps_at_once(deep_model: Any) -> None:
    """With the moments of what goes; of a prefilled cache too."""
    full = cached(deep_model, IDS, None, record=("queries",))
    states = [[full.recorded[index]["queries"], *layer.slots()] for index, layer in enumerate(full.layers)]
    preferences = [float(cake.preference(queries, keys, **WINDOW)[0]) for queries, keys, _ in states]
    budgets = cake.budgets(24, preferences, length=60, **WINDOW)
    assert len(set(budgets)) > 2 and budgets != sorted(budgets, reverse=True)
    cache = cached(deep_model, IDS, "snapkv+moments+cake", 0.6, WINDOW)
    for layer, (queries, keys, values), budget in zip(cache.layers, states, budgets, strict=True):
        kept = selection.top_k(snapkv.score(queries, keys, **WINDOW), budget)
        assert positions_of(layer) == places(kept)
        same_moments(layer, momentkv.update(momentkv.no_moments(keys, values), keys, values, ~kept))
    same(EvictingCache.from_prefilled(deep_model, full, "snapkv+cake", 0.6, WINDOW), cache)


def test_no_more_than_the_total_and_a_layer_is_stored(deep_model: Any, monkeypatch: Any) -> None:
    """Two heads of eight layers with 12 tokens each, of which 4 are the window of a layer that has read; the
    first has no more than its 60.
    """
    stored, update = [], EvictingCache.update

    def counted(cache: Any, *arguments: Any, **named: Any) -> Any:
        stored.append(60 * 2 + sum(int(layer.lengths.sum()) for layer in cache.layers if layer.seen))
        return update(cache, *arguments, **named)

    monkeypatch.setattr(EvictingCache, "update", counted)
    cache = cached(deep_model, IDS, "snapkv+ada_kv+cake", 0.8, WINDOW)
    assert stored == [2 * 60, *(2 * (min(60 * layers, 8 * 8 + 4 * layers) + 60) for layers in range(1, 8))]
    assert cache.tokens_kept == 12 and cache._session.compressor.stages == []


@pytest.mark.parametrize("method", ["snapkv+cake", "snapkv+chunk_kv+cake", "snapkv+ada_kv+cake"])
def test_rows_of_a_batch_have_budgets_of_their_own(deep_model: Any, method: str) -> None:
    ids, given = padded(30, 21)
    cache = cached(deep_model, ids, method, 0.5, WINDOW, given=given)
    for row, start in enumerate((0, 9)):
        alone = cached(deep_model, ids[row : row + 1, start:], method, 0.5, WINDOW)
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            _, _, positions, filled = ours.contents()
            own = [head[there] - start for head, there in zip(positions[row], filled[row], strict=True)]
            assert [head.tolist() for head in own] == positions_of(theirs)


def test_what_cake_cannot_do_is_refused(model: Any) -> None:
    for method, every, message in (
        ("h2o+cake", 0, "chooses its tokens itself"),
        ("momentkv+cake", 0, "chooses its tokens itself"),
        ("snapkv+pyramid_kv+cake", 0, "another division among layers"),
        ("snapkv+cake", 8, "wanted 0"),
    ):
        refused(lambda method=method, every=every: EvictingCache(model, method, every=every), message)
    states = dict.fromkeys(("keys", "values", "queries"), torch.ones(1, 1, 40, 2))
    refused(lambda: resolve("snapkv+cake").kept(states, Request(0.5)), "wanted an EvictingCache")
    full = cached(model, IDS, None)
    refused(lambda: EvictingCache.from_prefilled(model, full, "knorm+cake", 0.5), "did not record")
