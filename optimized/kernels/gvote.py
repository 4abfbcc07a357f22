r"""GVote (arXiv 2509.03136): budgets from the nucleus of the current query, votes of the sampled ones,
their union (GV-A1 to A11).

It equals, in torch, for one query head with the current query q and the samples x [S, D]:

    weights, order = (keys.float() @ q.float() / math.sqrt(head_dim)).softmax(dim=0).sort(descending=True,
    stable=True)
    budget = (weights.flip(0).cumsum(0).flip(0) > 1 - p).sum()
    votes = (x.float() @ keys.float().T).argsort(dim=-1, descending=True, stable=True)[:, :budget]
    kept[votes.flatten()] = True                       # one mask for the query heads of a group

The kernels sort nothing. The votes of a row are the tokens above a threshold, and of the tokens equal to it
those up to some position. So two numbers describe the votes of T logits, and the union tests for each token
whether any row of its KV head has it.

The nucleus by thresholds. The float32 weights are not negative, so that they are ordered as their bits. The
mass of all weights below a threshold grows with the threshold; the smallest weight of the nucleus is the
largest threshold whose mass below is not more than 1 - p of the whole, and it is found bit by bit. This is
true in rounded arithmetic too: a sum taken in a fixed order over the same places, some of them 0, cannot fall
when one of them becomes positive. So no digit found ever contradicts an earlier one. Weights equal to the
smallest leave the nucleus as long as the mass outside stays within 1 - p. The weights are those of the
softmax before its division, since mass is relative to the row. NaN ranks below every number and has no mass.

Waves. In a long prompt, the S * T logits of each query head take the most memory. So the samples are
processed in waves of as many sequences as WORKSPACE holds, or KV heads of one sequence, or samples of one KV
head; only the last kind reads K again for each wave. The logits never take more memory than WORKSPACE, or one
logit for each token and query head of a group.

Launches. `multiply` writes logits: the product of at most 64 query rows, the queries of a group, with 128
keys. Rows of up to 8,192 logits are settled in registers, without a second read: `settle_short_rows` for the
budgets, `rank_short_rows` for the votes. A longer row is cut into at most 64 chunks, by its length alone.
`find_peaks` and eight times `weigh_chunks` find a nucleus, four bits at a time, by the mass below fifteen
thresholds in one read; what lies below the bits that are known is carried along, and behind the fourth digit
most tiles have no weight with these bits and are passed over. `settle_long_rows` counts the nucleus.
`count_chunks`, four times, and `rank_chunks` find the votes by the histograms of `selection`. `unite` writes
or extends the mask. Nothing waits for the host. Masses of chunks are added in their order, and histograms are
whole numbers: two runs agree in every bit, and so does a sequence in whatever batch it runs. float32 caches
are multiplied in full float32, without tensor cores.
"""

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import floats, launch, padded
from .selection import count_keys, find_prefix, keep_from, load_ordered, ordered, store_counts
from .strided import strided
from .tiles import dot_dtype, head_of, load_queries, load_tile

WORKSPACE = 32 * 2**20  # bytes for the samples' logits at a time
LONGEST_SHORT_ROW = 8192
LEAST_CHUNK = 2048
MOST_CHUNKS = 64


def select(
    query: torch.Tensor, keys: torch.Tensor, sampled_queries: torch.Tensor, beyond: float
) -> torch.Tensor:
    r"""GV-A1..3, GV-A9..11: the kept mask, as `optimized.gvote.select`; `beyond` is 1 - p."""
    batch, num_kv_heads, length, _ = keys.shape
    group, samples = query.shape[1] // num_kv_heads, sampled_queries.shape[2]
    budgets = _nuclei(_logits(query[:, :, None], keys), beyond, from_logits=True)
    budgets = budgets.view(batch, num_kv_heads, group)
    kept = torch.empty(keys.shape[:3], dtype=torch.bool, device=keys.device)
    items, heads, wave = _waves(batch, num_kv_heads, samples, bytes_each=4 * group * length)
    for item, head in itertools.product(range(0, batch, items), range(0, num_kv_heads, heads)):
        own = slice(item, item + items), slice(head, head + heads)
        readers = slice(head * group, (head + heads) * group)
        for first in range(0, samples, wave):
            logits = _logits(sampled_queries[own[0], readers, first : first + wave], keys[own])
            _vote(logits, budgets[own], kept[own], extend=first > 0)
    return kept


