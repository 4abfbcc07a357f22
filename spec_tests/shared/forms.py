"""Steps of many methods as different people write them: forms of a softmax, of RoPE, of the best tokens.

A file `forms.py` is what a student could hand in: NumPy alone, and each part of a method as several
functions, its forms. `FORMS` of a method names them; the first form of a part is the one that others call
unless another is chosen. The right variants are forms put together (`proof/planted.py::put_together`), and so
are the submissions of `tests/classroom_styles.py`.
"""

import heapq
import math
from functools import reduce

import numpy as np


def softmax_by_maximum(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_by_log_add_exp(logits):
    return np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))


def softmax_by_log_sum_exp(logits):
    top = logits.max(axis=-1, keepdims=True)
    return np.exp(logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))


def softmax_by_differences(logits):
    with np.errstate(over="ignore"):
        return 1 / np.exp(logits[..., None, :] - logits[..., :, None]).sum(axis=-1)


def softmax_by_reduce(logits):
    return np.exp(logits - reduce(np.logaddexp, np.moveaxis(logits, -1, 0))[..., None])


def softmax_in_place(logits):
    work = np.array(logits)
    work -= np.maximum.reduce(work, axis=-1)[..., None]
    np.exp(work, out=work)
    work /= np.add.reduce(work, axis=-1)[..., None]
    return work


def softmax_in_long_double(logits):
    return softmax_by_maximum(logits.astype(np.longdouble)).astype(logits.dtype)


def softmax_in_powers_of_two(logits):
    powers = np.exp2((logits - logits.max(axis=-1, keepdims=True)) * math.log2(math.e))
    return powers / powers[..., ::-1].sum(axis=-1, keepdims=True)


def softmax_in_lists(logits):
    def of(row):
        weights = [math.exp(x - max(row)) for x in row]
        return [weight / math.fsum(weights) for weight in weights]

    return np.array([of(row) for row in logits.reshape(-1, logits.shape[-1]).tolist()]).reshape(logits.shape)


def softmax_online(logits):
    """Tiles of 16 tokens with a running maximum and a running sum."""
    top, total = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype), 0
    for start in range(0, logits.shape[-1], 16):
        tile = logits[..., start : start + 16]
        higher = np.maximum(top, tile.max(axis=-1, keepdims=True))
        total, top = total * np.exp(top - higher) + np.exp(tile - higher).sum(axis=-1, keepdims=True), higher
    return np.exp(logits - top) / total


SOFTMAX = (
    softmax_by_maximum,
    softmax_by_log_add_exp,
    softmax_by_log_sum_exp,
    softmax_by_differences,
    softmax_by_reduce,
    softmax_in_place,
    softmax_in_long_double,
    softmax_in_powers_of_two,
    softmax_in_lists,
    softmax_online,
)


def logits_by_matmul(query, keys):
    return (keys @ query[..., None])[..., 0] / math.sqrt(keys.shape[-1])


def logits_by_einsum(query, keys):
    return np.einsum("...td,...d->...t", keys, query * keys.shape[-1] ** -0.5)


def logits_by_sum(query, keys):
    return (keys * query[..., None, :]).sum(axis=-1) / np.sqrt(keys.dtype.type(keys.shape[-1]))


LOGITS = (logits_by_matmul, logits_by_einsum, logits_by_sum)


def running_statistics(rows, product=np.multiply):
    """Mean and variance, or covariance, of the first axis, updated with every row as Welford does."""
    mean = squares = np.zeros(())
    for count, row in enumerate(rows, 1):
        before = row - mean
        mean = mean + before / count
        squares = squares + product(before, row - mean)
    return mean, squares / len(rows)


def turned_by_halves(vectors, places, theta=10000.0):
    """The vectors [..., T, D] turned by RoPE to their places [..., T]."""
    half = vectors.shape[-1] // 2
    angles = places[..., None] * theta ** (-np.arange(half) / half)
    first, second = vectors[..., :half], vectors[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)],
        axis=-1,
    )


