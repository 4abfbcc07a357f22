"""What a module computes and where, wherever its weights are: on another device, on the disk, packed, or
behind an adapter.

accelerate leaves weights on the device meta, and brings their numbers for each forward. Quantized models hold
integers with scales. So nothing else reads a weight: what a module does to states, the module is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from evictionary.errors import UsageError, require

Above = tuple[tuple[torch.nn.Module, str], ...]
"""The modules around one, the nearest first, each with the place of this one in it, such as `self_attn.`."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors whose memory is their numbers; a subclass may pack them."""


def walk(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Above]]:
    """Each module inside of one and itself, in the order of `modules()`, with its path and what is around."""
    yield from _walk(module, "", (), set())


def _walk(
    module: torch.nn.Module, path: str, above: Above, seen: set[int]
) -> Iterator[tuple[torch.nn.Module, str, Above]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module, path, above
    for name, child in module.named_children():
        around = ((module, f"{name}."), *((each, f"{place}{name}.") for each, place in above))
        yield from _walk(child, f"{path}{name}.", around, seen)


def around(module: torch.nn.Module, model: torch.nn.Module | None) -> Above:
    """The modules of a model that are around one of its modules; none without a model."""
    walked = () if model is None else walk(model)
    return next((above for each, _, above in walked if each is module), ())


def device_of(module: torch.nn.Module, above: Above = ()) -> torch.device:
    """The device on which a module computes, also where its weights wait on another one.

    The nearest hook of accelerate tells, or else the first weight with numbers.
    """
    modules = (module, *(each for each, _ in above), *module.modules())
    told = [getattr(hook, "execution_device", None) for each in modules for hook in _hooks(each)]
    devices = [
        *(torch.device(each) for each in told if each is not None),
        *(each.device for each in module.parameters()),
        *(each.device for each in module.buffers()),
    ]
    return next((each for each in devices if each.type != "meta"), torch.device("cpu"))


def devices_of_layers(model: torch.nn.Module) -> dict[int, torch.device]:
    """The device of each layer of a model, by the index that its modules have."""
    found: dict[int, torch.device] = {}
    for module, _, above in walk(model):
        index = getattr(module, "layer_idx", None)
        if index is not None and int(index) not in found:
            found[int(index)] = device_of(module, above)
    return found


def numbers(module: torch.nn.Module, name: str, above: Above = ()) -> torch.Tensor:
    """A parameter or buffer of a module, also one that accelerate left in the memory or on the disk.

    Raises UsageError for one that is nowhere.
    """
    own: torch.Tensor = getattr(module, name)
    return own if own.device.type != "meta" else offloaded(module, name, above)


def offloaded(module: torch.nn.Module, name: str, above: Above = ()) -> torch.Tensor:
    """The numbers of a tensor on the device meta. Raises UsageError where there are none."""
    for each, place in ((module, ""), *above):
        for hook in _hooks(each):
            weights = getattr(hook, "weights_map", None)
            if weights is not None and place + name in weights:
                return weights[place + name]
    raise UsageError(
        f"model: got {type(module).__name__} without numbers in its {name} (device meta), wanted loaded "
        "weights"
    )


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """The hooks of accelerate at a module."""
    waiting = [getattr(module, "_hf_hook", None)]
    while waiting:
        hook = waiting.pop(0)
        if hook is not None:
            yield hook
            waiting += getattr(hook, "hooks", ())


def require_weights(model: torch.nn.Module) -> None:
    """Raise UsageError for a model on the device meta where nothing can bring its numbers for a forward."""
    for module, path, above in walk(model):
        bringing = any(_may_bring(each) for each in (module, *(each for each, _ in above)))
        for name, parameter in module.named_parameters(recurse=False):
            require(
                bringing or parameter.device.type != "meta",
                f"model: got {type(model).__name__} without numbers in {path}{name} (device meta), wanted a "
                "model with loaded weights",
            )


def require_numbers(states: torch.Tensor) -> None:
    """Raise UsageError for states of a model that computes on the device meta, without numbers."""
    require(
        states.device.type != "meta",
        "model: got states on the device meta, which have no numbers; wanted a model with loaded weights",
    )


def _may_bring(module: torch.nn.Module) -> bool:
    return bool(module._forward_pre_hooks) or "forward" in vars(module) or any(_hooks(module))


@contextmanager
def present(module: torch.nn.Module, above: Above) -> Iterator[None]:
    """Parts of a module may be called inside: accelerate's hooks that bring a whole block have brought it."""
    with ExitStack() as stack:
        for each in (module, *(each for each, _ in above)):
            for hook in _hooks(each):
                brings_all = getattr(hook, "offload", False) and getattr(hook, "place_submodules", False)
                if brings_all and any(own.device.type == "meta" for own in module.parameters()):
                    stack.callback(hook.post_forward, each, None)
                    hook.pre_forward(each)
        yield


def linear_map(
    module: Any, size: int, like: torch.Tensor, above: Above = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix [size, out] and the bias [out] of a module that maps [.., size] to [.., out], in the dtype
    and on the device of `like`.

    A Linear of torch has them. Any other module is asked for its products with the unit vectors, so packed
    weights, adapters and hooks count as they do in the model. Raises UsageError for a module that cannot be
    asked, or that is not linear.
    """
    if _is_plain_linear(module):
        weight = numbers(module, "weight", above).detach().to(like).T
        bias = weight.new_zeros(weight.shape[1])
        return weight, bias if module.bias is None else numbers(module, "bias", above).detach().to(like)
    unit = torch.eye(size, device=device_of(module, above))
    asked = torch.cat([unit, torch.zeros_like(unit[:1]), torch.ones_like(unit[:1])])
    with torch.no_grad(), present(module, above):
        answers = _answers(module, asked[None], like.dtype)[0].float()
    bias, of_all = answers[size], answers[size + 1] - answers[size]
    weight = answers[:size] - bias
    # A norm or a dropout inside changes a sum by its own size; the rounding to eight bits by a hundredth.
    require(
        (of_all - weight.sum(dim=0)).abs().max() <= 0.1 * of_all.abs().max(),
        f"model: got {_named(module)}, which does not map the sum of states to the sum of what it "
        "maps each to; wanted a linear projection",
    )
    return weight.to(like), bias.to(like)


def _is_plain_linear(module: torch.nn.Module) -> bool:
    """Whether a module is torch's Linear and computes its own weight, whoever brings this."""
    own = vars(module)
    forward = own.get("_old_forward", own.get("forward"))
    return (
        type(module) is torch.nn.Linear
        and type(module._parameters.get("weight")) in PLAIN
        and not (module._forward_hooks or module._forward_pre_hooks)
        and (forward is None or getattr(forward, "__func__", None) is torch.nn.Linear.forward)
    )


def _answers(module: torch.nn.Module, asked: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a module answers in this dtype, or in that of its weights: under autocast the two differ."""
    wide = (each.dtype for each in module.parameters() if each.is_floating_point() and each.itemsize > 1)
    reason: Exception | None = None
    for each in dict.fromkeys((dtype, *wide)):
        try:
            return module(asked.to(each))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # packages for quantized models raise what their kernels raise
            reason = error
    raise UsageError(
        f"model: got {_named(module)}, which does not answer to unit vectors, wanted a projection "
        f"that maps each state by itself: {reason}"
    ) from reason


def _named(module: torch.nn.Module) -> str:
    """The class of a module with its package, as several name theirs Linear."""
    return f"{type(module).__module__}.{type(module).__name__}"


def output_projection(module: Any, values: torch.Tensor, above: Above = ()) -> torch.Tensor:
    """W_o of an attention module by query head, [H_q, D_v, hidden], in the dtype and on the device of values
    [..., D_v]. Raises UsageError for a module without `o_proj` or `dense`.
    """
    names = [name for name in ("o_proj", "dense") if getattr(module, name, None) is not None]
    require(names, f"model: {type(module).__name__} has no o_proj or dense, which this method reads")
    projection, head_dim = getattr(module, names[0]), values.shape[-1]
    size = getattr(projection, "in_features", None) or module.config.num_attention_heads * head_dim
    inside = ((module, f"{names[0]}."), *((each, f"{place}{names[0]}.") for each, place in above))
    return linear_map(projection, size, values, inside)[0].unflatten(0, (-1, head_dim))
