"""Correct H2Os of other kinds."""

from __future__ import annotations

import math

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.variants import counted_before
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY, hidden, refuse, streamed, torch_weights, widened

SCORE, SELECT = "h2o.score", "h2o.select"


def over_the_group(received, keys):
    """[B, H_q, T] to [B, H_kv, T], the mean over each group."""
    return received.reshape(*keys.shape[:2], -1, keys.shape[2]).mean(2)


@control(SCORE, dtypes=NUMPY)
def as_decoding_does_it(queries, keys):
    """The attention of one query after the other added to running scores."""
    refuse(queries, keys)
    scores = np.zeros((*queries.shape[:2], keys.shape[2]), keys.dtype)
    for row in np.moveaxis(streamed(queries, keys), 2, 0):
        scores = scores + row
    return over_the_group(scores, keys)


@control(SCORE, dtypes=NUMPY)
def tokens_first(queries, keys):
    """A permuted layout; the group's mean before the sum over the queries, that taken from the last query to the first."""
    refuse(queries, keys)
    length, scale = keys.shape[2], keys.dtype.type(1 / math.sqrt(keys.shape[-1]))
    by_token = np.ascontiguousarray(keys.transpose(2, 0, 1, 3)) * scale
    grouped = queries.reshape(keys.shape[0], keys.shape[1], -1, *queries.shape[2:])
    logits = np.einsum("tbhd,bhgmd->mtbhg", by_token, grouped)
    seen = np.arange(length) <= np.arange(length - queries.shape[2], length)[:, None]
    logits = np.where(seen[:, :, None, None, None], logits, -np.inf)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights = (powers / powers.sum(axis=1, keepdims=True)).mean(axis=-1)
    return weights[::-1].sum(axis=0).transpose(1, 2, 0)


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_all_at_once(queries, keys):
    """torch, at least in float32, the whole matrix, summed as a product with ones."""
    refuse(queries, keys)
    weights = widened(queries, keys)
    received = (weights.new_ones(1, weights.shape[2]) @ weights)[:, :, 0]
    return over_the_group(received, keys).to(keys.dtype)


@control(SCORE, array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_weights_rounded(queries, keys):
    """The weights in the dtype of the keys, as eager code gives them, summed in float32 or wider."""
    refuse(queries, keys)
    wide = torch.promote_types(keys.dtype, torch.float32)
    return over_the_group(torch_weights(queries, keys).sum(dim=2, dtype=wide), keys).to(keys.dtype)


@control(SCORE, array_library="torch", dtypes=("float64", "float32"))
def torch_padded_blocks(queries, keys):
    """Blocks of 16 queries, the last one filled up with rubbish whose weights are masked."""
    refuse(queries, keys)
    num_queries, length = queries.shape[2], keys.shape[2]
    repeated = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) / math.sqrt(keys.shape[-1])
    padded = torch.cat([queries, torch.full((*queries.shape[:2], -num_queries % 16, queries.shape[3]), 1e3)], dim=2).to(keys.dtype)
    unseen = torch.cat([hidden(num_queries, length), torch.zeros(-num_queries % 16, length, dtype=torch.bool)])
    total = torch.zeros(*queries.shape[:2], length, dtype=keys.dtype)
    for start in range(0, padded.shape[2], 16):
        rows = slice(start, start + 16)
        weights = (padded[:, :, rows] @ repeated.mT).masked_fill(unseen[rows], -torch.inf).softmax(dim=-1)
        real = torch.arange(start, start + 16) < num_queries
        total += weights.masked_fill(~real[:, None], 0).sum(dim=2)
    return over_the_group(total, keys)


def refuse_budget(budget) -> None:
    if not isinstance(budget, int) or budget < 1:
        raise ValueError(f"budget: got {budget}")


@control(SELECT, dtypes=NUMPY)
def two_parts(queries, keys, *, budget):
    """The heavy hitters among the tokens before the recent ones, by a sort, and then the recent ones."""
    refuse_budget(budget)
    scores, length = as_decoding_does_it(queries, keys), keys.shape[2]
    before = max(0, length - (budget + 1) // 2)
    kept = np.arange(length) >= before + np.zeros(scores.shape, dtype=int)
    order = np.argsort(-scores[..., :before], axis=-1, kind="stable")[..., : budget // 2]
    np.put_along_axis(kept, order, True, axis=-1)
    return kept


@control(SELECT, dtypes=NUMPY)
def counted_rank(queries, keys, *, budget):
    """A token is kept if fewer than `budget` come before it."""
    refuse_budget(budget)
    recent = np.arange(keys.shape[2]) >= keys.shape[2] - (budget + 1) // 2
    return counted_before(np.where(recent, np.inf, tokens_first(queries, keys))) < budget


@control(SELECT, array_library="torch", dtypes=ALL)
def torch_sorted(queries, keys, *, budget):
    """torch's stable sort of scores in which the recent tokens are infinite."""
    refuse_budget(budget)
    scores = torch_all_at_once(queries, keys)
    recent = (budget + 1) // 2
    scores[..., max(0, keys.shape[2] - recent) :] = torch.inf
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :budget]
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, order, True)
