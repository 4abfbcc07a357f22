r"""R-KV to read: the attention of the last queries, less how much other keys repeat a key (RK-1 to RK-5).

Two launches, for keys of length 1, so that cosines are products. For each tile of rows of the T x T cosines,
one program finds the latest similar key of each row; then for each tile of columns one program adds them up
without those. The cosines are computed twice and never stored.
"""

import math

import torch
import triton
import triton.language as tl
from torch.nn.functional import max_pool1d, normalize

from ..attention import grouped_logits
from ..gradients import forward_only
from .h2o import load_channels

BLOCK = 64  # tokens of a tile


@forward_only
def redundancy(keys: torch.Tensor, *, threshold: float = 0.5) -> torch.Tensor:
    r"""RK-3: keys [..., T, D] give the redundancy [..., T], which sums to 1."""
    length, head_dim = keys.shape[-2:]
    totals, latest = keys.new_empty(keys.shape[:-1]), torch.empty_like(keys[..., 0], dtype=torch.int32)
    largest = keys.abs().amax(dim=-1, keepdim=True)  # the square of 1e30 would overflow
    directions = normalize(keys / torch.where(largest == 0, 1, largest), dim=-1).contiguous()
    grid = (totals.numel() // length, triton.cdiv(length, BLOCK))
    find_latest[grid](directions, latest, threshold, length, head_dim, BLOCK, num_warps=8)
    sum_columns[grid](directions, latest, totals, length, head_dim, BLOCK, num_warps=8)
    return (totals / length).softmax(dim=-1)


@forward_only
def importance(
    queries: torch.Tensor, keys: torch.Tensor, *, window_size: int = 8, kernel_size: int = 7
) -> torch.Tensor:
    r"""RK-4: queries [B, H_q, M, D] of the last tokens and
    keys [B, H_kv, T, D] give [B, H_kv, T - window_size].
    """
    logits = grouped_logits(queries[:, :, -window_size:], keys[:, :, :-window_size]).amax(dim=2)
    return max_pool1d(logits.softmax(dim=-1).mean(dim=2), kernel_size, stride=1, padding=kernel_size // 2)


@forward_only
def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    window_size: int = 8,
    kernel_size: int = 7,
    importance_share: float = 0.07,
    threshold: float = 0.5,
) -> torch.Tensor:
    r"""RK-5: `lambda I_t - (1 - lambda) R_t`, lambda =
    importance_share: scores [B, H_kv, T], infinite in the window.
    """
    scores = torch.full_like(keys[..., 0], math.inf)
    if keys.shape[2] > window_size:
        attended = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
        repeated = redundancy(keys, threshold=threshold)[..., :-window_size]
        scores[..., :-window_size] = importance_share * attended - (1 - importance_share) * repeated
    return scores


@triton.jit
def cosines(directions_ptr, rows, columns, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """RK-1: S_ij of a tile of rows and a tile of columns,
    [BLOCK, BLOCK]; 0 for i = j and beyond the last token.
    """
    found = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for first in range(0, D, 16):
        row_keys = load_channels(directions_ptr, rows, length, first, D)
        column_keys = load_channels(directions_ptr, columns, length, first, D)
        found = tl.dot(row_keys, tl.trans(column_keys), found, input_precision="ieee")
    return tl.where(rows[:, None] == columns[None, :], 0.0, found)


@triton.jit
def find_latest(directions_ptr, latest_ptr, threshold, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """RK-2: latest[head, i] = the last j with S_ij > threshold, or -1. Grid: heads, tiles of rows."""
    head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    latest = tl.full([BLOCK], -1, dtype=tl.int32)
    for first in range(0, length, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        similar = cosines(directions_ptr + head * length * D, rows, columns, length, D, BLOCK) > threshold
        latest = tl.maximum(
            latest, tl.max(tl.where(similar & (columns < length)[None, :], columns[None, :], -1), axis=1)
        )
    tl.store(latest_ptr + head * length + rows, latest, mask=rows < length)


@triton.jit
def sum_columns(directions_ptr, latest_ptr, totals_ptr, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """RK-3: totals[head, j] = the sum of S_ij over the rows
    i whose latest is not j. Grid: heads, tiles of columns.
    """
    head = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        latest = tl.load(latest_ptr + head * length + rows, mask=rows < length, other=-1)
        found = cosines(directions_ptr + head * length * D, rows, columns, length, D, BLOCK)
        total += tl.sum(tl.where(columns[None, :] == latest[:, None], 0.0, found), axis=0)
    tl.store(totals_ptr + head * length + columns, total, mask=columns < length)
