r"""Flash-decoding over a compressed cache: ragged heads, split along the tokens, with the log-sum-exp (ATT-1 to ATT-3).

It equals, in torch, for one query head and the n kept tokens of its KV head:

    logits = keys.float() @ query.float() / math.sqrt(head_dim)
    output = logits.softmax(dim=0) @ values.float()
    log_sum_exp = logits.logsumexp(dim=0)

K and V of every kept token are read once: the G query heads of a group and their M queries are the rows of one tile of queries,
which share the read. Queries, outputs and the partial results of the splits are small compared with K and V.

First launch, `attend_chunks`: the flat storage is cut into chunks that never cross a head, and one program takes one chunk. The
lengths of the heads are only on the GPU, and the host does not wait for them: the launch has as many programs as N tokens in
B * H_kv heads can need; each finds its head and chunk by adding up the lengths, and unused programs stop at once. So the work is
even for any ragged heads. The chunk follows from N: about a thousand programs, and from 64 to 4,096 tokens. A program has a running
maximum, sum and output in float32 (the online softmax, in powers of two), and writes its normalised output and the logarithm of
its sum. Every chunk has a token, so no maximum is -inf and nothing is divided by 0.
Second launch, `merge_chunks`: one program weighs the partial results of one query row, in the order of the chunks. A head without
tokens has no chunk, and its merge gives output 0 and log-sum-exp -inf.

The tiles. Tensor cores multiply at least 16 rows, so G * M rows are padded to 16 and taken 32 at a time at most. 64 tokens (32
where a row is 512 bytes or more) keep K and V in flight two to three deep in shared memory and leave room for two programs on a
multiprocessor. float32 caches are multiplied in full float32, without tensor cores.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..states import CompressedCache
from .compiling import HEAD_DIMS, configurations
from .launching import floats, outputs, padded
from .tiles import dot_dtype, load_queries, load_tile

PROGRAMS_WANTED = 1024
CHUNKS = (64, 4096)


def attend(queries: torch.Tensor, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ATT-1..3: attention of every query over the kept tokens of its KV head, as `optimized.attention.attend`."""
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads, value_dim = cache.lengths.shape[1], cache.values.shape[1]
    total, heads, rows = cache.keys.shape[0], batch * num_kv_heads, num_query_heads // num_kv_heads * num_queries
    chunk = min(max(triton.next_power_of_2(triton.cdiv(total, PROGRAMS_WANTED)), CHUNKS[0]), CHUNKS[1])
    programs = total // chunk + heads
    lengths = cache.lengths.contiguous()
    partial, partial_log = floats(queries, programs, rows, value_dim), floats(queries, programs, rows)
    output = outputs(queries, batch, num_query_heads, num_queries, value_dim)
    log_sum_exp = floats(queries, batch, num_query_heads, num_queries)
    block_heads, block_dv = padded(heads), padded(value_dim)
    tile = _tile(queries, padded(head_dim), block_dv, rows)
    attend_chunks[(programs, triton.cdiv(rows, tile["BLOCK_ROWS"]))](
        queries, cache.keys, cache.values, lengths, partial, partial_log,
        *queries.stride(), *cache.keys.stride(), *cache.values.stride(),
        num_kv_heads, heads, num_queries, rows, head_dim, value_dim, chunk, math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_HEADS=block_heads, BLOCK_DV=block_dv, **tile,
    )  # fmt: skip
    merge_chunks[(heads, rows)](
        lengths, partial, partial_log, output, log_sum_exp, heads, rows, value_dim, chunk,
        BLOCK_HEADS=block_heads, BLOCK_DV=block_dv, num_warps=4,
    )  # fmt: skip
    return output.to(queries.dtype), log_sum_exp


def _tile(queries: torch.Tensor, block_d: int, block_dv: int, rows: int) -> dict[str, Any]:
    """Return the constants of the tiling, by the bytes of the longer row of a tile."""
    wide = max(block_d, block_dv) > 128
    if queries.dtype == torch.float32:
        tile = {"BLOCK_ROWS": 16, "BLOCK_T": 16 if wide else 32, "num_warps": 8 if wide else 4, "num_stages": 2}
    else:
        tile = {"BLOCK_ROWS": min(32, padded(rows)), "BLOCK_T": 32 if wide else 64, "num_warps": 4, "num_stages": 2 if wide else 3}
    return tile | {"BLOCK_D": block_d, "DOT_DTYPE": dot_dtype(queries)}


@triton.jit
def find_chunk(lengths_ptr, program, heads, chunk, BLOCK_HEADS: tl.constexpr):
    """Return head, first row of storage and number of tokens of this program's chunk; head = `heads` if it has no chunk."""
    index = tl.arange(0, BLOCK_HEADS)
    lengths = tl.load(lengths_ptr + index, mask=index < heads, other=0).to(tl.int64)
    chunks = (lengths + chunk - 1) // chunk
    head = tl.sum(((tl.cumsum(chunks, axis=0) <= program) & (index < heads)).to(tl.int32), axis=0)
    done = (program - tl.sum(tl.where(index < head, chunks, 0), axis=0)) * chunk
    first = tl.sum(tl.where(index < head, lengths, 0), axis=0) + done
    left = tl.sum(tl.where(index == head, lengths, 0), axis=0) - done
    return head, first, tl.minimum(left, chunk)


