"""kvpress's Compactor: the leverage of sketched keys, and the attention within a chunk. The sketch that the
press draws is the given one.
"""

from unittest import mock

import torch
from kvpress import LeverageScorePress, NonCausalAttnPress

from conformance.borrowed import leave_out


def drawn(sketch):  # before its division by sqrt(k)
    return mock.patch.object(torch, "randn", return_value=sketch * sketch.shape[-1] ** 0.5)


def sketched_leverage(keys, sketch, *, ridge=0.01):
    leave_out(ridge != 0.01, "another ridge than 0.01")
    with drawn(sketch):
        return LeverageScorePress.compute_leverage_scores(keys, sketch.shape[-1])


def chunk_attention(queries, keys, *, chunk_size=256):
    return NonCausalAttnPress.non_causal_chunked_attn(queries, keys, chunk_size)
