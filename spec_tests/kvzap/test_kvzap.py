"""Laws of KVzap: ZA-1 to ZA-5."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import refuses

DMS, SCORE, TARGET, FIT, SELECT = (f"kvzap.{name}" for name in ("dms", "score", "target", "fit", "select"))
lengths_of, windows = st.sampled_from([17, 5, 33, 2, 1]), st.sampled_from([1, 2, 3, 7, 16])
thresholds = st.sampled_from([0.5, 0.0, 0.25, -1.0, -np.inf, np.inf])


def quarters(seed, *shape):
    # mostly below 2, and the same in every dtype
    return np.clip(np.round(4 * np.random.default_rng(seed).normal(size=shape)), -16, 16) / 4


def model(seed, length):
    # hidden states [2, T, 6], weights [2, 3, 6] and biases [2, 3] whose scores are exact in float32
    return quarters(seed, 2, length, 6), quarters(seed + 1, 2, 3, 6), quarters(seed + 2, 2, 3)


def scores_by_hand(states, weights, bias):
    """The sum of the products, number by number."""
    items = zip(states, weights, strict=True)
    return np.stack([linear(state, weight.T).T for state, weight in items]) + bias[..., None]


def by_hand(scores, threshold, window_size):
    """Token after token: each is judged when it leaves the window, and by itself."""
    kept = np.ones(scores.shape, dtype=bool)
    for leaving in range(scores.shape[-1] - window_size):
        kept[..., leaving] = ~(scores[..., leaving] < threshold)
    return kept


@law("ZA-1", of=DMS, seed=seeds(), length=lengths_of, threshold=thresholds, window_size=windows)
def test_a_token_below_the_threshold_goes_when_it_leaves_the_window(
    impl, seed, length, threshold, window_size
):
    """Each by itself, whatever other tokens, heads and batch items score. At the threshold it stays."""
    scores = quarters(seed, 2, 3, length)
    scores[..., seed % 7 : seed % 7 + 1] = np.copysign(np.inf, scores[..., seed % 7 : seed % 7 + 1])
    kept = impl.kvzap.dms(scores, threshold=threshold, window_size=window_size)
    equal(kept, by_hand(scores, threshold, window_size), "another token stays")


@law("ZA-1", of=DMS, seed=seeds(), length=lengths_of, window_size=windows)
def test_a_higher_threshold_keeps_a_part_of_what_a_lower_one_keeps(impl, seed, length, window_size):
    """From -infinity, which keeps all, to infinity, which keeps the window alone."""
    scores, rising = quarters(seed, 2, 3, length), (-np.inf, -2.0, -0.25, 0.0, 1.5, np.inf)
    kept = np.stack([impl.kvzap.dms(scores, threshold=tau, window_size=window_size) for tau in rising])
    require((kept[:-1] >= kept[1:]).all(), "a higher threshold keeps another token", got=kept)
    require(kept[0].all(), "the threshold -infinity evicts a token", True, kept[0])
    equal(kept[-1].sum(axis=-1), min(window_size, length), "infinity keeps more than the window")


@law("ZA-2", of=SCORE, case=seeded_cases(), seed=seeds(), heads=st.integers(1, 3))
def test_the_score_is_the_product_with_the_weights_and_a_bias(impl, case, seed, heads):
    """Number by number, with the weights of each KV head, so two surrogates added score their sum."""
    states, weights = impl.round(case.keys[:, 0]), quarters(seed, case.batch, heads, case.head_dim)
    size = 1 + (np.abs(states) @ np.swapaxes(np.abs(weights), 1, 2)).max()
    agrees(impl, SCORE, states, weights, weights[..., 0], by_hand=scores_by_hand, size=size)


@law("ZA-2", of=SCORE)
def test_the_scores_of_states_in_half_precision_are_sums_in_float32(impl):
    """256 + 1 - 256 + 171 is 172; a sum in bfloat16 or float16 would lose some of it, here 4,096 times."""
    states = np.tile([256.0, 1, -256, 171], 4096)[None, None]
    got = impl.kvzap.score(states, np.tile([1.0, 1, 1, 0], 4096)[None, None], np.zeros((1, 1)))
    rounds_to(impl, got, [[[4096.0]]], "the score", size=4096)


def target_by_hand(keys, values, w_o, queries, replay_keys, states):
    """The attention of each query of the replay, query by query, times one length, over another."""
    whole = for_each_reader(np.concatenate([keys, replay_keys], axis=2), queries)
    weights = causal_weights(queries, whole)[..., : keys.shape[2]]
    projected = zip(np.moveaxis(for_each_reader(values, queries), 1, 0), w_o, strict=True)
    added = np.stack([lengths(linear(value, weight)) for value, weight in projected], axis=1)
    largest = (weights * added[:, :, None] / lengths(states)[:, None, :, None]).max(axis=2)
    return np.log(np.maximum(largest.reshape(*keys.shape[:2], -1, keys.shape[2]).max(axis=2), 1e-30))


@law(
    "ZA-3",
    of=TARGET,
    case=seeded_cases(max_length=9, kinds=("normal", "drift"), groups=(1, 2)),
    seed=seeds(),
    count=st.sampled_from([1, 2, 4]),
)
def test_the_target_is_the_largest_attention_by_the_lengths_of_what_is_added(impl, case, seed, count):
    """Over the queries of the replay and the query heads of the group, each with its output projection."""
    (batch, heads, _, width), readers, texts = (
        case.keys.shape,
        case.queries.shape[1],
        (case.keys, case.values),
    )
    w_o, states = quarters(seed, readers, case.values.shape[-1], 5), 8 + quarters(seed + 1, batch, count, 5)
    replay = quarters(seed + 2, batch, readers, count, width), quarters(seed + 3, batch, heads, count, width)
    agrees(impl, TARGET, *map(impl.round, texts), w_o, *replay, states, by_hand=target_by_hand, size=1e3)


@law("ZA-3", of=TARGET)
def test_one_token_by_hand(impl):
    """Attention of 1/2, an addition of length 12 and a reader of length 5: the logarithm of 6/5. With nothing
    to add or to read it is that of 1e-30, not -infinity or NaN.
    """
    zero, w_o = np.zeros((1, 1, 1, 2)), np.array([[[4.0, 0, 0], [0, 1, 0]]])
    for length, size, share in ((3, 5, 1.2), (0, 5, 1e-30), (3, 0, 1e-30)):
        value, state = np.array([[[[length, 0.0]]]]), np.array([[[0.6, 0.8, 0]]]) * size
        got = impl.kvzap.target(zero, value, w_o, zero, zero, state)
        rounds_to(impl, got, [[[np.log(share)]]], "the target", roundings=70)


@law("ZA-3", of=TARGET, examples=1, seed=seeds())
def test_a_long_replay_counts_to_its_last_query(impl, seed):
    """Of 300 queries the last one alone looks at one of 130 tokens, which gets it all. The first query gives
    the others 1/131.
    """
    keys, queries, more = np.zeros((1, 1, 130, 2)), np.zeros((1, 2, 300, 2)), np.zeros((1, 1, 300, 2))
    keys[0, 0, seed % 130, 0], queries[0, 1, -1, 0] = 32, 32
    got = impl.kvzap.target(
        keys, np.ones((1, 1, 130, 1)), np.full((2, 1, 1), 2.0), queries, more, np.full((1, 300, 1), 2.0)
    )
    expected = np.where(np.arange(130) == seed % 130, 0, -np.log(131))[None, None]
    rounds_to(impl, got, expected, "the target by a replay of 300", roundings=6, terms=430)


@law("ZA-4", of=FIT, seed=seeds(), length=lengths_of, ridge=st.sampled_from([1.0, 0.25, 16.0]))
def test_no_other_surrogate_fits_better(impl, seed, length, ridge):
    """The derivatives of the sum by the weights and the bias are zero. The bias is the weight of a channel of
    ones, without a ridge.
    """
    states, targets = quarters(seed, 2, length, 4), quarters(seed + 1, 2, 3, length)
    weights, bias = impl.kvzap.fit(states, targets, ridge=ridge)
    require_numbers(weights, (2, 3, 4), "the weights")
    wide, both = np.append(states, np.ones((2, length, 1)), axis=2), np.append(weights, bias[..., None], 2)
    shrunk, transposed = both * np.array([ridge] * 4 + [0]), np.swapaxes(wide, 1, 2)
    slope = (both @ transposed - targets) @ wide + shrunk
    size = (np.abs(both) @ np.abs(transposed) + np.abs(targets)) @ np.abs(wide) + np.abs(shrunk)
    largest = size.max(axis=-1, keepdims=True)  # of a head, whose weights are found together
    rounds_to(impl, slope, np.zeros_like(slope), "a derivative", terms=length, size=largest)


@law("ZA-4", of=FIT, ridge=st.sampled_from([1.0, 4.0, 12.0, 28.0, 2.0**-30]))
def test_a_linear_target_is_found_and_the_ridge_shrinks_it(impl, ridge):
    """Three channels of squares that sum to 4: the weights are those of the target times 4 / (4 + ridge), the
    bias is whole. The ridge is 1 by default.
    """
    states = np.array([[[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]])
    wanted, bias = np.array([[[1.0, -2, 0.5], [0, 4, 8]]]), np.array([[3.0, -1]])
    targets, settings = (
        wanted @ np.swapaxes(states, 1, 2) + bias[..., None],
        {"ridge": ridge} if ridge != 1 else {},
    )
    weights, offset = impl.kvzap.fit(states, targets, **settings)
    rounds_to(impl, weights, wanted * 4 / (4 + ridge), "the weights", roundings=16)
    rounds_to(impl, offset, bias, "the bias", roundings=16)


@law("ZA-4", of=FIT, kind="refusal", why="no generated law tries infinity, and no planted mistake takes it")
def test_an_infinite_ridge_is_refused(impl):
    """A ridge of infinity raises ValueError."""
    refuses(impl, FIT, "ridge", np.inf)


@law("ZA-5", of=SELECT, seed=seeds(), length=lengths_of, threshold=thresholds, window_size=windows)
def test_a_token_stays_by_its_predicted_score_or_in_the_window(impl, seed, length, threshold, window_size):
    """Scores that are exact in each dtype, by hand; each head keeps its own number."""
    keys, given = np.ones((2, 3, length, width(impl))), model(seed, length)
    kept = impl.kvzap.select(keys, *given, threshold=threshold, window_size=window_size)
    equal(kept, by_hand(scores_by_hand(*given), threshold, window_size), "another token stays")


@law("ZA-5", of=SELECT, seed=seeds(), length=st.sampled_from([5, 17, 33]), window_size=windows)
def test_tokens_one_by_one_stay_as_all_at_once(impl, seed, length, window_size):
    """A step sees the hidden states of the window and the new token, and leaves alone what it has judged."""
    states, *surrogate = (each[:1] for each in model(seed, length))
    surrogate, settings = [each[:, :1] for each in surrogate], {"threshold": 0.5, "window_size": window_size}
    stored = np.arange(0)
    for newest in range(length):
        stored, recent = np.append(stored, newest), states[:, max(0, newest - window_size) : newest + 1]
        keys = np.ones((1, 1, len(stored), width(impl)))
        kept = impl.kvzap.select(keys, recent, *surrogate, **settings)
        require_mask(kept, keys.shape[:3], "the selection of a step")
        stored = stored[kept[0, 0]]
    at_once = impl.kvzap.select(np.ones((1, 1, length, width(impl))), states, *surrogate, **settings)
    equal(stored, np.flatnonzero(at_once), "token by token others stay")


@law("ZA-5", of=SELECT)
def test_the_defaults_are_minus_4_and_128_tokens(impl):
    """Of 200 tokens with scores of -4 and -4.25 in turn, the first 72 stay by their scores."""
    place, keys, surrogate = np.arange(200), np.ones((1, 1, 200, width(impl))), np.ones((1, 1, 1))
    kept = impl.kvzap.select(keys, -4 - place[None, :, None] % 2 / 4, surrogate, 0 * surrogate[0])
    equal(kept, ((place % 2 == 0) | (place >= 72))[None, None], "other tokens stay by default")
