"""What the torch path needs on a CPU: blocks that stay in
the processor's cache, and a second look at extreme norms.

A block is converted to the working dtype in a room, memory that the next block overwrites.
"""

import math
from collections.abc import Callable

import torch
from torch.linalg import vector_norm

from .checks import converted, require_finite

# Numbers of a block: few enough to stay in the last cache, enough to call torch seldom.
BLOCK = 2**20
# Between these norms no component's square overflows float32, and a square that underflows is too small to
# matter. The inverse of such a norm is between them too.
SAFE_NORMS = (1e-15, 1e15)


def blockwise(
    function: Callable[..., object], keys: torch.Tensor, *outs: torch.Tensor, room: torch.Tensor
) -> None:
    """Call `function(block, *parts)` for block after block of the tokens of keys [..., T, D], with its
    parts of outs [..., T]. On a GPU, which needs one long call, the block is all of them.
    """
    tokens = keys.shape[-2] if keys.is_cuda else max(1, BLOCK * keys.shape[-2] // keys.numel())
    for block, *parts in zip(
        keys.split(tokens, dim=-2), *(out.split(tokens, dim=-1) for out in outs), strict=True
    ):
        function(block.to(room.dtype) if keys.is_cuda else converted(block, room), *parts)


def headwise(
    function: Callable[..., object], keys: torch.Tensor, *outs: torch.Tensor, room: torch.Tensor
) -> None:
    """Call `function(keys, *outs, room=room)` for as many heads at a time as fit into a block, or for one
    that is longer.
    """
    if keys.numel() <= BLOCK:
        function(converted(keys, room), *outs, room=room)
    elif keys.ndim == 2:
        function(keys, *outs, room=room)
    else:
        fitting = BLOCK * len(keys) // keys.numel()
        for part in zip(
            *(each.split(fitting) if fitting > 1 else each.unbind() for each in (keys, *outs)), strict=True
        ):
            headwise(function, *part, room=room)


def are_safe(norms: torch.Tensor) -> bool:
    """Whether float32 could square all components, given the norms or their inverses; a NaN is not safe.

    Only the other caches are read a second time.
    """
    least, most = (bound.item() for bound in norms.aminmax())
    return SAFE_NORMS[0] < least and most < SAFE_NORMS[1]


def rescaled(name: str, keys: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys divided by their largest components, [..., T, D], and those, [..., T]; a zero key stays
    and has 1.

    Raises ValueError for NaN and infinite numbers. No gradient goes through the scale: whoever asks for it
    gives what does not depend on it.
    """
    require_finite(name, keys)
    keys = keys.to(dtype)
    largest = vector_norm(keys.detach(), ord=math.inf, dim=-1)
    scale = torch.where(largest == 0, 1, largest)
    return keys / scale[..., None], scale
