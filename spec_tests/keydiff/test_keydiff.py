"""Laws of KeyDiff: the score and what it optimises (KD-7, KD-8, KD-O)."""

from evictionary.reference import keydiff, keydiff_theory
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.keydiff.helpers import mean_direction, paper_budgets, scores_in_parts
from evictionary.spec_tests.shared.helpers import mirrored, refuse

SCORE = "keydiff.score"


@law("KD-8", of=SCORE, case=cases())
def test_score_is_minus_the_cosine_to_the_anchor(impl, case):
    """The score is minus the cosine between each key and the mean of the unit keys."""
    agrees(impl, SCORE, case.keys)


@law("KD-8", of=SCORE, kind="edge", case=cases(kinds=("zero_keys", "cancelling_keys", "ties")))
def test_the_score_where_a_direction_is_missing(impl, case):
    """Zero keys, which have no direction, and keys whose directions cancel are scored as decided: their
    cosines are 0.
    """
    agrees(impl, SCORE, case.keys)


def mean_of_directions(keys):
    return sum(np.moveaxis(directions(keys), 2, 0)) / keys.shape[2]


@law("KD-8", of=SCORE, brute_force=True, case=cases(max_length=5))
def test_score_in_plain_loops(impl, case):
    """Computed key by key and channel by channel, the score has the same numbers."""
    keys = impl.round(case.keys)
    length = lengths(mean_of_directions(keys))[..., None]
    if length.min() >= 1e-3:  # keys that nearly cancel leave fewer digits than the comparison asks for
        agrees(impl, SCORE, keys, by_hand=-mean_cosines(keys) / length)


@law("KD-8", of=SCORE, case=cases())
def test_scores_are_cosines(impl, case):
    """Scores lie in [-1, 1]."""
    lies(impl, impl.keydiff.score(case.keys), between=(-1, 1), what="a score")


@law("KD-8", of=SCORE, case=cases(max_length=1))
def test_the_only_key_scores_minus_one(impl, case):
    """The only key of a head is its own mean, and scores -1."""
    keys = impl.round(case.keys[:, :, :1])
    got, expected = impl.keydiff.score(keys), -(np.abs(keys).max(axis=-1) > 0).astype(float)
    near(got, expected, within(impl), "the score of the only key")


@law("KD-8", of=SCORE, kind="edge", pairs=st.integers(1, 9))
def test_keys_that_cancel_score_zero(impl, pairs):
    """Keys e1 and -e1 in equal number have the zero vector for a mean: every cosine with it is 0, not NaN."""
    keys = np.tile(np.array([[1.0, 0], [-1, 0]]), (1, 1, pairs, 1))
    equal(impl.keydiff.score(keys), 0, "keys whose directions cancel do not score 0")


@law("KD-8", of=SCORE, exponent=st.integers(-6, 6), across=st.sampled_from([1, 0]))
def test_long_and_short_keys_count_alike(impl, exponent, across):
    """Keys 2^e e1, e2, e2 and 2^-e (1, 1), or 2^-e e2 in
    place of the last: whatever e, e1 is the most distinct.
    """
    keys = np.array([[[[2.0**exponent, 0], [0, 1], [0, 1], [across * 2.0**-exponent, 2.0**-exponent]]]])
    first, *others = agrees(impl, SCORE, keys)[0, 0]
    require(
        first > max(others),
        "the order depends on the lengths of the keys",
        "e1 above the others",
        (first, *others),
    )


def check_anchor(impl, case):
    agrees(impl, "keydiff.anchor", case.keys, by_hand=mean_of_directions)


@law("KD-8", of="keydiff.anchor", case=cases())
def test_the_anchor_averages_directions(impl, case):
    """mu is the mean of the unit keys."""
    check_anchor(impl, case)


@law("KD-8", of="keydiff.anchor", kind="edge", case=cases(kinds=("zero_keys", "ties")))
def test_a_zero_key_counts_as_a_token_of_no_direction(impl, case):
    """A zero key adds nothing to the sum of the directions,
    and one to the number of tokens that it is divided by.
    """
    check_anchor(impl, case)


@law("KD-8", of=SCORE, case=cases(), seed=seeds())
def test_rescaling_each_key_changes_nothing(impl, case, seed):
    """Each key may be multiplied by its own positive number: only directions count (powers of two, so
    nothing is rounded).
    """
    factors = 2.0 ** np.random.default_rng(seed).integers(-3, 4, size=(*case.keys.shape[:-1], 1))
    same(
        impl,
        SCORE,
        case.keys,
        got=impl.keydiff.score(impl.round(case.keys) * factors),
        what="the score of the rescaled keys",
    )


