"""Laws of GVote's equations and of the single lines of
Algorithm 1: GV-1 to GV-5, GV-A1 to GV-A12, GV-O, GV-F3.
"""

import statistics

from evictionary.reference import gvote, rope
from evictionary.spec_tests.gvote.helpers import (
    WEIGHTS,
    check_each_selection,
    check_nucleus,
    drawn_queries,
    first_of_each,
    mass_slack,
    whole,
)
from evictionary.spec_tests.judge.prelude import *

NUCLEUS = "gvote.nucleus"
# The p of a nucleus: sixteenths, which with weights in sixteenths leave nothing to rounding.
SIXTEENTHS = st.integers(1, 16).map(lambda count: count / 16)


@st.composite
def exact_weights(draw, max_length=6):
    """Weights in sixteenths that sum to 1: every sum of them is exact in every dtype."""
    cuts = sorted(draw(st.lists(st.integers(0, 16), max_size=max_length - 1)))
    return np.diff([0, *cuts, 16]) / 16


@law("GV-1", of=WEIGHTS, case=cases())
def test_weights_are_the_softmax_of_the_scaled_logits(impl, case):
    """exp(q . k_t / sqrt(D)), divided by its sum over the tokens; also computed token by token."""
    keys, query = impl.round(for_each_reader(case.keys, case.queries)), impl.round(case.queries[:, :, 0])
    by_hand = causal_weights(query[:, :, None], keys)[:, :, 0]
    agrees(impl, WEIGHTS, query, keys, by_hand=by_hand, size=1 + np.abs(query).max() * np.abs(keys).max())


def logarithm_error(impl, size):
    """What weights of equal logits of this size may be wrong by beside their rounding.

    exp(x - log sum exp) is a right form too: it rounds the logarithm, which is as large as a logit, at each
    token that it adds.
    """
    return size * accumulating(impl)


@law("GV-A1", of=WEIGHTS, size=st.sampled_from([1.0, 1e2, 1e4]), length=st.sampled_from([1, 2, 17]))
def test_weights_of_large_logits_are_finite(impl, size, length):
    """Logits of 1e4 give weights from 0 to 1 that sum to 1; equal keys share them equally."""
    query = impl.round(np.array([[[np.sqrt(size), 0.0]]]))
    keys = impl.round(np.sqrt(size) * np.stack([np.ones((1, 1, length)), np.zeros((1, 1, length))], axis=-1))
    got, expected = impl.gvote.attention_weights(query, keys), np.full((1, 1, length), 1 / length)
    beside = logarithm_error(impl, size)
    rounds_to(impl, got, expected, "the weights of equal keys", size=expected, beside=beside)


@law("GV-2", of="gvote_theory.output", case=cases())
def test_output_is_the_weighted_sum_of_the_values(impl, case):
    """o = sum_t A_t v_t; a one-hot weight gives the value of that token."""
    weights, values = impl.round(np.abs(case.keys[..., 0])), impl.round(case.values)
    by_hand = sum(weights[..., token, None] * values[:, :, token] for token in range(weights.shape[-1]))
    size = weights.sum(axis=-1).max() * np.abs(values).max()
    agrees(impl, "gvote_theory.output", weights, values, by_hand=by_hand, size=size)
    for token, one_hot in enumerate(np.eye(weights.shape[-1])):
        got = impl.gvote_theory.output(np.broadcast_to(one_hot, weights.shape).copy(), values)
        equal(got, values[:, :, token], f"all weight on token {token} does not give its value")


@law("GV-3", of="gvote_theory.importance", case=cases())
def test_importance_is_attention_summed_over_the_queries(impl, case):
    """Every query hands out a total of 1: the scores of a head sum to the number of queries."""
    path, queries, keys = "gvote_theory.importance", impl.round(case.next_keys), impl.round(case.keys)
    by_hand = np.sum(
        [causal_weights(queries[:, :, [each]], keys)[:, :, 0] for each in range(queries.shape[2])], axis=0
    )
    size = queries.shape[2] * (1 + np.abs(queries).max() * np.abs(keys).max())
    got = agrees(impl, path, queries, keys, by_hand=by_hand, size=size)
    totals(got, queries.shape[2], impl.allowance(path, queries, keys), "the scores of a head")


