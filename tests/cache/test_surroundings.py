"""What people put around a model and a cache: wrappers,
threads, other precisions, images, gradients, an interruption.
"""

import copy
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import tiny_llama
from tools.reading import IDS, cached, generate, loaded, padded, read, read_in, refused, same, small
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM

from evictionary import EvictingCache
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve
from evictionary.models import versions


class Adapted(torch.nn.Module):
    """As PEFT wraps a model: it answers to the model's names, and calls it past itself."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "base_model" else getattr(self.base_model, name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.base_model.forward(*arguments, **named)


@pytest.mark.parametrize(
    "method", ["keydiff", "snapkv+ada_kv", "momentkv", "expected_attention", "gvote", "criticalkv"]
)
def test_a_wrapped_model_with_a_padded_batch_keeps_what_the_model_keeps(
    model: LlamaForCausalLM, method: str
) -> None:
    ids, given = padded(30, 19)
    found = []
    for each in (Adapted(Adapted(model)), model):
        with EvictingCache(each, method, 0.5, small(method)) as cache:
            found.append((generate(each, ids, cache, mask=given["attention_mask"]), cache.layers[1].lengths))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@torch.no_grad()
def test_arguments_by_place_are_those_by_name(model: LlamaForCausalLM) -> None:
    ids, given = padded(30, 19)
    found, wanted = (EvictingCache(model, "keydiff", 0.5) for _ in range(2))
    model.model(ids, *given.values(), found)
    model.model(ids, **given, **versions.argument(wanted))
    same(found, wanted)


def test_a_wrapped_model_reads_its_prompt_twice_and_loads_a_file(
    tmp_path: Any, model: LlamaForCausalLM
) -> None:
    wrapped: Any = Adapted(model)
    cache = EvictingCache(wrapped, "kvzip", 0.5)
    generate(wrapped, IDS, cache)
    assert loaded(cache, tmp_path, wrapped).tokens_kept == cache.tokens_kept == 30 + 7


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 2), "a name", None])
def test_what_holds_no_model_is_refused(other: Any) -> None:
    refused(lambda: EvictingCache(other), rf"model: got {type(other).__name__}, wanted a transformers model")


METHODS = ["keydiff", "snapkv+ada_kv", "momentkv", None]


def answer(model: LlamaForCausalLM, method: str | None) -> list[list[int]]:
    """The prompt and four more tokens, with a cache of its own."""
    return generate(model, IDS, EvictingCache(model, method, 0.5, small(method or "")), count=4).tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("method", METHODS[:3])
def test_another_thread_may_generate_at_any_moment(
    method: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread stops inside the attention of a layer until another has generated, from its first token
    to its last.
    """
    model = tiny_llama(attn_implementation=attention)
    wanted = {each: answer(model, each) for each in METHODS}
    inside, done, first = threading.Event(), threading.Event(), threading.get_ident()
    place = (
        (AttentionInterface._global_mapping, "sdpa")
        if attention == "sdpa"
        else (vars(sys.modules[type(model).__module__]), "eager_attention_forward")
    )
    own = place[0][place[1]]

    def stopping(*arguments: Any, **named: Any) -> Any:
        if threading.get_ident() == first and not inside.is_set():
            inside.set()
            assert done.wait(60)
        return own(*arguments, **named)

    def others() -> dict[str | None, list[list[int]]]:
        try:
            assert inside.wait(60)
            return {each: answer(model, each) for each in METHODS}
        finally:
            done.set()

    monkeypatch.setitem(*place, stopping)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(others)
        assert answer(model, method) == wanted[method]
        assert found.result() == wanted
    assert model.config._attn_implementation == attention


def test_threads_that_start_together_leave_the_model_as_it_was(model: LlamaForCausalLM) -> None:
    wanted = [[answer(model, each)] * 4 for each in METHODS]
    together = threading.Barrier(len(METHODS))

    def run(method: str | None) -> list[list[list[int]]]:
        together.wait(60)
        return [answer(model, method) for _ in range(4)]

    with ThreadPoolExecutor(len(METHODS)) as pool:
        assert list(pool.map(run, METHODS)) == wanted


