"""Tasks made offline from a seed: passkeys, needles, variables, word counts, copying, questions, and texts
that go on.

The kinds of tasks come from RULER (arXiv 2404.06654) and LagKV's 64-digit passkey (arXiv 2504.04704). Most
texts are our own; the tasks with questions, essays or code take texts that people wrote. The question always
follows the context, so a cache can be compressed before the question is known.
"""

import difflib
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from typing import Any, NamedTuple

import torch

from evictionary.errors import UsageError, require, require_known
from evictionary.evaluation import passkey, real_texts
from evictionary.evaluation.questions import tokenize

_NOUNS = """
acorn anchor apple arrow autumn bakery balloon banana barrel basket beach beaver bench berry bicycle blanket
boat bottle bridge broom bucket butter button cabin camel candle canyon carpet carrot castle cellar chain
chair cherry chimney circle clock cloud coffee copper corner cotton cradle cricket crown curtain daisy desert
diamond dinner dolphin donkey dragon drawer drum eagle engine falcon feather fence fiddle finger flute forest
fountain fox garlic gate ginger glacier glove goat granite guitar hammer harvest hazel helmet hill honey horse
hotel island ivory jacket jewel jungle kettle king kitchen ladder lake lantern lemon letter lion lizard magnet
maple marble meadow medal melon mirror monkey moon mountain museum needle nest nickel oak oasis ocean olive
onion orange orchid otter oven owl paddle palace paper parrot peach pearl pebble pencil pepper piano pillow
pilot pine planet pocket pond poplar potato prince pumpkin puzzle queen rabbit radio raven ribbon river rocket
roof rope rose saddle sailor salmon sand scarf school shadow shell shovel silver snow soap spider spoon spring
squirrel star statue stove summer sunset swan table teapot temple tent thunder tiger timber tower train tulip
tunnel turtle umbrella valley velvet vessel violin volcano wagon walnut water whale wheat window winter wolf
wood yard
"""
# Everyday nouns: the keys of needles, the words to count and the words to copy.
WORDS = _NOUNS.split()

# The tokens of a text that the model is to foretell, and those after which a cache that decodes them
# compresses again.
CONTINUED, AGAIN = 64, 16

SENTENCE = 32  # tokens, for the answer of a question: it may come as a sentence


class Score(NamedTuple):
    """exact is 1 for an answer without a mistake, else 0;
    partial, in [0, 1], is the right share of the answer.
    """

    exact: float
    partial: float


@dataclass(frozen=True)
class Prompt:
    """One text with a question about it.

    context_ids [1, T] and question_ids [1, M] together have at most the requested number of tokens. `needles`
    are the ranges of context positions [first, one past last) that hold the answer; the tuple is empty if the
    whole text holds the answer. A text that goes on has its next tokens [1, N] as `continuation`: they are
    given to the model, not asked for. `every` is the number of tokens after which the cache compresses again
    while the model reads them. `alone` [1, K] is read in the place of context and question where the tokens
    of the continuation that need the context are asked for.
    """

    context_ids: torch.Tensor
    question_ids: torch.Tensor
    answers: tuple[str, ...]
    needles: tuple[tuple[int, int], ...]
    max_new_tokens: int
    score: Callable[[str], Score]
    continuation: torch.Tensor | None = None
    every: int = 0
    alone: torch.Tensor | None = None


@dataclass(frozen=True)
class Task:
    """A generator of prompts: `make(tokenizer, tokens, seed)`. The same arguments give the same prompt.

    It raises UsageError for too few tokens to hold the question and its answer.
    """

    name: str
    description: str
    make: Callable[[Any, int, int], Prompt]


def get(name: str) -> Task:
    """The task of that name. Raises UsageError for an unknown one."""
    require_known("tasks", name, TASKS)
    return TASKS[name]


def score_number(answer: str, text: str) -> Score:
    """exact: the number appears, ignoring thousands separators and spaces; partial: the share of its
    digits in the right place.

    If the text has several numbers, the best one counts. A random number has a tenth of its digits in place.
    """
    joined = re.sub(r"[,\s]", "", text)
    if answer in joined:
        return Score(1.0, 1.0)
    in_place = (
        sum(a == b for a, b in zip(answer, number, strict=False)) for number in re.findall(r"\d+", joined)
    )
    return Score(0.0, max(in_place, default=0) / len(answer))


