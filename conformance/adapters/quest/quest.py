"""Quest's authors' evaluation: the `forward` of an attention layer, asked for the scores by which it ranks
pages and for the tokens that it attends to.
"""

from types import SimpleNamespace

import torch

from conformance.borrowed import OldDynamicCache, Watching, leave_out, take

DOMAIN = {"dtype": ("float32",)}

_forward = take(
    "quest",
    "evaluation/quest_attention.py",
    *("forward", "local_heavy_hitter_mask"),
    DynamicCache=OldDynamicCache,
    apply_rotary_pos_emb=lambda queries, keys, *unused: (queries, keys),
    repeat_kv=lambda states, groups: states.repeat_interleave(groups, dim=1),
).forward


def watched(query, keys, page_size, budget=1, layer_index=2):
    module = SimpleNamespace(
        q_proj=lambda unused: query,
        k_proj=lambda newest: newest,
        v_proj=lambda newest: newest,
        o_proj=lambda unused: None,
        rotary_emb=lambda *unused: (None, None),
        flash_forward=lambda *unused: None,
        num_heads=query.shape[1],
        num_key_value_heads=keys.shape[1],
        num_key_value_groups=query.shape[1] // keys.shape[1],
        head_dim=keys.shape[3],
        hidden_size=query.shape[1] * keys.shape[3],
        layer_id=layer_index,
        chunk_size=page_size,
        token_budget=budget,
    )
    with Watching() as watching:
        _forward(
            module,
            keys[:, :, -1:].flatten(1)[:, None],
            position_ids=torch.tensor([[keys.shape[2] - 1]]),
            past_key_value=(keys[:, :, :-1], keys[:, :, :-1]),
        )
    return watching


def bounds(query, low, high):  # of pages of two tokens, which are their own bounds
    return watched(query, torch.stack([low, high], dim=3).flatten(2, 3), 2).scores[:, :, 0]


def select(query, keys, layer_index, *, budget, page_size=16, skipped_layers=2):
    leave_out(
        skipped_layers != 2 or (layer_index > 1 and budget < 3 * page_size),
        "fewer than three pages, the least of this code, or another number of whole layers than 2",
    )
    index = watched(query, keys, page_size, budget, layer_index).index
    kept = torch.zeros(*query.shape[:2], keys.shape[2] + page_size, dtype=torch.bool)
    return (~kept if index is None else kept.scatter(2, index[:, :, 0], True))[..., : keys.shape[2]]
