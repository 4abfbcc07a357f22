r"""TriAttention to read: the logits that the mean query expects, in standard deviations, the largest of
the group (TA-3, TA-4).

One launch, in which a program for each tile of tokens of a query head computes `S_t`. Torch then says how
many deviations each lies above the mean of its row.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only

BLOCK = 64  # tokens of a tile


@forward_only
def score(keys: torch.Tensor, query_direction: torch.Tensor, query_slack: torch.Tensor) -> torch.Tensor:
    r"""TA-3, TA-4: keys [B, H_kv, T, D], query_direction [B, H_q, D], query_slack [B, H_q, D/2] give
    scores [B, H_kv, T].
    """
    batch, num_kv_heads, length, head_dim = keys.shape
    num_query_heads = query_direction.shape[1]
    direction, slack = (each.to(keys.dtype).contiguous() for each in (query_direction, query_slack))
    rows = keys.new_empty(batch, num_query_heads, length)
    grid = (batch * num_query_heads, triton.cdiv(length, BLOCK))
    expect_logits[grid](
        keys.contiguous(), direction, slack, rows, num_query_heads // num_kv_heads, length, head_dim, BLOCK
    )
    deviation, mean = torch.std_mean(rows, dim=-1, correction=0, keepdim=True)
    above = (rows - mean) / deviation.clamp(min=1e-6)  # TA-4
    return above.unflatten(1, (num_kv_heads, -1)).amax(dim=2)


@triton.jit
def expect_logits(
    keys_ptr, direction_ptr, slack_ptr, rows_ptr, group, length, D: tl.constexpr, BLOCK: tl.constexpr
):
    """TA-3: rows[query head, t] = qbar . k_t + sum_f slack_f
    |k_tf|, f the pairs. Grid: query heads, tiles of tokens.
    """
    query_head = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, pairs = positions < length, tl.arange(0, D // 2)
    # RoPE turns channel f together with channel f + D/2.
    addresses = keys_ptr + (query_head // group * length + positions)[:, None] * D + pairs[None, :]
    first = tl.load(addresses, mask=inside[:, None], other=0.0)
    second = tl.load(addresses + D // 2, mask=inside[:, None], other=0.0)
    direction = direction_ptr + query_head * D + pairs
    expected = first * tl.load(direction)[None, :] + second * tl.load(direction + D // 2)[None, :]
    slack = tl.load(slack_ptr + query_head * (D // 2) + pairs)
    expected += slack[None, :] * tl.sqrt(first * first + second * second)
    tl.store(rows_ptr + query_head * length + positions, tl.sum(expected, axis=1), mask=inside)
