"""Laws of Q-Filters: QF-1 to QF-3."""

from evictionary.spec_tests.judge.prelude import *

DIRECTION, CALIBRATE, SCORE = "q_filters.main_direction", "q_filters.calibrate", "q_filters.score"


def error(impl):
    """What a component of a direction may be wrong by: a
    decomposition in float32 or wider, and the output's rounding.
    """
    return 32 * max(accumulating(impl), 2.0**-22) + final_rounding(impl)


@law(
    "QF-1",
    of=DIRECTION,
    case=seeded_cases(kinds=("normal", "drift", "sinks", "outlier_channel", "ties")),
    seed=seeds(),
)
def test_no_direction_collects_more_of_the_queries(impl, case, seed):
    """The sum of the squared products with the queries is the largest eigenvalue of their products, and v
    has length 1.
    """
    queries = impl.round(case.keys)
    got = impl.q_filters.main_direction(case.keys)
    require_numbers(got, (*queries.shape[:2], case.head_dim), "the direction")
    near((got**2).sum(axis=-1), np.ones(queries.shape[:2]), 4 * error(impl), "the squared length")
    collected = ((queries @ got[..., None]) ** 2).sum(axis=(-2, -1))
    largest = np.linalg.eigvalsh(np.swapaxes(queries, -1, -2) @ queries)[..., -1]
    near(collected, largest, 8 * error(impl) * largest, "what the direction collects")


@law("QF-1", of=DIRECTION, case=seeded_cases(kinds=("normal", "drift"), min_length=3), seed=seeds())
def test_most_queries_point_ahead(impl, case, seed):
    """More than half of the queries have a positive product with v; turned around, v turns around."""
    factors = np.where(np.arange(case.length) % 4 == 3, -1.0, 1.0)[:, None]
    base = np.round(4 * np.random.default_rng(seed).normal(size=(1, 1, 1, case.head_dim))) / 4 + 8
    queries = factors * (base + np.round(np.clip(case.keys, -2, 2)) / 4)
    got = impl.q_filters.main_direction(queries)
    products = (queries @ got[..., None])[..., 0]
    require(
        ((products > 0).mean(axis=-1) > 0.5).all(), "most queries point against the direction", queries, got
    )
    turned = impl.q_filters.main_direction(-queries)
    near(turned, -got, 4 * error(impl), "the direction of the queries turned around")


@law("QF-1", of=DIRECTION)
def test_the_majority_decides_and_not_the_sum(impl):
    """Two queries (1, 0) and one (-3, 0): two of three point along (1, 0), although the sum points back."""
    got = impl.q_filters.main_direction(np.array([[1.0, 0], [1, 0], [-3, 0]]))
    near(got, np.array([1.0, 0]), error(impl), "the direction")


@law("QF-1", of=DIRECTION)
def test_the_length_of_a_query_has_no_vote(impl):
    """Three queries (1/2, 0) and two (-3/4, 0), in either order
    and turned around: short queries decide by their number.
    """
    queries = np.array([[0.5, 0], [0.5, 0], [0.5, 0], [-0.75, 0], [-0.75, 0]])
    got = impl.q_filters.main_direction(np.stack([queries, queries[::-1], -queries, -queries[::-1]]))
    near(got, np.array([[1.0, 0], [1, 0], [-1, 0], [-1, 0]]), error(impl), "the direction")


@law("QF-1", of=DIRECTION)
def test_the_direction_is_not_that_of_the_mean(impl):
    """(1, 3), (1, 3), (1, -3): the mean is (1, 1), but
    the channel of the threes holds most of the squares.
    """
    got = impl.q_filters.main_direction(np.array([[1.0, 3], [1, 3], [1, -3]]))
    # the eigenvector of [[3, 3], [3, 27]]
    slope = 4 + 17**0.5
    near(got, np.array([1, slope]) / (1 + slope**2) ** 0.5, error(impl), "the direction")


@law("QF-1", of=DIRECTION)
def test_the_mean_is_not_taken_away(impl):
    """(3, 1), (3, 1), (3, -1), (3, -1): channel 0 holds the
    squares. Without their mean, (3, 0), channel 1 would.
    """
    got = impl.q_filters.main_direction(np.array([[3.0, 1], [3, 1], [3, -1], [3, -1]]))
    near(got, np.array([1.0, 0]), error(impl), "the direction")


@law("QF-2", of=CALIBRATE)
def test_the_filter_is_the_mean_of_the_group(impl):
    """Query heads 0 and 1 read KV head 0: along (1, 0) and
    (0, 1) their mean is (1/2, 1/2); heads 2 and 3 cancel.
    """
    axes = np.array([[2.0, 0], [0, 3], [5, 0], [-1, 0]])
    got = impl.q_filters.calibrate(np.repeat(axes[None, :, None], 3, axis=2), 2)
    near(got, np.array([[[0.5, 0.5], [0, 0]]]), error(impl), "the filters")