@law("GV-4", of="gvote_theory.allocate", case=cases(), share=st.integers(0, 16).map(lambda count: count / 16))
def test_quotas_sum_to_the_budget(impl, case, share):
    """The quotas sum to the budget; no head gets a token
    that scores less than one another head has to leave.
    """
    scores = impl.round(case.keys[..., 0])
    budget = min(int(share * (scores.size + 1)), scores.size)
    quotas = impl.gvote_theory.allocate(scores, int(share * (scores.size + 1)))
    equal(quotas.shape, scores.shape[:-1], "there is not one quota for each head")
    equal(quotas.sum(), budget, "the quotas do not sum to the budget")
    selects(first_of_each(scores, quotas).reshape(1, -1), scores.reshape(1, -1), budget)


def selected(impl, case, seed):
    """Scores [B, H, T], budgets [B, H] from 0 to T + 1, and the mask that the implementation gives."""
    scores = impl.round(case.keys[..., 0])
    budgets = np.random.default_rng(seed).integers(0, scores.shape[-1] + 2, size=scores.shape[:-1])
    return scores, budgets, impl.gvote.top_each(scores, budgets)


@law("GV-5", of="gvote.top_each", case=cases(), seed=seeds())
def test_each_row_keeps_its_own_number(impl, case, seed):
    """Row h keeps b_h tokens, and none evicted scores more than one kept; 0 and more than T are allowed."""
    scores, budgets, got = selected(impl, case, seed)
    check_each_selection(got, scores, budgets)


@law("GV-5", of="gvote.top_each", kind="edge", case=cases(), seed=seeds())
def test_each_row_keeps_the_lower_of_equal_scores(impl, case, seed):
    """Row h keeps the first b_h tokens of a stable sort by falling score."""
    scores, budgets, got = selected(impl, case, seed)
    equal(got, first_of_each(scores, budgets), "a row keeps other tokens than a stable sort")


@law("GV-A2", of=NUCLEUS, weights=exact_weights(), p=SIXTEENTHS)
def test_the_nucleus_is_the_smallest_set_that_reaches_p(impl, weights, p):
    """It holds at least p, no set of fewer tokens does (every one is tried), and none outside weighs more
    than one in it.
    """
    kept = impl.gvote.nucleus(weights, p)
    subsets = (chosen for size in range(1, 7) for chosen in itertools.combinations(range(weights.size), size))
    smallest = len(next(chosen for chosen in subsets if weights[list(chosen)].sum() >= p))
    selects(kept, weights, smallest, what="the nucleus")
    require(weights[kept].sum() >= p, f"the nucleus holds {weights[kept].sum()}, wanted {p}", p, kept)


@law("GV-A2", of=NUCLEUS, kind="edge", weights=exact_weights(), p=SIXTEENTHS)
def test_of_equal_weights_those_at_the_lower_positions_are_in_the_nucleus(impl, weights, p):
    """As many tokens as are in the nucleus come first in a stable sort by falling weight, and they are it."""
    kept = impl.gvote.nucleus(weights, p)
    require_mask(kept, weights.shape, "the nucleus")
    expected = first_of_each(weights[None], kept.sum(keepdims=True))[0]
    equal(kept, expected, "of equal weights one at a higher position is in the nucleus")


