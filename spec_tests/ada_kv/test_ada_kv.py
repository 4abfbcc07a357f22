"""Laws of AdaKV: AD-1, AD-2, AD-3."""

from evictionary.spec_tests.ada_kv.helpers import as_good, shared_by_hand, shared_by_sorting
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import a_mask, without

SELECT = "ada_kv.select"
LAYERS = st.builds(
    Case,
    kind=st.sampled_from(KINDS),
    seed=seeds(),
    batch=st.integers(1, 2),
    num_kv_heads=st.integers(1, 4),
    length=st.sampled_from([1, 2, 5, 16, 33]),
    head_dim=st.just(1),
)
hundredths = st.integers(0, 100)


def chosen(impl, scores, budget, percent, **settings):
    """What each head keeps with a floor of so many hundredths; Violation unless it is a mask."""
    return a_mask(impl.ada_kv.select(scores, budget, floor_ratio=percent / 100, **settings), scores.shape)


def one_by_one(scores, budget, percent, protected):
    """AdaKV token by token, for each layer."""
    layers = zip(scores, protected, strict=True)
    return np.array([shared_by_hand(layer, budget, percent / 100, mask) for layer, mask in layers])


@law("AD-1", of=SELECT, case=LAYERS, budget=st.integers(0, 40), percent=hundredths)
def test_the_layer_total_is_exact(impl, case, budget, percent):
    """Each batch item keeps exactly H_kv * min(budget, T) tokens, however they fall on the heads."""
    scores = impl.round(case.keys[..., 0])
    kept = chosen(impl, scores, budget, percent)
    expected = scores.shape[1] * min(budget, scores.shape[2])
    equal(kept.sum(axis=(1, 2)), expected, "the layer keeps another number of tokens")


@law("AD-1", of=SELECT, case=LAYERS, budget=st.integers(0, 40))
def test_without_a_floor_it_is_one_top_k_over_the_layer(impl, case, budget):
    """With floor_ratio 0 no evicted token scores more than a kept one of any head."""
    scores = impl.round(case.keys[..., 0])
    kept = chosen(impl, scores, budget, 0)
    layer = scores.reshape(scores.shape[0], -1)
    selects(kept.reshape(layer.shape), layer, scores.shape[1] * min(budget, scores.shape[2]))


@law("AD-1", of=SELECT, kind="edge", case=LAYERS, budget=st.integers(0, 40), percent=hundredths)
def test_of_equal_scores_the_lower_head_then_position_stays(impl, case, budget, percent):
    """Which of equal scores stay is our decision: as if every token were taken one by one, in their order."""
    scores = impl.round(case.keys[..., 0])
    expected = one_by_one(scores, budget, percent, np.zeros(scores.shape, dtype=bool))
    equal(
        impl.ada_kv.select(scores, budget, floor_ratio=percent / 100),
        expected,
        "a tie went elsewhere",
    )


@law("AD-2", of=SELECT, case=LAYERS, budget=st.integers(0, 40), percent=hundredths)
def test_each_head_keeps_its_floor(impl, case, budget, percent):
    """Each head keeps at least floor(alpha * budget) tokens, and what it keeps are its own best. Every other
    head scores less than the rest.
    """
    scores = impl.round(case.keys[..., 0] - (4 * (np.arange(case.num_kv_heads) % 2)[:, None]))
    kept = chosen(impl, scores, budget, percent)
    floor = percent * min(budget, scores.shape[2]) // 100
    require(
        (kept.sum(axis=-1) >= floor).all(),
        "a head keeps fewer tokens than its floor",
        floor,
        kept.sum(axis=-1),
    )
    for head in np.ndindex(scores.shape[:2]):
        selects(kept[head], scores[head], int(kept[head].sum()), what=f"head {head}")


