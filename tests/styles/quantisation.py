"""A quantised cache as different people write it from its handout, in parts."""

import math
import struct

import numpy as np


def quantise_by_rint(numbers, *, bits=2):
    zero, largest = numbers.min(axis=-1), numbers.max(axis=-1)
    scale = (largest - zero) / (2**bits - 1)
    steps = (numbers - zero[..., None]) / np.where(scale == 0, 1, scale)[..., None]
    return np.rint(steps).astype(np.uint8), zero, scale


def quantise_in_lists(numbers, *, bits=2):
    """Row by row, with Python's own round, which goes to even too."""
    most, found = 2**bits - 1, []
    for row in numbers.reshape(-1, numbers.shape[-1]).tolist():
        low, high = min(row), max(row)
        step = (high - low) / most
        found.append(([round((x - low) / step) if step else 0 for x in row], low, step))
    codes, zero, scale = (np.array(each) for each in zip(*found, strict=True))
    return codes.reshape(numbers.shape), zero.reshape(numbers.shape[:-1]), scale.reshape(numbers.shape[:-1])


def quantise_among_levels(numbers, *, bits=2):
    """The nearest of all levels of a group; of two equally near ones the even."""
    zero, spread = np.amin(numbers, -1, keepdims=True), np.ptp(numbers, axis=-1, keepdims=True)
    scale = spread / (2**bits - 1)
    codes = np.zeros(numbers.shape, dtype=np.int32)
    nearest = np.abs(numbers - zero)
    for code in [*range(2, 2**bits, 2), *range(1, 2**bits, 2)]:
        distance = np.abs(numbers - (zero + code * scale))
        codes[distance < nearest] = code
        nearest = np.minimum(nearest, distance)
    return codes, zero[..., 0], scale[..., 0]


def quantise_with_divmod(numbers, *, bits=2):
    """The whole part and the rest of a step, compared with a half."""
    ordered = np.sort(numbers, axis=-1)
    zero, scale = ordered[..., 0], (ordered[..., -1] - ordered[..., 0]) / (2**bits - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.nan_to_num((numbers - zero[..., None]) / scale[..., None])
    whole = np.floor(steps).astype(int)
    rest = steps - whole
    return whole + ((rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))), zero, scale


def quantise_in_torch_style(numbers, *, bits=2):
    low = np.minimum.reduce(numbers, axis=-1, keepdims=True)
    scale = (np.maximum.reduce(numbers, axis=-1, keepdims=True) - low) / float((1 << bits) - 1)
    safe = scale.copy()
    safe[safe == 0] = np.inf
    codes = np.clip(np.round((numbers - low) / safe), 0, (1 << bits) - 1)
    return codes.astype(np.int64), low.squeeze(-1), scale.squeeze(-1)


def quantise_in_long_double(numbers, *, bits=2):
    low, step = numbers.min(-1), (numbers.max(-1) - numbers.min(-1)) / (2**bits - 1)
    wide = numbers.astype(np.longdouble) - low[..., None]
    codes = np.zeros(numbers.shape, dtype=np.int16)
    differ = np.broadcast_to(step[..., None] > 0, numbers.shape)
    codes[differ] = np.rint((wide / np.where(step > 0, step, 1)[..., None])[differ])
    return codes, low, step


def dequantise_by_broadcasting(codes, zero, scale):
    return zero[..., None] + scale[..., None] * codes


def dequantise_by_einsum(codes, zero, scale):
    return np.einsum("...n,...->...n", codes.astype(float), scale) + np.expand_dims(zero, -1)


def dequantise_from_tables(codes, zero, scale):
    found = np.empty(codes.shape)
    for place in np.ndindex(codes.shape[:-1]):
        table = [zero[place] + scale[place] * code for code in range(256)]
        found[place] = [table[int(code)] for code in codes[place]]
    return found


def dequantise_number_by_number(codes, zero, scale):
    repeated = np.repeat(zero[..., None], codes.shape[-1], axis=-1)
    return repeated + np.multiply(np.float64(codes), np.repeat(scale[..., None], codes.shape[-1], axis=-1))


def dequantise_through_transposes(codes, zero, scale):
    return np.moveaxis(np.moveaxis(codes, -1, 0) * scale + zero, 0, -1)


def dequantise_in_place(codes, zero, scale):
    out = codes.astype(np.float64)
    out *= scale[..., None]
    out += zero[..., None]
    return out


