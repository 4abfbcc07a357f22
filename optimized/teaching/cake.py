r"""CAKE to read: how far the attention of the last queries spreads, and how much it moves (CAKE-1, CAKE-2).

A program has the weights of all queries of the window on a tile of tokens. Their entropy is a sum over the
tile. The shift needs the mean of each column first, and the column is there.
"""

import torch
import triton
import triton.language as tl

from ..attention import grouped_attention
from ..gradients import forward_only

BLOCK = 64  # tokens of a tile


@forward_only
def preference(
    queries: torch.Tensor, keys: torch.Tensor, *, window_size: int = 32, tau1: float = 1.0, tau2: float = 1.0
) -> torch.Tensor:
    r"""CAKE-3: queries [B, H_q, M, D] of the last tokens and keys [B, H_kv, T, D] give the preference [B]."""
    before = keys.shape[2] - window_size
    if before <= 0:
        return keys.new_zeros(len(keys))
    weights = grouped_attention(queries[:, :, -window_size:], keys)
    sums = keys.new_empty(2, queries.shape[:2].numel(), triton.cdiv(before, BLOCK))
    sizes = (window_size, keys.shape[2], triton.next_power_of_2(window_size), BLOCK)
    measure[sums.shape[1:]](weights, sums, sums[1:], *sizes)
    spread, moved = sums.double().view(2, len(keys), -1).sum(dim=-1)
    return spread ** (1 / tau1) * moved ** (1 / tau2)


@triton.jit
def measure(weights, entropies, variances, window, length, M: tl.constexpr, BLOCK: tl.constexpr):
    """The entropy of a tile of weights, and the sum of the
    variances of its columns. Grid: query heads, tiles of tokens.
    """
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query, token = tl.arange(0, M)[:, None], tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (query < window) & (token < length - window)
    share = tl.load(weights + (head * window + query) * length + token, mask=inside, other=0.0)
    entropy = -tl.sum(share * tl.log(tl.where(share > 0, share, 1.0)))  # 0 ln 0 = 0
    distance = tl.where(inside, share - tl.sum(share, axis=0)[None, :] / window, 0.0)
    tl.store(entropies + head * tl.num_programs(1) + tile, entropy)
    variance = tl.sum(distance * distance) / tl.maximum(window - 1, 1)
    tl.store(variances + head * tl.num_programs(1) + tile, variance)
