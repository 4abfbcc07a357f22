"""The numbers of each group, and other plain forms: what the laws of quantisation compare with."""

from evictionary.spec_tests.judge.prelude import *

CASES = st.builds(
    Case,
    kind=st.sampled_from(["normal", "ties", "drift", "mixed_norms"]),
    seed=seeds(),
    batch=st.sampled_from([1, 2, 5]),
    num_kv_heads=st.sampled_from([1, 3]),
    length=st.sampled_from([12, 4, 8, 20, 36]),
    head_dim=st.sampled_from([4, 8, 16]),
    value_dim=st.sampled_from([8, 4, 16]),
)
"""Tokens and channels that groups of 4 divide, and channels that are a power of two."""

BITS = st.sampled_from([2, 1, 3, 4, 8])


def groups_of(states, group_size):
    """The groups [..., T, g, G] of the last axis of [..., T, C], one slice after the other."""
    starts = range(0, states.shape[-1], group_size)
    return np.stack([states[..., start : start + group_size] for start in starts], axis=-2)


def scales_by_hand(groups, bits):
    """The smallest number and the scale of each group [..., G], in the order of its numbers, [..., 1]."""
    in_order = np.sort(groups, axis=-1)
    return in_order[..., :1], (in_order[..., -1:] - in_order[..., :1]) / (2**bits - 1)


def check_given_back(impl, got, groups, bits, beside=0.0):
    """Raise Violation unless each number of `got` is one of the 2^bits numbers of its group, and no other of
    them is nearer to what was quantised. Both are [..., G].

    beside: what each number may be wrong by, beside the roundings of a number of its group.
    """
    zero, scale = scales_by_hand(groups, bits)
    size = np.abs(groups).max(axis=-1, keepdims=True)
    levels = zero + scale * np.arange(2**bits)[:, *[None] * groups.ndim]  # the numbers of each group
    nearest = np.abs(levels - got).min(axis=0)
    rounds_to(
        impl, nearest, np.zeros(got.shape), "the distance to a number of the group", size=size, beside=beside
    )
    slack = scale / 2 + 2 * beside
    rounds_to(impl, got, groups, "a number of a group", size=2 * size, beside=slack)


def check_by_token(impl, got, states, bits, group_size):
    """Raise Violation unless [..., T, C] is what groups of channels of one token give back."""
    require_numbers(got, states.shape, "what comes back")
    check_given_back(impl, groups_of(got, group_size), groups_of(states, group_size), bits)


def check_by_channel(impl, got, states, bits, group_size):
    """Raise Violation unless [..., T, C] is what groups of tokens of one channel give back."""
    check_by_token(impl, np.swapaxes(got, -1, -2), np.swapaxes(states, -1, -2), bits, group_size)


def whole_groups(states, group_size):
    """The first tokens of [..., T, C] that groups divide; all, where there are fewer than a group has."""
    length = states.shape[-2]
    return states[..., : length // group_size * group_size or length, :]


def sylvester(channels):
    """H[i, j] is -1 where i and j have an odd number of binary ones in common, else 1."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(channels)] for i in range(channels)])


def turned_by_hand(states):
    """Each state [..., D] by H / sqrt(D), sum by sum."""
    rows = sylvester(states.shape[-1]).tolist()
    found = np.empty_like(states)
    for place in np.ndindex(states.shape[:-1]):
        own = states[place].tolist()
        found[place] = [math.fsum(h * x for h, x in zip(row, own, strict=True)) for row in rows]
    return found / math.sqrt(states.shape[-1])


def e4m3_numbers():
    """The finite numbers of e4m3 of at least 0, each with whether its mantissa is even, in their order."""
    found = [(mantissa / 8 * 2.0**-6, mantissa % 2 == 0) for mantissa in range(8)]
    for exponent in range(-6, 9):
        found += [((1 + mantissa / 8) * 2.0**exponent, mantissa % 2 == 0) for mantissa in range(8)]
    return [each for each in found if each[0] <= 448]


def e4m3_by_hand(numbers):
    """The nearest of these numbers to each, the even one of two, with its sign."""
    values, even = (np.array(each) for each in zip(*e4m3_numbers(), strict=True))
    found = np.empty_like(numbers)
    for place, number in np.ndenumerate(numbers):
        distance = np.abs(values - abs(number))
        nearest = np.flatnonzero(distance == distance.min())
        found[place] = math.copysign(values[min(nearest, key=lambda own: not even[own])], number)
    return found


def bytes_of_arrays(length, head_dim, bits, group_size, residual, bytes_per_number):
    """The bytes of one KV head, counted token by token and channel by channel."""
    group = min(group_size, head_dim)
    old_keys = [token for token in range(length) if token // residual < length // residual]
    old_values = [token for token in range(length) if token < length - residual]
    bits_of_codes = 0
    for row in [len(old_keys)] * head_dim + [head_dim] * len(old_values):
        bits_of_codes += row * bits + -row * bits % 8  # a byte that is begun counts whole
    groups = len(old_keys) // group_size * head_dim + len(old_values) * (head_dim // group)
    exact = (2 * length - len(old_keys) - len(old_values)) * head_dim
    return bits_of_codes // 8 + bytes_per_number * (2 * groups + exact)