def score_all(answers: Sequence[str], text: str) -> Score:
    """exact: every answer appears as a whole word, in any
    order; partial: the share of the answers that appear.
    """
    joined = re.sub(r"[,\s]", "", text)
    found = sum(
        answer in joined
        if answer.isdigit()
        else re.search(rf"\b{re.escape(answer)}\b", text, re.IGNORECASE) is not None
        for answer in answers
    )
    return Score(float(found == len(answers)), found / len(answers))


def score_any(answers: Sequence[str], text: str) -> Score:
    """exact and partial: any of the answers appears, in capitals or not; so RULER scores questions."""
    found = float(any(answer.lower() in text.lower() for answer in answers))
    return Score(found, found)


def score_copy(answer: str, text: str) -> Score:
    """exact: the words appear one after the other with nothing between; partial: the share of the words
    that appear in order.
    """
    wanted, got = answer.lower().split(), re.findall(r"\w+", text.lower())
    whole = any(got[start : start + len(wanted)] == wanted for start in range(len(got)))
    blocks = difflib.SequenceMatcher(None, wanted, got, autojunk=False).get_matching_blocks()
    return Score(float(whole), sum(block.size for block in blocks) / len(wanted))


def _passkey(tokenizer: Any, tokens: int, seed: int, *, digits: int) -> Prompt:
    draw = random.Random(f"passkey/{digits}/{seed}")
    answer = _number(draw, digits)
    hidden = {passkey.NEEDLE.format(answer): _depth(seed)}
    ask = (passkey.QUESTION, passkey.ANSWER_START)
    score = partial(score_number, answer)
    return _among(
        tokenizer, tokens, _sentences(draw, tokens), passkey.INTRODUCTION, hidden, ask, (answer,), score
    )


def _needles(
    tokenizer: Any, tokens: int, seed: int, *, keys: int, values: int, queries: int = 1, essays: bool = False
) -> Prompt:
    """A text with `keys` things and `values` numbers for each; the question asks for all numbers of the
    first `queries` things.

    The same things and numbers are hidden in everyday sentences and in essays. In essays a number counts
    whole or not at all.
    """
    draw = random.Random(f"needles/{keys}/{values}/{seed}")
    things = draw.sample(WORDS, keys)
    numbers = {_number(draw, 7): thing for thing in things for _ in range(values)}
    said = {number: f"The ticket number of the {thing} is {number}." for number, thing in numbers.items()}
    order = draw.sample(sorted(said), len(said))
    depths = [_depth(seed)] if len(said) == 1 else _spread(draw, len(said))
    hidden = {said[number]: depth for number, depth in zip(order, depths, strict=True)}
    answers = tuple(number for number, thing in numbers.items() if thing in things[:queries])
    introduction = "Some ticket numbers are hidden in the following text. Remember them."
    many = "s" if len(answers) > 1 else ""
    count = f"{values} " if values > 1 else ""
    asked = f"{count}ticket number{many} of the {', the '.join(things[:queries])} mentioned in the text"
    question = f"What {'are all' if many else 'is the'} {asked}? Answer with the number{many} only."
    ask = (question, f"The {asked} {'are' if many else 'is'}")
    score = partial(score_all, answers) if essays or len(answers) > 1 else partial(score_number, answers[0])
    others = _sentences(draw, tokens, essays)
    return _among(
        tokenizer,
        tokens,
        others,
        introduction,
        hidden,
        ask,
        answers,
        score,
        [said[answer] for answer in answers],
    )


def _variables(tokenizer: Any, tokens: int, seed: int, *, essays: bool = False) -> Prompt:
    """One chain of five variables: the first is set to a number, each other one to the variable before it."""
    draw = random.Random(f"variables/{seed}")
    names = _distinct(5, lambda: "".join(draw.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 5)))
    value = _number(draw, 5)
    lines = [f"Set {name} = {before}." for name, before in zip(names, [value, *names], strict=False)]
    hidden = dict(zip(lines, _spread(draw, len(lines)), strict=True))
    introduction = "Variables are set in the following text. Keep track of their values."
    question = (
        f"Which {len(names)} variables have the value {value} in the end? Answer with their names only."
    )
    ask = (question, f"The {len(names)} variables with the value {value} are {names[0]},")
    answers, others = tuple(names[1:]), _sentences(draw, tokens, essays)
    return _among(tokenizer, tokens, others, introduction, hidden, ask, answers, partial(score_all, answers))


