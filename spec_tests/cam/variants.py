"""Right CaMs of other forms."""

import numpy as np
import torch
from torch.nn.functional import pad

from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.variants import ALL, NUMPY, in_float32, through_float32


@control("cam.shares", dtypes=NUMPY)
def rows_of_shares(kept, *, merge_size=32):
    """The kept tokens in their order, cut out for one evicted token after another."""
    found = np.zeros((*kept.shape, kept.shape[-1]))
    for *head, token in np.argwhere(~kept):
        places = np.flatnonzero(kept[tuple(head)])
        start = np.searchsorted(places, token)
        later = places[start : start + merge_size]
        found[(*head, token, later)] = 1 / max(1, len(later))
    return found


@control("cam.probabilities", array_library="torch", dtypes=ALL)
@in_float32
def windows_of_kept_tokens(attention, kept, *, merge_size=32):
    """Sums over windows of the kept tokens alone, head by head; infinity and NaN are replaced at the end."""
    found = torch.zeros_like(attention)
    for head in np.ndindex(kept.shape[:-1]):
        own, gone = attention[head][kept[head]], ~kept[head]
        size = min(merge_size, len(own) + 1)
        sums = pad(own, (0, size)).unfold(0, size, 1).sum(dim=1)
        before = kept[head].cumsum(0)[gone]
        means = sums[before] / (len(own) - before).clamp(1, size)
        ratio = (attention[head][gone] / means).nan_to_num(0, 1).clamp(max=1)
        found[head][gone] = torch.where(before < len(own), ratio, 0)
    return found


@control("cam.spread", array_library="torch", dtypes=ALL)
@through_float32
def receiver_after_receiver(values, kept, weights, *, merge_size=32):
    """The first receiver of all evicted tokens, then the second, and so on: an index_add for each."""
    found = values.clone()
    for head in np.ndindex(kept.shape[:-1]):
        places, gone = kept[head].nonzero()[:, 0], (~kept[head]).nonzero()[:, 0]
        start = torch.searchsorted(places, gone)
        count = (len(places) - start).clamp(max=merge_size)
        parts = values[head][gone] * (weights[head][gone] / count.clamp(min=1))[:, None]
        for step in range(min(merge_size, len(places))):
            there = step < count
            found[head].index_add_(0, places[start[there] + step], parts[there])
    return found


@control("cam.spread", dtypes=NUMPY)
def gaps_between_kept_tokens(values, kept, weights, *, merge_size=32):
    """The evicted tokens between two kept ones have the same receivers: a kept token adds the sums of the
    last m gaps.
    """
    found = np.array(values)
    for head in np.ndindex(kept.shape[:-1]):
        places = np.flatnonzero(kept[head])
        edges, gone = [-1, *places], np.where(kept[head], 0, weights[head])[:, None] * values[head]
        gaps = [
            gone[start + 1 : end].sum(axis=0) / min(merge_size, len(places) - rank)
            for rank, (start, end) in enumerate(zip(edges, places, strict=False))
        ]
        for rank, place in enumerate(places):
            found[head][place] += np.sum(gaps[max(0, rank + 1 - merge_size) : rank + 1], axis=0)
    return found


@control("cam.merge_values", dtypes=NUMPY)
def one_evicted_token_after_another(values, attention, kept, draws, *, merge_size=32):
    """As a cache that evicts them one by one from the front, and draws a number for each."""
    found = np.array(values)
    for *head, token in np.argwhere(~kept):
        head = tuple(head)
        later = (np.flatnonzero(kept[head][token:]) + token)[:merge_size]
        if len(later) and draws[head][token] * attention[head][later].sum() < attention[head][token] * len(
            later
        ):
            found[head][later] += values[head][token] / len(later) * (draws[head][token] < 1)
    return found
