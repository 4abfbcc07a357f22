r"""Top-k by radix threshold: find the k-th highest score, keep
the scores above it, and of its equals the lowest positions.

It equals, in torch:

    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)

Eviction needs only the mask, no sorted values and no indices, so nothing is sorted. A
float32 becomes a 32-bit unsigned key of the same order (`ordered`), and the k-th highest key
is found one byte at a time, the highest byte first: a histogram of the 256 values of that
byte, among the keys that agree with the bytes already found, says which value holds the k-th
key and how many of those keys are still to be kept. Four bytes give the threshold and the
number of its equals to keep. Then the mask is written in the order of the positions.

Two schedules. A short row is read once: `keep_whole` holds it in the registers of one program, in one launch.
The leading bytes that all its keys share need no histogram, so they are skipped. A long row does not fit
there: one program takes a chunk of it, in four launches of `count_byte` and one of `keep_chunks`. The first
of the five walks reads memory, the others L2 cache. A tile without a key that agrees with the bytes found so
far needs no histogram, and neither does a tile whose keys share the byte. The histograms of a row are added
with integer atomics, whose order cannot change the result. Every program of the next launch reads the last
finished histogram and finds one more byte by itself, which is cheaper than an extra launch; the first
program of a row stores what it has found for the launch after. The last histogram is also stored chunk by
chunk, so that `keep_chunks` knows how many equals of the threshold lie in front of it.

Protected tokens get the highest key, which no number has; NaN gets the lowest, so that a row with NaN still
keeps exactly k.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .compiling import configurations
from .launching import cdiv, launch, launcher, padded, register_limit, warps

KEYS_OF_A_THREAD = 16  # with more, a thread needs the registers of others
LONGEST_SHORT_ROW = 1024 * KEYS_OF_A_THREAD
MOST_CHUNKS = 256
PROGRAMS_WANTED = 2048
LEAST_TOKENS_OF_A_CHUNK = 4096


class Table(NamedTuple):
    """Numbers [R, T], a row for each selection: their pointer and their strides."""

    ptr: Any
    stride_row: int
    stride_t: int


@launcher
def top_k(scores: torch.Tensor, count: int, protected: torch.Tensor | None = None) -> torch.Tensor:
    r"""SEL-2..4: keep the `count` highest scores of each row, from 0 to T, as `optimized.selection.top_k`."""
    length = scores.shape[-1]
    if count in (0, length):
        return torch.full(scores.shape, count > 0, dtype=torch.bool, device=scores.device)
    rows = scores.reshape(-1, length)
    shielded = None if protected is None else protected.reshape(-1, length)
    return _keep(rows, shielded, count).view(scores.shape)


def keep_each(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Keep the highest scores of each of the R rows [R, T]:
    R / len(counts) rows in turn have the same count, int32.
    """
    return _keep(rows, None, counts.contiguous(), sharing=rows.shape[0] // counts.numel())


def _keep(
    rows: torch.Tensor, protected: torch.Tensor | None, count: int | torch.Tensor, sharing: int = 1
) -> torch.Tensor:
    """The mask [R, T] of the highest scores of each row; `protected` is a mask."""
    number, length = rows.shape
    kept = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    scores = Table(rows, *rows.stride())
    shielded = None if protected is None else Table(protected, *protected.stride())
    flags: dict[str, int] = {"EACH": isinstance(count, torch.Tensor)}
    if length <= LONGEST_SHORT_ROW:
        block = padded(length, 256)
        threads = max(64, block // KEYS_OF_A_THREAD)
        launch(keep_whole, (number,))(
            scores, shielded, kept, length, count, sharing,
            **flags, BLOCK=block, num_warps=warps(rows, threads),
        )  # fmt: skip
        return kept
    options = {"BLOCK": 2048, "num_warps": warps(rows, 256)}
    least = max(LEAST_TOKENS_OF_A_CHUNK, number * length // PROGRAMS_WANTED)
    chunk = padded(cdiv(length, MOST_CHUNKS), padded(least))
    chunks = cdiv(length, chunk)
    counts = torch.zeros((number, 4, 256), dtype=torch.int32, device=rows.device)
    last_counts = torch.empty((number, chunks, 256), dtype=torch.int32, device=rows.device)
    found = torch.empty((number, 4, 2), dtype=torch.int32, device=rows.device)
    grid = (number * chunks,)
    for byte in range(4):
        launch(count_byte, grid)(
            scores, shielded, counts, last_counts, found, length, count, sharing, chunk, chunks, byte,
            **flags, **options,
        )  # fmt: skip
    launch(keep_chunks, grid)(
        scores, shielded, counts, last_counts, found, kept, length, chunk, chunks,
        # left alone, the assembler of sm_80 takes 48 and spills one
        MOST_CHUNKS=MOST_CHUNKS, **options, **register_limit(rows, 64, 80),
    )  # fmt: skip
    return kept


@triton.jit
def ordered(values):
    """Return unsigned keys in the order of the float32 `values`: -0 as 0, NaN below all, and 0xFFFFFFFF
    above all unused.
    """
    bits = tl.where(values == 0, 0.0, values).to(tl.uint32, bitcast=True)
    # A negative number grows as its bits fall, so all its bits are flipped. A positive number only moves
    # above the negative ones.
    keys = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(values == values, keys, 0)


@triton.jit
def keep_highest(keys, count):
    """Return which `count` of the `keys` [BLOCK], held in
    registers, are highest; of equals the lowest positions.

    The threshold is found bit by bit, 32 dependent sums over registers. Counting the keys above each key
    would have no dependent step, but its BLOCK * BLOCK comparisons need the registers that keep other
    programs resident. The keys beyond the end of a row must be 0: they rank below every number, and by their
    position below NaN.
    """
    threshold = tl.zeros([], dtype=tl.uint32)
    bit = tl.full([], 0x80000000, dtype=tl.uint32)
    for step in range(32):
        candidate = threshold | (bit >> step)
        threshold = tl.where(tl.sum((keys >= candidate).to(tl.int32), axis=0) >= count, candidate, threshold)
    above = keys > threshold
    equal = keys == threshold
    spare = count - tl.sum(above.to(tl.int32), axis=0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= spare))


@triton.jit
def load_ordered(scores, protected, row, first, end, BLOCK: tl.constexpr):
    """Load the keys of positions first .. first+BLOCK-1 of a row, and which of them lie before `end`."""
    positions = (first + tl.arange(0, BLOCK)).to(tl.int64)
    inside = positions < end
    numbers = scores.ptr + row * scores.stride_row + positions * scores.stride_t
    keys = ordered(tl.load(numbers, mask=inside, other=0.0).to(tl.float32))
    if protected is not None:
        flags = protected.ptr + row * protected.stride_row + positions * protected.stride_t
        shielded = tl.load(flags, mask=inside, other=0)
        keys = tl.where(shielded != 0, 0xFFFFFFFF, keys)
    return keys, inside


@triton.jit
def next_byte(keys, among, prefix, byte):
    """Return one byte (0 is the highest) of each key, and which
    keys `among` those given have the `prefix` of bytes before it.
    """
    leading = keys >> (24 - 8 * byte)
    return (leading & 0xFF).to(tl.int32), among & ((leading >> 8) == prefix)


@triton.jit
def narrow(counts, prefix, left):
    """Return the prefix with one more byte, and how many
    of the keys with that prefix are still to be kept.
    """
    values = tl.arange(0, 256)
    at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    chosen = tl.sum((at_least >= left).to(tl.int32), axis=0) - 1
    left -= tl.sum(tl.where(values > chosen, counts, 0), axis=0)
    return (prefix << 8) | chosen.to(tl.uint32), left


@triton.jit
def count_keys(scores, protected, row, start, end, prefix, byte, BLOCK: tl.constexpr):
    """Return the histogram [256] of one byte among those keys of the positions start .. end-1 of a row
    whose bytes before it are `prefix`.
    """
    values = tl.arange(0, 256)
    counts = tl.zeros([256], dtype=tl.int32)
    for first in range(start, end, BLOCK):
        keys, inside = load_ordered(scores, protected, row, first, end, BLOCK)
        digits, matching = next_byte(keys, inside, prefix, byte)
        lowest = tl.min(tl.where(matching, digits, 256), axis=0)
        highest = tl.max(tl.where(matching, digits, -1), axis=0)
        # A histogram takes many instructions for each key. Behind the first byte most tiles have nothing to
        # count, and scores of one sign and size have one first byte.
        if lowest < highest:
            counts += tl.histogram(digits, 256, mask=matching)
        elif lowest == highest:
            counts += tl.where(values == lowest, tl.sum(matching.to(tl.int32), axis=0), 0)
    return counts


@triton.jit
def find_prefix(counts_ptr, found_ptr, row, known):
    """Return the first `known` bytes of the threshold of a row, one or more, and how many keys with them
    are to be kept: from what the launch before has found, and its histogram.
    """
    last = row * 4 + known - 1
    prefix = tl.load(found_ptr + last * 2).to(tl.uint32, bitcast=True)
    left = tl.load(found_ptr + last * 2 + 1)
    return narrow(tl.load(counts_ptr + last * 256 + tl.arange(0, 256)), prefix, left)


@triton.jit
def keep_from(keys, inside, threshold, left, seen):
    """Return which keys are kept, where `seen` equals of the threshold lie before them, and the equals
    seen after them.
    """
    equal = ((keys == threshold) & inside).to(tl.int32)
    kept = (keys > threshold) | ((equal != 0) & (seen + tl.cumsum(equal, axis=0) <= left))
    return kept, seen + tl.sum(equal, axis=0)


@triton.jit
def shared_bytes(lowest, highest):
    """Return how many leading bytes, 0 to 4, all keys
    from the lowest to the highest share, and these bytes.
    """
    apart = lowest ^ highest
    shared = (apart < 1 << 24).to(tl.int32) + (apart < 1 << 16) + (apart < 1 << 8) + (apart == 0)
    # 64 bits may be shifted by 32
    return shared, (lowest.to(tl.uint64) >> (32 - 8 * shared)).to(tl.uint32)


@triton.jit(do_not_specialize=["count", "sharing"])
def keep_whole(scores, protected, kept_ptr, length, count, sharing, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """kept[row] = the mask of the `count` highest scores
    of a row; EACH: of count[row // sharing]. Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(count + row // sharing) if EACH else count
    keys, inside = load_ordered(scores, protected, row, 0, length, BLOCK)
    # Protected keys share no byte with the others, so they are not searched.
    open = inside & (keys != 0xFFFFFFFF)
    room = wanted - tl.sum((inside & (keys == 0xFFFFFFFF)).to(tl.int32), axis=0)
    lowest = tl.min(tl.where(open, keys, 0xFFFFFFFF), axis=0)
    shared, prefix = shared_bytes(lowest, tl.max(tl.where(open, keys, 0), axis=0))
    left = room
    for byte in range(shared, 4):
        digits, matching = next_byte(keys, open, prefix, byte)
        prefix, left = narrow(tl.histogram(digits, 256, mask=matching), prefix, left)
    # Without room for others the first of the protected are kept.
    threshold = tl.where(room > 0, prefix, 0xFFFFFFFF)
    kept, _ = keep_from(keys, inside, threshold, tl.where(room > 0, left, wanted), 0)
    tl.store(kept_ptr + row * length + tl.arange(0, BLOCK), kept, mask=inside)


@triton.jit(do_not_specialize=["count", "sharing", "chunks", "byte"])
def count_byte(
    scores, protected, counts_ptr, last_counts_ptr, found_ptr, length, count, sharing, chunk, chunks, byte,
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the histogram of one byte over one chunk of a row to that of the row; the last is stored too.
    found[row, byte] = the bytes of the threshold before it, and how many keys with them are to be kept.
    Grid: rows * chunks.
    """
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    if byte == 0:
        prefix = tl.zeros([], dtype=tl.uint32)
        left = tl.load(count + row // sharing) if EACH else count
    else:
        prefix, left = find_prefix(counts_ptr, found_ptr, row, byte)
    if part == 0:
        tl.store(found_ptr + (row * 4 + byte) * 2, prefix.to(tl.int32, bitcast=True))
        tl.store(found_ptr + (row * 4 + byte) * 2 + 1, left)
    end = tl.minimum((part + 1) * chunk, length)
    counts = count_keys(scores, protected, row, part * chunk, end, prefix, byte, BLOCK)
    values = tl.arange(0, 256)
    tl.atomic_add(counts_ptr + (row * 4 + byte) * 256 + values, counts, mask=counts > 0)
    if byte == 3:
        tl.store(last_counts_ptr + program * 256 + values, counts)


@triton.jit(do_not_specialize=["chunks"])
def keep_chunks(
    scores, protected, counts_ptr, last_counts_ptr, found_ptr, kept_ptr, length, chunk, chunks,
    BLOCK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """kept[row, chunk] = the mask of the highest scores of a row. Grid: rows * chunks."""
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    prefix, left = find_prefix(counts_ptr, found_ptr, row, 4)
    # Equals of the threshold in earlier chunks: from the last histogram of each chunk, at the last byte of
    # the threshold.
    before = tl.arange(0, MOST_CHUNKS)
    ties = last_counts_ptr + (row * chunks + before) * 256 + (prefix & 0xFF).to(tl.int64)
    seen = tl.sum(tl.load(ties, mask=before < part, other=0), axis=0)
    end = tl.minimum((part + 1) * chunk, length)
    for first in range(part * chunk, end, BLOCK):
        keys, inside = load_ordered(scores, protected, row, first, end, BLOCK)
        kept, seen = keep_from(keys, inside, prefix, left, seen)
        tl.store(kept_ptr + row * length + first + tl.arange(0, BLOCK), kept, mask=inside)


def _launch(dtype: torch.dtype, rows: int, length: int, protected: int) -> None:
    scores = torch.empty((rows, length), dtype=dtype, device="meta")
    top_k(scores, length // 2, scores.to(torch.bool) if protected else None)


CONFIGURATIONS = configurations(
    _launch,
    *({"rows": rows, "length": length, "protected": protected}
      for protected in (1, 0) for rows, length in ((8, 131072), (256, 131072), (8, 8192))),
    dtypes=(torch.float32, torch.bfloat16),
)  # fmt: skip
