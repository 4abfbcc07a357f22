"""Laws of DropKV: DK-1 and DK-2."""

import numpy as np
from hypothesis import strategies as st

from evictionary.reference.expected_attention_theory import removal_error
from evictionary.spec_tests.judge.prelude import *

SCORE = "dropkv.score"
windows = st.sampled_from([1, 2, 3, 8, 32])
kernels = st.sampled_from([1, 3, 7])
MODERATE = ("normal", "ties", "duplicate_keys", "constant_channel", "tiny", "drift")


def scored(impl, queries, keys, values, **settings):
    """The scores, infinite in a window that scores more than all tokens before it, as it may by any number."""
    got = impl.dropkv.score(queries, keys, values, **settings)
    return window_above_all(got, keys, settings.get("window_size", 32))


def removed(logits, values):
    """The change of the output of each query [.., M, T] when token j is left out, the attention computed again."""
    full = softmax(logits) @ values
    changes = np.empty(logits.shape)
    for token in range(logits.shape[-1]):
        others = np.arange(logits.shape[-1]) != token
        changes[..., token] = lengths(full - softmax(logits[..., others]) @ values[..., others, :])
    return changes


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@law("DK-1", of=SCORE, case=seeded_cases(min_length=2, kinds=MODERATE), seed=seeds())
def test_the_score_is_the_error_of_brute_force_removal(impl, case, seed):
    """Attention computed again without token j: the squares of the changes of the last query's output, mean over the group."""
    queries = prompt_queries(case, seed)
    settings = {"window_size": 1, "kernel_size": 1}
    allowed = impl.allowance(SCORE, queries, case.keys, case.values, **settings)
    allowed.check(scored(impl, queries, case.keys, case.values, **settings), "the score")
    keys, values = (for_each_reader(impl.round(states), queries) for states in (case.keys, case.values))
    logits = queries[:, :, -1:] @ np.swapaxes(keys, -1, -2) / np.sqrt(keys.shape[-1])
    changes = over_group(removed(logits, values)[:, :, 0] ** 2, case.num_kv_heads)
    size = float(np.abs(values).max() ** 2 * (1 + np.abs(logits).max()))
    loops(allowed.expected[..., :-1], changes[..., :-1], 100 * size)


@law("DK-1", of=SCORE, case=seeded_cases(min_length=3, kinds=("normal", "drift")), seed=seeds())
def test_it_is_the_removal_error_of_expected_attention(impl, case, seed):
    """The square of EA-4's removal error, W_o left out."""
    queries = prompt_queries(case, seed)
    settings = {"window_size": 1, "kernel_size": 1}
    allowed = impl.allowance(SCORE, queries, case.keys, case.values, **settings)
    keys, values = (for_each_reader(impl.round(states), queries) for states in (case.keys, case.values))
    weights = causal_weights(queries[:, :, -1:], keys)[:, :, 0]
    errors = removal_error(np.minimum(weights, 1 - 1e-9), values, np.eye(values.shape[-1])) ** 2
    expected = np.where(np.isinf(allowed.expected), np.inf, over_group(errors, case.num_kv_heads))
    wider = allowed.wider(1e-6 * float(np.abs(values).max() ** 2))
    wider.check(scored(impl, queries, case.keys, case.values, **settings), "the score", expected)


@law("DK-1", of=SCORE)
def test_a_token_with_all_the_attention_is_not_free(impl):
    """A weight that rounds to 1 leaves v_j - o = 0, yet without it the output is the other value, 5 away: 25."""
    keys = np.array([[[[0.0], [16], [0]]]])
    values = np.array([[[[1.0, 1], [4, 5], [1, 1]]]])
    got = scored(impl, np.full((1, 1, 1, 1), 128.0), keys, values, window_size=1, kernel_size=1)
    require(
        abs(got[0, 0, 1] - 25) <= 1e-2 and got[0, 0, 0] <= 1e-6,
        "the token that holds all the attention does not cost |v_j - v| = 5",
        25.0,
        got,
    )


