r"""TriAttention to read: the logits that the mean query expects, in standard deviations, the largest of
the group (TA-3, TA-4).

Two launches. First, one program for each tile of tokens of a query head computes `S_t`. Then one program for
each query head walks over its row three times: for the mean, for the deviation, and to write how many
deviations each `S_t` lies above the mean.
"""

import torch
import triton
import triton.language as tl

BLOCK = 64  # tokens of a tile


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
    standardise[grid[:1]](rows, length, BLOCK)
    return rows.unflatten(1, (num_kv_heads, -1)).amax(dim=2)


@triton.jit
def expect_logits(
    keys_ptr, direction_ptr, slack_ptr, rows_ptr, group, length, D: tl.constexpr, BLOCK: tl.constexpr
):
    """TA-3: rows[query head, t] = qbar . k_t + sum_f slack_f |k_tf|, f the pairs. Grid: query heads, tiles
    of tokens.
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


@triton.jit
def standardise(rows_ptr, length, BLOCK: tl.constexpr):
    """TA-4: rows[query head] = (rows - their mean) / their standard deviation, of at least 1e-6. Grid:
    query heads.
    """
    rows_ptr += tl.program_id(0).to(tl.int64) * length
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        total += tl.load(rows_ptr + positions, mask=positions < length, other=0.0)
    mean = tl.sum(total, axis=0) / length
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        centred = tl.where(
            positions < length, tl.load(rows_ptr + positions, mask=positions < length, other=0.0) - mean, 0.0
        )
        total += centred * centred
    deviation = tl.maximum(tl.sqrt(tl.sum(total, axis=0) / length), 1e-6)
    for first in range(0, length, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + positions, mask=positions < length)
        tl.store(rows_ptr + positions, (row - mean) / deviation, mask=positions < length)
