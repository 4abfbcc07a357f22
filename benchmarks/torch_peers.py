"""Plain torch code, as a user would write it: the eager expressions that are timed beside the kernels.

That of a step of MomentKV is `optimized.momentkv.step_trusted`."""

import math
from typing import Any

import torch

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
    index = torch.cat([first, (chosen + starts[:, None]).flatten(2), last], dim=-1)[..., None].expand(
        -1, -1, -1, keys.shape[-1]
    )
    return keys.gather(2, index), values.gather(2, index)


def keydiff_torch(keys: torch.Tensor) -> torch.Tensor:
    """KD-8 in torch: unit keys, their mean, cosines."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    return -torch.cosine_similarity(unit.mean(dim=-2, keepdim=True), keys.float(), dim=-1)


def expected_attention_torch(
    keys: torch.Tensor, values: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor
) -> torch.Tensor:
    """EA-7..9 in torch, one query head of each group at a
    time, the quadratic form in the precision of the keys.
    """
    heads, head_dim = keys.shape[1], keys.shape[3]
    means, covariances = mean.unflatten(1, (heads, -1)), covariance.unflatten(1, (heads, -1))
    weights: Any = 0.0
    for g in range(means.shape[2]):
        linear = (keys @ means[:, :, g, :, None].to(keys.dtype)).squeeze(-1).float() / math.sqrt(head_dim)
        quadratic = ((keys @ covariances[:, :, g].to(keys.dtype)).float() * keys).sum(dim=-1) / (2 * head_dim)
        weights = weights + (linear + quadratic).softmax(dim=-1) / means.shape[2]
    return (weights + 0.02) * values.float().norm(dim=-1)


def received_torch(stem: str, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """SnapKV's or TOVA's score in torch: the attention
    of the last queries, softmax in float32, as a matrix.
    """
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


def moments_torch(
    keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, index: torch.Tensor
) -> tuple[Any, ...]:
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
    votes = (
        torch.arange(length, device=keys.device)
        < budgets.repeat_interleave(sampled.shape[2], dim=2)[..., None]
    )
    return torch.zeros_like(votes).scatter_(-1, order, votes).any(dim=2)
