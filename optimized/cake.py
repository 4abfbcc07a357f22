r"""CAKE (arXiv 2503.12491), an allocator over layers: a layer gets more tokens, the more its attention
spreads over the text and the more it moves.
"""

import torch

from evictionary.reference import cake
from evictionary.reference.checks import as_window

from . import kernels
from .attention import grouped_attention
from .checks import fits
from .operators import operator

LONGEST_WINDOW = 64  # queries whose weights a program of the kernel has at once


@operator(torch.float64)
@fits()
def preference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    window_size: int = 32,
    tau1: float = 1.0,
    tau2: float = 1.0,
) -> torch.Tensor:
    r"""CAKE-1 to CAKE-3: `P = H^(1/tau1) V^(1/tau2)` of a layer, H and V summed over its query heads.

    On a CPU the attention of one KV head at a time is in memory.

    Args: queries, of the last M tokens, after RoPE, at least those of the window; window_size, the last
    queries, which weigh the tokens before them; tau1 and tau2: the higher, the less H or V counts. Returns
    [B], at least 0, float64; 0 where no token comes before the window. Raises ValueError naming the argument.
    """
    length, group = keys.shape[2], queries.shape[1] // keys.shape[1]
    window = as_window(window_size, queries.shape[2], length)
    spread, moved = (keys.new_zeros(len(keys), dtype=torch.float64) for _ in range(2))
    fits = window < length and window <= LONGEST_WINDOW
    if fits and kernels.take("received_attention", queries, keys):
        spread, moved = kernels.received_attention.measure_window(queries[:, :, -window:], keys)
    else:
        for head in range(keys.shape[1] if window < length else 0):
            readers = queries[:, head * group : (head + 1) * group, -window:]
            before = grouped_attention(readers, keys[:, head : head + 1], head)[..., :-window]
            # a weight of 0 counts 0, as one of 1 does, which has a slope
            spread += torch.special.entr(before.masked_fill(before == 0, 1)).sum(dim=(1, 2, 3, 4))
            moved += before.var(dim=3, correction=min(1, window - 1)).sum(dim=(1, 2, 3))
    return spread ** (1 / tau1) * moved ** (1 / tau2)


@operator()
@fits()
def budgets(
    budget: int,
    preferences: torch.Tensor,
    *,
    num_layers: int | None = None,
    length: int | None = None,
    window_size: int = 0,
) -> list[int]:
    r"""CAKE-4: `b_l = w + P_l / (P_0 + .. + P_m) * L (b - w)`:
    the layers that have read the prompt share the total.

    The budgets are exact whole numbers, and the reference's function computes them.
    """
    given = preferences.detach().double().cpu().numpy()
    return cake.budgets(budget, given, num_layers=num_layers, length=length, window_size=window_size)
