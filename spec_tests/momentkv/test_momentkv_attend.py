"""Laws of MomentKV: the corrected attention (MK-2, MK-9
to MK-12, MK-37) and its zeroth-order variant (MK-T4).
"""

from evictionary.reference import momentkv, momentkv_theory
from evictionary.reference.momentkv import Moments
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.momentkv.helpers import (
    ATTEND,
    PARTITION,
    attend_in_loops,
    attends,
    heads_apart,
    held,
    moments_of,
    scale_values,
    short_cases,
    situation,
    some,
    turn,
    whole,
)
from evictionary.spec_tests.shared.helpers import attention_by_hand


def kept_situation(impl, case, seed):
    """The arguments of attend: those of score, and some of the retained tokens kept."""
    *states, moments = situation(impl, case, seed)
    return *states, some(case, seed + 1), moments


@law("MK-12", of=ATTEND, case=cases(), seed=seeds())
def test_output_mixes_the_retained_and_the_estimated_part(impl, case, seed):
    """what_R f_R + (1 - what_R) fhat_E; heads that keep nothing, or have evicted nothing, among them."""
    attends(impl, *kept_situation(impl, case, seed))


@law("MK-12", of=ATTEND, case=cases(max_length=17), seed=seeds())
def test_output_equals_the_loops(impl, case, seed):
    """One numerator and one denominator summed in plain loops, the moments entering as one more token,
    give the same output.
    """
    attends(impl, *kept_situation(impl, case, seed), also=attend_in_loops)


@law("MK-2", of=ATTEND, case=cases(), seed=seeds())
def test_without_moments_it_is_plain_attention_over_the_kept(impl, case, seed):
    """With nothing evicted the output is f_R, attention over the kept tokens alone."""
    states = case.queries[:, :, 0], case.keys, case.values
    attends(impl, *states, some(case, seed), momentkv.no_moments(*states[1:]), also=attend_in_loops)


@law("MK-2", of=ATTEND, kind="edge", case=cases())
def test_a_head_without_any_token_gives_zero(impl, case):
    """A head that keeps nothing and has evicted nothing has the output 0, not NaN."""
    query, keys, values = case.queries[:, :, 0], case.keys, case.values
    nothing = np.zeros(keys.shape[:3], dtype=bool)
    got = impl.momentkv.attend(query, keys, values, nothing, momentkv.no_moments(keys, values))
    equal(got, 0, "the output of a head that keeps nothing and has evicted nothing is not 0")


@law("MK-12", of=ATTEND, case=cases(), seed=seeds())
def test_what_is_not_kept_is_not_read(impl, case, seed):
    """The output does not change where the keys and values that are not kept do."""
    query, keys, values, kept, moments = states = kept_situation(impl, case, seed)
    others = (np.where(kept[..., None], each, 2.5) for each in (keys, values))
    attends(impl, *states, by=same, got=impl.momentkv.attend(query, *others, kept, moments))


def loses_nothing(impl, query, keys, values, kept):
    """Raise Violation unless the output is that of the full cache."""
    full = attention_by_hand(query[:, :, None], keys, values, np.ones_like(kept))[0][:, :, 0]
    attends(impl, query, keys, values, kept, moments_of(keys, values, ~kept), also=full)


@law("MK-12", of=ATTEND, case=short_cases, seed=seeds())
def test_equal_evicted_keys_lose_nothing(impl, case, seed):
    """Where the evicted keys of a head are equal, the output
    is that of the full cache: one token is a special case.
    """
    query, keys, values, kept = whole(case, seed)
    loses_nothing(impl, query, np.where(kept[..., None], keys, keys[:, :, :1]), values, kept)


@law("MK-9", of=ATTEND, case=short_cases, seed=seeds())
def test_a_query_orthogonal_to_the_spread_loses_nothing(impl, case, seed):
    """Where the evicted keys differ only in a channel that the query does not have, the output is that of
    the full cache.
    """
    query, keys, values, kept = whole(case, seed)
    query[..., 0] = 0
    alike = ~kept[..., None] & (np.arange(keys.shape[-1]) > 0)
    loses_nothing(impl, query, np.where(alike, keys[:, :, :1], keys), values, kept)


