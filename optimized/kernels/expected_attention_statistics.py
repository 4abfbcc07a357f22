r"""Expected Attention (arXiv 2510.00636): the statistics of the queries (EA-5, EA-L1).

They equal, in torch, `queries.mean(dim=-2)` and `torch.cov(queries.mT, correction=0)` of one head.

`sum_products`: one program adds up q - s and the products (q - s)(q - s)^T of one split of one head. The
channels are taken as the two halves a and b that RoPE rotates into each other; b a^T is the transpose of a
b^T, so three of four products are computed. Halves of 128 channels would take too many accumulators, as would
the rotation of float32 queries; there each product has a program of its own. The shift s, the mean of a few
queries spread over the sequence, is close to mu, so a large mu causes no cancellation: Sigma is sum / N - (mu
- s)(mu - s)^T. For the tensor cores q - s is rounded to the dtype of the queries, which adds 2^-9 / sqrt(N)
of Sigma, far less than the statistical error sqrt(2 / N) of N queries.

torch adds the splits and puts the four parts of Sigma together: once for a prompt, that is not worth a
kernel. The number of splits follows from the number of heads, so the last bits may differ between batches,
and are the same in every run.

`unrotated_statistics` takes queries after RoPE, as attention uses them, and undoes the rotation in registers.
Where positions follow one another, as in a prompt, a program carries the angles from tile to tile.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..rope import frequencies
from .compiling import HEAD_DIMS, configurations
from .launching import as_heads, cdiv, floats, launch, launcher, padded, register_limit, warps
from .strided import strided
from .tiles import at_head, dot_dtype, head_of, load_tile

PROGRAMS_WANTED = 512
LEAST_TOKENS_OF_A_SPLIT = 512
REFRESH = tl.constexpr(64)  # tiles


class Rotation(NamedTuple):
    """What undoes RoPE: the positions of the queries, and the turns of a pair of channels at position 1."""

    positions: Any  # [B, H, N], strided
    contiguous: torch.Tensor  # whether each position is the one before it, and 1
    fractions: torch.Tensor  # [D / 2] int32, in 1 / 2^32 of a turn


class Sums(NamedTuple):
    """The sums of each split; only the shifts are those of a head, and all its splits have the same."""

    shifts: torch.Tensor  # [heads, D], rounded up to even, as below
    queries: torch.Tensor  # [heads * splits, D]: the sum of q - s
    products: torch.Tensor  # [heads * splits, 3, D / 2, D / 2]: a a^T, a b^T, b b^T


@launcher
def query_statistics(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-5, EA-L1: mean and covariance of queries before
    RoPE, as `optimized.expected_attention.query_statistics`.
    """
    return _statistics(queries, None)


