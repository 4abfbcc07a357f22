r"""H2O (arXiv 2306.14048), a baseline: keep the tokens with most attention so far (heavy hitters), and as
many recent tokens.
"""

import itertools
import math

import torch

from evictionary.reference.checks import as_count

from . import gradients, kernels
from .attention import grouped_attention
from .checks import converted, fits, require_fit, working_dtype, working_room
from .operators import operator
from .selection import top_k
from .softmax import capped, current

# Entries of the attention at a time, and channels that are converted to float32 at a time: they stay in the
# processor's cache. However long the rows are, a tile has at least so many, since each tile reads the keys
# once more.
TILE, CHANNELS, LEAST_ROWS = 2**19, 2**19, 256


@operator()
@fits()
def score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""H2-1: `score_t = (1/G) sum_g sum_m A_gmt`, the attention that token t received from all queries,
    mean over the group.

    The attention matrix is computed a tile at a time, and only for the tokens that the queries see.

    Args: queries, of the last M tokens, after RoPE (M = T for H2O itself). Returns
    scores [B, H_kv, T], higher = keep, summing to M, float32 (float64 for float64); it
    costs O(M T). Raises ValueError naming what does not fit, and on a CPU for NaN or
    infinite numbers. Source: section 4.1 of the paper, the accumulated attention score.
    """
    return received_attention(queries, keys)


def received_attention(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return `score` of queries and keys that are already checked."""
    if kernels.take("received_attention", queries, keys):
        return kernels.received_attention.score(queries, keys)
    return _walked(queries, keys)[1]


def attend_and_score(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ATT-6 and H2-1 at once: the causal attention of the queries, and `score`, from the same products.

    A model that reads a prompt with it has the score for little more than its own attention.

    Args: as `score`, and values [B, H_kv, T, D_v]. Returns output [B, H_q, M, D_v] in the dtype of the
    queries, and the scores. Raises ValueError as `score`.
    """
    require_fit("dropkv.score", queries, keys, values)
    if kernels.take("received_attention", queries, keys, values):
        return kernels.received_attention.attend_and_score(queries, keys, values)
    return _walked(queries, keys, values)


def _walked(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, empty without values, and the scores: a tile of whole rows at a time, of as many
    KV heads as fit.
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1:3]
    group, dtype = num_query_heads // num_kv_heads, working_dtype(keys)
    if gradients.are_wanted(queries, keys, values):  # which needs the whole attention anyway
        attention = grouped_attention(queries, keys)
        received = attention.sum(dim=3).mean(dim=2)
        if values is None:
            return queries[..., :0], received
        output = (attention @ values.to(dtype)[:, :, None]).to(queries.dtype)
        return output.flatten(1, 2), received
    scores = keys.new_zeros(keys.shape[:3], dtype=dtype)
    output = queries.new_empty(*queries.shape[:3], 0 if values is None else values.shape[3])
    block = min(num_queries, max(TILE // length, LEAST_ROWS) // group + 1)
    together = min(num_kv_heads, max(1, TILE // (group * block * length))) if block == num_queries else 1
    tile = keys.new_empty(together * group * block * length, dtype=dtype)
    ones = keys.new_ones(together, 1, group * block, dtype=dtype)
    later = torch.ones(block, block, dtype=torch.bool, device=keys.device).triu(1)
    room, step = working_room(keys, CHANNELS), max(1, CHANNELS // (together * head_dim))
    for item, first in itertools.product(range(batch), range(0, num_kv_heads, together)):
        heads = slice(first, min(first + together, num_kv_heads))
        readers, count_heads = slice(first * group, heads.stop * group), heads.stop - first
        own = keys[item, heads]
        # several tiles read these keys: they are converted once, and lie as the product wants them
        if block < num_queries:
            own = own.mT.to(dtype).contiguous().mT
        for start in range(0, num_queries, block):
            rows = queries[item, readers, start : start + block].to(dtype)
            count = rows.shape[1]
            seen = length - num_queries + start + count  # no query of the block sees a later token
            rows = rows.reshape(count_heads, group * count, head_dim) / math.sqrt(head_dim)
            weights = tile[: rows.shape[:2].numel() * seen].view(*rows.shape[:2], seen)
            for part, piece in zip(weights.split(step, dim=2), own[:, :seen].split(step, dim=1), strict=True):
                torch.bmm(rows, converted(piece, room).mT, out=part)
            capped(weights).view(-1, count, seen)[..., seen - count :].masked_fill_(
                later[:count, :count], -math.inf
            )
            if (sinks := current().sinks) is not None:
                of_sinks = (
                    sinks[item, readers].to(dtype).view(count_heads, group).repeat_interleave(count, dim=1)
                )
                shares = (weights.logsumexp(dim=2) - of_sinks).sigmoid()  # of the tokens, beside the sink
            torch.softmax(weights, dim=2, out=weights)
            if sinks is not None:
                weights.mul_(shares[..., None])
            received = ones[:count_heads, :, : group * count] @ weights
            scores[item, heads, :seen].add_(received.squeeze(1), alpha=1 / group)
            if values is not None:
                attended = weights @ values[item, heads, :seen].to(dtype)
                output[item, readers, start : start + count] = attended.view(-1, count, values.shape[3])
    return output, scores


@operator()
@torch.no_grad()
def select(queries: torch.Tensor, keys: torch.Tensor, *, budget: int) -> torch.Tensor:
    r"""H2-1: keep the last `ceil(budget / 2)` tokens, and
    fill the budget with the highest scores among the others.

    Args: those of `score`; budget, more than T keeps all. Returns kept [B, H_kv, T]
    with min(budget, T) True in each row. Raises ValueError naming the argument.
    Source: section 4.2 of the paper; half and half as in its experiments.
    """
    return select_scored(score(queries, keys), budget=as_count("budget", budget, low=1))


def select_scored(scores: torch.Tensor, *, budget: int) -> torch.Tensor:
    """`select` of scores [B, H_kv, T] that are known."""
    length = scores.shape[-1]
    # Decision: the odd token of a budget goes to the recent half, so that a budget of 1 keeps the last token.
    recent = torch.arange(length, device=scores.device) >= length - (budget + 1) // 2
    return top_k(scores, budget, protected=recent.expand(scores.shape))
