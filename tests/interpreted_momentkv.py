"""The checks of the MomentKV kernels: run with TRITON_INTERPRET=1, all of them or the one that is named."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch

from evictionary.optimized import cache as optimized_cache
from evictionary.optimized import checks as optimized_checks
from evictionary.optimized import momentkv as optimized_momentkv
from evictionary.optimized.kernels import momentkv
from evictionary.optimized.momentkv import Moments
from evictionary.reference import momentkv as reference_momentkv

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What one rounding of a factor may cost, in parts of the size of a sum.
ROUNDING = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers whose tokens and heads are in each other's place in memory."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:]).to(dtype).transpose(1, 2)


def gapped(value: torch.Tensor) -> torch.Tensor:
    """The same numbers, every second one of a wider buffer whose rest is 77."""
    wide = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), 77)
    wide[..., ::2] = value
    return wide[..., ::2]


def exact(value: torch.Tensor) -> np.ndarray:
    """The same numbers in float64."""
    return value.double().numpy()


def oracle(moments: Moments) -> reference_momentkv.Moments:
    """The moments for the reference."""
    return reference_momentkv.Moments(moments.count.numpy(), *(exact(field) for field in moments[1:]))


def evicted_before(keys: torch.Tensor, values: torch.Tensor, *, length: int = 90) -> Moments:
    """Moments of other tokens; in the first head of the first sequence of none."""
    others = [torch.randn(*x.shape[:2], length, x.shape[3]).to(x.dtype) for x in (keys, values)]
    evicted = torch.rand(*keys.shape[:2], length) < 0.7
    evicted[0, 0] = False
    return optimized_momentkv.update(optimized_momentkv.no_moments(keys, values), *others, evicted)


def close(got: torch.Tensor, wanted: np.ndarray, dtype: torch.dtype, size: float | None = None) -> None:
    """Fail unless the largest error is within the rounding of the factors."""
    size = max(1.0, float(np.abs(wanted).max())) if size is None else size
    assert np.abs(exact(got) - wanted).max() <= ROUNDING[dtype] * size


def check_score_and_attend() -> None:
    """Sizes around a tile and a split, odd channels, several chunks of value channels, groups of 1 to 8, strides with gaps."""
    shapes = [(1, 1, 1, 1, 1, 1), (2, 2, 4, 31, 24, 80), (1, 1, 8, 33, 80, 16), (1, 1, 3, 600, 16, 16), (1, 1, 1, 20, 256, 256)]
    for dtype, (batch, heads, group, length, head_dim, value_dim) in itertools.product(DTYPES, shapes):
        keys, values = states(batch, heads, length, head_dim, dtype=dtype), states(batch, heads, length, value_dim, dtype=dtype)
        query = gapped(states(batch, heads * group, 1, head_dim, dtype=dtype)[:, :, 0])
        moments = evicted_before(keys, values)
        wanted = reference_momentkv.score(exact(query), exact(keys), exact(values), oracle(moments))
        close(momentkv.score(query, keys, gapped(values), moments), wanted, dtype, size=float(wanted.max()))
        kept = torch.rand(batch, heads, length) < 0.6
        kept[-1, -1] = False
        wanted = reference_momentkv.attend(exact(query), exact(keys), exact(values), kept.numpy(), oracle(moments))
        close(momentkv.attend(query, gapped(keys), values, kept, moments), wanted, dtype)


def check_step() -> None:
    """Two steps in a row: which token goes, what is left in which slot, the moments and the output."""
    shapes = [(1, 1, 1, 1, 16, 16), (2, 2, 4, 31, 80, 24), (1, 1, 8, 64, 24, 80), (1, 1, 2, 300, 16, 16), (1, 1, 5, 20, 128, 256)]
    for dtype, (batch, heads, group, length, head_dim, value_dim) in itertools.product(DTYPES, shapes):
        keys, values = (
            states(batch, heads, length, head_dim, dtype=dtype),
            gapped(states(batch, heads, length, value_dim, dtype=dtype)),
        )
        positions = torch.stack([torch.randperm(length) for _ in range(batch * heads)]).view(batch, heads, length)
        moments = evicted_before(keys, values)
        for position in range(length, length + 2):
            query = 2 * states(batch, heads * group, 1, head_dim, dtype=dtype)[:, :, 0]
            new_key, new_value = (gapped(states(batch, heads, 1, x.shape[3], dtype=dtype)[:, :, 0]) for x in (keys, values))
            all_keys, all_values = torch.cat([keys, new_key[:, :, None]], 2), torch.cat([values, new_value[:, :, None]], 2)
            before, slots = oracle(Moments(*(field.clone() for field in moments))), positions.clone()
            scores = reference_momentkv.score(exact(query), exact(all_keys), exact(all_values), before)
            output = momentkv.step(query, new_key, new_value, keys, values, positions, moments, position)
            # The one slot that changed, or the new token.
            changed = positions != slots
            assert changed.sum(-1).le(1).all() and positions[changed].eq(position).all()
            gone = torch.cat([changed, ~changed.any(-1, keepdim=True)], dim=-1)
            regret = scores[gone.numpy()] - scores.min(-1).ravel()
            assert regret.max() <= ROUNDING[dtype] * scores.max()
            assert torch.equal(keys, torch.where(changed[..., None], new_key[:, :, None], all_keys[:, :, :-1]))
            assert torch.equal(values, torch.where(changed[..., None], new_value[:, :, None], all_values[:, :, :-1]))
            after = reference_momentkv.update(before, exact(all_keys), exact(all_values), gone.numpy())
            assert np.array_equal(moments.count.numpy(), after.count)
            for got, wanted in zip(moments[1:], after[1:], strict=True):
                np.testing.assert_allclose(exact(got), wanted, rtol=2e-7, atol=2e-7 * np.abs(wanted).max())
            arguments = exact(query), exact(all_keys), exact(all_values), ~gone.numpy(), after
            close(output, reference_momentkv.attend(*arguments), dtype)


def check_evicted_token_that_held_all() -> None:
    """A token of value 0 scores 0 and goes, though it held nearly all of the attention: in a slot, or as the new one."""
    for dtype, lift, place in itertools.product((torch.float32, torch.float16), (3.0, 20.0), (0, 40, 70)):
        keys, values = torch.randn(1, 1, 71, 16).to(dtype), torch.randn(1, 1, 71, 40).to(dtype)
        query = torch.randn(1, 3, 16).to(dtype)
        query[..., 0] = 4
        keys[0, 0, place], values[0, 0, place] = 0, 0
        keys[0, 0, place, 0] = lift
        moments = optimized_momentkv.no_moments(keys, values)
        left = torch.arange(71)[None, None] != place
        after = optimized_momentkv.update(moments, keys, values, ~left)
        wanted = reference_momentkv.attend(exact(query), exact(keys), exact(values), left.numpy(), oracle(after))
        slots, new = (keys[:, :, :70].clone(), values[:, :, :70].clone()), (keys[:, :, 70], values[:, :, 70])
        output = momentkv.step(query, *new, *slots, torch.arange(70)[None, None].clone(), moments, 70)
        # The others have a millionth of the weight, and the estimate adds 0: the output must not be what rounding left of more.
        plain = optimized_momentkv.attend(query, keys, values, left, after)
        bound = 2 * np.abs(exact(plain) - wanted).max() + 1e-6 * np.abs(wanted).max()
        assert np.abs(exact(output) - wanted).max() <= bound


def check_ties() -> None:
    """Equal tokens have equal scores wherever they lie, in a tile, in a split or beside the cache: the latest position goes."""
    for dtype, length in itertools.product((torch.float32, torch.float16), (1, 40, 300)):
        # Halves, and a power of two of evicted tokens: no sum rounds, and no order of addition matters.
        keys, values = (torch.randn(1, 2, 1, 24).round().to(dtype).repeat(1, 1, length, 1) / 2 for _ in range(2))
        query = torch.randn(1, 4, 24).round().to(dtype)
        positions = torch.stack([torch.randperm(length), torch.randperm(length) + 5]).view(1, 2, length)
        others = torch.randn(2, 1, 2, 64, 24).round().to(dtype)
        every = torch.ones(1, 2, 64, dtype=torch.bool)
        moments = optimized_momentkv.update(optimized_momentkv.no_moments(keys, values), *others, every)
        before = positions.clone()
        # The new token is later than those of the first head, and earlier than most of the second.
        momentkv.step(
            query, keys[:, :, 0].clone(), values[:, :, 0].clone(), keys, values, positions, moments, torch.tensor([[length, 2]])
        )
        assert torch.equal(positions[0, 0], before[0, 0])
        assert torch.equal(positions[0, 1], torch.where(before[0, 1] == length + 4, 2, before[0, 1]))


def check_prompt() -> None:
    """Several splits, chunks of value channels, odd sizes; all, none and some kept: the cache bit by bit."""
    shapes = [(1, 1, 1, 1, 1), (2, 3, 33, 24, 80), (1, 1, 700, 16, 16), (1, 1, 40, 256, 256)]
    for dtype, (batch, heads, length, head_dim, value_dim) in itertools.product(DTYPES, shapes):
        keys, values = (
            states(batch, heads, length, head_dim, dtype=dtype),
            gapped(states(batch, heads, length, value_dim, dtype=dtype)),
        )
        for share in (0.0, 0.4, 1.0):
            kept = torch.rand(batch, heads, length) < share
            if share in (0.0, 1.0) and length > 33:
                continue
            cache, moments = momentkv.compress_prompt(keys, values, kept)
            for got, want in zip(cache, optimized_cache.compress(keys, values, kept), strict=True):
                assert torch.equal(got, want)
            before = oracle(optimized_momentkv.no_moments(keys, values))
            once = reference_momentkv.update(before, exact(keys), exact(values), ~kept.numpy())
            twice = reference_momentkv.update(once, exact(keys), exact(values), kept.numpy())
            updated = momentkv.update(moments, keys, values, kept)
            for got, want in ((moments, once), (updated, twice)):
                assert np.array_equal(got.count.numpy(), want.count)
                for field, wanted in zip(got[1:], want[1:], strict=True):
                    np.testing.assert_allclose(exact(field), wanted, rtol=1e-6, atol=2e-6 * max(1.0, np.abs(wanted).max()))


def check_nan() -> None:
    """On a GPU nobody looks for NaN beforehand: the token that has it goes, or none is left to compare, and every slot is one."""
    optimized_checks.require_finite = lambda name, value: None
    for broken in ("keys", "query", "moments"):
        storage = torch.randn(1, 2, 60, 16)
        keys, values, query = storage[:, :, 10:50], torch.randn(1, 2, 40, 16), torch.randn(1, 2, 16)
        moments = evicted_before(keys, values)
        {"keys": keys[0, 0, 7], "query": query[0, 0], "moments": moments.key_sum[0, 0]}[broken][3] = torch.nan
        around = storage[:, :, :10].clone(), storage[:, :, 50:].clone()
        positions = torch.arange(40).repeat(1, 2, 1)
        with np.errstate(invalid="ignore"):
            output = momentkv.step(query, torch.randn(1, 2, 16), torch.randn(1, 2, 16), keys, values, positions, moments, 40)
        assert torch.equal(storage[:, :, :10], around[0]) and torch.equal(storage[:, :, 50:], around[1])
        assert positions.ge(0).all() and positions.le(40).all()
        assert output[0, 0].isnan().any() and output[0, 1].isfinite().all()


def check_addresses() -> None:
    """Heads and tokens that lie 2^31 elements and more apart: 32-bit offsets would wrap. The pages between are never touched."""
    storage = torch.empty(2**32 + 2**20, dtype=torch.float16)
    apart = torch.as_strided(storage, (1, 2, 32, 16), (0, 2**31 + 64, 16, 1))
    scattered = torch.as_strided(storage, (1, 1, 2, 16), (0, 0, 2**32 + 1024, 1))
    for spread in (apart, scattered):
        near = torch.randn(spread.shape).half()
        spread.copy_(near)
        query, kept = torch.randn(1, 2, 16).half(), torch.rand(spread.shape[:3]) < 0.5
        kept[..., -1] = False
        moments = evicted_before(near, near)
        assert torch.equal(momentkv.score(query, spread, spread, moments), momentkv.score(query, near, near, moments))
        for got, want in zip(
            momentkv.update(moments, spread, spread, ~kept), momentkv.update(moments, near, near, ~kept), strict=True
        ):
            assert torch.equal(got, want)
        for got, want in zip(
            momentkv.compress_prompt(spread, spread, kept)[0], momentkv.compress_prompt(near, near, kept)[0], strict=True
        ):
            assert torch.equal(got, want)
        results = []
        values = torch.randn(near.shape).half()
        values[:, :, -1] = 0  # the last token, the farthest, scores 0 and is replaced
        for keys in (spread, near):
            own = Moments(*(torch.zeros_like(field) for field in moments))
            positions = torch.arange(keys.shape[2]).repeat(1, keys.shape[1], 1)
            arguments = query, *torch.ones(2, *keys.shape[:2], 16).half()
            results.append([momentkv.step(*arguments, keys, values.clone(), positions, own, 99), keys, positions, *own])
        assert results[0][2][..., -1].eq(99).all()
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


def check_errors() -> None:
    """What the kernels cannot take is refused before a launch, and before anything is written."""
    keys, query = states(1, 1, 8, 16), torch.ones(1, 2, 16)
    new, positions = torch.ones(1, 1, 16), torch.arange(8).view(1, 1, 8)
    moments, kept = optimized_momentkv.no_moments(keys, keys), torch.ones(1, 1, 8, dtype=torch.bool)
    strided = moments._replace(value_key_sum=torch.zeros(1, 1, 16, 16).mT)
    refused = [
        (lambda: momentkv.score(query, keys.double(), keys.double(), moments), "query: got dtype|keys: got dtype torch.float64"),
        (lambda: momentkv.score(torch.ones(1, 17, 16), keys, keys, moments), "query: got 17 query heads"),
        (lambda: momentkv.score(query, keys, keys, moments._replace(count=torch.tensor([[-1]]))), "moments.count"),
        (lambda: momentkv.attend(query, keys, keys, kept[..., 1:], moments), "kept: got shape"),
        (lambda: momentkv.update(moments, keys, keys, kept.long()), "evicted: got dtype"),
        (lambda: momentkv.compress_prompt(keys, keys[:, :, 1:], kept), "values: got shape"),
        (lambda: momentkv.compress_prompt(states(1, 1, 8, 300), keys, kept), "keys: got head_dim 300"),
        (lambda: momentkv.step(query, new[..., 1:], new, keys, keys, positions, moments, 8), "new_key: got shape"),
        (lambda: momentkv.step(query, new, new.half(), keys, keys, positions, moments, 8), "new_value: got dtype"),
        (lambda: momentkv.step(query, new, new, keys, keys, positions.int(), moments, 8), "positions: got torch.int32"),
        (lambda: momentkv.step(query, new, new, keys, keys, positions, moments, -1), "position: got -1"),
        (lambda: momentkv.step(query, new, new, keys, keys, positions, moments, torch.tensor([[1, 2]])), "position: got shape"),
        (lambda: momentkv.step(query, new, new, keys, keys, positions, moments._replace(key_sum=new.half()), 8), "moments.key_sum"),
        (lambda: momentkv.step(query, new, new, keys, keys, positions, strided, 8), "moments.value_key_sum: .* contiguous"),
        (lambda: momentkv.decode_step(query, new, new, keys, keys, moments, 0), "budget: got 0"),
    ]
    before = keys.clone()
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(keys, before) and not moments.count.any()


def check_repeatable() -> None:
    """Two runs agree in every bit, with several splits."""
    keys, values, query = states(1, 2, 600, 32), states(1, 2, 600, 32), torch.randn(1, 4, 32)
    kept, moments = torch.rand(1, 2, 600) < 0.5, evicted_before(keys, values)
    for call in (
        lambda: (momentkv.score(query, keys, values, moments),),
        lambda: (momentkv.attend(query, keys, values, kept, moments),),
        lambda: momentkv.update(moments, keys, values, kept),
        lambda: momentkv.decode_step(query, keys[:, :, 0], values[:, :, 0], keys, values, moments, 600)[:3],
    ):
        for first, second in zip(call(), call(), strict=True):
            assert torch.equal(first, second)


if __name__ == "__main__":
    for check in sys.argv[1:] or [name.removeprefix("check_") for name in list(globals()) if name.startswith("check_")]:
        torch.manual_seed(0)
        globals()[f"check_{check}"]()
