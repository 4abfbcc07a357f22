"""Right quantised caches of other kinds: number by number, as a stream of tokens, by tables, in torch."""

from evictionary.spec_tests.quantisation.helpers import e4m3_numbers, sylvester
from evictionary.spec_tests.shared.variants import *

QUANTISE, DEQUANTISE = "quantisation.quantise", "quantisation.dequantise"
BY_TOKEN, BY_CHANNEL, KIVI = "quantisation.by_token", "quantisation.by_channel", "quantisation.kivi"


def nearest_of_levels(group, bits):
    """The code, the smallest number and the scale of one group, by comparing with every level."""
    zero = min(group)
    scale = (max(group) - zero) / (2**bits - 1)
    if scale == 0:
        return [0] * len(group), zero, scale
    return [min(2**bits - 1, round((number - zero) / scale)) for number in group], zero, scale


@control(QUANTISE)
def number_by_number(numbers, *, bits=2):
    """Python's own numbers, which round half to even too."""
    codes = np.empty(numbers.shape, dtype=int)
    zero, scale = np.empty(numbers.shape[:-1]), np.empty(numbers.shape[:-1])
    for row in np.ndindex(numbers.shape[:-1]):
        codes[row], zero[row], scale[row] = nearest_of_levels(numbers[row].tolist(), bits)
    return codes, zero, scale


