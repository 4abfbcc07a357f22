"""KVCache-Factory's `H2OKVCluster`: column sums of the prompt's attention, with the window as the recent half."""

from conformance.adapters.kvcache_factory.clusters import H2OKVCluster
from conformance.borrowed import mask, positions_as_values
from evictionary.spec_tests.judge.domain import OutsideDomain

ARRAY_LIBRARY = "torch"
DOMAIN = {"dtype": ("float32",)}


def select(queries, keys, *, budget):
    if budget < 2:
        raise OutsideDomain("a budget without a heavy hitter, which the class does not take")
    cluster = H2OKVCluster(window_size=(budget + 1) // 2, max_capacity_prompt=budget)
    _, values = cluster.update_kv(keys, queries, positions_as_values(keys), None, None)
    return mask(values, keys.shape[2])
