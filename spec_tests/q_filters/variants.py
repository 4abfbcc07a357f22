"""Correct Q-Filters of other kinds."""

from evictionary.spec_tests.shared.variants import *

DIRECTION, CALIBRATE, SCORE = "q_filters.main_direction", "q_filters.calibrate", "q_filters.score"


@control(DIRECTION, dtypes=NUMPY)
def by_eigenvectors(queries):
    """The eigenvector of the products of the queries, in float64; votes counted as signs."""
    wide = queries.astype(np.float64)
    direction = np.linalg.eigh(np.einsum("...nd,...ne->...de", wide, wide))[1][..., -1]
    votes = np.where(np.einsum("...nd,...d->...n", wide, direction) > 0, 1, -1).sum(axis=-1)
    return (np.where(votes > 0, 1, -1)[..., None] * direction).astype(queries.dtype)


@control(CALIBRATE, array_library="torch", dtypes=("float64", "float32"))
def torch_svd(queries, num_kv_heads):
    """torch's decomposition of each head; the sign from
    the first left vector, as the public code finds it.
    """
    left, _, right = torch.linalg.svd(queries.double(), full_matrices=False)
    sign = torch.where((left[..., 0] > 0).double().mean(dim=-1) > 0.5, 1.0, -1.0)
    return (sign[..., None] * right[..., 0, :]).unflatten(1, (num_kv_heads, -1)).mean(dim=2).to(queries.dtype)


@control(SCORE, array_library="torch", dtypes=ALL)
@through_float32
def torch_sum(keys, q_filters):
    return (keys * q_filters[:, :, None]).sum(dim=-1)
