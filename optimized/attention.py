r"""Attention over a compressed cache, and of the queries
of a prompt, which all methods share (ATT-1 to ATT-6).
"""

import math

import torch

from . import kernels
from .checks import fits, require_finite, require_same_kind, working_dtype
from .operators import operator
from .softmax import capped, weights
from .states import CompressedCache

# Channels that are converted to float32 at a time: a copy that stays in the processor's cache costs nothing.
BLOCK = 2**20


@operator("cache.values", None)
@fits(finite=False)
def attend(queries: torch.Tensor, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ATT-1..3: `softmax(q K^T / sqrt(D)) V` of every query over the kept tokens of its KV head, and `log
    sum exp` of its logits.

    The query heads of a group and their M queries are rows of one product with the keys that they share. On a
    CPU the keys are read in place, head by head; only the logits are padded to the longest head, and the
    padding has no weight.

    Args: queries, all later than the cache (no causal mask); cache, from `cache.compress`.
    Returns output [B, H_q, M, D_v] in the dtype of the queries and log-sum-exp [B, H_q, M]
    in float32 (float64 for float64; natural logarithm, scaled logits). A head that keeps
    no token gives output 0 and log-sum-exp -inf. Raises ValueError if queries and cache
    disagree in shape, dtype or device, and on a CPU for NaN or infinite queries.
    """
    require_finite("queries", queries)
    require_same_kind("cache.keys", cache.keys, "queries", queries)
    return attend_trusted(queries, cache)


def attend_trusted(queries: torch.Tensor, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` for a caller whose arguments fit: a cache that
    decodes, where a check costs as much as the products.
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads = cache.lengths.shape[1]
    group = num_query_heads // num_kv_heads
    if kernels.take("attention", queries, cache.values, beside=cache):
        return kernels.attention.attend(queries, cache)
    dtype = working_dtype(queries)
    shape = (batch, num_query_heads, num_queries)
    spans = rows_of_heads(cache)
    longest = max(span.stop - span.start for span in spans)
    if longest == 0:
        return queries.new_zeros(*shape, cache.values.shape[-1]), queries.new_full(
            shape, -math.inf, dtype=dtype
        )
    grouped = queries.to(dtype).reshape(batch * num_kv_heads, group * num_queries, head_dim) / math.sqrt(
        head_dim
    )
    logits = queries.new_full((*grouped.shape[:2], longest), -math.inf, dtype=dtype)
    products(grouped, cache.keys, spans, logits)
    normaliser = logits.logsumexp(dim=-1)
    # An empty head has only logits of -inf; -inf minus -inf would be NaN, so its normaliser is replaced by 0
    # for the weights.
    weights = (logits - normaliser.masked_fill(normaliser == -math.inf, 0)[..., None]).exp_()
    output = queries.new_zeros(*grouped.shape[:2], cache.values.shape[-1], dtype=dtype)
    add_sums(weights, cache.values, spans, output)
    return output.to(queries.dtype).reshape(*shape, -1), normaliser.reshape(shape)


def rows_of_heads(cache: CompressedCache) -> list[slice]:
    """The rows of each head in the flat tensors of a cache, head after head, batch by batch."""
    ends = cache.lengths.flatten().cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def products(rows: torch.Tensor, keys: torch.Tensor, spans: list[slice], out: torch.Tensor) -> None:
    """Write the products of rows [heads, n, D] with the flat keys of each head to the first places of `out`
    [heads, n, longest]. The keys are read where they lie, once.
    """
    for head, span in enumerate(spans):
        out[head, :, : span.stop - span.start].addmm_(rows[head], keys[span].to(rows.dtype).T, beta=0)


def add_sums(weights: torch.Tensor, values: torch.Tensor, spans: list[slice], out: torch.Tensor) -> None:
    """Add the sums of the flat values of each head, weighted by the first places of weights
    [heads, n, longest], to `out` [heads, n, D_v].
    """
    for head, span in enumerate(spans):
        own = weights[head, :, : span.stop - span.start]
        out[head].addmm_(own, values[span].to(own.dtype))


def grouped_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""ATT-5: `q . k_t / sqrt(D)`, under the cap of the model, query head h = kv_head * G + g beside the
    others of its KV head.

    The query heads of a group and their M queries are rows of one product with the keys that they share.

    Args: queries [B, H_q, M, D]; keys [B, H_kv, T, D]. Returns
    [B, H_kv, G, M, T] in float32 (float64 for float64).
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_query_heads // num_kv_heads
    rows = queries.to(working_dtype(keys)).reshape(batch, num_kv_heads, group * num_queries, head_dim)
    logits = row_products(rows, keys).div_(math.sqrt(head_dim))  # in place: they are the largest tensor here
    return capped(logits).view(batch, num_kv_heads, group, num_queries, keys.shape[2])


def row_products(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The products of rows [B, H_kv, n, D], of the working dtype of the keys, with keys [B, H_kv, T, D]:
    [B, H_kv, n, T]. On a CPU keys of another dtype are converted in blocks.
    """
    batch, num_kv_heads, length, head_dim = keys.shape
    if keys.dtype == rows.dtype or keys.is_cuda:
        return rows @ keys.to(rows.dtype).mT
    found = rows.new_empty(*rows.shape[:3], length)
    tokens = max(1, BLOCK // (batch * num_kv_heads * head_dim))
    for start in range(0, length, tokens):
        block = keys[:, :, start : start + tokens].to(rows.dtype)
        found[..., start : start + tokens] = rows @ block.mT
    return found


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