def turned_as_complex_numbers(vectors, places, theta=10000.0):
    half = vectors.shape[-1] // 2
    points = vectors[..., :half] + 1j * vectors[..., half:]
    points = points * np.exp(
        1j * places[..., None] * np.exp(-np.arange(half) * (2 * math.log(theta) / vectors.shape[-1]))
    )
    return np.concatenate([points.real, points.imag], axis=-1)


def turned_by_matrices(vectors, places, theta=10000.0):
    first, half = np.arange(vectors.shape[-1] // 2), vectors.shape[-1] // 2
    angles = places[..., None] * theta ** (-first / half)
    matrices = np.zeros((*angles.shape[:-1], 2 * half, 2 * half))
    matrices[..., first, first] = matrices[..., first + half, first + half] = np.cos(angles)
    matrices[..., first + half, first], matrices[..., first, first + half] = np.sin(angles), -np.sin(angles)
    return np.einsum("...tij,...tj->...ti", matrices.astype(vectors.dtype), vectors)


def turned_with_rotate_half(vectors, places, theta=10000.0):
    frequencies = 1.0 / theta ** (np.arange(0, vectors.shape[-1], 2) / vectors.shape[-1])
    angles = np.concatenate([places[..., None] * frequencies] * 2, axis=-1)
    swapped = np.concatenate(
        [-vectors[..., vectors.shape[-1] // 2 :], vectors[..., : vectors.shape[-1] // 2]], axis=-1
    )
    return vectors * np.cos(angles) + swapped * np.sin(angles)


TURNED = (turned_by_halves, turned_as_complex_numbers, turned_by_matrices, turned_with_rotate_half)


def top_by_argsort(scores, count):
    """The mask of the `count` highest scores of each row; of equal scores the first."""
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, np.argsort(-scores, axis=-1, kind="stable")[..., :count], True, axis=-1)
    return kept


def top_by_rank(scores, count):
    return np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1) < count


def top_by_comparing(scores, count):
    mine, other, place = scores[..., :, None], scores[..., None, :], np.arange(scores.shape[-1])
    return ((other > mine) | ((other == mine) & (place < place[:, None]))).sum(axis=-1) < count


def top_by_lexsort(scores, count):
    order = np.lexsort((np.broadcast_to(np.arange(scores.shape[-1]), scores.shape), -scores))
    return np.argsort(order, axis=-1) < count


def top_by_sorted(scores, count):
    def of(row):
        return np.isin(
            np.arange(len(row)), sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
        )

    return np.apply_along_axis(of, -1, scores)


def top_by_a_heap(scores, count):
    def of(row):
        return np.isin(
            np.arange(len(row)),
            heapq.nsmallest(count, range(len(row)), key=lambda token: (-row[token], token)),
        )

    return np.apply_along_axis(of, -1, scores)


def top_by_repeated_argmax(scores, count):
    kept = np.zeros(scores.shape, dtype=bool)
    for _ in range(min(count, scores.shape[-1])):
        np.put_along_axis(kept, np.where(kept, -np.inf, scores).argmax(axis=-1)[..., None], True, axis=-1)
    return kept


def top_by_threshold(scores, count):
    """The threshold by a partial sort, ties filled from the front."""
    place = max(1, min(count, scores.shape[-1])) - 1
    least = -np.partition(-scores, place, axis=-1)[..., place : place + 1]
    equal = scores == least
    return (scores > least) | (
        equal & (np.cumsum(equal, axis=-1) <= count - (scores > least).sum(axis=-1, keepdims=True))
    )


TOP = (
    top_by_argsort,
    top_by_rank,
    top_by_comparing,
    top_by_lexsort,
    top_by_sorted,
    top_by_a_heap,
    top_by_repeated_argmax,
    top_by_threshold,
)
