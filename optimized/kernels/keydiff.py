r"""KeyDiff (arXiv 2504.15364) in two launches: KD-8, `score_i = -cos(mu, k_i)` with mu the mean of the unit keys.

It equals, in torch:

    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    score = -torch.cosine_similarity(unit.mean(dim=-2, keepdim=True), keys.float(), dim=-1)

Reads and writes. The anchor needs every key before the first score can be had, so the keys are read twice: 2 * T * H_kv * D
elements in, T * H_kv float32 scores out, and between the launches `splits` partial sums of D float32 per head. For 131,072
tokens of 8 heads of 128 bfloat16 channels that is 2 * 268 MB + 4 MB; at 4.3 TB/s the floor is 126 microseconds. One pass would
need the anchor from elsewhere. The torch expression moves at least six times the bytes, for it stores the unit keys.

First launch, `sum_unit_keys`: one program sums the unit keys of one split of one head. It adds tile to tile in registers, each
element to its own accumulator, and folds the tile along the tokens only once, at the end. Second launch, `score_keys`: one
program adds up the partial sums of its head, in the order of the splits, and scores one split. The norm of a key is computed
again there rather than stored: the tile is in registers anyway, and the second computation costs no byte.

The tiling. A tile holds 8,192 elements for 8 warps, 32 to a thread: that leaves registers for several programs on a
multiprocessor, whose loads overlap since none waits for another. The number of splits depends on T alone, and is at most 64:
enough programs to fill a GPU from 8 heads up, while the partial sums that a program reads stay under an eighth of its keys. As
nothing depends on the batch, the scores of a sequence are the same bits in whatever batch it runs; the order of every sum is
fixed, so they are the same bits in every run.

Range. A key is first multiplied by the power of two that brings its largest component to [1, 2): exact, one integer operation
for a key, and the squares of keys around 1e-30 or 1e30 neither vanish nor overflow. float16 cannot get there, and skips it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from optimized.checks import require_states
from optimized.kernels.compiling import Configuration
from optimized.kernels.launching import as_heads, padded, require_launchable

MOST_SPLITS = 64
LEAST_TOKENS_OF_A_SPLIT = 256
ELEMENTS_OF_A_TILE = 8192


def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `score_i = -cos(mu, k_i)`, as `optimized.keydiff.score`.

    Args: keys [B, H_kv, T, D] (any leading axes), float32, float16 or bfloat16, any strides, D at most 256.
    Returns scores [B, H_kv, T] float32. Raises ValueError for a wrong shape, dtype or device.
    """
    require_states("keys", keys, "... T D")
    require_launchable("keys", keys)
    heads = as_heads(keys)
    batch, num_heads, length, head_dim = heads.shape
    block_d = padded(head_dim)
    block_t = min(128, ELEMENTS_OF_A_TILE // block_d)
    split = max(LEAST_TOKENS_OF_A_SPLIT, triton.cdiv(triton.cdiv(length, MOST_SPLITS), block_t) * block_t)
    splits = triton.cdiv(length, split)
    sums = torch.empty((batch * num_heads, splits, block_d), dtype=torch.float32, device=keys.device)
    scores = torch.empty((batch, num_heads, length), dtype=torch.float32, device=keys.device)
    grid = (batch * num_heads * splits,)
    shape = (num_heads, length, head_dim, split, splits)
    tile = {"BLOCK_T": block_t, "BLOCK_D": block_d, "RESCALE": keys.dtype != torch.float16, "num_warps": 8}
    sum_unit_keys[grid](heads, sums, *heads.stride(), *shape, **tile)
    score_keys[grid](heads, sums, scores, *heads.stride(), *shape, **tile)
    return scores.reshape(keys.shape[:-1])


@triton.jit
def load_keys(base, first, end, stride_t, stride_d, head_dim, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, RESCALE: tl.constexpr):
    """Load the keys of positions first .. end-1, rescaled, with their inverse norms: [BLOCK_T, BLOCK_D] and [BLOCK_T]."""
    positions = first + tl.arange(0, BLOCK_T)
    channels = tl.arange(0, BLOCK_D)
    inside = (positions < end)[:, None] & (channels < head_dim)[None, :]
    offsets = positions.to(tl.int64)[:, None] * stride_t + channels.to(tl.int64)[None, :] * stride_d
    keys = tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)
    if RESCALE:
        # The exponent of the largest component, in place: 2**-exponent has the biased exponent 254 - exponent.
        largest = tl.max(tl.abs(keys), axis=1)
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
        scale = tl.minimum(tl.maximum(254 - exponent, 1), 253) << 23
        keys = keys * scale.to(tl.float32, bitcast=True)[:, None]
    squares = tl.sum(keys * keys, axis=1)
    # A zero key has no direction: its cosine is 0. Rounded root and quotient, since a tie may decide about a token.
    inverse = tl.where(squares > 0, tl.div_rn(1.0, tl.sqrt_rn(tl.where(squares > 0, squares, 1.0))), 0.0)
    return keys, inverse


