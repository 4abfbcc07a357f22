r"""GVote (arXiv 2509.03136), its derivation: the selection with a budget that it replaces, and the
smallest set to keep.
"""

from fractions import Fraction

import numpy as np

from .attention import attention_logits, softmax
from .contract import Mask, Real, Setting, Share, Weight, Whole, contract
from .gvote import nucleus, union
from .selection import top_k


@contract
def output(
    attention: Real[np.ndarray, "* T"], values: Real[np.ndarray, "* T D_v"]
) -> Real[np.ndarray, "* D_v"]:
    r"""GV-2: `o = A V`. Source: equation 2."""
    return (attention[..., None, :] @ values)[..., 0, :]


@contract
def importance(
    queries: Real[np.ndarray, "* M D"], keys: Real[np.ndarray, "* T D"]
) -> Weight[np.ndarray, "* T"]:
    r"""GV-3: `I_i = sum over the queries of the attention on token i`, a usual choice of the score,
    which the paper leaves open.

    Args: queries, all later than the keys. The scores sum to M. Source: equation 3.
    """
    return softmax(attention_logits(queries, keys)).sum(axis=-2)


def allocate(scores: Real[np.ndarray, "... T"], budget: int) -> Whole[np.ndarray, "..."]:
    r"""GV-4: `(b_1, .., b_H) = g(B, I)` with sum B, here by one top-B over the tokens of all heads.

    Args: scores, all leading axes sharing the budget; budget B >= 0. Returns quotas, summing to min(B,
    all tokens). Raises ValueError for NaN scores or a negative budget. Source: equation 4; the global
    top-k of section 2.2.
    """
    scores = np.asanyarray(scores)
    return top_k(scores.reshape(-1), budget).reshape(scores.shape).sum(axis=-1)


@contract
def optimal_keep_set(
    attention: Real[np.ndarray, "... M T"], p: Setting[float | Fraction, "[0, 1]"]
) -> Mask[np.ndarray, "... T"]:
    r"""GV-O: `K* = union over the future queries of their nucleus`, what GVote estimates.

    Args: attention, of M future queries. Returns the smallest set that contains every nucleus (a smaller
    one may still hold mass p of every query). Source: section 3.1.
    """
    return union(nucleus(attention, p))


@contract
def attention_overlap(
    attention: Real[np.ndarray, "... T"], candidates: Mask[np.ndarray, "... T"]
) -> Share[np.ndarray, "..."]:
    r"""GV-F3: `sum over the candidates of the attention of the real next query`, its recall.

    Args: candidates, such as the nucleus of a synthetic query. Source: section 3.3, figure 3.
    """
    return (attention * candidates).sum(axis=-1)
