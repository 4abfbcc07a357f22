r"""Delayed eviction by a threshold for any score: a token is judged once, when it leaves the window of the
last tokens, and goes if its score is below the threshold then. Each head keeps its own number of tokens.

Dynamic Memory Sparsification (DMS, arXiv 2506.05345) trains each head to decide for each token,
when it is read, whether the token goes later. Only the delay and the threshold are of DMS here:
the score is that of any method, and nothing is trained. Of the paper the abstract was read; the
rule follows public code, NVIDIA/kvpress at 36385e2, kvpress/presses/dms_press.py, and
NVIDIA/Model-Optimizer at 1752723, experimental/dms/dms/core.py.
"""

import numpy as np

from .contract import Mask, Open, Setting, Whole, contract


@contract
def due(
    filled: Mask[np.ndarray, "B H_kv T"],
    arrived: Setting[int | None, ">= 0"] = None,
    *,
    window_size: Setting[int, ">= 0", 16, 256] = 128,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""DM-1: `w <= a_t < w + m`, the tokens that are judged now: those that have left the window of w tokens
    since the last time. The age `a_t` counts from the newest token of a head.

    Args: filled, False where there is no token; arrived, m, the tokens that came since the last time, or
    None for all of a text at once; window_size, w.
    """
    arrived = filled.shape[-1] if arrived is None else arrived
    place = filled.cumsum(axis=-1)
    age = place[..., -1:] - place
    return filled & (age >= window_size) & (age < window_size + arrived)


@contract
def judge(
    scores: Open[np.ndarray, "B H_kv T"],
    filled: Mask[np.ndarray, "B H_kv T"],
    thresholds: Open[np.ndarray, "B"],
    arrived: Setting[int | None, ">= 0"] = None,
    *,
    window_size: Setting[int, ">= 0", 16, 256] = 128,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""DM-2: a token that is due goes if `s_t < tau`; all others stay, the judged ones and the window.

    Args: scores, of which only those of the tokens that are due are read; filled, arrived and window_size,
    those of `due`; thresholds, tau of each batch item, which all heads share.
    """
    # Decision: at the threshold a token stays, and what was judged once is not judged again.
    low = scores < thresholds[:, None, None]
    return filled & ~(due(filled, arrived, window_size=window_size) & low)


@contract
def threshold(
    scores: Open[np.ndarray, "B H_kv T"],
    judged: Mask[np.ndarray, "B H_kv T"],
    going: Whole[np.ndarray, "B"],
) -> Open[np.ndarray, "B"]:
    r"""DM-3: `tau = s_(n)`, the score that n of the judged scores of a layer lie below.

    Args: judged, the tokens whose scores count; going, n, the tokens of each batch item that are to go.
    Returns -infinity where none is to go, and infinity where all are.
    """
    # Decision: the heads of a layer share the threshold, so each keeps its own number. Of equal scores at the
    # threshold all stay, so fewer may go.
    ordered = np.sort(np.where(judged, scores, np.inf).reshape(len(scores), -1), axis=-1)
    ordered = np.pad(ordered, ((0, 0), (0, 1)), constant_values=np.inf)
    place = np.minimum(going, judged.sum(axis=(1, 2)))[:, None]
    return np.where(going == 0, -np.inf, np.take_along_axis(ordered, place, axis=-1)[:, 0])
