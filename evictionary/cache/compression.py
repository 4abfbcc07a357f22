"""One compression of a layer, step by step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from evictionary.cache.checks import require_finite
from evictionary.cache.inputs import supply
from evictionary.cache.layers import at
from evictionary.methods.method import Method, Request, tokens_to_keep
from evictionary.optimized.cache import compress as copied
from evictionary.policies import Compression, moments_of

if TYPE_CHECKING:
    from evictionary.cache.layers import EvictingLayer
    from evictionary.cache.watched_cache import WatchedCache


def compress(cache: WatchedCache, layer_index: int, note: Any, captured: Mapping[str, Any]) -> None:
    """Compress a layer of a cache that has a method, or raise and change nothing.

    1. Open the state of the policies. 2. Stop where the numbers say that every token stays. 3. Gather the
    states of the layer. 4. Let the method choose, or a policy that does more in the same pass. 5. Let an
    addition merge values, and the policies sum up what goes. 6. Evict. A method that compares the layers
    evicts from all layers so far.
    """
    layer, method = cache.layers[layer_index], cache.method
    assert method is not None
    if method.is_per_query:
        return
    step = opened(cache, layer_index, note)
    if layer.is_full and keeps_all(cache, layer_index, step):
        _skip(step)
        layer.state, layer.evicted_at = step.state, layer.seen
        return
    states, request = described(cache, layer_index, step, captured)
    if method.preference is not None:
        cascade(cache, layer_index, step, states, request)
        return
    kept = one_pass(method, step, request).kept(states, request)
    warn_of_what_is_too_much(cache, request, kept)
    warn_of_what_is_wasted(cache, layer_index, kept)
    if method.merge is not None and not (layer.is_full and kept.all()):
        step.compressed = copied(step.keys, method.merged(states, request, kept, step.new), kept)
    evict(layer, step, kept)


def evict(layer: EvictingLayer, step: Compression, kept: torch.Tensor) -> None:
    """Let the policies sum up what goes, and remove it."""
    for policy in step.method.policies:
        policy.evicted(step, kept)
    if step.compressed is not None or not layer.is_full or not kept.all():
        layer.evict(kept, step.compressed)
    layer.state, layer.evicted_at = step.state, layer.seen


def cascade(
    cache: WatchedCache, layer_index: int, step: Compression, states: Mapping[str, Any], request: Request
) -> None:
    """Share the total among the layers that have read the prompt: a new one, and those before, which shrink.

    The scores of each layer stay until the last layer has read the prompt. So a layer keeps in the end the
    tokens that it would have kept at once.
    """
    method, settings, seen = step.method, {**step.options, **request.options}, request.seen or ()
    choose = method.head_budgets or method.choose
    own = {name: settings[name] for name in method.preference.options if name in settings}
    preferred = method.preference.scores(states, replace(request, options=own)).amax(dim=(1, 2)).cpu()
    cache.stages.append((layer_index, method.scores(states, request), preferred))
    preferences = torch.stack([each for *_, each in cache.stages], dim=1)
    for place, (index, scores, _) in enumerate(cache.stages):
        layer, kept = cache.layers[index], torch.zeros_like(scores, dtype=torch.bool)
        for row, count in enumerate(seen):
            asked = replace(request, preferences=preferences[row], layer_index=place)
            kept[row, :, -count:] = choose(scores[row : row + 1, :, -count:], method.amount(count, asked))
        now = step if index == layer_index else opened(cache, index, None)
        _skip(now)
        now.keys, now.values, positions, filled = layer.contents()
        now.filled = None if layer.is_full else filled
        evict(layer, now, kept.gather(2, positions.long()) & filled)
    if len(cache.stages) == len(cache.evicting):
        cache.stages.clear()


def opened(cache: WatchedCache, layer_index: int, note: Any) -> Compression:
    """The compression as policies see it, with a state of its own."""
    layer, method = cache.layers[layer_index], cache.method
    assert method is not None
    options = {**method.options, **cache.options}
    step = Compression(method, options, cache.compression_ratio, cache.every, *layer.slots())
    step.new, step.note, step.state = layer.seen - layer.evicted_at, note, dict(layer.state)
    # the tokens before have been looked at, and the new ones are the last
    require_finite(layer_index, step.keys[:, :, -step.new :], step.values[:, :, -step.new :])
    if layer.evicted_at == 0:
        for policy in method.policies:
            step.state |= policy.opened(step)
    return step


def keeps_all(cache: WatchedCache, layer_index: int, step: Compression) -> bool:
    """Whether the numbers of tokens alone say that nothing of a full layer is evicted."""
    layer, method = cache.layers[layer_index], step.method
    for policy in method.policies:
        said = policy.keeps_all(method, step.options, step.state, layer.stored)
        if said is not None:
            return said
    if "keep_ratio" in cache.options or method.head_budgets is not None:
        return False
    return min(cache.amounts(layer_index, layer.seen)) >= layer.stored


def described(
    cache: WatchedCache, layer_index: int, step: Compression, captured: Mapping[str, Any]
) -> tuple[dict[str, Any], Request]:
    """The states of the layer, and the request for the method."""
    layer = cache.layers[layer_index]
    step.keys, step.values, positions, filled = layer.contents()
    step.filled = None if layer.is_full else filled
    padding = cache.padding_until(layer_index).to(positions.device).expand(len(filled), -1)
    states: dict[str, Any] = {"keys": step.keys, "values": step.values, **captured}
    # one of ragged heads may have kept every token
    if layer.ragged is not None or layer.seen > filled.shape[2]:
        states["positions"] = positions - at(padding, positions)
    if (moments := moments_of(step.state)) is not None:
        states["moments"] = moments
    cap, states["sinks"] = cache.softmax_of_batch(layer_index, len(filled))
    request = cache.request(
        layer_index,
        cap=cap,
        filled=step.filled,
        seen=[layer.seen - count for count in padding[:, -1].tolist()],
        is_prompt=layer.evicted_at == 0,
        state=step.state,
        supply=supply(cache, layer_index),
    )
    return states, request


def one_pass(method: Method, step: Compression, request: Request) -> Method:
    """The method, or one whose function does more: where it is called once, for all rows and heads."""
    if step.filled is not None or len(set(request.seen or ())) > 1:
        _skip(step)
        return method
    found = next(filter(None, (policy.fused(step) for policy in method.policies)), None)
    return replace(method, function=functools.wraps(method.function)(found)) if found else method


def chosen(cache: WatchedCache, layer_index: int) -> torch.Tensor:
    """The tokens [B, H_q, N] that each query head of the
    last token attends to, in a layer that has evicted none.
    """
    assert cache.method is not None
    captured = cache._captured[layer_index]
    states, request = described(cache, layer_index, opened(cache, layer_index, None), captured)
    return cache.method.kept(states, replace(request, is_prompt=False))


def _skip(step: Compression) -> None:
    for policy in step.method.policies:
        policy.skipped(step.state)


def warn_of_what_stays(cache: WatchedCache, layer: Any) -> None:
    """Warn, once, of a prompt that is read in blocks without `every`: later tokens outnumber it and what
    was asked for.
    """
    since = layer.seen - layer.evicted_at
    if cache.is_warned or cache.every or cache.method is None or not 0 < layer.evicted_at <= since:
        return
    cache.is_warned = since > tokens_to_keep(layer.seen, cache.compression_ratio, cache.budget)
    if cache.is_warned:
        warnings.warn(
            f"the cache compressed the first {layer.evicted_at} tokens, and {since} later ones stay: to "
            "compress a prompt in "
            "blocks give the cache every=N, and after a turn of a chat call cache.compress()",
            stacklevel=2,
        )


def warn_of_what_is_too_much(cache: WatchedCache, request: Request, kept: torch.Tensor) -> None:
    """Warn, once, where a select keeps more tokens [B, H_kv, T] than it may."""
    method = cache.method
    assert method is not None
    grows = "recursive" in method.traits and cache.every  # it keeps a fraction of each part
    if cache.is_told or grows or not method.is_select or "own_budget" in method.traits:
        return
    for count, seen in zip(kept.sum(dim=(1, 2)).tolist(), request.seen or (), strict=True):
        stored, asked = count / kept.shape[1], method.most(seen, request)
        if stored > asked:
            cache.is_told = True
            warnings.warn(
                f"method {method.name}: the cache stores {stored:.5g} of {seen} tokens in each head of layer "
                f"{request.layer_index}, where {asked} were asked for; a method that decides by itself how "
                'many stay says TRAITS = {"own_budget"}',
                stacklevel=2,
            )
            return


def warn_of_what_is_wasted(cache: WatchedCache, layer_index: int, kept: torch.Tensor) -> None:
    """Warn, once, where a select keeps less than half of the tokens [B, H_kv, T] that it may."""
    method = cache.method
    if (
        method is None
        or cache.is_told
        or not method.is_select
        or method.traits & {"own_budget", "moving_window", "recursive"}
    ):
        return
    asked, in_a_head = (
        sum(cache.amounts(layer_index, cache.layers[layer_index].seen)),
        int(kept.sum()) / kept.shape[1],
    )
    cache.is_told = 2 * in_a_head < asked
    if cache.is_told:
        warnings.warn(
            f"method {method.name}: keeps {in_a_head / len(kept):.4g} tokens in a head, where the budget is "
            f"{asked / len(kept):.4g}; a method that decides by itself how many stay says TRAITS = "
            f'{{"own_budget"}}',
            stacklevel=2,
        )
