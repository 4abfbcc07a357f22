"""Quantised keys and values in a cache: behind any method, of a prompt, of blocks and while decoding, and the
bytes of packed codes.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
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
    same,
    small,
    written,
)

from evictionary import EvictingCache, reference
from evictionary.methods.resolve import resolve
from evictionary.models.load import load
from evictionary.optimized import quantisation
from evictionary.policies.quantisation import Quantisation

SIZES: dict[str, Any] = {"bits": 4, "group_size": 4, "residual": 8}
OF = {"kivi": SIZES, "hadamard": {**SIZES, "residual": 0}, "fp8": {"residual": 0}}
COMPOSED = [
    "keydiff",
    "snapkv+ada_kv",
    "knorm+pyramid_kv",
    "snapkv+cake",
    "tova+protect",
    "random+moments",
    "lagkv",
    "gvote",
    "momentkv",
    "h2o",
]


def given_back(scheme: str, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A text in such a cache, by the functions of its mathematics."""
    if scheme == "kivi":
        return quantisation.kivi(keys, values, **SIZES)
    if scheme == "fp8":
        return quantisation.fp8(keys), quantisation.fp8(values)
    return tuple(quantisation.rotated(each, bits=4, group_size=4) for each in (keys, values))


def numbers_of(layer: Any) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """The key and the value of each token of the first row, by its head and its position."""
    keys, values, positions, filled = layer.contents()
    return {
        (head, int(positions[0, head, place])): (keys[0, head, place], values[0, head, place])
        for head, place in filled[0].nonzero().tolist()
    }


@pytest.mark.parametrize("scheme", sorted(OF))
def test_a_prompt_is_quantised_as_the_mathematics_says(model: Any, scheme: str) -> None:
    full = cached(model, IDS, None)
    cache = cached(model, IDS, f"keydiff+{scheme}", 0.0, OF[scheme])
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        for ours, theirs, before in zip(
            (layer.keys, layer.values),
            given_back(scheme, whole.keys, whole.values),
            (whole.keys, whole.values),
            strict=True,
        ):
            assert torch.equal(ours, theirs) and not torch.equal(ours, before)


