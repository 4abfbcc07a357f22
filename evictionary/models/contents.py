"""Every number that a model computes with, as plain tensors: what tells it from another of the same shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from evictionary.errors import require, usage
from evictionary.models.weights import PLAIN, numbers, offloaded, walk

SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""What the class of a module has of its own where it holds numbers beside parameters and buffers."""


def contents(model: Any) -> Iterator[torch.Tensor]:
    """The parameters in the order of the modules, tied ones once, as tensors whose memory is their numbers.

    Packed weights come as they are packed, with their scales. An adapter that is off, or merged into its
    weight, does not count. Raises UsageError for weights that are absent, or that cannot be read.
    """
    seen = {id(each) for module in model.modules() for each in _idle(module)}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    sources: dict[str, torch.Tensor] = {}
    for module, path, above in walk(model):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            tensor, source = numbers(module, name, above), tied.get(path + name, path + name)
            # accelerate makes two of tied weights when it takes them away
            is_away = tensor is not parameter
            if is_away and source in sources and torch.equal(sources[source].to(tensor), tensor):
                continue
            if source in tied.values():
                sources.setdefault(source, tensor)
            yield from _plain(tensor)
        for name, tensor in _beside(module):
            yield from _plain(tensor if tensor.device.type != "meta" else offloaded(module, name, above))
        for factor in _factors(module):
            yield torch.tensor([factor], dtype=torch.float64).view(torch.int64)


def _beside(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a module that packs its weights saves beside parameters."""
    parameters = dict(module.named_parameters(recurse=False))
    saves = any(getattr(type(module), name) is not getattr(torch.nn.Module, name) for name in SAVING)
    if saves or (not parameters and any(_is_packed(each) for each in module.buffers(recurse=False))):
        for name, value in sorted(module.state_dict().items()):
            if name not in parameters and name.partition(".")[0] not in module._modules:
                yield from ((name, each) for each in _tensors(value))


def _is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers, or numbers of eight bits."""
    return not tensor.is_floating_point() or tensor.itemsize == 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose memory is what a tensor holds: itself, or what a subclass packs it in."""
    if type(tensor) in PLAIN:
        yield tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    elif type(tensor).dequantize is not torch.Tensor.dequantize:
        yield from _plain(tensor.dequantize())
    else:
        yield _memory(tensor)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """What a subclass of a tensor has in its own memory. Raises UsageError for one that has none."""
    message = (
        f"model: got weights of the type {type(tensor).__name__}, which say neither what they are packed in "
        "(__tensor_flatten__) nor their numbers (dequantize); wanted weights that can be read"
    )
    with usage(message, RuntimeError, TypeError):
        plain = tensor.detach().as_subclass(torch.Tensor)
        require(not plain.numel() or plain.data_ptr(), "they have no memory", RuntimeError)
    return plain


def _is_adapted(module: Any) -> bool:
    """Whether a module is a layer of PEFT around another one."""
    return hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters")


def _active(module: Any) -> list[str]:
    """The adapters that a layer of PEFT adds to its weight."""
    is_off = getattr(module, "disable_adapters", False) or getattr(module, "merged", False)
    return [] if is_off else list(module.active_adapters)


def _idle(module: Any) -> Iterator[torch.Tensor]:
    """The parameters of the adapters that a layer does not use."""
    for name in module.adapter_layer_names if _is_adapted(module) else ():
        for adapter, part in getattr(module, name, {}).items():
            if adapter not in _active(module):
                yield from part.parameters() if isinstance(part, torch.nn.Module) else [part]


def _factors(module: Any) -> Iterator[float]:
    """The numbers that a layer multiplies its adapters by."""
    for adapter in _active(module) if _is_adapted(module) else ():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, dict) and adapter in scaling:
            yield float(scaling[adapter])
