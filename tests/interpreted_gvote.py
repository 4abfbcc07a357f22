"""GVote's kernels in the interpreter, against float64: run with TRITON_INTERPRET=1, all checks or those named."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from evictionary.optimized import gvote as optimized_gvote
from evictionary.optimized.kernels import gvote
from evictionary.reference import gvote as reference_gvote

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers whose tokens and heads are in each other's place in memory."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:]).to(dtype).transpose(1, 2)


def exact(value: torch.Tensor) -> np.ndarray:
    """The same numbers in float64."""
    return value.double().numpy()


@contextlib.contextmanager
def constants(**values: int) -> Iterator[None]:
    """Other constants of the file, such as the length from which rows are cut into chunks."""
    before = {name: getattr(gvote, name) for name in values}
    vars(gvote).update(values)
    try:
        yield
    finally:
        vars(gvote).update(before)


def schedules() -> Iterator[str]:
    """Rows in registers; rows in chunks."""
    yield "short"
    with constants(LONGEST_SHORT_ROW=0):
        yield "long"


def robust_p(weights: np.ndarray) -> float:
    """A p that no sum of the largest weights comes near, so that rounding cannot move the size of a nucleus."""
    sums = np.cumsum(-np.sort(-weights, axis=-1), axis=-1)
    return next(p for p in np.linspace(0.6, 0.99, 400).round(5).tolist() if np.abs(sums - p).min() > 1e-5)


def check_nucleus_exact() -> None:
    """Weights in 64ths of which every sum is exact: ties, zeros, rows without any mass, every kind of p."""
    for schedule, dtype, length in itertools.product(schedules(), (torch.float32, torch.float16), (1, 2, 63, 64, 65, 300)):
        weights = torch.randint(0, 5, (3, length)) / 64
        weights[1] = weights[1, 0]
        weights[2] = 0
        for p in (0, 1e-9, 0.25, 0.5, 1.0):
            got = gvote.nucleus(weights.to(dtype), p)
            assert np.array_equal(got.numpy(), reference_gvote.nucleus(exact(weights), p)), (schedule, dtype, length, p)


def check_nucleus_mass() -> None:
    """Weights of any size, several chunks: at least p of the mass, less without the lightest, and nothing heavier left out."""
    for _, dtype, length in itertools.product(schedules(), (torch.float32, torch.bfloat16), (700, 4500)):
        weights = (4 * torch.randn(2, length)).softmax(dim=-1).to(dtype)
        for p in (0.3, 0.95, 0.999):
            kept = gvote.nucleus(weights, p).numpy()
            for row, chosen in zip(exact(weights), kept, strict=True):
                inside, total = np.sort(row[chosen]), row.sum()
                assert inside.sum() >= (p - 1e-6) * total > inside[1:].sum() - 2e-6 * total
                assert row[~chosen].max() <= inside[0]
        assert torch.equal(gvote.nucleus(weights, 1.0), weights > 0)


def check_logits() -> None:
    """Head_dims that are padded, lengths around a tile, groups of 1 to 8, more rows than a tile has."""
    for dtype, (length, head_dim, samples) in itertools.product(
        DTYPES, [(1, 64, 1), (127, 80, 3), (129, 96, 17), (65, 128, 70), (33, 256, 5), (64, 24, 2)]
    ):
        queries, keys = states(2, 2, samples, head_dim, dtype=dtype), states(2, 2, length, head_dim, dtype=dtype)
        wanted = reference_gvote.sampled_logits(exact(queries), exact(keys))
        np.testing.assert_allclose(exact(gvote.sampled_logits(queries, keys)), wanted, atol=1e-5)
        weights = gvote.attention_weights(queries[:, :, 0], keys)
        np.testing.assert_allclose(
            exact(weights), reference_gvote.attention_weights(exact(queries[:, :, 0]), exact(keys)), atol=2e-6
        )
    rows = gvote.sampled_logits(queries[0, 0], keys[0, 0])
    assert torch.equal(rows, gvote.sampled_logits(queries, keys)[0, 0])


def check_top_each() -> None:
    """A number for each row: none, one, all; ties, both zeros, several chunks, any strides and leading axes."""
    for schedule, dtype, length in itertools.product(schedules(), (torch.float32, torch.bfloat16), (1, 63, 64, 65, 300, 4500)):
        few = torch.tensor([-1.5, -0.0, 0.0, 1.0, 2.0])
        budgets = torch.tensor([0, 1, length // 3, length - 1, length, length + 4]).clamp(min=0)
        for scores in (torch.randn(6, 2 * length)[:, ::2], few[torch.randint(5, (6, length))]):
            scores = scores.to(dtype)
            got = gvote.top_each(scores, budgets)
            assert np.array_equal(got.numpy(), reference_gvote.top_each(exact(scores), budgets.numpy())), (schedule, dtype, length)
    assert torch.equal(gvote.top_each(scores.view(2, 3, -1), budgets.view(2, 3)), got.view(2, 3, -1))


def check_select() -> None:
    """Exact logits, many of them equal: groups of 1 to 8, padded head_dims, one token, several chunks; all dtypes."""
    cases = [(1, 2, 1, 1, 3, 64), (2, 2, 4, 65, 3, 80), (1, 1, 8, 300, 2, 256), (1, 2, 2, 130, 9, 96), (1, 1, 3, 4200, 2, 16)]
    for schedule, (dtype, case) in itertools.product(schedules(), zip(itertools.cycle(DTYPES), cases, strict=False)):
        batch, heads, group, length, samples, head_dim = case
        keys = states(batch, heads, length, head_dim).round().to(dtype)
        queries = (2 * states(batch, heads * group, samples + 1, head_dim)).round().div(4).to(dtype)
        query, sampled = queries[:, :, 0], queries[:, :, 1:]
        repeated = np.repeat(exact(keys), group, axis=1)
        p = robust_p(reference_gvote.attention_weights(exact(query), repeated)) if length > 1 else 0.5
        wanted = reference_gvote.select(exact(query), exact(keys), exact(sampled), p=p)
        got = gvote.select(query, keys, sampled, p=p)
        assert np.array_equal(got.numpy(), wanted), (schedule, dtype, case)
        assert torch.equal(optimized_gvote.select(query, keys, sampled, p=p), got)
        of_a_sample = 4 * group * length
        for limit in (1, 2 * of_a_sample, samples * of_a_sample, 3 * samples * of_a_sample):  # samples, heads, sequences at a time
            with constants(WORKSPACE=limit):
                assert torch.equal(gvote.select(query, keys, sampled, p=p), got), (limit, schedule, dtype, case)


def check_waves() -> None:
    """Samples are split only where one KV head alone is too much: every other wave has keys of its own, and K is read once."""
    assert gvote._waves(32, 8, 8, bytes_each=16 * 4096) == (8, 8, 8)
    assert gvote._waves(1, 8, 8, bytes_each=16 * 131072) == (1, 2, 8)
    assert gvote._waves(1, 8, 8, bytes_each=16 * 2**20) == (1, 1, 2)
    assert gvote._waves(1, 8, 8, bytes_each=16 * 2**24) == (1, 1, 1)


def check_nan() -> None:
    """On a GPU nobody looks for NaN: a row keeps as many tokens as it is to keep, and a budget is from 1 to T."""
    for schedule, length in itertools.product(schedules(), (40, 2300)):
        rows = torch.randn(4, length)
        rows[0, 3], rows[1], rows[2, 5] = torch.nan, torch.nan, torch.inf
        for beyond, from_logits in itertools.product((0.0, 0.05, 1.0), (False, True)):
            with np.errstate(invalid="ignore"):
                sizes = gvote._nuclei(rows, beyond, from_logits=from_logits, mask=False)
                mask = gvote._nuclei(rows, beyond, from_logits=from_logits, mask=True)
            assert sizes.ge(1).all() and sizes.le(length).all(), (schedule, sizes)
            assert mask.any(dim=-1).all()
        kept = torch.empty(4, length, dtype=torch.bool)
        budgets = torch.tensor([length, 7, 1, length - 1], dtype=torch.int32)
        gvote._vote(rows, budgets, kept, extend=False)
        assert torch.equal(kept.sum(dim=-1), budgets.long())


def check_addresses() -> None:
    """Heads, tokens and rows 2^31 elements and more apart: 32-bit offsets would wrap. The pages between are never touched."""
    storage = torch.empty(2**32 + 2**20, dtype=torch.float16)
    apart = torch.as_strided(storage, (1, 2, 32, 16), (0, 2**31 + 64, 16, 1))
    scattered = torch.as_strided(storage, (1, 1, 2, 16), (0, 0, 2**32 + 1024, 1))
    for spread in (apart, scattered):
        near = torch.randn(spread.shape).half()
        spread.copy_(near)
        query = torch.randn(1, 2, 16).half()
        sampled = torch.randn(1, 2, 3, 16).half()
        assert torch.equal(gvote.select(query, spread, sampled), gvote.select(query, near, sampled))
    near = torch.randn(1, 2, 2, 16).half()
    keys = torch.randn(1, 2, 40, 16).half()
    for axes in ((0, 2**31 + 64, 16, 1), (0, 16, 2**32 + 1024, 1)):
        spread = torch.as_strided(storage, near.shape, axes)
        spread.copy_(near)
        assert torch.equal(gvote.sampled_logits(spread, keys), gvote.sampled_logits(near, keys))
    rows = torch.as_strided(storage, (2, 300), (2**31 + 64, 1))
    rows.copy_(torch.rand(2, 300))
    for _ in schedules():
        assert torch.equal(gvote.nucleus(rows, 0.7), gvote.nucleus(rows.clone(), 0.7))
        budgets = torch.tensor([100, 7])
        assert torch.equal(gvote.top_each(rows, budgets), gvote.top_each(rows.clone(), budgets))


def check_errors() -> None:
    """What the kernels cannot take is refused before a launch."""
    query, keys, sampled = torch.ones(1, 2, 16), states(1, 1, 8, 16), torch.ones(1, 2, 3, 16)
    refused = [
        (lambda: gvote.select(query.double(), keys.double(), sampled.double()), "keys: got dtype torch.float64"),
        (lambda: gvote.select(query, keys, sampled.half()), "sampled_queries: got dtype"),
        (lambda: gvote.select(query, keys, sampled[..., :8]), "sampled_queries: got shape"),
        (lambda: gvote.select(query, states(1, 3, 8, 16), sampled), "queries: got 2 query heads"),
        (lambda: gvote.select(query, keys, sampled, p=1.5), "p: got 1.5"),
        (lambda: gvote.select(torch.ones(1, 2, 300), states(1, 1, 8, 300), torch.ones(1, 2, 3, 300)), "keys: got head_dim 300"),
        (lambda: gvote.nucleus(torch.tensor([0.5, -0.1]), 0.5), "attention: got a weight of -0.1"),
        (lambda: gvote.nucleus(torch.tensor([0.5, torch.nan]), 0.5), "attention: got NaN"),
        (lambda: gvote.nucleus(torch.ones(2, dtype=torch.int32), 0.5), "attention: got dtype torch.int32"),
        (lambda: gvote.sampled_logits(sampled, keys), "sampled_queries: got shape"),
        (lambda: gvote.top_each(torch.ones(2, 3), torch.tensor([1.0, 2.0])), "budgets: got torch.float32"),
        (lambda: gvote.top_each(torch.ones(2, 3), torch.tensor([1, -1])), r"budgets: got \[1, -1\]"),
        (lambda: gvote.top_each(torch.ones(2, 3), torch.tensor([1])), "budgets: got shape"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def check_repeatable() -> None:
    """A sequence has the same selection, alone and in a batch, and again, and its weights the same nucleus in any row."""
    query, keys, sampled = torch.randn(2, 4, 16), states(2, 2, 120, 16), torch.randn(2, 4, 3, 16)
    weights = torch.rand(5, 2500)
    for _ in schedules():
        kept = gvote.select(query, keys, sampled)
        assert torch.equal(kept, gvote.select(query, keys, sampled))
        assert torch.equal(kept[1:], gvote.select(query[1:], keys[1:], sampled[1:]))
        chosen = gvote.nucleus(weights, 0.9)
        assert torch.equal(chosen, gvote.nucleus(weights, 0.9))
        assert torch.equal(chosen[3:4], gvote.nucleus(weights[3:4], 0.9))


if __name__ == "__main__":
    checks = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}
    for name in sys.argv[1:] or checks:
        torch.manual_seed(0)
        checks[name]()
