"""Laws of KeyDiff's variants (KD-T2, KD-T3, KD-T11), its
operation count (KD-A1), and the bounds of its appendix C.
"""

import statistics

from evictionary.reference import keydiff, keydiff_theory
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import mirrored

MEDIAN, RAW, DOT, EUCLID = (
    f"keydiff_variants.{name}_score" for name in ("median", "raw_mean", "dot_product", "euclidean")
)
RECENT, STEPS = "keydiff_variants.select_with_recent", "keydiff_theory.score_step_by_step"
BOUND, SQUARES = "keydiff_theory.alignment_bound", "keydiff_theory.squared_cosines"
NEARLY_CANCELLED = 1e-6  # a cosine with a mean a billionth as long as the keys has no more digits in float64


@law("KD-T2", of=(RAW, MEDIAN), kind="edge", case=cases(kinds=("zero_keys", "cancelling_keys", "ties")))
def test_the_variants_where_a_direction_is_missing(impl, case):
    """Zero keys, and keys whose mean or median is the zero vector, have cosines of 0 with the anchor."""
    agrees(impl, RAW, case.keys)
    agrees(impl, MEDIAN, case.keys)


def check_anchored(impl, path, case, middle):
    """Raise Violation unless the score is minus the cosine to the anchor that `middle` makes of the
    numbers of each channel.
    """
    keys = impl.round(case.keys)
    got, by_hand = agrees(impl, path, keys), oracle(path)(keys)
    for place in np.ndindex(keys.shape[:2]):
        anchor = np.array([[middle(column) for column in keys[place].T.tolist()]])
        size = lengths(anchor)
        # an anchor that nearly cancels leaves fewer digits than are compared
        if size > 1e-3 * lengths(keys[place]).max():
            by_hand[place] = -linear(keys[place], anchor.T)[:, 0] / (lengths(keys[place]) * size)
    agrees(impl, path, keys, got=got, by_hand=by_hand)


@law("KD-T2", of=MEDIAN, case=cases())
def test_the_median_is_taken_channel_by_channel(impl, case):
    """Minus the cosine to the median of the keys in each channel; of an even number, the mean of the two
    in the middle.
    """
    check_anchored(impl, MEDIAN, case, statistics.median)


@law("KD-T2", of=MEDIAN, case=cases(), seed=seeds())
def test_one_far_key_hardly_moves_the_median(impl, case, seed):
    """Each key twice and one key far beyond them: however
    far, it leaves the median and the scores as they are.
    """
    keys = np.clip(np.round(case.keys), -8, 8)
    far, farther = (np.concatenate([keys, keys, keys[:, :, :1] * factor], axis=2) for factor in (256, 1024))
    same(
        impl,
        MEDIAN,
        far,
        got=impl.keydiff_variants.median_score(farther),
        what="the score with the far key moved on",
    )
    move_with_tokens(impl, MEDIAN, seed, (far,))


@law("KD-T2", of=RAW, case=cases())
def test_the_raw_mean_weighs_by_length(impl, case):
    """Minus the cosine to the mean of the keys as they are: long keys count more."""
    check_anchored(impl, RAW, case, statistics.fmean)


def of_both(first, second):
    """What two answers may differ by where both may be wrong, and their oracles differ: the mean of keys that
    nearly cancel is rounding.
    """
    return first.largest + second.largest + NEARLY_CANCELLED


@law("KD-T2", of=(RAW, "keydiff.score"), case=cases(), seed=seeds())
def test_keys_of_one_length_have_one_mean(impl, case, seed):
    """Where all keys are equally long, here signed permutations of one vector, the raw mean ranks as the
    mean of unit keys.
    """
    generator = np.random.default_rng(seed)
    vector = impl.round(case.keys[0, 0, 0])
    keys = np.array([[[vector @ mirrored(generator, vector.size) for _ in range(case.keys.shape[2])]]])
    raw, plain = impl.allowance(RAW, keys), impl.allowance("keydiff.score", keys)
    if np.abs(raw.expected - plain.expected).max() > NEARLY_CANCELLED:
        return  # the keys cancel but for rounding
    got, expected = impl.keydiff_variants.raw_mean_score(keys), impl.keydiff.score(keys)
    near(got, expected, of_both(raw, plain), "the raw mean's score of keys of one length")


