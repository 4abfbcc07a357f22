r"""Rotary position embedding, in the half-split pairing
of transformers: channels i and i + D/2 rotate together.
"""

import numpy as np

from .contract import Real, Setting, Share, contract


@contract
def frequencies(
    head_dim: Setting[int, "even"], theta: Setting[float, "> 0"] = 10000.0
) -> Share[np.ndarray, "head_dim/2"]:
    r"""ROPE-1: the angle per position of each pair,
    `theta ** (-2 i / D)` for i = 0 .. D/2 - 1, in radians.
    """
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


@contract
def rotate(
    states: Real[np.ndarray, "... T D%2"], positions: np.ndarray, theta: Setting[float, "> 0"] = 10000.0
) -> Real[np.ndarray, "... T D"]:
    r"""ROPE-2..5: `R_t x_t`, rotate each pair (x_i,
    x_{i + D/2}) by the angle position * frequency_i.

    Args: positions [T] or any shape that broadcasts to [..., T]. Negated positions undo the rotation.
    """
    angles = np.asarray(positions, dtype=np.float64)[..., None] * frequencies(states.shape[-1], theta)
    first, second = np.split(states, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
