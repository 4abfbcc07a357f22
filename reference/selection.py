r"""Budgets and top-k selection, which every scoring method shares (requirements SEL-1 to SEL-4)."""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from .contract import Mask, Open, Real, Setting, contract


@contract
def budget(length: Setting[int, ">= 1"], compression_ratio: Setting[float | Fraction, "[0, 1)"]) -> int:
    r"""SEL-1: the number of tokens to keep, `max(1, floor(length * (1 - compression_ratio)))`.

    Args: length, tokens in the cache, at least 1;
    compression_ratio, the fraction removed, in [0, 1).
    """
    # Decision: exact decimal arithmetic and never fewer than one token; int(10 * (1 - 0.9)) would
    # be 0.
    return max(1, math.floor(length * (1 - compression_ratio)))


@contract
def top_k(
    scores: Open[np.ndarray, "... T"],
    budget: Setting[int, ">= 0"],
    protected: Mask[np.ndarray | None, "... T"] = None,
) -> Mask[np.ndarray, "... T"]:
    r"""SEL-2..4: keep the `budget` highest scores of
    each row, the protected tokens before all others.

    Returns kept, with exactly `min(budget, T)` True in each row: a budget above T keeps all. Raises
    ValueError for a row with more protected tokens than the budget.
    """
    length = scores.shape[-1]
    count = min(budget, length)
    if protected is None:
        protected = np.zeros(scores.shape, dtype=bool)
    elif (most := int(protected.sum(axis=-1).max())) > budget:
        raise ValueError(f"protected: got {most} protected tokens in a row, wanted at most {budget}")
    # Decision: of equal scores the lower position is kept. lexsort is stable and sorts by its last
    # key first: unprotected after protected, then the higher score, then (stability) the lower
    # position.
    order = np.lexsort((-np.asarray(scores, dtype=np.float64), ~protected), axis=-1)
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, order[..., :count], True, axis=-1)
    return kept


def regret(scores: Real[Any, "... T"], kept: Mask[np.ndarray, "... T"]) -> Open[np.ndarray, "..."]:
    r"""SEL-2: the loss of a selection, `sum of the |kept| highest scores - sum of the kept scores`,
    at least 0.

    Returns the regret of each row. A selection made from slightly different numbers is judged by this,
    not by comparing positions.
    """
    scores = np.asarray(scores, dtype=np.float64)
    best = -np.sort(-scores, axis=-1)
    rank = np.arange(scores.shape[-1]) < kept.sum(axis=-1, keepdims=True)
    return (best * rank).sum(axis=-1) - (scores * kept).sum(axis=-1)


def gather(rows: Real[np.ndarray, "... T D"], kept: Mask[np.ndarray, "... T"]) -> Real[np.ndarray, "... n D"]:
    """The kept rows as a block: n of each head, equally
    many. Rows may have no axis D: [..., T] gives [..., n].
    """
    return rows[kept].reshape(*kept.shape[:-1], -1, *rows.shape[kept.ndim :])
