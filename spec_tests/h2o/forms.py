"""H2O as different people write it, in parts."""

import math

import numpy as np

from evictionary.spec_tests.shared.forms import TOP, softmax_by_maximum


def last_places(queries, keys):
    return np.arange(keys.shape[-2] - queries.shape[-2], keys.shape[-2])[:, None]


def tiles(queries, keys, size=64):
    """The places and the causal logits of some tokens after the other."""
    scaled = queries / math.sqrt(keys.shape[-1])
    for start in range(0, keys.shape[-2], size):
        places = np.arange(start, min(start + size, keys.shape[-2]))
        product = np.einsum("bhmd,bhtd->bhmt", scaled, keys[..., places, :])
        yield places, np.where(places <= last_places(queries, keys), product, -np.inf)


def received_online(queries, keys):
    high, total = np.full(queries.shape[:-1], -np.inf), np.zeros(queries.shape[:-1])
    out = np.zeros(keys.shape[:-1])
    for _, tile in tiles(queries, keys):
        new = np.maximum(high, tile.max(axis=-1))
        total = total * np.exp(high - new) + np.exp(tile - new[..., None]).sum(axis=-1)
        high = new
    for places, tile in tiles(queries, keys):
        out[..., places] = (np.exp(tile - high[..., None]) / total[..., None]).sum(axis=-2)
    return out


def received_by_the_log_of_the_sum(queries, keys):
    mass, out = np.full(queries.shape[:-1], -np.inf), np.zeros(keys.shape[:-1])
    for _, tile in tiles(queries, keys):
        mass = np.logaddexp(mass, np.logaddexp.reduce(tile, axis=-1))
    for places, tile in tiles(queries, keys):
        out[..., places] = np.exp(tile - mass[..., None]).sum(axis=-2)
    return out


def received_by_rows(queries, keys):
    out = np.zeros(keys.shape[:-1])
    for start in range(0, queries.shape[-2], 64):
        rows = queries[..., start : start + 64, :]
        seen = np.arange(keys.shape[-2]) <= last_places(queries, keys)[start : start + 64]
        logits = np.where(seen, rows @ np.swapaxes(keys, -1, -2) * keys.shape[-1] ** -0.5, -np.inf)
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out += np.einsum("...mt,...m->...t", powers, 1 / powers.sum(axis=-1))
    return out


def received_query_by_query(queries, keys):
    out = np.zeros(keys.shape[:-1])
    before = keys.shape[-2] - queries.shape[-2]
    for row in range(queries.shape[-2]):
        seen = keys[..., : before + row + 1, :]
        logits = (seen @ queries[..., row, :, None])[..., 0] / np.sqrt(keys.shape[-1])
        out[..., : before + row + 1] += softmax_by_maximum(logits)
    return out


def received_from_the_last_in_long_double(queries, keys):
    out = np.zeros(keys.shape[:-1], dtype=np.longdouble)
    stop = keys.shape[-2]
    for row in reversed(range(queries.shape[-2])):
        logits = np.einsum("...td,...d->...t", keys[..., :stop, :], queries[..., row, :]).astype(
            np.longdouble
        )
        out[..., :stop] += softmax_by_maximum(logits / np.sqrt(np.longdouble(keys.shape[-1])))
        stop -= 1
    return out.astype(np.float64)


def score_of_repeated_keys(queries, keys):
    group = queries.shape[1] // keys.shape[1]
    each = received(queries, np.repeat(keys, group, axis=1))
    return each.reshape(*keys.shape[:2], group, keys.shape[2]).mean(axis=2)


def score_head_by_head(queries, keys):
    out, group = np.zeros(keys.shape[:3]), queries.shape[1] // keys.shape[1]
    for reader in range(queries.shape[1]):
        out[:, reader // group] += received(
            queries[:, reader : reader + 1], keys[:, reader // group : reader // group + 1]
        )[:, 0]
    return out / group


def score_by_every_gth_head(queries, keys):
    group = queries.shape[1] // keys.shape[1]
    return np.stack([received(queries[:, place::group], keys) for place in range(group)]).mean(axis=0)


def select_with_the_recent_first(queries, keys, *, budget):
    scores = score(queries, keys)
    scores[..., max(0, keys.shape[2] - (budget + 1) // 2) :] = np.inf
    return top(scores, budget)


def select_in_two_parts(queries, keys, *, budget):
    scores, before = score(queries, keys), max(0, keys.shape[2] - budget + budget // 2)
    kept = np.ones(scores.shape, dtype=bool)
    if before:
        kept[..., :before] = top(scores[..., :before], budget // 2)
    return kept


def select_head_by_head(queries, keys, *, budget):
    scores, before = score(queries, keys), max(0, keys.shape[2] - (budget + 1) // 2)
    kept = np.ones(scores.shape, dtype=bool)
    for head in np.ndindex(scores.shape[:2] if before else (0,)):
        kept[head][:before] = top(scores[head][:before], budget // 2)
    return kept


FORMS: dict = {
    "received": (
        received_online,
        received_by_the_log_of_the_sum,
        received_by_rows,
        received_query_by_query,
        received_from_the_last_in_long_double,
    ),
    "score": (score_of_repeated_keys, score_head_by_head, score_by_every_gth_head),
    "top": TOP,
    "select": (select_with_the_recent_first, select_in_two_parts, select_head_by_head),
}
received, score, top, select = (forms[0] for forms in FORMS.values())
