"""Laws of CriticalKV with DefensiveKV's aggregation: CK-1 to CK-5."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import latest, quarters, two_readers

NORMS, DEFEND, IMPORTANCE, SCORE, BOUND = (
    f"criticalkv.{name}" for name in ("projected_norms", "defend", "importance", "score", "error_bound")
)
windows = st.sampled_from([1, 2, 3, 8])
kernels = st.sampled_from([1, 3, 5])


def scored(impl, *states, **settings):
    """The scores, infinite for the tokens of a head that have the largest: any other number keeps these
    first as well.
    """
    got = impl.criticalkv.score(*states, **settings)
    require_numbers(got, states[1].shape[:3], "the score")
    return np.where(got == got.max(axis=-1, keepdims=True), np.inf, got)


def output_projection(case, seed, hidden=3):
    """W_o of each query head in quarters, [H_q, D_v, hidden]: the same in every dtype."""
    return quarters(seed, case.queries.shape[1], case.values.shape[-1], hidden)


@law("CK-1", of=NORMS, case=cases(), seed=seeds())
def test_the_norm_is_the_sum_of_magnitudes_of_the_projected_value(impl, case, seed):
    """|W_o v|_1 of each query head, averaged over the heads that read the value; also computed sum by sum."""
    w_o, values = output_projection(case, seed), impl.round(case.values)
    repeated = for_each_reader(values, case.queries)
    projected = np.stack([linear(repeated[:, head], w_o[head]) for head in range(w_o.shape[0])], axis=1)
    by_hand = over_group(np.abs(projected).sum(axis=-1), values.shape[1])
    agrees(impl, NORMS, values, w_o, by_hand=by_hand, size=float(np.abs(values).max()) * 100)


@law("CK-1", of=NORMS)
def test_two_heads_project_three_and_five(impl):
    """(1, -2) has the length 3 by one head and 4 + 1 by the
    other: 4 on average; twice the value, twice the length.
    """
    w_o = np.array([[[1.0, 0], [0, 1]], [[4, 1], [0, 1]]])
    got = impl.criticalkv.projected_norms(np.array([[[[1.0, -2], [2, -4]]]]), w_o)
    equal(got, [[[4.0, 8.0]]], "the lengths are not 4 and 8")


@law(
    "CK-2",
    of=DEFEND,
    rows=st.lists(st.lists(st.integers(0, 16), min_size=8, max_size=8), min_size=4, max_size=4),
)
def test_the_worst_case_counts_and_no_token_less_than_the_mean(impl, rows):
    """The largest of the sixteenths of two heads' two
    queries, raised to the mean of these over eight tokens.
    """
    weights = np.array(rows).reshape(2, 2, 8) / 16
    largest = np.array(rows).max(axis=0) / 16
    expected = [max(each, largest.sum() / 8) for each in largest]
    equal(impl.criticalkv.defend(weights), expected, "the aggregate is not the largest, clamped at its mean")


def check_importance(impl, case, seed, window_size, kernel_size):
    """Raise Violation unless the importance is that of plain loops."""
    queries, keys = prompt_queries(case, seed), impl.round(case.keys)
    window, reach = min(window_size, keys.shape[2] - 1), kernel_size // 2
    weights = causal_weights(queries[:, :, -window:], for_each_reader(keys, queries))[..., :-window]
    count = weights.shape[-1]
    pooled = np.stack(
        [weights[..., max(0, t - reach) : t + reach + 1].sum(axis=-1) for t in range(count)], axis=-1
    )
    total = pooled.sum(axis=-1, keepdims=True)
    pooled *= weights.sum(axis=-1, keepdims=True) / np.where(total == 0, 1, total)
    largest = pooled.max(axis=2).reshape(*keys.shape[:2], -1, count).max(axis=2)
    by_hand = np.maximum(largest, largest.mean(axis=-1, keepdims=True))
    settings: dict = {"window_size": window, "kernel_size": kernel_size}
    agrees(impl, IMPORTANCE, queries, keys, **settings, by_hand=by_hand, size=1 + np.abs(keys).max())


@law("CK-3", of=IMPORTANCE, case=cases(min_length=2), seed=seeds(), window_size=windows, kernel_size=kernels)
def test_importance_is_the_defended_attention_of_the_window(impl, case, seed, window_size, kernel_size):
    """Causal attention of each query, pooled and scaled to its sum, the largest of all queries and heads;
    also by loops.
    """
    check_importance(impl, case, seed, window_size, kernel_size)


@law("CK-3", of=IMPORTANCE, examples=1, seed=seeds())
def test_importance_by_the_window_of_the_public_code(impl, seed):
    """The same by 32 queries and 5 neighbours over 64 to 1,024 tokens, of a batch of three."""
    for case in narrow(impl, seed, group=2):
        check_importance(impl, case, seed, 32, 5)


@law("CK-3", of=IMPORTANCE)
def test_pooling_takes_nothing_from_the_ends(impl):
    """One token before the window gets 1/2 of the attention: pooled over 5 places, four of them beyond the
    ends, it has 1/2.
    """
    got = impl.criticalkv.importance(
        np.ones((1, 1, 1, 2)), np.zeros((1, 1, 2, 2)), window_size=1, kernel_size=5
    )
    near(got, np.array([[[0.5]]]), 2e-3, "the pooled attention")


@law("CK-3", of=IMPORTANCE, kind="edge")
def test_a_query_that_sees_the_window_alone_says_nothing(impl):
    """The key of the window outweighs the others by e^2000: their importance is 0, where 0/0 would be NaN."""
    keys = np.array([[[[-1000.0], [-1000], [1000]]]])
    got = impl.criticalkv.importance(np.ones((1, 1, 1, 1)), keys, window_size=1, kernel_size=1)
    equal(got, np.zeros((1, 1, 2)), "the importance of tokens without attention is not 0")


def second_stage(impl, queries, case, w_o, **settings):
    """The allowance of the scores when nothing is chosen
    by attention alone: a budget of 1 has no first half.
    """
    return impl.allowance(SCORE, queries, case.keys, case.values, w_o, budget=1, **settings)


@law("CK-4", of=SCORE, case=seeded_cases(min_length=2), seed=seeds(), window_size=windows, share=shares())
def test_half_of_the_budget_goes_by_attention(impl, case, seed, window_size, share):
    """The window and the tokens of the highest a up to half
    of the budget score most, the others have (a + epsilon) n.
    """
    queries, w_o, window = (
        prompt_queries(case, seed),
        output_projection(case, seed),
        min(window_size, case.length - 1),
    )
    settings = {"window_size": window, "kernel_size": 3}
    budget = max(1, int(share * 2 * case.length))
    attended = impl.allowance(IMPORTANCE, queries, case.keys, **settings)
    got = scored(impl, queries, case.keys, case.values, w_o, budget=budget, **settings)
    ranked = np.concatenate([attended.expected, np.full((*got.shape[:2], window), np.inf)], axis=-1)
    first, recent = min(case.length, max(window, budget // 2)), latest(got.shape, window)
    selects(np.isinf(got), ranked, first, slack=attended, protected=recent, what="the first stage")
    allowed = second_stage(impl, queries, case, w_o, **settings)
    allowed.check(np.where(np.isinf(got), allowed.expected, got), "the second stage")


@law("CK-4", of=(SCORE, "selection.top_k"), case=seeded_cases(min_length=4), seed=seeds(), share=shares())
def test_the_first_stage_stays_inside_the_result(impl, case, seed, share):
    """Top-k of the scores keeps the whole first stage,
    and fills the budget with the highest of the second.
    """
    queries, w_o, budget = (
        prompt_queries(case, seed),
        output_projection(case, seed),
        2 + int(share * (case.length - 2)),
    )
    got = scored(impl, queries, case.keys, case.values, w_o, budget=budget, window_size=1)
    allowed = second_stage(impl, queries, case, w_o, window_size=1)
    kept = impl.selection.top_k(got, budget)
    selects(kept, allowed.expected, budget, slack=allowed, protected=np.isinf(got))


@law("CK-4", of=SCORE)
def test_the_rest_goes_by_attention_times_length(impl):
    """Of four tokens with equal attention each scores by its value: (1/5 + 1e-4) times 1, 4, 2 and 8."""
    values, one = np.array([[[[1.0], [4], [2], [8], [1]]]]), np.ones((1, 1, 1, 1))
    got = scored(impl, one, np.zeros((1, 1, 5, 1)), values, one[0], budget=1, window_size=1, kernel_size=1)
    expected = np.array([[[*(np.array([1, 4, 2, 8]) * (0.2 + 1e-4)), np.inf]]])
    near(got, expected, 2e-2, "the score, (1/5 + 1e-4) times 1, 4, 2 and 8,")


@law("CK-4", of=SCORE)
def test_the_defaults_are_those_of_the_public_codes(impl):
    """A window of 32, a kernel of 5, half of the budget, epsilon 1e-4; with a budget of 66 the first stage
    adds a token.
    """
    keys, queries, w_o = (
        np.zeros((1, 1, 40, width(impl))),
        np.ones((1, 1, 40, width(impl))),
        np.ones((1, width(impl), 1)),
    )
    states = queries, keys, np.broadcast_to(np.arange(width(impl)) == 0, keys.shape).astype(float), w_o
    for budget, infinite in ((64, 32), (66, 33)):
        equal(
            np.isinf(scored(impl, *states, budget=budget)).sum(),
            infinite,
            f"with a budget of {budget} other tokens score most than {infinite}",
        )
    # 1/9 of the attention of the first query of the window, pooled over 3, 4, 5, 5, 5, 5, 4 and 3 of 5
    # places, which keep their sum
    pooled = np.array([3, 4, 5, 5, 5, 5, 4, 3]) * 8 / 34 / 9
    expected = np.concatenate([np.maximum(pooled, pooled.mean()) + 1e-4, np.full(32, np.inf)])
    agrees(
        impl,
        SCORE,
        *states,
        budget=1,
        got=scored(impl, *states, budget=1),
        expected=expected[None, None],
        more=1e-12,
    )


@law("CK-4", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Queries of heads 0 and 1 see KV head 0, those of
    heads 2 and 3 see KV head 1; their W_o go the same way.
    """
    (queries, keys), w_o = two_readers(width(impl), 3), np.zeros((4, width(impl), 1))
    w_o[:, 0, 0] = [1, 1, 2, 4]
    states, settings = (queries, keys, np.ones_like(keys), w_o), {"window_size": 1, "kernel_size": 1}
    got = scored(impl, *states, budget=1, epsilon=0.0, **settings)[..., 0]
    near(got, np.array([[1 / 3, 3]]), 0.02, "the score where query head h reads KV head h // G")


