"""SnapKV's authors: `SnapKVCluster` gets keys and queries of every query head and keeps one set for each."""

from conformance.borrowed import for_all_queries, leave_out_window, ranked_by, take, with_window

DOMAIN = {"dtype": ("float32",), "group": (1,)}

SnapKVCluster = take("snapkv", "snapkv/monkeypatch/snapkv_utils.py", "SnapKVCluster").SnapKVCluster


def score(queries, keys, *, window_size=32, kernel_size=7):
    length = keys.shape[2]
    leave_out_window(length, window_size)
    # The capacity is the whole prompt: all tokens before the window are ranked.
    cluster = SnapKVCluster(window_size, length, kernel_size, "avgpool")
    summed = ranked_by(cluster.update_kv, keys, for_all_queries(queries, length), keys, None, 1)
    # a sum over the window, where the contract has a mean
    return with_window(summed / window_size, window_size)
