"""Laws of GVote's selection, GV-A1 to GV-A12 as a whole. Its single steps are in test_gvote_steps.py."""

from evictionary.reference import cache, rope
from evictionary.spec_tests.gvote.helpers import (
    SELECT,
    WEIGHTS,
    bounds_of_budget,
    check_votes,
    drawn_queries,
    first_of_each,
    oracle_votes,
    whole,
)
from evictionary.spec_tests.judge.prelude import *


@law(
    "GV-A11",
    of=SELECT,
    case=cases(),
    seed=seeds(),
    samples=st.integers(1, 9),
    p=st.sampled_from([0.95, 0.5, 0.99, 1.0, 0.05]),
)
def test_each_head_keeps_the_union_of_the_top_b0(impl, case, seed, samples, p):
    """Every sampled query of a KV head's group votes for
    its top B_0, B_0 being that of its own query head.
    """
    query, sampled = drawn_queries(case, seed, samples)
    kept = impl.gvote.select(query, case.keys, sampled, p=p)
    weights, logits = oracle_votes(impl, query, case.keys, sampled)
    check_votes(impl, kept, weights, logits, case.keys.shape[1], p)


@law("GV-A11", of=SELECT, kind="edge", case=cases(), seed=seeds(), p=st.sampled_from([0.5, 0.05, 0.95]))
def test_of_equal_logits_those_at_the_lower_positions_get_the_votes(impl, case, seed, p):
    """A sample along one channel sees whole numbers, many
    equal: its B_0 votes are the first of a stable sort.
    """
    query, keys = drawn_queries(case, seed, 0)[0], whole(case)
    channels = np.random.default_rng(seed).integers(keys.shape[-1], size=query.shape[:2])
    kept = impl.gvote.select(query, keys, np.eye(keys.shape[-1])[channels][:, :, None], p=p)
    require_mask(kept, keys.shape[:3], "the selection")
    repeated = for_each_reader(keys, query)
    low, high = bounds_of_budget(impl, impl.allowance(WEIGHTS, query, repeated), p)
    seen = np.take_along_axis(repeated, channels[:, :, None, None], axis=-1)[..., 0]
    must, may = (
        first_of_each(seen, count).reshape(*keys.shape[:2], -1, keys.shape[2]).any(axis=2)
        for count in (low, high)
    )
    require(
        not (must & ~kept).any() and not (kept & ~may).any(),
        "of equal logits one at a higher position gets the vote",
        must,
        kept,
    )


@law("GV-A10", of=SELECT, case=cases(), seed=seeds())
def test_the_size_lies_between_the_budget_and_all_votes(impl, case, seed):
    """A KV head keeps at least the largest B_0 of its query heads, at most S times their sum, and never
    more than T.
    """
    query, sampled = drawn_queries(case, seed, 2)
    weights, _ = oracle_votes(impl, query, case.keys, sampled)
    length = case.keys.shape[2]
    low, high = (count.reshape(*case.keys.shape[:2], -1) for count in bounds_of_budget(impl, weights, 0.95))
    size = impl.gvote.select(query, case.keys, sampled).sum(axis=-1)
    require(
        (size >= low.max(axis=-1)).all() and (size <= np.minimum(length, 2 * high.sum(axis=-1))).all(),
        "the size of a keep set is out of bounds",
        (low.max(axis=-1), 2 * high.sum(axis=-1)),
        size,
    )


