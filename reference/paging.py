r"""A cache in pages, and its compaction in place: what a serving engine does once it has chosen
which tokens to keep (requirements PAGE-1 to PAGE-10).

    pool, before    A0 A1 A2 | B0 B1 B2 | A3 A4 --      pages 0, 1, 2 of three tokens
    pages of A      0, 2                                kept: A1, A3, A4
    pool, after     A1 A3 A4 | B0 B1 B2 | -- -- --      page 2 is free; A still counts 5 tokens

A page holds the tokens of one sequence, with all of its KV heads. Each head is compacted on its own,
so its physical length is its own; a page is free when no head needs it. Where each head has pages of
its own, it counts as a sequence with one head. Layers that share a block table count as more heads.
"""

import numpy as np

from .attention import attend
from .cache import CompressedCache, PagedCache
from .checks import require_between
from .contract import Mask, Open, Real, Setting, State, Whole, contract


@contract
def compact_pages(
    paged: State[PagedCache, ""], kept: Mask[np.ndarray, "B H_kv n*S"]
) -> tuple[State[PagedCache, ""], Mask[np.ndarray, "P"]]:
    r"""PAGE-4..10: move the kept tokens of each head, in their order, to the first places of its
    sequence, and name the pages that are free now.

    Args: kept, True = keep, by place; beyond a head's length it is not read. A head may keep all of
    its tokens or none.

    Returns the cache (other pools, physical lengths, the same logical lengths) and freed: the pages that
    were held before and are no more. Raises ValueError where a length or a page is out of range, or a
    page is held twice: prefixes that are shared have to be copied first, since the tokens of one sequence
    would be written over those of the other.
    """
    _require_own_pages(paged)
    kept = kept & _filled(paged)
    item, head, place = np.nonzero(kept)
    target = (np.cumsum(kept, axis=-1) - 1)[kept]
    source, destination = ((*_where(paged, item, each), head) for each in (place, target))
    pools = [pool.copy() for pool in paged[:3]]
    for pool in pools:
        # All is read before anything is written. Token by token it has to be done from the front: no
        # token moves backwards, so that what is written over has been read.
        pool[destination] = pool[source]
    lengths = kept.sum(axis=-1)
    freed = np.zeros(len(paged.keys), dtype=bool)
    freed[paged.block_table[_held(paged) & ~_held(paged._replace(lengths=lengths))]] = True
    return PagedCache(
        pools[0], pools[1], pools[2], paged.block_table.copy(), lengths, paged.seen.copy()
    ), freed


@contract
def slot_mapping(
    paged: State[PagedCache, ""], count: Setting[int, ">= 1"]
) -> Whole[np.ndarray, "B H_kv count"]:
    r"""PAGE-1: the slots of the next `count` tokens: place i of a sequence is in slot
    `block_table[i // S] * S + i % S`, and a head's next token takes the place of its physical length.

    Raises ValueError where the block table has too few pages.
    """
    size = paged.keys.shape[1]
    places = paged.lengths[..., None] + np.arange(count)
    require_between("paged.lengths", places + 1, 0, paged.block_table.shape[1] * size)
    page, offset = _where(paged, np.arange(len(places))[:, None, None], places)
    return page * size + offset


@contract
def gather_pages(paged: State[PagedCache, ""]) -> State[CompressedCache, ""]:
    r"""PAGE-2: the tokens of the pages, head by head in the order of their places, and nothing else.

    Raises ValueError where the block table has fewer places than a length.
    """
    item, head, place = np.nonzero(_filled(paged))
    page, offset = _where(paged, item, place)
    keys, values, positions = (pool[page, offset, head] for pool in paged[:3])
    return CompressedCache(keys, values, positions, paged.lengths.copy())


@contract
def attend_pages(
    queries: Real[np.ndarray, "B H_q M D"], paged: State[PagedCache, ""]
) -> tuple[Real[np.ndarray, "B H_q M D_v"], Open[np.ndarray, "B H_q M"]]:
    r"""PAGE-3: attention over the tokens of the pages; returns and raises as `attention.attend`."""
    return attend(queries, gather_pages(paged))


def _where(paged: PagedCache, item: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """PAGE-1: the page and the offset in it of a place of a sequence."""
    size = paged.keys.shape[1]
    return paged.block_table[item, place // size], place % size


def _filled(paged: PagedCache) -> np.ndarray:
    """The places that hold a token, [B, H_kv, n * S]."""
    room = paged.block_table.shape[1] * paged.keys.shape[1]
    require_between("paged.lengths", paged.lengths, 0, room)
    return np.arange(room) < paged.lengths[..., None]


def _held(paged: PagedCache) -> np.ndarray:
    """The entries of the block table that are pages of a sequence, [B, n]: those of its longest head."""
    pages = -(-paged.lengths.max(axis=-1) // paged.keys.shape[1])
    return np.arange(paged.block_table.shape[1]) < pages[:, None]


def _require_own_pages(paged: PagedCache) -> None:
    """PAGE-10: raise ValueError unless every page is one of the pool and is held once."""
    held = paged.block_table[_held(paged)]
    require_between("paged.block_table", held, 0, len(paged.keys) - 1)
    if len(np.unique(held)) < len(held):
        raise ValueError(f"paged.block_table: got pages {np.sort(held)}, wanted each of them once")
