"""Calibrated inputs of methods: computed from the queries of a text, saved, and refused for another model
than their own.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from evictionary import policies
from evictionary.cache import file
from evictionary.cache.model_hooks import attention_module
from evictionary.errors import require
from evictionary.models.queries import rotation, unrotated
from evictionary.models.weights import around, devices_of_layers, output_projection

SCHEMA = "evictionary/calibration/2"

State = dict[str, torch.Tensor]
"""What the policies calibrate of a layer, by name."""


def of_states(
    model: PreTrainedModel,
    layer_index: int,
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    key_positions: torch.Tensor | None,
) -> State:
    """The state of a layer from queries [B, H_q, N, D] and keys [B, H_kv, T, D], after RoPE, at positions
    [N] and [T].

    key_positions are None where tokens have been evicted. Raises UsageError for a partial RoPE.
    """
    cos, sin = rotation(model, layer_index, positions.to(queries.device))
    require(
        cos.shape[-1] == queries.shape[-1],
        f"model: RoPE turns {cos.shape[-1]} of {queries.shape[-1]} channels, wanted a model where it turns "
        "all",
    )
    given = policies.Calibration(queries, unrotated(queries, cos, sin), cos, sin, keys, key_positions)
    return _joined(model, layer_index, lambda policy, source: policy.calibrated(source, given))


def of_readings(
    model: PreTrainedModel, layer_index: int, readings: Sequence[Mapping[str, torch.Tensor]]
) -> State:
    """The state of a layer from texts that a model has read twice: of each the keys, the values, the hidden
    states, and the three states of the replay.
    """
    module = attention_module(model, layer_index)
    w_o = output_projection(module, readings[0]["values"], around(module, model))
    whole = [{**states, "w_o": w_o} for states in readings]
    return _joined(model, layer_index, lambda policy, source: policy.refitted(source, whole))


def at_position(
    model: PreTrainedModel, layer_index: int, state: Mapping[str, torch.Tensor], position: int
) -> State:
    """The inputs of the methods at the position of the next token."""
    found = _joined(model, layer_index, lambda policy, source: policy.at(source, state, position))
    return {**state, **found}


def _joined(
    model: PreTrainedModel, layer_index: int, ask: Callable[[policies.Policy, policies.Source], State]
) -> State:
    """What all policies answer for a layer."""
    source = policies.Source(model, attention_module(model, layer_index), layer_index)
    found: State = {}
    for policy in policies.known():
        found |= ask(policy, source)
    return found


def write(model: PreTrainedModel, layers: Mapping[int, Mapping[str, torch.Tensor]], path: str | Path) -> None:
    """Save the state of each layer. Raises UsageError for a path that cannot be written."""
    tensors = {
        f"{layer}.{name}": each.cpu().contiguous()
        for layer, state in layers.items()
        for name, each in state.items()
    }
    file.write_tensors("output", path, {"schema": SCHEMA, "model": file.fingerprint(model)}, tensors)


def read(model: PreTrainedModel, path: str | Path) -> dict[int, State]:
    """The state of each layer from a file that `write` wrote.
    Raises UsageError for any other, or for another model's.
    """
    settings, tensors = file.read_tensors("option calibration", path, SCHEMA, "of `evictionary calibrate`")
    require(
        settings["model"] == file.fingerprint(model),
        f"option calibration: got {path} of another model, wanted that of {type(model).__name__} at hand",
    )
    layers: dict[int, State] = {}
    devices = devices_of_layers(model)
    for name, tensor in tensors.items():
        layer, _, entry = name.partition(".")
        layers.setdefault(int(layer), {})[entry] = tensor.to(devices[int(layer)])
    return layers
