"""Laws of KeyDiff's ground: cached attention (KD-1 to KD-3),
eviction policies (KD-4, KD-5), block prompt processing (KD-6).
"""

from evictionary.reference.keydiff import Cache
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.keydiff.helpers import paper_budgets, scores_in_parts
from evictionary.spec_tests.shared.helpers import holds_tokens

ATTENTION, CACHED, EVICT = (
    "keydiff_theory.causal_attention",
    "keydiff_theory.cached_attention",
    "keydiff.evict",
)
BLOCK, PROMPT, DECODE = "keydiff.process_block", "keydiff.process_prompt", "keydiff.decode"

budgets = st.integers(1, 20)
block_sizes = st.sampled_from([1, 2, 3, 4, 7, 16, 64])


def own_queries(case):
    """One query for each key, of the same head: the states
    of the case as they are, in another order of channels.
    """
    return np.roll(case.keys, 1, axis=-1)[..., ::-1] / 2


def cache_of(keys, values, start=0):
    positions = np.broadcast_to(np.arange(start, start + keys.shape[-2]), keys.shape[:-1]).copy()
    return Cache(keys, values, positions, start + keys.shape[-2])


def joined(impl, cache, case, start, stop):
    """[cache ; block] of the original numbers: what a step may keep of."""
    keys, values = impl.round(case.keys)[..., start:stop, :], impl.round(case.values)[..., start:stop, :]
    block = cache_of(keys, values, start)
    if cache is None:
        return block
    return Cache(
        np.concatenate([cache.keys, block.keys], axis=-2),
        np.concatenate([cache.values, block.values], axis=-2),
        np.concatenate([cache.positions, block.positions], axis=-1),
        stop,
    )


def check_step(impl, before, after, budget, expected=None, slack=None):
    """The step kept the N best of what it had, whole, in position order, and counted what it saw.

    expected and slack are the scores and what they may be wrong by, where the oracle is not asked.
    """
    wanted = min(budget, before.positions.shape[-1])
    equal(
        after.positions.shape,
        (*before.positions.shape[:-1], wanted),
        "the cache has positions of another shape",
    )
    equal(
        after.seen, before.seen, f"the cache says that it has seen {after.seen} tokens, wanted {before.seen}"
    )
    require(
        (np.diff(after.positions, axis=-1) > 0).all(),
        "the kept tokens are not in position order",
        None,
        after.positions,
    )
    kept = np.zeros(before.positions.shape, dtype=bool)
    for row in np.ndindex(*kept.shape[:-1]):
        kept[row] = np.isin(before.positions[row], after.positions[row])
    if expected is None:
        slack = impl.allowance("keydiff.score", before.keys)
        expected = slack.expected
    selects(kept, expected, wanted, slack=slack, what="the step")
    for name, states, source in (("keys", after.keys, before.keys), ("values", after.values, before.values)):
        rows = source[kept].reshape(*after.positions.shape, -1)
        equal(states, rows, f"the cache's {name} are not those of the tokens at its positions")


@law("KD-1", of="keydiff_theory.transformer_block", case=cases())
def test_a_block_is_attention_and_then_the_feed_forward(impl, case):
    """Y = FFN(CSA(X)): attention comes first (here doubling),
    the feed-forward network second (here adding one).
    """
    states = np.clip(np.round(case.keys), -64, 64)  # whole numbers that every dtype doubles exactly
    got = impl.keydiff_theory.transformer_block(states, lambda x: x * 2, lambda x: x + 1)
    equal(got, states * 2 + 1, "the block does not apply attention first and the feed-forward second")


@law("KD-2", of=ATTENTION, case=cases())
def test_causal_attention_is_the_softmax_over_the_past(impl, case):
    """softmax(Q K^T / sqrt(D) + M) V, in which a token sees itself and the tokens before it."""
    agrees(impl, ATTENTION, own_queries(case), case.keys, case.values)


@law("KD-2", of=ATTENTION, case=cases(max_length=5))
def test_causal_attention_in_plain_loops(impl, case):
    """Computed token by token and channel by channel, causal attention gives the same numbers."""
    queries, keys, values = impl.rounded((own_queries(case), case.keys, case.values))
    size = np.abs(values).max() * (1 + np.abs(queries).max() * np.abs(keys).max())
    agrees(impl, ATTENTION, queries, keys, values, by_hand=causal_weights(queries, keys) @ values, size=size)


