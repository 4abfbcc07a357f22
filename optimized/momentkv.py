r"""MomentKV (arXiv 2606.01563): sum up what is evicted in four moments, and give its share of the attention back from them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.linalg import vector_norm

from optimized.checks import require_kept, require_same_kind, require_shape, require_states, working_dtype
from optimized.tova import grouped_logits
from reference.checks import group_size


class Moments(NamedTuple):
    r"""MK-22: `n_e = |E|`, `s_k = sum k_i`, `s_v = sum v_i`, `S = sum v_i k_i^T` over the evicted tokens of each KV head.

    count [B, H_kv], int64; key_sum [B, H_kv, D]; value_sum [B, H_kv, D_v]; value_key_sum [B, H_kv, D_v, D].
    Source: equation 22.
    """

    # Decision: float32 or wider, whatever the dtype of the cache: a half-precision sum stops growing (MK-C2).
    count: torch.Tensor  # type: ignore[assignment]
    key_sum: torch.Tensor
    value_sum: torch.Tensor
    value_key_sum: torch.Tensor


class Recovered(NamedTuple):
    """What the moments say of the evicted set: mean_key [..., D], mean_value [..., D_v], covariance [..., D_v, D] (a sum)."""

    mean_key: torch.Tensor
    mean_value: torch.Tensor
    covariance: torch.Tensor


def no_moments(keys: torch.Tensor, values: torch.Tensor) -> Moments:
    r"""MK-22: the moments of the empty set, for the heads of keys [..., T, D] and values [..., T, D_v]."""
    _require_tokens(keys, values)
    lead, head_dim, value_dim, dtype = keys.shape[:-2], keys.shape[-1], values.shape[-1], working_dtype(keys)
    return Moments(
        keys.new_zeros(lead, dtype=torch.int64),
        keys.new_zeros(*lead, head_dim, dtype=dtype),
        keys.new_zeros(*lead, value_dim, dtype=dtype),
        keys.new_zeros(*lead, value_dim, head_dim, dtype=dtype),
    )


def update(moments: Moments, keys: torch.Tensor, values: torch.Tensor, evicted: torch.Tensor) -> Moments:
    r"""MK-25: `n_e += 1, s_k += k_j, s_v += v_j, S += v_j k_j^T` for every evicted token j, in any order.

    Args: moments, before; keys [B, H_kv, T, D]; values [B, H_kv, T, D_v], any strides; evicted [B, H_kv, T], boolean, True =
    evicted now. Returns the Moments after, in float32 or the dtype of the moments where that is wider. Raises ValueError naming
    the argument that does not fit, and on a CPU for NaN or infinite numbers and for a negative count. Source: equation 25.
    """
    _require_tokens(keys, values)
    require_kept("evicted", evicted, "keys", keys, tuple(keys.shape[:-1]))
    moments = _wide(moments, keys, values)
    dtype = moments.key_sum.dtype
    gone_keys = torch.where(evicted[..., None], keys.to(dtype), 0)
    gone_values = torch.where(evicted[..., None], values.to(dtype), 0)
    return Moments(
        moments.count + evicted.sum(dim=-1),
        moments.key_sum + gone_keys.sum(dim=-2),
        moments.value_sum + gone_values.sum(dim=-2),
        moments.value_key_sum + gone_values.mT @ gone_keys,
    )


def merge(first: Moments, second: Moments) -> Moments:
    r"""MK-25: the moments of the union of two disjoint evicted sets, which is their sum, in float32 or wider."""
    sums = (
        mine.to(working_dtype(mine)) + theirs.to(working_dtype(theirs)) for mine, theirs in zip(first[1:], second[1:], strict=True)
    )
    return Moments(first.count + second.count, *sums)


def recover(moments: Moments) -> Recovered:
    r"""MK-23, MK-24: `kbar = s_k / n_e`, `vbar = s_v / n_e`, `Stilde = S - s_v s_k^T / n_e`; all zero where nothing was evicted.

    Args: moments, with any leading axes. Returns float32 (float64 for float64). Source: equations 23 and 24, Algorithm 1 line 7.
    """
    # Decision: the clamp of small entries of Stilde to 0 (appendix C.2) is off: a threshold of 1e-6 knows nothing of the scale.
    dtype = working_dtype(moments.key_sum)
    divisor = moments.count.clamp(min=1)[..., None].to(dtype)
    value_sum = moments.value_sum.to(dtype)
    mean_key = moments.key_sum.to(dtype) / divisor
    covariance = moments.value_key_sum.to(dtype) - value_sum[..., :, None] * mean_key[..., None, :]
    return Recovered(mean_key, value_sum / divisor, covariance)


def score(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, moments: Moments) -> torch.Tensor:
    r"""MK-10: `score_j = alpha_j |v_j - vbar - Stilde k_j / (n_e sqrt(d))|`, alpha the attention over the retained keys.

    Args: query [B, H_q, D], the decode query; keys [B, H_kv, T, D] and values [B, H_kv, T, D_v] of the retained tokens, any
    strides; moments of the evicted ones. Returns [B, H_kv, T], at least 0, higher = keep, float32 (float64 for float64); alpha is
    the mean of the probabilities that the query heads of a group give. Raises ValueError naming the argument that does not fit, and
    on a CPU for NaN or infinite numbers. Source: section 4.2, equation 10, Algorithm 1 lines 7 to 12.
    """
    _require_decoding(query, keys, values)
    count, (_, mean_value, covariance) = _recovered(moments, keys, values)
    dtype = working_dtype(keys)
    keys = keys.to(dtype)
    # Decision: a KV head is scored once for its group: the mean over its query heads, after the softmax.
    alpha = grouped_logits(query[:, :, None], keys).softmax(dim=-1).mean(dim=(2, 3))
    # Decision: with n_e = 0 the printed line is 0/0; the means it is set beside are 0, so the residual is v_j.
    scale = count.clamp(min=1)[..., None, None].to(dtype) * math.sqrt(keys.shape[-1])
    residual = values.to(dtype) - mean_value[..., None, :] - keys @ covariance.mT / scale
    return alpha * vector_norm(residual, dim=-1)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, moments: Moments) -> torch.Tensor:
    r"""MK-12, MK-37: `fhat(q) = what_R f_R(q) + (1 - what_R) fhat_E(q)`: the moments enter the softmax as one more token.

    Its logit is `log n_e + q . kbar / sqrt(d)` (MK-11), its value `vbar + Stilde q / (n_e sqrt(d))` (MK-9).

    Args: query [B, H_q, D]; keys [B, H_kv, T, D]; values [B, H_kv, T, D_v], any strides; kept [B, H_kv, T], boolean (what is not
    kept has no weight; its moments, if it has been evicted, are in `moments`); moments of the evicted tokens.
    Returns [B, H_q, D_v] in the dtype of query. With no moments it is f_R; a head that keeps nothing and has no moments gives 0.
    Raises ValueError naming the argument that does not fit, and on a CPU for NaN or infinite numbers.
    Source: section 4.2, equations 12 and 37, Algorithm 1 lines 19 to 25.
    """
    _require_decoding(query, keys, values)
    require_kept("kept", kept, "keys", keys, tuple(keys.shape[:3]))
    count, (mean_key, mean_value, covariance) = _recovered(moments, keys, values)
    batch, num_kv_heads, _, head_dim = keys.shape
    dtype = working_dtype(keys)
    queries = query.to(dtype).reshape(batch, num_kv_heads, -1, head_dim)
    divisor = count.clamp(min=1)[..., None].to(dtype)
    evicted_logit = divisor.log() + (queries @ mean_key[..., None]).squeeze(-1) / math.sqrt(head_dim)
    evicted_logit = evicted_logit.masked_fill(count[..., None] == 0, -math.inf)
    evicted_value = mean_value[:, :, None] + queries @ covariance.mT / (divisor[..., None] * math.sqrt(head_dim))
    logits = grouped_logits(query[:, :, None], keys).squeeze(3).masked_fill(~kept[:, :, None], -math.inf)
    # The largest logit is subtracted before any logarithm or sum: at logits of 1e4 float32 has three decimals left.
    top = torch.maximum(logits.amax(dim=-1), evicted_logit)
    top = torch.where(top == -math.inf, 0, top)  # a head without tokens and moments; -inf less -inf would be NaN
    weights, evicted_weight = (logits - top[..., None]).exp(), (evicted_logit - top).exp()[..., None]
    total = weights.sum(dim=-1, keepdim=True) + evicted_weight
    mixed = weights @ values.to(dtype) + evicted_weight * evicted_value
    return (mixed / torch.where(total == 0, 1, total)).reshape(batch, query.shape[1], -1).to(query.dtype)


def _require_tokens(keys: torch.Tensor, values: torch.Tensor, lead: str = "... T") -> None:
    """Raise ValueError unless keys and values are the states of the same tokens."""
    require_states("keys", keys, f"{lead} D")
    require_states("values", values, f"{lead} D_v")
    require_shape("values", values, (*keys.shape[:-1], values.shape[-1]), "the batch, heads and tokens of keys")
    require_same_kind("values", values, "keys", keys)


def _require_decoding(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise ValueError unless query is one decode query of each head that reads the cache."""
    _require_tokens(keys, values, "B H_kv T")
    require_states("query", query, "B H_q D")
    require_shape("query", query, (keys.shape[0], query.shape[1], keys.shape[3]), "the batch and channels of keys")
    require_same_kind("query", query, "keys", keys)
    group_size(query.shape[1], keys.shape[1])