def _copy(tokenizer: Any, tokens: int, seed: int) -> Prompt:
    draw = random.Random(f"copy/{seed}")
    words = draw.sample(WORDS, 16)
    hidden = {f'The sign at the gate says: "{" ".join(words)}".': _depth(seed)}
    answer = " ".join(words[2:])
    introduction = "A sign is quoted in the following text. Remember every word on it."
    ask = (
        "What does the sign at the gate say? Copy its words exactly.",
        f'The sign at the gate says: "{words[0]} {words[1]}',
    )
    others = _sentences(draw, tokens)
    return _among(
        tokenizer, tokens, others, introduction, hidden, ask, (answer,), partial(score_copy, answer)
    )


def _common_words(tokenizer: Any, tokens: int, seed: int, *, essays: bool = False) -> Prompt:
    """A list of words; five of them occur five times as often as the others."""
    draw = random.Random(f"common words/{seed}")
    known = real_texts.read().words if essays else WORDS
    words = draw.sample(known, len(known))
    common, others = words[:5], words[5:]

    def counts(total: int) -> dict[str, int]:
        times = max(2, ceil(total / len(others)))
        return {**dict.fromkeys(others[: total // times], times), **dict.fromkeys(common, 5 * times)}

    return _in_list(tokenizer, tokens, draw, "Words", common, counts, range(20, max(21, tokens)))


def _frequent_words(tokenizer: Any, tokens: int, seed: int, *, essays: bool = False) -> Prompt:
    """A list of words whose counts fall with the square of their rank (Zipf's law with exponent 2), made
    up or of the essays.
    """
    draw = random.Random(f"frequent words/{seed}")
    known = real_texts.read().words if essays else []
    made_up = partial(
        _distinct,
        tokens,
        lambda: "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)),
    )
    words = draw.sample(known, len(known)) or made_up()

    def counts(total: int) -> dict[str, int]:
        # total is the count of the first word; below 32 the third and fourth word have equal or nearly equal
        # counts
        return {word: total // rank**2 for rank, word in enumerate(words, start=1) if rank**2 <= total}

    return _in_list(tokenizer, tokens, draw, "Code words", words[:3], counts, range(32, max(33, tokens)))


def _question(tokenizer: Any, tokens: int, seed: int, *, name: str) -> Prompt:
    """A question about one or two paragraphs, which stand among others about near things, then among those
    of other questions.
    """
    every: Sequence[real_texts.Question] = getattr(real_texts.read(), name)
    asked = random.Random(name).sample(every, len(every))[seed % len(every)]  # each has its turn
    draw = random.Random(f"{name}/{seed}")
    far = (
        paragraph for other in draw.sample(every, min(len(every), tokens // 20)) for paragraph in other.gold
    )
    others = [
        each
        for each in dict.fromkeys([*draw.sample(asked.near, len(asked.near)), *far])
        if each not in asked.gold
    ]
    depths = [_depth(seed)] if len(asked.gold) == 1 else _spread(draw, len(asked.gold))
    hidden = dict(zip(draw.sample(asked.gold, len(asked.gold)), depths, strict=True))
    introduction = "Read the following paragraphs. A question about them comes afterwards."
    ask = (f"Question: {asked.text}\nAnswer with a few words copied from the text.", "The answer is")
    made = _among(
        tokenizer,
        tokens,
        others,
        introduction,
        hidden,
        ask,
        asked.answers[:1],
        partial(score_any, asked.answers),
        between="\n\n",
    )
    return replace(made, max_new_tokens=max(SENTENCE, made.max_new_tokens))


def _code(tokenizer: Any, tokens: int, seed: int) -> Prompt:
    """The body of a function as the continuation: its docstring stands among other functions, its first
    line at the end again.
    """
    every, draw = real_texts.read().functions, random.Random(f"code/{seed}")
    name, head, body = random.Random("code").sample(every, len(every))[seed % len(every)]
    first_line = head[head.rindex(f"def {name}(") :].partition("\n")[0]
    others = [each[1] + each[2] for each in draw.sample(every, len(every)) if each[0] != name]
    start = tokenizer.bos_token or ""

    def parts(size: int) -> Sequence[torch.Tensor]:
        file = _with(others[:size], {f"{head}    ...\n": _depth(seed)})
        return [_ids(tokenizer, text) for text in (start + "\n\n".join(file), f"\n\n{first_line}\n", body)]

    context_ids, question_ids, continuation = _longest(tokens, parts, range(len(others) + 1))
    needles = (passkey.locate(tokenizer, context_ids, head),)
    score, alone = partial(score_copy, body), _ids(tokenizer, f"{start}{first_line}\n")
    return Prompt(
        context_ids, question_ids, (body,), needles, continuation.shape[1], score, continuation, alone=alone
    )


def _prose(tokenizer: Any, tokens: int, seed: int, *, every: int) -> Prompt:
    """A window of a long text, whose last tokens are the continuation; the window of the next seed is that
    many tokens later.
    """
    least = CONTINUED + 1 + 8
    require(tokens >= least, f"tokens: got {tokens}, wanted at least {least} for this task")
    first = seed * CONTINUED
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    last = first + tokens - len(start)
    # no tokenizer makes tokens of more than 16 characters on average, so this much of the text holds the
    # window
    ids = tokenizer(_documentation()[: 16 * last], add_special_tokens=False)["input_ids"][first:last]
    require(
        len(start) + len(ids) >= tokens,
        f"seed: got {seed}, wanted a smaller one: the text of this task ends before its window",
    )
    window = torch.tensor([start + ids])
    context_ids, question_ids, continuation = window.split([tokens - CONTINUED - 1, 1, CONTINUED], dim=1)
    text = tokenizer.decode(continuation[0])
    return Prompt(
        context_ids, question_ids, (text,), (), CONTINUED, partial(score_copy, text), continuation, every
    )


@cache
def _documentation() -> str:
    """The language's reference, as every Python carries it for help(): half a million characters of
    English, another one in each version.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


# Every task by its name, in the order of the tables.
TASKS = {
    task.name: task
    for task in (
        Task("passkey7", "a number of 7 digits in a long text", partial(_passkey, digits=7)),
        Task("passkey64", "a number of 64 digits in a long text", partial(_passkey, digits=64)),
        Task("needle_single", "one thing has a number", partial(_needles, keys=1, values=1)),
        Task(
            "needle_multikey",
            "four things have a number each, and one is asked for",
            partial(_needles, keys=4, values=1),
        ),
        Task(
            "needle_multivalue",
            "one thing has four numbers, and all are asked for",
            partial(_needles, keys=1, values=4),
        ),
        Task("variables", "a chain of five variables, each set to the one before it", _variables),
        Task("common_words", "a list of words: five occur five times as often as the others", _common_words),
        Task(
            "frequent_words",
            "a list of made-up words; the question asks for the three most frequent",
            _frequent_words,
        ),
        Task("copy", "sixteen words in a long text, to be repeated", _copy),
        Task(
            "perplexity",
            f"the next {CONTINUED} tokens of a technical text, through a sliding window",
            partial(_prose, every=0),
        ),
        Task(
            "perplexity_decoding",
            f"the next {CONTINUED} tokens of a technical text, read one by one; a method that can do so "
            "compresses after each "
            f"{AGAIN}",
            partial(_prose, every=AGAIN),
        ),
        Task(
            "squad",
            "a question of SQuAD; its paragraph stands among others of the same article",
            partial(_question, name="squad"),
        ),
        Task(
            "hotpot",
            "a question of HotpotQA; the two paragraphs that it needs stand among others",
            partial(_question, name="hotpot"),
        ),
        Task(
            "essay_single",
            "one thing has a number, in essays",
            partial(_needles, keys=1, values=1, essays=True),
        ),
        Task(
            "essay_multikey",
            "four things have a number each, in essays",
            partial(_needles, keys=4, values=1, essays=True),
        ),
        Task(
            "essay_multivalue",
            "one thing has four numbers, in essays",
            partial(_needles, keys=1, values=4, essays=True),
        ),
        Task(
            "essay_multiquery",
            "four things have a number each, in essays, and all are asked for",
            partial(_needles, keys=4, values=1, queries=4, essays=True),
        ),
        Task("essay_variables", "a chain of five variables, in essays", partial(_variables, essays=True)),
        Task(
            "essay_common_words",
            "a list of words of essays: five occur five times as often",
            partial(_common_words, essays=True),
        ),
        Task(
            "essay_frequent_words",
            "a list of words of essays: the three most frequent",
            partial(_frequent_words, essays=True),
        ),
        Task(
            "code", "the body of a function of HumanEval, whose docstring stands among other functions", _code
        ),
    )
}

# The tasks without a question: the text goes on.
GOES_ON = ("perplexity", "perplexity_decoding", "code")


def _number(draw: random.Random, digits: int) -> str:
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def _distinct(count: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def _depth(seed: int) -> float:
    """The depth of a single needle: five seeds in a row try all five depths."""
    return passkey.DEPTHS[seed % len(passkey.DEPTHS)]


def _spread(draw: random.Random, count: int) -> list[float]:
    """Ascending depths, one drawn from each of `count` equal parts of the text."""
    return [(part + draw.random()) / count for part in range(count)]


def _sentences(draw: random.Random, tokens: int, essays: bool = False) -> list[str]:
    """Sentences of the essays from a place that is drawn, or everyday ones; enough for so many tokens."""
    if not essays:
        return [passkey.filler(draw) for _ in range(tokens // 8)]  # none is shorter than eight tokens
    every, count = real_texts.read().sentences, tokens // 4
    start = draw.randrange(max(1, len(every) - count))
    return every[start : start + count]


def _with(pieces: Sequence[str], hidden: Mapping[str, float]) -> list[str]:
    """The pieces with the hidden ones among them, each at its depth."""
    found = list(pieces)
    # from the last to the first: insertions do not shift earlier places
    for piece, depth in reversed(list(hidden.items())):
        found.insert(round(depth * len(pieces)), piece)
    return found


def _among(
    tokenizer: Any,
    tokens: int,
    others: Sequence[str],
    introduction: str,
    hidden: Mapping[str, float],
    ask: tuple[str, str],
    answers: tuple[str, ...],
    score: Callable[[str], Score],
    needles: Sequence[str] | None = None,
    between: str = " ",
) -> Prompt:
    """A prompt with the pieces `hidden`, each at its depth, among as many others as fit; the pieces
    `needles` hold the answer.
    """

    def parts(size: int) -> Sequence[torch.Tensor]:
        return tokenize(tokenizer, between.join([introduction, *_with(others[:size], hidden)]), *ask)

    context_ids, question_ids = _longest(tokens, parts, range(len(others) + 1))
    places = tuple(passkey.locate(tokenizer, context_ids, needle) for needle in needles or hidden)
    return Prompt(context_ids, question_ids, answers, places, _answer_tokens(tokenizer, answers), score)


def _in_list(
    tokenizer: Any,
    tokens: int,
    draw: random.Random,
    title: str,
    answers: Sequence[str],
    counts: Callable[[int], dict[str, int]],
    totals: range,
) -> Prompt:
    """A shuffled list in which each word occurs as often as counts(total) says, and a question for the
    most frequent ones.
    """
    order = draw.getrandbits(64)

    question = f"Which {len(answers)} words occur most often in the list? Answer with the words only."
    ask = (question, f"The {len(answers)} words that occur most often in the list are")

    def parts(total: int) -> Sequence[torch.Tensor]:
        words = [word for word, count in counts(total).items() for _ in range(count)]
        random.Random(order).shuffle(words)
        return tokenize(
            tokenizer, f"{title}, some of which occur more often than others: {' '.join(words)}.", *ask
        )

    context_ids, question_ids = _longest(tokens, parts, totals)
    return Prompt(
        context_ids,
        question_ids,
        tuple(answers),
        (),
        _answer_tokens(tokenizer, answers),
        partial(score_all, tuple(answers)),
    )


def _longest(
    tokens: int, parts: Callable[[int], Sequence[torch.Tensor]], sizes: range
) -> Sequence[torch.Tensor]:
    """The parts of a prompt, ids [1, N] each, at the largest
    size for which they have at most `tokens` tokens together.
    """

    def length(size: int) -> int:
        return sum(ids.shape[1] for ids in parts(size))

    index = max(0, bisect_right(sizes, tokens, key=length) - 1)
    while index > 0 and length(sizes[index]) > tokens:  # the length does not always grow with the size
        index -= 1
    if length(sizes[index]) > tokens:
        raise UsageError(
            f"tokens: got {tokens}, wanted at least {length(sizes[0])} for this task with this tokenizer"
        )
    return parts(sizes[index])


def _answer_tokens(tokenizer: Any, answers: Sequence[str]) -> int:
    """The longest answer, in tokens: the right answer plus a few tokens around each of its parts."""
    return answer_ids(tokenizer, answers).shape[1] + 4 * (1 + len(answers))


def answer_ids(tokenizer: Any, answers: Sequence[str]) -> torch.Tensor:
    """The right answer [1, N] as it follows the question,
    whose tokens end with the first words of the answer.
    """
    return _ids(tokenizer, " " + ", ".join(answers))


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
