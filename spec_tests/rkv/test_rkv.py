"""Laws of R-KV: RK-1 to RK-6."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import check_window, softmax, two_readers, window_scored

SIMILARITIES, LATEST, REDUNDANCY, IMPORTANCE, SCORE = (
    f"rkv.{name}" for name in ("similarities", "without_latest", "redundancy", "importance", "score")
)
RELEASED = "rkv_variants.released_score"
windows = st.sampled_from([1, 2, 3, 8])
kernels = st.sampled_from([1, 3, 7])


def scored(impl, *states, path=SCORE, **settings):
    return window_scored(impl, path, *states, **settings)


def cosines(keys):
    """The cosines of the keys of one head, [T, T], key by key, 0 for a key with itself."""
    rows, others = directions(keys), ~np.eye(len(keys), dtype=bool)
    return np.array([np.where(other, rows @ row, 0) for row, other in zip(rows, others, strict=True)])


def counted(similarity, threshold=0.5, otherwise=()):
    """The redundancy of one head, row by row: what each key
    says of the others, its latest similar one left out.

    otherwise is what a row without a similar key leaves out: nothing, or token 0.
    """
    totals = np.zeros(len(similarity))
    for row in similarity:
        similar = [place for place, cosine in enumerate(row) if cosine > threshold] or otherwise
        totals += [0.0 if similar and place == similar[-1] else cosine for place, cosine in enumerate(row)]
    return softmax(totals / len(similarity))


def by_hand(keys, margin=1e-4):
    """The redundancy of keys [B, H, T, D], and in how many rows a cosine lies so near to the threshold
    that rounding may decide.
    """
    found, doubtful = np.zeros(keys.shape[:3]), 0
    for place in np.ndindex(keys.shape[:2]):
        similarity = cosines(keys[place])
        found[place] = counted(similarity)
        doubtful = max(doubtful, int((np.abs(similarity - 0.5) < margin).any(axis=-1).sum()))
    return found, doubtful


def doubt(impl, keys, share=1.0):
    """What is allowed more where two keys may be similar or
    not: each such row moves one column mean by at most 1/T.
    """
    # an implementation may round the cosines too
    expected, doubtful = by_hand(keys, max(1e-4, 2 * final_rounding(impl)))
    return share * float(expected.max()) * float(np.expm1(2 * doubtful / keys.shape[2]))


def doubtful_redundancy(impl, keys):
    """The oracle's redundancy of the keys, an allowance that knows of the doubt."""
    return impl.allowance(REDUNDANCY, keys).wider(doubt(impl, keys))


@law("RK-1", of=SIMILARITIES, case=cases())
def test_similarities_are_cosines_without_the_diagonal(impl, case):
    """S_ij = cos(k_i, k_j) for two keys, 0 for a key with itself; also computed pair by pair."""
    keys = impl.round(case.keys)
    agrees(impl, SIMILARITIES, keys, by_hand=np.array([[cosines(head) for head in item] for item in keys]))


@law(
    "RK-2",
    of=LATEST,
    rows=st.lists(st.lists(st.integers(-4, 4), min_size=4, max_size=4), min_size=4, max_size=4),
)
def test_each_row_loses_its_latest_similar_key_alone(impl, rows):
    """Of cosines in quarters, those above 1/2 are similar:
    the last of them in each row becomes 0, and nothing else.
    """
    similarity = np.array(rows) / 4
    expected = similarity.copy()
    for row in expected:
        row[np.flatnonzero(row > 0.5)[-1:]] = 0
    equal(
        impl.rkv.without_latest(similarity), expected, "other cosines are left out than the latest above 1/2"
    )


@law("RK-3", of=REDUNDANCY, case=cases())
def test_redundancy_is_the_softmax_of_the_column_means(impl, case):
    """What the other keys say of a key, its latest similar
    one left out of each row; also counted row by row.
    """
    keys = impl.round(case.keys)
    expected, doubtful = by_hand(keys)
    agrees(impl, REDUNDANCY, keys, more=doubt(impl, keys), by_hand=None if doubtful else expected)


@law("RK-3", of=REDUNDANCY)
def test_the_latest_of_three_copies_is_the_least_redundant(impl):
    """Of three equal keys each row forgives the latest of the others: the column means are 2/3, 1/3 and 0,
    the row means equal. The first batch item has two copies alone.
    """
    keys = np.array([[[[4.0, 0], [0, 1], [4, 0]]], [[[2, 0], [2, 0], [2, 0]]]])
    agrees(impl, REDUNDANCY, keys, expected=softmax(np.array([[[0, 0, 0]], [[2 / 3, 1 / 3, 0]]])))


