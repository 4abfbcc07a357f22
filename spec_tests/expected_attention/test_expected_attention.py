"""Laws of Expected Attention's score and listing: EA-7 to EA-9, EA-L1."""

from evictionary.spec_tests.expected_attention.helpers import (
    CONTRIBUTION,
    SCORE,
    STATISTICS,
    WEIGHTS,
    epsilons,
    grouped,
    statistics,
    updates,
)
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import mirrored

ungrouped = st.one_of(tiny_cases(), seeded_cases(groups=(1,)))


def arguments(impl, case):
    return (impl.round(case.keys), impl.round(case.values), *statistics(impl, case))


@law("EA-9", of=SCORE, case=grouped, epsilon=epsilons)
def test_score_is_expected_attention_times_the_norm_of_the_value(impl, case, epsilon):
    """(mean over the group of softmax(mu.k/sqrt d + k^T Sigma k/(2d)) + epsilon) |v|."""
    agrees(impl, SCORE, *arguments(impl, case), epsilon=epsilon)


@law("EA-9", of=SCORE, case=grouped)
def test_epsilon_is_two_hundredths_unless_given(impl, case):
    """Without an epsilon the score is the one with epsilon = 0.02."""
    inputs = arguments(impl, case)
    got = impl.expected_attention.score(*inputs)
    same(impl, SCORE, *inputs, epsilon=0.02, got=got, what="the score by default")


def check_loops(impl, case, epsilon):
    """Raise Violation unless the score is that of plain loops over heads, tokens and channels."""
    keys, values, mean, covariance = inputs = arguments(impl, case)
    expected = np.zeros(keys.shape[:3])
    group, dim = mean.shape[1] // keys.shape[1], keys.shape[-1]
    for item, reader in np.ndindex(mean.shape[:2]):
        head = item, reader // group
        quadratic = (linear(keys[head], covariance[item, reader]) * keys[head]).sum(axis=-1)
        logits = linear(keys[head], mean[item, reader, :, None])[:, 0] / math.sqrt(dim) + quadratic / (
            2 * dim
        )
        weights = np.array([math.exp(logit - logits.max()) for logit in logits])
        expected[head] += (weights / math.fsum(weights) + epsilon) * lengths(values[head]) / group
    more = 1e-12 * float(2 * np.abs(expected).max(initial=0))
    agrees(
        impl, SCORE, *inputs, epsilon=epsilon, expected=expected, more=more, what="the score, against loops,"
    )


@law("EA-9", of=SCORE, case=grouped, epsilon=epsilons)
def test_score_equals_plain_loops(impl, case, epsilon):
    """Head by head, token by token and channel by channel, with nothing but sums: the same numbers."""
    check_loops(impl, case, epsilon)


@law("EA-9", of=SCORE, examples=1, seed=seeds())
def test_scores_of_the_lengths_of_the_paper_equal_plain_loops(impl, seed):
    """The same over 64 to 1,024 tokens, of a batch of three and two query heads a group."""
    for case in narrow(impl, seed, group=2):
        check_loops(impl, case, 0.02)


@law("EA-9", of=SCORE, case=grouped, exponent=st.integers(-3, 3))
def test_doubling_the_values_doubles_the_score(impl, case, exponent):
    """The score grows with the values as their norm does,
    once and not twice (powers of two, so nothing is rounded).
    """
    keys, values, mean, covariance = inputs = arguments(impl, case)
    got = impl.expected_attention.score(keys, values * 2.0**exponent, mean, covariance) / 2.0**exponent
    same(impl, SCORE, *inputs, got=got, what="the score of the scaled values, scaled back,")


@law("EA-9", of=SCORE, case=grouped, seed=seeds())
def test_scores_move_with_their_tokens(impl, case, seed):
    """Permuting the tokens permutes the scores: no position is favoured, not even the first."""
    keys, values, mean, covariance = arguments(impl, case)
    move_with_tokens(impl, SCORE, seed, (keys, values), mean, covariance)


@law("EA-9", of=SCORE, case=grouped, seed=seeds())
def test_one_turn_of_queries_and_keys_changes_nothing(impl, case, seed):
    """One orthogonal map of keys and queries, another of the values (channels exchanged and mirrored),
    leave the scores.
    """
    keys, values, mean, covariance = inputs = arguments(impl, case)
    generator = np.random.default_rng(seed)
    turn, other = (mirrored(generator, states.shape[-1]) for states in (keys, values))
    turned = keys @ turn, values @ other, mean @ turn, turn.T @ covariance @ turn
    got = impl.expected_attention.score(*turned)
    same(impl, SCORE, *inputs, got=got, what="the score of the turned states")


