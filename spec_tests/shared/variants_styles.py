"""The same formulas as different people write them: lists, recursion, other forms of log-sum-exp, in place, wider, sorted."""

from __future__ import annotations

import heapq
import math
from functools import reduce

import numpy as np
import torch

from evictionary.spec_tests.keydiff.variants import SCORE as KEYDIFF
from evictionary.spec_tests.keydiff.variants import refuse as refuse_keys
from evictionary.spec_tests.lagkv.variants import scorer
from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.refusal import refuse_unless
from evictionary.spec_tests.shared.variants import refuse_protection
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY


def deviation_of(states, following):
    """LagKV's deviation before the softmax, as the paper prints it, with our decisions where it divides 0 by 0."""
    low, high = following.min(axis=-2, keepdims=True), following.max(axis=-2, keepdims=True)
    flat = high == low
    scaled = np.where(flat, 0, (states - low) / np.where(flat, 1, high - low))
    return scaled.std(axis=-1, ddof=1) if scaled.shape[-1] > 1 else 0 * scaled[..., 0]


@scorer(dtypes=NUMPY)
def log_add_exp(states, following):
    deviation = deviation_of(states, following)
    return np.exp(deviation - np.logaddexp.reduce(deviation, axis=-1, keepdims=True))


@scorer(dtypes=NUMPY)
def log_add_exp_of_a_list(states, following):
    deviation = deviation_of(states, following)
    columns = [deviation[..., token] for token in range(deviation.shape[-1])]
    return np.exp(deviation - reduce(np.logaddexp, columns)[..., None])


@scorer(dtypes=NUMPY)
def softmax_by_powers_of_two(states, following):
    deviation = deviation_of(states, following)
    powers = np.exp2((deviation - deviation.max(axis=-1, keepdims=True)) * math.log2(math.e))
    return powers / np.add.reduce(powers, axis=-1, keepdims=True)


@scorer(dtypes=NUMPY, max_length=4096)
def every_share_by_differences(states, following):
    """1 / sum_j exp(d_j - d_i): no maximum, no quotient of sums."""
    deviation = deviation_of(states, following)
    return 1 / np.exp(deviation[..., None, :] - deviation[..., :, None]).sum(axis=-1)


