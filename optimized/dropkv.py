r"""DropKV (openreview MqfNzH3TVH): keep the last tokens,
and those whose removal alone would change the output most.

The paper is known here from its public code: NVIDIA/kvpress, pull requests 284 and 285,
kvpress/presses/dropkv_press.py at 7fb8625.
"""

import math

import torch
from torch.nn.functional import pad

from evictionary.reference.checks import as_window

from . import kernels
from .attention import grouped_logits
from .checks import fits, working_dtype
from .operators import operator
from .snapkv import average_pool
from .softmax import with_sink


def perturbation(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    r"""DK-1: `p_j / (1 - p_j) |v_j - o|`, the change of the
    output `o = sum_j p_j v_j` when only token j is evicted.

    The token of the largest weight is computed as `p_j |v_j - o'|`, o' the output without it: the same
    number, but where p_j rounds to 1 the other form is infinity times 0.

    Args: logits [..., M, T], finite for two tokens or more, -inf for those that are not seen; values [..., T,
    D_v] in the same dtype. Returns [..., M, T], 0 for tokens that are not seen.
    """
    weights = logits.softmax(dim=-1)
    first = logits.argmax(dim=-1, keepdim=True)
    largest = weights.gather(-1, first)
    without = logits.scatter(-1, first, -math.inf).softmax(dim=-1) @ values
    others = weights.scatter(-1, first, 0)
    # Differences, not products of matrices: those cancel where a value is near the output.
    exact = "donot_use_mm_for_euclid_dist"
    errors = others / (1 - others) * torch.cdist(weights @ values, values, compute_mode=exact)
    value = values.gather(-2, first.expand(*first.shape[:-1], values.shape[-1]))
    # Decision: no epsilon. With the public code's, a token that holds all the attention has the score 0.
    return errors.scatter(
        -1, first, largest * torch.linalg.vector_norm(value - without, dim=-1, keepdim=True)
    )


def squares(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    r"""DK-2 before the pooling: `(1/G) sum_g sum_m (p_gmj / (1 - p_gmj))^2 |v_j - o_gm|^2`, [B, H_kv, T].

    Args: queries [B, H_q, M, D] of the last M tokens, those of the window; keys and values as `score`.
    """
    window, length, group = queries.shape[2], keys.shape[2], queries.shape[1] // keys.shape[1]
    changes = keys.new_empty(keys.shape[:3], dtype=working_dtype(keys))
    later = torch.ones(window, length, dtype=torch.bool, device=keys.device).triu(length - window + 1)
    # One KV head at a time: the logits of all queries of the window are G * window numbers for every token
    # and head.
    for head, own in enumerate(queries.split(group, dim=1)):
        logits = grouped_logits(own, keys[:, head : head + 1]).masked_fill_(later, -math.inf)
        rows = with_sink(logits, head)[:, 0].flatten(1, 2)
        # a sink is a token whose value is 0
        padded = pad(values[:, head].to(rows.dtype), (0, 0, 0, rows.shape[2] - length))
        changes[:, head] = perturbation(rows, padded)[..., :length].square_().sum(dim=1) / group
    return changes


@operator()
@fits()
def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window_size: int = 32,
    kernel_size: int = 7,
) -> torch.Tensor:
    r"""DK-2: `s_j = pool_K (1/G) sum_g sum_m (p_gmj / (1 - p_gmj))^2 |v_j - o_gm|^2`
    over the last queries.

    Args: queries, of the last M tokens, after RoPE, at least those of the window; kernel_size K. Returns
    scores [B, H_kv, T], higher = keep, float32 (float64 for float64); infinity for the window, all infinite
    where T <= window_size. Raises ValueError naming the argument, and on a CPU for NaN or infinite numbers.
    Source: the public code, whose defaults these are.
    """
    length = keys.shape[2]
    window = as_window(window_size, queries.shape[2], length)
    scores = keys.new_full(keys.shape[:3], math.inf, dtype=working_dtype(keys))
    if window < length:
        last = queries[:, :, -window:]
        if kernels.take("dropkv", queries, keys, values):
            changes = kernels.dropkv.sum_squares(last, keys, values)
        else:
            changes = squares(last, keys, values)
        # Decision: the scores of the window are pooled with the others, as the public code does; SnapKV's are
        # not.
        scores[..., : length - window] = average_pool(changes, kernel_size)[..., : length - window]
    return scores
