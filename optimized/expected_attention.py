r"""Expected Attention (arXiv 2510.00636): keep the tokens that future queries, modelled as Gaussian, are
expected to use most.
"""

import itertools
import math
from collections.abc import Iterable

import torch

from evictionary.reference.checks import require_between

from . import gradients, kernels
from .checks import (
    converted,
    fits,
    require_finite,
    require_finite_by,
    require_fit,
    require_same_device,
    working_dtype,
    working_room,
)
from .knorm import score as norm_score
from .operators import operator
from .rope import frequencies, rotate, turn
from .softmax import weights

# Tokens of a block of all heads, for those who undo the rotation of queries as they come.
BLOCK_TOKENS = 512
# Tokens of a block of one head: its queries, and the product of keys with the covariances of a group, stay in
# a processor's nearer cache while they are read several times. A triangle of Sigma in blocks would need fewer
# products, but smaller ones, which run slower by as much.
BLOCK_QUERIES, BLOCK_KEYS = 1024, 256


@operator()
@fits(finite=False)
def query_statistics(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-5, EA-L1: `mu = mean of q`, `Sigma = (1/N) sum (q - mu)(q - mu)^T`, of queries before RoPE.

    Args: queries, all of one head. Returns mean [..., D] and covariance [..., D, D] in float32 (float64 for
    float64). Raises ValueError for a wrongly shaped or integer `queries`, and on a CPU for NaN or infinite
    numbers. Source: section 2.2; `compute_statistics` in listing 1.
    """
    if kernels.take("expected_attention", queries):
        require_finite("queries", queries)
        return kernels.expected_attention.query_statistics(queries)
    mean, covariance = _by_head(queries, None, 0.0)
    require_finite_by(mean, queries=queries)
    return mean, covariance


def _by_head(
    queries: torch.Tensor, positions: torch.Tensor | None, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`statistics_of_blocks` of one head after the other; with positions [..., N], the rotation of the
    queries is undone first.
    """
    if queries.ndim > 2:
        placed = [None] * len(queries) if positions is None else positions
        means, covariances = zip(
            *(_by_head(*one, theta) for one in zip(queries, placed, strict=True)), strict=True
        )
        return torch.stack(means), torch.stack(covariances)
    room = working_room(queries, BLOCK_QUERIES * queries.shape[1])
    blocks = (converted(block, room) for block in queries.split(BLOCK_QUERIES))
    if positions is not None:
        turns = (-positions.to(torch.int64)).split(BLOCK_QUERIES)
        blocks = (rotate(block, back, theta) for block, back in zip(blocks, turns, strict=True))
    return statistics_of_blocks(blocks)


def statistics_of_blocks(blocks: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-5 of queries that come in blocks [..., n, D]: each block is read once, and stays in the
    processor's cache meanwhile.

    The means and the sums of squares about them are merged pairwise (Chan, Golub and LeVeque, 1979). This
    stays accurate where the mean is much larger than the spread; `sum q q^T - N mu mu^T` does not.
    """
    blocks = iter(blocks)
    first = next(blocks)
    count, mean = first.shape[-2], first.mean(dim=-2)
    centred = first - mean[..., None, :]
    squares = centred.mT @ centred
    for block in blocks:
        size, own = block.shape[-2], block.mean(dim=-2)
        centred = block - own[..., None, :]
        squares += centred.mT @ centred
        apart = own - mean
        squares += count * size / (count + size) * apart[..., :, None] * apart[..., None, :]
        count += size
        mean = mean + apart * (size / count)
    # Decision: divided by N, as in the authors' library; with N - 1 a buffer of one query would have no
    # covariance.
    return mean, squares / count


def unrotated_statistics(
    queries: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-5 of queries after RoPE, as attention uses them: their rotation is undone first.

    Args: queries [..., N, D] after RoPE, D even; positions [N] or any shape that broadcasts to [..., N],
    integers; theta, the base of RoPE. Returns and raises as `query_statistics`; also raises ValueError for
    positions or theta that do not fit.
    """
    require_fit("queries: ... N D%2", queries)
    _require_rotation(queries, positions, theta)
    if kernels.take("expected_attention", queries):
        return kernels.expected_attention.unrotated_statistics(queries, positions, theta)
    return _by_head(queries, positions.expand(queries.shape[:-1]), theta)


def _require_rotation(queries: torch.Tensor, positions: torch.Tensor, theta: float) -> None:
    """Raise ValueError unless queries [..., N, D] can be
    rotated by integer `positions` and a positive `theta`.
    """
    if not isinstance(positions, torch.Tensor) or positions.is_floating_point() or positions.is_complex():
        got = positions.dtype if isinstance(positions, torch.Tensor) else type(positions).__name__
        raise ValueError(f"positions: got {got}, wanted a tensor of integers")
    require_same_device("positions", positions, "queries", queries)
    wanted = queries.shape[:-1]
    fits = positions.ndim <= len(wanted) and all(
        got in (1, size) for got, size in zip(reversed(positions.shape), reversed(wanted), strict=False)
    )
    if not fits:
        raise ValueError(
            f"positions: got shape {tuple(positions.shape)}, wanted a shape that broadcasts to "
            f"{tuple(wanted)}"
        )
    if not 0 < theta < math.inf:
        raise ValueError(f"theta: got {theta}, wanted a positive number")


@operator()
@fits()
def average_rope(
    query_mean: torch.Tensor,
    query_covariance: torch.Tensor,
    *,
    position: int,
    horizon: int = 512,
    theta: float = 10000.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""EA-6: `mu_bar = Rbar mu`, `Sigma_bar = Rbar Sigma Rbar^T`:
    statistics of queries averaged over the next positions.

    Rbar rotates and shrinks pairs of channels, with their mean cosine and sine, so the matrix is never built:
    the rows of Sigma are rotated, then its columns.

    Args: query_mean and query_covariance, before RoPE; position, that of the next token (the tokens seen,
    evicted ones too); horizon, how many positions from there on; theta, the base of RoPE. Returns both in the
    same shapes, in float32 (float64 for float64). Raises ValueError naming the argument, and on a CPU for NaN
    or infinite numbers. Source: section 2.2, equation 6.
    """
    head_dim, dtype = query_mean.shape[-1], working_dtype(query_mean)
    if not 0 < theta < math.inf:
        raise ValueError(f"theta: got {theta}, wanted a positive number")
    positions = torch.arange(position, position + horizon, dtype=torch.float64, device=query_mean.device)
    angles = positions[:, None] * frequencies(head_dim, theta, device=query_mean.device)
    cos, sin = angles.cos().mean(dim=0).to(dtype), angles.sin().mean(dim=0).to(dtype)
    by_rows = turn(query_covariance.to(dtype), cos, sin)
    return turn(query_mean.to(dtype), cos, sin), turn(by_rows, cos[:, None], sin[:, None], dim=-2)


@operator()
def score(
    keys: torch.Tensor,
    values: torch.Tensor,
    query_mean: torch.Tensor,
    query_covariance: torch.Tensor,
    *,
    epsilon: float = 0.02,
) -> torch.Tensor:
    r"""EA-7..9, EA-V: `(mean over the group of ahat_i + epsilon) |v_i|`; head-adaptive budgets are
    `ada_kv` on these scores.

    Args: query_mean and query_covariance, averaged over RoPE by `average_rope`, of any floating dtype;
    epsilon, 0.02 in the paper, 0 for needle retrieval. Returns scores [B, H_kv, T], higher = keep, float32
    (float64 for float64 keys). Raises ValueError naming the argument that does not fit, and on a CPU for NaN
    or infinite numbers. Source: section 2.2, equations 7 to 9.
    """
    statistics = ("query_mean", "query_covariance")
    require_fit("expected_attention.score", keys, values, query_mean, query_covariance, free=statistics)
    require_between("epsilon", epsilon, 0)
    if kernels.take("expected_attention", keys, values, beside=(query_mean, query_covariance)):
        return kernels.expected_attention.score(keys, values, query_mean, query_covariance, epsilon)
    # Decision: softmax for each query head, then the mean over the group; each query head attends by itself.
    expected = weights(expected_logits(keys, query_mean, query_covariance)).mean(dim=2)
    # Decision: |v|, as in the paper's experiments; W_o would need every value projected.
    return (expected + epsilon).mul_(-norm_score(values))


def expected_logits(
    keys: torch.Tensor, query_mean: torch.Tensor, query_covariance: torch.Tensor
) -> torch.Tensor:
    r"""EA-7: `log zhat_i = mu . k_i / sqrt(d) + k_i^T Sigma k_i / (2 d)`
    for each query head: [B, H_kv, G, T].

    The covariances of a group lie side by side: one product of a block of keys with all of them serves the
    whole group, and the block stays in the processor's cache. Arguments of `score`, already checked.
    """
    batch, num_kv_heads, length, head_dim = keys.shape
    group, dtype = query_mean.shape[1] // num_kv_heads, working_dtype(keys)
    means = query_mean.to(dtype).reshape(batch, num_kv_heads, group * head_dim) / math.sqrt(head_dim)
    covariances = query_covariance.to(dtype).reshape(batch, num_kv_heads, group, head_dim, head_dim) / (
        2 * head_dim
    )
    if gradients.are_wanted(keys, means, covariances):
        wide = keys.to(dtype)[:, :, None]
        return ((means.unflatten(2, (group, 1, -1)) + wide @ covariances) * wide).sum(dim=-1)
    logits = keys.new_empty(batch, num_kv_heads, group, length, dtype=dtype)
    room = keys.new_empty(min(BLOCK_KEYS, length), group * head_dim, dtype=dtype)
    own = working_room(keys, BLOCK_KEYS * head_dim)
    for item, head in itertools.product(range(batch), range(num_kv_heads)):
        mean, covariance = means[item, head], covariances[item, head].movedim(0, 1).reshape(head_dim, -1)
        for part, block in zip(
            logits[item, head].split(BLOCK_KEYS, dim=-1), keys[item, head].split(BLOCK_KEYS), strict=True
        ):
            block = converted(block, own)
            product = torch.addmm(mean, block, covariance, out=room[: len(block)]).view(-1, group, head_dim)
            torch.sum(product.mul_(block[:, None]), dim=-1, out=part.T)
    return logits
