"""Laws of the compressed cache: CACHE-1 to CACHE-3."""

import numpy as np

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import draw_mask


@law("CACHE-1", of="cache.compress", case=cases(), seed=seeds())
def test_the_cache_holds_the_kept_tokens_in_position_order(impl, case, seed):
    """Row by row, batch by batch, head by head and position by position, the cache holds the kept keys, bit for bit."""
    kept = draw_mask(case.keys.shape[:3], seed)
    cache = impl.cache.compress(case.keys, case.values, kept)
    where = np.argwhere(kept)
    expected = impl.round(case.keys)[tuple(where.T)]
    equal(cache.keys, expected, "the stored keys are not the kept keys in position order")
    equal(cache.positions, where[:, 2], "the stored positions are not those of the kept tokens")


@law("CACHE-2", of="cache.compress", case=cases(), seed=seeds())
def test_keys_and_values_move_together(impl, case, seed):
    """Each stored row is the key and the value of the token at the stored position."""
    kept = draw_mask(case.keys.shape[:3], seed)
    cache = impl.cache.compress(case.keys, case.values, kept)
    where = tuple(np.argwhere(kept).T)
    for name, states in (("keys", case.keys), ("values", case.values)):
        got, expected = getattr(cache, name), impl.round(states)[where]
        equal(got, expected, f"the stored {name} are not those of the kept tokens")


@law("CACHE-3", of="cache.compress", case=cases(), seed=seeds())
def test_lengths_count_the_rows_of_each_head(impl, case, seed):
    """lengths [B, H_kv] is the number of kept tokens of each head."""
    kept = draw_mask(case.keys.shape[:3], seed)
    got = impl.cache.compress(case.keys, case.values, kept).lengths
    equal(got, kept.sum(axis=-1), "lengths do not count the kept tokens")


@law("CACHE-2", of="cache.compress", case=cases())
def test_keeping_all_changes_nothing(impl, case):
    """With every token kept the cache is the sequence itself."""
    cache = impl.cache.compress(case.keys, case.values, np.ones(case.keys.shape[:3], dtype=bool))
    got = cache.values.reshape(case.values.shape)
    equal(got, impl.round(case.values), "keeping every token changed the values")


def long_cache(impl, case):
    """The compressed cache of a long prompt, whose heads keep most, some and few tokens, and the kept positions of each head."""
    shares = np.array([0.9, 0.3, 0.001])[: case.num_kv_heads, None]
    kept = np.random.default_rng(case.seed).random(case.keys.shape[:3]) < shares
    return impl.cache.compress(case.keys, case.values, kept), [np.flatnonzero(head) for head in kept[0]]


@law("CACHE-1", of="cache.compress", examples=2, case=long_cases())
def test_a_long_cache_holds_the_kept_tokens_in_position_order(impl, case):
    """Of thousands of tokens per head the cache holds the kept ones, head by head, in position order, and says where they stood."""
    cache, positions = long_cache(impl, case)
    equal(cache.positions, np.concatenate(positions), "the stored positions are not those of the kept tokens")
    keys = [impl.round(case.keys[0, head, places]) for head, places in enumerate(positions)]
    equal(cache.keys, np.concatenate(keys), "the stored keys are not the kept keys in position order")


@law("CACHE-2", of="cache.compress", examples=2, case=long_cases())
def test_values_of_a_long_cache_move_with_their_keys(impl, case):
    """Each of thousands of stored values is that of the token at its position."""
    cache, positions = long_cache(impl, case)
    values = [impl.round(case.values[0, head, places]) for head, places in enumerate(positions)]
    equal(cache.values, np.concatenate(values), "the stored values are not those of the kept tokens")


@law("CACHE-3", of="cache.compress", examples=2, case=long_cases(head_dims=(64,)))
def test_lengths_of_a_long_cache_count_its_rows(impl, case):
    """lengths is the number of kept tokens of each head, thousands of them or a few."""
    cache, positions = long_cache(impl, case)
    equal(cache.lengths, np.array([[len(places) for places in positions]]), "lengths do not count the kept tokens")
