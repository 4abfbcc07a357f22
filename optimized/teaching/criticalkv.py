r"""CriticalKV to read: attention times the length of
what a value adds to the residual stream (CK-1 to CK-4).

One launch, and those of `snapkv` and `selection`. `sum_projections` has one program for each tile of tokens:
it multiplies the values by a tile of the output projection at a time and adds up absolute numbers, so that no
product is stored.
"""

import math

import torch
import triton
import triton.language as tl

from ..attention import grouped_attention
from ..gradients import forward_only
from .h2o import load_channels
from .selection import top_k
from .snapkv import average_pool

BLOCK = 64  # tokens, and numbers of the residual stream, of a tile


@forward_only
def projected_norms(values: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
    r"""CK-1: values [B, H_kv, T, D_v] and w_o [H_q, D_v, hidden] give norms [B, H_kv, T]."""
    batch, num_kv_heads, length, value_dim = values.shape
    norms = values.new_empty(values.shape[:3])
    grid = (batch * num_kv_heads, triton.cdiv(length, BLOCK))
    sizes = (num_kv_heads, w_o.shape[0] // num_kv_heads, length, w_o.shape[2], value_dim, BLOCK)
    sum_projections[grid](values.contiguous(), w_o.contiguous(), norms, *sizes, num_warps=8)
    return norms


@forward_only
def importance(
    queries: torch.Tensor, keys: torch.Tensor, *, window_size: int = 32, kernel_size: int = 5
) -> torch.Tensor:
    r"""CK-2, CK-3: queries [B, H_q, M, D] of the last tokens
    and keys [B, H_kv, T, D] give [B, H_kv, T - window_size].
    """
    weights = grouped_attention(queries[:, :, -window_size:], keys)[..., :-window_size]
    pooled = average_pool(weights, kernel_size)
    total = pooled.sum(dim=-1, keepdim=True)
    pooled *= weights.sum(dim=-1, keepdim=True) / torch.where(total == 0, 1, total)
    largest = pooled.amax(dim=(2, 3))
    return largest.maximum(largest.mean(dim=-1, keepdim=True))


@forward_only
def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    w_o: torch.Tensor,
    *,
    budget: int,
    window_size: int = 32,
    kernel_size: int = 5,
    first_share: float = 0.5,
    epsilon: float = 1e-4,
) -> torch.Tensor:
    r"""CK-4: the states of `importance` and `projected_norms` give scores [B, H_kv, T], higher = keep."""
    scores, before = torch.full_like(keys[..., 0], math.inf), keys.shape[2] - window_size
    if before > 0:
        scores[..., :before] = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
        first = top_k(scores, math.floor(first_share * budget))
        scores[..., :before] = (scores[..., :before] + epsilon) * projected_norms(values, w_o)[..., :before]
        scores.masked_fill_(first, math.inf)
    return scores


@triton.jit
def sum_projections(
    values_ptr, w_o_ptr, norms_ptr, num_kv_heads, group, length, hidden, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """CK-1: norms[head, t] = sum of |W_o^g v_t| over the residual stream, mean over the group. Grid: KV
    heads, tiles of tokens.
    """
    head = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for query_head in range(head % num_kv_heads * group, (head % num_kv_heads + 1) * group):
        for start in range(0, hidden, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            product = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
            for first in range(0, D, 16):
                channels = first + tl.arange(0, 16)
                inside = (channels < D)[:, None] & (columns < hidden)[None, :]
                addresses = w_o_ptr + (query_head * D + channels)[:, None] * hidden + columns[None, :]
                weights = tl.load(addresses, mask=inside, other=0.0)
                values = load_channels(values_ptr + head * length * D, positions, length, first, D)
                product = tl.dot(values, weights, product, input_precision="ieee")
            total += tl.sum(tl.abs(product), axis=1)
    tl.store(norms_ptr + head * length + positions, total / group, mask=positions < length)
