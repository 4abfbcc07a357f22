r"""DuoAttention (arXiv 2410.10819): keep everything in retrieval heads, and the first and the last tokens
in the others.

The paper is known here from public code: NVIDIA/kvpress,
kvpress/presses/duo_attention_press.py at 00a150c, and mit-han-lab/duo-attention.
"""

import torch

from evictionary.reference.checks import as_count

from .checks import fits
from .operators import operator


@operator()
@fits(free=("gates",))
@torch.no_grad()
def select(
    keys: torch.Tensor,
    gates: torch.Tensor,
    *,
    threshold: float = 0.5,
    sink_size: int = 128,
    recent_size: int = 256,
) -> torch.Tensor:
    r"""DA-2: a head with `g >= threshold` keeps all tokens,
    another one the first `sink_size` and the last `recent_size`.

    Args: keys, of which only the shape is read; gates, trained or estimated; sink_size and recent_size,
    together at least 1. Returns kept [B, H_kv, T], boolean. Raises ValueError naming the argument.
    """
    length = keys.shape[2]
    # Decision: a streaming head keeps a token at least.
    recent_size = as_count("recent_size", recent_size, low=0 if sink_size else 1)
    places = torch.arange(length, device=keys.device)
    streaming = (places < sink_size) | (places >= length - recent_size)
    return (gates >= threshold)[..., None] | streaming