@law("KD-2", of=ATTENTION, case=cases(min_length=2), cut=st.floats(0, 1))
def test_no_token_sees_a_later_one(impl, case, cut):
    """Changing later tokens changes no earlier output; the first token's output is its own value."""
    first = max(1, int(cut * (case.keys.shape[2] - 1)))
    states = own_queries(case), case.keys, case.values
    changed = (np.where(np.arange(case.keys.shape[2])[:, None] < first, each, 1) for each in states)
    got = impl.keydiff_theory.causal_attention(*changed)[..., :first, :]
    same(impl, ATTENTION, *states, got=got, becomes=lambda outputs: outputs[..., :first, :])
    first, size = impl.round(case.values)[..., 0, :], np.abs(case.values).max()
    rounds_to(impl, got[..., 0, :], first, "the first token's output, its value,", roundings=1 / 4, size=size)


@law("KD-2", of=ATTENTION)
def test_attention_is_finite_at_large_logits(impl):
    """Logits of about 1e4 do not overflow: the largest takes all the weight."""
    keys, values = np.array([[[[100.0, 0], [-100, 0], [0, 100]]]]), np.array([[[[1.0], [2], [4]]]])
    got = impl.keydiff_theory.causal_attention(np.full((1, 1, 3, 2), 140.0), keys, values)
    near(got, np.array([1, 1, 2.5]).reshape(1, 1, 3, 1), 0.02, "attention at large logits")


@law("KD-3", of=(ATTENTION, CACHED), case=cases(min_length=2), cut=st.floats(0, 1))
def test_cached_equals_uncached(impl, case, cut):
    """The tokens after the cut, attending to a cache of those before it, give what causal attention over
    all of them gives.
    """
    start = 1 + int(cut * (case.keys.shape[2] - 2))
    states = own_queries(case), case.keys, case.values
    cache = cache_of(impl.round(case.keys[..., :start, :]), impl.round(case.values[..., :start, :]))
    got = impl.keydiff_theory.cached_attention(*(each[..., start:, :] for each in states), cache)
    same(impl, ATTENTION, *states, got=got, becomes=lambda outputs: outputs[..., start:, :])


@law("KD-3", of=CACHED, case=cases(min_length=4), seed=seeds())
def test_an_evicted_cache_is_seen_whole(impl, case, seed):
    """The mask hides later new tokens only: the order of
    a cache from which tokens were evicted plays no part.
    """
    old = case.keys.shape[2] - 2
    order = np.random.default_rng(seed).permutation(old)[: max(1, old - 1)]
    cache = impl.rounded(cache_of(case.keys[..., order, :], case.values[..., order, :])._replace(seen=old))
    new = queries, *states = impl.rounded(
        tuple(each[..., old:, :] for each in (own_queries(case), case.keys, case.values))
    )
    keys, values = (np.concatenate(pair, axis=-2) for pair in zip(cache[:2], states, strict=True))
    size = np.abs(values).max() * (1 + np.abs(queries).max() * np.abs(keys).max())
    backwards = Cache(cache.keys[..., ::-1, :], cache.values[..., ::-1, :], cache.positions[..., ::-1], old)
    got = impl.keydiff_theory.cached_attention(*new, backwards)
    agrees(impl, CACHED, *new, cache, by_hand=causal_weights(queries, keys) @ values, size=size)
    same(impl, CACHED, *new, cache, got=got, what="attention to the reversed cache")


@law("KD-3", of="keydiff.append", case=tiny_cases(min_length=2))
def test_new_tokens_come_after_the_cache(impl, case):
    """Appending keeps every number, the cache before the new tokens, and goes on counting positions."""
    half = case.keys.shape[2] // 2
    first, second = zip(
        *(np.split(states, [half], axis=2) for states in (case.keys, case.values)), strict=True
    )
    got = impl.keydiff.append(impl.keydiff.append(None, *first), *second)
    whole = cache_of(case.keys, case.values)
    for name in Cache._fields:
        equal(getattr(got, name), getattr(whole, name), f"the joined cache has other {name}")
    # Two tokens were seen and evicted: the next position is that of the sequence, not the length of the
    # cache.
    got = impl.keydiff.append(cache_of(*first)._replace(seen=half + 2), *second)
    wanted = np.concatenate([whole.positions[..., :half], whole.positions[..., half:] + 2], axis=-1)
    equal(got.positions, wanted, "after an eviction the new tokens get other positions")
    equal(got.seen, whole.seen + 2, "after an eviction other tokens were seen")


