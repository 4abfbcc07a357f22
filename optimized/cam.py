r"""CaM (PMLR 235:58840-58850), an addition: the value of an evicted token may live on in the values of the
next kept tokens.
"""

import torch
from torch.nn.functional import pad

from evictionary.reference.checks import as_count

from . import kernels
from .checks import fits, working_dtype
from .operators import operator


@operator("values")
@fits(free=("attention", "draws"))
def merge_values(
    values: torch.Tensor,
    attention: torch.Tensor,
    kept: torch.Tensor,
    draws: torch.Tensor,
    *,
    merge_size: int = 32,
) -> torch.Tensor:
    r"""CAM-4: `v_j + sum_i M_i S_ij v_i` with `M_i = [u_i < p_i]`: an evicted value is merged with
    probability p_i, or lost.

    Args: attention, what each token has received; kept, any number in a head; draws u,
    uniform in [0, 1); merge_size m, the kept tokens that share a value. attention and
    draws may have a dtype of their own. Returns the values, [B, H_kv, T, D_v], of evicted
    tokens as they were; the keys stay. Raises ValueError naming the argument, and on a CPU
    for NaN or infinite numbers. Source: the merge mask of the paper, a Bernoulli variable.
    """
    merged = (draws < probabilities(attention, kept, merge_size=merge_size)).to(values.dtype)
    return spread(values, kept, merged, merge_size=merge_size)


@operator()
@fits()
def probabilities(attention: torch.Tensor, kept: torch.Tensor, *, merge_size: int = 32) -> torch.Tensor:
    r"""CAM-2: `p_i = min(1, A_i / sum_j S_ij A_j)`, the attention of an evicted token beside the mean of the
    tokens that would share its value.

    Returns [..., T], from 0 to 1, in float32, or float64 for float64; 0 for a kept token and where no kept
    token comes later. Raises ValueError naming the argument. Source: the paper's clamp to [0, 1].
    """
    attention, size = attention.to(working_dtype(attention)), min(merge_size, kept.shape[-1])
    before, count, order = receivers(kept, merge_size)
    # The attention of the kept tokens in their order, zeros behind it, and its sum from each of them on.
    row = pad(attention.masked_fill(~kept, 0).gather(-1, order), (0, size))
    mean = row.unfold(-1, size, 1).sum(dim=-1).gather(-1, before) / count.clamp(min=1)
    ratio = attention / torch.where(mean > 0, mean, 1)
    # Decision: beside a mean of 0 any attention is enough, and none is not.
    probability = torch.where(mean > 0, ratio.clamp(max=1), (attention > 0).to(mean))
    return probability.masked_fill(count == 0, 0)


@operator("values")
@fits(free=("weights",))
def spread(
    values: torch.Tensor, kept: torch.Tensor, weights: torch.Tensor, *, merge_size: int = 32
) -> torch.Tensor:
    r"""CAM-3: `v_j + sum_i w_i S_ij v_i`: the tokens after an evicted one share the part w_i of its value.

    With w = p this is the expectation of CAM-4, for which nothing has to be drawn.

    Args: weights w, of which those of kept tokens do not count. Returns [..., T, D_v] in the dtype of the
    values. Raises ValueError naming the argument.
    """
    if kernels.take("cam", values, beside=weights):
        return kernels.cam.spread(values, kept, *stretches(kept, weights.float(), merge_size))
    parts, first, _ = stretches(kept, weights.double(), merge_size)
    # Sums in float64 hide no small value behind a large one of long ago.
    sums = pad((values.double() * parts[..., None]).cumsum(dim=-2), (0, 0, 1, 0))
    before = sums.gather(-2, first[..., None].expand(values.shape))
    return (values + (sums[..., :-1, :] - before)).to(values.dtype)


def stretches(
    kept: torch.Tensor, weights: torch.Tensor, merge_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CAM-3 as a sum over neighbours: a token t receives from first_t to t - 1, of each its part `w_i / m_i`.

    A kept token receives from the tokens after the m-th kept token before it, and an evicted one from none.
    Returns parts, first and the order of `receivers`, [..., T].
    """
    before, count, order = receivers(kept, merge_size)
    rank = before - 1 - merge_size
    start = (order.gather(-1, rank.clamp(min=0)) + 1).masked_fill(rank < 0, 0)
    first = torch.where(kept, start, torch.arange(kept.shape[-1], device=kept.device))
    return weights / count.clamp(min=1) * (count > 0), first, order


def receivers(kept: torch.Tensor, merge_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CAM-1: the kept tokens up to each token, [..., T]; m_i, of how many tokens after an evicted one share
    its value, 0 for a kept token; and the places of the kept tokens in their order, before the others.
    """
    before = kept.cumsum(dim=-1)
    later = (before[..., -1:] - before).clamp(max=as_count("merge_size", merge_size, low=1))
    return before, later.masked_fill(kept, 0), kept.byte().argsort(dim=-1, descending=True, stable=True)
