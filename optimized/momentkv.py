r"""MomentKV (arXiv 2606.01563): sum the evicted tokens up in four moments, and estimate their share of the
attention from them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.linalg import vector_norm
from torch.nn.functional import pad

from evictionary.reference.checks import as_count
from evictionary.reference.contract import contract_of

from . import ada_kv, gradients, kernels
from .attention import grouped_logits, row_products
from .cache import compress
from .checks import fits, require_fit, require_same_device, require_shape, working_dtype
from .h2o import score as received_attention
from .operators import operator
from .selection import top_k
from .softmax import capped, weights
from .states import CompressedCache, Moments, Step, zero_moments

# The largest group of query heads that a tile of the kernels holds.
LARGEST_GROUP = 16
# The value channels that bound a residual from below, and the tokens whose residuals are computed first.
PROBED, FEW = 8, 32
# Rounding may lift a bound above the score, but not by a thousandth of it.
ROUNDED = 0.999


class Recovered(NamedTuple):
    """Statistics of the evicted set: mean_key [..., D],
    mean_value [..., D_v], covariance [..., D_v, D] (a sum).
    """

    mean_key: torch.Tensor
    mean_value: torch.Tensor
    covariance: torch.Tensor


@operator()
@fits()
def no_moments(keys: torch.Tensor, values: torch.Tensor) -> Moments:
    r"""MK-22: the moments of the empty set, for the heads of keys and values."""
    return zero_moments(keys, values)


@operator()
@fits()
def update(moments: Moments, keys: torch.Tensor, values: torch.Tensor, evicted: torch.Tensor) -> Moments:
    r"""MK-25: `n_e += 1, s_k += k_j, s_v += v_j, S += v_j k_j^T` for every evicted token j, in any order.

    Args: moments, before; evicted, True = evicted now. Returns the Moments after, in float32 or the dtype of
    the moments where that is wider. Raises ValueError naming the argument that does not fit, and on a CPU for
    NaN or infinite numbers and for a negative count. Source: equation 25.
    """
    moments = _wide(moments, keys)
    if _kernels_take(keys, values, moments):
        return kernels.momentkv.update(moments, keys, values, evicted)
    dtype = moments.key_sum.dtype
    gone_keys = torch.where(evicted[..., None], keys.to(dtype), 0)
    gone_values = torch.where(evicted[..., None], values.to(dtype), 0)
    return Moments(
        moments.count + evicted.sum(dim=-1),
        moments.key_sum + gone_keys.sum(dim=-2),
        moments.value_sum + gone_values.sum(dim=-2),
        moments.value_key_sum + gone_values.mT @ gone_keys,
    )


def compress_prompt(
    keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, moments: Moments | None = None
) -> tuple[CompressedCache, Moments]:
    r"""CACHE-1 and MK-25 at once: `cache.compress(keys, values, kept)`, and the moments of the tokens that
    are not kept.

    Args: keys [B, H_kv, T, D]; values [B, H_kv, T, D_v], any strides; kept [B, H_kv, T], boolean; moments of
    the tokens evicted before, None for none. Returns the cache in the dtype of its inputs and the Moments,
    float32 or the dtype of the moments where that is wider (float64 for float64). The kernels read K and V
    once for both, and wait for the GPU once, to learn how many tokens are kept. Raises ValueError naming the
    argument, and on a CPU for NaN or infinite numbers.
    """
    line = f"{contract_of('cache.compress').line}, moments?: Moments B H_kv"
    require_fit(line, keys, values, kept, moments)
    before = zero_moments(keys, values) if moments is None else _wide(moments, keys)
    if _kernels_take(keys, values, before):
        return kernels.momentkv.compress_prompt(keys, values, kept, before)
    return compress(keys, values, kept), update(before, keys, values, ~kept)


def merge(first: Moments, second: Moments) -> Moments:
    r"""MK-25: the moments of the union of two disjoint
    evicted sets, which is their sum, in float32 or wider.
    """
    sums = (
        mine.to(working_dtype(mine)) + theirs.to(working_dtype(theirs))
        for mine, theirs in zip(first[1:], second[1:], strict=True)
    )
    return Moments(first.count + second.count, *sums)


def recover(moments: Moments) -> Recovered:
    r"""MK-23, MK-24: `kbar = s_k / n_e`, `vbar = s_v / n_e`, `Stilde = S - s_v s_k^T / n_e`; all zero
    where nothing was evicted.

    Args: moments, with any leading axes. Returns float32 (float64 for float64). Source: equations 23 and 24,
    Algorithm 1 line 7.
    """
    # Decision: the clamp of small entries of Stilde to 0 (appendix C.2) is off: a threshold of 1e-6 knows
    # nothing of the scale.
    dtype = working_dtype(moments.key_sum)
    divisor = moments.count.clamp(min=1)[..., None].to(dtype)
    value_sum = moments.value_sum.to(dtype)
    mean_key = moments.key_sum.to(dtype) / divisor
    covariance = moments.value_key_sum.to(dtype) - value_sum[..., :, None] * mean_key[..., None, :]
    return Recovered(mean_key, value_sum / divisor, covariance)


@operator()
@fits()
def score(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, moments: Moments) -> torch.Tensor:
    r"""MK-10: `score_j = alpha_j |v_j - vbar - Stilde k_j / (n_e sqrt(d))|`,
    alpha the attention over the retained keys.

    Args: query, the decode query; keys and values of the retained tokens; moments of
    the evicted ones. Returns [B, H_kv, T], at least 0, higher = keep, float32 (float64
    for float64); alpha is the mean of the probabilities that the query heads of a group
    give. Raises ValueError naming the argument that does not fit, and on a CPU for NaN
    or infinite numbers. Source: section 4.2, equation 10, Algorithm 1 lines 7 to 12.
    """
    moments = _wide(moments, keys)
    if _kernels_take(keys, values, moments, query):
        return kernels.momentkv.score(query, keys, values, moments)
    return _scores(grouped_logits(query[:, :, None], keys), keys, values, moments)


def _scores(logits: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, moments: Moments) -> torch.Tensor:
    """MK-10 from the logits [B, H_kv, G, 1, T] of tokens with keys [B, H_kv, T, D] and values."""
    # Decision: a KV head is scored once for its group: the mean over its query heads, after the softmax.
    alpha = weights(logits).mean(dim=(2, 3))
    return alpha * vector_norm(_residuals(keys, values, *predicting(moments, keys)), dim=-1)


def predicting(moments: Moments, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What predicts a value from its key in MK-10, `vbar + P k` with `P = Stilde / (n_e sqrt(d))`: vbar
    [B, H_kv, 1, D_v] and P [B, H_kv, D_v, D].
    """
    # Decision: with n_e = 0 the printed line is 0/0; the means are then set to 0, so the residual is v_j.
    dtype = working_dtype(keys)
    mean_value, covariance = (field.to(dtype) for field in recover(moments)[1:])
    scale = moments.count.clamp(min=1)[..., None, None].to(dtype) * math.sqrt(covariance.shape[-1])
    return mean_value[..., None, :], covariance.div(scale)


