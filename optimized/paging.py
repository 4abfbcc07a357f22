r"""A cache in pages, and its compaction in place: what an engine does once it has chosen what to keep
(PAGE-1 to PAGE-10).
"""

import torch

from . import gradients, kernels
from .attention import attend
from .checks import fits, require_finite, require_fit, require_same_kind
from .operators import operator
from .states import CompressedCache, PagedCache

__all__ = ["PagedCache", "attend_pages", "compact_in_place", "compact_pages", "gather_pages", "slot_mapping"]


@operator("paged.keys", "paged.values", "paged.positions", "paged.block_table", None, "paged.seen", None)
@fits()
def compact_pages(paged: PagedCache, kept: torch.Tensor) -> tuple[PagedCache, torch.Tensor]:
    r"""PAGE-4..10: move the kept tokens of each head to its first places, and name the pages that are free
    now, in other memory.

    Args, result and errors are those of `compact_in_place`; the given pools stay as they are.
    """
    return _compact(PagedCache(*(part.clone() for part in paged)), kept)


def compact_in_place(paged: PagedCache, kept: torch.Tensor) -> tuple[PagedCache, torch.Tensor]:
    r"""PAGE-4..10: `compact_pages` inside the pools of `paged`, without memory for a second copy on a GPU.

    Args: paged, see PagedCache, whose keys, values and positions are written; kept [B, H_kv, n * S], boolean,
    True = keep, by place; beyond a head's length it is not read. A head may keep all of its tokens or none.
    Returns the cache, with the pools that were given and new physical lengths, and freed [P], boolean: the
    pages that held a token and hold none now. Nothing waits for the device. Raises ValueError where shapes or
    devices disagree; on a CPU also where a length or a page is out of range or a page is held twice: a prefix
    that sequences share has to be copied first.
    """
    require_fit("paging.compact_pages", paged, kept)
    gradients.require_unwanted(
        "paging.compact_in_place", "writes into the pools, as compact_pages does not", paged=paged
    )
    return _compact(paged, kept)


def _compact(paged: PagedCache, kept: torch.Tensor) -> tuple[PagedCache, torch.Tensor]:
    """`compact_in_place` of arguments that fit."""
    held, filled = _held(paged, paged.lengths), _filled(paged)
    _require_own_pages(paged, held)
    if kernels.take("paging", paged.keys, paged.values):
        lengths = kernels.paging.compact(paged, kept)
    else:
        kept = kept & filled
        lengths = kept.sum(dim=-1)
        item, head, place = kept.nonzero(as_tuple=True)
        target = (kept.cumsum(dim=-1) - 1)[kept]
        (page, offset), (new_page, new_offset) = _where(paged, item, place), _where(paged, item, target)
        for pool in paged[:3]:
            # the right side is a copy: all is read before
            pool[new_page, new_offset, head] = pool[page, offset, head]
    pages = len(paged.keys)
    gone = torch.where(held & ~_held(paged, lengths), paged.block_table, pages).long()
    freed = torch.zeros(pages + 1, dtype=torch.bool, device=gone.device).scatter_(0, gone.flatten(), True)
    return paged._replace(lengths=lengths), freed[:pages]


@operator()
@fits()
def slot_mapping(paged: PagedCache, count: int) -> torch.Tensor:
    r"""PAGE-1: the slots `page * S + offset` of the next `count` tokens of each head, behind its physical
    length, [B, H_kv, count].

    Raises ValueError as `compact_in_place`, and on a CPU where the block table has too few pages.
    """
    places = paged.lengths[..., None] + torch.arange(count, device=paged.lengths.device)
    _require_room(paged, count)
    page, offset = _where(paged, torch.arange(len(places), device=places.device)[:, None, None], places)
    return page * paged.keys.shape[1] + offset


@operator("paged.keys", "paged.values", "paged.positions", None)
@fits()
def gather_pages(paged: PagedCache) -> CompressedCache:
    r"""PAGE-2: the tokens of the pages, head by head in the order of their places, and nothing else.

    Raises ValueError as `compact_in_place`, and on a CPU
    where the block table has fewer places than a length.
    """
    item, head, place = _filled(paged).nonzero(as_tuple=True)
    page, offset = _where(paged, item, place)
    keys, values, positions = (pool[page, offset, head] for pool in paged[:3])
    return CompressedCache(keys, values, positions, paged.lengths.clone())


@operator("paged.values", None)
@fits(finite=False)
def attend_pages(queries: torch.Tensor, paged: PagedCache) -> tuple[torch.Tensor, torch.Tensor]:
    r"""PAGE-3: `attention.attend` over the tokens of the pages. On a GPU they are read in place; on a CPU
    they are gathered first.

    Args: queries, all later than the cache; paged, see PagedCache. Returns and raises as `attention.attend`.
    """
    require_finite("queries", queries)
    require_same_kind("paged.keys", paged.keys, "queries", queries)
    if kernels.take("attention", queries, paged.values, beside=paged):
        # whoever calls may have a tuple of another class
        return kernels.attention.attend(queries, PagedCache(*paged))
    return attend(queries, gather_pages(paged))


def _where(paged: PagedCache, item: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """PAGE-1: the page and the offset in it of a place of a sequence."""
    size = paged.keys.shape[1]
    return paged.block_table[item, place // size].long(), place % size


def _filled(paged: PagedCache) -> torch.Tensor:
    """The places that hold a token, [B, H_kv, n * S]."""
    _require_room(paged)
    places = torch.arange(paged.block_table.shape[1] * paged.keys.shape[1], device=paged.lengths.device)
    return places < paged.lengths[..., None]


def _held(paged: PagedCache, lengths: torch.Tensor) -> torch.Tensor:
    """The entries of the block table that are pages of a sequence with these lengths, [B, n]."""
    columns = torch.arange(paged.block_table.shape[1], device=lengths.device)
    return columns * paged.keys.shape[1] < lengths.amax(dim=-1, keepdim=True)


def _require_room(paged: PagedCache, more: int = 0) -> None:
    """Raise ValueError, on a CPU, unless the block table has places for so many more tokens of each head."""
    room = paged.block_table.shape[1] * paged.keys.shape[1]
    if paged.lengths.device.type == "cpu" and int(paged.lengths.max()) + more > room:
        raise ValueError(
            f"paged.lengths: got up to {int(paged.lengths.max())} and {more} more, wanted at most {room} "
            "tokens"
        )


def _require_own_pages(paged: PagedCache, held: torch.Tensor) -> None:
    """PAGE-10: raise ValueError, on a CPU, unless every page is one of the pool and is held once."""
    if held.device.type == "cpu":
        pages = paged.block_table[held]
        if (pages >= len(paged.keys)).any() or len(pages.unique()) < len(pages):
            raise ValueError(
                f"paged.block_table: got {pages.tolist()}, wanted pages below {len(paged.keys)}, each of "
                "them once"
            )
