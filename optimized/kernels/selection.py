r"""Top-k by radix threshold: find the k-th highest score, keep
the scores above it, and of its equals the lowest positions.

It equals, in torch:

    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)

Eviction needs only the mask, no sorted values and no indices, so nothing is sorted. A float32 becomes a
32-bit unsigned key of the same order (`ordered`), and the k-th highest key is found one byte at a time, the
highest byte first: a histogram of the 256 values of that byte, among the keys that agree with the bytes
already found, says which value holds the k-th key and how many of those keys are still to be kept. Four bytes
give the threshold and the number of its equals to keep; one last walk over the row, in the order of the
positions, writes the mask. Of the five walks over a row, the first reads memory, the others L2 cache; a tile
without a key that agrees with the bytes found so far needs no histogram.

Two schedules. `keep_rows`: one program walks its short row five times, in one launch. `count_byte`, four
times, then `keep_chunks`: of a long row one program takes a chunk, and the histograms of a row are added with
integer atomics, whose order cannot change the result. Every program of the next launch reads the finished
histograms and computes the bytes found so far by itself: 256 numbers a byte, cheaper than an extra launch.
The last histogram is also stored chunk by chunk, so that `keep_chunks` knows how many equals of the threshold
lie in front of it.

Protected tokens get the highest key, which no number has; NaN gets the lowest, so that a row with NaN still
keeps exactly k.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .compiling import configurations
from .launching import cdiv, launch, launcher, padded, warps

LONGEST_SHORT_ROW = 16384
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
        # A program walks its whole row: the more threads, the fewer steps.
        block = 8192 if length > 2048 else padded(length, 256)
        threads = 1024 if block > 2048 else min(256, block // 4)
        launch(keep_rows, (number,))(
            scores, shielded, kept, length, count, sharing,
            **flags, BLOCK=block, num_warps=warps(rows, threads),
        )  # fmt: skip
        return kept
    flags |= {"BLOCK": 2048, "num_warps": warps(rows, 256)}
    least = max(LEAST_TOKENS_OF_A_CHUNK, number * length // PROGRAMS_WANTED)
    chunk = padded(cdiv(length, MOST_CHUNKS), padded(least))
    chunks = cdiv(length, chunk)
    counts = torch.zeros((number, 4, 256), dtype=torch.int32, device=rows.device)
    last_counts = torch.empty((number, chunks, 256), dtype=torch.int32, device=rows.device)
    grid = (number * chunks,)
    for byte in range(4):
        launch(count_byte, grid)(
            scores, shielded, counts, last_counts, length, count, sharing, chunk, chunks, byte, **flags
        )
    launch(keep_chunks, grid)(
        scores, shielded, counts, last_counts, kept, length, count, sharing, chunk, chunks,
        MOST_CHUNKS=MOST_CHUNKS, **flags,
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
def byte_counts(keys, inside, prefix, byte):
    """Return the histogram [256] of one byte (0 is the
    highest) among the keys whose bytes before it are `prefix`.
    """
    leading = keys >> (24 - 8 * byte)
    matching = inside & ((leading >> 8) == prefix)
    counts = tl.zeros([256], dtype=tl.int32)
    # A histogram takes many instructions for each key, and behind the first byte most tiles have nothing to
    # count.
    if tl.max(matching.to(tl.int32), axis=0) > 0:
        counts = tl.histogram((leading & 0xFF).to(tl.int32), 256, mask=matching)
    return counts


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
    """Return `byte_counts` of the positions start .. end-1 of a row."""
    counts = tl.zeros([256], dtype=tl.int32)
    for first in range(start, end, BLOCK):
        keys, inside = load_ordered(scores, protected, row, first, end, BLOCK)
        counts += byte_counts(keys, inside, prefix, byte)
    return counts


@triton.jit
def find_prefix(counts_ptr, row, count, sharing, known, EACH: tl.constexpr):
    """Return the first `known` bytes of the threshold of a row, from its histograms, and how many keys
    with them are to be kept.
    """
    prefix = tl.zeros([], dtype=tl.uint32)
    left = tl.load(count + row // sharing) if EACH else count
    for byte in range(known):
        prefix, left = narrow(tl.load(counts_ptr + (row * 4 + byte) * 256 + tl.arange(0, 256)), prefix, left)
    return prefix, left


@triton.jit
def keep_from(keys, inside, threshold, left, seen):
    """Return which keys are kept, where `seen` equals of the threshold lie before them, and the equals
    seen after them.
    """
    equal = ((keys == threshold) & inside).to(tl.int32)
    kept = (keys > threshold) | ((equal != 0) & (seen + tl.cumsum(equal, axis=0) <= left))
    return kept, seen + tl.sum(equal, axis=0)


@triton.jit(do_not_specialize=["count", "sharing"])
def keep_rows(scores, protected, kept_ptr, length, count, sharing, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """kept[row] = the mask of the `count` highest scores
    of a row; EACH: of count[row // sharing]. Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    prefix = tl.zeros([], dtype=tl.uint32)
    left = tl.load(count + row // sharing) if EACH else count
    for byte in range(4):
        counts = count_keys(scores, protected, row, 0, length, prefix, byte, BLOCK)
        prefix, left = narrow(counts, prefix, left)
    seen = tl.zeros([], dtype=tl.int32)
    for first in range(0, length, BLOCK):
        keys, inside = load_ordered(scores, protected, row, first, length, BLOCK)
        kept, seen = keep_from(keys, inside, prefix, left, seen)
        tl.store(kept_ptr + row * length + first + tl.arange(0, BLOCK), kept, mask=inside)


@triton.jit(do_not_specialize=["count", "sharing", "chunks", "byte"])
def count_byte(
    scores, protected, counts_ptr, last_counts_ptr, length, count, sharing, chunk, chunks, byte,
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the histogram of one byte over one chunk of a row to that of the row; the last is stored too.
    Grid: rows * chunks.
    """
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    prefix, _ = find_prefix(counts_ptr, row, count, sharing, byte, EACH)
    end = tl.minimum((part + 1) * chunk, length)
    counts = count_keys(scores, protected, row, part * chunk, end, prefix, byte, BLOCK)
    values = tl.arange(0, 256)
    tl.atomic_add(counts_ptr + (row * 4 + byte) * 256 + values, counts, mask=counts > 0)
    if byte == 3:
        tl.store(last_counts_ptr + program * 256 + values, counts)


@triton.jit(do_not_specialize=["count", "sharing", "chunks"])
def keep_chunks(
    scores, protected, counts_ptr, last_counts_ptr, kept_ptr, length, count, sharing, chunk, chunks,
    EACH: tl.constexpr, BLOCK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """kept[row, chunk] = the mask of the `count` highest scores of a row. Grid: rows * chunks."""
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    prefix, left = find_prefix(counts_ptr, row, count, sharing, 4, EACH)
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
