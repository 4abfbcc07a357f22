"""Laws of ValueNorm: VN-1."""

from evictionary.spec_tests.judge.prelude import *

SCORE = "value_norm.score"


@law("VN-1", of=SCORE, case=cases())
def test_score_is_the_norm_of_the_value(impl, case):
    """The score is the Euclidean norm of the value."""
    agrees(impl, SCORE, case.values)


@law("VN-1", of=SCORE)
def test_a_three_four_value_scores_five(impl):
    """|(3, 4)| = 5, exactly."""
    got = impl.value_norm.score(np.array([[[[3.0, 4.0], [0, 0]]]]))
    equal(got, [[[math.hypot(3, 4), 0.0]]], "the norm of (3, 4) is 5")