@law("GV-A2", of=(NUCLEUS, WEIGHTS), case=seeded_cases(), percent=st.integers(1, 99))
def test_the_nucleus_of_attention_holds_p_and_not_a_token_more(impl, case, percent):
    """Row by row: mass at least p, less than p without its smallest weight, and nothing left out weighs
    more than what is in.
    """
    keys = np.repeat(case.keys, case.group, axis=1)
    weights, p = impl.round(gvote.attention_weights(case.queries[:, :, 0], keys)), percent / 100
    check_nucleus(impl.gvote.nucleus(weights, p), weights, p, mass_slack(impl, case.length))


@law("GV-A2", of=NUCLEUS, weights=exact_weights(max_length=9), first=SIXTEENTHS, second=SIXTEENTHS)
def test_the_nucleus_grows_with_p(impl, weights, first, second):
    """A larger p keeps a superset; p = 1 keeps every weight above 0 and no other."""
    low, high = sorted((first, second))
    small, large, all_of_it = (impl.gvote.nucleus(weights, p) for p in (low, high, 1.0))
    require(not (small & ~large).any(), f"a token of the nucleus at {low} is missing at {high}", small, large)
    equal(all_of_it, weights > 0, "at p = 1 the nucleus is not the set of all weights above 0")


@law("GV-A2", of=NUCLEUS, count=st.sampled_from([1, 2, 4, 6, 18, 19, 20, 21]))
def test_no_weight_is_too_small_for_the_nucleus(impl, count):
    """Of the weights 1/2, 1/4, ... 2^-19, 3 2^-21, 2^-21, which sum to 1, the first n are the nucleus at
    1 - 3/2 2^-n, and p = 1 takes all.
    """
    if impl.dtype in ("float16", "bfloat16") and count < 21:
        count = min(count, 6)  # p has to be a number of the dtype
    # no two are equal: which of equal weights belongs to a nucleus is no law of mathematics
    weights = np.append(2.0 ** -np.arange(1.0, 20), [3 * 2.0**-21, 2.0**-21])
    p = 1 - 1.5 * 2.0**-count if count < 21 else 1.0
    kept = impl.gvote.nucleus(weights, p)
    equal(kept, np.arange(21) < count, f"the nucleus at {p} is not the first {count}")


@law("GV-A2", of=NUCLEUS, p=st.sampled_from([0, 1e-9, 0.25, 0.5]))
def test_the_nucleus_is_never_empty(impl, p):
    """The heaviest token is in it however small p is, and alone if it holds p."""
    kept = impl.gvote.nucleus(np.array([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]), p)
    equal(kept, [[False, True, False], [True, False, False]], "the nucleus is not the heaviest token alone")


@law("GV-A2", of=NUCLEUS, kind="edge", p=st.sampled_from([0, 1e-9, 0.25, 0.5]))
def test_a_row_without_weight_has_its_first_token(impl, p):
    """Of a row of zeros the first token is the nucleus."""
    kept = impl.gvote.nucleus(np.array([[0.25, 0.5, 0.25], [0, 0, 0]]), p)
    equal(
        kept,
        [[False, True, False], [True, False, False]],
        "of a row of zeros another than the first token is kept",
    )


@law("GV-A2", of=NUCLEUS)
def test_mass_is_relative_to_the_row(impl):
    """Weights that rounding left at a sum of 0.9375, below
    p, still have a nucleus: no weight of 0 is in it.
    """
    kept = impl.gvote.nucleus(np.array([0.5, 0.4375, 0, 0]), 0.95)
    equal(kept, [True, True, False, False], "the nucleus of (.5, .4375, 0, 0) at .95 is not the first two")


@law("GV-A2", of=NUCLEUS)
def test_mass_is_the_sum_of_the_weights(impl):
    """Of the weights 7/16, 4/16, 3/16 and 2/16 the mass
    1/4 takes one, 1/2 two, 3/4 three and 15/16 all four.
    """
    for count, p in enumerate((0.25, 0.5, 0.75, 0.9375), start=1):
        kept = impl.gvote.nucleus(np.array([0.4375, 0.25, 0.1875, 0.125]), p)
        equal(kept, np.arange(4) < count, f"the nucleus at {p} is not the first {count}")


