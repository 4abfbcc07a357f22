"""H2O as different people write it: each function of RIGHT is one form of a part, each of WRONG a mistake in a part."""

import math

import numpy as np

BLOCK = 64


def refuse_queries(queries, keys):
    fits = np.ndim(queries) == 4 and queries.shape[0] == keys.shape[0] and queries.shape[3] == keys.shape[3]
    if not fits or queries.shape[1] % keys.shape[1] or not 0 < queries.shape[2] <= keys.shape[2]:
        raise ValueError(f"queries: got shape {np.shape(queries)} for keys {keys.shape}")


def refuse_budget(budget):
    if not isinstance(budget, int) or budget < 1:
        raise ValueError(f"budget: got {budget}, wanted a whole number of at least 1")


def last_places(queries, keys):
    return np.arange(keys.shape[-2] - queries.shape[-2], keys.shape[-2])[:, None]


def received_online(queries, keys):
    high, total = np.full(queries.shape[:-1], -np.inf), np.zeros(queries.shape[:-1])
    out = np.zeros(keys.shape[:-1])
    tiles = [slice(start, start + BLOCK) for start in range(0, keys.shape[-2], BLOCK)]

    def logits(tile):
        product = queries @ np.swapaxes(keys[..., tile, :], -1, -2) / math.sqrt(keys.shape[-1])
        return np.where(np.arange(keys.shape[-2])[tile] <= last_places(queries, keys), product, -np.inf)

    for tile in tiles:
        new = np.maximum(high, logits(tile).max(axis=-1))
        total = total * np.exp(high - new) + np.exp(logits(tile) - new[..., None]).sum(axis=-1)
        high = new
    for tile in tiles:
        out[..., tile] = (np.exp(logits(tile) - high[..., None]) / total[..., None]).sum(axis=-2)
    return out


def received_by_the_log_of_the_sum(queries, keys):
    mass = np.full(queries.shape[:-1], -np.inf)
    out = np.zeros(keys.shape[:-1])
    scaled = queries / math.sqrt(keys.shape[-1])

    def logits(start):
        places = np.arange(start, min(start + BLOCK, keys.shape[-2]))
        product = np.einsum("bhmd,bhtd->bhmt", scaled, keys[..., places, :])
        return places, np.where(places <= last_places(queries, keys), product, -np.inf)

    for start in range(0, keys.shape[-2], BLOCK):
        mass = np.logaddexp(mass, np.logaddexp.reduce(logits(start)[1], axis=-1))
    for start in range(0, keys.shape[-2], BLOCK):
        places, tile = logits(start)
        out[..., places] = np.exp(tile - mass[..., None]).sum(axis=-2)
    return out


def received_by_rows(queries, keys):
    out = np.zeros(keys.shape[:-1])
    for start in range(0, queries.shape[-2], BLOCK):
        rows = queries[..., start : start + BLOCK, :]
        seen = np.arange(keys.shape[-2]) <= last_places(queries, keys)[start : start + BLOCK]
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
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[..., : before + row + 1] += powers / powers.sum(axis=-1, keepdims=True)
    return out


def received_from_the_last_in_long_double(queries, keys):
    out = np.zeros(keys.shape[:-1], dtype=np.longdouble)
    stop = keys.shape[-2]
    for row in reversed(range(queries.shape[-2])):
        logits = np.einsum("...td,...d->...t", keys[..., :stop, :], queries[..., row, :]).astype(np.longdouble)
        powers = np.exp((logits - logits.max(axis=-1, keepdims=True)) / np.sqrt(np.longdouble(keys.shape[-1])))
        out[..., :stop] += powers / powers.sum(axis=-1, keepdims=True)
        stop -= 1
    return out.astype(np.float64)


def score_of_repeated_keys(queries, keys):
    refuse_queries(queries, keys)
    group = queries.shape[1] // keys.shape[1]
    each = received(queries, np.repeat(keys, group, axis=1))
    return each.reshape(*keys.shape[:2], group, keys.shape[2]).mean(axis=2)


