r"""Attention over a compressed cache, and of the queries of a prompt, which all methods share (ATT-1 to
ATT-6).
"""

import math

import torch

from .checks import require_finite, require_fit, require_same_kind, working_dtype
from .kernels.launching import kernels_for
from .softmax import capped, weights
from .states import CompressedCache

# Channels that are converted to float32 at a time: a copy that stays in the processor's cache costs nothing.
BLOCK = 2**20


def attend(queries: torch.Tensor, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ATT-1..3: `softmax(q K^T / sqrt(D)) V` of every query over the kept tokens of its KV head, and `log
    sum exp` of its logits.

    The query heads of a group and their M queries are rows of one product with the keys that they share. On a
    CPU the keys are read in place, head by head; only the logits are padded to the longest head, and the
    padding has no weight.

    Args: queries [B, H_q, M, D], all later than the cache (no causal mask); cache, from `cache.compress`.
    Returns output [B, H_q, M, D_v] in the dtype of the queries and log-sum-exp [B, H_q, M] in float32
    (float64 for float64; natural logarithm, scaled logits). A head that keeps no token gives output 0 and
    log-sum-exp -inf. Raises ValueError if queries and cache disagree in shape, dtype or device, and on a CPU
    for NaN or infinite queries.
    """
    require_fit("attention.attend", queries, cache, finite=False)
    require_finite("queries", queries)
    require_same_kind("cache.keys", cache.keys, "queries", queries)
    return attend_trusted(queries, cache)


def attend_trusted(queries: torch.Tensor, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` for a caller whose arguments fit: a cache that decodes, where a check costs as much as the
    products.
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads = cache.lengths.shape[1]
    group = num_query_heads // num_kv_heads
    if kernels := kernels_for("attention", queries, cache.values, beside=cache):
        return kernels.attend(queries, cache)
    dtype = working_dtype(queries)
    shape = (batch, num_query_heads, num_queries)
    ends = cache.lengths.flatten().cumsum(0).tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    longest = max(span.stop - span.start for span in spans)
    if longest == 0:
        return queries.new_zeros(*shape, cache.values.shape[-1]), queries.new_full(
            shape, -math.inf, dtype=dtype
        )
    grouped = queries.to(dtype).reshape(batch * num_kv_heads, group * num_queries, head_dim) / math.sqrt(
        head_dim
    )
    logits = queries.new_full((*grouped.shape[:2], longest), -math.inf, dtype=dtype)
    for head, span in enumerate(spans):
        logits[head, :, : span.stop - span.start] = grouped[head] @ cache.keys[span].to(dtype).T
    normaliser = logits.logsumexp(dim=-1)
    # An empty head has only logits of -inf; -inf minus -inf would be NaN, so its normaliser is replaced by 0
    # for the weights.
    weights = (logits - normaliser.masked_fill(normaliser == -math.inf, 0)[..., None]).exp_()
    output = queries.new_empty(*grouped.shape[:2], cache.values.shape[-1], dtype=dtype)
    for head, span in enumerate(spans):
        output[head] = weights[head, :, : span.stop - span.start] @ cache.values[span].to(dtype)
    return output.to(queries.dtype).reshape(*shape, -1), normaliser.reshape(shape)


def grouped_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""ATT-5: `q . k_t / sqrt(D)`, under the cap of the model, query head h = kv_head * G + g beside the
    others of its KV head.

    The query heads of a group and their M queries are rows of one product with the keys that they share.

    Args: queries [B, H_q, M, D]; keys [B, H_kv, T, D]. Returns [B, H_kv, G, M, T] in float32 (float64 for
    float64).
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads, dtype = keys.shape[1], working_dtype(keys)
    group = num_query_heads // num_kv_heads
    rows = queries.to(dtype).reshape(batch, num_kv_heads, group * num_queries, head_dim)
    if keys.dtype == dtype or keys.is_cuda:
        logits = rows @ keys.to(dtype).mT
    else:
        logits = rows.new_empty(*rows.shape[:3], keys.shape[2])
        tokens = max(1, BLOCK // (batch * num_kv_heads * head_dim))
        for start in range(0, keys.shape[2], tokens):
            block = keys[:, :, start : start + tokens].to(dtype)
            logits[..., start : start + tokens] = rows @ block.mT
    logits.div_(math.sqrt(head_dim))  # in place: the logits are the largest tensor here
    return capped(logits).view(batch, num_kv_heads, group, num_queries, keys.shape[2])


def grouped_attention(queries: torch.Tensor, keys: torch.Tensor, first: int = 0) -> torch.Tensor:
    r"""ATT-6: softmax of the logits under the causal mask: the m-th of the last M queries sees the tokens
    up to T - M + m.

    Args: queries [B, H_q, M, D]; keys [B, H_kv, T, D], M <= T; first, the number of the first KV head in its
    model. Returns [B, H_kv, G, M, T], 0 for tokens that a query cannot see.
    """
    logits = grouped_logits(queries, keys)
    num_queries = queries.shape[2]
    later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=logits.device).triu(1)
    # every query sees the tokens before the queries
    logits[..., -num_queries:].masked_fill_(later, -math.inf)
    return weights(logits, first)
