r"""TOVA (arXiv 2401.06104), a baseline: keep the tokens
that the last query attends to, one set for the whole layer.
"""

import torch

from .checks import fits
from .h2o import received_attention
from .operators import operator


@operator()
@fits()
def score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""TO-1: `score_t = (1/H_q) sum_h softmax(q_h K^T / sqrt(D))_t`
    for the last query, the same for every KV head.

    Args: queries, the last M after RoPE, of which the last one is read. Returns scores [B, H_kv, T], higher =
    keep, summing to 1, float32 (float64 for float64). Raises ValueError naming the argument that does not
    fit, and on a CPU for NaN or infinite numbers. Source: section 3.2 of the paper.
    """
    # Decision: nothing is protected; the last token attends to itself and competes like any other, as in the
    # authors' code.
    received = received_attention(queries[:, :, -1:], keys).mean(dim=1, keepdim=True)
    return received.repeat(1, keys.shape[1], 1)
