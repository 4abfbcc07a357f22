r"""KNorm (arXiv 2406.11430), a baseline: keep the keys of smallest norm."""

from __future__ import annotations

import math

import torch
from torch.linalg import vector_norm

from .checks import converted, require_finite, require_fit, working_dtype, working_room
from .kernels.launching import kernels_for

# Between these norms no component's square overflows float32, and a square that underflows is too small to matter.
SAFE_NORMS = (1e-15, 1e18)
# Channels that are converted to float32 at a time: few enough for the copy to stay in the last cache, enough to call torch seldom.
BLOCK = 2**20


def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KN-1: `score_i = -|k_i|`. It costs one read of the keys.

    Args: keys [B, H_kv, T, D] (any leading axes), any strides. Returns scores [B, H_kv, T], at most 0, higher = keep, float32
    (float64 for float64 keys). Raises ValueError for an empty, wrongly shaped or integer `keys`, and on a CPU for NaN or
    infinite numbers. Source: the paper's abstract and section 3.
    """
    require_fit("knorm.score", keys, finite=False)
    if kernels := kernels_for("knorm", keys):
        require_finite("keys", keys)
        return kernels.score(keys)
    dtype = working_dtype(keys)
    if keys.is_cuda:
        # For what the kernel does not take. The cast is part of the reduction, and no square of a float32 leaves float64.
        return -vector_norm(keys, dim=-1, dtype=torch.float64).to(dtype)
    if keys.dtype == dtype:
        norms = vector_norm(keys, dim=-1)
    else:
        tokens, room = max(1, BLOCK * keys.shape[-2] // keys.numel()), working_room(keys, BLOCK)
        norms = keys.new_empty(keys.shape[:-1], dtype=dtype)
        for part, block in zip(norms.split(tokens, dim=-1), keys.split(tokens, dim=-2), strict=True):
            vector_norm(converted(block, room), dim=-1, out=part)
    least, most = (bound.item() for bound in norms.aminmax())  # NaN where a norm is
    # A norm within the safe range means safe components, so only other caches are read again.
    if not (least > SAFE_NORMS[0] and most < SAFE_NORMS[1]):
        require_finite("keys", keys)
        keys = keys.to(dtype)
        largest = vector_norm(keys, ord=math.inf, dim=-1, keepdim=True)
        scale = torch.where(largest == 0, 1, largest)
        norms = vector_norm(keys / scale, dim=-1) * scale.squeeze(-1)
    return norms.neg_()
