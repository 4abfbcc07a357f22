"""Correct KeyDiffs of other kinds."""

from typing import Any

from evictionary.reference.keydiff import Cache
from evictionary.spec_tests.keydiff import forms
from evictionary.spec_tests.shared.forms import top_by_rank
from evictionary.spec_tests.shared.variants import *

SCORE, ATTENTION, CACHED = (
    "keydiff.score",
    "keydiff_theory.causal_attention",
    "keydiff_theory.cached_attention",
)
BLOCK, PROMPT, DECODE = "keydiff.process_block", "keydiff.process_prompt", "keydiff.decode"

units = forms.unit_by_divide


def torch_units(states):
    return torch.nn.functional.normalize(cast(states), dim=-1, eps=1e-30)


@control(SCORE, dtypes=NUMPY)
def tiled(keys):
    """The anchor summed tile by tile, the last tile shorter."""
    directions = units(keys)
    total = sum(
        directions[..., start : start + 16, :].sum(axis=-2, keepdims=True)
        for start in range(0, keys.shape[-2], 16)
    )
    return -(directions * units(total)).sum(axis=-1)


control(SCORE, dtypes=NUMPY, name="all_cosines", max_length=4096)(
    put_together(forms, "score", score=forms.score_from_pairs)
)
control("keydiff.pairwise_score", dtypes=NUMPY, name="pairwise_by_the_total")(
    forms.pairwise_from_the_sum_of_directions
)


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_in_float32(keys):
    directions = torch_units(keys)
    return -(directions @ torch_units(directions.mean(dim=-2))[..., None])[..., 0]