@pytest.mark.parametrize("method", ["knorm+ada_kv", "keydiff+moments", "momentkv"])
def test_another_model_object_reads_nothing_from_a_cache_that_needs_its_model(
    tmp_path: Path, model: LlamaForCausalLM, method: str
) -> None:
    """A cell of a notebook that is run twice: the same weights, and another object, whose attention would
    see a part.
    """
    first = tiny_llama()
    cache = cached(first, IDS, method, 0.5)
    of_file = loaded(cache, tmp_path, model)
    wanted = read(first, IDS[:, :3], copy.deepcopy(cache))
    for is_there in (True, False):
        if not is_there:
            del first
            gc.collect()
        refused(
            lambda: read(model, IDS[:, :3], cache),
            r"cache: got tokens of another model, wanted .* loaded again",
            RuntimeError,
        )
        assert cache.get_seq_length() == 60
    assert torch.equal(read(model, IDS[:, :3], of_file), wanted)


@pytest.mark.parametrize(
    ("method", "every"), [("keydiff", 0), ("keydiff", 4), ("knorm+ada_kv", 0), ("momentkv", 1)]
)
@pytest.mark.parametrize("prompt", [False, True])
def test_a_forward_that_was_interrupted_is_noticed_by_the_next(
    model: LlamaForCausalLM, method: str, every: int, prompt: bool
) -> None:
    cache = EvictingCache(model, method, 0.5, every=every)
    if not prompt:
        read(model, IDS, cache)

    with model.model.layers[0].mlp.register_forward_hook(Mock(side_effect=KeyboardInterrupt)):
        refused(lambda: read(model, IDS[:, :5], cache), "", KeyboardInterrupt)
    refused(
        lambda: read(model, IDS[:, :5], cache),
        r"cache: got layers that have read .* tokens, wanted one number",
        RuntimeError,
    )
    cache.reset()
    read(model, IDS, cache)
    assert cache.tokens_kept == 30


@pytest.mark.parametrize(
    "method", ["keydiff", "knorm+ada_kv", "keydiff+moments", "knorm+ada_kv+moments", "momentkv"]
)
def test_gradients_go_through_what_is_kept(method: str) -> None:
    """Four later tokens have the logits of a cache without a graph, and gradients of every weight."""
    model = tiny_llama()
    wanted = read(model, IDS[:, :4], cached(model, IDS, method, 0.5, every=0))
    cache = EvictingCache(model, method, 0.5, every=0)
    model(IDS, **versions.argument(cache))
    logits = model(IDS[:, :4], **versions.argument(cache)).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    logits.sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters()
    )


