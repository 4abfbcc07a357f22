r"""GVote (arXiv 2509.03136): budgets from the nucleus of the current query, votes of the sampled ones,
their union (GV-A1 to A11).

It equals, in torch, for one query head with the current query q and the samples x [S, D]:

    weights, order = (keys.float() @ q.float() / math.sqrt(head_dim)).softmax(dim=0).sort(descending=True,
    stable=True)
    budget = (weights.flip(0).cumsum(0).flip(0) > 1 - p).sum()
    votes = (x.float() @ keys.float().T).argsort(dim=-1, descending=True, stable=True)[:, :budget]
    kept[votes.flatten()] = True                       # one mask for the query heads of a group

The kernels sort nothing: a threshold separates the nucleus, and another one the votes.

The nucleus by thresholds. The float32 weights are not negative, so that they are ordered as their bits. The
mass of all weights below a threshold grows with the threshold; the smallest weight of the nucleus is the
largest threshold whose mass below is not more than 1 - p of the whole, and it is found four bits at a time,
by the mass below fifteen thresholds in one read. This is true in rounded arithmetic too: a sum taken in a
fixed order over the same places, some of them 0, cannot fall when one of them becomes positive. So no digit
found ever contradicts an earlier one. Weights equal to the smallest leave the nucleus as long as the mass
outside stays within 1 - p. The weights are those of the softmax before its division, since mass is relative
to the row. NaN ranks below every number and has no mass.

Waves. In a long prompt, the S * T logits of each query head take the most memory. So the
samples are processed in waves of as many sequences as WORKSPACE holds, or KV heads of
one sequence, or samples of one KV head; only the last kind reads K again for each wave.
The logits never take more memory than WORKSPACE, or one logit for each token and query
head of a group. WORKSPACE holds 128 rows of 131,072 logits, as many as fill a GPU.

Launches. `multiply` writes logits: the product of at most 64 query rows, the queries of a group, with 128
keys. `count_nuclei` walks a row once for its largest logit, eight times for the digits, where most tiles have
no weight with the digits found so far and are passed over, and once for the size. `selection` finds the votes
of a row, each with its own count. The union is torch's `any`. Nothing waits for the host. A nucleus is one
program and the votes add integers, so two runs agree in every bit, and so does a sequence in whatever batch
it runs. float32 caches are multiplied in full float32, without tensor cores.
"""

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, launch, launcher, padded, warps
from .selection import keep_each
from .strided import strided
from .tiles import dot_dtype, head_of, load_queries, load_tile

WORKSPACE = 64 * 2**20  # bytes for the samples' logits at a time


@launcher
def select(
    query: torch.Tensor, keys: torch.Tensor, sampled_queries: torch.Tensor, beyond: float
) -> torch.Tensor:
    r"""GV-A1..3, GV-A9..11: the kept mask, as `optimized.gvote.select`; `beyond` is 1 - p."""
    batch, num_kv_heads, length, _ = keys.shape
    group, samples = query.shape[1] // num_kv_heads, sampled_queries.shape[2]
    budgets = _nuclei(_logits(query[:, :, None], keys), beyond, from_logits=True)
    budgets = budgets.view(batch, num_kv_heads, group)
    kept = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
    items, heads, wave = _waves(batch, num_kv_heads, samples, bytes_each=4 * group * length)
    for item, head in itertools.product(range(0, batch, items), range(0, num_kv_heads, heads)):
        own = slice(item, item + items), slice(head, head + heads)
        readers = slice(head * group, (head + heads) * group)
        for first in range(0, samples, wave):
            logits = _logits(sampled_queries[own[0], readers, first : first + wave], keys[own])
            votes = keep_each(logits, budgets[own])
            kept[own] |= votes.view(*kept[own].shape[:2], -1, length).any(dim=2)
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


@launcher
def nucleus(attention: torch.Tensor, beyond: float) -> torch.Tensor:
    r"""GV-A2: the smallest set with mass >= p, as `optimized.gvote.nucleus`; `beyond` is 1 - p. Weights
    below 0 count as 0.
    """
    rows = attention.reshape(-1, attention.shape[-1])
    return keep_each(rows, _nuclei(rows.float(), beyond, from_logits=False)).view(attention.shape)


