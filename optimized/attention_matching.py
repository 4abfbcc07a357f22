r"""Attention Matching (arXiv 2602.16284): keep the most attended keys, and fit a bias and a value to each of
them, so that reference queries find the mass and the outputs of the whole cache.

The paper is known here from its public code: adamzweiger/compaction, compaction/algorithms/base.py and
highest_attention_keys.py at 2e59cc8, with the settings AM-HighestAttnKeys-basic of
evaluation/configs/algorithms/default.py. The fits are of float64: they add up products over blocks of
queries, and squares lose half of the digits.
"""

from collections.abc import Iterator

import torch

from evictionary.reference.attention_matching import HIGH, LOW
from evictionary.reference.checks import as_count

from . import gradients, kernels
from .attention import grouped_logits
from .checks import fits, require_fit, working_dtype
from .operators import operator
from .selection import top_k
from .softmax import weights as softmax

# Logits at a time.
TILE = 2**22
# What is added to the diagonal of a system, in parts of it: what no query can tell apart stays as it was.
RIDGE, FLOOR = 1e-10, 1e-150
# Newton's steps, which mostly end by themselves after some ten, and how often each looks who would leave.
ROUNDS, PASSES = 20, 4


@operator()
@torch.no_grad()
def select(keys: torch.Tensor, replay_queries: torch.Tensor, *, budget: int) -> torch.Tensor:
    r"""AM-1: keep the `budget` tokens of the highest score in each head.

    Args: those of `score`. Returns kept [B, H_kv, T], boolean. Raises ValueError naming the argument.
    """
    return top_k(score(keys, replay_queries), as_count("budget", budget, low=1))


