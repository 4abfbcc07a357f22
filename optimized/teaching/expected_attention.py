r"""Expected Attention to read: the statistics of the
queries (EA-5), and the score from them (EA-7 to EA-9).

The statistics take one launch, one program for each head: a walk for the mean, and a walk for the covariance
about it. The score takes one, in which a program for each query head and tile of tokens computes the expected
logits. Their softmax, its mean over the group and the norms of the values are torch's.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only

BLOCK = 64  # tokens of a tile


@forward_only
def query_statistics(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-5: queries [..., N, D] before RoPE give their mean [..., D] and covariance [..., D, D]."""
    *heads, count, head_dim = queries.shape
    mean, covariance = queries.new_empty(*heads, head_dim), queries.new_empty(*heads, head_dim, head_dim)
    describe[(mean.numel() // head_dim,)](
        queries.contiguous(), mean, covariance, count, head_dim, num_warps=8
    )
    return mean, covariance


@forward_only
def score(
    keys: torch.Tensor,
    values: torch.Tensor,
    query_mean: torch.Tensor,
    query_covariance: torch.Tensor,
    *,
    epsilon: float = 0.02,
) -> torch.Tensor:
    r"""EA-7..9, EA-V: `(mean over the group of ahat_i + epsilon) |v_i|`.

    Keys [B, H_kv, T, D], values [B, H_kv, T, D_v], query_mean [B, H_q, D] and query_covariance [B, H_q, D, D]
    give [B, H_kv, T].
    """
    batch, num_kv_heads, length, head_dim = keys.shape
    readers, tiles = batch * query_mean.shape[1], triton.cdiv(length, BLOCK)
    group = query_mean.shape[1] // num_kv_heads
    logits = keys.new_empty(*query_mean.shape[:2], length)
    # The factors of equation 7 go into the statistics, which are small.
    mean, covariance = query_mean * head_dim**-0.5, query_covariance / (2 * head_dim)
    statistics = (mean.contiguous(), covariance.contiguous())
    expect[(readers, tiles)](keys.contiguous(), *statistics, logits, group, length, head_dim, BLOCK)
    weights = logits.softmax(dim=-1).unflatten(1, (num_kv_heads, group)).mean(dim=2)
    return (weights + epsilon) * values.norm(dim=-1)


@triton.jit
def describe(queries_ptr, mean_ptr, covariance_ptr, count, D: tl.constexpr):
    """EA-5: the mean [D] and the covariance [D, D] of the queries of a head. Grid: heads."""
    head = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, D)
    mean = tl.zeros([D], dtype=tl.float32)
    for row in range(head * count, (head + 1) * count):
        mean += tl.load(queries_ptr + row * D + channels) / count
    covariance = tl.zeros([D, D], dtype=tl.float32)
    for row in range(head * count, (head + 1) * count):
        centred = tl.load(queries_ptr + row * D + channels) - mean
        covariance += centred[:, None] * centred[None, :] / count
    tl.store(mean_ptr + head * D + channels, mean)
    tl.store(covariance_ptr + head * D * D + channels[:, None] * D + channels[None, :], covariance)


@triton.jit
def load_tile(base, rows, columns, num_rows, D: tl.constexpr):
    """Load some rows and columns of a matrix with D
    columns; zeros beyond its last row and its last column.
    """
    inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
    return tl.load(base + rows[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def expect(
    keys_ptr, mean_ptr, covariance_ptr, logits_ptr, group, length, D: tl.constexpr, BLOCK: tl.constexpr
):
    """EA-7: logits[query head, t] = (mean + covariance k) . k. Grid: query heads, tiles of tokens."""
    query_head = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys_ptr += query_head // group * length * D
    channels = tl.arange(0, D)
    product = tl.zeros([BLOCK, 1], dtype=tl.float32) + tl.load(mean_ptr + query_head * D + channels)[None, :]
    for first in range(0, D, 16):
        some = first + tl.arange(0, 16)
        covariance = load_tile(covariance_ptr + query_head * D * D, some, channels, D, D)
        product = tl.dot(
            load_tile(keys_ptr, positions, some, length, D), covariance, product, input_precision="ieee"
        )
    logits = tl.sum(product * load_tile(keys_ptr, positions, channels, length, D), axis=1)
    tl.store(logits_ptr + query_head * length + positions, logits, mask=positions < length)
