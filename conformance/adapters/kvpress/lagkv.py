"""kvpress's `LagKVPress`: its scores are ranks inside each
partition, so it is judged by what a top-k of them keeps.
"""

from kvpress import LagKVPress

from conformance.borrowed import leave_out, top_k
from evictionary.reference import lagkv as definition


def select(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    leave_out(keys.shape[3] != values.shape[3], "values of other channels than the keys")
    # A press is told a ratio of the whole cache; the number of tokens that LK-12 keeps is one of them.
    budget = definition.retained_length(
        keys.shape[2], keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size
    )
    return top_k(
        LagKVPress(n_sink=sink_size, lag_size=lag_size).score(None, None, keys, values, None, {}), budget
    )
