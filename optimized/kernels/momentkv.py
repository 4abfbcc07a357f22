r"""MomentKV (arXiv 2606.01563): a decoding step in four launches
(MK-A1). The moments of a prompt are in `momentkv_prompt`.

A step equals, in torch, for one KV head with L slots, its
G query heads [G, D] and float32 moments n, s_k, s_v, S:

    keys, values = torch.cat([keys, new_key[None]]).float(), torch.cat([values, new_value[None]]).float()
    covariance = S - torch.outer(s_v, s_k / n)
    residual = values - s_v / n - keys @ covariance.T / (n * math.sqrt(D))
    logits = query.float() @ keys.T / math.sqrt(D)
    evicted = (logits.softmax(dim=-1).mean(dim=0) * residual.norm(dim=-1)).argmin()
    n, s_k, s_v, S = n + 1, s_k + keys[evicted], s_v + values[evicted], S + torch.outer(values[evicted],
    keys[evicted])
    left = torch.arange(L + 1) != evicted
    estimate = s_v / n + query @ (S - torch.outer(s_v, s_k / n)).T / (n * math.sqrt(D))
    weights = torch.cat([logits[:, left], (n.log() + query @ s_k / n / math.sqrt(D))[:, None]],
    dim=-1).softmax(dim=-1)
    output = weights[:, :-1] @ values[left] + weights[:, -1:] * estimate

and then writes the new token into the slot of the evicted one. A cache of a fixed budget is never compacted:
its slots are in any order, and `positions` says which token each holds. K and V are read once, the moments
read and written once. The score is the mean over the group of probabilities, so it needs the sum of every
query head: the first launch stores the logits of the group and the norm of the residual of every token.

First launch, `walk_cache`: one program takes one split of one head. A tile of keys is loaded once and
multiplied twice: with the queries for the logits, and with the covariance for the residuals; only the norms
of the residuals are stored. The same tile of values completes the residual and enters the online softmax. The
new token is a tile of its own behind the last tile, so its score comes from the same instructions as the
other scores, and an equal token does not win or lose by different rounding. Second launch, `find_lowest`:
one program finds the lowest score of one head. Third launch, `evict`: one program takes some value channels
of one head, adds the evicted token to its part of the moments, and mixes its part of the output from the
other tokens. All programs of a head read the evicted token, the count and the sum of keys, and programs of
one launch cannot wait for each other. So the last launch, `write_new`, writes these and the new token.

Removing the evicted token. The first launch attended over L + 1 tokens, the output needs L. Subtracting the
evicted token's part is accurate as long as its weight is small, as it usually is; but a token with a value
that the moments predict scores 0 for any attention weight. If its weight is more than an eighth in some query
head, the sum and output of that head are computed again from the logits and values of the other tokens.

The tiles. A residual needs the whole covariance, [D_v, D], as one factor of a product; it stays on the
multiprocessor for the whole walk. A covariance that is too large is taken in chunks of value channels;
neighbouring programs then read K twice, from the L2 cache. A head is split only if the heads do not fill a
GPU, since each split reads S; so the last bits of a result follow the batch. The covariance is rounded once,
to the dtype of the keys (float16: multiplied first by a power of two that puts its largest entry below 2^15),
and the residual is computed n times as large, so that one division a token replaces one for each channel.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..states import Moments, zero_moments
from .attention import attend as attend_parts
from .compiling import FEW_SPILLS, HEAD_DIMS, configurations
from .launching import (
    cdiv,
    floats,
    is_amd,
    is_for,
    launch,
    launcher,
    on_tensor_cores,
    outputs,
    padded,
    register_limit,
)
from .momentkv_prompt import compress_prompt, contiguous, update
from .strided import KV, Rows, copy_row, load_row, sizes_of, strided
from .tiles import absorb, at_head, dot_dtype, head_of, load_tile, power_of_two

__all__ = ["CONFIGURATIONS", "attend", "compress_prompt", "score", "step", "update"]

PROGRAMS_WANTED = 256
SPLITS_AT_ONCE = tl.constexpr(16)
LOG2E = tl.constexpr(math.log2(math.e))


@launcher
def score(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, moments: Moments) -> torch.Tensor:
    r"""MK-10: `score_j = alpha_j |v_j - vbar - Stilde k_j / (n_e sqrt(d))|`, as
    `optimized.momentkv.score`.
    """
    moments = contiguous(moments)
    walked, splits, chunks = _walk(query, keys, values, moments)
    batch, num_kv_heads, length, _ = keys.shape
    group = query.shape[1] // num_kv_heads
    scores = floats(keys, batch, num_kv_heads, length)
    block = min(1024, padded(length))
    launch(finish_scores, (batch * num_kv_heads, cdiv(length, block)))(
        moments, walked, scores, group, length, splits, chunks,
        GROUP=padded(group, 1), BLOCK_L=block, num_warps=4,
    )  # fmt: skip
    return scores


@launcher
def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, moments: Moments
) -> torch.Tensor:
    r"""MK-12, MK-37: `fhat(q) = what_R f_R(q) + (1 - what_R) fhat_E(q)`, as `optimized.momentkv.attend`."""
    output, _ = attend_parts(query[:, :, None], None, (keys, values), contiguous(moments), kept=kept)
    return output[:, :, 0]


@launcher
def step(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    moments: Moments,
    position: torch.Tensor,
) -> torch.Tensor:
    r"""MK-A1 in place, as `optimized.momentkv.step`: four launches without waiting, which may be captured
    in a graph.

    The moments are float32 and contiguous; position is int64 [B, H_kv].
    """
    batch, num_kv_heads, length, head_dim = keys.shape
    walked, splits, chunks = _walk(query, keys, values, moments, (new_key, new_value))
    sizes = sizes_of(query, keys, values)
    output = outputs(query, *query.shape[:2], sizes.value_dim)
    block_v, heads = _block_v(keys, values), batch * num_kv_heads
    new, cache = KV(strided(new_key), strided(new_value)), KV(strided(keys), strided(values))
    places, position = strided(positions), position.contiguous()
    tile = {"GROUP": padded(sizes.group, 1), "BLOCK_L": min(512, padded(length + 1))}
    launch(find_lowest, (heads,))(
        places, position, moments, walked, num_kv_heads, sizes.group, length, splits, chunks,
        **tile, num_warps=4,
    )  # fmt: skip
    launch(evict, (heads * cdiv(sizes.value_dim, block_v),))(
        strided(query), new, cache, moments, walked, output, length, splits, 1 / math.sqrt(head_dim), sizes,
        **tile, BLOCK_T=16 if keys.dtype == torch.float32 else 32, BLOCK_D=padded(head_dim), BLOCK_V=block_v,
        num_warps=8 if keys.dtype == torch.float32 else 4,
        # left alone, the compiler spills to fit a fourth program on sm_80, and a third on sm_100
        **register_limit(keys, 168, 80), **register_limit(keys, 192, 100),
    )  # fmt: skip
    launch(write_new, (heads,))(
        new, cache, places, position, moments, walked.slots, length, sizes,
        BLOCK_D=padded(head_dim), BLOCK_V=padded(sizes.value_dim), num_warps=1,
    )  # fmt: skip
    return output.to(query.dtype)


class _Walked(NamedTuple):
    """The results of `walk_cache` for the next launches; None where these need none."""

    logits: torch.Tensor  # [heads, G, tokens], in powers of two, as all logits here
    squares: torch.Tensor  # [heads, chunks, tokens]: |n r_j|^2, summed over the value channels of a chunk
    highest: torch.Tensor  # [heads, splits, G]: the largest logit
    mass: torch.Tensor  # [heads, splits, G]: sum of 2^(logit - highest)
    partial: torch.Tensor | None  # [heads, splits, G, D_v]: sum of 2^(logit - highest) v
    slots: torch.Tensor | None  # [heads] int32: written by `find_lowest`, the slot of the evicted token


class Evicted(NamedTuple):
    """What a program of `evict` knows of the evicted tokens of its head, with some value channels."""

    count: Any  # as float32
    mean_key: Any  # [BLOCK_D]
    value_sum: Any  # [BLOCK_V]
    covariance: Any  # [BLOCK_V, BLOCK_D]


def _walk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    moments: Moments,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[_Walked, int, int]:
    """The first launch: over the cache and, with `new`, one token more, and the attention over both.

    Return its results, the splits of a head, and the chunks of its value channels.
    """
    sizes = sizes_of(query, keys, values)
    heads, length = keys.shape[0] * sizes.num_kv_heads, keys.shape[2]
    group, value_dim = sizes.group, sizes.value_dim
    tile = _walk_tile(keys, values)
    width = length + (new is not None)
    tiles = cdiv(length, tile["BLOCK_T"]) + (new is not None)
    tiles_of_split = cdiv(tiles, cdiv(PROGRAMS_WANTED, heads))
    splits, chunks = cdiv(tiles, tiles_of_split), cdiv(value_dim, tile["BLOCK_DV"])
    walked = _Walked(
        floats(keys, heads, group, width),
        floats(keys, heads, chunks, width),
        floats(keys, heads, splits, group),
        floats(keys, heads, splits, group),
        floats(keys, heads, splits, group, value_dim) if new else None,
        torch.empty(heads, dtype=torch.int32, device=keys.device) if new else None,
    )
    launch(walk_cache, (heads * splits * chunks,))(
        strided(query), new and KV(*map(strided, new)), KV(strided(keys), strided(values)), moments, walked,
        length, tiles, tiles_of_split, 1 / math.sqrt(sizes.head_dim), sizes, **tile,
    )  # fmt: skip
    return walked, splits, chunks


def _walk_tile(keys: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
    """Return the constants of `walk_cache`: the covariance
    of a chunk, [BLOCK_DV, BLOCK_D], stays beside the tiles.
    """
    block_d, block_dv = padded(keys.shape[-1]), padded(values.shape[-1])
    if not on_tensor_cores(keys):
        # Without tensor cores a row of 256 is spread over many threads; with AMD's, which support float32,
        # over few.
        num_warps = 8 if block_d <= 128 else 4 if is_amd(keys) else 16
        tile = {
            "BLOCK_T": 32 if block_d <= 64 else 16,
            "BLOCK_DV": min(block_dv, 32),
            "num_warps": num_warps,
            "num_stages": 1,
        }
    else:
        tile = {
            # on sm_90 a few registers are spilled, and a step still takes an eighth less time
            "BLOCK_T": 64 if is_for(keys, 90) else 32,
            "BLOCK_DV": min(block_dv, 16384 // block_d, 128),
            "num_warps": 4,
            "num_stages": 2,
        }
    return tile | {"BLOCK_D": block_d, "DOT_DTYPE": dot_dtype(keys)}


def _block_v(keys: torch.Tensor, values: torch.Tensor) -> int:
    """The value channels of a program of `evict`, which holds this part of S in registers: fewer
    for few heads.
    """
    few = keys.shape[0] * keys.shape[1] * values.shape[3] <= 32 * PROGRAMS_WANTED
    return min(
        padded(values.shape[3]), 16 if keys.dtype == torch.float32 or keys.shape[3] > 128 or few else 32
    )


@triton.jit
def load_sums(value_key_sum, channels, value_channels, head_dim, value_dim):
    """S of some value channels, [BLOCK_V, BLOCK_D]."""
    inside = (value_channels < value_dim)[:, None] & (channels < head_dim)[None, :]
    return tl.load(
        value_key_sum + value_channels[:, None] * head_dim + channels[None, :], mask=inside, other=0.0
    )


@triton.jit
def group_of(queries, head, num_kv_heads, group):
    """The queries of the group of a KV head, of `queries` [B, H_q, D], as `Rows` [G, D]."""
    return Rows(at_head(queries, head * group, num_kv_heads * group), queries.stride_h, queries.stride_d)


@triton.jit(do_not_specialize=["length", "tiles", "tiles_of_split"])
def walk_cache(
    queries, new, cache, moments, walked, length, tiles, tiles_of_split, scale, sizes,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Logits and residuals of one split of one head; with
    `new`, of the new token too, and the partial attention.

    Grid: heads * splits * chunks, the chunks together.
    """
    num_kv_heads, group, head_dim, value_dim = sizes
    NEW: tl.constexpr = new is not None
    splits, chunks = (tiles + tiles_of_split - 1) // tiles_of_split, (value_dim + BLOCK_DV - 1) // BLOCK_DV
    width = length + NEW
    program, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    head, part = program // splits, (program % splits).to(tl.int32)
    rows = tl.arange(0, 16)
    channels = tl.arange(0, BLOCK_D)
    value_channels = chunk * BLOCK_DV + tl.arange(0, BLOCK_DV)
    query = load_tile(
        group_of(queries, head, num_kv_heads, group), rows, channels, rows < group, head_dim
    ).to(DOT_DTYPE)
    key_base, value_base = at_head(cache.k, head, num_kv_heads), at_head(cache.v, head, num_kv_heads)
    if NEW:
        new_key, new_value = at_head(new.k, head, num_kv_heads), at_head(new.v, head, num_kv_heads)
    count = tl.maximum(tl.load(moments.count + head), 1).to(tl.float32)
    key_sum = tl.load(moments.key_sum + head * head_dim + channels, mask=channels < head_dim, other=0.0)
    value_sum = tl.load(
        moments.value_sum + head * value_dim + value_channels, mask=value_channels < value_dim, other=0.0
    )
    # MK-24: Stilde = S - s_v kbar^T
    covariance = (
        load_sums(
            moments.value_key_sum + head * value_dim * head_dim, channels, value_channels, head_dim, value_dim
        )
        - value_sum[:, None] * tl.div_rn(key_sum, count)[None, :]
    )
    unscale = scale
    if DOT_DTYPE == tl.float16:  # noqa: SIM300
        up, down = power_of_two(tl.max(tl.max(tl.abs(covariance), axis=1), axis=0), 14)
        covariance *= up
        unscale = scale * down
    factor = tl.trans(covariance.to(DOT_DTYPE))  # [BLOCK_D, BLOCK_DV]
    # all chunks of value channels compute the same numbers; the first chunk writes them
    written = tl.where(chunk == 0, group, 0)
    highest = tl.full([16], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([16], dtype=tl.float32)
    output = tl.zeros([16, BLOCK_DV], dtype=tl.float32)
    for tile in range(part * tiles_of_split, tl.minimum((part + 1) * tiles_of_split, tiles)):
        row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        token = row
        inside = row < length
        keys_here, key_step = key_base, cache.k.stride_d
        values_here, value_step = value_base, cache.v.stride_d
        if NEW:
            # The tile behind the last one holds only the new token: row 0 of its own memory, token `length`.
            is_new = tile * BLOCK_T >= length
            row = tl.where(is_new, tl.arange(0, BLOCK_T), row)
            token = tl.where(is_new, length + row, row)
            inside = row < tl.where(is_new, 1, length)
            keys_here = tl.where(is_new, new_key, key_base)
            key_step = tl.where(is_new, new.k.stride_d, cache.k.stride_d)
            values_here = tl.where(is_new, new_value, value_base)
            value_step = tl.where(is_new, new.v.stride_d, cache.v.stride_d)
        # key [BLOCK_T, BLOCK_D], value [BLOCK_T, BLOCK_DV]
        own_keys = Rows(keys_here, cache.k.stride_t, key_step)
        own_values = Rows(values_here, cache.v.stride_t, value_step)
        key = load_tile(own_keys, row, channels, inside, head_dim).to(DOT_DTYPE)
        value = load_tile(own_values, row, value_channels, inside, value_dim)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        target = walked.logits + (head * group + rows)[:, None] * width + token[None, :]
        tl.store(target, logits, mask=(rows < written)[:, None] & inside[None, :])
        predicted = tl.dot(key, factor, input_precision="ieee") * unscale
        residual = value * count - value_sum[None, :] - predicted  # n times the residual of MK-10
        squares = tl.sum(residual * residual, axis=1)
        tl.store(walked.squares + (head * chunks + chunk) * width + token, squares, mask=inside)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        highest, mass, weights, shrink = absorb(highest, mass, logits)
        if NEW:
            output = output * shrink[:, None] + tl.dot(
                weights.to(DOT_DTYPE), value.to(DOT_DTYPE), input_precision="ieee"
            )
    target = program * group + rows
    tl.store(walked.highest + target, highest, mask=rows < written)
    tl.store(walked.mass + target, mass, mask=rows < written)
    if NEW:
        tl.store(
            walked.partial + target[:, None] * value_dim + value_channels[None, :], output,
            mask=(rows < group)[:, None] & (value_channels < value_dim)[None, :],
        )  # fmt: skip


@triton.jit
def load_splits(walked, head, parts, splits, group, GROUP: tl.constexpr):
    """Return the largest logits, [SPLITS_AT_ONCE, GROUP],
    and the places of `parts` of the splits of a head.
    """
    rows = tl.arange(0, GROUP)[None, :]
    inside = (parts < splits)[:, None] & (rows < group)
    places = (head * splits + parts)[:, None] * group + rows
    return tl.load(walked.highest + places, mask=inside, other=float("-inf")), places, inside


@triton.jit
def merge_splits(walked, head, splits, group, GROUP: tl.constexpr):
    """Return, for each query head, the largest logit (0 without tokens) and the mass, [GROUP]."""
    top = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([GROUP], dtype=tl.float32)
    for first in range(0, splits, SPLITS_AT_ONCE):
        highest, places, inside = load_splits(
            walked, head, first + tl.arange(0, SPLITS_AT_ONCE), splits, group, GROUP
        )
        masses = tl.load(walked.mass + places, mask=inside, other=0.0)
        higher = tl.maximum(top, tl.max(highest, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp2(top - base) + tl.sum(masses * tl.exp2(highest - base[None, :]), axis=0)
        top = higher
    return tl.where(top == float("-inf"), 0.0, top), mass


@triton.jit
def merge_outputs(walked, head, top, value_channels, splits, group, value_dim, GROUP: tl.constexpr):
    """Return the sum of weights times values of each query
    head, [GROUP, BLOCK_V], relative to its largest logit.
    """
    output = top[:, None] * tl.zeros_like(value_channels).to(tl.float32)[None, :]
    for first in range(0, splits, SPLITS_AT_ONCE):
        highest, places, inside = load_splits(
            walked, head, first + tl.arange(0, SPLITS_AT_ONCE), splits, group, GROUP
        )
        partial = tl.load(
            walked.partial + places[:, :, None] * value_dim + value_channels[None, None, :],
            mask=inside[:, :, None] & (value_channels < value_dim)[None, None, :], other=0.0,
        )  # fmt: skip
        output += tl.sum(partial * tl.exp2(highest - top[None, :])[:, :, None], axis=0)
    return output


@triton.jit
def score_tokens(walked, head, tokens, width, group, chunks, top, mass, count, GROUP: tl.constexpr):
    """MK-10: `mean_g 2^(s_gj - log Z_g) |r_j|` of `tokens`, [BLOCK_L]."""
    rows = tl.arange(0, GROUP)
    inside = tokens < width
    logits = tl.load(
        walked.logits + (head * group + rows)[:, None] * width + tokens[None, :],
        mask=(rows < group)[:, None] & inside[None, :], other=float("-inf"),
    )  # fmt: skip
    alpha = tl.div_rn(tl.exp2(logits - top[:, None]), tl.where(rows < group, mass, 1.0)[:, None])
    alpha = tl.div_rn(tl.sum(alpha, axis=0), (group + tl.zeros_like(count)).to(tl.float32))
    squares = tl.zeros_like(alpha)
    for chunk in range(chunks):
        squares += tl.load(walked.squares + (head * chunks + chunk) * width + tokens, mask=inside, other=0.0)
    return alpha * tl.div_rn(tl.sqrt_rn(squares), count)


@triton.jit(do_not_specialize=["group", "width", "splits", "chunks"])
def finish_scores(
    moments, walked, scores_ptr, group, width, splits, chunks, GROUP: tl.constexpr, BLOCK_L: tl.constexpr
):
    """scores[head, tokens] of one block. Grid: heads, blocks."""
    head = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    top, mass = merge_splits(walked, head, splits, group, GROUP)
    count = tl.maximum(tl.load(moments.count + head), 1).to(tl.float32)
    scores = score_tokens(walked, head, tokens, width, group, chunks, top, mass, count, GROUP)
    tl.store(scores_ptr + head * width + tokens, scores, mask=tokens < width)


@triton.jit
def mix(
    queries, output_base, retained, top, mass, evicted, channels, value_channels, scale, sizes,
    GROUP: tl.constexpr,
):  # fmt: skip
    """MK-9, MK-11, MK-12, MK-37: mix the retained output with
    the estimate of the evicted output, for some value channels.

    queries are Rows [G, D]; retained [GROUP, BLOCK_V] and
    mass [GROUP] are sums of 2^(logit - top).
    """
    _, group, head_dim, value_dim = sizes
    count, mean_key, value_sum, covariance = evicted
    rows = tl.arange(0, GROUP)
    divisor = tl.maximum(count, 1.0)
    all_queries = load_tile(queries, tl.arange(0, 16), channels, tl.arange(0, 16) < group, head_dim)
    for member in range(group):
        query = tl.sum(tl.where((tl.arange(0, 16) == member)[:, None], all_queries, 0.0), axis=0)  # [BLOCK_D]
        log_evicted = tl.where(
            count > 0, tl.log2(divisor) + tl.sum(query * mean_key, axis=0) * (scale * LOG2E), float("-inf")
        )
        slope = tl.sum(covariance * query[None, :], axis=1) * scale
        estimate = tl.div_rn(value_sum, divisor) + tl.div_rn(slope, divisor)
        own_mass = tl.sum(tl.where(rows == member, mass, 0.0), axis=0)
        own_top = tl.where(own_mass > 0, tl.sum(tl.where(rows == member, top, 0.0), axis=0), float("-inf"))
        own = tl.sum(tl.where((rows == member)[:, None], retained, 0.0), axis=0)
        # A head without tokens has mass 0, and one without moments the logarithm -inf.
        highest = tl.maximum(own_top, log_evicted)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        weight, evicted_weight = tl.exp2(own_top - highest), tl.exp2(log_evicted - highest)
        total = own_mass * weight + evicted_weight
        mixed = tl.div_rn(own * weight + evicted_weight * estimate, tl.where(total == 0, 1.0, total))
        tl.store(output_base + member * value_dim + value_channels, mixed, mask=value_channels < value_dim)


@triton.jit(do_not_specialize=["length", "splits"])
def evict(
    queries, new, cache, moments, walked, output_ptr, length, splits, scale, sizes,
    GROUP: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add the token in the slot with the lowest score to the moments, and write the output without it. Grid:
    heads * value blocks.
    """
    num_kv_heads, group, head_dim, value_dim = sizes
    blocks = (value_dim + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0).to(tl.int64) // blocks
    channels = tl.arange(0, BLOCK_D)
    value_channels = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    own_queries = group_of(queries, head, num_kv_heads, group)
    key_base, own_values = at_head(cache.k, head, num_kv_heads), head_of(cache.v, head, num_kv_heads)
    new_key, new_value = at_head(new.k, head, num_kv_heads), at_head(new.v, head, num_kv_heads)
    slot = tl.load(walked.slots + head)
    before = tl.load(moments.count + head)
    top, mass = merge_splits(walked, head, splits, group, GROUP)
    is_new = slot == length
    evicted_key = load_row(
        tl.where(is_new, new_key, key_base + slot.to(tl.int64) * cache.k.stride_t), channels, head_dim,
        tl.where(is_new, new.k.stride_d, cache.k.stride_d),
    )  # fmt: skip
    evicted_value = load_row(
        tl.where(is_new, new_value, own_values.ptr + slot.to(tl.int64) * own_values.stride_t), value_channels,
        value_dim, tl.where(is_new, new.v.stride_d, own_values.stride_d),
    )  # fmt: skip

    retained = merge_outputs(walked, head, top, value_channels, splits, group, value_dim, GROUP)
    retained, top, mass = take_out(
        walked, head, retained, top, mass, slot, evicted_value, own_values,
        Rows(new_value, new.v.stride_h, new.v.stride_d), value_channels, length, sizes,
        GROUP, BLOCK_L, BLOCK_T,
    )  # fmt: skip
    count = (before + 1).to(tl.float32)
    key_sum = (
        tl.load(moments.key_sum + head * head_dim + channels, mask=channels < head_dim, other=0.0)
        + evicted_key
    )
    mean_key = tl.div_rn(key_sum, count)
    value_sum, covariance = update_moments(
        moments, head, evicted_key, evicted_value, mean_key, channels, value_channels, head_dim, value_dim
    )
    mix(
        own_queries, output_ptr + head * group * value_dim, retained, top, mass,
        Evicted(count, mean_key, value_sum, covariance), channels, value_channels, scale, sizes, GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length"])
def write_new(
    new, cache, positions, position_ptr, moments, slots, length, sizes,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Count the evicted token, add its key to the sum of
    keys, and put the new token into its slot. Grid: heads.
    """
    num_kv_heads, _, head_dim, value_dim = sizes
    head = tl.program_id(0).to(tl.int64)
    channels, value_channels = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    slot = tl.load(slots + head).to(tl.int64)
    new_key = at_head(new.k, head, num_kv_heads)
    key_slot = at_head(cache.k, head, num_kv_heads) + slot * cache.k.stride_t
    evicted_key = load_row(
        tl.where(slot == length, new_key, key_slot), channels, head_dim,
        tl.where(slot == length, new.k.stride_d, cache.k.stride_d),
    )  # fmt: skip
    count, sums = moments.count + head, moments.key_sum + head * head_dim + channels
    key_sum = tl.load(sums, mask=channels < head_dim, other=0.0) + evicted_key
    before = tl.load(count)
    # Threads of one program read the same numbers at their own pace: none may write before all have read.
    tl.debug_barrier()
    tl.store(count, before + 1)
    tl.store(sums, key_sum, mask=channels < head_dim)
    if slot < length:
        position = tl.load(position_ptr + head)
        tl.store(at_head(positions, head, num_kv_heads) + slot * positions.stride_d, position)
        copy_row(new_key, key_slot, channels, head_dim, new.k.stride_d, cache.k.stride_d)
        new_value = at_head(new.v, head, num_kv_heads)
        value_slot = at_head(cache.v, head, num_kv_heads) + slot * cache.v.stride_t
        copy_row(new_value, value_slot, value_channels, value_dim, new.v.stride_d, cache.v.stride_d)


@triton.jit(do_not_specialize=["num_kv_heads", "group", "length", "splits", "chunks"])
def find_lowest(
    positions, position_ptr, moments, walked, num_kv_heads, group, length, splits, chunks,
    GROUP: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """slots[head] = the slot of the lowest score, of equal scores the latest position; `length` is the new
    token. Grid: heads.
    """
    EARLIEST: tl.constexpr = -(2**62)
    head, width = tl.program_id(0).to(tl.int64), length + 1
    positions_ptr, position = at_head(positions, head, num_kv_heads), tl.load(position_ptr + head)
    count = tl.maximum(tl.load(moments.count + head), 1).to(tl.float32)
    top, mass = merge_splits(walked, head, splits, group, GROUP)
    lowest = tl.full([BLOCK_L], float("inf"), dtype=tl.float32)
    latest = tl.full([BLOCK_L], EARLIEST, dtype=tl.int64)
    lowest_slot = tl.full([BLOCK_L], 0, dtype=tl.int32) + length
    for first in range(0, width, BLOCK_L):
        slots = first + tl.arange(0, BLOCK_L)
        scores = score_tokens(walked, head, slots, width, group, chunks, top, mass, count, GROUP)
        scores = tl.where(scores == scores, scores, -1.0)  # NaN goes first, as in `selection.top_k`
        place = tl.load(positions_ptr + slots.to(tl.int64) * positions.stride_d, mask=slots < length, other=0)
        place = tl.where(slots < length, place, position)
        lower = (slots < width) & ((scores < lowest) | ((scores == lowest) & (place > latest)))
        lowest, latest = tl.where(lower, scores, lowest), tl.where(lower, place, latest)
        lowest_slot = tl.where(lower, slots, lowest_slot)
    tied = lowest == tl.min(lowest, axis=0)
    latest_tied = tl.max(tl.where(tied, latest, EARLIEST), axis=0)
    lowest_slot = tl.where(tied & (latest == latest_tied), lowest_slot, length)
    tl.store(walked.slots + head, tl.min(lowest_slot, axis=0))


@triton.jit
def take_out(
    walked, head, retained, top, mass, slot, evicted_value, values, new_value, value_channels, length, sizes,
    GROUP: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Take the evicted token out of the attention of each query head: retained [GROUP, BLOCK_V], top and
    mass [GROUP] without it. values and new_value are Rows; the new value is the first row.

    A share of more than an eighth is not subtracted: the sums are computed again from the other tokens.
    """
    group, value_dim = sizes.group, sizes.value_dim
    rows = tl.arange(0, GROUP)
    width = length + 1
    logit_rows = walked.logits + (head * group + rows) * width
    held = tl.exp2(tl.load(logit_rows + slot, mask=rows < group, other=float("-inf")) - top)
    if tl.max(held - 0.125 * mass, axis=0) > 0:
        top = tl.full([GROUP], float("-inf"), dtype=tl.float32)
        mass = tl.zeros([GROUP], dtype=tl.float32)
        for first in range(0, width, BLOCK_L):
            slots = first + tl.arange(0, BLOCK_L)
            stays = (rows < group)[:, None] & ((slots < width) & (slots != slot))[None, :]
            logits = tl.load(logit_rows[:, None] + slots[None, :], mask=stays, other=float("-inf"))
            top, mass, _, _ = absorb(top, mass, logits)
        top = tl.where(top == float("-inf"), 0.0, top)
        retained = tl.zeros_like(retained)
        coming = load_row(new_value.ptr, value_channels, value_dim, new_value.stride_d)
        for first in range(0, width, BLOCK_T):
            slots = first + tl.arange(0, BLOCK_T)
            stays = (slots < width) & (slots != slot)
            states = load_tile(values, slots, value_channels, stays & (slots < length), value_dim)
            states = tl.where((slots == length)[:, None], coming[None, :], states)  # [BLOCK_T, BLOCK_V]
            for member in range(group):
                own_top = tl.sum(tl.where(rows == member, top, 0.0), axis=0)
                logits = tl.load(
                    walked.logits + (head * group + member) * width + slots, mask=stays, other=float("-inf")
                )
                added = tl.sum(tl.exp2(logits - own_top)[:, None] * states, axis=0)
                retained += tl.where((rows == member)[:, None], added[None, :], 0.0)
    else:
        retained -= held[:, None] * evicted_value[None, :]
        mass -= held
    return retained, top, mass


@triton.jit
def update_moments(
    moments, head, evicted_key, evicted_value, mean_key, channels, value_channels, head_dim, value_dim
):
    """Add the evicted token to some value channels of the
    moments; return their sum of values and their covariance.
    """
    inside = value_channels < value_dim
    value_sum = (
        tl.load(moments.value_sum + head * value_dim + value_channels, mask=inside, other=0.0) + evicted_value
    )
    value_key_sum = moments.value_key_sum + head * value_dim * head_dim
    sums = load_sums(value_key_sum, channels, value_channels, head_dim, value_dim)
    sums += evicted_value[:, None] * evicted_key[None, :]
    # Threads of one program read the same numbers at their own pace: none may write before all have read.
    tl.debug_barrier()
    tl.store(moments.value_sum + head * value_dim + value_channels, value_sum, mask=inside)
    tl.store(
        value_key_sum + value_channels[:, None] * head_dim + channels[None, :], sums,
        mask=inside[:, None] & (channels < head_dim)[None, :],
    )  # fmt: skip
    return value_sum, sums - value_sum[:, None] * mean_key[None, :]


def _launch(dtype: torch.dtype, head_dim: int, group: int) -> None:
    cache = torch.empty((32, 8, 1024, head_dim), dtype=dtype, device="meta")
    query = torch.empty((32, 8 * group, head_dim), dtype=dtype, device="meta")
    positions = torch.empty((32, 8, 1024), dtype=torch.int64, device="meta")
    moments = zero_moments(cache, cache)
    step(
        query,
        cache[:, :, 0],
        cache[:, :, 1],
        cache,
        cache,
        positions,
        moments,
        positions[:, :, 0].contiguous(),
    )
    score(query, cache, cache, moments)


CONFIGURATIONS = configurations(
    _launch,
    *(
        {"head_dim": head_dim, "group": group}
        for head_dim, group in zip(HEAD_DIMS, (4, 1, 8, 3, 8), strict=True)
    ),
    tensor_cores=["walk_cache"],
    scalar=["finish_scores", "find_lowest"],
    spills=FEW_SPILLS,
)
