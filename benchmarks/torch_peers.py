"""Plain torch code, as a user would write it: the eager expressions that are timed beside the kernels."""

import math
from typing import Any

import torch

from evictionary.optimized.momentkv import Moments
from evictionary.optimized.rope import rotate


def lagkv_torch(
    keys: torch.Tensor, values: torch.Tensor, kept_each: int, sinks: int, lag: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """LagKV of a whole cache in batched torch: scores of all partitions, top-k of each, gather."""
    length = keys.shape[2]
    parts = (length - sinks) // lag
    end = sinks + parts * lag

    def variation(states: torch.Tensor) -> torch.Tensor:
        cut = states[:, :, sinks:end].unflatten(2, (parts, lag)).float()
        after = cut[:, :, 1:]
        low, high = after.amin(dim=-2, keepdim=True), after.amax(dim=-2, keepdim=True)
        return ((cut[:, :, :-1] - low) / (high - low)).std(dim=-1).softmax(dim=-1)

    chosen = (variation(keys) + variation(values)).topk(kept_each, dim=-1).indices.sort(dim=-1).values
    starts = torch.arange(sinks, end - lag, lag, device=keys.device)
    lead = keys.shape[:2]
    first = torch.arange(sinks, device=keys.device).expand(*lead, -1)
    last = torch.arange(end - lag, length, device=keys.device).expand(*lead, -1)
    index = torch.cat([first, (chosen + starts[:, None]).flatten(2), last], dim=-1)[..., None].expand(-1, -1, -1, keys.shape[-1])
    return keys.gather(2, index), values.gather(2, index)


def keydiff_torch(keys: torch.Tensor) -> torch.Tensor:
    """KD-8 in torch: unit keys, their mean, cosines."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    return -torch.cosine_similarity(unit.mean(dim=-2, keepdim=True), keys.float(), dim=-1)


def expected_attention_torch(
    keys: torch.Tensor, values: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor
) -> torch.Tensor:
    """EA-7..9 in torch, one query head of each group at a time, the quadratic form in the precision of the keys."""
    heads, head_dim = keys.shape[1], keys.shape[3]
    means, covariances = mean.unflatten(1, (heads, -1)), covariance.unflatten(1, (heads, -1))
    weights: Any = 0.0
    for g in range(means.shape[2]):
        linear = (keys @ means[:, :, g, :, None].to(keys.dtype)).squeeze(-1).float() / math.sqrt(head_dim)
        quadratic = ((keys @ covariances[:, :, g].to(keys.dtype)).float() * keys).sum(dim=-1) / (2 * head_dim)
        weights = weights + (linear + quadratic).softmax(dim=-1) / means.shape[2]
    return (weights + 0.02) * values.float().norm(dim=-1)


def received_torch(stem: str, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """SnapKV's or TOVA's score in torch: the attention of the last queries, softmax in float32, as a matrix."""
    heads, count, length = keys.shape[1], queries.shape[2], keys.shape[2]
    logits = (queries.unflatten(1, (heads, -1)) @ keys[:, :, None].mT).float() / math.sqrt(keys.shape[3])
    later = torch.ones(count, length, dtype=torch.bool, device=keys.device).triu(length - count + 1)
    received = logits.masked_fill(later, -math.inf).softmax(dim=-1).mean(dim=(2, 3))
    if stem == "tova":
        return received.mean(dim=1, keepdim=True).expand(-1, heads, -1)
    pooled = torch.nn.functional.avg_pool1d(received[..., : length - count], 7, stride=1, padding=3)
    return torch.nn.functional.pad(pooled, (0, count), value=math.inf)


def statistics_torch(queries: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance of queries with their rotation undone, in torch."""
    plain = rotate(queries, -positions).float()
    mean = plain.mean(dim=-2)
    centred = plain - mean[..., None, :]
    return mean, centred.mT @ centred / queries.shape[-2]


def momentkv_torch(
    query: torch.Tensor, new_key: torch.Tensor, new_value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    positions: torch.Tensor, moments: Moments, position: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One step of MomentKV in batched torch, in place: score, evict the lowest, add it to the moments, attend, mix."""
    heads, dim = keys.shape[1], keys.shape[3]
    all_keys = torch.cat([keys, new_key[:, :, None]], dim=2).float()
    all_values = torch.cat([values, new_value[:, :, None]], dim=2).float()
    grouped = query.float().unflatten(1, (heads, -1)) / math.sqrt(dim)

    def means() -> tuple[torch.Tensor, ...]:
        count = moments.count.clamp(min=1)[..., None].float()
        mean_key, mean_value = moments.key_sum / count, moments.value_sum / count
        spread = moments.value_key_sum - moments.value_sum[..., None] * mean_key[..., None, :]
        return count, mean_key, mean_value, spread

    count, _, mean_value, spread = means()
    logits = grouped @ all_keys.mT
    residual = all_values - mean_value[:, :, None] - all_keys @ spread.mT / (count[..., None] * math.sqrt(dim))
    scores = logits.softmax(dim=-1).mean(dim=2) * residual.norm(dim=-1)
    lowest = scores.argmin(dim=-1, keepdim=True)
    row = lowest[..., None].expand(-1, -1, -1, dim)
    gone_key, gone_value = all_keys.gather(2, row)[:, :, 0], all_values.gather(2, row)[:, :, 0]
    moments.count.add_(1)
    moments.key_sum.add_(gone_key)
    moments.value_sum.add_(gone_value)
    moments.value_key_sum.add_(gone_value[..., None] * gone_key[..., None, :])
    count, mean_key, mean_value, spread = means()
    logits = logits.scatter(3, lowest[:, :, None].expand(-1, -1, logits.shape[2], -1), -math.inf)
    evicted_logit = count.log() + (grouped @ mean_key[..., None]).squeeze(-1)
    evicted_value = mean_value[:, :, None] + grouped @ spread.mT / count[..., None]
    weights = torch.cat([logits, evicted_logit[..., None]], dim=-1).softmax(dim=-1)
    output = weights[..., :-1] @ all_values + weights[..., -1:] * evicted_value
    slot = lowest.clamp(max=keys.shape[2] - 1)
    replaces = (lowest < keys.shape[2])[..., None]
    row = slot[..., None].expand(-1, -1, -1, dim)
    keys.scatter_(2, row, torch.where(replaces, new_key[:, :, None], keys.gather(2, row)))
    values.scatter_(2, row, torch.where(replaces, new_value[:, :, None], values.gather(2, row)))
    positions.scatter_(2, slot, torch.where(replaces[..., 0], position[..., None], positions.gather(2, slot)))
    return output.flatten(1, 2).to(query.dtype)


def moments_torch(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, index: torch.Tensor) -> tuple[Any, ...]:
    """Moments of the evicted tokens and rows of the kept ones, in torch: a masked product and two gathers."""
    gone_keys, gone_values = torch.where(kept[..., None], 0, keys), torch.where(kept[..., None], 0, values)
    index = index[..., None].expand(-1, -1, -1, keys.shape[-1])
    sums = gone_keys.sum(dim=-2, dtype=torch.float32), gone_values.sum(dim=-2, dtype=torch.float32)
    return keys.gather(2, index), values.gather(2, index), *sums, gone_values.mT @ gone_keys


def gvote_torch(query: torch.Tensor, keys: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """GVote in torch: softmax and sort for the budgets, a sort of all sampled logits for the votes."""
    heads, length = keys.shape[1], keys.shape[2]
    current = query.unflatten(1, (heads, -1)).float() / math.sqrt(keys.shape[-1])
    falling = (current @ keys.float().mT).softmax(dim=-1).sort(dim=-1, descending=True).values
    tail = falling.flip(-1).cumsum(dim=-1, dtype=torch.float64).flip(-1)
    budgets = (tail > 0.05 * tail[..., :1]).sum(dim=-1)  # [B, H_kv, G]
    logits = sampled.unflatten(1, (heads, -1)).flatten(2, 3).float() @ keys.float().mT
    order = logits.argsort(dim=-1, descending=True)
    votes = torch.arange(length, device=keys.device) < budgets.repeat_interleave(sampled.shape[2], dim=2)[..., None]
    return torch.zeros_like(votes).scatter_(-1, order, votes).any(dim=2)
