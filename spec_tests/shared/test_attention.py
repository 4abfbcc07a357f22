"""Laws of attention: over a compressed cache, ATT-1 to
ATT-4; by groups of query heads, ATT-5; causal, ATT-6.
"""

from evictionary.reference import attention, cache as reference_cache
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import attention_by_hand, draw_mask, most_some_few, or_a_trace

CASES = seeded_cases(max_length=33)
BY_GROUP, CAUSAL = "attention.by_group", "attention.causal_attention"


def compressed(impl, case, kept):
    """The compressed cache of what the implementation sees: numbers rounded to its dtype."""
    return reference_cache.compress(impl.round(case.keys), impl.round(case.values), kept)


def check_attend(impl, case, seed, pick, what):
    """Raise Violation unless the output (pick 0) or the log-sum-exp (1) is that of loops over query heads
    and kept tokens.
    """
    kept = draw_mask(case.keys.shape[:3], seed)
    kept[..., :1] |= ~kept.any(axis=-1, keepdims=True)  # nothing kept is an edge
    queries, keys, values = impl.rounded((case.queries, case.keys, case.values))
    by_hand = attention_by_hand(queries, keys, values, kept)
    size = (1 + np.abs(queries).max() * np.abs(keys).max() * case.head_dim) * (1 + np.abs(values).max())
    cache = compressed(impl, case, kept)
    agrees(impl, "attention.attend", queries, cache, pick=pick, by_hand=by_hand[pick], size=size, what=what)


@law("ATT-1", of="attention.attend", case=CASES, seed=seeds())
def test_output_is_softmax_attention_over_the_kept_tokens(impl, case, seed):
    """Query head h attends, with scale 1/sqrt(D), over
    the kept tokens of KV head h // G, and over no other.
    """
    check_attend(impl, case, seed, 0, "the output")


@law("ATT-2", of="attention.attend", case=CASES, seed=seeds())
def test_log_sum_exp_is_that_of_the_scaled_logits(impl, case, seed):
    """The second result is log sum_t exp(q . k_t / sqrt(D)), natural logarithm."""
    check_attend(impl, case, seed, 1, "the log-sum-exp")


def heads_without_tokens(impl, case):
    """Output and log-sum-exp of the query heads whose KV head
    keeps nothing, where none keeps any, and beside full heads.
    """
    none = np.zeros(case.keys.shape[:3], dtype=bool)
    alternating = none | (np.arange(case.keys.shape[1]) % 2 == 0)[:, None]
    for kept in (none, alternating):
        empty = ~for_each_reader(kept, case.queries).any(axis=-1)
        yield (each[empty] for each in impl.attention.attend(case.queries, compressed(impl, case, kept)))


@law("ATT-1", of="attention.attend", case=CASES)
def test_a_head_that_keeps_nothing_gives_zero(impl, case):
    """Its output is 0, not NaN, beside full heads too: methods
    whose heads have budgets of their own make such heads.
    """
    for output, _ in heads_without_tokens(impl, case):
        equal(output, np.zeros(output.shape), "the output over no token is not 0")


@law("ATT-2", of="attention.attend", kind="edge", case=CASES)
def test_a_head_that_keeps_nothing_adds_nothing(impl, case):
    """Its log-sum-exp is -inf, so that a merge leaves the other cache."""
    for _, normaliser in heads_without_tokens(impl, case):
        nothing = np.full(normaliser.shape, -np.inf)
        equal(normaliser, nothing, "the log-sum-exp over no token is not -inf")


def merging_errors(impl, queries, caches):
    """What the output of two merged caches may be wrong by: each output is, and an error of a log-sum-exp
    moves weight from one to the other.
    """
    outputs, normalisers = (
        [impl.allowance("attention.attend", queries, cache, pick=pick) for cache in caches] for pick in (0, 1)
    )
    share = np.exp(-np.logaddexp(0, np.diff([each.expected for each in normalisers], axis=0)[0]))
    wrong = np.expm1(min(sum(each.largest for each in normalisers), 50.0))
    moved = np.minimum(share * (1 - share) * wrong, 1)[..., None]
    apart = np.abs(outputs[0].expected - outputs[1].expected)
    most = max(np.abs(cache.values).max() for cache in caches)
    return moved * apart + 3 * max(each.largest for each in outputs) + 4 * EPSILON["float64"] * most


