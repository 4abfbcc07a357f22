"""Re-rotated keys in a cache: behind any method, of a prompt, in blocks and while decoding, with every RoPE
that can be turned again.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools.families import FAMILIES, NO_HEAD_DIM, OF_2026, SMALL, build, random_model
from tools.reading import (
    IDS,
    after,
    cached,
    generate,
    loaded,
    padded,
    positions_of,
    read,
    read_in,
    refused,
    small,
    written,
)
from transformers import DynamicCache, LlamaConfig, Phi3Config

from evictionary import EvictingCache
from evictionary.cache.layers import EvictingLayer
from evictionary.methods.resolve import resolve
from evictionary.optimized import rerotation

STREAMING: dict[str, Any] = {"sink_size": 3}
NO_ROPE = {"Jamba", "Nemotron-H"}
UNREADABLE = {"LFM2", "Laguna", "Zamba2"}
"""Families whose queries are not their projected hidden states, so no trial can tell how they rotate."""


def alone(model: Any, ids: torch.Tensor, first: int = 0) -> DynamicCache:
    """The full cache of a text [1, T] whose first token is at this position."""
    cache = DynamicCache()
    read(model, ids, cache, position_ids=torch.arange(first, first + ids.shape[1])[None])
    return cache


def one_layer(**changes: Any) -> Any:
    """A model whose keys and values depend on their own token alone."""
    return tiny_llama(num_hidden_layers=1, **changes)


def kept_keys(layer: EvictingLayer, head: int) -> torch.Tensor:
    keys, _, _, filled = layer.contents()
    return keys[0, head][filled[0, head]]


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv", "lagkv", "duo_attention", "random+protect"])
def test_each_head_holds_the_keys_of_a_text_of_its_kept_tokens(method: str, rope: str) -> None:
    """Such a text lies right before the next token, at position 60. YaRN makes its keys longer, once."""
    model = one_layer(rope_parameters=ROPES[rope])
    cache = cached(model, IDS, f"{method}+rerotate", 0.5, small(method))
    (layer,) = cache.layers
    for head, places in enumerate(positions_of(layer)):
        wanted = alone(model, IDS[:, places], 60 - len(places)).layers[0].keys[0, head]
        torch.testing.assert_close(kept_keys(layer, head), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(60,), (16, 16, 28), (40, 1, 1, 1, 17)])
def test_the_next_tokens_read_a_text_of_sinks_and_window(sizes: tuple[int, ...]) -> None:
    """StreamingLLM in blocks and token by token: what follows is what follows the kept tokens alone, at the
    positions from 0 on. Without re-rotation the sinks are further away.
    """
    model, later = one_layer(), IDS[:, 5:13]
    options = {"budget": 20, "every": 8, "options": STREAMING}
    found = []
    for name in ("streaming_llm+rerotate", "streaming_llm"):
        cache = EvictingCache(model, name, **options)
        read_in(model, cache, sizes)
        cache.compress()
        kept = torch.cat([IDS[:, :3], IDS[:, -17:]], dim=1)
        found.append(read(model, later, cache))
    wanted = read(model, torch.cat([kept, later], dim=1), DynamicCache())[:, 20:]
    torch.testing.assert_close(found[0], wanted, atol=1e-4, rtol=1e-4)
    assert (found[1] - wanted).abs().max() > 0.05


def moved_sinks(model: Any) -> tuple[EvictingCache, DynamicCache]:
    """A text of which three sinks and 27 of 48 tokens stay, and the same text read so many positions later
    as the sinks move.
    """
    ids = IDS[:, :48]
    cache = cached(model, ids, "streaming_llm+rerotate", budget=30, options=STREAMING)
    later = DynamicCache(config=model.config)
    read(model, ids, later, position_ids=torch.arange(18, 66)[None])
    return cache, later


@pytest.mark.parametrize("family", sorted((FAMILIES | OF_2026).keys() - NO_ROPE - UNREADABLE))
def test_a_key_is_what_the_model_makes_of_it_at_its_new_place(family: str) -> None:
    """In every layer and family: pairs of halves and of neighbours, a part of the channels, layers without
    RoPE. A text that is read later has the same states but for RoPE.
    """
    model = build(family)
    full = EvictingCache(model, None)
    read(model, IDS[:, :48], full)
    cache, later = moved_sinks(model)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, EvictingLayer):
            whole, moved = full.layers[index], later.layers[index]
            size = float(whole.keys.abs().max())
            torch.testing.assert_close(
                layer.keys[:, :, :3], moved.keys[:, :, :3], atol=1e-4 * size, rtol=1e-4
            )
            assert torch.equal(layer.keys[:, :, 3:], whole.keys[:, :, -27:])
            assert torch.equal(layer.values, whole.values[:, :, layer.positions[0, 0].long()])


def test_positions_are_those_of_the_mathematics(model: Any) -> None:
    """The first layer's keys, moved by the functions of RR-1 and RR-9; the positions of the text stay."""
    full, cache = (cached(model, IDS, name, 0.5) for name in (None, "keydiff+rerotate"))
    keys, positions = full.layers[0].keys, cache.layers[0].positions
    kept = torch.zeros(keys.shape[:3], dtype=torch.bool).scatter_(2, positions.long(), True)
    old = torch.arange(60).expand(kept.shape)
    moved = rerotation.rerotated(keys, old, rerotation.positions_before(kept, 60))
    torch.testing.assert_close(cache.layers[0].keys.flatten(0, 2), moved[kept], atol=1e-5, rtol=1e-5)
    assert torch.equal(positions, cached(model, IDS, "keydiff", 0.5).layers[0].positions)


