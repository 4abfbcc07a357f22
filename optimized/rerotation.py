r"""Re-rotation after eviction: the keys that stay turn to consecutive positions. StreamingLLM
(arXiv 2309.17453, section 3.2) counts positions in the cache, not in the text.
"""

import torch

from . import cache, rope
from .cache import CompressedCache
from .checks import fits
from .operators import operator


@operator("keys")
@fits()
def rerotated(
    keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, *, theta: float = 10000.0
) -> torch.Tensor:
    r"""RR-1..5: `R_{q - p} k`, the keys at the positions `new`, cached after RoPE at the positions `old`.

    Args: keys [B, H_kv, T, D], D even; old and new [B, H_kv, T], whole numbers of at least 0; theta, that of
    the rotation which the keys were cached with. Returns [B, H_kv, T, D] in the dtype of keys. Raises
    ValueError for what does not fit, and on a CPU for NaN or infinite numbers.
    """
    return rope.rotate(keys, new.to(torch.float64) - old, theta)


@operator(torch.int64)
@fits()
@torch.no_grad()
def positions_after(kept: torch.Tensor) -> torch.Tensor:
    r"""RR-6: the kept tokens of a head get the positions 0 .. M - 1, in their order.

    Args: kept [B, H_kv, T], boolean. Returns [B, H_kv, T], int64, the new position of each kept token. The
    number of an evicted token means nothing.
    """
    return kept.cumsum(dim=-1) - kept.to(torch.int64)


@operator(torch.int64)
@fits()
@torch.no_grad()
def next_position(kept: torch.Tensor) -> torch.Tensor:
    r"""RR-7: the next token is at M, the number of tokens that its head holds.

    Args: kept [B, H_kv, T], boolean. Returns [B, H_kv], int64.
    """
    return kept.sum(dim=-1)


@operator("query")
@fits()
def rotated_query(query: torch.Tensor, kept: torch.Tensor, *, theta: float = 10000.0) -> torch.Tensor:
    r"""RR-7: `R_M q`, the next query at the position that follows the tokens of its KV head.

    Args: query [B, H_q, D], before RoPE, D even; kept [B, H_kv, T], boolean; theta, that of the keys. Returns
    [B, H_q, D] in the dtype of query. Raises ValueError as `rerotated` does.
    """
    group = query.shape[1] // kept.shape[1]
    return rope.rotate(query, next_position(kept).repeat_interleave(group, dim=1), theta)


@operator("keys", "values", None, None)
@fits()
def compact(
    keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, *, theta: float = 10000.0
) -> CompressedCache:
    r"""RR-8: the cache of the kept tokens with re-rotated keys; values and positions stay as they were.

    Args: keys [B, H_kv, T, D], cached after RoPE at the positions 0 .. T - 1, D even; values
    [B, H_kv, T, D_v]; kept [B, H_kv, T], boolean; theta, that of the rotation. Returns what `cache.compress`
    does, with the positions in the text. Raises ValueError as `rerotated` does.
    """
    places = torch.arange(kept.shape[-1], device=kept.device).expand(kept.shape)
    return cache.compress(rerotated(keys, places, positions_after(kept), theta=theta), values, kept)


@operator(torch.int64)
@fits()
@torch.no_grad()
def positions_before(kept: torch.Tensor, length: int | None = None) -> torch.Tensor:
    r"""RR-9: the same positions, moved so that the next token is at its place in the text, `length`: the kept
    tokens of a head get `length - M .. length - 1`.

    Args: kept [B, H_kv, T], boolean; length, the tokens of the text so far, T unless told. Returns
    [B, H_kv, T], int64. Raises ValueError for a length below T.
    """
    length = kept.shape[-1] if length is None else length
    if length < kept.shape[-1]:
        raise ValueError(f"length: got {length}, wanted at least {kept.shape[-1]}, the tokens of `kept`")
    return length - next_position(kept)[..., None] + positions_after(kept)
