"""TOVA's authors: `TOVACache.reduce` takes the attention
of the step and keeps what its last query attends to.
"""

from conformance.borrowed import OldDynamicCache, causal_attention, ranked_by, take

DOMAIN = {"dtype": ("float32",), "min_length": 2}  # of one token there is nothing to evict

TOVACache = take("tova", "src/tova_cache.py", "TOVACache", DynamicCache=OldDynamicCache).TOVACache


def score(queries, keys):
    cache = TOVACache(keys.shape[2] - 1)
    cache.key_cache, cache.value_cache = [keys], [keys]
    return ranked_by(cache.reduce, 0, causal_attention(queries, keys))[:, None].expand(keys.shape[:3])
