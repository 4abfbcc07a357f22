r"""Expected Attention (arXiv 2510.00636): statistics of queries in two launches, scores in three (EA-5, EA-7 to EA-9).

The scores equal, in torch, for one KV head and the query heads g of its group:

    logits = keys @ mean[g] / math.sqrt(d) + ((keys @ covariance[g]) * keys).sum(dim=-1) / (2 * d)
    score = (mean over g of logits.softmax(dim=0) + epsilon) * values.norm(dim=-1)

K and V are read from memory once, for any group size; T * H_q float32 logits are written and read again.

First launch, `split_covariances`: tensor cores multiply keys in their own dtype, in which a covariance has 8 bits (bfloat16) or
11. Keys are exact, so only Sigma has to be split: high + low, each in the dtype of the keys, is Sigma to 16 bits or more, for
twice the multiplications. Sigma is first scaled by a power of two that brings its largest element to [2^13, 2^14): float16 has
no numbers above 65,504, and fewer bits below 2^-14. float32 keys are multiplied in full float32, which needs no second part.
Second launch, `expected_logits`: one program takes one tile of tokens of one KV head. It walks the covariances of the group in
slices of columns: K_tile @ Sigma_slice on tensor cores, plus the mean, times the same columns of the tile, summed along the row.
The logits of the group are stored together, with the maximum and the sum of exponentials of the tile; the norms of the values go
to the memory of the scores. 128 tokens and 64 columns leave 32 accumulators to each of 256 threads; Sigma in one slice would need
the whole tile of K in registers, and leave no room for a second program. Rows of more than 128 channels take half of both.
Third launch, `weigh_values`: one program takes a run of tokens, adds up the maxima and sums of its KV head in the order of the
tiles, and turns logits and norms to scores.

The statistics equal, in torch, `queries.mean(dim=-2)` and `torch.cov(queries.mT, correction=0)` of one head. First launch,
`sum_products`: one program adds up q - s and the products (q - s)(q - s)^T of one split of one head. The channels are taken as
the two halves a and b that RoPE rotates into each other; b a^T is the transpose of a b^T, so three of four products are computed.
Halves of 128 channels would take 192 accumulators a thread, so there each product has a program of its own. The shift s, the mean
of a few queries spread over the sequence, is close to mu, so a large mu causes no cancellation: Sigma is
sum / N - (mu - s)(mu - s)^T. For the tensor cores q - s is rounded to the dtype of the queries, which adds 2^-9 / sqrt(N) of
Sigma, far less than the statistical error sqrt(2 / N) of N queries.
Second launch, `finish_statistics`: the splits are added in their order. Their number follows from the number of heads, so the
last bits may differ between batches, and are the same in every run.

`unrotated_statistics` takes queries after RoPE, as attention uses them, and undoes the rotation in registers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..rope import frequencies
from .compiling import HEAD_DIMS, configurations
from .launching import as_heads, floats, is_amd, padded
from .tiles import at_head, dot_dtype, load_tile

# Parts of Sigma for half-precision keys: 2, or 1 for half the time and Sigma rounded to the dtype of the keys.
TERMS = 2
TOKENS_OF_A_RUN = 512
PROGRAMS_WANTED = 512
LEAST_TOKENS_OF_A_SPLIT = 512


def query_statistics(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-5, EA-L1: mean and covariance of queries before RoPE, as `optimized.expected_attention.query_statistics`."""
    return _statistics(queries, None, None)


