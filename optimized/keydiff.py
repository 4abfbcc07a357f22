r"""KeyDiff (arXiv 2504.15364): keep the keys that point away from the average direction of the cache."""

import math

import torch
from torch.linalg import vector_norm

from . import gradients, kernels
from .checks import require_finite, require_fit, require_same_kind, working_dtype, working_room
from .cpu import BLOCK, are_safe, blockwise, headwise, rescaled
from .operators import operator


@operator()
def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `score_i = -cos(mu, k_i)`, mu = the mean of the unit keys, in O(T).

    The unit keys are never stored: with `w_i = 1 / |k_i|`, mu points along the product of the row w with K,
    and the scores are the product of K with mu, times w. Norms and the share of mu are computed for a block
    of tokens while it is in the processor's cache. Memory is read twice in total, or once if a head fits into
    the last cache, since heads come in turn.

    Returns scores [B, H_kv, T] in [-1, 1], higher = keep, float32 (float64 for float64 keys). Raises
    ValueError for an empty, wrongly shaped or integer `keys`, and on a CPU for NaN or infinite numbers.
    Source: section 3.2, equation 8.
    """
    if _kernels_take("keys", keys):
        return kernels.keydiff.score(keys)
    return _minus_cosine(keys)


def anchor_sum(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `T mu = sum_i k_i / |k_i|`, the anchor in the form that `update_anchor` keeps up to date.

    Args: keys as `score`. Returns [B, H_kv, D], float32
    (float64 for float64 keys). Raises ValueError as `score`.
    """
    return _sum("keys", keys)


@operator()
def anchor(keys: torch.Tensor) -> torch.Tensor:
    r"""KD-8: `mu = (1/T) sum_i k_i / |k_i|`, the mean of
    the unit keys. Args, Returns and Raises as `anchor_sum`.
    """
    return anchor_sum(keys) / keys.shape[-2]


