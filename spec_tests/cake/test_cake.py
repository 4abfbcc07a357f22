"""Laws of CAKE: CAKE-1 to CAKE-6."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import refuses

DISPERSION, SHIFT, PREFERENCE = "cake.dispersion", "cake.shift", "cake.preference"
SHARED, CASCADE = "cake.budgets", "cake_theory.cascade"
whole = st.lists(st.integers(0, 40), min_size=1, max_size=9)
preferences = st.one_of(whole, st.lists(st.floats(0, 4096, width=16), min_size=1, max_size=9))
counts: dict[str, Any] = {
    "budget": st.integers(1, 60),
    "length": st.integers(1, 70),
    "window": st.integers(0, 12),
}
# a token that is left over, and tokens that a layer cannot hold, may come back to an earlier layer
returning = st.sampled_from([([4, 7, 1, 1], 2, 70, 0), ([50, 50, 0, 4096], 26, 50, 0)])


def shares_of(impl, seed):
    """The attention of some queries on some tokens, [2, 3, M, N], from even to nearly one token."""
    generator = np.random.default_rng(seed)
    spread = np.full(generator.integers(1, 40), 10 ** generator.uniform(-1, 1))
    return impl.round(generator.dirichlet(spread, (2, 3, generator.integers(1, 9))))


def entropy_by_hand(attention):
    """The sum of -a ln a over queries and tokens, number by number."""
    rows = attention.reshape(*attention.shape[:-2], -1)
    return np.apply_along_axis(lambda row: math.fsum(-a * math.log(a) for a in row if a > 0), -1, rows)


def variance_by_hand(attention):
    """For each token the squared differences of all pairs of queries, each pair twice, over 2 M (M - 1)."""
    apart, count = attention[..., :, None, :] - attention[..., None, :, :], attention.shape[-2]
    return (apart**2).sum(axis=(-3, -2, -1)) / max(1, 2 * count * (count - 1))


@law("CAKE-1", of=DISPERSION, seed=seeds())
def test_the_dispersion_is_the_entropy_of_the_queries(impl, seed):
    """The sum of -a ln a over all queries and tokens; no share adds nothing."""
    agrees(impl, DISPERSION, shares_of(impl, seed), by_hand=entropy_by_hand, size=100)


@law("CAKE-1", of=DISPERSION, exponent=st.integers(0, 5), queries=st.integers(1, 4))
def test_even_attention_has_the_entropy_ln_n_and_one_token_has_none(impl, exponent, queries):
    """Each query adds ln N where all N tokens get the same, and 0 where one gets all."""
    even, alone = (
        np.full((queries, 2**exponent), 2.0**-exponent),
        np.eye(1, 2**exponent).repeat(queries, axis=0),
    )
    got = impl.cake.dispersion(np.array([even, alone]))
    near(got, np.array([queries * exponent * math.log(2), 0.0]), within(impl), "the entropy")


@law("CAKE-2", of=SHIFT, seed=seeds())
def test_the_shift_is_the_variance_over_the_queries(impl, seed):
    """The sample variance of each token's attention, from all pairs of queries, summed over the tokens; of
    one query 0.
    """
    agrees(impl, SHIFT, shares_of(impl, seed), by_hand=variance_by_hand)


@law(
    "CAKE-3",
    of=PREFERENCE,
    case=cases(),
    seed=seeds(),
    window_size=st.sampled_from([1, 2, 3, 8, 32]),
    tau1=st.sampled_from([1.0, 0.5]),
    tau2=st.sampled_from([1.0, 0.5]),
)
def test_the_preference_is_the_product_of_both(impl, case, seed, window_size, tau1, tau2):
    """Of the window's causal attention on the tokens before
    it, summed over the query heads; without such tokens 0.
    """
    queries, keys = impl.round(prompt_queries(case, seed)), impl.round(case.keys)
    before = max(0, keys.shape[2] - window_size)
    weights = causal_weights(queries[:, :, before:], for_each_reader(keys, queries))[..., :before]
    spread, moved = (each(weights).sum(axis=1) for each in (entropy_by_hand, variance_by_hand))
    by_hand = spread ** (1 / tau1) * moved ** (1 / tau2) if before else np.zeros(len(keys))
    settings = {"window_size": window_size, "tau1": tau1, "tau2": tau2}
    agrees(impl, PREFERENCE, queries, keys, **settings, by_hand=by_hand, size=100 + by_hand)


@law("CAKE-3", of=PREFERENCE, tau1=st.sampled_from([0.4, 1, 2, 64]), tau2=st.sampled_from([0.5, 1, 4]))
def test_two_queries_of_zero_keys(impl, tau1, tau2):
    """Two tokens before a window of two get a third and a quarter, in two heads: 4 (ln 3 / 3 + ln 4 / 4) and
    2 / 144.
    """
    given, settings = np.zeros((2, 1, 2, 4, 2)), {"window_size": 2, "tau1": tau1, "tau2": tau2}
    allowed = impl.allowance(PREFERENCE, *given, **settings)
    wanted = (4 * (math.log(3) / 3 + math.log(4) / 4)) ** (1 / tau1) * (2 / 144) ** (1 / tau2)
    near(impl.cake.preference(*given, **settings), np.array([wanted]), allowed, "the preference")


def shared(impl, budget, given, **settings):
    """The budgets of the layers; Violation unless they are whole and each layer has one."""
    got = impl.cake.budgets(budget, impl.round(np.array(given, dtype=float)), **settings)
    require(
        [type(each) for each in got] == [int] * len(given), "not one whole budget for each layer", got=got
    )
    return np.array(got)


@law("CAKE-4", of=SHARED, given=preferences, **counts)
def test_the_total_is_exact_and_each_layer_has_its_share(impl, given, budget, length, window):
    """All layers have min(budget, length) on average, each its window and at most all tokens, in the order of
    the preferences. Beside the window they are the shares, up to a token for each layer, where these fit.
    Eight times the preferences give the same.
    """
    given, settings = impl.round(np.array(given, dtype=float)), {"length": length, "window_size": window}
    got, mean, order = shared(impl, budget, given, **settings), min(budget, length), given.argsort()
    equal(int(got.sum()), len(given) * mean, "the budgets have another total")
    least = min(mean, max(1, window))
    require(least <= got.min() and got.max() <= length, "a budget out of range", (least, length), got)
    steps = np.diff(got[order])[np.diff(given[order]) > 0]
    require((steps >= 0).all(), "a layer with more preference has a smaller budget", given, got)
    shares = least + given * (len(given) * (mean - least)) / max(given.sum(), 2.0**-24)
    if given.any() and shares.max() <= length:
        near(got.astype(float), shares, len(given), "a budget, from its share,")
    equal(shared(impl, budget, 8 * given, **settings), got, "the scale of the preferences counts")


@law("CAKE-4", of=SHARED)
def test_budgets_by_hand(impl):
    """Whole shares and equal claims to the rest, beside a window, of the first layers of a model, with full
    layers, without preference.
    """
    for budget, given, settings, wanted in (
        (11, [3, 2, 2, 2, 1], {}, [16, 11, 11, 11, 6]),
        (2, [1, 3, 4, 8], {}, [1, 2, 2, 3]),
        (2, [2, 1], {}, [2, 2]),
        (2, [1, 1], {"num_layers": 3}, [3, 2]),
        (10, [2, 1], {"window_size": 4}, [12, 8]),
        (3, [2, 1], {"window_size": 4}, [3, 3]),
        (10, [3, 1], {"num_layers": 4}, [28, 10]),
        (10, [3, 1], {"num_layers": 4, "length": 20}, [20, 18]),
        (11, [90, 1, 2], {"length": 19}, [19, 5, 9]),
        (10, [5, 0, 0], {"length": 25, "window_size": 3}, [24, 3, 3]),
        (10, [5, 0, 0], {"length": 20, "window_size": 3}, [20, 5, 5]),
        (7, [0, 0, 0], {}, [7, 7, 7]),
        (30, [1, 2], {"length": 9}, [9, 9]),
    ):
        equal(shared(impl, budget, given, **settings), np.array(wanted), f"other budgets of {given}")


@law("CAKE-5", of=SHARED, asked=st.one_of(returning, st.tuples(preferences, *counts.values())))
def test_no_budget_grows_with_one_more_layer(impl, asked):
    """Each layer that has read the prompt takes from those before, or leaves them as they are."""
    given, budget, length, window = asked
    settings = {"num_layers": len(given), "length": length, "window_size": window}
    stages = [shared(impl, budget, given[: stage + 1], **settings) for stage in range(len(given))]
    for before, now in itertools.pairwise(stages):
        require((now[:-1] <= before).all(), "the budget of a layer grows", before, now)


@law("CAKE-6", of=CASCADE, seed=seeds(), given=whole, **counts)
def test_the_cascade_keeps_what_is_kept_at_once_and_never_stores_more(
    impl, seed, given, budget, length, window
):
    """Each layer keeps its best tokens by its last budget, the earlier of equal ones. Before the next layer
    is stored whole, the layers so far have their windows and the total, or all tokens.
    """
    scores = np.random.default_rng(seed).integers(-9, 9, size=(len(given), length)).astype(float)
    kept, most = impl.cake_theory.cascade(scores, np.array(given, dtype=float), budget, window_size=window)
    last = oracle(SHARED)(budget, given, length=length, window_size=window)
    order = np.argsort(-scores, axis=-1, kind="stable")
    best = [np.isin(np.arange(length), row[:count]) for row, count in zip(order, last, strict=True)]
    equal(kept, np.array(best), "the cascade keeps other tokens")
    least, layers = min(budget, length, max(1, window)), np.arange(len(given))
    total = layers * least + len(given) * (min(budget, length) - least) * (layers > 0)
    equal(most, np.minimum(layers * length, total).max() + length, "another number is stored at most")


@law("CAKE-4", of=SHARED, kind="refusal", why="no signature says it, and no planted mistake changes it")
def test_fewer_layers_than_preferences_are_refused(impl):
    """Three preferences of one layer raise ValueError."""
    refuses(impl, SHARED, "num_layers", 1)
