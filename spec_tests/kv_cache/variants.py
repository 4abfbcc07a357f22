"""Right KV caches of other kinds: head by head, token by token, in torch."""

from evictionary.reference.kv_cache import KVCache
from evictionary.spec_tests.kv_cache import forms
from evictionary.spec_tests.rope.variants import torch_angles, torch_turned
from evictionary.spec_tests.shared.variants import *

WEIGHTS, ATTEND, ROTATE = "kv_cache.weights", "kv_cache.attend", "kv_cache.rotate"
PREFILL, DECODE, BYTES = "kv_cache.prefill", "kv_cache.decode", "kv_cache.cache_bytes"

control(WEIGHTS, name="query_by_query")(
    put_together(forms, "weights", weights=forms.weights_query_by_query, seen=forms.seen_row_by_row)
)
control(WEIGHTS, name="with_a_bias")(
    put_together(forms, "weights", weights=forms.weights_with_a_bias, softmax=forms.softmax_by_log_add_exp)
)
control(ATTEND, name="by_groups")(put_together(forms, "attend", attend=forms.attend_by_groups))
control(ATTEND, name="head_by_head")(put_together(forms, "attend", attend=forms.attend_head_by_head))
control(ROTATE, name="as_complex_numbers")(forms.TURNED[1])
control(ROTATE, name="by_matrices")(forms.TURNED[2])
control(PREFILL, name="token_by_token")(
    put_together(forms, "prefill", prefill=forms.prefill_token_by_token, kept=forms.kept_in_two_slices)
)
control(DECODE, name="into_a_buffer")(put_together(forms, "decode", decode=forms.decode_into_a_buffer))
control(BYTES, name="layer_by_layer")(forms.bytes_layer_by_layer)


def torch_seen(num_queries, length, window, sinks):
    seen = ~hidden(num_queries, length)
    if window is None:
        return seen
    narrow = seen.triu(length - num_queries - window + 1)
    return narrow | (seen & (torch.arange(length) < sinks))


@control(WEIGHTS, array_library="torch", dtypes=ALL)
def torch_masked(queries, keys, *, window=None, sinks=0):
    """As eager code does it: a mask that is filled with minus infinity, and a softmax in the dtype."""
    logits = queries @ keys.mT / keys.shape[-1] ** 0.5
    seen = torch_seen(queries.shape[-2], keys.shape[-2], window, sinks)
    return logits.masked_fill(~seen, -torch.inf).softmax(dim=-1)


@control(ATTEND, array_library="torch", dtypes=ALL)
def torch_of_the_library(queries, keys, values, *, window=None, sinks=0):
    """torch's own attention, which groups the heads itself."""
    seen = torch_seen(queries.shape[2], keys.shape[2], window, sinks)
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen, enable_gqa=True
    )


@control(ROTATE, array_library="torch", dtypes=ALL)
@through_float32
def torch_rotate(states, positions):
    return torch_turned(states, torch_angles(states, positions, 10000.0))


def torch_kept(keys, values, seen, window, sinks):
    mask = torch_seen(1, keys.shape[2], window, sinks)[0]
    return KVCache(keys[:, :, mask], values[:, :, mask], seen)


@control(PREFILL, array_library="torch", dtypes=ALL)
def torch_prefill(queries, keys, values, *, window=None, sinks=0):
    places = torch.arange(keys.shape[2])
    queries, keys = (torch_rotate(each, places) for each in (queries, keys))
    output = torch_of_the_library(queries, keys, values, window=window, sinks=sinks)
    return output, torch_kept(keys, values, keys.shape[2], window, sinks)


@control(DECODE, array_library="torch", dtypes=ALL)
def torch_decode(query, key, value, cache, *, window=None, sinks=0):
    place = torch.tensor([cache.seen])
    query, key = (torch_rotate(each[:, :, None], place) for each in (query, key))
    keys, values = torch.cat([cache.keys, key], dim=2), torch.cat([cache.values, value[:, :, None]], dim=2)
    cache = torch_kept(keys, values, cache.seen + 1, window, sinks)
    return torch_of_the_library(query, cache.keys, cache.values)[:, :, 0], cache
