"""Correct SnapKVs of other kinds."""

from __future__ import annotations

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY, refuse, streamed, torch_weights, widened

SCORE, POOL = "snapkv.score", "snapkv.average_pool"


def checked(queries, keys, window_size, kernel_size) -> int:
    """The window, after ValueError for what the contract refuses."""
    for name, value in (("window_size", window_size), ("kernel_size", kernel_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value}")
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size: got {kernel_size}")
    refuse(queries, keys)
    window = min(window_size, keys.shape[2])
    if queries.shape[2] < window:
        raise ValueError(f"queries: got {queries.shape[2]}, fewer than the window")
    return window


@control(POOL, dtypes=NUMPY)
def convolved(weights, kernel_size):
    """A convolution with equal weights, row by row."""
    kernel = np.full(kernel_size, 1 / kernel_size, weights.dtype)
    rows = [np.convolve(row, kernel)[kernel_size // 2 :][: row.size] for row in weights.reshape(-1, weights.shape[-1])]
    return np.stack(rows).reshape(weights.shape)


@control(POOL, dtypes=NUMPY)
def shifted_sums(weights, kernel_size):
    """The shifted rows added up from the farthest, and then divided."""
    total, length = np.zeros_like(weights), weights.shape[-1]
    for shift in range(min(kernel_size // 2, length - 1), 0, -1):
        total[..., shift:] += weights[..., :-shift]
        total[..., :-shift] += weights[..., shift:]
    return (total + weights) / kernel_size


@control(POOL, array_library="torch", dtypes=ALL)
def torch_pooled(weights, kernel_size):
    """torch's own average pooling, which counts the padding."""
    pooled = torch.nn.functional.avg_pool1d(weights.reshape(-1, 1, weights.shape[-1]), kernel_size, 1, kernel_size // 2)
    return pooled.reshape(weights.shape)


@control(SCORE, dtypes=NUMPY)
def tiled(queries, keys, *, window_size=32, kernel_size=7):
    """Tiles of 16 tokens with a running maximum and sum; group and window added up query by query; a convolution."""
    window = checked(queries, keys, window_size, kernel_size)
    scores, before = np.full(keys.shape[:3], np.inf, keys.dtype), keys.shape[2] - window
    if before:
        weights = streamed(queries[:, :, -window:], keys)[..., :before].reshape(*keys.shape[:2], -1, before)
        total = sum(weights[:, :, row] for row in reversed(range(weights.shape[2])))
        scores[..., :before] = convolved(total / weights.shape[2], kernel_size)
    return scores


@control(SCORE, dtypes=NUMPY)
def pooled_first(queries, keys, *, window_size=32, kernel_size=7):
    """Each query's weights pooled by themselves, and then the mean over the window and the group."""
    window = checked(queries, keys, window_size, kernel_size)
    before = keys.shape[2] - window
    pooled = shifted_sums(streamed(queries[:, :, -window:], keys)[..., :before], kernel_size) if before else np.zeros(0)
    scores = np.full(keys.shape[:3], np.inf, keys.dtype)
    scores[..., :before] = pooled.reshape(*keys.shape[:2], -1, before).mean(axis=2) if before else np.inf
    return scores


def torch_scored(weights, keys, window, kernel_size):
    """The scores of attention [B, H_q, W, T]."""
    before = keys.shape[2] - window
    scores = torch.full(keys.shape[:3], torch.inf, dtype=weights.dtype)
    if before:
        received = weights[..., :before].mean(dim=2).unflatten(1, (keys.shape[1], -1)).mean(dim=2)
        scores[..., :before] = torch_pooled(received, kernel_size)
    return scores.to(keys.dtype)


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_in_float32(queries, keys, *, window_size=32, kernel_size=7):
    """torch, computing at least in float32, the result rounded."""
    window = checked(queries, keys, window_size, kernel_size)
    return torch_scored(widened(queries[:, :, -window:], keys), keys, window, kernel_size)


@control(SCORE, array_library="torch", dtypes=("float32", "float16", "bfloat16"))
def torch_rounding_each_step(queries, keys, *, window_size=32, kernel_size=7):
    """torch in the dtype of the keys throughout, as eager code does it."""
    window = checked(queries, keys, window_size, kernel_size)
    return torch_scored(torch_weights(queries[:, :, -window:], keys), keys, window, kernel_size)


def finite_window(scores):
    """One more than twice the largest finite score in the place of infinity."""
    return torch.where(scores.isinf(), 2 * scores.where(scores.isfinite(), 0).amax() + 1, scores)


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_window_above_the_rest(queries, keys, *, window_size=32, kernel_size=7):
    """As in kvpress's SnapKVPress, the window has a finite score."""
    return finite_window(torch_in_float32(queries, keys, window_size=window_size, kernel_size=kernel_size))


@control(SCORE, array_library="torch", dtypes=("float64", "float32"))
def torch_all_queries(queries, keys, *, window_size=32, kernel_size=7):
    """The attention of all the queries, of which the window is cut out, pooled by a convolution of the padded rows."""
    window = checked(queries, keys, window_size, kernel_size)
    before = keys.shape[2] - window
    weights = torch_weights(queries, keys)[:, :, -window:]
    received = weights.unflatten(1, (keys.shape[1], -1)).mean(dim=(2, 3))
    padded = torch.nn.functional.pad(received[..., :before], (kernel_size // 2, kernel_size // 2))
    pooled = padded.unfold(-1, kernel_size, 1).mean(dim=-1) if before else received[..., :0]
    return torch.nn.functional.pad(pooled, (0, window), value=torch.inf)