@law("KD-4", of=EVICT, case=cases(), seed=seeds())
def test_eviction_keeps_a_subset_whole_and_in_order(impl, case, seed):
    """Each head keeps its own tokens, keys and values together, in position order."""
    generator = np.random.default_rng(seed)
    cache = cache_of(impl.round(case.keys), impl.round(case.values), start=3)
    budget = generator.integers(1, case.keys.shape[2] + 1)
    kept = generator.random(case.keys.shape[:3]).argsort(axis=-1) < budget
    got = impl.keydiff.evict(cache, kept)
    for name in ("keys", "values", "positions"):
        rows = getattr(cache, name)[kept]  # head by head, as many of each
        wanted = rows.reshape(*kept.shape[:2], budget, *rows.shape[1:])
        equal(getattr(got, name), wanted, f"the {name} of a head are not those of its kept tokens")
    equal(got.seen, cache.seen, "eviction changes how many tokens were seen")


@law("KD-4", of=EVICT, kind="refusal")
def test_rows_of_different_counts_are_refused(impl):
    """All heads keep N tokens: a mask with rows of different counts raises ValueError."""
    cache = cache_of(np.ones((1, 2, 3, 2)), np.ones((1, 2, 3, 2)))
    refused(impl, "kept", EVICT, cache, np.array([[[True, True, False], [True, False, False]]]))


@law("KD-5", of="keydiff_theory.attention_policy", seed=seeds(), budget=st.integers(1, 6))
def test_a_policy_keeps_the_best_of_the_aggregated_weights(impl, seed, budget):
    """phi = the last row of A keeps what the last query attends to (TOVA); phi = its column sums what all
    attended to (H2O).
    """
    weights = np.random.default_rng(seed).integers(0, 16, size=(2, 3, 4, 5)) / 64
    for aggregate, what in ((lambda a: a[..., -1, :], "last row"), (lambda a: a.sum(axis=-2), "column sums")):
        kept = impl.keydiff_theory.attention_policy(weights, budget, aggregate=aggregate)
        selects(kept, aggregate(weights), min(budget, 5), what=f"the policy of the {what}")


@law("KD-6", of=BLOCK, case=cases(), budget=budgets, block_size=block_sizes)
def test_each_block_joins_the_cache_and_all_but_the_best_go(impl, case, budget, block_size):
    """After each block the cache holds the N best of [cache ; block] by KD-8, so never more than N + B
    tokens are held.
    """
    cache, length = None, case.keys.shape[2]
    for start in range(0, length, block_size):
        stop = min(start + block_size, length)
        before = joined(impl, cache, case, start, stop)
        cache = impl.keydiff.process_block(
            cache, case.keys[..., start:stop, :], case.values[..., start:stop, :], budget=budget
        )
        check_step(impl, before, cache, budget)
        assert before.positions.shape[-1] <= budget + block_size


def kept_of_blocks(impl, keys, budget, block_size):
    """The positions that a plain loop over the blocks keeps, and
    which heads met no choice so close that rounding decides.
    """
    expected, clear = np.zeros((*keys.shape[:2], 0), dtype=int), np.ones(keys.shape[:2], dtype=bool)
    for start in range(0, keys.shape[2], block_size):
        block = np.arange(start, min(start + block_size, keys.shape[2]))
        candidates = np.concatenate(
            [expected, np.broadcast_to(block, (*keys.shape[:2], block.size))], axis=-1
        )
        scores = impl.allowance("keydiff.score", np.take_along_axis(keys, candidates[..., None], axis=2))
        ranked = np.sort(scores.expected, axis=-1)[..., ::-1]
        if candidates.shape[-1] > budget:
            clear &= ranked[..., budget - 1] - ranked[..., budget] > 2 * scores.largest
        order = np.argsort(-scores.expected, axis=-1, kind="stable")[..., :budget]
        expected = np.sort(np.take_along_axis(candidates, order, axis=-1), axis=-1)
    return expected, clear


# In the plane few choices are close, whatever the dtype.
@law(
    "KD-6",
    of=PROMPT,
    case=cases(),
    budget=budgets,
    block_size=block_sizes,
    channels=st.sampled_from([None, 2]),
)
def test_a_prompt_is_its_blocks_one_after_another(impl, case, budget, block_size, channels):
    """Where no choice is close, a head keeps the positions
    of the prompt that a plain loop over its blocks keeps.
    """
    keys = impl.round(case.keys)[..., :channels]
    # Which of two close tokens stays is judged step by step in the law above.
    expected, clear = kept_of_blocks(impl, keys, budget, block_size)
    got = impl.keydiff.process_prompt(keys, case.values, budget=budget, block_size=block_size)
    equal(
        got.positions[clear],
        expected[clear],
        "the prompt keeps other positions than its blocks one after another",
    )
    equal(got.seen, keys.shape[2], "the prompt has seen another number of tokens")
    holds_tokens(got, keys, impl.round(case.values))


