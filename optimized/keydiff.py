r"""KeyDiff (arXiv 2504.15364): keep the keys that point away from the average direction of the cache."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch.linalg import vector_norm

from .checks import require_finite, require_same_device, require_same_kind, require_shape, require_states, working_dtype
from .kernels.launching import kernels_for

# Between these norms no component's square overflows float32, and a square that underflows is too small to matter.
SAFE_NORMS = (1e-15, 1e18)
# Numbers of a block of tokens, and of the heads that are scored together: a block stays in the processor's nearer cache during one
# pass, and the heads stay in its last cache from the first pass to the second.
BLOCK, HEADS_TOGETHER = 2**19, 2**21


def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `score_i = -cos(mu, k_i)`, mu = the mean of the unit keys, in O(T).

    The unit keys are never stored: with `w_i = 1 / |k_i|`, mu points along the product of the row w with K, and the scores are
    the product of K with mu, times w. Norms and the share of mu are computed for a block of tokens while it is in the
    processor's cache. Memory is read twice in total, or once if a head fits into the last cache, since heads come in turn.

    Args: keys [B, H_kv, T, D] (any leading axes), any strides. Returns scores [B, H_kv, T] in [-1, 1], higher = keep, float32
    (float64 for float64 keys). Raises ValueError for an empty, wrongly shaped or integer `keys`, and on a CPU for NaN or
    infinite numbers. Source: section 3.2, equation 8.
    """
    if kernels := _kernels("keys", keys):
        return kernels.score(keys)
    return _scored(keys)


