"""Correct groupings of query heads and correct causal attention of other kinds; the correct `attend` are in shared.py."""

from __future__ import annotations

import math

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control

BY_GROUP, CAUSAL = "attention.by_group", "attention.causal_attention"
NUMPY = ("float64", "float32")
ALL = (*NUMPY, "float16", "bfloat16")


def refuse(queries, keys) -> None:
    """ValueError for queries that are not those of the last tokens of keys, NumPy arrays and tensors alike."""
    if not (
        len(queries.shape) == 4
        and 0 not in queries.shape
        and queries.shape[0] == keys.shape[0]
        and queries.shape[1] % keys.shape[1] == 0
        and queries.shape[2] <= keys.shape[2]
        and queries.shape[3] == keys.shape[3]
    ):
        raise ValueError(f"queries: got shape {tuple(queries.shape)}, beside keys of {tuple(keys.shape)}")


def hidden(num_queries, length):
    """True where a query does not see a token, [M, T]."""
    return torch.ones(num_queries, length, dtype=torch.bool).triu(length - num_queries + 1)


def torch_weights(queries, keys):
    """Causal attention [B, H_q, M, T] in the dtype of the keys throughout, the keys repeated for each query head."""
    repeated = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    logits = queries @ repeated.mT / math.sqrt(keys.shape[-1])
    return logits.masked_fill(hidden(*logits.shape[-2:]), -torch.inf).softmax(dim=-1)


def widened(queries, keys):
    """The same at least in float32."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    return torch_weights(queries.to(wide), keys.to(wide))


def streamed(queries, keys):
    """Causal attention [B, H_q, M, T] query by query, with a running maximum and a running sum over tiles of 16 tokens."""
    length, scale = keys.shape[2], keys.dtype.type(1 / math.sqrt(keys.shape[-1]))
    weights = np.zeros((*queries.shape[:3], length), keys.dtype)
    for item, reader, row in np.ndindex(queries.shape[:3]):
        head, seen = reader // (queries.shape[1] // keys.shape[1]), length - queries.shape[2] + row + 1
        logits, highest, total = np.zeros(seen, keys.dtype), -np.inf, keys.dtype.type(0)
        for start in range(0, seen, 16):
            tile = keys[item, head, start : min(start + 16, seen)] @ (queries[item, reader, row] * scale)
            higher = max(highest, tile.max())
            total = total * np.exp(highest - higher) + np.exp(tile - higher).sum()
            highest, logits[start : start + 16] = higher, tile
        weights[item, reader, row, :seen] = np.exp(logits - highest) / total
    return weights


@control(BY_GROUP, dtypes=NUMPY)
def head_by_head(queries, keys):
    """Each KV head's readers cut out and stacked."""
    refuse(queries, keys)
    group = queries.shape[1] // keys.shape[1]
    return np.stack([queries[:, head * group : (head + 1) * group] for head in range(keys.shape[1])], axis=1), keys[:, :, None]


@control(BY_GROUP, dtypes=NUMPY)
def permuted_layout(queries, keys):
    """Channels first in memory: the same numbers with other strides."""
    refuse(queries, keys)
    first = np.ascontiguousarray(np.moveaxis(queries, -1, 0)).reshape(
        queries.shape[3], queries.shape[0], keys.shape[1], -1, queries.shape[2]
    )
    return np.moveaxis(first, 0, -1), np.moveaxis(np.ascontiguousarray(np.moveaxis(keys, -1, 0)), 0, -1)[:, :, None]


@control(BY_GROUP, array_library="torch", dtypes=ALL)
def torch_unflatten(queries, keys):
    refuse(queries, keys)
    return queries.unflatten(1, (keys.shape[1], -1)), keys.unsqueeze(2)


@control(CAUSAL, dtypes=NUMPY)
def tiles_of_tokens(queries, keys):
    return streamed(queries, keys)


@control(CAUSAL, array_library="torch", dtypes=ALL)
def torch_each_step_rounded(queries, keys):
    return torch_weights(queries, keys)


@control(CAUSAL, array_library="torch", dtypes=ALL)
def torch_attention_of_unit_values(queries, keys):
    """torch's own attention, at least in float32: the output over one-hot values is the weights."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    one_hot = torch.eye(keys.shape[-2], dtype=wide).expand(*keys.shape[:-1], -1)
    seen = ~hidden(queries.shape[-2], keys.shape[-2])
    states = queries.to(wide), keys.to(wide), one_hot
    return torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=seen).to(keys.dtype)


@control(CAUSAL, dtypes=NUMPY)
def powers_of_two(queries, keys):
    """Logits scaled by log2 e, powers of two, summed from the last token on; tokens padded to a multiple of 16 and masked."""
    length = keys.shape[-2]
    padded = np.pad(keys, [(0, 0)] * (keys.ndim - 2) + [(0, -length % 16), (0, 0)], constant_values=3)
    logits = np.einsum("...md,...td->...mt", queries, padded) * keys.dtype.type(math.log2(math.e) / math.sqrt(keys.shape[-1]))
    seen = np.arange(padded.shape[-2]) <= np.arange(length - queries.shape[-2], length)[:, None]
    logits = np.where(seen, logits, -np.inf)
    powers = np.exp2(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers[..., ::-1].sum(axis=-1, keepdims=True))[..., :length]
