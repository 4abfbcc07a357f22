"""Laws of CaM: CAM-1 to CAM-5."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import draw_mask

SHARES, PROBABILITIES, SPREAD, MERGE = "cam.shares", "cam.probabilities", "cam.spread", "cam.merge_values"
sizes = st.sampled_from([1, 2, 3, 8, 32, 100])
CANCELLED = 1e-13  # what a difference of running sums may be wrong by, in parts of the largest sum


def given(impl, case, seed):
    """Values, attention in eighths, and a mask whose heads keep different numbers; kept tokens have some."""
    values, kept = impl.round(case.values), draw_mask(case.values.shape[:3], seed)
    attention = np.round(8 * np.random.default_rng(seed).exponential(size=kept.shape)) / 8
    return values, np.where(kept, np.maximum(attention, 1 / 8), attention), kept


def receivers(kept, merge_size):
    """The place of each evicted token that has later kept ones, and of the next of these, token by token."""
    for *head, token in np.argwhere(~kept):
        if kept[*head, token:].any():
            yield tuple(head), token, token + np.flatnonzero(kept[*head, token:])[:merge_size]


def by_attention(attention, kept, merge_size):
    """CAM-2, token by token."""
    found = np.zeros(kept.shape)
    for head, token, later in receivers(kept, merge_size):
        found[head][token] = min(1, attention[head][token] * len(later) / math.fsum(attention[head][later]))
    return found


def by_adding(values, kept, weights, merge_size):
    """CAM-3, token by token."""
    found = np.array(values)
    for head, token, later in receivers(kept, merge_size):
        found[head][later] += weights[head][token] * values[head][token] / len(later)
    return found


def far_draws(impl, probabilities, seed):
    """Numbers that no rounding takes to the other side of the probability; 0 and 1 among them."""
    above, coin = np.where(probabilities < 7 / 8, (1 + probabilities) / 2, 1), np.random.default_rng(seed)
    return impl.round(np.where(coin.random(probabilities.shape) < 0.5, probabilities / 2, above))


@law("CAM-1", of=SHARES, case=cases(max_length=33), seed=seeds(), merge_size=sizes)
def test_the_next_kept_tokens_have_equal_shares(impl, case, seed, merge_size):
    """Token by token: 1 / m for each of the next m kept tokens, or for as many as there are."""
    kept, unit = draw_mask(case.values.shape[:3], seed), np.eye(case.values.shape[2])
    wanted = by_adding(np.broadcast_to(unit, (*kept.shape, len(unit))), kept, kept | True, merge_size) - unit
    agrees(impl, SHARES, kept, merge_size=merge_size, by_hand=np.swapaxes(wanted, -1, -2))


@law("CAM-2", of=PROBABILITIES, case=cases(), seed=seeds(), merge_size=sizes)
def test_the_probability_is_the_attention_beside_the_mean_of_the_receivers(impl, case, seed, merge_size):
    """Token by token, cut off at 1; 0 for a kept token, and where no kept token comes later."""
    _, attention, kept = given(impl, case, seed)
    by_hand = by_attention(attention, kept, merge_size)
    agrees(impl, PROBABILITIES, attention, kept, merge_size=merge_size, by_hand=by_hand)


@law("CAM-2", of=PROBABILITIES, kind="edge", received=st.sampled_from([0, 1 / 8, 4]))
def test_beside_tokens_without_attention_any_attention_is_enough(impl, received):
    """Where the mean is 0, the probability is 1, and 0 for a token that has received none either."""
    got = impl.cam.probabilities(np.array([[[received, 0.0, 0]]]), np.array([[[False, True, True]]]))
    equal(got, np.array([[[float(received > 0), 0, 0]]]), "the probability beside a mean of 0")


@law("CAM-3", of=SPREAD, case=cases(), seed=seeds(), merge_size=sizes)
def test_each_receiver_adds_its_part(impl, case, seed, merge_size):
    """Token by token, for weights from 0 to 1; those of kept tokens do not count. All values together grow as
    for one receiver each. Evicted values stay as they are, and kept ones before which nothing is evicted.
    """
    values, attention, kept = given(impl, case, seed)
    weights, size = impl.round(np.minimum(attention, 1)), (1 + np.abs(values).max()) * values.shape[2]
    wanted, of_one = (by_adding(values, kept, weights, count) for count in (merge_size, 1))
    got = agrees(impl, SPREAD, values, kept, weights, merge_size=merge_size, by_hand=wanted, size=size)
    sums, expected, sizes = (each.sum(axis=2) for each in (got, of_one, np.abs(got) + np.abs(values)))
    rounds_to(impl, sums, expected, "the total of the values", terms=values.shape[2], size=sizes)
    still = ~kept | (np.cumsum(~kept, axis=-1) == 0)
    equal(got[still], values[still], "a value changes that receives nothing")


@law("CAM-3", of=(SPREAD, PROBABILITIES))
def test_a_value_goes_to_32_tokens_unless_told(impl):
    """Of 64 later kept tokens 32 receive a part of 1/32. They have received 1 or 3, and the others 9, so
    attention 1 has probability 1/2.
    """
    values, kept = np.zeros((1, 1, 65, width(impl))), np.arange(65)[None, None] > 0
    values[:, :, 0], attention = 1, np.array([[[1.0] + 16 * [1] + 16 * [3] + 32 * [9]]])
    got = impl.cam.spread(values, kept, np.ones(kept.shape))
    equal(got[0, 0, :, 0], np.array([1.0] + 32 * [1 / 32] + 32 * [0]), "other tokens receive the value")
    equal(impl.cam.probabilities(attention, kept)[0, 0, 0], 1 / 2, "the mean is over other tokens")


@law(
    "CAM-3",
    of=SPREAD,
    examples=2,
    case=long_cases(lengths=(2049, 1025), head_dims=(64, 80)),
    merge_size=sizes,
)
def test_a_long_text_is_merged_token_by_token(impl, case, merge_size):
    """Of two thousand tokens half are kept at random, and a run of 300 goes at once."""
    values = impl.round(case.values)
    draw = np.random.default_rng(case.seed).random((2, *values.shape[:3]))
    kept, weights = draw[0] < np.where(np.arange(case.length) // 300 == 1, 0, 0.5), np.round(8 * draw[1]) / 8
    wanted, sums = (by_adding(each, kept, weights, merge_size) for each in (values, np.abs(values)))
    got = impl.cam.spread(values, kept, weights, merge_size=merge_size)
    beside = CANCELLED * sums.max()
    rounds_to(impl, got, wanted, "the merged values of a long text", terms=300, size=sums, beside=beside)


@law("CAM-4", of=MERGE, case=cases(), seed=seeds(), merge_size=sizes)
def test_a_value_is_merged_where_its_draw_is_below_its_probability(impl, case, seed, merge_size):
    """Token by token; a draw of 0 merges nothing that has no attention."""
    values, attention, kept = given(impl, case, seed)
    exact, size = by_attention(attention, kept, merge_size), (1 + np.abs(values).max()) * values.shape[2]
    draws = far_draws(impl, exact, seed)
    by_hand = by_adding(values, kept, draws < exact, merge_size)
    agrees(impl, MERGE, values, attention, kept, draws, merge_size=merge_size, by_hand=by_hand, size=size)


@law("CAM-4", of=MERGE, received=st.integers(0, 20))
def test_of_evenly_spaced_draws_the_probability_merges_its_part(impl, received):
    """Two kept tokens have received 8 and 24, the evicted one a: of 64 evenly spaced draws exactly 4 a merge,
    and at most all. Both receivers get half of the value, or neither gets any.
    """
    values, kept = np.zeros((64, 1, 3, width(impl))), np.broadcast_to(np.arange(3) > 0, (64, 1, 3))
    values[:, :, 0], values[:, :, 2] = 1, 4
    spaced, attention = (np.arange(64)[:, None, None] + 1 / 2) / 64, np.array([[[received, 8.0, 24]]])
    got = impl.cam.merge_values(values, *np.broadcast_arrays(attention, kept, spaced))
    equal(got, values + kept[..., None] * (spaced < received / 16)[..., None] / 2, "other draws merge")


@law("CAM-4", of=MERGE, case=seeded_cases(), seed=seeds())
def test_each_head_of_each_batch_item_merges_for_itself(impl, case, seed):
    """What a head gives alone, it gives among others."""
    values, attention, kept = given(impl, case, seed)
    same_alone(impl, MERGE, values, attention, kept, far_draws(impl, by_attention(attention, kept, 32), seed))


@law("CAM-5", of=(PROBABILITIES, SPREAD), case=cases(), seed=seeds(), merge_size=sizes)
def test_the_expected_output_is_that_of_the_whole_text(impl, case, seed, merge_size):
    """With the received attention, where no evicted token has more than a kept one and the last one stays."""
    values, attention, kept = given(impl, case, seed)
    kept[..., -1] = True
    attention = np.where(kept, 2 + attention, np.minimum(attention, 2))
    weights = impl.round(impl.cam.probabilities(attention, kept, merge_size=merge_size))
    got = impl.cam.spread(values, kept, weights, merge_size=merge_size)
    parts = attention[..., None] * np.stack([kept[..., None] * got, values, np.abs(values) + np.abs(got)])
    output, wanted, size = parts.sum(axis=3)
    rounds_to(impl, output, wanted, "the expected output", roundings=2, terms=values.shape[2], size=size)
