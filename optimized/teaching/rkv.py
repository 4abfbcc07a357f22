r"""R-KV to read: the attention of the last queries, less how much other keys repeat a key (RK-1 to RK-5).

Four launches. One makes all keys of length 1, so that cosines are products. For each tile of rows of the T x
T cosines, one program finds the latest similar key of each row; then for each tile of columns one program
adds them up without those. The cosines are computed twice and never stored. The fourth launch finds the
largest logits of the groups.
"""

import math

import torch
import triton
import triton.language as tl
from torch.nn.functional import max_pool1d

from .h2o import load_channels
from .tova import tile_logits

BLOCK = 64  # tokens of a tile


def redundancy(keys: torch.Tensor, *, threshold: float = 0.5) -> torch.Tensor:
    r"""RK-3: keys [..., T, D] give the redundancy [..., T], which sums to 1."""
    length, head_dim = keys.shape[-2:]
    totals, directions = keys.new_empty(keys.shape[:-1]), keys.new_empty(keys.shape)
    latest = torch.empty(keys.shape[:-1], dtype=torch.int32, device=keys.device)
    grid = (totals.numel() // length, triton.cdiv(length, BLOCK))
    point[grid](keys.contiguous(), directions, length, head_dim, BLOCK)
    find_latest[grid](directions, latest, threshold, length, head_dim, BLOCK, num_warps=8)
    sum_columns[grid](directions, latest, totals, length, head_dim, BLOCK, num_warps=8)
    return (totals / length).softmax(dim=-1)


def importance(
    queries: torch.Tensor, keys: torch.Tensor, *, window_size: int = 8, kernel_size: int = 7
) -> torch.Tensor:
    r"""RK-4: queries [B, H_q, M, D] of the last tokens and keys [B, H_kv, T, D] give [B, H_kv, T -
    window_size].
    """
    batch, heads, length, head_dim = keys.shape
    last = (queries[:, :, -window_size:] * head_dim**-0.5).contiguous()
    logits = keys.new_empty(batch, heads, window_size, length - window_size)
    grid = (batch * heads * window_size, triton.cdiv(length - window_size, BLOCK))
    largest_logits[grid](
        last, keys.contiguous(), logits, last.shape[1] // heads, window_size, length, head_dim, BLOCK
    )
    return max_pool1d(logits.softmax(dim=-1).mean(dim=2), kernel_size, stride=1, padding=kernel_size // 2)


def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    window_size: int = 8,
    kernel_size: int = 7,
    importance_share: float = 0.07,
    threshold: float = 0.5,
) -> torch.Tensor:
    r"""RK-5: `lambda I_t - (1 - lambda) R_t`, lambda = importance_share: scores [B, H_kv, T], infinite in
    the window.
    """
    scores = torch.full_like(keys[..., 0], math.inf)
    if keys.shape[2] > window_size:
        attended = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
        repeated = redundancy(keys, threshold=threshold)[..., :-window_size]
        scores[..., :-window_size] = importance_share * attended - (1 - importance_share) * repeated
    return scores


@triton.jit
def point(keys_ptr, directions_ptr, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """directions[head, t] = k_t / |k_t|, and 0 for a zero key. Grid: heads, tiles of tokens."""
    head = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places, inside = (
        (head * length + positions)[:, None] * D + tl.arange(0, D)[None, :],
        (positions < length)[:, None],
    )
    keys = tl.load(keys_ptr + places, mask=inside, other=0.0)
    largest = tl.max(tl.abs(keys), axis=1)[:, None]
    keys /= tl.where(largest == 0, 1.0, largest)  # the square of 1e30 would overflow
    norms = tl.sqrt(tl.sum(keys * keys, axis=1))[:, None]
    tl.store(directions_ptr + places, keys / tl.where(norms == 0, 1.0, norms), mask=inside)


@triton.jit
def cosines(directions_ptr, rows, columns, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """RK-1: S_ij of a tile of rows and a tile of columns, [BLOCK, BLOCK]; 0 for i = j and beyond the last
    token.
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
    """RK-3: totals[head, j] = the sum of S_ij over the rows i whose latest is not j. Grid: heads, tiles of
    columns.
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


@triton.jit
def largest_logits(
    queries_ptr, keys_ptr, logits_ptr, group, window, length, D: tl.constexpr, BLOCK: tl.constexpr
):
    """RK-4: logits[head, m, t] = max over the group of q_gm . k_t. Grid: KV heads times queries, tiles of
    tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    head, before, first = row // window, length - window, tl.program_id(1) * BLOCK
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for query_head in range(head * group, (head + 1) * group):
        query = tl.load(queries_ptr + (query_head * window + row % window) * D + tl.arange(0, D))
        largest = tl.maximum(
            largest, tile_logits(query, keys_ptr + head * length * D, first, before, D, BLOCK)
        )
    positions = first + tl.arange(0, BLOCK)
    tl.store(logits_ptr + row * before + positions, largest, mask=positions < before)
