"""Laws of MomentKV: the moments and the eviction score (MK-10, MK-22 to MK-25); further helpers for the
files beside it.
"""

from evictionary.reference import momentkv
from evictionary.reference.momentkv import Moments
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.momentkv.helpers import (
    SCORE,
    UPDATE,
    heads_apart,
    held,
    moments_in_loops,
    moments_of,
    recovers,
    scale_values,
    score_in_loops,
    short_cases,
    situation,
    some,
    turn,
    whole,
)
from evictionary.spec_tests.shared.helpers import refuses


def right_moments(impl, path, *arguments):
    """Raise Violation unless the moments are the oracle's, and the count exactly."""
    got = impl.call(path, *arguments)
    equal(got[0], oracle(path)(*arguments)[0], "the count is wrong")
    for pick, name in enumerate(Moments._fields[1:], 1):
        agrees(impl, path, *arguments, pick=pick, got=got[pick], what=name)


# The moments


@law("MK-22", of=UPDATE, case=cases(), seed=seeds())
def test_the_moments_are_four_sums_over_the_evicted_tokens(impl, case, seed):
    """Count, sum of keys, sum of values, and sum of v k^T
    (rows of values, columns of keys), added to what was there.
    """
    before = held(
        impl, moments_of(case.next_keys, case.next_values, some(case, seed + 1, case.next_keys.shape[:3]))
    )
    keys = case.keys.copy()
    keys[:, :, 0] = 0  # a token without a key counts
    right_moments(impl, UPDATE, before, keys, case.values, some(case, seed))


@law("MK-25", of=UPDATE, case=short_cases, seed=seeds())
def test_one_token_at_a_time_gives_the_same_moments(impl, case, seed):
    """Evicted one by one, in any order, or all at once: the sums are the same (whole numbers: exactly), as
    in plain loops.
    """
    _, keys, values, evicted = whole(case, seed)
    moments = empty = momentkv.no_moments(keys, values)
    for token in np.random.default_rng(seed).permutation(keys.shape[2]):
        now = evicted & (np.arange(keys.shape[2]) == token)
        moments = Moments(*impl.momentkv.update(moments, keys, values, now))
        moments = moments._replace(count=moments.count.astype(np.int64))
    at_once = impl.momentkv.update(empty, keys, values, evicted)
    expected = moments_in_loops(keys, values, evicted)
    for name, streamed, batched, by_hand in zip(Moments._fields, moments, at_once, expected, strict=True):
        equal(streamed, by_hand, f"{name}, one token at a time, is not the sum over the evicted tokens")
        equal(batched, by_hand, f"{name} is not the sum over the evicted tokens")


@law("MK-25", of=UPDATE, case=cases(), seed=seeds())
def test_what_stays_does_not_count(impl, case, seed):
    """The moments read nothing of a token that is not evicted."""
    evicted = some(case, seed)
    empty = momentkv.no_moments(case.keys, case.values)
    others = (np.where(evicted[..., None], states, 3.0) for states in (case.keys, case.values))
    got = impl.momentkv.update(empty, *others, evicted)
    own = impl.momentkv.update(empty, case.keys, case.values, evicted)
    equal(got[0], own[0], "the count is another where what stays is")
    for pick, name in enumerate(Moments._fields[1:], 1):
        what = f"{name} where what stays is another"
        same(impl, UPDATE, empty, case.keys, case.values, evicted, got=got[pick], pick=pick, what=what)


@law("MK-25", of="momentkv.merge", case=short_cases, seed=seeds())
def test_moments_of_disjoint_sets_add_up(impl, case, seed):
    """Merging is commutative and associative, the empty moments change nothing, and it equals one update
    with the union.
    """
    _, keys, values, _ = whole(case, seed)
    owner = np.random.default_rng(seed).integers(0, 4, size=keys.shape[:3])
    first, second, third = (moments_of(keys, values, owner == part) for part in range(3))
    union = moments_of(keys, values, owner < 3)
    merge, empty = impl.momentkv.merge, momentkv.no_moments(keys, values)
    for got in (merge(merge(first, second), third), merge(third, merge(empty, merge(second, first)))):
        for name, field, expected in zip(Moments._fields, got, union, strict=True):
            equal(field, expected, f"{name} of the merged moments is not that of the union")


@law("MK-22", of="momentkv.no_moments", case=seeded_cases(max_length=3))
def test_the_empty_set_has_moments_of_zero(impl, case):
    """Count 0, and sums of zero in the shapes of the heads, D_v by D for the products."""
    right_moments(impl, "momentkv.no_moments", case.keys, case.values)


