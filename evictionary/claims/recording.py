"""Records every layer's states in one forward over a text,
and runs the model on from a cache with removed tokens.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.claims import texts
from evictionary.errors import require
from evictionary.models import versions
from evictionary.models.queries import rotation, unrotated
from evictionary.models.weights import around, device_of, linear_map, output_projection
from evictionary.reference.attention import by_group, causal_attention


@dataclass(frozen=True)
class Scale:
    """The amount of work on each text."""

    prompt_tokens: int = 768
    later_tokens: int = 256
    passkey_tokens: int = 1552
    passkey_digits: int = 64
    passkey_depths: tuple[float, float] = (0.05, 0.75)
    lag_sizes: tuple[int, ...] = (128, 256)
    keep_ratios: tuple[float, ...] = (0.125, 0.25, 0.5)
    budgets: tuple[int, ...] = (24, 64, 128, 256)
    main_budget: int = 128


@dataclass(frozen=True)
class Layer:
    """The states of one layer over the T tokens of a text; queries and keys are after RoPE.

    queries [1, H_q, T, D], keys and values [1, H_kv, T, D], hidden_states [1, T, C] as the attention reads
    them (after the norm), query_weight [H_q, C, D], query_bias [H_q, D] or None, output_weight [H_q, D, C],
    cos and sin [T, D], the model's own RoPE.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    hidden_states: torch.Tensor
    query_weight: torch.Tensor
    query_bias: torch.Tensor | None
    output_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def plain_queries(self) -> torch.Tensor:
        """The queries before RoPE, [1, H_q, T, D]: the inverse of the model's rotation."""
        return unrotated(self.queries, self.cos, self.sin)


@dataclass(frozen=True)
class Recording:
    """One text of T tokens; the first `split` tokens are the prompt, the others come later. `seed` is for
    random draws on it.

    residual [layers - 1, M / 2, C] is the residual stream between the layers, of the first half of the M
    later tokens; theta the base of RoPE.
    """

    kind: str
    seed: int
    input_ids: torch.Tensor
    split: int
    theta: float
    layers: list[Layer]
    residual: torch.Tensor

    @property
    def later(self) -> int:
        """The number of tokens after the prompt."""
        return self.input_ids.shape[1] - self.split


@dataclass
class Lab:
    """The model, how much to measure on it, and the seed of the texts."""

    model: PreTrainedModel
    tokenizer: Any
    scale: Scale = field(default_factory=Scale)
    seed: int = 0


@dataclass(frozen=True)
class Observed:
    """The measurements of a paper's module on one text: numbers, or lists with the layer as the first
    axis, if there is one.
    """

    kind: str
    values: dict[str, Any]


