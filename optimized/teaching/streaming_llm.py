r"""StreamingLLM to read: `score_t = t`, infinity for the sinks (SL-1). One launch, which writes the scores
and reads nothing.
"""

import torch
import triton
import triton.language as tl

BLOCK = 256  # tokens of a tile


def score(keys: torch.Tensor, *, sink_size: int = 4) -> torch.Tensor:
    r"""SL-1: keys [..., T, D], of which only the shape is read, give scores [..., T], higher = keep."""
    scores = keys.new_empty(keys.shape[:-1])
    number_tokens[(triton.cdiv(scores.numel(), BLOCK),)](
        scores, scores.numel(), keys.shape[-2], sink_size, BLOCK
    )
    return scores


@triton.jit
def number_tokens(scores_ptr, tokens, length, sink_size, BLOCK: tl.constexpr):
    """scores[t] = the position of a token in its head,
    infinity for the first `sink_size`. Grid: tiles of tokens.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    positions = rows % length
    scores = tl.where(positions < sink_size, float("inf"), positions.to(tl.float32))
    tl.store(scores_ptr + rows, scores, mask=rows < tokens)
