"""Attention Matching in a cache: what it keeps, and how later tokens attend to it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.reading import IDS, cached, loaded, near, read, refused

from evictionary import EvictingCache
from evictionary.cache import partial_attention
from evictionary.reference import attention_matching as reference


def read_by_both(model: Any) -> tuple[EvictingCache, EvictingCache]:
    """A full cache that has recorded the second reading, and one with ten tokens of a head."""
    full = cached(model, IDS[:, :40], None, record=("replay_queries",))
    return full, cached(model, IDS[:, :40], "attention_matching", budget=10)


def test_a_cache_keeps_the_tokens_the_bias_and_the_values_of_the_mathematics(model: Any) -> None:
    full, cache = read_by_both(model)
    for index, layer in enumerate(cache.layers):
        keys, values, queries = (
            each.double().numpy()
            for each in (*full.layers[index].slots(), full.recorded[index]["replay_queries"])
        )
        kept = reference.select(keys, queries, budget=10)
        bias = reference.fit_bias(queries, keys, kept)
        fitted = reference.fit_values(queries, keys, values, kept, bias)
        assert np.array_equal(layer.positions.numpy(), kept.nonzero()[2].reshape(*kept.shape[:2], 10))
        near([layer.state["bias"], layer.values], [bias, fitted], atol=1e-3)


def test_later_tokens_attend_with_the_bias_and_have_none(model: Any, tmp_path: Path) -> None:
    _, cache = read_by_both(model)
    again = loaded(cache, tmp_path, model)
    logits = read(model, IDS[:, 40:43], cache)
    near([read(model, IDS[:, 40:43], again)], [logits.numpy()])
    layer = cache.layers[1]
    assert layer.stored == 13 and not layer.is_plain
    query = torch.randn(1, model.config.num_attention_heads, 1, layer.keys.shape[-1])
    bias = torch.nn.functional.pad(layer.state["bias"], (0, 3))
    wanted = reference.attend(*(each.numpy() for each in (query, *layer.slots(), bias)))
    near([partial_attention.attend(query, layer)], [wanted])
    plain = cached(model, IDS[:, :40], "attention_matching", budget=10)
    plain.layers[1].state["bias"].zero_()
    assert not torch.allclose(read(model, IDS[:, 40:43], plain), logits, atol=1e-4)


def test_the_mass_of_the_evicted_tokens_is_not_counted_twice(model: Any) -> None:
    refused(lambda: EvictingCache(model, "attention_matching+moments"), "would count again; wanted it alone")
    refused(lambda: EvictingCache(model, "attention_matching+ada_kv"), "chooses its tokens itself")
    refused(lambda: EvictingCache(model, "attention_matching", every=8), "wanted 0")
