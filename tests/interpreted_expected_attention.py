"""The kernels of Expected Attention in the interpreter, against float64: cases that the laws do not draw.

Run with TRITON_INTERPRET=1 and the names of checks, or without a name for all of them.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch

from evictionary.optimized import checks as optimized_checks
from evictionary.optimized import expected_attention as optimized_expected_attention
from evictionary.optimized.kernels import expected_attention
from evictionary.reference import expected_attention as reference_expected_attention
from evictionary.reference.rope import rotate

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers whose tokens and heads are in each other's place in memory."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:]).to(dtype).transpose(1, 2)


def exact(value: torch.Tensor) -> np.ndarray:
    """The same numbers in float64."""
    return value.double().numpy()


def gaussian(batch: int, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean, and a covariance of eigenvalues from 0.01 to 4 in a drawn basis."""
    basis = torch.linalg.qr(torch.randn(batch, heads, head_dim, head_dim)).Q
    return torch.randn(batch, heads, head_dim), (basis * torch.logspace(-2, 0.6, head_dim)) @ basis.mT


def compare_scores(*inputs: torch.Tensor, bound: float, epsilon: float = 0.0) -> None:
    """The scores of keys, values, mean and covariance are those of the reference, each within `bound` of itself."""
    got = expected_attention.score(*inputs, epsilon=epsilon)
    wanted = reference_expected_attention.score(*map(exact, inputs), epsilon=epsilon)
    np.testing.assert_allclose(exact(got), wanted, rtol=bound, atol=1e-30)


def check_scores() -> None:
    """Sizes around a tile and a run, padded head_dims, groups of 1 to 8, values of other channels; Sigma to 16 bits and more."""
    # batch, KV heads, group, tokens, head_dim, value_dim
    shapes = [(1, 1, 1, 1, 2, 3), (2, 2, 4, 127, 24, 80), (1, 1, 3, 128, 80, 16), (1, 1, 8, 129, 96, 96), (1, 1, 2, 65, 256, 64)]
    shapes += [(1, 1, 2, 513, 64, 256), (2, 1, 1, 130, 128, 128)]
    # float16: 22 bits of Sigma; bfloat16: 16, and the interpreter cuts off where a GPU rounds.
    for dtype, bound in zip(DTYPES, (2e-6, 2e-6, 3e-5), strict=True):
        for batch, heads, group, length, head_dim, value_dim in shapes:
            keys, values = (states(batch, heads, length, size, dtype=dtype) for size in (head_dim, value_dim))
            compare_scores(keys, values, *gaussian(batch, group * heads, head_dim), bound=bound)
    mean, covariance = gaussian(1, 2, 64)
    keys = states(1, 2, 200, 64, dtype=torch.float16)
    compare_scores(keys[:, :, ::3], keys[:, :, 1::3, ::2], mean.half(), covariance.double().mT, bound=3e-6, epsilon=0.02)
    expected_attention.TERMS = 1
    compare_scores(keys, keys, mean, covariance, bound=1e-2)
    expected_attention.TERMS = 2


def check_range() -> None:
    """Covariances and values beyond float16 and its square, no covariance, logits of 10,000, equal tokens, NaN."""
    mean, covariance = gaussian(1, 2, 32)
    for dtype, scale in itertools.product(DTYPES[:2], (1e-6, 1.0, 1e6)):
        keys, values = (states(1, 1, 40, 32) for _ in range(2))
        keys = (keys * scale**-0.5).to(dtype)
        compare_scores(keys, values.to(dtype), mean * scale**0.5, covariance * scale, bound=2e-6)
    keys, values = states(1, 1, 300, 32), states(1, 1, 300, 32) * 1e-30
    compare_scores(keys, values, mean, covariance * 0, bound=2e-6)
    compare_scores(keys, values * 1e30 * 1e25, mean, covariance, bound=2e-6)
    keys = torch.zeros(1, 1, 4, 4)
    keys[..., :2, 0] = 128
    for sign in (1, -1):
        got = expected_attention.score(
            keys, torch.ones(1, 1, 4, 1), sign * keys[..., 0, :] * 1.25, torch.zeros(1, 1, 4, 4), epsilon=0
        )
        assert got.flatten().tolist() == [0.5, 0.5, 0, 0][::sign]
    keys, values = states(1, 3, 300, 16), states(1, 3, 300, 16)
    keys[0, 1, 7, 3] = torch.nan
    optimized_checks.require_finite = lambda name, value: None  # as on a GPU, where nobody waits for the answer
    got = expected_attention.score(keys, values, *gaussian(1, 6, 16))
    assert got[0, 1].isnan().all() and got[0, ::2].isfinite().all()


def compare_moments(got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[np.ndarray, np.ndarray], bound: float) -> None:
    """The mean is within `bound` of each channel's deviation or of its own rounding, Sigma_ij of both channels' deviations."""
    deviation = np.sqrt(np.diagonal(wanted[1], axis1=-2, axis2=-1))
    assert (np.abs(exact(got[0]) - wanted[0]) <= bound * deviation + 1e-6 * np.abs(wanted[0])).all()
    allowed = bound * deviation[..., None] * deviation[..., None, :] + 1e-7
    assert (np.abs(exact(got[1]) - wanted[1]) <= allowed).all(), (np.abs(exact(got[1]) - wanted[1]) / allowed).max()


