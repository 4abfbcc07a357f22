"""Correct selections, caches, attention, baselines and allocators of other kinds, and what variants of
methods share: each file of them begins with `from evictionary.spec_tests.shared.variants import *`.

A variant is named for what it does in another way. One in torch computes in the dtype of its inputs, as eager
code does, and rounds at each step, unless it is widened by `in_float32` or `through_float32`.
"""

import functools
import importlib
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

from evictionary.reference import selection
from evictionary.reference.cache import CompressedCache
from evictionary.spec_tests.proof.planted import control, put_together
from evictionary.spec_tests.shared import forms

__all__ = [
    "ALL",
    "NUMPY",
    "Fraction",
    "cast",
    "control",
    "functools",
    "hidden",
    "in_float32",
    "math",
    "merged",
    "np",
    "online",
    "padded_storage",
    "put_together",
    "streamed",
    "through_float32",
    "torch",
    "torch_indexing",
    "torch_top",
    "torch_weights",
]

BUDGET, TOP_K, COMPRESS, ATTEND = "selection.budget", "selection.top_k", "cache.compress", "attention.attend"
BY_GROUP, CAUSAL = "attention.by_group", "attention.causal_attention"
NUMPY = ("float64", "float32")
ALL = (*NUMPY, "float16", "bfloat16")


def cast(value, dtype=None):
    """Floating-point tensors, alone or in a tuple, in a dtype, or without one at least in float32; all
    else as it is.
    """
    if isinstance(value, tuple):
        entries = [cast(each, dtype) for each in value]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype or torch.promote_types(value.dtype, torch.float32))


def in_float32(function):
    """Computes, and answers, at least in float32."""

    @functools.wraps(function)
    def wide(*args, **settings):
        return function(*cast(args), **{name: cast(value) for name, value in settings.items()})

    return wide


def through_float32(function):
    """Computes at least in float32; what it answers is
    rounded to the dtype of its last argument of real numbers.
    """

    @functools.wraps(function)
    def rounded(*args, **settings):
        dtype = [each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()][
            -1
        ]
        return cast(in_float32(function)(*args, **settings), dtype)

    return rounded


