"""Correct Expected Attentions of other kinds."""

from __future__ import annotations

import math

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.refusal import refuse_unless

STEM = "expected_attention"
SCORE, ROPE, STEP, STATISTICS = (f"{STEM}.{name}" for name in ("score", "average_rope", "decode_step", "query_statistics"))
NUMPY = ("float64", "float32")
HALVES = ("float16", "bfloat16")
ALL = ("float64", "float32", *HALVES)


def refuse(keys, values, query_mean, query_covariance, epsilon) -> None:
    """ValueError for what the contract refuses, of NumPy arrays and tensors alike."""
    arrays = {"keys": keys, "values": values, "query_mean": query_mean, "query_covariance": query_covariance}
    refuse_unless(**{name: 0 not in array.shape and (abs(array) < math.inf).all() for name, array in arrays.items()})
    refuse_unless(
        keys=len(keys.shape) == 4,
        values=len(values.shape) == 4 and values.shape[:3] == keys.shape[:3],
        query_mean=len(query_mean.shape) == 3
        and (query_mean.shape[0], query_mean.shape[2]) == (keys.shape[0], keys.shape[-1])
        and query_mean.shape[1] % keys.shape[1] == 0,
        query_covariance=tuple(query_covariance.shape) == (*query_mean.shape, keys.shape[-1]),
        epsilon=0 <= epsilon < math.inf,
    )


