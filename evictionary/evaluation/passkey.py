"""A retrieval task that a 135M model can do: a seven-digit number in a long text of everyday sentences."""

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from evictionary.errors import require
from evictionary.evaluation.questions import tokenize

# Where the number stands, as a fraction of the text.
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)

PLACES = (
    "harbour",
    "orchard",
    "station",
    "library",
    "market",
    "bakery",
    "valley",
    "old mill",
    "garden",
    "village square",
)
PEOPLE = (
    "The baker",
    "A fisherman",
    "The teacher",
    "Her neighbour",
    "The postman",
    "A young girl",
    "The gardener",
    "A painter",
)
DEEDS = (
    "walked slowly to",
    "waited quietly near",
    "looked across",
    "told a story about",
    "came home from",
    "sat down beside",
)
SKIES = (
    "The sky was grey.",
    "A soft rain fell.",
    "The wind was mild.",
    "The sun came out.",
    "It was a calm day.",
)

INTRODUCTION = "A secret number is hidden in the following text. Find it and remember it."
NEEDLE = "The secret number is {0}. Remember it: {0} is the secret number."
QUESTION = "What is the secret number mentioned in the text? Answer with the number only."
# The words with which the model begins its answer by itself; starting after them halves the tokens to
# generate.
ANSWER_START = "The secret number mentioned in the text is"


@dataclass(frozen=True)
class Passkey:
    """One text with a number in it; `needle` is the range of token positions of the sentence that says the
    number, and `copies` are those of the number itself, which the sentence says twice.
    """

    context_ids: torch.Tensor
    question_ids: torch.Tensor
    answer: str
    needle: tuple[int, int]
    copies: tuple[tuple[int, int], ...]


def filler(draw: random.Random) -> str:
    """One short everyday sentence or two."""
    sentence = f"{draw.choice(PEOPLE)} {draw.choice(DEEDS)} the {draw.choice(PLACES)}."
    return f"{sentence} {draw.choice(SKIES)}" if draw.random() < 0.3 else sentence


def count_tokens(tokenizer: Any, text: str) -> int:
    """The number of tokens of a text in the middle of another text."""
    return len(tokenizer(f" {text}", add_special_tokens=False)["input_ids"])


def sentences_of(tokenizer: Any, draw: Callable[[], str], tokens: int) -> list[str]:
    """Sentences from `draw`, until they have at least `tokens` tokens."""
    sentences: list[str] = []
    length = 0
    while length < tokens:
        sentences.append(draw())
        length += count_tokens(tokenizer, sentences[-1])
    return sentences


def make(tokenizer: Any, *, depth: float, seed: int = 0, tokens: int = 1500) -> Passkey:
    """Return the text with the number at `depth`, about
    `tokens` tokens long. The same arguments give the same text.

    Raises UsageError for a depth outside [0, 1] or fewer than 100 tokens.
    """
    require_made(depth, tokens)
    draw = random.Random(f"{seed}/{depth}")
    answer = str(draw.randrange(10**6, 10**7))
    # the chat frame, the introduction and the needle take about 80 tokens
    sentences = sentences_of(tokenizer, lambda: filler(draw), tokens - 80)
    place = round(depth * len(sentences))
    needle = NEEDLE.format(answer)
    text = " ".join([INTRODUCTION, *sentences[:place], needle, *sentences[place:]])
    context_ids, question_ids = tokenize(tokenizer, text, QUESTION, ANSWER_START)
    sentence = locate(tokenizer, context_ids, needle)
    return Passkey(context_ids, question_ids, answer, sentence, located(tokenizer, context_ids, answer))


def require_made(depth: float, tokens: int) -> None:
    """Raise UsageError for a depth or a length that no text can have."""
    require(0 <= depth <= 1, f"depth: got {depth}, wanted a number in [0, 1]")
    require(tokens >= 100, f"tokens: got {tokens}, wanted at least 100")


def locate(tokenizer: Any, context_ids: torch.Tensor, needle: str) -> tuple[int, int]:
    """The first of the places where `located` finds the needle. Raises ValueError if there is none."""
    places = located(tokenizer, context_ids, needle)
    if not places:
        raise ValueError("substring not found")
    return places[0]


def located(tokenizer: Any, context_ids: torch.Tensor, text: str) -> tuple[tuple[int, int], ...]:
    """The ranges of token positions (first, last + 1) of a
    text in context ids [1, T], found in the decoded context.
    """
    ids = context_ids[0].tolist()

    def end(index: int) -> int:  # of one token alone, a part of a letter may be all that can be decoded
        return len(tokenizer.decode(ids[: index + 1]))

    starts = [match.start() for match in re.finditer(re.escape(text), tokenizer.decode(ids))]
    return tuple(
        (
            bisect_right(range(len(ids)), start, key=end),
            bisect_left(range(len(ids)), start + len(text), key=end) + 1,
        )
        for start in starts
    )
