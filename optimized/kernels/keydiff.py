r"""KeyDiff (arXiv 2504.15364) in two launches: KD-8,
`score_i = -cos(mu, k_i)` with mu the mean of the unit keys.

It equals, in torch:

    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    score = -torch.cosine_similarity(unit.mean(dim=-2, keepdim=True), keys.float(), dim=-1)

The anchor needs every key before the first score, so the keys are read twice. First launch, `sum_unit_keys`:
one program sums the unit keys of one split of one head, each element of a tile to its own accumulator, and
folds the tile along the tokens once, at the end. It stores 1 / |k| of every key. Second launch, `score_keys`:
one program adds up the partial sums of its head, in the order of the splits, and scores one split. Its
programs start with the last split of the last head: what the first launch read last is still in the L2 cache.

With a kept anchor one pass is enough. From one block of the prompt to the next, the sum of the unit keys
gains those of the block and loses those of the evicted keys (KD-6): `sum_unit_keys` sums either, and
`score_keys` alone scores.

The walks over tiles load the next two tiles while they compute (`STAGES`). There are at most 64 splits, by
the number of tokens only: from 8 heads on they fill a GPU, the partial sums that a program reads are at
most half as many bytes as its keys, and the scores of a sequence are the same bits in every batch.

Range: a key is first multiplied by the power of two that brings its largest component to [1, 2), which is
exact, so that the squares of keys around 1e-30 or 1e30 neither vanish nor overflow.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import as_heads, cdiv, floats, launch, launcher, padded
from .strided import strided
from .tiles import head_of, load_tile, power_of_two

MOST_SPLITS = 64
LEAST_TOKENS_OF_A_SPLIT = 256
ELEMENTS_OF_A_TILE = 8192
STAGES = tl.constexpr(3)


@launcher
def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `score_i = -cos(mu, k_i)`, as `optimized.keydiff.score`."""
    inverses = floats(keys, *keys.shape[:-1])
    return score_against(keys, partial_sums(keys, inverses), inverses)