@law("EA-9", of=SCORE, case=seeded_cases(min_length=2, groups=(1, 2, 3)), epsilon=epsilons)
def test_each_query_head_has_its_own_softmax(impl, case, epsilon):
    """The score of a group is the mean of the scores that its query heads give one by one; query head h
    reads KV head h // G.
    """
    keys, values, mean, covariance = inputs = arguments(impl, case)
    of_readers = (
        (mean[:, each :: case.group], covariance[:, each :: case.group]) for each in range(case.group)
    )
    alone = [oracle(SCORE)(keys, values, *each, epsilon=epsilon) for each in of_readers]
    agrees(
        impl, SCORE, *inputs, epsilon=epsilon, expected=np.mean(alone, axis=0), what="the score of the group"
    )


@law("EA-9", of=SCORE, case=seeded_cases(min_length=2, groups=(1, 2)))
def test_heads_and_batch_items_do_not_see_each_other(impl, case):
    """The scores of a head are the same when it is scored alone with the query heads that read it."""
    same_alone(impl, SCORE, *arguments(impl, case))


@law("EA-9", of=SCORE, case=grouped, at=st.integers(0, 99))
def test_a_zero_value_scores_zero(impl, case, at):
    """A token without a value adds nothing, whatever attention it draws; epsilon is inside the product."""
    _, values, *_ = inputs = arguments(impl, case)
    values[:, :, at % values.shape[2]] = 0
    impl.allowance(SCORE, *inputs)  # leaves out what overflows in the dtype
    got = impl.expected_attention.score(*inputs)
    require(not np.isnan(got).any(), "a score is not a number", 0.0, got)
    equal(got[:, :, at % values.shape[2]], 0, "the score of a zero value is not 0")


@law("EA-9", of=SCORE)
def test_epsilon_moves_the_ranking_from_attention_to_the_norm(impl):
    """With epsilon 0 the product decides, with a large one the norm of the value alone."""
    keys, values = np.array([[[[3.0, 0], [2, 0], [0, 0]]]]), np.array([[[[1.0, 0], [2, 0], [0, 4]]]])
    for epsilon, order in ((0.0, [0, 1, 2]), (16.0, [2, 1, 0])):
        got = impl.expected_attention.score(
            keys, values, np.array([[[2.0, 0]]]), np.zeros((1, 1, 2, 2)), epsilon=epsilon
        )
        equal(np.argsort(-got[0, 0]), order, f"with epsilon = {epsilon:g} the tokens rank in another order")


@law("EA-9", of=CONTRIBUTION, case=cases(), seed=seeds())
def test_the_output_projection_may_weigh_the_value(impl, case, seed):
    """With W_o the norm is that of W_o v; an orthogonal W_o
    (here channels exchanged and mirrored) changes nothing.
    """
    weights, values, w_o = updates(impl, case, seed)
    for given, projected in (((w_o,), linear(values, w_o.T)), ((), values)):
        expected = (weights + 0.02) * lengths(projected)
        agrees(impl, CONTRIBUTION, weights, values, 0.02, *given, by_hand=expected, size=expected.max())
    turn = mirrored(np.random.default_rng(seed), values.shape[-1])
    got = impl.expected_attention.contribution(weights, values, 0.02, turn)
    same(impl, CONTRIBUTION, weights, values, 0.02, got=got, what="the contribution with W_o turned")


@law("EA-8", of=SCORE, case=grouped)
def test_the_weights_of_a_head_sum_to_one(impl, case):
    """Over values of norm 1, and without epsilon, the scores of every head are positive and sum to 1."""
    keys, values, *statistics = arguments(impl, case)
    states = keys, np.broadcast_to(np.arange(values.shape[-1]) == 0, values.shape).astype(float), *statistics
    got = impl.expected_attention.score(*states, epsilon=0.0)
    totals(got, 1, impl.allowance(SCORE, *states, epsilon=0.0), "the weights of a head")