@law("MK-C2", of=ATTEND, kind="edge", power=st.integers(0, 24))
def test_a_small_covariance_moves_the_output(impl, power):
    """Evicted k = (2,0,0,0), v = 2^-p and their mirror image, nothing kept: at q = (1,0,0,0) the output is
    2^-p, however small.
    """
    keys, values = np.array([[[[2.0, 0, 0, 0], [-2, 0, 0, 0]]]]), np.array([[[[1.0], [-1]]]]) * 2.0**-power
    query, nothing = np.array([[[1.0, 0, 0, 0]]]), np.zeros((1, 1, 2), dtype=bool)
    expected = np.array([[[2.0**-power]]])
    attends(impl, query, keys, values, nothing, moments_of(keys, values), expected=expected)


def weights_by_hand(query, keys, kept):
    """The weight of the kept tokens beside the estimate of the others, and beside the others themselves:
    two of [B, H_q, 1].
    """
    keys, kept = for_each_reader(keys, query), for_each_reader(kept, query)
    logits = (keys @ query[..., None])[..., 0] / math.sqrt(keys.shape[-1])
    logits -= logits.max(axis=-1, keepdims=True)
    of_kept, of_others = ((np.exp(logits) * side).sum(axis=-1) for side in (kept, ~kept))
    count = (~kept).sum(axis=-1)
    estimate = count * np.exp((logits * ~kept).sum(axis=-1) / np.maximum(1, count))
    return [(of_kept / (of_kept + others))[..., None] for others in (estimate, of_others)]


@law("MK-11", of=ATTEND, case=short_cases, seed=seeds())
def test_the_retained_weight_is_never_too_small(impl, case, seed):
    """With value 1 for kept and 0 for evicted tokens the output is Z_R / (Z_R + n exp(mean logit)): by
    Jensen w_R, or more.
    """
    query, keys, _, kept = whole(case, seed)
    values = kept[..., None] * 1.0
    of_estimate, true_weight = weights_by_hand(query, keys, kept)
    got = attends(impl, query, keys, values, kept, moments_of(keys, values, ~kept), also=of_estimate)
    lies(impl, got, between=(true_weight, 1), what="the weight of the retained tokens")


@law("MK-12", of=ATTEND, case=short_cases, seed=seeds(), shift=st.integers(-2, 2))
def test_a_constant_added_to_all_logits_changes_nothing(impl, case, seed, shift):
    """All keys moved by one vector, kept and evicted, and the moments with them: the output stays."""
    query, keys, values, kept = whole(case, seed)
    move = np.zeros(keys.shape[-1])
    move[:3] = shift * np.array([1.0, -1, 2])[: keys.shape[-1]]
    still = impl.momentkv.attend(query, keys, values, kept, moments_of(keys, values, ~kept))
    moved = keys + move
    attends(impl, query, moved, values, kept, moments_of(moved, values, ~kept), by=same, got=still)


@law("MK-12", of=ATTEND, case=short_cases, seed=seeds(), shift=st.integers(-2, 2))
def test_moving_all_values_moves_the_output(impl, case, seed, shift):
    """All values moved by one vector, kept and evicted: the output moves by the same vector, for the
    weights sum to 1.
    """
    query, keys, values, kept = whole(case, seed)
    kept[..., 0] = True
    still = impl.momentkv.attend(query, keys, values, kept, moments_of(keys, values, ~kept))
    moved = values + shift
    attends(impl, query, keys, moved, kept, moments_of(keys, moved, ~kept), by=same, got=still + shift)


@law("MK-37", of=ATTEND, case=cases(), seed=seeds(), side=st.sampled_from(["kept", "evicted", "both"]))
def test_logits_of_ten_thousand_do_not_overflow(impl, case, seed, side):
    """With logits of 1e4 on the kept side, on the evicted
    side, or on both, the output is finite and right.
    """
    lift = largest_product(impl, case.keys.shape[-1]) / 100
    states = case.queries[:, :, 0] / 64, case.keys / 64, case.next_keys / 64
    query, keys, evicted_keys = (np.clip(each, -1, 1) for each in states)
    query[..., 0] = 100
    keys[..., 0] += lift * (side != "evicted")
    evicted_keys[..., 0] += lift * (side != "kept")
    evicted, kept = some(case, seed, evicted_keys.shape[:3]), some(case, seed + 1)
    moments = held(impl, moments_of(evicted_keys, case.next_values, evicted))
    # Except in float64 a rounded logit of 1e4 says more of the dtype than of the formula.
    by_loops = attend_in_loops if impl.dtype == "float64" else None
    attends(impl, query, keys, case.values, kept, moments, also=by_loops)


