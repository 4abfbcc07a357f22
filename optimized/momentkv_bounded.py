r"""A correction that is never worse: bounds of what the evicted tokens can have given, beside MomentKV.

Derived here, from no paper; the proofs are in the file of the same name in `reference`.
"""

import math
from typing import NamedTuple

import torch

from .attention import grouped_logits
from .checks import fits, require_fit, working_dtype
from .momentkv import _wide, evicted_part, recover
from .operators import operator
from .states import Moments

# sinh(40) = 1e17: the radius of MB-4 then exceeds the box of the values up to 1e34 evicted tokens.
LARGEST_REACH = 40.0


class Bounds(NamedTuple):
    r"""MB-1: the least and the largest number of each channel of the evicted keys and values.

    key_low and key_high [B, H_kv, D]; value_low and value_high [B, H_kv, D_v]. Where nothing was evicted, low
    is infinity and high minus infinity.
    """

    key_low: torch.Tensor
    key_high: torch.Tensor
    value_low: torch.Tensor
    value_high: torch.Tensor


@operator("keys", "keys", "values", "values")
@fits()
def no_bounds(keys: torch.Tensor, values: torch.Tensor) -> Bounds:
    r"""MB-1: the bounds of the empty set, for the heads of keys and values, in their dtype."""
    key_high, value_high = (torch.full_like(states[..., 0, :], -torch.inf) for states in (keys, values))
    return Bounds(-key_high, key_high, -value_high, value_high)


@operator("bounds.key_low", "bounds.key_high", "bounds.value_low", "bounds.value_high")
@fits()
def update(bounds: Bounds, keys: torch.Tensor, values: torch.Tensor, evicted: torch.Tensor) -> Bounds:
    r"""MB-1: `low = min(low, k_j)`, `high = max(high, k_j)` for every evicted token j; values alike.

    Args: bounds, before; evicted, True = evicted now. Returns the Bounds after, in the wider dtype of the
    bounds and the states: they are never rounded. Raises ValueError naming the argument that does not fit,
    and on a CPU for NaN or infinite keys and values.
    """
    kept = ~evicted[..., None]
    return Bounds(
        torch.minimum(bounds[0], keys.masked_fill(kept, torch.inf).amin(dim=-2)),
        torch.maximum(bounds[1], keys.masked_fill(kept, -torch.inf).amax(dim=-2)),
        torch.minimum(bounds[2], values.masked_fill(kept, torch.inf).amin(dim=-2)),
        torch.maximum(bounds[3], values.masked_fill(kept, -torch.inf).amax(dim=-2)),
    )


@operator("values")
def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    moments: Moments,
    bounds: Bounds,
) -> torch.Tensor:
    r"""MB-6: MomentKV's output moved to the nearest point of a box that holds full attention: never
    farther from it.

    Args: as `momentkv.attend`, and bounds of the same evicted tokens. Returns [B, H_q, D_v] in the dtype of
    query. Raises ValueError naming the argument that does not fit, and on a CPU for NaN or infinite numbers.
    """
    from_retained, correction, low, high = _parts(query, keys, values, kept, moments, bounds)
    return _output(from_retained + correction.clamp(low, high), query)


@operator("values")
def attend_certified(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    moments: Moments,
    bounds: Bounds,
) -> torch.Tensor:
    r"""MB-7: as much of that correction as cannot hurt: never farther from full attention than the
    retained tokens alone are.

    Args, returns and raises as `attend`.
    """
    from_retained, correction, low, high = _parts(query, keys, values, kept, moments, bounds)
    step = correction.clamp(low, high)
    gain = torch.minimum(step * low, step * high).sum(dim=-1, keepdim=True)
    length = step.square().sum(dim=-1, keepdim=True)
    scale = (2 * gain / torch.where(length > 0, length, 1)).clamp(0, 1)
    return _output(from_retained + (scale * step).clamp(low, high), query)


def _parts(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    moments: Moments,
    bounds: Bounds,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """f_R, MomentKV's correction of it, and the box of f - f_R, low and high; [B, H_kv, G, D_v]."""
    require_fit("momentkv_bounded.attend", query, keys, values, kept, moments, bounds)
    moments = _wide(moments, keys)
    _require_finite_bounds(bounds, moments.count)
    some, dtype = moments.count[..., None] > 0, working_dtype(keys)
    mean_key, mean_value = (field.to(dtype) for field in recover(moments)[:2])
    key_low, key_high, value_low, value_high = (
        torch.where(some, field.to(dtype), 0)[:, :, None] for field in bounds
    )
    queries = query.to(dtype).reshape(*keys.shape[:2], -1, keys.shape[-1])
    root, log_count = math.sqrt(keys.shape[-1]), moments.count.clamp(min=1)[..., None].to(dtype).log()
    # MB-2 and MB-3: the logits and the partition function of the evicted tokens.
    ends = queries * key_low, queries * key_high
    least, largest = torch.minimum(*ends).sum(dim=-1) / root, torch.maximum(*ends).sum(dim=-1) / root
    mean_logit, spread = (queries @ mean_key[..., None]).squeeze(-1) / root, largest - least
    share = ((mean_logit - least) / torch.where(spread > 0, spread, 1)).clamp(0, 1)
    chord = torch.maximum(largest + (share + (1 - share) * (-spread).exp()).log(), mean_logit)
    # f_R, and the weights that the evicted tokens have at least and at most.
    logits = grouped_logits(query[:, :, None], keys).squeeze(3).masked_fill(~kept[:, :, None], -torch.inf)
    log_retained = logits.logsumexp(dim=-1, keepdim=True)
    from_retained = (logits - torch.where(log_retained == -torch.inf, 0, log_retained)).exp() @ values.to(
        dtype
    )
    # The sigmoid of a difference is 1 where nothing is kept, and 0 where nothing was evicted.
    light, heavy = (
        torch.where(some, (log_count + bound - log_retained[..., 0]).sigmoid(), 0)[..., None]
        for bound in (mean_logit, chord)
    )
    # MB-4: the box of the evicted output.
    mean = mean_value[:, :, None].clamp(value_low, value_high)
    product = (value_high - mean) * (mean - value_low)
    # the root has no slope at 0
    reach = torch.where(product > 0, torch.where(product > 0, product, 1).sqrt(), 0)
    radius = reach * (spread / 2).clamp(max=LARGEST_REACH).sinh()[..., None]
    low, high = (
        torch.maximum(value_low, mean - radius) - from_retained,
        torch.minimum(value_high, mean + radius) - from_retained,
    )
    correction = light * (evicted_part(queries, moments)[0] - from_retained)
    return (
        from_retained,
        correction,
        torch.minimum(light * low, heavy * low),
        torch.maximum(light * high, heavy * high),
    )


def _output(output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return output.reshape(*query.shape[:2], -1).to(query.dtype)


def _require_finite_bounds(bounds: Bounds, count: torch.Tensor) -> None:
    """Raise ValueError where, on a CPU, the bounds of evicted tokens are not finite."""
    for name, field in zip(Bounds._fields, bounds, strict=True):
        if field.device.type == "cpu" and (~field.isfinite().all(dim=-1) & (count > 0)).any():
            raise ValueError(f"bounds.{name}: got infinite bounds of evicted tokens, wanted `update`'s")
