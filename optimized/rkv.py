r"""R-KV (arXiv 2505.24133): keep the last tokens, and those that the last queries attend to and whose keys
no other repeats.

The paper is known here from its public code: Zefan-Cai/R-KV,
rkv/compression/r1_kv.py and rkv/utils.py at d15c976.
"""

import math

import torch
from torch.nn.functional import max_pool1d

from evictionary.reference.checks import require_window

from . import kernels
from .attention import grouped_logits
from .checks import fits, working_dtype
from .operators import operator

# Rows and columns of the similarity matrix of one head at a time.
BLOCK = 512


@operator()
@fits()
def redundancy(keys: torch.Tensor, *, threshold: float = 0.5) -> torch.Tensor:
    r"""RK-1..3: `R_j = softmax_j((1/T) sum_i S_ij)`, the cosines of the keys without the latest similar
    key of each row.

    The sum over i of the cosines is one product of k_j's direction and the sum of all directions. The matrix
    is needed for the latest similar keys alone (`_latest_similar`).

    Args: threshold, the cosine above which two keys are similar. Returns
    [B, H_kv, T], summing to 1, float32 (float64 for float64); it costs O(T^2),
    and less where many keys are similar. Raises ValueError for unusable keys.
    """
    if kernels.take("rkv", keys):
        return (kernels.rkv.totals(keys, threshold) / keys.shape[-2]).softmax(dim=-1).float()
    wide = keys.to(working_dtype(keys)).reshape(-1, *keys.shape[-2:])
    # the square of 1e30 overflows
    wide = wide / wide.detach().abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    directions = wide / norms.masked_fill(norms == 0, math.inf)
    length = keys.shape[-2]
    totals = (directions @ directions.sum(dim=-2)[..., None])[..., 0] - directions.square().sum(dim=-1)
    left = []
    for of_head, total in zip(directions, totals, strict=True):
        latest, similarity = _latest_similar(of_head, threshold)
        # Decision: a row without a similar key loses nothing. The public code takes token 0 for its
        # latest one.
        has = latest >= 0
        left.append(total.index_add(0, latest[has], -similarity[has]))
    return (torch.stack(left) / length).softmax(dim=-1).view(keys.shape[:-1])


def _latest_similar(directions: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The latest key whose cosine with each key of directions [T, D] is above the threshold, [T], -1 for
    none, and that cosine.

    A cosine says the same of both of its keys, so each pair of blocks is multiplied once. The last blocks
    come first, and a key that has found its latest one is done: a pair of blocks without an open key is left
    out. A block is looked at in full only where its largest cosine is above the threshold.
    """
    length = len(directions)
    latest = torch.full((length,), -1, device=directions.device)
    similarity = directions.new_zeros(length)
    blocks = [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]

    def look(cosines: torch.Tensor, rows: torch.Tensor, first: int) -> None:
        """Search the columns of cosines [n, m], from the key `first` on, for rows that are open."""
        found = (cosines.amax(dim=1) > threshold).nonzero()[:, 0]
        if len(found):
            hits = cosines[found]
            numbers = torch.arange(hits.shape[1], device=hits.device)
            place = torch.where(hits > threshold, numbers, -1).amax(dim=1)
            latest[rows[found]] = first + place
            similarity[rows[found]] = hits.gather(1, place[:, None])[:, 0]

    for number in reversed(range(len(blocks))):
        later = blocks[number]
        for earlier in reversed(blocks[: number + 1]):
            ours, theirs = ((latest[block] < 0).nonzero()[:, 0] + block.start for block in (earlier, later))
            both = len(ours) + len(theirs) > earlier.stop - earlier.start and earlier is not later
            if both:  # most keys are open: one product for both directions
                cosines = directions[earlier] @ directions[later].mT
                look(cosines[ours - earlier.start], ours, later.start)
                look(cosines.mT[theirs - later.start], theirs, earlier.start)
                continue
            if len(ours):
                cosines = directions[ours] @ directions[later].mT
                cosines.masked_fill_(
                    ours[:, None] == torch.arange(later.start, later.stop, device=ours.device), 0
                )
                look(cosines, ours, later.start)
            if len(theirs) and earlier is not later:
                look(directions[theirs] @ directions[earlier].mT, theirs, earlier.start)
    return latest, similarity


@operator()
@fits()
def importance(
    queries: torch.Tensor, keys: torch.Tensor, *, window_size: int = 8, kernel_size: int = 7
) -> torch.Tensor:
    r"""RK-4: `I_t = max over |u - t| <= (K - 1) / 2 of mean_m softmax_u(max_g q_gm . k_u / sqrt(D))`,
    before the window.

    Args: queries, of the last M >= window_size tokens, after RoPE; keys, T > window_size; kernel_size K.
    Returns [B, H_kv, T - window_size], float32 (float64 for float64). Raises ValueError naming the argument.
    """
    require_window(queries.shape[2], keys.shape[2], window_size)
    logits = grouped_logits(queries[:, :, -window_size:], keys[:, :, :-window_size])
    received = logits.amax(dim=2).softmax(dim=-1).mean(dim=-2)
    return max_pool1d(received, kernel_size, stride=1, padding=kernel_size // 2)


@operator()
@fits()
def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    window_size: int = 8,
    kernel_size: int = 7,
    importance_share: float = 0.07,
    threshold: float = 0.5,
) -> torch.Tensor:
    r"""RK-5: `lambda I_t - (1 - lambda) R_t`, lambda = importance_share; infinity for the window.

    Args: those of `importance` and `redundancy`. The keys of the window count for the redundancy of the
    others. Returns scores [B, H_kv, T], higher = keep, float32 (float64 for float64); all infinite where T <=
    window_size. Raises ValueError naming the argument, and on a CPU for NaN or infinite numbers. Source: the
    public code, whose defaults these are.
    """
    scores = keys.new_full(keys.shape[:3], math.inf, dtype=working_dtype(keys))
    if keys.shape[2] > window_size:
        attended = importance(queries, keys, window_size=window_size, kernel_size=kernel_size)
        repeated = redundancy(keys, threshold=threshold)[..., :-window_size]
        scores[..., :-window_size] = importance_share * attended - (1 - importance_share) * repeated
    return scores
