"""Laws of Expected Attention's two scores: with |W_o v|, as equation 9 prints it (EA-9), and with |v|, as
it was run (EA-V).
"""

from evictionary.spec_tests.expected_attention.helpers import CONTRIBUTION, SCORE, epsilons, updates
from evictionary.spec_tests.judge.prelude import *

some_cases = seeded_cases(max_length=17, groups=(1, 2))


def held(impl, rows):
    """The rows, where the dtype holds their lengths; 65,504 is the most that float16 does."""
    if not np.isfinite(impl.round(lengths(rows))).all():
        impl.unrepresentable()
    return rows


@law("EA-9", of=CONTRIBUTION, case=some_cases, seed=seeds(), epsilon=epsilons)
def test_with_w_o_it_is_the_length_of_the_projected_value(impl, case, seed, epsilon):
    """(ahat + epsilon) |W_o v|, W_o v computed number by number."""
    weights, values, w_o = updates(impl, case, seed)
    expected = (weights + epsilon) * lengths(held(impl, linear(values, w_o.T)))
    got = impl.expected_attention.contribution(weights, values, epsilon, w_o)
    # Products of both signs may cancel: the slack is a part of their sum without the signs.
    size = (weights + epsilon) * lengths(linear(np.abs(values), np.abs(w_o.T)))
    rounds_to(impl, got, expected, "the score with W_o", terms=values.shape[-1], size=size)


@law("EA-V", of=CONTRIBUTION, case=some_cases, seed=seeds(), epsilon=epsilons)
def test_without_w_o_it_is_the_length_of_the_value(impl, case, seed, epsilon):
    """(ahat + epsilon) |v|, number by number."""
    weights, values, _ = updates(impl, case, seed)
    expected = (weights + epsilon) * lengths(held(impl, values))
    got = impl.expected_attention.contribution(weights, values, epsilon)
    rounds_to(impl, got, expected, "the score without W_o", terms=values.shape[-1], size=expected)


def flat_score(impl, case, values, **settings):
    """The score where future queries are all zero, so that every token expects the attention 1/T."""
    zero = np.zeros_like(case.queries[:, :, 0])
    return impl.expected_attention.score(
        case.keys, values, zero, np.zeros((*zero.shape, zero.shape[-1])), **settings
    )


@law("EA-V", of=SCORE, case=some_cases)
def test_at_equal_attention_the_score_is_the_length_of_the_value(impl, case):
    """Of queries that are zero each of T tokens expects 1/T: its score is (1/T + 0.02) |v|, by hand."""
    values = impl.round(case.values)
    expected = (1 / values.shape[2] + 0.02) * lengths(values)
    got, terms = flat_score(impl, case, values), values.shape[2]
    rounds_to(impl, got, expected, "the score at equal attention", terms=terms, size=expected)


@law("EA-9", of=SCORE, case=some_cases, seed=seeds(), epsilon=epsilons)
def test_of_projected_values_the_score_is_equation_9(impl, case, seed, epsilon):
    """Given W_o v as the values, the score is equation 9 as printed: at equal attention (1/T + epsilon)
    |W_o v|, by hand.
    """
    _, values, w_o = updates(impl, case, seed)
    projected = impl.round(linear(values, w_o.T))
    expected = (1 / values.shape[2] + epsilon) * lengths(projected)
    got, terms = flat_score(impl, case, projected, epsilon=epsilon), values.shape[2]
    rounds_to(impl, got, expected, "the score of projected values", terms=terms, size=expected)
