"""Laws of H2O: H2-1."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import latest, two_readers

SCORE, SELECT = "h2o.score", "h2o.select"


@law("H2-1", of=SCORE, case=cases(max_length=33), seed=seeds())
def test_score_is_the_attention_received_from_all_queries(impl, case, seed):
    """Causal attention summed over the queries and averaged over the group; also computed query by query
    over what it can see.
    """
    queries, keys = prompt_queries(case, seed), impl.round(case.keys)
    received = over_group(causal_weights(queries, for_each_reader(keys, queries)).sum(axis=2), keys.shape[1])
    agrees(impl, SCORE, queries, keys, by_hand=received, size=keys.shape[2] * (1 + np.abs(keys).max()))


@law("H2-1", of=SCORE, case=cases(max_length=33), seed=seeds())
def test_every_query_hands_out_one(impl, case, seed):
    """The scores of a head sum to the number of queries; the last token receives at most 1, from itself."""
    queries = prompt_queries(case, seed)
    got = impl.h2o.score(queries, case.keys)
    totals(got, case.keys.shape[2], impl.allowance(SCORE, queries, case.keys), "the scores of a head")
    lies(impl, got[..., -1], (0, 1), "what the last token received")


@law("H2-1", of=SCORE, case=seeded_cases(min_length=2, max_length=33), seed=seeds())
def test_no_query_sees_a_later_token(impl, case, seed):
    """The scores of the first tokens from the first queries do not depend on the keys that come after."""
    half, queries = case.length // 2, prompt_queries(case, seed)
    parts = impl.h2o.score(queries[:, :, half:], case.keys)
    parts[:, :, :half] += impl.h2o.score(queries[:, :, :half], case.keys[:, :, :half])
    what = "the sum of the scores of the first and the last queries"
    same(impl, SCORE, queries, case.keys, got=parts, more=within(impl, times=2), what=what)


@law("H2-1", of=SCORE)
def test_equal_keys_score_by_how_long_they_were_seen(impl):
    """Zero keys: token t receives 1/(t+1) from each query
    from t on; of 4 tokens 25/12, 13/12, 7/12 and 1/4.
    """
    got = impl.h2o.score(np.ones((1, 1, 4, 2)), np.zeros((1, 1, 4, 2)))
    near(got, np.array([[[25, 13, 7, 3]]]) / 12, 0.02, "the score, the sum of 1/(m+1),")


@law("H2-1", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Queries of heads 0 and 1 see KV head 0, those of heads 2 and 3 see KV head 1."""
    got, expected = impl.h2o.score(*two_readers(2, 2, queries=2)), np.array([[[1.5, 0.5], [2, 0]]])
    near(got, expected, 1e-3, "the score where query head h reads KV head h // G")


@law("H2-1", of=SCORE, length=st.sampled_from([31, 32, 33, 63, 64, 65, 129]), last=st.integers(1, 129))
def test_fewer_queries_are_those_of_the_last_tokens(impl, length, last):
    """Of M queries the m-th sees the tokens up to T - M + m, so that with zero keys it gives each 1/(T - M
    + m + 1).
    """
    last = min(last, length)
    got = impl.h2o.score(np.ones((1, 1, last, 2)), np.zeros((1, 1, length, 2)))
    expected = [
        sum(1 / (place + 1) for place in range(max(token, length - last), length)) for token in range(length)
    ]
    near(got, np.array([[expected]]), within(impl), "the score by the last queries")


