r"""KVzap (arXiv 2601.07891): a linear surrogate predicts KVzip's score of a token from its hidden state,
and a threshold decides, once the token leaves a window.

Of the paper only the abstract was read. The definition follows public code, NVIDIA/kvpress at 8bb29b9:
kvpress/presses/kvzap_press.py, kvzap/data.py and kvzap/train.py, and for the rule
kvpress/presses/dms_press.py, which takes it from DMS (arXiv 2506.05345).
"""

import numpy as np

from .attention import by_group, grouped
from .contract import Mask, Open, Real, Setting, contract
from .expected_attention import norm
from .kvzip import replay_attention

METHOD = "keeps the tokens for which a linear model predicts a KVzip score above a threshold, and the last"
TRAITS = {"moving_window", "own_budget"}
INPUTS = {
    "surrogate_weights": ("second reading", "[B, H_kv, hidden], fitted to KVzip's scores of a text (ZA-4)"),
    "surrogate_bias": ("second reading", "[B, H_kv], fitted with the weights"),
}
FLOOR = 1e-30


@contract
def select(
    keys: Real[np.ndarray, "B H_kv T D"],
    hidden_states: Real[np.ndarray, "B M<=T C"],
    surrogate_weights: Real[np.ndarray, "B H_kv C"],
    surrogate_bias: Real[np.ndarray, "B H_kv"],
    *,
    threshold: Setting[float, "[-inf, inf]"] = -4.0,
    window_size: Setting[int, ">= 1"] = 128,
) -> Mask[np.ndarray, "B H_kv T"]:
    r"""ZA-5: the last M tokens are judged by `dms` on their `score`; the tokens before them stay.

    A token is judged as it leaves the window. Later calls get the hidden states of the window and of the
    new tokens alone, and leave alone what was judged before.

    Args: keys, of which only the shape is read; hidden_states, of the last M tokens, as the attention
    layer reads them; threshold and window_size, those of `dms`. The kept tokens are ragged. Source: the
    public code; -4 is the threshold of its example.
    """
    kept = np.ones(keys.shape[:3], dtype=bool)
    scores = score(hidden_states, surrogate_weights, surrogate_bias)
    kept[..., -scores.shape[-1] :] = dms(scores, threshold=threshold, window_size=window_size)
    return kept


@contract
def dms(
    scores: Open[np.ndarray, "... T"],
    *,
    threshold: Setting[float, "[-inf, inf]"],
    window_size: Setting[int, ">= 1"],
) -> Mask[np.ndarray, "... T"]:
    r"""ZA-1: `kept_t = (s_t >= tau) or (t > T - w)`: eviction by a threshold, delayed by a window.

    Each row keeps its own number of tokens.
    """
    # Decision: the window is never empty, so a head keeps a token. The public code allows 0.
    length = scores.shape[-1]
    return (scores >= threshold) | (np.arange(length) >= length - window_size)


@contract
def score(
    hidden_states: Real[np.ndarray, "B T C"],
    surrogate_weights: Real[np.ndarray, "B H_kv C"],
    surrogate_bias: Real[np.ndarray, "B H_kv"],
) -> Real[np.ndarray, "B H_kv T"]:
    r"""ZA-2: `s_t = w . h_t + b`, the surrogate of each KV head on the hidden state of the token.

    Returns scores, higher = keep, logarithms of KVzip's scores.
    """
    return surrogate_weights @ np.swapaxes(hidden_states, 1, 2) + surrogate_bias[..., None]


@contract
def target(
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    w_o: Real[np.ndarray, "H_q D_v hidden"],
    replay_queries: Real[np.ndarray, "B H_q M D"],
    replay_keys: Real[np.ndarray, "B H_kv M D"],
    replay_hidden_states: Real[np.ndarray, "B M hidden"],
) -> Real[np.ndarray, "B H_kv T"]:
    r"""ZA-3: `y_t = log max_gm A_gmt |W_o^g v_t| / |h_m|`, KVzip's score with the lengths of what a
    token adds and of the state that it is added to (KVzip+).

    Args: the queries, keys and hidden states of the replay.
    """
    queries, replay = by_group(replay_queries, replay_keys)
    attention = replay_attention(keys[:, :, None], queries, replay)
    added = norm(values[:, :, None] @ grouped(w_o[None], keys.shape[1]))
    reading = norm(replay_hidden_states)[:, None, None, :, None]
    # Decision: a zero state counts nothing, and scores below 1e-30 are 1e-30, for the fit needs
    # finite numbers. The public code divides by 0, and takes its logarithm.
    shares = np.where(reading == 0, 0, attention / np.where(reading == 0, 1, reading))
    return np.log(np.maximum((shares * added[..., None, :]).max(axis=(2, 3)), FLOOR))


@contract
def fit(
    hidden_states: Real[np.ndarray, "B T C"],
    target_scores: Real[np.ndarray, "B H_kv T"],
    *,
    ridge: Setting[float, "> 0"] = 1.0,
) -> tuple[Real[np.ndarray, "B H_kv C"], Real[np.ndarray, "B H_kv"]]:
    r"""ZA-4: the w and b with the least `sum_t (w . h_t + b - y_t)^2 + ridge |w|^2`, for each KV head.

    Args: ridge, which leaves b alone. Returns the weights w and the bias b. Source: kvzap/train.py, whose
    ridge is 1, the default of scikit-learn.
    """
    middle, mean = hidden_states.mean(axis=1, keepdims=True), target_scores.mean(axis=2, keepdims=True)
    centred = hidden_states - middle
    gram = np.swapaxes(centred, 1, 2) @ centred + ridge * np.eye(hidden_states.shape[2])
    weights = np.swapaxes(np.linalg.solve(gram, np.swapaxes((target_scores - mean) @ centred, 1, 2)), 1, 2)
    return weights, (mean - weights @ np.swapaxes(middle, 1, 2))[..., 0]
