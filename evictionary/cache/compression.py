"""One compression of a layer, step by step: states in, what is kept out. It changes no layer.

1. Open the state of the policies. 2. Stop where the numbers say that every token stays. 3. Gather the states
of the layer. 4. Let the method choose, or a policy that does more in the same pass. 5. Let an addition merge
values, and the policies sum up what goes. The `Eviction` that comes out is carried out by who asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from evictionary.cache.checks import require_finite
from evictionary.cache.inputs import supply
from evictionary.cache.layers import EvictingLayer, at
from evictionary.cache.notices import Notices
from evictionary.cache.reading import Reading
from evictionary.cache.settings import Settings
from evictionary.methods.method import Method, Request
from evictionary.optimized.cache import compress as copied
from evictionary.policies import Compression, moments_of


class Eviction(NamedTuple):
    """What a compression leaves of a layer: kept [B, H_kv, N] of its tokens, or None for all of them, with
    the state of the policies in `step`, and the kept tokens themselves where a pass has copied them.
    """

    layer: EvictingLayer
    step: Compression
    kept: torch.Tensor | None

    def carry_out(self) -> None:
        """Remove from the layer what is not kept."""
        layer, kept, copies = self.layer, self.kept, self.step.compressed
        if kept is not None and (copies is not None or not layer.is_full or not kept.all()):
            layer.evict(kept, copies)
        layer.state, layer.evicted_at = self.step.state, layer.seen


class Asked(NamedTuple):
    """Whose compression it is: a layer of a cache, by its place in the model, and what the cache has read.

    captured are the states that the layer has captured, note is what a policy's own attention of the prompt
    left. The model is None once it is gone.
    """

    model: PreTrainedModel | None
    reading: Reading
    layer_index: int
    captured: Mapping[str, Any]
    note: Any = None

    @property
    def layer(self) -> EvictingLayer:
        """The storage of the layer."""
        return self.reading.layers[self.layer_index]


class Compressor:
    """Chooses what the layers of a cache keep.

    It remembers what it has warned of, and, for a method that compares the layers, `stages`: of each layer
    that has read the prompt its place, its scores and its preference.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notices = Notices(settings)
        self.stages: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def copy(self) -> Compressor:
        """The same, to go on in another way."""
        twin = copy.copy(self)
        twin.notices, twin.stages = copy.copy(self.notices), [*self.stages]
        return twin

    def evictions(self, asked: Asked) -> Iterator[Eviction]:
        """What each layer keeps that this compression changes: the one that is asked for, and, where a method
        compares the layers, all layers before it.
        """
        layer, method = asked.layer, self.settings.method
        assert method is not None
        if method.is_per_query:
            return
        step = self._opened(asked)
        if layer.is_full and self._keeps_all(asked, step):
            _skip(step)
            yield Eviction(layer, step, None)
            return
        states, request = self._described(asked, step)
        if method.preference is not None:
            yield from self._cascade(asked, step, states, request)
            return
        kept = _one_pass(method, step, request).kept(states, request)
        self.notices.of_what_is_too_much(request, kept)
        self.notices.of_what_is_wasted(asked.layer_index, layer.seen, self._padding(asked), kept)
        if method.merge is not None and not (layer.is_full and kept.all()):
            step.compressed = copied(step.keys, method.merged(states, request, kept, step.new), kept)
        yield _summed_up(layer, step, kept)

    def chosen(self, asked: Asked) -> torch.Tensor:
        """The tokens [B, H_q, N] that each query head of the
        last token attends to, in a layer that has evicted none.
        """
        assert self.settings.method is not None
        states, request = self._described(asked, self._opened(asked))
        return self.settings.method.kept(states, replace(request, is_prompt=False))

    def _cascade(
        self, asked: Asked, step: Compression, states: Mapping[str, Any], request: Request
    ) -> Iterator[Eviction]:
        """Share the total among the layers that have read the
        prompt: a new one, and those before, which shrink.

        The scores of each layer stay until the last layer has read the prompt. So a layer keeps in the end
        the tokens that it would have kept at once.
        """
        method, settings, seen = step.method, {**step.options, **request.options}, request.seen or ()
        own = {name: settings[name] for name in method.preference.options if name in settings}
        preferred = method.preference.scores(states, replace(request, options=own)).amax(dim=(1, 2)).cpu()
        self.stages.append((asked.layer_index, method.scores(states, request), preferred))
        preferences = torch.stack([each for *_, each in self.stages], dim=1)
        for place, (index, scores, _) in enumerate(self.stages):
            one, kept = asked._replace(layer_index=index), torch.zeros_like(scores, dtype=torch.bool)
            for row, count in enumerate(seen):
                wanted = replace(request, preferences=preferences[row], layer_index=place)
                of_row = scores[row : row + 1, :, -count:]
                kept[row, :, -count:] = method.chosen(of_row, method.amount(count, wanted), wanted, row)
            now = step if index == asked.layer_index else self._opened(one._replace(note=None))
            _skip(now)
            now.is_final = len(self.stages) == len(self.settings.places)
            positions, filled = _gather(one.layer, now)
            yield _summed_up(one.layer, now, kept.gather(2, positions.long()) & filled)
        if len(self.stages) == len(self.settings.places):
            self.stages.clear()

    def _opened(self, asked: Asked) -> Compression:
        """The compression as policies see it, with a state of its own."""
        layer, settings = asked.layer, self.settings
        step = Compression(
            settings.method,
            settings.all_options,
            settings.compression_ratio,
            settings.every,
            *layer.slots(),
            new=layer.seen - layer.evicted_at,
            note=asked.note,
            state=dict(layer.state),
            model=asked.model,
            layer_index=asked.layer_index,
        )
        # the tokens before have been looked at, and the new ones are the last
        require_finite(asked.layer_index, step.keys[:, :, -step.new :], step.values[:, :, -step.new :])
        if layer.evicted_at == 0:
            for policy in settings.policies:
                step.state |= policy.opened(step)
        return step

    def _keeps_all(self, asked: Asked, step: Compression) -> bool:
        """Whether the numbers of tokens alone say that nothing of a full layer is evicted."""
        layer, method = asked.layer, step.method
        if method.quantised:
            return False
        for policy in method.policies:
            said = policy.keeps_all(method, step.options, step.state, layer.stored)
            if said is not None:
                return said
        if "keep_ratio" in self.settings.options or method.head_budgets is not None:
            return False
        amounts = self.settings.amounts(asked.layer_index, layer.seen, self._padding(asked))
        return min(amounts) >= layer.stored

    def _described(self, asked: Asked, step: Compression) -> tuple[dict[str, Any], Request]:
        """The states of the layer, and the request for the method."""
        layer, reading = asked.layer, asked.reading
        positions, filled = _gather(layer, step)
        padding = reading.padding_until(layer).to(positions.device).expand(len(filled), -1)
        states: dict[str, Any] = {"keys": step.keys, "values": step.values, **asked.captured}
        # one of ragged heads may have kept every token
        if layer.ragged is not None or layer.seen > filled.shape[2]:
            states["positions"] = positions - at(padding, positions)
        if (moments := moments_of(step.state)) is not None:
            states["moments"] = moments
        cap, states["sinks"] = self.settings.softmax(asked.layer_index, len(filled))
        request = self.settings.request(
            asked.layer_index,
            cap=cap,
            filled=step.filled,
            seen=[layer.seen - count for count in padding[:, -1].tolist()],
            is_prompt=layer.evicted_at == 0,
            state=step.state,
            supply=supply(
                asked.model,
                asked.layer_index,
                layer,
                self.settings.calibrated,
                counts_padding=reading.counts_padding,
            ),
        )
        return states, request

    def _padding(self, asked: Asked) -> list[int]:
        return asked.reading.padding_of_rows(asked.layer)


def _gather(layer: EvictingLayer, step: Compression) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a step the contents of its layer; returns their positions and what is filled, [B, H_kv, N]."""
    step.keys, step.values, positions, filled = layer.contents()
    step.filled = None if layer.is_full else filled
    return positions, filled


def _summed_up(layer: EvictingLayer, step: Compression, kept: torch.Tensor) -> Eviction:
    """The eviction of what is not kept, after the policies have summed it up."""
    for policy in step.method.policies:
        policy.evicted(step, kept)
    return Eviction(layer, step, kept)


def _one_pass(method: Method, step: Compression, request: Request) -> Method:
    """The method, or one whose function does more: where it is called once, for all rows and heads."""
    # what a pass remembers of the keys would be wrong once they have turned
    if step.filled is not None or len(set(request.seen or ())) > 1 or method.rerotated or method.delays:
        _skip(step)
        return method
    found = next(filter(None, (policy.fused(step) for policy in method.policies)), None)
    return replace(method, function=functools.wraps(method.function)(found)) if found else method


def _skip(step: Compression) -> None:
    for policy in step.method.policies:
        policy.skipped(step.state)
