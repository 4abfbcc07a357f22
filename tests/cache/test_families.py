"""Model families by their transformers classes, tiny and random: each is compressed, in every phase, or refused with a reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tools.families import FAMILIES, LAYERS, NO_HEAD_DIM, SMALL, build
from tools.reading import cached, generate, places, read, read_in, refused, small
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    CohereConfig,
    DbrxConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    DogeConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    GPTJConfig,
    GptOssConfig,
    HrmTextConfig,
    JetMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    NanoChatConfig,
    Olmo2Config,
    PreTrainedModel,
    Qwen3NextConfig,
    RoFormerConfig,
    SmolLM3Config,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from evictionary import reference
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.layers import EvictingLayer
from evictionary.cache.model_hooks import attention_modules
from evictionary.errors import UsageError
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
IDS = torch.randint(3, 299, (1, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_changes_nothing(family: str, attention: str) -> None:
    """Also where the cache answers for the attention itself: with the moments of nothing."""
    model = build(family, attn_implementation=attention)
    whole = read(model, IDS, None)
    for method in ("keydiff", "knorm+ada_kv", "keydiff+moments"):
        cache = EvictingCache(model, method, 0.0)
        got = read_in(model, cache, [40, 1, 1, 6], IDS)
        torch.testing.assert_close(got, whole, rtol=1e-3, atol=1e-3)
        cache.close()
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["keydiff", "expected_attention", "gvote", "momentkv", "tova", "snapkv+ada_kv+moments"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_compressed_and_generates(family: str, method: str, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    cache = EvictingCache(model, method, 0.5, small(method))
    output = generate(model, IDS, cache, count=6, min_new_tokens=1)
    assert output.shape[1] > 48
    if method != "gvote":  # random weights attend to everything alike, and GVote sets its budget by what is attended to
        assert cache.nbytes < cache.nbytes_full
    for layer in cache.layers:
        if isinstance(layer, EvictingLayer):
            assert int(layer.lengths.max()) <= 48 + 6
        else:
            assert layer.keys.shape[2] == 15  # a sliding window of 16, left alone


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_what_the_method_keeps(family: str) -> None:
    model = build(family)
    whole = cached(model, IDS, None)
    cache = EvictingCache.from_prefilled(model, whole, "keydiff", 0.5)
    for layer, full in zip(cache.layers, whole.layers, strict=True):
        if isinstance(layer, EvictingLayer):
            wanted = reference.selection.top_k(reference.keydiff.score(full.keys.double().numpy()), 24)
            assert layer.positions[0].tolist() == places(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_are_brought_back_to_before_rope_and_logits_to_one_scale(family: str) -> None:
    """What the cache records, un-rotated, is what the projection (and QK-norm) of the hidden states gives."""
    model = build(family)
    whole = cached(model, IDS, None, record=("queries", "hidden_states"))
    index = 2
    module: Any = attention_modules(model)[index]
    recorded = whole.recorded[index]
    got = future_queries.unrotated(recorded["queries"], *future_queries.rotation(model, index, torch.arange(48)))
    with torch.no_grad():
        projected = future_queries.project(model, module, recorded["hidden_states"])
    factor = future_queries.logit_factor(module, got.shape[-1])
    torch.testing.assert_close(got, projected * factor, rtol=1e-3, atol=1e-4)
    assert (abs(factor - 1) > 0.1) == (family == "gemma3")
    assert np.isfinite(factor)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(**SMALL, sliding_window=8), "a sliding window in every layer"),
        (Gemma2Config(**{**SMALL, "num_hidden_layers": 2}), "capped attention logits"),
        (
            Qwen3NextConfig(**{**SMALL, "num_hidden_layers": 2}, layer_types=["linear_attention", "full_attention"]),
            "layers of linear_attention; wanted full or sliding attention in every layer",
        ),
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "learned attention sinks"),
        (Gemma3nTextConfig(**{**SMALL, **LAYERS, **DENSE}, num_kv_shared_layers=1), "share keys"),
        (DiffLlamaConfig(**SMALL), "differential attention"),
        (DogeConfig(**SMALL), "a mask that it makes from the values"),
        (DeepseekV3Config(**{**SMALL, **LATENT}), "latent attention"),
    ],
    ids=["sliding", "capped", "linear", "sinks", "shared", "differential", "dynamic mask", "latent"],
)
def test_what_cannot_be_compressed_is_refused_and_left_as_it_was(config: Any, message: str) -> None:
    model = AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    refused(lambda: EvictingCache(model), message)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**NO_HEAD_DIM),
        SmolLM3Config(**SMALL, no_rope_layers=[1, 1, 0]),
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
    ],
    ids=["interleaved pairs", "a layer without RoPE", "a norm after RoPE", "no projection of queries alone"],
)
def test_future_queries_are_refused_where_they_would_be_others_than_the_models(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for method in ("expected_attention", "gvote"):
        with pytest.raises(UsageError, match=f"rotated by RoPE in two halves; wanted a method .* instead of {method}"):
            EvictingCache(model, method)
    cache = EvictingCache(model, "keydiff+ada_kv", 0.5)  # other methods do not mind
    assert read(model, IDS, cache).isfinite().all()
    cache.close()
    assert not model.config._attn_implementation.startswith("evictionary")


@pytest.mark.parametrize("method", ["expected_attention", "gvote"])
def test_rope_that_grows_with_the_text_grows_no_further_for_future_positions(method: str) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SMALL, "max_position_embeddings": 32}, rope_parameters=rope)).eval()
    model.config.max_position_embeddings = 256
    read(model, IDS, None)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cache = cached(model, IDS, method, 0.5)
    cache.close()
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


JETMOE = JetMoeConfig(**{**SMALL, "num_hidden_layers": 2}, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)
HRM = HrmTextConfig(**{**SMALL, "num_hidden_layers": 2})


@pytest.mark.parametrize("config", [JETMOE, HRM], ids=["jetmoe", "hrm"])
@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv", "momentkv"])
def test_a_model_that_attends_to_other_keys_is_refused_before_the_first_token(config: Any, method: str) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    drawn: list[Any] = []
    refused(
        lambda: generate(model, IDS, EvictingCache(model, method, 0.5), logits_processor=[lambda ids, scores: drawn.append(ids)]),
        r"which gives its attention other keys than the cache returned",
    )
    assert not drawn and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("config", [GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=8), RoFormerConfig(is_decoder=True)])
def test_a_model_with_an_attention_of_its_own_is_refused_by_a_true_sentence(config: Any) -> None:
    """They have rotary positions; their attention is written out, so no cache can see its queries."""
    with torch.device("meta"), pytest.raises(UsageError, match="an attention of its own that no cache can watch"):
        EvictingCache(AutoModelForCausalLM.from_config(config))


def test_rotations_by_complex_numbers_are_refused_where_they_are_needed() -> None:
    kinds = {"layer_types": ["full_attention"] * 3, "no_rope_layers": [1] * 3}
    config = Llama4TextConfig(**SMALL, **kinds, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for method in ("expected_attention", "gvote", "triattention"):
        with pytest.raises(UsageError, match=f"wanted a method that reads no future queries instead of {method}"):
            EvictingCache(model, method)
    assert generate(model, IDS, EvictingCache(model, "snapkv+ada_kv", 0.5, {"window_size": 4})).shape[1] == 56


@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv", "momentkv", "expected_attention", "gvote", "criticalkv"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_prompt_with_an_image_is_compressed(method: str, attention: str) -> None:
    """The attention of the image's tower is not ours to look at; that of the text is."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SMALL), image_token_index=299, vision_feature_layer=-1)
    torch.manual_seed(0)
    model: Any = LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation(attention)
    ids = torch.cat([IDS[:, :20] % 299, torch.full((1, 4), 299), IDS[:, 20:] % 299], dim=1)
    image = {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    whole = generate(model, ids, **image)
    assert torch.equal(generate(model, ids, EvictingCache(model, None), **image), whole)
    cache = EvictingCache(model, method, 0.5, small(method))
    assert generate(model, ids, cache, **image).shape == whole.shape
    assert cache.nbytes < cache.nbytes_full or method == "gvote"
    cache.close()
    assert model.config.vision_config._attn_implementation == model.config._attn_implementation == attention


def test_a_norm_over_all_heads_at_once_is_the_models() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Olmo2Config(**NO_HEAD_DIM)).eval()
    cache = EvictingCache(model, "gvote")
    assert read(model, IDS, cache).isfinite().all()


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
    """A flash kind on a CPU: their signature, [B, M, H, D] inside, causal to the bottom right, a mask [B, T] of padding alone."""
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
    """A prompt in blocks, later tokens alone and together, and a padded batch; flex_attention runs without its compiler."""
    rows = torch.cat([IDS, IDS.flip(1)])
    mask = torch.ones_like(rows)
    mask[1, :5] = 0
    results = []
    with torch.compiler.set_stance("force_eager"):
        for model in (build(family), with_attention(family, attention, monkeypatch)):
            before = model.config._attn_implementation
            cache = EvictingCache(model, method, 0.5, small(method))
            logits = read_in(model, cache, [40, 1, 1, 6], IDS)
            cache.close()
            whole, padded_cache = EvictingCache(model, None), EvictingCache(model, method, 0.5, small(method))
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            for each in (whole, padded_cache):  # the first 40 tokens, then 8 at once
                for part in (slice(0, 40), slice(40, 48)):
                    given = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
                    logits = torch.cat([logits, read(model, rows[:, part], each, **given)[:, -1:].flatten(0, 1)[None]], dim=1)
                each.close()
            results.append((logits, cache.tokens_kept))
            assert model.config._attn_implementation == before
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-3, atol=1e-3)
    assert results[1][1] == results[0][1]


