r"""The compressed cache: flat storage that holds the kept tokens and nothing else (requirements CACHE-1 to CACHE-3)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import require_kept, require_same_kind, require_shape, require_states, runs_on_gpu


class CompressedCache(NamedTuple):
    """The kept tokens of every head, row after row: batch by batch, head by head, in position order.

    keys [N, D] and values [N, D_v], N = all kept tokens; positions [N] int64, the place of each row in the original sequence;
    lengths [B, H_kv] int64, the number of rows of each head. Heads may differ in length (ragged).
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor


def compress(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> CompressedCache:
    r"""CACHE-1, CACHE-2: gather the kept tokens, K and V together, in position order.

    Args: keys [B, H_kv, T, D]; values [B, H_kv, T, D_v], any strides; kept [B, H_kv, T], boolean, any number True in each head.
    Returns the cache in the dtype of its inputs; its tensors share no storage with them.
    Raises ValueError naming the argument where shapes, dtypes or devices disagree or `kept` is not boolean, and on a CPU for
    NaN or infinite numbers.
    """
    require_states("keys", keys, "B H_kv T D")
    require_states("values", values, "B H_kv T D_v")
    require_shape("values", values, (*keys.shape[:3], values.shape[-1]), "the batch, heads and tokens of keys")
    require_same_kind("values", values, "keys", keys)
    require_kept("kept", kept, "keys", keys, tuple(keys.shape[:3]))
    if runs_on_gpu(keys) and runs_on_gpu(values):
        from .kernels import cache as kernels

        return kernels.compress(keys, values, kept)
    # Boolean indexing walks batch, head, position in that order: the order of storage.
    positions = kept.nonzero()[:, 2].contiguous()
    return CompressedCache(keys[kept], values[kept], positions, kept.sum(dim=-1))
