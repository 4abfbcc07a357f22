"""Several threads and tasks share one model, each with caches of its own, and leave nothing behind in it."""

import asyncio
import copy
import io
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools.reading import generate, read, small
from transformers import LlamaForCausalLM

from evictionary import EvictingCache
from evictionary.methods import catalogue

IDS = torch.randint(3, 300, (1, 48), generator=torch.Generator().manual_seed(7))
METHODS = [None, *catalogue.names(), "snapkv+ada_kv", "keydiff+moments", "momentkv+ada_kv", "kvzip+ada_kv"]


def answer(model: LlamaForCausalLM, method: str | None) -> list[list[int]]:
    with EvictingCache(model, method, 0.5, small(method or "")) as cache:
        return generate(model, IDS, cache, count=3).tolist()


def hooks(model: LlamaForCausalLM) -> list[Any]:
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
    ]


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_with_caches_of_all_methods_get_their_own_answers(model: LlamaForCausalLM) -> None:
    wanted = {method: answer(model, method) for method in METHODS}

    def run(first: int) -> list[str]:
        """Every method once, in another order in each thread, and without a cache of ours in between."""
        found = []
        for method in METHODS[first:] + METHODS[:first]:
            if answer(model, method) != wanted[method]:
                found.append(str(method))
            if generate(model, IDS, count=3).tolist() != wanted[None]:
                found.append("no cache")
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(0, 4 * 5, 5))) == [[]] * 4


@pytest.mark.usefixtures("switching")
def test_tasks_share_a_model(model: LlamaForCausalLM) -> None:
    methods = ["kvzip", "compactor", "keydiff", "expected_attention", "snapkv+ada_kv", None]

    async def together() -> list[list[list[int]]]:
        return await asyncio.gather(*(asyncio.to_thread(answer, model, method) for method in 2 * methods))

    assert asyncio.run(together()) == 2 * [answer(model, method) for method in methods]


def test_a_hook_that_another_thread_is_just_setting_does_nothing(model: LlamaForCausalLM) -> None:
    """torch writes a hook and then that it takes named arguments; between the two it is called without."""
    with EvictingCache(model, "expected_attention") as cache:
        for module in model.modules():
            for flags in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs):
                flags.clear()
        assert generate(model, IDS, count=3).tolist() == generate(tiny_llama(), IDS, count=3).tolist()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("method", ["keydiff", "expected_attention", "kvzip", "momentkv"])
def test_hooks_are_set_once_for_all_caches_of_a_model(model: LlamaForCausalLM, method: str) -> None:
    first = EvictingCache(model, method)
    number = len(hooks(model))
    caches = [EvictingCache(model, method) for _ in range(5)]
    assert len(hooks(model)) == number
    for cache in (first, *caches):
        assert hooks(model)
        cache.close()
    assert not hooks(model) and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("method", ["keydiff", "expected_attention", "knorm+ada_kv", "momentkv", "kvzip"])
@pytest.mark.parametrize(
    "place",
    [
        "embed_tokens",
        "layers.0",
        "layers.0.self_attn.q_proj",
        "layers.0.self_attn.o_proj",
        "layers.0.mlp",
        "layers.1.self_attn.q_proj",
        "layers.1.self_attn",
        "layers.1.mlp",
        "norm",
    ],
)
def test_an_exception_at_any_point_of_a_prompt_leaves_no_hook(
    model: LlamaForCausalLM, method: str, place: str
) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError(place)

    cache = EvictingCache(model, method, 0.5)
    with model.model.get_submodule(place).register_forward_hook(fail), pytest.raises(ArithmeticError):
        read(model, IDS, cache)
    if len({layer.get_seq_length() for layer in cache.layers}) > 1:
        assert not hooks(model)  # it was half read
        with pytest.raises(RuntimeError, match=r"cache\.reset\(\)"):
            read(model, IDS, cache)
    cache.reset()
    assert generate(model, IDS, cache, count=3).tolist() == answer(model, method)
    cache.close()
    assert not hooks(model)


@pytest.mark.parametrize("send", ["pickle", "torch.save", "deepcopy"])
@pytest.mark.parametrize("method", ["keydiff", "expected_attention", "momentkv"])
def test_a_watched_model_can_be_sent_to_another_process(
    model: LlamaForCausalLM, method: str, send: str
) -> None:
    wanted = answer(model, method), answer(model, None)
    with EvictingCache(model, method) as cache:
        if send == "pickle":
            other = pickle.loads(pickle.dumps(model))
        elif send == "torch.save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        else:
            other = copy.deepcopy(model)
        assert cache.get_seq_length() == 0
    assert (answer(other, method), generate(other, IDS, count=3).tolist()) == wanted
    assert not hooks(other) and other.config._attn_implementation == "sdpa"