def score_with_anchor(keys: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    r"""KD-8 with a given anchor: `score_i = -cos(anchor, k_i)`, in a single pass over the keys on a GPU.

    With `anchor_sum` of the same keys, or its mean, it is `score` up to rounding.

    Args: keys as `score`; anchor [B, H_kv, D], of any length (only its direction counts; a zero anchor scores
    0), float32 (float64 for float64 keys). Returns scores [B, H_kv, T] as `score`. Raises ValueError naming
    the argument that does not fit, and on a CPU for NaN or infinite numbers. Source: section 3.2, equation 8.
    """
    in_kernels = _kernels_take("keys", keys, beside=anchor)
    _require_anchor(anchor, keys)
    if in_kernels:
        return kernels.keydiff.score_with_anchor(keys, anchor)
    return _minus_cosine(keys, anchor)


def update_anchor(
    anchor: torch.Tensor, new_keys: torch.Tensor | None, evicted_keys: torch.Tensor | None
) -> torch.Tensor:
    r"""KD-6: the sum of the unit keys after a step, `sum' = sum + sum_new k / |k| - sum_evicted k / |k|`.

    A step of block prompt processing then costs `update_anchor` with the block, `score_with_anchor` of cache
    and block, and `update_anchor` with the evicted keys: the cache is read once. Rounding adds up over the
    steps; `anchor_sum` starts afresh.

    Args: anchor [B, H_kv, D], a sum such as `anchor_sum` gives (not the mean), zeros for an empty cache;
    new_keys [B, H_kv, M, D] and evicted_keys [B, H_kv, E, D], None for none. Returns [B, H_kv, D]; the
    argument is unchanged. Raises ValueError naming the argument that does not fit, and on a CPU for NaN or
    infinite numbers. Source: equation 6 with equation 8.
    """
    changes = [
        (name, keys)
        for name, keys in (("new_keys", new_keys), ("evicted_keys", evicted_keys))
        if keys is not None
    ]
    for name, keys in changes:
        require_fit(f"{name}: ... T D", keys, finite=False)
        _require_anchor(anchor, keys)
    if len(changes) == 2:
        require_same_kind("evicted_keys", changes[1][1], "new_keys", changes[0][1])
    updated = anchor.clone()
    for name, keys in changes:
        change = _sum(name, keys)
        updated += change if name == "new_keys" else -change
    return updated


def _sum(name: str, keys: torch.Tensor) -> torch.Tensor:
    """`anchor_sum` of an argument with this name."""
    if _kernels_take(name, keys):
        return kernels.keydiff.anchor_sum(keys)
    if not gradients.are_wanted(keys):
        weights = keys.new_empty(keys.shape[:-1], dtype=working_dtype(keys))
        total = _sum_into(keys, weights, working_room(keys, BLOCK))
        if are_safe(weights):
            return total
    return _summed_anywhere(name, keys)[2]


def _minus_cosine(keys: torch.Tensor, anchor: torch.Tensor | None = None) -> torch.Tensor:
    """`score_with_anchor` in torch; without an anchor, with that of the keys."""
    if not gradients.are_wanted(keys, anchor):
        scores, weights = (keys.new_empty(keys.shape[:-1], dtype=working_dtype(keys)) for _ in range(2))
        room = working_room(keys, BLOCK)
        if anchor is None:
            headwise(_minus_cosine_into, keys, scores, weights, room=room)
        else:
            _minus_cosine_into(keys, scores, weights, anchor, room=room)
        if are_safe(weights):
            return scores
    keys, weights, total = _summed_anywhere("keys", keys)
    return (_against(total if anchor is None else anchor) @ keys.mT).squeeze(-2) * weights


def _minus_cosine_into(
    keys: torch.Tensor,
    scores: torch.Tensor,
    weights: torch.Tensor,
    anchor: torch.Tensor | None = None,
    *,
    room: torch.Tensor,
) -> None:
    """Write `-w_i k_i . anchor / |anchor|` and `w_i = 1 / |k_i|`, [..., T], of keys within SAFE_NORMS."""
    total = _sum_into(keys, weights, room)
    direction = _against(total if anchor is None else anchor)

    def score(block: torch.Tensor, weight: torch.Tensor, part: torch.Tensor) -> None:
        torch.mul((direction @ block.mT).squeeze(-2), weight, out=part)

    blockwise(score, keys, weights, scores, room=room)


def _sum_into(keys: torch.Tensor, weights: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Write `w_i = 1 / |k_i|` [..., T] and return `sum_i w_i k_i` [..., D]."""
    total = weights.new_zeros((*weights.shape[:-1], 1, keys.shape[-1]))

    def add(block: torch.Tensor, part: torch.Tensor) -> None:
        torch.reciprocal(vector_norm(block, dim=-1), out=part)
        total.add_(part[..., None, :] @ block)

    blockwise(add, keys, weights, room=room)
    return total.squeeze(-2)


def _against(anchor: torch.Tensor) -> torch.Tensor:
    """`-anchor / |anchor|`, [..., 1, D], 0 for a zero anchor."""
    norm = vector_norm(anchor, dim=-1, keepdim=True)
    return (anchor / -norm.masked_fill(norm == 0, 1))[..., None, :]


def _summed_anywhere(name: str, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the keys, rescaled to 1 as their largest component but for zero keys, `w_i = 1 / |k_i|` [..., T]
    and `sum_i w_i k_i` [..., D]: of any finite keys, and with a graph.
    """
    keys, _ = rescaled(name, keys, working_dtype(keys))
    norms = vector_norm(keys, dim=-1)
    # Decision: the cosine with a zero vector is 0, for a zero key as for an anchor whose keys cancel.
    weights = 1 / norms.masked_fill(norms == 0, math.inf)
    return keys, weights, (weights[..., None, :] @ keys).squeeze(-2)


def _kernels_take(name: str, keys: torch.Tensor, beside: torch.Tensor | None = None) -> bool:
    """Return whether the kernels take `keys` [..., T, D], beside an anchor, or raise ValueError; the torch
    path sees NaN in the norms it computes.
    """
    require_fit(f"{name}: ... T D", keys, finite=False)
    taken = kernels.take("keydiff", keys, beside=beside)
    if taken:
        require_finite(name, keys)
    return taken


def _require_anchor(anchor: torch.Tensor, keys: torch.Tensor) -> None:
    """Raise ValueError unless `anchor` [..., D] has one vector
    for each head of `keys` [..., T, D], in the working dtype.
    """
    require_fit("keys: ... T D, anchor: ... D", keys, anchor, free=("anchor",), finite=False)
    require_finite("anchor", anchor)
    if anchor.dtype != working_dtype(keys):
        raise ValueError(f"anchor: got dtype {anchor.dtype}, wanted {working_dtype(keys)}")
