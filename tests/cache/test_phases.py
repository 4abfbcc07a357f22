"""All the phases of a cache: blocks, decoding, ragged heads, padded batches, moments; against the
reference, or masks by hand.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from tools.reading import (
    IDS,
    after,
    cached,
    generate,
    loaded,
    near,
    padded,
    places,
    positions_of,
    read,
    read_in,
    refused,
    same_moments,
    small,
    written,
)
from transformers import DynamicCache, LlamaForCausalLM

from evictionary import EvictingCache, reference
from evictionary.cache import checks, file, layers, partial_attention, saved
from evictionary.cache.model_hooks import attention_modules
from evictionary.errors import MethodError
from evictionary.evaluation.questions import prefill
from evictionary.methods import catalogue
from evictionary.methods.method import OBSERVED, Request
from evictionary.methods.resolve import resolve
from evictionary.models.load import load as load_model
from evictionary.models.weights import output_projection
from evictionary.optimized import lagkv, momentkv
from evictionary.policies import Source, expected_attention, gvote, load
from evictionary.policies.momentkv import MomentKV


def first_layer(model: LlamaForCausalLM) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of the first layer, which no eviction changes."""
    full = DynamicCache()
    read(model, IDS, full)
    return full.layers[0].keys.double().numpy(), full.layers[0].values.double().numpy()


def test_the_output_projection_of_each_head_adds_up_to_the_models(model: LlamaForCausalLM) -> None:
    """What `w_o` is for a method: the states of the heads,
    each times its own, sum to the model's projection.
    """
    module = attention_modules(model)[0]
    w_o = output_projection(module, torch.empty(8))
    states = torch.randn(len(w_o), w_o.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.einsum("hd,hdc->c", states, w_o), module.o_proj(states.flatten()))
    refused(lambda: output_projection(module.o_proj, torch.empty(8)), "Linear has no o_proj")


# blocks


@pytest.mark.parametrize("block", [1, 7, 16])
def test_keydiff_in_blocks_is_the_papers_and_never_holds_more_than_budget_and_block(
    model: LlamaForCausalLM, block: int
) -> None:
    cache = EvictingCache(model, "keydiff", budget=12, every=block)
    prefill(model, IDS, cache, block)
    wanted = reference.keydiff.process_prompt(*first_layer(model), budget=12, block_size=block)
    assert positions_of(cache.layers[0]) == wanted.positions[0].tolist()
    assert cache.peak_tokens <= 12 + block


@pytest.mark.parametrize("sizes", [(60,), (20, 20, 20), (9, 1, 30, 1, 19), (1,) * 60])
def test_lagkv_in_chunks_keeps_what_it_keeps_in_one(model: LlamaForCausalLM, sizes: tuple[int, ...]) -> None:
    settings = {"sink_size": 3, "lag_size": 8}
    cache = cached(model, IDS, "lagkv", 0.5, options=settings, every=1, sizes=sizes)
    assert positions_of(cache.layers[0]) == places(
        reference.lagkv.select(*first_layer(model), keep_ratio=0.5, **settings)
    )


def test_generate_reads_a_prompt_in_blocks(model: LlamaForCausalLM) -> None:
    cache = EvictingCache(model, "keydiff", budget=10, every=16)
    generate(model, IDS, cache, count=30, min_new_tokens=1, prefill_chunk_size=16)
    assert cache.get_seq_length() >= 60 and cache.peak_tokens <= 10 + 16


@pytest.mark.parametrize(("amount", "kept"), [({"compression_ratio": 0.5}, 30), ({"budget": 9}, 9)])
def test_a_ratio_counts_the_tokens_seen_and_a_budget_stays(
    model: LlamaForCausalLM, amount: dict[str, Any], kept: int
) -> None:
    assert cached(model, IDS, "knorm", every=1, sizes=[20, 20, *[1] * 20], **amount).tokens_kept == kept


# decoding


@pytest.mark.parametrize("method", catalogue.names())
def test_every_method_runs_after_the_prompt_and_generates(model: LlamaForCausalLM, method: str) -> None:
    cache = EvictingCache(model, method, 0.5, options=small(method))
    generate(model, IDS, cache, count=5)
    assert 0 < cache.tokens_kept <= 60 + 5 and (cache.nbytes < cache.nbytes_full) == (
        method in catalogue.evicting()
    )


@pytest.mark.parametrize(
    "method", ["tova", "snapkv", "expected_attention", "momentkv", "keydiff", "random", "streaming_llm"]
)
def test_methods_keep_a_fixed_budget_while_decoding(model: LlamaForCausalLM, method: str) -> None:
    cache = cached(model, IDS, method, budget=10, options=small(method), every=1, sizes=[20, 10, *[1] * 20])
    assert [layer.longest for layer in cache.layers] == [10, 10]
    assert all(len(set(row)) == 10 and row == sorted(row) for row in positions_of(cache.layers[1]))