@law("RK-3", of=REDUNDANCY)
def test_two_copies_forgive_each_other(impl):
    """Each of two equal keys is the other's latest similar key, so that neither is redundant: all three
    keys have 1/3.
    """
    agrees(impl, REDUNDANCY, np.array([[[[4.0, 0], [0, 1], [4, 0]]]]), expected=np.full((1, 1, 3), 1 / 3))


@law("RK-3", of=REDUNDANCY)
def test_a_row_without_a_similar_key_loses_nothing(impl):
    """Cosines of at most 1/2 all count, that with token 0 too: (1, 0), (0, 1) and (-1, 0) have the means
    -1/3, 0 and -1/3.
    """
    keys, means = np.array([[[[1.0, 0], [0, 1], [-1, 0]]]]), np.array([[[-1 / 3, 0, -1 / 3]]])
    agrees(impl, REDUNDANCY, keys, expected=softmax(means))


@law("RK-3", of=REDUNDANCY, threshold=st.sampled_from([0.5, 0.7, 0.9]))
def test_the_threshold_is_the_callers(impl, threshold):
    """(4, 3) has the cosines 0.8 and 0.6 with the axes; above the threshold they are forgiven, (4, 3)
    itself the later axis.
    """
    keys = np.array([[[[1.0, 0], [0, 8], [4, 3]]]])
    means = {0.5: [0.8 / 3, 0, 0], 0.7: [0, 0.6 / 3, 0.6 / 3], 0.9: [0.8 / 3, 0.6 / 3, 1.4 / 3]}[threshold]
    agrees(impl, REDUNDANCY, keys, threshold=threshold, expected=softmax(np.array([[means]])))


@law("RK-3", of=REDUNDANCY, case=seeded_cases(kinds=("normal", "drift", "sinks")), seed=seeds())
def test_the_length_of_a_key_does_not_count(impl, case, seed):
    """Each key may be rescaled by a power of two; the redundancies of a head sum to 1."""
    keys = impl.round(case.keys)
    factors = 2.0 ** np.random.default_rng(seed).integers(-3, 4, size=(*keys.shape[:3], 1))
    got, allowed = impl.rkv.redundancy(keys * factors), doubtful_redundancy(impl, keys)
    allowed.check(got, "the redundancy of the rescaled keys")
    totals(got, 1, allowed, "the redundancies of a head")


def check_importance(impl, case, seed, window_size, kernel_size):
    """Raise Violation unless the importance is that of plain loops."""
    queries, window = prompt_queries(case, seed), min(window_size, case.keys.shape[2] - 1)
    keys, heads, reach = impl.round(case.keys), case.keys.shape[1], kernel_size // 2
    group, before = queries.shape[1] // heads, case.keys.shape[2] - window
    expected = np.zeros((*keys.shape[:2], before))
    for item, head in np.ndindex(keys.shape[:2]):
        received = np.zeros(before)
        for place in range(-window, 0):
            readers = queries[item, head * group : (head + 1) * group, place]
            logits = (keys[item, head, :before] @ readers.T / keys.shape[-1] ** 0.5).max(axis=-1)
            received += softmax(logits) / window
        expected[item, head] = [received[max(0, t - reach) : t + reach + 1].max() for t in range(before)]
    settings: dict = {"window_size": window, "kernel_size": kernel_size}
    agrees(impl, IMPORTANCE, queries, keys, **settings, by_hand=expected, size=1 + np.abs(keys).max())


@law("RK-4", of=IMPORTANCE, case=cases(min_length=2), seed=seeds(), window_size=windows, kernel_size=kernels)
def test_importance_is_the_attention_of_the_largest_logit_of_a_group(
    impl, case, seed, window_size, kernel_size
):
    """Largest logit of the group, softmax over the tokens before the window, mean over it, largest
    neighbour; also by loops.
    """
    check_importance(impl, case, seed, window_size, kernel_size)


@law("RK-4", of=IMPORTANCE, examples=1, seed=seeds())
def test_importance_by_the_window_of_the_public_code(impl, seed):
    """The same by 8 queries and 7 neighbours over 64 to 1,024 tokens, of a batch of three."""
    for case in narrow(impl, seed, group=2):
        check_importance(impl, case, seed, 8, 7)


