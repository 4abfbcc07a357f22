r"""Attention over a compressed cache, with the log-sum-exp that merges it with attention over other tokens (ATT-1 to ATT-3)."""

from __future__ import annotations

import math

import torch

from evictionary.reference.checks import group_size

from .cache import CompressedCache
from .checks import require_same_kind, require_states, runs_on_gpu, working_dtype


def attend(queries: torch.Tensor, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ATT-1..3: `softmax(q K^T / sqrt(D)) V` of every query over the kept tokens of its KV head, and `log sum exp` of its logits.

    The query heads of a group and their M queries are rows of one product with the keys that they share. On a CPU the keys are read
    where they lie, head by head; only the logits are padded to the longest head, and the padding has no weight.

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
        from .kernels import attention as kernels

        return kernels.attend(queries, cache)
    dtype = working_dtype(queries)
    shape = (batch, num_query_heads, num_queries)
    ends = cache.lengths.flatten().cumsum(0).tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    longest = max(span.stop - span.start for span in spans)
    if longest == 0:
        return queries.new_zeros(*shape, cache.values.shape[-1]), queries.new_full(shape, -math.inf, dtype=dtype)
    grouped = queries.to(dtype).reshape(batch * num_kv_heads, group * num_queries, head_dim) / math.sqrt(head_dim)
    logits = queries.new_full((*grouped.shape[:2], longest), -math.inf, dtype=dtype)
    for head, span in enumerate(spans):
        torch.mm(grouped[head], cache.keys[span].to(dtype).T, out=logits[head, :, : span.stop - span.start])
    normaliser = logits.logsumexp(dim=-1)
    # An empty head has logits of -inf alone; -inf less -inf would be NaN, so its normaliser is replaced by 0 for the weights.
    weights = (logits - normaliser.masked_fill(normaliser == -math.inf, 0)[..., None]).exp_()
    output = queries.new_empty(*grouped.shape[:2], cache.values.shape[-1], dtype=dtype)
    for head, span in enumerate(spans):
        torch.mm(weights[head, :, : span.stop - span.start], cache.values[span].to(dtype), out=output[head])
    return output.to(queries.dtype).reshape(*shape, -1), normaliser.reshape(shape)
