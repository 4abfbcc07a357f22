r"""Budgets and top-k selection, which every scoring method shares (requirements SEL-1 to SEL-4)."""

import torch

from evictionary.reference.selection import budget

from . import kernels
from .checks import fits
from .operators import operator

# the budget is exact integer arithmetic: the reference's function serves here too
__all__ = ["budget", "top_k"]


@operator()
@fits(finite=False)
@torch.no_grad()
def top_k(scores: torch.Tensor, budget: int, protected: torch.Tensor | None = None) -> torch.Tensor:
    r"""SEL-2..4: keep the `budget` highest scores of each row, the protected tokens before all others.

    Args: scores of any real dtype, infinities allowed; budget, more than T keeps all. Returns kept [..., T],
    boolean, with exactly `min(budget, T)` True in each row. Raises ValueError for a negative budget or one
    below the protected tokens of a row, and on a CPU for NaN scores. On a GPU, NaN ranks below every number
    and the protected tokens are not counted: counting them would wait for the GPU.
    """
    count = min(budget, scores.shape[-1])
    in_kernels = kernels.take("selection", scores, longest=None)
    if not (in_kernels and scores.is_cuda):  # there the check would wait for the GPU
        if scores.is_floating_point() and scores.isnan().any():
            raise ValueError("scores: got NaN, wanted numbers that can be ordered")
        most = int(protected.sum(dim=-1).amax()) if protected is not None and protected.numel() else 0
        if most > budget:
            raise ValueError(
                f"protected: got {most} protected tokens in a row, wanted at most the budget, {budget}"
            )
    if in_kernels:
        return kernels.selection.top_k(scores, count, protected)
    # Decision: of equal scores the lower position is kept: a stable sort leaves equal scores in the order of
    # their positions.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if protected is not None:
        first = protected.gather(-1, order).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, first)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :count], True)
