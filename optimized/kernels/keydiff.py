r"""KeyDiff (arXiv 2504.15364) in two launches: KD-8, `score_i = -cos(mu, k_i)` with mu the mean of the unit keys.

It equals, in torch:

    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    score = -torch.cosine_similarity(unit.mean(dim=-2, keepdim=True), keys.float(), dim=-1)

Reads and writes. The anchor needs every key before the first score can be had, so the keys are read twice: 2 * T * H_kv * D
elements in, T * H_kv float32 scores out, and between the launches `splits` partial sums of D float32 per head. For 131,072
tokens of 8 heads of 128 bfloat16 channels that is 2 * 268 MB + 4 MB; at 4.3 TB/s the floor is 126 microseconds. The torch
expression moves at least six times the bytes, for it stores the unit keys. Prediction for one H200, not measured: either pass needs
14 to 16 instructions for an element, 62 and 70 microseconds at four a clock on 132 multiprocessors, as much as its bytes. So
they have to overlap well for 150 microseconds, and one pass alone takes 75 at best.

One pass. Block prompt processing scores nearly the same cache again and again (KD-6): from one block to the next, the sum of the
unit keys gains those of the block and loses those of the evicted keys. Who keeps that sum, D float32 per head, scores with
`score_with_anchor`, the second launch alone: the keys are read once, and the floor is 63 microseconds. `update_anchor` adds and
subtracts in a third kernel, `update_sums`: one program per head reads the new and the evicted keys, some 128 tokens of each, and
that is too little to split. What an update rounds off stays in the sum: after n updates the error is some sqrt(n) roundings of
the largest value that the sum had, so a sum taken afresh with `anchor_sum` now and then costs little and is never wrong.

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

from typing import Any

import torch
import triton
import triton.language as tl

from ..checks import require_same_kind, require_states
from ..keydiff import require_anchor
from .compiling import Configuration
from .launching import as_heads, padded, require_launchable

MOST_SPLITS = 64
LEAST_TOKENS_OF_A_SPLIT = 256
ELEMENTS_OF_A_TILE = 8192


def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `score_i = -cos(mu, k_i)`, as `optimized.keydiff.score`.

    Args: keys [B, H_kv, T, D] (any leading axes), float32, float16 or bfloat16, any strides, D at most 256.
    Returns scores [B, H_kv, T] float32. Raises ValueError for a wrong shape, dtype or device.
    """
    _require_keys("keys", keys)
    return _score(keys, _partial_sums(keys))