@control(QUANTISE, array_library="torch", dtypes=NUMPY)
def torch_min_and_max(numbers, *, bits=2):
    """As the public code does it, but for the group of equal numbers."""
    low, high = numbers.amin(dim=-1, keepdim=True), numbers.amax(dim=-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    codes = ((numbers - low) / torch.where(scale == 0, torch.ones_like(scale), scale)).clamp(0, 2**bits - 1)
    return codes.round().to(torch.int32), low[..., 0], scale[..., 0]


@control(DEQUANTISE)
def level_by_level(codes, zero, scale):
    """The numbers of each group in a table, of which the code takes one."""
    levels = zero[..., None] + scale[..., None] * np.arange(256)
    return np.take_along_axis(levels, codes.astype(int), axis=-1)


@control(DEQUANTISE, array_library="torch", dtypes=ALL)
def torch_multiply_and_add(codes, zero, scale):
    return codes.to(zero.dtype) * scale.unsqueeze(-1) + zero.unsqueeze(-1)


@control("quantisation.pack")
def bit_by_bit(codes, *, bits=2):
    """Each code as binary digits, the lowest first, and NumPy's packing of digits."""
    digits = codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8) & 1
    return np.packbits(digits.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


@control("quantisation.unpack")
def from_bits(packed, length, *, bits=2):
    digits = np.unpackbits(packed.astype(np.uint8), axis=-1, bitorder="little")[..., : length * bits]
    return digits.reshape(*packed.shape[:-1], length, bits) @ 2 ** np.arange(bits)


@control(BY_TOKEN)
def group_by_group(values, *, bits=2, group_size=32):
    found = np.empty(values.shape)
    for place in np.ndindex(values.shape[:-1]):
        for start in range(0, values.shape[-1], group_size):
            own = slice(start, start + group_size)
            codes, zero, scale = nearest_of_levels(values[place][own].tolist(), bits)
            found[place][own] = [zero + scale * code for code in codes]
    return found


@control(BY_CHANNEL)
def channel_by_channel(keys, *, bits=2, group_size=32):
    found = np.empty(keys.shape)
    for start in range(0, keys.shape[-2], group_size):
        block = np.moveaxis(keys[..., start : start + group_size, :], -2, -1)
        found[..., start : start + group_size, :] = np.moveaxis(
            group_by_group(block, bits=bits, group_size=keys.shape[-2]), -1, -2
        )
    return found


@control(KIVI)
def token_by_token(keys, values, *, bits=2, group_size=32, residual=128):
    """A stream: keys wait until a block is full, and a value goes when there is one too many."""
    found_keys, found_values, waiting = [], [], []
    for token in range(keys.shape[2]):
        waiting.append(keys[:, :, token])
        if len(waiting) == residual:
            block = np.stack(waiting, axis=2)
            found_keys.append(channel_by_channel(block, bits=bits, group_size=group_size))
            waiting = []
        if token >= residual:
            oldest = values[:, :, token - residual : token - residual + 1]
            found_values.append(group_by_group(oldest, bits=bits, group_size=group_size))
    keys = np.concatenate([*found_keys, keys[:, :, keys.shape[2] - len(waiting) :]], axis=2)
    return keys, np.concatenate([*found_values, values[:, :, len(found_values) :]], axis=2)


def torch_given_back(states, bits, group_size):
    size = min(group_size, states.shape[-1])
    groups = states.reshape(*states.shape[:-1], -1, size)
    return torch_multiply_and_add(*torch_min_and_max(groups, bits=bits)).reshape(states.shape)


@control(KIVI, array_library="torch", dtypes=NUMPY)
def torch_in_two_parts(keys, values, *, bits=2, group_size=32, residual=128):
    """What is quantised, and what is not, put together."""
    length = keys.shape[2]
    waiting, window = length % residual, min(length, residual)
    old_keys = (
        torch_given_back(keys[:, :, : length - waiting].mT, bits, group_size).mT
        if waiting < length
        else keys[:, :, :0]
    )
    old_values = (
        torch_given_back(values[:, :, : length - window], bits, group_size)
        if window < length
        else values[:, :, :0]
    )
    return (
        torch.cat([old_keys, keys[:, :, length - waiting :]], dim=2),
        torch.cat([old_values, values[:, :, length - window :]], dim=2),
    )


@control("quantisation.quantised_tokens")
def by_whole_blocks(length, *, group_size=32, residual=128):
    return length // residual * residual, length - min(length, residual)


@control("quantisation.kivi_bytes")
def layer_by_layer(
    length,
    *,
    num_layers,
    num_kv_heads,
    head_dim,
    bits=2,
    group_size=32,
    residual=128,
    bytes_per_number=2,
):
    """Group by group: its codes in bytes, and two numbers."""
    old_keys, old_values = by_whole_blocks(length, group_size=group_size, residual=residual)
    total = 0
    for count, row, rows in ((old_keys, old_keys, head_dim), (old_values, head_dim, old_values)):
        if count:
            size = min(group_size, row)
            total += rows * (math.ceil(row * bits / 8) + row // size * 2 * bytes_per_number)
    total += (length - old_keys + length - old_values) * head_dim * bytes_per_number
    return sum(total for _ in range(num_layers * num_kv_heads))


@control("quantisation.hadamard")
def by_binary_ones(states):
    return np.einsum("...d,de->...e", states, sylvester(states.shape[-1]) / np.sqrt(states.shape[-1]))


@control("quantisation.hadamard", array_library="torch", dtypes=ALL)
@through_float32
def torch_halves(states):
    """Sums and differences of halves, from the widest to the narrowest."""
    width = states.shape[-1]
    while width > 1:
        first, second = states.unflatten(-1, (-1, width)).chunk(2, dim=-1)
        states = torch.cat([first + second, first - second], dim=-1).flatten(-2)
        width //= 2
    return states / math.sqrt(states.shape[-1])


@control("quantisation.hadamard")
def each_step_a_rotation(states):
    """Sums and differences of neighbours, each divided by the root of 2: so every step rounds."""
    for _ in range(states.shape[-1].bit_length() - 1):
        first, second = states[..., ::2], states[..., 1::2]
        states = np.concatenate([first + second, first - second], axis=-1) / np.sqrt(2)
    return states


@control("quantisation.rotated")
def rotated_by_a_matrix(states, *, bits=4, group_size=32):
    matrix = sylvester(states.shape[-1]) / np.sqrt(states.shape[-1])
    return group_by_group(states @ matrix, bits=bits, group_size=group_size) @ matrix.T


@control("quantisation.e4m3")
def from_a_table(numbers):
    """The place among all numbers of the format, by the middles between them."""
    values, even = (np.array(each) for each in zip(*e4m3_numbers(), strict=True))
    middles = (values[1:] + values[:-1]) / 2
    below, above = (np.searchsorted(middles, np.abs(numbers), side=side) for side in ("left", "right"))
    return np.copysign(values[np.where(even[below], below, above)], numbers)


@control("quantisation.e4m3", array_library="torch", dtypes=ALL)
@through_float32
def torch_dtype(numbers):
    """torch's own format."""
    return numbers.clamp(-448, 448).float().to(torch.float8_e4m3fn).to(numbers.dtype)


@control("quantisation.fp8")
def token_of_a_table(states):
    found = np.zeros(states.shape)
    for place in np.ndindex(states.shape[:-1]):
        if largest := np.abs(states[place]).max():
            found[place] = from_a_table(states[place] * (448 / largest)) * (largest / 448)
    return found


@control("quantisation.fp8", array_library="torch", dtypes=ALL)
@through_float32
def torch_scaled(states):
    scale = states.abs().amax(dim=-1, keepdim=True) / 448
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch_dtype(states / scale) * scale
