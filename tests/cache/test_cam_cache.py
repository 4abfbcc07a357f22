"""CaM in a cache, behind any method: the kept tokens have merged values, and nothing else differs."""

import math
from typing import Any

import pytest
import torch
from tools.families import build
from tools.reading import IDS, after, cached, near, padded, positions_of, read, refused, same, small

from evictionary import EvictingCache, optimized, reference
from evictionary.optimized import cam
from evictionary.optimized.softmax import of_model


@pytest.fixture
def merges(monkeypatch: Any) -> list[Any]:
    found: list[Any] = []  # of each piece values, attention, kept, draws, and the values after it
    own = cam.merge_values

    def merge_values(values: Any, attention: Any, kept: Any, draws: Any) -> Any:
        found.append([values, attention, kept, draws, own(values, attention, kept, draws)])
        return found[-1][-1]

    monkeypatch.setattr(cam, "merge_values", merge_values)
    return found


@pytest.mark.parametrize(
    "method",
    ["h2o", "snapkv", "streaming_llm", "keydiff+ada_kv", "snapkv+chunk_kv+pyramid_kv", "lagkv", "kvzip"],
)
def test_the_values_are_merged_and_the_rest_is_as_without(model: Any, merges: list[Any], method: str) -> None:
    """The attention is that which each token of the prompt has received from all queries."""
    full = cached(model, IDS, None, record=("queries",))
    cache, plain = (cached(model, IDS, name, 0.6, small(method)) for name in (f"{method}+cam", method))
    for index, (layer, without) in enumerate(zip(cache.layers, plain.layers, strict=True)):
        own, there, (*given, _) = layer.contents(), without.contents(), merges[index]
        assert all(torch.equal(own[place], there[place]) for place in (0, 2, 3))
        near(
            given[:2],
            [
                full.layers[index].values,
                reference.h2o.score(full.recorded[index]["queries"], full.layers[index].keys),
            ],
        )
        near([own[1][own[3]]], [reference.cam.merge_values(*given)[given[2]]])


@pytest.mark.parametrize("method", ["snapkv+cam", "keydiff+ada_kv+cam"])
def test_rows_and_ragged_heads_merge_while_decoding_as_they_do_alone(
    model: Any, merges: list[Any], method: str
) -> None:
    """In a padded batch. The attention is that of the queries since the last compression."""
    (ids, given), token = padded(30, 21), IDS[:, :1]
    settings: dict[str, Any] = {"options": small(method), "budget": 8, "every": 1}
    cache = cached(model, ids, method, given=given, **settings)
    read(model, token.expand(2, 1), cache, **after(given))
    for row, count in enumerate((30, 21)):
        merges.clear()
        own_ids = [ids[row : row + 1, 30 - count :], token]
        alone = cached(model, torch.cat(own_ids, dim=1), method, sizes=(count, 1), **settings)
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            own, there = ours.contents(), theirs.contents()
            near([own[1][row][own[3][row]]], [there[1][there[3]]])
        for place, (*states, merged) in enumerate(merges):
            near([merged], [reference.cam.merge_values(*states)])
            assert float(states[1].sum(dim=-1)[0, 0]) == pytest.approx(1 if place > 1 else count)


def test_each_seed_has_its_draws_and_each_draw_its_probability(model: Any, merges: list[Any]) -> None:
    """Hoeffding's bound for a chance of one in a billion. A method that draws tokens does not find the
    numbers of the merge: what it evicts would have the smallest.
    """
    caches = [cached(model, IDS, "random+cam", 0.5, seed=seed) for seed in (*range(40), 0)]
    same(caches[0], caches[-1])
    kept, draws = (torch.cat([each[place] for each in merges[:-2]]) for place in (2, 3))
    for numbers, below in ((draws, 0.25), (draws, 0.75), (draws[~kept], 0.5)):
        assert abs(float((numbers < below).double().mean()) - below) < math.sqrt(
            math.log(2e9) / (2 * numbers.numel())
        )
    assert len(draws.unique()) > 0.99 * draws.numel()


@pytest.mark.parametrize("family", ["Gemma 2", "gpt-oss"])
def test_the_attention_is_that_of_a_model_with_another_softmax(merges: list[Any], family: str) -> None:
    other = build(family)
    full, _ = (cached(other, IDS[:, :40], name, record=("queries",)) for name in (None, "knorm+cam"))
    settings = full._session.settings
    index = settings.places[0]
    states = full.recorded[index]["queries"], full.layers[index].slots()[0]
    with torch.no_grad(), of_model(settings.softmax(index, 1)):
        near([merges[0][1]], [optimized.h2o.score(*states)])
    assert not torch.allclose(merges[0][1], optimized.h2o.score(*states), atol=1e-2)


def test_what_cam_cannot_do_is_refused(model: Any, merges: list[Any]) -> None:
    for method, message in (
        *((each, "would count again") for each in ("h2o+cam+moments", "h2o+moments+cam", "momentkv+cam")),
        ("attention_matching+cam", "would count again"),
        *((each, "wanted one of them") for each in ("snapkv+cam+cake", "snapkv+cake+cam")),
        ("quest+cam", "evicts nothing that cam could sum up"),
    ):
        refused(lambda method=method: EvictingCache(model, method), message)
    full, cache = (cached(model, IDS, method, budget=60) for method in (None, "knorm+cam"))
    assert merges == [] and positions_of(cache.layers[0]) == positions_of(full.layers[0])
    refused(cache.compress, "wanted a cache made with every=N")
    refused(lambda: EvictingCache.from_prefilled(model, full, "knorm+cam"), "did not record")
