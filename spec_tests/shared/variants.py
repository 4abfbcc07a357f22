"""Correct selections, caches, attention, baselines and allocators of other kinds."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

from evictionary.reference.cache import CompressedCache
from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.refusal import refuse_unless
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY

BUDGET, TOP_K, COMPRESS, ATTEND = "selection.budget", "selection.top_k", "cache.compress", "attention.attend"


def exact_ratio(ratio) -> Decimal:
    try:
        exact = Decimal(str(ratio))
        inside = 0 <= exact < 1  # raises for NaN
    except ArithmeticError:
        inside = False
    if not inside:
        raise ValueError(f"compression_ratio: got {ratio!r}")
    return exact


@control(BUDGET)
def decimal_budget(length, compression_ratio):
    return max(1, int(length * (1 - exact_ratio(compression_ratio))))


@control(BUDGET)
def removed_rounded_up(length, compression_ratio):
    return max(1, length - math.ceil(length * exact_ratio(compression_ratio)))


@control(BUDGET)
def integer_budget(length, compression_ratio):
    numerator, denominator = (1 - exact_ratio(compression_ratio)).as_integer_ratio()
    return max(1, length * numerator // denominator)


def refuse_protection(budget, protected) -> None:
    if protected is not None and (protected.sum(-1) > budget).any():
        raise ValueError(f"protected: more than the budget, {budget}")


@control(TOP_K, max_length=4096)
def greedy_top_k(scores, budget, protected=None):
    refuse_protection(budget, protected)
    kept = np.zeros(scores.shape, dtype=bool)
    for index in np.ndindex(scores.shape[:-1]):
        row = scores[index].tolist()
        first = [] if protected is None else np.flatnonzero(protected[index]).tolist()
        rest = sorted(set(range(len(row))) - set(first), key=lambda position, row=row: (-row[position], position))  # type: ignore[misc]
        kept[index][(first + rest)[:budget]] = True
    return kept


def counted_before(scores):
    """How many tokens of its row come before each: those of higher scores, and of equal ones those at lower positions."""
    place, mine, other = np.arange(scores.shape[-1]), scores[..., :, None], scores[..., None, :]
    return ((other > mine) | ((other == mine) & (place < place[:, None]))).sum(axis=-1)


@control(TOP_K, max_length=4096)
def counted_rank(scores, budget, protected=None):
    """A token is kept if fewer than `budget` come before it: the ranking by counting that a kernel does."""
    refuse_protection(budget, protected)
    first = np.zeros(scores.shape, dtype=bool) if protected is None else protected
    lifted = scores.shape[-1] * first - counted_before(scores)
    return counted_before(lifted) < budget


@control(TOP_K, array_library="torch", dtypes=ALL)
def torch_stable_sort(scores, budget, protected=None):
    refuse_protection(budget, protected)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if protected is not None:
        order = order.gather(-1, (~protected).gather(-1, order).to(torch.int8).argsort(dim=-1, stable=True))
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, order[..., :budget], True)


@control(TOP_K, array_library="torch", dtypes=ALL, edges=False)
def torch_topk(scores, budget, protected=None):
    """torch.topk, which keeps any of equal scores; the protected stand above all others, and are counted first."""
    refuse_protection(budget, protected)
    refuse_unless(scores=not scores.isnan().any(), budget=budget >= 0)
    kept = torch.zeros(scores.shape, dtype=torch.bool) if protected is None else protected.clone()
    for row in np.ndindex(*scores.shape[:-1]):
        free = (~kept[row]).nonzero()[:, 0]
        count = min(budget, scores.shape[-1]) - (scores.shape[-1] - len(free))
        kept[row][free[scores[row][free].topk(count).indices]] = True
    return kept


@control(COMPRESS)
def row_by_row(keys, values, kept):
    where = np.argwhere(kept)
    rows = [tuple(row) for row in where]
    stored_keys, stored_values = (
        np.array([states[row] for row in rows]).reshape(len(rows), states.shape[-1]) for states in (keys, values)
    )
    return CompressedCache(stored_keys, stored_values, where[:, 2], kept.sum(axis=-1))


@control(COMPRESS, array_library="torch", dtypes=ALL)
def torch_indexing(keys, values, kept):
    return CompressedCache(keys[kept], values[kept], kept.nonzero()[:, 2], kept.sum(dim=-1))


@control(COMPRESS)
def sorted_and_cut(keys, values, kept):
    """The kept positions by a stable sort of each head, then the first `length` of each."""
    lengths = kept.sum(axis=-1)
    order = np.argsort(~kept, axis=-1, kind="stable")
    cut = np.arange(kept.shape[-1]) < lengths[..., None]
    stored_keys, stored_values = (np.take_along_axis(states, order[..., None], axis=2)[cut] for states in (keys, values))
    return CompressedCache(stored_keys, stored_values, order[cut], lengths)


def walk(lengths):
    start = 0
    for index in np.ndindex(tuple(lengths.shape)):
        stop = start + int(lengths[index])
        yield index, slice(start, stop)
        start = stop


@control(ATTEND, dtypes=NUMPY)
def one_token_at_a_time(queries, cache):
    """Online softmax: a running maximum, a running sum and a running output."""
    group = queries.shape[1] // cache.lengths.shape[1]
    output = np.zeros((*queries.shape[:3], cache.values.shape[-1]), queries.dtype)
    normaliser = np.full(queries.shape[:3], -np.inf, queries.dtype)
    for (item, kv_head), rows in walk(cache.lengths):
        for head in range(kv_head * group, (kv_head + 1) * group):
            top, total = np.full(queries.shape[2], -np.inf, queries.dtype), np.zeros(queries.shape[2], queries.dtype)
            for row in range(rows.start, rows.stop):
                logit = queries[item, head] @ cache.keys[row] / np.sqrt(queries.dtype.type(queries.shape[-1]))
                higher = np.maximum(top, logit)
                old, new = np.exp(top - higher), np.exp(logit - higher)
                output[item, head] = output[item, head] * old[:, None] + new[:, None] * cache.values[row]
                top, total = higher, total * old + new
            if rows.start < rows.stop:
                output[item, head] /= total[:, None]
                normaliser[item, head] = top + np.log(total)
    return output, normaliser


@control(ATTEND, array_library="torch", dtypes=ALL)
def torch_library_attention(queries, cache):
    """torch's own attention head by head, in float32 for halves, the log-sum-exp beside it."""
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    group = queries.shape[1] // cache.lengths.shape[1]
    output = torch.zeros(*queries.shape[:3], cache.values.shape[-1], dtype=wide)
    normaliser = torch.full(queries.shape[:3], -torch.inf, dtype=wide)
    for (item, kv_head), rows in walk(cache.lengths):
        if rows.start == rows.stop:
            continue
        readers = slice(kv_head * group, (kv_head + 1) * group)
        query, keys, values = (entry.to(wide) for entry in (queries[item, readers], cache.keys[rows], cache.values[rows]))
        same = keys.expand(group, -1, -1), values.expand(group, -1, -1)
        output[item, readers] = torch.nn.functional.scaled_dot_product_attention(query, *same)
        normaliser[item, readers] = torch.logsumexp(query @ keys.T * query.shape[-1] ** -0.5, dim=-1)
    return output.to(queries.dtype), normaliser


