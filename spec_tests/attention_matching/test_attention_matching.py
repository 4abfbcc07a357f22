"""Laws of Attention Matching: AM-1 to AM-6."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import quarters, refuses

SELECT, SCORE, BOUNDED, BIAS, VALUES, ATTEND = (
    f"attention_matching.{name}"
    for name in ("select", "score", "bounded_least_squares", "fit_bias", "fit_values", "attend")
)
LOW, HIGH = np.exp([-3.0, 3.0])
SOLVED = 1e-7  # what a solver may leave undone, in parts of the squares that it is to explain, or of 1
counts = st.sampled_from([1, 2, 5, 17])


def reference_queries(case, seed, count):
    """Queries [B, H_q, M, D] in quarters: the same in every dtype."""
    return quarters(seed, *case.queries.shape[:2], count, case.keys.shape[-1])


def some_kept(keys, seed, share):
    """A mask [B, H_kv, T] that keeps as many tokens of each head, drawn at random."""
    drawn = np.random.default_rng(seed).random(keys.shape[:3])
    return drawn <= np.sort(drawn, axis=-1)[..., [int(share * (keys.shape[2] - 1))]]


def of_heads(queries, keys):
    """The place of each KV head, and the queries [G M, D] of all heads of its group."""
    for place, (_, readers) in zip(np.ndindex(keys.shape[:2]), heads_alone(queries, keys), strict=True):
        yield place, queries[readers].reshape(-1, queries.shape[-1])


def every_key(queries, keys):
    """The attention [B, H_q, M, T] of queries that see every key, query by query."""
    keys = for_each_reader(keys, queries)
    return np.concatenate(
        [causal_weights(queries[:, :, [place]], keys) for place in range(queries.shape[2])], axis=2
    )


def root_mean_square(queries, keys):
    """AM-1 from the attention of each query."""
    return np.sqrt(over_group((every_key(queries, keys) ** 2).mean(axis=2), keys.shape[1]))


def gap(matrix, target, weights):
    """How much |A w - y|^2 / 2 may fall at most by other
    weights between the bounds: a straight line lies below it.
    """
    slope = matrix.T @ (target - matrix @ weights)
    return np.maximum(slope * (HIGH - weights), slope * (LOW - weights)).sum()


def rounded_system(impl, matrix, target):
    """A system of equations, X and y, and what the rounding of their numbers may make of each."""
    error = rounding(impl, len(target))
    return matrix, target, error * np.abs(matrix), error * np.abs(target)


def check_optimum(impl, got, system, roundings=1, terms=1):
    """Raise Violation unless no weights do better, where the system may be wrong by what it says, and
    weights are rounded so often.
    """
    matrix, target, wrong, of_target = system
    of_weights = roundings * rounding(impl, terms)
    near(got, np.clip(got, LOW, HIGH), of_weights * got, "a weight beyond its bounds")
    weights, size = np.clip(got, LOW, HIGH), np.abs(matrix)
    missed = wrong @ weights + of_target + size @ (of_weights * weights)
    slack = ((size + wrong).T @ missed + wrong.T @ np.abs(target - matrix @ weights)).sum()
    allowed = (HIGH - LOW) * slack + SOLVED * (target @ target)
    found = gap(matrix, target, weights)
    require(found <= allowed, f"other weights explain {found:.3g} more, allowed is {allowed:.3g}", 0, found)


@law("AM-1", of=SCORE, case=cases(max_length=33), seed=seeds(), count=counts)
def test_the_score_is_the_root_mean_square_of_the_attention(impl, case, seed, count):
    """Of all queries of all query heads of the group, each of which sees every key; also query by query."""
    queries, keys = reference_queries(case, seed, count), impl.round(case.keys)
    agrees(impl, SCORE, keys, queries, by_hand=root_mean_square(queries, keys), size=1 + np.abs(keys).max())


@law("AM-1", of=SELECT, case=cases(max_length=33), seed=seeds(), count=counts, share=shares())
def test_the_kept_keys_are_those_of_the_highest_score(impl, case, seed, count, share):
    """No key that is left out has a higher root mean square than a kept one, query by query."""
    queries, keys = reference_queries(case, seed, count), impl.round(case.keys)
    budget = 1 + int(share * (keys.shape[2] - 1))
    kept = impl.attention_matching.select(keys, queries, budget=budget)
    slack = impl.allowance(SCORE, keys, queries)
    selects(kept, root_mean_square(queries, keys), budget, slack=slack)


@law("AM-1", of=SELECT)
def test_one_query_that_needs_a_token_outweighs_four_that_like_another(impl):
    """Three of four queries give 1/2 to each of tokens 0 and 1, the last one gives 1 to token 2: 3/8 on
    average beside 1/4, but 0.43 beside 1/2 in the root mean square.
    """
    keys, queries = np.zeros((1, 1, 3, width(impl))), np.zeros((1, 1, 4, width(impl)))
    keys[0, 0, :2, 0], keys[0, 0, 2, 1], queries[0, 0, :3, 0], queries[0, 0, 3, 1] = 32, 32, 32, 32
    kept = impl.attention_matching.select(keys, queries, budget=1)
    equal(kept, np.array([[[False, False, True]]]), "another token is kept")


@law("AM-1", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Query heads 0 and 1 read KV head 0, and 2 and 3 read KV head 1, where one of them looks at the first
    token: 1 and 1/2 have the root mean square sqrt(5/8).
    """
    keys, queries = np.zeros((1, 2, 2, width(impl))), np.zeros((1, 4, 1, width(impl)))
    keys[0, :, 0, 0], queries[0, 3, :, 0] = 32, 32
    got = impl.attention_matching.score(keys, queries)
    expected = np.sqrt(np.array([[[1, 1], [5 / 2, 1 / 2]]]) / np.array([4, 4]))
    rounds_to(impl, got, expected, "the score where query head h reads KV head h // G")


