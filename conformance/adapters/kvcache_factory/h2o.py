"""KVCache-Factory's `H2OKVCluster`: column sums of the
prompt's attention, with the window as the recent half.
"""

from conformance.adapters.kvcache_factory.clusters import H2OKVCluster
from conformance.borrowed import leave_out, mask, positions_as_values


def select(queries, keys, *, budget):
    leave_out(budget < 2, "a budget without a heavy hitter, which the class does not take")
    cluster = H2OKVCluster(window_size=(budget + 1) // 2, max_capacity_prompt=budget)
    _, values = cluster.update_kv(keys, queries, positions_as_values(keys), None, None)
    return mask(values, keys.shape[2])
