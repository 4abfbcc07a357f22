"""The evicting cache: what it stores, where the tokens are, and that it leaves the model as it found it."""

import copy
import gc
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools.reading import cached, generate, masked_logits, places, read, refused
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from evictionary import reference
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import MethodError, UsageError
from evictionary.evaluation.questions import prefill
from evictionary.optimized import h2o

QUERY_METHOD = "def score(queries, keys):\n    return (queries.reshape(*keys.shape[:2], -1, *keys.shape[2:]) ** 2).sum((2, 4))\n"


def write(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.9])
def test_the_tensors_shrink_to_the_budget(model: LlamaForCausalLM, prompt: torch.Tensor, ratio: float) -> None:
    cache = cached(model, prompt, "keydiff", ratio)
    kept = reference.selection.budget(40, ratio)
    for layer in cache.layers:
        assert tuple(layer.keys.shape) == tuple(layer.values.shape) == (1, 2, kept, 8)
    assert cache.nbytes == 2 * 2 * 2 * kept * 8 * 4
    assert cache.nbytes_full == 2 * 2 * 2 * 40 * 8 * 4


def test_what_is_kept_is_what_the_method_keeps_in_position_order(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    full = DynamicCache()
    read(model, prompt, full)
    cache = cached(model, prompt, "keydiff", 0.5)
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        kept = places(reference.selection.top_k(reference.keydiff.score(whole.keys.double().numpy()), 20))
        for head, positions in enumerate(kept):
            assert layer.positions[0, head].tolist() == positions
            assert torch.equal(layer.keys[0, head], whole.keys[0, head, positions])
            assert torch.equal(layer.values[0, head], whole.values[0, head, positions])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_removed_generates_what_no_cache_generates(prompt: torch.Tensor, attention: str) -> None:
    model = tiny_llama(attn_implementation=attention)
    assert torch.equal(generate(model, prompt, EvictingCache(model, "keydiff", 0.0)), generate(model, prompt))


def test_the_prompt_attends_in_full(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    assert torch.equal(read(model, prompt, EvictingCache(model, "keydiff", 0.9)), read(model, prompt, DynamicCache()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pieces", [(5,), (1, 1, 3)])
def test_later_tokens_attend_causally_at_their_true_positions(attention: str, pieces: tuple[int, ...]) -> None:
    """Against attention over all tokens with the evicted ones masked out by hand."""
    model = tiny_llama(attn_implementation=attention)
    ids = torch.randint(3, 259, (1, 45), generator=torch.Generator().manual_seed(2))
    cache = cached(model, ids[:, :40], "streaming_llm", 0.5)
    got = torch.cat([read(model, piece, cache) for piece in ids[:, 40:].split(list(pieces), dim=1)], dim=1)
    visible = torch.ones(45, 45).tril()
    kept = torch.zeros(45, dtype=torch.bool)
    kept[:4] = kept[24:] = True  # the sinks and the most recent of the prompt, and everything later
    visible[40:] *= kept
    wanted = masked_logits(model, ids, visible.bool())[:, 40:]
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert cache.get_seq_length() == 45
    assert cache.layers[0].positions[0, 0].tolist() == [*range(4), *range(24, 45)]


def test_bfloat16_and_a_batch_of_equal_lengths(prompt: torch.Tensor) -> None:
    model = tiny_llama().to(torch.bfloat16)
    batch = torch.cat([prompt, prompt.flip(1)])
    cache = EvictingCache(model, "keydiff", 0.5)
    assert generate(model, batch, cache).shape[1] == 48
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert tuple(cache.layers[0].keys.shape) == (2, 2, 27, 8)


@pytest.mark.parametrize(("method", "options"), [("keydiff", {}), ("gvote", {"p": 0.3})])
def test_rows_of_a_batch_are_compressed_each_for_itself(
    model: LlamaForCausalLM, prompt: torch.Tensor, method: str, options: dict[str, Any]
) -> None:
    """Rows of one length, without padding, together or alone; GVote draws the same noise for each."""
    both, alone = (EvictingCache(model, method, 0.5, options) for _ in range(2))
    read(model, torch.cat([prompt.flip(1), prompt]), both)
    read(model, prompt, alone)
    for together, one in zip(both.layers, alone.layers, strict=True):
        _, _, positions, filled = together.contents()
        _, _, own_positions, own_filled = one.contents()
        assert torch.equal(positions[1][filled[1]], own_positions[0][own_filled[0]])
        assert torch.equal(filled[1].sum(dim=-1), own_filled[0].sum(dim=-1))


def test_beam_search_keeps_positions_with_their_rows(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    whole = generate(model, prompt, EvictingCache(model, "keydiff", 0.0), num_beams=3)
    assert torch.equal(whole, generate(model, prompt, num_beams=3))
    cache = cached(model, torch.cat([prompt, prompt.flip(1)]), "keydiff", 0.5)
    first, second = cache.layers[0].positions.clone()
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    assert torch.equal(cache.layers[0].positions, torch.stack([second, first, first]))
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].positions[:2], torch.stack([second, second]))


def test_several_questions_do_not_see_one_another(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = cached(model, prompt, "keydiff", 0.5)
    first, second = torch.tensor([[7, 8, 9]]), torch.tensor([[20, 21]])
    alone = read(model, second, copy.deepcopy(cache))
    read(model, first, cache)
    cache.crop(-3)
    assert torch.equal(read(model, second, cache), alone)
    cache.crop(-2)
    assert cache.get_seq_length() == 40
    assert cache.nbytes == 2 * 2 * 2 * 20 * 8 * 4


def test_compressed_tokens_cannot_be_cropped(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = cached(model, prompt, "keydiff", 0.5)
    refused(lambda: cache.crop(-1), "cannot be restored", ValueError)


def test_a_crop_that_one_layer_refuses_changes_no_layer(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = cached(model, prompt, "keydiff", 0.5)
    read(model, prompt[:, :3], cache)
    cache._compress(1)
    refused(lambda: cache.crop(-1), "crop: got -1, wanted a number from 0 to 0", ValueError)
    assert [layer.seen for layer in cache.layers] == [43, 43]


def test_a_prefilled_cache_is_compressed_as_the_prompt_is(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    direct = cached(model, prompt, "lagkv", 0.5, {"lag_size": 8, "sink_size": 4})
    full = DynamicCache()
    read(model, prompt, full)
    later = EvictingCache.from_prefilled(model, full, "lagkv", 0.5, {"lag_size": 8, "sink_size": 4})
    for one, other in zip(direct.layers, later.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.positions, other.positions)
    assert full.layers[0].keys.shape[2] == 40
    refused(lambda: EvictingCache.from_prefilled(model, direct, "keydiff"), "wanted all tokens")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_queries_are_captured_after_rope_and_only_for_the_prompt(tmp_path: Path, prompt: torch.Tensor, attention: str) -> None:
    model = tiny_llama(attn_implementation=attention)
    method = write(tmp_path, QUERY_METHOD)
    plain = generate(model, prompt, EvictingCache(model, None))
    cache = EvictingCache(model, method, 0.5, record=("queries", "hidden_states"))
    other = EvictingCache(model, method, 0.0)  # both record at once, and each sees its own prompt
    assert model.config._attn_implementation != attention
    assert torch.equal(generate(model, prompt.flip(1), other), generate(model, prompt.flip(1)))
    read(model, prompt, cache)
    assert model.config._attn_implementation == attention
    assert torch.equal(generate(model, prompt), plain)
    for index, layer in enumerate(model.model.layers):
        recorded = cache.recorded[index]
        queries = layer.self_attn.q_proj(recorded["hidden_states"]).view(1, 40, 4, 8).transpose(1, 2)
        assert tuple(recorded["queries"].shape) == (1, 4, 40, 8)
        assert torch.equal(recorded["queries"][:, :, 0], queries[:, :, 0])  # RoPE turns nothing at position 0
        assert torch.allclose(recorded["queries"].norm(dim=-1), queries.norm(dim=-1), rtol=1e-5)
    again = EvictingCache.from_prefilled(model, cached(model, prompt, None, record=("queries",)), method, 0.5)
    assert torch.equal(again.layers[1].positions, cache.layers[1].positions)
    refused(lambda: EvictingCache.from_prefilled(model, cached(model, prompt, None), method, 0.5), "record=")
    in_parts = cached(model, prompt[:, :30], None, record=("queries",))
    read(model, prompt[:, 30:], in_parts)
    refused(
        lambda: EvictingCache.from_prefilled(model, in_parts, method, 0.5),
        "got queries of 30 of 40 tokens in layer 0, wanted a prompt that was read in one forward",
    )


@pytest.mark.parametrize("method", ["snapkv", "gvote"])
def test_a_prefilled_cache_compresses_again_as_one_that_read_the_prompt(
    model: LlamaForCausalLM, prompt: torch.Tensor, method: str
) -> None:
    """It remembers the prompt's last queries and hidden states: four new tokens alone have too few."""
    full = cached(model, prompt, None, record=("queries", "hidden_states"))
    direct = cached(model, prompt, method, 0.5, every=4)
    later = EvictingCache.from_prefilled(model, full, method, 0.5, every=4)
    for cache in (direct, later):
        read(model, prompt[:, :4], cache)
    for one, other in zip(direct.layers, later.layers, strict=True):
        for ours, theirs in zip(one.contents(), other.contents(), strict=True):
            assert torch.equal(ours, theirs)


def test_h2o_adds_up_the_attention_of_the_prompt_while_it_is_computed(
    prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products are computed once, where the model's own attention has no mask and no gradient; the result is the same."""
    prompts = torch.cat([prompt.flip(1), prompt])
    caches = {}
    for attention in ("sdpa", "eager"):
        model = tiny_llama(attn_implementation=attention)
        full = cached(model, prompts, None, record=("queries",))
        caches[attention, "later"] = EvictingCache.from_prefilled(model, full, "h2o", 0.5)
        with monkeypatch.context() as patch:
            if attention == "sdpa":
                patch.setattr(h2o, "score", None)
            caches[attention, "once"] = cached(model, prompts, "h2o", 0.5)
    learning = tiny_llama()
    differentiated = EvictingCache(learning, "h2o", 0.5)
    learning(prompts, past_key_values=differentiated).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in learning.parameters())
    wanted = caches["eager", "later"]
    for cache in (*caches.values(), differentiated):
        for layer, like in zip(cache.layers, wanted.layers, strict=True):
            assert torch.equal(layer.positions, like.positions)
            assert torch.allclose(layer.values, like.values, atol=1e-5)


def test_h2o_refuses_a_prompt_that_is_not_finite(prompt: torch.Tensor) -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = math.nan
    refused(lambda: cached(model, prompt, "h2o", 0.5), "values: got NaN or infinite numbers in layer 1", MethodError)


def test_recorded_queries_go_with_their_rows(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    full = cached(model, torch.cat([prompt.flip(1), prompt]), None, record=("queries",))
    direct = EvictingCache.from_prefilled(model, full, "snapkv", 0.5)
    full.reorder_cache(torch.tensor([1]))
    assert torch.equal(EvictingCache.from_prefilled(model, full, "snapkv", 0.5).layers[0].keys, direct.layers[0].keys[1:])


def test_hidden_states_reach_the_method(tmp_path: Path, model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    text = "def score(keys, hidden_states, layer_index, num_layers):\n    assert hidden_states.shape == (1, 40, 32)\n"
    cache = cached(model, prompt, write(tmp_path, text + "    return keys.sum(-1)\n"), 0.5)
    assert cache.tokens_kept == 20


def test_hooks_go_with_close_with_the_block_and_with_the_cache(tmp_path: Path, model: LlamaForCausalLM) -> None:
    method = write(tmp_path, "def score(keys, queries, hidden_states):\n    return keys.sum(-1)\n")
    EvictingCache(model, method).close()
    with EvictingCache(model, method):
        assert model.config._attn_implementation.startswith("evictionary")
    assert model.config._attn_implementation == "sdpa"
    cache = EvictingCache(model, method)
    del cache
    gc.collect()  # the fixture checks that nothing is left in the model


def test_a_closed_cache_says_why_it_cannot_compress(tmp_path: Path, model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = EvictingCache(model, write(tmp_path, QUERY_METHOD))
    cache.close()
    refused(lambda: read(model, prompt, cache), "after the cache was closed", RuntimeError)


def test_reset_waits_for_another_prompt(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = EvictingCache(model, "keydiff", 0.5)
    first = generate(model, prompt, cache)
    cache.reset()
    assert cache.nbytes == 0
    assert torch.equal(generate(model, prompt, cache), first)


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_llama()}])
@pytest.mark.parametrize("every", [0, 2])
def test_assisted_generation_is_refused_before_the_first_token(
    model: LlamaForCausalLM, prompt: torch.Tensor, drafts: dict[str, Any], every: int
) -> None:
    with EvictingCache(model, "keydiff", 0.5, every=every) as cache:
        refused(lambda: generate(model, prompt, cache, count=20, **drafts), "got assisted generation")
        assert cache.get_seq_length() == 0
    wanted = generate(model, prompt, count=20)
    assert torch.equal(generate(model, prompt, EvictingCache(model, None), count=20, **drafts), wanted)


def test_later_turns_are_compressed_when_asked(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = EvictingCache(model, "keydiff", budget=16)
    said = generate(model, prompt, cache, count=8)
    cache.compress()
    assert (cache.tokens_kept, cache.get_seq_length()) == (16, said.shape[1] - 1)
    both = torch.cat([said, prompt], dim=1)
    again = generate(model, both, cache, count=8)
    assert cache.get_seq_length() == again.shape[1] - 1
    cache.compress()
    assert cache.tokens_kept == 16
    ragged = EvictingCache(model, "knorm+ada_kv", budget=16)
    generate(model, both, ragged, count=8)
    ragged.compress()
    assert ragged.tokens_kept == 16
    assert generate(model, torch.cat([again, prompt], dim=1), ragged, count=4).shape[1] == again.shape[1] + prompt.shape[1] + 4
    for method in ("snapkv", "lagkv", "h2o"):
        once = EvictingCache(model, method, 0.5)
        generate(model, prompt, once, count=2)
        with pytest.raises(UsageError, match="wanted a cache made with every=N"):
            once.compress()


def test_the_last_block_is_compressed_whatever_its_length(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    for method in ("keydiff", "snapkv", "expected_attention"):
        cache = EvictingCache(model, method, budget=12, every=16)
        prefill(model, prompt, cache, 16)
        assert (cache.tokens_kept, cache.get_seq_length()) == (12, prompt.shape[1])


def test_a_prompt_in_blocks_without_every_is_warned_of(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="compressed the first 8 tokens, and 16 later ones stay"):
        prefill(model, prompt, EvictingCache(model, "keydiff", budget=8), 8)


def test_a_cache_cannot_be_pickled(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    refused(lambda: torch.save(cached(model, prompt, "keydiff"), io.BytesIO()), r"wanted cache\.save\(path\)", TypeError)


def test_another_model_of_the_same_shape_does_not_get_the_cache(
    model: LlamaForCausalLM, prompt: torch.Tensor, tmp_path: Path
) -> None:
    cached(model, prompt, "keydiff").save(tmp_path / "cache")
    other = tiny_llama()
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight += 1
    refused(lambda: EvictingCache.load(tmp_path / "cache", other), "with other weights")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv"])
def test_a_compiled_forward_gives_the_same(model: LlamaForCausalLM, prompt: torch.Tensor, method: str) -> None:
    wanted = generate(model, prompt, EvictingCache(model, method, 0.5))
    compiled = tiny_llama()
    compiled.forward = torch.compile(compiled.forward, backend="eager")  # type: ignore[method-assign]
    assert torch.equal(generate(compiled, prompt, EvictingCache(compiled, method, 0.5)), wanted)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = cached(model, prompt, "keydiff")
    refused(lambda: cache.save(tmp_path / "no" / "cache"), r"path: got .*no/cache, wanted a file that can be written")


def test_the_random_baseline_is_seeded(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    full = cached(model, prompt, None)
    one, same, other = (EvictingCache.from_prefilled(model, full, "random", 0.5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.layers[0].positions, same.layers[0].positions)
    assert not torch.equal(one.layers[0].positions, other.layers[0].positions)
    assert not torch.equal(one.layers[0].positions, one.layers[1].positions)


def test_nan_keys_are_named(prompt: torch.Tensor) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    refused(
        lambda: read(model, prompt, EvictingCache(model, "keydiff")), "keys: got NaN or infinite numbers in layer 1", MethodError
    )


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"compression_ratio": 1.0}, "compression_ratio: got 1.0"),
        ({"compression_ratio": -0.1}, "compression_ratio"),
        ({"compression_ratio": float("nan")}, "compression_ratio"),
        ({"budget": 0}, "budget: got 0"),
        ({"budget": 2.5}, "budget: got 2.5"),
        ({"method": "keydif"}, "did you mean keydiff"),
        ({"options": {"sinks": 3}}, "keydiff has no such option"),
        ({"method": None, "options": {"sinks": 3}}, "options"),
        ({"record": ("scores",)}, "record: got scores"),
    ],
)
def test_bad_arguments_are_value_errors(model: LlamaForCausalLM, named: dict[str, Any], message: str) -> None:
    refused(lambda: EvictingCache(model, **named), message, ValueError)


def test_a_budget_larger_than_the_cache_keeps_all(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = cached(model, prompt, "keydiff", budget=1000)
    assert cache.tokens_kept == 40


def test_prompts_that_cannot_be_read(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = EvictingCache(model, "keydiff")
    refused(lambda: model(prompt[:, :0], past_key_values=cache), "got no tokens")
    refused(lambda: read(model, prompt.repeat(1, 7), cache), r"got 280 tokens, wanted at most the model's context of 256")
    mask = torch.ones_like(prompt)
    mask[0, -1] = 0
    refused(lambda: model(prompt, attention_mask=mask, past_key_values=cache), "got padding after tokens")


def test_models_that_cannot_be_compressed() -> None:
    small: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    refused(lambda: EvictingCache(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=30))), "no rotary positions")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    refused(
        lambda: EvictingCache(MistralForCausalLM(MistralConfig(**small, **heads, sliding_window=8))),
        "a sliding window in every layer",
    )