def torch_top(scores, count):
    """The mask of the best of each row, by a stable sort."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, order[..., :count], True)


# Selections


@control(BUDGET)
def removed_rounded_up(length, compression_ratio):
    return max(1, length - math.ceil(length * Decimal(str(compression_ratio))))


def first_protected(top):
    """A selection by a form of `top`; where tokens are protected, it is asked for the best of the ranks
    that have these first.
    """

    def kept(scores, budget, protected=None):
        if protected is not None:
            scores = -np.argsort(np.lexsort((-scores, ~protected)), axis=-1)
        return top(scores, budget)

    return kept


control(TOP_K, dtypes=NUMPY, name="by_a_heap")(first_protected(forms.top_by_a_heap))


@control(TOP_K, array_library="torch", dtypes=ALL)
def torch_stable_sort(scores, budget, protected=None):
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if protected is not None:
        order = order.gather(-1, (~protected).gather(-1, order).to(torch.int8).argsort(dim=-1, stable=True))
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, order[..., :budget], True)


@control(TOP_K, array_library="torch", dtypes=ALL, edges=False)
def torch_topk(scores, budget, protected=None):
    """torch.topk, which keeps any of equal scores; the
    protected stand above all others, and are counted first.
    """
    kept = torch.zeros(scores.shape, dtype=torch.bool) if protected is None else protected.clone()
    for row in np.ndindex(*scores.shape[:-1]):
        free = (~kept[row]).nonzero()[:, 0]
        count = min(budget, scores.shape[-1]) - (scores.shape[-1] - len(free))
        kept[row][free[scores[row][free].topk(count).indices]] = True
    return kept


@control(COMPRESS, array_library="torch", dtypes=ALL)
def torch_indexing(keys, values, kept):
    return CompressedCache(keys[kept], values[kept], kept.nonzero()[:, 2], kept.sum(dim=-1))


@control(COMPRESS)
def sorted_and_cut(keys, values, kept):
    """The kept positions by a stable sort of each head, then the first `length` of each."""
    lengths = kept.sum(axis=-1)
    order = np.argsort(~kept, axis=-1, kind="stable")
    cut = np.arange(kept.shape[-1]) < lengths[..., None]
    stored_keys, stored_values = (
        np.take_along_axis(states, order[..., None], axis=2)[cut] for states in (keys, values)
    )
    return CompressedCache(stored_keys, stored_values, order[cut], lengths)


def online(queries, keys, values, causal=False):
    """Attention [..., M, D_v] with a running maximum, sum and output, one token after the other; its
    log-sum-exp [..., M].
    """
    seen = np.tri(
        queries.shape[-2],
        keys.shape[-2],
        (keys.shape[-2] - queries.shape[-2]) if causal else keys.shape[-2],
        dtype=bool,
    )
    output = np.zeros((*queries.shape[:-1], values.shape[-1]), queries.dtype)
    top, total = (
        np.full(queries.shape[:-1], -np.inf, queries.dtype),
        np.zeros(queries.shape[:-1], queries.dtype),
    )
    for place in range(keys.shape[-2]):
        logit = (queries * keys[..., place : place + 1, :]).sum(axis=-1) / queries.dtype.type(
            math.sqrt(keys.shape[-1])
        )
        logit = np.where(seen[:, place], logit, -np.inf)
        higher = np.maximum(top, logit)
        old, new = np.exp(top - higher), np.exp(logit - higher)
        output = output * old[..., None] + new[..., None] * values[..., place : place + 1, :]
        top, total = higher, total * old + new
    some = np.where(total > 0, total, 1)
    return output / some[..., None], top + np.log(some)


def softmax(logits):
    """Along the last axis; 0 where all logits are -inf."""
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1)


def merged(*parts):
    """Attention from the outputs [..., M, D_v] and log-sum-exps [..., M] over several sets of tokens, as
    split kernels do it.
    """
    outputs, log_totals = (np.stack(part, axis=-1) for part in zip(*parts, strict=True))
    return (outputs @ softmax(log_totals)[..., None])[..., 0]


def each_head(attention):
    """`attend` by the attention of the readers of one head
    [G, M, D] to its rows, and the log-sum-exp beside it.
    """

    @functools.wraps(attention)
    def attend(queries, cache):
        library, group = (
            torch if isinstance(queries, torch.Tensor) else np,
            queries.shape[1] // cache.lengths.shape[1],
        )
        output = library.zeros((*queries.shape[:3], cache.values.shape[-1]), dtype=queries.dtype)
        normaliser = library.full(queries.shape[:3], -library.inf, dtype=queries.dtype)
        stop = 0
        for item, head in np.ndindex(*cache.lengths.shape):
            start, stop = stop, stop + int(cache.lengths[item, head])
            readers = item, slice(head * group, (head + 1) * group)
            if start < stop:
                output[readers], normaliser[readers] = attention(
                    queries[readers], cache.keys[start:stop], cache.values[start:stop]
                )
        return output, normaliser

    return attend


control(ATTEND, dtypes=NUMPY, name="one_token_at_a_time")(each_head(online))


@control(ATTEND, array_library="torch", dtypes=ALL)
@through_float32
@each_head
def torch_library_attention(queries, keys, values):
    keys, values = (states.expand(len(queries), -1, -1) for states in (keys, values))
    logits = queries @ keys.mT * queries.shape[-1] ** -0.5
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values), logits.logsumexp(dim=-1)


@control(ATTEND, array_library="torch", dtypes=("float64", "float32"))
def padded_storage(queries, cache):
    """Heads padded to the longest, the padding masked with -inf."""
    empty = torch.arange(int(cache.lengths.max())) >= cache.lengths[..., None]
    keys, values = (
        torch.full((*empty.shape, rows.shape[-1]), 1e3, dtype=rows.dtype)
        for rows in (cache.keys, cache.values)
    )
    keys[~empty], values[~empty] = cache.keys, cache.values
    grouped = queries.unflatten(1, (cache.lengths.shape[1], -1))
    logits = torch.einsum("bhgmd,bhtd->bhgmt", grouped, keys) * queries.shape[-1] ** -0.5
    logits = logits.masked_fill(empty[:, :, None, None], -torch.inf)
    normaliser = logits.logsumexp(dim=-1)
    weights = torch.exp(logits - torch.where(normaliser.isinf(), 0, normaliser)[..., None])
    output = torch.einsum("bhgmt,bhtd->bhgmd", weights, torch.where(empty[..., None], 0, values))
    return output.flatten(1, 2), normaliser.flatten(1, 2)


# Attention


def hidden(num_queries, length):
    """True where a query does not see a token, [M, T]."""
    return torch.ones(num_queries, length, dtype=torch.bool).triu(length - num_queries + 1)


def torch_weights(queries, keys):
    """Causal attention [B, H_q, M, T] in the dtype of the
    keys throughout, the keys repeated for each query head.
    """
    repeated = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    logits = queries @ repeated.mT / math.sqrt(keys.shape[-1])
    return logits.masked_fill(hidden(*logits.shape[-2:]), -torch.inf).softmax(dim=-1)


def streamed(queries, keys):
    """Causal attention [B, H_q, M, T] with a running maximum and a running sum over tiles of 16 tokens."""
    repeated = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    logits = queries * keys.dtype.type(keys.shape[-1] ** -0.5) @ np.swapaxes(repeated, -1, -2)
    return forms.softmax_online(np.where(hidden(*logits.shape[-2:]).numpy(), -np.inf, logits))


@control(BY_GROUP, dtypes=NUMPY)
def permuted_layout(queries, keys):
    """Channels first in memory: the same numbers with other strides."""
    first = np.ascontiguousarray(np.moveaxis(queries, -1, 0)).reshape(
        queries.shape[3], queries.shape[0], keys.shape[1], -1, queries.shape[2]
    )
    return np.moveaxis(first, 0, -1), np.moveaxis(np.ascontiguousarray(np.moveaxis(keys, -1, 0)), 0, -1)[
        :, :, None
    ]


@control(BY_GROUP, array_library="torch", dtypes=ALL)
def torch_unflatten(queries, keys):
    return queries.unflatten(1, (keys.shape[1], -1)), keys.unsqueeze(2)


control(CAUSAL, dtypes=NUMPY, name="tiles_of_tokens")(streamed)
control(CAUSAL, array_library="torch", dtypes=ALL, name="torch_each_step_rounded")(torch_weights)


@control(CAUSAL, array_library="torch", dtypes=ALL)
@through_float32
def torch_attention_of_unit_values(queries, keys):
    """torch's own attention: the output over one-hot values is the weights."""
    one_hot = torch.eye(keys.shape[-2], dtype=keys.dtype).expand(*keys.shape[:-1], -1)
    seen = ~hidden(queries.shape[-2], keys.shape[-2])
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, one_hot, attn_mask=seen)