@law("KD-T2", of=(MEDIAN, RAW, "keydiff.score"))
def test_the_three_anchors_are_different_methods(impl):
    """Keys (2,0), (-3,-1), (0,4), (1,-1): the mean of directions, the mean and the median rank them in
    three different orders.
    """
    keys = np.array([[[[2.0, 0], [-3, -1], [0, 4], [1, -1]]]])
    for path, order in (("keydiff.score", [1, 2, 3, 0]), (RAW, [3, 1, 0, 2]), (MEDIAN, [2, 1, 0, 3])):
        equal(
            np.argsort(-impl.call(path, keys)[0, 0], kind="stable"), order, "the anchors rank in other orders"
        )


@law("KD-T3", of=DOT, case=cases())
def test_the_dot_product_variant_sums_the_dot_products(impl, case):
    """The score is minus the mean of the dot products with all keys, taken pair by pair: its anchor is the
    mean of the keys.
    """
    keys = impl.round(case.keys)
    pairs = -(keys @ np.swapaxes(keys, -1, -2)).mean(axis=-1)
    agrees(impl, DOT, keys, by_hand=pairs, size=(keys**2).sum(axis=-1).max())


@law("KD-T3", of=DOT, case=cases(), exponent=st.integers(-2, 2))
def test_the_dot_product_variant_is_quadratic(impl, case, exponent):
    """Scaling all keys of a head scales its scores by the square, so that it leaves the ranking."""
    try:
        got = impl.keydiff_variants.dot_product_score(impl.round(case.keys) * 2.0**exponent) / 4.0**exponent
    except ValueError:
        return  # the dtype under test cannot hold the scaled keys
    if np.isfinite(got).all() and exponent >= 0:
        same(impl, DOT, case.keys, got=got, what="the rescaled score")


@law("KD-T3", of=DOT)
def test_the_dot_product_variant_depends_on_the_length_of_a_key(impl):
    """Keys (1,0), (0,1), (1,1) and (3,0): the longest scores
    least, -3.75; a twelfth as long it scores most, -9/64.
    """
    for length, expected in ((3.0, [-1.25, -0.5, -1.75, -3.75]), (0.25, [-0.5625, -0.5, -1.0625, -0.140625])):
        agrees(
            impl, DOT, np.array([[[[1.0, 0], [0, 1], [1, 1], [length, 0]]]]), expected=np.array([[expected]])
        )


@law("KD-T3", of=EUCLID, case=cases())
def test_the_euclidean_variant_keeps_what_is_far_from_the_mean(impl, case):
    """The score is the distance to the mean of the keys; T times its square is the sum of the squared
    distances to all keys, less a number that is the same for every token.
    """
    agrees(impl, EUCLID, case.keys)
    keys = impl.round(case.keys)
    pairs = ((keys[..., :, None, :] - keys[..., None, :, :]) ** 2).sum(axis=(-2, -1))
    common = pairs - keys.shape[2] * oracle(EUCLID)(keys) ** 2
    loops(common, np.broadcast_to(common[..., :1], common.shape), size=pairs.max())


@law("KD-T3", of=EUCLID, case=cases(kinds=("ties", "duplicate_keys")), seed=seeds())
def test_the_euclidean_variant_knows_no_origin(impl, case, seed):
    """Moving all keys by one vector changes no distance to their mean (a cosine would change)."""
    keys = np.clip(np.round(case.keys), -8, 8)
    shift = np.random.default_rng(seed).integers(-4, 5, size=keys.shape[-1]) * 1.0
    same(
        impl,
        EUCLID,
        keys,
        got=impl.keydiff_variants.euclidean_score(keys + shift),
        more=within(impl, roundings=0),
        what="the score of the moved keys",
    )


@law("KD-T3", of=(DOT, EUCLID, "keydiff.score"))
def test_the_similarities_are_different_methods(impl):
    """Of keys (0,-2), (1,0), (-3,1), (2,3), the cosine keeps token 2, the dot product token 0 and the
    distance token 3.
    """
    keys = np.array([[[[0.0, -2], [1, 0], [-3, 1], [2, 3]]]])
    for path, order in (("keydiff.score", [2, 0, 3, 1]), (DOT, [0, 1, 2, 3]), (EUCLID, [3, 2, 0, 1])):
        equal(
            np.argsort(-impl.call(path, keys)[0, 0], kind="stable"),
            order,
            "the similarities rank in other orders",
        )


@law("KD-T11", of=RECENT, case=cases(), budget=st.integers(1, 70), percent=st.integers(0, 100))
def test_a_share_of_the_budget_goes_to_recent_tokens(impl, case, budget, percent):
    """floor(share * N) latest tokens stay; the rest of the budget goes to the best others by KD-8, scored
    among all keys.
    """
    scores, size = impl.allowance("keydiff.score", case.keys), min(budget, case.keys.shape[2])
    kept = impl.keydiff_variants.select_with_recent(case.keys, budget=budget, recent_ratio=percent / 100)
    latest = np.arange(case.keys.shape[2]) >= case.keys.shape[2] - percent * size // 100
    latest = np.broadcast_to(latest, scores.expected.shape)
    selects(kept, scores.expected, size, slack=scores, protected=latest)


