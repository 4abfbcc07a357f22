r"""LagKV (arXiv 2504.04704) in one launch: score every partition,
choose its tokens and copy them (LK-7 to LK-12, CACHE-1).

It equals, in torch, for one partition `part` and its successor
`next`, both [L, D], and in the same way for the values:

    low, high = next.amin(dim=0), next.amax(dim=0)
    deviation = ((part - low) / (high - low)).std(dim=-1)
    score = deviation_of_keys.softmax(dim=0) + deviation_of_values.softmax(dim=0)
    kept = score.argsort(descending=True, stable=True)[:floor(r * L)].sort()

Every partition keeps the same number of tokens, so the place of its rows is known before any score: scoring,
choosing and copying need no result of another program. One program of `compress_partitions` takes one
partition of one head; programs behind the last partition copy the tokens that are never scored, the sinks and
the tail. K and V come from memory once. Each partition is read a second time as the reference of the
partition before it, and its kept rows a third time; neighbours run together, so these reads hit the L2 cache.
Where the mask is wanted, and not the rows, `score_partitions` writes the scores, and `selection` keeps the
best of each partition: 4 bytes of a token's 512 are written and read again.

A program walks first over the next partition for the range of each channel: minimum and maximum are kept for
each row of a tile's ROWS, and folded over them once. Then over its own, for the deviation of each token,
collected in a register array of [tiles, tokens of a tile], so that the softmax and the ranks
(`selection.keep_highest`) need neither shared memory nor barriers; then over its own again, copying the
chosen rows. The walks load the next two tiles while they compute (`STAGES`).

Numbers. The inverse of a channel's range is computed once; a range of 0 has the
inverse 0, which is the decision that a constant channel normalises to 0. The
deviation is computed in two steps, mean and then squares, in registers. A distance
of more than 1e18 ranges counts as 1e18 ranges: its square is still a float32.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..states import CompressedCache
from .cache import Copy, empty_cache
from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, launch, launcher, padded
from .selection import keep_highest, ordered, top_k
from .strided import KV, strided
from .tiles import copy_tile, head_of, load_tile, rows_from

ELEMENTS_OF_A_TILE = 4096
ROWS = tl.constexpr(8)
STAGES = tl.constexpr(3)


@launcher
def score(
    keys: torch.Tensor, values: torch.Tensor, next_keys: torch.Tensor, next_values: torch.Tensor
) -> torch.Tensor:
    r"""LK-7..11: `score_i = score(K)_i + score(V)_i` of one
    partition against the next, as `optimized.lagkv.score`.
    """
    parts = [states.reshape(1, -1, *states.shape[-2:]) for states in (keys, values, next_keys, next_values)]
    return _scores(parts, keys.shape[-2], next_keys.shape[-2], 1).view(keys.shape[:-1])


@launcher
def select(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    *,
    sink_size: int,
    lag_size: int,
    kept_each: int,
) -> torch.Tensor:
    r"""LK-12: `kept` [B, H_kv, T], all True before, with the `kept_each` best tokens of every partition
    but the last.
    """
    scored = (keys.shape[2] - sink_size) // lag_size - 1
    after = sink_size + lag_size
    parts = keys[:, :, sink_size:], values[:, :, sink_size:], keys[:, :, after:], values[:, :, after:]
    best = top_k(_scores(parts, lag_size, lag_size, scored), kept_each)
    kept[:, :, sink_size : sink_size + scored * lag_size] = best.view(*kept.shape[:2], -1)
    return kept


def _scores(parts: Sequence[torch.Tensor], lag: int, following: int, scored: int) -> torch.Tensor:
    """The scores of the first `scored` partitions of `lag` tokens of each head, against as many of
    `following`, [N, lag].

    The parts are keys and values, and then those that follow them.
    """
    keys, values = parts[:2]
    heads = keys.shape[0] * keys.shape[1]
    scores = floats(keys, heads * scored, lag)
    launch(score_partitions, (heads * scored,))(
        KV(*map(strided, parts[:2])), KV(*map(strided, parts[2:])), scores,
        keys.shape[1], scored, lag, following, keys.shape[-1], values.shape[-1], **_tile(lag, keys, values),
    )  # fmt: skip
    return scores


@launcher
def compress(
    keys: torch.Tensor, values: torch.Tensor, retained: int, *, sink_size: int, lag_size: int, kept_each: int
) -> CompressedCache:
    r"""LK-12 and CACHE-1 in one launch: the cache of the
    tokens that `select` keeps, `retained` tokens of each head.
    """
    batch, num_heads, length, head_dim = keys.shape
    lengths = torch.full((batch, num_heads), retained, dtype=torch.int64, device=keys.device)
    cache = empty_cache(keys, values, batch * num_heads * retained, lengths)
    # A cache too short to be compressed is all tail: no partition is scored.
    scored = 0 if retained == length else (length - sink_size) // lag_size - 1
    launch(compress_partitions, (batch * num_heads * cdiv(length, lag_size),))(
        KV(strided(keys), strided(values)), Copy(*cache[:3]),
        num_heads, length, scored, min(sink_size, length), lag_size, kept_each, head_dim, values.shape[3],
        **_tile(lag_size, keys, values),
    )  # fmt: skip
    return cache


def _tile(lag: int, keys: torch.Tensor, values: torch.Tensor) -> dict[str, int]:
    """Return the constants of the tiling: BLOCK_L holds a partition, BLOCK_T the tokens of a tile; FULL:
    no channel is padding.
    """
    block_d, block_dv, block_l = padded(keys.shape[-1]), padded(values.shape[-1]), padded(lag)
    # Two warps seldom wait for each other. float32 tiles have more threads: with other sizes, sm_80 and sm_90
    # spill registers.
    wide = keys.element_size() == 4
    elements = ELEMENTS_OF_A_TILE if wide else ELEMENTS_OF_A_TILE // 2
    block_t = min(32, block_l, elements // max(block_d, block_dv))
    num_warps = 2 if not wide else 8 if max(block_d, block_dv) <= 64 else 4
    tile = {
        "BLOCK_L": block_l,
        "BLOCK_T": block_t,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "num_warps": num_warps,
    }
    return tile | {"FULL": keys.shape[-1] == block_d and values.shape[-1] == block_dv}


@triton.jit
def channel_range(states, length, head_dim, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """LK-7, LK-8: the minimum of every channel over a partition,
    and 1 / (maximum - minimum), or 0: [BLOCK_D] each.
    """
    low = tl.full([ROWS, BLOCK_D], float("inf"), dtype=tl.float32)
    high = tl.full([ROWS, BLOCK_D], float("-inf"), dtype=tl.float32)
    for first in tl.range(0, length, BLOCK_T, num_stages=STAGES):
        # Beyond the end the last token is taken again, which changes no range.
        tokens = tl.minimum(first + tl.arange(0, BLOCK_T), length - 1)
        tile = load_tile(states, tokens, tl.arange(0, BLOCK_D), tokens < length, head_dim)
        tile = tl.reshape(tile, [BLOCK_T // ROWS, ROWS, BLOCK_D])
        low = tl.minimum(low, tl.min(tile, axis=0))
        high = tl.maximum(high, tl.max(tile, axis=0))
    minimum = tl.min(low, axis=0)
    spread = tl.max(high, axis=0) - minimum
    # The inverse of a number below the smallest normal number overflows float32.
    return minimum, tl.where(spread > 0, tl.div_rn(1.0, tl.maximum(spread, 1.1754944e-38)), 0.0)


@triton.jit
def deviations(
    states, length, minimum, inverse, head_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """LK-9, LK-10: the standard deviation over channels
    of every normalised token of a partition: [BLOCK_L].
    """
    rows = tl.arange(0, BLOCK_L // BLOCK_T)[:, None]
    channels = tl.arange(0, BLOCK_D)
    channel = (channels < head_dim)[None, :]
    # an argument that is 1 is a constant, which has no `to`
    each = tl.div_rn(1.0, tl.cast(head_dim, tl.float32))
    collected = tl.zeros([BLOCK_L // BLOCK_T, BLOCK_T], dtype=tl.float32)
    for tile in tl.range(0, BLOCK_L // BLOCK_T, num_stages=STAGES):
        tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        own = load_tile(states, tokens, channels, tokens < length, head_dim)
        steps = tl.minimum(tl.maximum((own - minimum[None, :]) * inverse[None, :], -1e18), 1e18)
        if not FULL:
            steps = tl.where(channel, steps, 0.0)
        centred = steps - (tl.sum(steps, axis=1) * each)[:, None]
        if not FULL:
            centred = tl.where(channel, centred, 0.0)
        collected = tl.where(rows == tile, tl.sum(centred * centred, axis=1)[None, :], collected)
    # A single channel has no variation; the divisor of the sample deviation is then 1 instead of 0.
    return tl.sqrt_rn(
        tl.div_rn(tl.reshape(collected, [BLOCK_L]), tl.cast(tl.maximum(head_dim - 1, 1), tl.float32))
    )


@triton.jit
def softmax(values, inside):
    """exp(x_i) / sum exp(x_j) over the elements `inside`, 0 elsewhere."""
    weights = tl.exp(
        tl.where(inside, values - tl.max(tl.where(inside, values, float("-inf")), axis=0), float("-inf"))
    )
    return tl.div_rn(weights, tl.sum(weights, axis=0))


@triton.jit
def variation_score(
    states, length, next_states, next_length, head_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """LK-7..10 of keys or of values: [BLOCK_L], 0 from `length` on."""
    minimum, inverse = channel_range(next_states, next_length, head_dim, BLOCK_T, BLOCK_D)
    spread = deviations(states, length, minimum, inverse, head_dim, BLOCK_L, BLOCK_T, BLOCK_D, FULL)
    return softmax(spread, tl.arange(0, BLOCK_L) < length)


@triton.jit
def choose(
    keys, values, lag, kept_each, head_dim, value_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """LK-11, LK-12: which tokens are kept of the first partition
    of `keys` and `values` against the second: [BLOCK_L].
    """
    total = variation_score(keys, lag, rows_from(keys, lag), lag, head_dim, BLOCK_L, BLOCK_T, BLOCK_D, FULL)
    total += variation_score(
        values, lag, rows_from(values, lag), lag, value_dim, BLOCK_L, BLOCK_T, BLOCK_DV, FULL
    )
    ranks = tl.where(tl.arange(0, BLOCK_L) < lag, ordered(total), 0)
    return keep_highest(ranks, kept_each)


@triton.jit(do_not_specialize=["scored"])
def score_partitions(
    cache, next_cache, scores_ptr, num_heads, scored, lag, following, head_dim, value_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """scores[head, part] = LK-11 of one partition. Grid: heads * scored partitions."""
    program = tl.program_id(0).to(tl.int64)
    head, part = program // scored, program % scored
    first, next_first = part * lag, part * following
    own, after = head_of(cache.k, head, num_heads), head_of(next_cache.k, head, num_heads)
    own, after = rows_from(own, first), rows_from(after, next_first)
    total = variation_score(own, lag, after, following, head_dim, BLOCK_L, BLOCK_T, BLOCK_D, FULL)
    own, after = head_of(cache.v, head, num_heads), head_of(next_cache.v, head, num_heads)
    own, after = rows_from(own, first), rows_from(after, next_first)
    total += variation_score(own, lag, after, following, value_dim, BLOCK_L, BLOCK_T, BLOCK_DV, FULL)
    tokens = tl.arange(0, BLOCK_L)
    tl.store(scores_ptr + program * lag + tokens, total, mask=tokens < lag)


@triton.jit(do_not_specialize=["length", "scored", "sink_size", "kept_each"])
def compress_partitions(
    cache, copy, num_heads, length, scored, sink_size, lag, kept_each, head_dim, value_dim,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Copy the kept tokens of one partition of one head, or `lag` tokens of its sinks and tail. Grid:
    heads * parts of `lag` tokens.
    """
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(length, lag)
    head, part = program // parts, program % parts
    own_keys, own_values = head_of(cache.k, head, num_heads), head_of(cache.v, head, num_heads)
    first_row = head * (length - scored * (lag - kept_each))  # behind the rows that earlier heads retain
    if part < scored:
        start = sink_size + part * lag
        first_row += sink_size + part * kept_each
        part_keys, part_values = rows_from(own_keys, start), rows_from(own_values, start)
        kept = choose(
            part_keys,
            part_values,
            lag,
            kept_each,
            head_dim,
            value_dim,
            BLOCK_L,
            BLOCK_T,
            BLOCK_D,
            BLOCK_DV,
            FULL,
        ).to(tl.int32)
        # The row of a kept token counts the kept tokens before it; -1 marks the others. One row of the array
        # is a tile.
        rows = tl.reshape(tl.where(kept != 0, tl.cumsum(kept, axis=0) - 1, -1), [BLOCK_L // BLOCK_T, BLOCK_T])
        tiles = tl.arange(0, BLOCK_L // BLOCK_T)[:, None]
        for tile in range(0, BLOCK_L // BLOCK_T):
            row = tl.max(tl.where(tiles == tile, rows, -1), axis=0)
            tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
            target = first_row + row
            tl.store(copy.positions + target, start + tokens, mask=row >= 0)
            copy_tile(part_keys, copy.kept_keys, tokens, target, tl.arange(0, BLOCK_D), row >= 0, head_dim)
            copy_tile(
                part_values, copy.kept_values, tokens, target, tl.arange(0, BLOCK_DV), row >= 0, value_dim
            )
    else:
        copied = length - scored * lag
        first = (part - scored) * lag
        for tile in range(0, lag, BLOCK_T):
            index = first + tile + tl.arange(0, BLOCK_T)
            inside = (index < copied) & (tile + tl.arange(0, BLOCK_T) < lag)
            tokens = tl.where(index < sink_size, index, index + scored * lag)
            target = first_row + tl.where(index < sink_size, index, index + scored * kept_each)
            tl.store(copy.positions + target, tokens, mask=inside)
            copy_tile(own_keys, copy.kept_keys, tokens, target, tl.arange(0, BLOCK_D), inside, head_dim)
            copy_tile(own_values, copy.kept_values, tokens, target, tl.arange(0, BLOCK_DV), inside, value_dim)


def _launch(dtype: torch.dtype, head_dim: int, lag_size: int) -> None:
    cache = torch.empty((2, 8, 8192 + 16, head_dim), dtype=dtype, device="meta")
    kept = torch.empty(cache.shape[:3], dtype=torch.bool, device="meta")
    settings = {"sink_size": 16, "lag_size": lag_size, "kept_each": lag_size // 4}
    compress(cache, cache, 16 + lag_size + (8192 // lag_size - 1) * lag_size // 4, **settings)
    select(cache, cache, kept, **settings)
    part = cache[:, :, :lag_size]
    score(part, part, part, part)


CONFIGURATIONS = configurations(
    _launch,
    *({"head_dim": head_dim, "lag_size": lag_size} for head_dim in HEAD_DIMS for lag_size in (128, 1024)),
    resident={"compress_partitions": 8},
)