def _wide(moments: Moments, keys: torch.Tensor, values: torch.Tensor) -> Moments:
    """Return the moments in float32 or wider, at least as wide as the arithmetic of keys, or raise ValueError."""
    lead, head_dim, value_dim = keys.shape[:-2], keys.shape[-1], values.shape[-1]
    shapes = (lead, (*lead, head_dim), (*lead, value_dim), (*lead, value_dim, head_dim))
    if not isinstance(moments, tuple) or len(moments) != len(shapes):
        raise ValueError(f"moments: got {type(moments).__name__}, wanted Moments({', '.join(Moments._fields)})")
    for name, field, shape in zip(Moments._fields, moments, shapes, strict=True):
        if not isinstance(field, torch.Tensor):
            raise ValueError(f"moments.{name}: got {type(field).__name__}, wanted a torch tensor")
        require_shape(f"moments.{name}", field, shape, "the batch, heads and channels of keys and values")
        if field.device != keys.device:
            raise ValueError(f"moments.{name}: got device {field.device}, wanted {keys.device} (that of keys)")
        if name != "count":
            require_states(f"moments.{name}", field, "...")
    given, *sums = moments
    count = given.to(torch.int64)
    if count.device.type == "cpu" and ((count < 0) | (count != given)).any():
        raise ValueError("moments.count: got a negative or broken number, wanted whole numbers of at least 0")
    dtype = torch.promote_types(working_dtype(keys), working_dtype(sums[0]))
    return Moments(count, *(field.to(dtype) for field in sums))


def _recovered(moments: Moments, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, Recovered]:
    """Check the moments, and return the count, and the means and the covariance in the arithmetic of keys."""
    moments, dtype = _wide(moments, keys, values), working_dtype(keys)
    return moments.count, Recovered(*(field.to(dtype) for field in recover(moments)))
