"""Tiny random models of the families that transformers knows."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Cohere2Config,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    JambaConfig,
    LagunaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    NemotronHConfig,
    OlmoConfig,
    OlmoHybridConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
    Zamba2Config,
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
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

FOUR = {**SMALL, "num_hidden_layers": 4}
NO_HEAD_DIM_OF_FOUR = {**NO_HEAD_DIM, "num_hidden_layers": 4}
HALF_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
DELTA = {
    **HALF_LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
DELTA_EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def known(family: str, config: str, **settings: Any) -> dict[str, PretrainedConfig]:
    """The configuration of a family, or nothing: the oldest transformers of our range has none of it."""
    return {family: getattr(transformers, config)(**settings)} if hasattr(transformers, config) else {}


OF_2026: dict[str, Any] = {
    "Qwen3-Next": Qwen3NextConfig(**FOUR, **DELTA, **DELTA_EXPERTS),
    "Qwen3.5": Qwen3_5TextConfig(**FOUR, **DELTA),
    "OLMo Hybrid": OlmoHybridConfig(**NO_HEAD_DIM_OF_FOUR, **DELTA),
    "Jamba": JambaConfig(
        **NO_HEAD_DIM_OF_FOUR,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
    ),
    "Bamba": BambaConfig(**NO_HEAD_DIM_OF_FOUR, **MAMBA, attn_layer_indices=[1, 3]),
    "Granite 4 hybrid": GraniteMoeHybridConfig(
        **NO_HEAD_DIM_OF_FOUR,
        **MAMBA,
        **EXPERTS,
        **HALF_LINEAR,
        shared_intermediate_size=16,
        position_embedding_type=None,
    ),
    "Nemotron-H": NemotronHConfig(
        **{name: value for name, value in FOUR.items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=1,
        ssm_state_size=8,
        chunk_size=16,
    ),
    "LFM2": Lfm2Config(**NO_HEAD_DIM_OF_FOUR, layer_types=["conv", "full_attention"] * 2),
    "Falcon-H1": FalconH1Config(**NO_HEAD_DIM_OF_FOUR, **MAMBA, mamba_d_ssm=64, mamba_chunk_size=16),
    "Zamba2": Zamba2Config(
        **NO_HEAD_DIM_OF_FOUR,
        layers_block_type=["mamba", "hybrid"] * 2,
        mamba_d_state=8,
        mamba_headdim=8,
        mamba_ngroups=1,
        n_mamba_heads=8,
        chunk_size=16,
        num_mem_blocks=1,
        use_mem_rope=True,
    ),
    "gpt-oss": GptOssConfig(**FOUR, **EXPERTS, **HALF_SLIDING),
    "Granite-SWA": GraniteSWAConfig(**NO_HEAD_DIM_OF_FOUR, **HALF_SLIDING),
    "Gemma 2": Gemma2Config(**FOUR, **HALF_SLIDING, attn_logit_softcapping=5.0),
    "Gemma 3": Gemma3TextConfig(**FOUR, **HALF_SLIDING),
    "Gemma 4": Gemma4TextConfig(
        **FOUR, **HALF_SLIDING, num_kv_shared_layers=0, hidden_size_per_layer_input=0
    ),
    "Cohere": CohereConfig(**NO_HEAD_DIM_OF_FOUR, logit_scale=1.0),
    "Cohere2": Cohere2Config(**NO_HEAD_DIM_OF_FOUR, **HALF_SLIDING, logit_scale=1.0),
    "Laguna": LagunaConfig(
        **FOUR,
        **DELTA_EXPERTS,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        num_attention_heads_per_layer=[4, 8, 4, 4],
    ),
    "MiMo-V2-Flash": MiMoV2FlashConfig(
        **FOUR,
        **HALF_SLIDING,
        v_head_dim=4,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
    ),
    **known("Kolibri 1", "Kolibri1Config", **FOUR, **HALF_SLIDING, **DELTA_EXPERTS),
    **known("LFM3", "Lfm3Config", **FOUR, layer_types=["conv", "full_attention"] * 2),
    "SmolLM3": SmolLM3Config(**FOUR, no_rope_layers=[1, 0, 1, 0]),
    "Llama 4": Llama4TextConfig(
        **FOUR,
        **EXPERTS,
        intermediate_size_mlp=48,
        layer_types=["chunked_attention", "full_attention"] * 2,
        no_rope_layers=[1, 0] * 2,
        attention_chunk_size=16,
    ),
}
"""Layers with a state in the place of a cache, sinks, capped logits, RoPE of neighbouring channels, layers
without RoPE.
"""

FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, scaled RoPE": LlamaConfig(
        **SMALL, rope_parameters={**SCALED, "original_max_position_embeddings": 64}
    ),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**NO_HEAD_DIM),
    "qwen3": Qwen3Config(**SMALL),
    "gemma3": Gemma3TextConfig(**SMALL, **LAYERS, query_pre_attn_scalar=16),
    "phi3": Phi3Config(**NO_HEAD_DIM),
    "gpt_neox": GPTNeoXConfig(**ONE_KEY_A_QUERY),
    "olmo": OlmoConfig(**NO_HEAD_DIM, clip_qkv=3.0),
}


def random_model(
    config: PretrainedConfig, of: Callable[..., Any] = AutoModelForCausalLM.from_config, **named: Any
) -> Any:
    """A model with random weights that are always the same,
    by the function that makes it from its configuration.
    """
    torch.manual_seed(0)
    return of(copy.deepcopy(config), **named).eval()


def build(family: str, **named: Any) -> PreTrainedModel:
    config = (FAMILIES | OF_2026)[family]
    if getattr(config, "attn_logit_softcapping", None):
        named.setdefault("attn_implementation", "eager")  # before 5.21 it is sdpa, which leaves out the cap
    return random_model(config, **named)
