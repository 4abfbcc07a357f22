"""Laws of ChunkKV: CH-1, CH-2, CH-3."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import a_mask

CHOOSE, MEANS = "chunk_kv.choose", "chunk_kv.chunk_means"
sizes = st.sampled_from([1, 2, 3, 4, 7, 10, 40])
budgets = st.integers(0, 40)


def chunks(length, chunk_size):
    return [slice(start, start + chunk_size) for start in range(0, length, chunk_size)]


def means_by_hand(scores, chunk_size):
    """The mean of each chunk, summed without rounding."""
    rows = scores.reshape(-1, scores.shape[-1])
    found = [[math.fsum(row[part]) / len(row[part]) for part in chunks(len(row), chunk_size)] for row in rows]
    return np.array(found).reshape(*scores.shape[:-1], -1)


@law("CH-2", of=MEANS, case=cases(max_length=33), chunk_size=sizes)
def test_a_chunk_scores_the_mean_of_its_tokens(impl, case, chunk_size):
    """The mean is over the tokens that are there: the last chunk may be shorter."""
    scores = impl.round(case.keys[..., 0])
    agrees(impl, MEANS, scores, chunk_size=chunk_size, by_hand=means_by_hand(scores, chunk_size))


@law("CH-2", of=MEANS, kind="edge")
def test_an_infinite_score_decides_for_its_chunk(impl):
    """A chunk with the score infinity has it for a mean, whatever else is in it; one with -infinity
    otherwise has that.
    """
    scores = np.array([[[np.inf, 1, np.inf, -np.inf, -np.inf, 2, 3, 5]]])
    got = impl.chunk_kv.chunk_means(scores, chunk_size=2)
    equal(got, [[[np.inf, np.inf, -np.inf, 4]]], "the mean of a chunk with an infinite score")


@law("CH-1", of=CHOOSE, case=cases(max_length=33), budget=budgets, chunk_size=sizes)
def test_a_head_keeps_whole_chunks_and_at_most_one_in_part(impl, case, budget, chunk_size):
    """Each head keeps exactly min(budget, T) tokens; of the chunk that is kept in part its best."""
    scores = impl.round(case.keys[..., 0])
    kept = a_mask(impl.chunk_kv.choose(scores, budget, chunk_size=chunk_size), scores.shape)
    equal(kept.sum(axis=-1), min(budget, scores.shape[-1]), "a head keeps another number of tokens")
    for head in np.ndindex(scores.shape[:2]):
        parts = [part for part in chunks(scores.shape[-1], chunk_size) if len(set(kept[head][part])) == 2]
        require(len(parts) <= 1, "several chunks are kept in part", "at most one", parts)
        for part in parts:
            selects(kept[head][part], scores[head][part], int(kept[head][part].sum()), what="a chunk")


@law("CH-3", of=CHOOSE, case=cases(max_length=33), budget=budgets, chunk_size=sizes)
def test_no_evicted_chunk_has_a_higher_mean_than_a_kept_one(impl, case, budget, chunk_size):
    """A chunk of which a token stays scores at least as much as each chunk of which a token goes."""
    scores = impl.round(case.keys[..., 0])
    kept = a_mask(impl.chunk_kv.choose(scores, budget, chunk_size=chunk_size), scores.shape)
    means, starts = means_by_hand(scores, chunk_size), range(0, scores.shape[-1], chunk_size)
    slack = impl.allowance(MEANS, scores, chunk_size=chunk_size)
    for of_tokens in (np.logical_or, np.logical_and):  # the chunks of which some tokens stay, and all
        stays = of_tokens.reduceat(kept, starts, axis=-1)
        selects(stays, means, stays.sum(axis=-1), slack=slack, what="the choice of chunks")


@law("CH-3", of=CHOOSE, budget=st.integers(0, 5))
def test_five_tokens_by_hand(impl, budget):
    """Scores 7, 1 | 4, 5 | 6: the single token comes first, then 5 and 4, then the seven: means 6, 4.5, 4."""
    kept = impl.chunk_kv.choose(np.array([[[7.0, 1, 4, 5, 6]]]), budget, chunk_size=2)
    equal(kept, np.isin(np.arange(5), [4, 3, 2, 0, 1][:budget])[None, None], "other tokens are kept")


@law("CH-1", of=CHOOSE)
def test_a_chunk_has_ten_tokens_unless_told(impl):
    """Of 40 tokens, of which number 13 scores 1 and the others 0, ten stay: 10 to 19."""
    scores = (np.arange(40) == 13).astype(float)[None, None]
    equal(np.flatnonzero(impl.chunk_kv.choose(scores, 10)), np.arange(10, 20), "another chunk is kept")


@law("CH-1", of=CHOOSE, kind="edge", budget=budgets, chunk_size=sizes, length=st.integers(1, 40))
def test_of_equal_chunks_the_earlier_stay(impl, budget, chunk_size, length):
    """Where all tokens score 1, the first of them stay."""
    kept = impl.chunk_kv.choose(np.ones((1, 2, length)), budget, chunk_size=chunk_size)
    equal(kept, np.broadcast_to(np.arange(length) < budget, kept.shape), "a later token of equal score stays")


@law("CH-3", of=CHOOSE, case=cases(max_length=33), budget=budgets, whole=st.booleans())
def test_chunks_of_one_token_or_of_all_choose_the_best_tokens(impl, case, budget, whole):
    """Then the choice is a top-k."""
    scores = impl.round(case.keys[..., 0])
    length = scores.shape[-1]
    kept = impl.chunk_kv.choose(scores, budget, chunk_size=length if whole else 1)
    selects(kept, scores, min(budget, length))


@law("CH-1", of=CHOOSE, seed=seeds(), budget=budgets, chunk_size=sizes)
def test_each_head_of_each_batch_item_chooses_for_itself(impl, seed, budget, chunk_size):
    """What a head keeps alone, it keeps among others. The
    scores are whole, so no order depends on rounding.
    """
    scores = np.random.default_rng(seed).integers(-8, 9, size=(2, 3, 40)).astype(float)
    together = impl.chunk_kv.choose(scores, budget, chunk_size=chunk_size)
    for item, head in np.ndindex(2, 3):
        own = slice(item, item + 1), slice(head, head + 1)
        alone = impl.chunk_kv.choose(scores[own], budget, chunk_size=chunk_size)
        equal(together[own], alone, "a head keeps other tokens among others than alone")


@law("CH-3", of=CHOOSE, examples=2, case=long_rows(("normal",)), chunk_size=st.sampled_from([16, 64, 4]))
def test_a_long_row_keeps_its_best_chunks(impl, case, chunk_size):
    """Rows of up to 131,072 tokens of whole scores keep half of their chunks, the best."""
    scores = np.round(4 * case.keys[..., : case.length // chunk_size * chunk_size, 0])
    count = scores.shape[-1] // chunk_size // 2
    kept = a_mask(impl.chunk_kv.choose(scores, count * chunk_size, chunk_size=chunk_size), scores.shape)
    sums = scores.reshape(*scores.shape[:-1], -1, chunk_size).sum(axis=-1)
    kept = kept.reshape(*sums.shape, chunk_size)
    equal(kept.all(axis=-1), kept.any(axis=-1), "a chunk is kept in part")
    selects(kept.all(axis=-1), sums, count, what="a long row")
