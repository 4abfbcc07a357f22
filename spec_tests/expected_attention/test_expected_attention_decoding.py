"""Laws of Expected Attention's decoding, and of the measures of its appendices: EA-10, EA-A."""

from evictionary.reference.expected_attention import Decoding, average_rope, query_statistics, score
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import holds_tokens

STEP, START = "expected_attention.decode_step", "expected_attention.start_decoding"
MEASURES = "expected_attention_theory.skewness_and_kurtosis"
# What np.corrcoef may be wrong by: it loses digits of rows that vary little beside their size.
OF_CORRCOEF = 1e-9
# Section 4.2 compresses every 512 steps by the latest 128 queries: the defaults.
DEFAULTS = {"interval": 512, "buffer_size": 128}
PAPER = (
    {"target": 512},
    {"target": 128, "interval": 128, "buffer_size": 128},
    {"target": 100, "interval": 100, "buffer_size": 64},
)


def states(impl, seed, group, length, **sizes):
    """Keys, values and queries before RoPE of `length` tokens, as the dtype represents them: 2 batch
    items, 2 KV heads.
    """
    shape = {"batch": 2, "num_kv_heads": 2, "head_dim": 4, "value_dim": width(impl, Case.value_dim)} | sizes
    case = Case(seed=seed, group=group, length=length, num_queries=length, **shape)
    keys, queries = (among_zeros(rows, width(impl, shape["head_dim"])) for rows in (case.keys, case.queries))
    return impl.round(keys), impl.round(case.values), impl.round(queries)


