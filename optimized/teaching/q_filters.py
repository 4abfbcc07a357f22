r"""Q-Filters to read: `score_t = f . k_t`, f the filter of the head (QF-3). One launch; a program scores
one tile of a head.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only

BLOCK = 64  # tokens of a tile


@forward_only
def score(keys: torch.Tensor, q_filters: torch.Tensor) -> torch.Tensor:
    r"""QF-3: keys [B, H_kv, T, D] and q_filters [B, H_kv, D] give scores [B, H_kv, T], higher = keep."""
    batch, heads, length, head_dim = keys.shape
    scores = keys.new_empty(keys.shape[:3])
    grid = (batch * heads, triton.cdiv(length, BLOCK))
    filter_keys[grid](
        keys.contiguous(), q_filters.to(keys.dtype).contiguous(), scores, length, head_dim, BLOCK
    )
    return scores


@triton.jit
def filter_keys(keys_ptr, filters_ptr, scores_ptr, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """scores[head, t] = f . k_t. Grid: heads, tiles of tokens."""
    head = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < length
    filter = tl.load(filters_ptr + head * D + tl.arange(0, D))
    addresses = keys_ptr + (head * length + positions)[:, None] * D + tl.arange(0, D)[None, :]
    keys = tl.load(addresses, mask=inside[:, None], other=0.0)
    tl.store(scores_ptr + head * length + positions, tl.sum(keys * filter[None, :], axis=1), mask=inside)
