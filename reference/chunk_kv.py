r"""ChunkKV (arXiv 2502.00299), a choice of whole chunks: neighbouring tokens stay together.

The paper's text could not be read. The definition follows `chunkkv_press.py` of NVIDIA/kvpress, commit
19a6374, head by head.
"""

import numpy as np

from .contract import Mask, Open, Setting, contract


@contract
def choose(
    scores: Open[np.ndarray, "... T"], budget: Setting[int, ">= 0"], *, chunk_size: Setting[int, ">= 1"] = 10
) -> Mask[np.ndarray, "... T"]:
    r"""CH-1, CH-3: keep whole chunks, the best first;
    of the last one that fits in part, its best tokens.

    Args: budget, 0 to any number (more than T keeps all). Each row keeps exactly `min(budget, T)` tokens.
    """
    count = min(budget, scores.shape[-1])
    chunk = np.arange(scores.shape[-1]) // chunk_size
    means = chunk_means(scores, chunk_size=chunk_size)[..., chunk]
    # lexsort is stable and sorts by its last key first: the higher mean, then the earlier chunk,
    # then the higher score, then the lower position. Decision: kvpress keeps whole chunks alone, so
    # fewer tokens than the budget, and one set for all heads.
    order = np.lexsort((-scores, np.broadcast_to(chunk, scores.shape), -means), axis=-1)
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, order[..., :count], True, axis=-1)
    return kept


@contract
def chunk_means(
    scores: Open[np.ndarray, "... T"], *, chunk_size: Setting[int, ">= 1"] = 10
) -> Open[np.ndarray, "... chunks"]:
    r"""CH-2: the mean score of each chunk of `chunk_size` tokens; the last may be shorter.

    A row has `ceil(T / chunk_size)` chunks. Source: arXiv 2502.00299, the score of a chunk. Decision: a
    chunk with a token of score infinity has that mean, whatever else is in it.
    """
    length = scores.shape[-1]
    starts = np.arange(0, length, chunk_size)
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(scores, starts, axis=-1) / np.diff(np.append(starts, length))
    return np.where(np.isnan(means), np.inf, means)
