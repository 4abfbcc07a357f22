r"""LagKV to read: how much a token varies, measured by the range of the next partition (LK-7 to LK-12).

Two launches, for the keys and for the values. A program for each partition walks over the next partition for
the range of each channel, and then over its own for the deviation of each token. The softmax of these
deviations is torch's.
"""

import torch
import triton
import triton.language as tl

from evictionary.reference.lagkv import (
    compression_ratio,
    keep_ratio_for,
    retained_length,
    tokens_per_partition,
)

from ..gradients import forward_only
from .selection import top_k

# Counting partitions is exact integer arithmetic: the reference's functions serve here too.
__all__ = [
    "compression_ratio",
    "keep_ratio_for",
    "retained_length",
    "score",
    "select",
    "tokens_per_partition",
]

BLOCK = 64  # tokens of a tile


@forward_only
def score(
    keys: torch.Tensor, values: torch.Tensor, next_keys: torch.Tensor, next_values: torch.Tensor
) -> torch.Tensor:
    r"""LK-7..11: keys [..., L, D], values [..., L, D_v] and the partition after them give scores [..., L],
    which sum to 2.
    """
    return variation(keys, next_keys).softmax(dim=-1) + variation(values, next_values).softmax(dim=-1)


@forward_only
def variation(states: torch.Tensor, next_states: torch.Tensor) -> torch.Tensor:
    r"""LK-7..9: the deviation of each token of states [..., L, C], normalised by next_states [..., L', C]."""
    deviations = states.new_empty(states.shape[:-1])
    sizes = (states.shape[-2], *next_states.shape[-2:], BLOCK)
    grid = (deviations.numel() // states.shape[-2],)
    deviate[grid](states.contiguous(), next_states.contiguous(), deviations, *sizes)
    return deviations


@torch.no_grad()
def select(
    keys: torch.Tensor, values: torch.Tensor, *, keep_ratio: float, sink_size: int = 16, lag_size: int = 1024
) -> torch.Tensor:
    r"""LK-12: keep the sinks, the best of each partition but the last, and the last partition onwards:
    kept [B, H_kv, T].
    """
    kept = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    partitions = (keys.shape[2] - sink_size) // lag_size
    if partitions >= 2:
        parts = slice(sink_size, sink_size + partitions * lag_size)
        keys, values = (states[:, :, parts].unflatten(2, (partitions, lag_size)) for states in (keys, values))
        scores = score(keys[:, :, :-1], values[:, :, :-1], keys[:, :, 1:], values[:, :, 1:])
        chosen = top_k(scores, tokens_per_partition(keep_ratio, lag_size))
        kept[:, :, sink_size : parts.stop - lag_size] = chosen.flatten(2)
    return kept


@triton.jit
def load_tile(states_ptr, partition, first, length, other, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load the states of a tile of tokens, [BLOCK, D], with `other` beyond the end of the partition."""
    positions = first + tl.arange(0, BLOCK)
    addresses = states_ptr + (partition * length + positions)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(addresses, mask=(positions < length)[:, None], other=other)


@triton.jit
def deviate(states_ptr, next_ptr, deviations_ptr, length, following, D: tl.constexpr, BLOCK: tl.constexpr):
    """deviations[t] = std over the channels of (z_t - min)
    / (max - min), of the next partition. Grid: partitions.
    """
    partition = tl.program_id(0).to(tl.int64)
    low = tl.full([D], float("inf"), dtype=tl.float32)
    high = tl.full([D], float("-inf"), dtype=tl.float32)
    for first in range(0, following, BLOCK):
        low = tl.minimum(
            low, tl.min(load_tile(next_ptr, partition, first, following, float("inf"), D, BLOCK), axis=0)
        )
        high = tl.maximum(
            high, tl.max(load_tile(next_ptr, partition, first, following, float("-inf"), D, BLOCK), axis=0)
        )
    spread = high - low
    for first in range(0, length, BLOCK):
        states = load_tile(states_ptr, partition, first, length, 0.0, D, BLOCK)
        # A channel that is constant in the next partition says nothing about scale: it counts as 0.
        normal = tl.where(
            spread == 0, 0.0, (states - low[None, :]) / tl.where(spread == 0, 1.0, spread)[None, :]
        )
        centred = normal - tl.sum(normal, axis=1)[:, None] / D
        deviations = tl.sqrt(tl.sum(centred * centred, axis=1) / (D - 1 if D > 1 else 1))
        positions = first + tl.arange(0, BLOCK)
        tl.store(deviations_ptr + partition * length + positions, deviations, mask=positions < length)
