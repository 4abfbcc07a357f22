"""CaM in a cache, behind any method: the kept tokens have merged values, and nothing else differs."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.families import build
from tools.reading import IDS, after, cached, loaded, near, padded, positions_of, read, refused, same, small

from evictionary import EvictingCache, optimized, reference
from evictionary.cache.layers import EvictingLayer
from evictionary.optimized import cam
from evictionary.optimized.softmax import of_model

ANY = ["h2o", "snapkv", "streaming_llm", "keydiff+ada_kv", "snapkv+chunk_kv+pyramid_kv", "lagkv", "kvzip"]
Merges = list[tuple[list[torch.Tensor], torch.Tensor]]


@pytest.fixture
def merges(monkeypatch: Any) -> Merges:
    """What `merge_values` of each piece was given, values, attention, kept and draws, and what it gave."""
    found: Merges = []
    own = cam.merge_values

    def merge_values(values: Any, attention: Any, kept: Any, draws: Any, *, merge_size: int = 32) -> Any:
        merged = own(values, attention, kept, draws, merge_size=merge_size)
        found.append(([values, attention, kept, draws], merged))
        return merged

    merge_values.__module__ = own.__module__
    monkeypatch.setattr(cam, "merge_values", merge_values)
    return found


def stored(layer: EvictingLayer) -> Iterator[torch.Tensor]:
    """The values that each head of the first row stores."""
    _, values, _, filled = layer.contents()
    return (values[0, head][filled[0, head]] for head in range(values.shape[1]))


@pytest.mark.parametrize("method", ANY)
def test_the_values_are_those_of_the_mathematics_and_the_rest_is_as_without(
    model: Any, merges: Merges, method: str
) -> None:
    """The attention is that which each token of the prompt has received from all queries."""
    full = cached(model, IDS, None, record=("queries",))
    cache, plain = (cached(model, IDS, name, 0.6, small(method)) for name in (f"{method}+cam", method))
    for index, (layer, without) in enumerate(zip(cache.layers, plain.layers, strict=True)):
        assert positions_of(layer) == positions_of(without)
        assert torch.equal(layer.contents()[0], without.contents()[0])
        assert not torch.equal(layer.contents()[1], without.contents()[1])
        (values, attention, kept, draws), _ = merges[index]
        keys, own_values = full.layers[index].slots()
        near([values, attention], [own_values, reference.h2o.score(full.recorded[index]["queries"], keys)])
        wanted = torch.tensor(reference.cam.merge_values(values, attention, kept, draws))
        near(list(stored(layer)), [wanted[0, head][kept[0, head]] for head in range(len(kept[0]))])


def test_while_decoding_the_attention_is_that_of_the_new_queries(
    model: Any, merges: Merges, tmp_path: Path
) -> None:
    """A prompt in blocks of 16, then token by token; a cache from a file goes on in the same way."""
    settings = {"options": {"window_size": 4}, "budget": 20, "every": 16}
    seen: list[int] = []
    cache = cached(model, IDS, "snapkv+cam", sizes=(24, 16), **settings)
    again = loaded(cache, tmp_path, model)
    for token in IDS[:, 40:56].split(1, dim=1):
        near([read(model, token, again)], [read(model, token, cache)])
    for (_, attention, kept, _), _ in merges:
        seen.append(round(float(attention.sum() / attention.shape[1])))
        assert int(kept.sum()) == 20 * kept.shape[1]
    assert seen == [24] * 2 + [16] * 6
    same(again, cache)
    draws = [given[3] for given, _ in merges]
    assert not torch.equal(draws[0][..., :20], draws[2][..., :20])
    assert torch.equal(draws[4], draws[6])


def test_ragged_heads_merge_head_by_head(model: Any, merges: Merges) -> None:
    """Heads with different numbers of tokens are compressed again, each with its own draws."""
    cache = cached(model, IDS[:, :48], "keydiff+ada_kv+cam", sizes=(32, 16), budget=12, every=16)
    last = merges[2:]
    lengths = [values.shape[2] for (values, *_), _ in last]
    assert len(last) == 4 and len(set(lengths)) > 1
    assert not torch.equal(last[0][0][3][..., :12], last[1][0][3][..., :12])
    for index, layer in enumerate(cache.layers):
        own = last[2 * index : 2 * index + 2]
        near(list(stored(layer)), [merged[kept] for (_, _, kept, _), merged in own])
        for given, merged in own:
            near([merged], [reference.cam.merge_values(*given)])


@pytest.mark.parametrize("method", ["snapkv+cam", "keydiff+ada_kv+cam", "h2o+cam"])
def test_a_row_of_a_padded_batch_has_the_values_that_it_has_alone(model: Any, method: str) -> None:
    ids, given = padded(30, 21)
    cache = cached(model, ids, method, 0.5, small(method), given=given)
    for row, start in enumerate((0, 9)):
        alone = cached(model, ids[row : row + 1, start:], method, 0.5, small(method))
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            _, values, _, filled = ours.contents()
            near([values[row][filled[row]]], [torch.cat(list(stored(theirs)))])
    logits = read(model, IDS[:, :1].expand(2, 1), cache, **after(given))
    near([logits[1:]], [read(model, IDS[:, :1], alone)], atol=1e-3)


def test_each_seed_has_its_draws_and_each_draw_its_probability(model: Any, merges: Merges) -> None:
    """Hoeffding's bound for a chance of one in a billion. A method that draws tokens does not find the
    numbers of the merge: what it evicts would have the smallest.
    """
    caches = [cached(model, IDS, "random+cam", 0.5, seed=seed) for seed in (*range(40), 0)]
    same(caches[0], caches[-1])
    draws = torch.stack([given[3] for given, _ in merges[:-2]])
    assert len(draws.unique()) > 0.99 * draws.numel()
    gone = draws[~torch.stack([given[2] for given, _ in merges[:-2]])]
    for numbers, below in ((draws, 0.25), (draws, 0.75), (gone, 0.5)):
        share = (numbers < below).double().mean()
        assert abs(share - below) < math.sqrt(math.log(2e9) / (2 * numbers.numel()))
    assert float(draws.min()) >= 0 and float(draws.max()) < 1


def test_where_nothing_is_evicted_the_cache_is_as_it_was(model: Any, merges: Merges) -> None:
    same(cached(model, IDS, "h2o+cam", budget=60), cached(model, IDS, "h2o", budget=60))
    assert merges == []


def test_a_prefilled_cache_gives_the_same(model: Any) -> None:
    full = cached(model, IDS, None, record=("queries",))
    same(EvictingCache.from_prefilled(model, full, "knorm+cam"), cached(model, IDS, "knorm+cam"))


@pytest.mark.parametrize("family", ["Gemma 2", "gpt-oss"])
def test_the_attention_is_that_of_a_model_with_another_softmax(merges: Merges, family: str) -> None:
    """Capped logits, and a sink beside the tokens."""
    other = build(family)
    full = cached(other, IDS[:, :40], None, record=("queries",))
    cached(other, IDS[:, :40], "knorm+cam")
    index = min(full.evicting)
    states = full.recorded[index]["queries"], full.layers[index].slots()[0]
    with of_model(full.softmax_of_batch(index, 1)):
        near([merges[0][0][1]], [optimized.h2o.score(*states)])
    assert not torch.allclose(merges[0][0][1], optimized.h2o.score(*states), atol=1e-2)


def test_what_cam_cannot_do_is_refused(model: Any) -> None:
    for method in ("h2o+cam+moments", "h2o+moments+cam", "momentkv+cam", "attention_matching+cam"):
        refused(lambda method=method: EvictingCache(model, method), "would count again; wanted it alone")
    for method in ("snapkv+cam+cake", "snapkv+cake+cam"):
        refused(lambda method=method: EvictingCache(model, method), "wanted one of them")
    refused(lambda: EvictingCache(model, "quest+cam"), "evicts nothing that cam could sum up")
    refused(lambda: EvictingCache(model, "h2o+cam", every=8), "wanted 0")
    cache = cached(model, IDS, "knorm+cam")
    read(model, IDS[:, :2], cache)
    refused(cache.compress, "wanted a cache made with every=N")
    full = cached(model, IDS, None)
    refused(lambda: EvictingCache.from_prefilled(model, full, "knorm+cam"), "did not record")