def test_random_eviction_with_protection_keeps_the_first_and_the_last_tokens(model: LlamaForCausalLM) -> None:
    """Of a prompt and while decoding; a budget without room for all keeps the first and the newest. All
    else is `random`.
    """
    options = {"sinks": 3, "window": 6}
    cache = cached(model, IDS, "random_protected", budget=20, options=options, every=1, sizes=[50, *[1] * 5])
    for row in positions_of(cache.layers[1]):
        assert (
            row[:3] == [0, 1, 2]
            and row[-6:] == list(range(49, 55))
            and len(row) == 20
            and row != sorted(range(20))
        )
    tight = cached(model, IDS, "random_protected", budget=5, options=options)
    assert positions_of(tight.layers[0]) == [[0, 1, 2, 58, 59]] * 2
    alone, free = (
        cached(model, IDS, method, 0.5, seed=4) for method in (resolve("random_protected"), "random")
    )
    assert positions_of(alone.layers[0]) != positions_of(free.layers[0])
    assert positions_of(
        cached(model, IDS, "random_protected", 0.5, {"sinks": 0, "window": 0}, seed=4).layers[0]
    ) == positions_of(free.layers[0])
    refused(
        lambda: EvictingCache(model, "random_protected", options={"window": -1}),
        "window: got -1, wanted a whole number",
    )


def random_survivors(
    model: LlamaForCausalLM, every: int, seed: int, length: int = 28, rows: int = 64
) -> np.ndarray:
    """How many of the heads of all rows hold each position, after 12 tokens and then one by one, with a
    budget of 8.
    """
    states = torch.randn(rows, 2, length, 8, generator=torch.Generator().manual_seed(seed))
    with EvictingCache(model, "random", budget=8, every=every, seed=seed) as cache:
        for tokens in states.split([12, *[1] * (length - 12)], dim=2):
            cache.layers[0].update(tokens, tokens)
            if cache.layers[0].evicted_at == 0 or cache._session.settings.is_due(
                cache.layers[0].seen - cache.layers[0].evicted_at
            ):
                cache._session.compress(0)
        return np.bincount(cache.layers[0].positions.flatten().numpy(), minlength=length)