@law("KD-8", of=SCORE, case=cases(), seed=seeds())
def test_turning_all_keys_changes_nothing(impl, case, seed):
    """One orthogonal map of all keys (here channels exchanged and mirrored) leaves the scores as they are."""
    turned = case.keys @ mirrored(np.random.default_rng(seed), case.keys.shape[-1])
    same(impl, SCORE, case.keys, got=impl.keydiff.score(turned), what="the score of the turned keys")


@law("KD-8", of=SCORE, case=cases(), seed=seeds())
def test_scores_move_with_their_tokens(impl, case, seed):
    """Permuting the tokens permutes the scores: position plays no part."""
    move_with_tokens(impl, SCORE, seed, (case.keys,))


@law("KD-8", of=SCORE, case=cases(min_length=2))
def test_heads_do_not_see_each_other(impl, case):
    """The scores of a head are the same when it is scored alone."""
    same_alone(impl, SCORE, case.keys)


@law("KD-8", of=SCORE, kind="edge", case=tiny_cases(min_length=1), zero_at=st.integers(0, 4))
def test_a_zero_key_scores_zero(impl, case, zero_at):
    """The cosine with a zero vector is 0: a zero key scores 0, and all-zero keys score 0."""
    keys = case.keys.copy()
    keys[:, :, zero_at % keys.shape[2]] = 0
    for states in (keys, np.zeros_like(keys)):
        equal(impl.keydiff.score(states)[~states.any(axis=-1)], 0, "the score of a zero key is not 0")


@law("KD-8", of=SCORE)
def test_the_anchor_is_the_mean_of_unit_keys(impl):
    """Keys (10,0), (0,1), (.2,1), (1,1) rank 0, 1, 2, 3;
    with the raw mean as anchor they would rank 1, 2, 3, 0.
    """
    score = impl.keydiff.score(np.array([[[[10.0, 0], [0, 1], [0.2, 1], [1, 1]]]]))
    equal(np.argsort(-score[0, 0], kind="stable"), [0, 1, 2, 3], "the tokens rank in another order")


