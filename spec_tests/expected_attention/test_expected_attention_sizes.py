"""Laws of Expected Attention on thousands of tokens and queries, and at far positions: EA-5, EA-6, EA-9."""

from evictionary.spec_tests.expected_attention.helpers import (
    ROPE,
    SCORE,
    STATISTICS,
    averages,
    before_rope,
    grouped,
    in_closed_form,
)
from evictionary.spec_tests.judge.prelude import *

RANK = 3


def check_statistics(impl, case):
    """Raise Violation unless mean and covariance are those of
    parts of a hundred or a thousand queries, put together.
    """
    queries = of_dtype(impl, case.keys)
    count = queries.shape[-2]
    size = 3000 if count > 3000 else 100
    terms = queries, np.square(queries), np.abs(queries)
    totals = [sum(in_parts(lambda part: part.sum(axis=-2), each, size=size)) for each in terms]
    mean = totals[0] / count
    covariance = np.zeros((*mean.shape, mean.shape[-1]))
    for part in in_parts(lambda part: part, queries, size=size):
        own = part.mean(axis=-2)
        centred, apart = part - own[..., None, :], own - mean
        within, between = np.swapaxes(centred, -1, -2) @ centred, apart[..., :, None] * apart[..., None, :]
        covariance += (within + part.shape[-2] * between) / count
    magnitude = np.sqrt(np.square(queries).mean(axis=-2))
    got = impl.expected_attention.query_statistics(queries)
    slack = rounding(impl, count)
    near(got[0], mean, sum_errors(impl, count, *totals) / count, "the mean of many queries")
    near(
        got[1],
        covariance,
        slack * magnitude[..., :, None] * magnitude[..., None, :],
        "the covariance of many queries",
    )


@law(
    "EA-5",
    of=STATISTICS,
    examples=2,
    case=long_cases(("moving_mean", "sinks", "vast", "minute"), lengths=SPLIT_LENGTHS),
)
def test_statistics_of_many_queries_add_up_their_parts(impl, case):
    """Mean and covariance of thousands of queries are those of their parts, with what the means of the
    parts differ by.
    """
    check_statistics(impl, case)


@law("EA-5", of=STATISTICS, examples=1, seed=seeds())
def test_statistics_of_the_queries_of_the_paper_add_up_their_parts(impl, seed):
    """The same of a buffer of 128 queries, and of 64 to 2,048, of a batch of three."""
    for case in narrow(impl, seed, (*BUDGETS, 2048)):
        check_statistics(impl, case)


def between_two_ways(mean, position):
    """What means turned to this position in float64 may differ by, where two ways round the angle."""
    return 1e-15 * position * np.abs(mean).max()


@law("EA-6", of=ROPE, examples=10, case=grouped, position=st.sampled_from([131_072, 8192, 32_768, 65_535]))
def test_queries_of_far_positions_turn_by_them(impl, case, position):
    """At positions up to 131,072 the statistics turn by the mean rotation of the next 512 positions."""
    mean, covariance = before_rope(impl, case)
    got = impl.expected_attention.average_rope(mean, covariance, position=position)
    averages(impl, mean, covariance, position=position, got=got)
    expected, more = (in_closed_form(mean, position, 512), None), (between_two_ways(mean, position), 0.0)
    averages(impl, mean, covariance, position=position, got=got, expected=expected, more=more)


def log_expected(queries_mean, factor, keys):
    """mu . k / sqrt(d) + |F^T k|^2 / (2 d) for the covariance F F^T."""
    return keys @ queries_mean / np.sqrt(keys.shape[-1]) + np.square(keys @ factor).sum(axis=-1) / (
        2 * keys.shape[-1]
    )


def log_errors(impl, queries_mean, factor, keys):
    """What `log_expected` may be wrong by: as a logit of the mean query, and of the query Sigma k / 2 that
    each key has.
    """
    turned = keys @ factor @ factor.T / 2 / np.sqrt(keys.shape[-1])
    of_covariance = logit_errors(impl, turned[:, None], keys[:, None])[:, 0, 0]
    return logit_errors(impl, queries_mean[None], keys)[0] + 2 * of_covariance


def expected_scores(impl, mean, factors, keys, values):
    """The scores [1, H_kv, T] for the covariances F F^T, one
    query head after the other, and what they may be wrong by.
    """
    weights, errors = np.zeros(keys.shape[:3]), np.zeros(keys.shape[:3])
    group, norms = mean.shape[1] // keys.shape[1], np.sqrt(np.square(values).sum(axis=-1))
    for reader in range(mean.shape[1]):
        of_reader = mean[0, reader], factors[0, reader], keys[0, reader // group]
        logits = log_expected(*of_reader)
        # The softmax of these logits is the attention of the query 1 on keys of one channel.
        own = np.exp(logits - attention_in_parts(np.ones((1, 1)), logits[:, None], logits[:, None])[1])
        weights[0, reader // group] += own / group
        errors[0, reader // group] += softmax_slack(impl, own, log_errors(impl, *of_reader)) / group
    expected = weights + 0.02
    return expected * norms, (errors + rounding(impl, keys.shape[-1]) * expected) * norms


@law(
    "EA-9",
    of=SCORE,
    examples=3,
    case=st.one_of(
        long_cases(("sinks", "moving_mean", "normal"), lengths=SPLIT_LENGTHS),
        long_cases(("normal", "moving_mean"), groups=(16, 4), lengths=(4097, 8191), head_dims=(64, 128)),
    ),
    scale=st.sampled_from([1.0, 1e-7, 1e4]),
)
def test_all_tokens_of_a_long_prompt_share_one_softmax(impl, case, scale):
    """Over thousands of tokens the expected weights of each query head are normalised together; |v| may be
    1e-7 or 1e4.
    """
    keys, values = impl.round(case.keys), of_dtype(impl, scale * case.values)
    generator = np.random.default_rng(case.seed)
    readers = (1, case.num_kv_heads * case.group)
    # Of a few quarters: the covariance F F^T is exact in every dtype.
    mean = generator.integers(-2, 3, size=(*readers, case.head_dim)) / 4
    factors = generator.integers(-1, 2, size=(*readers, case.head_dim, RANK)) / 2
    expected, slack = expected_scores(impl, mean, factors, keys, values)
    got = impl.expected_attention.score(keys, values, mean, factors @ np.swapaxes(factors, -1, -2))
    near(got, expected, slack, "the score of a long prompt")


@law("EA-9", of=SCORE, examples=3, case=long_cases(groups=(4, 1, 16), lengths=SPLIT_LENGTHS))
def test_no_split_of_a_long_prompt_is_lost(impl, case):
    """Each query head expects its weight on a few neighbouring tokens; the heads find them from the first
    token to the last.
    """
    for each in (case, *narrow(impl, case.seed, batch=1, group=2)):
        mean, keys = looking(each, *neighbours(each))
        values = np.full_like(each.values, 1 / 8)
        covariance = np.zeros((*mean.shape, each.head_dim))
        # of a channel that all keys have alike: it adds the same to every logit
        covariance[..., -1, -1] = 1 / 1024
        norm = np.linalg.norm(values[0, 0, 0])
        by_head = mean[0].reshape(each.num_kv_heads, each.group, -1)
        expected = norm * np.array(
            [[weights_in_parts(*pair).mean(axis=0) for pair in zip(by_head, keys[0], strict=True)]]
        )
        got = impl.expected_attention.score(keys, values, mean, covariance, epsilon=0.0)
        what = f"the score of a prompt of {each.length} tokens"
        rounds_to(impl, got, expected, what, terms=each.length, size=expected.max())