@law("QF-2", of=(CALIBRATE, DIRECTION), case=seeded_cases(kinds=("drift",), min_length=5), seed=seeds())
def test_each_filter_is_that_of_its_own_heads(impl, case, seed):
    """Head by head: the mean of the main directions of
    the readers of each KV head; its length is at most 1.
    """
    draw = np.random.default_rng(seed)
    shape = (case.batch, case.group * case.num_kv_heads, case.length, case.head_dim)
    queries = (
        np.round(4 * (4 * draw.normal(size=(*shape[:2], 1, case.head_dim)) + 0.1 * draw.normal(size=shape)))
        / 4
    )
    if np.abs(queries).max() == 0 or (np.abs(queries.mean(axis=2)).max(axis=-1) < 1).any():
        return
    got = impl.q_filters.calibrate(queries, case.num_kv_heads)
    alone = [impl.q_filters.main_direction(queries[:, head]) for head in range(shape[1])]
    expected = np.stack(alone, axis=1).reshape(case.batch, case.num_kv_heads, case.group, -1).mean(axis=2)
    near(got, expected, 2 * error(impl), "the filters")


@law("QF-3", of=SCORE, case=cases())
def test_the_score_is_the_projection_of_the_key(impl, case):
    """f . k of each key with the filter of its head."""
    agrees(impl, SCORE, case.keys, case.queries[:, : case.keys.shape[1], 0])


@law("QF-3", of=SCORE)
def test_a_key_along_the_filter_stays(impl):
    """With the filter (3, 4) the keys (3, 4), (0, 0) and (-3, -4) score 25, 0 and -25."""
    got = impl.q_filters.score(np.array([[[[3.0, 4], [0, 0], [-3, -4]]]]), np.array([[[3.0, 4]]]))
    equal(got, [[[25.0, 0, -25]]], "the projections are not 25, 0 and -25")


@law("QF-3", of=SCORE, case=seeded_cases(), seed=seeds())
def test_tokens_may_be_permuted_and_heads_stand_alone(impl, case, seed):
    """The scores move with the tokens, and each head scores alone as among others."""
    filters = case.queries[:, : case.num_kv_heads, 0]
    move_with_tokens(impl, SCORE, seed, (case.keys,), filters)
    same_alone(impl, SCORE, case.keys, filters)


@law("QF-3", of=(CALIBRATE, SCORE), case=seeded_cases(kinds=("normal",), min_length=3), seed=seeds())
def test_the_score_ranks_as_the_logit_of_queries_along_one_line(impl, case, seed):
    """Queries that are multiples of one vector, most of them forward: the order of the scores is that of
    their mean logit.
    """
    line = np.round(4 * np.random.default_rng(seed).normal(size=case.head_dim)) / 4
    if np.abs(line).max() < 0.5:
        return
    queries = np.array([1.0, 2, 4, -1])[:, None] * line
    filters = impl.q_filters.calibrate(queries[None, None], 1)
    keys = impl.round(case.keys[:1, :1])
    got, wanted = impl.q_filters.score(keys, filters), (keys @ queries.mean(axis=0)[:, None])[..., 0]
    length = float(np.linalg.norm(line))
    near(got * 1.5 * length, wanted, 4 * error(impl) * length * lengths(keys), "the scaled score")


@law("QF-2", of=CALIBRATE, kind="refusal", heads=st.sampled_from([2, 4]))
def test_heads_that_no_group_divides_are_refused(impl, heads):
    """Three query heads for two or four KV heads raise ValueError."""
    refused(impl, "queries", CALIBRATE, np.ones((1, 3, 5, 2)), heads)


@law("QF-3", of=SCORE, examples=3, case=long_cases(kinds=("vast", "moving_mean", "minute", "sinks")))
def test_every_key_of_a_long_prompt_is_projected(impl, case):
    """Of thousands of keys, at scales from 1e-7 to 1e4,
    each scores the sum of its products with the filter.
    """
    keys, filters = of_dtype(impl, case.keys), impl.round(case.queries[:, : case.num_kv_heads, 0])
    expected = sum(keys[..., channel] * filters[..., channel, None] for channel in range(case.head_dim))
    size, got = (np.abs(keys) @ np.abs(filters)[..., None])[..., 0], impl.q_filters.score(keys, filters)
    rounds_to(impl, got, expected, "the score of a long prompt", terms=case.head_dim, size=size)


@law("QF-3", of=SCORE, examples=3, case=long_cases(lengths=(4095, 8191), head_dims=(256, 128)))
def test_small_products_between_large_ones_count(impl, case):
    """32768 and -32768 cancel, wherever they stand, and ones are left: a sum in float32 is exact, one in
    float16 loses the ones.
    """
    keys = np.full((1, case.num_kv_heads, case.length, case.head_dim), 1 / 16)
    filters, tokens = np.full((1, case.num_kv_heads, case.head_dim), 16.0), np.arange(case.length)
    keys[:, :, tokens, tokens % case.head_dim] = 2048
    keys[:, :, tokens, (tokens + 17) % case.head_dim] = -2048
    expected = 16 * keys.sum(axis=-1)
    rounds_to(impl, impl.q_filters.score(keys, filters), expected, "the score", size=np.abs(expected))