@law("ATT-3", of="attention.attend", case=seeded_cases(min_length=2, max_length=33), seed=seeds())
def test_two_disjoint_caches_merge_exactly(impl, case, seed):
    """Outputs over the kept and over the evicted tokens, weighted by their log-sum-exp, give attention
    over all tokens.
    """
    kept = draw_mask(case.keys.shape[:3], seed)
    kept[..., :1] |= ~kept.any(axis=-1, keepdims=True)
    kept[..., -1:] &= ~kept.all(axis=-1, keepdims=True)
    caches = [compressed(impl, case, mask) for mask in (kept, ~kept)]
    parts = [impl.attention.attend(case.queries, cache) for cache in caches]
    total = np.logaddexp(*(normaliser for _, normaliser in parts))
    merged = sum(np.exp(normaliser - total)[..., None] * output for output, normaliser in parts)
    whole = attention.attend(impl.round(case.queries), compressed(impl, case, np.ones_like(kept)))[0]
    near(merged, whole, merging_errors(impl, case.queries, caches), "the merged output")


@law("ATT-4", of="attention.attend", case=CASES)
def test_large_logits_stay_finite(impl, case):
    """Logits of 1e4 neither overflow nor give NaN: the output stays within the range of the values."""
    direction = case.queries / np.abs(case.queries).max()
    keys = case.keys / max(np.abs(case.keys).max(), 1e-300)
    products = direction @ np.swapaxes(for_each_reader(keys, direction), -1, -2)
    size = np.sqrt(largest_product(impl, keys.shape[-1]) / max(np.abs(products).max(), 1e-2))
    every = np.ones(case.keys.shape[:3], dtype=bool)
    cache = reference_cache.compress(impl.round(keys * size), impl.round(case.values), every)
    output, _ = impl.attention.attend(impl.round(direction * size), cache)
    require_numbers(output, (*case.queries.shape[:3], case.values.shape[-1]), "the output")
    largest, bound = np.abs(output).max(), np.abs(case.values).max()
    require(
        largest <= bound * 1.01,
        f"an output of {largest:.3g} leaves the range of the values, {bound:.3g}",
        None,
        output,
    )


@law("ATT-5", of=BY_GROUP, case=seeded_cases(min_length=3))
def test_each_query_head_stands_beside_its_kv_head(impl, case):
    """Query head h stands at [h // G, h % G], its numbers
    unchanged; the keys get an axis of one, which a group shares.
    """
    queries, keys = impl.rounded((case.queries, case.keys))
    grouped, shared = impl.attention.by_group(queries, keys)
    expected = np.stack([queries[:, head :: case.group] for head in range(case.group)], axis=2)
    equal(grouped, expected, "query head h is not at [h // G, h % G]")
    equal(shared, keys[:, :, None], "the keys are not those of the KV heads in their order")


def last_queries(case, seed):
    """Queries of the last tokens, of one, of several or of all, [B, H_kv, M, D]."""
    generator = np.random.default_rng(seed)
    shape = (*case.keys.shape[:2], generator.integers(1, case.keys.shape[2] + 1), case.keys.shape[3])
    return generator.normal(size=shape)


@law("ATT-6", of=CAUSAL, case=cases(max_length=33), seed=seeds())
def test_causal_attention_is_the_softmax_over_the_tokens_so_far(impl, case, seed):
    """Each query attends with scale 1/sqrt(D) to the tokens up to its own; also computed query by query
    over what it can see.
    """
    queries = last_queries(case, seed)
    agrees(impl, CAUSAL, queries, case.keys, by_hand=causal_weights, size=1 + np.abs(case.keys).max())


@law("ATT-6", of=CAUSAL, case=seeded_cases(max_length=33), seed=seeds(), size=st.sampled_from([1.0, 1e4]))
def test_later_tokens_get_nothing(impl, case, seed, size):
    """The weights beyond a query's own token are 0, not merely small, and the others sum to 1, however
    large the later keys are.
    """
    queries = last_queries(case, seed)
    keys = size * case.keys / np.abs(case.keys).max(initial=1e-300)
    got = impl.attention.causal_attention(queries, keys)
    totals(got, 1, impl.allowance(CAUSAL, queries, keys), "the weights of a query")
    later = np.arange(case.length) > np.arange(case.length - queries.shape[2], case.length)[:, None]
    equal(got[..., later], 0, "a query gives weight to a later token")


GROUPS = (4, 16, 1)


