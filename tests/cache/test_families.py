"""Model families by their transformers classes, tiny and random: each is compressed, in every phase, or
refused with a reason.
"""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import tiny_tokenizer
from tools.families import FAMILIES, LAYERS, NO_HEAD_DIM, OF_2026, SMALL, build, random_model
from tools.reading import (
    cached,
    generate,
    loaded,
    padded,
    places,
    positions_of,
    read,
    read_in,
    refused,
    small,
)
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CLIPVisionConfig,
    DbrxConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    DogeConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    InklingTextConfig,
    JetMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MllamaForCausalLM,
    MllamaTextConfig,
    NanoChatConfig,
    Olmo2Config,
    PreTrainedModel,
    RoFormerConfig,
    T5Config,
    T5ForConditionalGeneration,
    ZambaConfig,
    ZayaConfig,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from evictionary import EvictingCache, reference
from evictionary.cache import inputs
from evictionary.cache.layers import EvictingLayer
from evictionary.cache.model_hooks import attention_modules
from evictionary.evaluation.questions import ask
from evictionary.models import queries as future_queries

LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 3,
}
DENSE = {
    "intermediate_size": [48] * 3,
    "activation_sparsity_pattern": [0.0] * 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
}
TWO = {**SMALL, "num_hidden_layers": 2}
OTHERS = {MllamaTextConfig: MllamaForCausalLM, T5Config: T5ForConditionalGeneration}
IDS = torch.randint(3, 299, (1, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_changes_nothing(family: str, attention: str) -> None:
    """Also where the cache answers for the attention itself: with the moments of nothing."""
    model = build(family, attn_implementation=attention)
    whole = read(model, IDS, None)
    for method in ("keydiff", "knorm+ada_kv", "keydiff+moments"):
        with EvictingCache(model, method, 0.0) as cache:
            torch.testing.assert_close(read_in(model, cache, [40, 1, 1, 6], IDS), whole, rtol=1e-3, atol=1e-3)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "method", ["keydiff", "expected_attention", "gvote", "momentkv", "tova", "snapkv+ada_kv+moments"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_compressed_and_generates(family: str, method: str, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    cache = EvictingCache(model, method, 0.5, small(method))
    assert generate(model, torch.cat([IDS, IDS.flip(1)]), cache, count=6, min_new_tokens=1).shape[1] > 48
    # random weights attend to everything alike, and GVote sets its budget by what is attended to
    assert cache.nbytes < cache.nbytes_full or method == "gvote"
    for layer in cache.layers:
        assert layer.keys.dtype == dtype
        if isinstance(layer, EvictingLayer):
            assert int(layer.lengths.max()) <= 48 + 6
        else:
            assert layer.keys.shape[2] == 15  # a sliding window of 16, left alone


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_what_the_method_keeps_in_position_order(family: str) -> None:
    model = build(family)
    whole = cached(model, IDS, None)
    for layer, full in zip(
        EvictingCache.from_prefilled(model, whole, "keydiff", 0.5).layers, whole.layers, strict=True
    ):
        if isinstance(layer, EvictingLayer):
            kept = torch.from_numpy(
                reference.selection.top_k(reference.keydiff.score(full.keys.double().numpy()), 24)
            )
            assert positions_of(layer) == places(kept.numpy())
            assert torch.equal(layer.keys.flatten(0, 2), full.keys[kept])
            assert torch.equal(layer.values.flatten(0, 2), full.values[kept])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_are_brought_back_to_before_rope_and_logits_to_one_scale(family: str) -> None:
    """What the cache records, un-rotated, is what the projection (and QK-norm) of the hidden states gives."""
    model, index = build(family), 2
    recorded = cached(model, IDS, None, record=("queries", "hidden_states")).recorded[index]
    module: Any = attention_modules(model)[index]
    got = future_queries.unrotated(
        recorded["queries"], *future_queries.rotation(model, index, torch.arange(48))
    )
    factor = future_queries.logit_factor(module, got.shape[-1])
    torch.testing.assert_close(
        got, future_queries.project(model, module, recorded["hidden_states"]) * factor, rtol=1e-3, atol=1e-4
    )
    assert (abs(factor - 1) > 0.1) == (family == "gemma3") and np.isfinite(factor)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(**SMALL, sliding_window=8), "a sliding window or a state in every layer"),
        (Gemma3nTextConfig(**{**SMALL, **LAYERS, **DENSE}, num_kv_shared_layers=1), "share keys"),
        (DiffLlamaConfig(**SMALL), "differential attention"),
        (DogeConfig(**SMALL), "a mask that it makes from the values"),
        (DeepseekV3Config(**{**SMALL, **LATENT}), "latent attention"),
        (
            ZambaConfig(
                **NO_HEAD_DIM,
                layers_block_type=["mamba", "mamba", "hybrid"],
                mamba_d_state=4,
                n_mamba_heads=2,
                attention_hidden_size=64,
                attention_head_dim=16,
                tie_word_embeddings=False,
            ),
            "whose attention modules have no layer index",
        ),
        (GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=30), "no rotary positions"),
        (
            MllamaTextConfig(
                **NO_HEAD_DIM,
                cross_attention_layers=[1],
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            "with cross-attention layers",
        ),
        (
            T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=30),
            "an encoder-decoder",
        ),
    ],
    ids=[
        "sliding",
        "shared",
        "differential",
        "dynamic mask",
        "latent",
        "no layer index",
        "no RoPE",
        "an image",
        "an encoder",
    ],
)
def test_what_cannot_be_compressed_is_refused_and_left_as_it_was(config: Any, message: str) -> None:
    model = random_model(
        config, *(of._from_config for kind, of in OTHERS.items() if isinstance(config, kind))
    )
    before = model.config._attn_implementation
    refused(lambda: EvictingCache(model), message)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "config",
    [
        NanoChatConfig(**SMALL),
        DbrxConfig(
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=256,
            vocab_size=300,
            attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 2, "moe_top_k": 1},
        ),
        OF_2026["Laguna"],
        ZayaConfig(**SMALL, num_experts=2, moe_intermediate_size=16),
    ],
    ids=[
        "a norm after RoPE",
        "no projection of queries alone",
        "heads of a layer",
        "a projection with a cache",
    ],
)
def test_future_queries_are_refused_where_they_would_be_others_than_the_models(config: Any) -> None:
    model = random_model(config)
    for method in ("expected_attention", "gvote"):
        message = f"rotated by RoPE; wanted a method .* instead of {method}"
        refused(lambda method=method: EvictingCache(model, method), message)
    with EvictingCache(model, "keydiff+ada_kv", 0.5) as cache:  # other methods do not mind
        assert read(model, IDS, cache).isfinite().all()
    assert not model.config._attn_implementation.startswith("evictionary")


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_trial_of_the_queries_that_was_interrupted_is_not_remembered(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "unrotated", Mock(side_effect=error))
        refused(lambda: EvictingCache(model, "gvote"), error=error)
    assert cached(model, IDS, "gvote").get_seq_length() == 48


