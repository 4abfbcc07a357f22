r"""GVote (arXiv 2509.03136): budgets from the nucleus of the current query, votes of the sampled ones, their union (GV-A1 to A11).

It equals, in torch, for one query head with the current query q and the samples x [S, D]:

    weights, order = (keys.float() @ q.float() / math.sqrt(head_dim)).softmax(dim=0).sort(descending=True, stable=True)
    budget = (weights.flip(0).cumsum(0).flip(0) > 1 - p).sum()
    votes = (x.float() @ keys.float().T).argsort(dim=-1, descending=True, stable=True)[:, :budget]
    kept[votes.flatten()] = True                       # one mask for the query heads of a group

Nothing is sorted here. A row of votes is a threshold: the tokens above it, and of its equals those up to some position. So a
row of T logits is settled by two numbers, and the union asks of each token whether any row of its KV head has it.

The nucleus by thresholds. The float32 weights are not negative, so that they are ordered as their bits. The mass of all weights
below a threshold grows with the threshold; the smallest weight of the nucleus is the largest threshold whose mass below is not
more than 1 - p of the whole, and it is found bit by bit. That holds in rounded arithmetic too: a sum taken in a fixed order over
the same places, some of them 0, cannot fall when one of them becomes positive. So no digit found ever contradicts an earlier one.
Of weights equal to the smallest, as many leave the nucleus as fit into what the mass below has left free. The weights are those of
the softmax before its division, since mass is relative to the row.

Reads and writes. K twice, once for the current queries and once for the samples: 131,072 tokens of 8 heads of 128 bfloat16
channels are 2 * 268 MB, a floor of 125 microseconds at 4.3 TB/s. The logits of the current queries, 4 * G bytes a token and KV
head (17 MB), are written once and read ten times, those of S samples (134 MB for S = 8) written once and read five times: from L2,
if they stay there. S * T logits for each query head are what runs out of memory first in a long prompt. So the samples go in waves
of as many sequences as WORKSPACE holds, or KV heads of one, or samples of one KV head. The first two kinds share nothing: K is
still read twice. Only where one KV head alone is too much is its K read again for each of its waves. The memory taken for samples
is then never more than WORKSPACE or one logit for each token and query head of a group, whatever S is: 32 MiB hold all samples of
the layer above up to 32,768 tokens; at 131,072 tokens a wave is two KV heads, and there are four.

Prediction for one H200 at 131,072 tokens and S = 8, not measured: K takes 125 microseconds and writing the logits 35. The compiled
loops need 70 instructions for a logit and digit in `weigh_chunks` and for a logit's first byte in `count_chunks`: 80 microseconds
for each of the two at four instructions a clock on 132 multiprocessors. The other walks take some 80, the time between 40
dependent launches some 80 more: half a millisecond.

Launches. `multiply` writes logits: it is the product of at most 64 query rows, the queries of a group, with 128 keys, once for each
tile, so that K is read once for all rows of a wave. Rows of up to 8,192 logits are settled in registers, without a second read:
`settle_short_rows` for the budgets, `rank_short_rows` for the votes; a call is then five launches and three for each further wave.
A longer row is cut into at most 64 chunks, by its length alone. `find_peaks` and eight times `weigh_chunks` find a nucleus, four
bits at a time, by the mass below fifteen thresholds in one read, and `settle_long_rows` counts it; `count_chunks`, four times, and
`rank_chunks` find the votes by the histograms of `selection`. `unite` writes or extends the mask. The number of votes of a row
stays on the GPU; nothing waits for the host. Masses of chunks are stored and added in their order, and histograms are whole
numbers: two runs agree in every bit, and so does a sequence in whatever batch it runs.

float32 caches are multiplied in full float32, which tensor cores do not do. NaN ranks below every number and has no mass.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from evictionary.reference.checks import as_fraction

from ..checks import require_same_kind, require_shape, require_states
from ..gvote import require_budgets, require_votes
from .compiling import Configuration
from .launching import as_heads, padded, require_launchable
from .selection import byte_counts, keep_from, load_ordered, narrow, ordered

WORKSPACE = 32 * 2**20  # bytes of the samples' logits that are held at a time
LONGEST_SHORT_ROW = 8192
LEAST_CHUNK = 2048
MOST_CHUNKS = 64


def select(query: torch.Tensor, keys: torch.Tensor, sampled_queries: torch.Tensor, *, p: float = 0.95) -> torch.Tensor:
    r"""GV-A1..3, GV-A9..11: the kept mask, as `optimized.gvote.select`.

    Args: query [B, H_q, D]; keys [B, H_kv, T, D]; sampled_queries [B, H_q, S, D], float32, float16 or bfloat16, any strides, D at
    most 256; p in [0, 1]. Returns kept [B, H_kv, T], boolean, ragged. Raises ValueError naming the argument that does not fit.
    """
    require_votes(query, keys, sampled_queries)
    require_launchable("keys", keys)
    beyond = float(1 - as_fraction("p", p))
    batch, num_kv_heads, length, _ = keys.shape
    group, samples = query.shape[1] // num_kv_heads, sampled_queries.shape[2]
    budgets = _nuclei(_logits(query[:, :, None], keys)[..., :length], beyond, from_logits=True, mask=False)
    budgets = budgets.view(batch, num_kv_heads, group)
    kept = torch.empty(keys.shape[:3], dtype=torch.bool, device=keys.device)
    items, heads, wave = _waves(batch, num_kv_heads, samples, bytes_each=4 * group * length)
    for item, head in itertools.product(range(0, batch, items), range(0, num_kv_heads, heads)):
        own = slice(item, item + items), slice(head, head + heads)
        readers = slice(head * group, (head + heads) * group)
        for first in range(0, samples, wave):
            logits = _logits(sampled_queries[own[0], readers, first : first + wave], keys[own])[..., :length]
            _vote(logits, budgets[own], kept[own], extend=first > 0)
    return kept


def _waves(batch: int, num_kv_heads: int, samples: int, *, bytes_each: int) -> tuple[int, int, int]:
    """Return the sequences, KV heads and samples of a wave: whole sequences, or heads of one sequence, or samples of one head.

    `bytes_each` is what one sample takes for a KV head. Parts of a mask that a wave writes are next to one another this way.
    """
    fitting = WORKSPACE // bytes_each
    heads = fitting // samples
    if heads >= num_kv_heads:
        return min(batch, heads // num_kv_heads), num_kv_heads, samples
    return 1, max(1, heads), samples if heads else max(1, fitting)


def nucleus(attention: torch.Tensor, p: float) -> torch.Tensor:
    r"""GV-A2: the smallest set with mass >= p, as `optimized.gvote.nucleus`.

    Args: attention [..., T], weights of at least 0, float32, float16 or bfloat16, any strides; p in [0, 1]. Returns a mask
    [..., T]. Raises ValueError naming the argument that does not fit, and where the weights are on a CPU for one below 0; on a GPU
    weights below 0 and NaN count as 0.
    """
    require_states("attention", attention, "... T")
    require_launchable("attention", attention, largest=None)
    if attention.device.type == "cpu" and (attention < 0).any():
        raise ValueError(f"attention: got a weight of {float(attention.min())}, wanted weights of at least 0")
    beyond = float(1 - as_fraction("p", p))
    rows = attention.reshape(-1, attention.shape[-1])
    return _nuclei(rows, beyond, from_logits=False, mask=True).view(attention.shape)


def attention_weights(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""GV-1, GV-A1: `softmax(q K^T / sqrt(D))`. Args: query [..., D], keys [..., T, D]. Returns [..., T] float32."""
    require_states("query", query, "... D")
    return sampled_logits(query[..., None, :], keys)[..., 0, :].softmax(dim=-1)


