r"""The attention that every key receives, in the manner of FlashAttention: no T x T matrix (H2-1, SN-1,
TO-1, MK-P, KZ-2, CO-3).

It equals, in torch, for one query head, whose M queries are those of the last M of T tokens:

    later = torch.arange(T) > torch.arange(T - M, T)[:, None]
    weights = (queries.float() @ keys.float().T / math.sqrt(head_dim)).masked_fill(later,
    -math.inf).softmax(dim=-1)
    received = weights.sum(dim=0)
    output = weights @ values.float()

A weight needs the normaliser of its row, which needs every key that the row sees; a sum over a column
needs every row. So the products are computed twice, a tile at a time, and only the logarithms of the
normalisers lie in memory between the two passes. Such a logarithm is rounded as a logit is, no more:
kept apart, maximum and sum gave the same error for logits from 6 to 400. FlashAttention has these
logarithms already where it attends to the prompt (`optimized.flash`). Elsewhere, first launch, `sum_rows`:
one program takes a block of rows and walks the keys that they see, with a running maximum and sum
(the online softmax, in powers of two). Few rows, such as SnapKV's window, would leave a GPU idle:
then the keys are cut into splits, one program each, and `merge_splits` adds up their sums. Where the
output is wanted too, the walk is the attention of the prompt itself, in one split. Second launch,
`sum_columns`: one program keeps a block of keys and walks the rows that see one of them. Its tile
lies the other way round, keys by rows, so that a column of the attention is a row of the tile: tensor
cores then have full tiles for a single query too, and the sum stays within a few threads.

The rows of a KV head are the queries of its whole group in the order of time: row r is query r // G of query
head r % G. The group shares every key that is read, and the rows that see a key are the last ones. Sums have
a fixed order, without atomics. The programs with most work start first. Their number follows from the prompt
alone, so a sequence has the same bits in any batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .. import flash
from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, is_amd, launch, launcher, on_tensor_cores, outputs, padded
from .strided import Sizes, sizes_of, strided
from .tiles import LN_2, LOG2_E, absorb, dot_dtype, head_of, load_tile

MOST_SPLITS = 64
LEAST_TOKENS_OF_A_SPLIT = 512


@launcher
def score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""H2-1: the attention that every token receives from the
    queries, mean over the group, as `optimized.h2o.score`.
    """
    queries, keys = by_channels(queries), by_channels(keys)
    return _sum_columns(queries, keys, _sum_rows(queries, keys, None)[0])