@pytest.mark.parametrize("method", [*catalogue.names(), "snapkv+ada_kv", "keydiff+moments"])
def test_under_autocast_a_method_keeps_and_says_what_it_does_in_bfloat16(
    model: LlamaForCausalLM, method: str
) -> None:
    """With nothing removed the logits are as near to those of float32 as they are without our cache."""
    exact = read_in(model, DynamicCache(), [40, 1, 4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if not {"own_budget", "moving_window"} & resolve(method).traits:
            off = (read_in(model, DynamicCache(), [40, 1, 4]) - exact).abs().max()
            whole = read_in(model, EvictingCache(model, method, 0.0, small(method)), [40, 1, 4])
            assert 0 < (whole - exact).abs().max() <= 2 * off
        half = EvictingCache(model, method, 0.5, small(method))
        assert generate(model, IDS, half).shape == (1, 68)
    assert half.layers[0].keys.dtype == half.layers[0].values.dtype == torch.bfloat16
    assert (half.nbytes < half.nbytes_full) == (not resolve(method).is_per_query)


@pytest.mark.parametrize("tokens", [0, 40])
@pytest.mark.parametrize("method", ["keydiff", "momentkv", "knorm+ada_kv"])
def test_another_attention_after_the_cache_was_made_is_refused_before_a_token_is_read(
    method: str, tokens: int
) -> None:
    model = tiny_llama()
    cache = EvictingCache(model, method, 0.5, every=4)
    if tokens:
        read(model, IDS[:, :tokens], cache)
    model.set_attn_implementation("eager")
    refused(
        lambda: read(model, IDS[:, :3], cache),
        "model: got the attention eager, chosen after the cache was made",
    )
    assert cache.get_seq_length() == tokens


@pytest.mark.parametrize("every", [0, 4])
def test_a_second_prompt_that_is_shorter_than_the_first_says_what_to_do(
    model: LlamaForCausalLM, every: int
) -> None:
    with EvictingCache(model, "keydiff", 0.5, every=every) as cache:
        generate(model, IDS, cache)
        refused(
            lambda: generate(model, IDS[:, :20], cache),
            r"prompt: got no new token after the 67 .* wanted one: .* or cache.reset\(\) before it",
        )
        cache.reset()
        assert generate(model, IDS[:, :20], cache).shape == (1, 28)


@pytest.mark.parametrize("every", [0, 10])
def test_a_text_longer_than_the_models_context_is_said_once(every: int) -> None:
    model = tiny_llama(max_position_embeddings=64)
    cache = cached(model, IDS.repeat(1, 2), "keydiff", budget=20, every=every, sizes=[30, 34])
    with pytest.warns(UserWarning, match="longer than the model's context of 64 tokens") as said:
        read_in(model, cache, [1, 1, 9])
    assert len([each for each in said if "context" in str(each.message)]) == 1


OFFERED: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams that are sampled": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "guidance": {"guidance_scale": 1.5},
    "a prompt and answers in one": {"num_return_sequences": 2, "num_beams": 2, "logits_to_keep": 1},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "watermark": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an assistant": ({"assistant_model": None}, "got assisted generation"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "got assisted generation"),
    "early exit": ({"assistant_early_exit": 1}, "got assisted generation"),
    "drafts of its own": ({"use_mtp": True}, "got assisted generation"),
    "a static cache": ({"cache_implementation": "static"}, "Passing both `cache_implementation`"),
    "a quantized cache": ({"cache_implementation": "quantized"}, "Passing both `cache_implementation`"),
    "an offloaded cache": ({"cache_implementation": "offloaded"}, "Passing both `cache_implementation`"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "requires `trust_remote_code=True`"),
    "DoLa": ({"dola_layers": "low"}, "requires `trust_remote_code=True`"),
    "groups of beams": (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        "requires `trust_remote_code=True`",
    ),
    "no cache": ({"use_cache": False}, "use_cache: got False with a cache, wanted True or no cache"),
}


@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv"])
@pytest.mark.parametrize("way", OFFERED)
def test_every_way_to_generate_works(model: LlamaForCausalLM, way: str, method: str) -> None:
    """As with nothing removed: rows, tokens, and one cache of half of the prompt and the answer."""
    cache = EvictingCache(model, method, 0.5)
    output = generate(model, IDS, cache, **OFFERED[way])
    assert getattr(output, "sequences", output).shape == (OFFERED[way].get("num_return_sequences", 1), 68)
    assert cache.tokens_kept == 30 + 7
    assert not cache.layers[0].is_croppable  # or on Apple's GPUs transformers would read a token too many


@pytest.mark.parametrize("way", REFUSED)
def test_every_other_way_is_refused_before_the_first_token(model: LlamaForCausalLM, way: str) -> None:
    (settings, message), draw = REFUSED[way], Mock()
    given = settings | ({"assistant_model": tiny_llama()} if "assistant_model" in settings else {})
    refused(
        lambda: generate(model, IDS, EvictingCache(model, "keydiff"), logits_processor=[draw], **given),
        message,
        ValueError,
    )
    draw.assert_not_called()
