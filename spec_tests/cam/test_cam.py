"""Laws of CaM: CAM-1 to CAM-5."""

import math

import numpy as np
from hypothesis import strategies as st

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import draw_mask

SHARES, PROBABILITIES, SPREAD, MERGE = (
    f"cam.{name}" for name in ("shares", "probabilities", "spread", "merge_values")
)
sizes = st.sampled_from([1, 2, 3, 8, 32, 100])


def given(impl, case, seed):
    """Values, attention in eighths, and a mask whose heads keep different numbers; each kept token has
    received some.
    """
    values, draw = impl.round(case.values), np.random.default_rng(seed)
    kept = draw_mask(values.shape[:3], seed)
    attention = np.round(8 * draw.exponential(size=kept.shape)) / 8
    return values, np.where(kept, np.maximum(attention, 1 / 8), attention), kept


def receivers(kept, merge_size):
    """The place of each evicted token that has later kept ones, and the next of these, token by token."""
    for *head, token in np.argwhere(~kept):
        later = token + np.flatnonzero(kept[*head, token:])
        if len(later):
            yield tuple(head), token, later[:merge_size]


def probabilities_by_hand(attention, kept, merge_size):
    found = np.zeros(kept.shape)
    for head, token, later in receivers(kept, merge_size):
        mean = math.fsum(attention[head][later]) / len(later)
        found[head][token] = min(1, attention[head][token] / mean)
    return found


def spread_by_hand(values, kept, weights, merge_size):
    found = np.array(values)
    for head, token, later in receivers(kept, merge_size):
        found[head][later] += weights[head][token] * values[head][token] / len(later)
    return found


def far_draws(impl, probabilities, seed):
    """Numbers that no rounding takes to the other side of the probability; 0 and 1 among them."""
    is_merged = np.random.default_rng(seed).random(probabilities.shape) < 0.5
    above = np.where(probabilities < 7 / 8, (1 + probabilities) / 2, 1)
    return impl.round(np.where(is_merged, probabilities / 2, above))


@law("CAM-1", of=SHARES, case=cases(max_length=33), seed=seeds(), merge_size=sizes)
def test_the_next_kept_tokens_have_equal_shares(impl, case, seed, merge_size):
    """Token by token: 1 / m for each of the next m kept tokens, or for as many as there are."""
    kept, wanted = (
        draw_mask(case.values.shape[:3], seed),
        np.zeros((*case.values.shape[:3], case.values.shape[2])),
    )
    for head, token, later in receivers(kept, merge_size):
        wanted[head][token, later] = 1 / len(later)
    agrees(impl, SHARES, kept, merge_size=merge_size, by_hand=wanted)


@law("CAM-2", of=PROBABILITIES, case=cases(), seed=seeds(), merge_size=sizes)
def test_the_probability_is_the_attention_beside_the_mean_of_the_receivers(impl, case, seed, merge_size):
    """Token by token, cut off at 1; 0 for a kept token, and where no kept token comes later."""
    _, attention, kept = given(impl, case, seed)
    by_hand = probabilities_by_hand(attention, kept, merge_size)
    agrees(impl, PROBABILITIES, attention, kept, merge_size=merge_size, by_hand=by_hand)


@law(
    "CAM-2", of=PROBABILITIES, received=st.sampled_from([0, 1, 3, 4, 6, 8, 64]), merge_size=st.integers(1, 3)
)
def test_one_evicted_token_before_three_kept_ones(impl, received, merge_size):
    """These have received 2, 6 and 16: the mean of one, two and three of them is 2, 4 and 8."""
    attention, kept = np.array([[[received, 2.0, 6, 16]]]), np.array([[[False, True, True, True]]])
    got = impl.cam.probabilities(attention, kept, merge_size=merge_size)
    wanted = np.array([[[min(1, received / 2**merge_size), 0, 0, 0]]])
    near(got, wanted, rounding(impl), "the probability")


@law("CAM-2", of=PROBABILITIES, case=seeded_cases(), seed=seeds(), merge_size=sizes)
def test_the_scale_of_the_attention_does_not_count(impl, case, seed, merge_size):
    """Eight times the attention gives the same: a sum over queries is as good as their mean."""
    _, attention, kept = given(impl, case, seed)
    got = impl.cam.probabilities(8 * attention, kept, merge_size=merge_size)
    agrees(impl, PROBABILITIES, attention, kept, merge_size=merge_size, got=got)


@law("CAM-2", of=PROBABILITIES, kind="edge", received=st.sampled_from([0, 1 / 8, 4]))
def test_beside_tokens_without_attention_any_attention_is_enough(impl, received):
    """Where the mean is 0, the probability is 1, and 0 for a token that has received none either."""
    got = impl.cam.probabilities(np.array([[[received, 0.0, 0]]]), np.array([[[False, True, True]]]))
    equal(got, np.array([[[float(received > 0), 0, 0]]]), "the probability beside a mean of 0")


