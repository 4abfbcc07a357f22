"""Laws of TriAttention: TA-1 to TA-4."""

from evictionary.reference.rope import rotate
from evictionary.spec_tests.judge.prelude import *

STATISTICS, AVERAGE, LOGITS, SCORE = (
    f"triattention.{name}" for name in ("statistics", "average_over_offsets", "logits", "score")
)
positions = st.sampled_from([0, 1, 7, 1000, 131_072])
TRAITS = ("normal", "ties", "mixed_norms", "drift", "sinks", "outlier_channel")


def pairs(states):
    """Each pair (i, i + D/2) as a complex number, [.., D/2]."""
    first, second = np.split(states, 2, axis=-1)
    return first + 1j * second


def calibrated(case, seed):
    """A direction and a slack of at least 0 for each query head, in quarters: the same in every dtype."""
    batch, heads, _, width = case.queries.shape
    draw = np.random.default_rng(seed)
    direction = np.round(4 * draw.normal(size=(batch, heads, width))) / 4
    return direction, np.round(4 * np.abs(draw.normal(size=(batch, heads, width // 2)))) / 4


@law("TA-1", of=STATISTICS, case=seeded_cases(head_dims=EVEN_DIMS))
def test_the_slack_is_what_the_mean_hides_of_the_lengths(impl, case):
    """The mean query, and for each pair the mean length
    less the length of the mean, which is never negative.
    """
    states = pairs(impl.round(case.keys))
    size = float(np.abs(states).max())
    slack = agrees(impl, STATISTICS, case.keys)[1]
    by_hand = np.abs(states).mean(axis=-2) - np.abs(states.mean(axis=-2))
    agrees(impl, STATISTICS, case.keys, pick=1, got=slack, by_hand=by_hand, size=size)
    below, zero = np.minimum(slack, 0), np.zeros(slack.shape)
    near(below, zero, within(impl, pick=1, roundings=0), "a mean that is longer than the mean length")


@law("TA-1", of=STATISTICS)
def test_opposite_queries_have_no_mean_and_their_length_as_slack(impl):
    """(3, 4) and (-3, -4) as one pair: the mean is 0 and the slack 5; equal queries have the slack 0."""
    for second, expected in ((-1.0, ([0, 0], [5])), (1.0, ([3, 4], [0]))):
        queries = np.array([[3.0, 4], [3 * second, 4 * second]])
        for pick, got in enumerate(impl.triattention.statistics(queries)):
            rounds_to(impl, got, expected[pick], ("the mean", "the slack")[pick], size=5)


@law(
    "TA-2",
    of=AVERAGE,
    case=seeded_cases(head_dims=EVEN_DIMS),
    position=positions,
    max_offset=st.sampled_from([1, 2, 3, 64, 65_536]),
)
def test_the_average_is_over_the_powers_of_two(impl, case, position, max_offset):
    """The mean query turned to the positions p + 1, p + 2,
    p + 4, ... and averaged, one position after the other.
    """
    mean = impl.round(case.keys[:, :, 0])
    offsets = [2**power for power in range(17) if 2**power <= max_offset]
    turned = [rotate(mean[..., None, :], np.array([position + offset]))[..., 0, :] for offset in offsets]
    got = impl.triattention.average_over_offsets(mean, position=position, max_offset=max_offset)
    expected, radii = np.mean(turned, axis=0), np.tile(np.abs(pairs(mean)), 2)
    terms, angle = len(offsets), position + max_offset
    rounds_to(impl, got, expected, "the average", terms=terms, size=radii, angle=angle)


@law("TA-2", of=AVERAGE)
def test_the_last_offset_is_65536_by_default(impl):
    """17 offsets, from 1 to 2^16, at base 10000: for one pair, the mean of the cosines and sines of p + d."""
    got = impl.triattention.average_over_offsets(np.array([1.0, 0]), position=3)
    angles = 3 + 2.0 ** np.arange(17)
    expected = [np.cos(angles).mean(), np.sin(angles).mean()]
    rounds_to(impl, got, expected, "the average", terms=17, angle=angles.max())


@law(
    "TA-3",
    of=(STATISTICS, AVERAGE, LOGITS),
    case=seeded_cases(head_dims=EVEN_DIMS, kinds=TRAITS),
    position=positions,
)
def test_with_constant_queries_s_is_the_exact_logit(impl, case, position):
    """Of equal queries nothing is hidden: S is q . k at each
    future position, averaged, for keys that RoPE has turned.
    """
    query, keys = impl.round(case.queries[:, :1, :1]), impl.round(case.keys[:, :1])
    places = np.arange(case.length)
    mean, slack = impl.triattention.statistics(np.repeat(query, 3, axis=2))
    ahead = position + case.length
    direction = impl.triattention.average_over_offsets(mean, position=ahead, max_offset=4)
    turned = rotate(keys, position + places)
    impl.allowance(LOGITS, turned, direction, slack)  # leaves out what overflows in the dtype
    got = impl.triattention.logits(turned, direction, slack)
    exact = [rotate(query, np.array([ahead + d])) @ np.swapaxes(turned, -1, -2) for d in (1, 2, 4)]
    rounds_to(
        impl,
        got,
        sum(exact)[:, :, 0] / 3,
        "S",
        roundings=2,
        terms=case.head_dim,
        size=lengths(query).max() * lengths(keys).max(),
        angle=ahead + 4,
    )


def from_position(impl, keys, mean, slack, start):
    """S of the keys of a text that begins at this position. What overflows in the dtype is left out."""
    turned = rotate(keys, start + np.arange(keys.shape[2]))
    direction = impl.triattention.average_over_offsets(mean, position=start + keys.shape[2])
    impl.allowance(LOGITS, turned, direction, slack)
    return impl.triattention.logits(turned, direction, slack)


@law(
    "TA-3",
    of=(AVERAGE, LOGITS),
    case=seeded_cases(head_dims=EVEN_DIMS, kinds=TRAITS),
    seed=seeds(),
    shift=st.sampled_from([1, 64, 4096]),
)
def test_a_constant_added_to_all_positions_changes_nothing(impl, case, seed, shift):
    """Only distances count: the same S for a text that begins `shift` positions later."""
    direction, slack = calibrated(case, seed)
    mean, slack, keys = direction[:, :1], slack[:, :1], impl.round(case.keys[:, :1])
    earlier, later = (from_position(impl, keys, mean, slack, start) for start in (0, shift))
    size = (lengths(direction).max() + lengths(slack).max()) * lengths(keys).max()
    angle = 2 * (shift + case.length + 65536)  # both texts are turned
    how = {"roundings": 4, "terms": case.head_dim, "size": size, "angle": angle}
    rounds_to(impl, later, earlier, "S of the later text", **how)


@law("TA-3", of=LOGITS)
def test_the_cosines_of_the_paper_are_a_product(impl):
    """|E q| |k| cos(w D + phi) in the pair of frequency w = 1, E q = 2, k = 3i before RoPE: 6 cos(2 -
    pi/2); slack 1/2 adds 3/2.
    """
    first = np.eye(width(impl, 2) // 2)[:1]
    keys = rotate(np.concatenate([0 * first, 3 * first], axis=-1), np.array([5]))
    direction = rotate(np.concatenate([2 * first, 0 * first], axis=-1), np.array([7]))[0]
    got = impl.triattention.logits(keys, direction, 0.5 * first[0])
    rounds_to(impl, got, [6 * np.cos(2 - np.pi / 2) + 1.5], "S", roundings=8, terms=3)


@law("TA-4", of=SCORE, case=seeded_cases(head_dims=EVEN_DIMS, min_length=2, kinds=TRAITS), seed=seeds())
def test_each_head_is_standardised_and_the_largest_of_the_group_counts(impl, case, seed):
    """(S - mean) / std over the tokens for each query head,
    then the maximum; also head by head from complex pairs.
    """
    direction, slack = calibrated(case, seed)
    keys, group = impl.round(case.keys), direction.shape[1] // case.num_kv_heads
    by_hand = oracle(SCORE)(keys, direction, slack)
    for item, head in np.ndindex(keys.shape[:2]):
        rows = []
        for reader in range(head * group, (head + 1) * group):
            turned = pairs(direction[item, reader]) * np.conj(pairs(keys[item, head]))
            rows.append(turned.real.sum(axis=-1) + np.abs(pairs(keys[item, head])) @ slack[item, reader])
        if min(np.std(row) / (1 + np.abs(row).max()) for row in rows) > 1e-4:
            by_hand[item, head] = np.max([(row - row.mean()) / row.std() for row in rows], axis=0)
    agrees(impl, SCORE, keys, direction, slack, by_hand=by_hand, size=1e4)


@law("TA-4", of=SCORE, case=seeded_cases(head_dims=EVEN_DIMS, min_length=3, kinds=("normal",)), seed=seeds())
def test_the_scale_of_a_head_does_not_count(impl, case, seed):
    """Direction and slack of a query head may be twice or half as long: the standardised scores stay."""
    direction, slack = states = calibrated(case, seed)
    factors = 2.0 ** np.random.default_rng(seed).integers(-1, 2, size=(*direction.shape[:2], 1))
    got = impl.triattention.score(case.keys, direction * factors, slack * factors)
    more = impl.allowance(SCORE, case.keys, *states)
    same(impl, SCORE, case.keys, *states, got=got, more=more, what="the score of rescaled heads")


@law(
    "TA-4",
    of=SCORE,
    case=seeded_cases(head_dims=EVEN_DIMS, min_length=2, kinds=("normal", "drift")),
    seed=seeds(),
)
def test_tokens_may_be_permuted_and_heads_stand_alone(impl, case, seed):
    """The scores move with the tokens, and each KV head scores alone as among others."""
    calibration = calibrated(case, seed)
    move_with_tokens(impl, SCORE, seed, (case.keys,), *calibration)
    same_alone(impl, SCORE, case.keys, *calibration)


@law("TA-4", of=SCORE)
def test_two_heads_score_by_hand(impl):
    """One pair, keys (1, 0), (3, 0), (2, 0): head 0 wants them long, head 1 short: 0 in the middle, the
    same at both ends.
    """
    keys, end = np.array([[[[1.0, 0], [3, 0], [2, 0]]]]), (3 / 2) ** 0.5
    got = impl.triattention.score(keys, np.array([[[1.0, 0], [-2, 0]]]), np.zeros((1, 2, 1)))
    near(got, np.array([[[end, end, 0]]]), 1e-2, "the score of the better head")


@law("TA-4", of=SCORE, kind="edge")
def test_equal_keys_score_zero(impl):
    """Without any deviation nothing is divided: all scores are 0."""
    keys = np.broadcast_to([3.0, 4], (1, 1, 4, 2))
    got = impl.triattention.score(keys, np.ones((1, 2, 2)), np.ones((1, 2, 1)))
    equal(got, 0.0, "equal keys have different scores")


@law("TA-4", of=SCORE, examples=2, case=long_cases(groups=(2,), lengths=(16_385, 8_191), head_dims=(64, 80)))
def test_a_long_prompt_is_standardised_over_all_of_its_tokens(impl, case):
    """Over thousands of tokens: the scores of the loops, one head after the other."""
    direction, slack = calibrated(case, case.seed)
    states = pairs(impl.round(case.keys))
    rows = np.repeat(np.abs(states), 2, axis=1) @ slack[..., None]
    rows = rows[..., 0] + (np.repeat(np.conj(states), 2, axis=1) @ pairs(direction)[..., None])[..., 0].real
    standard = (rows - rows.mean(axis=-1, keepdims=True)) / rows.std(axis=-1, keepdims=True)
    expected = standard.reshape(1, case.num_kv_heads, 2, -1).max(axis=2)
    agrees(impl, SCORE, case.keys, direction, slack, expected=expected, more=1e-9)