def least_errors(weights, projected, kept):
    """The L1 error of the output of the kept tokens, attention computed again over them, less what sums in
    float64 may add to it.
    """
    left = np.where(kept, weights, 0)
    left = left / left.sum(axis=-1, keepdims=True)
    errors = np.abs(((weights - left)[..., None] * projected).sum(axis=-2)).sum(axis=-1)
    return errors - 1e-12 * np.abs(projected).sum(axis=-1).max() * weights.shape[-1] / left.max()


@law("CK-5", of=BOUND, case=seeded_cases(min_length=2), seed=seeds(), share=shares())
def test_no_selection_errs_by_more_than_the_bound(impl, case, seed, share):
    """The L1 error of the output of the kept tokens,
    attention computed again over them, is at most the bound.
    """
    values, w_o = impl.round(case.values), output_projection(case, seed)[0]
    draw = np.random.default_rng(seed)
    weights = impl.round(draw.dirichlet(np.ones(case.length), size=case.values.shape[:2]))
    weights /= weights.sum(axis=-1, keepdims=True)
    kept = draw.random(weights.shape) < share
    kept[..., 0] = True
    projected = values @ w_o
    got = agrees(impl, BOUND, weights, np.abs(projected).sum(axis=-1), kept)
    if impl.dtype == "float64":  # elsewhere the weights that it is given do not sum to 1
        lies(impl, got, (least_errors(weights, projected, kept), np.inf), "the bound")