@law("MK-C2", of=UPDATE, large=st.sampled_from([2048.0, 65536.0]))
def test_sums_are_float32_or_wider(impl, large):
    """A sum of 2048 still grows by one: half-precision sums stall there, bfloat16 ones at 256."""
    large = min(large, 2048.0) if impl.dtype == "float16" else large
    before = Moments(
        np.array([[4096]]), np.full((1, 1, 2), large), np.full((1, 1, 3), large), np.full((1, 1, 3, 2), large)
    )
    after = impl.momentkv.update(
        before, np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 3)), np.ones((1, 1, 1), dtype=bool)
    )
    for name, got, expected in zip(
        Moments._fields, after, (4097, large + 1, large + 1, large + 1), strict=True
    ):
        equal(got, expected, f"{name} did not grow by one: it is kept in too few bits")


@law("MK-24", of="momentkv.recover", case=cases(), seed=seeds())
def test_the_means_are_recovered_from_the_sums(impl, case, seed):
    """s_k / n, s_v / n and S - s_v s_k^T / n; zero where nothing was evicted."""
    moments = situation(impl, case, seed)[3]
    for pick, name in enumerate(momentkv.Recovered._fields):
        recovers(impl, moments, pick, what=name)


@law("MK-23", of="momentkv.recover", case=short_cases, seed=seeds())
def test_the_covariance_is_the_centred_sum(impl, case, seed):
    """Stilde = sum over the evicted tokens of v (k - kbar)^T, also with the values centred, and no shift
    of all keys changes it.
    """
    _, keys, values, evicted = whole(case, seed)
    expected = np.zeros((*keys.shape[:2], values.shape[-1], keys.shape[-1]))
    centred_values = expected.copy()
    for place in map(tuple, np.argwhere(evicted.any(axis=-1))):
        k, v = keys[place][evicted[place]], values[place][evicted[place]]
        expected[place] = v.T @ (k - k.mean(axis=0))
        centred_values[place] = (v - v.mean(axis=0)).T @ (k - k.mean(axis=0))
    for shift in (0.0, 2.0):
        moments = moments_of(keys + shift, values, evicted)
        got = recovers(impl, moments, 2, also=expected, what=f"Stilde of the keys + {shift:g}")
        recovers(impl, moments, 2, got=got, also=centred_values, what="Stilde with centred values")


@law("MK-C2", of="momentkv.recover", power=st.integers(0, 24))
def test_no_entry_of_the_covariance_is_too_small_to_count(impl, power):
    """Keys 2 and -2 with values 2^-p and -2^-p: Stilde
    is 2^(2-p), however small; nothing below 1e-6 is cut.
    """
    keys = np.array([[[[2.0], [-2.0]]]])
    expected = np.array([[[[2.0 ** (2 - power)]]]])
    agrees(impl, "momentkv.recover", moments_of(keys, keys / 2 ** (power + 1)), pick=2, expected=expected)


@law("MK-25", of=UPDATE, kind="refusal")
def test_a_negative_count_is_refused(impl):
    """Moments of fewer than no tokens raise ValueError with the name."""
    empty = momentkv.no_moments(np.ones((1, 2, 4, 4)), np.ones((1, 2, 4, 3)))
    if impl.reads_numbers:
        refuses(impl, UPDATE, "moments", empty._replace(count=np.full((1, 2), -1)))


# The eviction score


@law("MK-10", of=SCORE, case=cases(), seed=seeds())
def test_score_is_attention_times_the_residual(impl, case, seed):
    """alpha_j |v_j - vbar - Stilde k_j / (n sqrt(d))|, with alpha the mean over the group of the softmax."""
    agrees(impl, SCORE, *situation(impl, case, seed))


@law("MK-10", of=SCORE, case=cases(max_length=17), seed=seeds())
def test_score_equals_the_loops(impl, case, seed):
    """The score written as plain loops over batch, head, query head and token gives the same numbers."""
    agrees(impl, SCORE, *situation(impl, case, seed), also=score_in_loops)


@law("MK-10", of=SCORE, case=cases())
def test_with_nothing_evicted_the_residual_is_the_value(impl, case):
    """At count 0 the score is alpha_j |v_j|: finite, and with unit values it sums to 1 over the tokens."""
    query, keys = case.queries[:, :, 0], case.keys
    values = np.zeros_like(case.values)
    values[..., 0] = np.where(np.arange(values.shape[2]) % 2, 1.0, -1.0)
    states = query, keys, values, momentkv.no_moments(keys, values)
    totals(agrees(impl, SCORE, *states), 1, impl.allowance(SCORE, *states), "the scores of unit values")


