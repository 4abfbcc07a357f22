"""Splits a padded or ragged cache into pieces for a method: heads whose tokens stand at the same places."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

OF_QUERIES = (
    "queries",
    "replay_queries",
    "query",
    "query_mean",
    "query_covariance",
    "sampled_queries",
    "sinks",
)
OF_TOKENS = ("queries", "hidden_states")


@dataclass(frozen=True)
class Piece:
    """Heads of batch rows with their tokens at the same places."""

    rows: slice
    heads: slice
    places: torch.Tensor | None  # None: all of them


def pieces(
    shape: tuple[int, ...], filled: torch.Tensor | None, *, one_row: bool, one_head: bool
) -> list[Piece]:
    """The pieces of a cache of `shape`: one piece, or one for each row, or one for each head."""
    if filled is None and not one_row and not one_head:
        return [Piece(slice(None), slice(None), None)]
    found = []
    for row in range(shape[0]):
        of_row = torch.ones(shape[1:], dtype=torch.bool) if filled is None else filled[row]
        alike = not one_head and bool((of_row == of_row[0]).all())
        for head in [slice(None)] if alike else [slice(head, head + 1) for head in range(shape[1])]:
            places = of_row[head.start or 0].nonzero()[:, 0]
            found.append(Piece(slice(row, row + 1), head, places))
    return found


def query_heads(piece: Piece, states: torch.Tensor, shape: tuple[int, ...]) -> slice:
    """The query heads of states [B, H_q, ...] that read the KV heads of a piece."""
    if piece.heads == slice(None):
        return piece.heads
    group = states.shape[1] // shape[1]
    return slice(piece.heads.start * group, piece.heads.stop * group)


def cut(
    states: Mapping[str, Any], piece: Piece, shape: tuple[int, ...], *, is_prompt: bool, seen: int
) -> dict[str, Any]:
    """The states of a piece.

    A prompt's queries and hidden states: those of the piece's places. Recent queries and hidden states: only
    the last `seen`.
    """
    own: dict[str, Any] = {}
    for name, value in states.items():
        if value is None or piece.places is None:
            own[name] = value
        elif isinstance(value, tuple):
            own[name] = type(value)(*(entry[piece.rows, piece.heads] for entry in value))
        elif name.endswith("hidden_states"):
            own[name] = value[piece.rows]
        else:
            heads = query_heads(piece, value, shape) if name in OF_QUERIES else piece.heads
            own[name] = value[piece.rows, heads]
        if piece.places is not None and value is not None:
            axis = 1 if name.endswith("hidden_states") else 2
            if name in ("keys", "values", "positions", "kept") or (name in OF_TOKENS and is_prompt):
                own[name] = own[name].index_select(axis, piece.places)
            elif name in OF_TOKENS and seen < value.shape[axis]:  # the others were read from padding
                own[name] = own[name].narrow(axis, value.shape[axis] - seen, seen)
            if name == "positions":
                own[name] = own[name][0, 0]
    return own


def put(whole: torch.Tensor, piece: Piece, part: torch.Tensor) -> None:
    """Write the part of a piece, [b, h, n], to its places in the whole, [B, H_kv, T]."""
    if piece.places is None:
        whole[piece.rows, piece.heads] = part
    else:
        whole[piece.rows, piece.heads, piece.places] = part
