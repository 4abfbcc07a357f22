"""Laws of DropKV: DK-1 and DK-2."""

from evictionary.reference.expected_attention_theory import removal_error
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import latest, softmax, two_readers, window_scored

SCORE = "dropkv.score"
windows = st.sampled_from([1, 2, 3, 8, 32])
kernels = st.sampled_from([1, 3, 7])
MODERATE = ("normal", "ties", "duplicate_keys", "constant_channel", "tiny", "drift")


def scored(impl, *states, **settings):
    return window_scored(impl, SCORE, *states, **settings)


def scores(impl, *states, **another_way):
    """`agrees` of the scores, infinite in the window."""
    names = ("window_size", "kernel_size")
    settings = {name: another_way[name] for name in names if name in another_way}
    return agrees(impl, SCORE, *states, got=scored(impl, *states, **settings), **another_way)


def removed(logits, values):
    """The change of the output of each query [.., M, T]
    when token j is left out, the attention computed again.
    """
    full = softmax(logits) @ values
    changes = np.empty(logits.shape)
    for token in range(logits.shape[-1]):
        others = np.arange(logits.shape[-1]) != token
        changes[..., token] = lengths(full - softmax(logits[..., others]) @ values[..., others, :])
    return changes


@law("DK-1", of=SCORE, case=seeded_cases(min_length=2, kinds=MODERATE), seed=seeds())
def test_the_score_is_the_error_of_brute_force_removal(impl, case, seed):
    """Attention computed again without token j: the squares of the changes of the last query's output,
    mean over the group.
    """
    queries, states = prompt_queries(case, seed), impl.rounded((case.keys, case.values))
    keys, values = (for_each_reader(each, queries) for each in states)
    logits = queries[:, :, -1:] @ np.swapaxes(keys, -1, -2) / np.sqrt(keys.shape[-1])
    by_hand = over_group(removed(logits, values)[:, :, 0] ** 2, case.num_kv_heads)
    by_hand[..., -1] = np.inf
    size = 100 * float(np.abs(values).max() ** 2 * (1 + np.abs(logits).max()))
    scores(impl, queries, *states, window_size=1, kernel_size=1, by_hand=by_hand, size=size)


def removal_errors(query, keys, values):
    """The square of EA-4's removal error for one query, mean over the group and infinite for the last token;
    what it may be wrong by, at most and on average.

    Where a weight is near 1, what it leaves to the others has lost most of its digits.
    """
    left = 1e-9  # to the others, at least
    weights = np.minimum(causal_weights(query, for_each_reader(keys, query))[:, :, 0], 1 - left)
    errors = removal_error(weights, for_each_reader(values, query), np.eye(values.shape[-1])) ** 2
    costs = over_group(errors, keys.shape[1])
    wrong = 1e-6 * float(costs.max()), 1e-6 * float(costs.mean())
    costs[..., -1] = np.inf
    return costs, wrong


@law("DK-1", of=SCORE, case=seeded_cases(min_length=3, kinds=("normal", "drift")), seed=seeds())
def test_it_is_the_removal_error_of_expected_attention(impl, case, seed):
    """The square of EA-4's removal error, W_o left out."""
    queries, states = prompt_queries(case, seed), impl.rounded((case.keys, case.values))
    expected, more = removal_errors(queries[:, :, -1:], *states)
    scores(impl, queries, *states, window_size=1, kernel_size=1, expected=expected, more=more)


@law("DK-1", of=SCORE)
def test_a_token_with_all_the_attention_is_not_free(impl):
    """A weight that rounds to 1 leaves v_j - o = 0, yet
    without it the output is the other value, 5 away: 25.
    """
    keys, values = np.array([[[[0.0], [16], [0]]]]), np.array([[[[1.0, 1], [4, 5], [1, 1]]]])
    got = scored(impl, np.full((1, 1, 1, 1), 128.0), keys, values, window_size=1, kernel_size=1)
    near(
        got[0, 0, :2],
        np.array([0, 25]),
        np.array([1e-6, 1e-2]),
        "the cost of a token that holds all the attention",
    )


@law("DK-1", of=SCORE)
def test_a_value_equal_to_the_output_costs_nothing(impl):
    """Of equal weights on the values -2, 0 and 2 the middle one is the output: its removal changes
    nothing, the others 1 each.
    """
    keys, values = np.zeros((1, 1, 4, 1)), np.array([[[[-3.0], [0], [3], [0]]]])
    got = scored(impl, np.ones((1, 1, 1, 1)), keys, values, window_size=1, kernel_size=1)[..., :3]
    near(got, np.array([[[1, 0, 1]]]), 0.02, "the cost of -3, 0 and 3 among -3, 0, 3, 0")


