"""Laws of LagKV: the score of a partition and the selection (LK-7 to LK-13, LK-S9)."""

import statistics
from fractions import Fraction

from evictionary.reference.lagkv import tokens_per_partition
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.lagkv.helpers import (
    RETAINED,
    SCORE,
    SELECT,
    asked,
    by_oracle,
    caches,
    check_partitions,
    hundredths,
    lags,
    sinks,
)

# What the formula is asked for goes beyond the papers' own settings: 1,024 tokens a partition, 16 sinks,
# prompts of 128K.
any_length = st.one_of(st.integers(1, 5000), st.integers(5001, 200_000))
any_lag = st.one_of(st.integers(1, 99), st.sampled_from([1024, 128, 512, 2048]), st.integers(100, 1500))
any_sink = st.one_of(sinks, st.integers(6, 300))


def partitions(case):
    return case.keys, case.values, case.next_keys, case.next_values


def score_by_hand(states, next_states):
    """Equations 7 to 10 for one head in plain loops: lists of tokens in, the score of each token out."""
    columns = [[min(column), max(column)] for column in zip(*next_states, strict=True)]
    deviations = []
    for token in states:
        pairs = zip(token, columns, strict=True)
        normalised = [(number - low) / (high - low) if high > low else 0.0 for number, (low, high) in pairs]
        deviations.append(statistics.stdev(normalised) if len(normalised) > 1 else 0.0)
    weights = [math.exp(deviation - max(deviations)) for deviation in deviations]
    return [weight / sum(weights) for weight in weights]


def check_loops(impl, case):
    """Raise Violation unless the score is that of equations
    7 to 11 written as loops over tokens and channels.
    """
    # Multiples of an eighth: no range of a channel is so small that the comparison to 1e-12 would measure
    # rounding.
    inputs = (np.round(8 * states) / 8 for states in partitions(case))
    keys, values, next_keys, next_values = (
        impl.round(np.where(np.abs(each) > 64, np.sign(each), each)) for each in inputs
    )
    by_hand = np.zeros(keys.shape[:3])
    for place in np.ndindex(keys.shape[:2]):
        for states, following in ((keys, next_keys), (values, next_values)):
            by_hand[place] += score_by_hand(states[place].tolist(), following[place].tolist())
    agrees(impl, SCORE, keys, values, next_keys, next_values, by_hand=by_hand)


@law("LK-11", of=SCORE, case=cases())
def test_score_equals_the_plain_loops(impl, case):
    """Equations 7 to 11 written as loops over tokens and channels give the same numbers."""
    check_loops(impl, case)


@law("LK-11", of=SCORE, case=cases())
def test_score_is_the_sum_of_the_scores_of_keys_and_values(impl, case):
    """score(K) + score(V), each the softmax over the tokens of
    the standard deviation (ddof=1) of the normalised channels.
    """
    agrees(impl, SCORE, *partitions(case))


@law("LK-10", of=SCORE, case=cases())
def test_scores_are_positive_and_sum_to_two(impl, case):
    """Two softmaxes over the tokens of the partition: positive, at most 2, and 2 in total."""
    allowed = impl.allowance(SCORE, *partitions(case))
    totals(impl.lagkv.score(*partitions(case)), 2, allowed, "the scores of a partition")


@law("LK-7", of=SCORE, case=cases(), seed=seeds())
def test_the_range_is_a_minimum_over_the_next_partition(impl, case, seed):
    """The order of the tokens in the next partition does not matter, and its rows may be repeated."""
    generator, length = np.random.default_rng(seed), case.next_keys.shape[2]
    order = np.concatenate([generator.permutation(length), generator.integers(0, length, size=2)])
    got = impl.lagkv.score(case.keys, case.values, case.next_keys[:, :, order], case.next_values[:, :, order])
    same(impl, SCORE, *partitions(case), got=got, what="the score against the shuffled next partition")