@control(CAUSAL, dtypes=NUMPY)
def powers_of_two(queries, keys):
    """Powers of two; tokens padded to a multiple of 16 and masked."""
    length = keys.shape[-2]
    padded = np.pad(keys, [(0, 0)] * (keys.ndim - 2) + [(0, -length % 16), (0, 0)], constant_values=3)
    logits = np.einsum("...md,...td->...mt", queries, padded) * keys.dtype.type(keys.shape[-1] ** -0.5)
    seen = np.arange(padded.shape[-2]) <= np.arange(length - queries.shape[-2], length)[:, None]
    return forms.softmax_in_powers_of_two(np.where(seen, logits, -np.inf))[..., :length]


# Baselines and allocators


@control("knorm.score", dtypes=NUMPY)
def scaled_norm(keys):
    """The largest component divided out first, as against overflow."""
    largest = np.abs(keys).max(axis=-1, keepdims=True)
    scaled = np.divide(keys, largest, out=np.zeros_like(keys), where=largest > 0)
    return -largest[..., 0] * np.sqrt((scaled[..., ::-1] ** 2).sum(axis=-1))


@control("knorm.score", array_library="torch", dtypes=ALL)
def torch_norm(keys):
    return -torch.linalg.vector_norm(keys, dim=-1)


@control("knorm.score", dtypes=NUMPY)
def norms_by_hypot(keys):
    return -functools.reduce(np.hypot, np.moveaxis(keys, -1, 0), np.zeros_like(keys[..., 0]))


