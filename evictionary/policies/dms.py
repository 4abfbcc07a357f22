"""Delayed eviction by a threshold behind any method with scores, `+dms`: a layer judges each token once, when
it leaves the window.

The state of a layer is `dms.seen`, the tokens that each row had read when tokens were last judged, and
`dms.threshold` [B], the threshold of each row. Unless an option says a number, the first tokens of a row
that leave the window give it: the fraction `compression_ratio` of them goes, or as many as leave `budget`
tokens in a head on average. It stays for the rest of the text.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from evictionary.errors import require
from evictionary.optimized import dms, selection
from evictionary.policies import Policy, State


class DMS(Policy):
    def serves(self, method: Any) -> bool:
        return bool(method.delays)

    def keeps_all(self, method: Any, options: Mapping[str, Any], state: State, stored: int) -> bool:
        """A layer stays whole as long as its tokens fit into the window, whatever a budget says."""
        return bool(stored <= options["delay"])

    def most(self, method: Any, options: Mapping[str, Any], length: int, amount: int, removed: float) -> int:
        """All of them: the threshold decides."""
        return length


def judged(
    scores: torch.Tensor,
    filled: torch.Tensor,
    stays: torch.Tensor,
    options: Mapping[str, Any],
    request: Any,
) -> torch.Tensor:
    """The kept mask of scores [B, H_kv, T]. The threshold of a row that judges its first tokens goes into the
    state of the request.

    Args: filled, False where there is no token; stays, the tokens that stay whatever they score. Raises
    UsageError for an option out of range.
    """
    delay, number, state = options["delay"], options["cutoff"], request.state
    require(delay >= 1, f"option delay: got {delay}, wanted a whole number of at least 1")
    is_number = isinstance(number, int | float) and not isinstance(number, bool) and not math.isnan(number)
    require(
        number is None or is_number,
        f"option cutoff: got {number!r}, wanted a number, or none for that of the first text",
    )
    before = state.get("dms.seen", [0] * len(scores))
    steps = list(zip(before, request.seen, strict=True))
    arrived = max(0, *(now - then for then, now in steps))
    thresholds = state.get("dms.threshold", scores.new_full((len(scores),), -math.inf))
    if number is not None:
        thresholds = scores.new_full((len(scores),), number, dtype=torch.float64)
    # a row without a judged token has no threshold yet
    elif any(first := [then <= delay < now for then, now in steps]):
        leaving = dms.due(filled, arrived, window_size=delay) & ~stays
        counts = zip(leaving.sum(dim=(1, 2)).tolist(), request.seen, strict=True)
        going = [_going(count, seen, scores.shape[1], request) for count, seen in counts]
        found = dms.threshold(scores, leaving, torch.tensor(going, device=scores.device))
        thresholds = torch.where(torch.tensor(first, device=scores.device), found, thresholds)
    state |= {"dms.seen": [*request.seen], "dms.threshold": thresholds}
    return dms.judge(scores, filled, thresholds, arrived, window_size=delay) | (stays & filled)


def _going(leaving: int, seen: int, heads: int, request: Any) -> int:
    """How many of the tokens that leave the window of a layer are to go."""
    if request.budget is not None:
        return max(0, heads * (seen - int(request.budget)))
    ratio = request.compression_ratio
    return leaving - selection.budget(leaving, ratio) if leaving and ratio else 0
