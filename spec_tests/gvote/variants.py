"""Correct GVotes of other kinds."""

from __future__ import annotations

import math

import numpy as np
import torch

from evictionary.reference.cache import CompressedCache
from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.variants import counted_before, torch_indexing
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY

WEIGHTS, NUCLEUS, SELECT = "gvote.attention_weights", "gvote.nucleus", "gvote.select"
STATISTICS, SAMPLE, PROJECT = (f"gvote.{name}" for name in ("hidden_statistics", "sample_hidden_states", "project"))
COS_SIN, ROTATION, LOGITS = (f"gvote.{name}" for name in ("average_cos_sin", "rotate_by_average", "sampled_logits"))
TOP_EACH, ALLOCATE, UNION, PRUNE = "gvote.top_each", "gvote_theory.allocate", "gvote.union", "gvote.prune"
ALGORITHM, OPTIMAL, OVERLAP = "gvote.algorithm_1", "gvote_theory.optimal_keep_set", "gvote_theory.attention_overlap"


def widened(*arrays):
    """Tensors at least in float32."""
    return tuple(array.to(torch.promote_types(array.dtype, torch.float32)) for array in arrays)


def torch_marked(order, marks):
    """The mask in token order of `marks`, which are in the order of a sort."""
    return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order, marks)


@control(WEIGHTS, dtypes=NUMPY)
def one_tile_at_a_time(query, keys):
    """Tiles of 16 tokens with a running maximum and a running sum."""
    scaled = query / np.sqrt(keys.dtype.type(keys.shape[-1]))
    highest = np.full(keys.shape[:-2], -np.inf, keys.dtype)
    total, logits = np.zeros(keys.shape[:-2], keys.dtype), np.zeros(keys.shape[:-1], keys.dtype)
    for start in range(0, keys.shape[-2], 16):
        tile = np.einsum("...td,...d->...t", keys[..., start : start + 16, :], scaled)
        higher = np.maximum(highest, tile.max(axis=-1))
        total = total * np.exp(highest - higher) + np.exp(tile - higher[..., None]).sum(axis=-1)
        highest, logits[..., start : start + 16] = higher, tile
    return np.exp(logits - highest[..., None]) / total[..., None]