@law("CK-5", of=BOUND)
def test_the_bound_is_met_by_opposite_values(impl):
    """Of the values 2 and -2 with weights 3/4 and 1/4 the first is kept: the output 1 becomes 2, and the
    bound is 1.
    """
    kept = np.array([[True, False]])
    agrees(impl, BOUND, np.array([[0.75, 0.25]]), np.array([[2.0, 2.0]]), kept, expected=np.array([1.0]))


@law(
    "CK-3",
    of=IMPORTANCE,
    examples=2,
    case=long_cases(groups=(2, 1), lengths=(4097, 2049), head_dims=(64, 80)),
)
def test_every_token_of_a_long_prompt_has_its_importance(impl, case):
    """Of thousands of tokens: the attention of one query, pooled over 5 neighbours, with its sum, and the
    mean below it.
    """
    expected, more = long_importance(impl, case)[1], 1e-12
    agrees(impl, IMPORTANCE, case.queries, case.keys, window_size=1, expected=expected, more=more)


@law("CK-4", of=SCORE, examples=2, case=long_cases(groups=(2, 8), lengths=(4097, 2049), head_dims=(64, 80)))
def test_every_token_of_a_long_prompt_has_its_score(impl, case):
    """Of thousands of tokens 1,025 of the highest a and the
    last one score most, the others have (a + epsilon) n.
    """
    queries, importance, wrong = long_importance(impl, case)
    values, w_o = impl.round(case.values), output_projection(case, case.seed)
    second, slack = long_second_stage(impl, case, w_o, importance, wrong)
    got = scored(impl, queries, case.keys, values, w_o, budget=2052, window_size=1)
    equal(got[..., -1:], np.inf, "the last token does not score more than the second stage")
    first = np.isinf(got[..., :-1])
    selects(first, importance, min(1025, case.length - 1), slack=wrong, what="the first stage")
    near(np.where(first, second, got[..., :-1]), second, slack, "the second stage")