def unrotated_statistics(queries: torch.Tensor, positions: torch.Tensor, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-5 of queries after RoPE, as `optimized.expected_attention.unrotated_statistics`.

    An angle is the product of a position with a frequency, kept as a 32-bit fraction of a turn: whole turns
    overflow away, and the error at position 1,000,000 is below 0.001 radians.
    """
    turns = frequencies(queries.shape[-1], theta, device=queries.device) / (2 * math.pi)
    # The low 32 bits, as a signed number: a whole turn is 2^32, and wraps to 0.
    fractions = (torch.remainder(turns, 1) * 2**32).round().to(torch.int64).to(torch.int32)
    return _statistics(queries, positions.expand(queries.shape[:-1]), fractions)


def _statistics(
    queries: torch.Tensor, positions: torch.Tensor | None, fractions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `sum_products` and `finish_statistics`; with positions and fractions, the rotation of the queries is undone first."""
    heads = as_heads(queries)
    batch, num_heads, length, head_dim = heads.shape
    count, half, odd = batch * num_heads, (head_dim + 1) // 2, head_dim % 2
    block_h = padded(half)
    each = block_h > 64
    # 16 bytes for each thread, from either half of the channels. Without tensor cores a product takes more registers.
    threads = 512 if queries.dtype == torch.float32 and not each else 256
    block_t = max(16, threads * 16 // queries.element_size() // block_h)
    wanted = PROGRAMS_WANTED // (2 if each else 1)
    split = max(LEAST_TOKENS_OF_A_SPLIT, triton.cdiv(length, max(1, wanted // count)))
    split = triton.cdiv(split, block_t) * block_t
    splits = triton.cdiv(length, split)
    shifts, sums = floats(queries, count, 2 * half), floats(queries, count * splits, 2 * half)
    products = floats(queries, count * splits, 3, half, half)
    mean, covariance = floats(queries, count, head_dim), floats(queries, count, head_dim, head_dim)
    places = None if positions is None else as_heads(positions[..., None])[..., 0]
    sum_products[(count * splits, 3 if each else 1)](
        heads, places, fractions, shifts, sums, products, *heads.stride(), *((0, 0, 0) if places is None else places.stride()),
        num_heads, length, head_dim, split, splits,
        BLOCK_T=block_t, BLOCK_H=block_h, EACH=each, DOT_DTYPE=dot_dtype(queries), ROTATED=places is not None, ODD=odd,
        num_warps=_warps(queries, threads), num_stages=2,
    )  # fmt: skip
    finish_statistics[(count, 3, triton.cdiv(half, 16))](
        shifts, sums, products, mean, covariance, length, head_dim, splits,
        BLOCK_R=16, BLOCK_H=block_h, ODD=odd, num_warps=_warps(queries, 128),
    )  # fmt: skip
    return mean.reshape(*queries.shape[:-2], head_dim), covariance.reshape(*queries.shape[:-2], head_dim, head_dim)


def _warps(states: torch.Tensor, threads: int) -> int:
    """Return the number of warps of a program with `threads` threads."""
    return threads // (64 if is_amd(states) else 32)


def score(
    keys: torch.Tensor, values: torch.Tensor, query_mean: torch.Tensor, query_covariance: torch.Tensor, epsilon: float
) -> torch.Tensor:
    r"""EA-7..9: `(mean over the group of ahat_i + epsilon) |v_i|`, as `optimized.expected_attention.score`."""
    means, covariances = query_mean.float(), query_covariance.float()
    batch, num_kv_heads, length, head_dim = keys.shape
    num_query_heads = means.shape[1]
    heads, readers, group = batch * num_kv_heads, batch * num_query_heads, num_query_heads // num_kv_heads
    terms = 1 if keys.dtype == torch.float32 else TERMS
    tile = _tile(keys, values)
    block_group = padded(group, 1)
    tiles, runs = triton.cdiv(length, tile["BLOCK_T"]), triton.cdiv(length, TOKENS_OF_A_RUN)
    parts = keys.new_empty(terms, readers, head_dim, head_dim)
    factors, logits = floats(keys, readers), floats(keys, readers, tiles, tile["BLOCK_T"])
    highest, mass = floats(keys, readers, tiles), floats(keys, readers, tiles)
    scores = floats(keys, batch, num_kv_heads, length)
    split_covariances[(readers,)](
        covariances, parts, factors, *covariances.stride(), parts.stride(0), num_query_heads, head_dim,
        BLOCK_R=16, BLOCK_D=tile["BLOCK_D"], TERMS=terms, num_warps=_warps(keys, 256),
    )  # fmt: skip
    expected_logits[(heads * tiles,)](
        keys, values, means, parts, factors, logits, highest, mass, scores,
        *keys.stride(), *values.stride(), *means.stride(), parts.stride(0),
        num_kv_heads, group, length, tiles, head_dim, values.shape[-1], 1 / math.sqrt(head_dim),
        GROUP=block_group, TERMS=terms, RESCALE=values.dtype != torch.float16, **tile,
    )  # fmt: skip
    weigh_values[(heads * runs,)](
        logits, highest, mass, scores, group, length, tiles, runs, float(epsilon),
        GROUP=block_group, TILE=tile["BLOCK_T"], BLOCK_T=TOKENS_OF_A_RUN, num_warps=_warps(keys, 128),
    )  # fmt: skip
    return scores


def _tile(keys: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
    """Return the constants of `expected_logits`."""
    block_d, block_dv = padded(keys.shape[-1]), padded(values.shape[-1])
    wide = block_d > 128
    if keys.dtype == torch.float32:
        # Without tensor cores each product takes registers of its own: slices of 32 columns would spill a few.
        tile = {"BLOCK_T": 32, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1}
    else:
        tile = {"BLOCK_T": 64 if wide else 128, "BLOCK_N": 32 if wide else 64, "num_warps": 4 if wide else 8, "num_stages": 2}
    tile["BLOCK_N"] = min(tile["BLOCK_N"], block_d)
    return tile | {"BLOCK_D": block_d, "BLOCK_DV": block_dv, "DOT_DTYPE": dot_dtype(keys)}


@triton.jit
def power_of_two(largest, above: tl.constexpr):
    """Return 2^e with `largest` * 2^e in [2^above, 2^(above+1)), and 2^-e, by the exponent's bits. Any number for 0 and NaN."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    up = tl.minimum(tl.maximum(254 + above - exponent, 1), 253)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split_covariances(
    covariances_ptr, parts_ptr, factors_ptr, stride_b, stride_h, stride_r, stride_c, stride_part, num_query_heads, head_dim,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """parts[0] + parts[1] = Sigma * 2^e, and factors = 2^-e / (2 d). Grid: query heads of all sequences."""
    reader = tl.program_id(0).to(tl.int64)
    base = at_head(covariances_ptr, reader, num_query_heads, stride_b, stride_h)
    columns = tl.arange(0, BLOCK_D)
    largest = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for first in range(0, head_dim, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        largest = tl.maximum(largest, tl.abs(load_tile(base, rows, columns, rows < head_dim, stride_r, stride_c, head_dim)))
    scale, inverse = power_of_two(tl.max(tl.max(largest, axis=1), axis=0), 13)
    tl.store(factors_ptr + reader, inverse / (2 * head_dim))
    target = parts_ptr + reader * head_dim * head_dim
    for first in range(0, head_dim, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        covariance = load_tile(base, rows, columns, rows < head_dim, stride_r, stride_c, head_dim) * scale
        inside = (rows < head_dim)[:, None] & (columns < head_dim)[None, :]
        offsets = rows[:, None] * head_dim + columns[None, :]
        high = covariance.to(parts_ptr.dtype.element_ty)
        tl.store(target + offsets, high, mask=inside)
        if TERMS == 2:
            low = (covariance - high.to(tl.float32)).to(parts_ptr.dtype.element_ty)
            tl.store(target + stride_part + offsets, low, mask=inside)


@triton.jit(do_not_specialize=["length", "tiles", "root"])
def expected_logits(
    keys_ptr, values_ptr, means_ptr, parts_ptr, factors_ptr, logits_ptr, highest_ptr, mass_ptr, norms_ptr,
    key_stride_b, key_stride_h, key_stride_t, key_stride_d, value_stride_b, value_stride_h, value_stride_t, value_stride_d,
    mean_stride_b, mean_stride_h, mean_stride_d, stride_part,
    num_kv_heads, group, length, tiles, head_dim, value_dim, root,
    GROUP: tl.constexpr, TERMS: tl.constexpr, RESCALE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """EA-7 of one tile of one KV head for every query head of its group, and the norms of its values. Grid: heads * tiles."""
    program = tl.program_id(0).to(tl.int64)
    head, tile = program // tiles, program % tiles
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < length
    channels = tl.arange(0, BLOCK_D)
    rows = at_head(keys_ptr, head, num_kv_heads, key_stride_b, key_stride_h)
    # keys [BLOCK_T, BLOCK_D]: one factor of every product
    keys = load_tile(rows, tokens, channels, inside, key_stride_t, key_stride_d, head_dim).to(DOT_DTYPE)
    members = tl.arange(0, GROUP)
    logits = tl.zeros([GROUP, BLOCK_T], dtype=tl.float32)
    for step in range(0, group * (BLOCK_D // BLOCK_N)):
        member = step // (BLOCK_D // BLOCK_N)
        reader = head * group + member
        columns = (step % (BLOCK_D // BLOCK_N)) * BLOCK_N + tl.arange(0, BLOCK_N)
        # sigma [BLOCK_D, BLOCK_N]: a slice of the scaled covariance
        sigma_ptr = parts_ptr + reader * (head_dim * head_dim) + (channels[:, None] * head_dim + columns[None, :])
        sigma_inside = (channels < head_dim)[:, None] & (columns < head_dim)[None, :]
        sigma = tl.load(sigma_ptr, mask=sigma_inside, other=0.0).to(tl.float32).to(DOT_DTYPE)
        # part [BLOCK_T, BLOCK_N]: the same columns of the keys, from the caches
        part = load_tile(rows, tokens, columns, inside, key_stride_t, key_stride_d, head_dim)
        mean_ptr = at_head(means_ptr, reader, num_kv_heads * group, mean_stride_b, mean_stride_h)
        mean = tl.load(mean_ptr + columns.to(tl.int64) * mean_stride_d, mask=columns < head_dim, other=0.0)
        product = tl.dot(keys, sigma, input_precision="ieee")
        if TERMS == 2:
            sigma = tl.load(sigma_ptr + stride_part, mask=sigma_inside, other=0.0).to(tl.float32).to(DOT_DTYPE)
            product = tl.dot(keys, sigma, acc=product, input_precision="ieee")
        logit = tl.sum(part * (product * tl.load(factors_ptr + reader) + (mean * root)[None, :]), axis=1)
        logits += tl.where((members == member)[:, None], logit[None, :], 0.0)
    # Every tile has a token, so no maximum is -inf.
    logits = tl.where(inside[None, :], logits, float("-inf"))
    highest = tl.max(logits, axis=1)
    mass = tl.sum(tl.exp(logits - highest[:, None]), axis=1)
    present = members < group
    reader = head * group + members
    tl.store(logits_ptr + reader[:, None] * (tiles * BLOCK_T) + tokens[None, :], logits, mask=present[:, None])
    tl.store(highest_ptr + reader * tiles + tile, highest, mask=present)
    tl.store(mass_ptr + reader * tiles + tile, mass, mask=present)
    # values [BLOCK_T, BLOCK_DV]: their norms
    base = at_head(values_ptr, head, num_kv_heads, value_stride_b, value_stride_h)
    values = load_tile(base, tokens, tl.arange(0, BLOCK_DV), inside, value_stride_t, value_stride_d, value_dim)
    if RESCALE:  # squares of values around 1e30 or 1e-30 would overflow or vanish in float32
        scale, inverse = power_of_two(tl.max(tl.abs(values), axis=1), 0)
        values = values * scale[:, None]
        norms = tl.sqrt_rn(tl.sum(values * values, axis=1)) * inverse
    else:
        norms = tl.sqrt_rn(tl.sum(values * values, axis=1))
    tl.store(norms_ptr + head * length + tokens, norms, mask=inside)


@triton.jit(do_not_specialize=["length", "tiles", "runs", "epsilon"])
def weigh_values(
    logits_ptr, highest_ptr, mass_ptr, scores_ptr, group, length, tiles, runs, epsilon,
    GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """EA-8, EA-9: scores = (mean over the group of exp(logit - maximum) / sum + epsilon) * norm. Grid: heads * runs."""
    program = tl.program_id(0).to(tl.int64)
    head, run = program // runs, program % runs
    members = tl.arange(0, GROUP)
    # Rows beyond the group repeat its last row, and do not count.
    reader = head * group + tl.minimum(members, group - 1)
    highest = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([GROUP], dtype=tl.float32)
    for first in range(0, tiles, 64):
        tile = first + tl.arange(0, 64)
        offsets = reader[:, None] * tiles + tile[None, :]
        peaks = tl.load(highest_ptr + offsets, mask=(tile < tiles)[None, :], other=float("-inf"))
        sums = tl.load(mass_ptr + offsets, mask=(tile < tiles)[None, :], other=0.0)
        higher = tl.maximum(highest, tl.max(peaks, axis=1))
        mass = mass * tl.exp(highest - higher) + tl.sum(sums * tl.exp(peaks - higher[:, None]), axis=1)
        highest = higher
    tokens = run * BLOCK_T + tl.arange(0, BLOCK_T)
    stored = tiles * TILE  # a row of logits ends with its last tile, so that all rows are aligned
    logits = tl.load(logits_ptr + reader[:, None] * stored + tokens[None, :], mask=(tokens < stored)[None, :], other=float("-inf"))
    weights = tl.div_rn(tl.exp(logits - highest[:, None]), tl.broadcast_to(mass[:, None], [GROUP, BLOCK_T]))
    weights = tl.sum(tl.where((members < group)[:, None], weights, 0.0), axis=0)
    inside = tokens < length
    target = scores_ptr + head * length + tokens
    norms = tl.load(target, mask=inside, other=0.0)
    tl.store(target, (tl.div_rn(weights, tl.zeros([BLOCK_T], tl.float32) + group) + epsilon) * norms, mask=inside)


@triton.jit
def cos_and_sin(fraction):
    """Return cos and sin of `fraction` / 2^32 turns, to 1e-7, by the series about the nearest quarter of a turn.

    The library's functions take any angle, and keep a table in memory for the large ones.
    """
    quarter = (fraction + (1 << 29)) >> 30
    angle = (fraction - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32, at most pi / 4 away
    square = angle * angle
    cos = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320))))
    sin = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880)))))
    # A quarter turn takes (cos, sin) to (-sin, cos), a half turn takes both to their negatives.
    odd = (quarter & 1) == 1
    sign = (1 - (quarter & 2)).to(tl.float32)
    return sign * tl.where(odd, -sin, cos), sign * tl.where(odd, cos, sin)


@triton.jit
def load_pairs(
    base, positions_ptr, fractions_ptr, position_stride_n, stride_n, stride_d, tokens, end, head_dim,
    BLOCK_H: tl.constexpr, ROTATED: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """Load queries as their channels 0 .. D/2-1 and D/2 .. D-1, before RoPE, 0 from `end` on: float32 [tokens, BLOCK_H] twice."""
    half = (head_dim + ODD) // 2
    pairs = tl.arange(0, BLOCK_H)
    first = load_tile(base, tokens, pairs, tokens < end, stride_n, stride_d, half)
    second = load_tile(base, tokens, half + pairs, tokens < end, stride_n, stride_d, head_dim)
    if ROTATED:
        # A product of 32-bit integers drops the whole turns; read as signed, it lies within half a turn.
        position = tl.load(positions_ptr + tokens * position_stride_n, mask=tokens < end, other=0).to(tl.int32)
        fraction = tl.load(fractions_ptr + pairs, mask=pairs < half, other=0)
        cos, sin = cos_and_sin(position[:, None] * fraction[None, :])
        first, second = first * cos + second * sin, second * cos - first * sin
    return first, second


@triton.jit(do_not_specialize=["length", "split", "splits"])
def sum_products(
    queries_ptr, positions_ptr, fractions_ptr, shifts_ptr, sums_ptr, products_ptr,
    stride_b, stride_h, stride_n, stride_d, position_stride_b, position_stride_h, position_stride_n,
    num_heads, length, head_dim, split, splits,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, EACH: tl.constexpr, DOT_DTYPE: tl.constexpr,
    ROTATED: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """Sums of q - s and of (q - s)(q - s)^T over one split of one head. Grid: heads * splits, products.

    With the channels in two halves a and b, the products are a a^T, a b^T and b b^T; b a^T is the transpose of the second. EACH: a
    program takes one of them.
    """
    program = tl.program_id(0).to(tl.int64)
    head, part = program // splits, program % splits
    base = at_head(queries_ptr, head, num_heads, stride_b, stride_h)
    if ROTATED:
        positions_ptr = at_head(positions_ptr, head, num_heads, position_stride_b, position_stride_h)
    # The shift: the mean of queries at even distances, the same for all programs of a head.
    sample = tl.arange(0, BLOCK_T).to(tl.int64) * length // BLOCK_T
    first, second = load_pairs(
        base, positions_ptr, fractions_ptr, position_stride_n, stride_n, stride_d, sample, length, head_dim, BLOCK_H, ROTATED, ODD
    )
    first_shift, second_shift = tl.sum(first, axis=0) / BLOCK_T, tl.sum(second, axis=0) / BLOCK_T
    end = tl.minimum((part + 1) * split, length)
    first_sum = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    second_sum = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    aa = tl.zeros([BLOCK_H, BLOCK_H], dtype=tl.float32)
    ab = tl.zeros([BLOCK_H, BLOCK_H], dtype=tl.float32)
    bb = tl.zeros([BLOCK_H, BLOCK_H], dtype=tl.float32)
    which = tl.program_id(1)
    for start in range(part * split, end, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        inside = (tokens < end)[:, None]
        first, second = load_pairs(
            base, positions_ptr, fractions_ptr, position_stride_n, stride_n, stride_d, tokens, end, head_dim, BLOCK_H, ROTATED, ODD
        )
        first = tl.where(inside, first - first_shift[None, :], 0.0)
        second = tl.where(inside, second - second_shift[None, :], 0.0)
        first_sum += first
        second_sum += second
        # Halved, since a difference of two float16 numbers may be twice the largest float16.
        a, b = (first * 0.5).to(DOT_DTYPE), (second * 0.5).to(DOT_DTYPE)
        if EACH:
            left, right = tl.where(which == 2, b, a), tl.where(which == 0, a, b)
            aa = tl.dot(tl.trans(left), right, acc=aa, input_precision="ieee")
        else:
            aa = tl.dot(tl.trans(a), a, acc=aa, input_precision="ieee")
            ab = tl.dot(tl.trans(a), b, acc=ab, input_precision="ieee")
            bb = tl.dot(tl.trans(b), b, acc=bb, input_precision="ieee")
    half = (head_dim + ODD) // 2
    square = half * half
    rows, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_H)
    inside = (rows < half)[:, None] & (columns < half)[None, :]
    target = products_ptr + program * (3 * square) + rows[:, None] * half + columns[None, :]
    if EACH:
        tl.store(target + which * square, aa * 4, mask=inside)
    else:
        tl.store(target, aa * 4, mask=inside)
        tl.store(target + square, ab * 4, mask=inside)
        tl.store(target + 2 * square, bb * 4, mask=inside)
    if which == 0:
        sums_ptr += program * 2 * half
        tl.store(sums_ptr + columns, tl.sum(first_sum, axis=0), mask=columns < half)
        tl.store(sums_ptr + half + columns, tl.sum(second_sum, axis=0), mask=columns < half)
        if part == 0:
            shifts_ptr += head * 2 * half
            tl.store(shifts_ptr + columns, first_shift, mask=columns < half)
            tl.store(shifts_ptr + half + columns, second_shift, mask=columns < half)


@triton.jit
def add_sums(sums_ptr, places, inside, splits, stride):
    """Return the sums of `places` over the splits, in their order."""
    total = tl.zeros(places.shape, dtype=tl.float32)
    for _ in range(0, splits):
        total += tl.load(sums_ptr + places, mask=inside, other=0.0)
        sums_ptr += stride
    return total


@triton.jit(do_not_specialize=["length", "splits"])
def finish_statistics(
    shifts_ptr, sums_ptr, products_ptr, mean_ptr, covariance_ptr, length, head_dim, splits,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """mean = s + sum / N; covariance = products / N - (mean - s)(mean - s)^T. Grid: heads, products, blocks of rows."""
    head = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    half = (head_dim + ODD) // 2
    square = half * half
    rows = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_H)
    # The channels of the product: a a^T, a b^T, b b^T.
    first_row, first_column = tl.where(which == 2, half, 0), tl.where(which == 0, 0, half)
    sums_ptr += head * splits * 2 * half
    row_away = add_sums(sums_ptr, first_row + rows, rows < half, splits, 2 * half) / length
    away = add_sums(sums_ptr, first_column + columns, columns < half, splits, 2 * half) / length
    inside = (rows < half)[:, None] & (columns < half)[None, :]
    products_ptr += head * splits * (3 * square) + which * square
    products = add_sums(products_ptr, rows[:, None] * half + columns[None, :], inside, splits, 3 * square)
    covariance = products / length - row_away[:, None] * away[None, :]
    rows += first_row
    columns += first_column
    inside = inside & (rows < head_dim)[:, None] & (columns < head_dim)[None, :]
    covariance_ptr += head * head_dim * head_dim
    tl.store(covariance_ptr + rows[:, None] * head_dim + columns[None, :], covariance, mask=inside)
    if which == 1:
        tl.store(covariance_ptr + columns[None, :] * head_dim + rows[:, None], covariance, mask=inside)
    elif tl.program_id(2) == 0:
        present = (columns < first_column + half) & (columns < head_dim)
        shift = tl.load(shifts_ptr + head * 2 * half + columns, mask=present, other=0.0)
        tl.store(mean_ptr + head * head_dim + columns, shift + away, mask=present)


def _launch(dtype: torch.dtype, head_dim: int, group: int) -> None:
    cache = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    mean = torch.empty((2, 8 * group, head_dim), dtype=torch.float32, device="meta")
    covariance = torch.empty((2, 8 * group, head_dim, head_dim), dtype=torch.float32, device="meta")
    queries = torch.empty((2, 8 * group, 4096, head_dim), dtype=dtype, device="meta")
    score(cache, cache, mean, covariance, 0.02)
    query_statistics(queries)
    unrotated_statistics(queries, torch.empty(4096, dtype=torch.int64, device="meta"), 10000.0)


CONFIGURATIONS = configurations(
    _launch,
    *({"head_dim": head_dim, "group": group} for head_dim, group in zip(HEAD_DIMS, (4, 1, 2, 3, 8), strict=True)),
    tensor_cores=["expected_logits", "sum_products"],
)