@law("AM-1", of=SCORE, examples=2, case=long_cases(groups=(2, 1), lengths=(4097, 2049), head_dims=(64, 80)))
def test_every_token_of_a_long_text_has_its_score(impl, case):
    """Of thousands of tokens, the root mean square over three queries of a group, query by query. Zero
    queries give each token the same share.
    """
    queries, keys = reference_queries(case, case.seed, 3), impl.round(case.keys)
    agrees(impl, SCORE, keys, queries, expected=root_mean_square(queries, keys), more=1e-12)
    share = np.full(keys.shape[:3], 1 / case.length)
    got = impl.attention_matching.score(keys, 0 * queries)
    rounds_to(impl, got, share, "the share", terms=64, size=share)


@law("AM-2", of=BOUNDED, seed=seeds(), lines=counts, columns=st.sampled_from([1, 2, 3, 9]))
def test_no_weights_between_the_bounds_do_better(impl, seed, lines, columns):
    """A straight line below the squared error bounds what any other weights could gain: it is nothing."""
    draw = np.random.default_rng(seed)
    matrix = np.round(4 * draw.normal(size=(2, lines, columns))) / 4
    matrix[1] = np.abs(matrix[1])
    target = np.round(4 * draw.normal(size=(2, lines))) * 2.0 ** draw.integers(-2, 4)
    got = impl.attention_matching.bounded_least_squares(matrix, target)
    require_numbers(got, (2, columns), "the weights")
    for place in range(2):
        check_optimum(impl, got[place], rounded_system(impl, matrix[place], target[place]), terms=lines)


def solved(impl, matrix, target, weights, best):
    """The squared error that weights may have where the best has this one: matrix and target are rounded."""
    error = rounding(impl, len(target)) * (np.abs(matrix) @ weights + np.abs(target))
    return best + 4 * (error @ error) + SOLVED * best


@law("AM-2", of=BOUNDED, seed=seeds())
def test_no_point_of_a_grid_does_better(impl, seed):
    """Of two weights all 31 x 31 points between the bounds are tried."""
    draw = np.random.default_rng(seed)
    matrix, target = np.round(4 * draw.normal(size=(3, 2))) / 4, np.round(4 * draw.normal(size=3))
    got = impl.attention_matching.bounded_least_squares(matrix, target)
    require_numbers(got, (2,), "the weights")
    points = np.array(list(itertools.product(np.linspace(LOW, HIGH, 31), repeat=2)))
    best = ((points @ matrix.T - target) ** 2).sum(axis=-1).min()
    error = ((matrix @ got - target) ** 2).sum()
    lies(impl, error, (0, solved(impl, matrix, target, got, best)), "the error")