@pytest.mark.parametrize("attention", FLASH)
def test_a_flash_kind_on_a_cpu_is_refused_in_one_sentence(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setitem(AttentionInterface._global_mapping, attention, flash_attention_forward)
    model.config._attn_implementation_internal = attention
    refused(lambda: EvictingCache(model, "keydiff"), f"on a CPU with the attention {attention}, which runs on GPUs alone; wanted")
    assert model.config._attn_implementation == attention


def test_other_attention_implementations_are_refused() -> None:
    model = build("llama")
    model.config._attn_implementation_internal = "paged|eager"
    refused(
        lambda: EvictingCache(model, "keydiff"),
        r"with the attention paged\|eager, wanted attn_implementation='sdpa', 'eager', 'flex",
    )
    assert model.config._attn_implementation == "paged|eager"


def test_models_that_share_a_config_are_both_left_as_they_were() -> None:
    one = build("llama")
    other = type(one)(one.config).eval()
    caches = [EvictingCache(model, "knorm+ada_kv", 0.5) for model in (one, other)]
    for model, cache in zip((one, other), caches, strict=True):
        assert torch.equal(read(model, IDS, cache), read(model, IDS, None))
    for cache in caches:
        cache.close()
    assert one.config._attn_implementation == "sdpa"


class _Bytes:
    eos_token_id = None

    def decode(self, token_ids: list[int], **named: Any) -> str:
        return str(token_ids)


def test_a_model_with_sliding_layers_answers_several_questions_and_is_saved(tmp_path: Path) -> None:
    """The prompt is longer than the window, so what slid out of it cannot be cropped back."""
    model = build("gemma3")
    cache = cached(model, IDS, "keydiff", 0.5)
    cache.save(tmp_path / "cache")
    loaded = EvictingCache.load(tmp_path / "cache", model)
    first, _, third = (ask(model, _Bytes(), cache, question, 4) for question in (IDS[:, :5], IDS[:, 5:9], IDS[:, :5]))
    assert torch.equal(first.hidden_states, third.hidden_states)
    assert cache.get_seq_length() == 48
    whole = cached(model, IDS, None)
    assert whole.nbytes == whole.nbytes_full  # of a window that is a view, the window alone
    assert torch.equal(ask(model, _Bytes(), loaded, IDS[:, :5], 4).hidden_states, first.hidden_states)
    assert torch.equal(read(model, IDS[:, :5], loaded), read(model, IDS[:, :5], cache))


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=30)
    refused(lambda: EvictingCache(T5ForConditionalGeneration(config)), "an encoder-decoder")