@law("CAM-3", of=SPREAD, case=cases(), seed=seeds(), merge_size=sizes)
def test_each_receiver_adds_its_part(impl, case, seed, merge_size):
    """Token by token, for weights from 0 to 1; those of kept tokens do not count."""
    values, attention, kept = given(impl, case, seed)
    weights = impl.round(np.minimum(attention, 1))
    by_hand = spread_by_hand(values, kept, weights, merge_size)
    size = (1 + np.abs(values).max()) * values.shape[2]
    agrees(impl, SPREAD, values, kept, weights, merge_size=merge_size, by_hand=by_hand, size=size)


@law("CAM-3", of=SPREAD, case=cases(), seed=seeds(), merge_size=sizes)
def test_the_merged_values_have_the_total_of_what_goes(impl, case, seed, merge_size):
    """The kept values together grow by the weighted evicted values that have a receiver, whatever m is."""
    values, attention, kept = given(impl, case, seed)
    weights = impl.round(np.minimum(attention, 1))
    got = impl.cam.spread(values, kept, weights, merge_size=merge_size)
    require_numbers(got, values.shape, "the merged values")
    goes = ~kept & (np.cumsum(kept, axis=-1) < kept.sum(axis=-1, keepdims=True))
    grown = (kept[..., None] * (got - values)).sum(axis=2)
    wanted = ((weights * goes)[..., None] * values).sum(axis=2)
    size = (np.abs(got) + np.abs(values)).sum(axis=2) + 1e-30
    near(grown, wanted, rounding(impl, values.shape[2]) * size, "the total of the merged values")


@law("CAM-3", of=SPREAD, case=cases(), seed=seeds(), which=st.sampled_from(["all kept", "none", "no weight"]))
def test_where_nothing_is_merged_the_values_come_back(impl, case, seed, which):
    """Where all tokens stay, where none does, and where all weights are 0."""
    values, _, kept = given(impl, case, seed)
    kept = {"all kept": kept | True, "none": kept & False}.get(which, kept)
    weights = np.full(kept.shape, float(which != "no weight"))
    equal(impl.cam.spread(values, kept, weights), values, "values change although nothing is merged")


@law("CAM-3", of=SPREAD, case=cases(), seed=seeds(), merge_size=sizes)
def test_evicted_values_are_as_they_were(impl, case, seed, merge_size):
    """So is a kept value before which nothing is evicted: only later tokens receive."""
    values, _, kept = given(impl, case, seed)
    got = impl.cam.spread(values, kept, np.ones(kept.shape), merge_size=merge_size)
    require_numbers(got, values.shape, "the merged values")
    still = ~kept | (np.cumsum(~kept, axis=-1) == 0)
    equal(got[still], values[still], "a value changes that receives nothing")


@law("CAM-3", of=(SPREAD, PROBABILITIES))
def test_a_value_goes_to_32_tokens_unless_told(impl):
    """Of 64 later kept tokens 32 receive a part of 1/32. They have received 1 or 3, and the others 9, so
    attention 1 has probability 1/2.
    """
    values, kept = np.zeros((1, 1, 65, width(impl))), np.arange(65)[None, None] > 0
    values[:, :, 0] = 1
    attention = np.array([[[1.0] + 16 * [1] + 16 * [3] + 32 * [9]]])
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
    values, draw = impl.round(case.values), np.random.default_rng(case.seed)
    kept, weights = draw.random(values.shape[:3]) < 0.5, np.round(8 * draw.random(values.shape[:3])) / 8
    kept[:, :, 200:500] = False
    got = impl.cam.spread(values, kept, weights, merge_size=merge_size)
    sums = spread_by_hand(np.abs(values), kept, weights, merge_size)
    slack = rounding(impl, 300) * sums + 1e-13 * np.abs(values).max()
    near(got, spread_by_hand(values, kept, weights, merge_size), slack, "the merged values of a long text")


@law("CAM-4", of=MERGE, case=cases(), seed=seeds(), merge_size=sizes)
def test_a_value_is_merged_where_its_draw_is_below_its_probability(impl, case, seed, merge_size):
    """Token by token; a draw of 0 merges nothing that has no attention."""
    values, attention, kept = given(impl, case, seed)
    exact = probabilities_by_hand(attention, kept, merge_size)
    draws = far_draws(impl, exact, seed)
    by_hand = spread_by_hand(values, kept, draws < exact, merge_size)
    size = (1 + np.abs(values).max()) * values.shape[2]
    agrees(impl, MERGE, values, attention, kept, draws, merge_size=merge_size, by_hand=by_hand, size=size)


@law("CAM-4", of=MERGE, received=st.integers(0, 20))
def test_of_evenly_spaced_draws_the_probability_merges_its_part(impl, received):
    """Two kept tokens have received 8 and 24, the evicted one a: of 64 evenly spaced draws exactly 4 a merge,
    and at most all. Both receivers get half of the value, or neither gets any.
    """
    values, kept = np.zeros((64, 1, 3, width(impl))), np.array([False, True, True])
    values[:, :, 0], values[:, :, 2] = 1, 4
    attention = np.broadcast_to(np.array([received, 8.0, 24]), (64, 1, 3))
    draws = np.broadcast_to((np.arange(64)[:, None, None] + 1 / 2) / 64, (64, 1, 3))
    got = impl.cam.merge_values(values, attention, np.broadcast_to(kept, (64, 1, 3)), draws)
    require_numbers(got, values.shape, "the merged values")
    wanted = np.where(np.arange(64) < 4 * received, 1 / 2, 0)[:, None, None]
    equal((got - values)[:, 0, 1:], np.broadcast_to(wanted, (64, 2, values.shape[-1])), "other draws merge")


