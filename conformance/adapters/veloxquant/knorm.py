"""VeloxQuant-MLX's KNorm: the norms by which `knorm_update` ranks, in MLX's build for processors."""

from dataclasses import dataclass

import mlx.core as mx

from conformance.borrowed import take

ARRAY_LIBRARY = "mlx"
DOMAIN = {"dtype": ("float16",)}  # its keys are float16

_found = take(
    "veloxquant",
    "veloxquant_mlx/quantizers/knorm.py",
    *("KnormState", "init_knorm_state", "knorm_update"),
    dataclass=dataclass,
    mx=mx,
)


def score(keys):
    length, width = keys.shape[-2:]
    # With a budget of the whole prompt the state has the norms of all tokens.
    state = _found.init_knorm_state(0, length, width)
    rows = [_found.knorm_update(state, row, row).norms for row in keys.reshape(-1, length, width)]
    return -mx.stack(rows).reshape(keys.shape[:-1])