@triton.jit(do_not_specialize=["chunk", "scale"])
def attend_chunks(
    queries_ptr, keys_ptr, values_ptr, lengths_ptr, partial_ptr, partial_log_ptr,
    query_stride_b, query_stride_h, query_stride_m, query_stride_d,
    key_stride_t, key_stride_d, value_stride_t, value_stride_d,
    num_kv_heads, heads, num_queries, rows, head_dim, value_dim, chunk, scale,
    BLOCK_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Attend over one chunk with BLOCK_ROWS query rows. Grid: largest number of chunks, blocks of rows. Base-2 logarithms."""
    program = tl.program_id(0).to(tl.int64)
    head, first, tokens = find_chunk(lengths_ptr, program, heads, chunk, BLOCK_HEADS)
    if head < heads:
        channels = tl.arange(0, BLOCK_D)
        value_channels = tl.arange(0, BLOCK_DV)
        row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        queries = load_queries(
            queries_ptr, head.to(tl.int64), row, channels, num_kv_heads, rows, num_queries, head_dim,
            query_stride_b, query_stride_h, query_stride_m, query_stride_d,
        ).to(DOT_DTYPE)  # fmt: skip
        keys_ptr += first * key_stride_t
        values_ptr += first * value_stride_t
        highest = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
        mass = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        output = tl.zeros([BLOCK_ROWS, BLOCK_DV], dtype=tl.float32)
        for start in range(0, tokens.to(tl.int32), BLOCK_T):
            token = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
            inside = token < tokens
            keys = load_tile(keys_ptr, token, channels, inside, key_stride_t, key_stride_d, head_dim).to(DOT_DTYPE)
            values = load_tile(values_ptr, token, value_channels, inside, value_stride_t, value_stride_d, value_dim).to(DOT_DTYPE)
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            logits = tl.where(inside[None, :], logits, float("-inf"))
            higher = tl.maximum(highest, tl.max(logits, axis=1))
            weights = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(highest - higher)
            mass = mass * shrink + tl.sum(weights, axis=1)
            output = output * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), values, input_precision="ieee")
            highest = higher
        target = program * rows + row
        tl.store(
            partial_ptr + target[:, None] * value_dim + value_channels[None, :], output / mass[:, None],
            mask=(row < rows)[:, None] & (value_channels < value_dim)[None, :],
        )  # fmt: skip
        tl.store(partial_log_ptr + target, highest + tl.log2(mass), mask=row < rows)


@triton.jit(do_not_specialize=["chunk"])
def merge_chunks(
    lengths_ptr, partial_ptr, partial_log_ptr, output_ptr, log_sum_exp_ptr, heads, rows, value_dim, chunk,
    BLOCK_HEADS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one head for one query row: `sum_c 2^log_c * output_c / sum_c 2^log_c`. Grid: heads, rows."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    index = tl.arange(0, BLOCK_HEADS)
    lengths = tl.load(lengths_ptr + index, mask=index < heads, other=0).to(tl.int64)
    chunks = (lengths + chunk - 1) // chunk
    first = tl.sum(tl.where(index < head, chunks, 0), axis=0)
    end = first + tl.sum(tl.where(index == head, chunks, 0), axis=0)
    channels = tl.arange(0, BLOCK_DV)
    highest = tl.full([], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([], dtype=tl.float32)
    output = tl.zeros([BLOCK_DV], dtype=tl.float32)
    for start in range(first, end, 16):
        parts = start + tl.arange(0, 16)
        target = parts * rows + row
        logs = tl.load(partial_log_ptr + target, mask=parts < end, other=float("-inf"))
        partial = tl.load(
            partial_ptr + target[:, None] * value_dim + channels[None, :],
            mask=(parts < end)[:, None] & (channels < value_dim)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(logs, axis=0))
        weights = tl.exp2(logs - higher)
        shrink = tl.exp2(highest - higher)
        mass = mass * shrink + tl.sum(weights, axis=0)
        output = output * shrink + tl.sum(partial * weights[:, None], axis=0)
        highest = higher
    # A head without tokens has mass 0: its output is 0 and its log-sum-exp -inf.
    empty = mass == 0
    output = tl.where(empty, 0.0, output / tl.where(empty, 1.0, mass))
    log_sum_exp = (highest + tl.log2(tl.where(empty, 1.0, mass))) * 0.6931471805599453
    target = head.to(tl.int64) * rows + row
    tl.store(output_ptr + target * value_dim + channels, output, mask=channels < value_dim)
    tl.store(log_sum_exp_ptr + target, log_sum_exp)


def _launch(dtype: torch.dtype, head_dim: int, rows: int) -> None:
    storage = torch.empty((32 * 8 * 1024, head_dim), dtype=dtype, device="meta")
    lengths = torch.empty((32, 8), dtype=torch.int64, device="meta")
    queries = torch.empty((32, 8 * rows, 1, head_dim), dtype=dtype, device="meta")
    attend(queries, CompressedCache(storage, storage, lengths, lengths))


CONFIGURATIONS = configurations(
    _launch, *({"head_dim": head_dim, "rows": rows} for head_dim in HEAD_DIMS for rows in (4, 64)), tensor_cores=["attend_chunks"]
)
