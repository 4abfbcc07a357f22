r"""TriAttention (arXiv 2604.04921): keep the keys that the mean query will turn to, frequency by
frequency of RoPE.

The paper is known here from its public code: WeianMao/triattention,
triattention/methods/pruning_utils.py at 092e4dc and triattention.py at 1129a5f.
"""

import numpy as np

from .attention import grouped
from .contract import Real, Setting, Weight, contract
from .rope import rotate

METHOD = (
    "keeps the keys with the largest logit for the mean of calibrated queries, averaged over future positions"
)
INPUTS = {
    "query_direction": (
        "calibration",
        "[B, H_q, D], mean of calibrated queries, averaged over future positions (TA-2)",
    ),
    "query_slack": (
        "calibration",
        "[B, H_q, D/2], what that mean hides of the queries' lengths (TA-1)",
    ),
}


@contract
def score(
    keys: Real[np.ndarray, "B H_kv T D"],
    query_direction: Real[np.ndarray, "B H_q D"],
    query_slack: Real[np.ndarray, "B H_q D/2"],
) -> Real[np.ndarray, "B H_kv T"]:
    r"""TA-4: `max_g (S_g - mean_t S_g) / std_t S_g`: each query head's S is standardised over the
    tokens, the largest counts.

    Args: keys, after RoPE; query_direction and query_slack, calibrated. Returns scores, higher = keep.
    Source: the public code.
    """
    rows = logits(
        keys[:, :, None], *(grouped(each, keys.shape[1]) for each in (query_direction, query_slack))
    )
    centred = rows - rows.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred * centred).mean(axis=-1, keepdims=True))
    # Decision: 1e-6 is the least deviation, as in the public code.
    return (centred / np.maximum(deviation, 1e-6)).max(axis=2)


@contract
def statistics(
    queries: Real[np.ndarray, "... N D%2"],
) -> tuple[Real[np.ndarray, "... D"], Real[np.ndarray, "... D/2"]]:
    r"""TA-1: `E q` and `E|q_f| - |E q_f|`, at least 0: the mean query, and what the mean hides of
    each pair's length.

    Args: queries of a calibration text, before RoPE. Returns the mean and the slack.
    """
    mean = queries.mean(axis=-2)
    return mean, pair_lengths(queries).mean(axis=-2) - pair_lengths(mean)


@contract
def average_over_offsets(
    query_mean: Real[np.ndarray, "... D%2"],
    *,
    position: Setting[int, ">= 0"],
    max_offset: Setting[int, ">= 1"] = 65536,
    theta: Setting[float, "> 0"] = 10000.0,
) -> Real[np.ndarray, "... D"]:
    r"""TA-2: `(1/n) sum_d R_{p + d} E q` over the offsets d = 1, 2, 4, ..., at most max_offset.

    Args: position p, that of the next token; theta, the base of RoPE.
    """
    offsets = 2 ** np.arange(max_offset.bit_length())
    turned = rotate(query_mean[..., None, :], position + offsets, theta)
    return turned.mean(axis=-2)


def logits(
    keys: Real[np.ndarray, "... T D%2"],
    query_direction: Real[np.ndarray, "... D"],
    query_slack: Real[np.ndarray, "... D/2"],
) -> Real[np.ndarray, "... T"]:
    r"""TA-3: `S = qbar . k + sum_f (E|q_f| - |E q_f|) |k_f|`, the mean logit of the mean query and
    a bonus for long keys.

    The paper writes the first part as `sum_f |E q_f| |k_f| cos(w_f D + phi_f)`, D the distance and
    phi_f the angle between mean query and key before RoPE, averaged over the offsets: that is the
    product with the averaged rotated query, for keys after RoPE.

    Args: keys, after RoPE; query_direction, qbar of TA-2.
    """
    bonus = (pair_lengths(keys) @ query_slack[..., None])[..., 0]
    return (keys @ query_direction[..., None])[..., 0] + bonus


def pair_lengths(states: Real[np.ndarray, "... T D%2"]) -> Weight[np.ndarray, "... T D/2"]:
    r"""`|x_f| = sqrt(x_f^2 + x_{f + D/2}^2)`, of each pair that RoPE turns together. RoPE keeps it."""
    first, second = np.split(states, 2, axis=-1)
    return np.sqrt(first * first + second * second)