@scorer(dtypes=("float64", "float32"))
def in_long_double(states, following):
    deviation = deviation_of(states.astype(np.longdouble), following.astype(np.longdouble))
    weights = np.exp(deviation - deviation.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(states.dtype)


@scorer(dtypes=NUMPY)
def normalised_in_place(states, following):
    work = states - following.min(axis=-2, keepdims=True)
    spread = np.broadcast_to(np.ptp(following, axis=-2, keepdims=True), work.shape)
    np.divide(work, spread, out=work, where=spread > 0)
    work[spread == 0] = 0
    if work.shape[-1] > 1:
        work -= work.mean(axis=-1, keepdims=True)
        work *= work
        shares = np.sqrt(work.sum(axis=-1) / (work.shape[-1] - 1))
    else:
        shares = np.zeros_like(work[..., 0])
    shares -= shares.max(axis=-1, keepdims=True)
    np.exp(shares, out=shares)
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


@scorer(dtypes=NUMPY, max_length=256)
def lists_and_loops(states, following):
    """One head at a time, in Python's own numbers."""
    out = np.empty(states.shape[:-1], states.dtype)
    for head in np.ndindex(*states.shape[:-2]):
        rows, columns = states[head].tolist(), list(zip(*following[head].tolist(), strict=True))
        deviations = []
        for row in rows:
            scaled = []
            for value, column in zip(row, columns, strict=True):
                spread = max(column) - min(column)
                scaled.append((value - min(column)) / spread if spread else 0.0)
            mean = sum(scaled) / len(scaled)
            squares = sum((value - mean) ** 2 for value in scaled)
            deviations.append(math.sqrt(squares / (len(scaled) - 1)) if len(scaled) > 1 else 0.0)
        weights = [math.exp(value - max(deviations)) for value in deviations]
        out[head] = [weight / sum(weights) for weight in weights]
    return out


@scorer(array_library="torch", dtypes=ALL)
def torch_log_softmax(states, following):
    states, following = (
        states.float() if states.dtype != torch.float64 else states,
        following.to(torch.promote_types(states.dtype, torch.float32)),
    )
    low, high = following.aminmax(dim=-2, keepdim=True)
    scaled = ((states - low) / (high - low)).masked_fill(high == low, 0)
    deviation = scaled.std(dim=-1) if scaled.shape[-1] > 1 else scaled.sum(dim=-1) * 0
    return deviation.log_softmax(dim=-1).exp()


def pairwise(parts):
    """A sum by halves, as recursion writes it."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return pairwise(parts[:middle]) + pairwise(parts[middle:])


@control(KEYDIFF, dtypes=NUMPY, max_length=4096)
def anchor_by_recursion(keys):
    refuse_keys(keys)
    norms = np.sqrt((keys * keys).sum(axis=-1, keepdims=True))
    directions = keys / np.where(norms == 0, 1, norms)
    mean = pairwise([directions[..., token, :] for token in range(keys.shape[-2])]) / keys.shape[-2]
    length = np.sqrt((mean * mean).sum(axis=-1))[..., None]
    return -np.einsum("...td,...d->...t", directions, mean) / np.where(length == 0, 1, length)


@control(KEYDIFF, dtypes=("float64", "float32"), max_length=4096)
def all_cosines(keys):
    """Every pair of keys: the mean cosine to the others and itself, over the length of the anchor."""
    refuse_keys(keys)
    norms = np.linalg.norm(keys, axis=-1, keepdims=True)
    directions = np.divide(keys, norms, out=np.zeros_like(keys), where=norms > 0)
    means = (directions @ np.swapaxes(directions, -1, -2)).mean(axis=-1)
    mean = directions.mean(axis=-2)
    length = np.sqrt((mean * mean).sum(axis=-1))[..., None]
    return -means / np.where(length == 0, 1, length)


@control(KEYDIFF, dtypes=("float64", "float32"), max_length=256)
def keys_in_lists(keys):
    refuse_keys(keys)
    out = np.empty(keys.shape[:-1], keys.dtype)
    for head in np.ndindex(*keys.shape[:-2]):
        rows = keys[head].tolist()
        directions = [[x / size for x in row] if (size := math.hypot(*row)) else row for row in rows]
        mean = [sum(column) / len(rows) for column in zip(*directions, strict=True)]
        length = math.hypot(*mean) or 1.0
        out[head] = [-sum(a * b for a, b in zip(row, mean, strict=True)) / length for row in directions]
    return out


@control(KEYDIFF, dtypes=("float64", "float32"))
def keys_in_long_double(keys):
    refuse_keys(keys)
    wide = keys.astype(np.longdouble)
    norms = np.sqrt((wide * wide).sum(axis=-1, keepdims=True))
    wide = wide / np.where(norms == 0, 1, norms)
    mean = wide.mean(axis=-2, keepdims=True)
    length = np.sqrt((mean * mean).sum(axis=-1))
    return (-(wide * mean).sum(axis=-1) / np.where(length == 0, 1, length)).astype(keys.dtype)


@control("knorm.score", dtypes=("float64", "float32"))
def norms_by_hypot(keys):
    refuse_keys(keys)
    return -reduce(np.hypot, [keys[..., channel] for channel in range(keys.shape[-1])], np.zeros_like(keys[..., 0]))


@control("selection.top_k", dtypes=("float64", "float32"))
def by_a_heap(scores, budget, protected=None):
    """The best of each row with a heap of pairs, ties to the lower position."""
    refuse_unless(scores=np.ndim(scores) >= 1 and not np.isnan(scores).any(), budget=budget >= 0)
    protected = np.zeros(scores.shape, dtype=bool) if protected is None else protected
    refuse_protection(budget, protected)
    kept = np.zeros(scores.shape, dtype=bool)
    for row in np.ndindex(*scores.shape[:-1]):
        order = [(not held, -score, place) for place, (score, held) in enumerate(zip(scores[row], protected[row], strict=True))]
        kept[row][[place for *_, place in heapq.nsmallest(budget, order)]] = True
    return kept