def stacked(measured: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Repeated measurements with the same names: for each name, its arrays stacked on a new first axis."""
    each = list(measured)
    return {name: np.stack([values[name] for values in each]) for name in each[0]}


def of_texts(texts: Sequence[Observed], name: str) -> np.ndarray:
    """One quantity of all texts, [texts, ...]."""
    return np.array([text.values[name] for text in texts], dtype=np.float64)


def spread_by_layer(
    texts: Sequence[Observed], name: str, middle: Callable[..., Any] = np.median
) -> list[list[float]]:
    """The 10th percentile, the median or other middle, and
    the 90th percentile of each layer, over texts and heads.
    """
    found = of_texts(texts, name)
    found = found.reshape(*found.shape[:2], -1)
    low, high = np.percentile(found, [10, 90], axis=(0, 2))
    return [low.tolist(), middle(found, axis=(0, 2)).tolist(), high.tolist()]


def rope_theta(model: PreTrainedModel) -> float:
    """The base of the model's RoPE. Raises UsageError for scaled RoPE: the reference averages only plain
    RoPE over positions.
    """
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    require(
        parameters.get("rope_type", "default") == "default" and "rope_theta" in parameters,
        f"model: got RoPE of type {parameters.get('rope_type')!r}, wanted plain RoPE with one base",
    )
    return float(parameters["rope_theta"])


def record(lab: Lab, kind: str) -> Recording:
    """Read one text in one forward and keep the states of every layer. Raises UsageError for a model that
    cannot be recorded.
    """
    scale = lab.scale
    input_ids = texts.make(
        lab.tokenizer, kind, seed=lab.seed, tokens=scale.prompt_tokens + scale.later_tokens
    )
    return record_ids(lab, kind, input_ids, scale.prompt_tokens)


@torch.no_grad()
def record_ids(lab: Lab, kind: str, input_ids: torch.Tensor, split: int) -> Recording:
    """Read ids [1, T], of which `split` are the prompt, as `record` does."""
    model, input_ids = lab.model, input_ids.to(device_of(lab.model))
    theta = rope_theta(model)
    cache = EvictingCache(model, method=None, record=("queries", "hidden_states"))
    output = model(
        input_ids, **versions.argument(cache), use_cache=True, output_hidden_states=True, logits_to_keep=1
    )
    base: Any = model.base_model
    cos, sin = rotation(model, 0, torch.arange(input_ids.shape[1], device=input_ids.device))
    every: Any = zip(cache.layers, base.layers, strict=True)
    layers = [
        Layer(
            cache.recorded[index]["queries"],
            stored.keys,
            stored.values,
            cache.recorded[index]["hidden_states"],
            *_query_projection(model, block.self_attn, cache.recorded[index]["queries"]),
            output_projection(block.self_attn, stored.values, around(block.self_attn, model)),
            cos.to(stored.keys.device),
            sin.to(stored.keys.device),
        )
        for index, (stored, block) in enumerate(every)
    ]
    # The last hidden state has passed the final norm, so it is not the residual stream any more.
    half = slice(split, split + (input_ids.shape[1] - split) // 2)
    residual = torch.stack([states[0, half].to(input_ids.device) for states in output.hidden_states[1:-1]])
    return Recording(
        kind, zlib.crc32(f"{lab.seed}/{kind}".encode()), input_ids, split, theta, layers, residual
    )


def _query_projection(
    model: Any, attention: Any, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """W_Q as [H_q, C, D] and its bias as [H_q, D]."""
    require(
        hasattr(attention, "q_proj") and not hasattr(attention, "q_norm"),
        f"model: got {type(attention).__name__}, wanted queries that are a linear map of the hidden states",
    )
    size, above = model.config.get_text_config().hidden_size, around(attention.q_proj, model)
    weight, bias = linear_map(attention.q_proj, size, queries, above)
    heads = queries.shape[1]
    return weight.unflatten(1, (heads, -1)).transpose(0, 1), bias.unflatten(
        0, (heads, -1)
    ) if bias.any() else None


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a float64 array."""
    return tensor.detach().double().cpu().numpy()


def later_attention(recording: Recording, layer: Layer) -> np.ndarray:
    """The attention [H_kv, G, M, T] of the M later queries over all T tokens, causal."""
    queries, keys = by_group(as_array(layer.queries[:, :, recording.split :]), as_array(layer.keys))
    return causal_attention(queries, keys)[0]


def compressed(
    layers: Iterable[tuple[torch.Tensor, torch.Tensor]], kept: Sequence[torch.Tensor]
) -> DynamicCache:
    """A cache of the kept tokens of each layer, in position order: keys and values [B, H_kv, T, D], kept
    [B, H_kv, T].

    All rows of a layer keep the same number of tokens.
    """
    cache = DynamicCache()
    for index, ((keys, values), mask) in enumerate(zip(layers, kept, strict=True)):
        batch, heads, _, width = keys.shape
        cache.update(
            keys[mask].reshape(batch, heads, -1, width),
            values[mask].reshape(batch, heads, -1, values.shape[-1]),
            index,
        )
    return cache


@torch.no_grad()
def read_on(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, position: int, **named: Any
) -> Any:
    """The model's output for ids [B, M] that stand at position .. position + M - 1, whatever the cache
    still holds before them.
    """
    positions = torch.arange(position, position + input_ids.shape[1], device=input_ids.device)[None]
    return model(input_ids, **versions.argument(cache), position_ids=positions, use_cache=True, **named)


@torch.no_grad()
def read_kept(lab: Lab, recording: Recording, kept: Sequence[torch.Tensor], count: int) -> np.ndarray:
    """The residual stream of the `count` tokens after the prompt, as Recording.residual, where `kept`
    hides the other tokens.
    """
    with hiding(lab, recording, kept, count) as cache:
        return residual_after(lab, recording, cache, count)


@contextmanager
def hiding(
    lab: Lab, recording: Recording, kept: Sequence[torch.Tensor], count: int
) -> Iterator[DynamicCache]:
    """A whole cache of the prompt, of which the next `count` tokens see in each layer only what `kept` [1,
    H_kv, split] keeps.

    Heads may keep different numbers of tokens, since a mask hides them.
    """
    base: Any = lab.model.base_model
    split, cache = recording.split, DynamicCache()
    causal = torch.ones(count, count, dtype=torch.bool, device=recording.input_ids.device).tril()
    with ExitStack() as hooks:
        for index, (layer, mask, block) in enumerate(zip(recording.layers, kept, base.layers, strict=True)):
            cache.update(layer.keys[:, :, :split], layer.values[:, :, :split], index)
            groups = layer.queries.shape[1] // mask.shape[1]
            before = mask.to(layer.keys.device).repeat_interleave(groups, dim=1)
            rows = before[:, :, None].expand(-1, -1, count, -1)
            seen = torch.cat([rows, causal.to(rows.device).expand(*rows.shape[:3], -1)], dim=-1)
            hidden = layer.keys.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(layer.keys.dtype).min)

            def hide(
                module: Any, arguments: Any, named: dict[str, Any], hidden: torch.Tensor = hidden
            ) -> Any:
                return arguments, named | {"attention_mask": hidden}

            hooks.enter_context(block.self_attn.register_forward_pre_hook(hide, with_kwargs=True))
        yield cache


def residual_after(lab: Lab, recording: Recording, cache: Cache, count: int) -> np.ndarray:
    """The residual stream of the `count` tokens after the prompt, as Recording.residual, read from a cache
    of the prompt.
    """
    ids = recording.input_ids[:, recording.split : recording.split + count]
    output = read_on(lab.model, ids, cache, recording.split, output_hidden_states=True, logits_to_keep=1)
    return as_array(torch.stack([states[0].to(ids.device) for states in output.hidden_states[1:-1]]))
