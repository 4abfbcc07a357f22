"""Degenerate inputs: where an equation divides 0 by 0 or sums nothing, our decision counts, and no
mathematics of the paper.

Each predicate takes the arguments of a call by name and says what is degenerate about them, or returns an
empty string. Laws of mathematics are asked of other inputs only; laws of the class *edge* say what we decided
of these (docs/decisions.md).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

MATHEMATICS, EDGE, REFUSAL, MEMORY = KINDS = ("mathematics", "edge", "refusal", "memory")
"""The classes of law: what the equation says on generic inputs; what we decided of a degenerate input;
that bad input raises; that a compiled kernel touches its own memory alone.
"""

Arguments = Mapping[str, Any]


def zero_key(arguments: Arguments) -> str:
    """A zero key has no direction, and of one shorter than 1e-4, which no model has, an epsilon decides."""
    keys = arguments.get("keys")
    if keys is None or keys.ndim < 2 or not keys.size:
        return ""
    squares = np.square(np.minimum(np.abs(keys), 1)).sum(axis=-1)
    return "a zero key" if (squares == 0).any() else "a minute key" if (squares < 1e-8).any() else ""


def keydiff(arguments: Arguments) -> str:
    """A zero key has no direction, and directions that cancel have no mean direction."""
    keys = arguments.get("keys")
    if (
        (reason := zero_key(arguments))
        or keys is None
        or keys.ndim < 2
        or not keys.size
        or not np.isfinite(keys).all()
    ):
        return reason
    scaled = keys / np.abs(keys).max(axis=-1, keepdims=True)
    mean = (scaled / np.sqrt((scaled * scaled).sum(axis=-1, keepdims=True))).mean(axis=-2)
    return "directions that cancel" if (np.abs(mean).max(axis=-1) < 1e-6).any() else ""


def plain_anchor(arguments: Arguments) -> str:
    """A mean or a median of the keys themselves may be the zero vector too."""
    keys = arguments.get("keys")
    if (
        (reason := zero_key(arguments))
        or keys is None
        or keys.ndim < 2
        or not keys.size
        or not np.isfinite(keys).all()
    ):
        return reason
    least = np.abs(keys).max() * 1e-6
    anchors = (keys.mean(axis=-2), np.median(keys, axis=-2))
    return "keys that cancel" if any((np.abs(each).max(axis=-1) < least).any() for each in anchors) else ""


def lagkv(arguments: Arguments) -> str:
    """A channel without a range cannot be normalised by
    it, and one channel has no deviation from the others.
    """
    following = [arguments[name] for name in ("next_keys", "next_values", "next_states") if name in arguments]
    states = [arguments[name] for name in ("keys", "values", "states", "normalised") if name in arguments]
    if any(each.ndim >= 2 and each.shape[-1] == 1 for each in (*following, *states)):
        return "a single channel"
    lag = arguments.get("lag_size")
    if following or lag is None:
        return "a constant channel" if any(_is_constant(each) for each in following) else ""
    start = min(int(arguments.get("sink_size", 16)), states[0].shape[-2]) if states else 0
    for each in states:
        whole = (each.shape[-2] - start) // lag
        if whole >= 2 and lag >= 1:
            parts = each[..., start : start + whole * lag, :].reshape(
                *each.shape[:-2], whole, lag, each.shape[-1]
            )
            if _is_constant(parts[..., 1:, :, :]):
                return "a constant channel"
    return ""


def _is_constant(states: np.ndarray) -> bool:
    """Whether a channel is the same at all tokens of a partition."""
    return states.ndim >= 2 and states.size > 0 and bool((np.ptp(states, axis=-2) == 0).any())


def momentkv(arguments: Arguments) -> str:
    """An attention over nothing has no output. (That nothing was evicted yet is how every text begins.)"""
    kept = arguments.get("kept")
    return (
        "a head that keeps nothing" if kept is not None and kept.ndim and not kept.any(axis=-1).all() else ""
    )


def selection(arguments: Arguments) -> str:
    """A budget of nothing is asked for by no method."""
    return "a budget of 0" if arguments.get("budget") == 0 else ""


DEGENERATE: dict[str, Callable[[Arguments], str]] = {
    "keydiff.score": keydiff,
    "keydiff.anchor": zero_key,
    "keydiff.pairwise_score": zero_key,
    "keydiff.similarity_matrix": zero_key,
    "keydiff_theory.score_step_by_step": zero_key,
    "keydiff_variants.raw_mean_score": plain_anchor,
    "keydiff_variants.median_score": plain_anchor,
    "keydiff.process_block": keydiff,
    "keydiff.process_prompt": keydiff,
    "lagkv": lagkv,
    "momentkv.attend": momentkv,
    "selection.top_k": selection,
}
"""By function (`keydiff.score`) or by file (`lagkv`)."""


def degenerate(path: str, arguments: Arguments) -> str:
    """Say what is degenerate about a call of the function `path`, or return an empty string."""
    predicate = DEGENERATE.get(path) or DEGENERATE.get(path.split(".")[0])
    return predicate(arguments) if predicate else ""
