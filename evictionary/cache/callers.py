"""What a caller says of a text, compared with what the cache has read: an attention mask, positions, and the
text so far.

A cache counts every token that it has read, evicted or not, and padding
too. Shapes are always compared. Numbers on a GPU are compared where a
prompt is read; at each decoded token the GPU would have to be waited for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import GenerationMixin

from evictionary.cache.text import UNKNOWN, Text
from evictionary.errors import UsageError, require

_PREFILL: Any = getattr(getattr(GenerationMixin, "_prefill", None), "__code__", None)


def given_to_generate() -> Mapping[str, Any] | None:
    """What `generate()` holds while it reads a prompt, or None outside of that.

    It hands the model the last tokens of a text alone, so many as the cache has not read. The whole text
    stands in its own frame, and nowhere else. Frames belong to a thread, and nothing is left in the model.
    """
    frame = sys._getframe(1) if _PREFILL else None
    while frame is not None and frame.f_code.co_filename != _PREFILL.co_filename:
        frame = frame.f_back
    return frame.f_locals if frame is not None and frame.f_code is _PREFILL else None


def whole_text(generating: Mapping[str, Any] | None) -> torch.Tensor | None:
    """The ids [B, T] that `generate()` takes for the whole text so far, or None for new tokens alone."""
    told = generating or {}
    ids, columns = told.get("input_ids"), told.get("mask_length")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or told.get("use_inputs_embeds"):
        return None
    # older versions keep a mask of ones, and say here what they take of the ids
    is_whole = columns == ids.shape[1] if columns else told.get("next_sequence_length") is not None
    return ids if is_whole else None


def require_columns(generating: Mapping[str, Any] | None, seen: int) -> None:
    """Raise UsageError for a mask of another length; `generate()` drops one without padding."""
    told = generating or {}
    ids, columns = told.get("input_ids"), told.get("mask_length", -1)
    # of a prompt in blocks, the first one has told
    is_first = told.get("input_chunk") is next(iter(told.get("input_chunks", ())), None)
    if columns >= 0 and isinstance(ids, torch.Tensor) and is_first and whole_text(told) is None:
        wanted = seen + ids.shape[1]
        require(columns == wanted, _wanted_columns(f"{columns} columns", str(wanted), seen, ids.shape[1]))


def require_blocks(generating: Mapping[str, Any] | None, seen: int) -> None:
    """Raise UsageError for new tokens in blocks where this version of transformers begins at token 0."""
    told = generating or {}
    require(
        "input_chunks" not in told or told.get("past_length", seen) == seen,
        f"prefill_chunk_size: got it after the {seen} tokens that the cache has read, wanted it with a first "
        f"prompt alone: transformers {transformers.__version__} would begin at token 0 again; leave it out, "
        "or take transformers 5.21 or newer",
    )


def require_new_tokens(length: int, seen: int, whole: torch.Tensor | None) -> None:
    """Raise UsageError for a forward without a new token; `whole`, what was given to `generate()`."""
    given = None if whole is None or not seen else whole.shape[1]
    require(
        given is None or given != seen,
        f"prompt: got {given} tokens, and the cache has read as many, wanted more: generate() would read them"
        " again, after themselves; leave the last token to generate(), or call cache.reset() and read all",
    )
    taken = (
        "generate() takes its input for the whole text so far"
        if given is None
        else f"generate() took the {given} given for the whole text so far, and new tokens alone need an "
        f"attention_mask of {seen + given} columns"
    )
    require(
        length != 0 and (given is None or given > seen),
        f"prompt: got no new token after the {seen} that the cache has read, wanted one: {taken}; another "
        "prompt needs another cache, or cache.reset() before it",
    )


def require_same_text(ids: torch.Tensor, text: Text, padding: torch.Tensor) -> None:
    """Raise UsageError where ids [B, T] are others than
    the text that was read, beside its padding [B, seen].
    """
    read = text.ids
    given = ids[:, : read.shape[1]].to(read)
    differ = (given != read) & (read != UNKNOWN) & ~padding.to(read.device)
    if differ.any():
        row, place = differ.nonzero()[0].tolist()
        raise _other_text(row, place, int(read[row, place]), int(given[row, place]), read.shape[1])


def rest_of_rows(
    ids: torch.Tensor, mask: torch.Tensor | None, text: Text, padding: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What is new of the whole text ids [B, T] with this mask [B, T], rows padded on the left to one length,
    with the mask of the whole text; padding [B, seen] of what was read.

    Raises UsageError for another text than the one that was read, and for one without a new token.
    """
    seen, rests = padding.shape[1], []
    read, real = text.ids.cpu(), torch.ones_like(ids) if mask is None else mask
    for row, (own, given) in enumerate(zip(ids.cpu(), real.bool().cpu(), strict=True)):
        known, whole = read[row][~padding[row]], own[given]
        count = min(len(known), len(whole))
        differ = (whole[:count] != known[:count]) & (known[:count] != UNKNOWN)
        if differ.any():
            place = int(differ.nonzero()[0])
            raise _other_text(row, place, int(known[place]), int(whole[place]), len(known))
        require(
            len(whole) > len(known),
            f"input_ids: got {len(whole)} tokens in row {row}, of which the cache has read all, wanted more "
            f"than its {len(known)}",
        )
        rests.append(whole[count:])
    width = max(map(len, rests))
    new = torch.tensor([[False] * (width - len(rest)) + [True] * len(rest) for rest in rests])
    padded = torch.stack([torch.nn.functional.pad(rest, (width - len(rest), 0)) for rest in rests])
    given = {"input_ids": padded, "attention_mask": torch.cat([~padding, new], dim=1).long()}
    if not bool(given["attention_mask"].all()):
        start = seen + torch.tensor(text.shifts).nan_to_num().long()[:, None]
        given["position_ids"] = start + (new.cumsum(dim=1) - 1).clamp(min=0)
    return {name: each.to(ids.device) for name, each in given.items()}