@control(ATTEND, array_library="torch", dtypes=("float64", "float32"))
def padded_storage(queries, cache):
    """Heads padded to the longest, the padding masked with -inf."""
    batch, num_kv_heads = cache.lengths.shape
    group, longest = queries.shape[1] // num_kv_heads, int(cache.lengths.max())
    keys = torch.zeros(batch, num_kv_heads, longest, queries.shape[-1], dtype=queries.dtype)
    values = torch.full((batch, num_kv_heads, longest, cache.values.shape[-1]), 1e3, dtype=queries.dtype)
    for index, rows in walk(cache.lengths):
        keys[index][: rows.stop - rows.start] = cache.keys[rows]
        values[index][: rows.stop - rows.start] = cache.values[rows]
    empty = torch.arange(longest) >= cache.lengths[..., None]
    grouped = queries.unflatten(1, (num_kv_heads, group))
    logits = torch.einsum("bhgmd,bhtd->bhgmt", grouped, keys) * queries.shape[-1] ** -0.5
    logits = logits.masked_fill(empty[:, :, None, None], -torch.inf)
    normaliser = logits.logsumexp(dim=-1)
    weights = torch.exp(logits - torch.where(normaliser.isinf(), 0, normaliser)[..., None])
    output = torch.einsum("bhgmt,bhtd->bhgmd", weights, torch.where(empty[..., None], 0, values))
    return output.flatten(1, 2), normaliser.flatten(1, 2)