@control(SCORE, array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_rounding_each_step(keys):
    norms = keys.norm(dim=-1, keepdim=True)
    units = torch.where(norms == 0, 0, keys / torch.where(norms == 0, 1, norms))
    anchor = units.mean(dim=-2, keepdim=True)
    length = anchor.norm(dim=-1, keepdim=True)
    return -(units * torch.where(length == 0, 0, anchor / torch.where(length == 0, 1, length))).sum(dim=-1)


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_padded_and_permuted(keys):
    """Tokens before heads, filled up to whole tiles of 16
    with rubbish that is masked, sums in float32 or wider.
    """
    length = keys.shape[-2]
    by_token = keys.movedim(-2, 0)
    padded = torch.cat([by_token, torch.full((-length % 16, *by_token.shape[1:]), 1e3, dtype=keys.dtype)])
    real = (torch.arange(len(padded)) < length).view(-1, *[1] * (keys.ndim - 1))
    directions = torch_units(padded)
    tiles = torch.where(real, directions, 0).unflatten(0, (-1, 16)).sum(dim=1)
    return -(directions * torch_units(tiles.sum(dim=0))).sum(dim=-1)[:length].movedim(0, -1)


@control(SCORE, array_library="torch", dtypes=("float64", "float32", "bfloat16"), edges=False)
@in_float32
def torch_cosine_to_the_anchor(keys):
    """kvpress's KeyDiffPress: cosine_similarity, whose eps of 1e-8 shortens what is shorter than that."""
    anchor = torch.nn.functional.normalize(keys, dim=-1).mean(dim=-2, keepdim=True)
    return -torch.nn.functional.cosine_similarity(keys, anchor, dim=-1)


@in_float32
def torch_normalised_twice(keys):
    """torch's normalize, with its own eps of 1e-12, of the keys and of their mean."""
    units = torch.nn.functional.normalize(keys, dim=-1)
    return -(units * torch.nn.functional.normalize(units.mean(dim=-2, keepdim=True), dim=-1)).sum(dim=-1)


SEEN: set[Any] = set()


@control(SCORE, array_library="torch", dtypes=NUMPY)
def torch_compiled_anew(keys):
    """As torch.compile does: another program, whose roundings differ, in deterministic mode and once it
    has seen two sizes.
    """
    SEEN.add(keys.shape)
    backwards = torch.are_deterministic_algorithms_enabled() or len(SEEN) > 1
    return torch_in_float32(keys.flip(-1, -2)).flip(-1) if backwards else torch_normalised_twice(keys)


@control("keydiff.similarity_matrix", array_library="torch", dtypes=ALL)
def torch_cosine_similarity(keys):
    """torch, widened; every pair by itself."""
    directions = torch_units(keys)
    return (directions[..., :, None, :] * directions[..., None, :, :]).sum(dim=-1)


@control(ATTENTION, array_library="torch", dtypes=NUMPY)
def torch_library_attention(queries, keys, values):
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


@control(ATTENTION, array_library="torch", dtypes=("float16", "bfloat16"))
@through_float32
def torch_widened_attention(queries, keys, values):
    return torch_weights(queries, keys) @ values


@control(ATTENTION, dtypes=NUMPY)
def one_key_at_a_time(queries, keys, values):
    return online(queries, keys, values, causal=True)[0]


@control(CACHED, dtypes=NUMPY)
def merged_by_log_sum_exp(queries, keys, values, cache):
    """Cache and block attended to apart."""
    return merged(online(queries, cache.keys, cache.values), online(queries, keys, values, causal=True))


@control("keydiff.append")
def written_into_a_buffer(cache, keys, values):
    """A buffer of the final size, filled from both ends."""
    if cache is None:
        cache = Cache(keys[..., :0, :], values[..., :0, :], np.zeros((*keys.shape[:-2], 0), dtype=int), 0)
    old, new = cache.keys.shape[-2], keys.shape[-2]
    buffers = [
        np.full((*states.shape[:-2], old + new, states.shape[-1]), np.nan) for states in (keys, values)
    ]
    for buffer, last, first in zip(buffers, (keys, values), (cache.keys, cache.values), strict=True):
        buffer[..., old:, :], buffer[..., :old, :] = last, first
    positions = np.zeros((*keys.shape[:-2], old + new), dtype=int)
    positions[..., old:], positions[..., :old] = range(cache.seen, cache.seen + new), cache.positions
    return Cache(buffers[0], buffers[1], positions, cache.seen + new)


def gathered(cache, places):
    """The tokens at some places [..., N] of a cache."""
    keys, values = (
        np.take_along_axis(states, places[..., None], axis=-2) for states in (cache.keys, cache.values)
    )
    return Cache(keys, values, np.take_along_axis(cache.positions, places, axis=-1), cache.seen)


@control("keydiff.evict")
def head_by_head(cache, kept):
    rows = [np.flatnonzero(kept[index]) for index in np.ndindex(kept.shape[:-1])]
    return gathered(cache, np.array(rows).reshape(*kept.shape[:-1], -1))


@control("keydiff_theory.attention_policy", array_library="torch", dtypes=ALL)
def torch_policy(weights, budget, *, aggregate):
    return torch_top(aggregate(weights), budget)


def best_places(scores, budget):
    """The places of the highest scores by a stable sort, in order."""
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :budget], axis=-1)


@control(BLOCK, dtypes=NUMPY)
def worst_token_sorted_out(cache, keys, values, *, budget, scorer=None):
    """The order by a stable sort of minus the scores of
    another implementation, the kept places sorted again.
    """
    joined = written_into_a_buffer(cache, keys, values)
    joined = joined._replace(keys=joined.keys.astype(keys.dtype), values=joined.values.astype(keys.dtype))
    return gathered(joined, best_places(tiled(joined.keys), budget))


@control(PROMPT, dtypes=NUMPY)
def places_of_the_prompt(keys, values, *, budget, block_size, scorer=None):
    """Only the places of the prompt are carried from block
    to block; the numbers are gathered once, at the end.
    """
    length = keys.shape[-2]
    whole = Cache(keys, values, np.broadcast_to(np.arange(length), keys.shape[:-1]), length)
    places = whole.positions[..., :0]
    for start in range(0, length, block_size):
        places = np.concatenate([places, whole.positions[..., start : start + block_size]], axis=-1)
        best = best_places(tiled(gathered(whole, places).keys), budget)
        places = np.take_along_axis(places, best, axis=-1)
    return gathered(whole, places)


