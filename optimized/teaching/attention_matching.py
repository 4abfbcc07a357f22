r"""Attention Matching to read: attention over the kept keys, with a bias for each of them (AM-5).

One launch, one program for each query. It walks once over the kept keys and values, with the largest logit so
far, the sum of the exponentials and the sum of the values. The bias of a key is one more addend of its logit.
"""

import torch
import triton
import triton.language as tl

from ..gradients import forward_only
from .tova import BLOCK, tile_logits


@forward_only
def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    r"""AM-5: queries [B, H_q, M, D], keys [B, H_kv, n, D], values [B, H_kv, n, D_v] and bias [B, H_kv, n]
    give outputs [B, H_q, M, D_v].
    """
    head_dim, value_dim = keys.shape[-1], values.shape[-1]
    output = queries.new_empty(*queries.shape[:3], value_dim)
    readers = queries.shape[1] // keys.shape[1] * queries.shape[2]
    states = (
        (queries * head_dim**-0.5).contiguous(),
        keys.contiguous(),
        values.contiguous(),
        bias.contiguous(),
    )
    sizes = (readers, keys.shape[2], head_dim, value_dim, BLOCK)
    attend_biased[(queries.shape[:3].numel(),)](*states, output, *sizes)
    return output


@triton.jit
def attend_biased(
    queries_ptr, keys_ptr, values_ptr, bias_ptr, output_ptr, readers, length, D: tl.constexpr,
    D_V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """output[query] = sum_t exp(q . k_t + beta_t) v_t / sum_t exp(q . k_t + beta_t). Grid: queries."""
    row = tl.program_id(0).to(tl.int64)
    head = row // readers  # all queries of a group read the same KV head
    query = tl.load(queries_ptr + row * D + tl.arange(0, D))
    highest = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    output = tl.zeros([D_V], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        inside = positions < length
        logits = tile_logits(query, keys_ptr + head * length * D, first, length, D, BLOCK)
        logits += tl.load(bias_ptr + head * length + positions, mask=inside, other=0.0)
        higher = tl.maximum(highest, tl.max(logits, axis=0))
        powers = tl.exp(logits - higher)
        addresses = (head * length + positions)[:, None] * D_V + tl.arange(0, D_V)[None, :]
        values = tl.load(values_ptr + addresses, mask=inside[:, None], other=0.0)
        # What has been summed so far counts from the old largest logit; it is brought to the new one.
        shrunk = tl.exp(highest - higher)
        total = total * shrunk + tl.sum(powers, axis=0)
        output = output * shrunk + tl.sum(powers[:, None] * values, axis=0)
        highest = higher
    tl.store(output_ptr + row * D_V + tl.arange(0, D_V), output / total)