@control(SCORE, dtypes=NUMPY)
def tiled(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    """Query head by query head, tiles of 16 tokens, with a running maximum and a running sum."""
    refuse(keys, values, query_mean, query_covariance, epsilon)
    group, (length, dim) = query_mean.shape[1] // keys.shape[1], keys.shape[2:]
    weights = np.zeros(keys.shape[:3], keys.dtype)
    for item, reader in np.ndindex(query_mean.shape[:2]):
        head = reader // group
        highest, total, logits = -np.inf, keys.dtype.type(0), np.zeros(length, keys.dtype)
        for start in range(0, length, 16):
            tile = keys[item, head, start : start + 16]
            quadratic = np.einsum("td,de,te->t", tile, query_covariance[item, reader], tile)
            here = tile @ query_mean[item, reader] / keys.dtype.type(math.sqrt(dim)) + quadratic / (2 * dim)
            higher = max(highest, here.max())
            total = total * np.exp(highest - higher) + np.exp(here - higher).sum()
            highest, logits[start : start + 16] = higher, here
        weights[item, head] += np.exp(logits - highest) / total / group
    return (weights + keys.dtype.type(epsilon)) * np.linalg.norm(values, axis=-1)


@control(SCORE, dtypes=NUMPY)
def tokens_first(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    """A permuted layout, each pair of channels once and doubled, the group's weights summed from the last query head on."""
    refuse(keys, values, query_mean, query_covariance, epsilon)
    heads, dim = keys.shape[1], keys.shape[-1]
    by_token = np.ascontiguousarray(keys.transpose(2, 0, 1, 3))
    mean, covariance = (entry.reshape(entry.shape[0], heads, -1, *entry.shape[2:]) for entry in (query_mean, query_covariance))
    once = np.triu(covariance, 1)
    squares = np.einsum("tbhd,bhgd,tbhd->tbhg", by_token, np.einsum("bhgdd->bhgd", covariance), by_token)
    pairs = np.einsum("tbhd,bhgde,tbhe->tbhg", by_token, once, by_token)
    logits = np.einsum("tbhd,bhgd->tbhg", by_token, mean) / keys.dtype.type(math.sqrt(dim)) + (squares / 2 + pairs) / dim
    weights = np.exp(logits - logits.max(axis=0))
    weights = weights / weights[::-1].sum(axis=0)
    total = sum(weights[..., reader] for reader in reversed(range(mean.shape[2])))
    scores = (total / mean.shape[2] + keys.dtype.type(epsilon)).transpose(1, 2, 0)
    return np.sqrt(np.einsum("bhtd,bhtd->bht", values, values)) * scores


def torch_logits(keys, query_mean, query_covariance):
    """[B, H_q, T], the keys repeated for each query head."""
    repeated = keys.repeat_interleave(query_mean.shape[1] // keys.shape[1], dim=1)
    quadratic = ((repeated @ query_covariance) * repeated).sum(dim=-1)
    return (repeated @ query_mean[..., None])[..., 0] / math.sqrt(keys.shape[-1]) + quadratic / (2 * keys.shape[-1])


def torch_scored(weights, values, epsilon):
    group = weights.unflatten(1, (values.shape[1], -1)).mean(dim=2)
    return (group + epsilon) * torch.linalg.vector_norm(values, dim=-1)


@control(SCORE, array_library="torch", dtypes=("float64", *HALVES))
def torch_in_float32(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    """torch, computing at least in float32, the result rounded to the dtype of the keys."""
    refuse(keys, values, query_mean, query_covariance, epsilon)
    wide = torch.promote_types(keys.dtype, torch.float32)
    weights = torch_logits(keys.to(wide), query_mean.to(wide), query_covariance.to(wide)).softmax(dim=-1)
    return torch_scored(weights, values.to(wide), epsilon).to(keys.dtype)


@control(SCORE, array_library="torch", dtypes=("float32", *HALVES))
def torch_rounding_each_step(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    """torch in the dtype of the keys throughout, as eager code does it."""
    refuse(keys, values, query_mean, query_covariance, epsilon)
    return torch_scored(torch_logits(keys, query_mean, query_covariance).softmax(dim=-1), values, epsilon)


@control(SCORE, array_library="torch", dtypes=NUMPY)
def torch_log_softmax(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    """The weights as exponentials of a log-softmax."""
    refuse(keys, values, query_mean, query_covariance, epsilon)
    return torch_scored(torch_logits(keys, query_mean, query_covariance).log_softmax(dim=-1).exp(), values, epsilon)


@control(SCORE, array_library="torch", dtypes=NUMPY)
def padded_powers_of_two(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    """As a kernel does it: tokens padded to a multiple of 16 and masked, logits scaled by log2 e, powers of two."""
    refuse(keys, values, query_mean, query_covariance, epsilon)
    length = keys.shape[2]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -length % 16), value=3.0)
    logits = torch_logits(padded, query_mean, query_covariance) * math.log2(math.e)
    logits[..., length:] = -torch.inf
    powers = torch.exp2(logits - logits.amax(dim=-1, keepdim=True))
    return torch_scored((powers / powers.sum(dim=-1, keepdim=True))[..., :length], values, epsilon)


def refuse_window(query_mean, query_covariance, position, horizon, theta) -> None:
    refuse_unless(
        query_mean=query_mean.shape[-1] % 2 == 0,
        query_covariance=tuple(query_covariance.shape) == (*query_mean.shape, query_mean.shape[-1]),
        position=isinstance(position, int) and position >= 0,
        horizon=isinstance(horizon, int) and horizon >= 1,
        theta=theta > 0,
    )


def turned(states, cos, sin):
    """The last axis turned pair by pair, without a matrix."""
    first, second = np.split(states, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def both_sides(states, cos, sin):
    return turned(turned(states, cos, sin).swapaxes(-1, -2), cos, sin).swapaxes(-1, -2)


@control(ROPE, dtypes=NUMPY)
def tables_summed_backwards(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    """Cosines and sines summed in blocks of 64 from the last position on; rows and columns turned one after the other."""
    refuse_window(query_mean, query_covariance, position, horizon, theta)
    half = query_mean.shape[-1] // 2
    rates = np.asarray(1 / theta ** (np.arange(half) / half), query_mean.dtype)
    cos, sin = np.zeros(half, query_mean.dtype), np.zeros(half, query_mean.dtype)
    for stop in range(position + horizon, position, -64):
        angles = np.arange(stop - 1, max(position, stop - 64) - 1, -1).astype(query_mean.dtype)[:, None] * rates
        cos, sin = cos + np.cos(angles).sum(axis=0), sin + np.sin(angles).sum(axis=0)
    cos, sin = cos / horizon, sin / horizon
    return turned(query_mean, cos, sin), both_sides(query_covariance, cos, sin)


@control(ROPE, dtypes=NUMPY)
def geometric_series(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    """The average in closed form: the angle at the middle of the window, shrunk by sin(T w / 2) / (T sin(w / 2))."""
    refuse_window(query_mean, query_covariance, position, horizon, theta)
    half = query_mean.shape[-1] // 2
    rates = theta ** -(np.arange(half) / half)
    shrunk = np.sin(horizon * rates / 2) / (horizon * np.sin(rates / 2))
    middle = rates * (position + (horizon - 1) / 2)
    cos, sin = ((shrunk * wave(middle)).astype(query_mean.dtype) for wave in (np.cos, np.sin))
    return turned(query_mean, cos, sin), both_sides(query_covariance, cos, sin)


@control(ROPE, array_library="torch", dtypes=ALL)
def torch_complex_pairs(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    """Each pair as a complex number times the mean phase, at least in float32."""
    refuse_window(query_mean, query_covariance, position, horizon, theta)
    wide = torch.promote_types(query_mean.dtype, torch.float32)
    half = query_mean.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=wide) / half)
    angles = torch.arange(position, position + horizon, dtype=wide)[:, None] * rates
    phase = torch.polar(torch.ones_like(angles), angles).mean(dim=0)

    def turn(states):
        pairs = torch.complex(states[..., :half], states[..., half:]) * phase
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    covariance = turn(turn(query_covariance.to(wide)).mT).mT
    return turn(query_mean.to(wide)).to(query_mean.dtype), covariance.to(query_mean.dtype)


@control(ROPE, array_library="torch", dtypes=ALL)
def torch_rounded_table(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    """The averaged matrix rounded to the dtype of the statistics, and matrix products in that dtype."""
    refuse_window(query_mean, query_covariance, position, horizon, theta)
    wide = torch.promote_types(query_mean.dtype, torch.float32)
    half = query_mean.shape[-1] // 2
    angles = torch.arange(position, position + horizon, dtype=wide)[:, None] * theta ** (-torch.arange(half, dtype=wide) / half)
    cos, sin = torch.diag(angles.cos().mean(dim=0)), torch.diag(angles.sin().mean(dim=0))
    rotation = torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)]).to(query_mean.dtype)
    return query_mean @ rotation.T, rotation @ query_covariance @ rotation.T


@control(STATISTICS, dtypes=NUMPY)
def one_query_at_a_time(queries):
    """Welford's recurrence: mean and covariance updated with every query."""
    mean = np.zeros(queries.shape[:-2] + queries.shape[-1:], queries.dtype)
    covariance = np.zeros((*mean.shape, queries.shape[-1]), queries.dtype)
    for count in range(1, queries.shape[-2] + 1):
        before = queries[..., count - 1, :] - mean
        mean = mean + before / count
        after = queries[..., count - 1, :] - mean
        covariance = covariance + (before[..., None] * after[..., None, :] - covariance) / count
    return mean, covariance


@control(STATISTICS, array_library="torch", dtypes=ALL)
def torch_products_with_ones(queries):
    """torch, at least in float32: the mean as a product with ones, the covariance by einsum, stored channel by channel."""
    wide = queries.to(torch.promote_types(queries.dtype, torch.float32)).mT.contiguous()
    count = queries.shape[-2]
    mean = wide @ wide.new_full((count,), 1 / count)
    centred = wide - mean[..., None]
    covariance = torch.einsum("...dn,...en->...de", centred.flip(-1), centred.flip(-1) / count)
    return mean.to(queries.dtype), covariance.to(queries.dtype)


def grown(state, query, key, value, *, target, interval, buffer_size):
    """The state with the token added, NumPy or torch; its steps are 0 where a compression is due."""
    token = {"key": (state.keys, key), "value": (state.values, value), "query": (state.queries, query)}
    refuse_unless(target=target >= 1, interval=interval >= 1, buffer_size=buffer_size >= 1)
    refuse_unless(**{name: tuple(row.shape) == (*rows.shape[:2], rows.shape[3]) for name, (rows, row) in token.items()})
    library = torch if isinstance(key, torch.Tensor) else np
    keys, values, queries = (library.concatenate([rows, row[:, :, None]], 2) for rows, row in token.values())
    positions = library.concatenate([state.positions, library.full((*keys.shape[:2], 1), state.position)], 2)
    return state._replace(
        keys=keys,
        values=values,
        positions=positions,
        queries=queries[:, :, -buffer_size:],
        position=state.position + 1,
        steps=(state.steps + 1) % interval,
    )


@control(STEP, dtypes=NUMPY)
def head_by_head(state, query, key, value, *, target, interval=512, buffer_size=128, epsilon=0.02, **window):
    """NumPy, each head sorted by itself and its evicted rows deleted."""
    after = grown(state, query, key, value, target=target, interval=interval, buffer_size=buffer_size)
    if after.steps or after.keys.shape[2] <= target:
        return after
    statistics = geometric_series(*one_query_at_a_time(after.queries), position=after.position, **window)
    scores = tokens_first(after.keys, after.values, *statistics, epsilon=epsilon)
    order = np.argsort(-scores, axis=-1, kind="stable")

    def left(rows):
        heads = [np.delete(rows[index], order[index][target:], axis=0) for index in np.ndindex(rows.shape[:2])]
        return np.array(heads).reshape(*rows.shape[:2], target, *rows.shape[3:])

    return after._replace(keys=left(after.keys), values=left(after.values), positions=left(after.positions))


@control(STEP, array_library="torch", dtypes=ALL)
def torch_gathering(state, query, key, value, *, target, interval=512, buffer_size=128, epsilon=0.02, **window):
    """torch, computing at least in float32 from the queries to the scores: topk, then positions sorted and rows gathered."""
    after = grown(state, query, key, value, target=target, interval=interval, buffer_size=buffer_size)
    if after.steps or after.keys.shape[2] <= target:
        return after
    wide = torch.promote_types(key.dtype, torch.float32)
    statistics = torch_complex_pairs(*torch_products_with_ones(after.queries.to(wide)), position=after.position, **window)
    scores = torch_in_float32(after.keys.to(wide), after.values.to(wide), *statistics, epsilon=epsilon)
    rows = scores.topk(target, dim=-1).indices.sort(dim=-1).values
    keys, values = (
        states.gather(2, rows[..., None].expand(*rows.shape, states.shape[-1])) for states in (after.keys, after.values)
    )
    return after._replace(keys=keys, values=values, positions=after.positions.gather(2, rows))


@control(STEP, array_library="torch", dtypes=HALVES)
def torch_rounded_between(state, query, key, value, *, target, interval=512, buffer_size=128, epsilon=0.02, **window):
    """torch, the statistics and scores rounded to the dtype of the keys between the functions, masks in place of indices."""
    after = grown(state, query, key, value, target=target, interval=interval, buffer_size=buffer_size)
    if after.steps or after.keys.shape[2] <= target:
        return after
    statistics = torch_complex_pairs(*torch_products_with_ones(after.queries), position=after.position, **window)
    scores = torch_in_float32(after.keys, after.values, *statistics, epsilon=epsilon)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order[..., :target], True)
    keys, values, positions = (
        rows[kept].unflatten(0, (*kept.shape[:2], target)) for rows in (after.keys, after.values, after.positions)
    )
    return after._replace(keys=keys, values=values, positions=positions)


@control(f"{STEM}.log_expected_scores", dtypes=NUMPY)
def factors_of_the_covariance(keys, query_mean, query_covariance):
    """One einsum for the linear part, the quadratic part key by key as the sum of all entries of Sigma times k k^T."""
    outer = keys[..., :, None] * keys[..., None, :]
    quadratic = (outer * query_covariance[..., None, :, :]).sum(axis=(-2, -1))
    dim = keys.shape[-1]
    return np.einsum("...td,...d->...t", keys, query_mean / keys.dtype.type(math.sqrt(dim))) + quadratic / (2 * dim)


@control("expected_attention_theory.removal_error", dtypes=NUMPY)
def leaving_one_out(weights, values, w_o):
    """Attention computed again without each token, from its definition."""
    full = (weights[..., None] * values).sum(axis=-2)
    errors = []
    for token in range(weights.shape[-1]):
        others = np.delete(np.arange(weights.shape[-1]), token)
        left = weights[..., others] / weights[..., others].sum(axis=-1, keepdims=True)
        errors.append(np.linalg.norm((full - (left[..., None] * values[..., others, :]).sum(axis=-2)) @ w_o.T, axis=-1))
    return np.stack(errors, axis=-1)


@control(f"{STEM}.listing_1")
def sorted_listing(queries, keys, values, compression_ratio):
    """A sorted list of tokens, the best cut off and sorted again by position."""
    mean, covariance = one_query_at_a_time(queries)
    logits = factors_of_the_covariance(keys, mean, covariance)
    scores = (np.exp(logits - logits.max()) * np.linalg.norm(values, axis=-1)).tolist()
    count = max(1, len(scores) * (100 - round(100 * compression_ratio)) // 100)
    kept = sorted(sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:count])
    return keys[kept], values[kept]