@law("GV-A2", of=NUCLEUS)
def test_many_small_weights_add_up(impl):
    """Of 4096 equal weights the nucleus at .75 has 3072:
    a sum in half precision would stop growing at a half.
    """
    count = impl.gvote.nucleus(np.full((1, 4096), 2.0**-12), 0.75).sum(axis=-1)
    near(count, np.array([3072]), 4096 * mass_slack(impl, 4096), "the number of equal weights in the nucleus")


@law("GV-A3", of="gvote.single_step_budget", seed=seeds(), length=st.integers(1, 9))
def test_the_budget_counts_the_nucleus(impl, seed, length):
    """B_0 is the number of tokens of K_0, row by row, whatever the other rows have."""
    mask = np.random.default_rng(seed).random((2, 3, length)) < 0.5
    counts = [[row.tolist().count(True) for row in rows] for rows in mask]
    equal(impl.gvote.single_step_budget(mask), counts, "B_0 is not the size of the nucleus")


def updating_errors(impl, states):
    """What the mean and the variance of states [.., T, C] may be off by if every token updates them, in
    float32 or wider.

    With u = eps / 2 step k of mean += (x - mean) / k errs by at most u (2 |x - mean| / k + |mean|), which is
    k / T of itself at the end: the sum stays below eps (2 + T / 4) max |x|. The sum of squares errs by u of
    itself at each step, and by twice the deviation times the error of the mean.
    """
    epsilon, steps = accumulating(impl), states.shape[-2]
    deviation = np.abs(states - states.mean(axis=-2, keepdims=True)).max(axis=-2)
    mean = epsilon * (2 + steps / 4) * np.abs(states).max(axis=-2)
    return float(mean.max()), float((epsilon * (2 + steps / 2) * deviation**2 + 4 * deviation * mean).max())


@law(
    "GV-A4",
    of="gvote.hidden_statistics",
    case=cases(),
    sink_size=st.integers(0, 6),
    pick=st.integers(0, 1),
    seed=seeds(),
)
def test_statistics_leave_the_sinks_out(impl, case, sink_size, pick, seed):
    """Mean and variance (divided by the count) of each channel over the tokens after the sinks, or the
    last token where none is.
    """
    path, states, name = "gvote.hidden_statistics", impl.round(case.keys[:, 0]), ("mean", "variance")[pick]
    skipped = min(sink_size, states.shape[1] - 1)
    observed = states[:, skipped:]
    of_channel = (statistics.fmean, statistics.pvariance)[pick]
    by_hand = np.array([[of_channel(channel) for channel in item.T.tolist()] for item in observed])
    how = {"pick": pick, "more": updating_errors(impl, observed)[pick]}
    size = 1 + np.abs(observed).max(axis=1) ** 2
    agrees(impl, path, states, sink_size=sink_size, **how, by_hand=by_hand, size=size, what=f"the {name}")
    changed = states.copy()
    changed[:, :skipped] = np.random.default_rng(seed).normal(size=changed[:, :skipped].shape)
    got = impl.gvote.hidden_statistics(changed, sink_size=sink_size)[pick]
    same(impl, path, states, sink_size=sink_size, **how, got=got, what=f"the {name} with other sinks")


def large_mean(impl):
    """So large that the dtype just tells 0, 1, 2 and 3 apart beside it, and the accumulator a thousandth."""
    return min(2.0**-10 / accumulating(impl), 2.0**-2 / final_rounding(impl))


@law("GV-A4", of="gvote.hidden_statistics")
def test_the_variance_survives_a_large_mean(impl):
    """Numbers offset + 0, 1, 2, 3 have the variance 1.25 at every offset: E[x^2] - E[x]^2 would lose it."""
    states = large_mean(impl) + np.arange(4.0)[:, None]
    how = {"pick": 1, "more": updating_errors(impl, states)[1]}
    what = f"the variance of {states[0, 0]} + 0, 1, 2, 3"
    agrees(impl, "gvote.hidden_statistics", states, sink_size=0, **how, expected=np.array([1.25]), what=what)


