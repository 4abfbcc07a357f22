"""Calibrated state of methods: computed from the queries of a text, saved, and refused for another model than its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from evictionary.cache import file
from evictionary.cache.future_queries import rotation, turned, unrotated
from evictionary.errors import UsageError
from evictionary.optimized import q_filters, triattention

SCHEMA = "evictionary/calibration/2"
GATE_PLACES = 500
"""The places on which a gate is estimated (DA-1)."""
OFFSETS = 2 ** torch.arange(17)
"""The distances to future positions that the mean query is averaged over (TA-2): 1, 2, 4, ..., 65536."""

State = dict[str, torch.Tensor]
"""The state of a layer: query_mean [B, H_q, D] before RoPE, query_slack [B, H_q, D/2], q_filters [B, H_kv, D], gates [B, H_kv]."""


def of_states(
    model: PreTrainedModel,
    layer_index: int,
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    key_positions: torch.Tensor | None,
) -> State:
    """The state of a layer from queries [B, H_q, N, D] and keys [B, H_kv, T, D], after RoPE, at positions [N] and [T].

    Without key_positions, as when tokens have been evicted, there are no gates. Raises UsageError for a partial RoPE.
    """
    cos, sin = rotation(model, layer_index, positions)
    if cos.shape[-1] != queries.shape[-1]:
        raise UsageError(f"model: RoPE turns {cos.shape[-1]} of {queries.shape[-1]} channels, wanted a model where it turns all")
    mean, slack = triattention.statistics(unrotated(queries, cos, sin))
    # Some RoPE variants scale cosine and sine, so the cached keys are longer than the slack counts by that scale.
    scale = (cos * cos + sin * sin).sqrt().mean()
    filters = q_filters.calibrate(queries, keys.shape[1]).float()
    state = {"query_mean": mean, "query_slack": slack * scale, "q_filters": filters}
    if key_positions is not None:
        key_mean = unrotated(keys, *rotation(model, layer_index, key_positions)).mean(dim=-2)
        state["gates"] = _gates(model, layer_index, mean, key_mean)
    return state


def _gates(model: PreTrainedModel, layer_index: int, query_mean: torch.Tensor, key_mean: torch.Tensor) -> torch.Tensor:
    """DA-1 with the model's own RoPE: means before RoPE, [B, H_q, D] and [B, H_kv, D], give gates [B, H_kv]."""
    cos, sin = rotation(model, layer_index, torch.arange(GATE_PLACES, device=query_mean.device))
    keys = turned(key_mean[:, :, None].expand(-1, -1, GATE_PLACES, -1), cos, sin)
    last = turned(query_mean, cos[-1], sin[-1]).unflatten(1, (key_mean.shape[1], -1))
    weights = (last @ keys.mT / keys.shape[-1] ** 0.5).softmax(dim=-1)
    return weights.cumsum(dim=-1).mean(dim=(2, 3))


def at_position(model: PreTrainedModel, layer_index: int, state: Mapping[str, torch.Tensor], position: int) -> State:
    """The inputs of the methods at the position of the next token: query_direction (TA-2), and the others as they are."""
    mean = state["query_mean"]
    cos, sin = rotation(model, layer_index, position + OFFSETS.to(mean.device))
    direction = turned(mean[..., None, :].expand(*mean.shape[:-1], len(OFFSETS), -1), cos, sin).mean(dim=-2)
    return {**state, "query_direction": direction}


def write(model: PreTrainedModel, layers: Mapping[int, Mapping[str, torch.Tensor]], path: str | Path) -> None:
    """Save the state of each layer. Raises UsageError for a path that cannot be written."""
    tensors = {f"{layer}.{name}": each.cpu().contiguous() for layer, state in layers.items() for name, each in state.items()}
    file.write_tensors("output", path, {"schema": SCHEMA, "model": file.fingerprint(model)}, tensors)


def read(model: PreTrainedModel, path: str | Path) -> dict[int, State]:
    """The state of each layer from a file that `write` wrote. Raises UsageError for any other, or for another model's."""
    settings, tensors = file.read_tensors("option calibration", path, str(model.device), SCHEMA, "of `evictionary calibrate`")
    if settings["model"] != file.fingerprint(model):
        raise UsageError(f"option calibration: got {path} of another model, wanted that of {type(model).__name__} at hand")
    layers: dict[int, State] = {}
    for name, tensor in tensors.items():
        layer, _, entry = name.partition(".")
        layers.setdefault(int(layer), {})[entry] = tensor
    return layers