@triton.jit(do_not_specialize=["length", "split", "splits"])
def sum_unit_keys(
    keys_ptr, sums_ptr, stride_b, stride_h, stride_t, stride_d, num_heads, length, head_dim, split, splits,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, RESCALE: tl.constexpr,
):  # fmt: skip
    """sums[head, split] = the sum of k / |k| over the keys of one split. Grid: heads * splits, the splits of a head together."""
    program = tl.program_id(0).to(tl.int64)
    head, part = program // splits, program % splits
    base = keys_ptr + (head // num_heads) * stride_b + (head % num_heads) * stride_h
    end = tl.minimum((part + 1) * split, length)
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for first in range(part * split, end, BLOCK_T):
        keys, inverse = load_keys(base, first, end, stride_t, stride_d, head_dim, BLOCK_T, BLOCK_D, RESCALE)
        total += keys * inverse[:, None]
    channels = tl.arange(0, BLOCK_D)
    tl.store(sums_ptr + program * BLOCK_D + channels, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["length", "split", "splits"])
def score_keys(
    keys_ptr, sums_ptr, scores_ptr, stride_b, stride_h, stride_t, stride_d, num_heads, length, head_dim, split, splits,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, RESCALE: tl.constexpr,
):  # fmt: skip
    """scores[head, t] = -cos(anchor, k_t) for the keys of one split. Grid as in `sum_unit_keys`."""
    program = tl.program_id(0).to(tl.int64)
    head, part = program // splits, program % splits
    base = keys_ptr + (head // num_heads) * stride_b + (head % num_heads) * stride_h
    channels = tl.arange(0, BLOCK_D)
    folded = tl.zeros([16, BLOCK_D], dtype=tl.float32)
    for first in range(0, splits, 16):
        parts = first + tl.arange(0, 16)
        offsets = (head * splits + parts)[:, None] * BLOCK_D + channels[None, :]
        folded += tl.load(sums_ptr + offsets, mask=(parts < splits)[:, None], other=0.0)
    anchor = tl.sum(folded, axis=0)
    squares = tl.sum(anchor * anchor, axis=0)
    anchor = tl.where(squares > 0, tl.div_rn(anchor, tl.sqrt_rn(tl.where(squares > 0, squares, 1.0))), 0.0)
    end = tl.minimum((part + 1) * split, length)
    for first in range(part * split, end, BLOCK_T):
        keys, inverse = load_keys(base, first, end, stride_t, stride_d, head_dim, BLOCK_T, BLOCK_D, RESCALE)
        positions = first + tl.arange(0, BLOCK_T)
        scores = -(tl.sum(keys * anchor[None, :], axis=1) * inverse)
        tl.store(scores_ptr + head * length + positions, scores, mask=positions < end)


def _compiled(dtype: torch.dtype, head_dim: int) -> Configuration:
    return Configuration(
        f"{dtype} head_dim {head_dim}".removeprefix("torch."),
        lambda: score(torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")),
    )


CONFIGURATIONS = [
    _compiled(dtype, head_dim) for dtype in (torch.bfloat16, torch.float16, torch.float32) for head_dim in (128, 64, 80, 96, 256)
]
