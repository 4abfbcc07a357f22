"""Laws of SnapKV: SN-1."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import check_window, two_readers, window_scored

SCORE, POOL = "snapkv.score", "snapkv.average_pool"
windows = st.sampled_from([1, 2, 3, 8, 32])
kernels = st.sampled_from([1, 3, 5, 7])


def scored(impl, *states, **settings):
    return window_scored(impl, SCORE, *states, **settings)


@law("SN-1", of=SCORE, case=cases(), seed=seeds(), window_size=windows, kernel_size=kernels)
def test_score_is_the_pooled_attention_of_the_window(impl, case, seed, window_size, kernel_size):
    """Causal attention of the last queries on the tokens before the window, averaged and pooled; also
    computed query by query.
    """
    queries, settings = prompt_queries(case, seed), {"window_size": window_size, "kernel_size": kernel_size}
    keys, before, reach = impl.round(case.keys), max(0, case.keys.shape[2] - window_size), kernel_size // 2
    weights = causal_weights(queries[:, :, before:], for_each_reader(keys, queries))
    received, by_hand = (
        over_group(weights.mean(axis=2), keys.shape[1])[..., :before],
        np.full(keys.shape[:3], np.inf),
    )
    for token in range(before):
        by_hand[..., token] = (
            received[..., max(0, token - reach) : token + reach + 1].sum(axis=-1) / kernel_size
        )
    got = scored(impl, queries, keys, **settings)
    agrees(impl, SCORE, queries, keys, **settings, got=got, by_hand=by_hand, size=1 + np.abs(keys).max())


@law("SN-1", of=(SCORE, "selection.top_k"), case=cases(), seed=seeds(), window_size=windows, share=shares())
def test_the_window_is_kept(impl, case, seed, window_size, share):
    """The last tokens score more than all others, and with a budget of the window's size or more top-k
    keeps them all.
    """
    states = prompt_queries(case, seed), case.keys
    check_window(impl, SCORE, states, share, window_size=window_size)


@law("SN-1", of=SCORE, case=seeded_cases(min_length=3), seed=seeds(), window_size=st.integers(1, 4))
def test_queries_before_the_window_do_not_count(impl, case, seed, window_size):
    """Earlier queries may be anything, or absent; the window's are enough."""
    queries, window, settings = (
        prompt_queries(case, seed),
        min(window_size, case.length),
        {"window_size": window_size},
    )
    other = queries.copy()
    other[:, :, :-window] *= -4

    def lifted(scores):
        return window_above_all(scores, case.keys, window_size)

    for fewer in (other, queries[:, :, -window:]):
        got = scored(impl, fewer, case.keys, **settings)
        same(impl, SCORE, queries, case.keys, **settings, got=got, becomes=lifted)


@law("SN-1", of=SCORE, case=seeded_cases(min_length=3), seed=seeds())
def test_scores_are_shares_of_attention(impl, case, seed):
    """Scores lie in [0, 1]. Without pooling, the scores before the window sum to 1 minus the window's
    attention to itself.
    """
    before = scored(impl, prompt_queries(case, seed), case.keys, window_size=2, kernel_size=1)[..., :-2]
    require(before.min() >= 0, "a score before the window is negative", 0.0, before)
    what = "the sum of the scores before the window"
    lies(impl, before.sum(axis=-1), (0, 1), what, times=case.length, roundings=0)


@law("SN-1", of=SCORE)
def test_the_defaults_are_a_window_of_32_and_a_kernel_of_7(impl):
    """Of 40 zero keys each of the first 8 receives the mean of 1/9 .. 1/40, pooled over 4, 5, 6, 7, 7, 6,
    5 and 4 of them.
    """
    got = scored(impl, np.ones((1, 1, 40, 2)), np.zeros((1, 1, 40, 2)))
    expected = (sum(1 / seen for seen in range(9, 41)) / 32) * np.array([4, 5, 6, 7, 7, 6, 5, 4]) / 7
    equal(np.isinf(got[0, 0]), np.arange(40) >= 8, "the window is not the last 32 tokens")
    near(got[0, 0, :8], expected, within(impl, roundings=0), "the pooled share of each query")


