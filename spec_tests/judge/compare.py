"""The verbs of a law. Each knows what the arithmetic of
the dtype under test may be wrong by (`tolerance.py`).

`agrees`: an answer is the oracle's. `same`: two answers of the implementation are related as the law says,
whatever its numbers are. `equal`, `rounds_to`, `near`: numbers are those of another way, to the
last bit, but for roundings, or but for a slack that is given. `lies`: numbers lie between two. `selects`: a
selection is a right one. `refused`: a call raises. `require`: anything else holds. The body of a law computes
with no epsilon: these verbs do, and functions that say in words what an error comes from.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from evictionary.spec_tests.judge.arithmetic import EPSILON
from evictionary.spec_tests.judge.by_hand import angle_error, heads_alone, rounding
from evictionary.spec_tests.judge.implementation import Implementation
from evictionary.spec_tests.judge.tolerance import (
    Allowance,
    Unlike,
    Violation,
    note,
    require_mask,
    require_numbers,
)

# Where somebody listens: the largest share of its slack that each comparison without an Allowance used.
LISTENERS: list[list[float]] = []


def tell(error: Any, slack: Any) -> None:
    """Tell the listeners which share of the slack an error
    is; both are one number or an array.
    """
    if LISTENERS:
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(np.asarray(error) > 0, np.divide(error, slack), 0.0)
        for listener in LISTENERS:
            listener.append(float(np.max(shares, initial=0)))


def require(holds: Any, message: str, expected: Any = None, got: Any = None) -> None:
    """Raise Violation with this message, and with what is expected and what was got, unless the first
    argument is true.
    """
    if not holds:
        raise Violation(message, expected, got)


def equal(got: Any, expected: Any, message: str) -> None:
    """Raise Violation with this message unless `got` has the shape and numbers of `expected`; one number
    stands for all.

    Where a mask is expected, `got` has to be one.
    """
    if np.ndim(expected) and np.asarray(expected).dtype == np.bool_:
        require_mask(got, np.shape(expected), "the selection")
    wanted = np.broadcast_to(expected, np.shape(got)) if np.ndim(expected) == 0 else expected
    require(np.array_equal(got, wanted), message, expected, got)


def near(got: Any, expected: np.ndarray, slack: float | np.ndarray | Allowance, what: str) -> None:
    """Raise Violation unless `got` has the shape of `expected` and differs nowhere by more than `slack`,
    one number or an array.

    An Allowance is that of the oracle: numbers computed in
    loops, which round differently, may be twice as far away.
    """
    require_numbers(got, expected.shape, what)
    with np.errstate(invalid="ignore"):
        apart = np.where(got == expected, 0, np.abs(got - expected))
    note((lambda: slack.mean) if isinstance(slack, Allowance) else slack, expected)
    if isinstance(slack, Allowance):
        largest, size = float(apart.max(initial=0)), max(1.0, float(np.abs(expected).max(initial=0)))
        require(
            slack.covers((largest - 1e-12 * size) / 2, 0),
            f"{what} differs from the loops by {largest:.3g}",
            expected,
            got,
        )
        return
    tell(apart, slack)
    if not (apart <= slack).all():
        raise Violation(
            f"{what} differs by {np.nanmax(apart):.3g}; allowed is {np.max(slack):.3g}", expected, got
        )


def rounds_to(
    impl: Implementation,
    got: Any,
    expected: Any,
    what: str,
    *,
    roundings: float = 1,
    terms: int = 1,
    size: Any = 1.0,
    angle: Any = 0,
    beside: Any = 0.0,
) -> None:
    """Raise Violation unless `got` has the numbers of `expected`, found by another way, but for rounding.

    roundings: how often a number of this size is rounded. terms: each is the sum of so many. angle: up to
    which position RoPE turns it. beside: what else it may be wrong by. Size, angle and beside are one number
    or an array.
    """
    least = 2.0**-23 if impl.dtype == "float16" else 1e-30  # below it numbers lose their digits
    slack = (roundings * rounding(impl, terms) + angle_error(impl, angle)) * size + beside + least
    near(got, np.asarray(expected), slack, what)


def within(impl: Implementation, pick: int | None = None, roundings: int = 2, times: float = 1) -> float:
    """What a number of the last call may be wrong by, and so many roundings of a number of size 1 more;
    `times` that, where such numbers are added.
    """
    args, kwargs = impl.calls[-1].given
    wrong = impl.allowance(impl.calls[-1].function, *args, pick=pick, **kwargs).largest
    return times * (wrong + roundings * EPSILON[impl.dtype] + 1e-12)


def lies(
    impl: Implementation,
    got: Any,
    between: tuple[Any, Any],
    what: str,
    *,
    times: float = 1,
    roundings: int = 2,
) -> None:
    """Raise Violation unless these numbers lie between two
    others, but for what those of the last call may be wrong by.

    times, roundings: as for `within`. Numbers are between those of another call if twice that allows it.
    """
    low, high = between
    if not ((got >= low).all() and (got <= high).all()):
        slack = within(impl, times=times, roundings=roundings)
        tell(np.maximum(low - got, got - high), slack)
        require((got >= low - slack).all(), f"{what} is too small", low, got)
        require((got <= high + slack).all(), f"{what} is too large", high, got)


def selects(
    kept: Any,
    scores: np.ndarray,
    budget: int,
    *,
    slack: Allowance | float | np.ndarray | Callable[[], Allowance | float | np.ndarray] = 0.0,
    protected: np.ndarray | None = None,
    what: str = "the selection",
) -> None:
    """Raise Violation unless `kept` is a boolean mask that
    keeps `budget` of each row, and among the best by `scores`.

    slack is what a score may be wrong by, one number, an array or an Allowance: an evicted token may score
    more than a kept one by what both may. A function that gives it is called only where that matters, for an
    allowance is dear. Protected tokens must be kept and are not compared.
    """
    require_mask(kept, scores.shape, what)
    count = kept.sum(axis=-1)
    require(
        (count == budget).all(),
        f"{what} keeps {_few(count)} tokens of a head, wanted {budget}",
        budget,
        count,
    )
    require(protected is None or kept[protected].all(), f"{what} evicts a protected token", protected, kept)
    free = scores if protected is None else np.where(protected, np.inf, scores)

    def gap(wrong: float | np.ndarray) -> float:
        """By how much the best evicted score lies above the
        worst kept one, where each may be wrong by so much.
        """
        worst = np.where(kept, free + wrong, np.inf).min(axis=-1, initial=np.inf)
        best = np.where(kept, -np.inf, free - wrong).max(axis=-1, initial=-np.inf)
        with np.errstate(invalid="ignore"):  # of two equal infinities, which are no gap
            return float(np.where(best > worst, best - worst, 0).max(initial=0))

    def wrong() -> float | np.ndarray:
        found = slack() if callable(slack) else slack
        return found.largest + 1e-12 if isinstance(found, Allowance) else found

    if (largest := gap(0.0)) > 0:
        explained = wrong()
        tell(largest, 2 * np.max(explained))
        if gap(explained) > 0:
            beyond = "more than the rounding of both explains"
            raise Violation(
                f"{what} evicts a token that scores {largest:.3g} more than one it keeps, {beyond}",
                scores,
                kept,
            )


def _few(counts: np.ndarray) -> str:
    different = np.unique(counts)
    return ", ".join(str(int(value)) for value in different[:4]) + (", ..." if different.size > 4 else "")


def refused(impl: Implementation, argument: str, path: str, *args: Any, **kwargs: Any) -> None:
    """Raise Violation unless the call raises ValueError with
    this pattern, the name of the argument, in its message.
    """
    with impl.refuses(argument):
        impl.call(path, *args, **kwargs)


def agrees(
    impl: Implementation,
    path: str,
    *args: Any,
    got: Any = None,
    expected: Any = None,
    also: Any = None,
    by_hand: Any = None,
    size: Any = 1.0,
    more: Allowance | float | tuple[float, float] = 0.0,
    pick: int | None = None,
    what: str = "",
    **kwargs: Any,
) -> Any:
    """Raise Violation unless the answer of `path` is the oracle's within the allowance, each entry of a
    tuple; return it.

    got: the answer of another call that has to give the same. expected: the same numbers by another way, or a
    function that makes them of the oracle's. also: numbers in loops that round differently, `near` which the
    answer is as well. by_hand: what plain loops give, which the oracle has to give too, up to 1e-12 of
    `size`, that of the numbers rounded. Either may be a function of the same arguments, as the dtype holds
    them. more: what is allowed beyond the allowance, at most and on average, or another allowance. pick: one
    entry of a tuple. what: the answer, in words.
    """
    if "ranks" in impl.conventions and path.endswith("score") and got is expected is also is by_hand is None:
        return _orders(impl, path, *args, **kwargs)
    if got is None:
        answer = impl.call(path, *args, **kwargs)
        if isinstance(answer, tuple) and pick is None:
            for place, entry in enumerate(answer):
                impl.allowance(path, *args, pick=place, **kwargs).check(entry, f"entry {place} of {path}")
            return answer
        got = answer if pick is None else answer[pick]
    allowed = impl.allowance(path, *args, pick=pick, **kwargs)
    if by_hand is not None:
        loops(allowed.expected, by_hand(*impl.rounded(args)) if callable(by_hand) else by_hand, size)
    more = more.errors() if isinstance(more, Allowance) else more
    allowed = allowed.wider(*(more if isinstance(more, tuple) else (more,))) if more else allowed
    allowed.check(got, what or path, expected(allowed.expected) if callable(expected) else expected)
    if also is not None:
        near(got, also(*impl.rounded(args)) if callable(also) else also, allowed, what or path)
    return got


def same(
    impl: Implementation,
    path: str,
    *args: Any,
    got: Any,
    becomes: Callable[[np.ndarray], np.ndarray] | None = None,
    more: Allowance | float | tuple[float, float] = 0.0,
    pick: int | None = None,
    what: str = "the other answer",
    **kwargs: Any,
) -> np.ndarray:
    """Raise Unlike unless `got`, another answer of the implementation, is its own answer of `path` to these
    arguments; return that.

    The oracle's numbers take no part: an implementation with wrong numbers may keep the relation, and then
    the law holds of it. Only what rounding may come to is measured on the oracle. becomes: what the relation
    makes of the own answer. more, pick and what are those of `agrees`.
    """
    answer = impl.call(path, *args, **kwargs)
    own = answer if pick is None else answer[pick]
    itself(own, got, impl.allowance(path, *args, pick=pick, **kwargs), what, becomes=becomes, more=more)
    return own


def itself(
    own: np.ndarray,
    got: Any,
    allowed: Allowance,
    what: str,
    *,
    becomes: Callable[[np.ndarray], np.ndarray] | None = None,
    more: Allowance | float | tuple[float, float] = 0.0,
) -> None:
    """Raise Unlike unless two answers of an implementation differ by no more than both may be wrong by.

    allowed is the allowance on `own`; the rest as for `same`.
    """
    require_numbers(own, allowed.expected.shape, "an answer")
    both = allowed.of_two(own)
    more = more.errors() if isinstance(more, Allowance) else more
    both = both.wider(*(more if isinstance(more, tuple) else (more,))) if more else both
    both.check(got, what, becomes(own) if becomes else own, Unlike)


def loops(expected: np.ndarray, by_hand: Any, size: Any = 1.0) -> None:
    """Raise Violation unless the oracle's numbers are those of
    the law's own loops; `size` is that of the numbers rounded.
    """
    with np.errstate(invalid="ignore"):
        apart = np.where(expected == by_hand, 0, np.abs(expected - by_hand))
    same = expected.shape == np.shape(by_hand) and (apart <= 1e-12 * np.maximum(1.0, size)).all()
    require(same, "the oracle differs from the plain loop", by_hand, expected)


def _orders(impl: Implementation, path: str, *args: Any, **kwargs: Any) -> Any:
    """Raise Violation unless the scores put the tokens in the
    oracle's order, as far as the dtype can tell them apart.
    """
    impl.compares_order = True
    try:
        got = impl.call(path, *args, **kwargs)
    finally:
        impl.compares_order = False
    allowed = impl.allowance(path, *args, **kwargs)
    require_numbers(got, allowed.expected.shape, path)
    order = np.argsort(-got, axis=-1, kind="stable")
    ordered = np.take_along_axis(allowed.expected, order, axis=-1)
    later = np.maximum.accumulate(ordered[..., ::-1], axis=-1)[..., ::-1]
    if (later[..., 1:] - ordered[..., :-1] > 2 * allowed.largest).any():
        raise Violation("the scores put a token before one that scores more", allowed.expected, got)
    return got


def totals(got: Any, total: float, allowed: Allowance, what: str) -> None:
    """Raise Violation unless no number is negative and
    every row has this total, as softmax weights have 1.
    """
    require_numbers(got, allowed.expected.shape, what)
    sums = got.sum(axis=-1)
    error = float(np.abs(sums - total).max()) - 1e-12 * total
    right = (got >= 0).all() and allowed.covers(error / got.shape[-1], 0.0)
    require(right, f"{what} are negative somewhere, or do not sum to {total:g}", total, sums)


def move_with_tokens(
    impl: Implementation, path: str, seed: int, moving: tuple[np.ndarray, ...], *still: Any
) -> None:
    """Raise Violation unless scores [B, H, T] move with their tokens when the states [B, H, T, ..] that
    come first are permuted.
    """
    order = np.random.default_rng(seed).permutation(moving[0].shape[2])
    got = impl.call(path, *(states[:, :, order] for states in moving), *still)
    what = "the permuted score"
    same(impl, path, *moving, *still, got=got, becomes=lambda scores: scores[:, :, order], what=what)


def same_alone(impl: Implementation, path: str, *states: np.ndarray) -> None:
    """Raise Violation unless each head of each batch item gives alone what it gives among others.

    The first of the states [B, H, ..] has the KV heads; others may have the query heads, of which each head
    takes its readers.
    """
    allowed = impl.allowance(path, *states)
    together = impl.call(path, *states)
    require_numbers(together, allowed.expected.shape, "the result")
    apart = np.empty_like(together)
    for places in zip(*(heads_alone(array, states[0]) for array in states), strict=True):
        alone = impl.call(path, *(array[readers] for array, (_, readers) in zip(states, places, strict=True)))
        own = places[0][0]
        require_numbers(alone, together[own].shape, "the head alone")
        apart[own] = alone
    itself(together, apart, allowed, "the score of each head alone")
