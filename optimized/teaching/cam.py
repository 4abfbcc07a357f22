r"""CaM to read: a kept token adds the shares of the values that were merged into it (CAM-3).

The next kept tokens share an evicted value. So what a kept token receives lies between it and the m-th kept
token before it. A program walks this stretch of neighbours, and no two programs write to one place.
"""

import torch
import triton
import triton.language as tl

from ..cam import in_order, probabilities, receivers

BLOCK = 32  # tokens of a step


def merge_values(
    values: torch.Tensor,
    attention: torch.Tensor,
    kept: torch.Tensor,
    draws: torch.Tensor,
    *,
    merge_size: int = 32,
) -> torch.Tensor:
    r"""CAM-4: values [B, H_kv, T, D_v] with those of some evicted tokens merged into the next kept ones."""
    merged = draws < probabilities(attention, kept, merge_size=merge_size)
    return spread(values, kept, merged.float(), merge_size=merge_size)


def spread(
    values: torch.Tensor, kept: torch.Tensor, weights: torch.Tensor, *, merge_size: int = 32
) -> torch.Tensor:
    r"""CAM-3: values [..., T, D_v] and weights [..., T] give the values after the tokens in `kept` have
    received.
    """
    before, count = receivers(kept, merge_size)
    parts = torch.where(count > 0, weights / count.clamp(min=1), 0)
    rank = before - 1 - merge_size
    first = in_order(kept).gather(-1, rank.clamp(min=0)).masked_fill(rank < 0, -1)
    # an evicted token has nothing between itself and itself
    first = torch.where(kept, first, torch.arange(kept.shape[-1], device=kept.device))
    values = values.contiguous()
    answer, (length, channels) = torch.empty_like(values), values.shape[-2:]
    receive[kept.numel() // length, length](values, parts, first.contiguous(), answer, channels, BLOCK)
    return answer


@triton.jit
def receive(values, parts, first, answer, D: tl.constexpr, BLOCK: tl.constexpr):
    """A value, and the parts of those between the place `first` and its own. Grid: heads, tokens."""
    head, token, length = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, channel = head * length, tl.arange(0, D)
    total = tl.load(values + (row + token) * D + channel)
    for start in range(tl.load(first + row + token) + 1, token, BLOCK):
        place = start + tl.arange(0, BLOCK)
        part = tl.load(parts + row + place, mask=place < token, other=0.0)
        rows = (row + place[:, None]) * D + channel[None, :]
        value = tl.load(values + rows, mask=place[:, None] < token, other=0.0)
        total += tl.sum(part[:, None] * value, axis=0)
    tl.store(answer + (row + token) * D + channel, total)
