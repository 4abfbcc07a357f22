r"""CriticalKV (arXiv 2502.03805): keep half of the budget by attention, and half by attention times the
length of W_o v.

The attention is aggregated as in DefensiveKV (arXiv 2510.13334). Both papers are known here from their public
code: NVIDIA/kvpress, kvpress/presses/criticalkv_press.py at 0603dec, and FFY0/DefensiveKV,
kvpress/presses/efficient_defensivekv_press.py at c278cd0.
"""

import math

import torch

from evictionary.reference.checks import require_window

from . import kernels
from .attention import grouped_attention
from .checks import fits, working_dtype
from .cpu import BLOCK
from .operators import operator
from .selection import top_k
from .snapkv import average_pool


@operator()
@fits()
def projected_norms(values: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
    r"""CK-1: `n_t = (1/G) sum_g |W_o^g v_t|_1`, the length of what a token adds to the residual stream,
    for a weight of 1.

    Args: w_o, the rows of the output projection that belong to each query
    head, in the dtype of values. Returns [B, H_kv, T], float32 (float64
    for float64). Raises ValueError naming the argument that does not fit.
    """
    if kernels.take("criticalkv", values, beside=w_o):
        return kernels.criticalkv.projected_norms(values, w_o)
    heads = values.shape[1]
    group, dtype = w_o.shape[0] // heads, working_dtype(values)
    norms = values.new_zeros(values.shape[:3], dtype=dtype)
    # One query head at a time, and as many tokens as stay in the processor's cache: a product has hidden
    # numbers for each token.
    tokens = max(1, BLOCK // w_o.shape[2])
    # bfloat16 is multiplied as it is; a product of float16 can pass its largest number.
    narrow = values.dtype if values.dtype == w_o.dtype == torch.bfloat16 else dtype
    for query_head, weight in enumerate(w_o.to(narrow)):
        head = query_head // group
        for start in range(0, values.shape[2], tokens):
            block = values[:, head, start : start + tokens].to(narrow)
            norms[:, head, start : start + tokens].add_(
                (block @ weight).abs_().sum(dim=-1, dtype=dtype) / group
            )
    return norms


@operator()
@fits()
def importance(
    queries: torch.Tensor, keys: torch.Tensor, *, window_size: int = 32, kernel_size: int = 5
) -> torch.Tensor:
    r"""CK-2, CK-3: `a_t = max(b_t, mean_u b_u)`, b the largest attention of a query of the last tokens,
    pooled at an unchanged sum.

    Args: queries, of the last M >= window_size tokens, after RoPE; keys, T > window_size. Returns
    [B, H_kv, T - window_size], float32 (float64 for float64). Raises ValueError naming the argument.
    """
    require_window(queries.shape[2], keys.shape[2], window_size)
    group, largest = queries.shape[1] // keys.shape[1], []
    for head, last in enumerate(queries[:, :, -window_size:].split(group, dim=1)):
        weights = grouped_attention(last, keys[:, head : head + 1], head)[..., :-window_size]
        pooled = average_pool(weights, kernel_size)
        total = pooled.sum(dim=-1, keepdim=True)
        # Decision: a query whose attention stays within the window to the last digit says nothing, in place
        # of 0/0.
        pooled *= weights.sum(dim=-1, keepdim=True) / torch.where(total == 0, 1, total)
        largest.append(pooled.amax(dim=(2, 3)))
    found = torch.cat(largest, dim=1)
    return found.maximum(found.mean(dim=-1, keepdim=True))


@operator()
@fits()
def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    w_o: torch.Tensor,
    *,
    budget: int,
    window_size: int = 32,
    kernel_size: int = 5,
    first_share: float = 0.5,
    epsilon: float = 1e-4,
) -> torch.Tensor:
    r"""CK-4: `(a_t + epsilon) n_t`; infinity for the window, and for the `first_share * budget` tokens of
    the highest a.

    Args: those of `importance` and `projected_norms`; budget, the tokens that top-k will keep, the window
    among them. Returns scores [B, H_kv, T], higher = keep, float32 (float64 for float64); all infinite where
    T <= window_size. Raises ValueError naming the argument, and on a CPU for NaN or infinite numbers. Source:
    the public codes; half and 1e-4 are CriticalKV's defaults, 32 and 5 DefensiveKV's.
    """
    norms = projected_norms(values, w_o)
    scores = keys.new_full(keys.shape[:3], math.inf, dtype=working_dtype(keys))
    before = keys.shape[2] - window_size
    if before > 0:
        scores[..., :before] = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
        # Decision: the window is the first part of the first stage, as in the public code.
        first = top_k(scores, math.floor(first_share * budget))
        scores[..., :before] = (scores[..., :before] + epsilon) * norms[..., :before]
        scores.masked_fill_(first, math.inf)
    return scores
