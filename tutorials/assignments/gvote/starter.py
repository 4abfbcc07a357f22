"""GVote: how many tokens does a head need? Samples of future queries vote. NumPy alone is needed."""

import numpy as np


def attention_weights(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(D)): query [..., D] and keys
    [..., T, D], a head of keys for each query, to [..., T].
    """
    raise NotImplementedError


def nucleus(attention: np.ndarray, p: float) -> np.ndarray:
    """The smallest set of tokens whose weights reach the share
    p of their row: attention [..., T] to a boolean mask.

    Of equal weights the earlier token counts first; at least one token is in the set. Mass is relative to the
    sum of the row. Raises ValueError for p outside [0, 1] and for negative weights.
    """
    raise NotImplementedError


def single_step_budget(candidates: np.ndarray) -> np.ndarray:
    """How many tokens each row of a mask [..., T] holds: [...], whole numbers."""
    raise NotImplementedError


def select(
    query: np.ndarray, keys: np.ndarray, sampled_queries: np.ndarray, *, p: float = 0.95
) -> np.ndarray:
    """The kept mask [B, H_kv, T]: each sample of sampled_queries [B, H_q, S, D] votes for its best tokens.

    A query head votes for as many tokens as the nucleus of its current query [B, H_q, D] holds; a KV head
    keeps what any sample of any query head of its group votes for. Of equal logits the earlier token wins.
    Raises ValueError naming the argument that does not fit.
    """
    raise NotImplementedError
