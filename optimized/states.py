"""Tuples of tensors that entries and kernels exchange: the compressed cache, MomentKV's moments, its step."""

from typing import NamedTuple

import torch

from .checks import working_dtype


class CompressedCache(NamedTuple):
    """The kept tokens of every head, row after row: batch by batch, head by head, in position order.

    keys [N, D] and values [N, D_v], N = all kept tokens; positions [N] int64,
    the place of each row in the original sequence; lengths [B, H_kv] int64,
    the number of rows of each head. Heads may differ in length (ragged).
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor


class PagedCache(NamedTuple):
    """Pools of P pages of S tokens, as serving engines have them, and the pages of each sequence.

    keys [P, S, H_kv, D], values [P, S, H_kv, D_v] and positions [P, S, H_kv], the place
    of each token in the text; a slot without a token holds anything, NaN too. block_table
    [B, n], the pages of each sequence in their order; behind its last page stands any
    number. lengths [B, H_kv] int64, the tokens that each head holds (physical). seen [B],
    the tokens that the sequence has had (logical), which is the position of the next one.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    seen: torch.Tensor


class Moments(NamedTuple):
    r"""MK-22: `n_e = |E|`, `s_k = sum k_i`, `s_v = sum v_i`, `S = sum v_i k_i^T` over the evicted tokens
    of each KV head.

    count [B, H_kv], int64; key_sum [B, H_kv, D]; value_sum [B, H_kv, D_v]; value_key_sum [B, H_kv, D_v, D].
    Source: equation 22.
    """

    # Decision: float32 or wider for any dtype of the cache: a half-precision sum stops growing (MK-C2).
    count: torch.Tensor
    key_sum: torch.Tensor
    value_sum: torch.Tensor
    value_key_sum: torch.Tensor


class Step(NamedTuple):
    """After a decoding step: output [B, H_q, D_v], the retained keys [B, H_kv, L, D] and values in
    position order, the Moments.
    """

    output: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    moments: Moments


def zero_moments(keys: torch.Tensor, values: torch.Tensor) -> Moments:
    r"""The moments of the empty set for the heads of keys
    [..., T, D] and values [..., T, D_v], which have been checked.
    """
    lead, head_dim, value_dim, dtype = keys.shape[:-2], keys.shape[-1], values.shape[-1], working_dtype(keys)
    return Moments(
        keys.new_zeros(lead, dtype=torch.int64),
        keys.new_zeros(*lead, head_dim, dtype=dtype),
        keys.new_zeros(*lead, value_dim, dtype=dtype),
        keys.new_zeros(*lead, value_dim, head_dim, dtype=dtype),
    )
