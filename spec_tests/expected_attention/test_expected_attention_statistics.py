"""Laws of what Expected Attention builds on, and of its query statistics: EA-1 to EA-6."""

from evictionary.reference import rope
from evictionary.spec_tests.expected_attention.helpers import (
    ROPE,
    STATISTICS,
    averages,
    before_rope,
    grouped,
    in_closed_form,
    turned_errors,
    updates,
)
from evictionary.spec_tests.judge.prelude import *

positions = st.sampled_from([0, 1, 2, 7, 100, 1000, 4095])
horizons = st.sampled_from([1, 2, 3, 16, 512])
NAMES = "the queries", "the keys", "the values"


@law(
    "EA-6",
    of=ROPE,
    case=grouped,
    position=positions,
    horizon=horizons,
    theta=st.sampled_from([10000.0, 500000.0, 100.0]),
)
def test_average_rope_turns_mean_and_covariance_by_the_mean_rotation(impl, case, position, horizon, theta):
    """Rbar mu and Rbar Sigma Rbar^T, Rbar the mean of R over position .. position + horizon - 1, pairs (i,
    i + D/2).
    """
    averages(impl, *before_rope(impl, case), position=position, horizon=horizon, theta=theta)


@law("EA-6", of=ROPE, case=grouped, position=positions)
def test_the_horizon_is_512_and_the_base_10000_unless_given(impl, case, position):
    """Without them, the average is over the next 512 positions with theta = 10000."""
    states = before_rope(impl, case)
    got = impl.expected_attention.average_rope(*states, position=position)
    averages(impl, *states, position=position, theta=10000.0, by=same, got=got)


@law("EA-6", of=ROPE, case=grouped, position=positions)
def test_one_position_is_a_rotation(impl, case, position):
    """With horizon 1 the mean is turned as RoPE turns a query at `position`, and no length is lost."""
    mean, covariance = before_rope(impl, case)
    rotated = rope.rotate(mean, np.full(mean.shape[-2], position))
    _, turned = averages(impl, mean, covariance, position=position, horizon=1, expected=(rotated, None))
    before, after = (np.trace(states, axis1=-2, axis2=-1) for states in (covariance, turned))
    rounds_to(impl, after, before, "the turned covariance's trace", size=2 * before, angle=2 * (position + 1))


@law(
    "EA-6",
    of=ROPE,
    case=grouped,
    position=positions,
    horizon=horizons,
    theta=st.sampled_from([10000.0, 50.0]),
)
def test_the_average_is_over_the_positions_one_by_one(impl, case, position, horizon, theta):
    """The mean turned to each position of the window, by a loop, and averaged."""
    mean, covariance = before_rope(impl, case)
    places = range(position, position + horizon)
    turned = np.mean([rope.rotate(mean, np.full(mean.shape[-2], place), theta) for place in places], axis=0)
    averages(impl, mean, covariance, position=position, horizon=horizon, theta=theta, expected=(turned, None))


@law("EA-6", of=ROPE, case=grouped, position=positions, horizon=horizons)
def test_the_window_acts_as_its_middle_shrunk(impl, case, position, horizon):
    """Each pair is turned by w (position + (T - 1)/2) and shrunk by sin(T w/2) / (T sin(w/2)): the sum of
    a geometric series.
    """
    mean, covariance = before_rope(impl, case)
    expected = (in_closed_form(mean, position, horizon), None)
    averages(impl, mean, covariance, position=position, horizon=horizon, expected=expected)


def outer_errors(impl, mean, position):
    """How far the outer product of the mean that the last
    call turned may be from the covariance that it turned.

    The outer product was rounded to the dtype before it was turned, and either factor may be wrong.
    """
    largest = float(np.abs(mean).max())
    error = within(impl, pick=0, roundings=0) + turned_errors(impl, mean, position)
    return 4 * largest**2 * final_rounding(impl) + 4 * largest * error


@law("EA-6", of=ROPE, case=grouped, position=positions, horizon=horizons)
def test_mean_and_covariance_are_turned_alike(impl, case, position, horizon):
    """Where the covariance is the outer product of the mean with itself, it is so after the average too."""
    mean, _ = before_rope(impl, case)
    covariance = impl.round(mean[..., None] * mean[..., None, :])
    got, turned = impl.expected_attention.average_rope(mean, covariance, position=position, horizon=horizon)
    outer, more = got[..., None] * got[..., None, :], outer_errors(impl, mean, position + horizon)
    settings = {"position": position, "horizon": horizon, "got": (got, turned)}
    averages(impl, mean, covariance, **settings, expected=(None, outer), more=(0.0, more))