def _residuals(
    keys: torch.Tensor, values: torch.Tensor, mean_value: torch.Tensor, prediction: torch.Tensor
) -> torch.Tensor:
    """MK-10: what the moments do not predict of the values, [B, H_kv, T, D_v]."""
    dtype = prediction.dtype
    return values.to(dtype) - mean_value - keys.to(dtype) @ prediction.mT


@operator("values")
@fits()
def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, moments: Moments
) -> torch.Tensor:
    r"""MK-12, MK-37: `fhat(q) = what_R f_R(q) + (1 - what_R) fhat_E(q)`: the moments enter the softmax as
    one more token.

    Its logit is `log n_e + q . kbar / sqrt(d)` (MK-11), its value `vbar + Stilde q / (n_e sqrt(d))` (MK-9).

    Args: kept (other tokens have no weight; if they have been evicted, `moments` holds them); moments of the
    evicted tokens. Returns [B, H_q, D_v] in the dtype of query. With no moments it is f_R; a head that keeps
    nothing and has no moments gives 0. Raises ValueError naming the argument that does not fit, and on a CPU
    for NaN or infinite numbers. Source: section 4.2, equations 12 and 37, Algorithm 1 lines 19 to 25.
    """
    moments = _wide(moments, keys)
    if _kernels_take(keys, values, moments, query):
        return kernels.momentkv.attend(query, keys, values, kept, moments)
    logits = grouped_logits(query[:, :, None], keys).squeeze(3).masked_fill(~kept[:, :, None], -math.inf)
    return _mixed(query, pad(logits, (0, 1)), values, moments)


