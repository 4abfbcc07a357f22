"""KeyDiff with an anchor kept from step to step, in the interpreter: run with TRITON_INTERPRET=1, all checks or those named."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch

from evictionary.optimized import keydiff as optimized_keydiff
from evictionary.optimized.kernels import keydiff
from evictionary.reference import keydiff as reference_keydiff

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers whose tokens and heads are in each other's place in memory."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:]).to(dtype).transpose(1, 2)


def exact(value: torch.Tensor) -> np.ndarray:
    """The same numbers in float64."""
    return value.double().numpy()


def oracle_sum(keys: torch.Tensor) -> np.ndarray:
    """The sum of the unit keys in float64."""
    return reference_keydiff.unit(exact(keys)).sum(axis=-2)


def check_sums() -> None:
    """Anchors of caches around a tile and a split, keys that float32 cannot square, zero keys, any leading axes."""
    shapes = [(1, 1, 1, 1), (2, 3, 63, 24), (1, 2, 65, 80), (1, 1, 257, 96), (1, 2, 64, 256), (1, 2, 700, 64)]
    for dtype, shape in itertools.product(DTYPES, shapes):
        keys = states(*shape, dtype=dtype)
        if dtype != torch.float16:
            keys[:, :, ::3] *= 1e-30
            keys[:, :, 1::3] *= 1e30
        keys[:, :, 4:5] = 0
        for module in (keydiff, optimized_keydiff):
            np.testing.assert_allclose(exact(module.anchor_sum(keys)), oracle_sum(keys), atol=2e-7 * shape[2] ** 0.5 + 1e-6)
            np.testing.assert_allclose(exact(module.anchor(keys)), reference_keydiff.anchor(exact(keys)), atol=5e-7)
    keys = states(2, 3, 5, 16)
    assert torch.equal(keydiff.anchor_sum(keys[0, 0]), keydiff.anchor_sum(keys)[0, 0])
    assert torch.equal(keydiff.anchor_sum(keys[None]), keydiff.anchor_sum(keys)[None])


def check_scores() -> None:
    """Against the anchor of the same keys, its mean, a foreign one and none; in the layout of heads beside tokens and others."""
    for dtype, (length, head_dim) in itertools.product(DTYPES, [(1, 64), (65, 80), (300, 32), (70, 256)]):
        keys = states(2, 2, length, head_dim, dtype=dtype)
        sums = keydiff.anchor_sum(keys)
        for module in (keydiff, optimized_keydiff):
            wanted = reference_keydiff.score(exact(keys))
            for anchor in (sums, sums / length, sums.mT.contiguous().mT):
                np.testing.assert_allclose(exact(module.score_with_anchor(keys, anchor)), wanted, atol=1e-6)
            foreign = torch.randn(2, 2, head_dim)
            wanted = -reference_keydiff.cosine(exact(keys), exact(foreign))
            np.testing.assert_allclose(exact(module.score_with_anchor(keys, foreign)), wanted, atol=1e-6)
            assert module.score_with_anchor(keys, 0 * sums).eq(0).all()
    keys = states(1, 1, 40, 16)
    spread = torch.empty(1, 1, 40, 32)[..., ::2].copy_(keys)
    anchor = keydiff.anchor_sum(keys)
    assert torch.equal(keydiff.score_with_anchor(spread, anchor), keydiff.score_with_anchor(keys, anchor))


def check_updates() -> None:
    """Blocks around a tile come and go, none at all, unequally many; the argument stays what it was."""
    for dtype, (new, evicted, head_dim) in itertools.product(DTYPES, [(1, 1, 64), (63, 129, 80), (128, 1, 128), (3, 2, 256)]):
        cache, block = states(2, 2, 150, head_dim, dtype=dtype), states(2, 2, new, head_dim, dtype=dtype)
        before = keydiff.anchor_sum(cache)
        untouched = before.clone()
        gone = cache[:, :, :evicted]
        added, removed = oracle_sum(block), oracle_sum(gone)
        for module in (keydiff, optimized_keydiff):
            for arguments, change in (((block, gone), added - removed), ((block, None), added), ((None, gone), -removed)):
                got = module.update_anchor(before, *arguments)
                np.testing.assert_allclose(exact(got), exact(before) + change, atol=4e-6)
            assert torch.equal(module.update_anchor(before, None, None), before)
        assert torch.equal(before, untouched)


def check_drift() -> None:
    """300 steps of block prompt processing, a third of the keys alike: the sum that was kept scores as one taken afresh."""
    budget, block, head_dim = 96, 8, 64
    common = torch.randn(head_dim)
    cache = states(1, 2, budget, head_dim)
    kept_sum = keydiff.anchor_sum(cache)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        new = torch.randn(1, 2, block, head_dim, generator=generator)
        new[:, :, ::3] += 3 * common
        slots = torch.randperm(budget, generator=generator)[:block]
        kept_sum = keydiff.update_anchor(kept_sum, new, cache[:, :, slots])
        cache[:, :, slots] = new
    size = np.abs(oracle_sum(cache)).max()
    assert np.abs(exact(kept_sum) - oracle_sum(cache)).max() < 2e-6 * size
    scores = keydiff.score_with_anchor(cache, kept_sum)
    np.testing.assert_allclose(exact(scores), reference_keydiff.score(exact(cache)), atol=2e-6)
    np.testing.assert_allclose(exact(scores), exact(keydiff.score(cache)), atol=2e-6)


def check_blocks() -> None:
    """Block prompt processing with a kept anchor ends with the cache of `reference_keydiff.process_prompt`."""
    budget, block = 20, 12
    keys = states(1, 1, 150, 16)
    cache = keys[:, :, :0]
    kept_sum = torch.zeros(1, 1, 16)
    for start in range(0, keys.shape[2], block):
        new = keys[:, :, start : start + block]
        cache, kept_sum = torch.cat([cache, new], dim=2), keydiff.update_anchor(kept_sum, new, None)
        if cache.shape[2] > budget:
            kept = keydiff.score_with_anchor(cache, kept_sum).argsort(dim=-1, descending=True, stable=True)[0, 0, :budget]
            gone = torch.ones(cache.shape[2], dtype=torch.bool).index_fill(0, kept, False)
            kept_sum, cache = keydiff.update_anchor(kept_sum, None, cache[:, :, gone]), cache[:, :, ~gone]
    wanted = reference_keydiff.process_prompt(exact(keys), np.zeros((1, 1, 150, 1)), budget=budget, block_size=block)
    assert np.array_equal(exact(cache), wanted.keys)


def check_nan() -> None:
    """On a GPU nobody looks for NaN: in a key it shows in that key's score, in an anchor in all of its head's."""
    keys = states(1, 2, 40, 16)
    heads, tile = keys.contiguous(), keydiff._tile(keys)
    anchor = torch.randn(2, 1, 16)
    anchor[1, 0, 3] = torch.nan
    heads[0, 0, 7, 2] = torch.nan
    scores = keydiff._score(heads, anchor)
    assert scores[0, 0].isnan().nonzero().flatten().tolist() == [7]
    assert scores[0, 1].isnan().all()
    assert keydiff._partial_sums(heads).isnan().flatten(1).any(dim=1).tolist() == [True, False]
    assert tile["RESCALE"]


def check_addresses() -> None:
    """Heads and tokens 2^31 elements and more apart: 32-bit offsets would wrap. The pages between are never touched."""
    storage = torch.empty(2**32 + 2**20, dtype=torch.float16)
    apart = torch.as_strided(storage, (1, 2, 32, 16), (0, 2**31 + 64, 16, 1))
    scattered = torch.as_strided(storage, (1, 1, 2, 16), (0, 0, 2**32 + 1024, 1))
    for spread in (apart, scattered):
        near = torch.randn(spread.shape).half()
        spread.copy_(near)
        anchor = keydiff.anchor_sum(near)
        assert torch.equal(keydiff.anchor_sum(spread), anchor)
        assert torch.equal(keydiff.score_with_anchor(spread, anchor), keydiff.score_with_anchor(near, anchor))
        assert torch.equal(keydiff.update_anchor(anchor, spread, spread), keydiff.update_anchor(anchor, near, near))


def check_errors() -> None:
    """What does not fit is refused before a launch, by both files."""
    keys, anchor = states(1, 2, 8, 16), torch.ones(1, 2, 16)
    for module in (keydiff, optimized_keydiff):
        refused = [
            (lambda module=module: module.score_with_anchor(keys, anchor[:, :1]), r"anchor: got shape \(1, 1, 16\)"),
            (lambda module=module: module.score_with_anchor(keys.half(), anchor.half()), "anchor: got dtype torch.float16"),
            (lambda module=module: module.score_with_anchor(keys, anchor * torch.nan), "anchor: got NaN"),
            (lambda module=module: module.score_with_anchor(keys * torch.inf, anchor), "keys: got NaN or infinite"),
            (lambda module=module: module.update_anchor(anchor, keys[..., :8], None), "anchor: got shape"),
            (lambda module=module: module.update_anchor(anchor, None, keys[:, :, :0]), "evicted_keys: got shape"),
            (lambda module=module: module.update_anchor(anchor, keys, keys.half()), "evicted_keys: got dtype"),
            (lambda module=module: module.anchor_sum(keys[0, 0, 0]), "keys: got shape"),
        ]
        for call, message in refused:
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match="new_keys: got head_dim 300"):
        keydiff.update_anchor(torch.ones(1, 1, 300), states(1, 1, 4, 300), None)


def check_repeatable() -> None:
    """A sequence has the same sums and scores, bit by bit, alone and in a batch, and again."""
    keys, block = states(3, 2, 600, 32), states(3, 2, 40, 32)
    sums = keydiff.anchor_sum(keys)
    updated = keydiff.update_anchor(sums, block, keys[:, :, :40])
    scores = keydiff.score_with_anchor(keys, updated)
    assert torch.equal(sums, keydiff.anchor_sum(keys))
    assert torch.equal(sums[1:2], keydiff.anchor_sum(keys[1:2]))
    assert torch.equal(updated[1:2], keydiff.update_anchor(sums[1:2], block[1:2], keys[1:2, :, :40]))
    assert torch.equal(scores[1:2], keydiff.score_with_anchor(keys[1:2], updated[1:2]))


if __name__ == "__main__":
    checks = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}
    for name in sys.argv[1:] or checks:
        torch.manual_seed(0)
        checks[name]()
