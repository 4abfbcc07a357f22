"""The causal attention of a prompt by torch's FlashAttention,
which also gives the logarithm of each row's normaliser.

A method that adds up the attention that tokens receive (H2O) needs these logarithms, and its model needs the
output anyway. So one pass over the products is left to the method, which has no faster first pass of its own.
"""

import functools
import math

import torch

OPERATORS = {
    "cuda": torch.ops.aten._scaled_dot_product_flash_attention,
    "cpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
}
"""What `torch.nn.functional.scaled_dot_product_attention` calls where its flash backend serves, by device; it
keeps the logarithms to itself.
"""
LARGEST_HEAD_DIM, CHANNELS_OF_A_WORD = 256, 8
FIRST_ARCHITECTURE = (8, 0)


def serves(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether it takes a prompt: as many queries as keys, in half precision on a GPU."""
    head_dim = keys.shape[-1]
    fits = queries.shape[2] == keys.shape[2] and values.shape[-1] == head_dim
    fits &= head_dim <= LARGEST_HEAD_DIM and head_dim % CHANNELS_OF_A_WORD == 0
    if not queries.is_cuda:
        return fits and queries.device.type in OPERATORS
    is_half = queries.dtype in (torch.float16, torch.bfloat16)
    if not (fits and is_half and has_kernel()):
        return False
    return torch.cuda.get_device_capability(queries.device) >= FIRST_ARCHITECTURE


@functools.cache
def has_kernel() -> bool:
    """Return whether this torch was built with the operator for a GPU."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(OPERATORS["cuda"].default.name(), "CUDA")


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H_q, M, D] of the causal attention, in the dtype of the queries, and the
    logarithm of each normaliser [B, H_q, M], float32 (float64 for float64), natural.
    """
    flash = OPERATORS[queries.device.type]
    output, logarithms, *_ = flash(queries, keys, values, 0.0, True, scale=1 / math.sqrt(queries.shape[-1]))
    return output, logarithms
