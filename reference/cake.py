r"""CAKE (arXiv 2503.12491), an allocator over layers: a layer gets more tokens, the more its attention
spreads over the text and the more it moves.

The paper's text could not be read. The definition follows
the authors' public code, antgroup/cakekv, commit c4675ce.
"""

import math
from fractions import Fraction

import numpy as np

from .attention import by_group, causal_attention
from .checks import as_count, as_window
from .contract import Real, Setting, Weight, contract


@contract
def dispersion(attention: Weight[np.ndarray, "... M N"]) -> Weight[np.ndarray, "..."]:
    r"""CAKE-1: `H = -sum_m sum_t A_mt ln A_mt`, how far the attention of M queries spreads over N
    tokens; 0 ln 0 = 0.

    Args: attention, shares of each query's attention; a row may sum to less than 1. H is in nats.
    """
    return -(attention * np.log(np.where(attention > 0, attention, 1))).sum(axis=(-2, -1))


@contract
def shift(attention: Weight[np.ndarray, "... M N"]) -> Weight[np.ndarray, "..."]:
    r"""CAKE-2: `V = sum_t Var_m A_mt`, how much the
    attention on each of N tokens moves from query to query.

    Decision: the variance is the sample variance, with M - 1, as in the public code; one query alone
    moves nothing, V = 0, where the code has NaN.
    """
    deviations = attention - attention.mean(axis=-2, keepdims=True)
    return (deviations**2).sum(axis=(-2, -1)) / max(1, attention.shape[-2] - 1)


@contract
def preference(
    queries: Real[np.ndarray, "B H_q M<=T D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    *,
    window_size: Setting[int, ">= 1"] = 32,
    tau1: Setting[float, ">= 0.1"] = 1.0,
    tau2: Setting[float, ">= 0.1"] = 1.0,
) -> Weight[np.ndarray, "B"]:
    r"""CAKE-3: `P = H^(1/tau1) V^(1/tau2)` of a layer, H and V summed over its query heads.

    Args: queries, of the last M tokens, after RoPE, at least those of the window; window_size, the last
    queries, which weigh the tokens before them; tau1 and tau2, at least 0.1: the higher, the less H or V
    counts. P is 0 where no token comes before the window. Source: the defaults of `pred_cake.py`.
    """
    # Decision: each batch item has its own preference. The public code adds them up.
    queries, keys = by_group(queries, keys)
    window = as_window(window_size, queries.shape[-2], keys.shape[-2])
    if window == keys.shape[-2]:
        return np.zeros(len(keys))
    before = causal_attention(queries[..., -window:, :], keys)[..., :-window]
    spread, moved = (measure(before).sum(axis=(1, 2)) for measure in (dispersion, shift))
    return spread ** (1 / tau1) * moved ** (1 / tau2)


@contract
def budgets(
    budget: Setting[int, ">= 1"],
    preferences: Weight[np.ndarray, "L"],
    *,
    num_layers: Setting[int | None, ">= 1"] = None,
    length: Setting[int | None, ">= 1"] = None,
    window_size: Setting[int, ">= 0"] = 0,
) -> list[int]:
    r"""CAKE-4: `b_l = w + P_l / (P_0 + .. + P_m) * L (b - w)`: the layers that have read the prompt
    share the total.

    Args: budget b, the mean number of tokens per head and layer, at least 1, window included;
    preferences, those of the layers that have read the prompt; num_layers L of the model, None for
    these alone; length, the tokens that there are, None for more than any layer's share;
    window_size w, the last tokens, which every layer keeps. Returns m + 1 whole budgets, each at
    least 1 and at most length, never smaller than that of a layer with less preference. Together
    they are `(m + 1) w + L (b - w)`, or all tokens where that is more.
    """
    given = [Fraction(float(each)) for each in preferences]
    layers = as_count("num_layers", len(given) if num_layers is None else num_layers, low=len(given))
    budget = min(budget, budget if length is None else length)
    # Decision: without a window a layer keeps one token beside its share; a budget below the window
    # is the same in every layer.
    least = min(budget, max(1, window_size))
    total = layers * (budget - least)
    room = total if length is None else length - least
    total = min(total, len(given) * room)
    shares, rest, weight = [0] * len(given), Fraction(total), sum(given)
    # Decision: what a layer cannot hold goes to the others by their preferences. The public code
    # hands it on in equal parts, by which a layer's budget can grow when one more has read the
    # prompt (CAKE-5). Without any preference the layers are alike.
    for place, layer in enumerate(sorted(range(len(given)), key=lambda layer: -given[layer])):
        exact = rest * given[layer] / weight if weight else rest / (len(given) - place)
        exact = min(exact, Fraction(room))
        shares[layer] = math.floor(exact)
        rest, weight = rest - exact, weight - given[layer]
    # Decision: a token left over by the floors goes where preference / (share + 1) is largest, of
    # equals to the smallest share, then to the lowest layer. The largest fractions would break CAKE-5.
    for _ in range(total - sum(shares)):
        free = [layer for layer, share in enumerate(shares) if share < room]
        shares[max(free, key=lambda layer: (given[layer] / (shares[layer] + 1), -shares[layer], -layer))] += 1
    return [least + share for share in shares]
