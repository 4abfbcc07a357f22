r"""Rotary position embedding, in the half-split pairing
of transformers: channels i and i + D/2 rotate together.
"""

import torch

from .checks import fits, require_same_device, working_dtype
from .operators import operator


@operator(torch.float64)
@fits()
def frequencies(head_dim: int, theta: float = 10000.0, *, device: torch.device | None = None) -> torch.Tensor:
    r"""ROPE-1: the angle per position of each pair, `theta ** (-2 i / D)` for i = 0 .. D/2 - 1, in
    radians. [D/2], float64.
    """
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)


def turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int = -1) -> torch.Tensor:
    r"""`(x_i cos - x_{i + D/2} sin, x_{i + D/2} cos + x_i sin)` along an axis of D, with cos and sin that
    fit to its halves.
    """
    first, second = states.chunk(2, dim=dim)
    return torch.cat(
        [(first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)], dim=dim
    )


@operator("states")
@fits()
def rotate(states: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    r"""ROPE-2..5: `R_t x_t`, rotate each pair (x_i, x_{i + D/2}) by the angle position * frequency_i.

    Args: positions [T] or any shape that broadcasts to [..., T], on the device of states. Negated positions
    undo the rotation. Returns [..., T, D] in the dtype of states. Raises ValueError for an odd D and for
    positions elsewhere, and on a CPU for NaN or infinite numbers.
    """
    if not isinstance(positions, torch.Tensor):
        raise ValueError(f"positions: got {type(positions).__name__}, wanted a torch tensor")
    require_same_device("positions", positions, "states", states)
    # In float32 the angle of position 100,000 is off by up to 0.004 radians; a table of angles is cheap in
    # float64.
    angles = positions.to(torch.float64)[..., None] * frequencies(
        states.shape[-1], theta, device=states.device
    )
    dtype = working_dtype(states)
    return turn(states.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)).to(states.dtype)
