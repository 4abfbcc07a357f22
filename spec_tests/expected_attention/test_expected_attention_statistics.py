"""Laws of what Expected Attention builds on, and of its query statistics: EA-1 to EA-6."""

import numpy as np
from hypothesis import strategies as st

from evictionary.reference.expected_attention import average_rotation
from evictionary.reference.rope import rotate
from evictionary.spec_tests.expected_attention.helpers import (
    ROPE,
    STATISTICS,
    before_rope,
    grouped,
    in_closed_form,
    rope_allowance,
)
from evictionary.spec_tests.judge.prelude import *

positions = st.sampled_from([0, 1, 2, 7, 100, 1000, 4095])
horizons = st.sampled_from([1, 2, 3, 16, 512])


@law("EA-6", of=ROPE, case=grouped, position=positions, horizon=horizons, theta=st.sampled_from([10000.0, 500000.0, 100.0]))
def test_average_rope_turns_mean_and_covariance_by_the_mean_rotation(impl, case, position, horizon, theta):
    """Rbar mu and Rbar Sigma Rbar^T, Rbar the mean of R over position .. position + horizon - 1, pairs (i, i + D/2)."""
    mean, covariance = before_rope(impl, case)
    settings = {"position": position, "horizon": horizon, "theta": theta}
    got = impl.expected_attention.average_rope(mean, covariance, **settings)
    for pick, name in enumerate(("the mean", "the covariance")):
        rope_allowance(impl, pick, mean, covariance, **settings).check(got[pick], name)


@law("EA-6", of=ROPE, case=grouped, position=positions)
def test_the_horizon_is_512_and_the_base_10000_unless_given(impl, case, position):
    """Without them, the average is over the next 512 positions with theta = 10000."""
    mean, covariance = before_rope(impl, case)
    got = impl.expected_attention.average_rope(mean, covariance, position=position)
    for pick, name in enumerate(("the mean", "the covariance")):
        rope_allowance(impl, pick, mean, covariance, position=position).check(got[pick], f"{name} by default")


@law("EA-6", of=ROPE, case=grouped, position=positions)
def test_one_position_is_a_rotation(impl, case, position):
    """With horizon 1 the mean is turned as RoPE turns a query at `position`, and no length is lost."""
    mean, covariance = before_rope(impl, case)
    got, turned = impl.expected_attention.average_rope(mean, covariance, position=position, horizon=1)
    allowed = rope_allowance(impl, 0, mean, covariance, position=position, horizon=1)
    allowed.check(got, "the mean at one position", rotate(mean, np.full(mean.shape[-2], position)))
    allowed = rope_allowance(impl, 1, mean, covariance, position=position, horizon=1)
    trace = np.trace(turned, axis1=-2, axis2=-1) - np.trace(covariance, axis1=-2, axis2=-1)
    require(
        np.abs(trace).max() <= mean.shape[-1] * allowed.largest + 1e-12 * np.abs(covariance).sum(),
        "the trace of the covariance changed under a rotation",
        np.zeros_like(trace),
        trace,
    )


@law("EA-6", of=ROPE, case=grouped, position=positions, horizon=horizons, theta=st.sampled_from([10000.0, 50.0]))
def test_the_average_is_over_the_positions_one_by_one(impl, case, position, horizon, theta):
    """The mean turned to each position of the window, by a loop, and averaged."""
    mean, covariance = before_rope(impl, case)
    settings = {"position": position, "horizon": horizon, "theta": theta}
    total = sum(rotate(mean, np.full(mean.shape[-2], place), theta) for place in range(position, position + horizon))
    got, _ = impl.expected_attention.average_rope(mean, covariance, **settings)
    allowed = rope_allowance(impl, 0, mean, covariance, **settings)
    allowed.check(got, "the mean over the window", np.asarray(total / horizon))


@law("EA-6", of=ROPE, case=grouped, position=positions, horizon=horizons)
def test_the_window_acts_as_its_middle_shrunk(impl, case, position, horizon):
    """Each pair is turned by w (position + (T - 1)/2) and shrunk by sin(T w/2) / (T sin(w/2)): the sum of a geometric series."""
    mean, covariance = before_rope(impl, case)
    got, _ = impl.expected_attention.average_rope(mean, covariance, position=position, horizon=horizon)
    expected = in_closed_form(mean, position, horizon)
    rope_allowance(impl, 0, mean, covariance, position=position, horizon=horizon).check(got, "the mean", expected)


