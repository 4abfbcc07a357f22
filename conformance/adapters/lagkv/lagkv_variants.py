"""LagKV's authors: `L2KV`, the variant of their section 4.4 that ranks by the norm of the keys."""

from conformance.adapters.lagkv.caches import L2KV, kept

ARRAY_LIBRARY = "torch"
DOMAIN = {"dtype": ("float32",)}


def norm_select(keys, values, *, layer, keep_ratio, sink_size=16, lag_size=1024, skipped_layers=2):
    cache = L2KV(
        ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size, skip_layer_idx=list(range(skipped_layers))
    )
    return kept(cache, keys, values, sink_size, layer)