@law("RK-4", of=IMPORTANCE)
def test_the_attention_within_the_window_is_not_counted(impl):
    """A window token that would get all the attention takes none: zero keys before it share it equally."""
    keys, queries = np.array([[[[0.0], [0], [64], [64]]]]), np.array([[[[64.0], [64.0]]]])
    agrees(impl, IMPORTANCE, queries, keys, window_size=2, kernel_size=1, expected=np.array([[[0.5, 0.5]]]))


@law("RK-5", of=(SCORE, "selection.top_k"), case=cases(), seed=seeds(), window_size=windows, share=shares())
def test_the_score_weighs_importance_against_redundancy(impl, case, seed, window_size, share):
    """lambda I - (1 - lambda) R before the window, more than
    all of it in the window, and top-k keeps the window.
    """
    states = prompt_queries(case, seed), impl.round(case.keys)
    settings, more = (
        {"window_size": window_size, "importance_share": share},
        doubt(impl, states[1], 1 - share),
    )
    agrees(impl, SCORE, *states, **settings, got=scored(impl, *states, **settings), more=more)
    check_window(impl, SCORE, states, share, more, **settings)


@law("RK-5", of=SCORE)
def test_the_defaults_are_those_of_the_public_code(impl):
    """Of 16 tokens, zero keys: the last 8 are kept, each
    other has the attention 1/8 and the redundancy 1/16.
    """
    states = np.ones((1, 1, 16, width(impl))), np.zeros((1, 1, 16, width(impl)))
    expected = np.where(np.arange(16) < 8, 0.07 / 8 - 0.93 / 16, np.inf)[None, None]
    agrees(impl, SCORE, *states, got=scored(impl, *states), expected=expected, what="the score")


@law("RK-5", of=SCORE)
def test_a_peak_lifts_three_neighbours_to_each_side(impl):
    """A token that gets all the attention lends it to the three tokens on each side of it: a kernel of 7."""
    keys = np.zeros((1, 1, 20, 1))
    keys[0, 0, 5] = 64
    got = scored(impl, np.full((1, 1, 20, 1), 64.0), keys, importance_share=1.0)[0, 0, :12]
    equal(
        got.round(6),
        np.array([0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0.0]),
        "other tokens share the attention of a peak",
    )


@law("RK-5", of=SCORE)
def test_query_head_h_reads_kv_head_h_over_g(impl):
    """Queries of heads 0 and 1 see KV head 0, those of heads 2 and 3 see KV head 1."""
    settings = {"window_size": 1, "kernel_size": 1, "importance_share": 1.0}
    got = scored(impl, *two_readers(width(impl), 3), **settings)[..., :2]
    near(got, np.array([[[0.5, 0.5], [1, 0]]]), 2e-3, "the score where query head h reads KV head h // G")


@law(
    "RK-3",
    of=REDUNDANCY,
    examples=2,
    case=long_cases(kinds=("duplicate_keys",), lengths=(1025, 767), head_dims=(64, 80)),
)
def test_copies_among_a_thousand_keys_are_counted(impl, case):
    """Each of a few distinct keys stands hundreds of times:
    every copy resembles all but the latest, which is forgiven.
    """
    expected = by_hand(impl.round(case.keys))[0]
    got = impl.rkv.redundancy(case.keys)
    rounds_to(impl, got, expected, "the redundancy of copies", roundings=8, size=expected)


@law("RK-3", of=REDUNDANCY, examples=2, case=long_cases(lengths=(1025, 767), head_dims=(64, 80)))
def test_only_the_latest_of_a_thousand_copies_is_forgiven(impl, case):
    """The first half of the keys points one way, the second another: each row forgives the last key of its
    half, and that key the one before.
    """
    keys, count = np.zeros((1, case.num_kv_heads, case.length, case.head_dim)), case.length
    half = count // 2
    sizes = 2.0 ** (np.arange(count) % 3)
    keys[..., :half, 0], keys[..., half:, 1] = sizes[:half], sizes[half:]
    means = np.where(np.arange(count) < half, half - 1, count - half - 1) / count
    for end, copies in ((half, half), (count, count - half)):
        means[end - 2 : end] = (copies - 2) / count, 0
    expected = np.broadcast_to(np.exp(means) / np.exp(means).sum(), keys.shape[:3])
    rounds_to(impl, impl.rkv.redundancy(keys), expected, "the redundancy of copies", size=expected)


