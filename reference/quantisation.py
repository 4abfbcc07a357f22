r"""Quantised caches: KIVI (arXiv 2402.02750), Hadamard rotation (as QuaRot, arXiv 2404.00456) and fp8
(e4m3, arXiv 2209.05433): each number of a cache in 8 bits or fewer.

    keys     a group is one channel of 32 tokens in a row        (KIVI)
    values   a group is 32 channels in a row of one token        (KIVI)
    window   the last tokens are left as they are

The groups and the window follow KIVI's public code, jy-yuan/KIVI at 150def8: quant/new_pack.py, and
models/llama_kivi.py. A group shares its smallest number and a scale.
"""

import numpy as np

from .contract import Real, Setting, Weight, Whole, contract

KIVI, HADAMARD, FP8 = "kivi", "hadamard", "fp8"
QUANTISERS = {KIVI: "kivi", HADAMARD: "rotated", FP8: "fp8"}
"""What quantises the tokens that any method keeps, `keydiff+kivi`, and the function of each."""
LARGEST = 448.0
"""The largest number of e4m3."""


@contract
def quantise(
    numbers: Real[np.ndarray, "... n"], *, bits: Setting[int, "[1, 8]"] = 2
) -> tuple[Whole[np.ndarray, "... n"], Real[np.ndarray, "..."], Weight[np.ndarray, "..."]]:
    r"""QC-1: `c = round((x - z) / s)` with `z = min x` and `s = (max x - min x) / (2^bits - 1)`, of a group.

    Args: numbers, the last axis is a group; bits of a code. Returns the codes, from 0 to 2^bits - 1, and of
    each group z and s.
    """
    most = 2**bits - 1
    zero = numbers.min(axis=-1)
    scale = (numbers.max(axis=-1) - zero) / most
    # Decision: a group of equal numbers has the scale 0 and codes 0, so it comes back as it was. The public
    # code divides by 0.
    steps = (numbers - zero[..., None]) / np.where(scale == 0, 1, scale)[..., None]
    # Decision: half of a step goes to the even code, as NumPy and torch round.
    return np.clip(np.rint(steps), 0, most).astype(np.uint8), zero, scale


@contract
def dequantise(
    codes: Whole[np.ndarray, "... n"], zero: Real[np.ndarray, "..."], scale: Weight[np.ndarray, "..."]
) -> Real[np.ndarray, "... n"]:
    r"""QC-2: `x' = z + s c`, at most half a scale away from x.

    Args: those that `quantise` returns.
    """
    return zero[..., None] + scale[..., None] * codes


@contract
def pack(
    codes: Whole[np.ndarray, "... n"], *, bits: Setting[int, "[1, 8]"] = 2
) -> Whole[np.ndarray, "... m"]:
    r"""QC-3: the codes in bytes, `8 / bits` in each; m = ceil(n bits / 8).

    Args: codes, below 2^bits; bits, 1, 2, 4 or 8. Returns uint8. Raises ValueError for other bits, and for a
    code that does not fit.
    """
    _require_packable(bits)
    if codes.max() >= 2**bits:
        raise ValueError(f"codes: got {codes.max()}, wanted codes below {2**bits}, in {bits} bits")
    # Decision: the first code is in the lowest bits of a byte, and a byte that is not full ends in zeros.
    each = 8 // bits
    spare = -codes.shape[-1] % each
    padded = np.pad(codes.astype(np.uint8), [(0, 0)] * (codes.ndim - 1) + [(0, spare)])
    shifts = bits * np.arange(each)
    of_byte = padded.reshape(*codes.shape[:-1], -1, each).astype(np.int64) << shifts
    return of_byte.sum(axis=-1).astype(np.uint8)