@law("AM-2", of=BOUNDED)
def test_what_lies_at_a_bound_changes_the_others(impl):
    """Of w_1 + w_2 = 1 and w_2 = 4 the exact solution is (-3, 4). At the lower bound, w_2 is (5 - e^-3) / 2,
    and not 4.
    """
    got = impl.attention_matching.bounded_least_squares(np.array([[1.0, 1], [0, 1]]), np.array([1.0, 4]))
    rounds_to(impl, got, [LOW, (5 - LOW) / 2], "the weights", roundings=4, beside=SOLVED)


@law("AM-2", of=BOUNDED)
def test_single_weights_are_cut_off_at_the_bounds(impl):
    """Weights that are apart are the targets between e^-3 and e^3."""
    got = impl.attention_matching.bounded_least_squares(np.eye(4), np.array([-1.0, 0, 2, 64]))
    rounds_to(impl, got, [LOW, LOW, 2, HIGH], "the weights", size=HIGH, beside=SOLVED)


def exponentials(impl, rows, keys):
    """e^(s - h) of rows [M, D] and keys [T, D], h the largest logit of a row; what they may be wrong by."""
    logits, errors = rows @ keys.T / np.sqrt(keys.shape[-1]), logit_errors(impl, rows, keys)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    errors = errors + errors.max(axis=-1, keepdims=True) + rounding(impl)
    return powers, np.minimum(powers * np.expm1(np.minimum(errors, 50)), 1) + 1e-37


def mass_systems(impl, queries, keys, kept):
    """The place of each head, and what the weights of its kept keys have to solve: X and y, and what each may
    be wrong by.
    """
    for place, rows in of_heads(queries, keys):
        powers, wrong = exponentials(impl, rows, keys[place])
        own = kept[place]
        yield place, (powers[:, own], powers.sum(axis=-1), wrong[:, own], wrong.sum(axis=-1))


@law("AM-3", of=BIAS, case=cases(max_length=33), seed=seeds(), count=counts, share=shares())
def test_no_bias_matches_the_mass_better(impl, case, seed, count, share):
    """For each head alone: a straight line below the squared error of the mass bounds what any bias from -3
    to 3 could gain.
    """
    queries, keys = reference_queries(case, seed, count), impl.round(case.keys)
    kept = some_kept(keys, seed, share)
    got = impl.attention_matching.fit_bias(queries, keys, kept)
    require_numbers(got, (*keys.shape[:2], int(kept[0, 0].sum())), "the bias")
    for place, system in mass_systems(impl, queries, keys, kept):
        check_optimum(impl, np.exp(got[place]), system, roundings=4)


def masses_apart(impl, system, bias):
    """How far the masses of the kept keys are off with this bias, and at most how far without one.

    That is more by what powers and a bias in the dtype may be wrong by, and by what a solver leaves undone.
    """
    matrix, target, wrong, of_target = system
    weights = np.exp(np.minimum(bias, 4))
    slack = np.linalg.norm(wrong @ (weights + 1) + 2 * of_target)
    slack += 4 * rounding(impl) * np.linalg.norm(matrix @ weights) + 10 * SOLVED
    return np.linalg.norm(matrix @ weights - target), np.linalg.norm(matrix.sum(axis=-1) - target) + slack


@law("AM-3", of=BIAS, case=cases(max_length=33), seed=seeds(), count=counts, share=shares())
def test_the_mass_is_nearer_than_without_a_bias(impl, case, seed, count, share):
    """The squared error of the mass at the reference queries is no larger than with a bias of 0."""
    queries, keys = reference_queries(case, seed, count), impl.round(case.keys)
    kept = some_kept(keys, seed, share)
    got = impl.attention_matching.fit_bias(queries, keys, kept)
    for place, system in mass_systems(impl, queries, keys, kept):
        after, before = masses_apart(impl, system, got[place])
        require(after <= before, "the mass is further off than without", before, after)


