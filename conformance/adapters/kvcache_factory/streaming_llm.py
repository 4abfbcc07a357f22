"""KVCache-Factory's `StreamingLLMKVCluster`: the capacity less the window are the sinks, so the window is
what the sinks leave.
"""

from conformance.adapters.kvcache_factory.clusters import StreamingLLMKVCluster
from conformance.borrowed import leave_out, mask, positions_as_values, scores_by_budget

DOMAIN = {"dtype": ("float32",), "max_length": 512}  # every budget is asked


def score(keys, *, sink_size=4):
    length = keys.shape[2]
    leave_out(
        not 1 <= sink_size < length, "no sinks, or no more tokens than sinks, which the class does not take"
    )

    def kept_at(budget):
        cluster = StreamingLLMKVCluster(window_size=budget - sink_size, max_capacity_prompt=budget)
        return mask(cluster.update_kv(keys, keys, positions_as_values(keys), None, None)[1], length)

    return scores_by_budget(kept_at, range(sink_size + 1, length + 1))
