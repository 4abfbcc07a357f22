"""Compactor in a cache: its keys are brought to before RoPE, and the seed draws its sketch."""

from typing import Any

import numpy as np
import torch
from tools.reading import IDS, cached, places, positions_of, refused

from evictionary.reference import compactor, rope, selection


def test_a_cache_keeps_the_tokens_of_the_mathematics(model: Any) -> None:
    full = cached(model, IDS, None, record=("queries",))
    keys, values = (each.numpy() for each in full.layers[1].slots())
    sketch = torch.randn(1, 2, 8, 48, generator=torch.Generator().manual_seed(1)).numpy() / 48**0.5
    states = (full.recorded[1]["queries"].numpy(), keys, values, rope.rotate(keys, -np.arange(60)), sketch)
    kept = selection.top_k(compactor.score(*states, compression_ratio=2 / 3), 20)
    assert positions_of(cached(model, IDS, "compactor", budget=20).layers[1]) == places(kept)
    refused(lambda: cached(model, IDS, "compactor", every=8), "every: got 8, wanted 0")
