"""Measures this GPU's maximum bandwidth and arithmetic rate, in the same run as the rows that are compared with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

GIGABYTE = 10**9
PROGRAMS = 4096


@triton.jit
def sum_chunks(source_ptr, sums_ptr, chunk, length, BLOCK: tl.constexpr):
    """sums[p] = the sum of one chunk of float32 numbers, read 16 bytes at a time. Grid: chunks."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    end = tl.minimum((program + 1) * chunk, length)
    for first in range(program * chunk, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        total += tl.load(source_ptr + places, mask=places < end, other=0.0)
    tl.store(sums_ptr + program, tl.sum(total, axis=0))


def works() -> dict[str, tuple[Callable[[], Any], float]]:
    """The timed calls with their sizes: bytes of a copy (read and written), bytes of a read, operations of a matrix product.

    The matrices are random: a product of zeros would run faster. The ceiling of memory is the better of the first two.
    """
    source = torch.randn(GIGABYTE // 4, device="cuda")
    target = torch.empty_like(source)
    sums = torch.empty(PROGRAMS, device="cuda")
    chunk = triton.cdiv(triton.cdiv(source.numel(), PROGRAMS), 4096) * 4096
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    read = lambda: sum_chunks[(PROGRAMS,)](source, sums, chunk, source.numel(), BLOCK=4096, num_warps=8)  # noqa: E731
    return {
        "copy_bytes_per_s": (lambda: target.copy_(source), 2.0 * GIGABYTE),
        "read_bytes_per_s": (read, float(GIGABYTE)),
        "matmul_flops_per_s": (lambda: left @ right, 2.0 * 8192**3),
    }
