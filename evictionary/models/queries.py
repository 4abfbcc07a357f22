"""A model's queries before and after RoPE, by its own
modules: rotary embedding, query projection and norm.

So scaled or partial RoPE and QK-norm are those of the model;
with plain RoPE the results equal the reference (tested).
"""

import copy
import inspect
import math
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from evictionary.errors import UsageError, require
from evictionary.models.weights import around, device_of, numbers, present
from evictionary.optimized.softmax import Softmax

HORIZON = 512
"""The future positions that RoPE is averaged over."""
IN_HALVES = ("twice", "once")
LAYOUTS = (*IN_HALVES, "pairs", "none")
"""How a layer rotates: the channels c and c + R/2, by an angle that the model gives twice or once;
neighbouring channels; none.
"""
FIXED = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""The kinds of RoPE whose angle per position is the same in every text."""
layouts: weakref.WeakKeyDictionary[PreTrainedModel, dict[int, str]] = weakref.WeakKeyDictionary()
"""The layouts of a model's layers that a trial has found (cache/inputs.py); without one, the first."""


def rotation(
    model: PreTrainedModel, layer_index: int, positions: torch.Tensor, layout: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., R] of the model's RoPE at positions [...], of any integer dtype; R, at most D, is
    even. The layout is the layer's own unless one is given.
    """
    layout = layout or layouts.get(model, {}).get(layer_index, LAYOUTS[0])
    if layout == "none":
        still = torch.zeros(*positions.shape, 2, device=positions.device)
        return still.cos(), still
    rotary: Any = next(
        (module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")), None
    )
    require(
        rotary is not None,
        f"model: found no rotary embedding in {type(model).__name__}, which this method reads",
    )
    # Some model families rotate sliding and full layers by different angles.
    extra = {}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        kinds = getattr(model.config.get_text_config(), "layer_types", None)
        extra["layer_type"] = kinds[layer_index] if kinds else "full_attention"
    like = torch.empty(0, device=positions.device, dtype=torch.float32)
    turns = _twin(rotary, model)(like, positions.reshape(1, -1), **extra)
    require(
        not isinstance(turns, torch.Tensor),
        f"model: {type(model).__name__} rotates by complex numbers, wanted cosine and sine, which this "
        "method reads",
    )
    cos, sin = (torch.cat([turn, turn], dim=-1) for turn in turns) if layout == "once" else turns
    if layout == "pairs" and not of_neighbours(sin):
        cos, sin = (turn[..., : turn.shape[-1] // 2].repeat_interleave(2, dim=-1) for turn in (cos, sin))
    return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)


def require_fixed_rotation(model: PreTrainedModel) -> None:
    """Raise UsageError for a model whose RoPE turns a key by another angle in a longer text, or by the planes
    of an image: its keys cannot be turned again.
    """
    said = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    own = [said, *(each for each in said.values() if isinstance(each, dict))]
    kinds = {str(each["rope_type"]) for each in own if "rope_type" in each}
    others = sorted(kinds - FIXED) + ["planes"] * any("mrope_section" in each for each in own)
    name = type(model).__name__
    require(said, f"model: got {name}, which has no RoPE, wanted one whose keys have a position to re-rotate")
    require(
        not others,
        f"model: got {name} with the RoPE {', '.join(others)}, wanted one of {', '.join(sorted(FIXED))} to "
        "re-rotate keys: its angle per position is fixed",
    )


def _twin(rotary: torch.nn.Module, model: PreTrainedModel) -> torch.nn.Module:
    """A rotary embedding to ask, as some variants of RoPE write the longest position that they were asked for
    into themselves; without the hook of accelerate, which would carry all weights of the model along.
    """
    twin, above = copy.copy(rotary), around(rotary, model)
    own = vars(twin)
    if "_old_forward" in own:
        for name in ("_hf_hook", "_old_forward", "forward"):
            own.pop(name, None)
    own["_buffers"] = {
        name: buffer if buffer is None else numbers(rotary, name, above).clone()
        for name, buffer in rotary._buffers.items()
    }
    return twin


def turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to the first R channels of states; the other channels stay unchanged.

    The angles tell the pairs: those of neighbours stand side by side (Cohere), those of two halves R/2 apart.
    """
    rotated, passed = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    if of_neighbours(sin):
        partners = torch.stack([-rotated[..., 1::2], rotated[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        partners = torch.cat([-second, first], dim=-1)
    return torch.cat([rotated * cos + partners * sin, passed], dim=-1)


def of_neighbours(sin: torch.Tensor) -> bool:
    """Whether the angles [..., R] of neighbouring channels are the same: they are turned as a pair."""
    return torch.equal(sin[..., 0::2], sin[..., 1::2])


def unrotated(queries: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Undo RoPE: queries [..., N, D] with cos and sin [..., N, R] at their positions, in float32."""
    # Some RoPE variants scale cosine and sine; their squares then sum to the square of the scale.
    scale = cos * cos + sin * sin
    return turned(queries.float(), cos / scale, -sin / scale)


def average_rotation(
    model: PreTrainedModel, layer_index: int, position: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cosine and sine [R] over the HORIZON positions from `position` on."""
    cos, sin = rotation(model, layer_index, torch.arange(position, position + HORIZON, device=device))
    return cos.mean(dim=0), sin.mean(dim=0)


def project(model: PreTrainedModel, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The model's queries [B, H_q, S, D] before RoPE of hidden states [B, S, C], its QK-norm included."""
    with present(module, around(module, model)):
        return _projected(model, module, hidden_states)


def _projected(model: PreTrainedModel, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    head_dim = getattr(module, "head_dim", config.hidden_size // num_heads)
    if hasattr(module, "q_proj"):
        queries = module.q_proj(hidden_states)
        # a gate after the query of each head, as in Qwen3-Next
        if queries.shape[-1] == 2 * num_heads * head_dim:
            queries = queries.unflatten(-1, (num_heads, 2 * head_dim))[..., :head_dim].flatten(-2)
    elif hasattr(module, "qkv_proj"):  # one matrix for all three; the queries come first
        queries = module.qkv_proj(hidden_states)[..., : num_heads * head_dim]
    elif (
        getattr(module, "query_key_value", None) is not None
        and (fused := module.query_key_value(hidden_states)).shape[-1] == 3 * num_heads * head_dim
    ):
        # GPT-NeoX: one matrix for all three; the queries come first in each head
        queries = fused.unflatten(-1, (num_heads, 3 * head_dim))[..., :head_dim].flatten(-2)
    else:
        raise UsageError(
            f"model: {type(module).__name__} has no separate query projection, which this method samples "
            "queries with"
        )
    norm = getattr(module, "q_norm", None)
    weight = getattr(norm, "weight", None)
    if norm is not None and weight is not None and weight.shape[-1] != head_dim:  # over all heads at once
        queries, norm = norm(queries), None
    clip = getattr(config, "clip_qkv", None)
    queries = queries if clip is None else queries.clamp(-clip, clip)
    queries = queries.view(*hidden_states.shape[:2], num_heads, head_dim).transpose(1, 2)
    return queries if norm is None else norm(queries)


def logit_factor(module: Any, head_dim: int) -> float:
    """The factor for queries that makes `q . k / sqrt(D)` the
    model's logit: 1, except for models with another scale.
    """
    return float(getattr(module, "scaling", head_dim**-0.5)) * math.sqrt(head_dim)


def softmax_of(module: Any, model: PreTrainedModel | None = None) -> Softmax:
    """The softmax of an attention module: its cap, and its learned sinks [H_q]; model, the one it is of."""
    sinks = getattr(module, "sinks", None)
    if sinks is not None and sinks.device.type == "meta":
        above = around(module, model)
        sinks = numbers(module, "sinks", above).to(device_of(module, above))
    return Softmax(getattr(module, "attn_logit_softcapping", None), sinks)