def only_bias(impl, queries, keys, kept):
    """The bias of the only kept key for one query, at most 3, and what it may be wrong by: two logits, a
    logarithm and what a solver leaves undone.
    """
    logits = (queries @ np.swapaxes(keys, -1, -2))[:, :, 0] / np.sqrt(keys.shape[-1])
    log_mass = np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    expected = log_mass - logits[kept].reshape(log_mass.shape)
    slack = 2 * logit_errors(impl, queries, keys).max(axis=-1) + 4 * rounding(impl, keys.shape[2])
    return np.minimum(expected, 3), np.where(expected < 8, slack + 10 * SOLVED, 6)


@law("AM-3", of=BIAS, case=cases(max_length=33), seed=seeds())
def test_one_key_for_one_query_has_the_logarithm_of_the_mass(impl, case, seed):
    """beta = log sum_t exp(s_t) - s_j, and at most 3. A key without mass has any bias."""
    group, keys = case.queries.shape[1] // case.keys.shape[1], impl.round(case.keys)
    queries = reference_queries(case, seed, 1)[:, ::group]
    kept = np.broadcast_to(np.arange(keys.shape[2]) == seed % keys.shape[2], keys.shape[:3])
    got = impl.attention_matching.fit_bias(queries, keys, kept)
    expected, slack = only_bias(impl, queries, keys, kept)
    near(got, expected, slack, "the bias of the only key")


@law("AM-3", of=BIAS)
def test_each_line_counts_in_parts_of_its_largest_exponential(impl):
    """The kept key has logits 0, and the other one 0 and s: w = (2 + p (1 + p)) / (1 + p^2), p = e^-s."""
    keys, queries = np.zeros((1, 1, 2, width(impl))), np.zeros((1, 2, 1, width(impl)))
    keys[0, 0, 1, 0], queries[0, 1, 0, 0] = 4, 1
    part = np.exp(-4 / np.sqrt(keys.shape[-1]))
    got = impl.attention_matching.fit_bias(queries, keys, np.array([[[True, False]]]))
    expected = np.log((2 + part * (1 + part)) / (1 + part**2))
    rounds_to(impl, got, [[[expected]]], "the bias of two queries of a group", roundings=2, beside=SOLVED)


@law("AM-3", of=BIAS)
def test_a_bias_is_at_least_minus_three(impl):
    """One query sees the two kept keys alike, w_1 + w_2 = 2, and one the second of them and two evicted ones,
    w_2 = 3: at the lower bound of w_1, w_2 is (5 - e^-3) / 2.
    """
    keys, queries = np.zeros((1, 1, 4, width(impl))), np.zeros((1, 1, 2, width(impl)))
    keys[0, 0, 0, 1], keys[0, 0, 2:, 0] = -64, -64
    queries[0, 0, 0, 0], queries[0, 0, 1, 1] = 32, 32
    got = impl.attention_matching.fit_bias(queries, keys, np.array([[[True, True, False, False]]]))
    expected = [[[-3, np.log((5 - LOW) / 2)]]]
    rounds_to(impl, got, expected, "the bias at its bound", roundings=4, beside=SOLVED)


@law("AM-3", of=BIAS, kind="edge", case=cases(max_length=33), seed=seeds(), count=counts)
def test_where_all_keys_are_kept_the_bias_is_zero(impl, case, seed, count):
    """Nothing is missing, so of the many optima the cache as it was is taken."""
    queries = reference_queries(case, seed, count)
    got = impl.attention_matching.fit_bias(queries, case.keys, np.ones(case.keys.shape[:3], dtype=bool))
    near(got, np.zeros(case.keys.shape[:3]), 1e-6, "the bias where all keys are kept")


@law("AM-3", of=BIAS, kind="edge")
def test_large_logits_do_not_overflow(impl):
    """Two equal keys whose logit is as large as the dtype allows: the bias of one of them is log 2."""
    keys, queries = np.zeros((1, 1, 2, width(impl))), np.zeros((1, 1, 1, width(impl)))
    keys[..., 0], queries[..., 0] = 256, largest_product(impl, width(impl)) // 256
    got = impl.attention_matching.fit_bias(queries, keys, np.array([[[True, False]]]))
    rounds_to(impl, got, [[[np.log(2)]]], "the bias of large logits", beside=SOLVED)


UNEQUAL = [[[True, True], [True, False]]], [[[False, False], [False, False]]]