@operator()
@fits()
def score(keys: torch.Tensor, replay_queries: torch.Tensor) -> torch.Tensor:
    r"""AM-1: `score_t = sqrt(mean_m A_mt^2)`, the root mean square of the attention of all reference queries,
    those of all query heads of the group.

    Args: replay_queries, later than all keys, so without a causal mask. Returns [B, H_kv, T], higher = keep,
    float32 (float64 for float64). Raises ValueError naming the argument that does not fit, and on a CPU for
    NaN or infinite numbers.
    """
    squares = keys.new_zeros(keys.shape[:3], dtype=working_dtype(keys))
    for logits in _blocks(replay_queries, keys):
        squares += softmax(logits).square().sum(dim=(2, 3))
    return (squares / (replay_queries.shape[1] // keys.shape[1] * replay_queries.shape[2])).sqrt_()


def _blocks(queries: torch.Tensor, keys: torch.Tensor) -> Iterator[torch.Tensor]:
    """The logits [B, H_kv, G, m, T] of a block of queries after the other."""
    row = queries.shape[:2].numel() * keys.shape[2]
    for block in queries.split(max(1, TILE // row), dim=2):
        yield grouped_logits(block, keys)


@operator()
@fits()
def bounded_least_squares(matrix: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    r"""AM-2: the w in [e^-3, e^3]^n with the least `|A w - y|`.

    Args: matrix A; target y. Returns w [..., n], float32 (float64 for float64). Raises ValueError naming the
    argument that does not fit, and on a CPU for NaN or infinite numbers.
    """
    wide = matrix.double()
    missing = target.double() - wide.sum(dim=-1)
    change = _solve_between(wide.mT @ wide, (wide.mT @ missing[..., None])[..., 0])
    return (1 + change).to(working_dtype(matrix))


def _solve_between(gram: torch.Tensor, wish: torch.Tensor) -> torch.Tensor:
    """AM-2: the change u of weights of 1 with the least `u G u / 2 - wish u`, between the bounds.

    Its gradient is that of one more step of Newton, of the weights that are not at a bound.
    """
    found = _search(gram, wish)
    if not gradients.are_wanted(gram, wish):
        return found
    held, gram = (found <= LOW - 1) | (found >= HIGH - 1), _steadied(gram)
    step = _newton(gram, wish - (gram @ found[..., None])[..., 0], held)
    return found + step - step.detach()


def _steadied(gram: torch.Tensor) -> torch.Tensor:
    return gram + torch.diag_embed(RIDGE * gram.diagonal(dim1=-2, dim2=-1) + FLOOR)


@torch.no_grad()
def _search(gram: torch.Tensor, wish: torch.Tensor) -> torch.Tensor:
    """`_solve_between` by a projected Newton method.

    A weight at a bound that would leave it is held. The others go along Newton's step up to the first bound,
    or along it or the slope with all that leaves cut off: what gains most. Where some rows cannot tell the
    weights apart this may go on for thousands of steps, so `_finish` takes over from it.
    """
    low, high = torch.full_like(wish, LOW - 1), torch.full_like(wish, HIGH - 1)
    change, gram = torch.zeros_like(wish), _steadied(gram)
    careful = wish.shape[-1] * gram.diagonal(dim1=-2, dim2=-1)
    enough = 1e-15 * (wish.square() / careful).sum(dim=-1)
    for _ in range(ROUNDS):
        step = slope = wish - (gram @ change[..., None])[..., 0]
        held = torch.zeros_like(wish, dtype=torch.bool)
        for _ in range(PASSES):
            held = held | ((change <= low) & (step < 0)) | ((change >= high) & (step > 0))
            step = _newton(gram, slope, held)
        first = _to_the_first_bound(change, step, low, high)
        steps = torch.stack([step, step / 2, step / 4, slope / careful])
        tried = torch.cat([first[None], change + steps]).clamp(low, high)
        moved = tried - change
        gain, best = (moved * (slope - (gram @ moved[..., None])[..., 0] / 2)).sum(dim=-1).max(dim=0)
        if not (gain > enough).any():
            return change
        taken = tried.gather(0, best[None, ..., None].expand(1, *wish.shape))[0]
        change = torch.where((gain > enough)[..., None], taken, change)
    return _finish(gram, wish, change, low, high)


def _finish(
    gram: torch.Tensor, wish: torch.Tensor, change: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """The least of AM-2 from a change near it, one bound at a time: a weight that meets a bound stays there
    until the others are the best beside it. Then the one that gains most by leaving leaves. No set of held
    weights comes twice, but for rounding.
    """
    held = (change <= low) | (change >= high)
    careful = gram.diagonal(dim1=-2, dim2=-1)
    enough = 1e-15 * (wish.square() / careful).sum(dim=-1, keepdim=True)
    slope = wish - (gram @ change[..., None])[..., 0]
    for _ in range(ROUNDS * wish.shape[-1]):
        moved = _to_the_first_bound(change, _newton(gram, slope, held), low, high)
        met = ~held & ((moved <= low) | (moved >= high))
        change, held = moved, held | met
        slope = wish - (gram @ change[..., None])[..., 0]
        leaves = held & torch.where(change <= low, slope > 0, slope < 0) & ~met.any(dim=-1, keepdim=True)
        gain = torch.where(leaves, slope.square() / careful, 0)
        leaves = leaves & (gain > enough) & (gain == gain.amax(dim=-1, keepdim=True))
        held = held & ~leaves
        if not (met | leaves).any():
            break
    return change


def _newton(gram: torch.Tensor, slope: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Newton's step of the weights that are not held."""
    system = gram.masked_fill(held[..., None] | held[..., None, :], 0) + torch.diag_embed(held.to(gram))
    return torch.linalg.solve(system, slope.masked_fill(held, 0))


def _to_the_first_bound(
    change: torch.Tensor, step: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """The whole step, or its part up to the first bound that a weight meets."""
    bound = torch.where(step > 0, high, low)
    room = ((bound - change) / step).masked_fill(step == 0, torch.inf)
    reach = room.amin(dim=-1, keepdim=True).clamp(max=1)
    return torch.where(room <= reach, bound, change + reach * step)


@operator()
@fits()
def fit_bias(queries: torch.Tensor, keys: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    r"""AM-3: `beta_j = log w_j`, with the w of AM-2 for `sum_kept w_j exp(s_mj) = sum_t exp(s_mt)` at every
    reference query m, each line divided by its largest exponential.

    Args: queries, the reference queries; kept, n tokens of each head. Returns the bias [B, H_kv, n] of the
    kept keys in their order, float32 (float64 for float64). Raises ValueError naming the argument that does
    not fit, and on a CPU for NaN or infinite numbers.
    """
    count = _require_equal_heads(kept)
    gram = keys.new_zeros(*keys.shape[:2], count, count, dtype=torch.float64)
    wish = torch.zeros_like(gram[..., 0])
    for logits in _blocks(queries, keys):
        rows = logits.double().flatten(2, 3)
        powers = (rows - rows.amax(dim=-1, keepdim=True)).exp_()
        of_kept = _columns(powers, kept)
        missing = powers.masked_fill(kept[:, :, None], 0).sum(dim=-1)
        gram += of_kept.mT @ of_kept
        wish += (of_kept.mT @ missing[..., None])[..., 0]
    return (1 + _solve_between(gram, wish)).log_().to(working_dtype(keys))


@operator()
def fit_values(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    r"""AM-4: the C with the least `|X C - Y|`: X = `softmax(s_mj + beta_j)` over the kept keys, Y the outputs
    of the whole cache at the reference queries.

    Args: those of `fit_bias`; bias in any floating dtype. Returns C
    [B, H_kv, n, D_v], float32 (float64 for float64). Raises ValueError naming
    the argument that does not fit, and on a CPU for NaN or infinite numbers.
    """
    line = "attention_matching.fit_values"
    require_fit(line, queries, keys, values, kept, bias, free=("bias",))
    count = _require_equal_heads(kept)
    if bias.shape[-1] != count:
        raise ValueError(
            f"bias: got {bias.shape[-1]} numbers for a head, wanted {count}, one for each kept key"
        )
    wide = values.double()
    old = wide[kept].view(*kept.shape[:2], count, -1)
    gram = keys.new_zeros(*keys.shape[:2], count, count, dtype=torch.float64)
    wish = torch.zeros_like(old)
    for logits in _blocks(queries, keys):
        rows = logits.double().flatten(2, 3)
        weights = (_columns(rows, kept) + bias[:, :, None].double()).softmax(dim=-1)
        gram += weights.mT @ weights
        wish += weights.mT @ (rows.softmax(dim=-1) @ wide - weights @ old)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += RIDGE * diagonal.mean(dim=-1, keepdim=True)
    # Decision: of many best C the one nearest to the old values; the public code takes the shortest.
    return (old + torch.linalg.solve(gram, wish)).to(working_dtype(keys))


def _columns(rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The columns [B, H_kv, R, n] of the kept tokens in rows [B, H_kv, R, T]."""
    return rows.mT[kept].view(*kept.shape[:2], -1, rows.shape[2]).mT


def _require_equal_heads(kept: torch.Tensor) -> int:
    """Return how many tokens each head keeps. Raises ValueError for none, or where heads differ."""
    least, most = (int(each) for each in kept.sum(dim=-1).aminmax())
    if not 0 < least == most:
        raise ValueError(f"kept: got {least} to {most} tokens in a head, wanted as many in each")
    return most


@operator("values")
@fits(free=("bias",))
def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    r"""AM-5, AM-6: `softmax_j(q . k_j / sqrt(D) + beta_j) C`,
    attention over the kept keys, with the fitted values.

    Args: queries, later than the cache; bias in any floating dtype. Returns
    [B, H_q, M, D_v] in the dtype of queries. Raises ValueError naming the
    argument that does not fit, and on a CPU for NaN or infinite numbers.
    """
    if kernels.take("attention", queries, keys, values, beside=bias):
        each = queries.flatten(1, 2)[:, :, None]  # no causal mask: each query as a head of its own
        output, _ = kernels.attention.attend(each, None, (keys, values), bias=bias)
        return output.view(*queries.shape[:3], -1)
    logits = grouped_logits(queries, keys)
    weights = softmax(logits + bias.to(logits)[:, :, None, None])
    return (weights @ values.to(weights)[:, :, None]).flatten(1, 2).to(queries.dtype)
