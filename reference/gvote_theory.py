r"""GVote (arXiv 2509.03136), its derivation: the selection with a budget that it replaces, and the
smallest set to keep.
"""

import numpy as np

from .attention import attention_logits, softmax
from .checks import array, arrays
from .gvote import nucleus, union
from .selection import top_k


def output(attention: np.ndarray, values: np.ndarray) -> np.ndarray:
    r"""GV-2: `o = A V`. Args: attention [..., T]; values [..., T, D_v]. Returns [..., D_v]. Source:
    equation 2.
    """
    attention, values = arrays("gvote_theory.output", attention, values)
    return (attention[..., None, :] @ values)[..., 0, :]


def importance(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    r"""GV-3: `I_i = sum over the queries of the attention on token i`, a usual choice of the score,
    which the paper leaves open.

    Args: queries [..., M, D], all later than the keys; keys [..., T, D]. Returns [..., T], summing
    to M. Source: equation 3.
    """
    queries, keys = arrays("gvote_theory.importance", queries, keys)
    return softmax(attention_logits(queries, keys)).sum(axis=-2)


def allocate(scores: np.ndarray, budget: int) -> np.ndarray:
    r"""GV-4: `(b_1, .., b_H) = g(B, I)` with sum B, here by one top-B over the tokens of all heads.

    Args: scores [..., T], all leading axes sharing the budget; budget B >= 0. Returns quotas [...],
    summing to min(B, all tokens). Raises ValueError for NaN scores or a negative budget. Source:
    equation 4; the global top-k of section 2.2.
    """
    scores = np.asanyarray(scores)
    return top_k(scores.reshape(-1), budget).reshape(scores.shape).sum(axis=-1)


def optimal_keep_set(attention: np.ndarray, p: float) -> np.ndarray:
    r"""GV-O: `K* = union over the future queries of their nucleus`, what GVote estimates.

    Args: attention [..., M, T], of M future queries; p in [0, 1]. Returns [..., T], the smallest
    set that contains every nucleus (a smaller one may still hold mass p of every query). Source:
    section 3.1.
    """
    return union(nucleus(array("gvote_theory.optimal_keep_set", attention), p))


def attention_overlap(attention: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    r"""GV-F3: `sum over the candidates of the attention of the real next query`, its recall.

    Args: attention [..., T]; candidates [..., T], boolean, such as the nucleus of a synthetic
    query. Returns [...], from 0 to 1. Source: section 3.3, figure 3.
    """
    attention, candidates = arrays("gvote_theory.attention_overlap", attention, candidates)
    return (attention * candidates).sum(axis=-1)
