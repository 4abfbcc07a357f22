"""Correct KVzips of other kinds."""

from __future__ import annotations

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.refusal import refuse_unless
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY, streamed, torch_weights

SCORE, TOP_R = "kvzip.score", "kvzip.top_r"


def refuse(keys, replay_queries, replay_keys) -> None:
    shape = tuple(replay_queries.shape)
    fits = len(shape) == 4 and shape[0] == keys.shape[0] and shape[3] == keys.shape[3] and shape[1] % keys.shape[1] == 0
    refuse_unless(replay_queries=fits)
    refuse_unless(replay_keys=tuple(replay_keys.shape) == (*keys.shape[:2], shape[2], keys.shape[3]))


@control(SCORE, dtypes=NUMPY)
def streamed_with_a_running_maximum(keys, replay_queries, replay_keys):
    """Query by query over tiles of 16 tokens, the largest so far kept."""
    refuse(keys, replay_queries, replay_keys)
    weights = streamed(replay_queries, np.concatenate([keys, replay_keys], axis=2))[..., : keys.shape[2]]
    scores = np.zeros(keys.shape[:3], keys.dtype)
    for rows in np.moveaxis(weights.reshape(*keys.shape[:2], -1, keys.shape[2]), 2, 0):
        scores = np.maximum(scores, rows)
    return scores


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_at_once(keys, replay_queries, replay_keys):
    """torch, at least in float32, the whole matrix."""
    refuse(keys, replay_queries, replay_keys)
    wide = torch.promote_types(keys.dtype, torch.float32)
    weights = torch_weights(replay_queries.to(wide), torch.cat([keys, replay_keys], dim=2).to(wide))[..., : keys.shape[2]]
    return weights.unflatten(1, (keys.shape[1], -1)).amax(dim=(2, 3)).to(keys.dtype)


@control(TOP_R, dtypes=NUMPY)
def by_a_sorted_list(scores, budget):
    """Each row of the batch as a list of places, sorted by score, then by layer, head and token."""
    refuse_unless(budget=isinstance(budget, int) and budget >= 1)
    kept = np.zeros(scores.shape, dtype=bool)
    for item in range(scores.shape[1]):
        places = sorted(np.ndindex(scores[:, item].shape), key=lambda place: (-scores[:, item][place], place))
        for layer, head, token in places[: budget * scores.shape[0] * scores.shape[2]]:
            kept[layer, item, head, token] = True
    return kept
