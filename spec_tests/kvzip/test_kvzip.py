"""Laws of KVzip: KZ-1 to KZ-3."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import a_mask, quarters

ATTENTION, SCORE, TOP_R = "kvzip.replay_attention", "kvzip.score", "kvzip.top_r"
counts = st.sampled_from([1, 2, 5, 17])
REPLAYS = ((300, 3, 2), (2048, 1, 1))  # queries, batch items, query heads of a group


def replay(case, seed, count):
    """Queries [B, H_q, M, D] and keys [B, H_kv, M, D] of the replay, in quarters: the same in every dtype."""
    batch, heads, _, width = case.keys.shape
    readers = case.queries.shape[1]
    return np.split(quarters(seed, batch, readers + heads, count, width), [readers], axis=1)


def by_hand(keys, queries, replay_keys):
    """The attention of each query of the replay on the text, [B, H_q, M, T], query by query."""
    whole = np.concatenate([keys, replay_keys], axis=2)
    return causal_weights(queries, for_each_reader(whole, queries))[..., : keys.shape[2]]


def largest(weights, keys):
    """Of weights [B, H_q, M, T] the largest of the queries
    and the heads that read a KV head, [B, H_kv, T].
    """
    return weights.max(axis=2).reshape(*keys.shape[:2], -1, keys.shape[2]).max(axis=2)


@law("KZ-1", of=ATTENTION, case=cases(max_length=33), seed=seeds(), count=counts)
def test_the_replay_sees_the_text_and_itself_up_to_each_token(impl, case, seed, count):
    """Softmax over the tokens of the text and those of the replay so far; also computed query by query."""
    (queries, replay_keys), keys = replay(case, seed, count), impl.round(case.keys)
    queries = queries[:, :: case.queries.shape[1] // case.keys.shape[1]]
    agrees(impl, ATTENTION, keys, queries, replay_keys, by_hand=by_hand, size=1 + np.abs(keys).max())


@law("KZ-2", of=SCORE, case=cases(max_length=33), seed=seeds(), count=counts)
def test_the_score_is_the_largest_attention_of_any_query_of_the_replay(impl, case, seed, count):
    """The maximum over the queries of the replay and the
    query heads of the group; also computed query by query.
    """
    states, keys = replay(case, seed, count), impl.round(case.keys)
    agrees(
        impl, SCORE, keys, *states, by_hand=largest(by_hand(keys, *states), keys), size=1 + np.abs(keys).max()
    )


@law("KZ-2", of=SCORE, case=seeded_cases(max_length=33), seed=seeds(), count=st.sampled_from([2, 5]))
def test_a_longer_replay_never_lowers_a_score(impl, case, seed, count):
    """The replay's first tokens alone give no token more:
    what comes later cannot be seen, and a maximum only grows.
    """
    queries, replay_keys = replay(case, seed, count)
    part = impl.kvzip.score(case.keys, queries[:, :, :-1], replay_keys[:, :, :-1])
    whole = impl.kvzip.score(case.keys, queries, replay_keys)
    lies(impl, part, (0, whole), "the score by a shorter replay", times=2, roundings=0)


@law("KZ-2", of=SCORE, case=seeded_cases(max_length=33), seed=seeds())
def test_the_order_of_the_text_does_not_count(impl, case, seed):
    """Given the states of the replay the score is pure: it moves with the tokens of the text."""
    move_with_tokens(impl, SCORE, seed, (case.keys,), *replay(case, seed, 3))


@law("KZ-2", of=SCORE)
def test_what_the_replay_attends_to_itself_is_missing(impl):
    """Zero keys, two tokens and a replay of two: the first query gives 1/3 to each of three, the second
    1/4: the score is 1/3.
    """
    states = np.ones((1, 1, 2, 2)), np.zeros((1, 1, 2, 2))
    agrees(
        impl,
        SCORE,
        np.zeros((1, 1, 2, 2)),
        *states,
        expected=np.full((1, 1, 2), 1 / 3),
        more=1e-12,
        what="the score",
    )


@law("KZ-2", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Queries of heads 0 and 1 see KV head 0, those of heads
    2 and 3 see KV head 1; one head that looks is enough.
    """
    keys, queries = np.zeros((1, 2, 2, width(impl))), np.zeros((1, 4, 1, width(impl)))
    keys[0, :, 0, 0] = 16
    queries[0, 3, :, 0] = 16
    got = impl.kvzip.score(keys, queries, np.zeros((1, 2, 1, width(impl))))
    near(
        got,
        np.array([[[1 / 3, 1 / 3], [1, 1 / 3]]]),
        2e-3,
        "the score where query head h reads KV head h // G",
    )


def check_shared(impl, scores, budget):
    """Raise Violation unless all layers and heads of scores [N, B, H, T] share their budgets."""
    kept = a_mask(impl.kvzip.top_r(scores, budget), scores.shape)
    kept, of_item = (np.swapaxes(each, 0, 1).reshape(scores.shape[1], -1) for each in (kept, scores))
    selects(kept, of_item, min(budget, scores.shape[3]) * scores.shape[0] * scores.shape[2])


