"""An exam on the lessons: a question for most of them, with
numbers drawn from the instructor's secret, and the answers.

The questions are public, as all of this project. Their numbers are not, so neither are the answers: the
project's own reference computes them.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from evictionary.reference import (
    expected_attention,
    gvote,
    keydiff,
    kv_cache,
    lagkv,
    momentkv,
    momentkv_theory,
    quantisation,
)
from evictionary.reference.attention import causal_attention

POINTS, FOR_THE_WAY = 5, 3
MINUTES = 5  # a question, a guess


class Question(NamedTuple):
    """A question of the exam and its answer, both for people;
    `name` is that of its lesson, without a " "number."""

    name: str
    asked: str
    answer: str


def _kv_cache(draw: random.Random) -> tuple[str, str]:
    layers, heads, channels = draw.choice((16, 24, 32, 48)), draw.choice((2, 4, 8)), draw.choice((64, 128))
    tokens = draw.randrange(1, 60) * 1024
    held = kv_cache.cache_bytes(
        tokens, num_layers=layers, num_query_heads=heads * 4, num_kv_heads=heads, head_dim=channels
    )
    asked = (
        f"A model has {layers} layers, {heads * 4} query heads, {heads} KV heads and {channels} channels. "
        "It stores two bytes a number. "
        f"How many MiB does its cache take after {tokens:,} tokens?"
    )
    return asked, f"2 * {layers} * {heads} * {channels} * {tokens:,} * 2 bytes = {held / 2**20:g} MiB"


def _keydiff(draw: random.Random) -> tuple[str, str]:
    degrees = draw.sample(range(0, 180, 15), 4)
    lengths = draw.sample((1, 2, 5, 10), 4)
    turned = np.radians(degrees)
    keys = np.stack([np.cos(turned), np.sin(turned)], axis=-1) * np.array(lengths)[:, None]
    order = np.argsort(-keydiff.score(keys), kind="stable")
    listed = ", ".join(f"{angle} ({length})" for angle, length in zip(degrees, lengths, strict=True))
    asked = (
        f"Four keys of two channels have these angles in degrees, and lengths in brackets: {listed}. Two "
        "stay. Which ones does KeyDiff keep?"
    )
    middle = np.degrees(np.arctan2(*keydiff.anchor(keys)[::-1]))
    kept = " and ".join(f"{degrees[place]}" for place in sorted(order[:2]))
    return asked, (
        f"the keys at {kept} degrees: the anchor lies at {middle:.1f} degrees, and the lengths play no part"
    )


def _lagkv(draw: random.Random) -> tuple[str, str]:
    sinks, lag, share = draw.choice((4, 16)), draw.choice((64, 128, 256)), draw.choice((0.25, 0.5, 0.75))
    length = sinks + lag * draw.randrange(3, 9) + draw.randrange(1, lag)
    left = lagkv.retained_length(length, keep_ratio=share, sink_size=sinks, lag_size=lag)
    asked = f"LagKV has S = {sinks}, L = {lag} and r = {share}. How many of {length:,} tokens stay?"
    partitions, rest = divmod(length - sinks, lag)
    return asked, f"{sinks} + {int(share * lag)} * {partitions - 1} + {lag} + {rest} = {left} tokens"


def _budgets_and_positions(draw: random.Random) -> tuple[str, str]:
    shared, group = draw.choice((2, 4, 8)), draw.choice((3, 4, 7))
    head, read = draw.randrange(shared * group), draw.randrange(500, 5000)
    kept = read // draw.choice((2, 4, 10))
    asked = (
        f"A model has {shared * group} query heads and {shared} KV heads. Which KV head does query head "
        f"{head} read? After {read:,} tokens "
        f"a method keeps {kept:,}. Which position has the next query? Heads and positions count from 0."
    )
    return asked, f"KV head {head // group}, position {read:,}"


def _expected_attention(draw: random.Random) -> tuple[str, str]:
    mean, variance = draw.choice((-1, 1, 2)), draw.choice((1, 2, 4))
    one, other = draw.sample((-3, -2, -1, 1, 2, 3), 2)
    found = [
        float(
            expected_attention.log_expected_scores(
                np.array([[float(key)]]), np.array([float(mean)]), np.eye(1) * variance
            )[0]
        )
        for key in (one, other)
    ]
    asked = (
        f"One channel, queries of N({mean}, {variance}), the keys {one} and {other}. What are the "
        "logarithms of their expected weights before they are normalised?"
    )
    return asked, f"mean * key + variance * key^2 / 2: {found[0]:g} and {found[1]:g}"


def _momentkv(draw: random.Random) -> tuple[str, str]:
    stays, *gone = (draw.randrange(1, 13) for _ in range(draw.choice((3, 4, 5))))
    keys, values = np.zeros((1, len(gone) + 1, 1)), np.array([[[float(each)] for each in (stays, *gone)]])
    kept = np.arange(len(gone) + 1)[None] == 0
    moments = momentkv.update(momentkv.no_moments(keys, values), keys, values, ~kept)
    batched = momentkv.Moments(*(np.asarray(each)[None] for each in moments))
    output = momentkv.attend(np.ones((1, 1, 1)), keys[None], values[None], kept[None], batched).item()
    asked = (
        f"All keys are 0. A token of value {stays} stays, tokens of the values "
        f"{', '.join(map(str, gone))} are evicted. What are the outputs "
        "of the kept tokens alone, and of MomentKV?"
    )
    return asked, f"{stays}, and {output:.4g}: the evicted keys are equal, so the correction is exact"


def _reading_a_paper(draw: random.Random) -> tuple[str, str]:
    channels, budget = draw.choice((64, 128, 256)), draw.choice((128, 256, 512, 1024))
    share = momentkv_theory.share_of_cache(channels, budget)
    asked = (
        f"Heads have {channels} channels and keep {budget:,} tokens. How large are MomentKV's sums, in "
        "percent of the kept keys and values?"
    )
    return asked, f"({channels}^2 + 2 * {channels}) / (2 * {channels} * {budget:,}) = {share:.1%}"


def _quantised_caches(draw: random.Random) -> tuple[str, str]:
    bits, step, size = draw.choice((2, 3, 4)), draw.choice((3, 5, 7)), draw.choice((32, 64, 128))
    least = draw.randrange(-9, 10)
    most = least + step * (2**bits - 1)
    moved = draw.choice([each for each in range(least, most) if (each - least) % step])
    codes, zero, scale = quantisation.quantise(np.array([least, moved, most], dtype=float), bits=bits)
    back = quantisation.dequantise(codes, zero, scale)[1]
    asked = (
        f"A group of {size} numbers lies between {least} and {most}, which are two of them. Each number gets "
        f"{bits} bits. As which number does {moved} come back? How many bits does a number take on "
        "average, if the smallest number and the scale have 16 bits each?"
    )
    return asked, (
        f"the scale is {step}, so {moved} has the code {codes[1]} and comes back as {back:g}; "
        f"{bits} + 2 * 16 / {size} = {bits + 32 / size:g} bits"
    )


def _gvote(draw: random.Random) -> tuple[str, str]:
    parts = sorted((draw.randrange(1, 30) for _ in range(6)), reverse=True)
    weights, share = np.array(parts) / sum(parts), draw.choice((0.5, 0.8, 0.9))
    size = int(gvote.nucleus(weights, share).sum())
    asked = (
        f"A query gives six tokens weights in the ratio {' : '.join(map(str, parts))}. How many tokens "
        f"are in the nucleus of p = {share}?"
    )
    return asked, (
        f"{size}: the first {size} sum to {weights[:size].sum():.3f}, one fewer to "
        f"{weights[: size - 1].sum():.3f}"
    )


def _how_to_measure(draw: random.Random) -> tuple[str, str]:
    share, texts = draw.choice((0.7, 0.8, 0.9)), draw.randrange(4, 11)
    asked = (
        f"A method is right in {share:.0%} of all texts. How often is it right in all of {texts} texts? "
        f"What does a table of {texts} texts say then?"
    )
    return asked, (
        f"{share} to the {texts}th: {share**texts:.1%}. It looks perfect that often, so full marks say "
        "little."
    )


def _what_abstracts_claim(draw: random.Random) -> tuple[str, str]:
    middle, half = draw.randrange(-9, 10) / 10, draw.choice((0.2, 0.5, 0.7))
    low, high = round(middle - half, 1), round(middle + half, 1)
    verdict = "it holds" if high < 0 else "it does not hold" if low >= 0 else "undecided"
    asked = (
        f'The condition is "cost < 0". The interval of the cost is {low} to {high}. What is the '
        "verdict, and what would change it?"
    )
    more = (
        "more texts make the interval narrower" if verdict == "undecided" else "another model, or other texts"
    )
    return asked, f"{verdict}; {more}"


def _serving_with_pages(draw: random.Random) -> tuple[str, str]:
    size, lengths = draw.choice((8, 16, 32)), [draw.randrange(10, 200) for _ in range(3)]
    shared, own = 3 * -(-max(lengths) // size), sum(-(-length // size) for length in lengths)
    asked = (
        f"Three heads keep {', '.join(map(str, lengths))} tokens, and a page has {size} slots of one "
        "head. How many pages are held if the heads share pages, and how many if each has its "
        "own?"
    )
    return asked, f"{shared} if they share, since the longest head decides, and {own} with pages of their own"


def _numpy_to_triton(draw: random.Random) -> tuple[str, str]:
    length, tile = draw.randrange(1_000, 100_000), draw.choice((64, 128, 256))
    programs = -(-length // tile)
    asked = (
        f"A kernel takes {length:,} tokens in tiles of {tile}. How many tiles are there, and how many "
        "places of the last one does the mask leave out?"
    )
    return asked, f"{programs} tiles, {programs * tile - length} places"


def _received_attention(draw: random.Random) -> tuple[str, str]:
    length, token = draw.randrange(4, 8), draw.randrange(3)
    weights = causal_attention(np.ones((length, 1)), np.zeros((length, 1)))
    asked = (
        f"{length} tokens, and all keys are 0. How much attention does token {token} receive from all "
        "queries? Tokens count from 0."
    )
    terms = " + ".join(f"1/{place + 1}" for place in range(token, length))
    return asked, f"{terms} = {weights[:, token].sum():.4f}"


QUESTIONS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    each.__name__.removeprefix("_"): each
    for each in (
        _kv_cache,
        _keydiff,
        _lagkv,
        _budgets_and_positions,
        _expected_attention,
        _momentkv,
        _reading_a_paper,
        _quantised_caches,
        _gvote,
        _how_to_measure,
        _what_abstracts_claim,
        _serving_with_pages,
        _numpy_to_triton,
        _received_attention,
    )
}


def drawn(secret: bytes, names: tuple[str, ...] = tuple(QUESTIONS)) -> list[Question]:
    """The questions of some lessons. The same secret gives the same numbers, whichever others are asked."""
    return [Question(name, *QUESTIONS[name](random.Random(secret + name.encode()))) for name in names]


def sheet(questions: list[Question]) -> str:
    """The questions as a Markdown page, with their points, the minutes, and a line for the name."""
    asked = [f"**{number}.** ({POINTS} points) {each.asked}" for number, each in enumerate(questions, 1)]
    time = (
        f"You have {MINUTES * len(questions)} minutes. Write how you compute a result: that has points too."
    )
    head = [f"# Exam: {POINTS * len(questions)} points", f"Name: {'_' * 40}", time]
    return "\n\n".join([*head, *asked]) + "\n"


def answers(questions: list[Question]) -> str:
    """The answers as a Markdown page, for who grades."""
    told = [f"**{number}.** {each.answer}" for number, each in enumerate(questions, 1)]
    split = (
        f"Of the {POINTS} points, {FOR_THE_WAY} are for the way and {POINTS - FOR_THE_WAY} for the result."
    )
    return "\n\n".join(["# Answers", split, *told]) + "\n"
