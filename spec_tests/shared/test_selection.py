"""Laws of budgets and top-k: SEL-1 to SEL-4."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import sorted_choice

# Small whole numbers tie often and are the same in every dtype.
SCORES = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=9)


# Whole hundreds, where length * percent / 100 is whole and a binary float falls short of it.
LENGTHS = st.one_of(st.integers(1, 400).map(lambda hundreds: 100 * hundreds), st.integers(1, 10**6))


@law(
    "SEL-1",
    of="selection.budget",
    length=LENGTHS,
    percent=st.one_of(st.sampled_from([34, 55, 67, 79, 90]), st.integers(0, 99)),
)
def test_budget_is_the_exact_floor(impl, length, percent):
    """A ratio written in hundredths gives floor(length * (100 - percent) / 100), and at least 1."""
    got = impl.selection.budget(length, percent / 100)
    expected = max(1, length * (100 - percent) // 100)
    equal(got, expected, f"budget({length}, {percent / 100}) = {got}, wanted {expected}")


@law(
    "SEL-1",
    of="selection.budget",
    length=st.integers(1, 10**5),
    first=st.integers(0, 9999),
    second=st.integers(0, 9999),
)
def test_budget_falls_with_the_ratio(impl, length, first, second):
    """Removing a larger fraction never keeps more; the budget lies between 1 and the length."""
    low, high = sorted((first / 10**4, second / 10**4))
    more, fewer = impl.selection.budget(length, low), impl.selection.budget(length, high)
    require(
        1 <= fewer <= more <= length,
        f"budget({length}, {low}) = {more} and budget({length}, {high}) = {fewer}, wanted 1 <= .. <= "
        f"{length}",
    )


@law("SEL-1", of="selection.budget", kind="refusal")
def test_budget_refuses_a_ratio_in_words(impl):
    """A text that is no number raises ValueError."""
    refused(impl, "compression_ratio", "selection.budget", 10, "half")


@law(
    "SEL-2",
    of="selection.top_k",
    case=st.builds(
        Case,
        kind=st.sampled_from(KINDS),
        seed=seeds(),
        batch=st.integers(1, 2),
        num_kv_heads=st.integers(1, 3),
        length=st.sampled_from([1, 2, 16, 33, 65]),
        head_dim=st.just(1),
    ),
    share=shares(),
)
def test_top_k_keeps_the_best(impl, case, share):
    """Exactly min(budget, T) tokens of each row are kept, and none evicted scores more than one kept."""
    scores = impl.round(case.keys[..., 0])
    count = int(share * (case.length + 1))
    selects(impl.selection.top_k(scores, count), scores, min(count, case.length))


@law("SEL-2", of="selection.top_k", scores=SCORES, extra=st.integers(1, 5))
def test_a_budget_beyond_the_cache_keeps_all(impl, scores, extra):
    """A budget larger than the cache keeps every token."""
    row = np.array([[scores]])
    selects(impl.selection.top_k(row, len(scores) + extra), row, len(scores))


@law("SEL-2", of="selection.top_k", examples=5, seed=seeds(), share=shares())
def test_scores_of_every_size_rank(impl, seed, share):
    """Powers of two up to the largest that the dtype holds,
    their negatives and both infinities are told apart.
    """
    largest = {"float16": 15, "float64": 1023}.get(impl.dtype, 127)
    powers = np.append(2.0 ** np.arange(1 - largest, largest + 1), np.inf)
    scores = np.random.default_rng(seed).permutation(np.concatenate([powers, -powers]))[None, None]
    budget = max(1, int(share * scores.size))
    selects(impl.selection.top_k(scores, budget), scores, budget)


@law("SEL-3", of="selection.top_k", kind="edge", scores=SCORES, share=shares())
def test_ties_go_to_the_lower_position(impl, scores, share):
    """The kept set is the one that a stable sort by falling score gives."""
    count = int(share * (len(scores) + 1))
    best = sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:count]
    expected = np.isin(np.arange(len(scores)), best)
    got = impl.selection.top_k(np.array([[scores]]), count)
    selects(got, np.array([[scores]]), min(count, len(scores)))
    equal(got[0, 0], expected, "a token at a higher position was kept before an equal one at a lower")


@law("SEL-4", of="selection.top_k", scores=SCORES, data=st.data())
def test_protected_tokens_are_kept_first(impl, scores, data):
    """All protected tokens are kept; the rest of the budget goes to the best of the others."""
    length = len(scores)
    protected = np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    count = data.draw(st.integers(int(protected.sum()), length))
    row = np.array([[scores]])
    got = impl.selection.top_k(row, count, protected[None, None])
    selects(got, row, count, protected=protected[None, None])


@law("SEL-4", of="selection.top_k")
def test_each_row_protects_its_own(impl):
    """Six rows protect the same token with a budget of one:
    one token in each row, however many rows there are.
    """
    protected = np.array([[[False, False, True]] * 3] * 2)
    got = impl.selection.top_k(np.zeros((2, 3, 3)), 1, protected)
    equal(got, protected, "a row does not keep the one token that it protects")


def not_counted(impl) -> str:
    return "" if impl.reads_numbers else f"on {impl.device} nobody waits for the number of protected tokens"


@law("SEL-4", of="selection.top_k", kind="refusal", not_for=not_counted, scores=SCORES)
def test_more_protected_than_the_budget_is_refused(impl, scores):
    """Protecting every token with a smaller budget raises ValueError."""
    refused(
        impl,
        "protected",
        "selection.top_k",
        np.array([[scores]]),
        len(scores) - 1,
        np.ones((1, 1, len(scores)), dtype=bool),
    )


def masked_rows(impl, case, share):
    """Rows of scores as a serving engine has them: each with a length of its own, -inf in the padding
    behind it, and one +inf.
    """
    scores = impl.round(100 * case.keys[..., 0])
    ends = case.length - np.arange(case.num_kv_heads) * case.length // 3 - int(share * case.length / 4)
    scores[np.broadcast_to(np.arange(case.length) >= ends[:, None], scores.shape)] = -np.inf
    scores[..., case.length // 2] = np.inf
    return scores


LARGE = st.sampled_from([2048, 30_000, 64, 4096])


@law("SEL-2", of="selection.top_k", examples=10, case=long_rows(), share=shares(), budget=LARGE)
def test_a_long_row_keeps_its_best(impl, case, share, budget):
    """Of up to 131,072 scores, many equal, hardly apart or infinite, none evicted is above one kept."""
    scores = masked_rows(impl, case, share)
    selects(impl.selection.top_k(scores, budget), scores, min(budget, case.length))


@law("SEL-3", of="selection.top_k", kind="edge", examples=4, case=long_rows(), share=shares(), budget=LARGE)
def test_a_long_row_is_chosen_as_by_a_stable_sort(impl, case, share, budget):
    """Of up to 131,072 scores, many equal, the budget's best are kept, the lower position first."""
    scores = masked_rows(impl, case, share)
    expected = sorted_choice(scores, budget, np.zeros(scores.shape, dtype=bool))
    equal(
        impl.selection.top_k(scores, budget),
        expected,
        "other tokens of a long row are kept than by a stable sort",
    )