@law("EA-6", of=ROPE, case=grouped, position=positions, horizon=horizons)
def test_mean_and_covariance_are_turned_alike(impl, case, position, horizon):
    """Where the covariance is the outer product of the mean with itself, it is so after the average too."""
    mean, _ = before_rope(impl, case)
    covariance = impl.round(mean[..., None] * mean[..., None, :])
    got, turned = impl.expected_attention.average_rope(mean, covariance, position=position, horizon=horizon)
    allowed = rope_allowance(impl, 1, mean, covariance, position=position, horizon=horizon)
    slack = float(np.abs(mean).max()) ** 2 * 8 * EPSILON[impl.dtype]  # of the outer product, rounded to the dtype
    extra = (
        slack
        + 4 * float(np.abs(mean).max()) * rope_allowance(impl, 0, mean, covariance, position=position, horizon=horizon).largest
    )
    allowed.wider(extra).check(turned, "the covariance", got[..., None] * got[..., None, :])


@law(
    "EA-6", of=ROPE, kind="refusal", settings=st.sampled_from([("position", -1), ("position", 1.5), ("horizon", 0), ("theta", 0.0)])
)
def test_bad_windows_are_refused(impl, settings):
    """A position or horizon that is no whole number in range, and a base that is not positive, raise ValueError naming it."""
    name, value = settings
    refused(impl, name, ROPE, np.ones((1, 1, 2)), np.ones((1, 1, 2, 2)), **{"position": 0} | {name: value})


@law("EA-6", of=ROPE, kind="refusal", bad=st.sampled_from([("query_mean", (1, 1, 3)), ("query_covariance", (1, 2, 2))]))
def test_bad_statistics_are_refused(impl, bad):
    """An odd number of channels, and a covariance that is not of the mean's channels, raise ValueError."""
    name, shape = bad
    mean = np.ones(shape if name == "query_mean" else (1, 1, 2))
    refused(impl, name, ROPE, mean, np.ones((*mean.shape, mean.shape[-1]) if name == "query_mean" else shape), position=0)


def statistics_allowance(impl, pick, queries):
    """The error allowed on the mean (pick 0) or the covariance (1), also of one that is updated query by query.

    Welford's recurrence rounds at every one of n queries of at most M, each error fading as 1/n: together at most
    eps M (n + 9) / 4 on the mean and eps M^2 (3 n + 84) / 4 on the covariance, where the plain sums may be exact.
    """
    largest, count = float(np.abs(queries).max()), queries.shape[-2]
    updates = largest * (count + 9) / 4 if pick == 0 else largest**2 * (3 * count + 84) / 4
    return impl.allowance(STATISTICS, queries, pick=pick).wider(EPSILON[ACCUMULATOR[impl.dtype]] * updates)


@law("EA-5", of=STATISTICS, case=cases())
def test_statistics_are_the_mean_and_the_covariance_over_n(impl, case):
    """mu = mean of q; Sigma = (1/N) sum (q - mu)(q - mu)^T, centred and divided by N."""
    got = impl.expected_attention.query_statistics(case.keys)
    for pick, name in enumerate(("the mean", "the covariance")):
        statistics_allowance(impl, pick, case.keys).check(got[pick], name)


@law("EA-5", of=STATISTICS, case=cases(), seed=seeds())
def test_repeating_the_queries_changes_no_statistic(impl, case, seed):
    """Every query twice, in any order, gives the same mean and covariance (with N - 1 it would not)."""
    order = np.random.default_rng(seed).permutation(2 * case.keys.shape[2]) % case.keys.shape[2]
    got = impl.expected_attention.query_statistics(case.keys[:, :, order])
    for pick, name in enumerate(("the mean", "the covariance")):
        allowed = statistics_allowance(impl, pick, case.keys[:, :, order])
        expected = impl.allowance(STATISTICS, case.keys, pick=pick).expected
        allowed.wider(1e-12 * float(np.abs(expected).max(initial=0))).check(got[pick], f"{name} of repeated queries", expected)