@law("KD-8", of=SCORE, kind="refusal", bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_numbers_that_are_not_finite_do_not_pass_in_silence(impl, bad):
    """A NaN or an infinite number among the keys raises
    ValueError or shows as NaN in the scores of its head.
    """
    keys = np.ones((1, 1, 3, 2))
    keys[0, 0, 1, 1] = bad
    refuse(impl, SCORE, Misfit("keys", f"keys with {bad} in them: their score", {"keys": keys}, shows=True))


@law("KD-8", of=SCORE, kind="refusal", bad=st.sampled_from([(3,), (2, 0, 4, 3), (2, 1, 0, 3)]))
def test_bad_shapes_are_refused(impl, bad):
    """Too few axes, or an empty one, raise ValueError."""
    refused(impl, "keys", SCORE, np.zeros(bad))


@law("KD-7", of="keydiff.pairwise_score", case=cases())
def test_pairwise_score_sums_the_rows_of_the_similarity_matrix(impl, case):
    """The score of KD-7 is minus the sum of the cosines to all keys, the key itself among them."""
    agrees(impl, "keydiff.pairwise_score", case.keys)


@law(
    "KD-7",
    of=("keydiff.similarity_matrix", "keydiff.pairwise_score"),
    kind="edge",
    case=cases(kinds=("zero_keys", "ties")),
)
def test_a_zero_key_is_similar_to_none(impl, case):
    """The cosines of a zero key are 0, the one with itself too."""
    agrees(impl, "keydiff.similarity_matrix", case.keys)
    agrees(impl, "keydiff.pairwise_score", case.keys)


@law("KD-7", of="keydiff.similarity_matrix", case=cases())
def test_the_similarity_matrix_holds_every_cosine(impl, case):
    """S_ij is the cosine of the keys i and j."""
    agrees(impl, "keydiff.similarity_matrix", case.keys)


@law("KD-7", of="keydiff.similarity_matrix", case=cases())
def test_the_similarity_matrix_is_symmetric(impl, case):
    """S is symmetric, and its diagonal is 1."""
    got = impl.keydiff.similarity_matrix(case.keys)
    transposed = np.swapaxes(got, -1, -2).copy()
    same(impl, "keydiff.similarity_matrix", case.keys, got=transposed, what="the transposed matrix")
    wanted = (np.abs(impl.round(case.keys)).max(axis=-1) > 0).astype(float)
    near(np.diagonal(got, axis1=-2, axis2=-1), wanted, within(impl), "the cosine of a key with itself")


@law("KD-7", of="keydiff.pairwise_score", brute_force=True, case=cases(max_length=5))
def test_pairwise_score_in_plain_loops(impl, case):
    """Minus the sum of the cosines to every key, taken pair by pair, gives the same numbers."""
    keys = impl.round(case.keys)
    agrees(impl, "keydiff.pairwise_score", keys, by_hand=-keys.shape[2] * mean_cosines(keys))


def pairwise_scores(impl, keys, size):
    """The pairwise score, and what the anchor's score times `size` may differ from it by: both may be wrong,
    and both sum up T cosines.
    """
    pairwise = impl.allowance("keydiff.pairwise_score", keys)
    of_anchor = size * (impl.allowance(SCORE, keys).largest + 1e-12)
    return pairwise.expected, 2 * pairwise.largest + of_anchor + keys.shape[2] * rounding(impl)


@law("KD-7", of=("keydiff.anchor", SCORE), case=cases())
def test_both_scores_rank_alike(impl, case):
    """Row i of S sums to T |mu| cos(k_i, mu): the pairwise
    score is the anchor's score times a positive number.
    """
    size = case.keys.shape[2] * np.linalg.norm(impl.keydiff.anchor(case.keys), axis=-1, keepdims=True)
    expected, slack = pairwise_scores(impl, case.keys, size)
    near(size * impl.keydiff.score(case.keys), expected, slack, "T |mu| times the score")


def of_choices(impl, keys, count):
    """What a sum may miss of the least one where tokens are chosen by their scores: for each of so many, what
    two scores may be wrong by.
    """
    return 2 * count * impl.allowance(SCORE, keys).largest + 1e-11


@law(
    "KD-O",
    of=(SCORE, "selection.top_k"),
    brute_force=True,
    case=cases(min_length=2, max_length=5),
    share=shares(),
)
def test_top_k_solves_the_relaxed_problem(impl, case, share):
    """No other set of N keys has a smaller sum of khat_i
    . mu, which plain loops compute: every set is tried.
    """
    keys = impl.round(case.keys)
    budget = max(1, int(share * keys.shape[2]))
    kept = impl.selection.top_k(impl.keydiff.score(keys), budget)
    similarity = mean_cosines(keys)
    selects(kept, -similarity, budget, slack=impl.allowance(SCORE, keys))
    sets = itertools.combinations(np.moveaxis(similarity, -1, 0), budget)
    got, best = (similarity * kept).sum(axis=-1), np.min([sum(each) for each in sets], axis=0)
    near(got, best, of_choices(impl, keys, budget), "the similarity to the anchor, the least of all sets,")


@law("KD-O", of=(SCORE, "selection.top_k"), case=seeded_cases(min_length=5), share=shares())
def test_no_exchange_improves_the_relaxed_problem(impl, case, share):
    """No kept key has a larger khat_i . mu, which plain loops compute, than an evicted one: so no other
    set has a smaller sum.
    """
    keys = impl.round(case.keys)
    budget = max(1, int(share * case.length))
    kept = impl.selection.top_k(impl.keydiff.score(keys), budget)
    selects(kept, -mean_cosines(keys), budget, slack=lambda: impl.allowance(SCORE, keys))


@law(
    "KD-O",
    of=(SCORE, "selection.top_k"),
    examples=2,
    case=paper_cases(kinds=("normal", "drift")),
    budget=paper_budgets,
)
def test_no_exchange_improves_the_problem_of_a_long_prompt(impl, case, budget):
    """Of 16K to 128K keys with a direction of their own,
    the 2,048 to 8,192 of the smallest khat_i . mu are kept.
    """
    keys = impl.round(case.keys + 2)
    scores, slack = scores_in_parts(impl, keys)
    kept = impl.selection.top_k(impl.keydiff.score(keys), budget)
    selects(kept, scores, min(budget, case.length), slack=slack)


@law(
    "KD-O",
    of=("keydiff_theory.pairwise_objective", "keydiff_theory.relaxed_objective"),
    case=cases(max_length=33),
    seed=seeds(),
)
def test_the_objectives_are_sums_of_cosines(impl, case, seed):
    """The pairwise objective sums the cosines of all pairs
    in S, the relaxed one khat . mu over the tokens of S.
    """
    keys, kept = impl.round(case.keys), np.random.default_rng(seed).random(case.keys.shape[:3]) < 0.5
    pairwise, relaxed = np.zeros(kept.shape[:2]), np.zeros(kept.shape[:2])
    for place in np.ndindex(kept.shape[:2]):
        relaxed[place] = math.fsum(mean_cosines(keys[place])[kept[place]])
        if kept[place].any():
            pairwise[place] = math.fsum(kept[place].sum() * mean_cosines(keys[place][kept[place]]))
    for name, expected in (("pairwise_objective", pairwise), ("relaxed_objective", relaxed)):
        agrees(impl, f"keydiff_theory.{name}", keys, kept, by_hand=expected, size=keys.shape[2] ** 2)


@law("KD-O", of=(SCORE, "selection.top_k"), brute_force=True, case=cases(min_length=2))
def test_evicting_one_token_is_exactly_optimal(impl, case):
    """With N = n - 1, as in each step of decoding, no other choice leaves a smaller sum of pairwise
    cosines (no key being zero).
    """
    keys, length = impl.round(case.keys), case.keys.shape[2]
    assume(keys.any(axis=-1).all())
    kept = impl.selection.top_k(impl.keydiff.score(keys), length - 1)
    others = [np.broadcast_to(np.arange(length) != gone, kept.shape) for gone in range(length)]
    got, best = (
        keydiff_theory.pairwise_objective(keys, kept),
        np.min([keydiff_theory.pairwise_objective(keys, other) for other in others], axis=0),
    )
    # Leaving i out changes the objective by 1 - 2 n |mu| cos(k_i, mu): so often a score counts.
    count = 2 * length * np.linalg.norm(keydiff.anchor(keys), axis=-1)
    near(got, best, of_choices(impl, keys, count), "the sum of pairwise cosines, the least of all evictions,")


ANY_SCALE = ("small", "moving_mean", "sinks", "vast", "mixed_norms", "normal")


def check_long_prompt(impl, case):
    keys = of_dtype(impl, case.keys)
    expected, slack = scores_in_parts(impl, keys)
    near(impl.keydiff.score(keys), expected, slack, "the score of a long prompt")


@law("KD-8", of=SCORE, examples=3, case=long_cases(kinds=ANY_SCALE))
def test_long_prompts_are_scored_against_the_mean_of_all_their_keys(impl, case):
    """Of thousands of keys, of norms from 1e-4 to 1e5, each is compared with the sum of all unit keys,
    added part by part.
    """
    check_long_prompt(impl, case)


@law("KD-8", of="keydiff.anchor", examples=1, case=long_cases(kinds=ANY_SCALE))
def test_the_anchor_of_a_long_prompt_is_the_mean_of_its_parts(impl, case):
    """The anchor is the mean of the anchors of parts of the prompt, each weighted by its length."""
    keys = of_dtype(impl, case.keys)
    expected, slack = mean_direction(impl, keys)
    near(impl.keydiff.anchor(keys), expected, slack, "the anchor of a long prompt")


def keys_that_cancel(impl, case):
    """Keys along the axes, at the scale of the case, and their
    directions, whose sum every order of adding gives exactly.

    Most lie along the first axis, forwards and, from the middle on, backwards; one in 61 lies along another
    one. What little is left of thousands is the anchor.
    """
    tokens = np.arange(case.length)
    others = tokens[case.seed % 61 :: 61]
    units = np.zeros((1, case.num_kv_heads, case.length, case.head_dim))
    units[..., 0] = np.where(tokens < case.length // 2 + 8, 1, -1)
    units[:, :, others] = 0
    units[:, :, others, 1 + others // 61 % (case.head_dim - 1)] = 1
    scale = {"minute": 2.0**-24, "small": 2.0**-10, "vast": 2.0**16}.get(case.kind, 1.0)
    lengths = scale * 2.0 ** np.random.default_rng(case.seed).integers(-3, 4, size=(*units.shape[:-1], 1))
    return of_dtype(impl, units * lengths), units


def check_cancelling(impl, case):
    keys, units = keys_that_cancel(impl, case)
    mu = units.mean(axis=-2)
    expected = -(units @ mu[..., None])[..., 0] / np.linalg.norm(mu, axis=-1)[..., None]
    got, size = impl.keydiff.score(keys), np.abs(expected)
    rounds_to(impl, got, expected, "the score of keys that cancel", terms=case.length, size=size)


@law("KD-8", of=SCORE, examples=3, case=long_cases(kinds=ANY_SCALE))
def test_no_part_of_a_long_prompt_is_lost(impl, case):
    """Where thousands of directions cancel, a part that is
    lost, counted twice or weighted wrongly turns the anchor.
    """
    check_cancelling(impl, case)


@law("KD-8", of=SCORE, kind="edge", examples=2, case=long_cases(kinds=("minute",), lengths=(4097, 8191)))
def test_minute_keys_have_directions_too(impl, case):
    """Keys of norms down to 7e-9, which no model has, are
    scored like longer ones: no epsilon takes their place.
    """
    check_long_prompt(impl, case)
    check_cancelling(impl, case)


@law(
    "KD-8",
    of="keydiff.anchor",
    examples=1,
    case=long_cases(kinds=ANY_SCALE, lengths=(65_537, 40_960, 32_769)),
)
def test_the_sum_of_a_long_prompt_keeps_its_last_digits(impl, case):
    """A sum of directions that grows to tens of thousands and shrinks again is exact in float32; in half
    precision it is not.
    """
    keys, units = keys_that_cancel(impl, case)
    expected = units.mean(axis=-2)
    got, size = impl.keydiff.anchor(keys), np.abs(expected).max()
    rounds_to(impl, got, expected, "the anchor of keys that cancel", terms=case.length, size=size)