@law("SN-1", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Queries of heads 0 and 1 see KV head 0, those of heads 2 and 3 see KV head 1."""
    got = scored(impl, *two_readers(2, 3), window_size=1, kernel_size=1)[..., :2]
    near(got, np.array([[[1 / 3, 1 / 3], [1, 0]]]), 2e-3, "the score where query head h reads KV head h // G")


@law("SN-1", of=SCORE)
def test_the_window_does_not_leak_into_its_neighbours(impl):
    """A window token that gets all the attention raises no score before it: only the tokens before the
    window are pooled.
    """
    keys = np.array([[[[0.0], [0], [0], [64], [0]]]])
    got = scored(impl, np.array([[[[64.0], [64.0]]]]), keys, window_size=2, kernel_size=3)
    near(got[..., :3], np.zeros((1, 1, 3)), 1e-6, "the score of a token beside the window")


@law("SN-1", of=POOL, weights=st.lists(st.integers(0, 16), min_size=1, max_size=12), kernel_size=kernels)
def test_pooling_is_the_mean_of_the_neighbours(impl, weights, kernel_size):
    """The mean over kernel_size tokens around each, zeros beyond both ends; the number of tokens stays."""
    weights, reach = np.array(weights) / 16, kernel_size // 2

    def of_shares(weights):
        shares = np.pad(weights, reach) * (1 / kernel_size)
        return np.lib.stride_tricks.sliding_window_view(shares, kernel_size, axis=-1, subok=True).sum(axis=-1)

    # Dividing each weight is as good as dividing their sum, which alone is exact where the sum is a multiple
    # of the kernel.
    more = allowance(of_shares, impl.round(weights), dtype=impl.dtype)
    expected = [
        weights[max(0, token - reach) : token + reach + 1].sum() / kernel_size
        for token in range(weights.size)
    ]
    agrees(impl, POOL, weights, kernel_size, expected=np.array(expected), more=more)


@law("SN-1", of=SCORE, examples=1, case=paper_cases(groups=(2, 1)))
def test_the_window_scores_all_of_128k_tokens(impl, case):
    """The same of the longest prompts that papers use."""
    check_long_prompt(impl, case)


@law("SN-1", of=SCORE, examples=3, case=long_cases(groups=(4, 1), lengths=(16_385, 4097, 8191)))
def test_the_window_scores_all_of_a_long_prompt(impl, case):
    """Over thousands of tokens before the window: the mean
    attention of its 32 queries, pooled over 7 neighbours.
    """
    check_long_prompt(impl, case)


def check_long_prompt(impl, case):
    shape = (1, case.group * case.num_kv_heads, 32, case.head_dim)
    drawn, keys = np.random.default_rng(case.seed).normal(size=shape), impl.round(case.keys)

    def pooled(weights):
        received = over_group(weights[..., :-32].mean(axis=2), case.num_kv_heads)
        return np.array([[np.convolve(head, np.ones(7) / 7, mode="same") for head in received[0]]])

    # weights of all sizes, and weights nearly alike, whose sum half precision still holds
    for size in (1.0, 2.0**-6):
        queries = impl.round(size * drawn)
        expected, slack = map(pooled, attended(impl, queries, keys))
        got = scored(impl, queries, keys)
        near(got[..., :-32], expected, slack, "the score of a long prompt")
        equal(got[..., -32:], np.inf, "a token of the window does not score more than those before it")


@law("SN-1", of=POOL, examples=5, case=long_rows(("ties", "duplicate_keys", "normal")), kernel_size=kernels)
def test_long_rows_are_pooled_across_every_tile(impl, case, kernel_size):
    """Each of thousands of tokens is averaged with its neighbours, wherever a tile may end."""
    weights = impl.round(np.abs(case.keys[..., 0]))
    expected = (
        np.array([[np.convolve(head, np.ones(kernel_size), mode="same") for head in weights[0]]])
        / kernel_size
    )
    got = impl.snapkv.average_pool(weights, kernel_size)
    rounds_to(impl, got, expected, "the pooled weights", terms=kernel_size, size=expected)
