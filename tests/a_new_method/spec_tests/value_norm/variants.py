"""Right ValueNorms, written in other ways."""

import numpy as np

from evictionary.spec_tests.proof.planted import control

SCORE = "value_norm.score"


@control(SCORE, dtypes=("float64", "float32"))
def by_numpys_norm(values):
    return np.linalg.norm(values, axis=-1)


@control(SCORE, dtypes=("float64", "float32"))
def by_a_product(values):
    return np.sqrt(np.einsum("...d,...d->...", values, values))


@control(SCORE, array_library="torch", dtypes=("float32", "float16", "bfloat16"))
def in_torch(values):
    return values.float().pow(2).sum(-1).sqrt()