def long_attention(impl, case):
    """A cache whose heads keep most, some and few of a long prompt's tokens; output and log-sum-exp part
    by part, and slacks.
    """
    kept = most_some_few(case)
    cache, queries = compressed(impl, case, kept), impl.round(case.queries)
    parts = []
    for head, places in enumerate(kept[0]):
        readers = queries[0, head * case.group : (head + 1) * case.group, 0]
        keys, values = (impl.round(rows[0, head, places]) for rows in (case.keys, case.values))
        output, normaliser = attention_in_parts(readers, keys, values)
        of_normaliser = (weights_in_parts(readers, keys) * logit_errors(impl, readers, keys)).sum(axis=-1)
        of_normaliser += rounding(impl, case.length) * (1 + np.abs(normaliser))
        parts.append((output, output_slack(impl, readers, keys, values), normaliser, of_normaliser))
    return queries, cache, *(np.concatenate(each)[None, :, None] for each in zip(*parts, strict=True))


@law("ATT-1", of="attention.attend", examples=2, case=long_cases(groups=GROUPS, lengths=SPLIT_LENGTHS))
def test_attention_over_a_long_cache_adds_up_its_parts(impl, case):
    """Over thousands of kept tokens the output is that
    of parts, each weighted by its share of the softmax.
    """
    queries, cache, expected, slack, _, _ = long_attention(impl, case)
    near(impl.attention.attend(queries, cache)[0], expected, slack, "the output over a long cache")


@law("ATT-2", of="attention.attend", examples=2, case=long_cases(groups=GROUPS, lengths=SPLIT_LENGTHS))
def test_log_sum_exp_of_a_long_cache_adds_up_its_parts(impl, case):
    """Over thousands of kept tokens the log-sum-exp is that of parts, added beside the largest logit."""
    queries, cache, _, _, expected, slack = long_attention(impl, case)
    near(impl.attention.attend(queries, cache)[1], expected, slack, "the log-sum-exp over a long cache")


@law(
    "ATT-6",
    of=CAUSAL,
    examples=2,
    case=long_cases(lengths=(8191, 4097, 4095)),
    last=st.sampled_from([33, 1, 16]),
)
def test_the_last_queries_see_all_of_a_long_prompt(impl, case, last):
    """Each of the last queries of a long prompt attends to
    every token up to its own, as computed query by query.
    """
    shape = (1, case.num_kv_heads, last, case.head_dim)
    queries, keys = impl.round(np.random.default_rng(case.seed).normal(size=shape)), impl.round(case.keys)
    expected, slack = attended(impl, queries, keys)
    near(impl.attention.causal_attention(queries, keys), expected, slack, "the attention of the last queries")


@law("ATT-1", of="attention.attend", examples=3, case=long_cases(groups=GROUPS, lengths=SPLIT_LENGTHS))
def test_no_split_of_a_long_cache_is_lost(impl, case):
    """Each query head shares its weight among a few neighbouring tokens; the heads find them from the
    first token to the last.
    """
    readers, tokens = neighbours(case)
    queries, keys = looking(case, readers, tokens)
    # Neighbours have channels of their own, so that the output has the weight of each.
    values = np.full_like(case.values, -64)
    values[0, :, tokens] = np.eye(case.value_dim)[np.arange(len(tokens)) % case.value_dim, None]
    by_head = queries[0].reshape(case.num_kv_heads, case.group, -1)
    outputs = [attention_in_parts(*states)[0] for states in zip(by_head, keys[0], values[0], strict=True)]
    expected = np.concatenate(outputs)[None, :, None]
    cache = reference_cache.compress(keys, values, np.ones(keys.shape[:3], dtype=bool))
    got = impl.attention.attend(queries[:, :, None], cache)[0]
    what, size = "the output over a long cache", expected.max()
    rounds_to(impl, got, expected, what, terms=case.length, size=size)


@law(
    "ATT-6",
    of=CAUSAL,
    examples=3,
    case=long_cases(lengths=(8191, 4097, 12_289)),
    last=st.sampled_from([33, 1, 16]),
)
def test_no_block_of_the_causal_mask_is_lost(impl, case, last):
    """Each of the last queries of a long prompt shares its weight among every 17th token up to its own:
    some in all blocks.
    """
    keys, queries = np.full_like(case.keys, -64), np.zeros((1, case.num_kv_heads, last, case.head_dim))
    # Exact products, and equal ones where a query looks: rounded logits hide no block. All are negative, so
    # that padding shows.
    keys[:, :, ::17, 0], queries[..., 0] = -2, math.isqrt(case.head_dim)
    expected = causal_weights(queries, keys)
    got, what = impl.attention.causal_attention(queries, keys), "the attention of the last queries"
    rounds_to(impl, got, expected, what, terms=case.length, size=or_a_trace(expected))