@law("EA-6", of=ROPE, kind="refusal")
def test_an_odd_number_of_channels_is_refused(impl):
    """Three channels of both statistics, which agree but come in no pairs, raise ValueError."""
    refused(impl, "query_mean", ROPE, np.ones((1, 1, 3)), np.ones((1, 1, 3, 3)), position=0)


def updating_errors(impl, queries):
    """What mean and covariance may be wrong by where they are updated query by query.

    Welford's recurrence rounds at every one of n queries of at most M, each
    error fading as 1/n: together at most eps M (n + 9) / 4 on the mean and eps
    M^2 (3 n + 84) / 4 on the covariance, where the plain sums may be exact.
    """
    largest, count = float(np.abs(queries).max()), queries.shape[-2]
    changed = largest * (count + 9) / 4, largest**2 * (3 * count + 84) / 4
    return tuple(accumulating(impl) * each for each in changed)


def check_statistics(impl, queries):
    """`agrees` of mean and covariance, also of ones that are updated query by query."""
    for pick, more in enumerate(updating_errors(impl, queries)):
        agrees(impl, STATISTICS, queries, pick=pick, more=more)


@law("EA-5", of=STATISTICS, case=cases())
def test_statistics_are_the_mean_and_the_covariance_over_n(impl, case):
    """mu = mean of q; Sigma = (1/N) sum (q - mu)(q - mu)^T, centred and divided by N."""
    check_statistics(impl, case.keys)


@law("EA-5", of=STATISTICS, case=cases(), seed=seeds())
def test_repeating_the_queries_changes_no_statistic(impl, case, seed):
    """Every query twice, in any order, gives the same mean and covariance (with N - 1 it would not)."""
    order = np.random.default_rng(seed).permutation(2 * case.keys.shape[2]) % case.keys.shape[2]
    repeated = impl.round(case.keys[:, :, order])
    got, errors = impl.call(STATISTICS, case.keys), updating_errors(impl, repeated)
    for pick, more in enumerate(errors):
        what = f"the {('mean', 'covariance')[pick]} of the queries once"
        same(impl, STATISTICS, repeated, pick=pick, got=got[pick], more=2 * more, what=what)


def rounded_before(impl, mean, covariance, w_q):
    """What the projected mean and covariance may be wrong by, at most and on average, by the rounding before
    they are projected.

    Numbers too large for the dtype say nothing. Small ones have fewer digits in float16.
    """
    if not np.isfinite(impl.round(np.abs(covariance).max() * np.abs(w_q).sum() ** 2)):
        impl.unrepresentable()
    of_mean, of_rows = (
        np.maximum(np.abs(states), 2.0**-14 * (impl.dtype == "float16")) @ np.abs(w_q.T)
        for states in (mean, covariance)
    )
    errors = ((final_rounding(impl) + 1e-12) * sizes for sizes in (of_mean, np.abs(w_q) @ of_rows))
    return [(each.max(), each.mean()) for each in errors]


@law("EA-5", of=(STATISTICS, "expected_attention.project_statistics"), case=cases(), seed=seeds())
def test_statistics_pass_through_a_linear_map(impl, case, seed):
    """The statistics of W h are W mu and W Sigma W^T of those of h: from h channels to D."""
    hidden = impl.round(case.keys)
    w_q = np.random.default_rng(seed).integers(-1, 2, size=(2, hidden.shape[-1])) * 1.0
    states = *impl.rounded(oracle(STATISTICS)(hidden)), w_q
    got = impl.expected_attention.project_statistics(*states)
    direct, more = oracle(STATISTICS)(hidden @ w_q.T), rounded_before(impl, *states)
    for pick in (0, 1):
        how = {"pick": pick, "got": got[pick], "expected": direct[pick], "more": more[pick]}
        agrees(impl, "expected_attention.project_statistics", *states, **how)


@law("EA-1", of="expected_attention_theory.project", seed=seeds(), shift=st.integers(0, 50))
def test_logits_depend_on_distance_alone(impl, seed, shift):
    """Moving all positions by the same distance changes no
    q_i.k_j; W maps h channels to D; values carry no position.
    """
    generator = np.random.default_rng(seed)
    states = [impl.round(generator.normal(size=shape)) for shape in [(5, 6), (4, 6), (4, 6), (4, 6)]]
    path, places = "expected_attention_theory.project", np.arange(5)
    here, there = (impl.call(path, *states, each) for each in (places, places + shift))
    for pick, expected in enumerate(oracle(path)(*states, places)):
        name, how = NAMES[pick], {"pick": pick, "more": turned_errors(impl, expected, 5 + shift)}
        agrees(impl, path, *states, places, **how, got=here[pick], what=name)
        if pick == 2:
            same(impl, path, *states, places, **how, got=there[pick], what="the values elsewhere")
        else:
            how = {"roundings": 8, "size": np.abs(here[pick]).max(), "angle": 8 * (5 + shift)}
            own, what = lengths(here[pick]), f"the length of {name} elsewhere"
            rounds_to(impl, lengths(there[pick]), own, what, **how)
    logits = [queries @ keys.T for queries, keys, _ in (here, there)]
    how = {"roundings": 16, "size": np.abs(here[0]).max() * np.abs(here[1]).max(), "angle": 8 * (5 + shift)}
    rounds_to(impl, logits[1], logits[0], "the logits where all positions move together", **how)