@launcher
def anchor_sum(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `T mu = sum_i k_i / |k_i|`, as `optimized.keydiff.anchor_sum`."""
    return partial_sums(keys, None).sum(dim=1).reshape(*keys.shape[:-2], keys.shape[-1])


@launcher
def score_with_anchor(keys: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    r"""KD-8 with a given anchor, as `optimized.keydiff.score_with_anchor`: the keys are read once."""
    return score_against(keys, anchor.reshape(-1, 1, keys.shape[-1]).contiguous(), None)


def _tile(keys: torch.Tensor) -> dict[str, Any]:
    """Return the constants of the tiling."""
    block_d = padded(keys.shape[-1])
    return {"BLOCK_T": min(128, ELEMENTS_OF_A_TILE // block_d), "BLOCK_D": block_d, "num_warps": 8}


def _splits(length: int, block_t: int) -> tuple[int, int]:
    """Return the tokens of a split, whole tiles, and the number of splits."""
    split = max(LEAST_TOKENS_OF_A_SPLIT, cdiv(cdiv(length, MOST_SPLITS), block_t) * block_t)
    return split, cdiv(length, split)


def partial_sums(keys: torch.Tensor, inverses: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of the unit keys of every split, [B * H_kv, splits, D] float32; write 1 / |k| to
    `inverses` [..., T], of the keys as `load_keys` gives them, 0 for a zero key.
    """
    heads, tile = as_heads(keys), _tile(keys)
    batch, num_heads, length, head_dim = heads.shape
    split, splits = _splits(length, tile["BLOCK_T"])
    sums = floats(keys, batch * num_heads, splits, head_dim)
    launch(sum_unit_keys, (batch * num_heads * splits,))(
        strided(heads), sums, sums if inverses is None else inverses, num_heads, length, head_dim, split,
        splits,
        STORED=inverses is not None, **tile,
    )  # fmt: skip
    return sums


def score_against(keys: torch.Tensor, sums: torch.Tensor, inverses: torch.Tensor | None) -> torch.Tensor:
    """Score the keys, of which `inverses` may have 1 / |k|, against the sum of `sums` [B * H_kv, parts, D]
    over its parts.
    """
    heads, tile = as_heads(keys), _tile(keys)
    batch, num_heads, length, head_dim = heads.shape
    split, splits = _splits(length, tile["BLOCK_T"])
    scores = floats(keys, *keys.shape[:-1])
    launch(score_keys, (batch * num_heads * splits,))(
        strided(heads), sums, sums if inverses is None else inverses, scores,
        num_heads, length, head_dim, split, splits, sums.shape[1], STORED=inverses is not None, **tile,
    )  # fmt: skip
    return scores


@triton.jit
def load_keys(keys, first, end, head_dim, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the `keys` [T, D] of positions first .. end-1, rescaled: [BLOCK_T, BLOCK_D]."""
    positions = first + tl.arange(0, BLOCK_T)
    tile = load_tile(keys, positions, tl.arange(0, BLOCK_D), positions < end, head_dim)
    scale, _ = power_of_two(tl.max(tl.abs(tile), axis=1), 0)
    return tile * scale[:, None]


@triton.jit
def inverse_norms(keys):
    """Return 1 / |k| of the rescaled keys: [BLOCK_T]."""
    squares = tl.sum(keys * keys, axis=1)
    # A zero key has no direction: its cosine is 0.
    near = tl.rsqrt(tl.where(squares == 0, 1.0, squares))
    # The hardware's root has 22 bits; a step of Newton's method gives the rest, and costs less than a rounded
    # root and quotient.
    return tl.where(squares == 0, 0.0, near * (1.5 - 0.5 * squares * near * near))


@triton.jit(do_not_specialize=["length", "split", "splits"])
def sum_unit_keys(
    keys, sums_ptr, inverses_ptr, num_heads, length, head_dim, split, splits,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """sums[head, split] = the sum of k / |k| over the keys of one split; STORED: 1 / |k| goes to `inverses`.

    Grid: heads * splits, the splits of a head together.
    """
    program = tl.program_id(0).to(tl.int64)
    head, part = program // splits, program % splits
    own = head_of(keys, head, num_heads)
    end = tl.minimum((part + 1) * split, length)
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for first in tl.range(part * split, end, BLOCK_T, num_stages=STAGES):
        tile = load_keys(own, first, end, head_dim, BLOCK_T, BLOCK_D)
        inverse = inverse_norms(tile)
        if STORED:
            positions = first + tl.arange(0, BLOCK_T)
            tl.store(inverses_ptr + head * length + positions, inverse, mask=positions < end)
        total += tile * inverse[:, None]
    channels = tl.arange(0, BLOCK_D)
    tl.store(sums_ptr + program * head_dim + channels, tl.sum(total, axis=0), mask=channels < head_dim)


@triton.jit(do_not_specialize=["length", "split", "splits", "parts"])
def score_keys(
    keys, sums_ptr, inverses_ptr, scores_ptr, num_heads, length, head_dim, split, splits, parts,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """scores[head, t] = -cos(anchor, k_t) for one split, anchor = the sum of sums[head, :parts]; STORED:
    `inverses` has 1 / |k|.

    Grid as in `sum_unit_keys`, in the opposite order.
    """
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    head, part = program // splits, program % splits
    own = head_of(keys, head, num_heads)
    channels = tl.arange(0, BLOCK_D)
    folded = tl.zeros([16, BLOCK_D], dtype=tl.float32)
    for first in range(0, parts, 16):
        rows = first + tl.arange(0, 16)
        offsets = (head * parts + rows)[:, None] * head_dim + channels[None, :]
        folded += tl.load(
            sums_ptr + offsets, mask=(rows < parts)[:, None] & (channels < head_dim)[None, :], other=0.0
        )
    anchor = tl.sum(folded, axis=0)
    squares = tl.sum(anchor * anchor, axis=0)
    # The comparison with 0, not with more than 0, lets NaN through.
    anchor = tl.where(squares == 0, 0.0, tl.div_rn(anchor, tl.sqrt_rn(tl.where(squares == 0, 1.0, squares))))
    end = tl.minimum((part + 1) * split, length)
    for first in tl.range(part * split, end, BLOCK_T, num_stages=STAGES):
        tile = load_keys(own, first, end, head_dim, BLOCK_T, BLOCK_D)
        positions = first + tl.arange(0, BLOCK_T)
        if STORED:
            inverse = tl.load(inverses_ptr + head * length + positions, mask=positions < end, other=0.0)
        else:
            inverse = inverse_norms(tile)
        scores = -(tl.sum(tile * anchor[None, :], axis=1) * inverse)
        tl.store(scores_ptr + head * length + positions, scores, mask=positions < end)


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    anchor = torch.empty((2, 8, head_dim), dtype=torch.float32, device="meta")
    score(keys)
    score_with_anchor(keys, anchor)


CONFIGURATIONS = configurations(
    _launch,
    *({"head_dim": head_dim} for head_dim in HEAD_DIMS),
    resident={"sum_unit_keys": 2, "score_keys": 3},
)
