"""Right re-rotations of other forms."""

from evictionary.reference import cache as caches, rope
from evictionary.spec_tests.rope.variants import torch_angles, torch_turned
from evictionary.spec_tests.shared import forms
from evictionary.spec_tests.shared.variants import *

REROTATED, COMPACT = "rerotation.rerotated", "rerotation.compact"
AFTER, NEXT = "rerotation.positions_after", "rerotation.next_position"
QUERY, BEFORE = "rerotation.rotated_query", "rerotation.positions_before"


@control(REROTATED)
def back_and_forth(keys, old, new, *, theta=10000.0):
    """RoPE undone at the old position, and done again at the new one."""
    return rope.rotate(rope.rotate(keys, -np.asarray(old, dtype=float), theta), new, theta)


@control(REROTATED)
def complex_numbers(keys, old, new, *, theta=10000.0):
    return forms.turned_as_complex_numbers(keys, np.asarray(new, dtype=float) - old, theta)


@control(REROTATED)
def a_table_of_distances(keys, old, new, *, theta=10000.0):
    """The cosines and sines of each distance that there is, once."""
    distances, place = np.unique(np.asarray(new, dtype=int) - np.asarray(old, dtype=int), return_inverse=True)
    angles = distances[:, None] * rope.frequencies(keys.shape[-1], theta)
    cos, sin = (table[place.reshape(np.shape(old))] for table in (np.cos(angles), np.sin(angles)))
    first, second = np.split(keys, 2, axis=-1)
    return np.concatenate([cos * first - sin * second, sin * first + cos * second], axis=-1)


@control(REROTATED, array_library="torch", dtypes=ALL)
def torch_tables_of_the_distance(keys, old, new, *, theta=10000.0):
    return torch_turned(keys, torch_angles(keys, new - old, theta))


@control(REROTATED, array_library="torch", dtypes=ALL)
def torch_tables_of_both_places(keys, old, new, *, theta=10000.0):
    """Cosine and sine of the distance by those of both
    positions, in float64, as public code does it in float32.
    """
    half = keys.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    before, after = (each.to(torch.float64)[..., None] * inverse for each in (old, new))
    cos = after.cos() * before.cos() + after.sin() * before.sin()
    sin = after.sin() * before.cos() - after.cos() * before.sin()
    first, second = keys.to(torch.float64).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(keys.dtype)


@control(AFTER)
def token_by_token(kept):
    """One more than the largest so far; -1 for an evicted token."""
    found = np.full(kept.shape, -1)
    for head in np.ndindex(kept.shape[:-1]):
        for token in np.flatnonzero(kept[head]):
            found[head][token] = found[head].max() + 1
    return found


@control(AFTER)
def the_order_of_a_sort(kept):
    """A stable sort puts the kept tokens first: its inverse is their place."""
    return np.argsort(np.argsort(~kept, axis=-1, kind="stable"), axis=-1, kind="stable")


@control(AFTER, array_library="torch", dtypes=ALL)
def torch_counted(kept):
    return kept.cumsum(dim=-1) - 1


@control(NEXT)
def counted_by_numpy(kept):
    return np.count_nonzero(kept, axis=-1)


@control(QUERY)
def head_by_head(query, kept, *, theta=10000.0):
    found, group = np.empty(query.shape), query.shape[1] // kept.shape[1]
    for item, head in np.ndindex(query.shape[:2]):
        position = np.array([np.count_nonzero(kept[item, head // group])])
        found[item, head] = rope.rotate(query[item, head][None], position, theta)[0]
    return found


@control(QUERY, array_library="torch", dtypes=ALL)
def torch_groups(query, kept, *, theta=10000.0):
    """Query heads [B, H_kv, G, D] side by side, at the position of their KV head."""
    grouped = query.unflatten(1, (kept.shape[1], -1))
    angles = torch_angles(grouped, kept.sum(dim=-1)[..., None], theta)
    return torch_turned(grouped, angles).flatten(1, 2)


@control(COMPACT)
def gathered_first(keys, values, kept, *, theta=10000.0):
    """The kept tokens alone, and then turned row by row."""
    flat = caches.compress(keys, values, kept)
    new = np.concatenate([np.arange(count) for count in flat.lengths.flatten()])
    return flat._replace(keys=forms.turned_as_complex_numbers(flat.keys, new - flat.positions, theta))


@control(COMPACT)
def never_rotated(keys, values, kept, *, theta=10000.0):
    """Keys before RoPE, as a cache of them would hold them, and RoPE head by head."""
    bare = rope.rotate(keys, -np.arange(keys.shape[2]), theta)
    flat = caches.compress(bare, values, kept)
    turned = flat.keys.copy()
    for _, _, rows in caches.heads(flat):
        if rows.stop > rows.start:
            turned[rows] = rope.rotate(flat.keys[rows], np.arange(rows.stop - rows.start), theta)
    return flat._replace(keys=turned)


@control(BEFORE)
def counted_from_the_end(kept, length=None):
    """How many kept tokens there are from a token on is its distance to the next one."""
    return (kept.shape[-1] if length is None else length) - np.cumsum(kept[..., ::-1], axis=-1)[..., ::-1]
