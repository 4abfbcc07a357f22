r"""Top-k to read (SEL-2 to SEL-4): the highest scores of each row stay, of equal scores the lower
positions, the protected first.

One launch, on scores that `to_numbers` has turned into whole numbers of 32 bits in the same order. It has one
program for each row. Nothing is sorted: the program searches the number of the last token that stays, the
threshold, four bits at a time, with eight walks over the row. One walk more counts the numbers above the
threshold, and the last one, from left to right, writes the mask.
"""

import torch
import triton
import triton.language as tl

from evictionary.reference.selection import budget

# the budget is exact integer arithmetic: the reference's function serves here too
__all__ = ["budget", "keep_each", "top_k"]

BLOCK = 512  # tokens of a tile


@torch.no_grad()
def top_k(scores: torch.Tensor, budget: int, protected: torch.Tensor | None = None) -> torch.Tensor:
    r"""SEL-2..4: scores [..., T] and protected [..., T], boolean, give kept [..., T] with min(budget, T)
    True in each row.
    """
    return keep_each(
        scores, torch.full(scores.shape[:-1], min(budget, scores.shape[-1]), device=scores.device), protected
    )


@torch.no_grad()
def keep_each(
    scores: torch.Tensor, counts: torch.Tensor, protected: torch.Tensor | None = None
) -> torch.Tensor:
    r"""`top_k`, but each row keeps its own number: counts [...], whole numbers from 0 to T."""
    numbers = to_numbers(scores)
    if protected is not None:
        numbers = numbers.masked_fill(protected, 0x7FFFFFFF)
    kept = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    keep_highest[(counts.numel(),)](numbers, counts.contiguous(), kept, scores.shape[-1], BLOCK, num_warps=8)
    return kept


def to_numbers(scores: torch.Tensor) -> torch.Tensor:
    """Scores as int32 numbers of the same order."""
    # 0 and -0 are equal, their bits are not
    bits = torch.where(scores == 0, 0.0, scores.float()).contiguous().view(torch.int32)
    # Bits rise with positive numbers and fall with negative ones: those of the negative ones are flipped, all
    # but the sign.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def load_tile(numbers_ptr, row, first, length, BLOCK: tl.constexpr):
    """Load the numbers of a tile of a row; beyond its end the least of all int32, which no score has."""
    positions = first + tl.arange(0, BLOCK)
    return tl.load(numbers_ptr + row * length + positions, mask=positions < length, other=-(2**31))


@triton.jit
def keep_highest(numbers_ptr, counts_ptr, kept_ptr, length, BLOCK: tl.constexpr):
    """kept[row] = the mask of the counts[row] highest numbers. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + row)
    # The threshold is the largest number that `count` numbers reach. Of its next four bits, all 16 values are
    # tried at once.
    threshold = tl.full([], -(2**31), dtype=tl.int32)
    for step in range(8):
        candidates = threshold + (tl.arange(0, 16) << (28 - 4 * step))
        reached = tl.zeros([16], dtype=tl.int32)
        for first in range(0, length, BLOCK):
            numbers = load_tile(numbers_ptr, row, first, length, BLOCK)
            reached += tl.sum((numbers[None, :] >= candidates[:, None]).to(tl.int32), axis=1)
        threshold = tl.max(tl.where(reached >= count, candidates, threshold), axis=0)
    above = tl.zeros([], dtype=tl.int32)
    for first in range(0, length, BLOCK):
        above += tl.sum((load_tile(numbers_ptr, row, first, length, BLOCK) > threshold).to(tl.int32), axis=0)
    # What is above stays; of the equals as many as there is room for, from the left.
    seen = tl.zeros([], dtype=tl.int32)
    for first in range(0, length, BLOCK):
        numbers = load_tile(numbers_ptr, row, first, length, BLOCK)
        equal = (numbers == threshold).to(tl.int32)
        kept = (numbers > threshold) | ((equal != 0) & (above + seen + tl.cumsum(equal, axis=0) <= count))
        seen += tl.sum(equal, axis=0)
        positions = first + tl.arange(0, BLOCK)
        tl.store(kept_ptr + row * length + positions, kept, mask=positions < length)
