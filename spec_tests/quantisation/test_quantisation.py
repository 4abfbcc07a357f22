"""Laws of quantised caches: QC-1 to QC-11."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.quantisation.helpers import (
    BITS,
    CASES,
    bytes_of_arrays,
    check_by_channel,
    check_by_token,
    check_given_back,
    e4m3_by_hand,
    e4m3_numbers,
    groups_of,
    scales_by_hand,
    sylvester,
    turned_by_hand,
    whole_groups,
)

QUANTISE, DEQUANTISE = "quantisation.quantise", "quantisation.dequantise"
PACK, UNPACK = "quantisation.pack", "quantisation.unpack"
BY_TOKEN, BY_CHANNEL, KIVI = "quantisation.by_token", "quantisation.by_channel", "quantisation.kivi"
TOKENS, BYTES = "quantisation.quantised_tokens", "quantisation.kivi_bytes"
HADAMARD, ROTATED = "quantisation.hadamard", "quantisation.rotated"
E4M3, FP8 = "quantisation.e4m3", "quantisation.fp8"


# A group


def quantised(impl, numbers, bits):
    """Codes, smallest numbers and scales; Violation unless the codes are whole numbers of so many bits."""
    codes, zero, scale = impl.quantisation.quantise(numbers, bits=bits)
    require(
        codes.shape == numbers.shape and codes.dtype.kind in "iu",
        "the codes are no whole numbers",
        None,
        codes,
    )
    require((codes >= 0).all() and (codes < 2**bits).all(), f"a code has more than {bits} bits", None, codes)
    return codes, zero, scale


@law("QC-1", of=QUANTISE, case=CASES, bits=BITS)
def test_a_group_has_its_smallest_number_and_its_range(impl, case, bits):
    """z is the smallest number, and s the range divided by the largest code."""
    numbers = impl.round(case.values)
    _, zero, scale = quantised(impl, numbers, bits)
    wanted, step = scales_by_hand(numbers, bits)
    equal(zero, wanted[..., 0], "the zero of a group is not its smallest number")
    rounds_to(impl, scale, step[..., 0], "the scale of a group", size=np.abs(numbers).max(axis=-1))


@law("QC-1", of=QUANTISE, case=CASES, bits=BITS)
def test_each_number_has_the_nearest_code(impl, case, bits):
    """z + s c is at most half a scale away from x."""
    numbers = impl.round(case.values)
    codes = quantised(impl, numbers, bits)[0]
    zero, scale = scales_by_hand(numbers, bits)
    check_given_back(impl, zero + scale * codes, numbers, bits)


@law("QC-1", of=QUANTISE)
def test_a_group_by_hand(impl):
    """-3, 0, 3 and 6 in two bits are 0, 1, 2 and 3; -3, -1, 4 and 6 are 0, 1, 2 and 3 too."""
    numbers = np.array([[[-3.0, 0, 3, 6], [-3, -1, 4, 6]]])
    codes, zero, scale = quantised(impl, numbers, 2)
    equal(codes, np.array([[[0, 1, 2, 3]] * 2]), "other codes")
    equal(zero, np.full((1, 2), -3.0), "other smallest numbers")
    equal(scale, np.full((1, 2), 3.0), "other scales")


@law("QC-1", of=QUANTISE)
def test_two_bits_unless_told(impl):
    """Without bits the largest code is 3."""
    codes, _, scale = impl.quantisation.quantise(np.array([[[0.0, 1, 2, 3]]]))
    equal(codes, np.array([[[0, 1, 2, 3]]]), "other codes")
    equal(scale, np.array([[1.0]]), "another scale")


@law("QC-1", of=QUANTISE, kind="edge")
def test_half_of_a_step_goes_to_the_even_code(impl):
    """0.5 and 2.5 of three steps have the codes 0 and 2, and 1.5 has 2."""
    codes = quantised(impl, np.array([[[0, 0.5, 1.5, 2.5, 3]]]), 2)[0]
    equal(codes, np.array([[[0, 0, 2, 2, 3]]]), "a tie went elsewhere")


@law("QC-1", of=QUANTISE, case=CASES, bits=BITS)
def test_a_larger_number_has_no_smaller_code(impl, case, bits):
    """In the order of the numbers of a group the codes never fall."""
    numbers = impl.round(case.values)
    codes = quantised(impl, numbers, bits)[0]
    in_order = np.take_along_axis(codes.astype(int), numbers.argsort(axis=-1), axis=-1)
    require((np.diff(in_order, axis=-1) >= 0).all(), "a larger number has a smaller code", None, in_order)


@law("QC-1", of=QUANTISE, case=CASES, bits=BITS)
def test_twice_the_numbers_have_the_same_codes(impl, case, bits):
    """A group that is doubled has the codes that it had."""
    numbers = impl.round(case.values)
    codes, twice = (quantised(impl, factor * numbers, bits)[0] for factor in (1, 2))
    equal(twice, codes, "the numbers times two have other codes")


@law("QC-1", of=QUANTISE, case=CASES, bits=BITS, seed=seeds())
def test_codes_move_with_their_numbers(impl, case, bits, seed):
    """The numbers of a group in another order have their codes in that order."""
    numbers = impl.round(case.values)
    order = np.random.default_rng(seed).permutation(numbers.shape[-1])
    moved = quantised(impl, numbers[..., order], bits)[0]
    equal(moved, quantised(impl, numbers, bits)[0][..., order], "codes do not move with their numbers")


@law("QC-2", of=DEQUANTISE, case=CASES, bits=BITS, seed=seeds())
def test_a_code_is_a_number_of_its_group(impl, case, bits, seed):
    """The code c is the number z + s c."""
    codes = np.random.default_rng(seed).integers(0, 2**bits, size=case.values.shape)
    zero, scale = impl.rounded((case.keys[..., 0], np.abs(case.keys[..., 1])))
    wanted = np.empty(codes.shape)
    for place in np.ndindex(codes.shape):
        wanted[place] = zero[place[:-1]] + scale[place[:-1]] * float(codes[place])
    size = np.abs(zero)[..., None] + 2**bits * scale[..., None]
    rounds_to(impl, impl.quantisation.dequantise(codes, zero, scale), wanted, "a number", size=size)


@law("QC-2", of=(QUANTISE, DEQUANTISE), case=CASES, bits=BITS)
def test_numbers_come_back_within_half_a_scale(impl, case, bits):
    """What was quantised comes back at most half of its own scale away."""
    numbers = impl.round(case.values)
    codes, zero, scale = quantised(impl, numbers, bits)
    back = impl.quantisation.dequantise(codes, zero, scale)
    size = 2 * np.abs(numbers).max(axis=-1, keepdims=True)
    rounds_to(impl, back, numbers, "a number that comes back", size=size, beside=scale[..., None] / 2)


@law("QC-2", of=(QUANTISE, DEQUANTISE), kind="edge", seed=seeds(), bits=BITS)
def test_a_group_of_equal_numbers_comes_back_as_it_was(impl, seed, bits):
    """Its range is 0, and there is nothing to divide by."""
    numbers = np.repeat(impl.round(np.random.default_rng(seed).normal(size=(2, 3, 1))), 5, axis=-1)
    numbers[0, 0] = 0
    codes, zero, scale = quantised(impl, numbers, bits)
    equal(impl.quantisation.dequantise(codes, zero, scale), numbers, "equal numbers come back as others")


# Bytes


@law("QC-3", of=(PACK, UNPACK), seed=seeds(), bits=st.sampled_from([2, 1, 4, 8]), length=st.integers(1, 33))
def test_codes_come_out_as_they_went_in(impl, seed, bits, length):
    """Packed codes that are unpacked are the same codes, whether their number fills the bytes or not."""
    codes = np.random.default_rng(seed).integers(0, 2**bits, size=(8, 16, length))
    packed = impl.quantisation.pack(codes, bits=bits)
    equal(impl.quantisation.unpack(packed, length, bits=bits), codes, "other codes come out")


@law("QC-3", of=PACK, seed=seeds(), bits=st.sampled_from([2, 1, 4, 8]), length=st.integers(1, 33))
def test_a_byte_is_full_of_codes(impl, seed, bits, length):
    """The bytes are those of a number whose binary digits are the codes, the first in the lowest bits."""
    codes = np.random.default_rng(seed).integers(0, 2**bits, size=(2, 3, length))
    wanted = np.zeros((2, 3, -(-length * bits // 8)), dtype=int)
    for row in np.ndindex(2, 3):
        number = sum(int(code) << bits * place for place, code in enumerate(codes[row]))
        wanted[row] = list(number.to_bytes(wanted.shape[-1], "little"))
    equal(impl.quantisation.pack(codes, bits=bits), wanted, "other bytes")


@law("QC-3", of=UNPACK, seed=seeds(), bits=st.sampled_from([2, 1, 4, 8]), length=st.integers(1, 33))
def test_a_byte_gives_its_codes_from_the_lowest_bits(impl, seed, bits, length):
    """Each code is the next few binary digits of the bytes."""
    packed = np.random.default_rng(seed).integers(0, 256, size=(2, 3, -(-length * bits // 8)))
    wanted = np.zeros((2, 3, length), dtype=int)
    for row in np.ndindex(2, 3):
        number = int.from_bytes(bytes(packed[row].tolist()), "little")
        wanted[row] = [number >> bits * place & 2**bits - 1 for place in range(length)]
    equal(impl.quantisation.unpack(packed, length, bits=bits), wanted, "other codes")


@law("QC-3", of=PACK)
def test_a_byte_by_hand(impl):
    """1, 2, 3 and 0 in two bits are 1 + 2 * 4 + 3 * 16 = 57; two bits unless told."""
    equal(impl.quantisation.pack(np.array([[[1, 2, 3, 0]]])), np.array([[[57]]]), "another byte")


@law("QC-3", of=UNPACK)
def test_the_codes_of_a_byte_by_hand(impl):
    """57 is 1, 2, 3 and 0 in two bits; two bits unless told."""
    equal(impl.quantisation.unpack(np.array([[[57]]]), 4), np.array([[[1, 2, 3, 0]]]), "other codes")


@law("QC-3", of=PACK, kind="refusal")
def test_codes_and_bits_that_no_byte_holds_are_refused_by_pack(impl):
    """Three bits fill no byte, and 4 does not fit into two."""
    refused(impl, "bits", PACK, np.zeros((1, 1, 4), dtype=int), bits=3)
    if impl.reads_numbers:
        refused(impl, "codes", PACK, np.full((1, 1, 4), 4), bits=2)


@law("QC-3", of=UNPACK, kind="refusal")
def test_bits_and_lengths_that_no_byte_holds_are_refused_by_unpack(impl):
    """Three bits fill no byte, and one byte has no five codes of two bits."""
    refused(impl, "bits", UNPACK, np.zeros((1, 1, 4), dtype=int), 2, bits=3)
    refused(impl, "length", UNPACK, np.zeros((1, 1, 1), dtype=int), 5, bits=2)


# Keys and values


@law("QC-4", of=BY_TOKEN, case=CASES, bits=BITS, group_size=st.sampled_from([4, 2, 1]))
def test_values_share_a_scale_along_the_channels_of_a_token(impl, case, bits, group_size):
    """Each number that comes back is the nearest of the numbers of its group."""
    values = impl.round(case.values)
    got = impl.quantisation.by_token(values, bits=bits, group_size=group_size)
    check_by_token(impl, got, values, bits, group_size)


@law("QC-5", of=BY_CHANNEL, case=CASES, bits=BITS, group_size=st.sampled_from([4, 2, 1]))
def test_keys_share_a_scale_along_the_tokens_of_a_channel(impl, case, bits, group_size):
    """Each number that comes back is the nearest of the numbers of its group."""
    keys = whole_groups(impl.round(case.keys), group_size)
    got = impl.quantisation.by_channel(keys, bits=bits, group_size=group_size)
    check_by_channel(impl, got, keys, bits, group_size)


@law("QC-5", of=BY_CHANNEL, examples=1, case=long_cases(("normal",), lengths=(1024,), head_dims=(128, 256)))
def test_keys_of_a_long_text_share_a_scale_along_the_tokens(impl, case):
    """A thousand tokens of 16 heads in groups of 64 and of 128, as papers and public code have them."""
    keys = impl.round(np.concatenate([case.keys[:, :1]] * 16, axis=1))
    for group_size in (64, 128):
        whole = whole_groups(keys, group_size)
        got = impl.quantisation.by_channel(whole, bits=2, group_size=group_size)
        check_by_channel(impl, got, whole, 2, group_size)


def check_apart(impl, path, states, bits, changed):
    """Raise Violation unless the numbers outside of `changed` come back as before where those in it grow."""
    other = np.where(changed, impl.round(8 * states + 3), states)
    one, two = (impl.call(path, each, bits=bits, group_size=4) for each in (states, other))
    require_numbers(two, states.shape, "what comes back")
    size = np.where(changed, 0, np.abs(states).max())
    rounds_to(
        impl, np.where(changed, 0, two), np.where(changed, 0, one), "a number of another group", size=size
    )


@law("QC-4", of=BY_TOKEN, case=CASES, bits=BITS, seed=seeds())
def test_groups_of_values_do_not_share_scales(impl, case, bits, seed):
    """Larger numbers in one group of one token change no other group."""
    values = impl.round(case.values)
    places = np.random.default_rng(seed).permutation(case.length), np.arange(case.value_dim)
    changed = (places[0][:, None] == 0) & (places[1] // 4 == 0)
    check_apart(impl, BY_TOKEN, values, bits, np.broadcast_to(changed, values.shape))


@law("QC-5", of=BY_CHANNEL, case=CASES, bits=BITS, seed=seeds())
def test_groups_of_keys_do_not_share_scales(impl, case, bits, seed):
    """Larger numbers in one group of one channel change no other group."""
    keys = whole_groups(impl.round(case.keys), 4)
    channels = np.random.default_rng(seed).permutation(case.head_dim)
    changed = (np.arange(keys.shape[2])[:, None] // 4 == 0) & (channels == 0)
    check_apart(impl, BY_CHANNEL, keys, bits, np.broadcast_to(changed, keys.shape))


@law("QC-4", of=BY_TOKEN, channels=st.sampled_from([64, 128]))
def test_two_bits_and_groups_of_32_values_unless_told(impl, channels):
    """Of 64 channels, 0 to 31 and 0 to 310 by tens, each half has its own four numbers."""
    of_64 = np.concatenate([np.arange(32.0), 10 * np.arange(32.0)])
    values = np.tile(of_64, channels // 64)[None, None, None]
    check_by_token(impl, impl.quantisation.by_token(values), values, 2, 32)


@law("QC-5", of=BY_CHANNEL)
def test_two_bits_and_groups_of_32_keys_unless_told(impl):
    """Of 64 tokens, 0 to 31 and 0 to 310 by tens, each half has its own four numbers."""
    keys = np.concatenate([np.arange(32.0), 10 * np.arange(32.0)])[None, None, :, None]
    check_by_channel(impl, impl.quantisation.by_channel(keys), keys, 2, 32)


@law("QC-4", of=BY_TOKEN, kind="edge", case=CASES, bits=BITS)
def test_a_group_of_values_is_at_most_a_token(impl, case, bits):
    """A token with fewer channels than a group should have is one group."""
    values = impl.round(case.values)
    got = impl.quantisation.by_token(values, bits=bits, group_size=2 * case.value_dim)
    check_by_token(impl, got, values, bits, case.value_dim)


@law("QC-5", of=BY_CHANNEL, kind="edge", case=CASES, bits=BITS)
def test_a_group_of_keys_is_at_most_the_text(impl, case, bits):
    """A text with fewer tokens than a group should have is one group."""
    keys = impl.round(case.keys)
    got = impl.quantisation.by_channel(keys, bits=bits, group_size=2 * case.length)
    check_by_channel(impl, got, keys, bits, case.length)


@law("QC-4", of=BY_TOKEN, kind="refusal")
def test_groups_that_do_not_divide_the_channels_are_refused(impl):
    """Six channels are no groups of 4."""
    refused(impl, "group_size", BY_TOKEN, np.ones((1, 1, 4, 6)), group_size=4)


@law("QC-5", of=BY_CHANNEL, kind="refusal")
def test_groups_that_do_not_divide_the_tokens_are_refused(impl):
    """Six tokens are no groups of 4."""
    refused(impl, "group_size", BY_CHANNEL, np.ones((1, 1, 6, 4)), group_size=4)


# The window


SIZES: dict[str, Any] = {"group_size": 4, "residual": 8}


def window_of(length, residual=8):
    """Of how many tokens the key and the value are quantised."""
    return length // residual * residual, max(0, length - residual)


@law("QC-6", of=KIVI, case=CASES, bits=BITS)
def test_the_window_is_exact(impl, case, bits):
    """The last T mod 8 keys and the last 8 values come back bit for bit."""
    keys, values = impl.rounded((case.keys, case.values))
    got_keys, got_values = impl.quantisation.kivi(keys, values, bits=bits, **SIZES)
    old_keys, old_values = window_of(case.length)
    equal(got_keys[:, :, old_keys:], keys[:, :, old_keys:], "keys of the window are others")
    equal(got_values[:, :, old_values:], values[:, :, old_values:], "values of the window are others")


@law("QC-6", of=KIVI, case=CASES, bits=BITS)
def test_what_leaves_the_window_is_quantised(impl, case, bits):
    """Keys before the window come back by channel, values by token."""
    keys, values = impl.rounded((case.keys, case.values))
    got_keys, got_values = impl.quantisation.kivi(keys, values, bits=bits, **SIZES)
    old_keys, old_values = window_of(case.length)
    if old_keys:
        check_by_channel(impl, got_keys[:, :, :old_keys], keys[:, :, :old_keys], bits, 4)
    if old_values:
        check_by_token(impl, got_values[:, :, :old_values], values[:, :, :old_values], bits, 4)


@law("QC-6", of=KIVI, case=CASES, bits=BITS)
def test_what_is_quantised_stays_as_it_is(impl, case, bits):
    """A text that goes on changes no number that its beginning has quantised."""
    keys, values = impl.rounded((case.keys, case.values))
    stop = (case.length + 1) // 2
    whole = impl.quantisation.kivi(keys, values, bits=bits, **SIZES)
    begun = impl.quantisation.kivi(keys[:, :, :stop], values[:, :, :stop], bits=bits, **SIZES)
    for what, all_of_it, beginning, old in zip(("key", "value"), whole, begun, window_of(stop), strict=True):
        size = max(1.0, np.abs(all_of_it).max())
        rounds_to(impl, beginning[:, :, :old], all_of_it[:, :, :old], f"a quantised {what}", size=size)


@law("QC-6", of=KIVI, case=CASES, bits=BITS)
def test_a_request_alone_is_as_in_a_batch(impl, case, bits):
    """Each head of each batch item comes back alone as it does among others."""
    keys, values = impl.rounded((case.keys, case.values))
    together = impl.quantisation.kivi(keys, values, bits=bits, **SIZES)
    for item, head in np.ndindex(keys.shape[:2]):
        own = slice(item, item + 1), slice(head, head + 1)
        alone = impl.quantisation.kivi(keys[own], values[own], bits=bits, **SIZES)
        for what, among, one in zip(("keys", "values"), together, alone, strict=True):
            size = max(1.0, np.abs(among[own]).max())
            rounds_to(impl, one, among[own], f"the {what} of a head alone", size=size)


@law("QC-6", of=KIVI)
def test_two_bits_groups_of_32_and_a_window_of_128_unless_told(impl):
    """Of 160 tokens the first 128 keys and the first 32 values are quantised, each to four numbers."""
    states = np.random.default_rng(7).integers(-50, 50, size=(1, 1, 160, 64)).astype(float)
    keys, values = impl.quantisation.kivi(states, states)
    check_by_channel(impl, keys[:, :, :128], states[:, :, :128], 2, 32)
    check_by_token(impl, values[:, :, :32], states[:, :, :32], 2, 32)
    equal(keys[:, :, 128:], states[:, :, 128:], "keys of the window are others")
    equal(values[:, :, 32:], states[:, :, 32:], "values of the window are others")


@law("QC-6", of=KIVI, examples=1, case=long_cases(("normal",), lengths=(4097,), head_dims=(128, 256)))
def test_a_long_text_is_quantised_group_by_group(impl, case):
    """Thousands of tokens of up to 256 channels: each number
    is the nearest of its group, and the last ones are exact.
    """
    keys, values = impl.rounded((case.keys, case.keys[..., ::-1]))
    got_keys, got_values = impl.quantisation.kivi(keys, values)
    old_keys, old_values = window_of(case.length, 128)
    equal(got_keys[:, :, old_keys:], keys[:, :, old_keys:], "keys of the window are others")
    equal(got_values[:, :, old_values:], values[:, :, old_values:], "values of the window are others")
    if old_keys:
        check_by_channel(impl, got_keys[:, :, :old_keys], keys[:, :, :old_keys], 2, 32)
    if old_values:
        check_by_token(impl, got_values[:, :, :old_values], values[:, :, :old_values], 2, 32)


@law("QC-6", of=KIVI, kind="refusal")
def test_a_window_that_groups_do_not_divide_is_refused(impl):
    """A window of 6 keys is no groups of 4; 6 channels are none either, even while all values are exact."""
    states = np.ones((1, 1, 4, 4))
    refused(impl, "residual", KIVI, states, states, group_size=4, residual=6)
    refused(impl, "group_size", KIVI, states, np.ones((1, 1, 4, 6)), group_size=4, residual=8)


@law("QC-6", of=TOKENS, length=st.integers(1, 60), blocks=st.integers(1, 4))
def test_tokens_are_quantised_as_a_text_grows(impl, length, blocks):
    """A block of keys goes when it is full, and the oldest value when there is one too many."""
    keys = values = waiting = window = 0
    for _ in range(length):
        waiting, window = waiting + 1, window + 1
        if waiting == 4 * blocks:
            keys, waiting = keys + waiting, 0
        if window > 4 * blocks:
            values, window = values + 1, window - 1
    got = impl.quantisation.quantised_tokens(length, group_size=4, residual=4 * blocks)
    equal(np.array(got), np.array([keys, values]), f"of {length} tokens {got} are quantised")


@law("QC-6", of=TOKENS)
def test_a_window_of_128_tokens_unless_told(impl):
    """Of 300 tokens 256 keys and 172 values are quantised."""
    equal(np.array(impl.quantisation.quantised_tokens(300)), np.array([256, 172]), "other numbers of tokens")


@law("QC-6", of=TOKENS, kind="refusal")
def test_tokens_of_a_window_that_groups_do_not_divide_are_refused(impl):
    """A window of 48 tokens is no groups of 32."""
    refused(impl, "residual", TOKENS, 100, residual=48)


# Bytes of a cache


SHAPES: dict[str, Any] = {
    "num_layers": st.sampled_from([3, 1]),
    "num_kv_heads": st.sampled_from([5, 1]),
    "head_dim": st.sampled_from([64, 4, 6, 128]),
    "bits": st.sampled_from([2, 1, 4, 8]),
    "bytes_per_number": st.sampled_from([2, 4]),
}


@law("QC-7", of=BYTES, length=st.sampled_from([7, 1, 130, 300]), blocks=st.sampled_from([1, 4]), **SHAPES)
def test_the_formula_counts_codes_groups_and_exact_tokens(impl, length, blocks, **shape):
    """The bytes are those of all codes, smallest numbers, scales and exact numbers, counted one by one."""
    group_size = 32 if shape["head_dim"] > 6 else shape["head_dim"]
    sizes = {"group_size": group_size, "residual": blocks * group_size}
    got = impl.quantisation.kivi_bytes(length, **shape, **sizes)
    one = bytes_of_arrays(
        length, shape["head_dim"], shape["bits"], **sizes, bytes_per_number=shape["bytes_per_number"]
    )
    wanted = shape["num_layers"] * shape["num_kv_heads"] * one
    equal(got, wanted, f"the formula gives {got} bytes, and {wanted} are counted")


@law("QC-7", of=(BYTES, PACK), length=st.sampled_from([256, 130]), bits=st.sampled_from([2, 4, 8]))
def test_the_formula_has_the_bytes_of_packed_codes(impl, length, bits):
    """Two more bits of a code cost what the packed codes of both are longer by."""
    old_keys, old_values = window_of(length, 128)
    rows = [np.zeros((1, 64, max(1, old_keys)), dtype=int), np.zeros((1, max(1, old_values), 64), dtype=int)]
    sizes = {own: sum(impl.quantisation.pack(row, bits=own).size for row in rows) for own in (1, bits)}
    bytes_of = {
        own: impl.quantisation.kivi_bytes(length, num_layers=1, num_kv_heads=1, head_dim=64, bits=own)
        for own in (1, bits)
    }
    wanted = sizes[bits] - sizes[1]
    equal(bytes_of[bits] - bytes_of[1], wanted, f"{bits} bits take {wanted} bytes more than one, packed")


@law("QC-7", of=BYTES)
def test_an_8b_model_takes_a_fifth(impl):
    """Llama-3.1-8B, 32,768 tokens in two bits: 32 layers, 8 KV heads, head_dim 128, two bytes a number."""
    got = impl.quantisation.kivi_bytes(32768, num_layers=32, num_kv_heads=8, head_dim=128)
    codes = (32768 + 32640) * 128 // 4
    groups = (32768 + 32640) * 128 // 32 * 2 * 2
    equal(got, 256 * (codes + groups + 128 * 128 * 2), f"32,768 tokens take {got} bytes")


@law("QC-7", of=BYTES, kind="refusal")
def test_bytes_of_what_does_not_divide_are_refused(impl):
    """Three bits fill no byte; 48 tokens, and 48 channels, are no groups of 32."""
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64}
    refused(impl, "bits", BYTES, 100, **shape, bits=3)
    refused(impl, "residual", BYTES, 100, **shape, residual=48)
    refused(impl, "group_size", BYTES, 100, **shape | {"head_dim": 48})


# Rotation


CHANNELS = st.sampled_from([4, 1, 2, 8, 64, 128])


def some_states(impl, seed, channels, largest=16):
    """Numbers [2, 3, 5, channels], one channel so many times as large as the others."""
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(2, 3, 5, channels))
    states[..., generator.integers(channels)] *= largest
    return impl.round(states)


def rotation_error(states):
    """How large the numbers are that a rotation adds up."""
    return np.abs(states).sum(axis=-1, keepdims=True) / math.sqrt(states.shape[-1])


def rounded_sums(impl, size):
    """What rotations may be wrong by whose terms add up to `size`: a rounding of that."""
    return size * EPSILON[impl.dtype]


@law("QC-8", of=HADAMARD, seed=seeds(), channels=CHANNELS)
def test_a_rotation_is_a_sum_of_channels_with_signs(impl, seed, channels):
    """Channel i is the sum of all channels j, negative where i and j have an odd number of ones in common."""
    states = some_states(impl, seed, channels)
    got, size = impl.quantisation.hadamard(states), 2 * rotation_error(states)
    rounds_to(impl, got, turned_by_hand(states), "a rotated state", terms=channels, size=size)


@law("QC-8", of=HADAMARD)
def test_a_rotation_by_hand(impl):
    """(1, 2, 3, 4) becomes half of (10, -2, -4, 0)."""
    got = impl.quantisation.hadamard(np.array([[[1.0, 2, 3, 4]]]))
    rounds_to(impl, got, np.array([[[5.0, -1, -2, 0]]]), "another rotation", terms=4, size=10)


@law("QC-8", of=HADAMARD, seed=seeds(), channels=CHANNELS)
def test_two_rotations_change_nothing(impl, seed, channels):
    """H H = I."""
    states = some_states(impl, seed, channels, largest=1)
    back = impl.quantisation.hadamard(impl.round(impl.quantisation.hadamard(states)))
    rounds_to(impl, back, states, "a state that is rotated twice", size=lengths(states)[..., None])


@law("QC-8", of=HADAMARD, seed=seeds(), channels=CHANNELS)
def test_rotated_queries_and_keys_have_the_products_that_they_had(impl, seed, channels):
    """(H q) . (H k) = q . k."""
    queries, keys = (some_states(impl, each, channels, largest=1) for each in (seed, seed + 1))
    turned = [impl.quantisation.hadamard(each) for each in (queries, keys)]
    got, expected = (turned[0] * turned[1]).sum(axis=-1), (queries * keys).sum(axis=-1)
    rounds_to(impl, got, expected, "q . k", size=lengths(queries) * lengths(keys))


@law("QC-8", of=HADAMARD, kind="refusal")
def test_channels_that_are_no_power_of_two_are_refused(impl):
    """There is no Sylvester matrix of six channels."""
    refused(impl, "states", HADAMARD, np.ones((1, 1, 6)))


@law("QC-9", of=ROTATED, seed=seeds(), bits=st.sampled_from([4, 2, 8]), group_size=st.sampled_from([4, 8]))
def test_rotated_channels_share_a_scale(impl, seed, bits, group_size):
    """Rotated once more, each number is the nearest of the numbers of its rotated group."""
    states = some_states(impl, seed, 8)
    got = impl.quantisation.rotated(states, bits=bits, group_size=group_size)
    require_numbers(got, states.shape, "what comes back")
    turned, back = turned_by_hand(states), turned_by_hand(got)
    beside = rounded_sums(impl, groups_of(np.repeat(8 * rotation_error(states), 8, axis=-1), group_size))
    check_given_back(impl, groups_of(back, group_size), groups_of(turned, group_size), bits, beside=beside)


@law("QC-9", of=(BY_TOKEN, ROTATED), seed=seeds())
def test_a_large_channel_is_spread_over_all(impl, seed):
    """One large channel of many: the others come back nearer with a rotation than without."""
    states = np.random.default_rng(seed).normal(size=(2, 3, 8, 32))
    states[..., 5] = 64
    states = impl.round(states)
    kept = np.arange(32) != 5
    plain, turned = (
        np.abs(impl.call(path, states, bits=4, group_size=32) - states)[..., kept].mean()
        for path in (BY_TOKEN, ROTATED)
    )
    require(turned < plain, "a rotation makes the other channels worse", plain, turned)


@law("QC-9", of=ROTATED, seed=seeds())
def test_a_rotated_request_alone_is_as_in_a_batch(impl, seed):
    """Each head of each batch item comes back alone as it does among others."""
    states = some_states(impl, seed, 8)
    together = impl.quantisation.rotated(states)
    for own in itertools.product((slice(0, 1), slice(1, 2)), (slice(1, 2), slice(2, 3))):
        alone = impl.quantisation.rotated(states[own])
        rounds_to(impl, alone, together[own], "a head alone", size=lengths(states[own])[..., None])


@law("QC-9", of=ROTATED, seed=seeds())
def test_four_bits_and_groups_of_32_unless_told(impl, seed):
    """Rotated, 64 channels have two groups of 16 numbers each. What lies a quarter of a step beside a number
    comes back as it.
    """
    numbers, beside = np.repeat(np.arange(16) - 7.5, 2), np.resize([0.25, -0.25], 32)
    beside[[0, 1, -2, -1]] = 0  # the smallest and the largest number stay, so the step is 1
    order = np.random.default_rng(seed).permutation(32)
    given, wanted = (
        np.concatenate([group, 2 * group])[None, None, None] @ sylvester(64) / 8
        for group in ((numbers + beside)[order], numbers[order])
    )
    back = impl.quantisation.rotated(impl.round(given))
    rounds_to(impl, back, wanted, "what comes back", size=lengths(wanted)[..., None])


@law("QC-9", of=ROTATED, kind="refusal")
def test_groups_and_channels_that_do_not_divide_are_refused_by_a_rotation(impl):
    """There is no matrix of six channels, and eight channels are no groups of 3."""
    refused(impl, "states", ROTATED, np.ones((1, 1, 4, 6)))
    refused(impl, "group_size", ROTATED, np.ones((1, 1, 4, 8)), group_size=3)


# fp8


@law("QC-10", of=E4M3, seed=seeds(), scale=st.sampled_from([64.0, 1.0, 2.0**-7, 448.0]))
def test_each_number_becomes_the_nearest_of_e4m3(impl, seed, scale):
    """No other number of e4m3 is nearer; of two equally near ones it is the even one."""
    numbers = impl.round(np.random.default_rng(seed).normal(size=(2, 3, 17)) * scale)
    numbers = np.clip(numbers, -448, 448)
    equal(impl.quantisation.e4m3(numbers), e4m3_by_hand(numbers), "another number is nearer")


@law("QC-10", of=E4M3)
def test_numbers_of_e4m3_stay(impl):
    """Each of the 127 numbers that are at least 0 stays, and so does its negative."""
    numbers = np.array([value for value, _ in e4m3_numbers()])
    numbers = np.stack([numbers, -numbers])[None]
    equal(impl.quantisation.e4m3(numbers), numbers, "a number of e4m3 becomes another")


@law("QC-10", of=E4M3)
def test_of_two_equally_near_numbers_the_even_one(impl):
    """17 becomes 16, 19 becomes 20, and 3 * 2^-10 becomes 2^-8."""
    numbers = np.array([[[17, 19, -17, -19, 3 * 2.0**-10, 2.0**-10]]])
    wanted = np.array([[[16, 20, -16, -20, 2.0**-8, 0]]])
    equal(impl.quantisation.e4m3(numbers), wanted, "a tie went elsewhere")


@law("QC-10", of=E4M3, kind="edge")
def test_numbers_beyond_the_largest_become_the_largest(impl):
    """449, 480 and 10,000 become 448, and their negatives -448."""
    numbers = impl.round(np.array([[[450, 480, 10000, -450, -480, -10000]]]))
    equal(impl.quantisation.e4m3(numbers), np.copysign(448, numbers), "another number than 448")


@law("QC-11", of=FP8, case=CASES)
def test_each_token_has_a_scale_of_its_own(impl, case):
    """Divided by the scale of its token, each number is the nearest of e4m3."""
    states = impl.round(case.keys)
    got = impl.quantisation.fp8(states)
    require_numbers(got, states.shape, "what comes back")
    largest = np.abs(states).max(axis=-1, keepdims=True)
    assume((largest > 2.0**-6).all())
    scaled, back = 448 * states / largest, 448 * got / largest
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-20))), -6) - 3)
    of_code = e4m3_by_hand(back) * largest / 448
    rounds_to(impl, got, of_code, "a number of e4m3, times its scale", size=np.abs(of_code))
    rounds_to(impl, got, states, "a number in fp8", size=largest, beside=step / 2 * largest / 448)


@law("QC-11", of=FP8, case=CASES)
def test_the_largest_number_of_a_token_is_exact(impl, case):
    """It becomes 448, and comes back as it was, but for rounding, in tokens of 0.01 as in those of 500."""
    powers = np.random.default_rng(case.seed).integers(-8, 10, size=(*case.keys.shape[:3], 1))
    states = impl.round(case.keys * 2.0**powers)
    got, wanted = (np.abs(each).max(axis=-1) for each in (impl.quantisation.fp8(states), states))
    rounds_to(impl, got, wanted, "the largest number of a token", size=wanted)


@law("QC-11", of=FP8, case=CASES)
def test_tokens_do_not_share_a_scale(impl, case):
    """A token alone comes back as among others."""
    states = impl.round(case.keys)
    together = impl.quantisation.fp8(states)
    for token in range(case.length):
        own = states[:1, :1, token : token + 1]
        alone = impl.quantisation.fp8(own)
        rounds_to(impl, alone, together[:1, :1, token : token + 1], "a token alone", size=np.abs(own).max())


@law("QC-11", of=FP8, case=CASES)
def test_a_token_that_is_doubled_comes_back_doubled(impl, case):
    """fp8(2 x) = 2 fp8(x): the scale follows."""
    states = impl.round(case.keys)
    one, two = (impl.quantisation.fp8(factor * states) for factor in (1, 2))
    size = np.abs(states).max(axis=-1, keepdims=True)
    rounds_to(impl, two, 2 * one, "a token that is doubled", size=2 * size)


@law("QC-11", of=FP8, kind="edge", why="a scale of 0 gives NaN, which the reference refuses in a mistake")
def test_a_token_of_zeros_stays(impl):
    """It has no largest number to divide by."""
    states = np.zeros((1, 2, 3, 4))
    states[0, 1, 1] = [448, -448, 224, 0]
    equal(impl.quantisation.fp8(states), states, "zeros become other numbers")
