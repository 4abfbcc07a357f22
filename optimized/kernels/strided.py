"""Tensors as arguments of kernels: a pointer and its strides travel as one tuple, whose fields a kernel
reads by name.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Vectors(NamedTuple):
    """A tensor [B, H, D]: its pointer and its strides."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_d: int


class Tokens(NamedTuple):
    """A tensor [B, H, T, D]: its pointer and its strides."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_t: int
    stride_d: int


class Rows(NamedTuple):
    """A tensor [N, D]: its pointer and its strides."""

    ptr: Any
    stride_t: int
    stride_d: int


class Pages(NamedTuple):
    """A pool [P, S, H_kv, D] as rows of D numbers, `stride_t` elements apart: a page, a slot and a head
    are so many rows each.

    The strides themselves in their place would hide from the
    compiler that a row begins at a multiple of 16 bytes.
    """

    ptr: Any
    page_rows: int
    slot_rows: int
    head_rows: int
    stride_t: int
    stride_d: int


class KV(NamedTuple):
    """The keys and values of the same tokens. Letters, because
    `values` are the fields of any tuple inside a kernel.

    A kernel hands one of the two to its helpers: Triton 3.6 loses constants of a tuple within a tuple.
    """

    k: Any
    v: Any


class Sizes(NamedTuple):
    """The sizes that a model fixes. Triton compiles a kernel again where one becomes 1 or a multiple of 16.

    A length, which changes from call to call, is an argument
    of its own: `do_not_specialize` reaches into no tuple.
    """

    num_kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    value_dim: int = 0


def sizes_of(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None) -> Sizes:
    """Return the sizes of queries [B, H_q, ..], keys [B, H_kv, ..] and values [B, H_kv, ..]."""
    return Sizes(
        keys.shape[1],
        queries.shape[1] // keys.shape[1],
        keys.shape[-1],
        0 if values is None else values.shape[-1],
    )


def pages(pool: torch.Tensor) -> Pages:
    """Return a pool with its rows: pages with the tokens or the heads first, or those of one buffer for
    keys and values.
    """
    page, slot, head, stride_d = pool.stride()
    stride_t = math.gcd(page, slot, head) or 1
    return Pages(pool, page // stride_t, slot // stride_t, head // stride_t, stride_t, stride_d)


@triton.jit
def row_of_slot(pool, page, offset, head):
    """The row of a pool that a slot of a head is."""
    return page.to(tl.int64) * pool.page_rows + offset.to(tl.int64) * pool.slot_rows + head * pool.head_rows


def strided(tensor: torch.Tensor) -> Vectors | Tokens | Rows:
    """Return a tensor of two, three or four axes with its strides, by name."""
    kind: Any = {2: Rows, 3: Vectors, 4: Tokens}[tensor.ndim]
    return kind(tensor, *tensor.stride())


@triton.jit
def load_row(base, channels, head_dim, stride_d):
    """One vector as float32 [BLOCK], read as one row of a tile of 32: by few threads, several channels
    each, not by all.
    """
    rows = tl.arange(0, 32)[:, None]
    inside = (rows == 0) & (channels < head_dim)[None, :]
    states = tl.load(base + rows * 16 + channels.to(tl.int64)[None, :] * stride_d, mask=inside, other=0.0)
    return tl.sum(states.to(tl.float32), axis=0)


@triton.jit
def copy_row(source, target, channels, head_dim, source_stride_d, target_stride_d):
    """target = source, bit by bit; by few threads, as in `load_row`."""
    rows = tl.arange(0, 32)[:, None]
    inside = (rows == 0) & (channels < head_dim)[None, :]
    channels = rows * 16 + channels.to(tl.int64)[None, :]  # row 0 alone is read and written
    states = tl.load(source + channels * source_stride_d, mask=inside, other=0.0)
    tl.store(target + channels * target_stride_d, states, mask=inside)