def check_changes(impl, case, seed, window_size, kernel_size):
    """Raise Violation unless the score is that of attention computed again without each token."""
    settings = {"window_size": window_size, "kernel_size": kernel_size}
    queries, states = prompt_queries(case, seed), impl.rounded((case.keys, case.values))
    keys, values = (for_each_reader(each, queries) for each in states)
    before, reach, total = (
        max(0, case.length - window_size),
        kernel_size // 2,
        np.zeros((*queries.shape[:2], case.length)),
    )
    # a window over all tokens keeps them whatever they cost
    for place in range(before, case.length) if before else ():
        seen = place + 1
        logits = queries[:, :, place:seen] @ np.swapaxes(keys[:, :, :seen], -1, -2) / np.sqrt(keys.shape[-1])
        total[..., :seen] += removed(logits, values[:, :, :seen])[:, :, 0] ** 2
    summed, by_hand = over_group(total, case.num_kv_heads), np.full(case.keys.shape[:3], np.inf)
    for token in range(before):
        by_hand[..., token] = (
            summed[..., max(0, token - reach) : token + reach + 1].sum(axis=-1) / kernel_size
        )
    size = (
        100
        * window_size
        * float(np.abs(values).max() ** 2 * (1 + np.abs(queries).max() * np.abs(keys).max()))
    )
    scores(impl, queries, *states, **settings, by_hand=by_hand, size=size)


@law(
    "DK-2",
    of=SCORE,
    case=seeded_cases(min_length=2, kinds=MODERATE),
    seed=seeds(),
    window_size=windows,
    kernel_size=kernels,
)
def test_the_changes_of_the_window_add_up(impl, case, seed, window_size, kernel_size):
    """Squared changes of each output of the window, summed, averaged over the group and over the
    neighbours; also by loops.
    """
    check_changes(impl, case, seed, window_size, kernel_size)


@law("DK-2", of=SCORE, examples=1, seed=seeds())
def test_the_changes_of_the_window_of_the_public_code_add_up(impl, seed):
    """The same by 32 queries and 7 neighbours over 64 and 128 tokens, of a batch of three."""
    for case in narrow(impl, seed, (64, 128)):
        check_changes(impl, case, seed, 32, 7)


@law("DK-2", of=SCORE, case=seeded_cases(min_length=2, kinds=("normal", "ties")), seed=seeds())
def test_a_vector_added_to_all_values_changes_nothing(impl, case, seed):
    """Only differences of values count; values twice as long give four times the score."""
    settings: dict[str, Any] = {"window_size": 1, "kernel_size": 1}
    states, values = (prompt_queries(case, seed), case.keys), np.round(4 * case.values) / 4
    got = scored(impl, *states, 2 * values + 1, **settings)
    more = impl.allowance(SCORE, *states, 2 * values + 1, **settings)

    def becomes(scores):
        return 4 * window_above_all(scores, case.keys, 1)

    same(impl, SCORE, *states, values, **settings, got=got, becomes=becomes, more=more)


@law("DK-2", of=(SCORE, "selection.top_k"), case=cases(), seed=seeds(), window_size=windows, share=shares())
def test_the_window_is_kept(impl, case, seed, window_size, share):
    """The last tokens score more than all others and top-k
    keeps them; a prompt within the window is kept whole.
    """
    states = prompt_queries(case, seed), case.keys, case.values
    got, window = scored(impl, *states, window_size=window_size), latest(case.keys.shape[:3], window_size)
    equal(np.isinf(got), window, "another token than those of the window scores more than all others")
    require((got >= 0).all(), "a score is negative", 0.0, got)
    got = impl.round(got)  # as top-k gets them: a kernel in half precision may answer with float32 scores
    if np.isinf(got[~window]).any():
        impl.unrepresentable()
    budget = min(case.keys.shape[2], window_size + int(share * case.keys.shape[2]))
    selects(impl.selection.top_k(got, budget), got, budget, protected=window)


@law("DK-2", of=SCORE)
def test_the_defaults_are_those_of_the_public_code(impl):
    """Of 40 zero keys only token 4 has a value: its removal costs (1/n)^2 for each query that sees n
    tokens, pooled over 7.
    """
    keys, queries, values = (np.full((1, 1, 40, width(impl)), each) for each in (0.0, 1.0, 0.0))
    values[0, 0, 4, 0] = 8
    costs = np.zeros(40)
    for seen in range(9, 41):
        costs[:seen] += np.where(np.arange(seen) == 4, 8 / seen, 8 / seen / (seen - 1)) ** 2
    expected = np.array([costs[max(0, token - 3) : token + 4].sum() / 7 for token in range(40)])
    expected[8:] = np.inf
    scores(impl, queries, keys, values, expected=expected[None, None], more=1e-12)


@law("DK-2", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Queries of heads 0 and 1 see KV head 0, those of heads 2 and 3 see KV head 1."""
    queries, keys = two_readers(width(impl), 3)
    got = scored(impl, queries, keys, keys / 8, window_size=1, kernel_size=1)[..., 0]
    near(got, np.array([[4 / 9, 4]]), 0.02, "the score where query head h reads KV head h // G")


@law("DK-2", of=SCORE, examples=2, case=long_cases(groups=(2, 1), lengths=(4097, 2049), head_dims=(64, 80)))
def test_every_token_of_a_long_prompt_has_its_cost(impl, case):
    """Of thousands of tokens, each costs the square of p
    / (1 - p) |v - o| for the last query, token by token.
    """
    queries, *states = impl.rounded((case.queries, case.keys, case.values))
    expected, more = removal_errors(queries, *states)
    scores(impl, queries, *states, window_size=1, kernel_size=1, expected=expected, more=more)
