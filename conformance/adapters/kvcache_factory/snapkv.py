"""KVCache-Factory's `SnapKVCluster`, in its mode of one set for each KV head."""

from conformance.adapters.kvcache_factory.clusters import SnapKVCluster
from conformance.borrowed import for_all_queries, leave_out_window, ranked_by, with_window


def score(queries, keys, *, window_size=32, kernel_size=7):
    length = keys.shape[2]
    leave_out_window(length, window_size)
    cluster = SnapKVCluster(window_size, length, kernel_size, "avgpool")
    summed = ranked_by(cluster.update_kv, keys, for_all_queries(queries, length), keys, None, None)
    return with_window(summed / window_size, window_size)
