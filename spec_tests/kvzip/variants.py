"""Correct KVzips of other kinds."""

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
