r"""DropKV to read: how far the output of the last queries
moves when one token alone is evicted (DK-1, DK-2).

One launch, and the mean over neighbours of `snapkv`. A program for each query of the window walks over the
tokens that it sees and writes the square of `p_j / (1 - p_j) |v_j - o|`. The token of the largest weight is
set apart: where its weight rounds to 1, that form is infinity times 0.
"""

import math

import torch
import triton
import triton.language as tl

from ..gradients import forward_only
from .snapkv import average_pool
from .tova import tile_logits

BLOCK = 64  # tokens of a tile


@forward_only
def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window_size: int = 32,
    kernel_size: int = 7,
) -> torch.Tensor:
    r"""DK-2: queries [B, H_q, M, D] of the last tokens,
    keys, values [B, H_kv, T, D_v] give scores [B, H_kv, T].
    """
    batch, num_kv_heads, length, head_dim = keys.shape
    before, group = length - window_size, queries.shape[1] // num_kv_heads
    scores = torch.full_like(keys[..., 0], math.inf)
    if before > 0:
        last = (queries[:, :, -window_size:] * head_dim**-0.5).contiguous()
        changes = keys.new_zeros(*last.shape[:3], length)
        sizes = (group, window_size, length, head_dim, values.shape[3], BLOCK)
        drop_one[(last[..., 0].numel(),)](last, keys.contiguous(), values.contiguous(), changes, *sizes)
        summed = changes.view(batch, num_kv_heads, -1, length).sum(dim=2) / group
        scores[..., :before] = average_pool(summed, kernel_size)[..., :before]
    return scores


@triton.jit
def drop_one(
    queries_ptr, keys_ptr, values_ptr, changes_ptr, group, window, length, D: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """DK-1: changes[query, j] = the square of the change of the output without token j. Grid: the queries
    of the window.
    """
    row = tl.program_id(0).to(tl.int64)
    head, seen = row // window // group, length - window + row % window + 1
    keys_ptr, values_ptr = keys_ptr + head * length * D, values_ptr + head * length * DV
    query, channels = tl.load(queries_ptr + row * D + tl.arange(0, D)), tl.arange(0, DV)
    highest = tl.full([], float("-inf"), dtype=tl.float32)
    place = tl.zeros([], dtype=tl.int64)
    for first in range(0, seen, BLOCK):
        logits = tile_logits(query, keys_ptr, first, seen, D, BLOCK)
        place = tl.where(tl.max(logits, axis=0) > highest, first + tl.argmax(logits, axis=0), place)
        highest = tl.maximum(highest, tl.max(logits, axis=0))
    # The output without the token of the largest weight, from sums that count from the largest logit of the
    # others.
    second = tl.full([], float("-inf"), dtype=tl.float32)
    total, without = tl.zeros([], dtype=tl.float32), tl.zeros([DV], dtype=tl.float32)
    for first in range(0, seen, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        logits = tl.where(
            positions == place, float("-inf"), tile_logits(query, keys_ptr, first, seen, D, BLOCK)
        )
        higher = tl.maximum(second, tl.max(logits, axis=0))
        if higher > float("-inf"):
            powers, kept = tl.exp(logits - higher), tl.exp(second - higher)
            places = positions[:, None] * DV + channels[None, :]
            tile = tl.load(values_ptr + places, mask=(positions < seen)[:, None], other=0.0)
            total = total * kept + tl.sum(powers, axis=0)
            without = without * kept + tl.sum(powers[:, None] * tile, axis=0)
            second = higher
    without, odds = without / total, total * tl.exp(second - highest)
    value, largest = tl.load(values_ptr + place * DV + channels), 1 / (1 + odds)
    output = largest * value + largest * odds * without
    for first in range(0, seen, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        places = positions[:, None] * DV + channels[None, :]
        tile = tl.load(values_ptr + places, mask=(positions < seen)[:, None], other=0.0)
        weights = largest * tl.exp(tile_logits(query, keys_ptr, first, seen, D, BLOCK) - highest)
        is_largest = positions == place
        moved = tile - tl.where(is_largest[:, None], without[None, :], output[None, :])
        factor = tl.where(is_largest, weights, weights / tl.where(is_largest, 1.0, 1 - weights))
        tl.store(
            changes_ptr + row * length + positions,
            factor * factor * tl.sum(moved * moved, axis=1),
            mask=positions < seen,
        )
