r"""MomentKV to read: the four sums over the evicted tokens,
the score, and the attention with them (MK-10, MK-12, MK-25).

Two kernels, each one walk over the cache. `add_evicted`, one program for each head, adds the evicted tokens
to the sums. `attend_kept`, one program for each query head, is plain attention with one token more, which
stands for all the evicted ones: `evicted_token` makes its logit and its value from the sums. The score takes
from each value what the sums predict of it.
"""

import math

import torch
import triton
import triton.language as tl

from evictionary.optimized.states import Moments, Step

from ..gradients import forward_only
from .selection import top_k
from .tova import last_attention

BLOCK = 32  # tokens of a tile


@forward_only
def update(moments: Moments, keys: torch.Tensor, values: torch.Tensor, evicted: torch.Tensor) -> Moments:
    r"""MK-25: the moments with the tokens of `evicted` [B, H_kv, T] added: keys [B, H_kv, T, D] and values
    [B, H_kv, T, D_v].
    """
    key_sum, value_sum, value_key_sum = (
        field.clone(memory_format=torch.contiguous_format) for field in moments[1:]
    )
    states = (keys.contiguous(), values.contiguous(), evicted.contiguous())
    sizes = (keys.shape[-2], keys.shape[-1], values.shape[-1])
    add_evicted[(moments.count.numel(),)](*states, key_sum, value_sum, value_key_sum, *sizes, num_warps=8)
    return Moments(moments.count + evicted.sum(dim=-1), key_sum, value_sum, value_key_sum)


@forward_only
def score(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, moments: Moments) -> torch.Tensor:
    r"""MK-10: query [B, H_q, D], keys [B, H_kv, T, D], values [B, H_kv, T, D_v] give scores [B, H_kv, T],
    higher = keep.
    """
    _, mean_value, slope = means_and_slope(moments)
    alpha = last_attention(query, keys).unflatten(1, (keys.shape[1], -1)).mean(dim=2)
    return alpha * (values - mean_value[:, :, None] - keys @ slope.mT).norm(dim=-1)


@forward_only
def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, moments: Moments
) -> torch.Tensor:
    r"""MK-12, MK-37: attention over the tokens of `kept` [B, H_kv, T] and the evicted ones, in `moments`:
    [B, H_q, D_v].
    """
    output = query.new_empty(*query.shape[:2], values.shape[3])
    states = (
        (query * query.shape[2] ** -0.5).contiguous(),
        keys.contiguous(),
        values.contiguous(),
        kept.contiguous(),
    )
    sizes = (query.shape[1] // keys.shape[1], *keys.shape[2:], values.shape[3])
    attend_kept[(query.shape[0] * query.shape[1],)](
        *states, *evicted_token(query, moments), output, *sizes, BLOCK
    )
    return output


@forward_only
def decode_step(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    moments: Moments,
    budget: int,
) -> Step:
    r"""MK-A1: add the new token, evict the lowest scores
    one by one until `budget` tokens are left, then attend.
    """
    keys = torch.cat([keys, new_key[:, :, None]], dim=2)
    values = torch.cat([values, new_value[:, :, None]], dim=2)
    while keys.shape[2] > budget:
        kept = top_k(score(query, keys, values, moments), keys.shape[2] - 1)
        moments = update(moments, keys, values, ~kept)
        keys, values = (states[kept].unflatten(0, (*kept.shape[:2], -1)) for states in (keys, values))
    everything = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    return Step(attend(query, keys, values, everything, moments), keys, values, moments)


def means_and_slope(moments: Moments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""MK-23, MK-24: kbar [.., D], vbar [.., D_v] and the slope `Stilde / (n sqrt(D))` [.., D_v, D]; 0
    with nothing evicted.
    """
    divisor = moments.count.clamp(min=1)[..., None]
    mean_key, mean_value = moments.key_sum / divisor, moments.value_sum / divisor
    covariance = moments.value_key_sum - moments.value_sum[..., None] * mean_key[..., None, :]
    return mean_key, mean_value, covariance / (divisor[..., None] * math.sqrt(mean_key.shape[-1]))


def evicted_token(query: torch.Tensor, moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    r"""MK-9, MK-11: its logit `log n + q . kbar / sqrt(D)` [B, H_q] (-inf for none), its value `vbar +
    slope q` [B, H_q, D_v].
    """
    grouped = query.unflatten(1, (moments.count.shape[1], -1))
    mean_key, mean_value, slope = means_and_slope(moments)
    logits = (grouped @ mean_key[..., None])[..., 0] / math.sqrt(query.shape[-1])
    logits = torch.where(
        moments.count[..., None] > 0, moments.count.clamp(min=1).log()[..., None] + logits, -math.inf
    )
    return logits.contiguous(), (mean_value[:, :, None] + grouped @ slope.mT).contiguous()


@triton.jit
def add_evicted(
    keys_ptr,
    values_ptr,
    gone_ptr,
    key_sum_ptr,
    value_sum_ptr,
    outer_ptr,
    length,
    D: tl.constexpr,
    DV: tl.constexpr,
):
    """Add the evicted tokens of a head to its sums of k, of
    v and of v k^T, one token after the other. Grid: heads.
    """
    head = tl.program_id(0).to(tl.int64)
    key_channels, value_channels = head * D + tl.arange(0, D), head * DV + tl.arange(0, DV)
    pairs = value_channels[:, None] * D + tl.arange(0, D)[None, :]
    key_sum, value_sum = tl.load(key_sum_ptr + key_channels), tl.load(value_sum_ptr + value_channels)
    outer = tl.load(outer_ptr + pairs)
    for token in range(head * length, (head + 1) * length):
        if tl.load(gone_ptr + token) != 0:
            key = tl.load(keys_ptr + token * D + tl.arange(0, D))
            value = tl.load(values_ptr + token * DV + tl.arange(0, DV))
            key_sum += key
            value_sum += value
            outer += value[:, None] * key[None, :]
    tl.store(key_sum_ptr + key_channels, key_sum)
    tl.store(value_sum_ptr + value_channels, value_sum)
    tl.store(outer_ptr + pairs, outer)


@triton.jit
def attend_kept(
    query_ptr, keys_ptr, values_ptr, kept_ptr, logit_ptr, value_ptr, output_ptr, group, length,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """output = softmax of the logits of the kept tokens and of the evicted token, times their values.
    Grid: query heads.
    """
    query_head = tl.program_id(0).to(tl.int64)
    query = tl.load(query_ptr + query_head * D + tl.arange(0, D))
    value_channels = query_head * DV + tl.arange(0, DV)
    highest = tl.load(logit_ptr + query_head)
    total = tl.where(highest == float("-inf"), 0.0, 1.0)
    output = tl.load(value_ptr + value_channels) * total
    for first in range(0, length, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        rows = query_head // group * length + positions
        kept = tl.load(kept_ptr + rows, mask=positions < length, other=0) != 0
        keys = tl.load(keys_ptr + rows[:, None] * D + tl.arange(0, D)[None, :], mask=kept[:, None], other=0.0)
        values = tl.load(
            values_ptr + rows[:, None] * DV + tl.arange(0, DV)[None, :], mask=kept[:, None], other=0.0
        )
        logits = tl.where(kept, tl.sum(keys * query[None, :], axis=1), float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, axis=0))
        # where nothing has come yet: -inf less -inf is no number
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, shrink = tl.exp(logits - base), tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, axis=0)
        output = output * shrink + tl.sum(weights[:, None] * values, axis=0)
        highest = higher
    tl.store(output_ptr + value_channels, output / tl.where(total == 0, 1.0, total))