def sampled_logits(sampled_queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""GV-A9: `q_s . k_t / sqrt(D)`.

    Args: sampled_queries [..., S, D] and keys [..., T, D] with the same leading axes, float32, float16 or bfloat16, any strides,
    D at most 256. Returns [..., S, T] float32. Raises ValueError naming the argument that does not fit.
    """
    require_states("sampled_queries", sampled_queries, "... S D")
    require_states("keys", keys, "... T D")
    require_launchable("keys", keys)
    wanted = (*keys.shape[:-2], sampled_queries.shape[-2], keys.shape[-1])
    require_shape("sampled_queries", sampled_queries, wanted, "the heads and channels of keys")
    require_same_kind("sampled_queries", sampled_queries, "keys", keys)
    logits = _logits(as_heads(sampled_queries), as_heads(keys))[..., : keys.shape[-2]]
    return logits.reshape(*sampled_queries.shape[:-1], keys.shape[-2])


def top_each(scores: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    r"""GV-5, GV-A10: every row keeps the number of tokens that is its own, of equal scores the lower positions.

    Args: scores [..., T], float32, float16 or bfloat16, any strides; budgets [...], whole numbers on the same device. Returns kept
    [..., T]. Raises ValueError naming the argument that does not fit, and on a CPU for a negative budget (on a GPU it counts as 0).
    """
    require_budgets(scores, budgets)
    require_launchable("scores", scores, largest=None)
    counts = budgets.clamp(0, scores.shape[-1]).to(torch.int32).reshape(-1)
    kept = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    _vote(scores.reshape(-1, scores.shape[-1]), counts, kept, extend=False)
    return kept


def _logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return `q . k / sqrt(D)` for queries [B, H_q, M, D] as rows [H_q * B * M, T], padded to a multiple of 16 columns."""
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1], keys.shape[2]
    rows = num_query_heads // num_kv_heads * num_queries
    # Rows that start at a multiple of 64 bytes are read and written 16 bytes at a time, whatever T is.
    columns = triton.cdiv(length, 16) * 16
    logits = torch.empty((batch * num_kv_heads * rows, columns), dtype=torch.float32, device=keys.device)
    tile = _tile(keys, rows)
    blocks = triton.cdiv(length, tile["BLOCK_T"])
    multiply[(batch * num_kv_heads * blocks, triton.cdiv(rows, tile["BLOCK_ROWS"]))](
        queries, keys, logits, *queries.stride(), *keys.stride(),
        num_kv_heads, num_queries, rows, length, columns, blocks, head_dim, 1 / math.sqrt(head_dim), **tile,
    )  # fmt: skip
    return logits


