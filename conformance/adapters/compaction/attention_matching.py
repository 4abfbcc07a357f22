"""The authors' `HighestAttentionKeysCompaction`, with the settings AM-HighestAttnKeys-basic of their
configuration. It takes one head at a time.
"""

import math
from abc import ABC, abstractmethod

import torch

from conformance.borrowed import each_head, ranked_by, take

DOMAIN = {"dtype": ("float32",)}

NAMES = {"Tuple": tuple, "Dict": dict}
folder = "compaction/algorithms"
base = take(
    "compaction", f"{folder}/base.py", "CompactionAlgorithm", ABC=ABC, abstractmethod=abstractmethod, **NAMES
)
theirs = take(
    "compaction",
    f"{folder}/highest_attention_keys.py",
    "HighestAttentionKeysCompaction",
    **NAMES,
    **vars(base),
)
method = theirs.HighestAttentionKeysCompaction(
    score_method="rms", nnls_iters=2, nnls_lower_bound=math.exp(-3), nnls_upper_bound=math.exp(3)
)


def heads_of(keys, queries, *more):
    """The keys [T, D] of each head of each text, the queries of its group [G M, D], and what else it has."""
    return each_head(keys, queries.reshape(*keys.shape[:2], -1, keys.shape[3]), *more)


def score(keys, replay_queries):
    found = [
        ranked_by(method._select_keys_highest_attention, *head, 1) for head in heads_of(keys, replay_queries)
    ]
    return torch.stack(found).view(keys.shape[:3])


def select(keys, replay_queries, *, budget):
    kept = torch.zeros(keys.shape[:3], dtype=torch.bool)
    count = min(budget, keys.shape[2])
    for mask, head in zip(kept.flatten(0, 1), heads_of(keys, replay_queries), strict=True):
        mask[method._select_keys_highest_attention(*head, count)[2]] = True
    return kept


def bounded_least_squares(matrix, target):
    """Two steps after the clamped solution without bounds, as configured."""
    lines, sums = matrix.reshape(-1, *matrix.shape[-2:]), target.reshape(-1, target.shape[-1])
    settings = method.nnls_iters, method.nnls_lower_bound, method.nnls_upper_bound
    solved = [method._nnls_pg(*each, *settings) for each in zip(lines, sums, strict=True)]
    return torch.stack(solved).view(*matrix.shape[:-2], matrix.shape[-1])


def fit_values(queries, keys, values, kept, bias):
    found = [
        method._compute_C2(own[mask], beta, own, value, rows)
        for own, rows, value, mask, beta in heads_of(keys, queries, values, kept, bias)
    ]
    return torch.stack(found).view(*keys.shape[:2], -1, values.shape[3])
