r"""H2O to read: the attention that each token receives from
all queries (H2-1), without the matrix of T x T weights.

Two launches. A weight is `exp(s_mt - h_m) / z_m`, where h_m is the largest logit of query m and z_m the sum
of the exponentials. First, one program for each tile of queries walks over the keys and finds h and z. Then
one program for each tile of keys walks over the queries, makes the weights of a tile from the logits, and
adds them up over the queries. The logits are computed twice and never stored.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only
from .selection import top_k

BLOCK = 64  # queries, and tokens, of a tile


@forward_only
def score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""H2-1: queries [B, H_q, M, D] of the last M tokens and keys [B, H_kv, T, D] give scores [B, H_kv,
    T], higher = keep.
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1:3]
    queries, keys = (queries * head_dim**-0.5).contiguous(), keys.contiguous()
    highest, totals = keys.new_empty(queries.shape[:3]), keys.new_empty(queries.shape[:3])
    scores = keys.new_empty(keys.shape[:3])
    sizes = (num_query_heads // num_kv_heads, num_queries, length, head_dim, BLOCK)
    sum_rows[(batch * num_query_heads, triton.cdiv(num_queries, BLOCK))](
        queries, keys, highest, totals, *sizes, num_warps=8
    )
    sum_columns[(batch * num_kv_heads, triton.cdiv(length, BLOCK))](
        queries, keys, highest, totals, scores, *sizes, num_warps=8
    )
    return scores


@torch.no_grad()
def select(queries: torch.Tensor, keys: torch.Tensor, *, budget: int) -> torch.Tensor:
    r"""H2-1: keep the last `ceil(budget / 2)` tokens, and fill the budget with the highest scores: kept
    [B, H_kv, T].
    """
    length = keys.shape[2]
    recent = torch.arange(length, device=keys.device) >= length - (budget + 1) // 2
    return top_k(score(queries, keys), budget, protected=recent.expand(keys.shape[:3]))


@triton.jit
def load_channels(base, rows, count, first, D: tl.constexpr):
    """Load 16 channels of a tile of rows, [BLOCK, 16]; zeros beyond the last row and the last channel."""
    channels = first + tl.arange(0, 16)
    inside = (rows < count)[:, None] & (channels < D)[None, :]
    return tl.load(base + rows[:, None] * D + channels[None, :], mask=inside, other=0.0)


@triton.jit
def tile_logits(
    queries_ptr, keys_ptr, rows, positions, num_queries, length, D: tl.constexpr, BLOCK: tl.constexpr
):
    """The logits q_m . k_t of a tile of queries and a tile
    of keys, [BLOCK, BLOCK]; -inf where m does not see t.
    """
    logits = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for first in range(0, D, 16):
        queries = load_channels(queries_ptr, rows, num_queries, first, D)
        keys = load_channels(keys_ptr, positions, length, first, D)
        logits = tl.dot(queries, tl.trans(keys), logits, input_precision="ieee")
    # The queries are those of the last tokens: query m stands at position length - num_queries + m.
    return tl.where(positions[None, :] <= (length - num_queries + rows)[:, None], logits, float("-inf"))


@triton.jit
def sum_rows(
    queries_ptr,
    keys_ptr,
    highest_ptr,
    totals_ptr,
    group,
    num_queries,
    length,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """totals[query head, m] = sum_t exp(q_m . k_t - highest[m]). Grid: query heads, tiles of queries."""
    query_head = tl.program_id(0).to(tl.int64)
    queries_ptr += query_head * num_queries * D
    keys_ptr += query_head // group * length * D
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        logits = tile_logits(
            queries_ptr, keys_ptr, rows, first + tl.arange(0, BLOCK), num_queries, length, D, BLOCK
        )
        higher = tl.maximum(highest, tl.max(logits, axis=1))  # finite: every query sees token 0
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(logits - higher[:, None]), axis=1)
        highest = higher
    tl.store(highest_ptr + query_head * num_queries + rows, highest, mask=rows < num_queries)
    tl.store(totals_ptr + query_head * num_queries + rows, total, mask=rows < num_queries)


@triton.jit
def tile_weights(
    queries_ptr, keys_ptr, highest_ptr, totals_ptr, first, positions, num_queries, length, D: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """The weights of a tile of queries of a head and a
    tile of keys, [BLOCK, BLOCK]; 0 beyond the last query.
    """
    rows = first + tl.arange(0, BLOCK)
    logits = tile_logits(queries_ptr, keys_ptr, rows, positions, num_queries, length, D, BLOCK)
    highest = tl.load(highest_ptr + rows, mask=rows < num_queries, other=0.0)
    total = tl.load(totals_ptr + rows, mask=rows < num_queries, other=float("inf"))
    return tl.exp(logits - highest[:, None]) / total[:, None]


@triton.jit
def sum_columns(
    queries_ptr, keys_ptr, highest_ptr, totals_ptr, scores_ptr, group, num_queries, length, D: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """scores[head, t] = sum_m exp(q_m . k_t - highest[m]) / totals[m], the mean over the group. Grid: KV
    heads, tiles of tokens.
    """
    head = tl.program_id(0).to(tl.int64)
    keys_ptr += head * length * D
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    received = tl.zeros([BLOCK], dtype=tl.float32)
    for query_head in range(head * group, (head + 1) * group):
        row = query_head * num_queries
        queries, highest, totals = queries_ptr + row * D, highest_ptr + row, totals_ptr + row
        for first in range(0, num_queries, BLOCK):
            weights = tile_weights(
                queries, keys_ptr, highest, totals, first, positions, num_queries, length, D, BLOCK
            )
            received += tl.sum(weights, axis=0)
    tl.store(scores_ptr + head * length + positions, received / group, mask=positions < length)