def pack_by_shifts(codes, *, bits=2):
    each = 8 // bits
    spare = -codes.shape[-1] % each
    rows = np.concatenate([codes, np.zeros((*codes.shape[:-1], spare), codes.dtype)], axis=-1).astype(int)
    rows = rows.reshape(*codes.shape[:-1], -1, each)
    return (rows << np.arange(0, 8, bits)).sum(axis=-1).astype(np.uint8)


def pack_by_digits(codes, *, bits=2):
    digits = (codes[..., None].astype(int) >> np.arange(bits)) & 1
    flat = digits.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(flat, axis=-1, bitorder="little")


def pack_byte_by_byte(codes, *, bits=2):
    each = 8 // bits
    out = np.zeros((*codes.shape[:-1], math.ceil(codes.shape[-1] / each)), dtype=np.int64)
    for place in range(codes.shape[-1]):
        out[..., place // each] |= codes[..., place].astype(np.int64) << bits * (place % each)
    return out


def pack_as_one_number(codes, *, bits=2):
    rows = []
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        number = sum(int(code) << bits * place for place, code in enumerate(row))
        rows.append(list(number.to_bytes(math.ceil(len(row) * bits / 8), "little")))
    return np.array(rows, dtype=np.uint8).reshape(*codes.shape[:-1], -1)


def pack_by_powers(codes, *, bits=2):
    each, length = 8 // bits, codes.shape[-1]
    out = 0
    for place in range(each):
        own = codes[..., place::each].astype(np.int32)
        short = math.ceil(length / each) - own.shape[-1]
        padded = np.pad(own, [(0, 0)] * (own.ndim - 1) + [(0, short)])
        out = out + padded * 2 ** (bits * place)
    return out


def pack_by_texts(codes, *, bits=2):
    def of(row):
        text = "".join(f"{int(code):0{bits}b}"[::-1] for code in row)
        text += "0" * (-len(text) % 8)
        return np.array([int(text[start : start + 8][::-1], 2) for start in range(0, len(text), 8)])

    return np.apply_along_axis(of, -1, codes)


def unpack_by_shifts(packed, length, *, bits=2):
    codes = packed[..., None].astype(int) >> np.arange(0, 8, bits) & (1 << bits) - 1
    return codes.reshape(*packed.shape[:-1], -1)[..., :length]


def unpack_by_digits(packed, length, *, bits=2):
    digits = np.unpackbits(packed.astype(np.uint8), axis=-1, bitorder="little")
    digits = digits[..., : length * bits].reshape(*packed.shape[:-1], length, bits).astype(int)
    return (digits * 2 ** np.arange(bits)).sum(axis=-1)


def unpack_code_by_code(packed, length, *, bits=2):
    each = 8 // bits
    out = np.zeros((*packed.shape[:-1], length), dtype=np.uint8)
    for place in range(length):
        out[..., place] = packed[..., place // each] // 2 ** (bits * (place % each)) % 2**bits
    return out


def unpack_by_remainders(packed, length, *, bits=2):
    rest, parts = packed.astype(np.int64), []
    for _ in range(8 // bits):
        rest, code = np.divmod(rest, 2**bits)
        parts.append(code)
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)[..., :length]


def unpack_as_one_number(packed, length, *, bits=2):
    def of(row):
        number = int.from_bytes(bytes(int(each) for each in row), "little")
        return np.array([number >> bits * place & 2**bits - 1 for place in range(length)])

    return np.apply_along_axis(of, -1, packed)


def unpack_from_a_table(packed, length, *, bits=2):
    table = np.array([[byte >> shift & 2**bits - 1 for shift in range(0, 8, bits)] for byte in range(256)])
    return table[packed.astype(int)].reshape(*packed.shape[:-1], -1)[..., :length]


def _size(count, group_size):
    return count if group_size > count else group_size


def by_token_reshaped(values, *, bits=2, group_size=32):
    size = _size(values.shape[-1], group_size)
    groups = values.reshape(*values.shape[:-1], values.shape[-1] // size, size)
    return dequantise(*quantise(groups, bits=bits)).reshape(values.shape)


def by_token_slice_by_slice(values, *, bits=2, group_size=32):
    parts = [
        dequantise(*quantise(values[..., start : start + group_size], bits=bits))
        for start in range(0, values.shape[-1], group_size)
    ]
    return np.concatenate(parts, axis=-1)


def by_token_split(values, *, bits=2, group_size=32):
    count = max(1, values.shape[-1] // group_size)
    groups = np.stack(np.split(values, count, axis=-1))
    return np.concatenate([*dequantise(*quantise(groups, bits=bits))], axis=-1)


def by_token_written_into(values, *, bits=2, group_size=32):
    out, first = np.empty_like(values), 0
    while first < values.shape[-1]:
        own = slice(first, first + group_size)
        codes, zero, scale = quantise(values[..., own], bits=bits)
        out[..., own] = dequantise(codes, zero, scale)
        first += group_size
    return out


def by_token_with_its_own_arithmetic(values, *, bits=2, group_size=32):
    """Nothing of `quantise`: the range of each group over and over again."""
    size, most = _size(values.shape[-1], group_size), 2**bits - 1
    owner = np.arange(values.shape[-1]) // size
    low, high = (
        np.stack([reduce(values[..., owner == own], axis=-1) for own in range(owner.max() + 1)], axis=-1)
        for reduce in (np.min, np.max)
    )
    low, span = low[..., owner], (high - low)[..., owner]
    return low + np.rint((values - low) * most / np.where(span == 0, 1, span)) * span / most


def by_token_row_by_row(values, *, bits=2, group_size=32):
    out = np.zeros_like(values)
    for place in np.ndindex(values.shape[:-1]):
        for start in range(0, values.shape[-1], group_size):
            own = values[place][start : start + group_size]
            out[place][start : start + group_size] = dequantise(*quantise(own, bits=bits))
    return out


def by_channel_swapped(keys, *, bits=2, group_size=32):
    return np.swapaxes(by_token(np.swapaxes(keys, -1, -2), bits=bits, group_size=group_size), -1, -2)


def by_channel_block_by_block(keys, *, bits=2, group_size=32):
    blocks = []
    for start in range(0, keys.shape[-2], group_size):
        block = np.moveaxis(keys[..., start : start + group_size, :], -2, -1)
        blocks.append(np.moveaxis(dequantise(*quantise(block, bits=bits)), -1, -2))
    return np.concatenate(blocks, axis=-2)


def by_channel_channel_by_channel(keys, *, bits=2, group_size=32):
    out = keys.copy()
    for channel in range(keys.shape[-1]):
        out[..., channel] = by_token(keys[..., channel], bits=bits, group_size=group_size)
    return out


def by_channel_reshaped(keys, *, bits=2, group_size=32):
    *lead, length, channels = keys.shape
    size = _size(length, group_size)
    groups = np.moveaxis(keys.reshape(*lead, length // size, size, channels), -2, -1)
    return np.moveaxis(dequantise(*quantise(groups, bits=bits)), -1, -2).reshape(keys.shape)


def by_channel_by_einsum(keys, *, bits=2, group_size=32):
    turned = np.einsum("...td->...dt", keys)
    return np.einsum("...dt->...td", by_token(turned, bits=bits, group_size=group_size))


def by_channel_head_by_head(keys, *, bits=2, group_size=32):
    out = np.empty(keys.shape)
    for place in np.ndindex(keys.shape[:-2]):
        out[place] = by_token(keys[place].T, bits=bits, group_size=group_size).T
    return out


def tokens_by_remainder(length, *, group_size=32, residual=128):
    return length - length % residual, max(0, length - residual)


def tokens_by_division(length, *, group_size=32, residual=128):
    return residual * (length // residual), length - residual if length > residual else 0


def tokens_one_by_one(length, *, group_size=32, residual=128):
    waiting = keys = values = 0
    for token in range(1, length + 1):
        waiting += 1
        if waiting == residual:
            keys, waiting = keys + residual, 0
        values += token > residual
    return keys, values


def tokens_from_arrays(length, *, group_size=32, residual=128):
    token = np.arange(length)
    keys = (token // residual < length // residual).sum()
    return int(keys), np.count_nonzero(token + residual < length)


def tokens_from_a_list(length, *, group_size=32, residual=128):
    return [int(length / residual) * residual, length - min(residual, length)]


def tokens_with_divmod(length, *, group_size=32, residual=128):
    blocks, _ = divmod(length, residual)
    return blocks * residual, np.int64(max(length, residual) - residual)


def kivi_into_copies(keys, values, *, bits=2, group_size=32, residual=128):
    first, second = quantised_tokens(keys.shape[2], group_size=group_size, residual=residual)
    keys, values = np.array(keys), np.array(values)
    if first:
        keys[:, :, :first] = by_channel(keys[:, :, :first], bits=bits, group_size=group_size)
    if second:
        values[:, :, :second] = by_token(values[:, :, :second], bits=bits, group_size=group_size)
    return keys, values


def kivi_put_together(keys, values, *, bits=2, group_size=32, residual=128):
    counts = quantised_tokens(keys.shape[2], group_size=group_size, residual=residual)
    found = []
    for states, count, function in zip((keys, values), counts, (by_channel, by_token), strict=True):
        old = [function(states[:, :, :count], bits=bits, group_size=group_size)] if count else []
        found.append(np.concatenate([*old, states[:, :, count:]], axis=2))
    return tuple(found)


def kivi_by_a_mask(keys, values, *, bits=2, group_size=32, residual=128):
    """All values quantised, and then the exact ones chosen; whole blocks of keys."""
    length = keys.shape[2]
    first, second = quantised_tokens(length, group_size=group_size, residual=residual)
    place = np.arange(length)[:, None]
    values = np.where(place < second, by_token(values, bits=bits, group_size=group_size), values)
    whole = by_channel(keys[:, :, :first], bits=bits, group_size=group_size) if first else keys[:, :, :0]
    padded = np.concatenate([whole, np.zeros((*keys.shape[:2], length - first, keys.shape[3]))], axis=2)
    return np.where(place < first, padded, keys), values


def kivi_token_by_token(keys, values, *, bits=2, group_size=32, residual=128):
    old_keys, waiting, old_values, window = [], [], [], []
    for token in range(keys.shape[2]):
        waiting.append(keys[:, :, token : token + 1])
        window.append(values[:, :, token : token + 1])
        if len(waiting) == residual:
            block = np.concatenate(waiting, axis=2)
            old_keys.append(by_channel(block, bits=bits, group_size=group_size))
            waiting = []
        if len(window) > residual:
            old_values.append(by_token(window.pop(0), bits=bits, group_size=group_size))
    return np.concatenate([*old_keys, *waiting], axis=2), np.concatenate([*old_values, *window], axis=2)


def kivi_by_blocks(keys, values, *, bits=2, group_size=32, residual=128):
    keys_back, values_back = keys.copy(), values.copy()
    for block in range(keys.shape[2] // residual):
        own = slice(block * residual, (block + 1) * residual)
        keys_back[:, :, own] = by_channel(keys[:, :, own], bits=bits, group_size=group_size)
    for token in range(max(0, keys.shape[2] - residual)):
        values_back[:, :, token] = by_token(values[:, :, token], bits=bits, group_size=group_size)
    return keys_back, values_back


def kivi_head_by_head(keys, values, *, bits=2, group_size=32, residual=128):
    out = [each.copy() for each in (keys, values)]
    counts = quantised_tokens(keys.shape[2], group_size=group_size, residual=residual)
    for head in np.ndindex(keys.shape[:2]):
        for states, count, function in zip(out, counts, (by_channel, by_token), strict=True):
            if count > 0:
                states[head][:count] = function(states[head][:count], bits=bits, group_size=group_size)
    return [*out]


def _row(count, bits):
    return -(-count * bits // 8)


def bytes_by_the_formula(
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
    first, second = quantised_tokens(length, group_size=group_size, residual=residual)
    codes = head_dim * _row(first, bits) + second * _row(head_dim, bits)
    groups = head_dim * first // group_size + second * (head_dim // _size(head_dim, group_size))
    exact = (2 * length - first - second) * head_dim
    return num_layers * num_kv_heads * (codes + bytes_per_number * (2 * groups + exact))


def bytes_of_real_arrays(length, *, num_layers, num_kv_heads, head_dim, bits=2, **settings):
    """The bytes of arrays of one head that have what a cache has."""
    number, sizes = settings.pop("bytes_per_number", 2), settings
    first, second = quantised_tokens(length, **sizes)
    group = sizes.get("group_size", 32)
    total = 0
    for codes in ((head_dim, first), (second, head_dim)):
        if 0 not in codes:
            packed = pack(np.zeros(codes, dtype=int), bits=bits)
            total += packed.shape[0] * packed.shape[1]
            total += 2 * number * codes[0] * (codes[1] // _size(codes[1], group))
    total += number * head_dim * (length - first + length - second)
    return num_layers * num_kv_heads * total


def bytes_layer_by_layer(length, *, num_layers, num_kv_heads, head_dim, **settings):
    total = 0
    for _ in range(num_layers):
        for _ in range(num_kv_heads):
            total += _head(length, head_dim, **settings)
    return total


def _head(length, head_dim, bits=2, group_size=32, residual=128, bytes_per_number=2):
    first, second = quantised_tokens(length, group_size=group_size, residual=residual)
    of_a_channel = math.ceil(first * bits / 8) + first // group_size * 2 * bytes_per_number
    of_a_value = math.ceil(head_dim * bits / 8) + 2 * bytes_per_number * max(1, head_dim // group_size)
    window = (length - first) + (length - second)
    return head_dim * of_a_channel + second * of_a_value + window * head_dim * bytes_per_number


def bytes_by_a_struct(length, *, num_layers, num_kv_heads, head_dim, bytes_per_number=2, **settings):
    """What struct says that two numbers, and the numbers of the window, take."""
    bits, group = settings.pop("bits", 2), settings.get("group_size", 32)
    first, second = quantised_tokens(length, **settings)
    number = struct.calcsize(f"{bytes_per_number}B")
    keys = head_dim * ((first * bits + 7) // 8) + head_dim * (first // group) * 2 * number
    values = second * ((head_dim * bits + 7) // 8) + second * math.ceil(head_dim / group) * 2 * number
    exact = number * head_dim * (2 * length - first - second)
    return num_layers * num_kv_heads * (keys + values + exact)


def bytes_of_two_states(length, *, num_layers, num_kv_heads, head_dim, **settings):
    keys, values = (_of_keys(length, head_dim, **settings), _of_values(length, head_dim, **settings))
    return (keys + values) * num_kv_heads * num_layers


def _of_keys(length, head_dim, bits=2, group_size=32, residual=128, bytes_per_number=2):
    exact, blocks = length % residual, length // residual
    packed = (blocks * residual * bits + 7) >> 3
    return head_dim * (packed + bytes_per_number * (blocks * residual // group_size * 2 + exact))


def _of_values(length, head_dim, bits=2, group_size=32, residual=128, bytes_per_number=2):
    old = max(length - residual, 0)
    groups = head_dim // min(head_dim, group_size)
    return (
        old * ((head_dim * bits + 7 >> 3) + groups * 2 * bytes_per_number)
        + (length - old) * head_dim * bytes_per_number
    )


def bytes_counted_by_token(length, *, num_layers, num_kv_heads, head_dim, bits=2, **settings):
    number, group = settings.pop("bytes_per_number", 2), settings.get("group_size", 32)
    first, second = quantised_tokens(length, **settings)
    total = head_dim * math.ceil(first * bits / 8)
    for token in range(length):
        total += 0 if token < first else head_dim * number
        total += 2 * number * head_dim if token < first and token % group == 0 else 0
        if token < second:
            total += math.ceil(head_dim * bits / 8) + 2 * number * len(range(0, head_dim, group))
        else:
            total += head_dim * number
    return total * num_layers * num_kv_heads


def hadamard_by_blocks(states):
    matrix = np.array([[1.0]])
    while matrix.shape[0] < states.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return states @ matrix / math.sqrt(states.shape[-1])


def hadamard_by_kron(states):
    matrix, factor = np.ones((1, 1)), np.array([[1, 1], [1, -1]]) / np.sqrt(2)
    for _ in range(int(states.shape[-1]).bit_length() - 1):
        matrix = np.kron(factor, matrix)
    return np.einsum("...d,ed->...e", states, matrix)


def hadamard_by_butterflies(states):
    out, width, channels = states.astype(float), 1, states.shape[-1]
    while width < channels:
        pairs = out.reshape(*states.shape[:-1], channels // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([first + second, first - second], axis=-2).reshape(states.shape)
        width *= 2
    return out * channels**-0.5


def hadamard_by_halves(states):
    """Each half by itself, then their sum and their difference."""
    if states.shape[-1] == 1:
        return states.copy()
    first, second = (hadamard_by_halves(half) for half in np.split(states, 2, axis=-1))
    return np.concatenate([first + second, first - second], axis=-1) / math.sqrt(2)


def hadamard_by_signs(states):
    place = range(states.shape[-1])
    signs = np.array([[-1.0 if bin(i & j).count("1") % 2 else 1.0 for j in place] for i in place])
    return (states[..., None, :] * signs).sum(axis=-1) / np.sqrt(len(signs))


def hadamard_channel_by_channel(states):
    channels = states.shape[-1]
    out = np.zeros(states.shape)
    for own in range(channels):
        for other in range(channels):
            sign = 1 - 2 * ((own & other).bit_count() % 2)
            out[..., own] += sign * states[..., other]
    return out / channels**0.5


def rotated_by_functions(states, *, bits=4, group_size=32):
    return hadamard(by_token(hadamard(states), bits=bits, group_size=group_size))


def rotated_by_groups(states, *, bits=4, group_size=32):
    turned = hadamard(states)
    size = _size(turned.shape[-1], group_size)
    groups = turned.reshape(*turned.shape[:-1], -1, size)
    return hadamard(dequantise(*quantise(groups, bits=bits)).reshape(turned.shape))


def rotated_token_by_token(states, *, bits=4, group_size=32):
    out = np.empty_like(states)
    for token in range(states.shape[-2]):
        turned = hadamard(states[..., token, :])
        out[..., token, :] = hadamard(by_token(turned, bits=bits, group_size=group_size))
    return out


def rotated_by_an_inverse(states, *, bits=4, group_size=32):
    matrix = hadamard(np.eye(states.shape[-1]))
    return by_token(states @ matrix, bits=bits, group_size=group_size) @ np.linalg.inv(matrix)


def rotated_by_a_transpose(states, *, bits=4, group_size=32):
    matrix = hadamard(np.eye(states.shape[-1]))
    back = by_token(np.einsum("...d,de->...e", states, matrix), bits=bits, group_size=group_size)
    return np.einsum("...e,de->...d", back, matrix)


def rotated_by_channel(states, *, bits=4, group_size=32):
    """A group along the tokens of the swapped states is one along the channels."""
    turned = np.swapaxes(hadamard(states), -1, -2)
    return hadamard(np.swapaxes(by_channel(turned, bits=bits, group_size=group_size), -1, -2))


FORMS: dict = {
    "quantise": (
        quantise_by_rint,
        quantise_in_lists,
        quantise_among_levels,
        quantise_with_divmod,
        quantise_in_torch_style,
        quantise_in_long_double,
    ),
    "dequantise": (
        dequantise_by_broadcasting,
        dequantise_by_einsum,
        dequantise_from_tables,
        dequantise_number_by_number,
        dequantise_through_transposes,
        dequantise_in_place,
    ),
    "pack": (
        pack_by_shifts,
        pack_by_digits,
        pack_byte_by_byte,
        pack_as_one_number,
        pack_by_powers,
        pack_by_texts,
    ),
    "unpack": (
        unpack_by_shifts,
        unpack_by_digits,
        unpack_code_by_code,
        unpack_by_remainders,
        unpack_as_one_number,
        unpack_from_a_table,
    ),
    "by_token": (
        by_token_reshaped,
        by_token_slice_by_slice,
        by_token_split,
        by_token_written_into,
        by_token_with_its_own_arithmetic,
        by_token_row_by_row,
    ),
    "by_channel": (
        by_channel_swapped,
        by_channel_block_by_block,
        by_channel_channel_by_channel,
        by_channel_reshaped,
        by_channel_by_einsum,
        by_channel_head_by_head,
    ),
    "quantised_tokens": (
        tokens_by_remainder,
        tokens_by_division,
        tokens_one_by_one,
        tokens_from_arrays,
        tokens_from_a_list,
        tokens_with_divmod,
    ),
    "kivi": (
        kivi_into_copies,
        kivi_put_together,
        kivi_by_a_mask,
        kivi_token_by_token,
        kivi_by_blocks,
        kivi_head_by_head,
    ),
    "kivi_bytes": (
        bytes_by_the_formula,
        bytes_of_real_arrays,
        bytes_layer_by_layer,
        bytes_by_a_struct,
        bytes_of_two_states,
        bytes_counted_by_token,
    ),
    "hadamard": (
        hadamard_by_blocks,
        hadamard_by_kron,
        hadamard_by_butterflies,
        hadamard_by_halves,
        hadamard_by_signs,
        hadamard_channel_by_channel,
    ),
    "rotated": (
        rotated_by_functions,
        rotated_by_groups,
        rotated_token_by_token,
        rotated_by_an_inverse,
        rotated_by_a_transpose,
        rotated_by_channel,
    ),
}
(
    quantise,
    dequantise,
    pack,
    unpack,
    by_token,
    by_channel,
    quantised_tokens,
    kivi,
    kivi_bytes,
    hadamard,
    rotated,
) = (forms[0] for forms in FORMS.values())