@law("LK-8", of=SCORE, case=cases(min_length=2), seed=seeds())
def test_a_token_inside_the_range_adds_nothing(impl, case, seed):
    """A further token of the next partition between two of its tokens changes neither minimum nor maximum."""
    first, second = np.random.default_rng(seed).integers(0, case.next_keys.shape[2], size=2)
    inner_keys = np.minimum(case.next_keys[:, :, [first]], case.next_keys[:, :, [second]])
    inner_values = np.maximum(case.next_values[:, :, [first]], case.next_values[:, :, [second]])
    longer = (
        np.concatenate(pair, axis=2)
        for pair in ((case.next_keys, inner_keys), (case.next_values, inner_values))
    )
    same(impl, SCORE, *partitions(case), got=impl.lagkv.score(case.keys, case.values, *longer))


@law("LK-8", of=SCORE, case=cases())
def test_the_range_ends_at_the_largest_number(impl, case):
    """Where all numbers are negative, the largest is the one nearest to zero."""
    agrees(impl, SCORE, *(-np.abs(states) for states in partitions(case)))


@law("LK-9", of=SCORE, case=cases(kinds=("ties", "duplicate_keys")), seed=seeds())
def test_an_affine_map_of_the_channels_changes_nothing(impl, case, seed):
    """Each channel may be scaled by a positive number and shifted, in both partitions alike."""
    generator = np.random.default_rng(seed)
    # whole numbers: the map is exact in every dtype
    whole = [np.round(states) for states in partitions(case)]
    sizes = [each.shape[-1] for each in whole[:2]]
    scales = [2.0 ** generator.integers(-2, 3, size=size) for size in sizes]
    shifts = [generator.integers(-4, 5, size=size) for size in sizes]
    mapped = (x * scale + shift for x, scale, shift in zip(whole, 2 * scales, 2 * shifts, strict=True))
    same(impl, SCORE, *whole, got=impl.lagkv.score(*mapped), what="the score after the affine map")


@law("LK-9", of=SCORE)
def test_the_sign_of_a_channel_matters(impl):
    """Not invariant to a mirrored channel: normalised values are measured from the minimum."""
    keys, following = np.array([[[[0.0, 0], [3, 0.5], [1, 1]]]]), np.array([[[[0.0, 0], [1, 1]]]])
    mirror = np.array([-1.0, 1])
    plain = impl.lagkv.score(keys, keys, following, following)
    mirrored = impl.lagkv.score(keys * mirror, keys * mirror, following * mirror, following * mirror)
    apart = np.abs(plain - mirrored).max()
    require(apart >= 1e-3, "mirroring a channel of both partitions changed nothing", plain, mirrored)


@law("LK-9", of=SCORE, kind="edge", case=cases(), seed=seeds())
def test_a_channel_constant_in_the_next_partition_counts_as_zero(impl, case, seed):
    """Such a channel normalises to 0, whatever its values; nothing becomes NaN."""
    generator = np.random.default_rng(seed)
    keys, values, next_keys, next_values = (states.copy() for states in partitions(case))
    channel = generator.integers(0, keys.shape[-1])
    next_keys[..., channel] = 0.5
    other_keys = keys.copy()
    other_keys[..., channel] = generator.integers(-8, 9, size=keys.shape[:-1])
    got = impl.lagkv.score(other_keys, values, next_keys, next_values)
    agrees(impl, SCORE, keys, values, next_keys, next_values)
    same(impl, SCORE, keys, values, next_keys, next_values, got=got, what="the score by other constants")


@law("LK-9", of=SCORE)
def test_normalised_values_are_not_clipped(impl):
    """A token beyond the range of the next partition counts by how far it is beyond: at 3, 5 and 9 ranges
    the score rises.
    """
    keys, following = np.array([[[[0.0, 0], [3, 0], [5, 0], [9, 0]]]]), np.array([[[[0.0, 0], [1, 1]]]])
    got = agrees(impl, SCORE, keys, np.zeros_like(keys), following, following)
    require((np.diff(got) > 0).all(), "a token further beyond the range does not score more", None, got)