@law("GV-A11", of=SELECT, case=cases(), seed=seeds(), samples=st.integers(2, 9))
def test_more_samples_keep_more(impl, case, seed, samples):
    """Adding samples evicts nothing; neither their order nor a repeated one matters; one sample many times
    is that sample once.
    """
    (query, sampled), keys = drawn_queries(case, seed, samples), whole(case)
    full = impl.gvote.select(query, keys, sampled)
    require(
        not (impl.gvote.select(query, keys, sampled[:, :, : samples // 2]) & ~full).any(),
        "a token kept with fewer samples is evicted with more",
        None,
        full,
    )
    got = impl.gvote.select(query, keys, np.concatenate([sampled[:, :, ::-1], sampled[:, :, :1]], axis=2))
    equal(got, full, "the order of the samples, or one that came twice, changes the selection")
    alone, repeated = (
        impl.gvote.select(query, keys, np.repeat(sampled[:, :, :1], count, axis=2)) for count in (1, samples)
    )
    equal(repeated, alone, "the same sample again changes the selection")


@law("GV-A10", of=SELECT, case=cases(), seed=seeds())
def test_the_length_of_a_sample_does_not_matter(impl, case, seed):
    """Each sample may be multiplied by its own positive number: only the order of its logits counts."""
    query, sampled = drawn_queries(case, seed, 3)
    factors = 2.0 ** np.random.default_rng(seed).integers(-3, 4, size=(*sampled.shape[:3], 1))
    first, second = (impl.gvote.select(query, whole(case), states) for states in (sampled, sampled * factors))
    equal(second, first, "rescaled samples keep other tokens")


@law("GV-A11", of=SELECT, case=seeded_cases(max_length=17), seed=seeds())
def test_heads_do_not_see_each_other(impl, case, seed):
    """Other queries and keys in one KV head, or one batch
    item, leave the selection of the others as it is.
    """
    (query, sampled), keys = drawn_queries(case, seed, 2), whole(case)
    before = impl.gvote.select(query, keys, sampled)
    item, head = (np.random.default_rng(seed).integers(count) for count in keys.shape[:2])
    readers = slice(head * case.group, (head + 1) * case.group)
    query[item, readers], keys[item, head] = 3, keys[item, head][::-1].copy()
    sampled[item, readers] *= -1
    after = impl.gvote.select(query, keys, sampled)
    before[item, head] = after[item, head]
    equal(after, before, "a head's selection depends on another head or batch item")


def one_hot(*channels):
    """Queries [1, 1, len(channels), 4], each one channel of four."""
    return 8.0 * np.eye(4)[list(channels)][None, None]


@law("GV-A11", of=SELECT)
def test_the_current_nucleus_is_not_added(impl):
    """With keys 8 e_0 .. 8 e_3 a query along e_0 and samples along e_2 keep token 2 alone: neither K_0 nor
    a sink is added.
    """
    got = impl.gvote.select(one_hot(0)[:, :, 0], one_hot(0, 1, 2, 3), one_hot(2, 2))
    equal(got, [[[False, False, True, False]]], "other tokens than token 2 are kept")


@law("GV-A11", of=SELECT)
def test_each_sample_has_a_vote(impl):
    """With keys 8 e_0 .. 8 e_3, a query along e_1 and samples along e_0, e_2 and e_3 each sample keeps its
    token. So do 256 of each, which a count of votes in 8 bits holds as 0.
    """
    for times in (1, 256):
        sampled = np.repeat(one_hot(0, 2, 3), times, axis=2)
        got = impl.gvote.select(one_hot(1)[:, :, 0], one_hot(0, 1, 2, 3), sampled)
        equal(got, [[[True, False, True, True]]], "other tokens than 0, 2 and 3 are kept")


@law("GV-A10", of=SELECT)
def test_the_budget_is_that_of_the_current_query(impl):
    """A sample without preference keeps the B_0 = 1 token
    of the current query's count, not a nucleus of its own.
    """
    got = impl.gvote.select(one_hot(3)[:, :, 0], one_hot(0, 1, 2, 3), 0 * one_hot(0))
    require_mask(got, (1, 1, 4), "the selection")
    equal(got.sum(axis=-1), [[1]], "a sample has another number of votes than B_0")


@law("GV-A10", of=SELECT, kind="edge")
def test_a_sample_without_preference_votes_for_the_first_token(impl):
    """Of four equal logits, and B_0 = 1, the first gets the vote."""
    got = impl.gvote.select(one_hot(3)[:, :, 0], one_hot(0, 1, 2, 3), 0 * one_hot(0))
    equal(got, [[[True, False, False, False]]], "of equal logits another than the first gets the vote")


@law("GV-A3", of=SELECT)
def test_each_query_head_has_its_own_budget(impl):
    """At p = .5 peaked heads vote for 1 token of 4, a flat one for 2: its KV head keeps 3 tokens, one of
    peaked heads keeps 1.
    """
    peaked, sample = one_hot(3)[:, :, 0], np.array([[[[0.0, 0, 1, 8]]]])
    query = np.concatenate([peaked, 0 * peaked, peaked, peaked], axis=1)
    sampled = np.concatenate([sample, np.array([[[[2.0, 1, 0, 0]]]]), sample, sample], axis=1)
    # The second batch item has the KV heads the other way round.
    query, sampled = (np.concatenate([states, states[:, [2, 3, 0, 1]]]) for states in (query, sampled))
    got = impl.gvote.select(query, np.tile(one_hot(0, 1, 2, 3), (2, 2, 1, 1)), sampled, p=0.5)
    three, one = [True, True, False, True], [False, False, False, True]
    equal(got, [[three, one], [one, three]], "the heads of a group do not vote each with its own budget")


@law("GV-A11", of=SELECT)
def test_query_head_h_votes_in_kv_head_h_over_g(impl):
    """Four query heads, two KV heads: heads 0 and 1 vote for the cache of KV head 0, heads 2 and 3 for
    that of KV head 1.
    """
    keys = np.repeat(one_hot(0, 1, 2, 3), 2, axis=1)
    sampled = np.concatenate([one_hot(0), one_hot(1), one_hot(2), one_hot(3)], axis=1)
    got = impl.gvote.select(sampled[:, :, 0], keys, sampled)
    equal(
        got,
        [[[True, True, False, False], [False, False, True, True]]],
        "a query head votes for another KV head than h // G",
    )


@law("GV-A9", of=SELECT)
def test_far_logits_still_rank(impl):
    """A sample of logits 2048, 1024 and 0, of which softmax
    leaves only the first, still ranks the other two.
    """
    keys = np.array([[[[0.0, 1], [32, 0], [64, 0]]]])
    got = impl.gvote.select(np.array([[[0.0, 0]]]), keys, np.array([[[[45.25, 0]]]]), p=0.5)
    equal(got, [[[False, True, True]]], "the second best token of a sharp sample is lost")


def a_few_roundings_apart(impl):
    """1, 1 + 8 eps, 1 + 16 eps and 1 + 24 eps."""
    return 1 + 4 * final_rounding(impl) * np.arange(4)


@law("GV-A9", of=SELECT)
def test_logits_a_few_roundings_apart_still_rank(impl):
    """Keys 1, 1 + 8 eps, 1 + 16 eps and 1 + 24 eps, eps that of the dtype under test: the two largest
    logits get the votes.
    """
    keys = np.zeros((1, 1, 4, 4))
    keys[..., 0] = a_few_roundings_apart(impl)
    got = impl.gvote.select(np.zeros((1, 1, 4)), keys, one_hot(0), p=0.5)
    equal(got, [[[False, False, True, True]]], "logits that differ count as equal")


@law("GV-A9", of=SELECT)
def test_small_logits_still_rank(impl):
    """Logits 0, 1/4096, 2/4096 and 3/4096, of which three are 0 when rounded to three decimals: the two
    largest get the votes.
    """
    keys = np.zeros((1, 1, 4, 4))
    keys[..., 0] = np.arange(4) / 2**14
    got = impl.gvote.select(np.zeros((1, 1, 4)), keys, one_hot(0), p=0.5)
    equal(got, [[[False, False, True, True]]], "small logits count as equal")


def logits_of_samples(impl, keys, hidden, weight, noise, sink_size, horizon, theta):
    """The logits [B, H_q, S, T] of lines 4 to 10, an allowance: an angle that is a little off moves them by
    the lengths of query and key.
    """
    length, head_dim = keys.shape[2:]

    def sampled(hidden, weight, noise):
        observed = hidden[:, min(sink_size, length - 1) :]
        states = observed.mean(axis=1, keepdims=True) + observed.std(axis=1, keepdims=True) * noise
        return np.stack([states @ each for each in weight], axis=1)

    def by_hand(hidden, weight, noise, keys):
        queries = sampled(hidden, weight, noise)[..., None, :]
        rotated = rope.rotate(queries, length + np.arange(horizon), theta).mean(axis=-2)
        return rotated @ np.swapaxes(for_each_reader(keys, rotated), -1, -2) / head_dim**0.5

    logits = allowance(by_hand, hidden, weight, noise, keys, dtype=impl.dtype)
    if not np.isfinite(logits.largest):
        impl.unrepresentable()
    longest, longest_key = (
        float(np.linalg.norm(states, axis=-1).max()) for states in (sampled(hidden, weight, noise), keys)
    )
    return logits.wider(angle_error(impl, length + horizon) * longest * longest_key / head_dim**0.5, 0)


@law(
    "GV-A12",
    of="gvote.algorithm_1",
    case=st.builds(
        Case,
        seed=st.integers(0, 999),
        batch=st.integers(1, 2),
        num_kv_heads=st.integers(1, 2),
        group=st.integers(1, 3),
        length=st.sampled_from([1, 3, 16, 33]),
    ),
    sink_size=st.sampled_from([0, 4]),
    horizon=st.integers(1, 30),
    theta=st.sampled_from([10000.0, 50.0]),
)
def test_algorithm_1_samples_votes_and_prunes(impl, case, sink_size, horizon, theta):
    """Line by line: statistics of the hidden states, samples, W_Q, averaged RoPE from position T on,
    votes, union, cache.
    """
    generator = np.random.default_rng(case.seed)
    query, channels = 2 * case.queries[:, :, 0], 6
    hidden = generator.normal(size=(case.batch, case.length, channels))
    hidden[:, :4] += 8  # the sinks stand apart
    weight = generator.normal(size=(query.shape[1], channels, case.head_dim))
    noise = generator.normal(size=(case.batch, 3, channels))
    query, keys, hidden, weight, noise = (
        impl.round(array) for array in (query, case.keys, hidden, weight, noise)
    )
    settings: dict = {"sink_size": sink_size, "horizon": horizon, "theta": theta}
    logits = logits_of_samples(impl, keys, hidden, weight, noise, **settings)
    got = impl.gvote.algorithm_1(query, keys, case.values, hidden, weight, noise, p=0.5, **settings)
    kept = np.zeros(keys.shape[:3], dtype=bool)
    for item, head, rows in cache.heads(cache.CompressedCache(*got)):
        kept[item, head, got[2][rows]] = True
        wanted = impl.round(case.values)[item, head, kept[item, head]]
        equal(got[1][rows], wanted, "the values are not those of the kept tokens")
    weights = impl.allowance(WEIGHTS, query, np.repeat(keys, case.group, axis=1))
    check_votes(impl, kept, weights, logits, case.num_kv_heads, 0.5)


@law("GV-A12", of="gvote.algorithm_1")
def test_algorithm_1_keeps_as_many_as_p_asks(impl):
    """Nine equal keys: half of the attention needs five tokens, so one sample keeps five."""
    keys, hidden = np.ones((1, 1, 9, 2)), np.ones((1, 9, 2))
    got = impl.gvote.algorithm_1(
        np.ones((1, 1, 2)), keys, keys, hidden, np.ones((1, 2, 2)), np.zeros((1, 1, 2)), p=0.5
    )
    equal(len(got[2]), 5, "half of the attention to nine equal keys keeps another number than five")