def check_statistics() -> None:
    """Sizes around a tile, a split and several splits, odd and padded head_dims, a mean a hundred times the deviation."""
    shapes = [(1, 1, 1, 2), (2, 2, 31, 80), (1, 2, 33, 3), (1, 1, 512, 96), (1, 1, 513, 64), (1, 1, 1030, 128), (1, 1, 70, 256)]
    # The interpreter multiplies bfloat16 as float32, so nothing is rounded there.
    for dtype, bound in zip(DTYPES, (1e-5, 2e-3, 1e-5), strict=True):
        for shape in shapes:
            queries = states(*shape)
            queries[..., 1] += 100
            queries = queries.to(dtype)
            wanted = reference_expected_attention.query_statistics(exact(queries))
            compare_moments(expected_attention.query_statistics(queries), wanted, bound)
    queries = states(1, 2, 90, 16)
    queries[:, :, 0] *= 1000  # the first query, of the token that all attend to, is unlike all others
    compare_moments(
        expected_attention.query_statistics(queries), reference_expected_attention.query_statistics(exact(queries)), 1e-5
    )


def check_rotation() -> None:
    """Queries turned back from any positions, near and far, of one row or of each head its own; any base."""
    for theta, shape in [(10000.0, (1, 1, 5, 2)), (10000.0, (2, 2, 70, 80)), (500000.0, (1, 1, 33, 128)), (100.0, (1, 1, 530, 16))]:
        queries = states(*shape)
        queries[..., 1] += 3
        for positions in (torch.arange(shape[2]), torch.randint(0, 200_000, shape[:3]), torch.tensor([131_071])):
            places = exact(positions)
            turned = torch.from_numpy(rotate(exact(queries), places, theta)).float()
            wanted = reference_expected_attention.query_statistics(rotate(exact(turned), -places, theta))
            # Of an angle, position 200,000 may miss 2^-33 turns as often.
            bound = 1e-5 if positions.max() < 1000 else 2e-3
            compare_moments(expected_attention.unrotated_statistics(turned, positions, theta), wanted, bound)
            got = optimized_expected_attention.unrotated_statistics(turned, positions, theta)
            compare_moments(got, wanted, 1e-5)


def check_repeatable() -> None:
    """Two runs agree in every bit, and the scores of a sequence are the same alone and in a batch."""
    queries, values = (states(2, 2, 1030, 24, dtype=torch.float16) for _ in range(2))
    mean, covariance = (
        torch.stack(runs) for runs in zip(*(expected_attention.query_statistics(queries) for _ in range(2)), strict=True)
    )
    assert torch.equal(mean[0], mean[1]) and torch.equal(covariance[0], covariance[1])
    keys, values = queries[:, ::2], values[:, ::2]
    scores = expected_attention.score(keys, values, mean[0], covariance[0])
    assert torch.equal(scores, expected_attention.score(keys, values, mean[0], covariance[0]))
    assert torch.equal(scores[1:], expected_attention.score(keys[1:], values[1:], mean[0, 1:], covariance[0, 1:]))


def check_addresses() -> None:
    """Heads and tokens that lie 2^31 elements and more apart: 32-bit offsets would wrap. The pages between are never touched."""
    storage = torch.empty(2**32 + 2**20, dtype=torch.float16)
    apart = torch.as_strided(storage, (1, 2, 32, 16), (0, 2**31 + 64, 16, 1))
    scattered = torch.as_strided(storage, (1, 1, 2, 16), (0, 0, 2**32 + 1024, 1))
    for spread in (apart, scattered):
        near = torch.randn(spread.shape).half()
        spread.copy_(near)
        mean, covariance = gaussian(1, 2, 16)
        scores = [expected_attention.score(keys, keys, mean, covariance) for keys in (spread, near)]
        assert torch.equal(*scores)
        for got, want in zip(expected_attention.query_statistics(spread), expected_attention.query_statistics(near), strict=True):
            assert torch.equal(got, want)


def check_errors() -> None:
    """What the kernels cannot take is refused before a launch."""
    keys, positions = states(1, 2, 8, 16), torch.arange(8)
    mean, covariance = gaussian(1, 4, 16)
    score, statistics, turned = (
        expected_attention.score,
        expected_attention.query_statistics,
        expected_attention.unrotated_statistics,
    )
    refused = [
        (lambda: score(keys.double(), keys.double(), mean, covariance), "keys: got dtype torch.float64"),
        (lambda: score(keys, states(1, 2, 8, 300), mean, covariance), "values: got head_dim 300"),
        (lambda: score(keys, keys.half(), mean, covariance), "values: got dtype"),
        (lambda: score(keys, keys[:, :, 1:], mean, covariance), "values: got shape"),
        (lambda: score(keys, keys, mean[:, :3], covariance), "query_mean: got 3 query heads"),
        (lambda: score(keys, keys, mean[..., :8], covariance), "query_mean: got shape"),
        (lambda: score(keys, keys, mean, covariance[..., :8]), "query_covariance: got shape"),
        (lambda: score(keys, keys, mean, covariance, epsilon=-1), "epsilon: got -1"),
        (lambda: statistics(keys.double()), "queries: got dtype torch.float64"),
        (lambda: statistics(keys[0, 0, 0]), "queries: got shape"),
        (lambda: turned(keys[..., :3], positions), "queries: got head_dim 3"),
        (lambda: turned(keys, positions.float()), "positions: got torch.float32"),
        (lambda: turned(keys, positions[1:]), "positions: got shape"),
        (lambda: turned(keys, positions, 0.0), "theta: got 0.0"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


if __name__ == "__main__":
    every = ["scores", "range", "statistics", "rotation", "repeatable", "addresses", "errors"]
    for check in sys.argv[1:] or every:
        torch.manual_seed(0)
        globals()[f"check_{check}"]()
