"""Addresses and tiles that all kernels share: offsets in int64, masked loads, float32 right after the load."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launching import is_interpreted


def dot_dtype(states: torch.Tensor) -> Any:
    """Return the dtype for the factors of a product: that of `states`, or float32 in the interpreter for bfloat16."""
    bfloat16 = tl.float32 if is_interpreted(states) else tl.bfloat16  # float32 holds every bfloat16 exactly
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: bfloat16}[states.dtype]


@triton.jit
def at_head(ptr, head, num_heads, stride_b, stride_h):
    """Return the offset of a head: `head` (int64) counts the `num_heads` heads of all sequences, one sequence after the other."""
    return ptr + (head // num_heads) * stride_b + (head % num_heads) * stride_h


@triton.jit
def load_tile(base, rows, channels, inside, stride_row, stride_channel, size):
    """Load rows as float32 [rows, channels]: 0 where not `inside` [rows], and from channel `size` on."""
    offsets = tl.cast(rows, tl.int64)[:, None] * stride_row + channels.to(tl.int64)[None, :] * stride_channel
    return tl.load(base + offsets, mask=inside[:, None] & (channels < size)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_queries(
    base, head, rows, channels, num_kv_heads, count, num_queries, head_dim, stride_b, stride_h, stride_m, stride_channel
):  # fmt: skip
    """Load the `count` query rows of a KV head as float32 [rows, channels]: row r is query r % M of head r // M of the group."""
    query_head = (head % num_kv_heads) * (count // num_queries) + rows // num_queries
    offsets = (head // num_kv_heads) * stride_b + query_head * stride_h + (rows % num_queries).to(tl.int64) * stride_m
    offsets = offsets[:, None] + channels.to(tl.int64)[None, :] * stride_channel
    return tl.load(base + offsets, mask=(rows < count)[:, None] & (channels < head_dim)[None, :], other=0.0).to(tl.float32)


@triton.jit
def copy_tile(source, target, tokens, rows, channels, copied, stride_t, stride_d, size):
    """target[rows] = source[tokens] bit by bit where `copied`; tokens, rows and copied are [n], rows int64 and `size` apart."""
    inside = copied[:, None] & (channels < size)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * stride_t + channels.to(tl.int64)[None, :] * stride_d
    tl.store(target + rows[:, None] * size + channels[None, :], tl.load(source + offsets, mask=inside, other=0.0), mask=inside)