@law("LK-9", of=SCORE, case=cases(kinds=("ties", "duplicate_keys")), seed=seeds())
def test_the_order_of_the_channels_does_not_matter(impl, case, seed):
    """Channels permuted alike in both partitions, keys and
    values each in its own way, leave the score as it was.
    """
    generator = np.random.default_rng(seed)
    k_order, v_order = (generator.permutation(states.shape[-1]) for states in (case.keys, case.values))
    permuted = (
        states[..., order] for states, order in zip(partitions(case), (k_order, v_order) * 2, strict=True)
    )
    got = impl.lagkv.score(*permuted)
    same(impl, SCORE, *partitions(case), got=got, what="the score with permuted channels")


@law("LK-9", of=SCORE, case=cases(kinds=("ties",)))
def test_large_states_do_not_overflow(impl, case):
    """States a thousand times larger, as in the outlier channels of trained models, give the same score."""
    states = [np.round(each) for each in partitions(case)]
    got = impl.lagkv.score(*(1024 * each for each in states))
    same(impl, SCORE, *states, got=got, what="the score of large states")


@law("LK-10", of=SCORE, case=cases(), seed=seeds())
def test_scores_move_with_their_tokens(impl, case, seed):
    """Permuting the tokens of the partition permutes the scores: the softmax is over all of its tokens,
    wherever they stand.
    """
    move_with_tokens(impl, SCORE, seed, (case.keys, case.values), case.next_keys, case.next_values)


@law("LK-11", of=SCORE, kind="edge", case=cases(kinds=("constant_channel", "ties", "duplicate_keys")))
def test_the_score_where_a_range_is_missing(impl, case):
    """Channels that are constant in the next partition, and states of one channel, are scored as decided,
    in plain loops too.
    """
    agrees(impl, SCORE, *partitions(case))
    check_loops(impl, case)


@law("LK-9", of=SCORE, kind="edge")
def test_a_channel_without_a_range_counts_as_zero(impl):
    """The third channel is 5 in the whole next partition, and 7 here: the tokens are (0, 1, 0) and (0, 0, 0),
    of deviations 1/sqrt(3) and 0.
    """
    keys, following = np.array([[[[0.0, 1, 7], [0, 0, 7]]]]), np.array([[[[0.0, 0, 5], [1, 1, 5]]]])
    weight = math.exp(1 / math.sqrt(3))
    expected = 0.5 + np.array([[[weight, 1.0]]]) / (weight + 1)
    agrees(impl, SCORE, keys, np.zeros_like(keys), following, np.zeros_like(keys), expected=expected)


@law("LK-10", of=SCORE)
def test_the_deviation_is_that_of_a_sample(impl):
    """Two channels at 0 and 1 deviate by 1/sqrt(2) (ddof=1), not by 1/2; the softmax has no temperature."""
    keys, following = np.array([[[[0.0, 1], [0, 0]]]]), np.array([[[[0.0, 0], [1, 1]]]])
    weight = math.exp(1 / math.sqrt(2))
    expected = 0.5 + np.array([[[weight, 1.0]]]) / (weight + 1)
    agrees(impl, SCORE, keys, np.zeros_like(keys), following, following, expected=expected)


@law("LK-10", of=SCORE, kind="edge", case=cases(), keys_too=st.booleans())
def test_one_channel_does_not_vary(impl, case, keys_too):
    """With a single channel the deviation is 0 (not NaN): every token of the partition has the share 1/L."""
    keys, values, next_keys, next_values = partitions(case)
    # A token of zeros before and one of ones behind: no channel of the next partition is constant, which is
    # another law's case.
    longer = [
        np.pad(states, ((0, 0), (0, 0), (1, 1), (0, 0)), constant_values=(0, 1))
        for states in (next_keys, next_values)
    ]
    width = 1 if keys_too else keys.shape[-1]
    got = agrees(impl, SCORE, keys[..., :width], values[..., :1], longer[0][..., :width], longer[1][..., :1])
    if keys_too:
        alike, slack = np.full(got.shape, got.max()), within(impl, roundings=0, times=2)
        near(got, alike, slack, "the score of a token of one channel, like any other")


@law("LK-11", of=SCORE, case=cases(min_length=2))
def test_heads_do_not_see_each_other(impl, case):
    """Each head of each batch item is scored by its own
    tokens: alone it scores what it scores among others.
    """
    same_alone(impl, SCORE, *partitions(case))


