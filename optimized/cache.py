r"""The compressed cache: flat storage that holds the kept
tokens and nothing else (requirements CACHE-1 to CACHE-3).
"""

import torch

from . import kernels
from .checks import fits
from .operators import operator
from .states import CompressedCache

__all__ = ["CompressedCache", "compress"]


@operator("keys", "values", None, None)
@fits()
def compress(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> CompressedCache:
    r"""CACHE-1, CACHE-2: gather the kept tokens, K and V together, in position order.

    Args: kept, any number True in each head. Returns the cache in the dtype of its inputs; its tensors share
    no storage with them. Raises ValueError naming the argument where shapes, dtypes or devices disagree or
    `kept` is not boolean, and on a CPU for NaN or infinite numbers.
    """
    if kernels.take("cache", keys, values):
        return kernels.cache.compress(keys, values, kept)
    # Boolean indexing walks batch, head, position in that order: the order of storage.
    positions = kept.nonzero()[:, 2].contiguous()
    return CompressedCache(keys[kept], values[kept], positions, kept.sum(dim=-1))
