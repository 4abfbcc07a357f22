"""Sparse-vLLM's StreamingLLM: `SparseController._streamingllm_select_indices` at every budget."""

from types import SimpleNamespace

import torch

from conformance.borrowed import leave_out, scores_by_budget, take

DOMAIN = {"dtype": ("float32",), "max_length": 2048}  # every budget is asked

_found = take(
    "sparse_vllm",
    "src/sparsevllm/engine/sparse_controller.py",
    "SparseController",
).SparseController


def score(keys, *, sink_size=4):
    length = keys.shape[2]
    leave_out(sink_size >= length, "no more tokens than sinks, all of which are kept")

    def kept_at(budget):
        settings = SimpleNamespace(num_sink=sink_size, num_recent=budget - sink_size, device="cpu")
        kept = torch.zeros(length, dtype=torch.bool)
        return kept.index_fill(0, _found._streamingllm_select_indices(settings, length), True)

    return scores_by_budget(kept_at, range(sink_size + 1, length + 1)).expand(keys.shape[:3])