@law("AD-2", of=SELECT, examples=1, seed=seeds())
def test_every_hundredth_is_exact_at_the_budgets_of_the_papers(impl, seed):
    """Of budgets of 100 to 1,024, of a batch of three: a head that scores below the other keeps exactly
    floor(alpha * budget).
    """
    for budget in (100, 500, 1024):
        for case in narrow(impl, seed, (2 * budget + 21,), num_kv_heads=2, head_dim=width(impl)):
            scores = impl.round(np.round(8 * case.keys[..., 0]) / 8)
            low = (np.arange(case.batch)[:, None] + np.arange(2)) % 2 == 1
            scores -= 256 * low[..., None]
            for percent in range(101):
                kept = impl.ada_kv.select(scores, budget, floor_ratio=percent / 100)
                floor = percent * budget // 100
                equal(
                    kept.sum(axis=-1),
                    np.where(low, floor, 2 * budget - floor),
                    f"with a floor of {percent} of 100",
                )


@law("AD-2", of=SELECT, case=LAYERS, budget=st.integers(0, 40))
def test_a_floor_of_all_is_the_uniform_budget(impl, case, budget):
    """With floor_ratio 1 every head keeps min(budget, T) tokens."""
    scores = impl.round(case.keys[..., 0])
    selects(impl.ada_kv.select(scores, budget, floor_ratio=1.0), scores, min(budget, scores.shape[2]))


@law(
    "AD-2",
    of=SELECT,
    rows=st.lists(st.lists(st.integers(-2, 3), min_size=3, max_size=3), min_size=2, max_size=2),
    budget=st.integers(0, 3),
    percent=st.sampled_from([0, 34, 50, 67, 100]),
)
def test_no_selection_with_the_floor_scores_more(impl, rows, budget, percent):
    """Among all selections of the layer total that give each head its floor, none has a larger sum of
    scores: all are tried.
    """
    scores = np.array([rows], dtype=np.float64)
    kept = chosen(impl, scores, budget, percent)
    floor = percent * budget // 100
    best = max(
        sum(scores.flat[list(chosen)])
        for chosen in itertools.combinations(range(6), 2 * budget)
        if min(sum(index < 3 for index in chosen), sum(index >= 3 for index in chosen)) >= floor
    )
    equal(scores[kept].sum(), best, "another selection with the same floor scores more")


