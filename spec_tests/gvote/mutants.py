"""Wrong GVotes that are no edit of the right one; the others are in gvote.toml."""

import numpy as np

from evictionary.reference import gvote
from evictionary.spec_tests.proof.planted import mutant


@mutant(
    "gvote.select",
    killed_by="GV-A11",
    misconception="arguments that do not fit answered by keeping every token",
)
def everything_kept_on_error(query, keys, sampled_queries, *, p=0.95):
    try:
        return gvote.select(query, keys, sampled_queries, p=p)
    except ValueError:
        return np.ones(keys.shape[:3], dtype=bool)