@control(WEIGHTS, dtypes=NUMPY)
def powers_of_two(query, keys):
    """Logits scaled by log2 e, powers of two, summed from the last token on."""
    logits = (keys @ query[..., None])[..., 0] * keys.dtype.type(math.log2(math.e) / math.sqrt(keys.shape[-1]))
    powers = np.exp2(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers[..., ::-1].sum(axis=-1, keepdims=True)


@control(WEIGHTS, array_library="torch", dtypes=ALL)
def torch_weights(query, keys):
    """torch in the dtype of the keys throughout, as eager code does it."""
    return torch.softmax((keys @ query[..., None])[..., 0] / math.sqrt(keys.shape[-1]), dim=-1)


@control("gvote_theory.output", dtypes=NUMPY)
def summed_from_the_end(attention, values):
    weighted = attention[..., None] * values
    return sum(weighted[..., token, :] for token in reversed(range(values.shape[-2])))


@control("gvote_theory.output", array_library="torch", dtypes=ALL)
def torch_weighted_sum(attention, values):
    return torch.einsum("...t,...td->...d", attention, values)


@control("gvote_theory.importance", dtypes=NUMPY)
def one_query_at_a_time(queries, keys):
    """The attention of one query after the other added up, from the last."""
    return sum(powers_of_two(queries[..., row, :], keys) for row in reversed(range(queries.shape[-2])))


@control("gvote_theory.importance", array_library="torch", dtypes=ALL)
def torch_summed_by_ones(queries, keys):
    queries, wide = widened(queries, keys)
    weights = torch.softmax(queries @ wide.mT / math.sqrt(keys.shape[-1]), dim=-1)
    return (weights.mT @ weights.new_ones(weights.shape[-2])).to(keys.dtype)


@control(ALLOCATE)
def counted_by_threshold(scores, budget):
    """What lies above the threshold, and then ties at it from the first head on."""
    flat = np.sort(scores.ravel())[::-1]
    if budget == 0:
        return np.zeros(scores.shape[:-1], dtype=int)
    least = flat[min(budget, flat.size) - 1]
    above, equal = (scores > least).ravel(), (scores == least).ravel()
    kept = above | (equal & (np.cumsum(equal) <= min(budget, flat.size) - above.sum()))
    return kept.reshape(scores.shape).sum(axis=-1)


@control(ALLOCATE, array_library="torch", dtypes=ALL)
def torch_one_sort(scores, budget):
    order = scores.flatten().argsort(descending=True, stable=True)[:budget]
    return torch.bincount(order // scores.shape[-1], minlength=scores[..., 0].numel()).view(scores.shape[:-1])


def refuse_budgets(scores, budgets) -> None:
    whole = budgets.dtype in (torch.int64, torch.int32) if isinstance(budgets, torch.Tensor) else budgets.dtype.kind == "i"
    if not whole or tuple(budgets.shape) != tuple(scores.shape[:-1]) or bool((budgets < 0).any()):
        raise ValueError(f"budgets: got {budgets}")


@control(TOP_EACH, dtypes=NUMPY, max_length=4096)
def counted_rank(scores, budgets):
    """A token is kept if fewer than its row's budget come before it."""
    refuse_budgets(scores, budgets)
    return counted_before(scores) < budgets[..., None]


@control(TOP_EACH, array_library="torch", dtypes=ALL)
def torch_ranked(scores, budgets):
    """Ranks by sorting twice."""
    refuse_budgets(scores, budgets)
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < budgets[..., None]


def torch_last_ranked(scores, budgets):
    """As above, and of equal scores the last: a sort from the last token on."""
    return torch_ranked(scores.flip(-1), budgets).flip(-1)


@control(TOP_EACH, array_library="torch", dtypes=ALL, edges=False)
def torch_last_of_equals(scores, budgets):
    return torch_last_ranked(scores, budgets)


@control(TOP_EACH, array_library="torch", dtypes=ALL, edges=False)
def torch_topk_of_each_row(scores, budgets):
    """torch.topk row by row, which keeps any of equal scores."""
    refuse_budgets(scores, budgets)
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for row in np.ndindex(*scores.shape[:-1]):
        kept[row][scores[row].topk(min(int(budgets[row]), scores.shape[-1])).indices] = True
    return kept


def refuse_nucleus(attention, p) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"p: got {p}")
    if bool((attention < 0).any()):
        raise ValueError("attention: got a negative weight")


@control(NUCLEUS, dtypes=NUMPY, max_length=4096)
def one_weight_after_the_other(attention, p):
    """Row by row, the heaviest token that is left added until p of the row is reached."""
    refuse_nucleus(attention, p)
    kept = np.zeros(attention.shape, dtype=bool)
    for row in np.ndindex(attention.shape[:-1]):
        weights, mass = attention[row].astype(float), 0.0
        total = math.fsum(weights)
        for _ in range(weights.size):
            heaviest = int(np.where(kept[row], -1, weights).argmax())
            if kept[row].any() and (mass >= p * total or weights[heaviest] == 0):
                break
            kept[row][heaviest], mass = True, mass + weights[heaviest]
    return kept


@control(NUCLEUS, array_library="torch", dtypes=ALL)
def torch_mass_before(attention, p):
    """A token is in as long as those before it hold less than p; sums at least in float32."""
    refuse_nucleus(attention, p)
    falling, order = widened(attention)[0].sort(dim=-1, descending=True, stable=True)
    needed = (falling.cumsum(dim=-1) - falling < p * falling.sum(dim=-1, keepdim=True)) & (falling > 0)
    needed[..., 0] = True
    return torch_marked(order, needed)


@control(NUCLEUS, array_library="torch", dtypes=ALL)
def torch_searched(attention, p):
    """The number of tokens by a binary search in the cumulated mass of the normalised weights."""
    refuse_nucleus(attention, p)
    falling, order = widened(attention)[0].sort(dim=-1, descending=True, stable=True)
    total = falling.sum(dim=-1, keepdim=True)
    mass = falling.cumsum(dim=-1) / torch.where(total == 0, 1, total)
    # At p = 1 rounding may keep the mass below 1 for ever, or lift it there too early: every weight above 0 is wanted.
    count = torch.searchsorted(mass, torch.full_like(total, p)) + 1 if p < 1 else (falling > 0).sum(dim=-1, keepdim=True)
    count = torch.minimum(count, (falling > 0).sum(dim=-1, keepdim=True)).clamp(min=1)
    return torch_marked(order, (torch.arange(falling.shape[-1]) < count).expand(falling.shape))


@control(NUCLEUS, array_library="torch", dtypes=ALL, edges=False)
def torch_last_of_equal_weights(attention, p):
    return torch_mass_before(attention.flip(-1), p).flip(-1)


@control("gvote.single_step_budget", array_library="torch")
def torch_count(candidates):
    return torch.count_nonzero(candidates, dim=-1)


def observed(hidden_states, sink_size):
    if sink_size < 0:
        raise ValueError(f"sink_size: got {sink_size}")
    return hidden_states[..., min(sink_size, hidden_states.shape[-2] - 1) :, :]


@control(STATISTICS, dtypes=NUMPY)
def one_token_at_a_time(hidden_states, *, sink_size=4):
    """Welford's recurrence: mean and sum of squares updated with every token."""
    states = observed(hidden_states, sink_size)
    mean, squares = np.zeros_like(states[..., 0, :]), np.zeros_like(states[..., 0, :])
    for count in range(1, states.shape[-2] + 1):
        before = states[..., count - 1, :] - mean
        mean = mean + before / count
        squares = squares + before * (states[..., count - 1, :] - mean)
    return mean, squares / states.shape[-2]


@control(STATISTICS, array_library="torch", dtypes=ALL)
def torch_statistics(hidden_states, *, sink_size=4):
    """torch, at least in float32, rounded at the end."""
    variance, mean = torch.var_mean(widened(observed(hidden_states, sink_size))[0], dim=-2, correction=0)
    return mean.to(hidden_states.dtype), variance.to(hidden_states.dtype)


@control(SAMPLE, dtypes=NUMPY)
def product_first(mean, variance, noise):
    return np.sqrt(variance)[..., None, :] * noise + mean[..., None, :]


@control(SAMPLE, array_library="torch", dtypes=ALL)
def torch_addcmul(mean, variance, noise):
    """A fused multiply-add of broadcast tensors."""
    return torch.addcmul(mean[..., None, :], variance.sqrt()[..., None, :], noise)


@control(PROJECT, dtypes=NUMPY)
def channels_from_the_last(hidden_states, query_weight, query_bias=None):
    queries = np.einsum("...sc,...cd->...sd", hidden_states[..., ::-1], query_weight[..., ::-1, :])
    return queries if query_bias is None else query_bias[..., None, :] + queries


@control(PROJECT, array_library="torch", dtypes=ALL)
def torch_linear(hidden_states, query_weight, query_bias=None):
    """torch's own linear layer, whose weight is transposed."""
    return torch.nn.functional.linear(hidden_states, query_weight.mT, query_bias)


def refuse_positions(head_dim, position, horizon) -> None:
    for name, good in (("head_dim", head_dim % 2 == 0), ("position", position >= 0), ("horizon", horizon >= 1)):
        if not good:
            raise ValueError(f"{name}: does not fit")


def geometric_series(head_dim, position, horizon, theta):
    """The averages in closed form: the angle at the middle, shrunk by sin(n w / 2) / (n sin(w / 2))."""
    rates = 1 / theta ** (np.arange(head_dim // 2) / (head_dim // 2))
    shrunk = np.sin(horizon * rates / 2) / (horizon * np.sin(rates / 2))
    middle = rates * (position + (horizon - 1) / 2)
    return shrunk * np.cos(middle), shrunk * np.sin(middle)


@control(COS_SIN, dtypes=NUMPY)
def closed_form(head_dim, *, position, horizon=512, theta=10000.0):
    refuse_positions(head_dim, position, horizon)
    return geometric_series(head_dim, position, horizon, theta)


@control(COS_SIN, dtypes=NUMPY)
def summed_phases(head_dim, *, position, horizon=512, theta=10000.0):
    """Phases as complex numbers, summed from the last position on, in float64."""
    refuse_positions(head_dim, position, horizon)
    angles = np.arange(position + horizon - 1, position - 1, -1)[:, None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    phase = np.exp(1j * angles).sum(axis=0) / horizon
    return phase.real, phase.imag


@control(COS_SIN, array_library="torch", dtypes=("float32", "float16", "bfloat16"))
def torch_table(head_dim, *, position, horizon=512, theta=10000.0):
    """A table in float32, averaged row by row."""
    refuse_positions(head_dim, position, horizon)
    rates = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    angles = torch.outer(torch.arange(position, position + horizon, dtype=torch.float32), rates)
    return angles.cos().mean(dim=0), angles.sin().mean(dim=0)


@control(ROTATION, dtypes=NUMPY)
def complex_pairs(queries, *, position, horizon=512, theta=10000.0):
    """Each pair as a complex number times the mean phase."""
    refuse_positions(queries.shape[-1], position, horizon)
    cos, sin = geometric_series(queries.shape[-1], position, horizon, theta)
    half = queries.shape[-1] // 2
    turned = (queries[..., :half] + 1j * queries[..., half:]) * (cos + 1j * sin)
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(queries.dtype)


@control(ROTATION, dtypes=("float64",))
def rotated_and_averaged(queries, *, position, horizon=512, theta=10000.0):
    """Rotated to each of the positions, and then averaged."""
    refuse_positions(queries.shape[-1], position, horizon)
    total = np.zeros_like(queries)
    for place in range(position, position + horizon):
        total = total + complex_pairs(queries, position=place, horizon=1, theta=theta)
    return total / horizon


@control(ROTATION, array_library="torch", dtypes=ALL)
def torch_rotate_half(queries, *, position, horizon=512, theta=10000.0):
    """As transformers do it: a table of both halves in the dtype of the queries, and rotate_half."""
    refuse_positions(queries.shape[-1], position, horizon)
    cos, sin = (torch.from_numpy(table) for table in geometric_series(queries.shape[-1], position, horizon, theta))
    first, second = queries.chunk(2, dim=-1)
    table = (torch.cat([wave, wave]).to(queries.dtype) for wave in (cos, sin))
    return queries * next(table) + torch.cat([-second, first], dim=-1) * next(table)


@control(LOGITS, dtypes=NUMPY)
def scaled_queries(sampled_queries, keys):
    """The queries scaled instead of the logits; channels from the last."""
    scaled = sampled_queries * keys.dtype.type(1 / math.sqrt(keys.shape[-1]))
    return np.einsum("...sd,...td->...st", scaled[..., ::-1], keys[..., ::-1])


@control(LOGITS, array_library="torch", dtypes=ALL)
def torch_logits(sampled_queries, keys):
    return sampled_queries @ keys.mT / math.sqrt(keys.shape[-1])


@control(UNION)
def counted_votes(votes):
    return votes.sum(axis=-2) > 0


@control(UNION)
def one_sample_after_the_other(votes):
    kept = votes[..., 0, :].copy()
    for sample in range(1, votes.shape[-2]):
        kept |= votes[..., sample, :]
    return kept


@control(UNION, array_library="torch")
def torch_any(votes):
    return votes.any(dim=-2)


@control(PRUNE, array_library="torch", dtypes=ALL)
def torch_gathered(keys, values, kept):
    return torch_indexing(keys, values, kept)


def refuse(query, keys, sampled_queries, p) -> None:
    """ValueError for what the contract refuses, of NumPy arrays and tensors alike."""
    fits = {
        "keys": len(keys.shape) == 4 and bool((abs(keys) < math.inf).all()),
        "query": len(query.shape) == 3 and (query.shape[0], query.shape[2]) == (keys.shape[0], keys.shape[3]),
        "sampled_queries": tuple(sampled_queries.shape[:2]) == tuple(query.shape[:2]) and sampled_queries.shape[3] == keys.shape[3],
        "queries": query.shape[1] % keys.shape[1] == 0,
        "p": 0 <= p <= 1,
    }
    for name, good in fits.items():
        if not good:
            raise ValueError(f"{name}: does not fit")


@control(SELECT, dtypes=NUMPY, max_length=8192)
def head_by_head(query, keys, sampled_queries, *, p=0.95):
    """One query head and one sample after the other, the votes or-ed into the mask of the KV head."""
    refuse(query, keys, sampled_queries, p)
    kept = np.zeros(keys.shape[:3], dtype=bool)
    scale = keys.dtype.type(math.sqrt(keys.shape[-1]))
    for item, reader in np.ndindex(query.shape[:2]):
        head = reader // (query.shape[1] // keys.shape[1])
        states = keys[item, head]
        count = one_weight_after_the_other(powers_of_two(query[item, reader], states), p).sum()
        for sample in sampled_queries[item, reader]:
            best = np.argsort(-(states @ sample / scale), kind="stable")[:count]
            kept[item, head, best] = True
    return kept


@control(SELECT, dtypes=NUMPY, max_length=1024)
def tokens_first(query, keys, sampled_queries, *, p=0.95):
    """A permuted layout; votes by counting what comes before a token, added up over samples and query heads."""
    refuse(query, keys, sampled_queries, p)
    num_kv_heads, length = keys.shape[1:3]
    by_token = np.ascontiguousarray(keys.transpose(2, 0, 1, 3))
    states = np.concatenate([query[:, :, None], sampled_queries], axis=2)
    grouped = states.reshape(states.shape[0], num_kv_heads, -1, *states.shape[2:])
    logits = np.einsum("tbhd,bhgsd->bhgst", by_token, grouped) / keys.dtype.type(math.sqrt(keys.shape[-1]))
    weights = np.exp(logits[:, :, :, 0] - logits[:, :, :, 0].max(axis=-1, keepdims=True))
    budgets = one_weight_after_the_other(weights, p).sum(axis=-1)  # mass is relative: no need to divide by the sum
    votes = counted_rank(logits[:, :, :, 1:], np.repeat(budgets[..., None], logits.shape[3] - 1, axis=-1))
    return votes.reshape(*keys.shape[:2], -1, length).sum(axis=2) > 0


def torch_elected(p, query, keys, sampled_queries, ranked=torch_ranked):
    repeated = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    budgets = torch_mass_before(torch_weights(query, repeated), p).sum(dim=-1)
    votes = ranked(torch_logits(sampled_queries, repeated), budgets[..., None].expand(sampled_queries.shape[:3]))
    return votes.unflatten(1, (keys.shape[1], -1)).flatten(2, 3).any(dim=2)


@control(SELECT, array_library="torch", dtypes=ALL)
def torch_rounding_each_step(query, keys, sampled_queries, *, p=0.95):
    """torch in the dtype of the keys throughout, as eager code does it."""
    refuse(query, keys, sampled_queries, p)
    return torch_elected(p, query, keys, sampled_queries)


@control(SELECT, array_library="torch", dtypes=ALL, edges=False)
def torch_votes_for_the_last_of_equals(query, keys, sampled_queries, *, p=0.95):
    refuse(query, keys, sampled_queries, p)
    return torch_elected(p, query, keys, sampled_queries, torch_last_ranked)


@control(SELECT, array_library="torch", dtypes=("float16", "bfloat16"))
def torch_in_float32(query, keys, sampled_queries, *, p=0.95):
    refuse(query, keys, sampled_queries, p)
    return torch_elected(p, *widened(query, keys, sampled_queries))


@control(SELECT, array_library="torch", dtypes=("float64", "float32"))
def torch_padded(query, keys, sampled_queries, *, p=0.95):
    """Tokens padded to a multiple of 16 with rubbish, whose logits are masked; a sample at a time."""
    refuse(query, keys, sampled_queries, p)
    length, num_kv_heads = keys.shape[2], keys.shape[1]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -length % 16), value=1e3)
    states = torch.cat([query[:, :, None], sampled_queries], dim=2).unflatten(1, (num_kv_heads, -1))
    kept = torch.zeros(*keys.shape[:2], padded.shape[2], dtype=torch.bool)
    for row in range(states.shape[3]):
        logits = torch.einsum("bhgd,bhtd->bhgt", states[:, :, :, row], padded) / math.sqrt(keys.shape[-1])
        logits[..., length:] = -torch.inf
        if row == 0:
            budgets = torch_searched(logits.softmax(dim=-1), p).sum(dim=-1)
        else:
            kept |= torch_ranked(logits, budgets).any(dim=2)
    return kept[..., :length].contiguous()


@control(ALGORITHM, dtypes=NUMPY)
def numpy_line_by_line(query, keys, values, hidden_states, query_weight, noise, *, p=0.95, sink_size=4, horizon=512, theta=10000.0):
    """Welford's statistics, a projection head by head, complex phases and a selection head by head."""
    mean, variance = one_token_at_a_time(hidden_states, sink_size=sink_size)
    states = product_first(mean, variance, noise)
    sampled = np.stack([channels_from_the_last(states, weight) for weight in query_weight], axis=1)
    rotated = complex_pairs(sampled, position=keys.shape[2], horizon=horizon, theta=theta)
    kept = head_by_head(query, keys, rotated, p=p)
    where = np.argwhere(kept)
    return CompressedCache(keys[kept], values[kept], where[:, 2], kept.sum(axis=-1))


@control(ALGORITHM, array_library="torch", dtypes=ALL)
def torch_algorithm(query, keys, values, hidden_states, query_weight, noise, *, p=0.95, sink_size=4, horizon=512, theta=10000.0):
    """torch, at least in float32 until the votes are cast, each row of the cache gathered as it is."""
    states = torch_addcmul(*torch_statistics(*widened(hidden_states), sink_size=sink_size), *widened(noise))
    sampled = torch.einsum("bsc,hcd->bhsd", states, *widened(query_weight))
    rotated = torch_rotate_half(sampled, position=keys.shape[2], horizon=horizon, theta=theta)
    wide_query, wide_keys = widened(query, keys)
    return torch_gathered(keys, values, torch_elected(p, wide_query, wide_keys, rotated))


@control(OPTIMAL, dtypes=NUMPY)
def added_one_by_one(attention, p):
    return one_sample_after_the_other(one_weight_after_the_other(attention, p))


@control(OPTIMAL, array_library="torch", dtypes=ALL)
def torch_any_nucleus(attention, p):
    return torch_mass_before(attention, p).any(dim=-2)


@control(OPTIMAL, array_library="torch", dtypes=ALL, edges=False)
def torch_any_nucleus_of_the_last(attention, p):
    return torch_last_of_equal_weights(attention, p).any(dim=-2)


@control(OVERLAP, dtypes=NUMPY)
def candidates_alone(attention, candidates):
    return np.where(candidates[..., ::-1], attention[..., ::-1], 0).sum(axis=-1)


@control(OVERLAP, array_library="torch", dtypes=ALL)
def torch_product(attention, candidates):
    return (attention * candidates).sum(dim=-1)
