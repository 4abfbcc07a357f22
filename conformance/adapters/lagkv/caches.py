"""The two caches of LagKV's authors, and what a layer of one has kept of a prompt."""

import torch

from conformance.borrowed import OldDynamicCache, Watching, leave_out, take

LagKV = take("lagkv", "lag_kv.py", "LagKV", DynamicCache=OldDynamicCache).LagKV
L2KV = take("lagkv", "l2_kv.py", "L2KV", DynamicCache=OldDynamicCache).L2KV


def kept(cache, keys, values, sinks, layer=0):
    """The kept tokens [B, H, T]: sinks, what was gathered,
    and the tail; the rows of the cache are looked at, too.
    """
    leave_out(keys.shape[3] != values.shape[3], "values of other channels than the keys")
    length = keys.shape[2]
    with Watching() as watching:
        cache.update(keys.clone(), values.clone(), layer)
    if watching.index is None:
        return torch.ones(keys.shape[:3], dtype=torch.bool)
    chosen = sinks + watching.index[..., 0]
    tail = cache.key_cache[layer].shape[2] - sinks - chosen.shape[2]
    edges = [
        torch.arange(start, stop).expand(*keys.shape[:2], -1)
        for start, stop in ((0, sinks), (length - tail, length))
    ]
    places = torch.cat([edges[0], chosen, edges[1]], dim=2)
    for states, rows in ((keys, cache.key_cache[layer]), (values, cache.value_cache[layer])):
        if not torch.equal(rows, states.take_along_dim(places[..., None], dim=2)):
            raise AssertionError("the cache does not hold the rows that were chosen")
    return torch.zeros(keys.shape[:3], dtype=torch.bool).scatter(2, places, True)
