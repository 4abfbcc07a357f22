"""Laws of LagKV on partitions of thousands of tokens, at any scale: LK-9, LK-11, LK-12, LK-R."""

from dataclasses import replace

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.lagkv.helpers import SCORE, SELECT, asked, check_partitions, states_at
from evictionary.spec_tests.shared.helpers import holds_tokens, softmax

ANY_SCALE = ("minute", "moving_mean", "vast", "normal", "sinks")


def deviations(states, next_states):
    """The standard deviation over the channels of the normalised states, [.., L], added channel by
    channel; and its magnitude.
    """
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
        weights = softmax(deviation)
        score = score + weights
        slack = slack + softmax_slack(impl, weights, rounding(impl, states.shape[-1]) * largest)
    return score, slack


def of_contrast(case):
    """Exact partitions at the scale of the case, in which a few neighbouring tokens have all weight but
    1e-20 or so.

    These are the last ones by their keys, and any by their values. The range of
    the next partition is made by one token, its last or any; all others are alike.
    Signs take turns, so that those few tokens vary alike in any arithmetic.
    """
    tokens = np.arange(case.length)[:, None]
    signs = (-1.0) ** (tokens + np.arange(case.head_dim)), (-1.0) ** (tokens + np.arange(case.value_dim))
    last, any_one = case.length - 1, case.seed % case.length
    scale = {"minute": 2.0**-24, "vast": 2.0**13}.get(case.kind, 1.0)
    states = (
        signs[0] * np.where(np.abs(tokens - last) < 8, 128, 1),
        signs[1] * np.where(np.abs(tokens - any_one) < 8, 128, 1),
        np.broadcast_to(np.where(tokens == last, 1, -1), case.keys.shape),
        np.broadcast_to(np.where(tokens == any_one, -1, 1), case.values.shape),
    )
    return [
        np.broadcast_to(scale * part, whole.shape)
        for part, whole in zip(states, 2 * (case.keys, case.values), strict=True)
    ]


def check_score(impl, case):
    partitions = [of_dtype(impl, part) for part in (case.keys, case.values, case.next_keys, case.next_values)]
    expected, slack = expected_score(impl, *partitions)
    near(impl.lagkv.score(*partitions), expected, slack, "the score of a long partition")
    partitions = [of_dtype(impl, part) for part in of_contrast(case)]
    expected, _ = expected_score(impl, *partitions)
    slack = rounding(impl, case.length) * np.maximum(expected, 1e-6)
    near(impl.lagkv.score(*partitions), expected, slack, "the score where a few tokens have all weight")


@law("LK-9", of=SCORE, examples=2, case=long_cases(ANY_SCALE, lengths=(4097, 8191, 1024)))
def test_a_range_of_any_size_normalises(impl, case):
    """Channels whose range is 1e-7 or 1e5 are divided by it
    all the same: nothing but a range of 0 counts as constant.
    """
    check_score(impl, case)


@law(
    "LK-11",
    of=SCORE,
    examples=2,
    case=long_cases(("moving_mean", "normal", "sinks"), lengths=(8191, 4097, 1024)),
)
def test_a_partition_of_thousands_of_tokens_has_one_range_and_one_softmax(impl, case):
    """The range is that of all tokens of the next partition,
    and the scores of all tokens are normalised together.
    """
    check_score(impl, case)


SIZES: dict[str, Any] = {
    "percent": st.sampled_from([25, 50, 12]),
    "sink": st.sampled_from([16, 100, 4, 0, 256]),
    "lag": st.sampled_from([1024, 128, 512]),
}


def one_shot(impl, keys, values, **settings):
    return impl.lagkv.select(keys, values, **settings)


def streamed(impl, keys, values, *, sink_size, lag_size, **settings):
    """The mask that a stream ends with: the first chunk
    of the paper, S + 2L tokens, then up to L at a time.
    """
    lengths = np.random.default_rng(lag_size).integers(
        lag_size // 2, lag_size + 1, size=2 * keys.shape[2] // lag_size
    )
    ends = sink_size + 2 * lag_size + np.concatenate([[0], np.cumsum(lengths)])
    cuts = [*ends[ends < keys.shape[2]].tolist(), keys.shape[2]]
    settings |= {"sink_size": sink_size, "lag_size": lag_size}
    *_, (kept, stream, _) = states_at(impl, keys, values, cuts, **settings)
    equal(kept.sum(axis=-1), stream.positions.shape[-1], "a position stands twice in the stream")
    holds_tokens(stream, keys, values)
    return kept