@pytest.mark.parametrize("every", [1, 4])
def test_random_keeps_each_token_offered_with_one_probability(model: LlamaForCausalLM, every: int) -> None:
    """Each compression keeps 8 of 12 tokens, or 8 of 9 with each new one: a token stays with the product
    of its chances.
    """
    counts = sum(random_survivors(model, every, seed) for seed in range(8))
    heads = 8 * 64 * 2
    compressions = np.array([(28 - max(position + 1, 12)) // every for position in range(28)])
    chance = (8 / (8 + every)) ** compressions * np.where(np.arange(28) < 12, 8 / 12, 1)
    chance[12:] *= 8 / (8 + every)  # a new token may be the one that goes
    assert (abs(counts - heads * chance) <= 4.5 * np.sqrt(heads * chance * (1 - chance)) + 1e-9).all()


@pytest.mark.parametrize("method", ["random", "random+ada_kv", "gvote"])
def test_what_is_drawn_is_drawn_again_by_a_copy_a_file_and_another_run(
    tmp_path: Path, model: LlamaForCausalLM, method: str
) -> None:
    cache, other = (cached(model, IDS, method, 0.5, every=4, seed=3, sizes=[20, 4]) for _ in range(2))
    for each in (cache, copy.deepcopy(cache), loaded(cache, tmp_path, model), other):
        read(model, IDS[:, 24:28], each)
        assert positions_of(each.layers[1]) == positions_of(cache.layers[1])
    if method == "random+ada_kv":  # heads that are scored alone do not draw the same numbers
        assert len(set(map(tuple, positions_of(cache.layers[1])))) == 2


COMPOSED = [
    "snapkv+ada_kv",
    "keydiff+moments",
    "knorm+ada_kv+moments",
    "momentkv+ada_kv",
    "knorm+pyramid_kv",
    "momentkv+pyramid_kv",
]


@pytest.mark.parametrize("amount", [{"compression_ratio": 0.5}, {"budget": 20}], ids=["half", "20"])
@pytest.mark.parametrize("method", [*catalogue.names(), "random", *COMPOSED])
def test_each_stored_key_is_the_key_of_the_position_it_claims(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, method: str, amount: dict[str, Any]
) -> None:
    """In all layers, after a prompt, blocks and single tokens,
    of rows with padding too; no position is claimed twice.
    """
    handed: dict[int, list[torch.Tensor]] = {}
    own = EvictingCache.update

    def update(
        cache: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **named: Any
    ) -> Any:
        if not cache._session.is_replaying:
            handed.setdefault(layer, []).append(keys)
        return own(cache, keys, values, layer, *rest, **named)

    monkeypatch.setattr(EvictingCache, "update", update)
    found = resolve(method)
    once = (
        found.traits & {"prompt_only", "per_query"}
        or found.reads & {"gates", "replay_keys", "surrogate_bias"}
        or ("recursive" in found.traits and "budget" in amount)
    )
    for every in [0] if once else [0, 1, 4]:
        alike = every == 1 or not catalogue.REPLAYED.isdisjoint(found.captured)
        ids, given = padded(*((16,) if alike else (16, 11)), width=16)
        cache = EvictingCache(model, method, options=small(method), every=every, **amount)
        handed.clear()
        read(model, ids, cache, **given)
        for step in range(1, 11):
            read(model, ids[:, step : step + 1], cache, **after(given, step))
            for index, layer in enumerate(cache.layers):
                keys, _, positions, filled = layer.contents()
                wanted = torch.cat(handed[index], dim=2).gather(
                    2, positions[..., None].expand(-1, -1, -1, 8).long()
                )
                assert torch.equal(keys[filled], wanted[filled])
                rising = positions.masked_fill(~filled, -1)
                assert ((rising[..., 1:] > rising[..., :-1]) | ~filled[..., 1:]).all()
        cache.close()


def first_layer_with_queries(model: LlamaForCausalLM) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of the first layer."""
    return cached(model, IDS, None, record=("queries",)).recorded[0][
        "queries"
    ].double().numpy(), *first_layer(model)


@pytest.mark.parametrize(("prompt_tokens", "steps"), [(30, 15), (10, 8)])
def test_momentkv_decodes_as_algorithm_1(model: LlamaForCausalLM, prompt_tokens: int, steps: int) -> None:
    """The first layer against the reference, from the same queries: what is kept, and the moments.

    Of the longer prompt some tokens are evicted at once; of the shorter one none, and yet the first eviction
    is Algorithm 1's.
    """
    queries, keys, values = first_layer_with_queries(model)
    layer = cached(model, IDS, "momentkv", budget=12, sizes=[prompt_tokens, *[1] * steps]).layers[0]
    held = [states[:, :, :prompt_tokens] for states in (keys, values)]
    moments = reference.momentkv.no_moments(keys, values)
    if prompt_tokens > 12:
        kept = reference.momentkv.select_prompt(queries[:, :, prompt_tokens - 6 : prompt_tokens], *held, 12)
        moments = reference.momentkv.update(moments, *held, ~kept)
        held = [states[kept].reshape(1, 2, 12, 8) for states in held]
    end = prompt_tokens + steps
    for place in range(prompt_tokens, end):
        step = reference.momentkv.decode_step(
            *(states[:, :, place] for states in (queries, keys, values)), *held, moments=moments, budget=12
        )
        held, moments = [step.keys, step.values], step.moments
    near([layer.keys, layer.values], held, rtol=1e-7, atol=1e-5)
    same_moments(layer, moments)
    output = partial_attention.attend(
        torch.from_numpy(queries[:, :, end : end + 1]).float(), layer, [MomentKV()]
    )[:, :, 0]
    near(
        [output],
        [reference.momentkv.attend(queries[:, :, end], *held, np.ones((1, 2, 12), dtype=bool), moments)],
    )


def test_a_step_of_momentkv_does_not_check_again_what_the_step_before_has_written(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at the new token alone: that one is refused
    if it is not finite, before anything is written.
    """
    cache, looked_at, own = cached(model, IDS[:, :30], "momentkv", budget=12), [], checks.is_finite
    monkeypatch.setattr(checks, "is_finite", lambda states: looked_at.append(states.numel()) or own(states))
    for name in ("_wide", "require_fit"):
        monkeypatch.setattr(momentkv, name, no_memory)
    read_in(model, cache, [1] * 5, IDS[:, 30:])
    assert set(looked_at) == {2 * 8}
    before = cache.layers[0].keys.clone()
    with model.model.layers[0].self_attn.v_proj.register_forward_hook(
        lambda *_: torch.full((1, 1, 16), torch.nan)
    ):
        refused(
            lambda: read(model, IDS[:, 35:36], cache),
            "values: got NaN or infinite numbers in layer 0",
            MethodError,
        )
    assert torch.equal(cache.layers[0].keys, before)


def test_momentkv_shares_the_budget_of_a_prompt_as_the_paper_has_it(model: LlamaForCausalLM) -> None:
    """MK-P2, the first layer against the reference: what
    each head keeps, and the moments of what it evicts.
    """
    queries, keys, values = first_layer_with_queries(model)
    layer = cached(model, IDS, "momentkv+ada_kv", budget=20).layers[0]
    wanted = reference.momentkv.select_prompt(queries[:, :, -10:], keys, values, 20, floor_ratio=0.2)
    assert layer.lengths.tolist() == wanted.sum(axis=-1).tolist() != [[20, 20]]
    assert positions_of(layer) == places(wanted)
    same_moments(
        layer, reference.momentkv.update(reference.momentkv.no_moments(keys, values), keys, values, ~wanted)
    )


@pytest.mark.slow  # it installs the embedded model where it is not there yet
def test_every_head_of_a_real_model_keeps_the_first_token_and_the_window() -> None:
    """MK-P2 in all layers of the embedded model: the heads of a layer share its budget, and the moments
    hold every other token.
    """
    real, tokenizer = load_model()
    text = " ".join(
        f"Line {line}: the {('red', 'old', 'tall')[line % 3]} house has {line * 7 % 11} windows."
        for line in range(60)
    )
    ids = tokenizer(text, return_tensors="pt").input_ids.to(real.device)
    length, budget = ids.shape[1], ids.shape[1] // 4
    assert budget > 2 * OBSERVED
    ragged = 0
    with EvictingCache(real, "momentkv+ada_kv", budget=budget) as cache:
        read(real, ids, cache)
        for layer in cache.layers:
            heads = positions_of(layer)
            assert all(
                row[0] == 0 and row[-OBSERVED:] == list(range(length - OBSERVED, length)) for row in heads
            )
            assert sum(map(len, heads)) == budget * len(heads)
            ragged += len(set(map(len, heads))) > 1
            assert (layer.moments.count + layer.lengths == length).all()
        logits = read(real, ids[:, -1:], cache)
    assert ragged > len(cache.layers) // 2 and logits.isfinite().all()


@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_momentkv_with_a_budget_of_one_token(model: LlamaForCausalLM, length: int) -> None:
    cache = EvictingCache(model, "momentkv", budget=1)
    assert read_in(model, cache, [length, 1, 1, 1]).isfinite().all()
    assert {layer.longest for layer in cache.layers} == {1}
    assert (cache.layers[1].moments.count == length + 2).all()


# out of memory


def no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


OUT_OF_MEMORY = """
import torch
FAILS = set()
def score(keys, layer_index):
    if layer_index in FAILS:
        FAILS.clear()
        raise torch.OutOfMemoryError('CUDA out of memory')
    return keys.norm(dim=-1)
"""


def test_out_of_memory_while_the_prompt_is_compressed_leaves_an_empty_cache(
    tmp_path: Path, model: LlamaForCausalLM
) -> None:
    cache, other = (EvictingCache(model, written(tmp_path, OUT_OF_MEMORY), 0.5) for _ in range(2))
    cache.method.module.FAILS.add(1)
    refused(lambda: read(model, IDS, cache), "OutOfMemoryError", MethodError)
    assert cache.get_seq_length() == cache.nbytes == 0
    assert torch.equal(read_in(model, cache, [40, 1, 4]), read_in(model, other, [40, 1, 4]))


def test_out_of_memory_while_decoding_leaves_a_layer_whole_until_the_next_time(
    tmp_path: Path, model: LlamaForCausalLM
) -> None:
    cache = cached(model, IDS, written(tmp_path, OUT_OF_MEMORY), budget=10, every=4, sizes=[20, 1, 1, 1])
    cache.method.module.FAILS.add(1)
    with pytest.warns(UserWarning, match="layer 1: out of memory, so 14 tokens stay"):
        assert read(model, IDS[:, 23:24], cache).isfinite().all()
    assert [layer.longest for layer in cache.layers] == [10, 14]
    read(model, IDS[:, 24:25], cache)
    assert [layer.longest for layer in cache.layers] == [11, 10]


@pytest.mark.parametrize(
    "method", ["keydiff", "knorm+ada_kv", "keydiff+moments", "momentkv", "momentkv+ada_kv", "lagkv"]
)
def test_out_of_memory_in_the_write_changes_nothing(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    both = [cached(model, IDS, method, 0.5, small(method), every=100, sizes=[40, 8]) for _ in range(2)]
    for each in both:
        each._session.captured[0] = {"queries": torch.ones(1, 4, 1, 8)}
    layer = both[0].layers[0]
    before, numbers = copy.deepcopy(layer.tensors()), (layer.numbers(), layer.longest)
    with monkeypatch.context() as patch:
        for module, name in ((layers, "compress"), (momentkv, "compress"), (lagkv, "gather")):
            patch.setattr(module, name, no_memory)
        refused(lambda: both[0]._session.compress(0), "out of memory", (torch.OutOfMemoryError, MethodError))
    assert (layer.numbers(), layer.longest) == numbers
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.tensors().items())
    for each in both:
        each._session.compress(0)
        each._session.captured.clear()
    assert torch.equal(*(read(model, IDS[:, 48:50], each) for each in both))


# what methods want of the future


def test_future_statistics_are_those_of_the_reference(model: LlamaForCausalLM) -> None:
    queries = cached(model, IDS, None, record=("queries",)).recorded[1]["queries"]
    got = expected_attention.future_statistics(model, 1, queries, torch.arange(60), 60)
    statistics = reference.expected_attention.query_statistics(
        reference.rope.rotate(queries.double().numpy(), -np.arange(60))
    )
    near(got, reference.expected_attention.average_rope(*statistics, position=60))


@torch.no_grad()
def test_sampled_queries_are_those_of_the_reference(model: LlamaForCausalLM) -> None:
    hidden = torch.randn(1, 60, 32, generator=torch.Generator().manual_seed(0))
    module: Any = attention_modules(model)[1]
    states = {"hidden_states": hidden, "keys": hidden, "generator": torch.Generator().manual_seed(5)}
    got = load("gvote").supply(Source(model, module, 1), states, 60)["sampled_queries"]
    noise = torch.randn(1, gvote.SAMPLES, 32, generator=torch.Generator().manual_seed(5)).double().numpy()
    mean, variance = reference.gvote.hidden_statistics(hidden.double().numpy())
    sampled = reference.gvote.project(
        reference.gvote.sample_hidden_states(mean, variance, noise)[:, None],
        module.q_proj.weight.double().numpy().reshape(4, 8, 32).swapaxes(-1, -2),
    )
    near([got], [reference.gvote.rotate_by_average(sampled, position=60)])


def test_compactor_keeps_what_the_mathematics_keeps(model: LlamaForCausalLM) -> None:
    """Its keys are brought to before RoPE, and the seed draws its sketch, that of each layer anew."""
    full = cached(model, IDS, None, record=("queries",))
    keys, values = (each.numpy() for each in full.layers[1].slots())
    sketch = torch.randn(1, 2, 8, 48, generator=torch.Generator().manual_seed(1)).numpy() / 48**0.5
    plain = reference.rope.rotate(keys, -np.arange(60))
    states = (full.recorded[1]["queries"].numpy(), keys, values, plain, sketch)
    kept = reference.selection.top_k(reference.compactor.score(*states, compression_ratio=2 / 3), 20)
    assert positions_of(cached(model, IDS, "compactor", budget=20).layers[1]) == places(kept)


# ragged heads


def test_ragged_heads_take_the_bytes_of_their_tokens_and_no_more(model: LlamaForCausalLM) -> None:
    cache = cached(model, IDS, "knorm+ada_kv", 0.5)
    kept = reference.ada_kv.select(-np.linalg.norm(first_layer(model)[0], axis=-1), 30)
    assert cache.layers[0].ragged is not None and positions_of(cache.layers[0]) == places(kept)
    # K and V of 2 layers, 2 heads of 30 tokens on average, 8 float32 channels
    assert cache.nbytes == 2 * 2 * 60 * 8 * 4 and cache.tokens_kept == 30


def test_a_ragged_cache_is_compressed_again_head_by_head(model: LlamaForCausalLM) -> None:
    cache = cached(model, IDS, "knorm+ada_kv", budget=10, every=5, sizes=[20, *[1] * 25])
    for layer in cache.layers:
        assert int(layer.lengths.sum()) == 20 and all(row == sorted(set(row)) for row in positions_of(layer))
    assert cache.peak_tokens <= 10 * 2 + 5


@pytest.mark.parametrize(
    "method",
    [
        "knorm+pyramid_kv",
        "tova+pyramid_kv+ada_kv",
        "keydiff+moments",
        "snapkv+ada_kv+moments",
        "criticalkv+ada_kv",
    ],
)
def test_compositions(model: LlamaForCausalLM, method: str) -> None:
    cache = EvictingCache(model, method, budget=20, options=small(method))
    assert read_in(model, cache, [40, 1, 4]).isfinite().all()
    per_layer = [int(layer.lengths.sum()) - 2 * 5 for layer in cache.layers]
    assert sum(per_layer) == 80 and (per_layer[0] > per_layer[1]) == ("pyramid" in method)
    for layer in cache.layers:
        assert (layer.moments is not None) == ("moments" in method)
        assert layer.moments is None or (layer.moments.count + layer.lengths == 45).all()


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.4, 0.5, 0.9])
@pytest.mark.parametrize(
    "method", ["knorm+pyramid_kv", "snapkv+pyramid_kv", "snapkv+ada_kv+pyramid_kv", "lagkv+pyramid_kv"]
)
def test_a_pyramid_removes_what_is_asked_and_leaves_every_layer_its_window(
    deep_model: LlamaForCausalLM, method: str, ratio: float
) -> None:
    """Of a prompt, and again while decoding."""
    cache = EvictingCache(deep_model, method, ratio, small(method), every=5)
    for seen, ids in ((50, IDS[:, :50]), (55, IDS[:, 50:55])):
        read(deep_model, ids, cache)
        kept = [int(layer.lengths.sum()) for layer in cache.layers]
        if "lagkv" in method:  # whole partitions alone
            assert kept == sorted(kept, reverse=True) and max(kept) <= 2 * seen
        else:
            assert sum(kept) == 2 * len(kept) * reference.selection.budget(seen, ratio)
        if "snapkv" in method:
            window = list(range(seen - 4, seen))
            assert all(row[-4:] == window for layer in cache.layers for row in positions_of(layer))


