r"""KNorm (arXiv 2406.11430): `score_i = -|k_i|`, the
shortest kernel here and a good first one to read (KN-1).

It equals, in torch, `-torch.linalg.vector_norm(keys.float(), dim=-1)`. One program takes a tile of tokens of
one head: one load, one sum along the channels, one store. A row is first multiplied by the power of two that
brings its largest component to [1, 2), which is exact, so that no square leaves the range of float32.
"""

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import as_heads, cdiv, floats, launch, launcher, padded
from .strided import strided
from .tiles import head_and_tokens, head_of, load_tile, power_of_two

ELEMENTS_OF_A_TILE = 4096


@launcher
def score(keys: torch.Tensor) -> torch.Tensor:
    r"""KN-1: `score_i = -|k_i|`, as `optimized.knorm.score`."""
    heads = as_heads(keys)
    batch, num_heads, length, head_dim = heads.shape
    scores, block_d = floats(keys, *keys.shape[:-1]), padded(head_dim)
    block_t = min(128, ELEMENTS_OF_A_TILE // block_d)
    launch(score_norms, (batch * num_heads * cdiv(length, block_t),))(
        strided(heads), scores, num_heads, length, head_dim, BLOCK_T=block_t, BLOCK_D=block_d, num_warps=4
    )
    return scores


@triton.jit(do_not_specialize=["length"])
def score_norms(keys, scores_ptr, num_heads, length, head_dim, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """scores[head, token] = -|k|. Grid: heads * tiles of tokens."""
    head, token = head_and_tokens(length, BLOCK_T)
    keys = load_tile(head_of(keys, head, num_heads), token, tl.arange(0, BLOCK_D), token < length, head_dim)
    scale, inverse = power_of_two(tl.max(tl.abs(keys), axis=1), 0)
    keys *= scale[:, None]
    tl.store(
        scores_ptr + head * length + token,
        -inverse * tl.sqrt_rn(tl.sum(keys * keys, axis=1)),
        mask=token < length,
    )


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    score(torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta"))


CONFIGURATIONS = configurations(_launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS))
