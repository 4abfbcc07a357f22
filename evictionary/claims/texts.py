"""Texts of six kinds, generated from a seed: the claims are
measured on all six kinds, as one text is not representative.
"""

import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evictionary.evaluation.passkey import filler, sentences_of
from evictionary.evaluation.questions import tokenize

_WORDS: dict[str, list[str]] = tomllib.loads(
    (Path(__file__).parent / "texts.toml").read_text(encoding="utf-8")
)
WHO, WHAT, LIKE, DID, WHEN, WHY = (_WORDS[name] for name in ("who", "what", "like", "did", "when", "why"))


def repetitive(draw: random.Random) -> str:
    """A sentence of the passkey's filler: few words, often repeated."""
    return filler(draw)


def varied(draw: random.Random) -> str:
    """A sentence of many random parts; a few hundred sentences hardly repeat."""
    one, other = draw.sample(WHO, 2)
    first = (
        f"The {draw.choice(LIKE)} {draw.choice(WHAT)} that the {one} {draw.choice(DID)} {draw.choice(WHEN)}"
    )
    return (
        f"{first} was later {draw.choice(DID)} by the {other} from room {draw.randrange(10, 99)}, "
        f"{draw.choice(WHY)}."
    )


def records(draw: random.Random) -> str:
    """A line of a list: a label and numbers."""
    label = f"{draw.choice(WHAT)}-{draw.randrange(100, 1000)}"
    price = f"{draw.randrange(2, 90)}.{draw.randrange(10, 99)}"
    return f"Item {label}: {draw.randrange(1, 60)} pieces at {price} each, shelf {draw.choice('ABCDEF')}."


def sums(draw: random.Random) -> str:
    """A short word problem with its solution."""
    start, more, less = draw.randrange(20, 80), draw.randrange(2, 20), draw.randrange(2, 20)
    who, what = draw.choice(WHO), draw.choice(WHAT)
    between, left = start + more, start + more - less
    question = (
        f"Question: the {who} has {start} {what}s, buys {more} and gives away {less}. How many are left?"
    )
    return (
        f"{question} Answer: {start} + {more} = {between}, {between} - {less} = {left}, so {left} are left."
    )


def code(draw: random.Random) -> str:
    """A short function in Python."""
    what, other = draw.sample(WHAT, 2)
    name, limit, factor = f"{draw.choice(DID)}_{what}s", draw.randrange(10, 99), draw.randrange(2, 9)
    loop = (
        f"    for {what} in {what}s:\n        if {what}.{other} > {limit}:\n            total += {factor} "
        f"* {what}.{other}\n"
    )
    return (
        f"\n\ndef {name}({what}s, {draw.choice(LIKE)}={limit + factor}):\n    total = 0\n{loop}    return "
        "total\n"
    )


def chat(draw: random.Random) -> str:
    """A question and its answer in a conversation of two."""
    who, what, like = draw.choice(WHO), draw.choice(WHAT), draw.choice(LIKE)
    question = f"\nUser: Hi! Who {draw.choice(DID)} the {like} {what} {draw.choice(WHEN)}?"
    return (
        f"{question}\nAssistant: That was the {who}, {draw.choice(WHY)}. Shall I say more about the {what}?"
    )


KINDS: dict[str, Callable[[random.Random], str]] = {
    each.__name__: each for each in (repetitive, varied, records, sums, code, chat)
}


def make(tokenizer: Any, kind: str, *, seed: int, tokens: int) -> torch.Tensor:
    """Return ids [1, tokens] of a text of that kind in the model's chat format. The same arguments give
    the same text.
    """
    draw = random.Random(f"{seed}/{kind}")
    sentences = sentences_of(tokenizer, lambda: KINDS[kind](draw), tokens)
    context_ids, _ = tokenize(tokenizer, " ".join(sentences), "What is said last?")
    return context_ids[:, :tokens]