@law("CAM-4", of=(MERGE, PROBABILITIES, SPREAD), seed=seeds(), merge_size=sizes)
def test_the_mean_over_evenly_spaced_draws_is_the_expectation(impl, seed, merge_size):
    """Of 128 draws for each token, in any order, the mean of the merged values is that of weights p, up to
    one draw for each value.
    """
    draw, shape = np.random.default_rng(seed), (1, 2, 9)
    values = np.round(4 * draw.normal(size=(*shape, width(impl)))) / 4
    kept, attention = draw.random(shape) < 0.5, (1 + np.round(8 * draw.exponential(size=shape))) / 8
    draws = draw.permuted(np.broadcast_to((np.arange(128) + 1 / 2) / 128, (*shape, 128)), axis=-1)
    states = (np.repeat(each, 128, axis=0) for each in (values, attention, kept))
    got = impl.cam.merge_values(*states, np.moveaxis(draws[0], -1, 0), merge_size=merge_size)
    probabilities = impl.round(impl.cam.probabilities(attention, kept, merge_size=merge_size))
    expected = impl.cam.spread(values, kept, probabilities, merge_size=merge_size)
    one_draw = spread_by_hand(np.abs(values), kept, np.ones(shape), merge_size)
    near(got.mean(axis=0, keepdims=True), expected, (1 / 128 + 2 * rounding(impl)) * one_draw, "the mean")


@law("CAM-4", of=MERGE, case=seeded_cases(), seed=seeds())
def test_each_head_of_each_batch_item_merges_for_itself(impl, case, seed):
    """What a head gives alone, it gives among others."""
    values, attention, kept = given(impl, case, seed)
    draws = far_draws(impl, probabilities_by_hand(attention, kept, 32), seed)
    same_alone(impl, MERGE, values, attention, kept, draws)


def output(attention, values, tokens):
    """The sum of the values [B, H, T, D_v] of some tokens, each times its attention."""
    return ((attention * tokens)[..., None] * values).sum(axis=2)


@law("CAM-5", of=(PROBABILITIES, SPREAD), case=cases(), seed=seeds(), merge_size=sizes)
def test_the_expected_output_is_that_of_the_whole_text(impl, case, seed, merge_size):
    """With the received attention, where no evicted token has more than a kept one and the last one stays."""
    values, attention, kept = given(impl, case, seed)
    attention = np.where(kept, 2 + attention, np.minimum(attention, 2))
    kept[..., -1] = True
    attention[..., -1] = 2
    check_expectation(impl, values, attention, kept, merge_size, output(attention, values, kept | True))


@law("CAM-5", of=(PROBABILITIES, SPREAD), case=cases(), seed=seeds(), merge_size=sizes)
def test_what_is_cut_off_is_lost(impl, case, seed, merge_size):
    """An evicted token counts in the expected output with its attention, and at most with the mean of its
    receivers.
    """
    values, attention, kept = given(impl, case, seed)
    counted = np.where(kept, attention, 0)
    for head, token, later in receivers(kept, merge_size):
        counted[head][token] = min(attention[head][token], attention[head][later].mean())
    check_expectation(impl, values, attention, kept, merge_size, output(counted, values, kept | True))


def check_expectation(impl, values, attention, kept, merge_size, wanted):
    """Raise Violation unless kept tokens with expected values give this output."""
    weights = impl.round(impl.cam.probabilities(attention, kept, merge_size=merge_size))
    got = impl.cam.spread(values, kept, weights, merge_size=merge_size)
    require_numbers(got, values.shape, "the merged values")
    size = output(attention, np.abs(values) + np.abs(got), kept | True) + 1e-30
    slack = 2 * rounding(impl, values.shape[2]) * size
    near(output(attention, got, kept), wanted, slack, "the expected output")


@law("CAM-1", of=(SPREAD, PROBABILITIES, MERGE), kind="refusal", merge_size=st.sampled_from([0, -1, 1.5]))
def test_a_bad_merge_size_is_refused(impl, merge_size):
    """Fewer than one token, and a number that is not whole, raise ValueError naming the argument."""
    kept, ones, values = np.array([[[False, True]]]), np.ones((1, 1, 2)), np.ones((1, 1, 2, 2))
    refused(impl, "merge_size", SPREAD, values, kept, ones, merge_size=merge_size)
    refused(impl, "merge_size", PROBABILITIES, ones, kept, merge_size=merge_size)
    refused(impl, "merge_size", MERGE, values, ones, kept, ones, merge_size=merge_size)
