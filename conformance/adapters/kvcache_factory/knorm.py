"""KVCache-Factory's `L2NormCluster`, which sorts by the norms of the keys."""

from conformance.adapters.kvcache_factory.clusters import L2NormCluster
from conformance.borrowed import ranked_by

DOMAIN = {"dtype": ("float32",), "min_length": 2}  # of one token there is nothing to evict


def score(keys):
    return -ranked_by(L2NormCluster(max_capacity_prompt=1).update_kv, keys, keys, keys, None, None)
