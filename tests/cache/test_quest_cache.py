"""Selection without eviction in a cache: later tokens attend to what the method chooses for their query."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools.reading import (
    IDS,
    after,
    cached,
    loaded,
    masked_logits,
    near,
    padded,
    read,
    read_in,
    refused,
    written,
)
from transformers import DynamicCache

from evictionary import EvictingCache
from evictionary.reference import quest as reference

OPTIONS = {"page_size": 4, "skipped_layers": 0}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_later_token_attends_to_the_pages_of_the_mathematics(attention: str) -> None:
    """Of a model of one layer, whose queries do not depend on what was attended to before."""
    model = tiny_llama(num_hidden_layers=1, attn_implementation=attention)
    states = cached(model, IDS[:, :43], None, record=("queries",))
    queries, keys = (each.double().numpy() for each in (states.recorded[0]["queries"], states.layers[0].keys))
    cache, full = cached(model, IDS[:, :40], "quest", budget=12, options=OPTIONS), DynamicCache()
    read(model, IDS[:, :40], full)
    for place in (40, 41, 42):
        token, seen = IDS[:, place : place + 1], keys[:, :, : place + 1]
        mask = reference.select(queries[:, :, place], seen, 0, budget=12, **OPTIONS)
        assert set(mask.sum(axis=-1).flat) == {8 + place % 4 + 1}
        wanted = masked_logits(model, token, {0: torch.from_numpy(mask)[:, :, None]}, full)
        near([read(model, token, cache)], [wanted.numpy()])
    assert cache.tokens_kept == 43 and cache.nbytes >= cache.nbytes_full


@pytest.mark.parametrize("arguments", [{"budget": 43}, {"compression_ratio": 0.0}, {"options": {}}])
def test_a_budget_of_all_tokens_and_the_first_layers_are_the_full_cache(
    model: Any, arguments: dict[str, Any]
) -> None:
    """The model has two layers, which attend to all unless told."""
    given, sizes = {"options": OPTIONS} | arguments, [40, 1, 1, 1]
    wanted = read_in(model, EvictingCache(model, None), sizes)
    near([read_in(model, EvictingCache(model, "quest", **given), sizes)], [wanted.numpy()])


def test_a_padded_row_and_a_cache_that_was_stored_copied_or_cropped_answer_alike(
    model: Any, tmp_path: Path
) -> None:
    """Each row of a batch counts its pages from its first token."""
    rows, given = padded(30, 21)
    both = cached(model, rows, "quest", budget=9, options=OPTIONS, given=given)
    for cache in (copy.deepcopy(both), loaded(both, tmp_path, model), both):
        cache.reorder_cache(torch.tensor([1, 0]))
        flipped = {name: each.flip(0) for name, each in after(given).items()}
        got = read(model, IDS[:, :1].expand(2, 1), cache, **flipped)
        for row, length in enumerate((21, 30)):
            alone = cached(model, rows[1 - row :, 30 - length :][:1], "quest", budget=9, options=OPTIONS)
            near([got[row]], [read(model, IDS[:, :1], alone)[0].numpy()])
            read(model, IDS[:, 5:8], alone)
            alone.crop(-4)
            near([got[row]], [read(model, IDS[:, :1], alone)[0].numpy()])


@pytest.mark.parametrize(
    ("name", "named", "message"),
    [
        ("quest", {"every": 8}, "every: got 8, wanted 0: quest evicts nothing"),
        ("quest+moments", {}, "evicts nothing that moments could sum up"),
        ("quest+ada_kv", {}, "chooses its tokens itself"),
        ("TRAITS = {'per_query'}\ndef score(query): pass", {}, "wanted a select that takes query"),
    ],
)
def test_what_a_method_without_eviction_cannot_do_is_said_before_a_token_is_read(
    model: Any, tmp_path: Path, name: str, named: dict[str, Any], message: str
) -> None:
    name = written(tmp_path, name) if "def" in name else name
    refused(lambda: EvictingCache(model, name, **named), message)


def test_there_is_nothing_to_compress_and_a_closed_cache_reads_no_more(model: Any) -> None:
    with cached(model, IDS[:, :40], "quest", budget=9) as cache:
        cache.compress()
    refused(lambda: read(model, IDS[:, :1], cache), "wanted it open", RuntimeError)