def _other_text(row: int, place: int, read: int, given: int, length: int) -> UsageError:
    return UsageError(
        f"input_ids: got another text than the {length} tokens that the cache has read: at token {place} of "
        f"row {row} it has read {read}, and the input has {given}; wanted a text that goes on. Where a chat "
        "template says earlier turns in another way, evictionary.cache.chat.next_turn adds a turn to what "
        "was read. Another text needs another cache, or cache.reset() before it"
    )


def require_ids(input_ids: Any, mask: Any) -> None:
    """Raise UsageError for other ids, or another mask of theirs, than tensors [B, T]."""
    for name, given in (("input_ids", input_ids), ("attention_mask", mask)):
        if given is None and name == "attention_mask":
            continue
        require(
            isinstance(given, torch.Tensor) and given.ndim == 2,
            f"{name}: got {_form(given)}, wanted a tensor [rows, tokens]",
        )


def _form(given: Any) -> str:
    """The shape of a tensor, or what it is otherwise."""
    return str(list(given.shape)) if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"


def require_mask(mask: torch.Tensor, rows: int, length: int, seen: int) -> None:
    """Raise UsageError for a mask that has not a column for each token of the whole text."""
    got, wanted = list(mask.shape), [rows, seen + length]
    require(got == wanted, _wanted_columns(str(got), str(wanted), seen, length))


def _wanted_columns(got: str, wanted: str, seen: int, new: int) -> str:
    return (
        f"attention_mask: got {got}, wanted {wanted}, a column for each token of the whole text: {seen} that "
        f"the cache has read, evicted or not, and {new} new; where nothing is padded leave it out, and give "
        "generate() the whole text"
    )


def require_ones_and_zeros(mask: torch.Tensor) -> None:
    """Raise UsageError for a mask with other numbers than 1 and 0, such as one that is added to logits."""
    require(
        mask.dtype == torch.bool or ((mask == 0) | (mask == 1)).all(),
        f"attention_mask: got numbers from {mask.min()} to {mask.max()}, wanted 1 for a token and 0 for "
        "padding",
    )


