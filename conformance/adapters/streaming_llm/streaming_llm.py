"""StreamingLLM's authors: `StartRecentKVCache` keeps
so many tokens from the start and so many from the end.
"""

import contextlib
import io

from conformance.borrowed import mask, positions_as_values, scores_by_budget, take

DOMAIN = {"dtype": ("float32",), "max_length": 512}  # every budget is asked

_found = take("streaming_llm", "streaming_llm/kv_cache.py", "StartRecentKVCache", "slice2d", DIM_TO_SLICE={})
_found.StartRecentKVCache.__init__.__globals__["DIM_TO_SLICE"][2] = _found.slice2d


def score(keys, *, sink_size=4):
    length = keys.shape[2]

    def kept_at(budget):
        with contextlib.redirect_stdout(io.StringIO()):  # the class says its sizes
            cache = _found.StartRecentKVCache(sink_size, budget - sink_size)
        return mask(cache([[keys, positions_as_values(keys)]])[0][1], length)

    return scores_by_budget(kept_at, range(min(sink_size, length), length + 1))
