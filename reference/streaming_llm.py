r"""StreamingLLM (arXiv 2309.17453), a baseline: keep the first tokens, the attention sinks, and the
most recent ones.
"""

import numpy as np

from .contract import Open, Real, Setting, contract

METHOD = "keeps the first tokens (attention sinks) and the most recent ones"


@contract
def score(
    keys: Real[np.ndarray, "... T D"], *, sink_size: Setting[int, ">= 0"] = 4
) -> Open[np.ndarray, "... T"]:
    r"""SL-1: `score_t = t`, and infinity for the first `sink_size` tokens: top-k of it is sinks
    plus the most recent.

    Args: keys, of which only the shape is read. Source: section 3.2 of the paper.
    """
    positions = np.arange(keys.shape[-2], dtype=np.float64)
    scores = np.where(positions < sink_size, np.inf, positions)
    return np.broadcast_to(scores, keys.shape[:-1]).copy()
