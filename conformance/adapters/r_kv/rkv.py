"""R-KV's authors: `R1KV.update_kv`, the numbers that it ranks by."""

from conformance.borrowed import leave_out, leave_out_window, ranked_by, take, with_window

DOMAIN = {"dtype": ("float32",), "batch": (1,), "max_length": 2048}  # the similarities of all pairs of tokens
IMPLEMENTS = {"score": "rkv.released_score"}

parts = take("r_kv", "rkv/utils.py", "compute_attention_scores", "cal_similarity")
R1KV = take("r_kv", "rkv/compression/r1_kv.py", "R1KV", **vars(parts)).R1KV


def score(queries, keys, *, window_size=8, kernel_size=7, importance_share=0.07, threshold=0.5):
    length = keys.shape[2]
    leave_out_window(length, window_size)
    leave_out(threshold != 0.5, "another threshold than 1/2, which the class does not take")
    # The budget is the whole prompt: all tokens before the window are ranked.
    cluster = R1KV(
        budget=length, window_size=window_size, kernel_size=kernel_size, mix_lambda=importance_share
    )
    return with_window(ranked_by(cluster.update_kv, keys, queries, keys), window_size)