@control(PROMPT, array_library="torch", dtypes=ALL)
def torch_prompt(keys, values, *, budget, block_size, scorer=None):
    """torch, scored in float32 or wider; keys, values and positions cut and joined in the same way."""
    rows = keys, values, torch.arange(keys.shape[-2]).expand(keys.shape[:-1])[..., None]
    held = [each[..., :0, :] for each in rows]
    for start in range(0, keys.shape[-2], block_size):
        new = [each[..., start : start + block_size, :] for each in rows]
        held = [torch.cat(pair, dim=-2) for pair in zip(held, new, strict=True)]
        kept = torch_top(torch_in_float32(held[0]), budget)
        held = [each[kept].view(*keys.shape[:-2], -1, each.shape[-1]) for each in held]
    return Cache(held[0], held[1], held[2][..., 0], keys.shape[-2])


@control(DECODE, dtypes=NUMPY)
def worst_place_deleted(cache, key, value, *, budget, scorer=None):
    """The last of the lowest scores leaves, one token at a time."""
    joined = written_into_a_buffer(cache, key[..., None, :], value[..., None, :])
    held = [joined.keys.astype(key.dtype), joined.values.astype(key.dtype), joined.positions]
    while held[2].shape[-1] > budget:
        scores = tiled(held[0])
        worst = scores.shape[-1] - 1 - scores[..., ::-1].argmin(axis=-1)
        left = np.arange(scores.shape[-1]) != worst[..., None]
        held = [
            entry[left].reshape(*left.shape[:-1], left.shape[-1] - 1, *entry.shape[left.ndim :])
            for entry in held
        ]
    return Cache(held[0], held[1], held[2], joined.seen)


@control("keydiff_variants.median_score", array_library="torch", dtypes=ALL)
@in_float32
def torch_middle_of_the_sorted(keys):
    """The mean of the two in the middle of a sort, which are one where the number is odd."""
    ordered, length = keys.sort(dim=-2).values, keys.shape[-2]
    median = (ordered[..., (length - 1) // 2, :] + ordered[..., length // 2, :]) / 2
    return -(torch_units(keys) @ torch_units(median)[..., None])[..., 0]


@control("keydiff_variants.raw_mean_score", dtypes=NUMPY)
def raw_total(keys):
    """The sum for the mean: a cosine does not see the difference."""
    total = np.einsum("...td->...d", keys)
    norms, size = np.linalg.norm(keys, axis=-1), np.linalg.norm(total, axis=-1)[..., None]
    products = norms * size
    return -np.divide(
        np.einsum("...td,...d->...t", keys, total), products, out=np.zeros_like(products), where=products > 0
    )


@control("keydiff_variants.dot_product_score", dtypes=NUMPY)
def mean_of_the_products(keys):
    """Dot products with every key, and then their mean."""
    return -np.einsum("...td,...sd->...ts", keys, keys).mean(axis=-1)


@control("keydiff_variants.euclidean_score", array_library="torch", dtypes=ALL)
@in_float32
def torch_distance(keys):
    return torch.linalg.vector_norm(keys - keys.mean(dim=-2, keepdim=True), dim=-1)


@control("keydiff_variants.select_with_recent", dtypes=NUMPY)
def recent_lifted(keys, *, budget, recent_ratio):
    """The recent tokens lifted above all scores, then one sort."""
    ratio = Fraction(str(recent_ratio))
    length = keys.shape[-2]
    latest = np.arange(length) >= length - math.floor(ratio * min(budget, length))
    return top_by_rank(np.where(latest, 2, tiled(keys)), budget)


@control("keydiff_theory.squared_cosines", dtypes=NUMPY)
def squares_divided_last(vector, basis):
    """Squared coordinates over the squared norm."""
    squares = np.einsum("...nd,...d->...n", basis, vector) ** 2
    size = (vector * vector).sum(axis=-1, keepdims=True) * (basis * basis).sum(axis=-1)
    return np.divide(squares, size, out=np.zeros_like(squares), where=size > 0)


@control("keydiff_theory.alignment_bound")
def one_logarithm(count, weight, largest_norm):
    return (math.log(count * weight) - math.log1p(-weight) - largest_norm) / largest_norm
