"""Laws of what Expected Attention builds on, and of its query statistics: EA-1 to EA-6."""

from evictionary.reference import rope
from evictionary.spec_tests.expected_attention.helpers import (
    ROPE,
    STATISTICS,
    averages,
    before_rope,
    grouped,
    in_closed_form,
    updates,
)
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import refuses

positions = st.sampled_from([0, 1, 2, 7, 100, 1000, 4095])
horizons = st.sampled_from([1, 2, 3, 16, 512])


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
    averages(
        impl, *states, position=position, got=impl.expected_attention.average_rope(*states, position=position)
    )


@law("EA-6", of=ROPE, case=grouped, position=positions)
def test_one_position_is_a_rotation(impl, case, position):
    """With horizon 1 the mean is turned as RoPE turns a query at `position`, and no length is lost."""
    mean, covariance = before_rope(impl, case)
    rotated = rope.rotate(mean, np.full(mean.shape[-2], position))
    _, turned = averages(impl, mean, covariance, position=position, horizon=1, expected=(rotated, None))
    before, after = (np.trace(states, axis1=-2, axis2=-1) for states in (covariance, turned))
    rounded = final_rounding(impl) + 2 * accumulating(impl) * (position + 1)
    error = within(impl, pick=1, roundings=0) + 4 * float(np.abs(covariance).max()) * rounded
    near(
        after,
        before,
        mean.shape[-1] * error + 1e-12 * np.abs(covariance).sum(),
        "the trace of the rotated covariance",
    )


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


@law("EA-6", of=ROPE, case=grouped, position=positions, horizon=horizons)
def test_mean_and_covariance_are_turned_alike(impl, case, position, horizon):
    """Where the covariance is the outer product of the mean with itself, it is so after the average too."""
    mean, _ = before_rope(impl, case)
    covariance, largest = impl.round(mean[..., None] * mean[..., None, :]), float(np.abs(mean).max())
    got, turned = impl.expected_attention.average_rope(mean, covariance, position=position, horizon=horizon)
    error = within(impl, pick=0, roundings=0) + largest * (
        final_rounding(impl) + 2 * accumulating(impl) * (position + horizon)
    )
    # of the outer product, rounded to the dtype
    more = 4 * largest**2 * final_rounding(impl) + 4 * largest * error
    outer = got[..., None] * got[..., None, :]
    settings = {"position": position, "horizon": horizon, "got": (got, turned)}
    averages(impl, mean, covariance, **settings, expected=(None, outer), more=(0.0, more))


@law(
    "EA-6",
    of=ROPE,
    kind="refusal",
    bad=st.sampled_from([("position", -1), ("position", 1.5), ("horizon", 0), ("theta", 0.0)]),
)
def test_bad_windows_are_refused(impl, bad):
    """A position or horizon that is no whole number in range, and a base that is not positive, raise
    ValueError naming it.
    """
    refuses(impl, ROPE, *bad)


@law(
    "EA-6",
    of=ROPE,
    kind="refusal",
    bad=st.sampled_from(
        [("query_mean", (1, 1, 3), (1, 1, 3, 3)), ("query_covariance", (1, 1, 2), (1, 2, 2))]
    ),
)
def test_bad_statistics_are_refused(impl, bad):
    """An odd number of channels, and a covariance that is not of the mean's channels, raise ValueError."""
    name, *shapes = bad
    refused(impl, name, ROPE, *map(np.ones, shapes), position=0)


def check_statistics(impl, queries, expected=(None, None)):
    """`agrees` of mean and covariance, also of ones that are updated query by query.

    Welford's recurrence rounds at every one of n queries of at most M, each error fading as 1/n: together at
    most eps M (n + 9) / 4 on the mean and eps M^2 (3 n + 84) / 4 on the covariance, where the plain sums may
    be exact.
    """
    got, largest, count = impl.call(STATISTICS, queries), float(np.abs(queries).max()), queries.shape[-2]
    for pick, changed in enumerate((largest * (count + 9) / 4, largest**2 * (3 * count + 84) / 4)):
        more = accumulating(impl) * changed
        if expected[pick] is not None:
            more += 1e-12 * float(np.abs(expected[pick]).max(initial=0))
        agrees(impl, STATISTICS, queries, pick=pick, got=got[pick], expected=expected[pick], more=more)


@law("EA-5", of=STATISTICS, case=cases())
def test_statistics_are_the_mean_and_the_covariance_over_n(impl, case):
    """mu = mean of q; Sigma = (1/N) sum (q - mu)(q - mu)^T, centred and divided by N."""
    check_statistics(impl, case.keys)


@law("EA-5", of=STATISTICS, case=cases(), seed=seeds())
def test_repeating_the_queries_changes_no_statistic(impl, case, seed):
    """Every query twice, in any order, gives the same mean and covariance (with N - 1 it would not)."""
    order = np.random.default_rng(seed).permutation(2 * case.keys.shape[2]) % case.keys.shape[2]
    check_statistics(impl, case.keys[:, :, order], expected=oracle(STATISTICS)(impl.round(case.keys)))


