"""KeyDiff as different people write it, in parts."""

import math
from functools import reduce

import numpy as np


def unit_by_where(vectors):
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(norms == 0, 1, norms)


def unit_by_divide(vectors):
    norms = np.sqrt(np.sum(np.square(vectors), axis=-1, keepdims=True))
    return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms != 0)


def unit_by_einsum(vectors):
    squares = np.einsum("...d,...d->...", vectors, vectors)
    return vectors * np.where(squares > 0, squares, 1)[..., None] ** -0.5


def unit_in_place(vectors):
    result = np.array(vectors)
    norms = np.sqrt((result**2).sum(-1, keepdims=True))
    norms[norms == 0] = 1
    result /= norms
    return result


def unit_in_lists(vectors):
    rows = vectors.reshape(-1, vectors.shape[-1]).tolist()
    return np.array([[x / (math.hypot(*row) or 1.0) for x in row] for row in rows]).reshape(vectors.shape)


def unit_in_long_double(vectors):
    wide = vectors.astype(np.longdouble)
    norms = np.sqrt((wide * wide).sum(-1, keepdims=True))
    return (wide / np.where(norms == 0, 1, norms)).astype(np.float64)


def unit_by_its_largest(vectors):
    largest = np.abs(vectors).max(axis=-1, keepdims=True)
    scaled = vectors / np.where(largest == 0, 1, largest)
    return scaled / np.maximum(np.sqrt((scaled * scaled).sum(axis=-1, keepdims=True)), 1e-300)


def unit_by_hypot(vectors):
    norms = reduce(np.hypot, np.moveaxis(vectors, -1, 0), np.zeros(vectors.shape[:-1]))
    return np.where(norms[..., None] > 0, vectors / np.where(norms > 0, norms, 1)[..., None], 0)


def anchor_by_mean(keys):
    return unit(keys).mean(axis=-2)


def anchor_by_sum(keys):
    return np.sum(unit(keys), axis=-2) / keys.shape[-2]


def anchor_by_einsum(keys):
    return np.einsum("...td->...d", unit(keys)) / keys.shape[-2]


def anchor_token_by_token(keys):
    return sum(unit(keys[..., token, :]) for token in range(keys.shape[-2])) / keys.shape[-2]


def anchor_from_the_last(keys):
    return sum(np.moveaxis(unit(keys), -2, 0)[::-1]) / keys.shape[-2]


def anchor_by_recursion(keys):
    def total(rows):
        if len(rows) == 1:
            return rows[0]
        return total(rows[: len(rows) // 2]) + total(rows[len(rows) // 2 :])

    return total(list(np.moveaxis(unit(keys), -2, 0))) / keys.shape[-2]


def anchor_exact(keys):
    rows = unit(keys)
    flat = rows.reshape(-1, *rows.shape[-2:])
    sums = [[math.fsum(column) / len(head) for column in zip(*head, strict=True)] for head in flat.tolist()]
    return np.array(sums).reshape(keys.shape[:-2] + keys.shape[-1:])


def score_by_matmul(keys):
    return -(unit(keys) @ unit(anchor(keys))[..., None])[..., 0]


def score_by_einsum(keys):
    return np.negative(np.einsum("...td,...d->...t", unit(keys), unit(anchor(keys))))


def score_by_products(keys):
    return -(unit(keys) * unit(anchor(keys))[..., None, :]).sum(axis=-1)


def score_divided_last(keys):
    mean = anchor(keys)
    length = np.linalg.norm(mean, axis=-1)[..., None]
    return -np.einsum("...td,...d->...t", unit(keys), mean) / np.where(length == 0, 1, length)


def score_textbook(keys):
    direction = unit(anchor(keys))
    norms = np.linalg.norm(keys, axis=-1)
    return -(keys @ direction[..., None])[..., 0] / np.where(norms == 0, 1, norms)


def score_in_loops(keys):
    out = np.zeros(keys.shape[:-1])
    for head in np.ndindex(keys.shape[:-2]):
        direction = unit(anchor(keys[head]))
        for token in range(keys.shape[-2]):
            out[(*head, token)] = -np.dot(unit(keys[head][token]), direction)
    return out


def score_from_pairs(keys):
    length = np.linalg.norm(anchor(keys), axis=-1)[..., None]
    return -similarity_matrix(keys).mean(axis=-1) / np.where(length == 0, 1, length)


def matrix_by_matmul(keys):
    return unit(keys) @ np.swapaxes(unit(keys), -1, -2)


def matrix_by_einsum(keys):
    rows = unit(keys)
    return np.einsum("...td,...sd->...ts", rows, rows)


def matrix_by_broadcast(keys):
    rows = unit(keys)
    return (rows[..., :, None, :] * rows[..., None, :, :]).sum(-1)


def matrix_row_by_row(keys):
    rows = unit(keys)
    return np.stack([(rows @ rows[..., token, :, None])[..., 0] for token in range(keys.shape[-2])], axis=-2)


def matrix_by_outer_products(keys):
    columns = np.moveaxis(unit(keys), -1, 0)
    return sum(column[..., :, None] * column[..., None, :] for column in columns)


def pairwise_by_sum(keys):
    return -similarity_matrix(keys).sum(axis=-1)


def pairwise_by_ones(keys):
    return -(similarity_matrix(keys) @ np.ones(keys.shape[-2]))


def pairwise_by_columns(keys):
    return -np.add.reduce(similarity_matrix(keys), axis=-2)


def pairwise_from_the_sum_of_directions(keys):
    rows = unit(keys)
    return -(rows @ rows.sum(axis=-2)[..., None])[..., 0]


FORMS: dict = {
    "unit": (
        unit_by_where,
        unit_by_divide,
        unit_by_einsum,
        unit_in_place,
        unit_in_lists,
        unit_in_long_double,
        unit_by_its_largest,
        unit_by_hypot,
    ),
    "anchor": (
        anchor_by_mean,
        anchor_by_sum,
        anchor_by_einsum,
        anchor_token_by_token,
        anchor_from_the_last,
        anchor_by_recursion,
        anchor_exact,
    ),
    "score": (
        score_by_matmul,
        score_by_einsum,
        score_by_products,
        score_divided_last,
        score_textbook,
        score_in_loops,
        score_from_pairs,
    ),
    "similarity_matrix": (
        matrix_by_matmul,
        matrix_by_einsum,
        matrix_by_broadcast,
        matrix_row_by_row,
        matrix_by_outer_products,
    ),
    "pairwise_score": (
        pairwise_by_sum,
        pairwise_by_ones,
        pairwise_by_columns,
        pairwise_from_the_sum_of_directions,
    ),
}
unit, anchor, score, similarity_matrix, pairwise_score = (forms[0] for forms in FORMS.values())