def _waves(batch: int, num_kv_heads: int, samples: int, *, bytes_each: int) -> tuple[int, int, int]:
    """Return the sequences, KV heads and samples of a wave: whole sequences, or heads of one sequence, or
    samples of one head.

    `bytes_each` is the memory of one sample for a KV head. A wave writes parts of the mask that are next to
    one another this way.
    """
    fitting = WORKSPACE // bytes_each
    heads = fitting // samples
    if heads >= num_kv_heads:
        return min(batch, heads // num_kv_heads), num_kv_heads, samples
    return 1, max(1, heads), samples if heads else max(1, fitting)


def nucleus(attention: torch.Tensor, beyond: float) -> torch.Tensor:
    r"""GV-A2: the smallest set with mass >= p, as `optimized.gvote.nucleus`; `beyond` is 1 - p. Weights
    below 0 count as 0.
    """
    return _top_each(
        attention, _nuclei(attention.reshape(-1, attention.shape[-1]), beyond, from_logits=False)
    )


def top_each(scores: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    r"""GV-5, GV-A10: every row keeps its own number of tokens, as `optimized.gvote.top_each`."""
    return _top_each(scores, budgets.clamp(0, scores.shape[-1]).to(torch.int32).reshape(-1))


def _top_each(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mask of the `counts` [R] highest scores of the R rows of `scores` [.., T]."""
    kept = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    _vote(scores.reshape(-1, scores.shape[-1]), counts, kept, extend=False)
    return kept


def _logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """GV-1, GV-A9: `q . k / sqrt(D)` for queries [B, H_q, M, D] as rows [B * H_q * M, T] of the heads,
    then of their queries.
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1], keys.shape[2]
    rows = num_query_heads // num_kv_heads * num_queries
    # Rows that start at a multiple of 64 bytes are read and written 16 bytes at a time, for any T.
    columns = triton.cdiv(length, 16) * 16
    logits = floats(keys, batch * num_kv_heads * rows, columns)
    tile = _tile(keys, rows)
    blocks = triton.cdiv(length, tile["BLOCK_T"])
    launch(multiply, (batch * num_kv_heads * blocks, triton.cdiv(rows, tile["BLOCK_ROWS"])))(
        strided(queries), strided(keys), logits,
        num_kv_heads, num_queries, rows, length, columns, blocks, head_dim, 1 / math.sqrt(head_dim), **tile,
    )  # fmt: skip
    return logits[:, :length]


def _tile(keys: torch.Tensor, rows: int) -> dict[str, Any]:
    """Return the constants of the tiling of `multiply`."""
    block_d = padded(keys.shape[-1])
    if keys.dtype == torch.float32:
        tile = {"BLOCK_ROWS": 16, "BLOCK_T": 32}
    else:
        tile = {"BLOCK_ROWS": min(64, padded(rows)), "BLOCK_T": 64 if block_d > 128 else 128}
    return tile | {"BLOCK_D": block_d, "DOT_DTYPE": dot_dtype(keys), "num_warps": 4}


def _short(length: int) -> dict[str, int]:
    """Return the constants of the kernels that hold rows in registers: 4,096 numbers to a program, or one
    row.
    """
    block = padded(length, 64)
    return {"ROWS": max(1, 4096 // block), "BLOCK": block, "num_warps": max(8, block // 512)}


def _chunks(length: int) -> tuple[int, int]:
    """Return the tokens of a chunk of a long row and the number of chunks: by the length alone."""
    chunk = padded(triton.cdiv(length, MOST_CHUNKS), LEAST_CHUNK)
    return chunk, triton.cdiv(length, chunk)


def _nuclei(rows: torch.Tensor, beyond: float, *, from_logits: bool) -> torch.Tensor:
    """Return the size of the nucleus of each row [R, T], [R] int32. `beyond` is 1 - p."""
    count, length = rows.shape
    sizes = torch.empty(count, dtype=torch.int32, device=rows.device)
    if length <= LONGEST_SHORT_ROW:
        tile = _short(length)
        launch(settle_short_rows, (triton.cdiv(count, tile["ROWS"]),))(
            rows, sizes, *rows.stride(), count, length, beyond, FROM_LOGITS=from_logits, **tile
        )
        return sizes
    chunk, chunks = _chunks(length)
    peaks, totals = floats(rows, count, chunks), floats(rows, count, chunks)
    # Each digit follows from the masses and the threshold of the digit before it.
    masses = [floats(rows, count, chunks, 16) for _ in range(2)]
    thresholds = [torch.empty(count, dtype=torch.int32, device=rows.device) for _ in range(2)]
    grid = (count * chunks,)
    launch(find_peaks, grid)(rows, peaks, *rows.stride(), length, chunk, chunks, BLOCK=2048, num_warps=4)
    for digit in range(8):
        now, before = digit % 2, 1 - digit % 2
        launch(weigh_chunks, grid)(
            rows, peaks, masses[before], masses[now], totals, thresholds[before], thresholds[now],
            *rows.stride(), length, chunk, chunks, digit, beyond,
            FROM_LOGITS=from_logits, BLOCK=512, MOST_CHUNKS=MOST_CHUNKS, num_warps=4,
        )  # fmt: skip
    launch(settle_long_rows, (count,))(
        rows, peaks, masses[1], totals, thresholds[1], sizes, *rows.stride(), length, chunks, beyond,
        FROM_LOGITS=from_logits, BLOCK=4096, MOST_CHUNKS=MOST_CHUNKS, num_warps=8,
    )  # fmt: skip
    return sizes


def _vote(rows: torch.Tensor, budgets: torch.Tensor, kept: torch.Tensor, *, extend: bool) -> None:
    """Write into `kept` [.., T] (or add to it) the union of the top tokens of the rows [R, T] that share a
    row of `kept`.

    R / len(budgets) rows in turn have the same budget, and R / rows of kept in turn the same row of it.
    """
    count, length = rows.shape
    sharing = count // budgets.numel()
    thresholds = torch.empty(count, dtype=torch.int32, device=rows.device)
    lasts = torch.empty(count, dtype=torch.int32, device=rows.device)
    if length <= LONGEST_SHORT_ROW:
        tile = _short(length)
        launch(rank_short_rows, (triton.cdiv(count, tile["ROWS"]),))(
            rows, budgets, thresholds, lasts, *rows.stride(), count, length, sharing, **tile
        )
    else:
        chunk, chunks = _chunks(length)
        counts = torch.zeros((count, 4, 256), dtype=torch.int32, device=rows.device)
        last_counts = torch.empty((count, chunks, 256), dtype=torch.int32, device=rows.device)
        arguments = (*rows.stride(), length, sharing, chunk, chunks)
        for byte in range(4):
            launch(count_chunks, (count * chunks,))(
                rows, budgets, counts, last_counts, *arguments, byte, BLOCK=2048, num_warps=4
            )
        launch(rank_chunks, (count * chunks,))(
            rows,
            budgets,
            counts,
            last_counts,
            thresholds,
            lasts,
            *arguments,
            BLOCK=2048,
            MOST_CHUNKS=MOST_CHUNKS,
            num_warps=4,
        )
    masks = kept.numel() // length
    blocks = triton.cdiv(length, 2048)
    launch(unite, (masks * blocks,))(
        rows,
        thresholds,
        lasts,
        kept,
        *rows.stride(),
        length,
        count // masks,
        blocks,
        EXTEND=extend,
        BLOCK=2048,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_queries", "rows", "length", "blocks", "scale"])
def multiply(
    queries, keys, logits_ptr,
    num_kv_heads, num_queries, rows, length, columns, blocks, head_dim, scale,
    BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """logits[head, row, t] = q_row . k_t * scale, row g * M + m of a KV head. Grid: heads * blocks of
    tokens, blocks of rows.
    """
    program = tl.program_id(0).to(tl.int64)
    head, block = program // blocks, program % blocks
    channels = tl.arange(0, BLOCK_D)
    row = (tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    query = load_queries(queries, head, row, channels, num_kv_heads, rows, num_queries, head_dim).to(
        DOT_DTYPE
    )
    key = load_tile(head_of(keys, head, num_kv_heads), token, channels, token < length, head_dim).to(
        DOT_DTYPE
    )
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    # The columns from `length` on belong to the row too: they are written, and not read.
    offsets = (head * rows + row)[:, None] * columns + token[None, :]
    tl.store(logits_ptr + offsets, logits, mask=(row < rows)[:, None] & (token < columns)[None, :])


@triton.jit
def load_values(row, first, end, stride_t, BLOCK: tl.constexpr):
    """Load the numbers at first .. first+BLOCK-1 of a row as float32, and which of them lie before `end`."""
    positions = (first + tl.arange(0, BLOCK)).to(tl.int64)
    inside = positions < end
    return tl.load(row + positions * stride_t, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def as_weights(values, inside, peak, FROM_LOGITS: tl.constexpr):
    """Return weights of at least 0: the values, or exp(value - peak); 0 for NaN and outside."""
    if FROM_LOGITS:
        # of what is outside the exponential could overflow
        values = tl.exp(tl.where(inside, values - peak, 0.0))
    return tl.where(inside & (values > 0), values, 0.0)


@triton.jit
def equals_needed(threshold, bound, below, equals):
    """Return how many of the `equals` weights at the threshold are in the nucleus, with the mass `below`
    the threshold.

    Starting at the last, they leave as long as the mass outside stays within the bound; one weight is always
    needed.
    """
    weight = threshold.to(tl.float32, bitcast=True)
    fitting = tl.floor(tl.div_rn(bound - below, tl.where(weight > 0, weight, 1.0)))
    # Rows without mass keep their first token. The comparison is false for NaN, which is no whole number.
    leaving = tl.where(fitting >= 0, tl.minimum(fitting, 2.0e9), 0.0).to(tl.int32)
    leaving = tl.where(threshold == 0, equals - 1, tl.minimum(leaving, equals - 1))
    return tl.maximum(equals - leaving, 1)


@triton.jit
def load_rows(values_ptr, rows, length, stride_row, stride_t, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load ROWS rows as float32 [ROWS, BLOCK], which of the numbers exist, and the indices of the rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    positions = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (positions < length)[None, :]
    offsets = row[:, None] * stride_row + positions.to(tl.int64)[None, :] * stride_t
    return tl.load(values_ptr + offsets, mask=inside, other=0.0).to(tl.float32), inside, row


@triton.jit(do_not_specialize=["rows", "beyond"])
def settle_short_rows(
    values_ptr, sizes_ptr, stride_row, stride_t, rows, length, beyond,
    FROM_LOGITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sizes[row] = the size of the nucleus of a row. Grid: blocks of rows."""
    values, inside, row = load_rows(values_ptr, rows, length, stride_row, stride_t, ROWS, BLOCK)
    weights = as_weights(
        values, inside, tl.max(tl.where(inside, values, float("-inf")), axis=1)[:, None], FROM_LOGITS
    )
    keys = weights.to(tl.uint32, bitcast=True)
    bound = beyond * tl.sum(weights, axis=1)
    threshold = tl.zeros([ROWS], dtype=tl.uint32)
    bit = tl.full([], 0x40000000, dtype=tl.uint32)
    for step in range(31):
        candidate = threshold | (bit >> step)
        below = tl.sum(tl.where(keys < candidate[:, None], weights, 0.0), axis=1)
        threshold = tl.where(below <= bound, candidate, threshold)
    # With p near 0 all of the mass may be below the threshold; the largest weight is still needed.
    threshold = tl.minimum(threshold, tl.max(keys, axis=1))
    below = tl.sum(tl.where(keys < threshold[:, None], weights, 0.0), axis=1)
    above = tl.sum((keys > threshold[:, None]).to(tl.int32), axis=1)
    equals = tl.sum((inside & (keys == threshold[:, None])).to(tl.int32), axis=1)
    sizes = tl.minimum(above + equals_needed(threshold, bound, below, equals), length)
    tl.store(sizes_ptr + row, sizes, mask=row < rows)


@triton.jit(do_not_specialize=["chunks"])
def find_peaks(values_ptr, peaks_ptr, stride_row, stride_t, length, chunk, chunks, BLOCK: tl.constexpr):
    """peaks[row, chunk] = the largest value of one chunk of a row. Grid: rows * chunks."""
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    end = tl.minimum((part + 1) * chunk, length)
    peak = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in range(part * chunk, end, BLOCK):
        values, inside = load_values(values_ptr + row * stride_row, first, end, stride_t, BLOCK)
        peak = tl.maximum(peak, tl.where(inside, values, float("-inf")))
    tl.store(peaks_ptr + program, tl.max(peak, axis=0))


@triton.jit
def row_peak(peaks_ptr, row, chunks, MOST_CHUNKS: tl.constexpr):
    """Return the largest value of a row."""
    parts = tl.arange(0, MOST_CHUNKS)
    return tl.max(tl.load(peaks_ptr + row * chunks + parts, mask=parts < chunks, other=float("-inf")), axis=0)


@triton.jit
def next_digit(masses_ptr, totals_ptr, row, chunks, beyond, MOST_CHUNKS: tl.constexpr):
    """Return the next digit of the threshold, from the masses of `weigh_chunks`, and the mass that may be
    left out.
    """
    slots = tl.arange(0, 16)
    parts = row * chunks + tl.arange(0, MOST_CHUNKS)
    inside = parts < (row + 1) * chunks
    offsets = parts[:, None] * 16 + slots[None, :]
    masses = tl.sum(tl.load(masses_ptr + offsets, mask=inside[:, None], other=0.0), axis=0)
    bound = beyond * tl.sum(tl.load(totals_ptr + parts, mask=inside, other=0.0), axis=0)
    return tl.sum(((slots > 0) & (masses <= bound)).to(tl.int32), axis=0), bound


@triton.jit(do_not_specialize=["chunks", "digit", "beyond"])
def weigh_chunks(
    values_ptr, peaks_ptr, earlier_masses_ptr, masses_ptr, totals_ptr, earlier_thresholds_ptr, thresholds_ptr,
    stride_row, stride_t, length, chunk, chunks, digit, beyond,
    FROM_LOGITS: tl.constexpr, BLOCK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """masses[row, chunk, v] = the mass of a chunk below the threshold whose next digit is v = 0 .. 15.
    Grid: rows * chunks.

    Digit 0 is the highest. thresholds[row] = the known digits; every program of a row computes them itself.
    Digit 0 also writes totals[row, chunk] = the whole mass.
    """
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    prefix = tl.zeros([], dtype=tl.uint32)
    base = tl.zeros([], dtype=tl.float32)
    if digit > 0:
        prefix = tl.load(earlier_thresholds_ptr + row).to(tl.uint32, bitcast=True)
        found, _ = next_digit(earlier_masses_ptr, totals_ptr, row, chunks, beyond, MOST_CHUNKS)
        prefix |= found.to(tl.uint32) << (32 - 4 * digit)
        base = tl.load(earlier_masses_ptr + program * 16 + found)
    if part == 0:
        tl.store(thresholds_ptr + row, prefix.to(tl.int32, bitcast=True))
    peak = row_peak(peaks_ptr, row, chunks, MOST_CHUNKS)
    slots = tl.arange(0, 16)
    masses = tl.zeros([16, BLOCK], dtype=tl.float32)
    end = tl.minimum((part + 1) * chunk, length)
    for first in range(part * chunk, end, BLOCK):
        values, inside = load_values(values_ptr + row * stride_row, first, end, stride_t, BLOCK)
        weights = as_weights(values, inside, peak, FROM_LOGITS)
        # The next digit of a weight whose digits so far are the known ones. Another is 16 or more, above or
        # in `base` already.
        place = (weights.to(tl.uint32, bitcast=True) ^ prefix) >> (28 - 4 * digit)
        if tl.min(place, axis=0) < 15:
            masses += tl.where(place[None, :] < slots.to(tl.uint32)[:, None], weights[None, :], 0.0)
    below = base + tl.sum(masses, axis=1)
    tl.store(masses_ptr + program * 16 + slots, below)
    if digit == 0:  # of a number without a sign it is 7 at most, so that all of the mass is below 15
        tl.store(totals_ptr + program, tl.sum(tl.where(slots == 15, below, 0.0), axis=0))


@triton.jit(do_not_specialize=["chunks", "beyond"])
def settle_long_rows(
    values_ptr, peaks_ptr, masses_ptr, totals_ptr, thresholds_ptr, sizes_ptr, stride_row, stride_t, length,
    chunks, beyond,
    FROM_LOGITS: tl.constexpr, BLOCK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """sizes[row] = the size of the nucleus of a row, after eight `weigh_chunks`. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    peak = row_peak(peaks_ptr, row, chunks, MOST_CHUNKS)
    threshold = tl.load(thresholds_ptr + row).to(tl.uint32, bitcast=True)
    found, bound = next_digit(masses_ptr, totals_ptr, row, chunks, beyond, MOST_CHUNKS)
    threshold |= found.to(tl.uint32)
    heaviest = tl.full([], 1.0, dtype=tl.float32) if FROM_LOGITS else tl.where(peak > 0, peak, 0.0)
    threshold = tl.minimum(threshold, heaviest.to(tl.uint32, bitcast=True))
    below = tl.zeros([BLOCK], dtype=tl.float32)
    above = tl.zeros([BLOCK], dtype=tl.int32)
    equals = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, length, BLOCK):
        values, inside = load_values(values_ptr + row * stride_row, first, length, stride_t, BLOCK)
        weights = as_weights(values, inside, peak, FROM_LOGITS)
        keys = weights.to(tl.uint32, bitcast=True)
        below += tl.where(keys < threshold, weights, 0.0)
        above += (keys > threshold).to(tl.int32)
        equals += (inside & (keys == threshold)).to(tl.int32)
    needed = equals_needed(threshold, bound, tl.sum(below, axis=0), tl.sum(equals, axis=0))
    tl.store(sizes_ptr + row, tl.minimum(tl.sum(above, axis=0) + needed, length))


@triton.jit(do_not_specialize=["rows", "sharing"])
def rank_short_rows(
    scores_ptr, budgets_ptr, thresholds_ptr, lasts_ptr, stride_row, stride_t, rows, length, sharing,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The top tokens of a row are those above thresholds[row], and the equal ones up to lasts[row]. Grid:
    blocks of rows.
    """
    scores, inside, row = load_rows(scores_ptr, rows, length, stride_row, stride_t, ROWS, BLOCK)
    # The places beyond the end of a row have the key of NaN, and rank below NaN by their position.
    keys = tl.where(inside, ordered(scores), 0)
    budgets = tl.load(budgets_ptr + row // sharing, mask=row < rows, other=0)
    # The highest threshold that enough keys reach, or a threshold above all keys if the budget is 0.
    threshold = tl.zeros([ROWS], dtype=tl.uint32)
    bit = tl.full([], 0x80000000, dtype=tl.uint32)
    for step in range(32):
        candidate = threshold | (bit >> step)
        reaching = tl.sum((keys >= candidate[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(reaching >= budgets, candidate, threshold)
    left = budgets - tl.sum((keys > threshold[:, None]).to(tl.int32), axis=1)
    equal = (keys == threshold[:, None]).to(tl.int32)
    chosen = (equal != 0) & (tl.cumsum(equal, axis=1) <= left[:, None])
    last = tl.max(tl.where(chosen, tl.arange(0, BLOCK)[None, :], -1), axis=1)
    tl.store(thresholds_ptr + row, threshold.to(tl.int32, bitcast=True), mask=row < rows)
    tl.store(lasts_ptr + row, last, mask=row < rows)


@triton.jit(do_not_specialize=["sharing", "chunks", "byte"])
def count_chunks(
    scores_ptr, budgets_ptr, counts_ptr, last_counts_ptr, stride_row, stride_t, length, sharing, chunk,
    chunks, byte,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the histogram of one byte over one chunk of a row to that of the row; each row has its own
    count. Grid: rows * chunks.
    """
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    scores = scores_ptr + row * stride_row
    prefix, _ = find_prefix(counts_ptr, row, tl.load(budgets_ptr + row // sharing), byte)
    end = tl.minimum((part + 1) * chunk, length)
    counts = count_keys(scores, scores, part * chunk, end, prefix, byte, stride_t, 0, False, BLOCK)
    store_counts(counts_ptr, last_counts_ptr, row, program, byte, counts)


@triton.jit(do_not_specialize=["sharing", "chunks"])
def rank_chunks(
    scores_ptr, budgets_ptr, counts_ptr, last_counts_ptr, thresholds_ptr, lasts_ptr,
    stride_row, stride_t, length, sharing, chunk, chunks,
    BLOCK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """thresholds[row] and lasts[row] as `rank_short_rows`: only the chunk where the equals run out is
    read. Grid: rows * chunks.
    """
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    scores = scores_ptr + row * stride_row
    prefix, left = find_prefix(counts_ptr, row, tl.load(budgets_ptr + row // sharing), 4)
    parts = tl.arange(0, MOST_CHUNKS)
    equals_ptr = last_counts_ptr + (row * chunks + parts) * 256 + (prefix & 0xFF).to(tl.int64)
    equals = tl.load(equals_ptr, mask=parts < chunks, other=0)
    seen = tl.sum(tl.where(parts < part, equals, 0), axis=0)
    own = tl.sum(tl.where(parts == part, equals, 0), axis=0)
    if (seen < left) & (left <= seen + own):
        last = tl.full([BLOCK], -1, dtype=tl.int32)
        end = tl.minimum((part + 1) * chunk, length)
        for first in range(part * chunk, end, BLOCK):
            keys, inside = load_ordered(scores, scores, first, end, stride_t, 0, False, BLOCK)
            kept, seen = keep_from(keys, inside, prefix, left, seen)
            positions = (first + tl.arange(0, BLOCK)).to(tl.int32)
            last = tl.maximum(last, tl.where(kept & (keys == prefix) & inside, positions, -1))
        tl.store(thresholds_ptr + row, prefix.to(tl.int32, bitcast=True))
        tl.store(lasts_ptr + row, tl.max(last, axis=0))
    if (left == 0) & (part == 0):  # a row that keeps nothing: no number has this key
        tl.store(thresholds_ptr + row, -1)
        tl.store(lasts_ptr + row, -1)


@triton.jit(do_not_specialize=["rows", "blocks"])
def unite(
    scores_ptr, thresholds_ptr, lasts_ptr, kept_ptr, stride_row, stride_t, length, rows, blocks,
    EXTEND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """kept[mask, t] = whether any of its rows has token t among its top tokens. Grid: masks * blocks of
    tokens.
    """
    program = tl.program_id(0).to(tl.int64)
    mask, block = program // blocks, program % blocks
    first = block * BLOCK
    positions = (first + tl.arange(0, BLOCK)).to(tl.int32)
    target = kept_ptr + mask * length + first + tl.arange(0, BLOCK)
    kept = positions < 0
    if EXTEND:
        kept = tl.load(target, mask=positions < length, other=0) != 0
    for row in range(mask * rows, (mask + 1) * rows):
        scores = scores_ptr + row * stride_row
        keys, _ = load_ordered(scores, scores, first, length, stride_t, 0, False, BLOCK)
        threshold = tl.load(thresholds_ptr + row).to(tl.uint32, bitcast=True)
        kept |= (keys > threshold) | ((keys == threshold) & (positions <= tl.load(lasts_ptr + row)))
    tl.store(target, kept, mask=positions < length)


def _launch(dtype: torch.dtype, head_dim: int, length: int) -> None:
    keys = torch.empty((1, 8, length, head_dim), dtype=dtype, device="meta")
    sampled = torch.empty((1, 8 * 4, 16, head_dim), dtype=dtype, device="meta")
    select(sampled[:, :, 0], keys, sampled, 0.05)
    nucleus(torch.empty((8, length), dtype=dtype, device="meta"), 0.05)


CONFIGURATIONS = configurations(
    _launch,
    *({"head_dim": head_dim, "length": length} for head_dim in HEAD_DIMS for length in (131072, 4096)),
    tensor_cores=["multiply"],
)
