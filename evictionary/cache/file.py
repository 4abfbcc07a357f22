"""Safetensors files with settings in their metadata, and the fingerprint of the model that they are of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from evictionary.errors import UsageError, require
from evictionary.models.contents import contents

OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


def write_tensors(
    argument: str, path: str | Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Write tensors and their settings. Raises UsageError,
    naming the argument, for a path that cannot be written.
    """
    try:
        told = json.dumps(settings)
        save_file(tensors, path, metadata={"evictionary": told, "checksum": _checksum(told, tensors)})
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{argument}: got {path}, wanted a file that can be written: {error}") from error


def read_tensors(
    argument: str, path: str | Path, schema: str, written_by: str, older: str | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The settings of a file of `write_tensors` with this schema, or an older one, and its tensors on the
    CPU. Raises UsageError for any other.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            settings = json.loads(metadata.get("evictionary", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise UsageError(f"{argument}: got {path}, wanted a file {written_by}: {error}") from error
    require(
        settings.get("schema") in (schema, older or schema),
        f"{argument}: got {path} of schema {settings.get('schema')}, wanted {schema}",
    )
    require(
        metadata.get("checksum") == _checksum(metadata["evictionary"], tensors),
        f"{argument}: got {path} with other contents than its checksum says, wanted the file as it was "
        "written",
    )
    return settings, tensors


def _checksum(settings: str, tensors: dict[str, torch.Tensor]) -> str:
    """A digest of the settings and of every bit of the tensors."""
    digest = hashlib.sha256(settings.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def fingerprint(model: PreTrainedModel | None) -> str:
    """A digest of every weight: keys, values and queries mean nothing to another model of the same shape.

    Of each weight it takes 64 numbers and the sum of all, as whole numbers: the bits that bfloat16 has. So it
    sees that one number has changed, and a model of float32 and the same one in bfloat16 are one model. It
    is the same wherever accelerate keeps the weights; packed ones count as they are packed. Raises UsageError
    for weights that are absent.
    """
    assert model is not None
    digest = hashlib.sha256()
    for tensor in contents(model):
        bits = _bits(tensor)
        some = bits[:: max(1, bits.numel() // 64)].to(torch.int64).cpu().numpy()
        # on a CPU NumPy adds whole numbers eighteen times as fast as torch
        is_near = bits.device.type == "cpu"
        total = bits.numpy().sum(dtype=np.int64) if is_near else bits.sum(dtype=torch.int64).item()
        digest.update(np.concatenate([[total], some]).astype(np.int64).tobytes())
    return digest.hexdigest()[:16]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as whole numbers [N]: the bits that bfloat16 has, or those of integers."""
    if tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2:
        return tensor.to(torch.bfloat16).contiguous().flatten().view(torch.int16)
    return tensor.contiguous().flatten().view(OF_BYTES[min(tensor.itemsize, 8)])