def check_best(impl, case, choose, percent, sink, lag):
    """Raise Violation unless each partition but the last keeps its best floor(rL) tokens, and the sinks
    and the window stay.
    """
    keys, values = (of_dtype(impl, states) for states in (case.keys, case.values))
    kept = choose(impl, keys, values, **asked(percent, sink, lag))
    check_partitions(kept, keys, values, percent, sink, lag, lambda *states: expected_score(impl, *states))


def check_larger_half(impl, case, choose, percent, sink, lag):
    """Raise Violation unless of each partition the half stays that leaves the range of the next one.

    Which half that is differs from head to head and from one batch item to the next. It is 8 and -8 in every
    second channel, which has a range of 2 in the next partition; the other half is 1 and -1 in the other
    channels, which have a range of 16 there. Measured by the partition's own range the halves vary alike. All
    quotients are exact.
    """
    places, compressed = np.arange(case.length) - sink, max(0, (case.length - sink) // lag - 1)
    turn = np.arange(case.keys.shape[0])[:, None, None] + np.arange(case.keys.shape[1])[:, None]
    larger = (places // (lag // 2) + places // lag + turn) % 2 == 1  # [B, H, T]

    def alternating(states):
        channels, size = np.arange(states.shape[-1]), np.where(larger, 8.0, 1.0)[..., None]
        mine = (channels + (places // lag)[:, None]) % 2 == np.where(larger, 0, 1)[..., None]
        return np.broadcast_to(
            np.where(mine, np.where((places[:, None] + channels // 2) % 2, -size, size), 0), states.shape
        )

    keys, values = (alternating(states) for states in (case.keys, case.values))
    kept = choose(impl, keys, values, **asked(percent, sink, lag))
    require_mask(kept, keys.shape[:3], "the selection")
    own_kept, own_larger = (
        np.broadcast_to(rows, kept.shape)[..., sink : sink + compressed * lag].reshape(
            *kept.shape[:2], compressed, lag
        )
        for rows in (kept, larger)
    )
    selects(own_kept, own_larger.astype(float), percent * lag // 100, what="a partition")


@law("LK-12", of=SELECT, examples=2, case=long_cases(ANY_SCALE, lengths=(32_769, 8191, 4097)), **SIZES)
def test_every_partition_of_a_long_prompt_keeps_its_best(impl, case, percent, sink, lag):
    """Of dozens of partitions, each but the last keeps its
    best floor(rL) tokens; the sinks and the window stay.
    """
    check_best(impl, case, one_shot, percent, sink, lag)


@law(
    "LK-12",
    of=SELECT,
    examples=2,
    case=long_cases(lengths=(32_769, 8191, 4097)).map(lambda case: replace(case, batch=2)),
    **SIZES,
)
def test_every_partition_of_a_long_prompt_keeps_its_larger_half(impl, case, percent, sink, lag):
    """One half of each partition, the second and the first in turn, varies far more by the range of the
    next one: it stays. Each head and each batch item keeps its own.
    """
    check_larger_half(impl, case, one_shot, percent, sink, lag)


@law("LK-12", of=SELECT, examples=3, case=paper_cases(), **SIZES)
def test_the_prompts_of_the_paper_are_compressed_whole(impl, case, percent, sink, lag):
    """Prompts of 16K to 128K at the paper's settings and
    with up to 256 sinks: every partition keeps its best.
    """
    check_best(impl, case, one_shot, percent, sink, lag)
    check_larger_half(impl, case, one_shot, percent, sink, lag)


@law("LK-R", of="lagkv.step", examples=3, case=paper_cases((16_384, 32_769, 20_011)), **SIZES)
def test_the_streams_of_the_paper_keep_what_one_shot_keeps(impl, case, percent, sink, lag):
    """Streams of 16K tokens and more, in chunks of up to the paper's 128, 512 or 1,024 tokens, keep the
    best of each partition.
    """
    check_best(impl, case, streamed, percent, sink, lag)
    check_larger_half(impl, case, streamed, percent, sink, lag)