def _tile(keys: torch.Tensor, rows: int) -> dict[str, Any]:
    """Return the constants of the tiling of `multiply`."""
    block_d = padded(keys.shape[-1])
    if keys.dtype == torch.float32:
        return {"BLOCK_ROWS": 16, "BLOCK_T": 32, "BLOCK_D": block_d, "DOT_DTYPE": tl.float32, "num_warps": 4}
    # The interpreter cannot multiply bfloat16; float32 holds every bfloat16 exactly.
    bfloat16 = tl.float32 if keys.device.type == "cpu" else tl.bfloat16
    dot_dtype = tl.float16 if keys.dtype == torch.float16 else bfloat16
    block_t = 64 if block_d > 128 else 128
    return {"BLOCK_ROWS": min(64, padded(rows)), "BLOCK_T": block_t, "BLOCK_D": block_d, "DOT_DTYPE": dot_dtype, "num_warps": 4}


def _short(length: int) -> dict[str, int]:
    """Return the constants of the kernels that hold rows in registers: 4,096 numbers to a program, or one row."""
    block = max(64, triton.next_power_of_2(length))
    return {"ROWS": max(1, 4096 // block), "BLOCK": block, "num_warps": max(8, block // 512)}


def _chunks(length: int) -> tuple[int, int]:
    """Return the tokens of a chunk of a long row and the number of chunks: by the length alone."""
    chunk = max(LEAST_CHUNK, triton.next_power_of_2(triton.cdiv(length, MOST_CHUNKS)))
    return chunk, triton.cdiv(length, chunk)


def _nuclei(rows: torch.Tensor, beyond: float, *, from_logits: bool, mask: bool) -> torch.Tensor:
    """Return the nucleus of each row [R, T], as a mask [R, T] or as its size [R] int32. `beyond` is 1 - p."""
    count, length = rows.shape
    sizes = torch.empty(0 if mask else count, dtype=torch.int32, device=rows.device)
    kept = torch.empty((count, length) if mask else (0,), dtype=torch.bool, device=rows.device)
    flags = {"FROM_LOGITS": from_logits, "MASK": mask}
    if length <= LONGEST_SHORT_ROW:
        tile = _short(length)
        settle_short_rows[(triton.cdiv(count, tile["ROWS"]),)](
            rows, sizes, kept, *rows.stride(), count, length, beyond, **flags, **tile
        )
        return kept if mask else sizes
    chunk, chunks = _chunks(length)
    peaks = torch.empty((count, chunks), dtype=torch.float32, device=rows.device)
    # Each digit is worked out from the masses and the threshold that the digit before it left.
    masses = [torch.empty((count, chunks, 16), dtype=torch.float32, device=rows.device) for _ in range(2)]
    thresholds = [torch.empty(count, dtype=torch.int32, device=rows.device) for _ in range(2)]
    grid = (count * chunks,)
    find_peaks[grid](rows, peaks, *rows.stride(), length, chunk, chunks, BLOCK=2048, num_warps=4)
    for digit in range(8):
        now, before = digit % 2, 1 - digit % 2
        weigh_chunks[grid](
            rows, peaks, masses[before], masses[now], thresholds[before], thresholds[now],
            *rows.stride(), length, chunk, chunks, digit, beyond,
            FROM_LOGITS=from_logits, BLOCK=2048, MOST_CHUNKS=MOST_CHUNKS, num_warps=4,
        )  # fmt: skip
    settle_long_rows[(count,)](
        rows, peaks, masses[1], thresholds[1], sizes, kept, *rows.stride(), length, chunks, beyond,
        **flags, BLOCK=4096, MOST_CHUNKS=MOST_CHUNKS, num_warps=8,
    )  # fmt: skip
    return kept if mask else sizes


def _vote(rows: torch.Tensor, budgets: torch.Tensor, kept: torch.Tensor, *, extend: bool) -> None:
    """Write into `kept` [.., T] (or add to it) the union of the top tokens of the rows [R, T] that share a row of it.

    R / len(budgets) rows in turn have the same budget, and R / rows of kept in turn the same row of it.
    """
    count, length = rows.shape
    sharing = count // budgets.numel()
    thresholds = torch.empty(count, dtype=torch.int32, device=rows.device)
    lasts = torch.empty(count, dtype=torch.int32, device=rows.device)
    if length <= LONGEST_SHORT_ROW:
        tile = _short(length)
        rank_short_rows[(triton.cdiv(count, tile["ROWS"]),)](
            rows, budgets, thresholds, lasts, *rows.stride(), count, length, sharing, **tile
        )
    else:
        chunk, chunks = _chunks(length)
        counts = torch.zeros((count, 4, 256), dtype=torch.int32, device=rows.device)
        last_counts = torch.empty((count, chunks, 256), dtype=torch.int32, device=rows.device)
        arguments = (*rows.stride(), length, sharing, chunk, chunks)
        for byte in range(4):
            count_chunks[(count * chunks,)](rows, budgets, counts, last_counts, *arguments, byte, BLOCK=2048, num_warps=4)
        rank_chunks[(count * chunks,)](
            rows, budgets, counts, last_counts, thresholds, lasts, *arguments, BLOCK=2048, MOST_CHUNKS=MOST_CHUNKS, num_warps=4
        )
    masks = kept.numel() // length
    blocks = triton.cdiv(length, 1024)
    unite[(masks * blocks,)](
        rows, thresholds, lasts, kept, *rows.stride(), length, count // masks, blocks, EXTEND=extend, BLOCK=1024, num_warps=4
    )


@triton.jit(do_not_specialize=["num_queries", "rows", "length", "blocks", "scale"])
def multiply(
    queries_ptr, keys_ptr, logits_ptr,
    query_stride_b, query_stride_h, query_stride_m, query_stride_d, key_stride_b, key_stride_h, key_stride_t, key_stride_d,
    num_kv_heads, num_queries, rows, length, columns, blocks, head_dim, scale,
    BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """logits[head, row, t] = q_row . k_t * scale, row g * M + m of a KV head. Grid: heads * blocks of tokens, blocks of rows."""
    program = tl.program_id(0).to(tl.int64)
    head, block = program // blocks, program % blocks
    item, kv_head = head // num_kv_heads, head % num_kv_heads
    channels = tl.arange(0, BLOCK_D)
    row = (tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    query_head = kv_head * (rows // num_queries) + row // num_queries
    query_offsets = item * query_stride_b + query_head * query_stride_h + (row % num_queries) * query_stride_m
    # queries [BLOCK_ROWS, BLOCK_D], keys [BLOCK_T, BLOCK_D]
    queries = tl.load(
        queries_ptr + query_offsets[:, None] + channels.to(tl.int64)[None, :] * query_stride_d,
        mask=(row < rows)[:, None] & (channels < head_dim)[None, :], other=0.0,
    ).to(tl.float32).to(DOT_DTYPE)  # fmt: skip
    key_offsets = item * key_stride_b + kv_head * key_stride_h + token * key_stride_t
    keys = tl.load(
        keys_ptr + key_offsets[:, None] + channels.to(tl.int64)[None, :] * key_stride_d,
        mask=(token < length)[:, None] & (channels < head_dim)[None, :], other=0.0,
    ).to(tl.float32).to(DOT_DTYPE)  # fmt: skip
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    # The columns from `length` on belong to the row too: they are written with it, and not read.
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
        values = tl.exp(values - peak)
    return tl.where(inside & (values > 0), values, 0.0)


@triton.jit
def equals_needed(threshold, bound, below, equals):
    """Return how many of the `equals` weights at the threshold are in the nucleus, with the mass `below` them all.

    From the last one on, they leave as long as the mass that is left out stays within the bound; one is always needed.
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
    values_ptr, sizes_ptr, kept_ptr, stride_row, stride_t, rows, length, beyond,
    FROM_LOGITS: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sizes[row] = the size of the nucleus of a row, or kept[row] = its mask. Grid: blocks of rows."""
    values, inside, row = load_rows(values_ptr, rows, length, stride_row, stride_t, ROWS, BLOCK)
    weights = as_weights(values, inside, tl.max(tl.where(inside, values, float("-inf")), axis=1)[:, None], FROM_LOGITS)
    keys = weights.to(tl.uint32, bitcast=True)
    bound = beyond * tl.sum(weights, axis=1)
    threshold = tl.zeros([ROWS], dtype=tl.uint32)
    bit = tl.full([], 0x40000000, dtype=tl.uint32)
    for step in range(31):
        candidate = threshold | (bit >> step)
        below = tl.sum(tl.where(keys < candidate[:, None], weights, 0.0), axis=1)
        threshold = tl.where(below <= bound, candidate, threshold)
    # With p near 0 all of the mass may stay below the threshold: the heaviest weight is needed even so.
    threshold = tl.minimum(threshold, tl.max(keys, axis=1))
    below = tl.sum(tl.where(keys < threshold[:, None], weights, 0.0), axis=1)
    above = keys > threshold[:, None]
    equal = (inside & (keys == threshold[:, None])).to(tl.int32)
    needed = equals_needed(threshold, bound, below, tl.sum(equal, axis=1))
    if MASK:
        kept = above | ((equal != 0) & (tl.cumsum(equal, axis=1) <= needed[:, None]))
        tl.store(kept_ptr + row[:, None] * length + tl.arange(0, BLOCK)[None, :], kept, mask=inside)
    else:
        sizes = tl.minimum(tl.sum(above.to(tl.int32), axis=1) + needed, length)
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
def next_digit(masses_ptr, prefix, row, chunks, digit, beyond, MOST_CHUNKS: tl.constexpr):
    """Return the threshold with one digit more, from the masses of `weigh_chunks` for it, and the mass that may be left out."""
    slots = tl.arange(0, 16)
    parts = tl.arange(0, MOST_CHUNKS)
    offsets = (row * chunks + parts)[:, None] * 16 + slots[None, :]
    masses = tl.sum(tl.load(masses_ptr + offsets, mask=(parts < chunks)[:, None], other=0.0), axis=0)
    bound = beyond * tl.sum(tl.where(slots == 0, masses, 0.0), axis=0)
    found = tl.sum(((slots > 0) & (masses <= bound)).to(tl.int32), axis=0)
    return prefix | (found.to(tl.uint32) << (28 - 4 * digit)), bound


@triton.jit(do_not_specialize=["chunks", "digit", "beyond"])
def weigh_chunks(
    values_ptr, peaks_ptr, earlier_masses_ptr, masses_ptr, earlier_thresholds_ptr, thresholds_ptr,
    stride_row, stride_t, length, chunk, chunks, digit, beyond,
    FROM_LOGITS: tl.constexpr, BLOCK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """masses[row, chunk, v] = the mass below the threshold whose next digit is v = 1 .. 15; v = 0: all of it. Grid: rows * chunks.

    Digit 0 is the highest. thresholds[row] = the digits that are known, which the programs of a row all work out for themselves.
    """
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    prefix = tl.zeros([], dtype=tl.uint32)
    if digit > 0:
        prefix = tl.load(earlier_thresholds_ptr + row).to(tl.uint32, bitcast=True)
        prefix, _ = next_digit(earlier_masses_ptr, prefix, row, chunks, digit - 1, beyond, MOST_CHUNKS)
    if part == 0:
        tl.store(thresholds_ptr + row, prefix.to(tl.int32, bitcast=True))
    peak = row_peak(peaks_ptr, row, chunks, MOST_CHUNKS)
    slots = tl.arange(0, 16)
    candidates = tl.where(slots == 0, 0xFFFFFFFF, prefix | (slots.to(tl.uint32) << (28 - 4 * digit)))
    masses = tl.zeros([16], dtype=tl.float32)
    end = tl.minimum((part + 1) * chunk, length)
    for first in range(part * chunk, end, BLOCK):
        values, inside = load_values(values_ptr + row * stride_row, first, end, stride_t, BLOCK)
        weights = as_weights(values, inside, peak, FROM_LOGITS)
        below = weights.to(tl.uint32, bitcast=True)[None, :] < candidates[:, None]
        masses += tl.sum(tl.where(below, weights[None, :], 0.0), axis=1)
    tl.store(masses_ptr + program * 16 + slots, masses)


@triton.jit(do_not_specialize=["chunks", "beyond"])
def settle_long_rows(
    values_ptr, peaks_ptr, masses_ptr, thresholds_ptr, sizes_ptr, kept_ptr, stride_row, stride_t, length, chunks, beyond,
    FROM_LOGITS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """sizes[row] = the size of the nucleus of a row, or kept[row] = its mask, after eight `weigh_chunks`. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    base = values_ptr + row * stride_row
    peak = row_peak(peaks_ptr, row, chunks, MOST_CHUNKS)
    threshold = tl.load(thresholds_ptr + row).to(tl.uint32, bitcast=True)
    threshold, bound = next_digit(masses_ptr, threshold, row, chunks, 7, beyond, MOST_CHUNKS)
    heaviest = tl.full([], 1.0, dtype=tl.float32) if FROM_LOGITS else tl.where(peak > 0, peak, 0.0)
    threshold = tl.minimum(threshold, heaviest.to(tl.uint32, bitcast=True))
    below = tl.zeros([BLOCK], dtype=tl.float32)
    above = tl.zeros([BLOCK], dtype=tl.int32)
    equals = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, length, BLOCK):
        values, inside = load_values(base, first, length, stride_t, BLOCK)
        weights = as_weights(values, inside, peak, FROM_LOGITS)
        keys = weights.to(tl.uint32, bitcast=True)
        below += tl.where(keys < threshold, weights, 0.0)
        above += (keys > threshold).to(tl.int32)
        equals += (inside & (keys == threshold)).to(tl.int32)
    needed = equals_needed(threshold, bound, tl.sum(below, axis=0), tl.sum(equals, axis=0))
    if MASK:
        seen = tl.zeros([], dtype=tl.int32)
        for first in range(0, length, BLOCK):
            values, inside = load_values(base, first, length, stride_t, BLOCK)
            keys = as_weights(values, inside, peak, FROM_LOGITS).to(tl.uint32, bitcast=True)
            kept, seen = keep_from(keys, inside, threshold, needed, seen)
            tl.store(kept_ptr + row * length + first + tl.arange(0, BLOCK), kept, mask=inside)
    else:
        tl.store(sizes_ptr + row, tl.minimum(tl.sum(above, axis=0) + needed, length))


@triton.jit(do_not_specialize=["rows", "sharing"])
def rank_short_rows(
    scores_ptr, budgets_ptr, thresholds_ptr, lasts_ptr, stride_row, stride_t, rows, length, sharing,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The top tokens of a row are those above thresholds[row], and its equals up to position lasts[row]. Grid: blocks of rows."""
    scores, inside, row = load_rows(scores_ptr, rows, length, stride_row, stride_t, ROWS, BLOCK)
    # The places beyond the end of a row have the key of NaN, and lose to it by their position.
    keys = tl.where(inside, ordered(scores), 0)
    budgets = tl.load(budgets_ptr + row // sharing, mask=row < rows, other=0)
    # The highest threshold that enough keys reach, or one above all keys where the budget is 0.
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
    scores_ptr, budgets_ptr, counts_ptr, last_counts_ptr, stride_row, stride_t, length, sharing, chunk, chunks, byte,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the histogram of one byte over one chunk of a row to that of the row; each row has its own count. Grid: rows * chunks."""
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    scores = scores_ptr + row * stride_row
    values = tl.arange(0, 256)
    prefix = tl.zeros([], dtype=tl.uint32)
    left = tl.load(budgets_ptr + row // sharing)
    for earlier in range(byte):
        prefix, left = narrow(tl.load(counts_ptr + (row * 4 + earlier) * 256 + values), prefix, left)
    counts = tl.zeros([256], dtype=tl.int32)
    end = tl.minimum((part + 1) * chunk, length)
    for first in range(part * chunk, end, BLOCK):
        keys, inside = load_ordered(scores, scores, first, end, stride_t, 0, False, BLOCK)
        counts += byte_counts(keys, inside, prefix, byte)
    tl.atomic_add(counts_ptr + (row * 4 + byte) * 256 + values, counts, mask=counts > 0)
    if byte == 3:
        tl.store(last_counts_ptr + program * 256 + values, counts)


@triton.jit(do_not_specialize=["sharing", "chunks"])
def rank_chunks(
    scores_ptr, budgets_ptr, counts_ptr, last_counts_ptr, thresholds_ptr, lasts_ptr,
    stride_row, stride_t, length, sharing, chunk, chunks,
    BLOCK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """thresholds[row] and lasts[row] as `rank_short_rows`: only the chunk where the equals run out is read. Grid: rows * chunks."""
    program = tl.program_id(0).to(tl.int64)
    row, part = program // chunks, program % chunks
    scores = scores_ptr + row * stride_row
    values = tl.arange(0, 256)
    prefix = tl.zeros([], dtype=tl.uint32)
    left = tl.load(budgets_ptr + row // sharing)
    for byte in range(4):
        prefix, left = narrow(tl.load(counts_ptr + (row * 4 + byte) * 256 + values), prefix, left)
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
    """kept[mask, t] = whether any of its rows has token t among its top tokens. Grid: masks * blocks of tokens."""
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


def _compiled(dtype: torch.dtype, head_dim: int, length: int, group: int = 4) -> Configuration:
    def launch() -> None:
        keys = torch.empty((1, 8, length, head_dim), dtype=dtype, device="meta")
        sampled = torch.empty((1, 8 * group, 16, head_dim), dtype=dtype, device="meta")
        select(sampled[:, :, 0], keys, sampled)
        nucleus(torch.empty((8, length), dtype=dtype, device="meta"), 0.95)

    return Configuration(
        f"{dtype} head_dim {head_dim} {length} tokens".removeprefix("torch."),
        launch,
        tensor_cores=frozenset() if dtype == torch.float32 else frozenset({"multiply"}),
    )


CONFIGURATIONS = [
    _compiled(dtype, head_dim, length)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for head_dim in (128, 64, 80, 96, 256)
    for length in (131072, 4096)
]
