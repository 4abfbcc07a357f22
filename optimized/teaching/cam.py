r"""CaM to read: a kept token adds the parts of the values that are merged into it (CAM-3).

The next kept tokens share an evicted value. So what a kept token receives lies between it and the m-th kept
token before it. A program walks this stretch of neighbours, and no two programs write to one place.
"""

import torch
import triton
import triton.language as tl

from ..cam import stretches
from ..gradients import forward_only

BLOCK = 32  # tokens of a step


@forward_only
def spread(
    values: torch.Tensor, kept: torch.Tensor, weights: torch.Tensor, *, merge_size: int = 32
) -> torch.Tensor:
    r"""CAM-3: values [..., T, D_v] and weights [..., T] give the values after kept tokens have received."""
    values, (parts, first, _) = values.contiguous(), stretches(kept, weights, merge_size)
    answer, (length, channels) = torch.empty_like(values), values.shape[-2:]
    receive[length, kept.numel() // length](values, parts, first.contiguous(), answer, channels, BLOCK)
    return answer


@triton.jit
def receive(values, parts, first, answer, D: tl.constexpr, BLOCK: tl.constexpr):
    """A value, and the parts of those from the place `first` to its own. Grid: tokens, heads."""
    token, length, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    row, channel = head * length, tl.arange(0, D)
    total = tl.load(values + (row + token) * D + channel)
    for start in range(tl.load(first + row + token), token, BLOCK):
        place = start + tl.arange(0, BLOCK)
        part = tl.load(parts + row + place, mask=place < token, other=0.0)
        of_place = values + (row + place[:, None]) * D + channel[None, :]
        total += tl.sum(part[:, None] * tl.load(of_place, mask=place[:, None] < token, other=0.0), axis=0)
    tl.store(answer + (row + token) * D + channel, total)
