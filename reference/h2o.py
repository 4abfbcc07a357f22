r"""H2O (arXiv 2306.14048), a baseline: keep the tokens with most attention so far (heavy hitters),
and as many recent tokens.
"""

import numpy as np

from .attention import by_group, causal_attention
from .contract import Mask, Real, Setting, Weight, contract
from .selection import top_k

METHOD = "keeps the tokens with most attention accumulated over all queries, and the most recent ones"
PROTECTED = "last half of the budget"
TRAITS = {"prompt_only"}

# Rows of the attention matrix at a time: all at once, 8 heads of 4096 tokens take 1 GiB, far beyond
# any cache of the processor.
BLOCK = 64


@contract
def score(
    queries: Real[np.ndarray, "B H_q M<=T D"], keys: Real[np.ndarray, "B H_kv T D"]
) -> Weight[np.ndarray, "B H_kv T"]:
    r"""H2-1: `score_t = (1/G) sum_g sum_m A_gmt`, the attention that token t received from all
    queries, mean over the group.

    Args: queries, of the last M tokens, after RoPE (M = T for H2O itself). Returns scores, higher = keep,
    summing to M; it costs O(M T). Source: section 4.1 of the paper, the accumulated attention score.
    """
    queries, keys = by_group(queries, keys)
    num_queries, length = queries.shape[-2], keys.shape[-2]
    total = np.zeros((*queries.shape[:3], length))
    for start in range(0, num_queries, BLOCK):
        stop = min(start + BLOCK, num_queries)
        seen = length - num_queries + stop  # no query of the block sees a later token
        received = causal_attention(queries[..., start:stop, :], keys[..., :seen, :]).sum(axis=-2)
        total = total + np.concatenate([received, np.zeros((*received.shape[:-1], length - seen))], axis=-1)
    return total.mean(axis=2)


@contract
def select(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    *,
    budget: Setting[int, ">= 1"],
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""H2-1: keep the last `ceil(budget / 2)` tokens, and fill the budget with the highest scores
    among the others.

    Args: those of `score`; budget >= 1, more than T keeps all. Each row keeps min(budget, T) tokens.
    Source: section 4.2 of the paper; half and half as in its experiments.
    """
    scores = score(queries, keys)
    # Decision: the odd token of a budget goes to the recent half, so that a budget of 1 keeps the
    # last token.
    recent = np.arange(scores.shape[-1]) >= scores.shape[-1] - (budget + 1) // 2
    return top_k(scores, budget, protected=np.broadcast_to(recent, scores.shape))
