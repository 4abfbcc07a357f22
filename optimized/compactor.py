r"""Compactor (arXiv 2507.08143): keep the outliers among the keys, by their leverage scores, and the tokens
that their neighbours attend to.

The definition follows the presses that the paper's author gave to NVIDIA/kvpress, at 8bb29b9 and 15a267d.
"""

import math

import torch
from torch.linalg import vector_norm

from evictionary.reference.checks import as_count
from evictionary.reference.compactor import CUTOFF

from . import gradients, kernels
from .checks import fits, working_dtype
from .operators import operator
from .snapkv import average_pool


@operator()
@fits(free=("unrotated_keys", "sketch"))
def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    unrotated_keys: torch.Tensor,
    sketch: torch.Tensor,
    *,
    compression_ratio: float,
    sink_size: int = 8,
    recent_size: int = 4,
    chunk_size: int = 256,
) -> torch.Tensor:
    r"""CO-5: `score = r z(l) + z(p)` between the first and the last tokens, which have infinity: l the
    leverage of CO-2, and `p_t = (1/3) sum_{u = t-1}^{t+1} |v_u| (1/G) sum_g a_gu` with the attention a of
    CO-3, mean over the group.

    Args: queries of all tokens and keys, after RoPE; unrotated_keys and sketch, in any floating dtype;
    compression_ratio r, the fraction to remove; sink_size and recent_size, the first and last tokens. Returns
    scores [B, H_kv, T], higher = keep, float32 (float64 for float64). Raises ValueError naming the argument,
    and on a CPU for NaN or infinite numbers. Source: compactor_press.py.
    """
    first, last = sink_size, keys.shape[2] - recent_size
    scores = keys.new_full(keys.shape[:3], math.inf, dtype=working_dtype(keys))
    if first < last:
        states = (each[:, :, first:last] for each in (queries, keys, values, unrotated_keys))
        # On a CPU the logits of one head stay in the processor's cache.
        parts = 1 if keys.is_cuda else keys.shape[1]
        found = []
        for part in zip(*(each.chunk(parts, dim=1) for each in (*states, sketch)), strict=True):
            readers, own, behind, plain, phi = part
            received = group_attention(readers, own, chunk_size=chunk_size)
            lengths = vector_norm(behind, dim=-1, dtype=received.dtype)
            found.append((sketched_leverage(plain, phi), received * lengths))
        outliers, attended = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
        blend = compression_ratio * z_scores(outliers) + z_scores(average_pool(attended, 3))
        scores[:, :, first:last] = blend
    return scores


@operator()
@fits()
def leverage(keys: torch.Tensor, *, ridge: float = 0.0) -> torch.Tensor:
    r"""CO-1: `l_t = k_t^T (K^T K + r I)^+ k_t`, the diagonal of the hat matrix: how little the other keys can
    replace key t.

    Args: ridge r. Returns [..., T], from 0 to 1, float32 (float64 for float64);
    without a ridge they sum to the rank of K. Raises ValueError naming the argument,
    and on a CPU for NaN or infinite numbers. Source: compute_leverage_scores.
    """
    wide = keys.double()  # where the singular values of float32 keys keep all their digits
    if ridge:
        # With K above sqrt(r) I = QR, `K^T K + r I = R^T R`, and the leverage is the square of `k_t R^-1`.
        below = math.sqrt(ridge) * torch.eye(keys.shape[-1], dtype=wide.dtype, device=keys.device)
        stacked = torch.cat([wide, below.expand(*keys.shape[:-2], -1, -1)], dim=-2)
        # the gradient of R needs Q
        upper = torch.linalg.qr(stacked, mode="reduced" if gradients.are_wanted(stacked) else "r").R
        rows = torch.linalg.solve_triangular(upper, wide, upper=True, left=False)
    elif gradients.are_wanted(wide):  # that of singular vectors divides by the distances of their values
        return (wide * torch.linalg.pinv(wide, rtol=CUTOFF).mT).sum(dim=-1).to(working_dtype(keys))
    else:
        left, sizes, _ = torch.linalg.svd(wide, full_matrices=False)
        rows = left.masked_fill((sizes <= CUTOFF * sizes[..., :1])[..., None, :], 0)
    return rows.square().sum(dim=-1).to(working_dtype(keys))


@operator()
@fits(free=("sketch",))
def sketched_leverage(keys: torch.Tensor, sketch: torch.Tensor, *, ridge: float = 0.01) -> torch.Tensor:
    r"""CO-2: the leverage of `(K - mean_t k_t) Phi`, keys in fewer channels.

    Args: keys, before RoPE; sketch Phi, each head its own. Returns [..., T], from 0 to 1, of sum at most k,
    float32 (float64 for float64). Raises ValueError naming the argument, and on a CPU for NaN or infinite
    numbers. Source: compute_leverage_scores.
    """
    wide = keys.to(working_dtype(keys))
    return leverage((wide - wide.mean(dim=-2, keepdim=True)) @ sketch.to(wide.dtype), ridge=ridge)


@operator()
@fits()
def chunk_attention(queries: torch.Tensor, keys: torch.Tensor, *, chunk_size: int = 256) -> torch.Tensor:
    r"""CO-3: `a_t = sum_m softmax_t(q_m . k_t)` over the m and t of one chunk: the attention that a token
    receives from its chunk, before and after it.

    The logits are not divided by `sqrt(D)`, nor capped. One chunk is computed at a time.

    Args: queries and keys, after RoPE; chunk_size, the last chunk may be shorter. Returns [..., T], float32
    (float64 for float64); each chunk sums to its length. Raises ValueError naming the argument, and on a CPU
    for NaN or infinite numbers. Source: non_causal_chunked_attn.
    """
    dtype = working_dtype(keys)
    chunks = zip(queries.split(chunk_size, dim=-2), keys.split(chunk_size, dim=-2), strict=True)
    received = [(rows.to(dtype) @ own.to(dtype).mT).softmax(dim=-1).sum(dim=-2) for rows, own in chunks]
    return torch.cat(received, dim=-1)


def group_attention(queries: torch.Tensor, keys: torch.Tensor, *, chunk_size: int = 256) -> torch.Tensor:
    r"""CO-3: the `chunk_attention` of queries [B, H_q, T, D] over keys [B, H_kv, T, D], mean over the group:
    [B, H_kv, T].
    """
    size = as_count("chunk_size", chunk_size, low=1)
    if kernels.take("received_attention", queries, keys):
        return kernels.received_attention.score_chunks(queries, keys, size)
    return chunk_attention(queries.unflatten(1, (keys.shape[1], -1)), keys[:, :, None], chunk_size=size).mean(
        dim=2
    )


@operator("scores")
def z_scores(scores: torch.Tensor) -> torch.Tensor:
    r"""CO-4: `z = (x - mean x) / std x` over all heads and tokens of an item: [B, H_kv, T] to the same."""
    centred = scores - scores.mean(dim=(-2, -1), keepdim=True)
    variance = centred.square().sum(dim=(-2, -1), keepdim=True) / max(1, scores[0].numel() - 1)
    return centred / variance.clamp(min=1e-12).sqrt()  # of no less, for the root has no slope at 0