@law("DK-1", of=SCORE)
def test_a_value_equal_to_the_output_costs_nothing(impl):
    """Of equal weights on the values -2, 0 and 2 the middle one is the output: its removal changes nothing, the others 1 each."""
    keys = np.zeros((1, 1, 4, 1))
    values = np.array([[[[-3.0], [0], [3], [0]]]])
    got = scored(impl, np.ones((1, 1, 1, 1)), keys, values, window_size=1, kernel_size=1)[..., :3]
    require(
        np.abs(got - [[[1, 0, 1]]]).max() <= 0.02,
        "the removal of -3, 0 and 3 among -3, 0, 3, 0 changes the mean by 1, 0 and 1",
        [[[1, 0, 1]]],
        got,
    )


def check_changes(impl, case, seed, window_size, kernel_size):
    """Raise Violation unless the score is that of attention computed again without each token."""
    queries, settings = prompt_queries(case, seed), {"window_size": window_size, "kernel_size": kernel_size}
    allowed = impl.allowance(SCORE, queries, case.keys, case.values, **settings)
    got = scored(impl, queries, case.keys, case.values, **settings)
    allowed.check(got, "the score")
    before = case.length - window_size
    if before <= 0:
        return equal(np.isinf(got), True, "a token of the window has a finite score")
    keys, values = (for_each_reader(impl.round(states), queries) for states in (case.keys, case.values))
    total = np.zeros((*queries.shape[:2], case.length))
    for place in range(before, case.length):
        seen = place + 1
        logits = queries[:, :, place:seen] @ np.swapaxes(keys[:, :, :seen], -1, -2) / np.sqrt(keys.shape[-1])
        total[..., :seen] += removed(logits, values[:, :, :seen])[:, :, 0] ** 2
    summed, reach = over_group(total, case.num_kv_heads), kernel_size // 2
    size = 100 * window_size * float(np.abs(values).max() ** 2 * (1 + np.abs(queries).max() * np.abs(keys).max()))
    for token in range(before):
        pooled = summed[..., max(0, token - reach) : token + reach + 1].sum(axis=-1) / kernel_size
        loops(allowed.expected[..., token], pooled, size)


@law("DK-2", of=SCORE, case=seeded_cases(min_length=2, kinds=MODERATE), seed=seeds(), window_size=windows, kernel_size=kernels)
def test_the_changes_of_the_window_add_up(impl, case, seed, window_size, kernel_size):
    """Squared changes of each output of the window, summed, averaged over the group and over the neighbours; also by loops."""
    check_changes(impl, case, seed, window_size, kernel_size)


@law("DK-2", of=SCORE, examples=1, seed=seeds())
def test_the_changes_of_the_window_of_the_public_code_add_up(impl, seed):
    """The same by 32 queries and 7 neighbours over 64 and 128 tokens, of a batch of three."""
    for case in narrow(impl, seed, (64, 128)):
        check_changes(impl, case, seed, 32, 7)


@law("DK-2", of=SCORE, case=seeded_cases(min_length=2, kinds=("normal", "ties")), seed=seeds())
def test_a_vector_added_to_all_values_changes_nothing(impl, case, seed):
    """Only differences of values count; values twice as long give four times the score."""
    queries, settings = prompt_queries(case, seed), {"window_size": 1, "kernel_size": 1}
    values = np.round(4 * case.values) / 4
    allowed = impl.allowance(SCORE, queries, case.keys, 2 * values + 1, **settings)
    plain = impl.allowance(SCORE, queries, case.keys, values, **settings)
    got = scored(impl, queries, case.keys, 2 * values + 1, **settings)
    allowed.wider(4 * plain.largest, 4 * plain.mean).check(got, "the score of shifted and doubled values", 4 * plain.expected)


