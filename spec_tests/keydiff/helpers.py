"""What several files of the laws of keydiff use."""

import numpy as np
from hypothesis import strategies as st

from evictionary.spec_tests.judge.by_hand import in_parts, rounding

paper_budgets = st.sampled_from([2048, 8192, 4096, 6144])


def one_over_norm(keys):
    return 1 / np.sqrt(np.einsum("...d,...d->...", keys, keys))


def mean_direction(keys, weights):
    """The sum of `k / |k|`, part by part, divided by the number of keys."""
    parts = in_parts(lambda part, weight: (part * weight).sum(axis=-2), keys, weights[..., None])
    return sum(parts) / keys.shape[-2]


def scores_in_parts(impl, keys):
    """The score of many keys, the anchor added part by part, and what it may be wrong by."""
    weights = one_over_norm(keys)
    mu = mean_direction(keys, weights)
    length = np.linalg.norm(mu, axis=-1)[..., None]
    # The magnitudes whose sum is mu have a mean of at most 1; those of a cosine a sum of at most 1.
    slack = rounding(impl, keys.shape[-1]) + 2 * rounding(impl, keys.shape[-2]) / length
    return -(keys @ mu[..., None])[..., 0] * weights / length, slack