@pytest.mark.parametrize("every", [1, 3, 8, 20])
def test_a_growing_text_is_quantised_as_the_mathematics_says(model: Any, every: int) -> None:
    """Of the lowest layer, whose keys depend on no other: whenever it is compressed."""
    full = cached(model, IDS, None)
    cache = cached(model, IDS, "keydiff+kivi", 0.0, SIZES, every=every, sizes=[24, *[1] * 36])
    layer, whole = cache.layers[0], full.layers[0]
    stop = layer.evicted_at
    wanted = quantisation.kivi(whole.keys[:, :, :stop], whole.values[:, :, :stop], **SIZES)
    assert stop > 60 - every
    for ours, theirs in zip((layer.keys, layer.values), wanted, strict=True):
        torch.testing.assert_close(ours[:, :, :stop], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", sorted(OF))
@pytest.mark.parametrize("method", COMPOSED)
def test_what_a_method_keeps_of_a_prompt_is_quantised(deep_model: Any, method: str, scheme: str) -> None:
    """It keeps the tokens that it keeps alone, and each head is quantised by itself."""
    settings: dict[str, Any] = {"budget": 24, "every": None if "moment" not in method else 0}
    alone = cached(deep_model, IDS, method, options=small(method), **settings)
    options = {**small(method), **OF[scheme]}
    cache = cached(deep_model, IDS, f"{method}+{scheme}", options=options, **settings)
    # the prompt attends to its own exact tokens, so what later layers read is that of the method alone
    for layer, exact in zip(cache.layers, alone.layers, strict=True):
        assert positions_of(layer) == positions_of(exact)
        ours, theirs = numbers_of(layer), numbers_of(exact)
        for head, kept in enumerate(positions_of(exact)):
            keys, values = (
                torch.stack([theirs[head, place][part] for place in kept])[None, None] for part in (0, 1)
            )
            wanted = given_back(scheme, keys, values)
            for part in (0, 1):
                found = torch.stack([ours[head, place][part] for place in kept])
                assert torch.equal(found, wanted[part][0, 0])


@pytest.mark.parametrize("scheme", sorted(OF))
@pytest.mark.parametrize(
    "method", ["keydiff", "tova", "keydiff+ada_kv", "momentkv", "lagkv", "random+moments"]
)
def test_what_is_quantised_once_stays_as_it_is(model: Any, method: str, scheme: str) -> None:
    """While tokens go and come: a number changes at most once, when it leaves the window."""
    options = {**small(method), **OF[scheme]}
    cache = EvictingCache(model, f"{method}+{scheme}", 0.5, options, every=2)
    changes: dict[tuple[int, int, int], int] = {}
    before: dict[tuple[int, int], Any] = {}
    for ids in IDS.split([30, *[1] * 30], dim=1):
        read(model, ids, cache)
        now = numbers_of(cache.layers[1])
        for token in now.keys() & before.keys():
            for part in (0, 1):
                differs = not torch.equal(now[token][part], before[token][part])
                changes[*token, part] = changes.get((*token, part), 0) + differs
        before = now
    assert max(changes.values()) == 1


def test_the_window_is_exact_behind_an_eviction(model: Any) -> None:
    """Of 24 kept tokens the last 8 values, and no key, for 24 are three full blocks."""
    alone = cached(model, IDS, "keydiff", budget=24)
    cache = cached(model, IDS, "keydiff+kivi", budget=24, options=SIZES)
    for layer, exact in zip(cache.layers, alone.layers, strict=True):
        assert torch.equal(layer.values[:, :, 16:], exact.values[:, :, 16:])
        assert (layer.values[:, :, :16] != exact.values[:, :, :16]).any(dim=-1).all()
        assert (layer.keys != exact.keys).any(dim=-1).all()


@pytest.mark.parametrize("method", ["keydiff+kivi", "keydiff+ada_kv+hadamard"])
def test_a_request_of_a_padded_batch_is_as_alone(model: Any, method: str) -> None:
    (ids, given), token = padded(30, 21), IDS[:, :1]
    settings: dict[str, Any] = {"options": {**SIZES, "residual": 4}, "budget": 12, "every": 1}
    cache = cached(model, ids, method, given=given, **settings)
    read(model, token.expand(2, 1), cache, **after(given))
    for row, start in enumerate((0, 9)):
        alone = EvictingCache(model, method, **settings)
        read(model, ids[row : row + 1, start:], alone)
        read(model, token, alone)
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            keys, values, positions, filled = ours.contents()
            for (head, place), (key, value) in numbers_of(theirs).items():
                (at,) = (positions[row, head].eq(place + start) & filled[row, head]).nonzero()[0].tolist()
                torch.testing.assert_close(keys[row, head, at], key, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(values[row, head, at], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "method", ["keydiff+kivi", "keydiff+ada_kv+kivi", "tova+hadamard", "tova+moments+fp8"]
)
def test_a_file_and_a_copy_go_on_as_the_cache_does(tmp_path: Path, model: Any, method: str) -> None:
    options = OF[method.rpartition("+")[2]]
    cache = cached(model, IDS[:, :40], method, 0.5, options, every=2)
    others = [copy.deepcopy(cache), loaded(cache, tmp_path, model)]
    for each in (cache, *others):
        read_in(model, each, [1] * 7, IDS[:, 40:])
    for each in others:
        same(each, cache)
        assert each.nbytes == cache.nbytes


# Bytes


@pytest.mark.parametrize("scheme", sorted(OF))
def test_the_bytes_are_those_of_packed_codes(model: Any, scheme: str) -> None:
    """Two layers, two heads of eight channels, four bytes a number, 60 tokens."""
    cache = cached(model, IDS, f"keydiff+{scheme}", 0.0, OF[scheme])
    of_token = {"hadamard": 4 + 2 * 2 * 4, "fp8": 8 + 4}  # codes, and two numbers of two groups, or a scale
    shape: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "bytes_per_number": 4}
    wanted = (
        reference.quantisation.kivi_bytes(60, **shape, **SIZES)
        if scheme == "kivi"
        else 2 * 2 * 2 * 60 * of_token[scheme]
    )
    assert cache.nbytes == wanted < cache.nbytes_full


def test_a_window_as_long_as_the_text_has_the_bytes_of_the_full_cache(model: Any) -> None:
    cache = cached(model, IDS, "keydiff+kivi", 0.0)
    assert cache.nbytes == cache.nbytes_full == 2 * 2 * 2 * 60 * 8 * 4


def test_a_group_of_keys_has_its_two_numbers_until_its_last_key_goes() -> None:
    """Seven keys of one head in three groups, of eight channels, four bits and four bytes a number."""
    keys = torch.zeros(1, 1, 9, 8)
    state = {
        "quantised.keys": torch.tensor([[[1, 1, 1, 2, 4, 4, 4, 0, 0]]], dtype=torch.int32),
        "quantised.values": torch.tensor([[[True, True, False, False, False, False, False, False, False]]]),
    }
    saved = Quantisation().saved(resolve("keydiff+kivi"), SIZES, state, keys, keys)
    codes, groups = 8 * 4, 3 * 8 * 2 * 4  # seven codes of four bits are four bytes
    assert saved == (7 * 8 * 4 - codes - groups) + 2 * (8 * 4 - 4 - 2 * 2 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_two_bytes_are_counted_as_such(dtype: torch.dtype) -> None:
    model = tiny_llama().to(dtype)
    cache = cached(model, IDS, "keydiff+hadamard", 0.0, {**SIZES, "residual": 0})
    assert cache.nbytes == 2 * 2 * 2 * 60 * (4 + 2 * 2 * dtype.itemsize)
    assert cache.layers[0].keys.dtype == dtype


# A model


@pytest.mark.slow  # it installs the embedded model where it is not there yet
def test_eight_bits_change_a_real_model_little_and_a_window_helps_two_bits() -> None:
    """The logits of 40 tokens after 200, in the embedded model, beside those of the full cache."""
    model, tokenizer = load("embedded")
    text = Path(__file__).with_name("test_cache.py").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :240]

    def logits(method: str | None, **options: int) -> torch.Tensor:
        cache = EvictingCache(model, method, 0.0, options or None)
        read(model, ids[:, :200], cache)
        return read(model, ids[:, 200:], cache).log_softmax(dim=-1)

    full = logits(None)

    def divergence(method: str, **options: int) -> float:
        return float((full.exp() * (full - logits(method, **options))).sum(dim=-1).mean())

    two, windowed = (divergence("keydiff+kivi", bits=2, residual=window) for window in (32, 128))
    eight = {name: divergence(f"keydiff+{name}", bits=8, residual=32) for name in ("kivi", "hadamard")}
    assert max(*eight.values(), divergence("keydiff+fp8")) < 0.01 < windowed < two
    assert divergence("keydiff+hadamard", bits=4) < divergence("keydiff+hadamard", bits=2)


# What is refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("keydiff+kivi+fp8", "got 'fp8' after kivi, wanted one of them"),
        ("keydiff+kivi+kivi", "got 'kivi' twice"),
        ("kivi", r"got 'kivi' first, wanted a method before it, such as \w+\+kivi"),
        ("quest+kivi", "quest evicts nothing, and reads keys by a summary of their pages"),
        ("attention_matching+hadamard", "gives kept tokens other values"),
        ("keydiff+cam+kivi", r"keydiff\+cam gives kept tokens other values, which kivi would not quantise"),
        ("keydiff+kivi+cam", "got 'cam' after kivi, but it gives kept tokens other values"),
        ("keydiff+kivvi", r"did you mean kivi\?"),
    ],
)
def test_what_cannot_be_quantised_is_refused(name: str, message: str) -> None:
    refused(lambda: resolve(name), message)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("kivi", {"bits": 3}, "option bits: got 3, wanted one of 2, 4, 8"),
        ("hadamard", {"bits": 16}, "option bits: got 16, wanted one of 2, 4, 8"),
        ("kivi", {"bits": "two"}, "option bits: got 'two', wanted a whole number"),
        ("kivi", {"group_size": 0}, "option group_size: got 0, wanted a whole number of at least 1"),
        ("kivi", {"group_size": 48}, "option residual: got 128, wanted a multiple of group_size, 48"),
        ("kivi", {"residual": 0}, "option residual: got 0, wanted a whole number of at least 1"),
        ("fp8", {"residual": -1}, "option residual: got -1, wanted a whole number of at least 0"),
        ("fp8", {"bits": 8}, r"option bits: keydiff\+fp8 has no such option"),
    ],
)
def test_options_out_of_range_are_refused_before_a_prompt(
    model: Any, scheme: str, options: dict[str, Any], message: str
) -> None:
    refused(lambda: EvictingCache(model, f"keydiff+{scheme}", options=options), message)


