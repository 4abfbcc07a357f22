"""KeyDiff in Triton as different people write it, in
parts, as the files `forms.py` of the methods have them.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def directions_by_where(tile):
    largest = tl.max(tl.abs(tile), axis=1)
    tile = tile / tl.where(largest > 0, largest, 1.0)[:, None]
    norms = tl.sqrt(tl.sum(tile * tile, axis=1))
    return tile / tl.where(norms > 0, norms, 1.0)[:, None]


@triton.jit
def directions_by_a_factor(tile):
    largest = tl.max(tl.abs(tile), axis=1)
    tile = tile / tl.where(largest > 0, largest, 1.0)[:, None]
    squares = tl.sum(tile * tile, axis=1)
    return tile * tl.where(squares > 0, 1.0 / tl.sqrt(tl.where(squares > 0, squares, 1.0)), 0.0)[:, None]


@triton.jit
def directions_in_float64(tile):
    wide = tile.to(tl.float64)
    squares = tl.sum(wide * wide, axis=1)
    return (wide / tl.sqrt(tl.where(squares > 0, squares, 1.0))[:, None]).to(tl.float32)


@triton.jit
def along_by_sum(units, anchor):
    length = tl.sqrt(tl.sum(anchor * anchor))
    return -tl.sum(units * (anchor / tl.where(length > 0, length, 1.0))[None, :], axis=1)


@triton.jit
def along_divided_last(units, anchor):
    length = tl.sqrt(tl.sum(anchor * anchor))
    return tl.where(
        length > 0, -tl.sum(units * anchor[None, :], axis=1) / tl.where(length > 0, length, 1.0), 0.0
    )


@triton.jit
def along_by_squares(units, anchor):
    squares = tl.sum(anchor * anchor)
    return -tl.sum(units * anchor[None, :], axis=1) * tl.where(
        squares > 0, 1.0 / tl.sqrt(tl.where(squares > 0, squares, 1.0)), 0.0
    )


@triton.jit
def along_in_float64(units, anchor):
    wide = anchor.to(tl.float64)
    squares = tl.sum(wide * wide)
    return (
        -tl.sum(units.to(tl.float64) * wide[None, :], axis=1) / tl.sqrt(tl.where(squares > 0, squares, 1.0))
    ).to(tl.float32)


@triton.jit
def tile_of(keys, head, rows, columns, tokens, channels):
    inside = (rows[:, None] < tokens) & (columns[None, :] < channels)
    return tl.load(
        keys + (head * tokens + rows[:, None]) * channels + columns[None, :], mask=inside, other=0.0
    )


@triton.jit
def whole_head(keys, scores, tokens, channels, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    head = tl.program_id(0)
    rows, columns = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    units = directions(tile_of(keys, head, rows, columns, tokens, channels))
    tl.store(scores + head * tokens + rows, along(units, tl.sum(units, axis=0)), mask=rows < tokens)


@triton.jit
def in_blocks(keys, scores, tokens, channels, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    head = tl.program_id(0)
    rows, columns = tl.arange(0, 16), tl.arange(0, CHANNELS)
    anchor = tl.zeros([CHANNELS], dtype=tl.float32)
    for start in range(0, tokens, 16):
        anchor += tl.sum(directions(tile_of(keys, head, start + rows, columns, tokens, channels)), axis=0)
    for start in range(0, tokens, 16):
        units = directions(tile_of(keys, head, start + rows, columns, tokens, channels))
        tl.store(scores + head * tokens + start + rows, along(units, anchor), mask=start + rows < tokens)


@triton.jit
def anchors_alone(keys, anchors, tokens, channels, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    head = tl.program_id(0)
    rows, columns = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    units = directions(tile_of(keys, head, rows, columns, tokens, channels))
    tl.store(anchors + head * CHANNELS + columns, tl.sum(units, axis=0))


@triton.jit
def scores_alone(keys, anchors, scores, tokens, channels, CHANNELS: tl.constexpr):
    head, block = tl.program_id(0), tl.program_id(1)
    rows, columns = block * 16 + tl.arange(0, 16), tl.arange(0, CHANNELS)
    units = directions(tile_of(keys, head, rows, columns, tokens, channels))
    tl.store(
        scores + head * tokens + rows,
        along(units, tl.load(anchors + head * CHANNELS + columns)),
        mask=rows < tokens,
    )


def prepared(keys):
    if keys.ndim < 2 or 0 in keys.shape or not keys.isfinite().all():
        raise ValueError("keys: wanted finite numbers and no empty axis")
    keys = keys.contiguous()
    tokens, channels = keys.shape[-2:]
    scores = torch.empty(keys.shape[:-1])
    return keys, scores, tokens, channels, triton.next_power_of_2(tokens), triton.next_power_of_2(channels)


def score_in_one_launch(keys):
    keys, scores, tokens, *sizes = prepared(keys)
    kernel[(scores.numel() // tokens,)](keys, scores, tokens, *sizes)
    return scores


def score_in_two_launches(keys):
    keys, scores, tokens, channels, rows, columns = prepared(keys)
    heads = scores.numel() // tokens
    anchors = torch.zeros(heads, columns)
    anchors_alone[(heads,)](keys, anchors, tokens, channels, rows, columns)
    scores_alone[(heads, triton.cdiv(tokens, 16))](keys, anchors, scores, tokens, channels, columns)
    return scores


def in_torch(keys):
    """What a wrong submission answers with."""
    largest = keys.abs().amax(dim=-1, keepdim=True)
    keys = keys / torch.where(largest > 0, largest, 1)
    units = torch.nn.functional.normalize(keys, dim=-1)
    return -(units * torch.nn.functional.normalize(units.mean(dim=-2, keepdim=True), dim=-1)).sum(dim=-1)


FORMS = {
    "directions": (directions_by_where, directions_by_a_factor, directions_in_float64),
    "along": (along_by_sum, along_divided_last, along_by_squares, along_in_float64),
    "kernel": (whole_head, in_blocks),
    "score": (score_in_one_launch, score_in_two_launches),
}
directions, along, kernel, score = (forms[0] for forms in FORMS.values())
