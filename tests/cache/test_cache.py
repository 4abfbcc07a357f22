"""The evicting cache: what it stores, where the tokens are, and that it leaves the model as it found it."""

import gc
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools.reading import cached, generate, loaded, padded, positions_of, read, refused, same, written
from transformers import DynamicCache, LlamaForCausalLM

from evictionary import EvictingCache, reference
from evictionary.errors import MethodError
from evictionary.evaluation.questions import prefill
from evictionary.models import versions
from evictionary.optimized import h2o

QUERY_METHOD = (
    "def score(queries, keys):\n    return (queries.reshape(*keys.shape[:2], -1, *keys.shape[2:]) "
    "** 2).sum((2, 4))\n"
)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.9])
def test_the_tensors_shrink_to_the_budget(
    model: LlamaForCausalLM, prompt: torch.Tensor, ratio: float
) -> None:
    cache = cached(model, prompt, "keydiff", ratio)
    kept = reference.selection.budget(40, ratio)
    assert {tuple(states.shape) for layer in cache.layers for states in (layer.keys, layer.values)} == {
        (1, 2, kept, 8)
    }
    assert (cache.nbytes, cache.nbytes_full) == (2 * 2 * 2 * kept * 8 * 4, 2 * 2 * 2 * 40 * 8 * 4)


def test_the_prompt_attends_in_full(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    assert torch.equal(
        read(model, prompt, EvictingCache(model, "keydiff", 0.9)), read(model, prompt, DynamicCache())
    )


@pytest.mark.parametrize(("method", "options"), [("keydiff", {}), ("gvote", {"p": 0.3})])
def test_rows_of_a_batch_are_compressed_each_for_itself(
    model: LlamaForCausalLM, prompt: torch.Tensor, method: str, options: dict[str, Any]
) -> None:
    """Rows of one length, without padding, together or alone; GVote draws the same noise for each."""
    both = cached(model, torch.cat([prompt.flip(1), prompt]), method, 0.5, options)
    both.reorder_cache(torch.tensor([1]))
    assert [*map(positions_of, both.layers)] == [
        *map(positions_of, cached(model, prompt, method, 0.5, options).layers)
    ]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_removed_generates_what_no_cache_generates(
    prompt: torch.Tensor, attention: str, beams: int
) -> None:
    model = tiny_llama(attn_implementation=attention)
    whole = generate(model, prompt, EvictingCache(model, "keydiff", 0.0), num_beams=beams)
    assert torch.equal(whole, generate(model, prompt, num_beams=beams))


def test_rows_are_repeated_with_their_positions(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = cached(model, torch.cat([prompt, prompt.flip(1)]), "keydiff", 0.5)
    before = cache.layers[0].positions.clone()
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].positions, before[[0, 0, 1, 1]])