def test_moments_correct_the_attention_of_any_method(model: LlamaForCausalLM) -> None:
    """The first layer of `keydiff+moments` against the reference's correction."""
    layer = cached(model, IDS, "keydiff+moments", 0.5).layers[0]
    keys, values = first_layer(model)
    kept = reference.selection.top_k(reference.keydiff.score(keys), 30)
    moments = reference.momentkv.update(reference.momentkv.no_moments(keys, values), keys, values, ~kept)
    queries = np.random.default_rng(0).normal(size=(1, 4, 3, 8))
    got = partial_attention.attend(torch.from_numpy(queries).float(), layer, [MomentKV()])
    for query in range(3):
        # attend takes the last stored tokens for the queries' own: the third query sees all of them
        seen = kept & (kept.cumsum(axis=-1) <= 28 + query)
        near(
            [got[:, :, query]], [reference.momentkv.attend(queries[:, :, query], keys, values, seen, moments)]
        )


# batches, copies, files

BY_POSITION = (
    "import torch\ndef score(keys, positions):\n    return (positions * 7 % 11.0).expand(keys.shape[:3])\n"
)

PADDED = {
    ((40, 23, 31), None): [
        "keydiff",
        "tova",
        "expected_attention",
        "knorm+ada_kv",
        "keydiff+moments",
        "lagkv",
    ],
    ((40, 11), 3): ["keydiff", "expected_attention", "gvote", "momentkv", "snapkv", "knorm+ada_kv", "lagkv"],
}
"""The lengths of the rows, the tokens between two compressions, and methods."""


