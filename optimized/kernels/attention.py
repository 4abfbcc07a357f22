r"""Flash-decoding over a cache in parts: ragged heads,
recent tokens, the moments of evicted ones (ATT-1 to ATT-3).

It equals, in torch, for one query head and its KV head, with the n kept tokens and the recent ones in `keys`
and `values`, of which the query sees the first `visible`, and float32 moments n_e, s_k, s_v, S:

    logits = keys[:visible].float() @ query.float() / math.sqrt(head_dim)
    evicted_logit = n_e.log() + query @ s_k / n_e / math.sqrt(head_dim)
    evicted_value = s_v / n_e + (S - torch.outer(s_v, s_k / n_e)) @ query / (n_e * math.sqrt(head_dim))
    logits, values = torch.cat([logits, evicted_logit[None]]), torch.cat([values[:visible].float(),
    evicted_value[None]])
    output, log_sum_exp = logits.softmax(dim=0) @ values, logits.logsumexp(dim=0)

The G query heads of a group and their M queries are the rows of one product with the keys that they share.

First launch, `attend_chunks`: the flat storage and the recent segment are cut into chunks that never cross a
head, and one program takes one chunk and one block of rows, with an online softmax in powers of two. The
lengths of ragged heads are only on the GPU, and the host does not wait for them: the launch has as many
programs as N tokens in B * H_kv heads can need, a `Plan` says which head each takes, and unused programs stop
at once. The chunks are as short as it takes to fill a GPU; with many blocks of rows a head is one chunk, and
K and V are read once for each block. Second launch, `merge_chunks`: one program weighs the partial results of
one query row, in the order of the chunks, and the moments as one virtual token more. A row without tokens and
moments gives output 0 and log-sum-exp -inf.

A cache in pages (`PagedCache`) differs in one thing: a token is found by the block table of its sequence, in
pools of any strides.

Queries go in waves whose partial results fit `WORKSPACE`.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..states import CompressedCache, Moments, PagedCache, zero_moments
from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, is_amd, is_for, launch, launcher, outputs, padded, warps
from .strided import KV, Rows, Sizes, load_row, pages, row_of_slot, strided
from .tiles import LN_2, LOG2_E, absorb, at_head, dot_dtype, load_queries, load_tile

PROGRAMS_WANTED = 1024
CHUNKS = (64, 4096)
WORKSPACE = 2**28


class Plan(NamedTuple):
    """The chunks of a compressed cache. It stays right as long as the cache is not compressed again."""

    chunk: int  # tokens
    programs: int  # the most chunks that the heads can have
    # [programs] int32: the head of each chunk, B * H_kv where there is no chunk
    heads: torch.Tensor | None = None
    first_chunk: torch.Tensor | None = None  # [B * H_kv + 2] int64: the chunks of the heads before
    # [B * H_kv + 2] int64: the tokens of the heads before, and 0 behind the last
    first_token: torch.Tensor | None = None
    table: torch.Tensor | None = None  # [B, pages]: the pages of each sequence; None for flat storage
    pages: int = 0


class Recent(NamedTuple):
    """The recent tokens of every head, and what else is known of them."""

    k: Any
    v: Any
    kept: torch.Tensor | None  # [B, H_kv, R]: which take part
    bias: torch.Tensor | None  # [B, H_kv, n], added to the logits of the first n
    biased: int  # n


class Partial(NamedTuple):
    """The attention of every query row over each chunk."""

    output: torch.Tensor  # [programs, rows, D_v]
    log: torch.Tensor  # [programs, rows]: log2 of the normaliser


def plan(cache: CompressedCache | PagedCache, chunk: int) -> Plan:
    """Cut a cache into chunks of `chunk` tokens, without waiting for its lengths."""
    lengths = cache.lengths.flatten()
    programs = most_tokens(cache) // chunk + len(lengths)
    first_chunk, first_token = (
        torch.nn.functional.pad(counts.cumsum(0), (1, 1))
        for counts in ((lengths + chunk - 1) // chunk, lengths)
    )
    heads = torch.searchsorted(
        first_chunk[1:-1], torch.arange(programs, device=lengths.device), right=True, out_int32=True
    )
    found = Plan(chunk, programs, heads, first_chunk, first_token)
    if not isinstance(cache, PagedCache):
        return found
    return found._replace(table=cache.block_table.contiguous(), pages=cache.block_table.shape[1])


def most_tokens(cache: CompressedCache | PagedCache | None) -> int:
    """Return the number of tokens, or of places for them in the pages of all heads."""
    if cache is None:
        return 0
    if isinstance(cache, PagedCache):
        return cache.block_table.shape[1] * cache.keys.shape[1] * cache.lengths.numel()
    return cache.keys.shape[0]


def chunk_size(tokens: int, row_blocks: int) -> int:
    """Return the tokens of a chunk: with `row_blocks` blocks
    of query rows, fewer and longer chunks fill a GPU.
    """
    wanted = triton.next_power_of_2(cdiv(tokens, max(1, PROGRAMS_WANTED // row_blocks)))
    return max(CHUNKS[0], min(wanted, CHUNKS[1] * row_blocks))


@launcher
def attend(
    queries: torch.Tensor,
    cache: CompressedCache | PagedCache | None,
    recent: tuple[torch.Tensor, torch.Tensor] | None = None,
    moments: Moments | None = None,
    plans: dict[int, Plan] | None = None,
    kept: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ATT-1..3: attention of every query over the parts of a cache, one of which may be None.

    Args: queries [B, H_q, M, D]; cache, ragged; recent, keys [B, H_kv, R, D] and values after those of the
    cache, causal: the last M are the tokens of the queries; moments of evicted tokens, float32; plans, of
    this cache, by the size of their chunks: one that is missing is made and added; kept [B, H_kv, R],
    boolean, which recent tokens take part, and bias [B, H_kv, n], added to the logits of the first n of them,
    both where there is no cache. Returns as `optimized.attention.attend`.
    """
    batch, num_query_heads, num_queries, _ = queries.shape
    part: Any = recent if cache is None else cache
    bytes_each = 4 * batch * num_query_heads * part[1].shape[-1]
    # each row has a result in two or three chunks of its head, at least
    wave = max(1, WORKSPACE // (4 * bytes_each))
    parts = []
    for first in range(0, num_queries, wave):
        end = min(first + wave, num_queries)
        seen = recent and tuple(states[:, :, : states.shape[2] - num_queries + end] for states in recent)
        parts.append(
            _attend(
                queries[:, :, first:end], cache, seen, moments, {} if plans is None else plans, kept, bias
            )
        )
    if len(parts) == 1:
        return parts[0]
    output, log_sum_exp = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return output, log_sum_exp


def _attend(
    queries: torch.Tensor,
    cache: CompressedCache | PagedCache | None,
    recent: tuple[torch.Tensor, ...] | None,
    moments: Moments | None,
    plans: dict[int, Plan],
    kept: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One wave of queries."""
    batch, num_query_heads, num_queries, head_dim = queries.shape
    part: Any = recent if cache is None else cache
    keys, values = part[:2]
    num_kv_heads, value_dim = (cache.lengths if cache is not None else keys).shape[1], values.shape[-1]
    sizes = Sizes(num_kv_heads, num_query_heads // num_kv_heads, head_dim, value_dim)
    heads, rows = batch * num_kv_heads, sizes.group * num_queries
    tile = _tile(queries, padded(head_dim), padded(value_dim), rows)
    if kept is not None or bias is not None:
        tile["num_stages"] = 2  # with either, three tiles in flight spill registers
    row_blocks = cdiv(rows, tile["BLOCK_ROWS"])
    length = 0 if recent is None else recent[0].shape[2]
    chunk = chunk_size(most_tokens(cache) + heads * length, row_blocks)
    chunks_each = cdiv(length, chunk)
    cut, stored = Plan(chunk, 0), None
    paged = isinstance(cache, PagedCache)
    if cache is not None:
        cut = plans[chunk] = plans.get(chunk) or plan(cache, chunk)
        stored = KV(*map(pages if paged else strided, (keys, values)))
    # Recent tokens that are missing have no chunk, and the queries stand in for their pointers.
    recent_keys, recent_values = recent or (queries, queries)
    dense = Recent(
        strided(recent_keys),
        strided(recent_values),
        None if kept is None else kept.contiguous(),
        None if bias is None else bias.float().contiguous(),
        0 if bias is None else bias.shape[2],
    )
    programs = cut.programs + heads * chunks_each
    partial = Partial(floats(queries, programs, rows, value_dim), floats(queries, programs, rows))
    output = outputs(queries, batch, num_query_heads, num_queries, value_dim)
    log_sum_exp = floats(queries, batch, num_query_heads, num_queries)
    scale = math.log2(math.e) / math.sqrt(head_dim)
    launch(attend_chunks, (programs * row_blocks,))(
        strided(queries), stored, dense, cut, partial, num_queries, length, scale, sizes,
        PAGE=keys.shape[1] if paged else 0, BLOCK_DV=padded(value_dim), **tile,
    )  # fmt: skip
    launch(merge_chunks, (heads * rows,))(
        strided(queries), cut, moments, partial, output, log_sum_exp, num_queries, chunks_each, scale, sizes,
        BLOCK_D=32, BLOCK_DV=padded(value_dim), num_warps=warps(queries, 256),
    )  # fmt: skip
    return output.to(queries.dtype), log_sum_exp


def _tile(queries: torch.Tensor, block_d: int, block_dv: int, rows: int) -> dict[str, Any]:
    """Return the constants of the tiling, by the bytes of the longer row of a tile and by the query rows."""
    wide = max(block_d, block_dv) > 128
    if queries.dtype == torch.float32:
        tile = {"BLOCK_ROWS": 16, "BLOCK_T": 16 if wide else 32, "num_warps": 8, "num_stages": 2}
    elif rows > 32 and not wide:
        # Three tiles in flight do not fit into the 64 KB of an AMD GPU, and spill registers on sm_100.
        tile = {
            "BLOCK_ROWS": 64,
            "BLOCK_T": 64,
            "num_warps": 4,
            "num_stages": 2 if is_amd(queries) or is_for(queries, 100) else 3,
        }
    else:
        tile = {
            "BLOCK_ROWS": min(32, padded(rows)),
            "BLOCK_T": 32 if wide else 64,
            "num_warps": 4,
            "num_stages": 2 if wide else 3,
        }
    return tile | {"BLOCK_D": block_d, "DOT_DTYPE": dot_dtype(queries)}


@triton.jit(do_not_specialize=["num_queries", "length", "scale"])
def attend_chunks(
    queries, stored, recent, plan, partial, num_queries, length, scale, sizes,
    PAGE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Attend over one chunk with BLOCK_ROWS query rows. Grid: (chunks of the storage, then of the recent
    tokens) * row blocks.

    `length` counts the recent tokens of a head; PAGE: the tokens of a page, 0 for flat storage.
    """
    num_kv_heads, group, head_dim, value_dim = sizes
    rows, chunks_each = group * num_queries, tl.cdiv(length, plan.chunk)
    row_blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    program = tl.program_id(0).to(tl.int64) // row_blocks
    row = (tl.program_id(0) % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # a chunk of the recent tokens
    head = (program - plan.programs) // tl.maximum(chunks_each, 1)
    first = (program - plan.programs) % tl.maximum(chunks_each, 1) * plan.chunk
    tokens = length - first
    visible = tokens - num_queries + 1 + row % num_queries  # each query sees the tokens up to its own
    keys_here, values_here = at_head(recent.k, head, num_kv_heads), at_head(recent.v, head, num_kv_heads)
    key_stride_t, key_stride_d = recent.k.stride_t, recent.k.stride_d
    value_stride_t, value_stride_d = recent.v.stride_t, recent.v.stride_d
    if stored is not None:
        # or a chunk of the storage: the program behind the last chunk finds no tokens
        is_recent = program >= plan.programs
        own_head = tl.load(plan.heads + program, mask=program < plan.programs, other=0).to(tl.int64)
        before = tl.load(plan.first_token + own_head)
        own_first = (program - tl.load(plan.first_chunk + own_head)) * plan.chunk
        own_tokens = tl.load(plan.first_token + own_head + 1) - before - own_first
        head = tl.where(is_recent, head, own_head)
        first = tl.where(is_recent, first, 0 if PAGE else before + own_first)
        tokens = tl.where(is_recent, tokens, own_tokens)
        visible = tl.where(is_recent, visible, own_tokens)
        keys_here = tl.where(is_recent, keys_here, stored.k.ptr)
        values_here = tl.where(is_recent, values_here, stored.v.ptr)
        key_stride_t = tl.where(is_recent, key_stride_t, stored.k.stride_t)
        key_stride_d = tl.where(is_recent, key_stride_d, stored.k.stride_d)
        value_stride_t = tl.where(is_recent, value_stride_t, stored.v.stride_t)
        value_stride_d = tl.where(is_recent, value_stride_d, stored.v.stride_d)
    if tokens > 0:
        channels = tl.arange(0, BLOCK_D)
        value_channels = tl.arange(0, BLOCK_DV)
        query = load_queries(queries, head, row, channels, num_kv_heads, rows, num_queries, head_dim).to(
            DOT_DTYPE
        )
        own_keys = Rows(keys_here + first * key_stride_t, key_stride_t, key_stride_d)
        own_values = Rows(values_here + first * value_stride_t, value_stride_t, value_stride_d)
        highest = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
        mass = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        output = tl.zeros([BLOCK_ROWS, BLOCK_DV], dtype=tl.float32)
        end = tl.minimum(tl.minimum(tokens, plan.chunk), tl.max(visible, axis=0)).to(tl.int32)
        for start in range(0, end, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            inside = token < end
            if recent.kept is not None:
                inside &= tl.load(recent.kept + head * length + first + token, mask=inside, other=0) != 0
            key_row, value_row = token, token
            if PAGE:
                place = own_first + token
                in_page = token < tl.where(is_recent, 0, end)
                kv_head, own_table = (
                    own_head % num_kv_heads,
                    plan.table + own_head // num_kv_heads * plan.pages,
                )
                page = tl.load(own_table + place // PAGE, mask=in_page, other=0)
                key_row = tl.where(is_recent, token, row_of_slot(stored.k, page, place % PAGE, kv_head))
                value_row = tl.where(is_recent, token, row_of_slot(stored.v, page, place % PAGE, kv_head))
            key = load_tile(own_keys, key_row, channels, inside, head_dim).to(DOT_DTYPE)
            value = load_tile(own_values, value_row, value_channels, inside, value_dim).to(DOT_DTYPE)
            logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if recent.bias is not None:  # AM-5, in powers of two
                own = recent.bias + head * recent.biased + first + token
                added = tl.load(own, mask=inside & (first + token < recent.biased), other=0.0)
                logits += added[None, :] * LOG2_E
            logits = tl.where(inside[None, :] & (token[None, :] < visible[:, None]), logits, float("-inf"))
            highest, mass, weights, shrink = absorb(highest, mass, logits)
            output = output * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), value, input_precision="ieee")
        mass = tl.where(highest == float("-inf"), 1.0, mass)
        target = program * rows + row
        tl.store(
            partial.output + target[:, None] * value_dim + value_channels[None, :], output / mass[:, None],
            mask=(row < rows)[:, None] & (value_channels < value_dim)[None, :],
        )  # fmt: skip
        tl.store(partial.log + target, highest + tl.log2(mass), mask=row < rows)


@triton.jit(do_not_specialize=["num_queries", "chunks_each", "scale"])
def merge_chunks(
    queries, plan, moments, partial, output_ptr, log_sum_exp_ptr, num_queries, chunks_each, scale, sizes,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Merge the chunks and moments of one query row: `sum_c 2^log_c * output_c / sum_c 2^log_c`. Grid:
    heads * rows.
    """
    value_dim, rows = sizes.value_dim, sizes.group * num_queries
    head, row = tl.program_id(0).to(tl.int64) // rows, tl.program_id(0) % rows
    first, stored = head * 0, head * 0
    if plan.heads is not None:
        first = tl.load(plan.first_chunk + head)
        stored = tl.load(plan.first_token + head + 1) - tl.load(plan.first_token + head)
        stored = (stored + plan.chunk - 1) // plan.chunk
    channels = tl.arange(0, BLOCK_DV)
    highest = tl.full([], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([], dtype=tl.float32)
    output = tl.zeros([BLOCK_DV], dtype=tl.float32)
    for start in range(0, (stored + chunks_each).to(tl.int32), 16):
        parts = start + tl.arange(0, 16)
        inside = parts < stored + chunks_each
        target = (
            tl.where(parts < stored, first + parts, plan.programs + head * chunks_each + parts - stored)
            * rows
            + row
        )
        logs = tl.load(partial.log + target, mask=inside, other=float("-inf"))
        outputs = tl.load(
            partial.output + target[:, None] * value_dim + channels[None, :],
            mask=inside[:, None] & (channels < value_dim)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(logs, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logs - base)
        shrink = tl.exp2(highest - base)
        mass = mass * shrink + tl.sum(weights, axis=0)
        output = output * shrink + tl.sum(outputs * weights[:, None], axis=0)
        highest = higher
    if moments is not None:
        log_evicted, estimate = evicted_token(
            queries, moments, head, row, channels, num_queries, scale, sizes, BLOCK_D
        )
        higher = tl.maximum(highest, log_evicted)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(highest - base), tl.exp2(log_evicted - base)
        mass = mass * shrink + weight
        output = output * shrink + estimate * weight
        highest = higher
    # A row without tokens has mass 0: its output is 0 and its log-sum-exp -inf.
    empty = mass == 0
    output = tl.where(empty, 0.0, output / tl.where(empty, 1.0, mass))
    log_sum_exp = (highest + tl.log2(tl.where(empty, 1.0, mass))) * LN_2
    target = head * rows + row
    tl.store(output_ptr + target * value_dim + channels, output, mask=channels < value_dim)
    tl.store(log_sum_exp_ptr + target, log_sum_exp)


@triton.jit
def evicted_token(queries, moments, head, row, channels, num_queries, scale, sizes, BLOCK_D: tl.constexpr):
    """MK-9, MK-11: the evicted tokens of a head as one token
    for a query row: its logit in base 2, its value [BLOCK_DV].
    """
    num_kv_heads, group, head_dim, value_dim = sizes
    count = tl.load(moments.count + head).to(tl.float32)
    divisor = tl.maximum(count, 1.0)
    value_sum = tl.load(moments.value_sum + head * value_dim + channels, mask=channels < value_dim, other=0.0)
    query_head = head % num_kv_heads * group + row // num_queries
    query_ptr = queries.ptr + head // num_kv_heads * queries.stride_b + query_head * queries.stride_h
    query_ptr += (row % num_queries).to(tl.int64) * queries.stride_t
    logit = tl.zeros([], dtype=tl.float32)
    slope = tl.zeros_like(value_sum)
    for start in range(0, head_dim, BLOCK_D):
        inner = start + tl.arange(0, BLOCK_D)
        inside = inner < head_dim
        query = load_row(query_ptr, inner, head_dim, queries.stride_d)
        mean_key = tl.div_rn(
            tl.load(moments.key_sum + head * head_dim + inner, mask=inside, other=0.0), divisor
        )
        sums = tl.load(
            moments.value_key_sum + (head * value_dim + channels[:, None]) * head_dim + inner[None, :],
            mask=(channels < value_dim)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        slope += tl.sum((sums - value_sum[:, None] * mean_key[None, :]) * query[None, :], axis=1)
        logit += tl.sum(query * mean_key, axis=0)
    log_evicted = tl.where(count > 0, tl.log2(divisor) + logit * scale, float("-inf"))
    return log_evicted, tl.div_rn(value_sum + slope * (scale * LN_2), divisor)


def _launch(dtype: torch.dtype, head_dim: int, rows: int) -> None:
    storage = torch.empty((32 * 8 * 1024, head_dim), dtype=dtype, device="meta")
    lengths = torch.empty((32, 8), dtype=torch.int64, device="meta")
    queries = torch.empty((32, 8 * rows, 1, head_dim), dtype=dtype, device="meta")
    recent = torch.empty((32, 8, 256, head_dim), dtype=dtype, device="meta")
    moments = zero_moments(recent, recent)
    attend(queries, CompressedCache(storage, storage, lengths, lengths), (recent, recent), moments)
    kept = torch.empty((32, 8, 256), dtype=torch.bool, device="meta")
    attend(queries, None, (recent, recent), moments)
    attend(queries, None, (recent, recent), moments, kept=kept)
    attend(queries, None, (recent, recent), bias=floats(recent, 32, 8, 128))
    pool, table = storage.view(-1, 16, 8, head_dim), torch.empty((32, 64), dtype=torch.int32, device="meta")
    attend(queries, PagedCache(pool, pool, pool[..., 0], table, lengths, lengths[:, 0]))


CONFIGURATIONS = configurations(
    _launch,
    *({"head_dim": head_dim, "rows": rows} for head_dim in HEAD_DIMS for rows in (4, 64)),
    tensor_cores=["attend_chunks"],
)
