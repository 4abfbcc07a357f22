"""The bytes and the tokens that the layers of a cache hold."""

from typing import Any

import torch

from evictionary.cache.layers import EvictingLayer, evicting, recurrent
from evictionary.cache.settings import Settings


def stored(layers: list[Any]) -> int:
    """The bytes that the keys and values allocate: the sizes of their storages, each counted once.

    Of a layer with a sliding window only its window counts, which may be a view of more.
    """
    states = [state for layer in evicting(layers) for state in _states(layer)]
    windows = [state for layer in layers if not isinstance(layer, EvictingLayer) for state in _states(layer)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in states}
    return sum(storages.values()) + sum(state.nbytes for state in windows)


def packed(layers: list[Any], settings: Settings) -> int:
    """The bytes that the stored tokens take where quantised ones are packed codes, without room for more."""
    windows = [state for layer in layers if not isinstance(layer, EvictingLayer) for state in _states(layer)]
    total = sum(state.nbytes for state in windows)
    for layer in evicting(layers):
        if layer.keys is not None and layer.values is not None:
            numbers = int(layer.lengths.sum()) * (layer.keys.shape[-1] + layer.values.shape[-1])
            total += numbers * layer.keys.element_size()
            for policy in settings.policies:
                options = settings.all_options
                total -= policy.saved(settings.method, options, layer.state, layer.keys, layer.values)
    return total


def full(layers: list[Any]) -> int:
    """The bytes that the same tokens would take if nothing had been removed."""
    states = [(layer, getattr(layer, name, None)) for layer in layers for name in ("keys", "values")]
    lengths = {layer: layer.seen for layer in evicting(layers)}
    return sum(
        state.shape[:2].numel() * lengths.get(layer, state.shape[2]) * state.shape[3] * state.element_size()
        for layer, state in states
        if state is not None
    )


def beside(layers: list[Any]) -> int:
    """The bytes beside keys and values: positions, lengths, moments, recent queries, and states in the place
    of a cache.
    """
    states_of_layers = [state for layer in layers for state in recurrent(layer).values()]
    own = [tensor for layer in evicting(layers) for tensor in layer.tensors().values()]
    states = sum(state.nbytes for layer in evicting(layers) for state in _states(layer))
    return sum(tensor.nbytes for tensor in (*states_of_layers, *own)) - states


def tokens_kept(layers: list[Any]) -> float:
    """The tokens stored in each head, on average over the
    batch, the heads and the layers that are compressed.
    """
    holding = [layer for layer in evicting(layers) if layer.keys is not None]
    if not holding:
        return 0
    mean = float(torch.stack([layer.lengths.double().mean().cpu() for layer in holding]).mean())
    return int(mean) if mean == int(mean) else mean


def _states(layer: Any) -> list[torch.Tensor]:
    """The key and value tensors of a layer, including the flat tensors of ragged heads."""
    ragged = getattr(layer, "ragged", None)
    states = [
        getattr(layer, "keys", None),
        getattr(layer, "values", None),
        *((ragged.keys, ragged.values) if ragged is not None else ()),
    ]
    return [state for state in states if state is not None]
