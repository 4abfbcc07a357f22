r"""KVzip to read: the largest attention that any query
of the second reading gives to a token (KZ-1, KZ-2).

Two launches, as for `h2o`, whose first one serves here too: the sums that turn logits into weights. Then one
program for each tile of tokens walks over the queries, makes the weights of a tile from the logits, and keeps
the largest ones in place of their sum.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only
from .h2o import BLOCK, sum_rows, tile_weights


@forward_only
def score(keys: torch.Tensor, replay_queries: torch.Tensor, replay_keys: torch.Tensor) -> torch.Tensor:
    r"""KZ-1, KZ-2: keys [B, H_kv, T, D], replay_queries [B, H_q, M, D], replay_keys [B, H_kv, M, D] give
    scores [B, H_kv, T].
    """
    batch, num_query_heads, num_queries, head_dim = replay_queries.shape
    num_kv_heads, length = keys.shape[1:3]
    queries, whole = (replay_queries * head_dim**-0.5).contiguous(), torch.cat([keys, replay_keys], dim=2)
    highest, totals = keys.new_empty(queries.shape[:3]), keys.new_empty(queries.shape[:3])
    scores = keys.new_empty(keys.shape[:3])
    sizes = (num_query_heads // num_kv_heads, num_queries, length + num_queries, head_dim, BLOCK)
    query_tiles, token_tiles = triton.cdiv(num_queries, BLOCK), triton.cdiv(length, BLOCK)
    sum_rows[(batch * num_query_heads, query_tiles)](queries, whole, highest, totals, *sizes, num_warps=8)
    largest_weights[(batch * num_kv_heads, token_tiles)](
        queries, whole, highest, totals, scores, *sizes, num_warps=8
    )
    return scores


@triton.jit
def largest_weights(
    queries_ptr, keys_ptr, highest_ptr, totals_ptr, scores_ptr, group, num_queries, length, D: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """scores[head, t] = max over the group and m of exp(q_m . k_t - highest[m]) / totals[m]. Grid: KV
    heads, tiles of tokens.
    """
    head = tl.program_id(0).to(tl.int64)
    keys_ptr += head * length * D
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for query_head in range(head * group, (head + 1) * group):
        row = query_head * num_queries
        queries, highest, totals = queries_ptr + row * D, highest_ptr + row, totals_ptr + row
        for first in range(0, num_queries, BLOCK):
            weights = tile_weights(
                queries, keys_ptr, highest, totals, first, positions, num_queries, length, D, BLOCK
            )
            largest = tl.maximum(largest, tl.max(weights, axis=0))
    text = length - num_queries  # the tokens of the replay come after the text, and have no score
    tl.store(scores_ptr + head * text + positions, largest, mask=positions < text)