@law("EA-2", of="expected_attention_theory.attention_weights", case=cases())
def test_attention_weights_are_the_softmax_of_scaled_logits(impl, case):
    """softmax over the tokens of q.k/sqrt d: positive, and 1 in total."""
    path, states = "expected_attention_theory.attention_weights", (case.next_keys[..., 0, :], case.keys)
    query, keys = impl.rounded(states)
    size = 1 + np.abs(query).max() * np.abs(keys).max()
    got = agrees(
        impl, path, query, keys, by_hand=causal_weights(query[..., None, :], keys)[..., 0, :], size=size
    )
    totals(got, 1, impl.allowance(path, query, keys), "the weights")


@law("EA-3", of="expected_attention_theory.residual_updates", case=cases(), seed=seeds())
def test_the_updates_sum_to_the_projected_output(impl, case, seed):
    """sum_i a_i W_o v_i = W_o sum_i a_i v_i: the output is the sum of what each token adds."""
    weights, values, w_o = updates(impl, case, seed)
    got = agrees(impl, "expected_attention_theory.residual_updates", weights, values, w_o)
    output = (weights[..., None, :] @ values @ w_o.T)[..., 0, :]
    slack = within(impl, roundings=0, times=values.shape[2])
    near(got.sum(axis=2), output, slack, "the sum of the updates")


@law("EA-4", of="expected_attention_theory.update_norms", case=cases(), seed=seeds())
def test_the_norm_of_an_update_is_weight_times_norm(impl, case, seed):
    """a_i |W_o v_i|."""
    weights, values, w_o = states = updates(impl, case, seed)
    expected = weights * lengths(linear(values, w_o.T))
    agrees(impl, "expected_attention_theory.update_norms", *states, by_hand=expected, size=expected.max())


def of_two_outputs(impl, values, w_o):
    """What the change of an output may be wrong by where it is the difference of two that are rounded."""
    return rounding(impl) * float((np.abs(values) @ np.abs(w_o.T)).max())


@law("EA-4S", of="expected_attention_theory.removal_error", case=cases(min_length=2), seed=seeds())
def test_removal_error_is_the_error_of_leaving_one_out(impl, case, seed):
    """Attention computed again without token i differs from the full output by a/(1-a) |W_o (v - o)|."""
    _, values, w_o = updates(impl, case, seed)
    # Whole parts in 256, no token without one: they sum to 1 in every dtype.
    generator, tokens = np.random.default_rng(seed), values.shape[2]
    shares = generator.dirichlet(np.ones(tokens), size=values.shape[:2])
    weights = (1 + generator.multinomial(256 - tokens, shares)) / 256
    full = (weights[..., None] * values).sum(axis=2)
    expected = np.empty(weights.shape)
    for token in range(tokens):
        others = np.arange(tokens) != token
        left = weights[..., others] / weights[..., others].sum(axis=-1, keepdims=True)
        expected[..., token] = lengths((full - (left[..., None] * values[:, :, others]).sum(axis=2)) @ w_o.T)
    states, size = (weights, values, w_o), np.abs(values).max() * np.abs(w_o).sum()
    agrees(
        impl,
        "expected_attention_theory.removal_error",
        *states,
        by_hand=expected,
        size=size,
        more=of_two_outputs(impl, values, w_o),
    )


def float32_errors(position):
    """What an average rotation may be wrong by, up to this position.

    A matrix made of whole numbers alone has no dtype to follow: float32 is what every implementation can do.
    """
    return 2.0**-23 * position


@law(
    "EA-6",
    of="expected_attention.average_rotation",
    position=positions,
    horizon=horizons,
    dim=st.sampled_from([2, 4, 8]),
)
def test_the_average_rotation_never_lengthens(impl, position, horizon, dim):
    """Rbar^T Rbar = diag(g^2) with every g at most 1, and
    1 where horizon = 1: an average of rotations shrinks.
    """
    got = impl.expected_attention.average_rotation(dim, position=position, horizon=horizon)
    expected = oracle("expected_attention.average_rotation")(dim, position=position, horizon=horizon)
    near(got, expected, float32_errors(position + horizon), "the average rotation")
    gram = got.T @ got
    squares, slack = np.diag(np.minimum(np.diag(gram), 1)), float32_errors(4 * (position + horizon))
    near(gram, squares, slack, "the product of the average rotation with itself")
