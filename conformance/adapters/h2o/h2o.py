"""H2O's authors: `H2OKVCache_LayerWise` sums the attention
that it is given, and keeps heavy hitters and recent tokens.
"""

import contextlib
import io

from conformance.borrowed import causal_attention, leave_out, mask, positions_as_values, take

DOMAIN = {"dtype": ("float32",), "batch": (1,), "group": (1,)}

H2OKVCache = take(
    "h2o", "h2o_hf/utils_real_drop/modify_llama.py", "H2OKVCache_LayerWise"
).H2OKVCache_LayerWise


def _cache(heavy, recent):
    with contextlib.redirect_stdout(io.StringIO()):  # the class says its sizes
        return H2OKVCache(heavy, recent)


def score(queries, keys):
    cache = _cache(1, 1)
    cache._update_hh_score(causal_attention(queries, keys))
    return cache.hh_score[None]


def select(queries, keys, *, budget):
    leave_out(1 in keys.shape[1:], "one head, one token or one channel, which squeeze() drops")
    cache = _cache(budget // 2, (budget + 1) // 2)
    _, values = cache((keys, positions_as_values(keys)), causal_attention(queries, keys))
    return mask(values, keys.shape[2])