@law("GV-A5", of="gvote.sample_hidden_states", case=cases(), seed=seeds())
def test_samples_stand_where_the_noise_puts_them(impl, case, seed):
    """x = mu + sigma e: noise 0 gives the mean, 1 and -1 the mean plus and minus the standard deviation
    (not the variance).
    """
    mean = np.round(case.keys[:, 0, 0])
    variance = np.random.default_rng(seed).integers(0, 5, mean.shape) ** 2.0
    noise = np.stack([np.zeros_like(mean), np.ones_like(mean), -np.ones_like(mean)], axis=-2)
    agrees(impl, "gvote.sample_hidden_states", mean, variance, noise, what="the samples")
    states = case.keys[:, 0, 0], np.abs(case.keys[:, 0, -1]), case.next_keys[:, 0]
    agrees(impl, "gvote.sample_hidden_states", *states)


@law("GV-A5", of="gvote.sample_hidden_states")
def test_samples_have_the_mean_and_the_variance(impl):
    """Of 20,000 samples the mean and the variance lie within 6 standard errors: sigma / sqrt(N), and
    sigma^2 sqrt(2 / N).
    """
    mean, variance = np.array([0.0, 1, -2]), np.array([1.0, 4, 0.25])
    noise = impl.round(np.random.default_rng(0).normal(size=(20_000, 3)))
    got = impl.gvote.sample_hidden_states(mean, variance, noise)
    beside = 6 * np.sqrt(variance / len(noise)), 6 * variance * np.sqrt(2 / len(noise))
    rounds_to(impl, got.mean(axis=0), mean, "the mean of the samples", beside=beside[0])
    rounds_to(impl, got.var(axis=0), variance, "the variance of the samples", roundings=4, beside=beside[1])


@law("GV-A6", of="gvote.project", case=cases(), seed=seeds())
def test_projection_is_the_linear_layer(impl, case, seed):
    """Q = X W_Q + b, W_Q from channels to D; in whole numbers
    the projection of a sum is the sum of the projections.
    """
    channels, generator, keys = case.keys.shape[-1], np.random.default_rng(seed), impl.round(case.keys)
    weight, bias = (impl.round(generator.normal(size=shape)) for shape in ((channels, 5), 5))
    for layer, added in (((weight,), 0.0), ((weight, bias), bias)):
        by_hand = linear(keys, weight) + added
        agrees(impl, "gvote.project", keys, *layer, by_hand=by_hand, size=channels * np.abs(case.keys).max())
    states, other, weight = whole(case), np.clip(np.round(case.keys[:, :, ::-1]), -8, 8), np.round(2 * weight)
    parts = [impl.gvote.project(x, weight) for x in (states, other)]
    together, size = impl.gvote.project(states + other, weight), np.abs(parts).max()
    rounds_to(impl, sum(parts), together, "the sum of two projections", size=size)


@law(
    "GV-A7",
    of="gvote.average_cos_sin",
    head_dim=st.sampled_from([2, 4, 16]),
    position=st.integers(0, 200),
    horizon=st.integers(1, 64),
    theta=st.sampled_from([10000.0, 500000.0]),
)
def test_averages_have_the_closed_form(impl, head_dim, position, horizon, theta):
    """Over n positions from t_0 cos(t w) averages g cos(w (t_0 + (n - 1) / 2)), g = sin(n w / 2) / (n
    sin(w / 2)); so for sin.
    """
    frequency = rope.frequencies(head_dim, theta)
    shrinkage = np.sin(horizon * frequency / 2) / (horizon * np.sin(frequency / 2))
    middle = frequency * (position + (horizon - 1) / 2)
    got = impl.gvote.average_cos_sin(head_dim, position=position, horizon=horizon, theta=theta)
    rounds_to(impl, got[0], shrinkage * np.cos(middle), "the mean cos", angle=position + horizon)
    rounds_to(impl, got[1], shrinkage * np.sin(middle), "the mean sin", angle=position + horizon)


