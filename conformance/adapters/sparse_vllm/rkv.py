"""Sparse-vLLM's R-KV: two pure functions of `RKVCacheManager`, for each head alone."""

import torch

from conformance.borrowed import each_head, leave_out, take

# One query head to a KV head: of several the engine averages over the queries first. All pairs of tokens.
DOMAIN = {"dtype": ("float32",), "group": (1,), "max_length": 2048}

_found = take(
    "sparse_vllm",
    "src/sparsevllm/engine/cache_manager/rkv.py",
    "RKVCacheManager",
    SnapKVCacheManager=object,
).RKVCacheManager


def redundancy(keys, *, threshold=0.5):
    heads = [
        _found.redundancy_scores_from_keys(
            head[:, None], similarity_threshold=threshold, recent_similar_keep=1, max_tokens=len(head)
        )
        for head in keys.flatten(0, -3)
    ]
    return torch.stack(heads).view(keys.shape[:-1])


def importance(queries, keys, *, window_size=8, kernel_size=7):
    leave_out(kernel_size != 1, "pooling of neighbours, which this code does not do")
    length = keys.shape[2]
    positions = torch.arange(length)
    heads = [
        _found.attention_scores_from_materialized_keys(
            q[-window_size:, None], k[:-window_size, None], positions[-window_size:], positions[:-window_size]
        )
        for q, k in each_head(queries, keys)
    ]
    return torch.stack(heads).view(*keys.shape[:2], length - window_size)