@law(
    "AD-1",
    of=SELECT,
    examples=5,
    case=long_rows(("ties", "one_bin", "normal", "duplicate_keys")),
    percent=hundredths,
)
def test_a_long_layer_is_shared_out_as_by_a_stable_sort(impl, case, percent):
    """Of a layer of up to 262,144 tokens, many of which tie, each head keeps its floor, and the layer's
    best fill the total.
    """
    scores = impl.round(np.concatenate([case.keys[..., 0], case.keys[:, :, ::-1, 0] + 0.5], axis=1))
    budget = min(2048, case.length // 2)
    nothing = np.zeros(scores.shape, dtype=bool)
    expected = shared_by_sorting(scores, budget, percent, nothing)
    got = impl.ada_kv.select(scores, budget, floor_ratio=percent / 100)
    as_good(got, expected, scores, nothing, "a long layer keeps tokens of other scores than by a sort")


@law("AD-1", of=SELECT, kind="edge", examples=2, case=long_rows(("ties", "one_bin")), percent=hundredths)
def test_of_equal_scores_of_a_long_layer_the_lower_head_then_position_stays(impl, case, percent):
    """Of a layer of up to 262,144 tokens, many of which tie, exactly those stay that a stable sort keeps."""
    scores = impl.round(np.concatenate([case.keys[..., 0], case.keys[:, :, ::-1, 0]], axis=1))
    budget = min(2048, case.length // 2)
    expected = shared_by_sorting(scores, budget, percent, np.zeros(scores.shape, dtype=bool))
    kept = impl.ada_kv.select(scores, budget, floor_ratio=percent / 100)
    equal(kept, expected, "a tie of a long layer went elsewhere")


@law(
    "AD-3",
    of=SELECT,
    not_for=without(SELECT, "protected"),
    case=LAYERS,
    seed=seeds(),
    budget=st.integers(0, 40),
    percent=hundredths,
)
def test_protected_tokens_stay_in_their_head_inside_the_budget(impl, case, seed, budget, percent):
    """Each head keeps its own protected tokens, then its share of what they leave, then the layer's best:
    the total is exact.
    """
    generator = np.random.default_rng(seed)
    # Heads of unlike scores, so that some have nothing beyond their own share.
    scores = impl.round(case.keys[..., 0] + generator.choice([0, 100], size=(*case.keys.shape[:2], 1)))
    rank = generator.random(scores.shape).argsort(axis=-1).argsort(axis=-1)
    protected = rank < generator.integers(0, min(budget, scores.shape[2]) + 1, size=(*scores.shape[:2], 1))
    kept = chosen(impl, scores, budget, percent, protected=protected)
    require(kept[protected].all(), "a protected token is evicted", protected, kept)
    total = scores.shape[1] * min(budget, scores.shape[2])
    equal(kept.sum(axis=(1, 2)), total, "the layer keeps another number of tokens")
    expected = one_by_one(scores, budget, percent, protected)
    as_good(kept, expected, scores, protected, "tokens of other scores are kept than one by one")


@law(
    "AD-3",
    of=SELECT,
    not_for=without(SELECT, "protected"),
    rows=st.lists(st.lists(st.integers(-2, 3), min_size=3, max_size=3), min_size=2, max_size=2),
    safe=st.lists(st.sampled_from([0, 1, 2, 4, 3, 6]), min_size=2, max_size=2),
    budget=st.integers(0, 3),
    percent=st.sampled_from([0, 34, 50, 67, 100]),
)
def test_no_selection_with_the_protected_tokens_scores_more(impl, rows, safe, budget, percent):
    """Among all selections of this size that keep every head's protected tokens and minimum share, this
    has the largest sum.
    """
    scores = np.array([rows], dtype=np.float64)
    protected = np.array([[[bool(bits >> place & 1) for place in range(3)] for bits in safe]])
    protected &= protected.cumsum(axis=-1) <= budget
    kept = chosen(impl, scores, budget, percent, protected=protected)
    least = [int(taken) + percent * (budget - int(taken)) // 100 for taken in protected[0].sum(axis=-1)]
    best = max(
        sum(scores.flat[list(chosen)])
        for chosen in itertools.combinations(range(6), 2 * budget)
        if set(np.flatnonzero(protected)) <= set(chosen)
        and sum(index < 3 for index in chosen) >= least[0]
        and sum(index >= 3 for index in chosen) >= least[1]
    )
    require(kept[protected].all(), "a protected token is evicted", protected, kept)
    equal(scores[kept].sum(), best, "another selection with the same protected tokens scores more")


@law("AD-3", of=SELECT, kind="refusal", not_for=without(SELECT, "protected"))
def test_protected_tokens_that_do_not_fit_are_refused(impl):
    """More protected tokens in a head than the budget raise ValueError."""
    if impl.reads_numbers:
        refused(impl, "protected", SELECT, np.zeros((1, 2, 3)), 2, protected=np.ones((1, 2, 3), dtype=bool))


@law(
    "AD-3",
    of=SELECT,
    examples=5,
    not_for=without(SELECT, "protected"),
    case=long_rows(("ties", "one_bin", "normal", "duplicate_keys")),
    seed=seeds(),
    percent=hundredths,
)
def test_protected_tokens_of_a_long_layer_are_kept_first(impl, case, seed, percent):
    """Of a layer of up to 262,144 tokens each head keeps 33 protected ones and its share of the rest, and
    the layer its best.
    """
    scores = impl.round(np.concatenate([case.keys[..., 0], case.keys[:, :, ::-1, 0] + 0.5], axis=1))
    protected = np.zeros(scores.shape, dtype=bool)
    places = np.random.default_rng(seed).random(scores.shape).argsort(axis=-1)[..., :33]
    np.put_along_axis(protected, places, True, axis=-1)
    taken = int(protected[0, 0].sum())
    budget = taken + min(2048, (case.length - taken) // 2)
    expected = shared_by_sorting(scores, budget, percent, protected)
    got = impl.ada_kv.select(scores, budget, floor_ratio=percent / 100, protected=protected)
    as_good(got, expected, scores, protected, "a long layer keeps tokens of other scores than by a sort")
