"""Calibrates methods on a text: the model reads it once,
and the state of each layer is computed from its queries.
"""

import contextlib
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from evictionary.cache import calibration
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import UsageError, require
from evictionary.evaluation.questions import prefill
from evictionary.methods.catalogue import REPLAYED
from evictionary.models.weights import device_of

# Tokens of a text that calibrates: fewer say too little about the directions of the queries, more are not
# read. A part is read twice: KVzap's public code takes texts of 750 to 1,250 tokens.
LEAST, MOST, PART = 256, 4096, 1024


def of_text(
    model: PreTrainedModel,
    ids: torch.Tensor,
    plan: Callable[[int], None] = lambda steps: None,
    advance: Callable[[str], None] = lambda text: None,
) -> dict[int, calibration.State]:
    """The calibrated state of each layer from the first MOST
    tokens of ids [1, N], as far as the model's context goes.

    plan and advance are told the number of steps, and each
    step. Raises UsageError for fewer than LEAST tokens.
    """
    longest = min(MOST, getattr(model.config.get_text_config(), "max_position_embeddings", MOST))
    require(ids.shape[1] >= LEAST, f"text: got {ids.shape[1]} tokens, wanted at least {LEAST} to calibrate")
    ids = ids[:, :longest]
    parts = ids.tensor_split(-(-ids.shape[1] // min(PART, longest // 2)), dim=1)
    plan(1 + len(parts))
    advance("reading the text")
    with EvictingCache(model, None, record=("queries",)) as cache:
        prefill(model, ids, cache)
    positions = torch.arange(ids.shape[1], device=device_of(model))
    found = {
        layer: calibration.of_states(
            model, layer, recorded["queries"], positions, cache.layers[layer].keys, positions
        )
        for layer, recorded in cache.recorded.items()
    }
    # a model that cannot read a text twice, or whose output projection is not known, has no surrogate
    with contextlib.suppress(UsageError):
        readings = []
        for part in parts:
            advance("reading a part twice")
            readings.append(read_twice(model, part))
        for layer in found:
            found[layer] |= calibration.of_readings(model, layer, [reading[layer] for reading in readings])
    return found


def read_twice(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    """The states of each layer after a model has read ids [1, N] twice."""
    with EvictingCache(model, None, record=(*REPLAYED, "hidden_states")) as cache:
        prefill(model, ids, cache)
    return {
        index: recorded | {"keys": cache.layers[index].keys, "values": cache.layers[index].values}
        for index, recorded in cache.recorded.items()
    }