@launcher
def top_each(scores: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    r"""GV-5, GV-A10: every row keeps its own number of tokens, as `optimized.gvote.top_each`."""
    length = scores.shape[-1]
    return keep_each(scores.reshape(-1, length), budgets.clamp(0, length).to(torch.int32)).view(scores.shape)


def _logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """GV-1, GV-A9: `q . k / sqrt(D)` for queries [B, H_q, M, D] as rows [B * H_q * M, T] of the heads,
    then of their queries.
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1], keys.shape[2]
    rows = num_query_heads // num_kv_heads * num_queries
    # Rows that start at a multiple of 64 bytes are read and written 16 bytes at a time, for any T.
    columns = cdiv(length, 16) * 16
    logits = floats(keys, batch * num_kv_heads * rows, columns)
    tile = _tile(keys, rows)
    blocks = cdiv(length, tile["BLOCK_T"])
    launch(multiply, (batch * num_kv_heads * blocks, cdiv(rows, tile["BLOCK_ROWS"])))(
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


def _nuclei(rows: torch.Tensor, beyond: float, *, from_logits: bool) -> torch.Tensor:
    """Return the size of the nucleus of each row [R, T], [R] int32. `beyond` is 1 - p."""
    sizes = torch.empty(rows.shape[0], dtype=torch.int32, device=rows.device)
    block = min(2048, padded(rows.shape[1], 256))
    launch(count_nuclei, (rows.shape[0],))(
        rows,
        sizes,
        *rows.stride(),
        rows.shape[1],
        beyond,
        FROM_LOGITS=from_logits,
        BLOCK=block,
        num_warps=warps(rows, block // 4),
    )
    return sizes


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
def load_values(row, first, length, stride_t, BLOCK: tl.constexpr):
    """Load the numbers at first .. first+BLOCK-1 of a row as float32, and which of them there are."""
    positions = (first + tl.arange(0, BLOCK)).to(tl.int64)
    inside = positions < length
    return tl.load(row + positions * stride_t, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def load_weights(row, first, length, stride_t, peak, FROM_LOGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Load weights of at least 0: the numbers, or exp(number
    - peak); 0 for NaN and outside. And which there are.
    """
    values, inside = load_values(row, first, length, stride_t, BLOCK)
    if FROM_LOGITS:
        # of what is outside the exponential could overflow
        values = tl.exp(tl.where(inside, values - peak, 0.0))
    return tl.where(inside & (values > 0), values, 0.0), inside


@triton.jit
def equals_needed(threshold, bound, below, equals):
    """Return how many of the `equals` weights at the threshold
    are in the nucleus, with the mass `below` the threshold.

    Starting at the last, they leave as long as the mass outside
    stays within the bound; one weight is always needed.
    """
    weight = threshold.to(tl.float32, bitcast=True)
    fitting = tl.floor(tl.div_rn(bound - below, tl.where(weight > 0, weight, 1.0)))
    # Rows without mass keep their first token. The comparison is false for NaN, which is no whole number.
    leaving = tl.where(fitting >= 0, tl.minimum(fitting, 2.0e9), 0.0).to(tl.int32)
    leaving = tl.where(threshold == 0, equals - 1, tl.minimum(leaving, equals - 1))
    return tl.maximum(equals - leaving, 1)


@triton.jit(do_not_specialize=["beyond"])
def count_nuclei(
    values_ptr, sizes_ptr, stride_row, stride_t, length, beyond, FROM_LOGITS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """sizes[row] = the size of the nucleus of a row. Grid: rows."""
    program = tl.program_id(0).to(tl.int64)
    row = values_ptr + program * stride_row
    peaks = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in range(0, length, BLOCK):
        values, inside = load_values(row, first, length, stride_t, BLOCK)
        peaks = tl.maximum(peaks, tl.where(inside, values, float("-inf")))
    peak = tl.max(peaks, axis=0)
    threshold = tl.zeros([], dtype=tl.uint32)
    below = tl.zeros([], dtype=tl.float32)
    bound = tl.zeros([], dtype=tl.float32)
    digits = tl.arange(0, 16)
    for place in range(28, -4, -4):
        masses = tl.zeros([16, BLOCK], dtype=tl.float32)
        for first in range(0, length, BLOCK):
            weights, _ = load_weights(row, first, length, stride_t, peak, FROM_LOGITS, BLOCK)
            # The next digit of a weight whose digits so far are the known ones. Another is 16 or more, above
            # or in `below` already.
            digit = (weights.to(tl.uint32, bitcast=True) ^ threshold) >> place
            if tl.min(digit, axis=0) < 15:
                masses += tl.where(digit[None, :] < digits.to(tl.uint32)[:, None], weights[None, :], 0.0)
        # [16], the mass below the threshold whose next digit is 0 .. 15
        sums = below + tl.sum(masses, axis=1)
        # The first digit of a number without a sign is 7 at most, so that all of the mass is below 15.
        bound = tl.where(place == 28, beyond * tl.sum(tl.where(digits == 15, sums, 0.0), axis=0), bound)
        found = tl.sum(((digits > 0) & (sums <= bound)).to(tl.int32), axis=0)
        below = tl.sum(tl.where(digits == found, sums, 0.0), axis=0)
        threshold |= found.to(tl.uint32) << place
    # With p near 0 all of the mass may be below the threshold; the largest weight is still needed.
    heaviest = tl.full([], 1.0, dtype=tl.float32) if FROM_LOGITS else tl.where(peak > 0, peak, 0.0)
    threshold = tl.minimum(threshold, heaviest.to(tl.uint32, bitcast=True))
    lighter = tl.zeros([BLOCK], dtype=tl.float32)
    above = tl.zeros([BLOCK], dtype=tl.int32)
    equals = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, length, BLOCK):
        weights, inside = load_weights(row, first, length, stride_t, peak, FROM_LOGITS, BLOCK)
        bits = weights.to(tl.uint32, bitcast=True)
        lighter += tl.where(bits < threshold, weights, 0.0)
        above += (bits > threshold).to(tl.int32)
        equals += (inside & (bits == threshold)).to(tl.int32)
    needed = equals_needed(threshold, bound, tl.sum(lighter, axis=0), tl.sum(equals, axis=0))
    tl.store(sizes_ptr + program, tl.minimum(tl.sum(above, axis=0) + needed, length))


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
