r"""DropKV's change of the output: DK-1, `p_j / (1 - p_j) |v_j - o|` of a query when token j alone is evicted.

It equals, in torch, `squares` of `optimized.dropkv`.

Where a weight rounds to 1, that form is infinity times 0. So the token of the largest weight of each row is
set apart: its change is `p_j |v_j - o'|`, with the output o' of the others. The first launch of `walk_rows`
finds its place, and the second is the attention of a row without that token, in the manner of FlashAttention.
Both cut the keys into splits, which torch merges; the largest token joins there. Then `sum_changes`: one
program keeps a tile of keys and values and walks over the rows, which share it. The logits are products on
tensor cores. The distance of a value to an output is summed from differences, since a product of the two
would cancel where they are near.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .launching import cdiv, floats, launch, launcher, padded
from .received_attention import by_channels, load_rows, row_logits, scale_of, split_of, tile_of
from .strided import KV, sizes_of, strided
from .tiles import absorb, add_product, head_and_tokens, head_of, load_tile


class Partial(NamedTuple):
    """The attention of each row over each split: its largest logit, and the sums of `tiles.absorb`."""

    highest: torch.Tensor  # [heads, splits, rows]
    mass: torch.Tensor  # [heads, splits, rows]: sum of 2^(logit - highest)
    output: torch.Tensor  # [heads, splits, rows, D_v]: sum of 2^(logit - highest) v


class Found(NamedTuple):
    """What is known of each row, [heads, rows], when the tokens ask for their change."""

    place: torch.Tensor  # int32: the token of the largest weight
    log: torch.Tensor  # log2 of the normaliser
    change: torch.Tensor  # of the output, when the token at `place` is evicted
    output: torch.Tensor  # [heads, rows, D_v]


@launcher
def sum_squares(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    r"""DK-2 before the pooling, [B, H_kv, T], float32, as `optimized.dropkv.squares`."""
    queries, keys = by_channels(queries), by_channels(keys)
    sizes = sizes_of(queries, keys, values)
    batch, num_heads, length, _ = keys.shape
    window, value_dim = queries.shape[2], sizes.value_dim
    heads, rows = batch * num_heads, sizes.group * window
    # more rows would leave a multiprocessor one program
    tile = tile_of(queries, min(rows, 32), value_dim) | {"BLOCK_DV": padded(value_dim), "num_warps": 8}
    blocks = cdiv(rows, tile["BLOCK_ROWS"])
    split = split_of(length, blocks, tile["BLOCK_T"])
    splits = cdiv(length, split)
    states = strided(queries), KV(strided(keys), strided(values))

    highest, mass = floats(keys, 2, heads, splits, rows)
    output, places = floats(keys, heads, splits, rows, value_dim), torch.empty_like(mass, dtype=torch.int32)

    def walk(place: torch.Tensor, **options: Any) -> None:
        launch(walk_rows, (heads * blocks * splits,))(
            *states, place, Partial(highest, mass, output), window, length, split, sizes, **options, **tile
        )

    walk(places, OTHERS=False)
    largest, part = highest.max(dim=1)
    place = places.gather(1, part[:, None]).squeeze(1)
    walk(place, OTHERS=True)
    others = highest.amax(dim=1)
    shrink = (highest - others[:, None]).exp2()
    mass = (mass * shrink).sum(dim=1)
    without = (output * shrink[..., None]).sum(dim=1) / mass[..., None]

    odds = mass * (others - largest).exp2()  # of the others against the largest
    weight = 1 / (1 + odds)
    at_place = place.long().view(batch, num_heads, rows, 1).expand(-1, -1, -1, value_dim)
    value = values.gather(2, at_place).float().view_as(without)
    output = weight[..., None] * (value + odds[..., None] * without)
    change = weight * torch.linalg.vector_norm(value - without, dim=-1)
    changes = floats(keys, batch, num_heads, length)
    launch(sum_changes, (heads * cdiv(length, tile["BLOCK_T"]),))(
        *states, Found(place, largest + torch.log2(1 + odds), change, output), changes, window, length, sizes,
        **tile | {"BLOCK_ROWS": 16},
    )  # fmt: skip
    return changes


@triton.jit(do_not_specialize=["window", "length", "split"])
def walk_rows(
    queries, cache, place_ptr, partial, window, length, split, sizes,
    OTHERS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """partial.highest = the largest logit of a row in a split, -inf where it sees nothing, and place has
    its token. OTHERS: the token at `place` is left out, and all of `partial` is written.

    Grid: heads * blocks of rows * splits.
    """
    num_heads, group, head_dim, value_dim = sizes
    program = tl.program_id(0).to(tl.int64)
    rows, splits = group * window, tl.cdiv(length, split)
    blocks, part = tl.cdiv(rows, BLOCK_ROWS), program % splits
    head, start = program // (blocks * splits), part.to(tl.int32) * split
    row = (program // splits % blocks).to(tl.int32) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = load_rows(queries, head, row, window, sizes, BLOCK_D).to(DOT_DTYPE)
    own, own_values = head_of(cache.k, head, num_heads), head_of(cache.v, head, num_heads)
    end, channels = tl.minimum(start + split, length), tl.arange(0, BLOCK_DV)
    last = tl.minimum(length - window + row // group, end - 1)
    place = tl.zeros([BLOCK_ROWS], dtype=tl.int32)
    if OTHERS:
        place = tl.load(place_ptr + head * rows + row, mask=row < rows, other=-1)
    highest = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    output = tl.zeros([BLOCK_ROWS, BLOCK_DV], dtype=tl.float32)
    for first in range(start, end, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        key = load_tile(own, token, tl.arange(0, BLOCK_D), token < length, head_dim).to(DOT_DTYPE)
        logits = row_logits(query, key, token, last, scale_of(head_dim, False))
        if OTHERS:
            logits = tl.where(token[None, :] == place[:, None], float("-inf"), logits)
            highest, mass, weights, shrink = absorb(highest, mass, logits)
            value = load_tile(own_values, token, channels, token < length, value_dim).to(DOT_DTYPE)
            output = add_product(output * shrink[:, None], weights, value, DOT_DTYPE)
        else:
            higher = tl.max(logits, axis=1)
            # NaN equals nothing: then token 0 stands here, which is there.
            at = tl.max(tl.where(logits == higher[:, None], token[None, :], 0), axis=1)
            place = tl.where(higher > highest, at, place)
            highest = tl.maximum(highest, higher)
    target = (head * splits + part) * rows + row
    tl.store(partial.highest + target, highest, mask=row < rows)
    if OTHERS:
        tl.store(partial.mass + target, mass, mask=row < rows)
        inside = (row < rows)[:, None] & (channels < value_dim)[None, :]
        tl.store(partial.output + target[:, None] * value_dim + channels[None, :], output, mask=inside)
    else:
        tl.store(place_ptr + target, place, mask=row < rows)


@triton.jit(do_not_specialize=["window", "length"])
def sum_changes(
    queries, cache, found, changes_ptr, window, length, sizes,
    BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """changes[head, token] = (1/G) sum over the rows of (p / (1 - p) |v - output|)^2, of the token at `place`
    the square of `change`. Grid: heads * tiles of tokens.
    """
    num_heads, group, head_dim, value_dim = sizes
    head, token = head_and_tokens(length, BLOCK_T)
    rows = group * window
    channels, column = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_ROWS)
    own, own_values = head_of(cache.k, head, num_heads), head_of(cache.v, head, num_heads)
    key = load_tile(own, token, tl.arange(0, BLOCK_D), token < length, head_dim).to(DOT_DTYPE)
    value = load_tile(own_values, token, channels, token < length, value_dim)
    changes = tl.zeros([BLOCK_T], dtype=tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        row = start + column
        query = load_rows(queries, head, row, window, sizes, BLOCK_D).to(DOT_DTYPE)
        place = tl.load(found.place + head * rows + row, mask=row < rows, other=-1)
        # A row that is not there has an infinite normaliser, and gives nothing.
        logs = tl.load(found.log + head * rows + row, mask=row < rows, other=float("inf"))
        logits = tl.dot(key, tl.trans(query), input_precision="ieee") * scale_of(head_dim, False)
        others = token[:, None] <= (length - window + row // group)[None, :]
        others = others & (token[:, None] != place[None, :])
        weights = tl.where(others, tl.exp2(logits - logs[None, :]), 0.0)
        factor = weights / (1 - weights)
        for each in range(tl.minimum(BLOCK_ROWS, rows - start)):
            target = found.output + (head * rows + start + each) * value_dim + channels
            output = tl.load(target, mask=channels < value_dim, other=0.0)
            apart = value - output[None, :]
            share = tl.sum(tl.where(column == each, factor, 0.0), axis=1)
            # Squares may overflow, and a token that is not seen changes nothing.
            changes += tl.where(share == 0, 0.0, share * share * tl.sum(apart * apart, axis=1))
        change = tl.load(found.change + head * rows + row, mask=row < rows, other=0.0)
        changes += tl.sum(tl.where(token[:, None] == place[None, :], (change * change)[None, :], 0.0), axis=1)
    tl.store(changes_ptr + head * length + token, changes / group, mask=token < length)


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    queries = torch.empty((2, 32, 32, head_dim), dtype=dtype, device="meta")
    sum_squares(queries, keys, keys)


CONFIGURATIONS = configurations(
    _launch,
    *({"head_dim": head_dim} for head_dim in HEAD_DIMS),
    tensor_cores=["walk_rows", "sum_changes"],
)
