"""What the laws leave to the torch path: errors before any work, dtypes, any scale."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tools import refused

from evictionary.optimized import (
    attention,
    attention_matching,
    cache,
    expected_attention,
    gvote,
    keydiff,
    knorm,
    lagkv,
    selection,
    streaming_llm,
)
from evictionary.reference import (
    attention_matching as matching_reference,
    keydiff as keydiff_reference,
    knorm as knorm_reference,
    lagkv as lagkv_reference,
)


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


KEYS, VALUES = states(2, 3, 40, 16), states(2, 3, 40, 12, seed=1)
KEPT = states(2, 3, 40, seed=2) > 0
CACHE = cache.compress(KEYS, VALUES, KEPT)
QUERIES = states(2, 6, 5, 16, seed=3)
LAG = {"keep_ratio": 0.5, "sink_size": 4, "lag_size": 8}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_float32_or_wider_and_states_keep_their_dtype(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    keys, values = KEYS.to(dtype), VALUES.to(dtype)
    scores = [method.score(keys) for method in (keydiff, knorm, streaming_llm)]
    assert {each.dtype for each in (*scores, lagkv.score(keys, values, keys, values))} == {wide}
    compressed = cache.compress(keys, values, KEPT)
    assert [each.dtype for each in compressed] == [dtype, dtype, torch.int64, torch.int64]
    assert [each.dtype for each in attention.attend(QUERIES.to(dtype), compressed)] == [dtype, wide]


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-15, 1e15, 1e30, 1e37])
def test_scales_beyond_the_squares_of_float32(scale: float) -> None:
    keys = KEYS.clone()
    keys[..., ::3, :] *= scale
    keys[..., 7, :] = 0
    np.testing.assert_allclose(keydiff.score(keys).numpy(), keydiff_reference.score(keys.numpy()), atol=1e-6)
    np.testing.assert_allclose(
        knorm.score(keys).numpy(), knorm_reference.score(keys.numpy()), rtol=1e-5, atol=1e-44
    )


def test_votes_whose_logits_overflow_are_counted() -> None:
    keys, query, sampled = (
        torch.tensor([[[[-1e20], [1e20], [1.0]]]]),
        torch.zeros(1, 1, 1),
        torch.full((1, 1, 1, 1), 1e25),
    )
    assert gvote.select(query, keys, sampled, p=0.3).tolist() == [[[False, True, False]]]
    refused(lambda: gvote.select(query + 1e25, keys, sampled, p=0.3), "attention", ValueError)


def test_a_token_too_far_off_for_float32_wins_its_partition() -> None:
    """A token 1e40 ranges away has no float32; it counts as 1e18 ranges away, and its partition keeps it
    as in float64.
    """
    keys = KEYS.clone()
    keys[:, :, 12:20] *= 1e-10
    keys[:, :, 6] *= 1e30
    kept = lagkv.select(keys, VALUES, **LAG)
    assert kept[:, :, 6].all()
    assert torch.equal(kept, torch.from_numpy(lagkv_reference.select(keys.numpy(), VALUES.numpy(), **LAG)))


NAN, INFINITE = KEYS.clone(), KEYS.clone()
NAN[0, 0, 3, 2], INFINITE[1, 2, 0, 0] = float("nan"), float("inf")

WRONG: list[tuple[str, Callable[[], object], str]] = [
    ("a list", lambda: keydiff.score(KEYS.tolist()), "keys: got list, wanted a torch tensor"),
    ("integers", lambda: keydiff.score(KEYS.long()), "keys: got dtype torch.int64, wanted a floating dtype"),
    ("one axis", lambda: keydiff.score(KEYS[0, 0, 0]), r"keys: got shape \(16,\), wanted \[\.\.\., T, D\]"),
    ("no tokens", lambda: keydiff.score(KEYS[:, :, :0]), "keys: got shape .* with no empty axis"),
    ("NaN", lambda: keydiff.score(NAN), "keys: got NaN or infinite numbers"),
    ("infinity", lambda: keydiff.score(INFINITE), "keys: got NaN or infinite numbers"),
    ("NaN norm", lambda: knorm.score(NAN), "keys: got NaN or infinite numbers"),
    ("negative sinks", lambda: streaming_llm.score(KEYS, sink_size=-1), "sink_size: got -1"),
    (
        "fewer values",
        lambda: lagkv.select(KEYS, VALUES[:, :, 1:], **LAG),
        r"values: got shape .* wanted \[B, H_kv, T, D_v\] with T = 40, as in keys",
    ),
    (
        "two dtypes",
        lambda: lagkv.select(KEYS, VALUES.double(), **LAG),
        r"values: got dtype torch.float64, wanted torch.float32",
    ),
    (
        "two devices",
        lambda: lagkv.select(KEYS, VALUES.to("meta"), **LAG),
        "values: got device meta, wanted cpu",
    ),
    (
        "three axes",
        lambda: lagkv.select(KEYS[0], VALUES[0], **LAG),
        r"keys: got shape .* wanted \[B, H_kv, T, D\]",
    ),
    ("keep_ratio", lambda: lagkv.select(KEYS, VALUES, keep_ratio=1.5), "keep_ratio: got 1.5"),
    ("next channels", lambda: lagkv.score(KEYS, VALUES, KEYS[..., 1:], VALUES), "next_keys: got shape"),
    ("next tokens", lambda: lagkv.score(KEYS, VALUES, KEYS, VALUES[:, :, 1:]), "next_values: got shape"),
    (
        "a float mask",
        lambda: cache.compress(KEYS, VALUES, KEPT.float()),
        "kept: got dtype torch.float32, wanted a boolean mask",
    ),
    ("a short mask", lambda: cache.compress(KEYS, VALUES, KEPT[..., 1:]), "kept: got shape"),
    ("NaN scores", lambda: selection.top_k(torch.tensor([1.0, float("nan")]), 1), "scores: got NaN"),
    ("a negative budget", lambda: selection.top_k(torch.ones(3), -1), "budget: got -1"),
    (
        "a boolean score",
        lambda: selection.top_k(KEPT, 1),
        "scores: got dtype torch.bool, wanted real numbers",
    ),
    (
        "too many protected",
        lambda: selection.top_k(torch.ones(3), 1, torch.ones(3, dtype=torch.bool)),
        "protected: got 3 .* budget, 1",
    ),
    (
        "an integer mask",
        lambda: selection.top_k(torch.ones(3), 1, torch.ones(3)),
        "protected: got dtype torch.float32",
    ),
    (
        "five query heads",
        lambda: attention.attend(QUERIES[:, :5], CACHE),
        "queries: got shape .* with H_q a multiple of H_kv = 3, as in cache.lengths",
    ),
    (
        "a query dtype",
        lambda: attention.attend(QUERIES.half(), CACHE),
        "cache.keys: got dtype torch.float32, wanted torch.float16",
    ),
    (
        "query channels",
        lambda: attention.attend(QUERIES[..., :8], CACHE),
        "cache.keys: got shape .* with D = 8, as in queries",
    ),
    *(
        (
            f"head_dim {odd} before RoPE",
            lambda odd=odd: expected_attention.unrotated_statistics(
                states(2, 2, 40, odd), torch.tensor([1000])
            ),
            rf"queries: got shape .* {odd}\), wanted .* with D%2 = 0",
        )
        for odd in (1, 3)
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    refused(call, message, ValueError)


def test_a_bias_is_the_best_one_where_few_queries_tell_the_keys_apart() -> None:
    """Newton's steps alone took up to 1,900 rounds for such heads, and ended after 50."""
    draw, kept = np.random.default_rng(0), np.arange(33)[None, None] % 2 == 0
    for _ in range(40):
        queries, keys = draw.normal(size=(1, 1, 8, 2)), draw.normal(size=(1, 1, 33, 2))
        logits = queries[0, 0] @ keys[0, 0].T / math.sqrt(2)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        ours = attention_matching.fit_bias(*map(torch.tensor, (queries, keys, kept))).numpy()
        found, best = (
            np.linalg.norm(powers[:, kept[0, 0]] @ np.exp(bias[0, 0]) - powers.sum(axis=1))
            for bias in (ours, matching_reference.fit_bias(queries, keys, kept))
        )
        assert found <= best * (1 + 1e-6) + 1e-6
