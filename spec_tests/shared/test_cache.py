"""Laws of the compressed cache: CACHE-1 to CACHE-3."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import draw_mask, most_some_few


def check_cache(impl, case, kept, *names):
    """Raise Violation unless these fields of the cache are those of the kept tokens: batch by batch, head
    by head, in order.
    """
    cache, where = impl.cache.compress(case.keys, case.values, kept), tuple(np.argwhere(kept).T)
    wanted = {
        "keys": impl.round(case.keys)[where],
        "values": impl.round(case.values)[where],
        "positions": where[2],
    }
    wanted["lengths"] = np.array([[np.count_nonzero(head) for head in item] for item in kept])
    for name in names:
        equal(
            getattr(cache, name),
            wanted[name],
            f"the stored {name} are not those of the kept tokens in position order",
        )


def drawn(case, seed):
    return draw_mask(case.keys.shape[:3], seed)


@law("CACHE-1", of="cache.compress", case=cases(), seed=seeds())
def test_the_cache_holds_the_kept_tokens_in_position_order(impl, case, seed):
    """Row by row, batch by batch, head by head and position by position, the cache holds the kept keys,
    bit for bit.
    """
    check_cache(impl, case, drawn(case, seed), "keys", "positions")


@law("CACHE-2", of="cache.compress", case=cases(), seed=seeds())
def test_keys_and_values_move_together(impl, case, seed):
    """Each stored row is the key and the value of the token at the stored position."""
    check_cache(impl, case, drawn(case, seed), "keys", "values")


@law("CACHE-3", of="cache.compress", case=cases(), seed=seeds())
def test_lengths_count_the_rows_of_each_head(impl, case, seed):
    """lengths [B, H_kv] is the number of kept tokens of each head."""
    check_cache(impl, case, drawn(case, seed), "lengths")


@law("CACHE-2", of="cache.compress", case=cases())
def test_keeping_all_changes_nothing(impl, case):
    """With every token kept the cache is the sequence itself."""
    cache = impl.cache.compress(case.keys, case.values, np.ones(case.keys.shape[:3], dtype=bool))
    equal(
        cache.values.reshape(case.values.shape),
        impl.round(case.values),
        "keeping every token changed the values",
    )


@law("CACHE-1", of="cache.compress", examples=2, case=long_cases())
def test_a_long_cache_holds_the_kept_tokens_in_position_order(impl, case):
    """Of thousands of tokens per head the cache holds the kept ones, head by head, in position order, and
    says where they stood.
    """
    check_cache(impl, case, most_some_few(case), "keys", "positions")


@law("CACHE-2", of="cache.compress", examples=2, case=long_cases())
def test_values_of_a_long_cache_move_with_their_keys(impl, case):
    """Each of thousands of stored values is that of the token at its position."""
    check_cache(impl, case, most_some_few(case), "values")


@law("CACHE-3", of="cache.compress", examples=2, case=long_cases(head_dims=(64,)))
def test_lengths_of_a_long_cache_count_its_rows(impl, case):
    """lengths is the number of kept tokens of each head, thousands of them or a few."""
    check_cache(impl, case, most_some_few(case), "lengths")
