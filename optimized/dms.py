r"""Delayed eviction by a threshold for any score: a token is judged once, when it leaves the window of the
last tokens, and goes if its score is below the threshold then. Each head keeps its own number of tokens.

The delay and the threshold are those of Dynamic Memory Sparsification (DMS, arXiv 2506.05345), whose
decisions are trained. Here the score is that of any method.
"""

import torch

from .checks import fits
from .operators import operator


@operator()
@fits()
@torch.no_grad()
def due(filled: torch.Tensor, arrived: int | None = None, *, window_size: int = 128) -> torch.Tensor:
    r"""DM-1: `w <= a_t < w + m`, the tokens that are judged now: those that have left the window of w tokens
    since the last time. The age `a_t` counts from the newest token of a head.

    Args: filled [B, H_kv, T], boolean, False where there is no token; arrived, m, the tokens that came since
    the last time, or None for all of a text at once; window_size, w. Returns [B, H_kv, T], boolean. Raises
    ValueError naming the argument out of range.
    """
    arrived = filled.shape[-1] if arrived is None else arrived
    place = filled.cumsum(dim=-1)
    age = place[..., -1:] - place
    return filled & (age >= window_size) & (age < window_size + arrived)


@operator()
@fits(free=("thresholds",))
@torch.no_grad()
def judge(
    scores: torch.Tensor,
    filled: torch.Tensor,
    thresholds: torch.Tensor,
    arrived: int | None = None,
    *,
    window_size: int = 128,
) -> torch.Tensor:
    r"""DM-2: a token that is due goes if `s_t < tau`; all others stay, the judged ones and the window.

    Args: scores [B, H_kv, T], infinities allowed; filled, arrived and window_size, those of `due`; thresholds
    [B], in any floating dtype, tau of each batch item, which all heads share. Returns kept [B, H_kv, T],
    boolean. Raises ValueError naming the argument, and on a CPU for NaN.
    """
    # In float64, for a score may lie nearer to the threshold than its dtype can say of the threshold.
    low = scores.double() < thresholds.double()[:, None, None]
    return filled & ~(due(filled, arrived, window_size=window_size) & low)


@operator("scores")
@fits()
def threshold(scores: torch.Tensor, judged: torch.Tensor, going: torch.Tensor) -> torch.Tensor:
    r"""DM-3: `tau = s_(n)`, the score that n of the judged scores of a layer lie below.

    Args: scores [B, H_kv, T], infinities allowed; judged [B, H_kv, T], boolean, the tokens whose scores
    count; going [B], n, the tokens of each batch item that are to go. Returns [B] in the dtype of scores:
    -infinity where none is to go, and infinity where all are. Raises ValueError naming the argument, and on a
    CPU for NaN.
    """
    ordered = scores.masked_fill(~judged, torch.inf).flatten(1).sort(dim=-1).values
    ordered = torch.nn.functional.pad(ordered, (0, 1), value=torch.inf)
    place = going.minimum(judged.sum(dim=(1, 2)))
    found = ordered.gather(1, place[:, None].long())[:, 0]
    return found.masked_fill(going == 0, -torch.inf)