def _mixed(query: torch.Tensor, logits: torch.Tensor, values: torch.Tensor, moments: Moments) -> torch.Tensor:
    """MK-12 from the logits [B, H_kv, G, T + 1] of tokens with values [B, H_kv, T, D_v], -inf for those
    without weight. That of the evicted part is written to the last place.
    """
    evicted_value, logits[..., -1] = evicted_part(query.unflatten(1, logits.shape[1:3]), moments)
    # a head without tokens and moments: the softmax of nothing would be NaN
    shares = logits.softmax(dim=-1).masked_fill(logits.amax(dim=-1, keepdim=True) == -math.inf, 0)
    mixed = shares[..., :-1] @ values.to(shares.dtype) + shares[..., -1:] * evicted_value
    return mixed.flatten(1, 2).to(query.dtype)


def evicted_part(queries: torch.Tensor, moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    r"""MK-9, MK-11: the evicted tokens as one token, with the value `vbar + Stilde q / (n_e sqrt(d))` and the
    logit `log n_e + q . kbar / sqrt(d)`.

    Args: queries [B, H_kv, N, D]; moments. Returns values [B, H_kv, N, D_v] and logits [B, H_kv, N], -inf
    where nothing was evicted, in float32 (float64 for float64 queries). Source: equations 9 and 11.
    """
    # The covariance of a head is `S - s_v kbar^T`: it is applied to a query, and never made. A decoder asks
    # at each token, and then the number of calls is the cost.
    dtype, root = working_dtype(queries), math.sqrt(queries.shape[-1])
    rows = queries.to(dtype).flatten(0, 1)
    count, key_sum, value_sum, value_key_sum = (field.flatten(0, 1) for field in moments)
    count = count[:, None, None]
    share = count.clamp(min=1).to(dtype).reciprocal()
    logits = torch.bmm(rows, key_sum.to(dtype)[..., None]).mul_(share / root)
    values = torch.bmm(rows, value_key_sum.to(dtype).mT).mul_(share / root)
    values.addcmul_(1 - logits, value_sum.to(dtype)[:, None] * share)
    logits = (logits - share.log()).masked_fill(count == 0, -math.inf)
    lead = queries.shape[:3]
    return values.view(*lead, -1), logits.view(lead)


def step(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    moments: Moments,
    position: int | torch.Tensor,
) -> torch.Tensor:
    r"""MK-A1 in place, for a cache that is full: the new token
    takes the slot of the lowest score, or is evicted itself.

    No token is moved, so the slots end up in any order; `positions` says which token each holds, and decides
    between equal scores: the latest is evicted.

    Args: query [B, H_q, D]; new_key [B, H_kv, D]; new_value [B, H_kv, D_v]; keys [B, H_kv, L, D], values [B,
    H_kv, L, D_v] and positions [B, H_kv, L] int64, any strides, all slots in use; moments, float32 or wider;
    position of the new token, a number or an int64 tensor that broadcasts to [B, H_kv]. Changes keys, values,
    positions and moments, on a GPU in four launches. Returns [B, H_q, D_v] in the dtype of query, attention
    after the eviction. Raises ValueError naming the argument that does not fit, and on a CPU for NaN or
    infinite numbers and for a negative count, before anything is written. Source: Algorithm 1.
    """
    require_fit("momentkv.decode_step", query, new_key, new_value, keys, values, moments)
    gradients.require_unwanted(
        "momentkv.step",
        "writes into its arguments, as decode_step does not",
        query=query,
        new_key=new_key,
        new_value=new_value,
        keys=keys,
        values=values,
        moments=moments,
    )
    _require_slots(positions, moments, keys)
    place = _as_positions(position, positions)
    return step_trusted(query, new_key, new_value, keys, values, positions, Moments(*moments), place)


def step_trusted(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    moments: Moments,
    position: torch.Tensor,
) -> torch.Tensor:
    r"""`step` without a look at its arguments, for a caller that wrote the cache and the moments itself.

    A step looks at the new token and at one other: it computes the logits once, and neither masks nor copies
    the rest of the cache.
    """
    # The kernels write into the moments in place.
    dtypes = (torch.int64, *(torch.float32,) * 3)
    writable = all(
        field.dtype == dtype and field.is_contiguous() for field, dtype in zip(moments, dtypes, strict=True)
    )
    if writable and _kernels_take(keys, values, moments, query):
        return kernels.momentkv.step(query, new_key, new_value, keys, values, positions, moments, position)
    length, dtype = keys.shape[2], moments.key_sum.dtype
    new_keys, new_values = new_key[:, :, None], new_value[:, :, None]
    logits, scores, places = _lowest_of_layer(query, (keys, new_keys), (values, new_values), moments)
    all_positions = torch.cat([positions, position[:, :, None]], dim=2).gather(2, places)
    is_lowest = scores == scores.amin(dim=-1, keepdim=True)
    evicted = places.gather(2, all_positions.masked_fill(~is_lowest, -1).argmax(dim=-1, keepdim=True))
    slot = evicted.clamp(max=length - 1)
    is_new = (evicted == length)[..., None]
    moments.count.add_(1)
    gone = []
    for states, new, total in ((keys, new_keys, moments.key_sum), (values, new_values, moments.value_sum)):
        place = slot[..., None].expand(-1, -1, -1, states.shape[3])
        old = states.gather(2, place)
        states.scatter_(2, place, torch.where(is_new, old, new))
        gone.append(torch.where(is_new, new, old).to(dtype))
        total.add_(gone[-1].squeeze(2))
    moments.value_key_sum.add_(gone[1].mT * gone[0])
    positions.scatter_(2, slot, torch.where(is_new[..., 0], positions.gather(2, slot), position[:, :, None]))
    # The token that took the slot keeps its own logit there, and the evicted part takes the last place.
    taken = evicted[:, :, None].expand(-1, -1, logits.shape[2], -1)
    logits.scatter_(3, taken, logits[..., length:].clone())
    return _mixed(query, logits, values, moments)


def _lowest_of_layer(
    query: torch.Tensor, keys: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...], moments: Moments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits [B, H_kv, G, T] of the stored tokens and the new one, and of a few of them, with the lowest
    scores (MK-10), these scores and their places.

    keys and values: the stored ones [B, H_kv, T - 1, D] and the new one [B, H_kv, 1, D].
    """
    mean_value, prediction = predicting(moments, keys[0])
    rows = query.to(prediction.dtype).unflatten(1, (keys[0].shape[1], -1)) / math.sqrt(query.shape[-1])
    tile, group = torch.cat([rows, prediction[:, :, :PROBED]], dim=2), rows.shape[2]
    length = keys[0].shape[2]
    both = tile.new_empty(*tile.shape[:3], length + 1)
    both[..., :length], both[..., length:] = (row_products(tile, each) for each in keys)
    logits, predicted = both.tensor_split([group], dim=2)
    alpha = weights(capped(logits)).mean(dim=2)
    probed = (
        torch.cat([each[..., :PROBED] for each in values], dim=2).to(prediction.dtype)
        - mean_value[..., :PROBED]
    )

    row, head = (torch.arange(count, device=rows.device) for count in keys[0].shape[:2])

    def scored(places: torch.Tensor) -> torch.Tensor:
        """The scores at some places; the last place is that of the new token."""
        is_new, inside = (places == length)[..., None], places.clamp(max=length - 1)
        own_keys, own_values = (
            torch.where(is_new, new, stored[row[:, None, None], head[:, None], inside])
            for stored, new in (keys, values)
        )
        residuals = _residuals(own_keys, own_values, mean_value, prediction)
        return alpha.gather(2, places) * vector_norm(residuals, dim=-1)

    return logits, *lowest(alpha * norms_across(probed.mT - predicted), scored, 1)


def norms_across(channels: torch.Tensor) -> torch.Tensor:
    """The norms [..., T] of a few channels [..., n, T], which are overwritten."""
    return channels.square_().sum(dim=-2).sqrt_()


def lowest(
    bounds: torch.Tensor, scored: Callable[[torch.Tensor], torch.Tensor], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores and the places of a few tokens of each row, among which are its `count` lowest scores and
    all that equal them.

    A residual costs D_v D multiplications, and which token is the lowest needs few of them: some channels of
    a residual are no longer than all of it, so they bound the score from below. The tokens with the lowest
    bounds are scored in full. Where others may be as low, a second time scores all that may.

    Args: bounds [..., T]; scored, which gives the scores at places [..., n]; count, at most T. NaN counts as
    -1, so it comes first.
    """
    length = bounds.shape[-1]
    bounds = (bounds * ROUNDED).nan_to_num(nan=-1, posinf=math.inf)
    few = length if bounds.is_cuda else min(FEW + count, length)  # to look at a result would wait for a GPU

    def of_least(few: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        least, places = bounds.topk(few, dim=-1, largest=False)
        return least, scored(places).nan_to_num(nan=-1, posinf=math.inf), places

    least, scores, places = of_least(few)
    if few < length:
        found = scores.kthvalue(count, dim=-1, keepdim=True).values
        if not (found < least[..., -1:]).all():
            _, scores, places = of_least(int((bounds <= found).sum(dim=-1).max()))
    return scores, places


@operator()
@fits()
def decode_step(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    moments: Moments,
    budget: int,
) -> Step:
    r"""MK-A1: Algorithm 1, mended: add the new token, evict the lowest scores one by one, then attend with
    the moments as they are.

    The functional form of `step`: it copies the cache, and returns it in position order. A decoder with a
    fixed budget is faster with `step`.

    Args: the retained keys and values, and the moments, before; budget (L). The new token may be evicted at
    once. Returns a Step that shares no storage with its arguments. Raises ValueError naming the argument, and
    on a CPU for NaN or infinite numbers.
    """
    moments = Moments(*(field.clone(memory_format=torch.contiguous_format) for field in _wide(moments, keys)))
    batch, num_kv_heads, length, _ = keys.shape
    if length < budget or gradients.are_wanted(query, new_key, new_value, keys, values, moments):
        keys = torch.cat([keys, new_key[:, :, None]], dim=2)
        values = torch.cat([values, new_value[:, :, None]], dim=2)
        while keys.shape[2] > budget:
            keys, values, moments = _without_the_lowest(query, keys, values, moments)
        kept = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
        return Step(attend(query, keys, values, kept, moments), keys, values, moments)
    keys, values = (states.clone(memory_format=torch.contiguous_format) for states in (keys, values))
    positions = torch.arange(length, device=keys.device).repeat(batch, num_kv_heads, 1)
    output = step(query, new_key, new_value, keys, values, positions, moments, length)
    for last in range(length - 1, budget - 1, -1):
        # Still over the budget: the token in the last slot is added again, to a cache without that slot.
        new_key, new_value, position = keys[:, :, last], values[:, :, last], positions[:, :, last]
        keys, values, positions = keys[:, :, :last], values[:, :, :last], positions[:, :, :last]
        output = step(query, new_key, new_value, keys, values, positions, moments, position)
    order = positions.argsort(dim=-1)[..., None]
    keys, values = (states.gather(2, order.expand(-1, -1, -1, states.shape[3])) for states in (keys, values))
    return Step(output, keys, values, moments)


def _without_the_lowest(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, moments: Moments
) -> tuple[torch.Tensor, torch.Tensor, Moments]:
    """The keys, values and moments after the token of the lowest score has been evicted from each head."""
    with torch.no_grad():
        kept = top_k(score(query, keys, values, moments), keys.shape[2] - 1)
    moments = update(moments, keys, values, ~kept)
    keys, values = (states[kept].view(*states.shape[:2], -1, states.shape[3]) for states in (keys, values))
    return keys, values, moments


@operator()
def score_prompt(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, chunk_size: int = 4
) -> torch.Tensor:
    r"""MK-P: score a prompt once: `alpha_j |v_j|`, alpha averaged over the observation window and the
    group, then over each chunk.

    Args: queries, those of the last M tokens (32 in the paper), causal among
    themselves; keys and values of the whole prompt; chunk_size, neighbours that share
    one score. Returns [B, H_kv, T], float32 (float64 for float64). Raises ValueError
    naming the argument, and on a CPU for NaN or infinite numbers. Source: section 5.1.
    """
    return _attention_and_score(queries, keys, values, chunk_size)[1]


def _attention_and_score(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha_j and alpha_j |v_j|, both averaged over each chunk, [B, H_kv, T]."""
    require_fit("momentkv.score_prompt", queries, keys, values)
    chunk_size = as_count("chunk_size", chunk_size, low=1)
    alpha = received_attention(queries, keys) / queries.shape[2]
    each = torch.stack([alpha, alpha * vector_norm(values.to(alpha.dtype), dim=-1)])
    # Decision: a chunk gets the mean score of its tokens; the last chunk may be shorter.
    length = each.shape[-1]
    sums = pad(each, (0, -length % chunk_size)).unflatten(-1, (-1, chunk_size)).sum(dim=-1)
    starts = torch.arange(0, length, chunk_size, device=each.device)
    means = sums / (length - starts).clamp(max=chunk_size)
    attention, score = means.repeat_interleave(chunk_size, dim=-1)[..., :length]
    return attention, score


@operator()
@torch.no_grad()
def select_prompt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    budget: int,
    *,
    sink_size: int = 1,
    chunk_size: int = 4,
    floor_ratio: float | None = None,
) -> torch.Tensor:
    r"""MK-P, MK-P2: keep the first token, the observation window and the best others, in one shot;
    `update` takes the evicted ones.

    Args: as `score_prompt`, and budget, the tokens of a head, at least the protected ones; floor_ratio: a
    number, such as 0.2, and the heads of a layer share H_kv * budget by their attention, by `ada_kv.select`,
    as the paper has it; None, and each head keeps the budget. Returns kept [B, H_kv, T], boolean, ragged
    where the heads share. Raises ValueError naming the argument. Source: section 5.1.
    """
    attention, scores = _attention_and_score(queries, keys, values, chunk_size)
    position = torch.arange(scores.shape[-1], device=scores.device)
    protected = (position < as_count("sink_size", sink_size, low=0)) | (
        position >= scores.shape[-1] - queries.shape[2]
    )
    protected = protected.expand(scores.shape)
    if floor_ratio is None:
        return top_k(scores, budget, protected)
    # The attention alone says how much a head may keep, the score which of its tokens.
    counts = ada_kv.select(attention, budget, floor_ratio=floor_ratio, protected=protected).sum(
        dim=-1, keepdim=True
    )
    return ada_kv.ranks(scores, protected) < counts


def _require_slots(positions: torch.Tensor, moments: Moments, keys: torch.Tensor) -> None:
    """Raise ValueError unless a step may write into the positions of the cache and into the moments."""
    if not isinstance(positions, torch.Tensor) or positions.dtype != torch.int64:
        got = positions.dtype if isinstance(positions, torch.Tensor) else type(positions).__name__
        raise ValueError(f"positions: got {got}, wanted int64")
    require_shape("positions", positions, tuple(keys.shape[:3]), "the batch, heads and slots of keys")
    require_same_device("positions", positions, "keys", keys)
    dtypes = (torch.int64, *(working_dtype(keys),) * 3)
    for name, field, wanted in zip(Moments._fields, moments, dtypes, strict=True):
        if torch.promote_types(field.dtype, wanted) != field.dtype:
            raise ValueError(
                f"moments.{name}: got dtype {field.dtype}, wanted {wanted}, which a step adds to in place"
            )


def _as_positions(position: int | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the position of the new token as int64 [B, H_kv] beside `positions`, or raise ValueError."""
    if not isinstance(position, torch.Tensor):
        number = as_count("position", position, low=0)
        return torch.full(positions.shape[:2], number, dtype=torch.int64, device=positions.device)
    if position.dtype != torch.int64 or position.device != positions.device:
        raise ValueError(
            f"position: got {position.dtype} on {position.device}, wanted torch.int64 on {positions.device}"
        )
    try:
        return position.expand(positions.shape[:2])
    except RuntimeError:
        wanted = tuple(positions.shape[:2])
        raise ValueError(
            f"position: got shape {tuple(position.shape)}, wanted {wanted} (the batch and heads of keys)"
        ) from None


def _wide(moments: Moments, keys: torch.Tensor) -> Moments:
    """Return the moments in float32 or wider, at least as wide as the arithmetic of keys."""
    count, *sums = moments
    dtype = torch.promote_types(working_dtype(keys), working_dtype(sums[0]))
    return Moments(count.to(torch.int64), *(field.to(dtype) for field in sums))


def _kernels_take(
    keys: torch.Tensor, values: torch.Tensor, moments: Moments, query: torch.Tensor | None = None
) -> bool:
    """Return whether the kernels take these states and moments."""
    fits = moments.key_sum.dtype == torch.float32 and (
        query is None or query.shape[1] <= LARGEST_GROUP * keys.shape[1]
    )
    return fits and kernels.take("momentkv", keys, values, beside=(moments, query))