def test_options_that_a_method_has_too_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "def score(keys, bits=2):\n    return keys[..., 0]\n")
    refused(lambda: resolve(f"{file}+kivi"), "has an option bits, which kivi has too")


def test_channels_that_do_not_fit_are_refused_at_the_prompt() -> None:
    model = tiny_llama(head_dim=12)
    wanted = "option group_size: got 8, wanted a divisor of the 12 channels of a head"
    options = {"group_size": 8, "residual": 8}
    refused(lambda: cached(model, IDS, "keydiff+kivi", options=options), wanted)
    wanted = r"method: got \+hadamard for heads of 12 channels, wanted a power of two"
    refused(lambda: cached(model, IDS, "keydiff+hadamard", options={"group_size": 4}), wanted)


def test_a_gradient_through_rounded_numbers_is_refused(model: Any) -> None:
    cache = EvictingCache(model, "keydiff+fp8", 0.0)
    wanted = "states: got a tensor that requires a gradient, wanted one that requires none: quantisation.fp8"
    refused(lambda: model(IDS, **cache.argument), wanted)


def test_generation_goes_on(model: Any) -> None:
    for scheme, options in OF.items():
        cache = EvictingCache(model, f"tova+{scheme}", 0.5, options, every=1)
        assert generate(model, IDS, cache).shape == (1, 68) and cache.tokens_kept == 33
    assert set(OF) == set(reference.quantisation.QUANTISERS)