@law("DK-2", of=(SCORE, "selection.top_k"), case=cases(), seed=seeds(), window_size=windows, share=shares())
def test_the_window_is_kept(impl, case, seed, window_size, share):
    """The last tokens score more than all others and top-k keeps them; a prompt within the window is kept whole."""
    queries, length = prompt_queries(case, seed), case.keys.shape[2]
    scores = scored(impl, queries, case.keys, case.values, window_size=window_size)
    window = np.broadcast_to(np.arange(length) >= length - window_size, scores.shape)
    require(
        np.isinf(scores[window]).all() and np.isfinite(scores[~window]).all() and (scores >= 0).all(),
        "the window does not score more than all tokens before it, or one of these is infinite",
        window,
        scores,
    )
    scores = impl.round(scores)  # as top-k gets them: a kernel in half precision may answer with float32 scores
    if np.isinf(scores[~window]).any():
        impl.unrepresentable()
    budget = min(length, window_size + int(share * length))
    selects(impl.selection.top_k(scores, budget), scores, budget, protected=window)


@law("DK-2", of=SCORE)
def test_the_defaults_are_those_of_the_public_code(impl):
    """Of 40 zero keys only token 4 has a value: its removal costs (1/n)^2 for each query that sees n tokens, pooled over 7."""
    keys, queries, values = (np.full((1, 1, 40, width(impl)), each) for each in (0.0, 1.0, 0.0))
    values[0, 0, 4, 0] = 8
    got = scored(impl, queries, keys, values)
    costs = np.zeros(40)
    for seen in range(9, 41):
        costs[:seen] += np.where(np.arange(seen) == 4, 8 / seen, 8 / seen / (seen - 1)) ** 2
    expected = np.array([costs[max(0, token - 3) : token + 4].sum() / 7 for token in range(40)])
    expected[8:] = np.inf
    agrees(impl, SCORE, queries, keys, values, got=got, expected=expected[None, None], more=1e-12, what="the score")


@law("DK-2", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Queries of heads 0 and 1 see KV head 0, those of heads 2 and 3 see KV head 1."""
    keys, queries, values = np.zeros((1, 2, 3, width(impl))), np.zeros((1, 4, 1, width(impl))), np.zeros((1, 2, 3, width(impl)))
    keys[..., 0, 0] = 16
    queries[0, 2:, :, 0] = 16  # the readers of KV head 1 look at token 0
    values[..., 0, 0] = 2
    got = scored(impl, queries, keys, values, window_size=1, kernel_size=1)[..., 0]
    require(np.abs(got - [[4 / 9, 4]]).max() <= 0.02, "a query head reads another KV head than h // G", [[4 / 9, 4]], got)


@law("DK-2", of=SCORE, kind="refusal", bad=st.sampled_from([("window_size", 0), ("window_size", 1.5), ("kernel_size", 4)]))
def test_bad_settings_are_refused(impl, bad):
    """An empty window or a kernel that is not odd raise ValueError."""
    states = [np.ones((1, 1, 5, 2))] * 3
    refused(impl, bad[0], SCORE, *states, **{"window_size": 2, "kernel_size": 3} | dict([bad]))


@law("DK-2", of=SCORE, examples=2, case=long_cases(groups=(2, 1), lengths=(4097, 2049), head_dims=(64, 80)))
def test_every_token_of_a_long_prompt_has_its_cost(impl, case):
    """Of thousands of tokens, each costs the square of p / (1 - p) |v - o| for the last query, token by token."""
    queries, keys, values = (impl.round(states) for states in (case.queries, case.keys, case.values))
    allowed = impl.allowance(SCORE, queries, keys, values, window_size=1, kernel_size=1)
    weights = causal_weights(queries, for_each_reader(keys, queries))[:, :, 0]
    values = for_each_reader(values, queries)
    errors = over_group(removal_error(np.minimum(weights, 1 - 1e-9), values, np.eye(values.shape[-1])) ** 2, case.num_kv_heads)
    got = scored(impl, queries, keys, impl.round(case.values), window_size=1, kernel_size=1)
    expected = np.where(np.arange(case.length) == case.length - 1, np.inf, errors)
    allowed.wider(1e-6 * float(errors.max()), 1e-6 * float(errors.mean())).check(got, "the score of a long prompt", expected)