@law("KD-T11", of=RECENT)
def test_the_share_is_of_the_budget_and_exact(impl):
    """29 % of 100 tokens are 29, although 0.29 * 100 is less in floating point; the share is of the
    budget, not of the cache.
    """
    first = np.arange(300) < 71
    keys = np.stack([~first, first], axis=-1).astype(float)[None, None]  # the first 71 are the unusual ones
    kept = impl.keydiff_variants.select_with_recent(keys, budget=100, recent_ratio=0.29)[0, 0]
    equal(kept, first | (np.arange(300) >= 271), "other tokens are kept than the first 71 and the last 29")


@law(
    "KD-A1",
    of=(STEPS, "keydiff.score"),
    case=cases(kinds=("normal", "outlier_channel", "drift", "cancelling_keys")),
)
def test_the_counted_steps_give_the_score(impl, case):
    """The order of operations that the appendix counts computes KD-8."""
    keys = impl.round(case.keys)
    if np.linalg.norm(keydiff.anchor(keys), axis=-1).min() >= 1e-6:  # below epsilon the quotient is bounded
        agrees(impl, STEPS, keys)
        near(oracle(STEPS)(keys), oracle("keydiff.score")(keys), 1e-8, "the oracle's score, step by step,")


@law("KD-A1", of=STEPS, kind="refusal")
def test_a_zero_key_has_no_steps(impl):
    """A zero key, by whose norm the steps divide, raises ValueError."""
    refused(impl, "keys", STEPS, np.array([[[[1.0, 2], [0, 0]]]]))


@law(
    "KD-A1",
    of=("keydiff_theory.operation_count", "keydiff_theory.flops"),
    length=st.integers(1, 9000),
    head_dim=st.integers(1, 256),
)
def test_operation_count_is_the_formula(impl, length, head_dim):
    """n(3d + 1) + 2d multiplications, 3nd - n - 1 additions, 2n + 1 divisions and n + 1 square roots."""
    got = impl.keydiff_theory.operation_count(length, head_dim)
    expected = (
        length * (3 * head_dim + 1) + 2 * head_dim,
        3 * length * head_dim - length - 1,
        2 * length + 1,
        length + 1,
    )
    require(tuple(got) == expected, "the operations are counted otherwise", expected, got)
    total = impl.keydiff_theory.flops(keydiff_theory.Operations(*expected))
    equal(total, 6 * length * head_dim + 2 * head_dim + 18 * length + 12, "the weighted sum is another")


@law(
    "KD-C1",
    of=BOUND,
    count=st.integers(1, 9000),
    percent=st.integers(1, 99),
    largest=st.sampled_from([0.25, 1.0, 7.0, 64.0]),
)
def test_alignment_bound_is_the_formula(impl, count, percent, largest):
    """a / M - 1 with a = log n + log(w / (1 - w)), in natural logarithms."""
    expected = (math.log(count) + math.log(percent) - math.log(100 - percent)) / largest - 1
    got = np.asarray(float(impl.keydiff_theory.alignment_bound(count, percent / 100, largest)))
    rounds_to(impl, got, expected, "the bound", roundings=2, size=1 + 14 / largest)


@law("KD-C2", of=SQUARES, case=cases(), seed=seeds())
def test_squared_cosines_with_a_basis_sum_to_one(impl, case, seed):
    """The squared cosines of a nonzero vector with an orthonormal basis (here signed axes) sum to 1."""
    vector = impl.round(case.keys[0, 0, 0])
    basis = mirrored(np.random.default_rng(seed), vector.size)
    by_hand = linear(vector, basis.T) ** 2 / (math.fsum(vector**2) or 1.0)
    got, one = agrees(impl, SQUARES, vector, basis, by_hand=by_hand), float(vector.any())
    totals(got, one, impl.allowance(SQUARES, vector, basis), "the squared cosines")


@law(
    "KD-C3", of="keydiff_theory.anchor_cosine_bound", first=st.integers(-16, 16), second=st.integers(-16, 16)
)
def test_anchor_cosine_bound_is_the_formula(impl, first, second):
    """1 - (bq - bk)^2 / 2: 1 where both cosines are equal, -1 where they are 1 and -1."""
    agrees(
        impl, "keydiff_theory.anchor_cosine_bound", np.array([first / 16, 1.0]), np.array([second / 16, -1.0])
    )