@pytest.mark.parametrize("method", ["expected_attention", "gvote"])
def test_rope_that_grows_with_the_text_grows_no_further_for_future_positions(method: str) -> None:
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = random_model(LlamaConfig(**{**SMALL, "max_position_embeddings": 32}, rope_parameters=rope))
    model.config.max_position_embeddings = 256
    read(model, IDS, None)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cached(model, IDS, method, 0.5)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            JetMoeConfig(**TWO, kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
            "which gives its attention other keys than the cache returned",
        ),
        (
            InklingTextConfig(
                **TWO,
                swa_num_attention_heads=4,
                swa_num_key_value_heads=2,
                swa_head_dim=8,
                layer_types=["hybrid_sliding", "hybrid"],
                n_routed_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
            ),
            "InklingAttention, whose attention in layer 1 reads position_bias too",
        ),
    ],
    ids=["other keys", "a bias of positions"],
)
@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv", "momentkv"])
def test_an_attention_that_is_not_of_the_kept_keys_is_refused_before_the_first_token(
    config: Any, message: str, method: str
) -> None:
    model, draw = random_model(config), Mock()
    refused(lambda: generate(model, IDS, EvictingCache(model, method, 0.5), logits_processor=[draw]), message)
    assert not draw.called and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "config", [GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=8), RoFormerConfig(is_decoder=True)]
)
def test_a_model_with_an_attention_of_its_own_is_refused_by_a_true_sentence(config: Any) -> None:
    """They have rotary positions; their attention is written out, so no cache can see its queries."""
    with torch.device("meta"):
        refused(
            lambda: EvictingCache(random_model(config)), "an attention of its own that no cache can watch"
        )


