"""CAKE in a cache: layers share the total while they read the prompt, and keep what they would at once."""

from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools.reading import IDS, cached, loaded, near, padded, places, positions_of, read, refused, same

from evictionary import EvictingCache
from evictionary.methods.method import Request
from evictionary.methods.resolve import resolve
from evictionary.reference import cake, momentkv, selection, snapkv

WINDOW = {"window_size": 4}


@pytest.fixture(scope="module")
def deep_model() -> Any:
    return tiny_llama(num_hidden_layers=6)


def test_a_cache_keeps_what_the_mathematics_keeps_at_once(deep_model: Any, tmp_path: Any) -> None:
    """With the moments of what goes; of a prefilled cache too."""
    full = cached(deep_model, IDS, None, record=("queries",))
    states = [
        [each.double().numpy() for each in (full.recorded[index]["queries"], *layer.slots())]
        for index, layer in enumerate(full.layers)
    ]
    preferences = [cake.preference(queries, keys, **WINDOW)[0] for queries, keys, _ in states]
    budgets = cake.budgets(24, preferences, length=60, **WINDOW)
    assert len(set(budgets)) > 2 and budgets != sorted(budgets, reverse=True)
    cache = cached(deep_model, IDS, "snapkv+moments+cake", 0.6, WINDOW)
    for layer, (queries, keys, values), budget in zip(cache.layers, states, budgets, strict=True):
        kept = selection.top_k(snapkv.score(queries, keys, **WINDOW), budget)
        assert positions_of(layer) == places(kept)
        none = momentkv.no_moments(keys, values)
        near(layer.moments, momentkv.update(none, keys, values, ~kept), rtol=1e-4, atol=1e-3)
    same(EvictingCache.from_prefilled(deep_model, full, "snapkv+cake", 0.6, WINDOW), cache)
    near(
        [read(deep_model, IDS[:, :3], loaded(cache, tmp_path, deep_model))],
        [read(deep_model, IDS[:, :3], cache)],
    )


def test_no_more_than_the_total_and_a_layer_is_stored(deep_model: Any, monkeypatch: Any) -> None:
    """Two heads of six layers with 12 tokens each, of which 4 are the window of a layer that has read."""
    stored, update = [], EvictingCache.update
    cache = EvictingCache(deep_model, "snapkv+ada_kv+cake", 0.8, WINDOW)

    def counted(*arguments: Any, **named: Any) -> Any:
        found = update(*arguments, **named)
        stored.append(sum(int(layer.lengths.sum()) for layer in cache.layers if layer.keys is not None))
        return found

    monkeypatch.setattr(EvictingCache, "update", counted)
    read(deep_model, IDS, cache)
    assert stored == [2 * 60, *(2 * (6 * 8 + 4 * layers + 60) for layers in range(1, 6))]
    assert cache.tokens_kept == 12 and cache.stages == []


@pytest.mark.parametrize("method", ["snapkv+cake", "snapkv+chunk_kv+cake", "knorm+ada_kv+cake"])
def test_rows_of_a_batch_have_budgets_of_their_own(deep_model: Any, method: str) -> None:
    ids, given = padded(30, 21)
    options = WINDOW if "snapkv" in method else {}
    cache = cached(deep_model, ids, method, 0.5, options, given=given)
    for row, length in enumerate((30, 21)):
        alone = cached(deep_model, ids[row : row + 1, 30 - length :], method, 0.5, options)
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            assert ours.lengths[row].tolist() == theirs.lengths[0].tolist()
            _, _, positions, filled = ours.contents()
            wanted = [token + 30 - length for head in positions_of(theirs) for token in head]
            assert positions[row][filled[row]].tolist() == wanted


def test_what_cake_cannot_do_is_refused(model: Any) -> None:
    refused(lambda: EvictingCache(model, "h2o+cake"), "chooses its tokens itself")
    refused(lambda: EvictingCache(model, "momentkv+cake"), "chooses its tokens itself")
    refused(lambda: EvictingCache(model, "snapkv+pyramid_kv+cake"), "another division among layers")
    refused(lambda: EvictingCache(model, "snapkv+cake", every=8), "wanted 0")
    states = dict.fromkeys(("keys", "values", "queries"), torch.ones(1, 1, 40, 2))
    refused(lambda: resolve("snapkv+cake").kept(states, Request(0.5)), "wanted an EvictingCache")
    full = cached(model, IDS, None)
    refused(lambda: EvictingCache.from_prefilled(model, full, "knorm+cake", 0.5), "did not record")
