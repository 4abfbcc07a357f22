r"""Q-Filters (arXiv 2503.02812): keep the keys that point along the main direction of calibrated queries.

The paper is known here from its public code: NathanGodey/qfilters,
make_filters.py and src/hf_cache.py at cda5c38.
"""

import torch

from evictionary.reference.checks import group_size

from . import gradients, kernels
from .checks import fits, require_finite_by, room_for, working_dtype
from .cpu import BLOCK, blockwise
from .operators import operator


@operator()
@fits()
def main_direction(queries: torch.Tensor) -> torch.Tensor:
    r"""QF-1: the first right singular vector v of the queries, with the sign for which most of them have
    `q . v > 0`.

    It is the last eigenvector of the D x D matrix of the queries'
    products, in float64: squares lose half of the digits.

    Returns [..., D], of length 1, float32 (float64 for float64). Raises ValueError for unusable queries.
    """
    wide = queries.double()
    direction = torch.linalg.eigh(wide.mT @ wide).eigenvectors[..., -1]
    ahead = (wide @ direction[..., None] > 0).double().mean(dim=(-2, -1))
    # Decision: a majority is more than half, as in the public code.
    signed = torch.where(ahead > 0.5, 1.0, -1.0)[..., None] * direction
    return signed.to(working_dtype(queries))


@operator()
@fits()
def calibrate(queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    r"""QF-2: `f_h = (1/G) sum_g v_{hG + g}`, the filter of a
    KV head: the mean of the directions of its query heads.

    Args: queries, of a calibration text, after RoPE. Returns filters [B, H_kv, D], of length at most 1,
    float32 (float64 for float64). Raises ValueError naming the argument.
    """
    group_size(queries.shape[1], num_kv_heads)
    return main_direction(queries).unflatten(1, (num_kv_heads, -1)).mean(dim=2)


@operator()
@fits(free=("q_filters",), finite=False)
def score(keys: torch.Tensor, q_filters: torch.Tensor) -> torch.Tensor:
    r"""QF-3: `score_t = f . k_t`, which is proportional to
    the expected logit where queries are spread around f.

    Args: keys, after RoPE; q_filters, of `calibrate`, in any floating dtype. Returns scores [B, H_kv, T],
    higher = keep, float32 (float64 for float64 keys). Raises ValueError naming the argument that does not
    fit, and on a CPU for NaN or infinite numbers. Source: the public code, where stored filter and score have
    the other sign.
    """
    along = q_filters.to(working_dtype(keys))
    if kernels.take("projections", keys, beside=along):
        scores = kernels.projections.project(keys, along)
    elif gradients.are_wanted(keys, along):
        scores = (keys.to(along.dtype) * along[:, :, None]).sum(dim=-1)
    else:
        scores = along.new_empty(keys.shape[:3])
        # A sum of products: torch's product of a matrix with one vector is slower than memory. On a CPU the
        # products stay in one place.
        products = room_for(keys, BLOCK)

        def add(block: torch.Tensor, part: torch.Tensor) -> None:
            place = None if keys.is_cuda else products[: block.numel()].view(block.shape)
            torch.sum(torch.mul(block, along[:, :, None], out=place), dim=-1, out=part)

        blockwise(add, keys, scores, room=products)
    require_finite_by(scores, keys=keys, q_filters=q_filters)
    return scores
