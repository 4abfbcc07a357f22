r"""Expected Attention (arXiv 2510.00636): the scores in three
launches (EA-7 to EA-9); statistics are in `.._statistics`.

They equal, in torch, for one KV head and the query heads g of its group:

    logits = keys @ mean[g] / math.sqrt(d) + ((keys @ covariance[g]) * keys).sum(dim=-1) / (2 * d)
    score = (mean over g of logits.softmax(dim=0) + epsilon) * values.norm(dim=-1)

K and V are read from memory once, for any group size; T * H_q float32 logits are written and read again.

First launch, `split_covariances`: prepares each covariance Sigma. It is symmetric: with its channels in two
halves a and b, k^T Sigma k is a^T Sigma_aa a + 2 b^T Sigma_ba a + b^T Sigma_bb b, three of four products. The
launch stores Sigma_ba + Sigma_ab^T for 2 Sigma_ba, so that a Sigma that is not quite symmetric gives the
same. Tensor cores multiply keys in their own dtype, in which a covariance has 8 bits (bfloat16) or 11. Keys
are exact, so only Sigma has to be split: high + low, each in the dtype of the keys, is Sigma to 16 bits or
more, for twice the multiplications. Sigma is first scaled by a power of two that brings its largest element
to [2^13, 2^14): float16 has no numbers above 65,504, and fewer bits below 2^-14. float32 keys are multiplied
in full float32, which needs no second part. Second launch, `expected_logits`: one program takes one tile of
tokens of one KV head. It walks the covariances of the group in slices of columns, first those of half b and
then those of half a: K_tile @ Sigma_slice on tensor cores, plus the mean, times the same columns of the tile,
summed along the row. The logits of the group are stored together, with the maximum and the sum of
exponentials of the tile; the norms of the values go to the memory of the scores. A slice and not all of
Sigma, because two programs of a multiprocessor have to share its registers. Third launch, `weigh_values`: one
program takes a run of tokens, adds up the maxima and sums of its KV head in the order of the tiles, and turns
logits and norms to scores.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .expected_attention_statistics import query_statistics, unrotated_statistics
from .launching import cdiv, floats, launch, launcher, on_tensor_cores, padded, register_limit, warps
from .strided import Rows, sizes_of, strided
from .tiles import dot_dtype, head_of, load_tile, power_of_two

__all__ = ["CONFIGURATIONS", "query_statistics", "score", "unrotated_statistics"]

# Parts of Sigma for half-precision keys: 2, or 1 for half the time and Sigma rounded to the dtype of the
# keys.
TERMS = 2
TOKENS_OF_A_RUN = 512


class Normal(NamedTuple):
    """The normal distribution of the queries of each query head, as factors of a product with keys."""

    means: torch.Tensor  # [readers, D], divided by sqrt(D)
    parts: torch.Tensor  # [readers, terms, D, D], of the keys' dtype: the terms of 2^e Sigma
    factors: torch.Tensor  # [readers]: 2^-e / (2 D)


class Softmax(NamedTuple):
    """The logits of each query head, tile by tile, and the sum of their exponentials."""

    logits: torch.Tensor  # [readers, tiles, BLOCK_T]
    highest: torch.Tensor  # [readers, tiles]: the largest logit
    mass: torch.Tensor  # [readers, tiles]: sum of exp(logit - highest)


@launcher
def score(
    keys: torch.Tensor,
    values: torch.Tensor,
    query_mean: torch.Tensor,
    query_covariance: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    r"""EA-7..9: `(mean over the group of ahat_i + epsilon) |v_i|`, as
    `optimized.expected_attention.score`.
    """
    means, covariances = (
        (query_mean.float() / math.sqrt(keys.shape[-1])).contiguous(),
        query_covariance.float(),
    )
    sizes = sizes_of(means, keys, values)
    batch, num_kv_heads, length, head_dim = keys.shape
    num_query_heads = means.shape[1]
    heads, readers = batch * num_kv_heads, batch * num_query_heads
    terms = 1 if keys.dtype == torch.float32 else TERMS
    tile = _tile(keys, values)
    block_group = padded(sizes.group, 1)
    tiles, runs = cdiv(length, tile["BLOCK_T"]), cdiv(length, TOKENS_OF_A_RUN)
    parts = keys.new_empty(readers, terms, head_dim, head_dim)
    normal = Normal(means, parts, floats(keys, readers))
    softmax = Softmax(
        floats(keys, readers, tiles, tile["BLOCK_T"]),
        floats(keys, readers, tiles),
        floats(keys, readers, tiles),
    )
    scores = floats(keys, batch, num_kv_heads, length)
    launch(split_covariances, (readers,))(
        strided(covariances), parts, normal.factors, num_query_heads, head_dim,
        BLOCK_R=16, BLOCK_D=2 * tile["BLOCK_H"], TERMS=terms, num_warps=warps(keys, 256),
    )  # fmt: skip
    launch(expected_logits, (heads * tiles,))(
        strided(keys), strided(values), normal, softmax, scores, length, tiles, sizes,
        GROUP=block_group, TERMS=terms, **tile,
    )  # fmt: skip
    launch(weigh_values, (heads * runs,))(
        softmax, scores, sizes.group, length, tiles, runs, float(epsilon),
        GROUP=block_group, TILE=tile["BLOCK_T"], BLOCK_T=TOKENS_OF_A_RUN, num_warps=warps(keys, 128),
    )  # fmt: skip
    return scores


def _tile(keys: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
    """Return the constants of `expected_logits`."""
    block_d, block_dv = padded(keys.shape[-1], 32), padded(values.shape[-1])
    wide = block_d > 128
    if not on_tensor_cores(keys):
        # Without tensor cores each product takes registers of its own. With one stage all keys stay in
        # registers too, and spill.
        tile = {"BLOCK_T": 32, "BLOCK_N": 16, "num_warps": 8}
    else:
        tile = {"BLOCK_T": 64 if wide else 128, "BLOCK_N": 32 if wide else 64, "num_warps": 4 if wide else 8}
        # two programs on a multiprocessor; left alone, the compiler takes a few registers more
        if block_d == 128:
            tile |= register_limit(keys, 128)
    tile["BLOCK_N"] = min(tile["BLOCK_N"], block_d // 2)
    return tile | {
        "BLOCK_H": block_d // 2,
        "BLOCK_DV": block_dv,
        "DOT_DTYPE": dot_dtype(keys),
        "num_stages": 2,
    }


@triton.jit
def split_covariances(
    covariances, parts_ptr, factors_ptr, num_query_heads, head_dim,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Write parts[0] + parts[1] = Sigma * 2^e, with Sigma_ab added to Sigma_ba, and factors = 2^-e / (2 d).

    Grid: query heads of all sequences.
    """
    reader = tl.program_id(0).to(tl.int64)
    own = head_of(covariances, reader, num_query_heads)
    transposed = Rows(own.ptr, own.stride_d, own.stride_t)
    columns = tl.arange(0, BLOCK_D)
    largest = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for first in range(0, head_dim, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        largest = tl.maximum(largest, tl.abs(load_tile(own, rows, columns, rows < head_dim, head_dim)))
    scale, inverse = power_of_two(tl.max(tl.max(largest, axis=1), axis=0), 13)
    tl.store(factors_ptr + reader, inverse / (2 * head_dim))
    target = parts_ptr + reader * (TERMS * head_dim * head_dim)
    for first in range(0, head_dim, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        covariance = load_tile(own, rows, columns, rows < head_dim, head_dim) * scale
        below = (rows >= BLOCK_D // 2) & (rows < head_dim)  # Sigma_ba gets Sigma_ab^T; nobody reads Sigma_ab
        covariance += load_tile(transposed, rows, columns, below, BLOCK_D // 2) * scale
        inside = (rows < head_dim)[:, None] & (columns < head_dim)[None, :]
        offsets = rows[:, None] * head_dim + columns[None, :]
        high = covariance.to(parts_ptr.dtype.element_ty)
        tl.store(target + offsets, high, mask=inside)
        if TERMS == 2:
            low = (covariance - high.to(tl.float32)).to(parts_ptr.dtype.element_ty)
            tl.store(target + head_dim * head_dim + offsets, low, mask=inside)


@triton.jit
def times_sigma(
    keys, sigma_ptr, rows, columns, head_dim, product, TERMS: tl.constexpr, DOT_DTYPE: tl.constexpr
):
    """Return `product` + keys @ sigma, for the given rows
    and columns of the scaled covariance, all its terms.
    """
    sigma_ptr += rows[:, None] * head_dim + columns[None, :]
    inside = (rows < head_dim)[:, None] & (columns < head_dim)[None, :]
    for term in tl.static_range(TERMS):
        sigma = (
            tl.load(sigma_ptr + term * head_dim * head_dim, mask=inside, other=0.0)
            .to(tl.float32)
            .to(DOT_DTYPE)
        )
        product = tl.dot(keys, sigma, acc=product, input_precision="ieee")
    return product


@triton.jit(do_not_specialize=["length", "tiles"])
def expected_logits(
    keys, values, normal, softmax, norms_ptr, length, tiles, sizes,
    GROUP: tl.constexpr, TERMS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_DV: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """EA-7 of one tile of one KV head for every query head of its group, and the norms of its values.
    Grid: heads * tiles.
    """
    num_kv_heads, group, head_dim, value_dim = sizes
    program = tl.program_id(0).to(tl.int64)
    head, tile = program // tiles, program % tiles
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < length
    rows = head_of(keys, head, num_kv_heads)
    # keys_a, keys_b [BLOCK_T, BLOCK_H]: the left factors of every product
    a, b = tl.arange(0, BLOCK_H), BLOCK_H + tl.arange(0, BLOCK_H)
    keys_a = load_tile(rows, tokens, a, inside, head_dim).to(DOT_DTYPE)
    keys_b = load_tile(rows, tokens, b, inside, head_dim).to(DOT_DTYPE)
    members = tl.arange(0, GROUP)
    logits = tl.zeros([GROUP, BLOCK_T], dtype=tl.float32)
    for half in tl.static_range(1, -1, -1):  # half b first, which needs fewer registers
        for step in range(0, group * (BLOCK_H // BLOCK_N)):
            member = step // (BLOCK_H // BLOCK_N)
            reader = head * group + member
            columns = half * BLOCK_H + (step % (BLOCK_H // BLOCK_N)) * BLOCK_N + tl.arange(0, BLOCK_N)
            sigma_ptr = normal.parts + reader * (TERMS * head_dim * head_dim)
            product = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
            product = times_sigma(keys_b, sigma_ptr, b, columns, head_dim, product, TERMS, DOT_DTYPE)
            if half == 0:
                product = times_sigma(keys_a, sigma_ptr, a, columns, head_dim, product, TERMS, DOT_DTYPE)
            # part [BLOCK_T, BLOCK_N]: these columns of the keys, from the caches
            part = load_tile(rows, tokens, columns, inside, head_dim)
            mean = tl.load(normal.means + reader * head_dim + columns, mask=columns < head_dim, other=0.0)
            logit = tl.sum(part * (product * tl.load(normal.factors + reader) + mean[None, :]), axis=1)
            logits += tl.where((members == member)[:, None], logit[None, :], 0.0)
    # Every tile has a token, so no maximum is -inf.
    logits = tl.where(inside[None, :], logits, float("-inf"))
    highest = tl.max(logits, axis=1)
    mass = tl.sum(tl.exp(logits - highest[:, None]), axis=1)
    present = members < group
    reader = head * group + members
    target = softmax.logits + reader[:, None] * (tiles * BLOCK_T) + tokens[None, :]
    tl.store(target, logits, mask=present[:, None])
    tl.store(softmax.highest + reader * tiles + tile, highest, mask=present)
    tl.store(softmax.mass + reader * tiles + tile, mass, mask=present)
    # value [BLOCK_T, BLOCK_DV]: the norms of its rows
    value = load_tile(head_of(values, head, num_kv_heads), tokens, tl.arange(0, BLOCK_DV), inside, value_dim)
    # Squares of values around 1e30 or 1e-30 would overflow or vanish in float32.
    scale, inverse = power_of_two(tl.max(tl.abs(value), axis=1), 0)
    value = value * scale[:, None]
    norms = tl.sqrt_rn(tl.sum(value * value, axis=1)) * inverse
    tl.store(norms_ptr + head * length + tokens, norms, mask=inside)


@triton.jit(do_not_specialize=["length", "tiles", "runs", "epsilon"])
def weigh_values(
    softmax, scores_ptr, group, length, tiles, runs, epsilon,
    GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """EA-8, EA-9: scores = (mean over the group of exp(logit - maximum) / sum + epsilon) * norm. Grid:
    heads * runs.
    """
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
        peaks = tl.load(softmax.highest + offsets, mask=(tile < tiles)[None, :], other=float("-inf"))
        sums = tl.load(softmax.mass + offsets, mask=(tile < tiles)[None, :], other=0.0)
        higher = tl.maximum(highest, tl.max(peaks, axis=1))
        mass = mass * tl.exp(highest - higher) + tl.sum(sums * tl.exp(peaks - higher[:, None]), axis=1)
        highest = higher
    tokens = run * BLOCK_T + tl.arange(0, BLOCK_T)
    stored = tiles * TILE  # a row of logits ends with its last tile, so that all rows are aligned
    logits = tl.load(
        softmax.logits + reader[:, None] * stored + tokens[None, :],
        mask=(tokens < stored)[None, :],
        other=float("-inf"),
    )
    weights = tl.div_rn(tl.exp(logits - highest[:, None]), tl.broadcast_to(mass[:, None], [GROUP, BLOCK_T]))
    weights = tl.sum(tl.where((members < group)[:, None], weights, 0.0), axis=0)
    inside = tokens < length
    target = scores_ptr + head * length + tokens
    norms = tl.load(target, mask=inside, other=0.0)
    tl.store(
        target, (tl.div_rn(weights, tl.zeros([BLOCK_T], tl.float32) + group) + epsilon) * norms, mask=inside
    )


def _launch(dtype: torch.dtype, head_dim: int, group: int) -> None:
    cache = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    mean = torch.empty((2, 8 * group, head_dim), dtype=torch.float32, device="meta")
    covariance = torch.empty((2, 8 * group, head_dim, head_dim), dtype=torch.float32, device="meta")
    score(cache, cache, mean, covariance, 0.02)


CONFIGURATIONS = configurations(
    _launch,
    *(
        {"head_dim": head_dim, "group": group}
        for head_dim, group in zip(HEAD_DIMS, (4, 1, 2, 3, 8), strict=True)
    ),
    tensor_cores=["expected_logits"],
    resident={"expected_logits": 2},
)
