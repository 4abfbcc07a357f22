"""Addresses and tiles that all kernels share: offsets
in int64, masked loads, float32 right after the load.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .launching import is_interpreted
from .strided import Rows

# Logarithms are those of powers of two inside a kernel.
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def dot_dtype(states: torch.Tensor) -> Any:
    """Return the dtype for the factors of a product: that
    of `states`, or float32 in the interpreter for bfloat16.
    """
    bfloat16 = tl.float32 if is_interpreted(states) else tl.bfloat16  # float32 holds every bfloat16 exactly
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: bfloat16}[states.dtype]


@triton.jit
def head_and_tokens(length, BLOCK_T: tl.constexpr):
    """The head of a program and its tile of tokens, [BLOCK_T], both int64, in a grid of heads * tiles: those
    of a head run side by side.
    """
    program, tiles = tl.program_id(0).to(tl.int64), tl.cdiv(length, BLOCK_T)
    return program // tiles, program % tiles * BLOCK_T + tl.arange(0, BLOCK_T)


@triton.jit
def at_head(states, head, num_heads):
    """Where a head of `states` [B, H, ..] begins: `head` (int64) counts the `num_heads` heads of one
    sequence after the other.
    """
    return states.ptr + (head // num_heads) * states.stride_b + (head % num_heads) * states.stride_h


@triton.jit
def head_of(states, head, num_heads):
    """One head of `states` [B, H, T, D] as `Rows` [T, D]; `head` as in `at_head`."""
    return Rows(at_head(states, head, num_heads), states.stride_t, states.stride_d)


@triton.jit
def rows_from(states, first):
    """The rows of `states` [N, D] from `first` (int64) on."""
    return Rows(states.ptr + first * states.stride_t, states.stride_t, states.stride_d)


@triton.jit
def load_tile(states, rows, channels, inside, size):
    """Load some rows of `states` [N, D] as float32 [rows, channels]: 0 where not `inside` [rows], and from
    channel `size` on.
    """
    offsets = (
        tl.cast(rows, tl.int64)[:, None] * states.stride_t + channels.to(tl.int64)[None, :] * states.stride_d
    )
    return tl.load(states.ptr + offsets, mask=inside[:, None] & (channels < size)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def load_queries(queries, head, rows, channels, num_kv_heads, count, num_queries, head_dim):
    """Load the `count` query rows of a KV head as float32 [rows, channels]: row r is query r % M of head r
    // M of the group.
    """
    query_head = (head % num_kv_heads) * (count // num_queries) + rows // num_queries
    offsets = (head // num_kv_heads) * queries.stride_b + query_head * queries.stride_h
    offsets += (rows % num_queries).to(tl.int64) * queries.stride_t
    offsets = offsets[:, None] + channels.to(tl.int64)[None, :] * queries.stride_d
    return tl.load(
        queries.ptr + offsets, mask=(rows < count)[:, None] & (channels < head_dim)[None, :], other=0.0
    ).to(tl.float32)


@triton.jit
def copy_tile(source, target, tokens, rows, channels, copied, size):
    """target[rows] = source[tokens] bit by bit where `copied`;
    source [N, D], the rows of `target` are `size` apart.

    tokens, rows and copied are [n], rows int64.
    """
    inside = copied[:, None] & (channels < size)[None, :]
    offsets = (
        tokens.to(tl.int64)[:, None] * source.stride_t + channels.to(tl.int64)[None, :] * source.stride_d
    )
    states = tl.load(source.ptr + offsets, mask=inside, other=0.0)
    tl.store(target + rows[:, None] * size + channels[None, :], states, mask=inside)


@triton.jit
def power_of_two(largest, above: tl.constexpr):
    """Return 2^e with `largest` * 2^e in [2^above, 2^(above+1)), and 2^-e, by the exponent's bits. Any
    number for 0 and NaN.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    up = tl.minimum(tl.maximum(254 + above - exponent, 1), 253)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_product(total, weights, values, DOT_DTYPE: tl.constexpr):
    """total + weights @ values, for values of DOT_DTYPE, and weights in float32 of at most 1.

    A weight is the sum of two numbers of the dtype, to 16 bits of bfloat16 and 22 of float16.
    """
    high = weights.to(DOT_DTYPE)
    if weights.dtype != DOT_DTYPE:
        low = (weights - high.to(tl.float32)).to(DOT_DTYPE)
        total = tl.dot(low, values, total, input_precision="ieee")
    return tl.dot(high, values, total, input_precision="ieee")


@triton.jit
def absorb(highest, mass, logits):
    """Take logits [R, T], in powers of two, into the largest
    logit and the mass of each row: an online softmax.

    Return both, the weights [R, T] and what earlier weights shrink by, [R]. -inf less -inf is NaN, so a row
    without a logit has 0.
    """
    higher = tl.maximum(highest, tl.max(logits, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights, shrink = tl.exp2(logits - base[:, None]), tl.exp2(highest - base)
    return higher, mass * shrink + tl.sum(weights, axis=1), weights, shrink
