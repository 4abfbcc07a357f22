r"""TriAttention (arXiv 2604.04921): keep the keys that the
mean query will turn to, frequency by frequency of RoPE.

The paper is known here from its public code: WeianMao/triattention, triattention/methods/pruning_utils.py at
092e4dc and triattention.py at 1129a5f.
"""

import torch

from . import gradients, kernels
from .checks import fits, working_dtype
from .operators import operator


@operator("states")
def pair_lengths(states: torch.Tensor) -> torch.Tensor:
    r"""`|x_f| = sqrt(x_f^2 + x_{f + D/2}^2)`, of each pair that RoPE turns together: [..., D] to [...,
    D/2]. RoPE keeps it.
    """
    first, second = states.chunk(2, dim=-1)
    if not gradients.are_wanted(states):
        return torch.hypot(first, second)
    is_zero = (first == 0) & (second == 0)  # where torch's slope is 0 / 0
    return torch.hypot(first.masked_fill(is_zero, 1), second).masked_fill(is_zero, 0)


@operator()
@fits()
def statistics(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""TA-1: `E q` and `E|q_f| - |E q_f|`, at least 0: the
    mean query, and what the mean hides of each pair's length.

    Args: queries of a calibration text, before RoPE. Returns the mean [..., D] and the slack [..., D/2],
    float32 (float64 for float64). Raises ValueError for unusable queries or an odd D.
    """
    wide = queries.to(working_dtype(queries))
    mean = wide.mean(dim=-2)
    return mean, pair_lengths(wide).mean(dim=-2) - pair_lengths(mean)


@operator()
@fits(free=("query_direction", "query_slack"))
def score(keys: torch.Tensor, query_direction: torch.Tensor, query_slack: torch.Tensor) -> torch.Tensor:
    r"""TA-3, TA-4: `max_g (S_g - mean_t S_g) / std_t S_g`,
    `S = qbar . k + sum_f (E|q_f| - |E q_f|) |k_f|`.

    Args: keys, after RoPE; query_direction and query_slack, calibrated, in any floating dtype. Returns scores
    [B, H_kv, T], higher = keep, float32 (float64 for float64 keys). Raises ValueError naming the argument
    that does not fit, and on a CPU for NaN or infinite numbers. Source: the public code.
    """
    heads, dtype = keys.shape[1], working_dtype(keys)
    direction, slack = query_direction.to(dtype), query_slack.to(dtype)
    if kernels.take("projections", keys, beside=(direction, slack)):
        rows = kernels.projections.project(keys, direction, slack).unflatten(1, (heads, -1))
    else:
        wide = keys.to(dtype)
        rows = direction.unflatten(1, (heads, -1)) @ wide.mT
        rows += slack.unflatten(1, (heads, -1)) @ pair_lengths(wide).mT
    # In float64: the square of 1e30 overflows float32.
    deviation, mean = torch.std_mean(rows.double(), dim=-1, correction=0, keepdim=True)
    # Decision: 1e-6 is the least deviation, as in the public code.
    return ((rows - mean) / deviation.clamp(min=1e-6)).amax(dim=2).to(dtype)