def moved_by_angles(impl, queries, position):
    """What a channel may be wrong by, at most and on average, where angles up to this position are.

    An allowance knows what the arithmetic on the queries costs;
    an angle that is a little off moves a pair by its radius.
    """
    moved = angle_error(impl, position) * np.hypot(*np.split(queries, 2, axis=-1))
    return moved.max(), moved.mean()


def lengthened(impl, queries, moved):
    """By how much a turned query of the last call may come out longer, where angles move a channel by so
    much: by the error of each of its channels.
    """
    channels = within(impl, times=queries.shape[-1], roundings=0) + queries.shape[-1] * moved
    return 4 * final_rounding(impl) * np.linalg.norm(queries, axis=-1) + channels


@law(
    "GV-A8",
    of="gvote.rotate_by_average",
    case=cases(kinds=("normal", "ties", "outlier_channel")),
    position=st.integers(0, 99),
    horizon=st.integers(1, 9),
    theta=st.sampled_from([10000.0, 500.0]),
)
def test_the_averaged_query_is_the_mean_of_the_rotated_ones(impl, case, position, horizon, theta):
    """Rotating to each of the positions and averaging gives
    the same; one position is RoPE itself; no query grows.
    """
    odd = case.queries.shape[-1] % 2
    even = np.concatenate([case.queries, case.queries[..., ::-1]], axis=-1) if odd else case.queries
    path, queries = "gvote.rotate_by_average", impl.round(even)
    settings = {"position": position, "horizon": horizon, "theta": theta}
    moved = moved_by_angles(impl, queries, position + horizon)
    places = range(position, position + horizon)
    by_hand = np.mean([rope.rotate(queries, np.array(place), theta) for place in places], axis=0)
    how = {"size": 1 + np.abs(queries).max(), "more": moved}
    got = agrees(impl, path, queries, **settings, by_hand=by_hand, **how)
    before, after = (np.linalg.norm(states, axis=-1) for states in (queries, got))
    longest = before + lengthened(impl, queries, moved[0])
    require((after <= longest).all(), "averaging over positions made a query longer", before, after)


@law("GV-A9", of="gvote.sampled_logits", case=cases(), seed=seeds())
def test_logits_compare_each_sample_with_each_key(impl, case, seed):
    """q_s . k_t / sqrt(D): one row for each sample."""
    _, sampled = drawn_queries(case, seed, 3)
    sampled, keys = impl.round(sampled), impl.round(for_each_reader(case.keys, sampled))
    expected = np.zeros((*sampled.shape[:3], keys.shape[2]))
    for place in np.ndindex(sampled.shape[:2]):
        expected[place] = linear(sampled[place], keys[place].T) / keys.shape[-1] ** 0.5
    size = keys.shape[-1] * np.abs(sampled).max() * np.abs(keys).max()
    agrees(impl, "gvote.sampled_logits", sampled, keys, by_hand=expected, size=size)


@law("GV-A11", of="gvote.union", case=cases(), seed=seeds())
def test_union_keeps_what_any_sample_votes_for(impl, case, seed):
    """A token stays if one vote is for it, in whatever order the samples come, or if 256 are, which a count
    in 8 bits holds as 0.
    """
    votes = np.random.default_rng(seed).random((*case.keys.shape[:2], 3, case.keys.shape[2])) < 0.3
    expected = votes[:, :, 0] | votes[:, :, 1] | votes[:, :, 2]
    for order in itertools.permutations(range(3)):
        got = impl.gvote.union(votes[:, :, list(order)])
        equal(got, expected, "the union is not what any sample votes for")
    many = np.repeat(votes[:, :, :1], 256, axis=2)
    equal(impl.gvote.union(many), votes[:, :, 0], "256 equal samples are not one of them")


