"""The next turn of a chat, for a cache that has read the turns before."""

from collections.abc import Mapping
from typing import Any

import torch

from evictionary.errors import require

ANSWER = "<evictionary:answer>"


def next_turn(
    tokenizer: Any, read: torch.Tensor | None, *messages: Mapping[str, Any], **template: Any
) -> torch.Tensor:
    """The ids [1, T + M] of a chat with its next messages, up to where the answer begins.

    `read` [1, T] is what `generate()` returned: the chat as the model has read and answered it, or None
    before the first turn. A chat template may say earlier turns in another way, as one does that drops what
    the model thought. The whole chat in its words is then not the text in the cache. So the template gives
    the new turn alone: all that it puts after an answer. `template` are arguments of `apply_chat_template`.

    Raises UsageError for several rows, and for a template that does not show answers.
    """
    before: list[Mapping[str, Any]] = []
    if read is not None:
        require(
            read.ndim == 2 and len(read) == 1,
            f"read: got {list(read.shape)}, wanted [1, tokens]: one chat, as generate() returned it",
        )
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    told = tokenizer.apply_chat_template(
        [*before, *messages], tokenize=False, add_generation_prompt=True, **template
    )
    _, mark, new = told.rpartition(ANSWER)
    require(
        new and (mark or not before),
        "tokenizer: got a chat template that shows no answer, wanted one that shows each turn",
    )
    ids = tokenizer(new, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if read is None:
        return ids
    is_ended = bool(ids[0, 0] == read[0, -1])  # by the model itself
    return torch.cat([read, ids[:, int(is_ended) :].to(read)], dim=1)
