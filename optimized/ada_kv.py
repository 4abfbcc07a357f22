r"""AdaKV (arXiv 2407.11550), an allocator: one budget for a layer, divided among its heads by one top-k
over all heads.
"""

import math
from fractions import Fraction

import torch

from .checks import fits
from .operators import operator
from .selection import top_k


@operator()
@fits()
@torch.no_grad()
def select(
    scores: torch.Tensor, budget: int, *, floor_ratio: float = 0.2, protected: torch.Tensor | None = None
) -> torch.Tensor:
    r"""AD-1..3: each head keeps its best floor(alpha * budget) tokens; the rest of `H_kv * budget` goes to
    the layer's best.

    Args: scores, comparable between the heads; budget, the mean number of tokens per head; floor_ratio
    (alpha), the fraction of the budget that each head keeps for itself: 1 gives every head the same budget, 0
    guarantees none; protected, tokens that their head keeps whatever they score. They are inside the budget,
    and alpha is the fraction of the rest of it. Returns kept [B, H_kv, T], boolean, ragged; each batch item
    keeps exactly `H_kv * min(budget, T)`. Raises ValueError naming the argument out of range, and on a CPU
    for NaN scores and for a head with more protected tokens than the budget. Source: algorithm 1, the
    safeguard of section 4 and, for what is protected, algorithm 2.
    """
    batch, num_kv_heads, length = scores.shape
    budget = min(budget, length)
    alpha = Fraction(floor_ratio)
    if protected is None:
        own = top_k(scores, own_budget(budget, alpha))
    else:
        own = _own(scores, budget, alpha, protected)
    # One row per batch item. Among equal scores the lower head comes first, then the lower position.
    layer = scores.reshape(batch, num_kv_heads * length)
    return top_k(layer, num_kv_heads * budget, own.reshape(layer.shape)).reshape(scores.shape)


def own_budget(budget: int, alpha: Fraction = Fraction(1, 5)) -> int:
    """AD-1: the tokens that each head keeps for itself, by default of `select`."""
    return alpha.numerator * budget // alpha.denominator


def leaving(
    scores: torch.Tensor, positions: torch.Tensor, spare: torch.Tensor, over: list[int]
) -> torch.Tensor:
    """AD-1..3 from below: the tokens that `select` would not keep, where few leave a layer that was full.

    A head loses at most the tokens beyond its own. Of equal scores the last head loses first, and in a head
    the latest token. Args: scores [B, H_kv, n], the lowest of each head, at least as many as leave; their
    positions; spare [B, H_kv], the tokens of a head beyond its own; over, the tokens that leave each row.
    Returns [B, H_kv, n], boolean.
    """
    order = positions.argsort(dim=-1, descending=True)
    order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, stable=True))
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    ranked = scores.gather(-1, order).masked_fill(numbers >= spare[..., None], math.inf)
    layer = ranked.flip(1).flatten(1).argsort(dim=-1, stable=True)
    leaves = (
        torch.arange(layer.shape[1], device=scores.device) < torch.tensor(over, device=scores.device)[:, None]
    )
    of_heads = torch.zeros_like(leaves).scatter_(1, layer, leaves)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, of_heads.view(order.shape).flip(1))


def _own(scores: torch.Tensor, budget: int, alpha: Fraction, protected: torch.Tensor) -> torch.Tensor:
    """What each head keeps for itself: its protected tokens, and the best others up to alpha of the rest
    of its budget.
    """
    taken = protected.sum(dim=-1, keepdim=True)
    if not scores.is_cuda and int(taken.amax()) > budget:  # on a GPU the check would wait for it
        raise ValueError(
            f"protected: got {int(taken.amax())} protected tokens in a head, wanted at most the budget, "
            f"{budget}"
        )
    # Decision: as the observation window in the authors' code, what is protected leaves the budget before it
    # is shared out.
    # exact: int64 could overflow
    shares = [alpha.numerator * rest // alpha.denominator for rest in range(budget + 1)]
    counts = taken + torch.tensor(shares, device=scores.device)[(budget - taken).clamp(min=0)]
    return ranks(scores, protected) < counts


@torch.no_grad()
def ranks(scores: torch.Tensor, protected: torch.Tensor) -> torch.Tensor:
    r"""SEL-3, SEL-4: the place of each token in its row, from 0: the protected tokens first, then the
    higher, then the earlier.

    Args: scores and protected [..., T]. Returns int64
    [..., T]. For rows that keep different numbers of tokens.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    first = protected.gather(-1, order).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return order.gather(-1, first).argsort(dim=-1)