def require_same_padding(mask: torch.Tensor, padding: torch.Tensor) -> None:
    """Raise UsageError where a mask says something else of
    the tokens that were read than their padding [B, seen].
    """
    told = ~mask[:, : padding.shape[1]].bool().cpu()
    if not torch.equal(told, padding.expand_as(told)):
        row, place = (told != padding).nonzero()[0].tolist()
        got, read = ("padding", "a token") if told[row, place] else ("no padding", "padding")
        raise UsageError(
            f"attention_mask: got {got} at token {place} of row {row}, where the cache has read {read}; "
            "wanted the padding as it was read"
        )


def require_told(is_needed: bool, seen: int, length: int) -> None:
    """Raise UsageError for a forward without a mask where the model would attend to padding."""
    require(
        not is_needed,
        f"attention_mask: got none, wanted that of the whole text, with {seen + length} columns: the text is "
        "padded, and layers in which the model attends by itself would read the padding",
    )


def require_position_shape(position_ids: Any, rows: int, length: int, *, has_planes: bool) -> None:
    """Raise UsageError for other position_ids than [B or 1, M], or [planes, B or 1, M] of an M-RoPE."""
    shape = tuple(getattr(position_ids, "shape", ()))
    require(
        len(shape) in (2, 2 + has_planes) and shape[-1] == length and shape[-2] in (1, rows),
        f"position_ids: got {_form(position_ids)}, wanted {[rows, length]}, a position for each new token: "
        "generate() makes them of an attention_mask of the whole text",
    )


def shifts_without(shifts: list[float], seen: int, *, finds_own: bool) -> list[float]:
    """The shifts of a text after a forward without position_ids: the model counts all that was read.

    finds_own says that the model may give other positions to an image, as an M-RoPE does. Raises UsageError
    where the positions so far left padding out.
    """
    require(
        finds_own or all(shift == 0 or math.isnan(shift) for shift in shifts),
        "position_ids: got none, wanted those that go on with "
        f"{', '.join(f'{seen + shift:.0f}' for shift in shifts)} in the rows: the model would count the "
        "padding, which the positions before leave out; generate() makes them of the attention_mask",
    )
    return [math.nan if finds_own else 0.0]


def shifts_after(
    position_ids: torch.Tensor, real: torch.Tensor | None, rows: int, seen: int, shifts: list[float]
) -> list[float]:
    """The shifts of a text after a forward with these positions, whose tokens are real [B, M], or all.

    Raises UsageError for positions that do not go on where the text before ended. Padding may count or not.
    Positions of an image, which differ from plane to plane, are not looked at.
    """
    if real is None and position_ids.ndim == 2 and position_ids.shape[1] == 1:  # while decoding
        wanted = [seen + shift for shift in shifts] * (len(position_ids) // len(shifts))
        if position_ids[:, 0].tolist() == wanted:
            return shifts
    planes = position_ids.cpu().double().reshape(-1, *position_ids.shape[-2:])
    planes = (planes[1:] if len(planes) == 4 else planes).expand(-1, rows, -1)
    places, is_text = planes[0], (planes == planes[0]).all(dim=0)
    real = torch.ones_like(is_text) if real is None else real
    first = seen + torch.tensor(shifts, dtype=torch.float64).expand(rows)[:, None]
    known = (is_text | ~real).all(dim=1, keepdim=True) & ~first.isnan()
    without_padding = first + real.cumsum(dim=1) - 1
    for expected in (without_padding, first + torch.arange(real.shape[1])):
        if not ((places != expected) & real & known).any():
            learned = torch.where(is_text & real, places, torch.nan)
            return (torch.where(known, expected, learned)[:, -1] + 1 - seen - real.shape[1]).tolist()
    row, place = ((places != without_padding) & real & known).nonzero()[0].tolist()
    raise UsageError(
        f"position_ids: got {places[row, place]:.10g} for new token {place} of row {row}, wanted "
        f"{int(without_padding[row, place])}: the cache has read {seen} tokens, and those that it evicted "
        "count; leave position_ids out, and give generate() an attention_mask of the whole text or none"
    )