@pytest.mark.parametrize(
    ("lengths", "every", "method"),
    [(*case, method) for case, methods in PADDED.items() for method in methods],
)
def test_rows_padded_on_the_left_are_compressed_and_answered_as_alone(
    model: LlamaForCausalLM, lengths: tuple[int, ...], every: int | None, method: str
) -> None:
    """Padding counts neither for a ratio, nor for positions, nor among the last queries and hidden states."""
    options = None if every and method == "snapkv" else small(method)
    ids, given = padded(*lengths, width=40)
    together = EvictingCache(model, method, 0.5, options, every=every)
    answers = generate(model, ids, together, count=12, mask=given["attention_mask"])[:, 40:]
    for row, length in enumerate(lengths):
        alone = EvictingCache(model, method, 0.5, options, every=every)
        assert (
            answers[row].tolist()
            == generate(model, ids[row : row + 1, 40 - length :], alone, count=12)[0, length:].tolist()
        )
        for ours, own in zip(together.layers, alone.layers, strict=True):
            assert torch.equal(ours.lengths[row].sum(), own.lengths[0].sum())
            assert every is None or torch.equal(ours.lengths[row], own.lengths[0])


def test_gvote_compresses_ragged_heads_again(model: LlamaForCausalLM) -> None:
    cache = EvictingCache(model, "gvote", options={"p": 0.5}, every=4)
    assert read_in(model, cache, [30, 4, 4, *[1] * 8]).isfinite().all()
    assert cache.layers[0].ragged is not None


