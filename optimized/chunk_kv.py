r"""ChunkKV (arXiv 2502.00299), a choice of whole chunks: neighbouring tokens stay together."""

import torch
from torch.nn.functional import pad

from evictionary.reference.checks import as_count

from .checks import fits
from .operators import operator


@operator()
@fits()
@torch.no_grad()
def choose(scores: torch.Tensor, budget: int, *, chunk_size: int = 10) -> torch.Tensor:
    r"""CH-1, CH-3: keep whole chunks, the best first; of the last one that fits in part, its best tokens.

    Args: scores, infinities allowed; budget, more than T keeps all. Returns kept [..., T], boolean, with
    exactly `min(budget, T)` True in each row. Raises ValueError naming the argument out of range, and on a
    CPU for NaN scores.
    """
    length = scores.shape[-1]
    # The chunks, best first, and how many tokens come before each.
    order = chunk_means(scores, chunk_size=chunk_size).argsort(dim=-1, descending=True, stable=True)
    sizes = _sizes(scores, chunk_size).expand(order.shape).gather(-1, order)
    before = torch.empty_like(order).scatter_(-1, order, sizes.cumsum(dim=-1) - sizes)
    # The place of each token among those of its chunk. What fills up the last chunk comes behind all others.
    chunks = _chunks(scores, chunk_size, -torch.inf)
    place = chunks.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (before[..., None] + place < budget).flatten(-2)[..., :length]


@operator()
@fits()
def chunk_means(scores: torch.Tensor, *, chunk_size: int = 10) -> torch.Tensor:
    r"""CH-2: the mean score of each chunk of `chunk_size` tokens; the last may be shorter.

    Returns [..., ceil(T / chunk_size)], in float32, or float64 for float64. Source: arXiv 2502.00299, the
    score of a chunk. Decision: a chunk with a token of score infinity has that mean, whatever else is in it.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    means = _chunks(wide, chunk_size, 0).sum(dim=-1) / _sizes(scores, chunk_size)
    return means.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _chunks(scores: torch.Tensor, chunk_size: int, filling: float) -> torch.Tensor:
    """[..., C, chunk_size], the last chunk filled up."""
    size = as_count("chunk_size", chunk_size, low=1)
    scores = scores if scores.is_floating_point() else scores.double()
    return pad(scores, (0, -scores.shape[-1] % size), value=filling).unflatten(-1, (-1, size))


def _sizes(scores: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """The number of tokens of each chunk, [C]."""
    starts = torch.arange(0, scores.shape[-1], chunk_size, device=scores.device)
    return (scores.shape[-1] - starts).clamp(max=chunk_size)