@law("KZ-3", of=TOP_R, case=seeded_cases(max_length=17), seed=seeds(), budget=st.integers(1, 20))
def test_all_layers_and_heads_share_one_budget(impl, case, seed, budget):
    """Of three layers the highest scores of all heads stay, as many as the budget of all heads together."""
    drawn = np.random.default_rng(seed).normal(size=(3, case.batch, case.num_kv_heads, case.length))
    check_shared(impl, np.round(8 * drawn) / 8, budget)


@law("KZ-3", of=TOP_R)
def test_a_head_may_keep_nothing(impl):
    """Two layers of one head: the two highest scores of four stand in the first, so the second keeps none."""
    kept = impl.kvzip.top_r(np.array([[[[0.9, 0.8]]], [[[0.1, 0.2]]]]), 1)
    equal(kept, np.array([[[[True, True]]], [[[False, False]]]]), "each head keeps its own best")


@law("KZ-3", of=TOP_R, examples=3, case=long_rows(), budget=st.sampled_from([2048, 30_000, 64]))
def test_two_layers_of_long_rows_share_one_budget(impl, case, budget):
    """Of up to half a million scores of two layers, many of which tie, as many stay as the budget says,
    and the highest.
    """
    check_shared(impl, impl.round(np.stack([case.keys[..., 0], case.next_keys[..., 0]])), budget)


@law("KZ-2", of=SCORE, examples=2, case=long_cases(groups=(2, 1), lengths=(4097, 2049), head_dims=(64, 80)))
def test_every_token_of_a_long_text_has_its_largest_attention(impl, case):
    """Of thousands of tokens: the largest attention of a replay of three, query by query."""
    states, keys = replay(case, case.seed, 3), impl.round(case.keys)
    agrees(impl, SCORE, keys, *states, expected=largest(by_hand(keys, *states), keys), more=1e-12)


@law(
    "KZ-2",
    of=SCORE,
    examples=3,
    case=long_cases(groups=(2, 1), lengths=(4097, 2049), head_dims=(64, 80)),
    count=counts,
)
def test_padding_takes_no_part_in_a_long_text(impl, case, count):
    """The whole replay looks at one token: all others score 0. A padded query would see all alike, a
    padded key would win.
    """
    heads, place = case.num_kv_heads, case.seed % case.length
    keys, replay_keys = (np.full((1, heads, length, case.head_dim), -64.0) for length in (case.length, count))
    queries = np.zeros((1, heads * case.group, count, case.head_dim))
    keys[:, :, place, 0], queries[..., 0] = -32, 64
    expected = np.zeros((1, heads, case.length))
    expected[:, :, place] = 1
    got, size = impl.kvzip.score(keys, queries, replay_keys), np.where(expected == 1, 1, 1e-6)
    rounds_to(impl, got, expected, "the score, which is 0 of what no query looks at,", size=size)


@law("KZ-1", of=ATTENTION, examples=1, seed=seeds())
def test_replays_of_hundreds_of_queries_see_the_text_and_themselves(impl, seed):
    """The attention of 300 and of 1,024 queries of a replay on 130 tokens, query by query; alike where all
    keys are zero.
    """
    for count, batch in ((300, 3), (1024, 1)):
        for case in narrow(impl, seed, (130,), batch=batch):
            (queries, replay_keys), keys = replay(case, seed, count), impl.round(case.keys)
            queries = queries[:, :: case.group]
            expected, slack = attended(impl, queries, np.concatenate([keys, replay_keys], axis=2))
            expected, slack = expected[..., : case.length], slack[..., : case.length]
            near(
                impl.kvzip.replay_attention(keys, queries, replay_keys),
                expected,
                slack,
                "the attention of a replay",
            )
            got = impl.kvzip.replay_attention(0 * keys, queries, 0 * replay_keys)
            alike = np.broadcast_to(1 / (case.length + 1 + np.arange(count))[:, None], got.shape)
            what = "the attention of a replay on zero keys"
            rounds_to(impl, got, alike, what, terms=case.length, size=alike)


@law("KZ-2", of=SCORE, examples=1, seed=seeds())
def test_replays_of_the_length_of_a_chunk_score_by_their_largest_attention(impl, seed):
    """A chunk has 2,048 tokens: of 300 and of 2,048 queries; where one alone, any or the last, looks at a
    token, it has 1.
    """
    for count, batch, group in REPLAYS:
        for case in narrow(impl, seed, (130,), batch=batch, group=group):
            (queries, replay_keys), keys = replay(case, seed, count), impl.round(case.keys)
            whole = attended(impl, queries, np.concatenate([keys, replay_keys], axis=2))
            expected, slack = (largest(each[..., : case.length], keys) for each in whole)
            near(impl.kvzip.score(keys, queries, replay_keys), expected, slack, "the score by a replay")
            for looking in (seed % count, count - 1):
                keys, queries = np.zeros_like(case.keys), np.zeros_like(queries)
                keys[:, :, seed % case.length, 0], queries[:, :: case.group, looking, 0] = 32, 32
                # The first query, or the second where the only first one looks, sees all tokens before it
                # alike.
                expected = np.full(keys.shape[:3], 1 / (case.length + 1 + (looking == 0 and case.group == 1)))
                expected[:, :, seed % case.length] = 1
                got = impl.kvzip.score(keys, queries, np.zeros_like(replay_keys))
                what = f"the score where query {looking} of {count} looks"
                rounds_to(impl, got, expected, what, terms=case.length, size=expected)
