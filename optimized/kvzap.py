r"""KVzap (arXiv 2601.07891): a linear surrogate predicts KVzip's score of a token from its hidden state, and
a threshold decides, once the token leaves a window.

Of the paper only the abstract was read. The definition follows public code, NVIDIA/kvpress at 8bb29b9:
kvpress/presses/kvzap_press.py, kvzap/data.py and kvzap/train.py, and for the rule
kvpress/presses/dms_press.py, which takes it from DMS (arXiv 2506.05345).
"""

import torch

from evictionary.reference.kvzap import FLOOR

from . import gradients, kernels
from .checks import fits, require_finite_by, require_fit, working_dtype, working_room
from .cpu import BLOCK, blockwise
from .kvzip import replay_attention_in_blocks
from .operators import operator


@operator()
@torch.no_grad()
def select(
    keys: torch.Tensor,
    hidden_states: torch.Tensor,
    surrogate_weights: torch.Tensor,
    surrogate_bias: torch.Tensor,
    *,
    threshold: float = -4.0,
    window_size: int = 128,
) -> torch.Tensor:
    r"""ZA-5: the last M tokens are judged by `dms` on their `score`; the tokens before them stay.

    Args: keys, of which only the shape is read; hidden_states, of the last M
    tokens; surrogate_weights and surrogate_bias, in any floating dtype; threshold
    and window_size, those of `dms`. Returns kept [B, H_kv, T], boolean, ragged.
    Raises ValueError naming the argument, and on a CPU for NaN or infinite numbers.
    """
    given, free = (hidden_states, surrogate_weights, surrogate_bias), ("surrogate_weights", "surrogate_bias")
    require_fit("kvzap.select", keys, *given, free=("hidden_states", *free))
    kept = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    judged = dms(score(*given), threshold=threshold, window_size=window_size)
    kept[..., -hidden_states.shape[1] :] = judged
    return kept


@operator()
@fits()
@torch.no_grad()
def dms(scores: torch.Tensor, *, threshold: float, window_size: int) -> torch.Tensor:
    r"""ZA-1: `kept_t = (s_t >= tau) or (t > T - w)`: eviction by a threshold, delayed by a window.

    Args: scores, infinities allowed. Returns kept [..., T], boolean. Raises ValueError naming the argument,
    and on a CPU for NaN.
    """
    length = scores.shape[-1]
    places = torch.arange(length, device=scores.device)
    # In float64, for a score may lie nearer to the threshold than its dtype can say of the threshold.
    return (scores.double() >= threshold) | (places >= length - window_size)


@operator()
def score(
    hidden_states: torch.Tensor, surrogate_weights: torch.Tensor, surrogate_bias: torch.Tensor
) -> torch.Tensor:
    r"""ZA-2: `s_t = w . h_t + b`, the surrogate of each KV head on the hidden state of the token.

    Args: surrogate_weights and surrogate_bias, in any floating dtype. Returns
    scores [B, H_kv, T], higher = keep, float32 (float64 for float64). Raises
    ValueError naming the argument, and on a CPU for NaN or infinite numbers.
    """
    given = hidden_states, surrogate_weights, surrogate_bias
    require_fit("kvzap.score", *given, free=("surrogate_weights", "surrogate_bias"), finite=False)
    weights, bias = (each.to(working_dtype(hidden_states)) for each in given[1:])
    if kernels.take("kvzap", hidden_states, longest=None, beside=(weights, bias)):
        scores = kernels.kvzap.score(hidden_states, weights, bias)
    elif gradients.are_wanted(hidden_states, weights, bias):
        scores = weights @ hidden_states.to(weights.dtype).mT + bias[..., None]
    else:
        scores = weights.new_empty(*weights.shape[:2], hidden_states.shape[1])
        # A block of states is converted at a time: as a whole they would be read three times.
        blockwise(
            lambda states, part: torch.matmul(weights, states.mT, out=part),
            hidden_states,
            scores,
            room=working_room(hidden_states, BLOCK),
        )
        scores.add_(bias[..., None])
    require_finite_by(
        scores,
        hidden_states=hidden_states,
        surrogate_weights=surrogate_weights,
        surrogate_bias=surrogate_bias,
    )
    return scores


@operator()
def target(
    keys: torch.Tensor,
    values: torch.Tensor,
    w_o: torch.Tensor,
    replay_queries: torch.Tensor,
    replay_keys: torch.Tensor,
    replay_hidden_states: torch.Tensor,
) -> torch.Tensor:
    r"""ZA-3: `y_t = log max_gm A_gmt |W_o^g v_t| / |h_m|`, KVzip's score with the lengths of what a token
    adds and of the state that it is added to (KVzip+). Blocks of queries are computed at a time.

    Returns [B, H_kv, T], float32 (float64 for float64). Raises ValueError naming the argument, and on a CPU
    for NaN or infinite numbers.
    """
    given = keys, values, w_o, replay_queries, replay_keys, replay_hidden_states
    require_fit("kvzap.target", *given, free=("replay_hidden_states",))
    keys, values, w_o, queries, replay, states = (each.to(working_dtype(keys)) for each in given)
    heads, group = keys.shape[1], len(w_o) // keys.shape[1]
    # one query head at a time: its product has hidden numbers for each token
    added = torch.stack(
        [(values[:, head // group] @ weight).norm(dim=-1) for head, weight in enumerate(w_o)], dim=1
    ).unflatten(1, (heads, group))
    sizes = states.norm(dim=-1)[:, None, :, None]
    # a state of length 0 divides nothing: its queries have no share
    sizes = sizes.masked_fill(sizes == 0, torch.inf)
    found = [keys.new_full(keys.shape[::2], FLOOR)] * heads
    for head, places, weights in replay_attention_in_blocks(keys, queries, replay):
        shares = (weights / sizes[:, :, places]).amax(dim=2)
        found[head] = found[head].maximum((shares * added[:, head]).amax(dim=1))
    return torch.stack(found, dim=1).log()


@operator()
@fits(free=("target_scores",))
def fit(
    hidden_states: torch.Tensor, target_scores: torch.Tensor, *, ridge: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""ZA-4: the w and b with the least `sum_t (w . h_t + b - y_t)^2 + ridge |w|^2`, for each KV head. In
    float64, for squares lose half of the digits.

    Args: target_scores, in any floating dtype; ridge, which leaves b alone. Returns weights [B, H_kv, hidden]
    and bias [B, H_kv], float32 (float64 for float64). Raises ValueError naming the argument, and on a CPU for
    NaN or infinite numbers.
    """
    states, targets = hidden_states.double(), target_scores.double()
    middle, mean = states.mean(dim=1, keepdim=True), targets.mean(dim=2, keepdim=True)
    centred = states - middle
    gram = centred.mT @ centred
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    weights = torch.linalg.solve(gram, ((targets - mean) @ centred).mT).mT
    dtype = working_dtype(hidden_states)
    return weights.to(dtype), (mean - weights @ middle.mT)[..., 0].to(dtype)
