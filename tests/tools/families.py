"""Tiny random models of the families that transformers knows."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}
NO_HEAD_DIM = {name: value for name, value in SMALL.items() if name != "head_dim"}
ONE_KEY_A_QUERY = {name: value for name, value in NO_HEAD_DIM.items() if name != "num_key_value_heads"}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 16}
SCALED = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, scaled RoPE": LlamaConfig(**SMALL, rope_parameters={**SCALED, "original_max_position_embeddings": 64}),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**NO_HEAD_DIM),
    "qwen3": Qwen3Config(**SMALL),
    "gemma3": Gemma3TextConfig(**SMALL, **LAYERS, query_pre_attn_scalar=16),
    "phi3": Phi3Config(**NO_HEAD_DIM),
    "gpt_neox": GPTNeoXConfig(**ONE_KEY_A_QUERY),
    "olmo": OlmoConfig(**NO_HEAD_DIM, clip_qkv=3.0),
}


def random_model(config: PretrainedConfig, of: Callable[..., Any] = AutoModelForCausalLM.from_config, **named: Any) -> Any:
    """A model with random weights that are always the same, by the function that makes it from its configuration."""
    torch.manual_seed(0)
    return of(copy.deepcopy(config), **named).eval()


def build(family: str, **named: Any) -> PreTrainedModel:
    return random_model(FAMILIES[family], **named)