@law("MK-10", of=SCORE, power=st.sampled_from([0, 22, 24]))
def test_a_predicted_token_scores_zero(impl, power):
    """Evicted k = (r, 0, ..), r^2 = D, v = 1 and their mirror image predict v = k_1: where k_1 = v the
    score is 0, at any scale.
    """
    # Of a number of channels without a whole root, four: the least that the sentence can be said with.
    root = math.isqrt(width(impl, 4)) if math.sqrt(width(impl, 4)).is_integer() else 2
    key, scale = root * np.eye(root**2)[0], 2.0**-power
    evicted_keys, evicted_values = np.stack([key, -key])[None, None], scale * np.array([[[[1.0], [-1.0]]]])
    moments = moments_of(evicted_keys, evicted_values)
    keys, values = (
        np.stack([key, key, 2 * key])[None, None],
        root * scale * np.array([[[[1.0], [-1.0], [1.0]]]]),
    )
    what = f"the score of the residuals 0, 2 and 1, times {root} (values 1, -1 and 1, predictions 1, 1 and 2)"
    also = root * scale * np.array([[[0, 2, 1]]]) / 3
    agrees(impl, SCORE, np.zeros((1, 1, root**2)), keys, values, moments, also=also, what=what)


@law("MK-10", of=SCORE)
def test_the_group_is_averaged_after_the_softmax(impl):
    """Two query heads that look at different tokens give each half of the attention; the mean query would
    give a third.
    """
    keys, values = np.array([[[[8.0, 0], [0, 8], [-8, -8]]]]), np.ones((1, 1, 3, 1))
    empty = momentkv.no_moments(keys, values)
    # In the second pair one query head looks the other way, and would be averaged away.
    for second, expected in (([0, 64], [0.5, 0.5, 0]), ([-48, 0], [0.5, 0, 0.5])):
        query = np.array([[[64.0, 0], second]])
        agrees(
            impl,
            SCORE,
            query,
            keys,
            values,
            empty,
            also=np.array([[expected]]),
            what="the score of two query heads",
        )


@law("MK-10", of=SCORE, case=seeded_cases(groups=(2, 3)), seed=seeds())
def test_query_heads_of_a_group_are_interchangeable(impl, case, seed):
    """Query head h reads KV head h // G: an exchange within a group changes nothing, each KV head alone
    gives the same score.
    """
    query, keys, values, moments = states = situation(impl, case, seed)
    exchanged = query.reshape(*keys.shape[:2], -1, query.shape[-1])[:, :, ::-1].reshape(query.shape)
    same(impl, SCORE, *states, got=impl.momentkv.score(exchanged, keys, values, moments))
    same(impl, SCORE, *states, got=heads_apart(impl, SCORE, *states), what="the scores of the heads alone")


@law("MK-10", of=SCORE, case=cases(min_length=2), seed=seeds())
def test_scores_move_with_their_tokens(impl, case, seed):
    """Permuting the retained tokens permutes the scores."""
    query, keys, values, moments = situation(impl, case, seed)
    order = np.random.default_rng(seed).permutation(keys.shape[2])
    got = impl.momentkv.score(query, keys[:, :, order], values[:, :, order], moments)
    same(impl, SCORE, query, keys, values, moments, got=got, becomes=lambda scores: scores[:, :, order])


@law("MK-10", of=SCORE, case=cases(), seed=seeds())
def test_turning_keys_or_values_changes_no_score(impl, case, seed):
    """One orthogonal map of keys, query and moments, and
    another of the values, leave the scores as they are.
    """
    states = situation(impl, case, seed)
    same(
        impl,
        SCORE,
        *states,
        got=impl.momentkv.score(*turn(seed, *states)[:4]),
        what="the score of the turned states",
    )


@law("MK-10", of=SCORE, case=cases(), seed=seeds(), power=st.sampled_from([-2, -1, 1, 2]))
def test_the_score_is_of_first_degree_in_the_values(impl, case, seed, power):
    """Doubling retained and evicted values doubles the score (powers of two, so nothing is rounded)."""
    query, keys, values, moments = situation(impl, case, seed)
    values, moments, scaled_values, scaled_moments = scale_values(impl, values, moments, 2.0**power)
    got = impl.momentkv.score(query, keys, values, moments)
    same(
        impl, SCORE, query, keys, scaled_values, scaled_moments, got=got * 2.0**power, what="the scaled score"
    )


@law("MK-10", of=SCORE, case=cases())
def test_logits_of_ten_thousand_do_not_overflow_the_score(impl, case):
    """With logits of 1e4 the scores are finite and right."""
    query, keys = np.clip(case.queries[:, :, 0] / 64, -1, 1), np.clip(case.keys / 64, -1, 1)
    query[..., 0] = 100
    keys[..., 0] += largest_product(impl, keys.shape[-1]) / 100
    agrees(impl, SCORE, query, keys, case.values, momentkv.no_moments(keys, case.values))


@law("MK-10", of=SCORE, case=st.builds(Case, seed=st.integers(0, 99), batch=st.just(2), length=st.just(5)))
def test_batch_items_do_not_see_each_other(impl, case):
    """Item 1 scores the same beside another item 0."""
    query, keys, values, moments = states = situation(impl, case, 3)
    other = (np.concatenate([each[:1] * 0 + 3, each[1:]]) for each in (keys, values))
    got = impl.momentkv.score(query, *other, moments)[1:]
    same(impl, SCORE, *states, got=got, becomes=lambda scores: scores[1:], what="the score of item 1")
