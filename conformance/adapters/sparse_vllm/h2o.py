"""Sparse-vLLM's H2O, token by token: what a decode step adds to the scores of a row, and which it keeps."""

import torch

from conformance.borrowed import take

DOMAIN = {"dtype": ("float32",), "max_length": 512}  # token by token

_found = take(
    "sparse_vllm",
    "src/sparsevllm/engine/cache_manager/h2o.py",
    "H2OCacheManager",
    SnapKVCacheManager=object,
).H2OCacheManager


def score(queries, keys):
    """One score for all heads: the largest logit of all query heads, softmax, as the decode kernel and
    `_normalize_logit_prefill_score` do; weighed by one query each.
    """
    rows = torch.stack([_row(q, k) for q, k in zip(queries, keys, strict=True)])
    return rows[:, None].expand(keys.shape[:3])


def _row(queries, keys):
    length, count = keys.shape[1], queries.shape[1]
    keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
    logits = (queries @ keys.mT / keys.shape[-1] ** 0.5).amax(dim=0)
    scores = None
    for step, row in enumerate(logits):
        seen = length - count + step + 1
        added = _found._normalize_logit_prefill_score(row, new_len=seen)
        scores = _found._accumulate_score(scores, added, new_len=seen, weight=1.0)
    return scores


def select(queries, keys, *, budget):
    kept = [
        torch.zeros(keys.shape[2], dtype=torch.bool).index_fill(
            0, _found.select_h2o_indices(row, budget=budget, recent_ratio=0.5), True
        )
        for row in score(queries, keys)[:, 0]
    ]
    return torch.stack(kept)[:, None].expand(keys.shape[:3])