def test_sampled_queries_come_from_the_last_hidden_states(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While decoding they are a distribution, not the one state of the newest token."""
    whole = cached(model, IDS, None, record=("hidden_states",)).recorded[0]["hidden_states"]
    supply = Mock(wraps=load("gvote").supply)
    monkeypatch.setattr(load("gvote"), "supply", supply)
    # the smallest budget, so that GVote is asked each time
    cached(model, IDS, "gvote", budget=1, every=1, sizes=[40, 1, 1])
    asked = [call.args for call in supply.call_args_list]
    given = [states["hidden_states"] for source, states, _ in asked if source.layer_index == 0]
    # ragged heads ask one by one
    assert list(dict.fromkeys(states.shape[1] for states in given)) == [40, 41, 42]
    torch.testing.assert_close(given[-1], whole[:, :42])


def test_the_last_queries_are_the_last_where_a_cache_has_as_many_tokens(tmp_path: Path) -> None:
    """Recent queries are not of the tokens that the cache holds, even when there are equally many."""
    text = "GIVEN = []\ndef score(keys, queries):\n    GIVEN.append(queries)\n    return keys.sum(-1)\n"
    method: Any = resolve(written(tmp_path, text))
    states = {
        "keys": torch.randn(1, 2, 8, 4),
        "values": torch.randn(1, 2, 8, 4),
        "queries": torch.randn(1, 4, 8, 4),
    }
    filled = torch.ones(1, 2, 8, dtype=torch.bool)
    filled[0, 1, 3:] = False
    method.kept(states, Request(budget=2, filled=filled, seen=[30], is_prompt=False))
    near([states["queries"][:, :2], states["queries"][:, 2:, -3:]], method.module.GIVEN, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv", "momentkv", "expected_attention"])
def test_generation_is_continued_in_a_second_call(model: LlamaForCausalLM, method: str) -> None:
    """A padded batch answers, reads more and answers again: each row as alone."""

    def twice(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
        cache = EvictingCache(model, method, 0.5, every=3)
        for _ in range(2):
            ids = torch.cat([generate(model, ids, cache, mask=mask), IDS[:, :5].expand(len(ids), -1)], dim=1)
            mask = torch.cat([mask, torch.ones(len(ids), 13, dtype=torch.long)], dim=1)
        return ids.tolist()

    ids, given = padded(30, 10)
    together = twice(ids, given["attention_mask"])
    for row, start in enumerate((0, 20)):
        part = slice(row, row + 1), slice(start, None)
        assert [together[row][start:]] == twice(ids[part], given["attention_mask"][part])


@pytest.mark.parametrize("amount", [{"compression_ratio": 0.5}, {"budget": 20}], ids=["half", "20"])
@pytest.mark.parametrize("method", ["keydiff", "by position"])
def test_padding_of_a_later_turn_counts_for_nothing(
    tmp_path: Path, model: LlamaForCausalLM, method: str, amount: dict[str, Any]
) -> None:
    """The second row has four tokens less in its second turn: in a cache, its copy, its file and another."""
    method = written(tmp_path, BY_POSITION) if method == "by position" else method
    ids, mask = IDS[:, :43].repeat(2, 1), torch.ones(2, 43, dtype=torch.long)
    mask[1, 30:34] = 0
    cache, whole = (cached(model, ids[:, :30], each, **amount) for each in (method, None))
    twin, positions = copy.deepcopy(cache), mask.cumsum(dim=1) - 1
    given = {"attention_mask": mask[:, :40], "position_ids": positions[:, 30:40]}
    later = {"attention_mask": mask, "position_ids": positions[:, 40:]}
    for each in (cache, twin):
        read(model, ids[:, 30:40], each, **given)
    stored = [loaded(cache, tmp_path, model) for _ in range(2)]
    near(*([read(model, ids[:, 40:], each, **later)] for each in (copy.deepcopy(cache), stored[0])))
    for told, kept in ((given, [20, 18]), ({}, [20, 20])):  # the second takes the place of the first
        whole.crop(30 - whole.get_seq_length())
        read(model, ids[:, 30:40], whole, **told)
        assert (
            EvictingCache.from_prefilled(model, whole, "knorm", 0.5).layers[1].lengths[:, 0].tolist() == kept
        )
    for each in (cache, twin, stored[1]):
        each.compress()
        refused(lambda each=each: read(model, ids[:, 40:], each, attention_mask=mask.flip(1)), "got padding")
        answers = read(model, ids[:, 40:], each, **later)
        for row, own in enumerate(ids[row : row + 1, mask[row].bool()] for row in (0, 1)):
            alone = cached(model, own, method, **amount, sizes=[30, own.shape[1] - 33])
            alone.compress()
            near([answers[row]], [read(model, own[:, -3:], alone)[0]])
            assert torch.equal(each.layers[1].lengths[row], alone.layers[1].lengths[0])


def test_a_block_of_padding_alone_is_refused(model: LlamaForCausalLM) -> None:
    ids, given = padded(30, 10)
    cache = EvictingCache(model, "keydiff", budget=8, every=8)
    refused(
        lambda: generate(model, ids, cache, count=2, mask=given["attention_mask"], prefill_chunk_size=8),
        "got a row with only padding in the first 8 tokens, wanted a larger block",
    )


@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv", "keydiff+moments", "momentkv", "lagkv"])
def test_a_copy_and_a_file_answer_alike(tmp_path: Path, model: LlamaForCausalLM, method: str) -> None:
    cache = cached(model, IDS[:, :50], method, 0.5, small(method), every=4 if method == "lagkv" else None)
    others = copy.deepcopy(cache), loaded(cache, tmp_path, model)
    assert [layer.longest for layer in others[1].layers] == [layer.longest for layer in cache.layers]
    answer = read_in(model, cache, [1, 1, 4], IDS[:, 50:])
    assert all(torch.equal(read_in(model, each, [1, 1, 4], IDS[:, 50:]), answer) for each in others)


def test_files_that_cannot_be_loaded(tmp_path: Path, model: LlamaForCausalLM) -> None:
    text, early = written(tmp_path, "no cache"), EvictingCache(model, "keydiff")
    refused(lambda: EvictingCache.load(text, model), r"wanted a file that EvictingCache\.save wrote")
    refused(lambda: early.save(tmp_path / "early"), "has not read its prompt", ValueError)
    another = tiny_llama(num_hidden_layers=3)
    refused(lambda: loaded(cached(model, IDS, "keydiff"), tmp_path, another), "wanted the model of the cache")


@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv", "momentkv"])
def test_a_file_that_was_changed_or_lacks_something_is_refused(
    tmp_path: Path, model: LlamaForCausalLM, method: str
) -> None:
    path = tmp_path / "cache"
    cached(model, IDS, method, 0.5).save(path)
    whole, (settings, tensors) = path.read_bytes(), saved.read(path)
    for place in (len(whole) // 2, len(whole) - 3, len(whole) - 40 * 8):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        refused(lambda: EvictingCache.load(path, model), "with other contents than its checksum says")
    for name in (settings | tensors).keys() - {"schema", "0._kept_positions", "1._kept_positions"}:
        left = ({key: each for key, each in part.items() if key != name} for part in (settings, tensors))
        file.write_tensors("path", path, *left)
        lack = f"it lacks '{name}'" if name in settings else "it lacks"
        refused(
            lambda: EvictingCache.load(path, model),
            f"wanted a file with every setting and tensor of a cache; {lack}",
        )


@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv", "momentkv", "expected_attention"])
@pytest.mark.parametrize(("one", "other"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_same_weights_in_another_dtype_are_the_same_model(
    tmp_path: Path, method: str, one: torch.dtype, other: torch.dtype
) -> None:
    source, target = (tiny_llama().bfloat16().to(dtype) for dtype in (one, other))
    again = loaded(cached(source, IDS, method, 0.5, every=4), tmp_path, target)
    assert again.layers[0].keys.dtype == other
    assert read(target, IDS[:, :4], again).isfinite().all() and again.tokens_kept == 32


@torch.no_grad()
def test_one_number_of_one_weight_makes_another_model(model: LlamaForCausalLM) -> None:
    before = file.fingerprint(model)
    for name, weight in model.named_parameters():
        place = (-2,) * weight.ndim
        kept = weight[place].clone()
        weight[place] = kept + 1
        assert file.fingerprint(model) != before, name
        weight[place] = kept
    assert file.fingerprint(model) == before


def test_weights_that_are_on_the_disk_are_read_from_there(model: LlamaForCausalLM) -> None:
    """As accelerate leaves them: on the device meta, with a map beside; without a map a sentence says so."""
    offloaded = tiny_llama()
    projection: Any = offloaded.model.layers[1].self_attn.o_proj
    own = {"weight": projection.weight.data}
    projection.weight = torch.nn.Parameter(torch.empty_like(own["weight"], device="meta"))
    refused(
        lambda: file.fingerprint(offloaded),
        r"model: got Linear without numbers in its weight \(device meta\)",
    )
    projection._hf_hook = SimpleNamespace(hooks=[SimpleNamespace(weights_map=own)])
    assert file.fingerprint(offloaded) == file.fingerprint(model)
    assert torch.equal(
        *(output_projection(attention_modules(each)[1], torch.empty(8)) for each in (offloaded, model))
    )


@pytest.mark.parametrize("method", ["expected_attention", "gvote"])
def test_tokens_that_were_cropped_count_for_nothing(model: LlamaForCausalLM, method: str) -> None:
    """Neither their keys nor their queries or hidden states, which the next compression reads."""
    cropped, straight = (cached(model, IDS[:, :40], method, 0.5, small(method), every=6) for _ in range(2))
    read(model, IDS[:, 55:], cropped)
    cropped.crop(-5)
    for cache in (cropped, straight):
        read(model, IDS[:, 40:46], cache)
    found, wanted = ([layer.tensors() for layer in cache.layers] for cache in (cropped, straight))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert found[0].keys() >= ({"recent_hidden"} if method == "gvote" else {"recent"})
