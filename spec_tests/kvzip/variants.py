"""Correct KVzips of other kinds."""

from evictionary.spec_tests.shared.forms import top_by_sorted
from evictionary.spec_tests.shared.variants import *

SCORE, TOP_R = "kvzip.score", "kvzip.top_r"


@control(SCORE, dtypes=NUMPY)
def streamed_with_a_running_maximum(keys, replay_queries, replay_keys):
    """Query by query over tiles of 16 tokens, the largest so far kept."""
    weights = streamed(replay_queries, np.concatenate([keys, replay_keys], axis=2))[..., : keys.shape[2]]
    return functools.reduce(
        np.maximum, np.moveaxis(weights.reshape(*keys.shape[:2], -1, keys.shape[2]), 2, 0)
    )


@control(SCORE, array_library="torch", dtypes=ALL)
@through_float32
def torch_at_once(keys, replay_queries, replay_keys):
    weights = torch_weights(replay_queries, torch.cat([keys, replay_keys], dim=2))[..., : keys.shape[2]]
    return weights.unflatten(1, (keys.shape[1], -1)).amax(dim=(2, 3))


@control(TOP_R, dtypes=NUMPY)
def by_a_sorted_list(scores, budget):
    """Each row of the batch as a list of places, sorted by score, then by layer, head and token."""
    rows = np.moveaxis(scores, 1, 0)
    kept = top_by_sorted(rows.reshape(len(rows), -1), budget * scores.shape[0] * scores.shape[2])
    return np.moveaxis(kept.reshape(rows.shape), 0, 1)
