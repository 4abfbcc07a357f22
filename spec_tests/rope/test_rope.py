"""Laws of rotary position embedding: ROPE-1 to ROPE-5."""

from evictionary.spec_tests.judge.prelude import *

ROTATE, FREQUENCIES = "rope.rotate", "rope.frequencies"

thetas = st.sampled_from([100.0, 10000.0, 500000.0])
offsets = st.integers(0, 4000)


def positions_of(case: Case, offset: int = 0) -> np.ndarray:
    return np.arange(offset, offset + case.length)


def turned(
    impl, states: np.ndarray, positions: np.ndarray, theta: float = 10000.0
) -> tuple[np.ndarray, float]:
    """What the oracle gives, and the error allowed on a channel: the angle is a product, rounded in
    float32 or wider.
    """
    allowed = impl.allowance(ROTATE, states, positions, theta)
    error = angle_error(impl, np.abs(positions).max()) + 2.0**-50
    return allowed.expected, float(allowed.largest + error * np.abs(states).max())


def turned_by_hand(states: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Each pair (i, i + D/2) as a complex number, times e^(i angle): the definition, one number at a time."""
    half, positions = states.shape[-1] // 2, np.broadcast_to(positions, states.shape[:-1])
    angles = [
        [float(position) * theta ** (-2 * channel / (2 * half)) for channel in range(half)]
        for position in positions.ravel()
    ]
    turns = np.array([[complex(math.cos(angle), math.sin(angle)) for angle in row] for row in angles])
    first, second = np.split(states, 2, axis=-1)
    pairs = (first + 1j * second) * turns.reshape(first.shape)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@law("ROPE-1", of=FREQUENCIES, half=st.integers(1, 64), theta=thetas)
def test_frequencies_fall_geometrically_from_one(impl, half, theta):
    """D/2 frequencies, theta^(-2i/D): the first is 1, each the same factor below the one before."""
    wanted = np.array([theta ** (-index / half) for index in range(half)])
    # Computed in float32 or wider: the exponent is off by 2^-24 of itself, which theta to that power
    # multiplies by its logarithm, the power and its inverse by as much; and all that twice.
    near(
        impl.rope.frequencies(2 * half, theta),
        wanted,
        (math.log(theta) + 3) * 2.0**-23 * wanted,
        "the frequencies",
    )


@law("ROPE-1", of=FREQUENCIES, kind="refusal")
def test_no_channels_are_refused(impl):
    """A head_dim of 0, which is even, raises ValueError."""
    refused(impl, "head_dim", FREQUENCIES, 0)


@law("ROPE-2", of=ROTATE, case=seeded_cases(head_dims=EVEN_DIMS, max_length=17), offset=offsets, theta=thetas)
def test_channel_i_turns_with_channel_i_plus_half(impl, case, offset, theta):
    """The pairs are (i, i + D/2), not (2i, 2i + 1), and turn from the first towards the second."""
    keys, positions = impl.round(case.keys), positions_of(case, offset)
    expected, slack = turned(impl, keys, positions, theta)
    loops(expected, turned_by_hand(keys, positions, theta), np.abs(keys).max())
    near(impl.rope.rotate(keys, positions, theta), expected, slack, "the rotated keys")


@law(
    "ROPE-2",
    of=ROTATE,
    case=seeded_cases(head_dims=EVEN_DIMS, max_length=17),
    seed=seeds(),
    batch=st.sampled_from([1, 3]),
    shape=st.integers(0, 2),
)
def test_each_head_turns_by_its_own_positions(impl, case, seed, batch, shape):
    """After eviction each head has other positions: [B, H, T], [B, 1, T] and [H, T] turn token by token as
    well as [T].
    """
    keys = impl.round(np.concatenate([case.keys[:1]] * batch))
    wanted = ((*keys.shape[:3],), (batch, 1, case.length), keys.shape[1:3])[shape]
    positions = np.sort(np.random.default_rng(seed).integers(0, 5000, size=wanted), axis=-1)
    expected, slack = turned(impl, keys, positions)
    size = 10 * np.abs(keys).max()  # angles of thousands lose a digit
    loops(expected, turned_by_hand(keys, positions, 10000.0), size)
    near(impl.rope.rotate(keys, positions), expected, slack, "the rotated keys")


@law("ROPE-2", of=ROTATE)
def test_a_quarter_turn_moves_the_first_half_to_the_second(impl):
    """At D = 4 and position 1, channel 0 turns by 1 radian
    into channel 2; channel 1 turns by 0.01 into channel 3.
    """
    channels = width(impl, 4)
    for channel, angle in ((0, 1.0), (1, 1e4 ** (-2 / channels))):
        basis, wanted = np.zeros((1, 1, 1, channels)), np.zeros(channels)
        basis[..., channel] = 1
        wanted[channel], wanted[channel + channels // 2] = math.cos(angle), math.sin(angle)
        _, slack = turned(impl, basis, np.array([1]))
        near(
            impl.rope.rotate(basis, np.array([1])),
            wanted.reshape(basis.shape),
            slack,
            "a rotated basis vector",
        )


@law("ROPE-3", of=ROTATE, case=seeded_cases(head_dims=EVEN_DIMS), offset=offsets)
def test_a_rotation_keeps_the_norm_of_each_pair(impl, case, offset):
    """Each pair keeps its length: nothing is scaled, and no pair mixes with another."""
    keys, positions = impl.round(case.keys), positions_of(case, offset)
    _, slack = turned(impl, keys, positions)
    before = np.hypot(*np.split(keys, 2, axis=-1))
    after = np.hypot(*np.split(impl.rope.rotate(keys, positions), 2, axis=-1))
    near(after, before, 2 * slack, "the length of a pair")


@law(
    "ROPE-4",
    of=ROTATE,
    case=seeded_cases(head_dims=EVEN_DIMS, kinds=("normal", "ties", "drift")),
    shift=st.integers(-50, 2000),
    seed=seeds(),
)
def test_a_dot_product_depends_on_the_distance_only(impl, case, shift, seed):
    """Moving query and key by the same number of positions leaves q . k as it was."""
    queries, keys = impl.round(case.keys), impl.round(case.next_keys)
    apart = np.random.default_rng(seed).integers(0, 100, size=2)
    here, there = np.full(case.length, 50 + apart[0]), np.full(case.length, 50 + apart[1])

    def products(shift: int) -> tuple[np.ndarray, np.ndarray]:
        got_queries, got_keys = impl.rope.rotate(queries, here + shift), impl.rope.rotate(keys, there + shift)
        (_, query_slack), (_, key_slack) = (
            turned(impl, queries, here + shift),
            turned(impl, keys, there + shift),
        )
        # The errors of the channels are independent: they add up by their squares.
        size_of_queries, size_of_keys = lengths(queries), lengths(keys)
        slack = (
            2 * (query_slack * size_of_keys + key_slack * size_of_queries)
            + 2.0**-46 * size_of_queries * size_of_keys
        )
        return (got_queries * got_keys).sum(axis=-1), slack

    (before, slack_before), (after, slack_after) = products(0), products(shift)
    near(after, before, slack_before + slack_after, f"q . k, both moved by {shift},")


@law("ROPE-5", of=ROTATE, case=seeded_cases(head_dims=EVEN_DIMS))
def test_position_zero_changes_nothing(impl, case):
    """At position 0 every angle is 0: the keys come back exactly."""
    keys = impl.round(case.keys)
    equal(impl.rope.rotate(keys, np.zeros(case.length, dtype=int)), keys, "position 0 changed the keys")


@law(
    "ROPE-5",
    of=ROTATE,
    case=seeded_cases(head_dims=EVEN_DIMS),
    first=st.integers(-300, 300),
    second=st.integers(-300, 300),
)
def test_rotations_add_up(impl, case, first, second):
    """Turning by s after turning by t is turning by s + t; s = -t undoes it."""
    keys = impl.round(case.keys)
    for then in (second, -first):
        at_first, at_then, at_sum = (
            np.full(case.length, position) for position in (first, then, first + then)
        )
        halfway = impl.round(impl.rope.rotate(keys, at_first))
        # The first turn may be off by its allowance, which the second carries on, mixed over a pair of
        # channels.
        slack = 2 * turned(impl, keys, at_first)[1] + turned(impl, halfway, at_then)[1]
        at_once, slack_of_sum = impl.rope.rotate(keys, at_sum), turned(impl, keys, at_sum)[1]
        got = impl.rope.rotate(halfway, at_then)
        near(got, at_once, slack + slack_of_sum, f"turning by {first} and then by {then}")


@law("ROPE-5", of=ROTATE, case=seeded_cases(head_dims=EVEN_DIMS, min_length=2), seed=seeds())
def test_each_token_turns_by_its_own_position(impl, case, seed):
    """Positions need not be consecutive or ascending: tokens
    permuted with their positions give the permuted result.
    """
    generator = np.random.default_rng(seed)
    positions = generator.integers(0, 5000, size=case.length)
    order = generator.permutation(case.length)
    slack = turned(impl, impl.round(case.keys), positions)[1]
    got = impl.rope.rotate(case.keys[:, :, order], positions[order])
    own = impl.rope.rotate(case.keys, positions)
    near(got, own[:, :, order], 2 * slack, "the permuted rotation")


@law(
    "ROPE-2",
    of=ROTATE,
    examples=3,
    case=long_cases(kinds=("normal", "minute", "vast", "sinks"), lengths=(4097, 8191, 4095)),
    theta=thetas,
)
def test_tokens_turn_by_any_position_up_to_131072(impl, case, theta):
    """Thousands of tokens at positions up to 131,072, in any
    order: each pair turns as a complex number by its angle.
    """
    states = of_dtype(impl, case.keys)
    positions = np.random.default_rng(case.seed).integers(0, 2**17 + 1, size=case.length)
    positions[0] = 2**17
    first, second = np.split(states, 2, axis=-1)
    frequency = theta ** (-np.arange(first.shape[-1]) / first.shape[-1])
    turned = (first + 1j * second) * np.exp(1j * positions[:, None] * frequency)
    expected, radii = np.concatenate([turned.real, turned.imag], axis=-1), np.tile(np.hypot(first, second), 2)
    got, what = impl.rope.rotate(states, positions, theta), "the rotated keys of a long prompt"
    rounds_to(impl, got, expected, what, size=radii, angle=positions[:, None])
