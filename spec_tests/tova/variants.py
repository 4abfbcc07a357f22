"""Correct TOVAs of other kinds."""

from evictionary.spec_tests.shared.variants import *

SCORE = "tova.score"


@control(SCORE, dtypes=NUMPY)
def tiled(queries, keys):
    """Tiles of 16 tokens with a running maximum and sum; the heads added one by one from the last."""
    weights = streamed(queries[:, :, -1:], keys)[:, :, 0]
    total = sum(weights[:, reader] for reader in reversed(range(queries.shape[1])))
    return np.repeat((total / queries.shape[1])[:, None], keys.shape[1], axis=1)


@control(SCORE, dtypes=NUMPY)
def tokens_first(queries, keys):
    """A permuted layout, the normaliser as a log-sum-exp."""
    by_token = np.ascontiguousarray(keys.transpose(2, 0, 1, 3))
    last = queries[:, :, -1].reshape(keys.shape[0], keys.shape[1], -1, keys.shape[3])
    logits = np.einsum("tbhd,bhgd->tbhg", by_token, last / keys.dtype.type(math.sqrt(keys.shape[-1])))
    top = logits.max(axis=0)
    weights = np.exp(logits - top - np.log(np.exp(logits - top).sum(axis=0)))
    return np.repeat((np.einsum("tbhg->bt", weights) / queries.shape[1])[:, None], keys.shape[1], axis=1)


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
