r"""GVote (arXiv 2509.03136): sampled future queries vote on the tokens to keep, each for as many as the
current query needs.
"""

import numpy
import torch

from . import kernels
from .attention import grouped_logits
from .checks import fits, require_finite, working_dtype
from .operators import operator


@operator()
@fits()
@torch.no_grad()
def nucleus(attention: torch.Tensor, p: float) -> torch.Tensor:
    r"""GV-A2: `K_0 = the smallest set of tokens with mass >= p`, and never empty.

    Returns a mask [..., T]. Raises ValueError for a p outside [0, 1], and on a CPU for a negative weight and
    for NaN or infinite numbers. Source: section 3.2, step 1; Algorithm 1, line 2.
    """
    beyond = float(1 - p)
    if kernels.take("gvote", attention, longest=None):
        return kernels.gvote.nucleus(attention, beyond)
    return highest(attention, nucleus_sizes(attention, beyond))


@torch.no_grad()
def nucleus_sizes(attention: torch.Tensor, beyond: float) -> torch.Tensor:
    r"""`B_0 = |K_0|` of each row of `nucleus`, [...], whole numbers from 1 to T; `beyond` is 1 - p.
    Arguments already checked.
    """
    # The smallest weights are summed first, so that at p = 1 no weight above 0 is lost to rounding: `tail` is
    # the mass of a token and of all lighter tokens. A token is needed as long as the heavier ones hold less
    # than p: while its tail is above 1 - p.
    tail = rising(attention).cumsum(dim=-1, dtype=torch.float64)
    # Decision: mass is relative to the sum of the row, which is not exactly 1 in low precision.
    return (tail > beyond * tail[..., -1:]).sum(dim=-1).clamp(min=1)


@operator()
@fits()
@torch.no_grad()
def top_each(scores: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    r"""GV-5, GV-A10: every row keeps its own number of tokens, of equal scores the lower positions.

    Args: budgets, more than T keeps all. Returns kept [..., T]. Raises ValueError naming the argument that
    does not fit, and on a CPU for a negative budget and for NaN or infinite scores.
    """
    if kernels.take("gvote", scores, longest=None):
        return kernels.gvote.top_each(scores, budgets)
    return highest(scores, budgets)


@torch.no_grad()
def highest(scores: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    r"""`top_each` of arguments that have been checked; scores
    may be infinite, as the logits of large states are.
    """
    length = scores.shape[-1]
    budgets = budgets[..., None].clamp(max=length)
    threshold = rising(scores).gather(-1, (length - budgets).clamp(max=length - 1)).to(scores.dtype)
    above, equal = scores > threshold, scores == threshold
    return above | (equal & (equal.cumsum(dim=-1) <= budgets - above.sum(dim=-1, keepdim=True)))


def rising(values: torch.Tensor) -> torch.Tensor:
    r"""The values [..., T] in ascending order, without their indices: NumPy sorts plain values several
    times faster than torch.
    """
    if values.device.type != "cpu":
        return values.sort(dim=-1).values
    return torch.from_numpy(numpy.sort(values.detach().to(working_dtype(values)).numpy(), axis=-1))


@operator()
@fits()
@torch.no_grad()
def select(
    query: torch.Tensor, keys: torch.Tensor, sampled_queries: torch.Tensor, *, p: float = 0.95
) -> torch.Tensor:
    r"""GV-A1..3, GV-A9..11: keep what any sampled query
    has among its top B_0, for any query head of the group.

    One sample of every query head is ranked at a time: sorting the logits of all samples at once would take S
    times the memory.

    Args: query, that of the last prompt token; sampled_queries and keys; all after RoPE. Returns kept
    [B, H_kv, T], ragged: from max B_0 to min(T, S * sum of B_0) tokens, over the query heads of a group.
    Raises ValueError naming the argument that does not fit, and on a CPU for NaN or infinite numbers. Source:
    section 3.2; Algorithm 1, lines 1 to 3 and 9 to 11.
    """
    beyond = float(1 - p)
    if kernels.take("gvote", keys):
        return kernels.gvote.select(query, keys, sampled_queries, beyond)
    keys = keys.to(working_dtype(keys))  # once, not for every sample
    attention = grouped_logits(query[:, :, None], keys).softmax(dim=-1)  # [B, H_kv, G, 1, T]
    require_finite("attention", attention)  # the logits of finite states may overflow
    budgets = nucleus_sizes(attention, beyond)
    kept = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
    for sampled in sampled_queries.split(1, dim=2):
        # Decision: the logits, not their softmax. The ranking is the same, but very low logits have a softmax
        # of 0: ties.
        votes = highest(grouped_logits(sampled, keys), budgets)
        # Decision: the query heads of a group share one cache, so it keeps every token that any of them voted
        # for. The tokens of K_0 itself are not added, and no sink is protected: the paper's union has only
        # the sets of the samples.
        kept |= votes.any(dim=3).any(dim=2)
    return kept