@law("AM-3", of=BIAS, kind="refusal", kept=st.sampled_from(UNEQUAL))
def test_heads_that_keep_other_numbers_are_refused(impl, kept):
    """Heads that keep one and two tokens, or none, raise ValueError."""
    refused(impl, "kept", BIAS, np.ones((1, 2, 1, 2)), np.ones((1, 2, 2, 2)), np.array(kept))


def fitted(impl, case, seed, count, share, sign=np.positive):
    """What `fit_values` is given, and for each head what
    it has to solve: X, Y, and what each may be wrong by.
    """
    queries, keys, values = (
        reference_queries(case, seed, count),
        impl.round(case.keys),
        impl.round(sign(case.values)),
    )
    kept = some_kept(keys, seed, share)
    draw = np.random.default_rng(seed)
    bias = np.round(8 * draw.uniform(-3, 3, size=(*keys.shape[:2], int(kept[0, 0].sum())))) / 8
    systems = {}
    for place, rows in of_heads(queries, keys):
        logits, errors = rows @ keys[place].T / np.sqrt(keys.shape[-1]), logit_errors(impl, rows, keys[place])
        biased = logits[:, kept[place]] + bias[place]
        of_kept, of_all = (
            np.exp(each - np.logaddexp.reduce(each, axis=-1)[:, None]) for each in (biased, logits)
        )
        wrong = softmax_slack(impl, of_kept, errors[:, kept[place]] + rounding(impl) * np.abs(biased))
        of_output = (softmax_slack(impl, of_all, errors) + rounding(impl) * of_all) @ np.abs(values[place])
        systems[place] = of_kept, of_all @ values[place], wrong, of_output
    return (queries, keys, values, kept, bias), systems


def left_along(impl, system, values):
    """What the values leave of the outputs, along the weights, and what that may be wrong by: the system,
    rounding and what a solver leaves undone.
    """
    weights, outputs, wrong, of_output = system
    sizes, error = np.abs(values), rounding(impl) + SOLVED
    missed = wrong @ sizes + of_output + error * (weights @ sizes + np.abs(outputs))
    rest = weights @ values - outputs
    slack = (weights + wrong).T @ missed + wrong.T @ np.abs(rest) + 1e-30
    slack += SOLVED * np.linalg.norm(weights) * np.linalg.norm(missed / error)
    return weights.T @ rest, slack


@law("AM-4", of=VALUES, case=cases(max_length=33), seed=seeds(), count=counts, share=shares())
def test_the_fitted_values_solve_the_normal_equations(impl, case, seed, count, share):
    """For each head alone: what X C misses of the whole cache's outputs is orthogonal to X."""
    given, systems = fitted(impl, case, seed, count, share)
    got = impl.attention_matching.fit_values(*given)
    require_numbers(got, (*given[4].shape, given[2].shape[-1]), "the values")
    for place, system in systems.items():
        left, slack = left_along(impl, system, got[place])
        near(left, np.zeros(left.shape), slack, "what is left of the outputs, along the weights,")


def outputs_apart(impl, system, values, old):
    """How far the outputs are off with these values, and at most how far with the old ones, which the system,
    rounding and a solver may add to.
    """
    weights, outputs, wrong, of_output = system
    sizes = np.abs(old) + np.abs(values)
    slack = wrong @ sizes + 2 * of_output + (rounding(impl) + SOLVED) * (weights @ sizes)
    after, before = (np.linalg.norm(weights @ each - outputs) for each in (values, old))
    return after, before + np.linalg.norm(slack)


@law("AM-4", of=VALUES, case=cases(max_length=33), seed=seeds(), count=counts, share=shares())
def test_the_outputs_are_nearer_than_with_the_old_values(impl, case, seed, count, share):
    """The squared error at the reference queries is no larger than with the values as they were."""
    given, systems = fitted(impl, case, seed, count, share)
    got = impl.attention_matching.fit_values(*given)
    for place, system in systems.items():
        after, before = outputs_apart(impl, system, got[place], given[2][place][given[3][place]])
        require(after <= before, "the outputs are further off than with the old values", before, after)


