"""What several files of the laws of expected_attention use."""

from evictionary.spec_tests.judge.prelude import *

SCORE, WEIGHTS, STATISTICS, CONTRIBUTION, ROPE = (
    f"expected_attention.{name}"
    for name in ("score", "expected_weights", "query_statistics", "contribution", "average_rope")
)
epsilons = st.sampled_from([0.02, 0.0, 0.5])


grouped = st.one_of(tiny_cases(), tiny_cases(group=2), seeded_cases())


def statistics(impl, case):
    """A mean [B, H_q, D] and a full-rank covariance [B, H_q, D, D]
    of the case's queries, as the dtype represents them.
    """
    queries = case.queries
    covariance = np.swapaxes(queries, -1, -2) @ queries / 4 + np.eye(queries.shape[-1]) / 4
    return impl.round(queries.mean(axis=2)), impl.round(covariance)


def updates(impl, case, seed):
    """Weights that sum to 1 (up to the dtype), values, and W_o from D_v to another number of channels."""
    generator, values = np.random.default_rng(seed), impl.round(case.values)
    weights = impl.round(generator.dirichlet(np.ones(values.shape[2]), size=values.shape[:2]))
    return weights, values, impl.round(generator.normal(size=(values.shape[-1] + 1, values.shape[-1])))


def before_rope(impl, case):
    """The statistics of `case`, with a channel of zeros where their number is odd."""
    mean, covariance = statistics(impl, case)
    more = mean.shape[-1] % 2
    return np.pad(mean, [(0, 0), (0, 0), (0, more)]), np.pad(
        covariance, [(0, 0), (0, 0), (0, more), (0, more)]
    )


def turned_errors(impl, states, position):
    """What numbers as large as the largest of `states` may be wrong by after RoPE up to this position.

    Its angles are in the accumulator's precision, its tables in that of the dtype.
    """
    return float(np.abs(states).max()) * (final_rounding(impl) + angle_error(impl, position))


def averages(
    impl,
    mean,
    covariance,
    *,
    position,
    horizon=512,
    by=agrees,
    got=None,
    expected=(None, None),
    more=(0.0, 0.0),
    **settings,
):
    """`agrees` or `same` of both results of average_rope,
    but for `turned_errors` and what `more` allows of each.
    """
    asked = {"position": position, "horizon": horizon, **settings}
    got = impl.call(ROPE, mean, covariance, **asked) if got is None else got
    for pick, states in enumerate((mean, 4 * covariance)):
        error = turned_errors(impl, states, position + horizon)
        how = {"pick": pick, "got": got[pick], "what": ("the mean", "the covariance")[pick]}
        if expected[pick] is not None:
            how["expected"] = expected[pick]
        by(impl, ROPE, mean, covariance, **asked, **how, more=error + more[pick])
    return got


def in_closed_form(mean, position, horizon):
    """Means averaged over a window of positions by the sum of a geometric series, pair by pair."""
    half = mean.shape[-1] // 2
    averaged = np.empty_like(mean)
    for pair in range(half):
        w = 10000.0 ** (-pair / half)
        shrunk = math.sin(horizon * w / 2) / (horizon * math.sin(w / 2))
        turn = (
            shrunk
            * np.exp(1j * w * (position + (horizon - 1) / 2))
            * (mean[..., pair] + 1j * mean[..., pair + half])
        )
        averaged[..., pair], averaged[..., pair + half] = turn.real, turn.imag
    return averaged