@contract
def unpack(
    packed: Whole[np.ndarray, "... m"],
    length: Setting[int, ">= 1"],
    *,
    bits: Setting[int, "[1, 8]"] = 2,
) -> Whole[np.ndarray, "... length"]:
    r"""QC-3: the codes of bytes, as `pack` was given them.

    Args: packed, below 256; length, the codes of a row; bits, 1, 2, 4 or 8. Raises ValueError for other
    bits, and for a length of more codes than there are.
    """
    _require_packable(bits)
    held = packed.shape[-1] * 8 // bits
    if length > held:
        raise ValueError(f"length: got {length}, wanted at most the {held} codes of {packed.shape[-1]} bytes")
    shifts = bits * np.arange(8 // bits)
    codes = packed[..., None].astype(np.int64) >> shifts & 2**bits - 1
    return codes.reshape(*packed.shape[:-1], -1)[..., :length].astype(np.uint8)


@contract
def by_token(
    values: Real[np.ndarray, "... T D_v"],
    *,
    bits: Setting[int, "[1, 8]"] = 2,
    group_size: Setting[int, ">= 1", 64, 128] = 32,
) -> Real[np.ndarray, "... T D_v"]:
    r"""QC-4: values as a cache gives them back: a group is `group_size` channels in a row of one token.

    Args: bits of a code; group_size. Raises ValueError where the groups do not divide the channels.
    """
    return _given_back(values, bits, group_size)


@contract
def by_channel(
    keys: Real[np.ndarray, "... T D"],
    *,
    bits: Setting[int, "[1, 8]"] = 2,
    group_size: Setting[int, ">= 1", 64, 128] = 32,
) -> Real[np.ndarray, "... T D"]:
    r"""QC-5: keys as a cache gives them back: a group is one channel of `group_size` tokens in a row.

    Args: bits of a code; group_size. Raises ValueError where the groups do not divide the tokens.
    """
    return np.swapaxes(_given_back(np.swapaxes(keys, -1, -2), bits, group_size), -1, -2)


@contract
def kivi(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    *,
    bits: Setting[int, "[1, 8]"] = 2,
    group_size: Setting[int, ">= 1", 64, 128] = 32,
    residual: Setting[int, ">= 1", 32] = 128,
) -> tuple[Real[np.ndarray, "B H_kv T D"], Real[np.ndarray, "B H_kv T D_v"]]:
    r"""QC-6: keys and values of a text as KIVI's cache gives them back: the last tokens are exact.

    The last T mod residual keys are exact: a block of `residual` keys is quantised when it is full. The last
    `residual` values are exact: each new one pushes out the oldest. Raises ValueError for a residual that
    the groups do not divide, and as `by_token` does.
    """
    # Decision: 128 tokens and groups of 32, those of the public code's example. The other sizes are its too.
    old_keys, old_values = quantised_tokens(keys.shape[2], group_size=group_size, residual=residual)
    _groups(values.shape[-1], group_size)
    keys, values = keys.copy(), values.copy()
    if old_keys:
        keys[:, :, :old_keys] = by_channel(keys[:, :, :old_keys], bits=bits, group_size=group_size)
    if old_values:
        values[:, :, :old_values] = by_token(values[:, :, :old_values], bits=bits, group_size=group_size)
    return keys, values


@contract
def quantised_tokens(
    length: Setting[int, ">= 1"],
    *,
    group_size: Setting[int, ">= 1", 64, 128] = 32,
    residual: Setting[int, ">= 1", 32] = 128,
) -> tuple[int, int]:
    r"""QC-6: of how many tokens KIVI's cache has quantised the key, and the value.

    Args: those of `kivi`. Raises ValueError for a residual that the groups do not divide.
    """
    if residual % group_size:
        raise ValueError(f"residual: got {residual}, wanted a multiple of group_size, {group_size}")
    return length - length % residual, max(0, length - residual)


@contract
def kivi_bytes(
    length: Setting[int, ">= 1"],
    *,
    num_layers: Setting[int, ">= 1"],
    num_kv_heads: Setting[int, ">= 1"],
    head_dim: Setting[int, ">= 1"],
    bits: Setting[int, "[1, 8]"] = 2,
    group_size: Setting[int, ">= 1", 64, 128] = 32,
    residual: Setting[int, ">= 1", 32] = 128,
    bytes_per_number: Setting[int, ">= 1"] = 2,
) -> int:
    r"""QC-7: the bytes of KIVI's caches of all layers after a text of `length` tokens: packed codes, the
    smallest number and the scale of each group, and the exact tokens.

    Args: those of a model's configuration, and of `kivi`; bytes_per_number, of an exact number, a smallest
    number and a scale. Raises ValueError as `kivi` does, and for bits that no byte is full of.
    """
    _require_packable(bits)
    old_keys, old_values = quantised_tokens(length, group_size=group_size, residual=residual)
    of_token = _groups(head_dim, group_size)
    codes = head_dim * _bytes(old_keys, bits) + old_values * _bytes(head_dim, bits)
    groups = head_dim * old_keys // group_size + old_values * of_token
    exact = (2 * length - old_keys - old_values) * head_dim
    return num_layers * num_kv_heads * (codes + (2 * groups + exact) * bytes_per_number)


@contract
def hadamard(states: Real[np.ndarray, "... D"]) -> Real[np.ndarray, "... D"]:
    r"""QC-8: `H x / sqrt(D)` with Sylvester's matrix H, whose entries are 1 and -1; it is its own inverse.

    Raises ValueError unless D is a power of two.
    """
    channels = states.shape[-1]
    if channels & (channels - 1):
        raise ValueError(f"states: got {channels} channels, wanted a power of two")
    matrix = np.ones((1, 1))
    while len(matrix) < channels:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return states @ matrix / np.sqrt(channels)


@contract
def rotated(
    states: Real[np.ndarray, "... T D"],
    *,
    bits: Setting[int, "[1, 8]", 2, 8] = 4,
    group_size: Setting[int, ">= 1", 64, 128] = 32,
) -> Real[np.ndarray, "... T D"]:
    r"""QC-9: keys or values as a rotated cache gives them back: `H Q(H x)`, with Q of `by_token`.

    Rotation spreads a large channel over all of them. A query may be rotated in the place of the keys, for
    (H q) . (H k) = q . k. Args: bits of a code; group_size. Raises ValueError as `hadamard` and `by_token`.
    """
    return hadamard(_given_back(hadamard(states), bits, group_size))


@contract
def e4m3(numbers: Real[np.ndarray, "... n"]) -> Real[np.ndarray, "... n"]:
    r"""QC-10: the nearest numbers of e4m3: a sign, 4 bits of exponent, 3 of mantissa; of two the even one.

    The largest is 448, the smallest above 0 is 2^-9.
    """
    _, exponent = np.frexp(numbers)
    step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    # Decision: what is beyond 448 becomes 448. The format has no infinity.
    return np.clip(np.rint(numbers / step) * step, -LARGEST, LARGEST)


@contract
def fp8(states: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... T D"]:
    r"""QC-11: `s e4m3(x / s)` with `s = max |x| / 448` of each token: its largest number becomes 448.

    Returns keys or values as the cache gives them back.
    """
    # Decision: each token of a head has a scale, and a token of zeros has the scale 1. Engines have one of a
    # layer or of a head too, which a text calibrates.
    scale = np.abs(states).max(axis=-1, keepdims=True) / LARGEST
    scale = np.where(scale == 0, 1, scale)
    return e4m3(states / scale) * scale


def _given_back(states: np.ndarray, bits: int, group_size: int) -> np.ndarray:
    """Each group of the last axis, quantised and dequantised."""
    groups = states.reshape(*states.shape[:-1], _groups(states.shape[-1], group_size), -1)
    return dequantise(*quantise(groups, bits=bits)).reshape(states.shape)


def _groups(count: int, group_size: int) -> int:
    """How many groups `count` numbers are."""
    # Decision: a group is at most the whole axis.
    size = min(group_size, count)
    if count % size:
        raise ValueError(f"group_size: got {group_size}, wanted a divisor of {count}")
    return count // size


def _bytes(count: int, bits: int) -> int:
    """The bytes of a row of codes."""
    return -(-count * bits // 8)


def _require_packable(bits: int) -> None:
    """Raise ValueError unless a byte is full of codes."""
    if 8 % bits:
        raise ValueError(f"bits: got {bits}, wanted 1, 2, 4 or 8, of which a byte is full")
