r"""Expected Attention (arXiv 2510.00636), its derivation: the residual stream, the cost of a
removal, the measures.
"""

import numpy as np

from .attention import attention_logits, softmax
from .contract import Cosine, Real, Share, Weight
from .expected_attention import norm
from .rope import rotate


def project(
    hidden: Real[np.ndarray, "... T h"],
    w_q: Real[np.ndarray, "D%2 h"],
    w_k: Real[np.ndarray, "D%2 h"],
    w_v: Real[np.ndarray, "D%2 h"],
    positions: np.ndarray,
    theta: float = 10000.0,
) -> tuple[Real[np.ndarray, "... T D"], Real[np.ndarray, "... T D"], Real[np.ndarray, "... T D"]]:
    r"""EA-1: `q_i = R_i W_Q h_i`, `k_i = R_i W_K h_i`, `v_i = W_V h_i`.

    Args: w_q, w_k, w_v, which map h to D (the paper prints the transposed shape); positions [T]. Returns
    queries, keys, values. Raises ValueError for an odd D. Source: section 2.1, equation 1.
    """
    queries, keys, values = (hidden @ np.swapaxes(weight, -1, -2) for weight in (w_q, w_k, w_v))
    return rotate(queries, positions, theta), rotate(keys, positions, theta), values


def attention_weights(
    query: Real[np.ndarray, "... D"], keys: Real[np.ndarray, "... T D"]
) -> Share[np.ndarray, "... T"]:
    r"""EA-2: `a_i = z_i / sum_j z_j`, `z_i = exp(q . k_i / sqrt(d))`. Source: equation 2."""
    return softmax(attention_logits(query[..., None, :], keys))[..., 0, :]


def residual_updates(
    weights: Weight[np.ndarray, "... T"], values: Real[np.ndarray, "... T D"], w_o: Real[np.ndarray, "h D"]
) -> Real[np.ndarray, "... T h"]:
    r"""EA-3: `dh_i = a_i W_o v_i`, what token i adds to the residual stream:
    `h_out = h + sum_i dh_i`.

    Source: equation 3.
    """
    return weights[..., None] * (values @ np.swapaxes(w_o, -1, -2))


def update_norms(
    weights: Weight[np.ndarray, "... T"], values: Real[np.ndarray, "... T D"], w_o: Real[np.ndarray, "h D"]
) -> Weight[np.ndarray, "... T"]:
    r"""EA-4: `|dh_i| = a_i |W_o v_i|`. Source: equation 4."""
    return norm(residual_updates(weights, values, w_o))


def removal_error(
    weights: Weight[np.ndarray, "... T"], values: Real[np.ndarray, "... T D"], w_o: Real[np.ndarray, "h D"]
) -> Weight[np.ndarray, "... T"]:
    r"""EA-4S: `a_i / (1 - a_i) |W_o (v_i - o)|`, `o = sum_j a_j v_j`: the change of the output when
    only token i is evicted.

    Args: weights, each below 1. The paper calls `update_norms` optimal; it estimates this change: the
    remaining weights are normalised again, so evicting a token whose value is the output changes nothing.
    """
    output = (weights[..., None] * values).sum(axis=-2, keepdims=True)
    return weights / (1 - weights) * norm((values - output) @ np.swapaxes(w_o, -1, -2))


def reconstruction_error(
    hidden: Real[np.ndarray, "... T h"], compressed: Real[np.ndarray, "... T h"]
) -> Weight[np.ndarray, "..."]:
    r"""EA-A: mean over the tokens of `|h - h_compr|`. Source: appendix A, figure 6."""
    return norm(hidden - compressed).mean(axis=-1)


def centre(states: Real[np.ndarray, "... T D"]) -> Real[np.ndarray, "... T D"]:
    r"""`x - mean of x` over the tokens; exactly zero for a constant channel."""
    # The first row is subtracted first: the mean of equal numbers may differ from them in the last
    # bit, which z would enlarge.
    states = states - states[..., :1, :]
    return states - states.mean(axis=-2, keepdims=True)


def correlation(
    observed: Real[np.ndarray, "... T"], expected: Real[np.ndarray, "... T"]
) -> Cosine[np.ndarray, "..."]:
    r"""EA-A: Pearson correlation of two rows of attention; 0 if one row is constant.

    Source: appendix C, figure 10.
    """
    observed, expected = (centre(weights[..., None])[..., 0] for weights in (observed, expected))
    size = norm(observed) * norm(expected)
    return (observed * expected).sum(axis=-1) / np.where(size == 0, 1, size)


def skewness_and_kurtosis(
    states: Real[np.ndarray, "... T D"],
) -> tuple[Real[np.ndarray, "... D"], Real[np.ndarray, "... D"]]:
    r"""EA-A: skewness `E[z^3]` and excess kurtosis
    `E[z^4] - 3` of each channel; a Gaussian has 0 and 0.

    z is standardised over the tokens. A constant channel has 0 and -3. Source: figures 7 to 9 of appendix
    B show these distributions.
    """
    centred = centre(states)
    deviation = np.sqrt((centred * centred).mean(axis=-2, keepdims=True))
    standard = centred / np.where(deviation == 0, 1, deviation)
    square = standard * standard
    return (square * standard).mean(axis=-2), (square * square).mean(axis=-2) - 3
