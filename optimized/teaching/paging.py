r"""Compaction of a cache in pages to read (PAGE-4 to PAGE-10): the kept tokens of each head move to its
first places, in place.

One launch; a program moves the tokens of one head. Three facts keep a token from
being written over before it is read: no other program touches the slots of this head;
a token never moves backwards, so what a tile writes lies before all later tiles; and
within a tile all threads wait for one another between the loads and the stores.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only

BLOCK = 32  # places of a tile


@forward_only
def compact_pages(paged, kept: torch.Tensor):
    r"""PAGE-4..10: paged (`reference/cache.py`, class PagedCache) and kept [B, H_kv, n * S] give the cache
    and freed [P].
    """
    keys, values, positions = (pool.contiguous().clone() for pool in paged[:3])
    lengths, columns = (
        torch.empty_like(paged.lengths),
        torch.arange(paged.block_table.shape[1], device=kept.device),
    )
    (_, size, _, head_dim), value_dim = keys.shape, values.shape[-1]
    compact[tuple(lengths.shape)](
        keys, values, positions, kept.contiguous(), paged.block_table.contiguous(),
        paged.lengths.contiguous(), lengths,
        len(columns), size, head_dim, value_dim, BLOCK,
    )  # fmt: skip
    before, after = (
        columns * size < counts.amax(dim=-1, keepdim=True) for counts in (paged.lengths, lengths)
    )
    # one page more, for the entries that stay
    gone = torch.where(before & ~after, paged.block_table, len(keys)).long()
    freed = torch.zeros(len(keys) + 1, dtype=torch.bool, device=kept.device).scatter_(
        0, gone.flatten(), True
    )[:-1]
    return type(paged)(keys, values, positions, paged.block_table.clone(), lengths, paged.seen.clone()), freed


@triton.jit
def compact(
    keys_ptr, values_ptr, positions_ptr, kept_ptr, table_ptr, lengths_ptr, found_ptr, pages,
    SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the kept tokens of one head to its first places, and count them. Grid: sequences, heads."""
    item, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    table, program = table_ptr + item * pages, item * num_heads + head
    length, count = tl.load(lengths_ptr + program), 0
    for start in range(0, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        kept = tl.load(kept_ptr + program * pages * SIZE + places, mask=places < length, other=0).to(tl.int32)
        targets = count + tl.cumsum(kept, axis=0) - 1  # at most `places`
        sources, targets = (
            slots(table, places, kept, num_heads, head, SIZE),
            slots(table, targets, kept, num_heads, head, SIZE),
        )
        inside = kept[:, None] != 0
        key = tl.load(keys_ptr + sources * D + tl.arange(0, D)[None, :], mask=inside, other=0.0)
        value = tl.load(values_ptr + sources * DV + tl.arange(0, DV)[None, :], mask=inside, other=0.0)
        position = tl.load(positions_ptr + sources, mask=inside, other=0)
        tl.debug_barrier()  # no thread stores before every thread has loaded
        tl.store(keys_ptr + targets * D + tl.arange(0, D)[None, :], key, mask=inside)
        tl.store(values_ptr + targets * DV + tl.arange(0, DV)[None, :], value, mask=inside)
        tl.store(positions_ptr + targets, position, mask=inside)
        count += tl.sum(kept, axis=0)
    tl.store(found_ptr + program, count)


@triton.jit
def slots(table, places, kept, num_heads, head, SIZE: tl.constexpr):
    """PAGE-1: the rows of a pool that hold these places of a head, [BLOCK, 1]."""
    page = tl.load(table + places // SIZE, mask=kept != 0, other=0).to(tl.int64)
    return ((page * SIZE + places % SIZE) * num_heads + head)[:, None]
