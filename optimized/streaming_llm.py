r"""StreamingLLM (arXiv 2309.17453), a baseline: keep the
first tokens, the attention sinks, and the most recent ones.
"""

import math

import torch

from evictionary.reference.checks import as_count

from . import kernels
from .checks import fits, require_fit, working_dtype
from .operators import operator
from .states import CompressedCache


@operator()
@fits()
def score(keys: torch.Tensor, *, sink_size: int = 4) -> torch.Tensor:
    r"""SL-1: `score_t = t`, and infinity for the first
    `sink_size` tokens: top-k of it is sinks plus the most recent.

    Args: keys, of which only shape, dtype and device are read. Returns scores [B, H_kv, T], float32 (exact up
    to 16,777,216 tokens; float64 for float64 keys). Raises ValueError for a wrongly shaped or integer `keys`
    or a negative sink_size. Source: section 3.2 of the paper.
    """
    positions = torch.arange(keys.shape[-2], dtype=working_dtype(keys), device=keys.device)
    positions[:sink_size] = math.inf
    return positions.expand(keys.shape[:-1]).clone()


def compress(keys: torch.Tensor, values: torch.Tensor, *, budget: int, sink_size: int = 4) -> CompressedCache:
    r"""SL-1 and CACHE-1 at once: `cache.compress` of the `budget` best tokens by `score`; what is evicted
    is never read on a GPU.

    Args: keys [B, H_kv, T, D]; values [B, H_kv, T, D_v], any strides; budget, 0 to any number (more than T
    keeps all); sink_size >= 0, of which a smaller budget keeps the first. Returns the cache in the dtype of
    its inputs; its tensors share no storage with them. Raises ValueError naming the argument, and on a CPU
    for NaN or infinite numbers.
    """
    require_fit("lagkv.select", keys, values)
    batch, num_heads, length, _ = keys.shape
    kept = min(as_count("budget", budget, low=0), length)
    sinks = min(as_count("sink_size", sink_size, low=0), kept)
    if kept and kernels.take("streaming_llm", keys, values):
        return kernels.streaming_llm.compress(keys, values, sinks, kept - sinks)
    position = torch.arange(length, device=keys.device)
    index = position[(position < sinks) | (position >= length - kept + sinks)]
    return CompressedCache(
        keys[:, :, index].flatten(0, 2),
        values[:, :, index].flatten(0, 2),
        index.repeat(batch * num_heads),
        torch.full((batch, num_heads), kept, device=keys.device),
    )
