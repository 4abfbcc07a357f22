"""Right caches in pages of other kinds: by sorting, in loops, in place from the front, in torch."""

from evictionary.reference.cache import CompressedCache, PagedCache
from evictionary.spec_tests.paging.helpers import held, pages_of, slots_of
from evictionary.spec_tests.shared.variants import *

COMPACT, ATTEND, GATHER, SLOTS = (
    "paging.compact_pages",
    "paging.attend_pages",
    "paging.gather_pages",
    "paging.slot_mapping",
)


def answered(paged, pools, lengths):
    """The compacted cache and the freed pages, page by page."""
    freed = np.zeros(len(paged.keys), dtype=bool)
    for item in range(len(lengths)):
        for page in set(pages_of(paged, item, paged.lengths)) - set(pages_of(paged, item, lengths)):
            freed[page] = True
    return PagedCache(pools[0], pools[1], pools[2], paged.block_table, lengths, paged.seen), freed


@control(COMPACT, dtypes=NUMPY)
def in_place_from_the_front(paged, kept):
    pools, lengths = [pool.copy() for pool in paged[:3]], np.zeros_like(paged.lengths)
    for item, head in np.ndindex(lengths.shape):
        slots = slots_of(paged, item)
        for place in range(paged.lengths[item, head]):
            if kept[item, head, place]:
                for pool in pools:
                    pool[slots[lengths[item, head]]][head] = pool[slots[place]][head]
                lengths[item, head] += 1
    return answered(paged, pools, lengths)


@control(COMPACT, array_library="torch", dtypes=ALL)
def by_a_stable_sort(paged, kept):
    """Kept places come first in a stable sort of the evicted
    ones; whole rows of slots are gathered and written back.
    """
    size, places = paged.keys.shape[1], torch.arange(kept.shape[-1])
    kept = kept & (places < paged.lengths[..., None])
    order = (~kept).to(torch.int8).argsort(dim=-1, stable=True)
    slots = (paged.block_table.repeat_interleave(size, dim=1) * size + places % size)[:, None].expand(
        order.shape
    )
    lengths, head = kept.sum(dim=-1), torch.arange(order.shape[1])[:, None].expand(order.shape)
    filled = places < lengths[..., None]
    pools = [pool.clone() for pool in paged[:3]]
    for pool in pools:
        flat = pool.flatten(0, 1)
        flat[slots[filled], head[filled]] = flat[slots.gather(-1, order)[filled], head[filled]]
    needs = (
        torch.arange(paged.block_table.shape[1]) * size
        < torch.stack([paged.lengths, lengths]).amax(dim=-1)[..., None]
    )
    freed = torch.zeros(len(paged.keys), dtype=torch.bool)
    freed[paged.block_table[needs[0] & ~needs[1]]] = True
    return paged._replace(**dict(zip(paged._fields, pools, strict=False)), lengths=lengths), freed


@control(SLOTS)
def slot_by_slot(paged, count):
    return np.array(
        [
            [
                [
                    page * paged.keys.shape[1] + offset
                    for page, offset in slots_of(paged, item)[length:][:count]
                ]
                for length in lengths
            ]
            for item, lengths in enumerate(paged.lengths)
        ]
    )


@control(GATHER, dtypes=NUMPY)
def slot_after_slot(paged):
    keys, values, positions = (np.concatenate(list(held(paged, pool, paged.lengths))) for pool in paged[:3])
    return CompressedCache(keys, values, positions, paged.lengths)


@control(ATTEND, array_library="torch", dtypes=("float64", "float32"))
def padded_and_masked(queries, paged):
    """The slots of each head gathered in one go, padded to the longest head, and the padding masked."""
    size, places = paged.keys.shape[1], torch.arange(paged.block_table.shape[1] * paged.keys.shape[1])
    filled = places < paged.lengths[..., None]
    rows = (paged.block_table.repeat_interleave(size, dim=1) * size + places % size)[:, None].expand(
        filled.shape
    )[filled]
    head = torch.arange(filled.shape[1])[:, None].expand(filled.shape)[filled]
    keys, values, positions = (pool.flatten(0, 1)[rows, head] for pool in paged[:3])
    return padded_storage(queries, CompressedCache(keys, values, positions, paged.lengths))