@law(
    "SEL-3",
    of="selection.top_k",
    kind="edge",
    examples=2,
    case=long_rows(("saturated",), lengths=(131_072, 131_071)),
)
def test_a_hundred_thousand_equal_scores_are_counted(impl, case):
    """Nine of ten scores are 0: those above stay, and of the zeros the lower positions, up to three
    quarters of the row.
    """
    scores = impl.round(case.keys[..., 0])
    expected = sorted_choice(scores, case.length * 3 // 4, np.zeros(scores.shape, dtype=bool))
    got = impl.selection.top_k(scores, case.length * 3 // 4)
    equal(got, expected, "other tokens of a saturated row are kept than by a stable sort")


@law("SEL-4", of="selection.top_k", examples=5, case=long_rows(), share=shares())
def test_protected_tokens_of_a_long_row_are_kept_first(impl, case, share):
    """Some two thousand protected tokens, in the padding too,
    are kept, and the best of the others up to the budget.
    """
    scores = masked_rows(impl, case, share)
    # whoever sets protected scores to infinity could not tell them apart
    scores = np.where(scores == np.inf, 0, scores)
    protected = np.random.default_rng(case.seed).random(scores.shape) < 2000 / case.length
    budget = int(protected.sum(axis=-1).max()) + int(share * 2048)
    selects(
        impl.selection.top_k(scores, budget, protected), scores, min(budget, case.length), protected=protected
    )


@law(
    "SEL-2",
    of="selection.top_k",
    examples=10,
    case=long_rows(("normal", "vast", "minute", "saturated")),
    share=shares(),
)
def test_a_long_row_keeps_its_budget(impl, case, share):
    """Exactly min(budget, T) tokens of a long row are kept, and none evicted scores more than one kept."""
    scores = impl.round(case.keys[..., 0])
    budget = int(share * case.length)
    selects(impl.selection.top_k(scores, budget), scores, budget)


@law("SEL-2", of="selection.regret", brute_force=True, case=cases(max_length=5), seed=seeds())
def test_regret_is_what_the_best_set_has_more(impl, case, seed):
    """The largest sum of as many scores, over every set of that size, less the sum of the kept ones: 0 for
    the best set.
    """
    scores = impl.round(case.keys[..., 0])
    kept = np.random.default_rng(seed).random(scores.shape) < 0.5
    got = impl.selection.regret(scores, kept)
    expected = np.zeros(scores.shape[:-1])
    for place in np.ndindex(expected.shape):
        sums = map(math.fsum, itertools.combinations(scores[place].tolist(), int(kept[place].sum())))
        expected[place] = max(sums) - math.fsum(scores[place][kept[place]])
    terms, size = scores.shape[-1], np.abs(scores).sum(axis=-1)
    rounds_to(impl, got, expected, "the regret", terms=terms, size=size)
