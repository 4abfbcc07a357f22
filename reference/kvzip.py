r"""KVzip (arXiv 2505.23416): keep the tokens that are
needed most when the model reads the text a second time.

The paper is known here from its public code: NVIDIA/kvpress, kvpress/presses/kvzip_press.py at
00dd63a, which names snu-mllab/KVzip.
"""

import numpy as np

from .attention import by_group, causal_attention
from .contract import Mask, Real, Setting, Share, contract
from .selection import top_k

METHOD = "keeps the tokens with the largest attention of any query when the text is read a second time"
TRAITS = {"prompt_only"}


@contract
def score(
    keys: Real[np.ndarray, "B H_kv T D"],
    replay_queries: Real[np.ndarray, "B H_q M D"],
    replay_keys: Real[np.ndarray, "B H_kv M D"],
) -> Share[np.ndarray, "B H_kv T"]:
    r"""KZ-2: `score_t = max_gm A_gmt`, the largest
    attention that any query of the replay gives to a token.

    Given the states of the replay the score is pure: to read the text again is the caller's.

    Returns scores, higher = keep; it costs O(M T). Source: the public code.
    """
    queries, replay = by_group(replay_queries, replay_keys)
    return replay_attention(keys[:, :, None], queries, replay).max(axis=(2, 3))


def replay_attention(
    keys: Real[np.ndarray, "... T D"],
    replay_queries: Real[np.ndarray, "... M D"],
    replay_keys: Real[np.ndarray, "... M D"],
) -> Share[np.ndarray, "... M T"]:
    r"""KZ-1: attention of the replay's M tokens on the text's T: the m-th sees the text and the
    replay up to itself.

    Args: replay_queries and replay_keys, after RoPE, at the positions after the text. Each row of the
    answer sums to less than 1 by what the replay attends to itself.
    """
    whole = np.concatenate([keys, replay_keys], axis=-2)
    return causal_attention(replay_queries, whole)[..., : keys.shape[-2]]


@contract
def top_r(
    scores: Real[np.ndarray, "L B H_kv T"], budget: Setting[int, ">= 1"]
) -> Mask[np.ndarray, "L B H_kv T"]:
    r"""KZ-3: one selection over all layers and heads: the
    `budget * L * H` highest scores, no head guaranteed any.

    Args: budget, the tokens of each head on average. Returns kept, with min(budget, T) * L * H True for
    each row of the batch.
    """
    layers, batch, heads, length = scores.shape
    rows = np.swapaxes(scores, 0, 1).reshape(batch, -1)
    kept = top_k(rows, budget * layers * heads)
    return np.swapaxes(kept.reshape(batch, layers, heads, length), 0, 1)