def test_rotations_by_complex_numbers_are_refused_where_they_are_needed() -> None:
    kinds = {"layer_types": ["full_attention"] * 3, "no_rope_layers": [1] * 3}
    model = random_model(
        Llama4TextConfig(
            **SMALL, **kinds, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1
        )
    )
    for method in ("expected_attention", "gvote", "triattention"):
        message = f"wanted a method that reads no future queries instead of {method}"
        refused(lambda method=method: EvictingCache(model, method), message)
    assert generate(model, IDS, EvictingCache(model, "snapkv+ada_kv", 0.5, {"window_size": 4})).shape[1] == 56


@pytest.mark.parametrize(
    "method", ["keydiff", "snapkv+ada_kv", "momentkv", "expected_attention", "gvote", "criticalkv"]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_prompt_with_an_image_is_compressed(method: str, attention: str) -> None:
    """The attention of the image's tower is not ours to look at; that of the text is."""
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**SMALL), image_token_index=299, vision_feature_layer=-1
    )
    model = random_model(config, of=LlavaForConditionalGeneration._from_config)
    model.set_attn_implementation(attention)
    ids = torch.cat([IDS[:, :20] % 299, torch.full((1, 4), 299), IDS[:, 20:] % 299], dim=1)
    image = {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    whole = generate(model, ids, **image)
    assert torch.equal(generate(model, ids, EvictingCache(model, None), **image), whole)
    with EvictingCache(model, method, 0.5, small(method)) as cache:
        assert generate(model, ids, cache, **image).shape == whole.shape
        assert cache.nbytes < cache.nbytes_full or method == "gvote"
    twice = EvictingCache(model, "kvzip", 0.5)
    refused(lambda: generate(model, ids, twice, **image), "got a prompt with media, wanted text")
    assert model.config.vision_config._attn_implementation == model.config._attn_implementation == attention


def test_a_norm_over_all_heads_at_once_is_the_models() -> None:
    model = random_model(Olmo2Config(**NO_HEAD_DIM))
    assert read(model, IDS, EvictingCache(model, "gvote")).isfinite().all()


def stand_in(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """A flash kind on a CPU: their signature, [B, M, H, D] inside, causal to the bottom right, a mask [B,
    T] of padding alone.
    """
    assert module.config._attn_implementation in FLASH
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    group, new, stored = query.shape[2] // key.shape[2], query.shape[1], key.shape[1]
    logits = torch.einsum("bmhd,bthd->bhmt", query, key.repeat_interleave(group, 2)) * scaling
    visible = torch.ones(new, stored, dtype=torch.bool).tril(stored - new)
    if sliding_window is not None:
        visible &= ~torch.ones(new, stored, dtype=torch.bool).tril(stored - new - sliding_window)
    if attention_mask is not None:
        assert attention_mask.shape == (len(query), stored)
        visible = visible & attention_mask.bool()[:, None, None]
    weights = logits.masked_fill(~visible, -1e30).softmax(dim=-1)
    return torch.einsum("bhmt,bthd->bmhd", weights, value.repeat_interleave(group, 2)), None


FLASH = ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"]


def with_attention(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model with flex_attention, or with the stand-in under the name of a flash kind."""
    if attention in FLASH:
        monkeypatch.setitem(AttentionInterface._global_mapping, attention, stand_in)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, attention, flash_attention_mask)
        # transformers then takes the kind's package for loaded, and the device for a GPU
        monkeypatch.setattr("transformers.modeling_flash_attention_utils._loaded_implementation", attention)
        monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: False)
        monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *arguments, **named: True)
    return build(family, attn_implementation=attention)


@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv+moments", "momentkv", "gvote"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("attention", ["flex_attention", *FLASH])
def test_flex_and_the_flash_kinds_do_what_sdpa_does(
    attention: str, family: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in blocks, later tokens alone and together, and
    a padded batch; flex_attention runs without its compiler.
    """
    ids, given = padded(48, 43, width=48)
    mask, positions = given.values()
    results = []
    with torch.compiler.set_stance("force_eager"):
        for model in (build(family), with_attention(family, attention, monkeypatch)):
            before = model.config._attn_implementation
            with EvictingCache(model, method, 0.5, small(method)) as cache:
                logits = [read_in(model, cache, [40, 1, 1, 6], IDS)]
            for of_batch in (EvictingCache(model, None), EvictingCache(model, method, 0.5, small(method))):
                for part in (slice(0, 40), slice(40, 48)):
                    told = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
                    logits.append(read(model, ids[:, part], of_batch, **told)[:, -1:])
                of_batch.close()
            results.append((logits, cache.tokens_kept))
            assert model.config._attn_implementation == before
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        *((kind, f"on a CPU with the attention {kind}, which runs on GPUs alone; wanted") for kind in FLASH),
        (
            "paged|eager",
            r"with the attention paged\|eager, wanted attn_implementation='sdpa', 'eager', 'flex",
        ),
    ],
)
def test_an_attention_that_no_cache_can_be_part_of_is_refused(
    attention: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    monkeypatch.setitem(AttentionInterface._global_mapping, attention, flash_attention_forward)
    model.config._attn_implementation_internal = attention
    refused(lambda: EvictingCache(model, "keydiff"), message)
    assert model.config._attn_implementation == attention


def test_models_that_share_a_config_are_both_left_as_they_were() -> None:
    one = build("llama")
    other = type(one)(one.config).eval()
    with (
        EvictingCache(one, "knorm+ada_kv", 0.5) as first,
        EvictingCache(other, "knorm+ada_kv", 0.5) as second,
    ):
        for model, cache in ((one, first), (other, second)):
            assert torch.equal(read(model, IDS, cache), read(model, IDS, None))
    assert one.config._attn_implementation == "sdpa"


def test_a_model_with_sliding_layers_answers_several_questions_and_is_saved(tmp_path: Path) -> None:
    """The prompt is longer than the window, so what slid out of it cannot be cropped back."""
    model = build("gemma3")
    cache = cached(model, IDS, "keydiff", 0.5)
    again = loaded(cache, tmp_path, model)
    asked = [(cache, IDS[:, :5]), (cache, IDS[:, 5:9]), (cache, IDS[:, :5]), (again, IDS[:, :5])]
    first, _, third, of_file = (
        ask(model, tiny_tokenizer(), each, question, 4).hidden_states for each, question in asked
    )
    assert torch.equal(first, third) and torch.equal(first, of_file) and cache.get_seq_length() == 48
    whole = cached(model, IDS, None)
    assert whole.nbytes == whole.nbytes_full  # of a window that is a view, the window alone
    assert torch.equal(read(model, IDS[:, :5], again), read(model, IDS[:, :5], cache))


@pytest.mark.parametrize(
    "config",
    [
        Gemma4TextConfig(
            **SMALL,
            **LAYERS,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
        ),
        GPTNeoXConfig(**NO_HEAD_DIM),
    ],
    ids=["others in some layers", "others than the configuration says"],
)
def test_a_file_is_loaded_however_many_kv_heads_the_layers_have(tmp_path: Path, config: Any) -> None:
    model = random_model(config)
    cache = cached(model, IDS, "keydiff", 0.5)
    again = loaded(cache, tmp_path, model)
    assert torch.equal(read(model, IDS[:, :5], again), read(model, IDS[:, :5], cache))
