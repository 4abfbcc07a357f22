"""Right ValueNorms, written in other ways."""

from __future__ import annotations

import numpy as np

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.refusal import refuse_unless

SCORE = "value_norm.score"


def refuse(values) -> None:
    refuse_unless(values=values.ndim >= 2)


@control(SCORE, dtypes=("float64", "float32"))
def by_numpys_norm(values):
    refuse(values)
    return np.linalg.norm(values, axis=-1)


@control(SCORE, dtypes=("float64", "float32"))
def by_a_product(values):
    refuse(values)
    return np.sqrt(np.einsum("...d,...d->...", values, values))


@control(SCORE, array_library="torch", dtypes=("float32", "float16", "bfloat16"))
def in_torch(values):
    refuse(values)
    return values.float().pow(2).sum(-1).sqrt()