@launcher
def unrotated_statistics(
    queries: torch.Tensor, positions: torch.Tensor, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-5 of queries after RoPE, as `optimized.expected_attention.unrotated_statistics`.

    An angle is the product of a position with a frequency, kept as a 32-bit fraction of a turn: whole turns
    overflow away, and the error at position 1,000,000 is below 0.001 radians.
    """
    turns = frequencies(queries.shape[-1], theta, device=queries.device) / (2 * math.pi)
    # The low 32 bits, as a signed number: a whole turn is 2^32, and wraps to 0.
    fractions = (torch.remainder(turns, 1) * 2**32).round().to(torch.int64).to(torch.int32)
    # The kernel reads the answer; the host does not wait for it.
    contiguous = (positions.expand(*positions.shape[:-1], queries.shape[-2]).diff() == 1).all()
    places = strided(as_heads(positions.expand(queries.shape[:-1])[..., None])[..., 0])
    return _statistics(queries, Rotation(places, contiguous, fractions))


def _statistics(queries: torch.Tensor, rotation: Rotation | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `sum_products`, and finish; a rotation of the queries is undone first."""
    heads = as_heads(queries)
    batch, num_heads, length, head_dim = heads.shape
    count, half, odd = batch * num_heads, (head_dim + 1) // 2, head_dim % 2
    block_h = padded(half)
    each = block_h > 64 or (rotation is not None and queries.dtype == torch.float32)
    # 16 bytes for each thread, from either half of the channels. Without tensor cores a product takes more
    # registers.
    threads = 512 if queries.dtype == torch.float32 and not each else 256
    block_t = max(16, threads * 16 // queries.element_size() // block_h)
    # Two programs on a multiprocessor; left alone, the compiler takes a few registers more. With rotations it
    # would spill some.
    limited = rotation is None and block_h == 64 and queries.dtype != torch.float32
    limit = register_limit(queries, 128) if limited else {}
    # Tiles in flight: one program on a multiprocessor needs more than two. The products of float32 take
    # longer than its loads.
    stages = 2 if rotation is None else 1 if queries.dtype == torch.float32 else 3
    wanted = PROGRAMS_WANTED // (2 if each else 1)
    split = max(LEAST_TOKENS_OF_A_SPLIT, cdiv(length, max(1, wanted // count)))
    split = cdiv(split, block_t) * block_t
    splits = cdiv(length, split)
    sums = Sums(
        floats(queries, count, 2 * half),
        floats(queries, count * splits, 2 * half),
        floats(queries, count * splits, 3, half, half),
    )
    launch(sum_products, (count * splits, 3 if each else 1))(
        strided(heads), rotation, sums, num_heads, length, head_dim, split, splits,
        BLOCK_T=block_t, BLOCK_H=block_h, EACH=each, DOT_DTYPE=dot_dtype(queries), ODD=odd,
        num_warps=warps(queries, threads), num_stages=stages, **limit,
    )  # fmt: skip
    # b a^T is the transpose of a b^T.
    aa, ab, bb = sums.products.view(count, splits, 3, half, half).sum(dim=1).div_(length).unbind(dim=1)
    away = (sums.queries.view(count, splits, 2 * half).sum(dim=1) / length)[:, :head_dim]
    covariance, rest = floats(queries, count, head_dim, head_dim), head_dim - half
    covariance[:, :half, :half], covariance[:, half:, half:] = aa, bb[:, :rest, :rest]
    covariance[:, :half, half:], covariance[:, half:, :half] = ab[..., :rest], ab.mT[:, :rest]
    covariance.addcmul_(away[:, :, None], away[:, None], value=-1)
    mean = sums.shifts[:, :head_dim] + away
    return mean.view(*queries.shape[:-2], head_dim), covariance.view(*queries.shape[:-2], head_dim, head_dim)


@triton.jit
def cos_and_sin(fraction):
    """Return cos and sin of `fraction` / 2^32 turns, to
    1e-7, by the series about the nearest quarter of a turn.

    The library's functions take any angle, and keep a table in memory for the large ones.
    """
    quarter = (fraction + (1 << 29)) >> 30
    # 2 pi / 2^32, at most pi / 4 away
    angle = (fraction - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09
    square = angle * angle
    cos = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320))))
    sin = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880)))))
    # A quarter turn takes (cos, sin) to (-sin, cos), a half turn takes both to their negatives.
    odd = (quarter & 1) == 1
    sign = (1 - (quarter & 2)).to(tl.float32)
    return sign * tl.where(odd, -sin, cos), sign * tl.where(odd, cos, sin)


@triton.jit
def load_pairs(queries, tokens, end, head_dim, BLOCK_H: tl.constexpr, ODD: tl.constexpr):
    """Load `queries` [N, D] as their channels 0 .. D/2-1 and D/2
    .. D-1, 0 from `end` on: float32 [tokens, BLOCK_H] twice.
    """
    half = (head_dim + ODD) // 2
    pairs = tl.arange(0, BLOCK_H)
    first = load_tile(queries, tokens, pairs, tokens < end, half)
    return first, load_tile(queries, tokens, half + pairs, tokens < end, head_dim)


