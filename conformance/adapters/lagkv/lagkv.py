"""LagKV's authors: `LagKV.update` takes a prompt and leaves the compressed cache in `key_cache`."""

import torch

from conformance.adapters.lagkv.caches import LagKV, kept
from conformance.borrowed import leave_out, ranked_by

DOMAIN = {"dtype": ("float32",)}


def score(keys, values, next_keys, next_values):
    leave_out(
        keys.shape[2] != next_keys.shape[2] or keys.shape[3] != values.shape[3],
        "partitions of two lengths, or values of other channels than the keys",
    )
    pairs = (torch.cat(pair, dim=2) for pair in ((keys, next_keys), (values, next_values)))
    return ranked_by(LagKV(sink_size=0, lag_size=keys.shape[2]).update, *pairs, 0)[:, :, 0]


def select(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    return kept(LagKV(ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size), keys, values, sink_size)
