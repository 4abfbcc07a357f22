r"""The means of ChunkKV to read: a program is one chunk of one row (CH-2).

A program of tokens that are neighbours needs no loop: it loads its chunk at once, masks what lies past the
end of the row, and divides by the number of tokens that are there.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only


@triton.jit
def mean_of_chunk(scores, means, length, chunk_size, SIZE: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offset = tl.arange(0, SIZE)
    token = chunk * chunk_size + offset
    inside = (offset < chunk_size) & (token < length)
    total = tl.sum(tl.load(scores + row * length + token, mask=inside, other=0).to(tl.float32))
    mean = total / tl.sum(inside.to(tl.float32))
    # infinity and -infinity in one chunk: infinity says that a token has to stay
    tl.store(means + row * tl.num_programs(0) + chunk, tl.where(mean == mean, mean, float("inf")))


@forward_only
def chunk_means(scores: torch.Tensor, *, chunk_size: int = 10) -> torch.Tensor:
    r"""CH-2: scores [..., T] give the mean score of each chunk, [..., ceil(T / chunk_size)]."""
    *leading, length = scores.shape
    rows = scores.reshape(-1, length).contiguous()
    means = torch.empty(len(rows), triton.cdiv(length, chunk_size), device=scores.device)
    mean_of_chunk[means.shape[::-1]](rows, means, length, chunk_size, SIZE=triton.next_power_of_2(chunk_size))
    return means.reshape(*leading, -1)
