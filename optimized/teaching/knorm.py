r"""KNorm to read: `score_i = -|k_i|` (KN-1). One launch; a program scores one tile of tokens, whatever
head they are of.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only

BLOCK = 64  # tokens of a tile


@forward_only
def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KN-1: keys [..., T, D] give scores [..., T], at most 0, higher = keep."""
    scores = keys.new_empty(keys.shape[:-1])
    minus_norms[(triton.cdiv(scores.numel(), BLOCK),)](
        keys.contiguous(), scores, scores.numel(), keys.shape[-1], BLOCK
    )
    return scores


@triton.jit
def minus_norms(keys_ptr, scores_ptr, tokens, D: tl.constexpr, BLOCK: tl.constexpr):
    """scores[t] = -|k_t|. Grid: tiles of tokens."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, D)
    inside = rows < tokens  # the last tile may reach beyond the last token
    keys = tl.load(keys_ptr + rows[:, None] * D + channels[None, :], mask=inside[:, None], other=0.0)
    tl.store(scores_ptr + rows, -tl.sqrt(tl.sum(keys * keys, axis=1)), mask=inside)
