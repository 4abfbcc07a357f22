"""Laws of Expected Attention's two scores: with |W_o v|, as equation 9 prints it (EA-9), and with |v|, as
it was run (EA-V).
"""

from operator import mul

from evictionary.spec_tests.judge.prelude import *

CONTRIBUTION, SCORE = "expected_attention.contribution", "expected_attention.score"
some_cases = seeded_cases(max_length=17, groups=(1, 2))
epsilons = st.sampled_from([0.02, 0.0, 0.5])


def scored_by_hand(weights, vectors, epsilon):
    """(weight + epsilon) times the length of each vector, number by number."""
    expected = np.zeros(weights.shape)
    for place in np.ndindex(weights.shape):
        expected[place] = (weights[place] + epsilon) * sum(
            float(entry) ** 2 for entry in vectors[place]
        ) ** 0.5
    return expected


def projected_by_hand(values, w_o):
    """W_o v of each token: row by row of W_o, the sum of its products with the channels of v."""
    projected = np.zeros((*values.shape[:-1], len(w_o)))
    rows = w_o.tolist()
    for place in np.ndindex(values.shape[:-1]):
        value = values[place].tolist()
        projected[place] = [sum(map(mul, row, value)) for row in rows]
    return projected


def held(impl, rows):
    """The rows, where the dtype holds their lengths; 65,504 is the most that float16 does."""
    if not np.isfinite(impl.round(lengths(rows))).all():
        impl.unrepresentable()
    return rows


def given(impl, case, seed):
    """The values, weights that sum to 1, and a W_o [h, D] with more rows than columns, as the dtype
    represents them.
    """
    generator = np.random.default_rng(seed)
    values = impl.round(case.values)
    size = values.shape[-1]
    weights = impl.round(generator.dirichlet(np.ones(values.shape[2]), size=values.shape[:2]))
    return values, weights, impl.round(generator.integers(-2, 3, size=(size + 1, size)).astype(float))


@law("EA-9", of=CONTRIBUTION, case=some_cases, seed=seeds(), epsilon=epsilons)
def test_with_w_o_it_is_the_length_of_the_projected_value(impl, case, seed, epsilon):
    """(ahat + epsilon) |W_o v|, W_o v computed number by number."""
    values, weights, w_o = given(impl, case, seed)
    expected = scored_by_hand(weights, held(impl, projected_by_hand(values, w_o)), epsilon)
    got = impl.expected_attention.contribution(weights, values, epsilon, w_o)
    # Products of both signs may cancel: the slack is a part of their sum without the signs.
    size = scored_by_hand(weights, projected_by_hand(np.abs(values), np.abs(w_o)), epsilon)
    near(got, expected, rounding(impl, values.shape[-1]) * size, "the score with W_o")


@law("EA-V", of=CONTRIBUTION, case=some_cases, seed=seeds(), epsilon=epsilons)
def test_without_w_o_it_is_the_length_of_the_value(impl, case, seed, epsilon):
    """(ahat + epsilon) |v|, number by number."""
    values, weights, _ = given(impl, case, seed)
    expected = scored_by_hand(weights, held(impl, values), epsilon)
    got = impl.expected_attention.contribution(weights, values, epsilon)
    near(got, expected, rounding(impl, values.shape[-1]) * expected, "the score without W_o")


def flat_score(impl, case, values, **settings):
    """The score where future queries are all zero, so that every token expects the attention 1/T."""
    batch, readers, _, head_dim = case.queries.shape
    zero = np.zeros((batch, readers, head_dim))
    return impl.expected_attention.score(
        case.keys, values, zero, np.zeros((*zero.shape, head_dim)), **settings
    )


@law("EA-V", of=SCORE, case=some_cases)
def test_at_equal_attention_the_score_is_the_length_of_the_value(impl, case):
    """Of queries that are zero each of T tokens expects 1/T: its score is (1/T + 0.02) |v|, by hand."""
    values = impl.round(case.values)
    expected = scored_by_hand(np.full(values.shape[:3], 1 / values.shape[2]), values, 0.02)
    got = flat_score(impl, case, values)
    near(got, expected, rounding(impl, values.shape[2]) * expected, "the score at equal attention")


@law("EA-9", of=SCORE, case=some_cases, seed=seeds(), epsilon=epsilons)
def test_of_projected_values_the_score_is_equation_9(impl, case, seed, epsilon):
    """Given W_o v as the values, the score is equation 9 as printed: at equal attention (1/T + epsilon)
    |W_o v|, by hand.
    """
    values, _, w_o = given(impl, case, seed)
    projected = impl.round(projected_by_hand(values, w_o))
    expected = scored_by_hand(np.full(values.shape[:3], 1 / values.shape[2]), projected, epsilon)
    got = flat_score(impl, case, projected, epsilon=epsilon)
    near(got, expected, rounding(impl, values.shape[2]) * expected, "the score of projected values")