@law("AM-4", of=VALUES, case=cases(max_length=33), seed=seeds(), count=counts)
def test_the_only_value_is_the_mean_output(impl, case, seed, count):
    """One key has all the weight whatever its bias, so its
    value is the mean of the outputs at the reference queries.
    """
    given, systems = fitted(impl, case, seed, count, 0, sign=np.abs)  # of one sign, the mean is no small rest
    got = impl.attention_matching.fit_values(*given)
    for place, (_, outputs, _, of_output) in systems.items():
        mean, size, wrong = (each.mean(axis=0)[None] for each in (outputs, np.abs(outputs), of_output))
        beside = wrong + SOLVED * np.abs(given[2]).max()
        rounds_to(impl, got[place], mean, "the value of the only key", terms=count, size=size, beside=beside)


@law("AM-4", of=VALUES)
def test_a_kept_key_of_next_to_no_weight_leaves_the_values_finite(impl):
    """The outputs of two queries are 2 and 1. The first key has all of their weight but e^-92, which the
    second has at one query. A solver in float32 cannot divide by that.
    """
    keys, values = np.zeros((2, 1, 1, 3, width(impl)))
    size = np.round(46 / 16 * np.sqrt(keys.shape[-1]))
    keys[0, 0, :2, 0], keys[0, 0, 2, 1], values[..., 0] = (size, -size), size, (1, 8, 3)
    queries, kept = np.zeros((1, 1, 2, width(impl))), np.array([[[True, True, False]]])
    queries[..., :2] = [16, 16], [64, 0]
    got = impl.attention_matching.fit_values(queries, keys, values, kept, np.zeros((1, 1, 2)))
    require_numbers(got, (1, 1, 2, width(impl)), "the values")
    first, is_finite = got[0, 0, 0, 0], bool(np.isfinite(got).all())
    require(is_finite and 0.9 < first < 2.1, "a value is infinite, or is not between the outputs", None, got)


@law("AM-4", of=VALUES, kind="edge")
def test_of_many_best_values_the_nearest_are_taken(impl):
    """One query sees the values 1, 3 and 8 alike: their mean is 4. The mean of the first two is 2, so both
    grow by 2.
    """
    keys, queries = np.zeros((1, 1, 3, width(impl))), np.ones((1, 1, 1, width(impl)))
    values = np.zeros((1, 1, 3, width(impl)))
    values[0, 0, :, 0] = 1, 3, 8
    got = impl.attention_matching.fit_values(
        queries, keys, values, np.array([[[True, True, False]]]), np.zeros((1, 1, 2))
    )
    what = "the values of two equal keys"
    rounds_to(impl, got[..., 0], [[[3.0, 5]]], what, roundings=8, beside=10 * SOLVED)


@law("AM-4", of=VALUES, kind="edge", case=cases(max_length=33), seed=seeds(), count=counts)
def test_where_all_keys_are_kept_the_values_stay(impl, case, seed, count):
    """With a bias of 0 no output misses anything."""
    keys, values = impl.round(case.keys), impl.round(case.values)
    queries, kept = reference_queries(case, seed, count), np.ones(keys.shape[:3], dtype=bool)
    got = impl.attention_matching.fit_values(queries, keys, values, kept, np.zeros(keys.shape[:3]))
    what, size = "the values where all keys are kept", np.abs(values).max()
    rounds_to(impl, got, values, what, size=size, beside=100 * SOLVED * size)


@law("AM-4", of=VALUES, kind="refusal")
def test_a_bias_of_other_keys_is_refused(impl):
    """Three numbers for a head that keeps two keys raise ValueError."""
    refuses(impl, VALUES, "bias", np.zeros((1, 2, 3)), kept=np.arange(4) < np.full((1, 2, 1), 2))


@law("AM-5", of=ATTEND, case=cases(max_length=33), seed=seeds())
def test_the_bias_is_added_to_the_logits(impl, case, seed):
    """softmax(s + beta) C, query by query."""
    keys, values, queries = (impl.round(each) for each in (case.keys, case.values, case.queries))
    bias = np.round(8 * np.random.default_rng(seed).uniform(-3, 3, size=keys.shape[:3])) / 8
    output = np.zeros((*queries.shape[:3], values.shape[-1]))
    for place, row in of_queries(queries, keys):
        logits = keys[row] @ queries[place] / np.sqrt(keys.shape[-1]) + bias[row]
        output[place] = np.exp(logits - np.logaddexp.reduce(logits)) @ values[row]
    size = (1 + np.abs(keys).max() * np.abs(queries).max()) * (1 + np.abs(values).max()) * keys.shape[-1]
    agrees(impl, ATTEND, queries, keys, values, bias, by_hand=output, size=size)


