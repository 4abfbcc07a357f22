"""Laws of LagKV on partitions of thousands of tokens, at any scale: LK-9, LK-11, LK-12."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from evictionary.spec_tests.harness.by_hand import of_dtype, require_near, rounding, softmax_slack
from evictionary.spec_tests.harness.cases import long_cases
from evictionary.spec_tests.harness.law import law
from evictionary.spec_tests.harness.tolerance import check_selection, require_mask

SCORE, SELECT = "lagkv.score", "lagkv.select"
ANY_SCALE = ("minute", "moving_mean", "vast", "normal", "sinks")


def deviations(states, next_states):
    """The standard deviation over the channels of the normalised states, [.., L], added channel by channel; and its magnitude."""
    low, high = next_states.min(axis=-2), next_states.max(axis=-2)
    total = squares = largest = np.zeros(states.shape[:-1])
    for channel in range(states.shape[-1]):
        spread = high[..., channel] - low[..., channel]
        normalised = (states[..., channel] - low[..., channel, None]) / spread[..., None]
        largest = np.maximum(largest, np.abs(normalised))
        # Around one half, where most of them lie, so that the sums of squares do not cancel.
        total, squares = total + (normalised - 0.5), squares + (normalised - 0.5) ** 2
    channels = states.shape[-1]
    return np.sqrt(np.maximum(squares - total**2 / channels, 0) / (channels - 1)), largest


def expected_score(impl, *partitions):
    """The score of partitions [.., L, D] against their successors, and what it may be wrong by."""
    keys, values, next_keys, next_values = partitions
    score = slack = np.zeros(keys.shape[:-1])
    for states, next_states in ((keys, next_keys), (values, next_values)):
        deviation, largest = deviations(states, next_states)
        weights = np.exp(deviation - deviation.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        score = score + weights
        slack = slack + softmax_slack(impl, weights, rounding(impl, states.shape[-1]) * float(largest.max()))
    return score, slack


def of_contrast(case):
    """Exact partitions at the scale of the case, in which a few neighbouring tokens have all weight but 1e-20 or so.

    These are the last ones by their keys, and any by their values. The range of the next partition is made by one token, its last
    or any; all others are alike.
    """
    tokens = np.arange(case.length)[:, None]
    last, any_one = case.length - 1, case.seed % case.length
    scale = {"minute": 2.0**-24, "vast": 2.0**13}.get(case.kind, 1.0)
    states = (
        np.sign(case.keys) * np.where(np.abs(tokens - last) < 8, 128, 1),
        np.sign(case.values) * np.where(np.abs(tokens - any_one) < 8, 128, 1),
        np.broadcast_to(np.where(tokens == last, 1, -1), case.keys.shape),
        np.broadcast_to(np.where(tokens == any_one, -1, 1), case.values.shape),
    )
    return [scale * part for part in states]


def check_score(impl, case):
    for states in ((case.keys, case.values, case.next_keys, case.next_values), of_contrast(case)):
        partitions = [of_dtype(impl, part) for part in states]
        expected, slack = expected_score(impl, *partitions)
        require_near(impl.lagkv.score(*partitions), expected, slack, "the score of a long partition")


@law("LK-9", of=SCORE, examples=2, case=long_cases(ANY_SCALE, lengths=(4097, 8191, 1024)))
def test_a_range_of_any_size_normalises(impl, case):
    """Channels whose range is 1e-7 or 1e5 are divided by it all the same: nothing but a range of 0 counts as constant."""
    check_score(impl, case)


@law("LK-11", of=SCORE, examples=2, case=long_cases(("moving_mean", "normal", "sinks"), lengths=(8191, 4097, 1024)))
def test_a_partition_of_thousands_of_tokens_has_one_range_and_one_softmax(impl, case):
    """The range is that of all tokens of the next partition, and the scores of all tokens are normalised together."""
    check_score(impl, case)


@law(
    "LK-12",
    of=SELECT,
    examples=2,
    case=long_cases(ANY_SCALE, lengths=(32_769, 8191, 4097)),
    percent=st.sampled_from([25, 50, 12]),
    sink=st.sampled_from([16, 4, 0]),
    lag=st.sampled_from([1024, 128]),
)
def test_every_partition_of_a_long_prompt_keeps_its_best(impl, case, percent, sink, lag):
    """Of dozens of partitions, each but the last keeps its best floor(rL) tokens; the sinks and the window stay."""
    keys, values = (of_dtype(impl, states) for states in (case.keys, case.values))
    kept = impl.lagkv.select(keys, values, keep_ratio=percent / 100, sink_size=sink, lag_size=lag)
    require_mask(kept, keys.shape[:3], "the selection")
    whole = (case.length - sink) // lag
    last = sink + max(0, whole - 1) * lag
    free = np.broadcast_to((np.arange(case.length) < sink) | (np.arange(case.length) >= last), kept.shape)
    if whole < 2:
        check_selection(kept, np.zeros(kept.shape), case.length, protected=free)
        return
    parts = [states[:, :, sink : last + lag].reshape(*states.shape[:2], whole, lag, -1) for states in (keys, values)]
    scores, slack = expected_score(impl, *(part[:, :, :-1] for part in parts), *(part[:, :, 1:] for part in parts))
    check_selection(kept[..., sink:last].reshape(scores.shape), scores, percent * lag // 100, slack=float(slack.max()))
    check_selection(kept, np.zeros(kept.shape), int(kept[0, 0].sum()), protected=free, what="the selection of a head")


@law(
    "LK-12",
    of=SELECT,
    examples=2,
    case=long_cases(lengths=(32_769, 8191, 4097)),
    percent=st.sampled_from([25, 50, 12]),
    sink=st.sampled_from([16, 4, 0]),
    lag=st.sampled_from([1024, 128]),
)
def test_every_partition_of_a_long_prompt_keeps_its_larger_half(impl, case, percent, sink, lag):
    """One half of each partition, the second and the first in turn, varies eight times as much as the other: it stays."""
    places, compressed = np.arange(case.length) - sink, max(0, (case.length - sink) // lag - 1)
    larger = (places // (lag // 2) + places // lag) % 2 == 1
    # 8 and -8 stand in every channel of every partition: its range is 16, and all quotients and sums are exact.
    keys, values = (
        np.broadcast_to(np.where((places[:, None] + np.arange(states.shape[-1])) % 2, -1.0, 1.0), states.shape)
        * np.where(larger, 8, 1)[:, None]
        for states in (case.keys, case.values)
    )
    kept = impl.lagkv.select(keys, values, keep_ratio=percent / 100, sink_size=sink, lag_size=lag)
    require_mask(kept, keys.shape[:3], "the selection")
    own_kept, own_larger = (
        np.broadcast_to(rows, kept.shape)[..., sink : sink + compressed * lag].reshape(*kept.shape[:2], compressed, lag)
        for rows in (kept, larger)
    )
    check_selection(own_kept, own_larger.astype(float), percent * lag // 100, what="a partition")
