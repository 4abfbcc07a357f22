r"""GVote to read: sampled queries vote, each for as many tokens as the current query needs (GV-A1 to
GV-A3, GV-A9 to GV-A11).

The attention of the current query comes from `tova`. One launch finds its nucleus, one program for each query
head; the size of the nucleus is the number of votes of a sample. The logits of the samples are a product, and
the launch of `selection` turns them into votes.
"""

import torch
import triton
import triton.language as tl

from evictionary.reference.checks import as_fraction

from ..attention import grouped_logits
from .selection import keep_each as top_each
from .tova import last_attention

__all__ = ["nucleus", "select", "top_each"]

BLOCK = 64  # tokens of a tile


@torch.no_grad()
def nucleus(attention: torch.Tensor, p: float) -> torch.Tensor:
    r"""GV-A2: weights [..., T] give the mask [..., T] of the fewest tokens that hold at least p of the
    mass; at least one.
    """
    kept = torch.empty(attention.shape, dtype=torch.bool, device=attention.device)
    length, beyond = attention.shape[-1], float(1 - as_fraction("p", p))
    keep_nucleus[(attention.numel() // length,)](attention.contiguous(), kept, length, beyond, BLOCK)
    return kept


@torch.no_grad()
def select(
    query: torch.Tensor, keys: torch.Tensor, sampled_queries: torch.Tensor, *, p: float = 0.95
) -> torch.Tensor:
    r"""GV-A11: query [B, H_q, D], keys [B, H_kv, T, D] and sampled_queries [B, H_q, S, D] give kept [B,
    H_kv, T], ragged.
    """
    logits = grouped_logits(sampled_queries, keys)
    counts = nucleus(last_attention(query, keys), p).sum(dim=-1).view(*logits.shape[:3], 1)
    return top_each(logits, counts.expand(logits.shape[:-1])).any(dim=3).any(dim=2)


@triton.jit
def load_weights(weights_ptr, row, first, length, BLOCK: tl.constexpr):
    """Load the weights of a tile, 0 beyond the end of the row, and which of them lie before it."""
    positions = first + tl.arange(0, BLOCK)
    inside = positions < length
    return tl.load(weights_ptr + row * length + positions, mask=inside, other=0.0), inside


@triton.jit
def keep_nucleus(weights_ptr, kept_ptr, length, beyond, BLOCK: tl.constexpr):
    """kept[row] = the mask of the fewest weights that leave at most `beyond` of the mass. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    mass = tl.zeros([], dtype=tl.float32)
    largest = tl.zeros([], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        weights, _ = load_weights(weights_ptr, row, first, length, BLOCK)
        mass += tl.sum(weights, axis=0)
        largest = tl.maximum(largest, tl.max(weights, axis=0))
    # The smallest weight that is needed: the largest one with at most `beyond` of the mass below it, found
    # four bits at a time as in `selection`: the bits of numbers from 0 on are in the order of the numbers.
    bits = tl.zeros([], dtype=tl.uint32)
    for step in range(8):
        candidates = bits | (tl.arange(0, 16).to(tl.uint32) << (28 - 4 * step))
        below = tl.zeros([16], dtype=tl.float32)
        for first in range(0, length, BLOCK):
            weights, _ = load_weights(weights_ptr, row, first, length, BLOCK)
            lighter = weights[None, :] < candidates.to(tl.float32, bitcast=True)[:, None]
            below += tl.sum(tl.where(lighter, weights[None, :], 0.0), axis=1)
        fits = (candidates <= largest.to(tl.uint32, bitcast=True)) & (below <= beyond * mass)
        bits = tl.max(tl.where(fits, candidates, 0), axis=0)
    threshold = bits.to(tl.float32, bitcast=True)
    tail = tl.zeros([], dtype=tl.float32)  # the mass of the weights up to the threshold
    for first in range(0, length, BLOCK):
        weights, _ = load_weights(weights_ptr, row, first, length, BLOCK)
        tail += tl.sum(tl.where(weights <= threshold, weights, 0.0), axis=0)
    # Of equal weights the first are needed, as long as more than `beyond` of the mass is left from there on;
    # one always is.
    seen = tl.zeros([], dtype=tl.int32)
    for first in range(0, length, BLOCK):
        weights, inside = load_weights(weights_ptr, row, first, length, BLOCK)
        equal = (weights == threshold) & inside
        before = seen + tl.cumsum(equal.to(tl.int32), axis=0) - 1
        needed = (before == 0) | (tail - before * threshold > beyond * mass)
        seen += tl.sum(equal.to(tl.int32), axis=0)
        kept = (weights > threshold) | (equal & needed)
        tl.store(kept_ptr + row * length + first + tl.arange(0, BLOCK), kept, mask=inside)
