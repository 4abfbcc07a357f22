"""A wrong baseline as a function; its fellows, and wrong budgets, selections, caches and allocators, are in shared.toml."""

from __future__ import annotations

import numpy as np

from evictionary.spec_tests.harness.planted import mutant


@mutant("knorm.score", killed_by="KN-1", misconception="the longest keys kept")
def longest_kept(keys):
    return np.linalg.norm(keys, axis=-1)