@law("H2-1", of=SELECT, case=cases(max_length=33), seed=seeds(), share=shares())
def test_half_of_the_budget_is_recent(impl, case, seed, share):
    """Of an even budget the last half stays, and the other
    half goes to the highest scores among the other tokens.
    """
    queries, length = prompt_queries(case, seed), case.keys.shape[2]
    budget = 2 * max(1, int(share * (length + 2) / 2))
    allowed = impl.allowance(SCORE, queries, case.keys)
    kept = impl.h2o.select(queries, case.keys, budget=budget)
    recent = latest(case.keys.shape[:3], budget // 2)
    selects(kept, allowed.expected, min(budget, length), slack=allowed, protected=recent)


@law("H2-1", of=SELECT, kind="edge", budget=st.integers(1, 9))
def test_the_recent_half_rounds_up(impl, budget):
    """Of 9 tokens with equal keys, where earlier ones score more, a budget keeps its floor half first and
    its ceil half last.
    """
    kept = impl.h2o.select(np.ones((1, 1, 9, 2)), np.zeros((1, 1, 9, 2)), budget=budget)
    place = np.arange(9)
    expected = (place < budget // 2) | (place >= 9 - (budget + 1) // 2)
    equal(kept, expected[None, None], "other tokens are kept")


@law("H2-1", of=SELECT)
def test_each_head_chooses_for_itself(impl):
    """Of four tokens the first draws the attention of head 0, the second that of head 1: each head keeps
    its own, and the last.
    """
    keys = np.zeros((1, 2, 4, 2))
    keys[0, 0, 0] = keys[0, 1, 1] = 5
    kept = impl.h2o.select(np.ones((1, 2, 4, 2)), keys, budget=2)
    expected = np.array([[[True, False, False, True], [False, True, False, True]]])
    equal(kept, expected, "a head keeps what another one chose")


@law("H2-1", of=SELECT)
def test_a_recent_heavy_hitter_takes_no_place_of_another(impl):
    """Of six tokens that receive 2, 0, 1, 3, 0 and 0 a budget of 5 keeps the last three, and the two others
    that receive something.
    """
    keys, queries = np.zeros((2, 1, 1, 6, width(impl)))
    keys[0, 0, [0, 2, 3], [0, 0, 1]] = 32, -32, 32
    queries[0, 0, [1, 2, 3, 4, 5], [0, 0, 1, 1, 1]] = 32, -32, 32, 32, 32
    kept = impl.h2o.select(queries, keys, budget=5)
    equal(kept, [[[True, False, True, True, True, True]]], "a recent token takes the place of another")


def long_prompt(impl, case):
    """Queries of every token of a prompt of a thousand, the keys, the attention received query by query,
    and its slack.
    """
    queries, keys = impl.round(prompt_queries(case, case.seed)), impl.round(case.keys)
    return queries, keys, *map(received(case), attended(impl, queries, keys))


def received(case):
    """What the keys of each KV head receive of weights [B, H_q, M, T], summed over the queries."""
    return lambda weights: over_group(weights.sum(axis=2), case.num_kv_heads)


@law("H2-1", of=SCORE, examples=2, case=long_cases(groups=(2, 1), lengths=(1025, 767), head_dims=(64, 80)))
def test_a_thousand_queries_add_up(impl, case):
    """The attention received from each of a thousand queries is summed, block by block, over the tokens
    that it sees.
    """
    queries, keys, expected, slack = long_prompt(impl, case)
    near(impl.h2o.score(queries, keys), expected, slack, "the score of a long prompt")


def of_rounded_logits(impl, apart):
    """By what share exp of a logit so far from the largest is wrong, where logits are rounded."""
    return np.expm1(apart * final_rounding(impl) / 2)


@law("H2-1", of=SCORE, examples=2, case=long_cases(lengths=(2305, 2561), head_dims=(64, 80)))
def test_much_and_little_attention_adds_up(impl, case):
    """All queries give 1 to the first token, where a sum in half precision stops growing, and to others
    less than float16 holds.
    """
    keys, queries = np.full_like(case.keys, -16), np.zeros_like(case.keys)
    keys[:, :, 0, 0], queries[..., 0] = 8, math.isqrt(case.head_dim)
    apart = 24 * math.isqrt(case.head_dim) / math.sqrt(case.head_dim)
    first, seen = math.exp(apart), np.arange(case.length)
    little = np.cumsum((1 / (first + seen))[::-1])[::-1]  # of the queries from the token's own to the last
    expected = np.where(seen == 0, first * little, little)
    # Equal terms are rounded alike, one after the other: the error of their sum grows with their number, not
    # with its root.
    rounds_to(
        impl,
        impl.h2o.score(queries, keys),
        np.broadcast_to(expected, keys.shape[:3]),
        "the score of a long prompt",
        terms=case.length**2,
        size=expected,
        beside=np.where(seen == 0, 0, of_rounded_logits(impl, apart) * expected),
    )


@law("H2-1", of=SELECT, examples=2, case=long_cases(groups=(2, 1), lengths=(1025, 767), head_dims=(64, 80)))
def test_half_of_a_large_budget_is_recent(impl, case):
    """Of a thousand tokens the last 257 stay, and the 257 heavy hitters among the others."""
    queries, keys, expected, slack = long_prompt(impl, case)
    recent = np.broadcast_to(np.arange(case.length) >= case.length - 257, expected.shape)
    kept = impl.h2o.select(queries, keys, budget=514)
    selects(kept, expected, min(514, case.length), slack=slack, protected=recent)


@law("H2-1", of=SCORE, examples=2, case=paper_cases(groups=(2, 1)))
def test_the_last_queries_of_a_prompt_of_128k_add_up(impl, case):
    """The last 33 of 128K tokens hand out their attention over all that they see."""
    shape = (1, case.group * case.num_kv_heads, 33, case.head_dim)
    queries = impl.round(np.round(4 * np.random.default_rng(case.seed).normal(size=shape)) / 64)
    keys = impl.round(case.keys)
    expected, slack = map(received(case), attended(impl, queries, keys))
    near(impl.h2o.score(queries, keys), expected, slack, "the score of a prompt of 128K")