def of_seven(numbers):
    """The largest of each number [B, H, T] and its three neighbours to each side; none is negative."""
    padded = np.pad(numbers, ((0, 0), (0, 0), (3, 3)))
    return np.max([padded[..., shift : shift + numbers.shape[-1]] for shift in range(7)], axis=0)


def attended_by_group(impl, queries, keys):
    """The softmax of the largest logits of each group of queries [B, H_q, 1, D], [B, H_kv, T], and what it
    may be wrong by.
    """
    by_head = queries.reshape(*keys.shape[:2], -1, keys.shape[-1])
    weights = softmax((by_head @ np.swapaxes(keys, -1, -2)).max(axis=2) / np.sqrt(keys.shape[-1]))
    return weights, softmax_slack(impl, weights, logit_errors(impl, by_head, keys).max(axis=2))


@law("RK-4", of=IMPORTANCE, examples=2, case=long_cases(groups=(8, 2, 1), lengths=(16_385, 4097)))
def test_every_token_of_a_long_prompt_has_its_importance(impl, case):
    """Of thousands of tokens: the softmax of the largest logits of the group, and the largest of three
    neighbours to each side.
    """
    queries, keys = impl.round(case.queries), impl.round(case.keys)
    expected, slack = map(of_seven, attended_by_group(impl, queries, keys[:, :, :-1]))
    got = impl.rkv.importance(queries, keys, window_size=1)
    near(got, expected, slack, "the importance of a long prompt")


def weighed(impl, queries, keys):
    """The scores before a window of one token, and what they
    may be wrong by: the importance is, and all is rounded.
    """
    attended = impl.allowance(IMPORTANCE, queries, keys, window_size=1)
    repeated = by_hand(impl.round(keys))[0]
    expected = 0.07 * attended.expected - 0.93 * repeated[..., :-1]
    size = repeated.max() + np.abs(expected).max()
    return expected, 0.07 * attended.largest + 8 * final_rounding(impl) * size


@law(
    "RK-5",
    of=SCORE,
    examples=2,
    case=long_cases(kinds=("duplicate_keys",), groups=(8, 1), lengths=(1025, 767), head_dims=(64, 80)),
)
def test_a_thousand_tokens_have_their_scores(impl, case):
    """0.07 of the attention of the last query less 0.93
    of the redundancy, which counts the last token too.
    """
    expected, slack = weighed(impl, case.queries, case.keys)
    got = scored(impl, case.queries, case.keys, window_size=1)
    equal(got[..., -1:], np.inf, "the last token does not score more than those before it")
    near(got[..., :-1], expected, slack, "the score")


@law("RK-6", of=RELEASED, case=cases(min_length=3), seed=seeds(), share=shares())
def test_the_released_code_leaves_out_token_0_where_no_key_is_similar(impl, case, seed, share):
    """The redundancy counted row by row, token 0 left out of the rows without a similar key; the
    importance as in RK-4.
    """
    queries, keys = prompt_queries(case, seed), impl.round(case.keys)
    settings: dict = {"window_size": 2, "kernel_size": 3}
    expected = None
    if not by_hand(keys)[1]:  # no two keys are so nearly similar that rounding decides
        redundancy = np.array([[counted(cosines(head), otherwise=(0,)) for head in item] for item in keys])
        expected = share * oracle(IMPORTANCE)(queries, keys, **settings) - (1 - share) * redundancy[..., :-2]
        expected = np.concatenate([expected, np.full((*keys.shape[:2], 2), np.inf)], axis=-1)
    settings |= {"importance_share": share}
    got = scored(impl, queries, keys, path=RELEASED, **settings)
    agrees(impl, RELEASED, queries, keys, **settings, got=got, more=doubt(impl, keys), by_hand=expected)


@law("RK-6", of=RELEASED)
def test_the_released_code_finds_token_0_the_least_redundant(impl):
    """(1, 0), (0, 1), (-1, 0): no two are similar, so no
    row counts token 0, and the means are 0, 0 and -1/3.
    """
    keys, queries = np.array([[[[1.0, 0], [0, 1], [-1, 0]]]]), np.zeros((1, 1, 1, 2))
    settings: dict = {"window_size": 1, "kernel_size": 1, "importance_share": 0.0}
    expected = np.append(-softmax(np.array([0, 0, -1 / 3]))[:2], np.inf)[None, None]
    agrees(
        impl,
        RELEASED,
        queries,
        keys,
        **settings,
        got=scored(impl, queries, keys, path=RELEASED, **settings),
        expected=expected,
        what="the score",
    )
