"""The inputs of a method that only the running model has:
what the policies compute from its states, and its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from evictionary import policies
from evictionary.cache import calibration
from evictionary.cache.layers import EvictingLayer
from evictionary.cache.model_hooks import attention_module, attention_modules
from evictionary.errors import UsageError, require
from evictionary.methods.catalogue import CALIBRATED, CAPTURED_FOR, DECLARED, REFITTED
from evictionary.methods.method import Method, Supply
from evictionary.models.queries import (
    IN_HALVES,
    LAYOUTS,
    layouts,
    logit_factor,
    of_neighbours,
    project,
    require_fixed_rotation,
    rotation,
    softmax_of,
    unrotated,
)
from evictionary.models.weights import around, device_of, output_projection

Recorder = Callable[[PreTrainedModel, torch.Tensor], Mapping[int, Mapping[str, torch.Tensor]]]
"""Lets a model read ids [1, T], and returns the queries and the hidden states of each layer."""


def supply(
    model: PreTrainedModel | None,
    layer_index: int,
    layer: EvictingLayer,
    calibrated: Mapping[int, Mapping[str, torch.Tensor]],
    *,
    counts_padding: bool,
) -> Supply:
    """The callback that computes the inputs of a layer from the captured states.

    Args: calibrated, the inputs of a calibration file by layer; counts_padding, whether the positions of the
    text count its padding. Without a model there are none.
    """
    assert layer.keys is not None
    kv_heads = layer.keys.shape[1]
    projections: list[torch.Tensor] = []

    def found(name: str, states: Mapping[str, Any], position: int) -> dict[str, Any]:
        captured_as = CAPTURED_FOR.get(name)

        def of_heads(each: torch.Tensor) -> torch.Tensor:
            """The part of [B, heads, ..], of query heads or
            KV heads, that belongs to the KV heads at hand.
            """
            return each.unflatten(1, (kv_heads, -1))[:, states["kv_heads"]].flatten(1, 2)

        if model is not None and name == "w_o":
            if not projections:  # the same for all rows, and a packed one takes time
                module = attention_module(model, layer_index)
                projections.append(output_projection(module, states["values"], around(module, model)))
            return {name: of_heads(projections[0][None])[0]}
        if model is not None and name in CALIBRATED and calibrated:
            own = {entry: of_heads(each) for entry, each in calibrated[layer_index].items()}
            inputs = calibration.at_position(model, layer_index, own, position)
            require(
                name in inputs,
                f"option calibration: got a file without {name}, wanted one of `evictionary calibrate` for a "
                "model that can read a text twice",
            )
            return {
                entry: each.expand(len(states["keys"]), *each.shape[1:]) for entry, each in inputs.items()
            }
        if model is None or captured_as is None or states.get(captured_as) is None:
            return {}
        require(
            not counts_padding,
            f"position_ids: got those that count the padding, wanted those of generate(): {name} depends on "
            "them",
        )
        if name in REFITTED:
            return calibration.of_readings(model, layer_index, [states])
        if name in CALIBRATED:
            queries = states["queries"]
            places = torch.arange(position - queries.shape[2], position, device=queries.device)
            key_places = states["positions"] if layer.evicted_at == 0 else None
            state = calibration.of_states(model, layer_index, queries, places, states["keys"], key_places)
            return calibration.at_position(model, layer_index, state, position)
        source = policies.Source(model, attention_module(model, layer_index), layer_index)
        inputs = policies.load(DECLARED[name][0]).supply(source, states, position)
        # queries belong to the heads at hand already; hidden states have no heads, so what is computed from
        # them has all
        return (
            inputs if captured_as == "queries" else {entry: of_heads(each) for entry, each in inputs.items()}
        )

    return found


def require_suitable(
    model: PreTrainedModel, method: Method, every: int, is_calibrated: bool, recorder: Recorder
) -> None:
    """Raise UsageError where a model cannot give a method its inputs, or not again with `every`."""
    if any(policy.reads_before_rope for policy in method.suppliers):
        in_halves = any(policy.counts_in_halves for policy in method.suppliers)
        require_readable_queries(model, method.name, recorder, IN_HALVES if in_halves else LAYOUTS)
    if method.rerotated:
        _require_turnable(model, method, every, is_calibrated, recorder)
    caps = {softmax_of(module, model).cap for module in attention_modules(model).values()} - {None}
    require(
        not caps or not any(policy.needs_no_cap for policy in (*method.policies, *method.suppliers)),
        f"model: got {type(model).__name__} with capped attention logits, wanted a method without a closed "
        "form of them instead of "
        f"{method.name}",
    )
    require(
        not every or is_calibrated or not any(policy.reads_all_keys for policy in method.suppliers),
        f"every: got {every} without the option calibration, wanted 0: {method.name} calibrates on all keys "
        "of the prompt, and these are gone when the cache compresses again",
    )


def _require_turnable(
    model: PreTrainedModel, method: Method, every: int, is_calibrated: bool, recorder: Recorder
) -> None:
    """Raise UsageError where the keys of a model cannot be turned again, or a method compares moved keys with
    queries from before the move.
    """
    require_fixed_rotation(model)
    require_readable_queries(model, method.name, recorder, other="turns no keys")
    held = {"query", *(CALIBRATED if is_calibrated else ())}
    before = [name for name in method.inputs if CAPTURED_FOR.get(name) == "queries" and name not in held]
    require(
        not every or not before,
        f"every: got {every} for {method.name}, wanted 0: it reads {', '.join(before)} of tokens before the "
        "last compression, which has moved the keys since",
    )


def require_readable_queries(
    model: PreTrainedModel,
    name: str,
    recorder: Recorder,
    wanted: Iterable[str] = LAYOUTS,
    other: str = "reads no future queries",
) -> None:
    """Raise UsageError if this model's queries cannot be computed from hidden states, or rotate otherwise;
    a few tokens are tried.

    A model may pair RoPE's channels in another way, leave RoPE out of some layers, or apply a norm after it;
    no configuration tells.
    """
    if model not in layouts:
        layouts[model] = _layouts(model, recorder)
    require(
        layouts[model] and set(layouts[model].values()) <= set(wanted),
        f"model: got {type(model).__name__}, whose queries are not its projected hidden states rotated by "
        "RoPE"
        f"{' in two halves' if wanted is IN_HALVES else ''}; wanted a method that {other} instead "
        f"of {name}",
    )


@torch.no_grad()
def _layouts(model: PreTrainedModel, recorder: Recorder) -> dict[int, str]:
    """The layout of each layer, with which queries before RoPE are the projected hidden states; empty if
    one has none.
    """
    places, found = torch.arange(4, device=device_of(model)), {}
    try:
        recorded = recorder(model, places[None] + 1)
    except KeyError:  # a layer has another name for its hidden states
        return {}
    for index, states in recorded.items():
        fits = [layout for layout in LAYOUTS if _fits(model, index, states, places, layout)]
        if not fits:
            return {}
        found[index] = fits[0]
    return found


def _fits(
    model: PreTrainedModel, index: int, states: Mapping[str, torch.Tensor], places: torch.Tensor, layout: str
) -> bool:
    try:
        module: Any = attention_module(model, index)
        cos, sin = rotation(model, index, places, layout)
        if layout in IN_HALVES and of_neighbours(sin):
            return False
        queries = unrotated(states["queries"], cos, sin)
        projected = project(model, module, states["hidden_states"]).float() * logit_factor(
            module, queries.shape[-1]
        )
        # Wrong queries differ by their own size; the rounding of bfloat16 is a hundredth of that.
        return bool((queries - projected).abs().max() <= 0.1 * projected.abs().max())
    except torch.OutOfMemoryError:
        raise
    # another name for hidden states, other shapes, or a projection that does not give queries alone, or
    # reads more than hidden states
    except (KeyError, TypeError, UsageError, RuntimeError):
        return False
