"""Calibrates methods on a text: the model reads it once, and the state of each layer is computed from its
queries.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from evictionary.cache import calibration
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import UsageError
from evictionary.evaluation.questions import prefill

LEAST, MOST = 256, 4096
"""Tokens of a text that calibrates: fewer say too little about the directions of the queries, more are not
read.
"""


def of_text(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, calibration.State]:
    """The calibrated state of each layer from the first MOST tokens of ids [1, N], as far as the model's
    context goes.

    Raises UsageError for fewer than LEAST tokens.
    """
    longest = min(MOST, getattr(model.config.get_text_config(), "max_position_embeddings", MOST))
    if ids.shape[1] < LEAST:
        raise UsageError(f"text: got {ids.shape[1]} tokens, wanted at least {LEAST} to calibrate")
    ids = ids[:, :longest]
    with EvictingCache(model, None, record=("queries",)) as cache:
        prefill(model, ids, cache)
    positions = torch.arange(ids.shape[1], device=model.device)
    found: dict[int, Any] = {}
    for layer, recorded in cache.recorded.items():
        found[layer] = calibration.of_states(
            model, layer, recorded["queries"], positions, cache.layers[layer].keys, positions
        )
    return found