def anchor_sum(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `T mu = sum_i k_i / |k_i|`, the anchor in the form that `update_anchor` keeps up to date.

    Args: keys as `score`. Returns [B, H_kv, D], float32 (float64 for float64 keys). Raises ValueError as `score`.
    """
    if kernels := _kernels("keys", keys):
        return kernels.anchor_sum(keys)
    return _summed("keys", keys)[2]


def anchor(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `mu = (1/T) sum_i k_i / |k_i|`, the mean of the unit keys. Args, Returns and Raises as `anchor_sum`."""
    return anchor_sum(keys) / keys.shape[-2]


def score_with_anchor(keys: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    r"""KD-8 with a given anchor: `score_i = -cos(anchor, k_i)`, in a single pass over the keys on a GPU.

    With `anchor_sum` of the same keys, or its mean, it is `score` up to rounding.

    Args: keys as `score`; anchor [B, H_kv, D], of any length (only its direction counts; a zero anchor scores 0), float32
    (float64 for float64 keys). Returns scores [B, H_kv, T] as `score`. Raises ValueError naming the argument that does not fit,
    and on a CPU for NaN or infinite numbers. Source: section 3.2, equation 8.
    """
    kernels = _kernels("keys", keys)
    _require_anchor(anchor, keys)
    if kernels:
        return kernels.score_with_anchor(keys, anchor)
    return _minus_cosine(*_summed("keys", keys)[:2], anchor)


def update_anchor(anchor: torch.Tensor, new_keys: torch.Tensor | None, evicted_keys: torch.Tensor | None) -> torch.Tensor:
    r"""KD-6: the sum of the unit keys after a step, `sum' = sum + sum_new k / |k| - sum_evicted k / |k|`.

    A step of block prompt processing then costs `update_anchor` with the block, `score_with_anchor` of cache and block, and
    `update_anchor` with the evicted keys: the cache is read once. Rounding adds up over the steps; `anchor_sum` starts afresh.

    Args: anchor [B, H_kv, D], a sum such as `anchor_sum` gives (not the mean), zeros for an empty cache; new_keys [B, H_kv, M, D]
    and evicted_keys [B, H_kv, E, D], None for none. Returns [B, H_kv, D]; the argument is unchanged. Raises ValueError naming
    the argument that does not fit, and on a CPU for NaN or infinite numbers. Source: equation 6 with equation 8.
    """
    changes = [(name, keys) for name, keys in (("new_keys", new_keys), ("evicted_keys", evicted_keys)) if keys is not None]
    kernels = None
    for name, keys in changes:
        kernels = _kernels(name, keys)
        _require_anchor(anchor, keys)
    if len(changes) == 2:
        require_same_kind("evicted_keys", changes[1][1], "new_keys", changes[0][1])
    if kernels:
        return kernels.update_anchor(anchor, new_keys, evicted_keys)
    updated = anchor.clone()
    for name, keys in changes:
        change = _summed(name, keys)[2]
        updated += change if name == "new_keys" else -change
    return updated


def _kernels(name: str, keys: torch.Tensor) -> ModuleType | None:
    """Return the kernels if they take `keys` [..., T, D], or raise ValueError; the torch path sees NaN in the norms it computes."""
    require_states(name, keys, "... T D", finite=False)
    kernels = kernels_for("keydiff", keys)
    if kernels:
        require_finite(name, keys)
    return kernels


def _require_anchor(anchor: torch.Tensor, keys: torch.Tensor) -> None:
    """Raise ValueError unless `anchor` [..., D] has one vector for each head of `keys` [..., T, D], in the working dtype."""
    require_states("anchor", anchor, "... D")
    require_shape("anchor", anchor, (*keys.shape[:-2], keys.shape[-1]), "the heads and channels of the keys")
    if anchor.dtype != working_dtype(keys):
        raise ValueError(f"anchor: got dtype {anchor.dtype}, wanted {working_dtype(keys)}")
    require_same_device("anchor", anchor, "the keys", keys)


def _scored(keys: torch.Tensor) -> torch.Tensor:
    """`score` on a CPU: half of the heads before the other half, until few enough are left."""
    axis = next((axis for axis, size in enumerate(keys.shape[:-2]) if size > 1), None)
    if axis is None or keys.numel() <= HEADS_TOGETHER:
        return _minus_cosine(*_summed("keys", keys))
    return torch.cat([_scored(heads) for heads in keys.tensor_split(2, dim=axis)], dim=axis)


def _summed(name: str, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the keys (rescaled where float32 could not square them), `w_i = 1 / |k_i|` [..., T] and `sum_i w_i k_i` [..., D]."""
    dtype = working_dtype(keys)
    weights = keys.new_empty(keys.shape[:-1], dtype=dtype)
    total = keys.new_zeros(*keys.shape[:-2], keys.shape[-1], dtype=dtype)
    for part, block in zip(weights.split(_tokens(keys), dim=-1), keys.split(_tokens(keys), dim=-2), strict=True):
        block = block.to(dtype)
        norms = vector_norm(block, dim=-1)
        least, most = (bound.item() for bound in norms.aminmax())  # NaN where a norm is
        # A norm within the safe range means safe components, so only other caches are read again.
        if not (least > SAFE_NORMS[0] and most < SAFE_NORMS[1]):
            require_finite(name, keys)
            keys = keys.to(dtype)
            largest = vector_norm(keys, ord=math.inf, dim=-1, keepdim=True)
            return _summed_anywhere(keys / torch.where(largest == 0, 1, largest))
        torch.reciprocal(norms, out=part)
        total += (part[..., None, :] @ block).squeeze(-2)
    return keys, weights, total


def _summed_anywhere(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_summed` for keys that are zero or have 1 as their largest component."""
    norms = vector_norm(keys, dim=-1)
    # Decision: the cosine with a zero vector is 0, for a zero key as for an anchor whose keys cancel.
    weights = torch.where(norms == 0, 0, 1 / norms)
    return keys, weights, (weights[..., None, :] @ keys).squeeze(-2)


def _minus_cosine(keys: torch.Tensor, weights: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Return `-w_i k_i . anchor / |anchor|`, [..., T]."""
    norm = vector_norm(anchor, dim=-1, keepdim=True)
    direction = (anchor / torch.where(norm == 0, 1, norm))[..., None, :]
    scores = torch.empty_like(weights)
    for part, block in zip(scores.split(_tokens(keys), dim=-1), keys.split(_tokens(keys), dim=-2), strict=True):
        part.copy_((direction @ block.to(weights.dtype).mT).squeeze(-2))
    return scores.mul_(weights).neg_()


def _tokens(keys: torch.Tensor) -> int:
    """The number of tokens in a block."""
    return max(1, BLOCK * keys.shape[-2] // keys.numel())
