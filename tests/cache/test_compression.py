"""One step of compression by itself: states in, what is kept out."""

import copy
from typing import Any

import pytest
import torch
from tools.reading import IDS, cached, small

METHODS = ["keydiff", "lagkv", "momentkv", "knorm+ada_kv", "keydiff+moments", "snapkv+cam", "gvote"]


@pytest.mark.parametrize("method", METHODS)
def test_a_compression_changes_no_layer_before_it_is_carried_out(model: Any, method: str) -> None:
    with cached(model, IDS, method, 0.5, small(method), every=100, sizes=[40, 8]) as cache:
        layer, session = cache.layers[0], cache._session
        recent = {"queries": layer.recent, "hidden_states": layer.recent_hidden}
        remembered = {name: states for name, states in recent.items() if states is not None}
        session.captured[0] = {"queries": torch.ones(1, 4, 1, 8)} | remembered
        before, numbers = copy.deepcopy(layer.tensors()), layer.numbers()
        (eviction,) = session.compressor.evictions(session.asked(0))
        assert eviction.layer is layer and layer.numbers() == numbers
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.tensors().items())
        eviction.carry_out()
        assert eviction.kept is not None and torch.equal(layer.lengths, eviction.kept.sum(dim=-1))
        assert layer.evicted_at == layer.seen == 48
