"""What is asked of a cache: its arguments, checked for its model, and what follows from them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from evictionary.cache import calibration
from evictionary.cache.arguments import checked
from evictionary.cache.inputs import Recorder, require_suitable
from evictionary.cache.layers import EvictingLayer
from evictionary.cache.model_hooks import attention_modules
from evictionary.errors import require
from evictionary.methods.catalogue import CALIBRATED, CAPTURED_FOR, REPLAYED, captured
from evictionary.methods.method import Method, Request
from evictionary.models.queries import softmax_of
from evictionary.optimized.softmax import PLAIN, Softmax
from evictionary.policies import Policy
from evictionary.policies.quantisation import require_fitting

CAPTURED = frozenset(CAPTURED_FOR.values())
"""The states that the model does not hand to a cache; the cache captures them if a method names them."""


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of a cache: those of EvictingCache, in their types.

    calibrated holds the inputs of a calibration file by layer; places are the layers of the model that are
    compressed; softmaxes are those of its layers.
    """

    method: Method | None
    compression_ratio: float
    options: dict[str, Any]
    budget: int | None
    every: int
    seed: int
    record: frozenset[str]
    calibrated: Mapping[int, Mapping[str, torch.Tensor]]
    places: tuple[int, ...]
    softmaxes: Mapping[int, Softmax]

    @property
    def policies(self) -> tuple[Policy, ...]:
        """What the method does beside choosing tokens."""
        return self.method.policies if self.method else ()

    @functools.cached_property
    def all_options(self) -> dict[str, Any]:
        """The options with their defaults."""
        return {**(self.method.options if self.method else {}), **self.options}

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The inputs of the method that the cache has to find; a calibration file holds the others."""
        return (self.method.reads if self.method else frozenset()) - (
            CALIBRATED if self.calibrated else frozenset()
        )

    @functools.cached_property
    def captured(self) -> frozenset[str]:
        """The states of the model that are recorded, or that an input is computed from."""
        return self.record | captured(self.reads)

    @functools.cached_property
    def remembered(self) -> frozenset[str]:
        """Those of which a layer keeps the last ones, for a method that compresses while decoding."""
        # `query` is the last of the queries, and no history of it is needed
        later = self.reads & self.method.reads_later - {"query"} if self.method and self.every else set()
        return frozenset(CAPTURED_FOR[name] for name in later if name in CAPTURED_FOR)

    @functools.cached_property
    def window(self) -> int | None:
        """Of how many tokens before the new ones the method remembers states, where it says so."""
        windows = (policy.recent(self.all_options) for policy in self.policies)
        return next((window for window in windows if window is not None), None)

    @property
    def reads_twice(self) -> bool:
        """Whether the model reads the prompt a second time."""
        return bool(self.captured & REPLAYED)

    def is_due(self, since: int) -> bool:
        """Whether a layer compresses again, `since` tokens after the last time."""
        return self.every > 0 and since >= self.every

    def request(self, layer_index: int, **named: Any) -> Request:
        """What is asked of a layer, and what else is said of it."""
        return Request(
            self.compression_ratio,
            self.budget,
            self.options,
            self.places.index(layer_index),
            len(self.places),
            self.seed,
            **named,
        )

    def amounts(self, layer_index: int, seen: int, padding: Sequence[int]) -> list[int]:
        """The tokens that each row of a batch may keep in a head of a layer, once `seen` tokens have been
        read; `padding` are those of each row.
        """
        assert self.method is not None
        request = self.request(layer_index)
        return [self.method.amount(seen - count, request) for count in padding]

    def softmax(self, layer_index: int, batch: int) -> Softmax:
        """The softmax of a layer with sinks [B, H_q]."""
        own = self.softmaxes.get(layer_index, PLAIN)
        return Softmax(own.cap, None if own.sinks is None else own.sinks.expand(batch, -1))


def settled(
    model: PreTrainedModel,
    layers: list[Any],
    method: str | Method | None,
    compression_ratio: float,
    options: Mapping[str, Any] | None,
    budget: int | None,
    every: int | None,
    seed: int,
    record: Iterable[str],
    recorder: Recorder,
) -> Settings:
    """The settings of a cache with these layers. Raises UsageError for an argument that cannot be used."""
    found, typed, between = checked(method, compression_ratio, options, budget, every)
    path = typed.get("calibration")
    if found:
        require_suitable(model, found, between, bool(path), recorder)
    calibrated = calibration.read(model, path) if path and found and CALIBRATED & found.reads else {}
    recorded = frozenset(record)
    require(
        recorded <= CAPTURED,
        f"record: got {', '.join(sorted(recorded))}, wanted some of {', '.join(sorted(CAPTURED))}",
    )
    settings = Settings(
        found,
        compression_ratio,
        typed,
        budget,
        between,
        seed,
        recorded,
        calibrated,
        tuple(index for index, layer in enumerate(layers) if isinstance(layer, EvictingLayer)),
        {index: softmax_of(module, model) for index, module in attention_modules(model).items()},
    )
    if found and found.quantised:
        require_fitting(found.quantised, settings.all_options)
    require(
        not settings.reads_twice or all(type(layer) is EvictingLayer for layer in layers),
        "model: got layers with a sliding window or a recurrent state, wanted full attention alone in all to "
        "read the prompt twice",
    )
    return settings