@law("EA-5", of=(STATISTICS, "expected_attention.project_statistics"), case=cases(), seed=seeds())
def test_statistics_pass_through_a_linear_map(impl, case, seed):
    """The statistics of W h are W mu and W Sigma W^T of those of h: from h channels to D."""
    hidden = impl.round(case.keys)
    w_q = np.random.default_rng(seed).integers(-1, 2, size=(2, hidden.shape[-1])) * 1.0
    mean, covariance = (impl.allowance(STATISTICS, hidden, pick=pick).expected for pick in (0, 1))
    mean, covariance = impl.round(mean), impl.round(covariance)
    got = impl.expected_attention.project_statistics(mean, covariance, w_q)
    for pick, name in enumerate(("the mean", "the covariance")):
        direct = impl.allowance(STATISTICS, hidden @ w_q.T, pick=pick).expected
        size = float(np.abs(hidden).max()) ** (1 + pick) * hidden.shape[-1] ** 2
        agrees(
            impl,
            "expected_attention.project_statistics",
            mean,
            covariance,
            w_q,
            pick=pick,
            got=got[pick],
            expected=direct,
            more=size * (2 * EPSILON[impl.dtype] + 1e-12),
            what=f"{name} of the projected states",
        )


@law("EA-1", of="expected_attention_theory.project", seed=seeds(), shift=st.integers(0, 50))
def test_logits_depend_on_distance_alone(impl, seed, shift):
    """Moving all positions by the same distance changes no q_i.k_j; W maps h channels to D; values carry no position."""
    generator = np.random.default_rng(seed)
    hidden, *weights = (impl.round(generator.normal(size=shape)) for shape in [(5, 6), (4, 6), (4, 6), (4, 6)])
    path, places = "expected_attention_theory.project", np.arange(5)
    here = impl.expected_attention_theory.project(hidden, *weights, places)
    there = impl.expected_attention_theory.project(hidden, *weights, places + shift)
    angle = EPSILON[ACCUMULATOR[impl.dtype]] * (5 + shift)
    for pick, name in enumerate(("the queries", "the keys", "the values")):
        allowed = impl.allowance(path, hidden, *weights, places, pick=pick)
        size = float(np.abs(allowed.expected).max()) * 2 * (EPSILON[impl.dtype] + angle)
        allowed.wider(size).check(here[pick], name)
        if pick < 2:
            error = np.abs(np.linalg.norm(there[pick], axis=-1) - np.linalg.norm(allowed.expected, axis=-1)).max()
            require(
                error <= 4 * (allowed.largest + size),
                f"{name} change their length with the position by {error:.3g}",
                here[pick],
                there[pick],
            )
        else:
            allowed.wider(size).check(there[pick], "the values elsewhere")
    logits = [queries @ keys.T for queries, keys, _ in (here, there)]
    bound = 16 * float(np.abs(here[0]).max() * np.abs(here[1]).max()) * (8 * EPSILON[impl.dtype] + angle)
    require(
        np.abs(logits[0] - logits[1]).max() <= bound, "the logits change when all positions move together", logits[0], logits[1]
    )


@law("EA-2", of="expected_attention_theory.attention_weights", case=cases())
def test_attention_weights_are_the_softmax_of_scaled_logits(impl, case):
    """softmax over the tokens of q.k/sqrt d: positive, and 1 in total."""
    query = impl.round(case.next_keys[..., 0, :])
    agrees(impl, "expected_attention_theory.attention_weights", query, case.keys)
    allowed = impl.allowance("expected_attention_theory.attention_weights", query, case.keys)
    keys = impl.round(case.keys)
    by_hand = causal_weights(query[..., None, :], keys)[..., 0, :]
    loops(allowed.expected, by_hand, 1 + np.abs(query).max() * np.abs(keys).max())
    totals(impl.expected_attention_theory.attention_weights(query, case.keys), 1, allowed, "the weights")


