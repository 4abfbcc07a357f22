r"""KeyDiff to read: `score_i = -cos(mu, k_i)`, mu the mean of the unit keys (KD-8).

Two launches, since no score is known before the last key has entered the mean. First, one program for each
head walks over its keys and averages their directions. Then one program for each tile of tokens reads its
keys again and scores them.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only

BLOCK = 64  # tokens of a tile


@forward_only
def anchor(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: the mean of the unit keys: keys [..., T, D] give [..., D]."""
    length, head_dim = keys.shape[-2:]
    anchors = keys.new_empty(*keys.shape[:-2], head_dim)
    mean_directions[(anchors.numel() // head_dim,)](keys.contiguous(), anchors, length, head_dim, BLOCK)
    return anchors


@forward_only
def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: keys [..., T, D] give scores [..., T] in [-1, 1], higher = keep."""
    length, head_dim = keys.shape[-2:]
    scores = keys.new_empty(keys.shape[:-1])
    grid = (scores.numel() // length, triton.cdiv(length, BLOCK))
    score_keys[grid](keys.contiguous(), anchor(keys), scores, length, head_dim, BLOCK)
    return scores


@triton.jit
def unit_keys(keys_ptr, head, first, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load the keys of a tile and divide each by its norm,
    [BLOCK, D]; a zero key has no direction and stays zero.
    """
    positions = first + tl.arange(0, BLOCK)
    addresses = keys_ptr + (head * length + positions)[:, None] * D + tl.arange(0, D)[None, :]
    keys = tl.load(addresses, mask=(positions < length)[:, None], other=0.0)
    norms = tl.sqrt(tl.sum(keys * keys, axis=1))
    return keys / tl.where(norms == 0, 1.0, norms)[:, None]


@triton.jit
def mean_directions(keys_ptr, anchors_ptr, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """anchors[head] = the mean of the unit keys. Grid: heads."""
    head = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK, D], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        total += unit_keys(keys_ptr, head, first, length, D, BLOCK)
    tl.store(anchors_ptr + head * D + tl.arange(0, D), tl.sum(total, axis=0) / length)


@triton.jit
def score_keys(keys_ptr, anchors_ptr, scores_ptr, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """scores[head, t] = -cos(anchor, k_t). Grid: heads, tiles of tokens."""
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    anchor = tl.load(anchors_ptr + head * D + tl.arange(0, D))
    norm = tl.sqrt(tl.sum(anchor * anchor, axis=0))
    anchor = anchor / tl.where(norm == 0, 1.0, norm)
    scores = -tl.sum(unit_keys(keys_ptr, head, first, length, D, BLOCK) * anchor[None, :], axis=1)
    positions = first + tl.arange(0, BLOCK)
    tl.store(scores_ptr + head * length + positions, scores, mask=positions < length)