def anchor_sum(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `T mu = sum_i k_i / |k_i|`, what `update_anchor` keeps up to date. Args as `score`. Returns [..., D] float32."""
    _require_keys("keys", keys)
    return _partial_sums(keys).sum(dim=1).reshape(*keys.shape[:-2], keys.shape[-1])


def anchor(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `mu = (1/T) sum_i k_i / |k_i|`. Args as `score`. Returns [..., D] float32."""
    return anchor_sum(keys) / keys.shape[-2]


def score_with_anchor(keys: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    r"""KD-8 with an anchor from elsewhere, as `optimized.keydiff.score_with_anchor`: the keys are read once.

    Args: keys as `score`; anchor [..., D] float32, one for each head: the sum of unit keys or their mean, which score alike.
    Returns scores [..., T] float32. Raises ValueError for a wrong shape, dtype or device.
    """
    _require_keys("keys", keys)
    require_anchor("anchor", anchor, keys)
    heads = as_heads(keys)
    return _score(keys, anchor.reshape(heads.shape[0] * heads.shape[1], 1, keys.shape[-1]).contiguous())


def update_anchor(anchor: torch.Tensor, new_keys: torch.Tensor | None, evicted_keys: torch.Tensor | None) -> torch.Tensor:
    r"""KD-6: `sum' = sum + sum_new k / |k| - sum_evicted k / |k|`, as `optimized.keydiff.update_anchor`.

    Args: anchor [..., D] float32, the sum of the unit keys of the cache; new_keys [..., M, D] and evicted_keys [..., E, D] as
    `score`, None for none. Returns [..., D] float32. Raises ValueError for a wrong shape, dtype or device.
    """
    changes = [(name, keys) for name, keys in (("new_keys", new_keys), ("evicted_keys", evicted_keys)) if keys is not None]
    for name, keys in changes:
        _require_keys(name, keys)
        require_anchor("anchor", anchor, keys)
    if not changes:
        return anchor.clone()
    if len(changes) == 2:
        require_same_kind("evicted_keys", changes[1][1], "new_keys", changes[0][1])
    some = as_heads(changes[0][1])
    num_heads, head_dim = some.shape[1], some.shape[3]
    added, removed = (some[:, :, :0] if keys is None else as_heads(keys) for keys in (new_keys, evicted_keys))
    updated = torch.empty(anchor.shape, dtype=torch.float32, device=anchor.device)
    update_sums[(some.shape[0] * num_heads,)](
        anchor.contiguous(), added, removed, updated, *added.stride(), *removed.stride(),
        num_heads, added.shape[2], removed.shape[2], head_dim, **_tile(some),
    )  # fmt: skip
    return updated


def _require_keys(name: str, keys: torch.Tensor) -> None:
    """Raise ValueError unless the kernels can run on `keys` [..., T, D]."""
    require_states(name, keys, "... T D")
    require_launchable(name, keys)


def _tile(keys: torch.Tensor) -> dict[str, Any]:
    """Return the constants of the tiling."""
    block_d = padded(keys.shape[-1])
    tile = {"BLOCK_T": min(128, ELEMENTS_OF_A_TILE // block_d), "BLOCK_D": block_d}
    return tile | {"RESCALE": keys.dtype != torch.float16, "num_warps": 8}


def _splits(length: int, block_t: int) -> tuple[int, int]:
    """Return the tokens of a split, whole tiles, and the number of splits."""
    split = max(LEAST_TOKENS_OF_A_SPLIT, triton.cdiv(triton.cdiv(length, MOST_SPLITS), block_t) * block_t)
    return split, triton.cdiv(length, split)


def _partial_sums(keys: torch.Tensor) -> torch.Tensor:
    """Return the sum of the unit keys of every split, [B * H_kv, splits, D] float32."""
    heads, tile = as_heads(keys), _tile(keys)
    batch, num_heads, length, head_dim = heads.shape
    split, splits = _splits(length, tile["BLOCK_T"])
    sums = torch.empty((batch * num_heads, splits, head_dim), dtype=torch.float32, device=keys.device)
    sum_unit_keys[(batch * num_heads * splits,)](heads, sums, *heads.stride(), num_heads, length, head_dim, split, splits, **tile)
    return sums


def _score(keys: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Score the keys against the sum of `sums` [B * H_kv, parts, D] over its parts."""
    heads, tile = as_heads(keys), _tile(keys)
    batch, num_heads, length, head_dim = heads.shape
    split, splits = _splits(length, tile["BLOCK_T"])
    scores = torch.empty(keys.shape[:-1], dtype=torch.float32, device=keys.device)
    score_keys[(batch * num_heads * splits,)](
        heads, sums, scores, *heads.stride(), num_heads, length, head_dim, split, splits, sums.shape[1], **tile
    )
    return scores


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
    inverse = tl.where(squares == 0, 0.0, tl.div_rn(1.0, tl.sqrt_rn(tl.where(squares == 0, 1.0, squares))))
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
    tl.store(sums_ptr + program * head_dim + channels, tl.sum(total, axis=0), mask=channels < head_dim)


@triton.jit(do_not_specialize=["added_length", "removed_length"])
def update_sums(
    sums_ptr, added_ptr, removed_ptr, updated_ptr,
    added_stride_b, added_stride_h, added_stride_t, added_stride_d,
    removed_stride_b, removed_stride_h, removed_stride_t, removed_stride_d,
    num_heads, added_length, removed_length, head_dim,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, RESCALE: tl.constexpr,
):  # fmt: skip
    """updated[head] = sums[head] + the sum of k / |k| over the keys added - that over the keys removed. Grid: heads."""
    head = tl.program_id(0).to(tl.int64)
    item, kv_head = head // num_heads, head % num_heads
    base = added_ptr + item * added_stride_b + kv_head * added_stride_h
    change = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for first in range(0, added_length, BLOCK_T):
        keys, inverse = load_keys(
            base, first, added_length, added_stride_t, added_stride_d, head_dim, BLOCK_T, BLOCK_D, RESCALE
        )  # fmt: skip
        change += keys * inverse[:, None]
    base = removed_ptr + item * removed_stride_b + kv_head * removed_stride_h
    for first in range(0, removed_length, BLOCK_T):
        keys, inverse = load_keys(
            base, first, removed_length, removed_stride_t, removed_stride_d, head_dim, BLOCK_T, BLOCK_D, RESCALE
        )  # fmt: skip
        change -= keys * inverse[:, None]
    channels = tl.arange(0, BLOCK_D)
    inside = channels < head_dim
    sums = tl.load(sums_ptr + head * head_dim + channels, mask=inside, other=0.0)
    tl.store(updated_ptr + head * head_dim + channels, sums + tl.sum(change, axis=0), mask=inside)


@triton.jit(do_not_specialize=["length", "split", "splits", "parts"])
def score_keys(
    keys_ptr, sums_ptr, scores_ptr, stride_b, stride_h, stride_t, stride_d, num_heads, length, head_dim, split, splits, parts,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, RESCALE: tl.constexpr,
):  # fmt: skip
    """scores[head, t] = -cos(anchor, k_t) for one split, anchor = the sum of sums[head, :parts]. Grid as in `sum_unit_keys`."""
    program = tl.program_id(0).to(tl.int64)
    head, part = program // splits, program % splits
    base = keys_ptr + (head // num_heads) * stride_b + (head % num_heads) * stride_h
    channels = tl.arange(0, BLOCK_D)
    folded = tl.zeros([16, BLOCK_D], dtype=tl.float32)
    for first in range(0, parts, 16):
        rows = first + tl.arange(0, 16)
        offsets = (head * parts + rows)[:, None] * head_dim + channels[None, :]
        folded += tl.load(sums_ptr + offsets, mask=(rows < parts)[:, None] & (channels < head_dim)[None, :], other=0.0)
    anchor = tl.sum(folded, axis=0)
    squares = tl.sum(anchor * anchor, axis=0)
    # Asking for 0 and not for more than 0 lets NaN through.
    anchor = tl.where(squares == 0, 0.0, tl.div_rn(anchor, tl.sqrt_rn(tl.where(squares == 0, 1.0, squares))))
    end = tl.minimum((part + 1) * split, length)
    for first in range(part * split, end, BLOCK_T):
        keys, inverse = load_keys(base, first, end, stride_t, stride_d, head_dim, BLOCK_T, BLOCK_D, RESCALE)
        positions = first + tl.arange(0, BLOCK_T)
        scores = -(tl.sum(keys * anchor[None, :], axis=1) * inverse)
        tl.store(scores_ptr + head * length + positions, scores, mask=positions < end)


def _compiled(dtype: torch.dtype, head_dim: int) -> Configuration:
    def launch() -> torch.Tensor:
        keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
        anchor = torch.empty((2, 8, head_dim), dtype=torch.float32, device="meta")
        update_anchor(anchor, keys[:, :, :128], keys[:, :, 128:256])
        return score(keys)

    return Configuration(f"{dtype} head_dim {head_dim}".removeprefix("torch."), launch)


CONFIGURATIONS = [
    _compiled(dtype, head_dim) for dtype in (torch.bfloat16, torch.float16, torch.float32) for head_dim in (128, 64, 80, 96, 256)
]
