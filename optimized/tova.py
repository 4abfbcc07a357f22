r"""TOVA (arXiv 2401.06104), a baseline: keep the tokens that the last query attends to, one set for the whole layer."""

from __future__ import annotations

import math

import torch

from evictionary.reference.checks import group_size

from .checks import require_same_kind, require_states, working_dtype

# Channels that are converted to float32 at a time: a copy that stays in the processor's cache is had for nothing.
BLOCK = 2**20


def require_queries(queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Raise ValueError unless queries [B, H_q, M, D] are those of the last M tokens of keys [B, H_kv, T, D]."""
    require_states("queries", queries, "B H_q M D")
    require_states("keys", keys, "B H_kv T D")
    length = keys.shape[2]
    if queries.shape[0] != keys.shape[0] or queries.shape[3] != keys.shape[3] or queries.shape[2] > length:
        wanted = f"[{keys.shape[0]}, H_q, M <= {length}, {keys.shape[3]}]"
        raise ValueError(f"queries: got shape {tuple(queries.shape)}, wanted {wanted} (the shape of keys)")
    group_size(queries.shape[1], keys.shape[1])
    require_same_kind("queries", queries, "keys", keys)


def grouped_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""ATT-5: `q . k_t / sqrt(D)`, query head h = kv_head * G + g beside the others of its KV head.

    The query heads of a group and their M queries are rows of one product with the keys that they share.

    Args: queries [B, H_q, M, D]; keys [B, H_kv, T, D]. Returns [B, H_kv, G, M, T] in float32 (float64 for float64).
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
        for part, block in zip(logits.split(tokens, dim=3), keys.split(tokens, dim=2), strict=True):
            part.copy_(rows @ block.to(dtype).mT)
    logits.div_(math.sqrt(head_dim))  # in place: the logits are the largest tensor here
    return logits.view(batch, num_kv_heads, group, num_queries, keys.shape[2])


def score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""TO-1: `score_t = (1/H_q) sum_h softmax(q_h K^T / sqrt(D))_t` for the last query, the same for every KV head.

    Args: queries [B, H_q, M, D], the last M after RoPE, of which the last one is read; keys [B, H_kv, T, D], any strides.
    Returns scores [B, H_kv, T], higher = keep, summing to 1, float32 (float64 for float64). Raises ValueError naming the
    argument that does not fit, and on a CPU for NaN or infinite numbers. Source: section 3.2 of the paper.
    """
    require_queries(queries, keys)
    # Decision: nothing is protected; the last token attends to itself and has to earn its place, as in the authors' code.
    received = grouped_logits(queries[:, :, -1:], keys).softmax(dim=-1)
    scores = received.mean(dim=(1, 2, 3))
    return scores[:, None].repeat(1, keys.shape[1], 1)