@control("streaming_llm.score")
def ages(keys, *, sink_size=4):
    """Minus the age of a token, the sinks younger than all."""
    position = np.arange(keys.shape[2])
    age = np.where(position < sink_size, -1.0 - keys.shape[2], keys.shape[2] - 1.0 - position)
    return np.broadcast_to(-age, keys.shape[:3]).copy()


@control("streaming_llm.score")
def recency_in_thirds(keys, *, sink_size=4):
    position = np.arange(keys.shape[2]) / 3
    return np.tile(np.where(np.arange(keys.shape[2]) < sink_size, 1e9, position), (*keys.shape[:2], 1))


@control("streaming_llm.score", array_library="torch", dtypes=("float64", "float32"))
def torch_positions(keys, *, sink_size=4):
    position = torch.arange(keys.shape[2], dtype=torch.float32)
    position[:sink_size] = torch.inf
    return position.expand(keys.shape[:3]).clone()


def own_of(scores, budget, floor_ratio, protected) -> tuple[int, np.ndarray, np.ndarray]:
    """The budget, the protected tokens [B, H_kv, T], and
    how many tokens each head keeps for itself [B, H_kv, 1].
    """
    ratio, budget = Fraction(str(floor_ratio)), min(budget, scores.shape[2])
    protected = np.zeros(scores.shape, dtype=bool) if protected is None else np.asarray(protected)
    taken = protected.sum(axis=-1, keepdims=True)
    return (
        budget,
        protected,
        taken + np.array([int(ratio * rest) for rest in range(budget + 1)])[budget - taken],
    )


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


@control("ada_kv.select", array_library="torch", dtypes=ALL)
def torch_layer_sort(scores, budget, *, floor_ratio=0.2, protected=None):
    budget, protected, own = own_of(scores, budget, floor_ratio, protected)
    first = torch.where(torch.from_numpy(protected), torch.inf, scores)
    rank = first.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    lifted = torch.where(rank < torch.from_numpy(own), torch.inf, scores).flatten(1)
    return torch_top(lifted, scores.shape[1] * budget).view(scores.shape)


def last_of_equals(scores, budget, protected=None):
    """A top-k that keeps the later of equal scores."""
    held = None if protected is None else protected[..., ::-1]
    return selection.top_k(scores[..., ::-1], budget, held)[..., ::-1]


# Which of equal scores stay is our decision: whoever decides otherwise fails edges alone.
for path in (
    "ada_kv.select", "attention_matching.select", "criticalkv.score", "expected_attention.decode_step",
    "gvote_theory.allocate", "h2o.select", "keydiff.process_block", "keydiff_theory.attention_policy",
    "keydiff_variants.select_with_recent", "kvzip.top_r", "momentkv.decode_step", "momentkv.select_prompt",
):  # fmt: skip
    stem, function = path.split(".")
    module = importlib.import_module(f"evictionary.reference.{stem}")
    control(path, edges=False, name=f"{function}_last_of_equals")(
        put_together(module, function, top_k=last_of_equals)
    )


def exact_line(budget, num_layers, beta) -> list[Fraction]:
    """The budgets before they are rounded."""
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