def of_queries(queries, keys):
    """The place of each query, and that of the KV head that it reads."""
    group = queries.shape[1] // keys.shape[1]
    return (((item, head, row), (item, head // group)) for item, head, row in np.ndindex(queries.shape[:3]))


@law("AM-5", of=ATTEND)
def test_a_bias_of_three_is_a_key_that_stands_twenty_times(impl):
    """Of two zero keys with the values 1 and 0, the first with a bias of 3, the output is e^3 / (e^3 + 1)."""
    keys, values = np.zeros((1, 1, 2, width(impl))), np.zeros((1, 1, 2, width(impl)))
    values[0, 0, 0, 0] = 1
    got = impl.attention_matching.attend(keys[:, :, :1], keys, values, np.array([[[3.0, 0]]]))
    rounds_to(impl, got[..., 0], [[[HIGH / (HIGH + 1)]]], "the output")


@law("AM-5", of=ATTEND, case=seeded_cases(max_length=33), seed=seeds())
def test_the_same_for_all_keys_is_no_bias(impl, case, seed):
    """Two for every key of a head leaves its output as it is."""
    bias = np.round(8 * np.random.default_rng(seed).uniform(-1, 1, size=case.keys.shape[:3])) / 8
    got = impl.attention_matching.attend(case.queries, case.keys, case.values, bias + 2)
    more = impl.allowance(ATTEND, case.queries, case.keys, case.values, bias + 2)
    same(impl, ATTEND, case.queries, case.keys, case.values, bias, got=got, more=more)


def matched_output(impl, queries, keys, values):
    """The output of queries [M, D] on all tokens [T, D] of a head, and what it may be wrong by where bias and
    value of one key match five of them: each is a rounded sum, and a solver leaves something undone.
    """
    matched = (2 * rounding(impl, 5) + 16 * SOLVED) * np.abs(values).max()
    output = attention_in_parts(queries, keys, values)[0]
    return output, output_slack(impl, queries, keys, values) + matched


@law("AM-6", of=(BIAS, VALUES, ATTEND), seed=seeds(), group=st.sampled_from([1, 2]), later=counts)
def test_later_tokens_find_the_mass_and_the_output_of_the_whole_cache(impl, seed, group, later):
    """As many kept keys as queries match both exactly. With later tokens beside them, of bias 0, the output
    is that of the whole text.
    """
    draw, channels = np.random.default_rng(seed), width(impl)
    queries, keys, values, new_keys, new_values = (
        np.round(8 * draw.normal(size=(2, heads, tokens, channels))) / 8
        for heads, tokens in ((group, 1), (1, 5), (1, 5), (1, later), (1, later))
    )
    values, new_values = np.abs(values), np.abs(new_values)  # so the output is no small rest
    queries = np.repeat(queries[:, :1], group, axis=1)
    kept = np.broadcast_to(np.arange(5) == seed % 5, keys.shape[:3])
    logits = (queries[:, :1] @ np.swapaxes(keys, -1, -2))[:, :, 0] / np.sqrt(channels)
    bias = impl.attention_matching.fit_bias(queries, keys, kept)
    fits = np.logaddexp.reduce(logits, axis=-1) - logits[kept].reshape(2, 1) < 3
    fitted_values = impl.attention_matching.fit_values(queries, keys, values, kept, impl.round(bias))
    got = impl.attention_matching.attend(
        queries,
        np.concatenate([keys[kept].reshape(2, 1, 1, -1), new_keys], axis=2),
        np.concatenate([fitted_values, new_values], axis=2),
        np.concatenate([bias, np.zeros((2, 1, later))], axis=2),
    )
    for item in np.flatnonzero(fits[:, 0]):
        pairs = (keys, new_keys), (values, new_values)
        whole = (np.concatenate([each[item, 0] for each in pair]) for pair in pairs)
        expected, slack = matched_output(impl, queries[item, 0], *whole)
        near(got[item], np.repeat(expected[None], group, axis=0), slack, "the output beside later tokens")
