"""Correct R-KVs of other kinds."""

from __future__ import annotations

import numpy as np
import torch

from evictionary.reference import rkv
from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.refusal import refuse_unless
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY, refuse
from evictionary.spec_tests.snapkv.variants import checked, finite_window

REDUNDANCY, IMPORTANCE, SCORE = "rkv.redundancy", "rkv.importance", "rkv.score"


def refuse_share(share) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"importance_share: got {share}")


@control(REDUNDANCY, dtypes=NUMPY)
def row_by_row(keys, *, threshold=0.5):
    """One key after the other says what it thinks of the others; its latest similar key is found from the end."""
    norms = np.sqrt(np.einsum("...d,...d->...", keys, keys))
    directions = keys / np.where(norms == 0, 1, norms)[..., None]
    totals = np.zeros(keys.shape[:-1], keys.dtype)
    for place in range(keys.shape[-2]):
        said = np.einsum("...td,...d->...t", directions, directions[..., place, :])
        said[..., place] = 0
        for row in said.reshape(-1, keys.shape[-2]):
            latest = next((other for other in reversed(range(row.size)) if row[other] > threshold), None)
            if latest is not None:
                row[latest] = 0
        totals += said
    powers = np.exp(totals / keys.dtype.type(keys.shape[-2]))
    return powers / powers.sum(axis=-1, keepdims=True)


@control(REDUNDANCY, array_library="torch", dtypes=ALL)
def torch_at_once(keys, *, threshold=0.5):
    """torch, at least in float32: the whole matrix, the latest similar key by a cumulative count from the end."""
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    norms = wide.norm(dim=-1, keepdim=True)
    directions = wide / norms.where(norms > 0, 1)
    similarity = directions @ directions.mT
    similarity.diagonal(dim1=-2, dim2=-1).zero_()
    similar = similarity > threshold
    later = similar.flip(-1).cumsum(-1).flip(-1)
    similarity[similar & (later == 1)] = 0
    return similarity.mean(dim=-2).softmax(dim=-1).to(keys.dtype)


@control(IMPORTANCE, dtypes=NUMPY)
def query_by_query(queries, keys, *, window_size=8, kernel_size=7):
    """The queries of the window one after the other, from the last; the neighbours compared by shifting."""
    refuse_unless(queries=queries.shape[2] >= window_size)
    before = keys[:, :, :-window_size] / keys.dtype.type(keys.shape[-1] ** 0.5)
    group = queries.shape[1] // keys.shape[1]
    total = np.zeros(before.shape[:-1], before.dtype)
    for place in range(-1, -window_size - 1, -1):
        logits = np.stack([np.einsum("bhtd,bhd->bht", before, queries[:, g::group, place]) for g in range(group)])
        powers = np.exp(logits.max(axis=0) - logits.max(axis=(0, -1))[..., None])
        total = total + powers / powers.sum(axis=-1, keepdims=True)
    largest = total.copy()
    for shift in range(1, min(kernel_size // 2, total.shape[-1] - 1) + 1):
        largest[..., shift:] = np.maximum(largest[..., shift:], total[..., :-shift])
        largest[..., :-shift] = np.maximum(largest[..., :-shift], total[..., shift:])
    return largest / keys.dtype.type(window_size)


@control(IMPORTANCE, array_library="torch", dtypes=ALL)
def torch_by_logarithms(queries, keys, *, window_size=8, kernel_size=7):
    """torch, at least in float32: the weights as exp(logit - log Z), the neighbours by a pooling layer."""
    refuse_unless(queries=queries.shape[2] >= window_size)
    wide = torch.promote_types(keys.dtype, torch.float32)
    before = keys[:, :, None, :-window_size].to(wide)
    recent = queries[:, :, -window_size:].to(wide).unflatten(1, (keys.shape[1], -1))
    logits = (recent @ before.mT).amax(dim=2) / keys.shape[-1] ** 0.5
    received = (logits - logits.logsumexp(dim=-1, keepdim=True)).exp().mean(dim=-2)
    return torch.nn.functional.max_pool1d(received, kernel_size, stride=1, padding=kernel_size // 2).to(keys.dtype)


@control(SCORE, dtypes=NUMPY)
def in_parts(queries, keys, *, window_size=8, kernel_size=7, importance_share=0.07, threshold=0.5):
    """The two parts from the controls above, mixed as R + lambda (I - ...)."""
    refuse_share(importance_share)
    window = checked(queries, keys, window_size, kernel_size)
    scores = np.full(keys.shape[:3], np.inf, keys.dtype)
    if window < keys.shape[2]:
        repeated = row_by_row(keys, threshold=threshold)[..., :-window]
        attended = query_by_query(queries, keys, window_size=window, kernel_size=kernel_size)
        scores[..., :-window] = importance_share * (attended + repeated) - repeated
    return scores


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_score(queries, keys, *, window_size=8, kernel_size=7, importance_share=0.07, threshold=0.5):
    """torch, at least in float32; the maximum of the neighbours by unfolding."""
    refuse_share(importance_share)
    window = checked(queries, keys, window_size, kernel_size)
    wide = torch.promote_types(keys.dtype, torch.float32)
    scores = torch.full(keys.shape[:3], torch.inf, dtype=wide)
    if window < keys.shape[2]:
        refuse(queries, keys)
        grouped = queries[:, :, -window:].to(wide).unflatten(1, (keys.shape[1], -1))
        logits = torch.einsum("bhgmd,bhtd->bhgmt", grouped, keys[:, :, :-window].to(wide)) / keys.shape[-1] ** 0.5
        received = logits.amax(dim=2).softmax(dim=-1).mean(dim=2)
        reach = kernel_size // 2
        attended = torch.nn.functional.pad(received, (reach, reach)).unfold(-1, kernel_size, 1).amax(dim=-1)
        repeated = torch_at_once(keys.to(wide), threshold=threshold)[..., :-window]
        scores[..., :-window] = importance_share * attended - (1 - importance_share) * repeated
    return scores.to(keys.dtype)


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_window_above_the_rest(queries, keys, **settings):
    """The window has a finite score, more than the best token before it."""
    return finite_window(torch_score(queries, keys, **settings))


@control("rkv_variants.released_score", dtypes=NUMPY)
def released_by_rows(queries, keys, *, window_size=8, kernel_size=7, importance_share=0.07, threshold=0.5):
    """The score of the reference, and what token 0 gains where no key is similar put right in the column sums."""
    attended = rkv.importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
    similarity = rkv.similarities(keys)
    sums = rkv.without_latest(similarity, threshold).sum(axis=-2)
    alone = ~(similarity > threshold).any(axis=-1)
    sums[..., 0] -= np.where(alone, similarity[..., 0], 0).sum(axis=-1)
    powers = np.exp(sums / keys.shape[-2])
    repeated = (powers / powers.sum(axis=-1, keepdims=True))[..., :-window_size]
    beyond = np.full((*repeated.shape[:-1], window_size), np.inf)
    return np.concatenate([importance_share * attended - (1 - importance_share) * repeated, beyond], axis=-1)
