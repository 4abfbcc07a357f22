"""R-KV's baseline `SnapKV`."""

from conformance.borrowed import for_all_queries, leave_out_window, ranked_by, take, with_window

DOMAIN = {"dtype": ("float32",)}

compute_attention_scores = take("r_kv", "rkv/utils.py", "compute_attention_scores").compute_attention_scores
SnapKV = take(
    "r_kv", "rkv/compression/snapkv.py", "SnapKV", compute_attention_scores=compute_attention_scores
).SnapKV


def score(queries, keys, *, window_size=32, kernel_size=7):
    length = keys.shape[2]
    leave_out_window(length, window_size)
    cluster = SnapKV(budget=length, window_size=window_size, kernel_size=kernel_size)
    return with_window(
        ranked_by(cluster.update_kv, keys, for_all_queries(queries, length), keys), window_size
    )
