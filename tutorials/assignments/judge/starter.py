"""A judge at real sizes: rows of scores on which a wrong top-k keeps other tokens than a right one. NumPy
alone is needed.

A row is (scores, budget) or (scores, budget, protected): scores [T], floats without NaN; budget, from 1 to T;
protected [T], boolean, the tokens that stay whatever their scores. A right top-k keeps the `budget` highest
scores, of equal ones those at lower positions.
"""

import numpy as np

Row = tuple[np.ndarray, int] | tuple[np.ndarray, int, np.ndarray]


def lost_ties() -> Row:
    """At most 2,048 tokens; wrong here: a stash of 1,024 entries for the scores equal to the threshold."""
    raise NotImplementedError


def crowded_bin() -> Row:
    """At most 4,096 tokens; wrong here: of more than 2,048 scores that are one float16 the first are kept."""
    raise NotImplementedError


def padded_lanes() -> Row:
    """At most 2,048 tokens; wrong here: zeros fill the row up to whole tiles of 1,024, and compete."""
    raise NotImplementedError


def lost_candidates() -> Row:
    """At most 40,000 tokens; wrong here: a list of 32,768 candidates."""
    raise NotImplementedError


def wrapped_positions() -> Row:
    """At most 70,000 tokens; wrong here: positions in 16 bits. The list of 32,768 candidates shows on such
    a row too.
    """
    raise NotImplementedError


def counted_ties() -> Row:
    """At most 70,000 tokens; wrong here: the scores equal to the threshold counted in 16 bits."""
    raise NotImplementedError


def clamped_scores() -> Row:
    """At most 16 tokens; wrong here: scores below -65,504 are taken for it."""
    raise NotImplementedError


def protected_blocks() -> Row:
    """At most 5,000 tokens; wrong here: `protected` is read for the first 256 blocks of 16 tokens, then
    again from the start.
    """
    raise NotImplementedError


def rows(seed: int) -> list[Row]:
    """The rows of a judge, drawn with the seed, at most 262,144 scores altogether: every mistake shows on
    one of them.
    """
    raise NotImplementedError