@law("KD-6", of=PROMPT, case=cases(), budget=budgets, more=st.integers(0, 3))
def test_one_block_is_one_shot(impl, case, budget, more):
    """With B >= T the prompt is scored once, as a whole."""
    length = case.keys.shape[2]
    got = impl.keydiff.process_prompt(case.keys, case.values, budget=budget, block_size=length + more)
    check_step(impl, joined(impl, None, case, 0, length), got, budget)


@law("KD-6", of=DECODE, case=cases(min_length=2), budget=budgets)
def test_decoding_is_a_block_of_one(impl, case, budget):
    """Each new token joins the cache and one token goes, the new one among the candidates."""
    cache = joined(impl, None, case, 0, 1)
    for place in range(1, min(case.keys.shape[2], 6)):
        before = joined(impl, cache, case, place, place + 1)
        cache = impl.keydiff.decode(
            cache, case.keys[..., place, :], case.values[..., place, :], budget=budget
        )
        check_step(impl, before, cache, budget)


@law("KD-6", of=PROMPT, kind="edge")
def test_of_equal_tokens_the_earlier_stays(impl):
    """Keys e1, e1, e2, e1 with a budget of 2: e2 is the
    distinct one, and of the equal three the first is kept.
    """
    keys = np.array([[[[1.0, 0], [1, 0], [0, 1], [1, 0]]]])
    for block_size in (1, 2, 3, 4):
        got = impl.keydiff.process_prompt(keys, keys, budget=2, block_size=block_size).positions
        equal(got[0, 0], [0, 2], f"in blocks of {block_size} the prompt keeps other positions")


@law("KD-6", of=BLOCK, examples=2, case=long_cases(lengths=(8191, 4097, 12_289)))
def test_a_block_joins_a_cache_of_thousands(impl, case):
    """A block of a thousand tokens joins a cache of thousands: the 2,048 best of all of them stay, whole
    and in order.
    """
    first = case.length - 1000
    # The keys of the block point away from those of the cache: to lose one is a mistake of size.
    away = np.where(np.arange(case.length) < first, 3, -3)[:, None]
    keys, values = impl.round(case.keys + away), impl.round(case.values)
    cache = cache_of(keys[:, :, :first], values[:, :, :first])
    after = impl.keydiff.process_block(cache, keys[:, :, first:], values[:, :, first:], budget=2048)
    check_step(impl, cache_of(keys, values), after, 2048, *scores_in_parts(impl, keys))


@law("KD-6", of=(BLOCK, DECODE), examples=2, case=paper_cases((16_384, 8320, 6300)), budget=paper_budgets)
def test_blocks_of_128_join_a_full_cache(impl, case, budget):
    """At the paper's B = 128 and N = 2,048 to 8,192 each of the last blocks, and then each new token,
    leaves the N best.
    """
    keys, values = impl.round(case.keys + 2), impl.round(case.values)
    first = min(budget, case.length - 3 * 128 - 2)
    cache = cache_of(keys[:, :, :first], values[:, :, :first])
    for start, stop in zip([0, 128, 256, 384, 385], [128, 256, 384, 385, 386], strict=True):
        new = slice(first + start, first + stop)
        before = joined(impl, cache, case, new.start, new.stop)._replace(
            keys=np.concatenate([cache.keys, keys[:, :, new]], axis=2)
        )
        if stop - start == 1:
            cache = impl.keydiff.decode(cache, keys[:, :, new.start], values[:, :, new.start], budget=budget)
        else:
            cache = impl.keydiff.process_block(cache, keys[:, :, new], values[:, :, new], budget=budget)
        check_step(impl, before, cache, budget, *scores_in_parts(impl, before.keys))


@law("KD-6", of=PROMPT, examples=2, case=paper_cases((16_384, 32_769, 8320)), budget=paper_budgets)
def test_a_prompt_of_hundreds_of_blocks_keeps_what_is_distinct(impl, case, budget):
    """In blocks of 128, one key in 32 points another way:
    every one of them is kept, in whatever block it came.
    """
    distinct = np.arange(case.length) % 32 == case.seed % 32
    keys = np.zeros_like(case.keys)
    keys[:, :, distinct, 1] = keys[:, :, ~distinct, 0] = 1
    values = impl.round(case.values)
    got = impl.keydiff.process_prompt(keys, values, budget=budget, block_size=128)
    equal(
        got.positions.shape,
        (*keys.shape[:2], min(budget, case.length)),
        "the cache holds another number of tokens",
    )
    equal(
        distinct[got.positions].sum(axis=-1), distinct.sum(), "a distinct key was evicted, or is held twice"
    )
    holds_tokens(got, keys, values)