@law("EA-5", of=(STATISTICS, "expected_attention.project_statistics"), case=cases(), seed=seeds())
def test_statistics_pass_through_a_linear_map(impl, case, seed):
    """The statistics of W h are W mu and W Sigma W^T of those of h: from h channels to D."""
    hidden = impl.round(case.keys)
    w_q = np.random.default_rng(seed).integers(-1, 2, size=(2, hidden.shape[-1])) * 1.0
    states = *impl.rounded(oracle(STATISTICS)(hidden)), w_q
    got = impl.expected_attention.project_statistics(*states)
    for pick, direct in enumerate(oracle(STATISTICS)(hidden @ w_q.T)):
        # The statistics are rounded before they are projected: so much that rounding may change the sums.
        sizes = np.abs(states[pick]) @ np.abs(w_q.T)
        sizes = np.abs(w_q) @ sizes if pick else sizes
        more = (final_rounding(impl) + 1e-12) * sizes
        how = {"pick": pick, "got": got[pick], "expected": direct, "more": (more.max(), more.mean())}
        agrees(impl, "expected_attention.project_statistics", *states, **how)


@law("EA-1", of="expected_attention_theory.project", seed=seeds(), shift=st.integers(0, 50))
def test_logits_depend_on_distance_alone(impl, seed, shift):
    """Moving all positions by the same distance changes no q_i.k_j; W maps h channels to D; values carry
    no position.
    """
    generator = np.random.default_rng(seed)
    states = [impl.round(generator.normal(size=shape)) for shape in [(5, 6), (4, 6), (4, 6), (4, 6)]]
    path, places = "expected_attention_theory.project", np.arange(5)
    here, there = (impl.call(path, *states, each) for each in (places, places + shift))
    turned = accumulating(impl) * (5 + shift)
    for pick, name in enumerate(("the queries", "the keys", "the values")):
        allowed = impl.allowance(path, *states, places, pick=pick)
        more = float(np.abs(allowed.expected).max()) * (final_rounding(impl) + 2 * turned)
        agrees(impl, path, *states, places, pick=pick, got=here[pick], more=more, what=name)
        if pick == 2:
            agrees(
                impl,
                path,
                *states,
                places,
                pick=pick,
                got=there[pick],
                more=more,
                what="the values elsewhere",
            )
        else:
            slack = 4 * (allowed.largest + more)
            near(lengths(there[pick]), lengths(allowed.expected), slack, f"the length of {name} elsewhere")
    logits = [queries @ keys.T for queries, keys, _ in (here, there)]
    bound = 16 * float(np.abs(here[0]).max() * np.abs(here[1]).max()) * (4 * final_rounding(impl) + turned)
    near(logits[1], logits[0], bound, "the logits where all positions move together")


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
    slack = values.shape[2] * within(impl, roundings=0) + 1e-12 * float(
        np.abs(weights[..., None] * values @ w_o.T).sum()
    )
    near(got.sum(axis=2), output, slack, "the sum of the updates")


@law("EA-4", of="expected_attention_theory.update_norms", case=cases(), seed=seeds())
def test_the_norm_of_an_update_is_weight_times_norm(impl, case, seed):
    """a_i |W_o v_i|."""
    weights, values, w_o = states = updates(impl, case, seed)
    expected = weights * lengths(linear(values, w_o.T))
    agrees(impl, "expected_attention_theory.update_norms", *states, by_hand=expected, size=expected.max())


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
    more = 1e-12 * float(np.abs(values).max() * np.abs(w_o).sum())
    agrees(
        impl, "expected_attention_theory.removal_error", weights, values, w_o, expected=expected, more=more
    )


@law(
    "EA-6",
    of="expected_attention.average_rotation",
    position=positions,
    horizon=horizons,
    dim=st.sampled_from([2, 4, 8]),
)
def test_the_average_rotation_never_lengthens(impl, position, horizon, dim):
    """Rbar^T Rbar = diag(g^2) with every g at most 1, and 1 where horizon = 1: an average of rotations
    shrinks.
    """
    got = impl.expected_attention.average_rotation(dim, position=position, horizon=horizon)
    # A matrix made of whole numbers alone has no dtype to follow: float32 is what every implementation can
    # do.
    error = 2.0**-23 * (position + horizon)
    expected = oracle("expected_attention.average_rotation")(dim, position=position, horizon=horizon)
    near(got, expected, error, "the average rotation")
    gram = got.T @ got
    squares = np.diag(gram)
    require(squares.max() <= 1 + 4 * error, "the average rotation lengthens a vector", np.eye(dim), gram)
    near(gram, np.diag(squares), 4 * error, "the product of the average rotation with itself")
