"""The classes of KVCache-Factory that the adapters call,
each with `update_kv(keys, queries, values, mask, groups)`.
"""

from conformance.borrowed import take

_found = take(
    "kvcache_factory",
    "pyramidkv/pyramidkv_utils.py",
    *(
        "_debug_print",
        "repeat_kv",
        "_gqa_groups",
        "_reduce_group_scores",
        "_grouped_window_attn_cache",
        "_select_topk_kv",
    ),
    *("SnapKVCluster", "PyramidKVCluster", "H2OKVCluster", "StreamingLLMKVCluster", "L2NormCluster"),
    List=list,
    _KVCACHE_FACTORY_DEBUG=False,
)
SnapKVCluster, PyramidKVCluster, H2OKVCluster = (
    _found.SnapKVCluster,
    _found.PyramidKVCluster,
    _found.H2OKVCluster,
)
StreamingLLMKVCluster, L2NormCluster = _found.StreamingLLMKVCluster, _found.L2NormCluster
