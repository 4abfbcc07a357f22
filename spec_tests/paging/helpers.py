"""Caches in pages, made and read token by token: what the laws of paging and their variants share."""

from collections.abc import Iterator

import numpy as np

from evictionary.reference.cache import PagedCache
from evictionary.spec_tests.shared.helpers import draw_mask

SIZES = (1, 2, 3, 4, 16)


def slots_of(paged: PagedCache, item: int) -> list[tuple[int, int]]:
    """The slots of a sequence, page and offset, in the order of its places."""
    return [(page, offset) for page in paged.block_table[item] for offset in range(paged.keys.shape[1])]


def pages_of(paged: PagedCache, item: int, lengths: np.ndarray) -> list[int]:
    """The pages in which a sequence holds a token, in
    their order, if its heads have these lengths [B, H_kv].
    """
    return list(dict.fromkeys(page for page, _ in slots_of(paged, item)[: lengths[item].max()]))


def held(paged: PagedCache, pool: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """What a pool holds for each head of each sequence, read slot by slot: [length, ..]."""
    for item, head in np.ndindex(lengths.shape):
        rows = [pool[slot][head] for slot in slots_of(paged, item)[: lengths[item, head]]]
        yield np.array(rows).reshape(len(rows), *pool.shape[3:])


def in_pages(case, seed: int, least: int = 0) -> PagedCache:
    """The tokens of a case in pages that lie in any order, of heads that hold `least` tokens or more.

    A slot without a token holds NaN, or at every other seed a number, as memory
    that was used does: who reads it then gets wrong numbers and no error. Two pages
    are nobody's, and behind the last page of a sequence stands any page.
    """
    generator = np.random.default_rng(seed)
    batch, heads, length = case.keys.shape[:3]
    size = int(generator.choice(SIZES))
    lengths = generator.integers(least, length + 1, size=(batch, heads))
    table = generator.permutation(batch * (length // size + 2) + 2)[:-2].reshape(batch, -1)
    positions = np.sort(
        generator.permuted(np.tile(np.arange(2 * length), (batch, heads, 1)), axis=-1)[..., :length]
    )
    shape = (table.size + 2, size, heads)
    left = 3.0 if seed % 2 else np.nan
    pools = [np.full(shape + states.shape[3:], left) for states in (case.keys, case.values)] + [
        np.zeros(shape, dtype=np.int64)
    ]
    paged = PagedCache(pools[0], pools[1], pools[2], table, lengths, np.full(batch, 2 * length))
    for item, head in np.ndindex(lengths.shape):
        for place, (page, offset) in enumerate(slots_of(paged, item)[: lengths[item, head]]):
            for pool, states in zip(pools, (case.keys, case.values, positions), strict=True):
                pool[page, offset, head] = states[item, head, place]
        table[item, len(pages_of(paged, item, lengths)) :] = generator.integers(0, len(pools[0]))
    return paged


def drawn(case, seed: int, least: int = 0) -> tuple[PagedCache, np.ndarray]:
    """A case in pages, and a mask over all places of the block table, beyond the lengths too; each head
    keeps `least` or more.
    """
    paged = in_pages(case, seed, least)
    kept = draw_mask((*paged.lengths.shape, paged.block_table.shape[1] * paged.keys.shape[1]), seed)
    kept[..., :least] = True
    return paged, kept


def of_places(paged: PagedCache, kept: np.ndarray) -> list[np.ndarray]:
    """The mask of each head over the tokens that it holds."""
    return [kept[place][: paged.lengths[place]] for place in np.ndindex(paged.lengths.shape)]


def counts_of(paged: PagedCache, kept: np.ndarray) -> np.ndarray:
    """The tokens that each head keeps, [B, H_kv]."""
    return np.array([mask.sum() for mask in of_places(paged, kept)]).reshape(paged.lengths.shape)
