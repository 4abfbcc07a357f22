r"""The compressed cache: flat storage that holds the kept tokens and nothing else (requirements
CACHE-1 to CACHE-3). `paging.py` is about a cache in pages.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .contract import Mask, Memory, Real, State, Whole, contract


class CompressedCache(NamedTuple):
    """The kept tokens of every head, row after row:
    batch by batch, head by head, in position order.

    N counts the kept tokens of all heads; positions are those of the original sequence; lengths
    say how many rows each head has. Heads may differ in length (ragged).
    """

    keys: Real[np.ndarray, "N>=0 D"]
    values: Real[np.ndarray, "N>=0 D_v"]
    positions: Whole[np.ndarray, "N>=0"]
    lengths: Whole[np.ndarray, "B H_kv"]


class PagedCache(NamedTuple):
    """Pools of P pages of S tokens, and the pages of each sequence.

    positions are places in the text; a slot without a token holds anything, NaN too. block_table has
    the pages of each sequence in their order; behind its last page is any number. lengths count the
    tokens that each head holds (physical), seen those that the sequence has had (logical), which is
    the position of the next one.
    """

    keys: Memory[np.ndarray, "P S H_kv D"]
    values: Memory[np.ndarray, "P S H_kv D_v"]
    positions: Whole[np.ndarray, "P S H_kv"]
    block_table: Whole[np.ndarray, "B n"]
    lengths: Whole[np.ndarray, "B H_kv"]
    seen: Whole[np.ndarray, "B"]


@contract
def compress(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    kept: Mask[np.ndarray, "B H_kv T"],
) -> State[CompressedCache, ""]:
    r"""CACHE-1, CACHE-2: gather the kept tokens, K and V together, in position order.

    Args: kept, any number True in each head.
    """
    # Boolean indexing walks batch, head, position in that order: the order of storage is the order
    # of the loop.
    positions = np.nonzero(kept)[-1]
    return CompressedCache(keys[kept], values[kept], positions, kept.sum(axis=-1))


def heads(cache: State[CompressedCache, ""]) -> Iterator[tuple[int, int, slice]]:
    """CACHE-3: walk the flat storage: yield (batch item, KV head, slice of their rows)."""
    ends = np.cumsum(cache.lengths).reshape(cache.lengths.shape)
    for index in np.ndindex(cache.lengths.shape):
        stop = int(ends[index])
        yield index[0], index[1], slice(stop - int(cache.lengths[index]), stop)
