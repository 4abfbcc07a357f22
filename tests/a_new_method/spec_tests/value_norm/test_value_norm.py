"""Laws of ValueNorm: VN-1."""

from __future__ import annotations

import math

import numpy as np

from evictionary.spec_tests.judge.cases import cases
from evictionary.spec_tests.judge.law import law
from evictionary.spec_tests.judge.tolerance import Violation

SCORE = "value_norm.score"


@law("VN-1", of=SCORE, case=cases())
def test_score_is_the_norm_of_the_value(impl, case):
    """The score is the Euclidean norm of the value."""
    impl.agrees(SCORE, case.values)


@law("VN-1", of=SCORE)
def test_a_three_four_value_scores_five(impl):
    """|(3, 4)| = 5, exactly."""
    got = impl.value_norm.score(np.array([[[[3.0, 4.0], [0, 0]]]]))
    if got.tolist() != [[[math.hypot(3, 4), 0.0]]]:
        raise Violation("the norm of (3, 4) is 5", [[[5.0, 0.0]]], got)


@law("VN-1", of=SCORE, kind="refusal", why="bad shapes are refused, which no planted mistake changes")
def test_bad_shapes_are_refused(impl):
    """A single axis raises ValueError."""
    with impl.refuses("values"):
        impl.value_norm.score(np.ones(3))
