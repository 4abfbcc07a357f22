"""Right ValueNorms, written in other ways."""

from evictionary.spec_tests.shared.variants import *

SCORE = "value_norm.score"


@control(SCORE, dtypes=NUMPY)
def by_numpys_norm(values):
    return np.linalg.norm(values, axis=-1)


@control(SCORE, dtypes=NUMPY)
def by_a_product(values):
    return np.sqrt(np.einsum("...d,...d->...", values, values))


@control(SCORE, array_library="torch", dtypes=("float32", "float16", "bfloat16"))
def in_torch(values):
    return values.float().pow(2).sum(-1).sqrt()
