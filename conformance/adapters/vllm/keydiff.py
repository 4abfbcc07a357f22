"""KeyDiff of a pull request to vLLM: `keydiff_scores`, and `compact_request_kv` of a paged cache as one
block of the paper.
"""

import numpy as np
import torch

from conformance.borrowed import leave_out, take
from evictionary.reference.keydiff import Cache

DOMAIN = {"dtype": ("float32",)}

PAGE = 4  # tokens
_names = ("keydiff_scores", "compact_request_kv", "gather_slots", "scatter_slots", "_slots_for_positions")
_found = take("vllm", "vllm/v1/worker/kv_compression.py", *_names, np=np)


def score(keys):
    return torch.stack([_found.keydiff_scores(each.transpose(0, 1)) for each in keys])


def process_block(cache, keys, values, *, budget):
    leave_out(
        keys.ndim != 4 or keys.shape[-1] != values.shape[-1],
        "leading axes other than [B, H], or values of other channels than the keys",
    )
    seen = cache.seen if cache else 0
    positions = torch.arange(seen, seen + keys.shape[2]).expand(keys.shape[:3])
    if cache:
        keys, values, positions = (
            torch.cat(pair, dim=2) for pair in zip(cache[:3], (keys, values, positions), strict=True)
        )
    # Positions travel as values of a second layer, whose keys are the same.
    layers = [values, positions[..., None].expand(keys.shape).to(keys.dtype)]
    kept = [
        torch.stack([_compacted(*item, budget) for item in zip(keys, layer, strict=True)], dim=1)
        for layer in layers
    ]
    return Cache(
        *kept[0], kept[1][1][..., 0].long(), seen + positions.shape[2] - (cache.keys.shape[2] if cache else 0)
    )


def _compacted(keys, values, budget):
    """Keys and values [H, T, D] of one text through a
    cache whose pages lie in reversed order; [2, H, n, D].
    """
    pages = -(-keys.shape[1] // PAGE)
    table = np.arange(pages)[::-1].copy()
    places = torch.from_numpy(table.repeat(PAGE) * PAGE + np.tile(np.arange(PAGE), pages))[: keys.shape[1]]
    paged = torch.zeros(2, pages, PAGE, keys.shape[0], keys.shape[2])
    flat = paged.view(2, pages * PAGE, *paged.shape[3:])
    flat[:, places] = torch.stack([keys, values]).transpose(1, 2)
    count = _found.compact_request_kv([paged], table, PAGE, keys.shape[1], budget)
    return flat[:, places[:count]].transpose(1, 2)