@control("knorm.score", dtypes=NUMPY)
def library_norm(keys):
    return -np.linalg.norm(keys, axis=-1)


@control("knorm.score", dtypes=NUMPY)
def scaled_norm(keys):
    """The largest component divided out first, as against overflow."""
    largest = np.abs(keys).max(axis=-1, keepdims=True)
    scaled = np.divide(keys, largest, out=np.zeros_like(keys), where=largest > 0)
    return -largest[..., 0] * np.sqrt((scaled[..., ::-1] ** 2).sum(axis=-1))


@control("knorm.score", array_library="torch", dtypes=ALL)
def torch_norm(keys):
    return -torch.linalg.vector_norm(keys, dim=-1)


def refuse_sinks(sink_size) -> None:
    if sink_size < 0:
        raise ValueError(f"sink_size: got {sink_size}")


@control("streaming_llm.score")
def ages(keys, *, sink_size=4):
    """Minus the age of a token, the sinks younger than all."""
    refuse_sinks(sink_size)
    position = np.arange(keys.shape[2])
    age = np.where(position < sink_size, -1.0 - keys.shape[2], keys.shape[2] - 1.0 - position)
    return np.broadcast_to(-age, keys.shape[:3]).copy()


@control("streaming_llm.score")
def recency_in_thirds(keys, *, sink_size=4):
    refuse_sinks(sink_size)
    position = np.arange(keys.shape[2]) / 3
    return np.tile(np.where(np.arange(keys.shape[2]) < sink_size, 1e9, position), (*keys.shape[:2], 1))


@control("streaming_llm.score", array_library="torch", dtypes=("float64", "float32"))
def torch_positions(keys, *, sink_size=4):
    refuse_sinks(sink_size)
    position = torch.arange(keys.shape[2], dtype=torch.float32)
    position[:sink_size] = torch.inf
    return position.expand(keys.shape[:3]).clone()


def own_of(scores, budget, floor_ratio, protected) -> tuple[int, np.ndarray, np.ndarray]:
    """The budget, the protected tokens [B, H_kv, T], and how many tokens each head keeps for itself [B, H_kv, 1]."""
    if budget < 0:
        raise ValueError(f"budget: got {budget}")
    ratio = Fraction(str(floor_ratio))
    if not 0 <= ratio <= 1:
        raise ValueError(f"floor_ratio: got {floor_ratio}")
    budget = min(budget, scores.shape[2])
    if protected is not None and "bool" not in str(protected.dtype):
        raise ValueError(f"protected: got {protected.dtype}")
    protected = np.zeros(scores.shape, dtype=bool) if protected is None else np.asarray(protected)
    if protected.shape != tuple(scores.shape):
        raise ValueError(f"protected: got {protected.shape}")
    taken = protected.sum(axis=-1, keepdims=True)
    if (taken > budget).any():
        raise ValueError(f"protected: got {taken.max()} tokens, more than the budget")
    return budget, protected, taken + np.array([int(ratio * rest) for rest in range(budget + 1)])[budget - taken]


