r"""CaM's merge: CAM-3, a kept token adds the parts of the evicted values that it shares.

It equals, in torch, for one head, with `parts` and `first` of `optimized.cam.stretches`:

    token = torch.arange(T)
    shared = (token >= first[:, None]) & (token < token[:, None])
    values = values + (shared * parts) @ values

The kept tokens that receive from one stretch of neighbours are neighbours too. So one program takes a tile of
the kept tokens in their order, and walks once from the first value that one of them receives to the last. A
tile of 32 kept tokens, where 32 share a value, reads twice the values that lie between them. Its neighbours
read the same ones at the same time, from the L2 cache. Torch copies the evicted values.
"""

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import as_heads, cdiv, launch, launcher, on_tensor_cores, outputs, padded, warps
from .strided import strided
from .tiles import add_product, dot_dtype, head_and_tokens, head_of, load_tile


@launcher
def spread(
    values: torch.Tensor, kept: torch.Tensor, parts: torch.Tensor, first: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    r"""CAM-3: the values [..., T, D_v] after the merge; kept, parts
    (float32), first and order [..., T] as in `optimized.cam.stretches`.
    """
    heads = as_heads(values)
    batch, num_heads, length, value_dim = heads.shape
    merged = outputs(values, *values.shape).copy_(values)
    # kept tokens of a program, and values of a step
    block_rows, block_t = (32, 64) if on_tensor_cores(values) else (16, 16)
    launch(receive, (batch * num_heads * cdiv(length, block_rows),))(
        strided(heads), parts.contiguous(), first.contiguous(), order.contiguous(),
        kept.sum(dim=-1).flatten(), merged, num_heads, length, value_dim,
        BLOCK_ROWS=block_rows, BLOCK_T=block_t, BLOCK_D=padded(value_dim), DOT_DTYPE=dot_dtype(values),
        num_warps=warps(values, 256),
    )  # fmt: skip
    return merged.to(values.dtype)


@triton.jit(do_not_specialize=["length"])
def receive(
    values, parts_ptr, first_ptr, order_ptr, count_ptr, merged_ptr, num_heads, length, value_dim,
    BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """merged[token] = its value and the parts of those from its `first` on, for a tile of the kept tokens.

    Grid: heads * tiles of all tokens, since a head may keep all.
    """
    head, rank = head_and_tokens(length, BLOCK_ROWS)
    inside, row, channels = rank < tl.load(count_ptr + head), head * length, tl.arange(0, BLOCK_D)
    own = head_of(values, head, num_heads)
    token = tl.load(order_ptr + row + rank, mask=inside, other=0)
    first = tl.load(first_ptr + row + token, mask=inside, other=length)
    total = load_tile(own, token, channels, inside, value_dim)
    for start in range(tl.min(first, axis=0), tl.max(token, axis=0), BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        part = tl.load(parts_ptr + row + place, mask=place < length, other=0.0)
        shared = (place[None, :] >= first[:, None]) & (place[None, :] < token[:, None])
        value = load_tile(own, place, channels, place < length, value_dim).to(DOT_DTYPE)
        total = add_product(total, tl.where(shared, part[None, :], 0.0), value, DOT_DTYPE)
    target = merged_ptr + (row + token)[:, None] * value_dim + channels[None, :]
    tl.store(target, total, mask=inside[:, None] & (channels < value_dim)[None, :])


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    values = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    kept, places = (values.new_empty(values.shape[:3], dtype=kind) for kind in (torch.bool, torch.int64))
    spread(values, kept, values[..., 0].float(), places, places)


CONFIGURATIONS = configurations(
    _launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS), tensor_cores=["receive"]
)
