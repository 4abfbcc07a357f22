r"""Attention over a compressed cache, with the log-sum-exp that merges it with attention over other tokens (ATT-1 to ATT-3)."""

from __future__ import annotations

import math

import torch

from optimized.cache import CompressedCache
from optimized.checks import require_same_kind, require_states, runs_on_gpu, working_dtype
from reference.checks import group_size


def attend(queries: torch.Tensor, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ATT-1..3: `softmax(q K^T / sqrt(D)) V` of every query over the kept tokens of its KV head, and `log sum exp` of its logits.

    The ragged heads are padded to the longest one by an index, and the padding masked; the query heads of a group and their M
    queries are rows of one product with the keys that they share.

    Args: queries [B, H_q, M, D], all later than the cache (no causal mask); cache, from `cache.compress`.
    Returns output [B, H_q, M, D_v] in the dtype of the queries and log-sum-exp [B, H_q, M] in float32 (float64 for float64;
    natural logarithm, scaled logits). A head that keeps no token gives output 0 and log-sum-exp -inf.
    Raises ValueError where queries and cache disagree in shape, dtype or device, and on a CPU for NaN or infinite queries.
    """
    require_states("queries", queries, "B H_q M D")
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads = cache.lengths.shape[1]
    if batch != cache.lengths.shape[0] or head_dim != cache.keys.shape[-1]:
        wanted = f"[{cache.lengths.shape[0]}, H_q, M, {cache.keys.shape[-1]}]"
        raise ValueError(f"queries: got shape {tuple(queries.shape)}, wanted {wanted}")
    require_same_kind("queries", queries, "cache.keys", cache.keys)
    group = group_size(num_query_heads, num_kv_heads)
    if runs_on_gpu(queries) and runs_on_gpu(cache.values):
        from optimized.kernels import attention as kernels

        return kernels.attend(queries, cache)
    dtype = working_dtype(queries)
    longest = int(cache.lengths.max())
    if longest == 0:
        shape = (batch, num_query_heads, num_queries)
        return queries.new_zeros(*shape, cache.values.shape[-1]), queries.new_full(shape, -math.inf, dtype=dtype)
    starts = cache.lengths.flatten().cumsum(0).view_as(cache.lengths) - cache.lengths
    slots = torch.arange(longest, device=queries.device)
    filled = slots < cache.lengths[..., None]  # [B, H_kv, longest]
    rows = torch.where(filled, starts[..., None] + slots, 0)
    keys, values = cache.keys[rows].to(dtype), cache.values[rows].to(dtype)  # [B, H_kv, longest, D or D_v]
    grouped = queries.to(dtype).reshape(batch, num_kv_heads, group * num_queries, head_dim)
    logits = (grouped @ keys.mT / math.sqrt(head_dim)).masked_fill(~filled[:, :, None], -math.inf)
    normaliser = logits.logsumexp(dim=-1)
    # An empty head has logits of -inf alone; -inf less -inf would be NaN, so its normaliser is replaced by 0 for the weights.
    weights = (logits - torch.where(normaliser == -math.inf, 0, normaliser)[..., None]).exp()
    output = (weights @ values).to(queries.dtype)
    shape = (batch, num_query_heads, num_queries)
    return output.reshape(*shape, -1), normaliser.reshape(shape)
