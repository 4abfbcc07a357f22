r"""KNorm (arXiv 2406.11430), a baseline: keep the keys of smallest norm."""

import torch
from torch.linalg import vector_norm

from . import gradients, kernels
from .checks import fits, require_finite, working_dtype, working_room
from .cpu import BLOCK, are_safe, blockwise, rescaled
from .operators import operator


@operator()
@fits(finite=False)
def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KN-1: `score_i = -|k_i|`. It costs one read of the keys.

    Returns scores [B, H_kv, T], at most 0, higher = keep, float32 (float64 for float64 keys). Raises
    ValueError for an empty, wrongly shaped or integer `keys`, and on a CPU for NaN or infinite numbers.
    Source: the paper's abstract and section 3.
    """
    if kernels.take("knorm", keys):
        require_finite("keys", keys)
        return kernels.knorm.score(keys)
    dtype = working_dtype(keys)
    if keys.is_cuda:
        # For what the kernel does not take. The cast is part of the reduction, and no square of a float32
        # leaves float64.
        return -vector_norm(keys, dim=-1, dtype=torch.float64).to(dtype)
    if keys.dtype == dtype or keys.numel() <= BLOCK or gradients.are_wanted(keys):
        norms = vector_norm(keys, dim=-1, dtype=dtype)
    else:
        norms = keys.new_empty(keys.shape[:-1], dtype=dtype)
        blockwise(
            lambda block, part: vector_norm(block, dim=-1, out=part),
            keys,
            norms,
            room=working_room(keys, BLOCK),
        )
    if not are_safe(norms):
        keys, scale = rescaled("keys", keys, dtype)
        norms = vector_norm(keys, dim=-1) * scale
    return -norms
