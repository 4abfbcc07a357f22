r"""Quest to read: what each page promises a query (QU-2).

One launch, one program for each tile of pages of each query head. It loads the bounds of the pages, and adds,
channel by channel, the larger of two products. It reads two vectors for a page instead of the page.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only
from .tova import BLOCK


@forward_only
def bounds(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    r"""QU-2: query [B, H_q, D] and the bounds of the pages give U, [B, H_q, P]."""
    (batch, heads, head_dim), pages = query.shape, low.shape[2]
    scores = torch.empty(batch, heads, pages, device=query.device)
    states = (query.contiguous(), low.contiguous(), high.contiguous(), scores)
    sizes = (heads // low.shape[1], pages, head_dim, BLOCK)
    score_pages[(batch * heads, triton.cdiv(pages, BLOCK))](*states, *sizes)
    return scores


@triton.jit
def score_pages(query_ptr, low_ptr, high_ptr, scores_ptr, group, pages, D: tl.constexpr, BLOCK: tl.constexpr):
    """scores[page] = sum_i max(q_i low_i, q_i high_i). Grid: query heads, tiles of pages."""
    head = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, channel = page < pages, tl.arange(0, D)
    query = tl.load(query_ptr + head * D + channel).to(tl.float32)[None, :]
    # the query heads of a group read the same pages
    rows = (head // group * pages + page)[:, None] * D + channel[None, :]
    low = tl.load(low_ptr + rows, mask=inside[:, None], other=0.0)
    high = tl.load(high_ptr + rows, mask=inside[:, None], other=0.0)
    score = tl.sum(tl.maximum(query * low, query * high), axis=1)
    tl.store(scores_ptr + head * pages + page, score, mask=inside)
