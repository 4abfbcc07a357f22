"""Laws of delayed eviction: DM-1, DM-2, DM-3."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import a_mask, draw_mask

DUE, JUDGE, THRESHOLD = "dms.due", "dms.judge", "dms.threshold"
windows, lengths_of = st.sampled_from([0, 1, 2, 5, 16, 40]), st.sampled_from([33, 17, 9, 2, 1])
arrivals = st.sampled_from([0, 1, 3, 16, 40])
taus = st.sampled_from([0.25, 0.0, -1.0, 1.5, -np.inf, np.inf])


def quarters(seed, *shape):
    """Scores in quarters, many of them equal, some infinite: the same in every dtype."""
    generator = np.random.default_rng(seed)
    scores = np.clip(np.round(4 * generator.normal(size=shape)), -16, 16) / 4
    at = generator.random(shape)
    return np.where(at < 0.05, -np.inf, np.where(at > 0.95, np.inf, scores))


def due_by_hand(filled, arrived, window_size):
    """The tokens of each head from the newest one back: a window waits, and as many as arrived are due."""
    found = np.zeros(filled.shape, dtype=bool)
    for head in np.ndindex(filled.shape[:-1]):
        newest_first = np.flatnonzero(filled[head])[::-1]
        found[head][newest_first[window_size : window_size + arrived]] = True
    return found


def kept_by_hand(scores, filled, thresholds, arrived, window_size):
    """Each token that is due against the threshold of its batch item."""
    kept = filled.copy()
    for place in zip(*np.nonzero(due_by_hand(filled, arrived, window_size)), strict=True):
        kept[place] = not scores[place] < thresholds[place[0]]
    return kept


def judged(impl, scores, filled, thresholds, arrived, window_size):
    """What is kept; Violation unless it is a mask."""
    return a_mask(impl.dms.judge(scores, filled, thresholds, arrived, window_size=window_size), scores.shape)


def in_blocks(impl, scores, thresholds, window_size, sizes):
    """The kept tokens after each block of a text: what is kept of the blocks before, and the new block."""
    filled, end, found = np.zeros(scores.shape, dtype=bool), 0, []
    for size in sizes:
        filled[..., end : end + size] = True
        end += size
        so_far = judged(impl, scores[..., :end], filled[..., :end], thresholds, size, window_size)
        filled[..., :end] = so_far
        found.append(filled.copy())
    return found


def cuts(seed, length):
    """The sizes of blocks, of one token and of many, that make up a text."""
    generator = np.random.default_rng(seed)
    sizes: list[int] = []
    while (left := length - sum(sizes)) > 0:
        sizes.append(min(left, int(generator.choice([1, 1, 2, 7, 20]))))
    return sizes


@law("DM-1", of=DUE, seed=seeds(), length=lengths_of, arrived=arrivals, window_size=windows)
def test_a_token_is_due_when_it_has_left_the_window(impl, seed, length, arrived, window_size):
    """Its age counts the tokens of its own head, which has empty places."""
    filled = draw_mask((2, 3, length), seed)
    got = a_mask(impl.dms.due(filled, arrived, window_size=window_size), filled.shape)
    equal(got, due_by_hand(filled, arrived, window_size), "other tokens are due")


@law("DM-1", of=DUE)
def test_nine_tokens_by_hand(impl):
    """With a window of three and two new tokens, 4 and 5 of 0 to 8 are due; without 7 and 4, 2 and 3."""
    filled = np.ones((1, 2, 9), dtype=bool)
    filled[0, 1, [4, 7]] = False
    wanted = [[np.isin(np.arange(9), [4, 5]), np.isin(np.arange(9), [2, 3])]]
    equal(impl.dms.due(filled, 2, window_size=3), wanted, "other tokens are due")


@law("DM-1", of=DUE, seed=seeds(), length=st.sampled_from([60, 33, 8]), window_size=windows)
def test_each_token_is_due_once(impl, seed, length, window_size):
    """Block after block of a text: all are due once but the last ones, which wait."""
    times, end = np.zeros(length, dtype=int), 0
    for size in cuts(seed, length):
        end += size
        got = impl.dms.due(np.ones((1, 1, end), dtype=bool), size, window_size=window_size)
        times[:end] += a_mask(got, (1, 1, end))[0, 0]
    wanted = (np.arange(length) < length - window_size).astype(int)
    equal(times, wanted, "a token is due another number of times")


@law("DM-1", of=DUE)
def test_a_hundred_and_twenty_eight_tokens_wait_unless_told(impl):
    """Of 131 tokens that arrived the first three are due."""
    got = impl.dms.due(np.ones((1, 1, 131), dtype=bool), 131)
    equal(got, (np.arange(131) < 3)[None, None], "other tokens are due")


@law("DM-1", of=DUE, seed=seeds(), window_size=windows)
def test_all_tokens_have_arrived_unless_told(impl, seed, window_size):
    """Then all but the window are due."""
    filled = draw_mask((2, 3, 33), seed)
    got = a_mask(impl.dms.due(filled, window_size=window_size), filled.shape)
    equal(got, due_by_hand(filled, 33, window_size), "other tokens are due")


@law("DM-2", of=JUDGE, seed=seeds(), tau=taus, window_size=windows)
def test_all_tokens_before_the_window_are_judged_unless_told(impl, seed, tau, window_size):
    """As if all tokens had arrived."""
    scores, filled = quarters(seed, 2, 3, 33), draw_mask((2, 3, 33), seed + 1)
    got = a_mask(impl.dms.judge(scores, filled, np.full(2, tau), window_size=window_size), scores.shape)
    wanted = kept_by_hand(scores, filled, np.full(2, tau), 33, window_size)
    equal(got, wanted, "another token stays")


@law("DM-1", of=DUE, seed=seeds(), arrived=arrivals, window_size=windows)
def test_each_head_counts_its_own_tokens(impl, seed, arrived, window_size):
    """What is due in a head alone is due among others."""
    filled = draw_mask((2, 3, 33), seed)
    together = impl.dms.due(filled, arrived, window_size=window_size)
    for item, head in np.ndindex(2, 3):
        own = slice(item, item + 1), slice(head, head + 1)
        alone = impl.dms.due(filled[own], arrived, window_size=window_size)
        equal(together[own], alone, "a head has other tokens due among others than alone")


@law("DM-2", of=JUDGE, seed=seeds(), length=lengths_of, arrived=arrivals, window_size=windows, tau=taus)
def test_a_token_that_is_due_goes_below_the_threshold(impl, seed, length, arrived, window_size, tau):
    """Each batch item has its own threshold, and at the threshold a token stays."""
    scores, filled = quarters(seed, 2, 3, length), draw_mask((2, 3, length), seed + 1)
    thresholds = np.array([tau, 0.5])
    got = judged(impl, scores, filled, thresholds, arrived, window_size)
    equal(got, kept_by_hand(scores, filled, thresholds, arrived, window_size), "another token stays")


@law("DM-2", of=JUDGE, seed=seeds(), length=lengths_of, window_size=st.sampled_from([1, 2, 7, 16]), tau=taus)
def test_a_text_at_once_is_judged_as_by_kvzap(impl, seed, length, window_size, tau):
    """The rule of KVzap (ZA-1) is that of a text whose tokens all arrive at once."""
    scores = quarters(seed, 2, 3, length)
    got = judged(impl, scores, np.ones(scores.shape, dtype=bool), np.full(2, tau), length, window_size)
    equal(
        got, oracle("kvzap.dms")(scores, threshold=tau, window_size=window_size), "KVzap keeps other tokens"
    )


@law("DM-2", of=JUDGE, seed=seeds(), length=lengths_of, tau=taus)
def test_without_delay_a_threshold_decides_at_once(impl, seed, length, tau):
    """With w = 0 a token stays exactly if its score is not below the threshold."""
    scores = quarters(seed, 2, 3, length)
    got = judged(impl, scores, np.ones(scores.shape, dtype=bool), np.full(2, tau), length, 0)
    equal(got, ~(scores < tau), "another token stays")


@law("DM-2", of=JUDGE, seed=seeds(), length=lengths_of, arrived=arrivals, window_size=windows)
def test_the_last_tokens_stay(impl, seed, length, arrived, window_size):
    """The last w tokens of each head stay, and the tokens that were judged before, whatever they score."""
    scores, filled = quarters(seed, 2, 3, length), draw_mask((2, 3, length), seed + 1)
    got = judged(impl, scores, filled, np.full(2, np.inf), arrived, window_size)
    window = due_by_hand(filled, window_size, 0)
    require((got >= window).all(), "a token of the window goes", got=got)
    before = due_by_hand(filled, length, window_size + arrived)
    require((got >= before).all(), "a token is judged a second time", got=got)


@law("DM-2", of=JUDGE, seed=seeds(), length=lengths_of, arrived=arrivals, window_size=windows)
def test_a_higher_threshold_keeps_a_part_of_what_a_lower_one_keeps(impl, seed, length, arrived, window_size):
    """From -infinity, which keeps all, to infinity, which keeps no due token with a finite score."""
    scores, rising = quarters(seed, 2, 3, length), (-np.inf, -2.0, -0.25, 0.0, 1.5, np.inf)
    filled = draw_mask((2, 3, length), seed + 1)
    kept = [judged(impl, scores, filled, np.full(2, tau), arrived, window_size) for tau in rising]
    falls = all((low >= high).all() for low, high in itertools.pairwise(kept))
    require(falls, "a higher threshold keeps another token", got=kept)
    equal(kept[0], filled, "the threshold -infinity evicts a token")
    wanted = filled & ~(due_by_hand(filled, arrived, window_size) & (scores < np.inf))
    equal(kept[-1], wanted, "infinity keeps another token")


@law("DM-2", of=JUDGE, seed=seeds(), length=st.sampled_from([60, 33, 8]), window_size=windows, tau=taus)
def test_blocks_of_a_text_end_as_the_text_at_once(impl, seed, length, window_size, tau):
    """Where the score of a token does not change, its fate does not depend on the blocks."""
    scores, thresholds = quarters(seed, 2, 3, length), np.array([tau, 0.25])
    (at_once,) = in_blocks(impl, scores, thresholds, window_size, [length])
    *_, last = in_blocks(impl, scores, thresholds, window_size, cuts(seed, length))
    equal(last, at_once, "the blocks of a text decide")


@law("DM-2", of=JUDGE, seed=seeds(), window_size=windows, tau=taus)
def test_what_went_never_comes_back(impl, seed, window_size, tau):
    """Nor does a judged token go later, when its score has changed."""
    thresholds, sizes = np.array([tau, 0.25]), cuts(seed, 48)
    filled, end = np.zeros((2, 3, 48), dtype=bool), 0
    for step, size in enumerate(sizes):
        before, old = filled.copy(), max(end - window_size, 0)
        filled[..., end : end + size] = True
        end += size
        scores = quarters(seed + step, 2, 3, end)
        filled[..., :end] = judged(impl, scores, filled[..., :end], thresholds, size, window_size)
        equal(filled[..., :old], before[..., :old], "a judged token is judged again, or comes back")


@law("DM-2", of=JUDGE)
def test_five_tokens_by_hand(impl):
    """Scores 1, 3, 2, 0, 0 with a window of two: 2 stays at the threshold 2, and 1 goes."""
    scores, filled = np.array([[[1.0, 3, 2, 0, 0]]]), np.ones((1, 1, 5), dtype=bool)
    got = impl.dms.judge(scores, filled, np.array([2.0]), 5, window_size=2)
    equal(got, [[[False, True, True, True, True]]], "another token stays")


@law("DM-2", of=JUDGE)
def test_a_hundred_and_twenty_eight_tokens_are_not_judged_unless_told(impl):
    """Of 131 tokens that arrived with low scores the first three go."""
    got = impl.dms.judge(np.zeros((1, 1, 131)), np.ones((1, 1, 131), dtype=bool), np.ones(1), 131)
    equal(got, (np.arange(131) >= 3)[None, None], "other tokens stay")


@law("DM-2", of=JUDGE, seed=seeds(), arrived=arrivals, window_size=windows, tau=taus)
def test_a_head_is_judged_alone_as_among_others(impl, seed, arrived, window_size, tau):
    """Each head of each batch item, with the threshold of the item."""
    scores, filled = quarters(seed, 2, 3, 33), draw_mask((2, 3, 33), seed + 1)
    thresholds = np.array([tau, 0.25])
    together = judged(impl, scores, filled, thresholds, arrived, window_size)
    for item, head in np.ndindex(2, 3):
        own = slice(item, item + 1), slice(head, head + 1)
        alone = judged(impl, scores[own], filled[own], thresholds[own[0]], arrived, window_size)
        equal(together[own], alone, "a head keeps other tokens among others than alone")


def threshold_by_hand(scores, due, going):
    """The judged scores of each batch item in order, and one behind those that are to go."""
    found = []
    for own, here, count in zip(scores, due, going, strict=True):
        in_order = [*sorted(own[here]), np.inf]
        found.append(in_order[min(count, len(in_order) - 1)] if count else -np.inf)
    return np.array(found)


@law(
    "DM-3",
    of=THRESHOLD,
    seed=seeds(),
    length=lengths_of,
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 2.0]),
)
def test_as_many_scores_lie_below_the_threshold_as_are_to_go(impl, seed, length, share):
    """The heads of a layer share the threshold; what is not judged does not count."""
    scores, mask = quarters(seed, 2, 3, length), draw_mask((2, 3, length), seed + 1)
    going = np.floor(share * mask.sum(axis=(1, 2))).astype(int)
    got = impl.dms.threshold(scores, mask, going)
    equal(got, threshold_by_hand(scores, mask, going), "another threshold")


@law("DM-3", of=THRESHOLD, seed=seeds(), length=st.sampled_from([33, 17, 9, 2]), going=st.integers(0, 30))
def test_of_different_scores_exactly_those_go(impl, seed, length, going):
    """Where no two scores are equal, the lowest ones of all heads lie below, and none beside them."""
    scores = np.random.default_rng(seed).permutation(6 * length).reshape(2, 3, length) / 4
    got = impl.dms.threshold(scores, np.ones(scores.shape, dtype=bool), np.full(2, going))
    below = (scores < got[:, None, None]).sum(axis=(1, 2))
    equal(below, np.full(2, min(going, 3 * length)), "another number of scores lies below")


@law("DM-3", of=THRESHOLD, kind="edge", seed=seeds(), going=st.integers(1, 40))
def test_equal_scores_stay_together(impl, seed, going):
    """Of equal scores at the threshold all stay: at most as many go as are to go, and no more could."""
    scores = np.random.default_rng(seed).integers(-2, 3, size=(2, 3, 9)).astype(float)
    got = impl.dms.threshold(scores, np.ones(scores.shape, dtype=bool), np.full(2, going))
    for own, tau in zip(scores, got, strict=True):
        require((own < tau).sum() <= going, "more tokens go than are to go", going, (own < tau).sum())
        higher = (own <= tau).sum() if tau < np.inf else 27
        require(higher > going or higher == 27, "a higher threshold would do", going, higher)


@law("DM-3", of=THRESHOLD, kind="edge", seed=seeds())
def test_none_and_all(impl, seed):
    """Where none is to go the threshold is -infinity, so that none goes later; where all are, infinity."""
    scores, mask = quarters(seed, 2, 3, 17), draw_mask((2, 3, 17), seed + 1)
    mask[..., 0] = True
    everything = mask.sum(axis=(1, 2))
    equal(impl.dms.threshold(scores, mask, 0 * everything), [-np.inf] * 2, "a token would go")
    equal(impl.dms.threshold(scores, mask, everything), [np.inf] * 2, "a token would stay")


@law("DM-3", of=THRESHOLD)
def test_two_heads_by_hand(impl):
    """Scores 5, 1, 4 and 2, 9, 0 of which 0 is not judged: three below 5 are 1, 2 and 4."""
    scores = np.array([[[5.0, 1, 4], [2, 9, 0]]])
    judged_ = np.array([[[True] * 3, [True, True, False]]])
    equal(impl.dms.threshold(scores, judged_, np.array([3])), [5.0], "another threshold")


@law("DM-3", of=THRESHOLD, seed=seeds(), counts=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_a_batch_item_has_its_threshold_alone_as_among_others(impl, seed, counts):
    """A request has the same threshold in a batch."""
    scores, mask, going = quarters(seed, 2, 3, 17), draw_mask((2, 3, 17), seed + 1), np.array(counts)
    together = impl.dms.threshold(scores, mask, going)
    for item in range(2):
        own = slice(item, item + 1)
        alone = impl.dms.threshold(scores[own], mask[own], going[own])
        equal(together[own], alone, "an item has another threshold among others than alone")


@law("DM-2", of=JUDGE, examples=2, case=long_rows(("normal",)), window_size=st.sampled_from([128, 1024]))
def test_a_long_row_is_judged_once(impl, case, window_size):
    """Of up to 131,072 tokens, some evicted before, the last 4,096 have arrived."""
    scores = impl.round(case.keys[..., 0])
    filled, thresholds = draw_mask(scores.shape, case.seed), np.zeros(len(scores))
    filled[..., -4096 - window_size :] = True
    got = judged(impl, scores, filled, thresholds, 4096, window_size)
    equal(got, kept_by_hand(scores, filled, thresholds, 4096, window_size), "another token stays")


@law("DM-3", of=THRESHOLD, examples=2, case=long_rows(("normal",)), share=st.sampled_from([0.1, 0.5, 0.9]))
def test_a_long_row_has_the_threshold_of_its_order(impl, case, share):
    """Of up to 131,072 tokens in each head."""
    scores = impl.round(case.keys[..., 0])
    mask = np.ones(scores.shape, dtype=bool)
    going = np.full(len(scores), int(share * scores[0].size))
    equal(
        impl.dms.threshold(scores, mask, going), threshold_by_hand(scores, mask, going), "another threshold"
    )
