"""A cache as a file: its tensors and its arguments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from evictionary.cache.file import fingerprint, read_tensors, write_tensors
from evictionary.cache.layers import EvictingLayer, recurrent, restore_recurrent
from evictionary.cache.session import Session
from evictionary.errors import UsageError, require
from evictionary.models.weights import device_of, devices_of_layers

SCHEMA = "evictionary/cache/4"
OLDER = "evictionary/cache/3"
"""It has no ids of tokens, nor the positions at which rows go on."""
ARGUMENTS = ("compression_ratio", "options", "budget", "every", "seed")
"""The arguments of a cache that are written without conversion."""


def write(session: Session, path: str | Path) -> None:
    """Write a cache that has read its prompt, by its session. Raises ValueError before that, and UsageError
    for a path that cannot be written.
    """
    asked, reading = session.settings, session.reading
    require(reading.seen != 0, "save: the cache has not read its prompt yet", ValueError)
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    for index, layer in enumerate(session.layers):
        own = recurrent(layer)
        if isinstance(layer, EvictingLayer):
            layers.append(layer.numbers())
            own |= layer.tensors()
        elif hasattr(layer, "cumulative_length"):  # a sliding window
            layers.append({"cumulative_length": layer.cumulative_length})
            own |= {"keys": layer.keys, "values": layer.values}
        else:
            layers.append({})
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in own.items()}
    settings = {
        "schema": SCHEMA,
        "model": fingerprint(session.model),
        "method": asked.method.name if asked.method else None,
        **{name: getattr(asked, name) for name in ARGUMENTS},
        "padding": None if reading.padding is None else reading.padding.tolist(),
        "counts_padding": reading.counts_padding,
        "shifts": [None if math.isnan(shift) else shift for shift in reading.text.shifts],
        "layers": layers,
    }
    reading.text.fit(reading.seen, reading.rows)
    tensors["ids"] = reading.text.ids.contiguous()
    write_tensors("path", path, settings, tensors)


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The settings and the tensors of a file that `write` wrote. Raises UsageError for any other."""
    return read_tensors("path", path, SCHEMA, "that EvictingCache.save wrote", OLDER)


def restore(
    session: Session,
    model: PreTrainedModel,
    settings: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    path: str | Path,
) -> None:
    """Put the settings and tensors from `read` into an empty cache, by its session. Raises UsageError, and
    closes it, if the model does not fit.
    """
    layers, reading = session.layers, session.reading
    if settings["model"] != fingerprint(model):
        session.close()
        raise UsageError(
            f"model: got {type(model).__name__} with other weights, wanted the model of the cache in {path}"
        )
    # the weights are the same, and with them the KV heads, which configurations name in different ways
    if len(settings["layers"]) != len(layers):
        session.close()
        raise UsageError(f"model: got {len(layers)} layers, wanted the model of the cache in {path}")
    devices, device = devices_of_layers(model), device_of(model)
    for index, (layer, numbers) in enumerate(zip(layers, settings["layers"], strict=True)):
        own = {
            name.partition(".")[2]: tensor.to(devices.get(index, device))
            for name, tensor in tensors.items()
            if name.startswith(f"{index}.")
        }
        restore_recurrent(layer, own, model.dtype)
        if isinstance(layer, EvictingLayer):
            layer.restore(own, numbers, model.dtype)
            session.peak_tokens = max(session.peak_tokens, layer.longest)
        elif numbers:
            layer.lazy_initialization(own["keys"], own["values"])
            layer.keys, layer.values = own["keys"].to(model.dtype), own["values"].to(model.dtype)
            layer.cumulative_length = numbers["cumulative_length"]
    reading.padding = None if settings["padding"] is None else torch.tensor(settings["padding"])
    reading.counts_padding = settings["counts_padding"]
    if settings["schema"] == OLDER:
        reading.text.shifts = [0.0 if reading.padding is None else math.nan]
        return
    reading.text.read(tensors["ids"])
    reading.text.shifts = [math.nan if shift is None else shift for shift in settings["shifts"]]