def test_nothing_moves_where_nothing_goes_or_before_what_goes(model: Any) -> None:
    """A whole cache keeps its keys bit for bit, and so do the tokens behind the last evicted one."""
    full = cached(model, IDS, None)
    for own, whole in zip(cached(model, IDS, "keydiff+rerotate", 0.0).layers, full.layers, strict=True):
        assert torch.equal(own.keys, whole.keys)
    for own, whole in zip(
        cached(model, IDS, "streaming_llm+rerotate", 0.5, STREAMING).layers, full.layers, strict=True
    ):
        assert torch.equal(own.keys[:, :, 3:], whole.keys[:, :, 33:])
        assert not torch.equal(own.keys[:, :, :3], whole.keys[:, :, :3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_that_move_many_times_drift_by_no_more_than_their_roundings(dtype: torch.dtype) -> None:
    """A hundred moves by one position each, beside one move by a hundred. Each rounds a key once."""
    model = one_layer(max_position_embeddings=512).to(dtype)
    ids = IDS.repeat(1, 3)
    cache = EvictingCache(model, "streaming_llm+rerotate", budget=20, every=1, options=STREAMING)
    read_in(model, cache, [80, *[1] * 100], ids)
    wanted = alone(model.float(), ids[:, :3], 160).layers[0].keys
    error = (cache.layers[0].keys[:, :, :3].float() - wanted).abs().max()
    assert 0 < error <= 161 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv", "streaming_llm"])
def test_rows_of_a_padded_batch_are_as_alone(model: Any, method: str) -> None:
    ids, given = padded(30, 22, 11)
    options = small(method)
    cache = cached(model, ids, f"{method}+rerotate", 0.5, options, given=given)
    logits = read(model, ids[:, :1], cache, **after(given))
    for row, length in enumerate((30, 22, 11)):
        own = cached(model, ids[row : row + 1, 30 - length :], f"{method}+rerotate", 0.5, options)
        alone_logits = read(model, ids[row : row + 1, :1], own)
        torch.testing.assert_close(logits[row : row + 1], alone_logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", ["keydiff", "knorm+ada_kv", "lagkv", "streaming_llm"])
def test_a_copy_and_a_file_go_on_alike(model: Any, tmp_path: Path, method: str) -> None:
    """Positions are stored nowhere: a key moves by the number of tokens that go behind it."""
    cache = EvictingCache(model, f"{method}+rerotate", 0.5, small(method), every=8)
    read_in(model, cache, (40, 8))
    twins = [copy.deepcopy(cache), loaded(cache, tmp_path, model)]
    wanted = read(model, IDS[:, 48:], cache)
    for twin in twins:
        assert torch.equal(read(model, IDS[:, 48:], twin), wanted)


def test_merged_values_and_moved_keys_go_together(model: Any) -> None:
    """CaM changes values alone: in either order the values are CaM's and the keys are the moved ones."""
    both = [
        cached(model, IDS, name, 0.5, seed=1) for name in ("keydiff+cam+rerotate", "keydiff+rerotate+cam")
    ]
    merged, moved = (cached(model, IDS, name, 0.5, seed=1) for name in ("keydiff+cam", "keydiff+rerotate"))
    for cache in both:
        for own, values, keys in zip(cache.layers, merged.layers, moved.layers, strict=True):
            assert torch.equal(own.values, values.values) and torch.equal(own.keys, keys.keys)


@pytest.mark.parametrize(
    "method", ["keydiff", "random", "kvzip", "tova+chunk_kv", "knorm+pyramid_kv", "gvote"]
)
def test_generation_goes_on(model: Any, method: str) -> None:
    cache = EvictingCache(model, f"{method}+rerotate", 0.5)
    assert generate(model, IDS, cache).shape == (1, 68)
    assert cache.get_seq_length() == 67


def test_a_gradient_goes_through_the_turn(model: Any) -> None:
    cache = EvictingCache(model, "keydiff+rerotate", 0.5)
    model(IDS, **cache.argument)
    model(IDS[:, :1], **cache.argument).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
    model.zero_grad()


# What is refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("keydiff+kivi+rerotate", "got 'rerotate' after kivi, but quantised keys would be rounded again"),
        ("keydiff+rerotate+fp8", "got 'fp8' after rerotate, but quantised keys would be rounded again"),
        ("quest+rerotate", "quest evicts nothing, so no key moves"),
        ("momentkv+rerotate", "what makes up for the evicted tokens holds at their old distances alone"),
        ("keydiff+moments+rerotate", "what makes up for the evicted tokens holds at their old distances"),
        ("keydiff+rerotate+moments", "got 'moments' after rerotate, but what makes up"),
        ("attention_matching+rerotate", "what makes up for the evicted tokens holds at their old distances"),
        ("snapkv+cake+rerotate", "it shrinks a layer again for each later layer"),
        ("snapkv+rerotate+cake", "got 'cake' after rerotate, but it shrinks a layer again"),
        ("keydiff+rerotate+rerotate", "got 'rerotate' twice"),
        ("rerotate", r"got 'rerotate' first, wanted a method before it, such as \w+\+rerotate"),
        ("keydiff+rerotat", r"did you mean rerotate\?"),
    ],
)
def test_what_cannot_be_re_rotated_is_refused(name: str, message: str) -> None:
    refused(lambda: resolve(name), message)


@pytest.mark.parametrize("family", sorted(NO_ROPE | UNREADABLE))
def test_a_family_whose_keys_cannot_be_turned_is_refused(family: str) -> None:
    wanted = "which has no RoPE" if family in NO_ROPE else "are not its projected hidden states rotated by"
    refused(lambda: EvictingCache(build(family), "keydiff+rerotate"), wanted)


LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
            ),
            "LlamaForCausalLM with the RoPE dynamic, wanted one of default, linear, llama3,",
        ),
        (
            Phi3Config(
                **NO_HEAD_DIM,
                original_max_position_embeddings=64,
                rope_parameters={**LONG, "original_max_position_embeddings": 64},
            ),
            "Phi3ForCausalLM with the RoPE longrope, wanted one of",
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_a_rope_that_changes_with_the_text_is_refused(config: Any, message: str) -> None:
    model = random_model(config)
    refused(lambda: EvictingCache(model, "keydiff+rerotate"), message)
    assert EvictingCache(model, "keydiff").compression_ratio == 0.5


def test_queries_from_before_a_move_are_refused(model: Any, tmp_path: Path) -> None:
    """With `every`, queries that are remembered belong to the distances before the last compression."""
    wanted = r"every: got 8 for snapkv\+rerotate, wanted 0: it reads queries of tokens before the last"
    refused(lambda: EvictingCache(model, "snapkv+rerotate", every=8), wanted)
    file = written(tmp_path, "def score(keys, query):\n    return keys @ query.mean()\n")
    assert EvictingCache(model, f"{file}+rerotate", every=8).every == 8


def test_a_model_that_is_gone_turns_no_key() -> None:
    model = one_layer()
    cache = cached(model, IDS, "keydiff+rerotate", 0.5, every=8)
    del model
    assert cache.model is None
    cache.layers[0].update(torch.ones(1, 2, 8, 8), torch.ones(1, 2, 8, 8))
    refused(cache.compress, "model: got none any more, wanted the model of the cache")
