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

    flat = keys.as_strided((keys.numel(),), (1,))
    return -torch.linalg.vector_norm(flat.view(keys.shape), dim=-1)


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
