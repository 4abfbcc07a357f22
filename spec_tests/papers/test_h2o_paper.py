"""What H2O's score favours, whoever computes it (H2-1)."""

import numpy as np

from evictionary.reference import h2o
from evictionary.spec_tests.judge.law import law


@law("H2-1")
def test_the_first_tokens_collect_most():
    """Without any preference the first half of 64 tokens receives 85 % of the attention: the sum favours
    what came early.
    """
    scores = h2o.score(np.zeros((1, 1, 64, 2)), np.zeros((1, 1, 64, 2)))[0, 0]
    assert (np.diff(scores) < 0).all()
    assert 0.84 < scores[:32].sum() / scores.sum() < 0.86