def long_importance(impl, case):
    """The one query of each head, the importance of the
    tokens before it by hand, and what it may be wrong by.
    """
    queries = impl.round(case.queries)
    weights, wrong = (each[:, :, 0, :-1] for each in attended(impl, queries, impl.round(case.keys)))
    pooled, of_pooled = (
        np.array([[np.convolve(row, np.ones(5), mode="same") for row in each[0]]])
        for each in (weights, wrong)
    )
    total = weights.sum(axis=-1, keepdims=True)
    share = total / pooled.sum(axis=-1, keepdims=True)
    of_pooled = share * (of_pooled + 2 * pooled * wrong.sum(axis=-1, keepdims=True) / total)
    largest = (
        each.reshape(*case.keys.shape[:2], -1, weights.shape[-1]).max(axis=2)
        for each in (share * pooled, of_pooled)
    )
    return queries, *(np.maximum(each, each.mean(axis=-1, keepdims=True)) for each in largest)


def long_second_stage(impl, case, w_o, importance, wrong):
    """(a + epsilon) n of the tokens before the last one, and what it may be wrong by: the importance, and the
    rounding of a projected value.
    """
    projected = for_each_reader(impl.round(case.values), case.queries) @ w_o
    norms = over_group(np.abs(projected).sum(axis=-1), case.num_kv_heads)[..., :-1]
    scores = importance + 1e-4
    return scores * norms, (wrong + rounding(impl, case.value_dim) * scores) * norms
