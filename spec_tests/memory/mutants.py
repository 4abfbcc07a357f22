"""Functions that compute the right numbers and treat memory wrongly.

torch is imported when they run: whoever judges NumPy functions may have none.
"""

import numpy as np

from evictionary.spec_tests.proof.planted import mutant


@mutant(
    "knorm.score",
    killed_by="MEM-4",
    misconception="strides ignored: the storage read as if it were contiguous",
    array_library="torch",
)
def storage_read_in_order(keys):
    import torch

    return -torch.linalg.vector_norm(keys.as_strided((keys.numel(),), (1,)).view(keys.shape), dim=-1)


@mutant(
    "knorm.score",
    killed_by="MEM-5",
    misconception="the output allocated with torch.empty and its tail tile not written",
    array_library="torch",
)
def tail_not_written(keys):
    import torch

    scores = torch.empty(keys.shape[:-1])
    whole = keys.shape[2] // 16 * 16
    scores[:, :, :whole] = -torch.linalg.vector_norm(keys[:, :, :whole], dim=-1)
    return scores


@mutant("knorm.score", killed_by="MEM-7", misconception="offsets computed in 32 bits", array_library="torch")
def offsets_in_32_bits(keys):
    import torch

    rows = []
    for item in range(keys.shape[0]):
        offset = int(np.array(item * keys.stride(0)).astype(np.int32)) if keys.stride(0) < 2**32 else 0
        rows.append(keys.as_strided(keys.shape[1:], keys.stride()[1:], keys.storage_offset() + abs(offset)))
    return -torch.linalg.vector_norm(torch.stack(rows), dim=-1)


@mutant(
    "knorm.score",
    killed_by="MEM-4",
    misconception="batch items counted from the storage: an expanded batch is scored once, the rest stays "
    "zero",
    array_library="torch",
)
def batch_counted_from_storage(keys):
    import torch

    stored = keys.untyped_storage().nbytes() // keys.element_size() // keys[0].numel()
    scores = torch.zeros(keys.shape[:-1])
    scores[:stored] = -torch.linalg.vector_norm(keys[:stored], dim=-1)
    return scores


# What a serving engine keeps between two calls.
WORKSPACES: dict = {}


@mutant(
    "knorm.score",
    killed_by="MEM-3",
    misconception="squares summed into a workspace that is not cleared: a call adds to what the one before "
    "left",
    array_library="torch",
)
def workspace_not_cleared(keys):
    import torch

    sums = WORKSPACES.setdefault(("sums", keys.shape), torch.zeros(keys.shape[:-1]))
    sums += keys.square().sum(dim=-1)
    return -sums.sqrt()


@mutant(
    "knorm.score",
    killed_by="MEM-2",
    misconception="one output buffer for all calls of a shape: the next call writes over an answer that is "
    "still read",
    array_library="torch",
)
def output_written_over_by_the_next_call(keys):
    import torch

    scores = WORKSPACES.setdefault(("scores", keys.shape), torch.empty(keys.shape[:-1]))
    return torch.neg(torch.linalg.vector_norm(keys, dim=-1), out=scores)


@mutant(
    "knorm.score",
    killed_by="KN-1",
    misconception="squares summed in float16 and not in float32",
    array_library="torch",
)
def summed_in_half(keys):
    return -keys.half().square().sum(dim=-1).sqrt().to(keys.dtype)


@mutant(
    "knorm.score",
    killed_by="MEM-9",
    misconception="a kernel that detaches: launched past autograd, its answer carries no graph, and nothing "
    "says so",
    array_library="torch",
)
def graph_cut(keys):
    import torch

    scores = torch.empty(keys.shape[:-1], dtype=keys.dtype)
    with torch.no_grad():
        return torch.neg(torch.linalg.vector_norm(keys, dim=-1), out=scores)


@mutant(
    "knorm.score",
    killed_by="MEM-9",
    misconception="the answer written with out=, which torch refuses where a gradient is wanted, in words "
    "that name no function of ours",
    array_library="torch",
)
def written_with_out(keys):
    import torch

    norms = torch.empty(keys.shape[:-1], dtype=keys.dtype)
    return -torch.linalg.vector_norm(keys, dim=-1, out=norms)


@mutant(
    "knorm.score",
    killed_by="MEM-9",
    misconception="the norms negated in place: their gradient needs them, and fails when it is asked for",
    array_library="torch",
)
def negated_in_place(keys):
    import torch

    return torch.linalg.vector_norm(keys, dim=-1).neg_()


@mutant(
    "knorm.score",
    killed_by="MEM-9",
    misconception="one factor of the squares detached: half of the gradient",
    array_library="torch",
)
def half_of_the_graph(keys):
    return -(keys * keys.detach()).sum(dim=-1).sqrt()


@mutant(
    "keydiff.score",
    killed_by="KD-8",
    misconception="the anchor of the first call of a shape is kept for the calls after it",
    array_library="torch",
)
def anchor_kept_between_calls(keys):
    import torch

    units = torch.nn.functional.normalize(keys, dim=-1, eps=1e-30)
    anchor = WORKSPACES.setdefault(("anchor", keys.shape), units.mean(dim=-2, keepdim=True))
    return -torch.nn.functional.cosine_similarity(units, anchor, dim=-1, eps=1e-30)