@law("GV-A12", of="gvote.prune", case=seeded_cases(max_length=17), seed=seeds())
def test_pruning_gathers_keys_and_values_head_by_head(impl, case, seed):
    """Row after row the key, the value and the position
    of each kept token, and how many rows each head has.
    """
    kept = np.random.default_rng(seed).random(case.keys.shape[:3]) < 0.5
    where = tuple(np.argwhere(kept).T)
    wanted = impl.round(case.keys)[where], impl.round(case.values)[where], where[2], kept.sum(axis=-1)
    got = impl.gvote.prune(case.keys, case.values, kept)
    for name, found, expected in zip(("keys", "values", "positions", "lengths"), got, wanted, strict=True):
        equal(found, expected, f"the {name} are not those of the kept tokens")


def future_attention(first, seed):
    """Three rows of attention: the weights, and two permutations of them."""
    generator = np.random.default_rng(seed)
    return np.stack([first, generator.permutation(first), generator.permutation(first)])


@law(
    "GV-O", of="gvote_theory.optimal_keep_set", first=exact_weights(max_length=5), seed=seeds(), p=SIXTEENTHS
)
def test_the_optimal_set_contains_every_nucleus(impl, first, seed, p):
    """Of each future query it contains as many tokens as reach p, and no token that is in no nucleus;
    equal weights are alike.
    """
    attention = future_attention(first, seed)
    got = impl.gvote_theory.optimal_keep_set(attention, p)
    require_mask(got, first.shape, "the keep set")
    nuclei = gvote.nucleus(attention, p)
    least = np.where(nuclei, attention, np.inf).min(axis=-1, keepdims=True)
    above, inside = attention > least, attention >= least
    served = not (above & ~got).any() and ((got & inside).sum(axis=-1) >= nuclei.sum(axis=-1)).all()
    needed = not (got & ~inside.any(axis=0)).any() and got.sum() <= nuclei.sum()
    require(served, "a future query misses a part of its nucleus", nuclei, got)
    require(needed, "a token is kept that no future query needs", nuclei, got)


@law(
    "GV-O",
    of="gvote_theory.optimal_keep_set",
    kind="edge",
    first=exact_weights(max_length=5),
    seed=seeds(),
    p=SIXTEENTHS,
)
def test_the_optimal_set_is_the_smallest_around_the_first_of_equal_weights(impl, first, seed, p):
    """It is the smallest set that contains the nucleus of every future query: every set is tried."""
    attention = future_attention(first, seed)
    nuclei = [set(np.flatnonzero(gvote.nucleus(row, p))) for row in attention]
    subsets = (
        set(chosen) for size in range(1, 6) for chosen in itertools.combinations(range(first.size), size)
    )
    smallest = next(chosen for chosen in subsets if all(nucleus <= chosen for nucleus in nuclei))
    got = impl.gvote_theory.optimal_keep_set(attention, p)
    equal(
        got,
        np.isin(np.arange(first.size), list(smallest)),
        "the keep set is not the smallest that contains every nucleus",
    )


@law("GV-F3", of="gvote_theory.attention_overlap", weights=exact_weights(), seed=seeds())
def test_overlap_is_the_attention_on_the_candidates(impl, weights, seed):
    """The sum of the weights of the candidates: 1 for all
    tokens, 0 for none, and never less with a candidate more.
    """
    candidates = np.random.default_rng(seed).random(weights.shape) < 0.5
    expected = sum(weight for weight, chosen in zip(weights, candidates, strict=True) if chosen)
    for tokens, wanted in ((candidates, expected), (candidates | True, 1), (candidates & False, 0)):
        got = impl.gvote_theory.attention_overlap(weights, tokens)
        equal(float(got), wanted, "the overlap is not the attention on the candidates")