def score_head_by_head(queries, keys):
    refuse_queries(queries, keys)
    out, group = np.zeros(keys.shape[:3]), queries.shape[1] // keys.shape[1]
    for reader in range(queries.shape[1]):
        out[:, reader // group] += received(queries[:, reader : reader + 1], keys[:, reader // group : reader // group + 1])[:, 0]
    return out / group


def score_by_every_gth_head(queries, keys):
    refuse_queries(queries, keys)
    group = queries.shape[1] // keys.shape[1]
    return np.stack([received(queries[:, place::group], keys) for place in range(group)]).mean(axis=0)


def select_by_rank(queries, keys, *, budget):
    refuse_budget(budget)
    scores, length = score(queries, keys), keys.shape[2]
    scores[..., max(0, length - (budget + 1) // 2) :] = np.inf
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.argsort(order, axis=-1, kind="stable") < budget


def select_head_by_head(queries, keys, *, budget):
    refuse_budget(budget)
    scores, kept = score(queries, keys), np.zeros(keys.shape[:3], dtype=bool)
    before = max(0, keys.shape[2] - (budget + 1) // 2)
    for head in np.ndindex(scores.shape[:2]):
        best = sorted(range(before), key=lambda token, row=scores[head]: (-row[token], token))[: budget // 2]
        kept[head][[*best, *range(before, keys.shape[2])]] = True
    return kept


def select_in_two_parts(queries, keys, *, budget):
    refuse_budget(budget)
    scores = score(queries, keys)
    before = max(0, keys.shape[2] - budget + budget // 2)
    order = np.lexsort((np.broadcast_to(np.arange(before), scores[..., :before].shape), -scores[..., :before]))
    kept = np.ones(scores.shape, dtype=bool)
    np.put_along_axis(kept, order[..., budget // 2 :], False, axis=-1)
    return kept


RIGHT = {
    "received": (
        received_online,
        received_by_the_log_of_the_sum,
        received_by_rows,
        received_query_by_query,
        received_from_the_last_in_long_double,
    ),
    "score": (score_of_repeated_keys, score_head_by_head, score_by_every_gth_head),
    "select": (select_by_rank, select_head_by_head, select_in_two_parts),
}


def sum_not_rescaled(queries, keys):
    high = np.full(queries.shape[:-1], -np.inf)
    total, out = np.zeros(queries.shape[:-1]), np.zeros(keys.shape[:-1])
    logits = queries @ np.swapaxes(keys, -1, -2) / math.sqrt(keys.shape[-1])
    logits = np.where(np.arange(keys.shape[-2]) <= last_places(queries, keys), logits, -np.inf)
    for start in range(0, keys.shape[-2], 4):
        tile = logits[..., start : start + 4]
        high = np.maximum(high, tile.max(axis=-1))
        total += np.exp(tile - high[..., None]).sum(axis=-1)
    out += (np.exp(logits - high[..., None]) / total[..., None]).sum(axis=-2)
    return out


def the_last_tile_left_out(queries, keys):
    whole = keys.shape[-2] - keys.shape[-2] % 16
    return np.concatenate([received_by_rows(queries, keys)[..., :whole], np.zeros(keys[..., whole:, 0].shape)], axis=-1)


def weights_in_float32(queries, keys):
    return received_by_rows(queries.astype(np.float32), keys.astype(np.float32)).astype(np.float64)


def softmax_and_1e_9(queries, keys):
    return received_by_rows(queries, keys) / (1 + 1e-9)


def nobody_looks_at_itself(queries, keys):
    return received_by_rows(queries, keys) - 1 / keys.shape[-2]


def sharpened_by_the_head_dim(queries, keys):
    return received_by_rows(queries, keys * keys.shape[-1] ** 0.5)


def select_without_the_recent_first(queries, keys, *, budget):
    refuse_budget(budget)
    scores = score(queries, keys)
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.argsort(order, axis=-1) < min(budget, keys.shape[2])


def select_with_a_recent_third(queries, keys, *, budget):
    refuse_budget(budget)
    scores = score(queries, keys)
    scores[..., max(0, keys.shape[2] - (budget + 2) // 3) :] = np.inf
    return np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1) < budget


WRONG = {
    "received": (
        sum_not_rescaled,
        the_last_tile_left_out,
        weights_in_float32,
        softmax_and_1e_9,
        nobody_looks_at_itself,
        sharpened_by_the_head_dim,
    ),
    "select": (select_without_the_recent_first, select_with_a_recent_third),
}
received, score, select = (forms[0] for forms in RIGHT.values())