@control("ada_kv.select", max_length=4096)
def token_by_token(scores, budget, *, floor_ratio=0.2, protected=None):
    """The floors first, then one token after another to the best of the layer that is left."""
    budget, kept, own = own_of(scores, budget, floor_ratio, protected)
    kept = kept.copy()
    for head in np.ndindex(scores.shape[:2]):
        best = [token for token in np.argsort(-scores[head], kind="stable") if not kept[head][token]]
        kept[head][best[: own[head][0] - kept[head].sum()]] = True
    for item in range(scores.shape[0]):
        for _ in range(scores.shape[1] * budget - kept[item].sum()):
            left = np.where(kept[item], -np.inf, scores[item])
            kept[item][np.unravel_index(left.argmax(), left.shape)] = True
    return kept


@control("ada_kv.select")
def boosted_floors(scores, budget, *, floor_ratio=0.2, protected=None):
    """The floors lifted above every other score, then one sort of the layer."""
    budget, protected, own = own_of(scores, budget, floor_ratio, protected)
    rank = np.argsort(np.argsort(np.where(protected, -np.inf, -scores), axis=-1, kind="stable"), axis=-1)
    lifted = np.where(rank < own, np.inf, scores).reshape(scores.shape[0], -1)
    order = np.argsort(-lifted, axis=-1, kind="stable")[:, : scores.shape[1] * budget]
    kept = np.zeros(lifted.shape, dtype=bool)
    np.put_along_axis(kept, order, True, axis=-1)
    return kept.reshape(scores.shape)


@control("ada_kv.select", array_library="torch", dtypes=ALL)
def torch_layer_sort(scores, budget, *, floor_ratio=0.2, protected=None):
    budget, protected, own = own_of(scores, budget, floor_ratio, protected)
    first = torch.where(torch.from_numpy(protected), torch.inf, scores)
    rank = first.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    lifted = torch.where(rank < torch.from_numpy(own), torch.inf, scores).flatten(1)
    order = lifted.argsort(dim=-1, descending=True, stable=True)[:, : scores.shape[1] * budget]
    return torch.zeros(lifted.shape, dtype=torch.bool).scatter(1, order, True).view(scores.shape)


def exact_line(budget, num_layers, beta) -> list[Fraction]:
    """The budgets before they are rounded."""
    for name, value in (("budget", budget), ("num_layers", num_layers), ("beta", beta)):
        if value < 1:
            raise ValueError(f"{name}: got {value}")
    if num_layers == 1:
        return [Fraction(budget)]
    last = max(Fraction(1), Fraction(budget) / Fraction(str(beta)))
    return [2 * budget - last - layer * 2 * (budget - last) / (num_layers - 1) for layer in range(num_layers)]


@control("pyramid_kv.budgets")
def carried_remainder(budget, num_layers, *, beta=20.0):
    """The largest remainders found one at a time."""
    line = exact_line(budget, num_layers, beta)
    whole = [share.numerator // share.denominator for share in line]
    for _ in range(num_layers * budget - sum(whole)):
        gap = [share - count for share, count in zip(line, whole, strict=True)]
        whole[gap.index(max(gap))] += 1
    return whole


def in_pairs(budget, num_layers, beta, rounded) -> list[int]:
    """The line rounded in pairs, first with last: their sum is twice the budget."""
    line, whole = exact_line(budget, num_layers, beta), [budget] * num_layers
    for layer in range(num_layers // 2):
        whole[layer] = rounded(line[layer])
        whole[-1 - layer] = 2 * budget - whole[layer]
    return whole


@control("pyramid_kv.budgets")
def rounded_line(budget, num_layers, *, beta=20.0):
    return in_pairs(budget, num_layers, beta, int)


@control("pyramid_kv.budgets")
def rounded_up_pairs(budget, num_layers, *, beta=20.0):
    """The upper half of the pairs rounded to the nearest."""
    return in_pairs(budget, num_layers, beta, lambda share: min(int(share + Fraction(1, 2)), 2 * budget - 1))