@law("MK-12", of=ATTEND, case=cases(), seed=seeds())
def test_turning_keys_or_values_turns_the_output_alike(impl, case, seed):
    """One orthogonal map of keys, query and moments
    changes nothing; another of the values maps the output.
    """
    query, keys, values, kept, moments = states = kept_situation(impl, case, seed)
    *turned, turned_moments, of_values = turn(seed, query, keys, values, moments)
    got = impl.momentkv.attend(*turned, kept, turned_moments)
    attends(impl, *states, by=same, got=got, becomes=lambda output: output @ of_values)


@law("MK-12", of=ATTEND, case=cases(), seed=seeds(), power=st.sampled_from([-2, -1, 1, 2]))
def test_the_output_is_of_first_degree_in_the_values(impl, case, seed, power):
    """Doubling retained and evicted values doubles the output (powers of two, so nothing is rounded)."""
    query, keys, values, kept, moments = kept_situation(impl, case, seed)
    values, moments, scaled_values, scaled_moments = scale_values(impl, values, moments, 2.0**power)
    got = impl.momentkv.attend(query, keys, values, kept, moments) * 2.0**power
    attends(impl, query, keys, scaled_values, kept, scaled_moments, by=same, got=got)


@law("MK-12", of=ATTEND, case=seeded_cases(groups=(2, 3)), seed=seeds())
def test_each_query_head_reads_its_own_kv_head(impl, case, seed):
    """Query head h reads KV head h // G and its moments: every KV head alone, with its query heads, gives
    the same output.
    """
    states = kept_situation(impl, case, seed)
    attends(impl, *states, by=same, got=heads_apart(impl, ATTEND, *states))


@law(
    "MK-37",
    of="momentkv.log_mixing_weights",
    pair=st.tuples(st.integers(-40, 40), st.integers(-40, 40)),
    lift=st.sampled_from([0, 10_000]),
)
def test_log_weights_are_the_logarithms_of_the_weights(impl, pair, lift):
    """exp of the log weights is Z_R / (Z_R + Zhat_E) and its complement, at any height of the logits; an
    empty set weighs 0.
    """
    first, second = np.array([pair[0] / 4.0]), np.array([pair[1] / 4.0])
    logs = first + lift, second + lift
    weights = np.exp(impl.momentkv.log_mixing_weights(*logs))
    if all(map(np.array_equal, impl.rounded(logs), logs)):
        expected = momentkv_theory.mixing_weight(np.exp(first), np.exp(second))
        allowed = impl.allowance("momentkv.log_mixing_weights", *logs, pick=0)
        near(
            weights,
            np.array([expected, 1 - expected]),
            allowed,
            "the weights of the retained and of the evicted tokens",
        )
    nothing = np.array([-np.inf])
    for sides, weight in (((first, nothing), 1.0), ((nothing, first), 0.0)):
        equal(np.exp(impl.momentkv.log_mixing_weights(*sides)[0]), weight, "an empty set has a weight")


@law("MK-12", of="momentkv_theory.mixing_weight", first=st.integers(1, 64), second=st.integers(0, 64))
def test_the_mixing_weight_is_a_share(impl, first, second):
    """Z_R / (Z_R + Zhat_E)."""
    agrees(impl, "momentkv_theory.mixing_weight", np.array([first / 4]), np.array([second / 4]))