def update_inputs(impl, case, seed):
    """Weights that sum to 1 (up to the dtype), values, and W_o from D_v to another number of channels."""
    generator = np.random.default_rng(seed)
    values = impl.round(case.values)
    weights = impl.round(generator.dirichlet(np.ones(values.shape[2]), size=values.shape[:2]))
    return weights, values, impl.round(generator.normal(size=(values.shape[-1] + 1, values.shape[-1])))


@law("EA-3", of="expected_attention_theory.residual_updates", case=cases(), seed=seeds())
def test_the_updates_sum_to_the_projected_output(impl, case, seed):
    """sum_i a_i W_o v_i = W_o sum_i a_i v_i: the output is the sum of what each token adds."""
    weights, values, w_o = update_inputs(impl, case, seed)
    path = "expected_attention_theory.residual_updates"
    allowed = impl.allowance(path, weights, values, w_o)
    got = impl.expected_attention_theory.residual_updates(weights, values, w_o)
    allowed.check(got, "the updates")
    output = (weights[..., None, :] @ values @ w_o.T)[..., 0, :]
    error = float(np.abs(got.sum(axis=2) - output).max())
    require(
        error <= values.shape[2] * allowed.largest + 1e-12 * float(np.abs(allowed.expected).sum()),
        f"the sum of the updates differs by {error:.3g} from the output",
        output,
        got.sum(axis=2),
    )


@law("EA-4", of="expected_attention_theory.update_norms", case=cases(), seed=seeds())
def test_the_norm_of_an_update_is_weight_times_norm(impl, case, seed):
    """a_i |W_o v_i|."""
    weights, values, w_o = update_inputs(impl, case, seed)
    allowed = impl.allowance("expected_attention_theory.update_norms", weights, values, w_o)
    expected = weights * lengths(linear(values, w_o.T))
    loops(allowed.expected, expected, expected.max())
    allowed.check(impl.expected_attention_theory.update_norms(weights, values, w_o), "the norms")


@law("EA-4S", of="expected_attention_theory.removal_error", case=cases(min_length=2), seed=seeds())
def test_removal_error_is_the_error_of_leaving_one_out(impl, case, seed):
    """Attention computed again without token i differs from the full output by a/(1-a) |W_o (v - o)|."""
    weights, values, w_o = update_inputs(impl, case, seed)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    full = (weights[..., None] * values).sum(axis=2)
    expected = np.empty(weights.shape)
    for token in range(weights.shape[-1]):
        others = np.arange(weights.shape[-1]) != token
        left = weights[..., others] / weights[..., others].sum(axis=-1, keepdims=True)
        without = (left[..., None] * values[:, :, others]).sum(axis=2)
        expected[..., token] = np.linalg.norm((full - without) @ w_o.T, axis=-1)
    # The weights as the dtype holds them do not quite sum to 1, which 1 - a magnifies.
    short = EPSILON[impl.dtype] * weights.shape[-1] / (1 - weights.max()) ** 2 * float(np.abs(values).max() * np.abs(w_o).sum())
    agrees(
        impl,
        "expected_attention_theory.removal_error",
        weights,
        values,
        w_o,
        expected=expected,
        more=8 * short,
        what="the removal error",
    )


@law("EA-6", of="expected_attention.average_rotation", position=positions, horizon=horizons, dim=st.sampled_from([2, 4, 8]))
def test_the_average_rotation_never_lengthens(impl, position, horizon, dim):
    """Rbar^T Rbar = diag(g^2) with every g at most 1, and 1 where horizon = 1: an average of rotations shrinks."""
    got = impl.expected_attention.average_rotation(dim, position=position, horizon=horizon)
    expected = average_rotation(dim, position=position, horizon=horizon)
    # A matrix made of whole numbers alone has no dtype to follow: float32 is what every implementation can do.
    error = EPSILON["float32"] * (position + horizon)
    Allowance(expected, error, error).check(got, "the average rotation")
    gram = got.T @ got
    largest = float(np.abs(gram - np.diag(np.diag(gram))).max(initial=0))
    require(
        np.diag(gram).max() <= 1 + 4 * error and largest <= 4 * error,
        "the average rotation lengthens a vector or bends a pair",
        np.eye(dim),
        gram,
    )
