"""Laws of TOVA: TO-1."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import or_a_trace

SCORE = "tova.score"


def last_queries(case):
    """The queries of the case, as many as fit its tokens."""
    return case.queries[:, :, : case.keys.shape[2]]


def over_heads(keys):
    """The mean of weights [B, H_q, 1, T] over the query
    heads, once for each KV head of the keys [B, H_kv, T, D].
    """
    return lambda weights: np.broadcast_to(weights.mean(axis=1), keys.shape[:3])


@law("TO-1", of=SCORE, case=cases())
def test_score_is_the_mean_attention_of_the_last_query(impl, case):
    """softmax(q K^T / sqrt(D)) of the last query, averaged over all query heads of the layer; also
    computed head by head.
    """
    queries, keys = impl.rounded((last_queries(case), case.keys))
    last = queries[:, :, -1:]
    by_hand = over_heads(keys)(causal_weights(last, for_each_reader(keys, last)))
    agrees(impl, SCORE, queries, keys, by_hand=by_hand, size=1 + np.abs(keys).max() * np.abs(last).max())


@law("TO-1", of=(SCORE, "selection.top_k"), case=seeded_cases(min_length=2), share=shares())
def test_the_layer_keeps_one_set(impl, case, share):
    """Every KV head has the same scores, which sum to 1,
    and so keeps the same tokens; none of them is protected.
    """
    queries = last_queries(case)
    allowed = impl.allowance(SCORE, queries, case.keys)
    scores = impl.tova.score(queries, case.keys)
    totals(scores, 1, allowed, "the scores")
    equal(scores, np.broadcast_to(scores[:, :1], scores.shape), "KV heads have different scores")
    budget = max(1, int(share * case.length))
    selects(impl.selection.top_k(scores, budget), allowed.expected, budget, slack=allowed)


@law("TO-1", of=SCORE, case=seeded_cases(), seed=seeds())
def test_only_the_last_query_counts(impl, case, seed):
    """Earlier queries may be anything, or absent."""
    queries = last_queries(case)
    other = np.random.default_rng(seed).normal(size=queries.shape)
    other[:, :, -1] = queries[:, :, -1]
    for given in (other, queries[:, :, -1:]):
        same(
            impl,
            SCORE,
            queries,
            case.keys,
            got=impl.tova.score(given, case.keys),
            what="the score with other earlier queries",
        )


@law("TO-1", of=SCORE, case=seeded_cases(), seed=seeds())
def test_scores_move_with_their_tokens(impl, case, seed):
    """Permuting the tokens permutes the scores; permuting the query heads of a group, or the batch,
    changes no score.
    """
    queries, keys, generator = last_queries(case), case.keys, np.random.default_rng(seed)
    order = generator.permutation(case.length)
    got = impl.tova.score(queries, keys[:, :, order])
    same(
        impl,
        SCORE,
        queries,
        keys,
        got=got,
        becomes=lambda scores: scores[:, :, order],
        what="the permuted score",
    )
    heads = np.concatenate(
        [head * case.group + generator.permutation(case.group) for head in range(case.num_kv_heads)]
    )
    same(
        impl,
        SCORE,
        queries,
        keys,
        got=impl.tova.score(queries[:, heads], keys),
        what="the score of exchanged query heads",
    )
    got = impl.tova.score(queries[::-1], keys[::-1])[::-1]
    same(impl, SCORE, queries, keys, got=got, what="the score of the batch in reverse")


@law("TO-1", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Heads 0 and 1 find token 0 in KV head 0, heads 2 and 3 find token 2 in KV head 1; the other heads'
    keys hold nothing.
    """
    keys = 16 * np.array([[[[1.0, 0], [0, 0], [0, 1]], [[1, 0], [0, 0], [0, 1]]]])
    queries = 16 * np.array([[[[1.0, 0]], [[1, 0]], [[0, 1]], [[0, 1]]]])
    keys[0, 0, 2], keys[0, 1, 0] = 0, 0
    got, expected = impl.tova.score(queries, keys), np.array([[[0.5, 0, 0.5]] * 2])
    near(got, expected, 1e-3, "the score where query head h reads KV head h // G")


@law("TO-1", of=SCORE, size=st.sampled_from([1.0, 1e4]))
def test_large_logits_and_single_tokens_are_finite(impl, size):
    """Logits of 1e4 give the best token all of the weight;
    one token has a score of 1; zero vectors share equally.
    """
    queries = np.full((1, 1, 1, 4), np.sqrt(size))
    sharp = impl.tova.score(queries, np.sqrt(size) * np.array([[[[1.0] * 4, [-1.0] * 4]]]))
    require(
        0.85 < sharp[0, 0, 0] <= 1 and 0 <= sharp[0, 0, 1] < 0.15,
        "the better token does not have the weight",
        [1, 0],
        sharp,
    )
    rounds_to(impl, impl.tova.score(queries, queries), np.ones((1, 1, 1)), "the score of a single token")
    shared = impl.tova.score(queries, np.zeros((1, 1, 4, 4)))
    rounds_to(impl, shared, np.full((1, 1, 4), 0.25), "the score of each of four equal keys")


@law("TO-1", of=SCORE, examples=1, case=paper_cases(groups=(4, 1)))
def test_the_last_query_scores_all_of_128k_tokens(impl, case):
    """The same of the longest prompts that papers use."""
    check_long_prompt(impl, case)


@law("TO-1", of=SCORE, examples=3, case=long_cases(groups=(16, 4, 1), lengths=SPLIT_LENGTHS))
def test_the_last_query_scores_all_of_a_long_prompt(impl, case):
    """Over thousands of tokens the weights of each query head
    are normalised together, and averaged over all heads.
    """
    check_long_prompt(impl, case)


def check_long_prompt(impl, case):
    queries, keys = impl.round(case.queries[:, :, -1:]), impl.round(case.keys)
    expected, slack = map(over_heads(keys), attended(impl, queries, keys))
    got = impl.tova.score(queries, keys)
    near(got, expected, slack, "the score of a long prompt")
    # Where rounded logits leave a single weight no digit, the errors of thousands cancel.
    sums, expected = got.sum(axis=-1), np.ones(keys.shape[:2])
    rounds_to(impl, sums, expected, "the sum of the scores", terms=case.length)


@law("TO-1", of=SCORE, examples=3, case=long_cases(groups=(16,), lengths=SPLIT_LENGTHS))
def test_no_split_of_a_long_prompt_is_lost(impl, case):
    """Each query head shares its weight among a few neighbouring tokens; the heads find them from the
    first token to the last.
    """
    queries, keys = looking(case, *neighbours(case))
    queries = queries[:, :, None]
    expected = over_heads(keys)(causal_weights(queries, for_each_reader(keys, queries)))
    got, size = impl.tova.score(queries, keys), or_a_trace(expected)
    rounds_to(impl, got, expected, "the score of a long prompt", terms=case.length, size=size)