@launcher
def attend_and_score(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ATT-6 and H2-1: the causal attention's output and the score, as `optimized.h2o.attend_and_score`."""
    queries, keys, values = (by_channels(states) for states in (queries, keys, values))
    if flash.serves(queries, keys, values):
        output, logarithms = flash.attend(queries, keys, values)
        by_head = logarithms.unflatten(1, (keys.shape[1], -1))
        logs = (by_head * LOG2_E.value).mT.float().contiguous()  # the rows of a KV head in the order of time
    else:
        logs, output = _sum_rows(queries, keys, values)
    return output.to(queries.dtype), _sum_columns(queries, keys, logs)


@launcher
def score_replay(keys: torch.Tensor, replay_queries: torch.Tensor, replay_keys: torch.Tensor) -> torch.Tensor:
    r"""KZ-2: the largest attention that a query of the replay gives each token, as `optimized.kvzip.score`.

    The replay stands behind the text, so its keys take part in the rows, and have no columns. One sequence
    at a time: its keys lie in memory once more, one behind the other.
    """
    scores = []
    for text, queries, replay in zip(keys, replay_queries, replay_keys, strict=True):
        rows, whole = by_channels(queries[None]), torch.cat([text, replay], dim=1)[None]
        scores.append(_sum_columns(rows, whole, _sum_rows(rows, whole, None)[0], keys.shape[2]))
    return torch.cat(scores)


@launcher
def score_chunks(queries: torch.Tensor, keys: torch.Tensor, chunk_size: int) -> torch.Tensor:
    r"""CO-3: the attention that every token receives from
    its chunk, as `optimized.compactor.group_attention`.

    A chunk is a sequence of its own, whose queries see all of it. The last one may be shorter.
    """
    length, sequences = keys.shape[2], []
    whole = length // chunk_size * chunk_size
    for one in zip(by_channels(queries), by_channels(keys), strict=True):
        scores = []
        for part, size in ((slice(0, whole), chunk_size), (slice(whole, length), length - whole)):
            if part.stop > part.start:
                rows, own = (each[:, part].unflatten(1, (-1, size)).transpose(0, 1) for each in one)
                logs = _sum_rows(rows, own, None, in_chunk=True)[0]
                scores.append(_sum_columns(rows, own, logs, in_chunk=True).transpose(0, 1).flatten(1))
        sequences.append(torch.cat(scores, dim=1))
    return torch.stack(sequences)


@launcher
def measure_window(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    r"""CAKE-1, CAKE-2: how far the attention of the queries spreads over the tokens before them, and how much
    it moves, [2, B] float64, summed over the query heads.
    """
    queries, keys = by_channels(queries), by_channels(keys)
    sizes, heads, rows = _sizes(queries, keys)
    num_queries, length = queries.shape[2], keys.shape[2]
    tile = tile_of(queries, rows) | {"BLOCK_ROWS": padded(num_queries)}
    tile["BLOCK_T"] = tile["BLOCK_T"] if on_tensor_cores(queries) else 16
    tiles = cdiv(length - num_queries, tile["BLOCK_T"])
    sums, logs = floats(queries, 2, heads, tiles), _sum_rows(queries, keys, None)[0]
    launch(measure_columns, (heads * tiles,))(
        strided(queries), strided(keys), logs, sums, sums[1:], num_queries, length, sizes, **tile
    )
    return sums.double().view(2, len(queries), -1).sum(dim=-1)


def by_channels(states: torch.Tensor) -> torch.Tensor:
    """Return states whose channels are neighbours in memory: as they are, or else a copy."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _sizes(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None
) -> tuple[Sizes, int, int]:
    """Return the sizes, the KV heads of all sequences, and the rows of each."""
    sizes = sizes_of(queries, keys, values)
    return sizes, keys.shape[0] * sizes.num_kv_heads, sizes.group * queries.shape[2]


def tile_of(queries: torch.Tensor, rows: int, widest: int = 0) -> dict[str, Any]:
    """Return the constants of a pass over the keys; `widest` is the number of channels of the values, if
    they are read.
    """
    block_d = padded(queries.shape[3])
    wide = max(block_d, padded(widest)) > 128
    if not on_tensor_cores(queries):
        tile = {
            "BLOCK_ROWS": 16,
            "BLOCK_T": 16 if wide else 32,
            "num_warps": 8 if block_d > 64 or wide else 4,
            "num_stages": 2,
        }
    else:
        # On AMD the addresses of an output of 128 rows would spill.
        block_rows = min(64 if wide or (widest and is_amd(queries)) else 128, padded(rows))
        tile = {
            "BLOCK_ROWS": block_rows,
            "BLOCK_T": 32 if wide else 64,
            "num_warps": 8 if block_rows > 32 else 4,
            "num_stages": 2,
        }
    return tile | {"BLOCK_D": block_d, "DOT_DTYPE": dot_dtype(queries)}


def split_of(length: int, blocks: int, block_t: int) -> int:
    """Return the tokens of a split, whole tiles, where the rows of a head are so many blocks."""
    split = max(LEAST_TOKENS_OF_A_SPLIT, cdiv(length, max(1, MOST_SPLITS // blocks)))
    return cdiv(split, block_t) * block_t


def _sum_rows(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, in_chunk: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the base-2 logarithm of the normaliser of every row, [B * H_kv, G * M] float32, and with
    values the output.
    """
    sizes, heads, rows = _sizes(queries, keys, values)
    num_queries, length = queries.shape[2], keys.shape[2]
    tile = tile_of(queries, rows, sizes.value_dim)
    blocks = cdiv(rows, tile["BLOCK_ROWS"])
    # an output is not added up from splits
    split = split_of(length, blocks, tile["BLOCK_T"]) if values is None else length
    splits = cdiv(length, split)
    logs = floats(queries, heads, splits, rows)
    output = outputs(queries, *queries.shape[:3], sizes.value_dim)
    launch(sum_rows, (heads * blocks * splits,))(
        strided(queries), strided(keys), None if values is None else strided(values), logs, output,
        num_queries, length, split, sizes,
        IN_CHUNK=in_chunk, BLOCK_DV=padded(sizes.value_dim), **tile,
    )  # fmt: skip
    if splits == 1:
        return logs, output
    merged = floats(queries, heads, rows)
    launch(merge_splits, (heads * cdiv(rows, 32),))(
        logs, merged, rows, splits, MOST_SPLITS=MOST_SPLITS, BLOCK_ROWS=32, num_warps=4
    )
    return merged, output


def _sum_columns(
    queries: torch.Tensor, keys: torch.Tensor, logs: torch.Tensor, tokens: int = 0, in_chunk: bool = False
) -> torch.Tensor:
    """Return the sum of every column of the attention, mean over the group, [B, H_kv, T] float32; with
    `tokens` the largest number of each of so many columns.
    """
    sizes, heads, rows = _sizes(queries, keys)
    tile = tile_of(queries, rows)
    if on_tensor_cores(queries):
        wide = tile["BLOCK_D"] > 128
        tile |= {
            "BLOCK_T": 64 if wide else 128,
            "BLOCK_ROWS": min(32 if wide else 64, padded(rows)),
            "num_warps": 4 if wide else 8,
        }
    columns = tokens or keys.shape[2]
    scores = floats(queries, *keys.shape[:2], columns)
    launch(sum_columns, (heads * cdiv(columns, tile["BLOCK_T"]),))(
        strided(queries), strided(keys), logs, scores, queries.shape[2], keys.shape[2], columns, sizes,
        LARGEST=tokens > 0, IN_CHUNK=in_chunk, **tile,
    )  # fmt: skip
    return scores


@triton.jit
def load_rows(queries, head, row, num_queries, sizes, BLOCK_D: tl.constexpr):
    """Load rows of a KV head as float32 [rows, BLOCK_D]: row
    r is query r // group of head r % group of the group.
    """
    num_kv_heads, group, head_dim, _ = sizes
    query_head = (head % num_kv_heads) * group + row % group
    offsets = (head // num_kv_heads) * queries.stride_b + query_head * queries.stride_h
    offsets += (row // group).to(tl.int64) * queries.stride_t
    channels = tl.arange(0, BLOCK_D)
    inside = (row < group * num_queries)[:, None] & (channels < head_dim)[None, :]
    return tl.load(queries.ptr + offsets[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def scale_of(head_dim, IN_CHUNK: tl.constexpr):
    """The factor of a product of query and key, whose logit is in powers of two."""
    # a constant 1 has no `to`
    root = tl.sqrt_rn(tl.cast(head_dim, tl.float32))
    return LOG2_E if IN_CHUNK else tl.div_rn(LOG2_E, root)


@triton.jit
def row_logits(query, key, token, last, scale):
    """Logits of rows by keys: -inf for the tokens after the last one that a row sees."""
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    return tl.where(token[None, :] <= last[:, None], logits, float("-inf"))


@triton.jit(do_not_specialize=["num_queries", "length", "split"])
def sum_rows(
    queries, keys, values, logs_ptr, output_ptr, num_queries, length, split, sizes,
    IN_CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """logs[head, split, row] = log2 of the normaliser over a split, -inf where nothing is seen; with values
    the output of the row too.

    Grid: heads * blocks of rows * splits.
    """
    num_kv_heads, group, head_dim, value_dim = sizes
    ATTEND: tl.constexpr = values is not None
    program = tl.program_id(0).to(tl.int64)
    rows, splits = group * num_queries, 1 if ATTEND else tl.cdiv(length, split)
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    head, part = program // (blocks * splits), (program % splits).to(tl.int32)
    block = (blocks - 1 - program // splits % blocks).to(tl.int32)  # the last rows see most
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    before = length - (1 if IN_CHUNK else num_queries)  # the last token that the first query sees
    last = before + row // group
    query = load_rows(queries, head, row, num_queries, sizes, BLOCK_D).to(DOT_DTYPE)
    own_keys = head_of(keys, head, num_kv_heads)
    if ATTEND:
        own_values = head_of(values, head, num_kv_heads)
    channels = tl.arange(0, BLOCK_DV)
    end = tl.minimum(
        tl.minimum((part + 1) * split, length),
        before + ((block + 1) * BLOCK_ROWS - 1) // group + 1,
    )
    highest = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    output = tl.zeros([BLOCK_ROWS, BLOCK_DV], dtype=tl.float32)
    for start in range(part * split, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        key = load_tile(own_keys, token, tl.arange(0, BLOCK_D), token < length, head_dim).to(DOT_DTYPE)
        logits = row_logits(query, key, token, tl.minimum(last, end - 1), scale_of(head_dim, IN_CHUNK))
        highest, mass, weights, shrink = absorb(highest, mass, logits)
        if ATTEND:
            value = load_tile(own_values, token, channels, token < length, value_dim).to(DOT_DTYPE)
            output = output * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), value, input_precision="ieee")
    logs = highest + tl.log2(tl.where(mass == 0, 1.0, mass))
    tl.store(logs_ptr + (head * splits + part) * rows + row, logs, mask=row < rows)
    if ATTEND:
        # int64, as `head` is
        target = ((head * group + row % group) * num_queries + row // group) * value_dim
        inside = (row < rows)[:, None] & (channels < value_dim)[None, :]
        tl.store(output_ptr + target[:, None] + channels[None, :], output / mass[:, None], mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_splits(logs_ptr, merged_ptr, rows, splits, MOST_SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """merged[head, row] = log2 of the sum over the splits of 2^logs[head, split, row]. Grid: heads *
    blocks of rows.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    head, row = program // blocks, program % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.arange(0, MOST_SPLITS)
    inside = (part < splits)[:, None] & (row < rows)[None, :]
    logs = tl.load(
        logs_ptr + (head * splits + part)[:, None] * rows + row[None, :], mask=inside, other=float("-inf")
    )
    highest = tl.max(logs, axis=0)
    shift = tl.where(row < rows, highest, 0.0)
    mass = tl.sum(tl.exp2(logs - shift[None, :]), axis=0)
    tl.store(
        merged_ptr + head * rows + row, shift + tl.log2(tl.where(row < rows, mass, 1.0)), mask=row < rows
    )


@triton.jit(do_not_specialize=["num_queries", "length", "columns"])
def sum_columns(
    queries, keys, logs_ptr, scores_ptr, num_queries, length, columns, sizes,
    LARGEST: tl.constexpr, IN_CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """scores[head, token] = (1/G) sum over the rows that see the token of 2^(logit - log); LARGEST: the
    largest of these numbers. Grid: heads * blocks of the first `columns` keys.
    """
    num_kv_heads, group, head_dim, _ = sizes
    program = tl.program_id(0).to(tl.int64)
    rows, blocks = group * num_queries, tl.cdiv(columns, BLOCK_T)
    head, block = program // blocks, (program % blocks).to(tl.int32)  # the first keys are seen by most
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    own_keys = head_of(keys, head, num_kv_heads)
    key = load_tile(own_keys, token, tl.arange(0, BLOCK_D), token < length, head_dim).to(DOT_DTYPE)
    before = length - (1 if IN_CHUNK else num_queries)
    first = tl.maximum(block * BLOCK_T - before, 0) * group // BLOCK_ROWS * BLOCK_ROWS
    # From `whole` on, a block of rows sees every token of the block, and nothing is compared.
    whole = tl.cdiv(tl.maximum((block + 1) * BLOCK_T - 1 - before, 0) * group, BLOCK_ROWS) * BLOCK_ROWS
    received = tl.zeros([BLOCK_T], dtype=tl.float32)
    for compared in tl.static_range(2):
        for start in range(
            first if compared else whole, tl.minimum(whole, rows) if compared else rows, BLOCK_ROWS
        ):
            row = start + tl.arange(0, BLOCK_ROWS)
            query = load_rows(queries, head, row, num_queries, sizes, BLOCK_D).to(DOT_DTYPE)
            # A row that is not there has an infinite normaliser, and gives nothing.
            logs = tl.load(logs_ptr + head * rows + row, mask=row < rows, other=float("inf"))
            logits = tl.dot(key, tl.trans(query), input_precision="ieee") * scale_of(head_dim, IN_CHUNK)
            if compared:
                seen = token[:, None] <= (before + row // group)[None, :]
                logits = tl.where(seen, logits, float("-inf"))
            weights = tl.exp2(logits - logs[None, :])
            if LARGEST:
                received = tl.maximum(received, tl.max(weights, axis=1))
            else:
                received += tl.sum(weights, axis=1)
    received = received if LARGEST else received / group
    tl.store(scores_ptr + head * columns + token, received, mask=token < columns)


@triton.jit(do_not_specialize=["num_queries", "length"])
def measure_columns(
    queries, keys, logs_ptr, entropies_ptr, variances_ptr, num_queries, length, sizes,
    BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """entropies[head, tile] = the sum of -p ln p over the tokens of a tile and the rows, and variances that
    of the variance of each column of each query head. Grid: heads * tiles of the tokens before the queries.
    """
    num_kv_heads, group, head_dim, _ = sizes
    program = tl.program_id(0).to(tl.int64)
    rows, before = group * num_queries, length - num_queries
    tiles = tl.cdiv(before, BLOCK_T)
    head, token = program // tiles, (program % tiles).to(tl.int32) * BLOCK_T + tl.arange(0, BLOCK_T)
    own_keys, query_place = head_of(keys, head, num_kv_heads), tl.arange(0, BLOCK_ROWS)
    key = load_tile(own_keys, token, tl.arange(0, BLOCK_D), token < before, head_dim).to(DOT_DTYPE)
    inside = (token < before)[:, None] & (query_place < num_queries)[None, :]
    entropy = tl.zeros([BLOCK_T], dtype=tl.float32)
    variance = tl.zeros([BLOCK_T], dtype=tl.float32)
    for member in range(group):
        row = query_place * group + member
        query = load_rows(queries, head, row, num_queries, sizes, BLOCK_D).to(DOT_DTYPE)
        logs = tl.load(logs_ptr + head * rows + row, mask=row < rows, other=0.0)
        logits = tl.dot(key, tl.trans(query), input_precision="ieee") * scale_of(head_dim, False)
        information = logs[None, :] - logits
        weights = tl.where(inside, tl.exp2(-information), 0.0)
        entropy += tl.sum(tl.where(inside, weights * information, 0.0), axis=1)
        distance = tl.where(inside, weights - (tl.sum(weights, axis=1) / num_queries)[:, None], 0.0)
        variance += tl.sum(distance * distance, axis=1)
    tl.store(entropies_ptr + program, tl.sum(entropy, axis=0) * LN_2)
    tl.store(variances_ptr + program, tl.sum(variance, axis=0) / tl.maximum(num_queries - 1, 1))


def _launch(dtype: torch.dtype, head_dim: int, window: int) -> None:
    keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    queries = torch.empty((2, 32, window or 4096, head_dim), dtype=dtype, device="meta")
    score(queries, keys)
    measure_window(queries[:, :, -64:], keys)  # the longest window that `optimized.cake` asks for
    if not window:
        attend_and_score(queries, keys, keys)
        score_replay(keys, queries, keys)
        score_chunks(queries, keys, 256)


CONFIGURATIONS = configurations(
    _launch,
    *({"head_dim": head_dim, "window": window} for head_dim in HEAD_DIMS for window in (0, 32, 1)),
    tensor_cores=["sum_rows", "sum_columns", "measure_columns"],
    scalar=["merge_splits"],
)