def among_zeros(rows, channels):
    """The rows with zeros in all other channels: the same pairs for RoPE, and logits of about the same size.

    Among many random channels queries and keys are nearly
    orthogonal. A bfloat16 then hides which key is best.
    """
    pairs = rows.shape[-1] // 2
    wide = np.zeros((*rows.shape[:-1], channels))
    wide[..., :pairs], wide[..., channels // 2 : channels // 2 + pairs] = np.split(rows, 2, axis=-1)
    return wide * 2.0 ** round(math.log2(channels / rows.shape[-1]) / 4)


def prompt(keys, values, queries, length, buffer_size):
    """The state after `length` tokens, none of them evicted."""
    places = np.broadcast_to(np.arange(length), (*keys.shape[:2], length)).copy()
    newest = slice(max(0, length - buffer_size), length)
    return Decoding(keys[:, :, :length], values[:, :, :length], places, queries[:, :, newest], length, 0)


def check_compression(impl, state, queries, keys, values, candidates, position, target, **settings):
    """The kept positions are the `target` best of the candidates [B, H_kv, n] by the statistics of
    `queries` at `position`.
    """
    rows = [np.take_along_axis(rows, candidates[..., None], axis=2) for rows in (keys, values)]
    horizon = settings.get("horizon", 512)

    def chain(queries, keys, values):
        mean, covariance = average_rope(*query_statistics(queries), position=position, horizon=horizon)
        return score(keys, values, mean, covariance, epsilon=settings.get("epsilon", 0.02))

    kept = (candidates[..., None] == state.positions[..., None, :]).any(axis=-1)

    def slack() -> np.ndarray:
        # Queries are rounded as statistics, as tables of RoPE, turned and averaged; angles are in the
        # accumulator's precision.
        angle = 2 * final_rounding(impl) + accumulating(impl) * (position + horizon)
        size = (
            np.linalg.norm(queries, axis=-1).max()
            * np.linalg.norm(rows[0], axis=-1)
            / math.sqrt(rows[0].shape[-1])
        )
        weights = chain(queries, rows[0], np.ones_like(rows[1][..., :1]))
        moved = softmax_slack(impl, weights - settings.get("epsilon", 0.02), angle * (size + size**2))
        return (moved + 2 * final_rounding(impl) * weights) * np.linalg.norm(rows[1], axis=-1)

    selects(
        kept, chain(queries, *rows), target, slack=slack, what=f"the compression before position {position}"
    )


def check_stream(impl, states, length, target, *, interval=512, buffer_size=128, **settings):
    """Raise Violation unless the tokens after the first `length` are added one by one and compressed when
    they should be.

    The implementation is asked with what differs from the defaults of the paper.
    """
    keys, values, queries = states
    sizes = {"interval": interval, "buffer_size": buffer_size}
    asked = settings | {name: value for name, value in sizes.items() if value != DEFAULTS[name]}
    state = prompt(keys, values, queries, length, buffer_size)
    for step, token in enumerate(range(length, keys.shape[2]), start=1):
        before, new = state, (each[:, :, token] for each in (queries, keys, values))
        state = impl.expected_attention.decode_step(before, *new, target=target, **asked)
        equal(
            (state.position, state.steps),
            (token + 1, step % interval),
            f"after step {step} position and steps are wrong",
        )
        candidates = np.concatenate([before.positions, np.full((*keys.shape[:2], 1), token)], axis=2)
        latest = queries[:, :, max(0, token + 1 - buffer_size) : token + 1]
        equal(state.queries, latest, "the buffer does not hold the latest queries")
        if step % interval == 0 and candidates.shape[2] > target:
            check_compression(impl, state, latest, keys, values, candidates, token + 1, target, **settings)
        else:
            equal(state.positions, candidates, "a token was evicted or lost between two compressions")
        require(
            (np.diff(state.positions, axis=-1) > 0).all(),
            "the rows are not in position order",
            None,
            state.positions,
        )
        holds_tokens(state, keys, values)


@law(
    "EA-10",
    of=STEP,
    seed=seeds(),
    group=st.integers(1, 2),
    length=st.integers(1, 6),
    target=st.integers(1, 6),
    interval=st.integers(1, 5),
    buffer_size=st.integers(1, 7),
    epsilon=st.sampled_from([0.0, 0.02]),
)
def test_decoding_compresses_every_interval(
    impl, seed, group, length, target, interval, buffer_size, epsilon
):
    """Step by step: the cache grows by one, and every `interval`
    steps shrinks to the `target` best by the latest queries.
    """
    settings = {"interval": interval, "buffer_size": buffer_size, "horizon": 4, "epsilon": epsilon}
    check_stream(impl, states(impl, seed, group, length + 12), length, target, **settings)


@law("EA-10", of=STEP, examples=1, seed=seeds())
def test_decoding_compresses_at_the_intervals_of_the_paper(impl, seed):
    """The same every 512 steps with the latest 128 queries, which are the defaults, and every 100 and 128
    steps with others.
    """
    for settings in PAPER:
        length, steps = settings["target"] // 2, settings["target"] + settings.get("interval", 512) // 4
        tokens = length + max(steps, settings.get("interval", 512) + 2)
        check_stream(
            impl, states(impl, seed, 1, tokens, batch=3, num_kv_heads=1, head_dim=2), length, **settings
        )


@law("EA-10", of=STEP, seed=seeds(), target=st.integers(1, 9), interval=st.integers(1, 6))
def test_the_cache_never_exceeds_target_plus_interval(impl, seed, target, interval):
    """From a prompt within the target on, no step ends with target + interval tokens or more, nor stores
    more queries than 3.
    """
    keys, values, queries = states(impl, seed, 1, 30)
    state = prompt(keys, values, queries, min(target, 4), 3)
    for token in range(min(target, 4), 30):
        new = (each[:, :, token] for each in (queries, keys, values))
        state = impl.expected_attention.decode_step(
            state, *new, target=target, interval=interval, buffer_size=3
        )
        held = state.keys.shape[2]
        require(
            held <= max(target, target + interval - 1),
            f"the cache holds {held} tokens",
            target + interval - 1,
            held,
        )
        require(
            state.queries.shape[2] <= 3, "the buffer holds more than 3 queries", 3, state.queries.shape[2]
        )


@law("EA-10", of=STEP, examples=2, position=st.sampled_from([521, 5000]))
def test_the_defaults_are_those_of_the_paper(impl, position):
    """128 queries, every 512 steps, 512 positions, epsilon 0.02, at the true position and not at that of
    the buffer's end.
    """
    keys, values, queries = states(impl, 7, 2, 521)
    places = np.broadcast_to(np.arange(position - 521, position), keys.shape[:3]).copy()
    state = Decoding(
        keys[:, :, :-1], values[:, :, :-1], places[..., :-1], queries[:, :, -131:-1], position - 1, 510
    )
    token = (queries[:, :, -1], keys[:, :, -1], values[:, :, -1])
    waiting = impl.expected_attention.decode_step(state, *token, target=200)
    sizes = waiting.keys.shape[2], waiting.steps, waiting.queries.shape[2]
    equal(sizes, (521, 511, 128), "compressed before 512 steps, or the buffer is not of 128 queries")
    compressed = impl.expected_attention.decode_step(state._replace(steps=511), *token, target=200)
    relative = compressed._replace(positions=compressed.positions - (position - 521))
    candidates = places - (position - 521)
    check_compression(impl, relative, queries[:, :, -128:], keys, values, candidates, position, 200)


def check_start(impl, seed, length, buffer_size=None):
    keys, values, queries = states(impl, seed, 2, length)
    expected = prompt(keys, values, queries, length, buffer_size or 128)
    asked = {} if buffer_size is None else {"buffer_size": buffer_size}
    got = impl.expected_attention.start_decoding(keys, values, queries, **asked)
    for name, wanted, found in zip(Decoding._fields, expected, got, strict=True):
        equal(found, wanted, f"{name} of the first state is wrong")


@law("EA-10", of=START, seed=seeds(), length=st.integers(1, 6), buffer_size=st.integers(1, 8))
def test_decoding_starts_with_the_latest_queries_of_the_prompt(impl, seed, length, buffer_size):
    """All tokens of the prompt, their positions, the latest queries, and the position of the next token."""
    check_start(impl, seed, length, buffer_size)


@law("EA-10", of=START, examples=1, seed=seeds())
def test_decoding_starts_with_the_latest_128_queries(impl, seed):
    """The same by default, of prompts shorter than 128 tokens, as long, and longer."""
    for length in (100, 127, 128, 129, 512, 2048):
        check_start(impl, seed, length)


@law("EA-A", of="expected_attention_theory.reconstruction_error", case=cases())
def test_reconstruction_error_is_the_mean_norm_of_the_difference(impl, case):
    """The mean over the tokens of |h - h_compr|: 0 where nothing was evicted."""
    path = "expected_attention_theory.reconstruction_error"
    size = min(case.keys.shape[2], case.next_keys.shape[2])
    hidden, compressed = impl.rounded((case.keys[:, :, :size], case.next_keys[:, :, :size]))
    norms = lengths(hidden - compressed)
    by_hand = np.array([[math.fsum(row) / size for row in rows] for rows in norms])
    agrees(impl, path, hidden, compressed, by_hand=by_hand, size=norms.max())
    equal(impl.call(path, hidden, hidden), 0, "equal states have a reconstruction error")


@law("EA-A", of="expected_attention_theory.correlation", case=cases(min_length=2), seed=seeds())
def test_correlation_is_pearsons(impl, case, seed):
    """The mean product of the standardised rows: 1 with itself, -1 with its mirror, 0 with a constant."""
    path, observed = "expected_attention_theory.correlation", impl.round(case.keys[..., 0])
    expected = impl.round(np.random.default_rng(seed).normal(size=observed.shape))
    got, pearson = agrees(impl, path, observed, expected), np.zeros(observed.shape[:-1])
    for place in np.ndindex(pearson.shape):
        if np.ptp(observed[place]):
            pearson[place] = np.corrcoef(observed[place], expected[place])[0, 1]
    how = {"got": got, "expected": pearson, "more": OF_CORRCOEF}
    agrees(impl, path, observed, expected, **how, what="the correlation, from Pearson's,")
    agrees(impl, path, observed, -4 * observed, what="the correlation with the mirror")


@law("EA-A", of=MEASURES, case=cases(min_length=2))
def test_skewness_and_kurtosis_are_standardised_moments(impl, case):
    """E[z^3] and E[z^4] - 3 of each channel over the tokens."""
    agrees(impl, MEASURES, case.keys)


@law("EA-A", of=MEASURES)
def test_known_distributions_have_their_moments(impl):
    """Two equal points have excess kurtosis -2, a constant
    channel -3, (0, 0, 0, 4) skewness 2/sqrt 3 and kurtosis -2/3.
    """
    channels = np.array([[1.0, -1, 1, -1], [2, 2, 2, 2], [0, 0, 0, 4]]).T
    skewness, kurtosis = impl.expected_attention_theory.skewness_and_kurtosis(channels)
    rounds_to(impl, skewness, [0, 0, 2 / np.sqrt(3)], "the skewness", roundings=4)
    rounds_to(impl, kurtosis, [-2, -3, -2 / 3], "the excess kurtosis", roundings=4)


@law("EA-A", of=MEASURES, seed=seeds())
def test_gaussian_samples_measure_near_zero(impl, seed):
    """Of 2,000 Gaussian numbers, skewness and excess kurtosis lie within six standard errors, sqrt(6/N)
    and sqrt(24/N), of 0.
    """
    sample = impl.round(np.random.default_rng(seed).normal(size=(2_000, 1)))
    skewness, kurtosis = impl.expected_attention_theory.skewness_and_kurtosis(sample)
    errors = np.sqrt(6 / 2_000), np.sqrt(24 / 2_000)
    rounds_to(impl, skewness, np.zeros(1), "the skewness", roundings=8, beside=6 * errors[0])
    # The sample kurtosis of a Gaussian has a heavy right tail: there the bound is twice as wide.
    rounds_to(impl, kurtosis, np.zeros(1), "the excess kurtosis", roundings=8, beside=12 * errors[1])
