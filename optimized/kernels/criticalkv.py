r"""CriticalKV's length of a projected value: CK-1, `n_t = (1/G) sum_g |W_o^g v_t|_1`.

It equals, in torch, `(values.float() @ w_o.float()).abs().sum(dim=-1)`, mean over the query heads of a group.
A product has as many numbers for each token as the residual stream, so none is stored: one program keeps a
tile of values and walks over the output projection of its group. The programs of a head run side by side and
share what they read.
"""

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, launch, launcher, on_tensor_cores, padded
from .strided import Rows, strided
from .tiles import dot_dtype, head_and_tokens, head_of, load_tile


@launcher
def projected_norms(values: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
    r"""CK-1: norms [B, H_kv, T], float32, of values
    [B, H_kv, T, D_v] and w_o [H_q, D_v, hidden], any strides.
    """
    batch, num_heads, length, value_dim = values.shape
    norms, block_d = floats(values, batch, num_heads, length), padded(value_dim)
    block_t, block_h = (128 if block_d <= 128 else 64, 64) if on_tensor_cores(values) else (32, 32)
    launch(sum_projections, (batch * num_heads * cdiv(length, block_t),))(
        strided(values), strided(w_o), norms,
        num_heads, w_o.shape[0] // num_heads, length, w_o.shape[2], value_dim,
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_D=block_d, DOT_DTYPE=dot_dtype(values), num_warps=8,
        num_stages=2,
    )  # fmt: skip
    return norms


@triton.jit(do_not_specialize=["length"])
def sum_projections(
    values, w_o, norms_ptr, num_heads, group, length, hidden, value_dim,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """norms[head, token], the programs of a head together. Grid: KV heads * tiles of tokens."""
    head, token = head_and_tokens(length, BLOCK_T)
    own, channels = head_of(values, head, num_heads), tl.arange(0, BLOCK_D)
    value = load_tile(own, token, channels, token < length, value_dim).to(DOT_DTYPE)
    # Each number of the tile is a sum of its own until the end.
    total = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    for query_head in range(head % num_heads * group, (head % num_heads + 1) * group):
        projection = Rows(w_o.ptr + query_head * w_o.stride_b, w_o.stride_d, w_o.stride_h)
        for start in range(0, hidden, BLOCK_H):
            column = start + tl.arange(0, BLOCK_H)
            weight = load_tile(projection, column, channels, column < hidden, value_dim).to(DOT_DTYPE)
            total += tl.abs(tl.dot(value, tl.trans(weight), input_precision="ieee"))
    tl.store(norms_ptr + head * length + token, tl.sum(total, axis=1) / group, mask=token < length)


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    values = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    weight = torch.empty((4096, 32, head_dim), dtype=dtype, device="meta")  # as a model has it
    projected_norms(values, weight.permute(1, 2, 0))


CONFIGURATIONS = configurations(
    _launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS), tensor_cores=["sum_projections"]
)
