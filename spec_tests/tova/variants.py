"""Correct TOVAs of other kinds."""

from evictionary.spec_tests.shared.variants import *

SCORE = "tova.score"


@control(SCORE, dtypes=NUMPY)
def tiled(queries, keys):
    """Tiles of 16 tokens with a running maximum and sum; the heads added one by one from the last."""
    weights = streamed(queries[:, :, -1:], keys)[:, :, 0]
    total = sum(weights[:, reader] for reader in reversed(range(queries.shape[1])))
    return np.repeat((total / queries.shape[1])[:, None], keys.shape[1], axis=1)


@control(SCORE, array_library="torch", dtypes=ALL)
@through_float32
def torch_in_float32(queries, keys):
    """One score for the layer, expanded over its heads."""
    return (
        torch_weights(queries[:, :, -1:], keys)[:, :, 0]
        .mean(dim=1, keepdim=True)
        .expand(-1, keys.shape[1], -1)
    )


@control(SCORE, array_library="torch", dtypes=("float32", "float16", "bfloat16"))
def torch_rounding_each_step(queries, keys):
    """torch in the dtype of the keys throughout, as eager code does it: the mean of each group, then of
    the KV heads.
    """
    groups = torch_weights(queries[:, :, -1:], keys)[:, :, 0].unflatten(1, (keys.shape[1], -1)).mean(dim=2)
    return groups.mean(dim=1, keepdim=True).repeat(1, keys.shape[1], 1)