@law("LK-11", of=SCORE, case=cases(min_length=2))
def test_exchanging_keys_and_values_changes_nothing(impl, case):
    """K and V enter alike: their scores are added."""
    got = impl.lagkv.score(case.values, case.keys, case.next_values, case.next_keys)
    same(impl, SCORE, *partitions(case), got=got, what="the score with keys and values exchanged")


@law("LK-11", of=SCORE)
def test_the_reference_is_the_next_partition(impl):
    """The range comes from the partition after; its own range would give other numbers."""
    keys, following = np.array([[[[0.0, 0], [4, 0], [0, 1]]]]), np.array([[[[0.0, 0], [1, 8]]]])
    agrees(impl, SCORE, keys, keys, following, following)


@law(
    "LK-12",
    of=RETAINED,
    length=st.one_of(st.just(0), any_length),
    percent=hundredths,
    sink=any_sink,
    lag=any_lag,
)
def test_retained_length_is_the_formula(impl, length, percent, sink, lag):
    """S + floor(rL)(partitions - 1) + L + remainder, from S + 2L on; below that, everything."""
    expected = length
    if length >= sink + 2 * lag:
        expected = sink + (percent * lag // 100) * ((length - sink) // lag - 1) + lag + (length - sink) % lag
    got = impl.lagkv.retained_length(length, keep_ratio=percent / 100, sink_size=sink, lag_size=lag)
    equal(got, expected, f"retained_length({length}) = {got}, wanted {expected}")


@law("LK-12", of=RETAINED)
def test_retained_length_at_its_edges(impl):
    """S + 2L is the first length that is compressed, and floor(0.29 * 100) is 29, though float says 28; a
    third of 3 is 1.
    """
    for length, ratio, sink, lag, expected in (
        (7, 0.5, 2, 3, 7),
        (8, 0.5, 2, 3, 6),
        (13, 0.5, 2, 3, 9),
        (500, 0.29, 0, 100, 216),
        (9, Fraction(1, 3), 0, 3, 5),
    ):
        got = impl.lagkv.retained_length(length, keep_ratio=ratio, sink_size=sink, lag_size=lag)
        equal(got, expected, f"retained_length({length}) = {got}, wanted {expected}")


@law("LK-12", of=(SELECT, RETAINED), case=caches, percent=hundredths, sink=sinks, lag=lags)
def test_the_kept_mask_has_the_retained_length(impl, case, percent, sink, lag):
    """Every head keeps retained_length(T) tokens, the sinks
    and everything from the last partition on among them.
    """
    kept = impl.lagkv.select(case.keys, case.values, **asked(percent, sink, lag))
    require_mask(kept, case.keys.shape[:3], "the selection")
    expected = impl.lagkv.retained_length(case.length, **asked(percent, sink, lag))
    equal(kept.sum(axis=-1), expected, "the mask keeps another number of tokens than LK-12 says")
    equal(kept[..., :sink], True, "a sink token was evicted")
    end = sink + max(0, (case.length - sink) // lag - 1) * lag
    equal(kept[..., end:], True, "a token of the sliding window was evicted")


@law("LK-12", of=SELECT, case=caches, percent=hundredths, sink=sinks, lag=lags)
def test_each_partition_keeps_its_best_tokens(impl, case, percent, sink, lag):
    """Partition by partition, floor(rL) tokens are kept and none evicted scores more than one kept."""
    kept = impl.lagkv.select(case.keys, case.values, **asked(percent, sink, lag))
    check_partitions(kept, case.keys, case.values, percent, sink, lag, by_oracle(impl))


@law(
    "LK-13",
    of="lagkv.compression_ratio",
    length=any_length,
    percent=hundredths,
    sink=any_sink,
    lag=any_lag,
)
def test_the_compression_ratio_is_the_share_removed(impl, length, percent, sink, lag):
    """C = 1 - L_R / L_s, the removed tokens counted partition by partition; at most 1 - floor(rL)/L, which
    only r = 1 reaches.
    """
    each = lag - percent * lag // 100
    # a whole partition follows it
    removed = sum(each for start in range(sink, length, lag) if start + 2 * lag <= length)
    got = impl.lagkv.compression_ratio(length, keep_ratio=percent / 100, sink_size=sink, lag_size=lag)
    require(
        abs(got - removed / length) <= 1e-6,
        f"compression_ratio({length}) = {got}, wanted {removed} / {length}",
        removed / length,
        got,
    )
    require(
        got < each / lag or got == each == 0,
        f"compression_ratio({length}) = {got} reaches its limit",
        each / lag,
        got,
    )


@law("LK-13", of=RETAINED, percent=hundredths, sink=any_sink, lag=any_lag, partitions=st.integers(2, 10**6))
def test_the_compression_ratio_tends_to_its_limit(impl, percent, sink, lag, partitions):
    """1 - floor(rL)/L is approached like 1/L_s: the gap is (1
    - floor(rL)/L) (S + L + (L_s - S) mod L) / L_s, exactly.
    """
    length = sink + partitions * lag + lag // 2
    left = impl.lagkv.retained_length(length, keep_ratio=percent / 100, sink_size=sink, lag_size=lag)
    limit = 1 - Fraction(percent * lag // 100, lag)
    gap = limit - (1 - Fraction(int(left), length))
    require(
        gap == limit * Fraction(sink + lag + (length - sink) % lag, length),
        f"retained_length({length}) = {left} is at another distance from the limit",
        limit,
        gap,
    )


@law("LK-13", of="lagkv.compression_ratio")
def test_the_compression_ratio_is_not_monotone(impl):
    """With S=16, L=128, r=.5 the ratio is .235 at 272
    tokens, falls to .160 at 399 and rises to .320 at 400.
    """
    got = [
        impl.lagkv.compression_ratio(n, keep_ratio=0.5, sink_size=16, lag_size=128) for n in (272, 399, 400)
    ]
    near(np.array(got), np.array([64 / 272, 64 / 399, 128 / 400]), 1e-12, "the compression ratio")


@law(
    "LK-13",
    of=("lagkv.keep_ratio_for", RETAINED),
    length=any_length,
    budget=any_length,
    sink=any_sink,
    lag=any_lag,
)
def test_the_keep_ratio_for_a_budget_is_the_largest_that_fits(impl, length, budget, sink, lag):
    """The retained length is within the budget where it can be; a token more a partition is too much; 1
    where none has to go.
    """
    settings = {"sink_size": sink, "lag_size": lag}
    ratio, said = impl.lagkv.keep_ratio_for(length, budget, **settings), f"keep_ratio_for({length}, {budget})"
    require(0 <= ratio <= 1, f"{said} = {ratio}, wanted in [0, 1]", None, ratio)
    must_go = budget < length and length >= sink + 2 * lag
    require(ratio == 1 or must_go, f"{said} = {ratio} where nothing has to go, or can", 1, ratio)
    least, got = (impl.lagkv.retained_length(length, keep_ratio=each, **settings) for each in (0, ratio))
    require(
        got <= max(budget, least),
        f"retained_length is {got}, over the budget {budget} (possible: {least})",
        budget,
        got,
    )
    if (whole := tokens_per_partition(ratio, lag)) < lag:
        more = impl.lagkv.retained_length(length, keep_ratio=Fraction(whole + 1, lag), **settings)
        require(more > budget, f"a larger keep_ratio also fits: {more} of {budget}", more, got)


@law(
    "LK-12", of="lagkv.why_nothing_removed", sink=any_sink, lag=any_lag, more=st.sampled_from([-1, 0, 1, 300])
)
def test_a_cache_that_stays_whole_is_explained(impl, sink, lag, more):
    """Below S + 2L tokens the reason names that number; from there on there is none."""
    shortest = sink + 2 * lag
    got = impl.lagkv.why_nothing_removed(shortest + more, sink_size=sink, lag_size=lag)
    explained = str(shortest) in str(got) if more < 0 else got is None
    require(explained, f"a cache of {shortest + more} tokens is explained by {got!r}", shortest, got)


@law(
    "LK-12",
    of=SELECT,
    kind="edge",
    case=cases(min_length=5),
    percent=hundredths,
    sink=sinks,
    lag=st.sampled_from([1, 2, 3, 4]),
)
def test_equal_tokens_are_kept_from_the_left(impl, case, percent, sink, lag):
    """Of equal scores the lower position is kept: where all
    tokens are alike, the first floor(rL) of each partition.
    """
    keys, values = (
        np.broadcast_to(states[:, :, :1], states.shape).copy() for states in (case.keys, case.values)
    )
    kept = impl.lagkv.select(keys, values, keep_ratio=percent / 100, sink_size=sink, lag_size=lag)
    length = keys.shape[2]
    last = max(0, (length - sink) // lag - 1) * lag + sink
    place = np.arange(length)
    expected = (place < sink) | (place >= last) | ((place - sink) % lag < percent * lag // 100)
    equal(kept, np.broadcast_to(expected, kept.shape), "equal tokens are not kept from the left")


@law(
    "LK-12",
    of=SELECT,
    percent=st.sampled_from([28, 29, 57, 58]),
    lag=st.sampled_from([25, 50, 100]),
    sink=st.integers(0, 1),
)
def test_the_floor_of_rl_is_exact(impl, percent, lag, sink):
    """floor(rL) of the decimal r that was written: 29 % of 100 tokens are 29, although 0.29 * 100 is less
    in floating point.
    """
    keys = np.random.default_rng(lag).normal(size=(1, 1, sink + 2 * lag, width(impl, 4)))
    kept = impl.lagkv.select(keys, keys, keep_ratio=percent / 100, sink_size=sink, lag_size=lag)
    require_mask(kept, keys.shape[:3], "the selection")
    wanted = sink + percent * lag // 100 + lag
    equal(kept.sum(axis=-1), wanted, f"{kept.sum()} tokens of {keys.shape[2]} are kept, wanted {wanted}")


@law("LK-12", of=SELECT, case=tiny_cases(min_length=5), sink=sinks, lag=st.sampled_from([1, 2]))
def test_the_extreme_ratios(impl, case, sink, lag):
    """keep_ratio 1 keeps everything; keep_ratio 0 leaves the
    sinks and what follows the last compressed partition.
    """
    settings, place = {"sink_size": sink, "lag_size": lag}, np.arange(case.keys.shape[2])
    last = max(0, (place.size - sink) // lag - 1) * lag + sink
    for ratio, expected in ((1, place >= 0), (0, (place < sink) | (place >= last))):
        kept = impl.lagkv.select(case.keys, case.values, keep_ratio=ratio, **settings)
        equal(
            kept,
            np.broadcast_to(expected, case.keys.shape[:3]),
            f"with keep_ratio {ratio} other tokens are kept",
        )


@law(
    "LK-S9",
    of=SELECT,
    case=st.builds(Case, seed=seeds(), num_kv_heads=st.integers(1, 2), length=st.integers(12, 64)),
    percent=hundredths,
    sink=sinks,
    lag=st.sampled_from([1, 2, 3, 4]),
)
def test_tokens_after_the_next_partition_do_not_matter(impl, case, percent, sink, lag):
    """What a partition keeps is decided by itself and
    the next one: other tokens further on change nothing.
    """
    before = impl.lagkv.select(case.keys, case.values, **asked(percent, sink, lag))
    decided = sink + ((case.length - sink) // lag // 2) * lag
    pairs = ((case.keys, case.next_keys), (case.values, case.next_values))
    others = (
        np.concatenate([mine[:, :, : decided + lag], next_[:, :, decided + lag :]], axis=2)
        for mine, next_ in pairs
    )
    after = impl.lagkv.select(*others, **asked(percent, sink, lag))
    equal(after[..., :decided], before[..., :decided], "tokens after the next partition changed what is kept")


@law("LK-12", of=SELECT, seed=seeds())
def test_two_heads_of_any_length_keep_their_own(impl, seed):
    """Two heads with one sink and partitions of four keep
    the best half of each, at every length from 9 to 16.
    """
    for length in range(9, 17):
        case = Case(seed=seed, num_kv_heads=2, length=length)
        kept = impl.lagkv.select(case.keys, case.values, **asked(50, 1, 4))
        check_partitions(kept, case.keys, case.values, 50, 1, 4, by_oracle(impl))
