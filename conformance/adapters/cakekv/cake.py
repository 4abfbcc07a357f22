"""CAKE's authors' code: the entropy, the preference that an attention layer finds while it reads the prompt,
and what the layers so far keep.
"""

from types import SimpleNamespace

import numpy as np
import torch

from conformance.borrowed import OldDynamicCache, for_all_queries, leave_out, take

DOMAIN = {"dtype": ("float32",), "batch": (1,)}

_utils = take("cakekv", "cake/utils.py", "calculate_entropy", "adjust_budgets", np=np)
_caches = take(
    "cakekv",
    "cake/cake_cache.py",
    *("CakeCache", "CakeprefillKVCache"),
    Cache=object,
    adjust_budgets=_utils.adjust_budgets,
)
_attention = take(
    "cakekv",
    "cake/model/modify_llama.py",
    "llama_attn_forward_cake",
    StaticCache=OldDynamicCache,
    DynamicCache=OldDynamicCache,
    logger=SimpleNamespace(warning_once=lambda unused: None),
    calculate_entropy=_utils.calculate_entropy,
    apply_rotary_pos_emb=lambda queries, keys, cos, sin: (queries, keys),
    repeat_kv=lambda states, groups: states.repeat_interleave(groups, dim=1),
    _flash_attention_forward=lambda queries, *unused, **settings: queries,
).llama_attn_forward_cake


def dispersion(attention):
    return torch.stack([_utils.calculate_entropy(row) for row in attention.flatten(0, -3)]).view(
        attention.shape[:-2]
    )


def preference(queries, keys, *, window_size=32, tau1=1.0, tau2=1.0):
    leave_out(
        not 1 < window_size < keys.shape[2], "a prompt within the window, or one query, which gives NaN"
    )
    cache, whole = _caches.CakeCache(), _caches.CakeprefillKVCache(keys.shape[2], num_layers=1)
    module = SimpleNamespace(
        q_proj=lambda unused: for_all_queries(queries, keys.shape[2]).transpose(1, 2),
        k_proj=lambda unused: keys.transpose(1, 2),
        v_proj=lambda unused: keys.transpose(1, 2),
        o_proj=lambda unused: None,
        num_heads=queries.shape[1],
        num_key_value_heads=keys.shape[1],
        num_key_value_groups=queries.shape[1] // keys.shape[1],
        head_dim=keys.shape[3],
        layer_idx=0,
        training=False,
        attention_dropout=0.0,
        is_causal=True,
        _flash_attn_uses_top_left_mask=False,
        config=SimpleNamespace(
            prefill=[True],
            prefill_cake_evict=[whole],
            decoding_evict=[None],
            key_size=[0],
            window_size=[window_size],
            tau1=tau1,
            tau2=tau2,
            gamma=0.0,
            _pre_quantization_dtype=torch.float32,
        ),
    )
    _attention(module, keys[:, 0], past_key_value=cache, position_embeddings=(None, None))
    return torch.from_numpy(np.stack(cache.pref_scores))


def budgets(budget, preferences, *, num_layers=None, length=None, window_size=0):
    layers, length = len(preferences), length or budget + window_size + 1
    leave_out(
        not 1 <= window_size <= budget < length - window_size or not preferences.any(),
        "no window, one above the budget, a prompt that stays whole, or no preference, by which it divides",
    )
    cache, settings = _caches.CakeCache(), {"num_layers": num_layers or layers, "use_cascading": True}
    cache.pref_scores, cache.layer_budget = list(preferences.numpy()), [None] * layers
    cache.evict_scores, cache.key_cache, cache.value_cache = (
        list(torch.zeros(layers, 1, 1, *size)) for size in ([length - window_size], [length, 1], [length, 1])
    )
    _caches.CakeprefillKVCache(budget, window_size, num_heads=1, **settings)(cache, length)
    return [keys.shape[2] for keys in cache.key_cache]