@law("EA-8", of=SCORE, case=grouped, shift=st.sampled_from([0.5, -3.0, 64.0, -64.0]))
def test_a_constant_on_all_logits_changes_nothing(impl, case, shift):
    """Where every key has the same channel, moving the mean along it moves all logits alike, and no score."""
    keys, _, mean, covariance = inputs = arguments(impl, case)
    keys[..., 0] = 1
    covariance[..., 0, :] = covariance[..., :, 0] = 0
    mean[..., 0] = 0
    before = impl.expected_attention.score(*inputs)
    mean[..., 0] = shift
    same(impl, SCORE, *inputs, got=before, what="the score before all logits were moved")


@law("EA-8", of=SCORE, sign=st.sampled_from([1.0, -1.0]))
def test_logits_of_ten_thousand_do_not_overflow(impl, sign):
    """At logits of 1e4 the softmax is taken in the log
    domain: equal keys share the weight, and nothing is NaN.
    """
    keys = np.array([[[[128.0, 0, 0, 0], [128, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]]])
    states = keys, np.ones((1, 1, 4, 1)), sign * np.array([[[160.0, 0, 0, 0]]]), np.zeros((1, 1, 4, 4))
    agrees(impl, SCORE, *states, epsilon=0.0, expected=np.array([[[0.5, 0.5, 0, 0]]])[..., :: int(sign)])


@law("EA-8", of=SCORE, sign=st.sampled_from([1.0, -1.0]))
def test_logits_beyond_a_hundred_keep_their_distance(impl, sign):
    """Two logits of 128 and 126, or of -128 and -126: two apart, so one weight is e^2 times the other."""
    keys = np.array([[[[64.0, 0, 0, 0], [63, 0, 0, 0]]]])
    states = keys, np.ones((1, 1, 2, 1)), sign * np.array([[[4.0, 0, 0, 0]]]), np.zeros((1, 1, 4, 4))
    larger = 1 / (1 + math.exp(-2))
    agrees(impl, SCORE, *states, epsilon=0.0, expected=np.array([[[larger, 1 - larger]]])[..., :: int(sign)])


@law("EA-8", of=WEIGHTS, case=ungrouped)
def test_expected_weights_are_the_softmax_of_the_logits(impl, case):
    """exp(log zhat_i) / sum_j exp(log zhat_j) over the tokens of one head."""
    keys, _, mean, covariance = arguments(impl, case)
    agrees(impl, WEIGHTS, keys, mean, covariance)


@law("EA-7", of="expected_attention.log_expected_scores", case=ungrouped)
def test_log_expected_scores_are_linear_plus_quadratic(impl, case):
    """mu.k/sqrt d + k^T Sigma k/(2d) for every token."""
    keys, _, mean, covariance = arguments(impl, case)
    agrees(impl, "expected_attention.log_expected_scores", keys, mean, covariance)


def sampled_ratios(generator, allowed, mean, root, keys):
    """The logarithms of how much more than the first key the others draw from 20,000 Gaussian queries.

    And what they differ by from those of the scores: six standard errors, and what both scores may be wrong
    by, in parts of the smallest.
    """
    drawn = np.exp((mean + generator.normal(size=(20_000, 4)) @ root.T) @ keys.T / 2)
    means = drawn.mean(axis=0)
    apart = drawn[:, 1:] / means[1:] - drawn[:, :1] / means[0]
    error = 6 * apart.std(axis=0) / math.sqrt(len(drawn)) + 8 * allowed.largest / allowed.expected.min()
    return np.log(means[1:] / means[0]), error


@law("EA-7", of=SCORE, seed=seeds())
def test_the_expectation_is_that_of_sampled_queries(impl, seed):
    """The mean of exp(q.k/sqrt d) over 20,000 Gaussian queries
    gives the ratios of the scores, within six standard errors.
    """
    generator = np.random.default_rng(seed)
    keys = generator.integers(-8, 9, size=(1, 1, 3, 4)) / 8.0
    root = generator.integers(-4, 5, size=(4, 4)) / 4.0
    mean = generator.integers(-8, 9, size=(1, 1, 4)) / 8.0
    covariance = (root @ root.T)[None, None]
    values = np.ones((1, 1, 3, 1))
    allowed = impl.allowance(SCORE, keys, values, mean, covariance, epsilon=0.0)
    got = impl.expected_attention.score(keys, values, mean, covariance, epsilon=0.0)[0, 0]
    expected, slack = sampled_ratios(generator, allowed, mean[0, 0], root, keys[0, 0])
    near(np.log(got[1:] / got[0]), expected, slack, "the log ratio of two scores")


@law("EA-7", of=SCORE)
def test_half_the_variance_can_cancel_the_mean(impl):
    """Keys 0 and (2,0,0,0), mean -1/2, variance 1, d = 4: -1/2 from the mean and +1/2 from the variance,
    so both weigh 1/2.
    """
    keys = np.array([[[[0.0, 0, 0, 0], [2, 0, 0, 0]]]])
    mean, covariance = np.array([[[-0.5, 0, 0, 0]]]), np.diag([1.0, 0, 0, 0])[None, None]
    got = impl.expected_attention.score(keys, np.ones((1, 1, 2, 1)), mean, covariance, epsilon=0.0)
    equal(got, np.array([[[0.5, 0.5]]]), "the mean and half of the variance do not cancel")


@law("EA-7", of=SCORE, case=grouped)
def test_without_variance_it_is_the_attention_of_the_mean_query(impl, case):
    """With Sigma = 0 the weights are the softmax of mu.k/sqrt d."""
    keys, values, mean, covariance = arguments(impl, case)
    weights = causal_weights(mean[:, :, None], for_each_reader(keys, mean))[:, :, 0]
    expected = over_group(weights, keys.shape[1]) * lengths(values)
    size = (1 + np.abs(mean).max() * np.abs(keys).max()) * lengths(values).max()
    states = keys, values, mean, np.zeros_like(covariance)
    agrees(impl, SCORE, *states, epsilon=0.0, by_hand=expected, size=size)


@law("EA-7", of=SCORE, case=grouped)
def test_halving_the_keys_and_doubling_the_queries_changes_nothing(impl, case):
    """Keys / 2, mean * 2, covariance * 4: the covariance is of the second degree in the queries and meets
    the key twice.
    """
    keys, values, mean, covariance = inputs = arguments(impl, case)
    got = impl.expected_attention.score(keys / 2, values, 2 * mean, 4 * covariance)
    same(impl, SCORE, *inputs, got=got, what="the score of the scaled states")


def scores_of_the_listing(impl, queries, keys, values):
    """The scores [T] of one head with epsilon 0 by the
    statistics of its queries, and what they may be wrong by.

    The statistics are rounded, and so is the product with the covariance: errors of a key's logit.
    """
    of_mean, of_covariance = (impl.allowance(STATISTICS, queries, pick=pick) for pick in (0, 1))
    states = keys, values, of_mean.expected, of_covariance.expected
    scores = impl.allowance(SCORE, *(each[None, None] for each in states), epsilon=0.0)
    length = np.linalg.norm(keys, axis=-1).max()
    rounded = final_rounding(impl) / 2 * np.abs(of_covariance.expected).max()
    logit_error = length * of_mean.largest + length**2 * (of_covariance.largest + rounded)
    return scores.expected[0, 0], scores.largest + float(logit_error * np.abs(scores.expected).max())


@law("EA-L1", of="expected_attention.listing_1", case=seeded_cases(), percent=st.integers(0, 99))
def test_the_mended_listing_keeps_the_best_by_the_equations(impl, case, percent):
    """floor(T (1 - ratio)) tokens, at least one, are kept,
    in position order: the best by EA-7..9 with epsilon 0.
    """
    keys, values, queries = (impl.round(states[0, 0]) for states in (case.keys, case.values, case.queries))
    got_keys, got_values = impl.expected_attention.listing_1(queries, keys, values, percent / 100)
    budget = max(1, case.length * (100 - percent) // 100)
    require_numbers(got_keys, (budget, keys.shape[-1]), "the kept keys")
    require_numbers(got_values, (budget, values.shape[-1]), "the kept values")
    kept, rows = np.zeros(case.length, dtype=bool), np.concatenate([keys, values], axis=-1)
    left = iter(range(case.length))
    for row in np.concatenate([got_keys, got_values], axis=-1):
        token = next((token for token in left if (rows[token] == row).all()), None)
        require(token is not None, "a kept row is not a token of the cache in position order", rows, row)
        kept[token] = True
    scores, slack = scores_of_the_listing(impl, queries, keys, values)
    # Equal rows match the first of them, so the mask may stand for another that keeps the same vectors: their
    # scores are the same.
    selects(kept, scores, budget, slack=slack)