@law("MK-9", of="momentkv.approximate_evicted", case=cases(), seed=seeds())
def test_the_approximation_is_affine_in_the_query(impl, case, seed):
    """vbar + Stilde q / (n sqrt(d)): at q = 0 it is vbar."""
    query, _, _, moments = situation(impl, case, seed)
    query = query[:, :: query.shape[1] // case.keys.shape[1]]
    agrees(impl, "momentkv.approximate_evicted", query, moments)
    agrees(impl, "momentkv.approximate_evicted", np.zeros_like(query), moments)


@law("MK-11", of=PARTITION, case=cases(), seed=seeds())
def test_the_evicted_partition_is_the_count_at_the_mean_key(impl, case, seed):
    """log n_e + q . kbar / sqrt(d), also summed up key by key, and -inf where nothing was evicted."""
    query, _, _, moments = situation(impl, case, seed)
    query = impl.round(query[:, :: query.shape[1] // case.keys.shape[1]])
    evicted = some(case, seed, case.next_keys.shape[:3])
    by_hand, size = np.full(query.shape[:2], -np.inf), np.ones(query.shape[:2])
    for place in map(tuple, np.argwhere(evicted.any(axis=-1))):
        sums, count = impl.round(case.next_keys[place][evicted[place]].sum(axis=0)), int(evicted[place].sum())
        terms = [x * y / math.sqrt(len(sums)) for x, y in zip(query[place], sums, strict=True)]
        by_hand[place], size[place] = math.log(count) + math.fsum(terms) / count, 1 + sum(map(abs, terms))
    agrees(impl, PARTITION, query, moments, by_hand=by_hand, size=size)


@law("MK-2", of="momentkv.retained_attention", case=cases(), seed=seeds())
def test_retained_attention_is_renormalised(impl, case, seed):
    """f_R and log Z_R over the kept tokens alone; 0 and -inf where none is kept."""
    logits = np.swapaxes(np.clip(case.next_keys, -16, 16), -1, -2)  # [..., M, T]: a row for each channel
    agrees(
        impl,
        "momentkv.retained_attention",
        logits,
        case.next_values,
        some(case, seed, case.next_keys.shape[:3])[..., None, :],
    )


@law("MK-10", of=("momentkv.residual", "momentkv.residual_norm"), case=cases(), seed=seeds())
def test_the_residual_is_what_the_model_leaves(impl, case, seed):
    """v_j minus the approximation with k_j in the place of the query."""
    _, keys, values, moments = situation(impl, case, seed)
    agrees(impl, "momentkv.residual", keys, values, moments)
    agrees(impl, "momentkv.residual_norm", keys, values, moments)
    expected = values - momentkv.approximate_evicted(keys, Moments(*(field[:, :, None] for field in moments)))
    loops(momentkv.residual(keys, values, moments), expected, size=np.abs(expected).max())


def spread_of_means(moments):
    """The moments whose keys and values do not vary together: S = s_v s_k^T / n."""
    product = moments.value_sum[..., :, None] * moments.key_sum[..., None, :]
    return moments._replace(value_key_sum=product / np.maximum(moments.count, 1)[..., None, None])


@law("MK-T4", of="momentkv_theory.attend_zeroth_order", case=cases(), seed=seeds())
def test_the_zeroth_order_ignores_the_covariance(impl, case, seed):
    """what_R f_R + (1 - what_R) vbar: value_key_sum may be anything; in plain loops the evicted tokens are
    n_e times their mean.
    """
    query, keys, values, kept, moments = impl.rounded(kept_situation(impl, case, seed))
    path = "momentkv_theory.attend_zeroth_order"
    without_spread = attend_in_loops(query, keys, values, kept, spread_of_means(moments))
    got = agrees(impl, path, query, keys, values, kept, moments, also=without_spread)
    other = moments._replace(value_key_sum=np.ones_like(moments.value_key_sum))
    equal(impl.call(path, query, keys, values, kept, other), got, "value_key_sum plays a part")


@law("MK-2", of="momentkv.retained_attention", gap=st.sampled_from([0.0, 100.0, 1000.0]))
def test_a_larger_logit_that_is_not_kept_does_not_matter(impl, gap):
    """Two kept tokens of equal logits share the weight, however far above them lies the logit of a token
    that is not kept.
    """
    logits, values = np.array([[0.0, 0.0, gap]]), np.array([[1.0], [3.0], [7.0]])
    got = impl.momentkv.retained_attention(logits, values, np.array([[True, True, False]]))
    for entry, expected, what in zip(
        got, ([[2.0]], [np.log(2)]), ("the output", "the logarithm of the sum"), strict=True
    ):
        near(entry, np.array(expected), 0.01, what)