@pytest.mark.parametrize(("held", "came"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("method", ["keydiff", "momentkv"])
def test_another_number_of_rows_is_refused_and_changes_nothing(
    model: LlamaForCausalLM, prompt: torch.Tensor, method: str, held: int, came: int
) -> None:
    cache, twin = (cached(model, prompt.expand(held, -1), method, 0.5) for _ in range(2))
    for steps in (1, 5):
        refused(
            lambda steps=steps: read(model, prompt[:, :steps].expand(came, -1), cache),
            f"batch size: got {came}, wanted {held}, the rows that the cache holds",
        )
    assert torch.equal(*(read(model, prompt[:, :5].expand(held, -1), each) for each in (cache, twin)))


def test_a_closed_cache_refuses_another_number_of_rows(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = cached(model, prompt.expand(3, -1), "keydiff", 0.5)
    cache.close()
    refused(lambda: read(model, prompt[:, :1], cache), "batch size: got 1, wanted 3")


def test_a_crop_that_one_layer_refuses_changes_no_layer(
    model: LlamaForCausalLM, prompt: torch.Tensor
) -> None:
    cache = cached(model, prompt, "keydiff", 0.5)
    read(model, prompt[:, :3], cache)
    cache._session.compress(1)
    refused(lambda: cache.crop(-1), "crop: got -1, wanted a number from 0 to 0", ValueError)
    assert [layer.seen for layer in cache.layers] == [43, 43]


def test_a_prefilled_cache_is_compressed_as_the_prompt_is(
    model: LlamaForCausalLM, prompt: torch.Tensor
) -> None:
    full, options = DynamicCache(), {"lag_size": 8, "sink_size": 4}
    read(model, prompt, full)
    direct = cached(model, prompt, "lagkv", 0.5, options)
    same(EvictingCache.from_prefilled(model, full, "lagkv", 0.5, options), direct)
    assert full.layers[0].keys.shape[2] == 40
    refused(lambda: EvictingCache.from_prefilled(model, direct, "keydiff"), "wanted all tokens")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_queries_are_captured_after_rope_and_only_for_the_prompt(
    tmp_path: Path, prompt: torch.Tensor, attention: str
) -> None:
    model = tiny_llama(attn_implementation=attention)
    method = written(tmp_path, QUERY_METHOD)
    plain = generate(model, prompt, EvictingCache(model, None))
    cache = EvictingCache(model, method, 0.5, record=("queries", "hidden_states"))
    other = EvictingCache(model, method, 0.0)  # both record at once, and each sees its own prompt
    assert model.config._attn_implementation != attention
    assert torch.equal(generate(model, prompt.flip(1), other), generate(model, prompt.flip(1)))
    read(model, prompt, cache)
    assert model.config._attn_implementation == attention and torch.equal(generate(model, prompt), plain)
    for recorded, layer in zip(cache.recorded.values(), model.model.layers, strict=True):
        queries = layer.self_attn.q_proj(recorded["hidden_states"]).view(1, 40, 4, 8).transpose(1, 2)
        turned = recorded["queries"]
        assert turned.shape == queries.shape and torch.allclose(turned.norm(dim=-1), queries.norm(dim=-1))
        assert torch.equal(turned[:, :, 0], queries[:, :, 0])  # RoPE turns nothing at position 0
    same(
        EvictingCache.from_prefilled(model, cached(model, prompt, None, record=("queries",)), method, 0.5),
        cache,
    )
    in_parts = cached(model, prompt, None, record=("queries",), sizes=[30, 10])
    for full, message in (
        (cached(model, prompt, None), "record="),
        (in_parts, "got queries of 30 of 40 tokens in layer 0, wanted a prompt that was read in one forward"),
    ):
        refused(lambda full=full: EvictingCache.from_prefilled(model, full, method, 0.5), message)


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
    same(later, direct)


def test_h2o_adds_up_the_attention_of_the_prompt_while_it_is_computed(
    prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products are computed once, where the model's own attention has no mask and no gradient; the
    result is the same.
    """
    prompts = torch.cat([prompt.flip(1), prompt])
    models = {attention: tiny_llama(attn_implementation=attention) for attention in ("eager", "sdpa")}
    full = [cached(model, prompts, None, record=("queries",)) for model in models.values()]
    caches = [
        *(
            EvictingCache.from_prefilled(*each, "h2o", 0.5)
            for each in zip(models.values(), full, strict=True)
        ),
        cached(models["eager"], prompts, "h2o", 0.5),
        EvictingCache(models["sdpa"], "h2o", 0.5),
    ]
    models["sdpa"](prompts, **versions.argument(caches[-1])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in models["sdpa"].parameters())
    monkeypatch.setattr(h2o, "score", None)
    caches += [cached(models["sdpa"], prompts, "h2o", 0.5)]
    for cache in caches[1:]:
        for layer, like in zip(cache.layers, caches[0].layers, strict=True):
            assert torch.equal(layer.positions, like.positions)
            assert torch.allclose(layer.values, like.values, atol=1e-5)


@pytest.mark.parametrize(("method", "states"), [("h2o", "values"), ("keydiff", "keys")])
@torch.no_grad()
def test_a_prompt_that_is_not_finite_is_refused_by_name(
    prompt: torch.Tensor, method: str, states: str
) -> None:
    model = tiny_llama()
    getattr(model.model.layers[1].self_attn, f"{states[0]}_proj").weight[0, 0] = math.nan
    refused(
        lambda: cached(model, prompt, method, 0.5),
        f"{states}: got NaN or infinite numbers in layer 1",
        MethodError,
    )


def test_recorded_queries_go_with_their_rows(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    full = cached(model, torch.cat([prompt.flip(1), prompt]), None, record=("queries",))
    direct = EvictingCache.from_prefilled(model, full, "snapkv", 0.5)
    for cache in (direct, full):
        cache.reorder_cache(torch.tensor([1]))
    same(EvictingCache.from_prefilled(model, full, "snapkv", 0.5), direct)


def test_hidden_states_reach_the_method(
    tmp_path: Path, model: LlamaForCausalLM, prompt: torch.Tensor
) -> None:
    text = (
        "def score(keys, hidden_states, layer_index, num_layers):\n    assert hidden_states.shape == (1, "
        "40, 32)\n"
    )
    assert cached(model, prompt, written(tmp_path, text + "    return keys.sum(-1)\n"), 0.5).tokens_kept == 20


def test_hooks_go_with_close_with_the_block_and_with_the_cache(
    tmp_path: Path, model: LlamaForCausalLM
) -> None:
    method = written(tmp_path, "def score(keys, queries, hidden_states):\n    return keys.sum(-1)\n")
    EvictingCache(model, method).close()
    with EvictingCache(model, method):
        assert model.config._attn_implementation.startswith("evictionary")
    assert model.config._attn_implementation == "sdpa"
    cache = EvictingCache(model, method)
    del cache
    gc.collect()  # the fixture checks that nothing is left in the model


def test_a_closed_cache_says_why_it_cannot_compress(
    tmp_path: Path, model: LlamaForCausalLM, prompt: torch.Tensor
) -> None:
    cache = EvictingCache(model, written(tmp_path, QUERY_METHOD))
    cache.close()
    refused(lambda: read(model, prompt, cache), "after the cache was closed", RuntimeError)


def test_reset_waits_for_another_prompt(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = EvictingCache(model, "keydiff", 0.5)
    first = generate(model, prompt, cache)
    cache.reset()
    assert cache.nbytes == 0 and torch.equal(generate(model, prompt, cache), first)


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


@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv"])
def test_later_turns_are_compressed_when_asked(
    model: LlamaForCausalLM, prompt: torch.Tensor, method: str
) -> None:
    cache, said = EvictingCache(model, method, budget=16), prompt
    for turn in range(3):
        said = generate(model, torch.cat([said, prompt], dim=1) if turn else prompt, cache, count=8)
        assert cache.get_seq_length() == said.shape[1] - 1
        cache.compress()
        assert cache.tokens_kept == 16


@pytest.mark.parametrize("method", ["snapkv", "lagkv", "h2o"])
def test_a_method_of_the_prompt_compresses_no_later_turn(
    model: LlamaForCausalLM, prompt: torch.Tensor, method: str
) -> None:
    cache = EvictingCache(model, method, 0.5)
    generate(model, prompt, cache, count=2)
    refused(cache.compress, "wanted a cache made with every=N")


@pytest.mark.parametrize("method", ["keydiff", "snapkv", "expected_attention"])
def test_the_last_block_is_compressed_whatever_its_length(
    model: LlamaForCausalLM, prompt: torch.Tensor, method: str
) -> None:
    cache = EvictingCache(model, method, budget=12, every=16)
    prefill(model, prompt, cache, 16)
    assert (cache.tokens_kept, cache.get_seq_length()) == (12, prompt.shape[1])


def test_a_prompt_in_blocks_without_every_is_warned_of(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="compressed the first 8 tokens, and 16 later ones stay"):
        prefill(model, prompt, EvictingCache(model, "keydiff", budget=8), 8)


def test_a_cache_cannot_be_pickled(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    refused(
        lambda: torch.save(cached(model, prompt, "keydiff"), io.BytesIO()),
        r"wanted cache\.save\(path\)",
        TypeError,
    )


@torch.no_grad()
def test_another_model_of_the_same_shape_does_not_get_the_cache(
    model: LlamaForCausalLM, prompt: torch.Tensor, tmp_path: Path
) -> None:
    other = tiny_llama()
    other.model.layers[0].self_attn.k_proj.weight += 1
    refused(lambda: loaded(cached(model, prompt, "keydiff"), tmp_path, other), "with other weights")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv"])
def test_a_compiled_forward_gives_the_same(
    model: LlamaForCausalLM, prompt: torch.Tensor, method: str
) -> None:
    wanted = generate(model, prompt, EvictingCache(model, method, 0.5))
    compiled = tiny_llama()
    compiled.forward = torch.compile(compiled.forward, backend="eager")  # type: ignore[method-assign]
    assert torch.equal(generate(compiled, prompt, EvictingCache(compiled, method, 0.5)), wanted)


def test_a_path_that_cannot_be_written_is_named(
    tmp_path: Path, model: LlamaForCausalLM, prompt: torch.Tensor
) -> None:
    refused(
        lambda: cached(model, prompt, "keydiff").save(tmp_path / "no" / "cache"),
        r"path: got .*no/cache, wanted a file that can be written",
    )


def test_the_random_baseline_is_seeded(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    full = cached(model, prompt, None)
    one, again, other = (
        EvictingCache.from_prefilled(model, full, "random", 0.5, seed=seed).layers for seed in (1, 1, 2)
    )
    assert positions_of(one[0]) == positions_of(again[0])
    assert positions_of(one[0]) != positions_of(other[0]) and positions_of(one[0]) != positions_of(one[1])


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
        ({"every": -1}, "every: got -1"),
        ({"every": 2.0}, "every: got 2.0"),
        ({"method": "h2o", "every": 5}, "every: got 5, wanted 0: h2o reads the queries of all tokens"),
        (
            {"method": "lagkv", "every": 1, "budget": 100},
            "budget: got 100 with every=1, wanted a compression_ratio",
        ),
    ],
)
def test_bad_arguments_are_value_errors(model: LlamaForCausalLM, named: dict[str, Any], message: str) -> None:
    refused(lambda: EvictingCache(model, **named), message, ValueError)


def test_prompts_that_cannot_be_read(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    cache = EvictingCache(model, "keydiff")
    refused(lambda: model(prompt[:, :0], **versions.argument(cache)), "got no tokens")
    refused(
        lambda: read(model, prompt.repeat(1, 7), cache),
        r"got 280 tokens, wanted at most the model's context of 256",
    )
    mask = torch.ones_like(prompt)
    mask[0, -1] = 0
    refused(
        lambda: model(prompt, attention_mask=mask, **versions.argument(cache)), "got padding after tokens"
    )
    for wrong in (mask[:, None, None], {"full_attention": None}):
        refused(
            lambda wrong=wrong: model(prompt, attention_mask=wrong, **versions.argument(cache)),
            r"\[batch, tok",
        )


def test_a_later_mask_and_a_later_image_are_refused(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """An open cache makes the mask of later tokens itself: another one would be dropped without a word."""
    cache = cached(model, prompt[:, :30], "keydiff", budget=100, every=64)
    mask = torch.ones(1, 40)
    mask[0, 32] = 0
    for named, message in (
        ({"attention_mask": mask[:, None, None]}, r"wanted \[batch, tokens\]"),
        ({"attention_mask": mask}, "wanted it before the first prompt alone"),
        ({"token_type_ids": 1 - mask.long()}, "wanted images in the first prompt alone"),
    ):
        refused(lambda named=named: model(prompt[:, 30:], **versions.argument(cache), **named), message)


def test_a_padded_cache_of_transformers_is_compressed_with_its_mask(model: LlamaForCausalLM) -> None:
    ids, given = padded(30, 20)
    full = DynamicCache()
    model(ids, **versions.argument(full), **given)
    found = EvictingCache.from_prefilled(model, full, "keydiff", 0.5, attention_mask=given["attention_mask"])
    direct = EvictingCache(model, "keydiff", 0.5)
    model(ids, **versions.argument(direct), **given)
    same(found, direct)
