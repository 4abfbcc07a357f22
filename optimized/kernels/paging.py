r"""Compaction of a cache in pages, in place: the kept tokens
of each head move to its first places (PAGE-4 to PAGE-6).

It equals, in torch, for one head of one sequence with its slots in order, `rows = pool.view(-1, D)[slots]`:

    rows[: kept.sum()] = rows[kept]

No second copy of the pool is made, so that a token could be written over one that nobody has read. Three
facts exclude it. A head is one program, which alone touches its slots; other heads of a page are other
channels of it. A token never moves backwards: the place of its rank among the kept ones is at most its own
place. The program walks the places from the front, tile by tile, so whatever a tile writes lies before the
end of that tile, where no later tile reads. Within a tile threads do not run in step: one could store before
another has loaded. So each tile is loaded, keys, values and positions, then all threads wait for one another,
and then it is stored.

Tokens whose place does not change are neither read nor written: a prefix that is kept whole costs only its
part of the mask. The pools may have any strides, so that [P, S, H_kv, D] may be a view of pages with the
heads first, or of one buffer for K and V.
"""

import torch
import triton
import triton.language as tl

from ..states import PagedCache
from .compiling import HEAD_DIMS, configurations
from .launching import launch, launcher, padded
from .strided import pages, row_of_slot

ELEMENTS_OF_A_TILE = 4096


@launcher
def compact(paged: PagedCache, kept: torch.Tensor) -> torch.Tensor:
    """Move the kept tokens inside the pools of `paged`; return the new lengths [B, H_kv]. kept [B, H_kv, n
    * S].
    """
    (batch, num_heads), (_, page_size, _, head_dim), value_dim = (
        paged.lengths.shape,
        paged.keys.shape,
        paged.values.shape[-1],
    )
    pools = (pages(paged.keys), pages(paged.values), pages(paged.positions[..., None]))
    table, lengths = paged.block_table.contiguous(), paged.lengths.contiguous()
    found, block_d, block_dv = torch.empty_like(lengths), padded(head_dim), padded(value_dim)
    launch(compact_heads, (batch * num_heads,))(
        *pools, kept.contiguous(), table, lengths, found, num_heads, table.shape[1], head_dim, value_dim,
        PAGE=page_size,
        BLOCK_T=min(64, ELEMENTS_OF_A_TILE // max(block_d, block_dv)), BLOCK_D=block_d, BLOCK_DV=block_dv,
        num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["columns"])
def compact_heads(
    keys, values, positions, kept_ptr, block_table_ptr, lengths_ptr, found_ptr, num_heads, columns, head_dim,
    value_dim,
    PAGE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Move the kept tokens of one head to its first places. Grid: sequences * heads."""
    program = tl.program_id(0).to(tl.int64)
    item, head = program // num_heads, program % num_heads
    length = tl.load(lengths_ptr + program).to(tl.int32)
    table = block_table_ptr + item * columns
    channels, value_channels = (
        tl.arange(0, BLOCK_D).to(tl.int64)[None, :],
        tl.arange(0, BLOCK_DV).to(tl.int64)[None, :],
    )
    count = tl.zeros([], dtype=tl.int32)
    for start in range(0, length, BLOCK_T):
        # [BLOCK_T]
        places = start + tl.arange(0, BLOCK_T)
        kept = tl.load(kept_ptr + program * columns * PAGE + places, mask=places < length, other=0) != 0
        targets = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        count += tl.sum(kept.to(tl.int32), axis=0)
        moved = kept & (targets < places)
        page = tl.load(table + places // PAGE, mask=moved, other=0)
        new_page = tl.load(table + targets // PAGE, mask=moved, other=0)
        offset, new_offset = places % PAGE, targets % PAGE
        # [BLOCK_T, channels]
        inside = moved[:, None] & (channels < head_dim)
        inside_values = moved[:, None] & (value_channels < value_dim)
        key = tl.load(slots(keys, page, offset, head) + channels * keys.stride_d, mask=inside, other=0.0)
        value = tl.load(
            slots(values, page, offset, head) + value_channels * values.stride_d,
            mask=inside_values,
            other=0.0,
        )
        position = tl.load(slots(positions, page, offset, head), mask=moved[:, None], other=0)
        tl.debug_barrier()  # no thread stores before every thread has loaded
        tl.store(slots(keys, new_page, new_offset, head) + channels * keys.stride_d, key, mask=inside)
        tl.store(
            slots(values, new_page, new_offset, head) + value_channels * values.stride_d,
            value,
            mask=inside_values,
        )
        tl.store(slots(positions, new_page, new_offset, head), position, mask=moved[:, None])
    tl.store(found_ptr + program, count)


@triton.jit
def slots(pool, page, offset, head):
    """Where the slots of a head begin in a pool
    [P, S, H_kv, ..]: page and offset [n] give pointers [n, 1].
    """
    return pool.ptr + (row_of_slot(pool, page, offset, head) * pool.stride_t)[:, None]


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    pool = torch.empty((8192, 16, 8, head_dim), dtype=dtype, device="meta")
    whole = torch.empty((8192, 16, 8), dtype=torch.int64, device="meta")
    table = torch.empty((32, 256), dtype=torch.int32, device="meta")
    lengths = torch.empty((32, 8), dtype=torch.int64, device="meta")
    compact(
        PagedCache(pool, pool, whole, table, lengths, lengths[:, 0]),
        lengths.new_empty(32, 8, 4096, dtype=torch.bool),
    )


CONFIGURATIONS = configurations(_launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS))
