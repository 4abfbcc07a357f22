"""The checks of `test_optimized_kernels.py`: run with TRITON_INTERPRET=1 and the names of some, or none for all."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch

from evictionary.optimized import attention as optimized_attention
from evictionary.optimized import cache as optimized_cache
from evictionary.optimized.kernels import attention, cache, keydiff, lagkv, selection
from evictionary.reference import attention as reference_attention
from evictionary.reference import cache as reference_cache
from evictionary.reference import keydiff as reference_keydiff
from evictionary.reference import lagkv as reference_lagkv
from evictionary.reference import selection as reference_selection

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers whose tokens and heads are in each other's place in memory."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:]).to(dtype).transpose(1, 2)


def exact(value: torch.Tensor) -> np.ndarray:
    """The same numbers in float64."""
    return value.double().numpy()


def check_keydiff() -> None:
    """Sizes around a tile and a split, odd channels, scales that float32 cannot square, zero keys."""
    shapes = [(1, 1, 1, 1), (2, 3, 63, 24), (1, 2, 64, 128), (1, 1, 65, 80), (1, 1, 257, 256), (1, 2, 700, 16)]
    for dtype, shape in itertools.product(DTYPES, shapes):
        keys = states(*shape, dtype=dtype)
        if dtype != torch.float16:
            keys[:, :, ::3] *= 1e-30
            keys[:, :, 1::3] *= 1e30
        keys[:, :, 4:5] = 0
        np.testing.assert_allclose(exact(keydiff.score(keys)), reference_keydiff.score(exact(keys)), atol=5e-7)
    tiny = states(1, 1, 9, 16) * 1e-42
    np.testing.assert_allclose(exact(keydiff.score(tiny)), reference_keydiff.score(exact(tiny)), atol=5e-7)


def check_lagkv() -> None:
    """Partitions around a tile, one channel, a constant channel, values of other channels, caches too short to compress."""
    cases = [(100, 4, 32, 24, 16, 0.3), (200, 16, 33, 80, 128, 0.5), (70, 3, 40, 16, 16, 0.25), (67, 3, 16, 1, 5, 0.4)]
    cases += [(650, 7, 300, 8, 8, 0.29), (2, 4, 5, 4, 4, 0.5), (48, 0, 16, 4, 4, 0.0), (48, 0, 16, 4, 4, 1.0)]
    for dtype, (length, sink_size, lag, head_dim, value_dim, keep_ratio) in itertools.product(DTYPES, cases):
        keys, values = states(2, 3, length, head_dim, dtype=dtype), states(2, 3, length, value_dim, dtype=dtype)
        keys[..., 3:4] = 1
        settings = {"keep_ratio": keep_ratio, "sink_size": sink_size, "lag_size": lag}
        kept = lagkv.select(keys, values, **settings)
        wanted = reference_lagkv.select(exact(keys), exact(values), **settings)
        assert kept.sum(dim=-1).eq(reference_lagkv.retained_length(length, **settings)).all()
        if length >= sink_size + 2 * lag:
            parts = [x[:, :, sink_size : sink_size + lag] for x in (keys, values)]
            parts += [x[:, :, sink_size + lag : sink_size + 2 * lag - 3] for x in (keys, values)]
            scores = reference_lagkv.score(*map(exact, parts))
            np.testing.assert_allclose(exact(lagkv.score(*parts)), scores, atol=1e-6)
            # Judged by what was lost, not by which tokens: float32 may exchange two scores that nearly tie.
            first = slice(sink_size, sink_size + lag)
            regret = (scores * wanted[..., first]).sum(-1) - (scores * kept[..., first].numpy()).sum(-1)
            assert np.abs(regret).max() < 1e-6
        for got, want in zip(lagkv.compress(keys, values, **settings), optimized_cache.compress(keys, values, kept), strict=True):
            assert torch.equal(got, want)
    # On a GPU nobody looks for NaN beforehand: the kernel keeps as many tokens as it has room for, whatever it meets.
    keys = states(1, 1, 64, 16)
    keys[0, 0, 5, 2] = torch.nan
    part = keys[0, 0].contiguous()
    rows = torch.full((40, 16), -1.0)
    positions = torch.full((40,), -1)
    lagkv.compress_partitions[(4,)](
        part, part, rows, rows.clone(), positions, 0, 0, 16, 1, 0, 0, 16, 1, 1, 64, 40, 3, 4, 0, 16, 8, 16, 16,
        **lagkv._tile(16, part, part),
    )  # fmt: skip
    assert positions.diff().gt(0).all() and positions.ge(0).all() and positions.lt(64).all()


def check_selection() -> None:
    """Both schedules: all numbers equal, few distinct ones, infinities, both zeros, protected tokens, every kind of budget."""
    for dtype, length, schedule in itertools.product(DTYPES, (1, 5, 300, 2500), (selection.LONGEST_SHORT_ROW, 0)):
        selection.LONGEST_SHORT_ROW = schedule
        few = torch.tensor([-torch.inf, -1.0, -0.0, 0.0, 1.0, torch.inf])
        for scores in (torch.randn(2, length), few[torch.randint(6, (2, length))], torch.zeros(2, length)):
            scores = scores.to(dtype)
            protected = torch.rand(2, length) < 0.1
            for budget in {0, 1, length // 3, length - 1, length, length + 4}:
                got = selection.top_k(scores, budget)
                assert np.array_equal(got.numpy(), reference_selection.top_k(exact(scores), budget))
                if protected.sum(-1).max() <= budget:
                    got = selection.top_k(scores, budget, protected)
                    assert np.array_equal(got.numpy(), reference_selection.top_k(exact(scores), budget, protected.numpy()))
    selection.LONGEST_SHORT_ROW = 16384
    scores = torch.randn(2, 40000)[:, ::2]
    assert np.array_equal(selection.top_k(scores, 7777).numpy(), reference_selection.top_k(exact(scores), 7777))


def check_cache() -> None:
    """Ragged heads, empty heads, an empty cache, values of other channels."""
    for dtype, share in itertools.product(DTYPES, (0.0, 0.4, 1.0)):
        keys, values = states(2, 3, 150, 24, dtype=dtype), states(2, 3, 150, 80, dtype=dtype)
        kept = torch.rand(2, 3, 150) < share
        kept[0, 1] = False
        wanted = reference_cache.compress(exact(keys), exact(values), kept.numpy())
        for got, want in zip(cache.compress(keys, values, kept), wanted, strict=True):
            assert np.array_equal(exact(got), want)


def check_attention() -> None:
    """Ragged and empty heads, several chunks, groups of 1 to 8, several queries; no less exact than torch in that precision."""
    shapes = [(2, 3, 4, 1, 150, 24, 20), (1, 2, 1, 3, 1, 16, 16), (1, 2, 8, 9, 300, 80, 128), (1, 1, 1, 1, 65, 256, 256)]
    for dtype, (batch, heads, group, queried, length, head_dim, value_dim) in itertools.product(DTYPES, shapes):
        kept = torch.rand(batch, heads, length) < 0.6
        kept[0, 1:2] = False
        storage = optimized_cache.compress(
            states(batch, heads, length, head_dim, dtype=dtype), states(batch, heads, length, value_dim, dtype=dtype), kept
        )
        queries = 3 * states(batch, heads * group, queried, head_dim, dtype=dtype)
        oracle = reference_cache.CompressedCache(*map(exact, storage[:2]), storage.positions.numpy(), storage.lengths.numpy())
        wanted, log_wanted = reference_attention.attend(exact(queries), oracle)
        plain, _ = optimized_attention.attend(queries, storage)
        output, log_sum_exp = attention.attend(queries, storage)
        bound = 2 * np.abs(exact(plain) - wanted).max() + torch.finfo(dtype).eps * max(1.0, np.abs(wanted).max())
        assert np.abs(exact(output) - wanted).max() <= bound
        np.testing.assert_allclose(exact(log_sum_exp), log_wanted, rtol=1e-6, atol=1e-5)


def check_addresses() -> None:
    """Heads and tokens that lie 2^31 elements and more apart: 32-bit offsets would wrap. The pages between are never touched."""
    storage = torch.empty(2**32 + 2**20, dtype=torch.float16)
    apart = torch.as_strided(storage, (1, 2, 32, 16), (0, 2**31 + 64, 16, 1))
    scattered = torch.as_strided(storage, (1, 1, 2, 16), (0, 0, 2**32 + 1024, 1))
    for spread in (apart, scattered):
        near = torch.randn(spread.shape).half()
        spread.copy_(near)
        kept = torch.rand(spread.shape[:3]) < 0.9
        kept[..., -1] = True
        assert torch.equal(keydiff.score(spread), keydiff.score(near))
        settings = {"keep_ratio": 0.5, "sink_size": 0, "lag_size": spread.shape[2] // 2}
        for got, want in zip(cache.compress(spread, spread, kept), cache.compress(near, near, kept), strict=True):
            assert torch.equal(got, want)
        for got, want in zip(lagkv.compress(spread, spread, **settings), lagkv.compress(near, near, **settings), strict=True):
            assert torch.equal(got, want)
    lengths = torch.tensor([[2]])
    far, close = (optimized_cache.CompressedCache(x[0, 0], x[0, 0], lengths, lengths) for x in (scattered, near))
    for got, want in zip(attention.attend(near, far), attention.attend(near, close), strict=True):
        assert torch.equal(got, want)
    scores = torch.as_strided(storage, (2, 300), (2**31 + 64, 1))
    scores.copy_(torch.randn(2, 300))
    assert torch.equal(selection.top_k(scores, 100), selection.top_k(scores.clone(), 100))


def check_errors() -> None:
    """What the kernels cannot take is refused before a launch."""
    keys = states(1, 1, 8, 16)
    refused = [
        (lambda: keydiff.score(keys.double()), "keys: got dtype torch.float64"),
        (lambda: keydiff.score(states(1, 1, 4, 300)), "keys: got head_dim 300"),
        (lambda: keydiff.score(keys[0, 0, 0]), "keys: got shape"),
        (lambda: lagkv.select(keys, keys, keep_ratio=0.5, lag_size=5000), "lag_size: got a partition of 5000"),
        (lambda: lagkv.select(keys, keys[..., 1:, :], keep_ratio=0.5), "values: got shape"),
        (lambda: selection.top_k(torch.tensor([1.0, torch.nan]), 1), "scores: got NaN"),
        (lambda: selection.top_k(torch.ones(3), 1, torch.ones(3, dtype=torch.bool)), "protected: got 3"),
        (lambda: cache.compress(keys, keys.half(), torch.ones(1, 1, 8, dtype=torch.bool)), "values: got dtype"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def check_repeatable() -> None:
    """A sequence has the same scores, bit by bit, alone and in a batch, and again."""
    keys = states(3, 2, 600, 32)
    scores = keydiff.score(keys)
    assert torch.equal(scores, keydiff.score(keys))
    assert torch.equal(scores[1:2], keydiff.score(keys[1:2]))


if __name__ == "__main__":
    checks = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}
    for name in sys.argv[1:] or checks:
        torch.manual_seed(0)
        checks[name]()
