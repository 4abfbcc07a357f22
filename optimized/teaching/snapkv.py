r"""SnapKV to read: the attention that tokens receive
from the last queries, smoothed over neighbours (SN-1).

The attention that a token receives comes from the two launches of `h2o`, for the queries of the window alone.
One launch more takes the mean over neighbours.
"""

import math

import torch
import triton
import triton.language as tl

from ..gradients import forward_only
from .h2o import score as received_attention

BLOCK = 256  # tokens of a tile


@forward_only
def score(
    queries: torch.Tensor, keys: torch.Tensor, *, window_size: int = 32, kernel_size: int = 7
) -> torch.Tensor:
    r"""SN-1: queries [B, H_q, M, D] of the last tokens, keys [B, H_kv, T, D] give scores [B, H_kv, T],
    infinite in the window.
    """
    before = keys.shape[2] - window_size
    scores = torch.full_like(keys[..., 0], math.inf)
    if before > 0:
        received = received_attention(queries[:, :, -window_size:], keys)[..., :before]
        scores[..., :before] = average_pool(received / window_size, kernel_size)
    return scores


@forward_only
def average_pool(weights: torch.Tensor, kernel_size: int) -> torch.Tensor:
    r"""SN-1: `p_t = (1/K) sum of w_u over |u - t| <= (K - 1) / 2`, K odd: weights [..., N] give [..., N]."""
    pooled = weights.new_empty(weights.shape)
    length = weights.shape[-1]
    grid = (weights.numel() // length, triton.cdiv(length, BLOCK))
    average_neighbours[grid](weights.contiguous(), pooled, length, kernel_size, BLOCK)
    return pooled


@triton.jit
def average_neighbours(weights_ptr, pooled_ptr, length, kernel_size, BLOCK: tl.constexpr):
    """pooled[row, t] = the mean of the weights around t,
    zeros beyond both ends. Grid: rows, tiles of tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(kernel_size):
        neighbours = positions + step - kernel_size // 2
        there = (neighbours >= 0) & (neighbours < length)
        total += tl.load(weights_ptr + row * length + neighbours, mask=there, other=0.0)
    tl.store(pooled_ptr + row * length + positions, total / kernel_size, mask=positions < length)