@triton.jit
def load_rotation(
    positions_ptr, stride_n, fractions_ptr, tokens, end, head_dim, BLOCK_H: tl.constexpr, ODD: tl.constexpr
):
    """Return cos and sin of RoPE's angles at the positions of `tokens`: float32 [tokens, BLOCK_H] twice."""
    places = positions_ptr + tokens.to(tl.int64) * stride_n
    position = tl.load(places, mask=tokens < end, other=0).to(tl.int32)
    pairs = tl.arange(0, BLOCK_H)
    fraction = tl.load(fractions_ptr + pairs, mask=pairs < (head_dim + ODD) // 2, other=0)
    # A product of 32-bit integers drops the whole turns; read as signed, it lies within half a turn.
    return cos_and_sin(position[:, None] * fraction[None, :])


@triton.jit
def turn(cos, sin, first, second):
    """Rotate pairs of channels back by the angles with this cos and sin."""
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def add_products(
    first, second, first_shift, second_shift, inside, first_sum, second_sum, aa, ab, bb, which,
    EACH: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the queries of a tile, less the shift, to the two
    sums, and their products to the three sums of products.
    """
    first = tl.where(inside[:, None], first - first_shift[None, :], 0.0)
    second = tl.where(inside[:, None], second - second_shift[None, :], 0.0)
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
    return first_sum, second_sum, aa, ab, bb


@triton.jit(do_not_specialize=["length", "split", "splits"])
def sum_products(
    queries, rotation, sums, num_heads, length, head_dim, split, splits,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, EACH: tl.constexpr, DOT_DTYPE: tl.constexpr,
    ODD: tl.constexpr,
):  # fmt: skip
    """Sums of q - s and of (q - s)(q - s)^T over one split of one head. Grid: heads * splits, products.

    With the channels in two halves a and b, the products are a a^T, a b^T and b b^T; b a^T is the transpose
    of the second. EACH: a program takes one of them.
    """
    program = tl.program_id(0).to(tl.int64)
    head, part = program // splits, (program % splits).to(tl.int32)
    own = head_of(queries, head, num_heads)
    # The shift: the mean of queries at even distances, the same for all programs of a head.
    sample = tl.arange(0, BLOCK_T).to(tl.int64) * length // BLOCK_T
    first, second = load_pairs(own, sample, length, head_dim, BLOCK_H, ODD)
    if rotation is not None:
        positions, stride_n = at_head(rotation.positions, head, num_heads), rotation.positions.stride_d
        fractions = rotation.fractions
        cos, sin = load_rotation(positions, stride_n, fractions, sample, length, head_dim, BLOCK_H, ODD)
        first, second = turn(cos, sin, first, second)
    first_shift, second_shift = tl.sum(first, axis=0) / BLOCK_T, tl.sum(second, axis=0) / BLOCK_T
    end = tl.minimum((part + 1) * split, length)
    first_sum = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    second_sum = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    aa = tl.zeros([BLOCK_H, BLOCK_H], dtype=tl.float32)
    ab = tl.zeros([BLOCK_H, BLOCK_H], dtype=tl.float32)
    bb = tl.zeros([BLOCK_H, BLOCK_H], dtype=tl.float32)
    which = tl.program_id(1)
    if rotation is not None:
        # The angles of a tile are those of the tile before it and one step: four products in place of two
        # series. Errors add up, so a stretch of REFRESH tiles begins with the series. Where positions do not
        # follow one another, each tile is a stretch.
        pairs = tl.arange(0, BLOCK_H)
        step_cos, step_sin = cos_and_sin(
            tl.load(fractions + pairs, mask=pairs < (head_dim + ODD) // 2, other=0) * BLOCK_T
        )
        stretch = tl.where(tl.load(rotation.contiguous), REFRESH * BLOCK_T, BLOCK_T)
        for begin in range(part * split, end, stretch):
            tokens = begin + tl.arange(0, BLOCK_T)
            cos, sin = load_rotation(positions, stride_n, fractions, tokens, end, head_dim, BLOCK_H, ODD)
            for start in range(begin, tl.minimum(begin + stretch, end), BLOCK_T):
                tokens = start + tl.arange(0, BLOCK_T)
                first, second = load_pairs(own, tokens, end, head_dim, BLOCK_H, ODD)
                first, second = turn(cos, sin, first, second)
                sin, cos = turn(step_cos[None, :], step_sin[None, :], sin, cos)
                first_sum, second_sum, aa, ab, bb = add_products(
                    first, second, first_shift, second_shift, tokens < end, first_sum, second_sum, aa, ab, bb,
                    which, EACH, DOT_DTYPE,
                )  # fmt: skip
    else:
        for start in range(part * split, end, BLOCK_T):
            tokens = start + tl.arange(0, BLOCK_T)
            first, second = load_pairs(own, tokens, end, head_dim, BLOCK_H, ODD)
            first_sum, second_sum, aa, ab, bb = add_products(
                first,
                second,
                first_shift,
                second_shift,
                tokens < end,
                first_sum,
                second_sum,
                aa,
                ab,
                bb,
                which,
                EACH,
                DOT_DTYPE,
            )
    half = (head_dim + ODD) // 2
    square = half * half
    rows, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_H)
    inside = (rows < half)[:, None] & (columns < half)[None, :]
    target = sums.products + program * (3 * square) + rows[:, None] * half + columns[None, :]
    if EACH:
        tl.store(target + which * square, aa * 4, mask=inside)
    else:
        tl.store(target, aa * 4, mask=inside)
        tl.store(target + square, ab * 4, mask=inside)
        tl.store(target + 2 * square, bb * 4, mask=inside)
    if which == 0:
        sums_ptr = sums.queries + program * 2 * half
        tl.store(sums_ptr + columns, tl.sum(first_sum, axis=0), mask=columns < half)
        tl.store(sums_ptr + half + columns, tl.sum(second_sum, axis=0), mask=columns < half)
        if part == 0:
            shifts_ptr = sums.shifts + head * 2 * half
            tl.store(shifts_ptr + columns, first_shift, mask=columns < half)
            tl.store(shifts_ptr + half + columns, second_shift, mask=columns < half)


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    queries = torch.empty((2, 32, 4096, head_dim), dtype=dtype, device="meta")
    query_statistics(queries)
    unrotated_statistics(queries, torch.empty(4096, dtype=torch.int64, device="meta"), 10000.0)


CONFIGURATIONS = configurations(
    _launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS), tensor_cores=["sum_products"]
)
